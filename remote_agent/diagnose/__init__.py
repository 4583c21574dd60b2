"""Lines, exits, dumps -> evidence -> verdict. Pure: no files, no clock, no network.

In: RankEvidence of each rank, Context. Out: an Incident: one cause, its victims, where to look.
"""

from remote_agent.diagnose.errorfile import read_error_document
from remote_agent.diagnose.model import Context, Incident, RankEvidence, Victims, iso_time
from remote_agent.diagnose.verdict import verdict

__all__ = [
    "Context",
    "Incident",
    "RankEvidence",
    "Victims",
    "iso_time",
    "read_error_document",
    "verdict",
]
