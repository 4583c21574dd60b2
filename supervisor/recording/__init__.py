"""A job as one file: recorded from a session, and replayed at any time of the job.

In: a session; a file. Out: a file; a player that the screens use in place of a session. `__init__` imports nothing, so
that each command loads only what it needs. Imports `errors`, `ssh`, `link`, `logs`, `history`, `nccl`, `session` and
`wording`; of the node's side `wire`, `text`, `history` and `diagnose`.
"""
