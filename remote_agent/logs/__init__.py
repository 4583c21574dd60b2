"""The log files of one job on one node: indexed, searched, merged and followed.

In: generation_<g>/rank_<R>/{stdout,stderr,nccl}.log, which the ranks write. Out: answers to the log requests, and the
progress of each rank. Imports `wire`, `text` and `diagnose`.
"""

from remote_agent.logs.store import LogStore

__all__ = ["LogStore"]
