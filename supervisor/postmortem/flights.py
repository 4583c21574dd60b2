"""The flight records of a run: what they add to the verdict that its logs show.

In: files of torch's flight recorder, the incidents of the logs. Out: the incidents, explained or with further evidence;
`Misfit` with one clear line for a file that is none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from remote_agent.diagnose.categories import CATEGORIES
from remote_agent.diagnose.evidence import JobContext, name_nodes
from remote_agent.diagnose.flight import Parting, Record, compare, read
from remote_agent.diagnose.flight_files import MAX_BYTES, parse_flight_record
from remote_agent.diagnose.incidents import EvidenceLine, incident, missing_ranks
from remote_agent.diagnose.verdict import MAX_EVIDENCE
from remote_agent.text.names import name_ranks
from remote_agent.text.shapes import clip, fingerprint
from remote_agent.wire.gate import Misfit

if TYPE_CHECKING:
    from pathlib import Path

    from remote_agent.wire.documents import IncidentDocument

# If ranks called different collectives, the logs of the others show only that they waited.
_CONSEQUENCES = frozenset(
    {"nccl_timeout_watchdog", "hang_no_output", "collective_desync", "gloo_connection_reset", "nccl_remote_error"}
)


class FlightRecords:
    """The records of all ranks, one directory after the other."""

    def __init__(self) -> None:
        self._records: dict[str, dict[int, Record]] = {}
        self._files: dict[str, dict[int, str]] = {}

    def add(self, path: Path, rank: int) -> str:
        """Read a file; returns why it cannot be read, or nothing."""
        folder = str(path.parent)
        try:
            with path.open("rb") as opened:
                record = read(parse_flight_record(opened.read(MAX_BYTES + 1)))
        except Misfit as error:
            return str(error)
        if rank not in self._records.setdefault(folder, {}):
            self._records[folder][rank] = record
            self._files.setdefault(folder, {})[rank] = str(path)
        return ""

    def explain(
        self, incidents: Sequence[IncidentDocument], nodes: Mapping[str, Sequence[int]]
    ) -> list[IncidentDocument]:
        """Return the incidents with what the records show.

        A failure that may be a consequence gets their verdict; one with its own cause gets their lines as evidence.
        """
        explained = [document for folders in self._runs() if (document := self._incident(folders, nodes)) is not None]
        if not explained or not incidents:
            return [*incidents, *explained]
        *earlier, last = incidents
        flight, own = explained[-1], last["evidence"]
        if last["category"] not in _CONSEQUENCES:
            return [*earlier, {**last, "evidence": [*own, *flight["evidence"]][:MAX_EVIDENCE]}]
        verdict: IncidentDocument = {
            **last,
            "category": flight["category"], "scope": flight["scope"], "culprit_ranks": flight["culprit_ranks"],
            "culprit_node": flight["culprit_node"], "confidence": flight["confidence"], "summary": flight["summary"],
            "hint": flight["hint"], "victims": flight["victims"], "missing": flight["missing"],
            "evidence": [*flight["evidence"], *own][:MAX_EVIDENCE],
        }  # fmt: skip
        return [*earlier, verdict]

    def _runs(self) -> list[list[str]]:
        """Return the directories of each run: all are of one, unless they have records of the same rank."""
        ranks = [rank for own in self._records.values() for rank in own]
        folders = sorted(self._records)
        return [folders] if len(ranks) == len(set(ranks)) and folders else [[folder] for folder in folders]

    def _incident(self, folders: Sequence[str], nodes: Mapping[str, Sequence[int]]) -> IncidentDocument | None:
        records = {rank: record for folder in folders for rank, record in self._records[folder].items()}
        files = {rank: path for folder in folders for rank, path in self._files[folder].items()}
        parting = compare(records, (rank for ranks in nodes.values() for rank in ranks))
        return None if parting is None else incident_of(parting, JobContext(ranks_per_node=nodes), files)


def incident_of(parting: Parting, context: JobContext, files: Mapping[int, str]) -> IncidentDocument:
    """Return the incident of a parting; files: the path of each rank's record."""
    culprits = parting.culprits
    nodes = sorted(context.nodes_of(culprits))
    is_stuck = parting.kind in ("missing", "unfinished")
    category = "hang_no_output" if is_stuck else "collective_desync"
    # If the sides are equal, the headline begins with one of them.
    begins = parting.headline.startswith(("rank ", "ranks ", "all "))
    subject = "" if begins or not culprits else f"{name_ranks(culprits)}{name_nodes(nodes)}: "
    several = "one_rank" if len(culprits) == 1 else "several_or_all_ranks"
    waiting = [rank for rank in parting.waiting if rank not in culprits]
    return incident(
        context,
        time_ns=parting.call.at_ns or None,
        category=category,
        scope=several if culprits else "outside_the_ranks",
        confidence="established" if parting.is_sure else "supported",
        summary=f"{subject}{parting.headline}",
        hint=_hint(parting),
        fingerprint=fingerprint(category, parting.kind, parting.call.place, parting.call.op),
        ranks=culprits,
        node=nodes[0] if len(nodes) == 1 else None,
        evidence=(
            EvidenceLine(context.node_of(rank), rank, files.get(rank), None, clip(text))
            for rank, text in parting.lines[:MAX_EVIDENCE]
        ),
        victims=[(waiting, category, f"in {parting.call.text}")] if waiting and culprits else (),
        missing=missing_ranks(
            parting.call.op, parting.call.seq, parting.waiting, parting.missing, sorted(parting.stacks.items())
        ),
    )


def _hint(parting: Parting) -> str:
    if parting.kind == "unfinished":
        return CATEGORIES["nccl_network"].hint
    if parting.kind == "missing":
        return f"check the output of {name_ranks(parting.culprits)}, and what the script does after the last call shown"
    return CATEGORIES["collective_desync"].hint
