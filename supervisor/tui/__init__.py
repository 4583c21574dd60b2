"""The terminal UI: screens, widgets, themes and keys over one session.

In: a session. Out: frames on a terminal, requests to the session. Imports `errors`, `paths`, `standard_streams`,
`session`, `link`, `ssh`, `logs`, `history` and `wording`; of the node's side `wire` and `text`.
"""
