"""Signatures: what texts mean. Data, one file a subject, one entry a failure.

In: nothing. Out: SIGNATURES, to be searched in the text of a rank. Imports `text`.

To add a failure, add an entry to the group that it belongs to.
"""

from remote_agent.diagnose.signatures import cuda, distributed, host, launcher, nccl, python
from remote_agent.diagnose.signatures.signature import Signature

# The order matters for two signatures of one role that match the same line: the first one counts. Specific groups come
# before general ones: a failed allocation before the error code that it is reported with, the reason of a death before
# the words of the launcher that saw it.
SIGNATURES: tuple[Signature, ...] = (
    *cuda.MEMORY,
    *nccl.MEMORY,
    *host.MEMORY,
    *cuda.ERRORS,
    *nccl.ERRORS,
    *distributed.COLLECTIVES,
    *distributed.RENDEZVOUS,
    *distributed.CONNECTIONS,
    *python.FILES,
    *python.LOSS,
    *launcher.ENDED,
    *host.CRASHES,
    *launcher.EXITED,
    *python.GENERIC_ERRORS,
)

__all__ = ["SIGNATURES", "Signature"]
