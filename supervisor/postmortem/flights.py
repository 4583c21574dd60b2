"""The flight records of a run: what they add to the verdict that its logs show.

In: files of torch's flight recorder, the incidents of the logs. Out: the incidents, explained or with further evidence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from remote_agent.diagnose.evidence import JobContext, name_nodes
from remote_agent.diagnose.flight import Parting, Record, compare, read
from remote_agent.diagnose.incidents import EvidenceLine, Incident, Victims
from remote_agent.diagnose.signatures import HINTS
from remote_agent.text.names import name_ranks
from remote_agent.text.shapes import clip, fingerprint
from remote_agent.wire.gate import Misfit
from supervisor.postmortem.flight_files import MAX_BYTES, parse_flight_record

if TYPE_CHECKING:
    from supervisor.postmortem.files import RunFile
    from supervisor.postmortem.journal import Json

# Where ranks part, the logs of the others show no more than that they waited.
_CONSEQUENCES = frozenset(
    {"nccl_timeout_watchdog", "hang_no_output", "collective_desync", "gloo_connection_reset", "nccl_remote_error"}
)
_EXPLAINED = (
    "category",
    "scope",
    "culprit_ranks",
    "culprit_node",
    "confidence",
    "summary",
    "hint",
    "victims",
    "missing",
)
_MAX_EVIDENCE = 12


class FlightRecords:
    """The records of all ranks, one directory after the other."""

    def __init__(self) -> None:
        self._records: dict[str, dict[int, Record]] = {}
        self._files: dict[str, dict[int, str]] = {}

    def add(self, file: RunFile) -> str:
        """Read a file; returns why it cannot be read, or nothing."""
        folder, rank = str(file.path.parent), file.rank or 0
        try:
            with file.path.open("rb") as opened:
                record = read(parse_flight_record(opened.read(MAX_BYTES + 1)))
        except Misfit as error:
            return str(error)
        if rank not in self._records.setdefault(folder, {}):
            self._records[folder][rank] = record
            self._files.setdefault(folder, {})[rank] = str(file.path)
        return ""

    def explain(self, incidents: Sequence[Json], nodes: Mapping[str, Sequence[int]]) -> list[Json]:
        """Return the incidents with what the records show.

        A failure that may be a consequence gets their verdict; one with its own cause gets their lines as evidence.
        """
        found = [document for folders in self._runs() if (document := self._incident(folders, nodes)) is not None]
        if not found or not incidents:
            return [*incidents, *found]
        *earlier, last = incidents
        flight, own = found[-1], last["evidence"]
        if last["category"] not in _CONSEQUENCES:
            return [*earlier, {**last, "evidence": [*own, *flight["evidence"]][:_MAX_EVIDENCE]}]
        verdict = {key: flight[key] for key in _EXPLAINED}
        return [*earlier, {**last, **verdict, "evidence": [*flight["evidence"], *own][:_MAX_EVIDENCE]}]

    def _runs(self) -> list[list[str]]:
        """Return the directories of each run: all are of one, unless they have records of the same rank."""
        ranks = [rank for own in self._records.values() for rank in own]
        folders = sorted(self._records)
        return [folders] if len(ranks) == len(set(ranks)) and folders else [[folder] for folder in folders]

    def _incident(self, folders: Sequence[str], nodes: Mapping[str, Sequence[int]]) -> Json | None:
        records = {rank: record for folder in folders for rank, record in self._records[folder].items()}
        files = {rank: path for folder in folders for rank, path in self._files[folder].items()}
        parting = compare(records, (rank for ranks in nodes.values() for rank in ranks))
        return None if parting is None else incident_of(parting, JobContext(ranks_per_node=nodes), files).to_json()


def incident_of(parting: Parting, context: JobContext, files: Mapping[int, str]) -> Incident:
    """Return the incident of a parting; files: the path of each rank's record."""
    culprits = parting.culprits
    nodes = sorted(context.nodes_of(culprits))
    is_stuck = parting.kind in ("missing", "unfinished")
    category = "hang_no_output" if is_stuck else "collective_desync"
    # Where the sides are equal the text begins with one of them.
    begins = parting.headline.startswith(("rank ", "ranks ", "all "))
    subject = "" if begins or not culprits else f"{name_ranks(culprits)}{name_nodes(nodes)}: "
    several = "one_rank" if len(culprits) == 1 else "several_or_all_ranks"
    waiting = tuple(rank for rank in parting.waiting if rank not in culprits)
    victims = (Victims(waiting, category, f"in {parting.call.text}"),) if waiting and culprits else ()
    return Incident(
        id=context.incident_id,
        generation=context.generation,
        time_ns=parting.call.at_ns or None,
        category=category,
        scope=several if culprits else "outside_the_ranks",
        confidence="established" if parting.is_sure else "supported",
        summary=clip(f"{subject}{parting.headline}"),
        hint=_hint(parting),
        fingerprint=fingerprint(category, parting.kind, parting.call.place, parting.call.op),
        culprit_ranks=tuple(sorted(culprits)),
        culprit_node=nodes[0] if len(nodes) == 1 else None,
        evidence=tuple(
            EvidenceLine(context.node_of(rank), rank, files.get(rank), None, clip(text))
            for rank, text in parting.lines[:_MAX_EVIDENCE]
        ),
        victims=victims,
        missing=parting.missing_document(),
    )


def _hint(parting: Parting) -> str:
    if parting.kind == "unfinished":
        return HINTS["nccl_network"]
    if parting.kind == "missing":
        return f"check the output of {name_ranks(parting.culprits)}, and what the script does after the last call shown"
    return HINTS["collective_desync"]
