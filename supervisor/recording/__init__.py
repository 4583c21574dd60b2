"""A job as one file: recorded from a session, and replayed at any time of the job.

In: a session; a file. Out: a file; a player that the screens use in place of a session. Imports `logs`, `nccl`, `link`
and `wording`. This package imports nothing itself, so that each command loads only what it needs.
"""
