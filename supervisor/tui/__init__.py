"""The terminal UI: screens, widgets, themes and keys over one session.

In: a session, read through `source.SessionSource` and nothing else. Out: frames on a terminal, requests to the session.
Imports `errors`, `paths`, `standard_streams`, `actions`, `ssh`, `logs`, `history`, `nccl` and `wording`; of the node's
side `wire` and `text`.
"""
