"""The coordinator: a pure state machine that decides who is in the group and when it starts, stops and ends.

In: (State, Input, now). Out: the next State and commands for the shell in `agent`; the status document; the state
folded from a journal; the preview of a request, which the operator's side imports too. No I/O except the journal's
file. Imports `wire`, `text`, `base`, `diagnose` and `snapshots`.
"""
