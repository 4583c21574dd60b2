"""The terminal UI: screens, widgets, themes and keys over one session.

In: a session, read through `source.Source` and nothing else. Out: frames on a terminal, requests to the session.
"""
