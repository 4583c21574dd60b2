"""Index, windows, search, follow over the files that workers write.

In: the job's generation_<g>/rank_<R>/*.log. Out: answers to the log requests, each rank's progress.
"""

from remote_agent.logs.logfile import STREAMS, Key
from remote_agent.logs.store import LogStore

__all__ = ["STREAMS", "Key", "LogStore"]
