"""The verdict of each generation that a set of log files shows.

In: files. Out: the contract's documents: incidents, oldest first, and what the text tells of NCCL.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from remote_agent.diagnose import Context, Incident, RankEvidence, read_error_document, verdict
from remote_agent.diagnose.nccl import NcclFacts
from supervisor.postmortem.files import Found, LeaveOut, find
from supervisor.postmortem.quiet import got_past, overcome, stands, without_settled
from supervisor.postmortem.ranks import Line, of_one_rank, split_ranks
from supervisor.postmortem.reading import Progress, read_all
from supervisor.postmortem.stamps import span_before

Json = dict[str, Any]
# What is longer is no error file of torch's.
ERROR_BYTES = 64 << 20
# Of files that stand in no directory of a run: group and generation.
LOOSE = ("", 0)
# Once a task has failed srun ends the others: what Slurm says of that is no cause.
_SRUN_ENDS = re.compile(r"^srun: (?:Force )?Terminat(?:ing|ed) (?:StepId|job step)")
# What was asked to end by others dies so too.
_TASK_DIED = re.compile(r"^srun: error: \S+: tasks? [\d,-]+: (?!Terminated|Exited with exit code 143)")
_STEP_CANCELLED = re.compile(r"\*\*\* STEP \S+ ON \S+ CANCELLED AT \S+ \*\*\*")
# A server ends itself, and what a shell says of that is no cause.
_ENDS_ITSELF, _SHELLS_WORD = "Received sigquit from a child process", re.compile(r"(?:^|: +\d+ )Killed\b")
# Stands between the lines of two files: it ends a message, and a traceback whose end is missing.
_OTHER_FILE = ("", "--")
_LAUNCHER = re.compile(r"torch[./]distributed[./](?:elastic|launcher|run)\b")
# Why a group of ours is stopped that gets on: an operator wishes it, or a node has come back.
_ASKED = frozenset({"restart", "removed", "added", "returned", "stop"})
# stamps.py puts what has no year into 1970.
YEAR_UNKNOWN_NS = 366 * 86_400 * 1_000_000_000


@dataclasses.dataclass
class _Rank:
    """What was found of one rank in one generation."""

    node: str | None = None
    lines: list[tuple[str, Line]] = dataclasses.field(default_factory=list)
    error: Json | None = None
    error_file: str = ""
    exit: Json | None = None
    raised_ns: int | None = None
    """When its exception was recorded, as its node saw it: the file's own time is lost where it was copied."""
    shift_ns: int | None = None


@dataclasses.dataclass
class _Generation:
    number: int
    ranks: dict[int | None, _Rank] = dataclasses.field(default_factory=dict)
    lost: dict[str, tuple[int, str]] = dataclasses.field(default_factory=dict)
    nodes: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    hang: Json | None = None
    """The incident of a hang that lasted until the end, as the journal has it: no file of a rank tells of it."""
    told: Json | None = None
    """The last incident that the journal has of its end."""
    cause: str = ""
    """Why it was stopped, as the journal has it; empty: nothing says that it was."""
    stop_asked: bool = False
    failing: bool = False
    """A rank or a node was gone before the job's end was asked for: that hides the failure from the journal."""
    notes: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    shifts_ns: dict[str, int] = dataclasses.field(default_factory=dict)
    """By node: what turns its time into the coordinator's."""
    clock_error_ms: dict[str, float] = dataclasses.field(default_factory=dict)
    succeeded: bool = False

    def rank(self, number: int | None) -> _Rank:
        return self.ranks.setdefault(number, _Rank())

    def as_asked(self) -> bool:
        """Return whether it was stopped on request, and nothing was seen to fail before."""
        return self.cause in _ASKED and not (self.failing if self.cause == "stop" else self.lost)

    def gets_on(self) -> bool:
        """Return whether it had begun and nothing had failed or ended when the journal was read, or cut off."""
        return bool(self.nodes) and not (self.cause or self.failing or any(rank.error for rank in self.ranks.values()))


def diagnose(
    paths: Sequence[Path], progress: Progress = lambda _bytes: None, leave_out: LeaveOut = lambda _why: None
) -> Json:
    """Return {incidents, nccl} of the files under these paths; raises UsageError, OSError."""
    facts = NcclFacts()
    runs: dict[tuple[str, int], _Generation] = {}
    found = find(paths, leave_out)
    for file in found:
        if file.stream == "journal":
            _read_journal(file, runs)
        elif file.stream == "error":
            rank = _generation(runs, file).rank(file.rank)
            with file.path.open("rb") as text:
                rank.error = read_error_document(text.read(ERROR_BYTES), file.path.stat().st_mtime_ns)
            rank.error_file = str(file.path)
    logs = [file for file in found if file.stream not in ("journal", "error")]
    with closing(read_all([file.path for file in logs], progress)) as read:
        for lines, file in zip(read, logs, strict=True):
            _take_lines(file, lines, _generation(runs, file), facts)
    _join_loose(runs)
    judged = [(run, _judge(run, number)) for number, run in enumerate(_in_order(runs), 1) if not run.succeeded]
    incidents = [document for run, incident in judged for document in _told(run, incident)]
    ended_well = any(run.succeeded for run in runs.values())
    cut_short = bool(judged) and (judged[-1][0].as_asked() or judged[-1][0].gets_on())
    if not incidents and judged and not ended_well and not cut_short and stands(texts := _texts(judged[-1][0])):
        incidents = [_standing(judged[-1][1], texts[-1]).to_json()]
    numbered = [{**document, "id": number} for number, document in enumerate(incidents, 1)]
    return {"incidents": numbered, "nccl": facts.result()}


def _told(run: _Generation, incident: Incident) -> list[Json]:
    hang = [] if run.hang is None else [run.hang]
    if run.as_asked():
        # No rank ended by itself: a traceback in its files was caught, or came of our signal.
        return hang if run.told is None else [*hang, run.told]
    found = incident.to_json()
    # An exception that ended a thread stands in the log, and in the incident of the hang that came of it.
    keys = ("category", "culprit_ranks")
    is_known = any(one.get("traceback") and all(one[key] == found[key] for key in keys) for one in hang)
    ranks = {number: each.lines for number, each in run.ranks.items()}
    if is_known or _says_nothing(incident) or overcome(incident, (line for own in ranks.values() for line in own)):
        return hang
    return hang if not run.nodes and got_past(incident, ranks) else [*hang, found]


def _texts(run: _Generation) -> list[str]:
    lines = [line for rank in run.ranks.values() for _, line in rank.lines if line.text.strip()]
    return [line.text for line in sorted(lines, key=lambda line: line.number)]


def _in_order(runs: Mapping[tuple[str, int], _Generation]) -> list[_Generation]:
    return [runs[key] for key in sorted(runs) if runs[key].ranks or runs[key].lost]


def _join_loose(runs: dict[tuple[str, int], _Generation]) -> None:
    """Take loose files, a scheduler's for example, to the run beside them, where there is only one."""
    others = [key for key in runs if key != LOOSE]
    if LOOSE not in runs or len(others) != 1:
        return
    for number, found in runs.pop(LOOSE).ranks.items():
        rank = runs[others[0]].rank(number)
        rank.node = rank.node or found.node
        rank.lines += found.lines


def _generation(runs: dict[tuple[str, int], _Generation], file: Found) -> _Generation:
    return runs.setdefault((file.group, file.generation), _Generation(file.generation))


def _take_lines(file: Found, lines: list[Line], run: _Generation, facts: NcclFacts) -> None:
    for line in lines:
        facts.feed(line.text)
    lines = without_settled(_without_servers_own(_without_sruns_own(lines)))
    name = str(file.path)
    if file.rank is not None:
        run.rank(file.rank).lines += [(name, line) for line in of_one_rank(lines)]
        return
    parts = split_ranks(lines)
    blamed = [part.rank for part in parts if part.blamed]
    for part in parts:
        own = _launchers(part.lines) if part.rank is None and len(blamed) == 1 else set()
        for line in part.lines:
            # Where a launcher knows of one failure only, what carries no tag is mostly of the rank that failed.
            theirs = part.rank is None and len(blamed) == 1 and line.number not in own
            rank = run.rank(blamed[0] if theirs else part.rank)
            rank.node = rank.node or part.node
            rank.lines.append((name, line))


def _launchers(lines: list[Line]) -> set[int]:
    """Return the numbers of the lines that are a launcher's: those that name it, and its tracebacks as a whole."""
    own = {line.number for line in lines if _LAUNCHER.search(line.text)}
    trace: list[int] = []
    for line in lines:
        if line.text.startswith("Traceback "):
            trace = [line.number]
            continue
        trace = [*trace, line.number] if trace else []
        # It lasts until the exception, the first line that does not stand to the right.
        if not line.text.startswith(" "):
            own.update(trace if own.intersection(trace[:-1]) and line.number not in own else ())
            trace = []
    return own


def _without_sruns_own(lines: list[Line]) -> list[Line]:
    """Leave out that a step was cancelled where srun did it, since one of its tasks had died."""
    cancelled = {line.number for line in lines if _STEP_CANCELLED.search(line.text)}
    if not cancelled:
        return lines
    if not any(_SRUN_ENDS.match(line.text) for line in lines):
        died = next((line.number for line in lines if _TASK_DIED.match(line.text)), max(cancelled))
        cancelled = {number for number in cancelled if number > died}
    return [line for line in lines if line.number not in cancelled]


def _without_servers_own(lines: list[Line]) -> list[Line]:
    """Leave out that a shell saw a server killed that had ended itself, as one of its processes had died."""
    ended = next((line.number for line in lines if _ENDS_ITSELF in line.text), None)
    return [line for line in lines if ended is None or line.number < ended or not _SHELLS_WORD.search(line.text)]


def _read_journal(file: Found, runs: dict[tuple[str, int], _Generation]) -> None:
    """Take what a job's journal says of exits, lost nodes and who ran where."""
    with file.path.open(encoding="utf-8", errors="replace") as lines:
        for text in lines:
            # The last line may be torn.
            with suppress(ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
                event = json.loads(text)
                number = int(event["generation"])
                _read_event(event, runs.setdefault((file.group, number), _Generation(number)))


def _read_event(event: Json, run: _Generation) -> None:
    kind, detail = event["type"], event["detail"]
    if kind == "generation_started":
        for member in detail["members"]:
            run.nodes[member["node"]] = list(range(member["base_rank"], member["base_rank"] + member["nproc"]))
    elif kind == "ranks_assigned":
        run.nodes[event["node"]] = [int(rank[0]) for rank in detail["ranks"]]
    elif kind == "rank_failed":
        _read_failure(event, run)
    elif kind == "generation_stopped":
        _read_stop(detail, run)
    elif kind == "incident":
        _read_incident(detail, run)
    elif kind == "stop_requested":
        run.stop_asked, run.cause = True, run.cause or "stop"
    elif kind in ("hang_over", "job_succeeded"):
        run.hang, run.succeeded = None, kind == "job_succeeded"
    elif kind == "node_lost" and event["node"] in run.nodes:
        run.lost[event["node"]] = (int(detail.get("alive_ns") or 0), str(detail.get("reason")))
        run.failing = run.failing or not run.stop_asked


def _read_incident(detail: Json, run: _Generation) -> None:
    incident = {key: value for key, value in detail.items() if key not in ("ongoing", "fingerprint")}
    if detail.get("ongoing"):
        run.hang = incident
    else:
        run.told = incident


def _read_stop(detail: Json, run: _Generation) -> None:
    """Take what the end of a group says: why, of ranks that did not fail by themselves, and of the nodes' clocks."""
    run.cause = str(detail.get("cause") or "not told")
    for number, t_ns, over_ns in detail.get("left", ()):
        ended = {"code": 0, "signal": None, "t_ns": t_ns, "over_ns": over_ns}
        run.rank(number).exit = {**ended, "stopped_by_us": False}
    for number, t_ns, code, signal, raised_ns, over_ns, asked_ns in detail.get("stopped", ()):
        ended = {"code": code, "signal": signal, "t_ns": t_ns, "over_ns": over_ns, "asked_ns": asked_ns}
        run.rank(number).exit = {**ended, "stopped_by_us": True}
        run.rank(number).raised_ns = raised_ns
    for node, (shift_ns, error_ns) in detail.get("clocks", {}).items():
        run.shifts_ns[node] = shift_ns
        run.clock_error_ms[node] = error_ns / 1e6


def _read_failure(event: Json, run: _Generation) -> None:
    """Take what a journal says of a rank that failed by itself."""
    detail = event["detail"]
    run.failing = run.failing or not run.stop_asked
    rank = run.rank(event["rank"])
    rank.node = event["node"]
    how = {"pid": detail.get("pid"), "local_rank": detail.get("local_rank"), "t_ns": detail.get("time_ns")}
    own = {"sent": detail.get("sent"), "over_ns": detail.get("over_ns"), "stopped_by_us": False}
    rank.exit = {**how, **detail["exit"], **own}
    rank.raised_ns = detail.get("raised_ns")
    rank.shift_ns = int(detail.get("shift_ns", 0))
    run.notes.setdefault(event["node"], []).extend(detail.get("notes", ()))


def _judge(run: _Generation, number: int) -> Incident:
    named = {rank: node for node, ranks in run.nodes.items() for rank in ranks}
    # What a rank that lives has printed was caught; a scheduler, say, may know of an end that the journal does not.
    ended = {rank: found for rank, found in run.ranks.items() if rank is None or not run.gets_on()}
    evidence = [_evidence(rank, found, named, run.shifts_ns) for rank, found in ended.items()]
    everyone = sorted(rank for rank in run.ranks if rank is not None)
    context = Context(
        generation=run.number,
        incident_id=number,
        world_size=sum(map(len, run.nodes.values())) or None,
        ranks_per_node=run.nodes or {"": everyone},
        lost_nodes=run.lost,
        hang=run.hang["missing"] if run.hang is not None and any(rank.exit for rank in run.ranks.values()) else None,
        host_notes=run.notes,
        clock_error_ms=run.clock_error_ms,
    )
    incident = verdict(evidence, context)
    # Some stamps tell no year: they serve to order, and for nothing else.
    known = incident.time_ns is not None and incident.time_ns > YEAR_UNKNOWN_NS
    return incident if known else dataclasses.replace(incident, time_ns=None)


def _evidence(rank: int | None, found: _Rank, named: Mapping[int, str], shifts_ns: Mapping[str, int]) -> RankEvidence:
    node = found.node or (named.get(rank) if rank is not None else None)
    texts, places = _laid_out(found.lines)
    exact = {} if found.raised_ns is None else {"timestamp_ns": found.raised_ns}
    return RankEvidence(
        rank=rank,
        node=node,
        exit=found.exit,
        error=None if found.error is None else {**found.error, **exact},
        tail="\n".join(texts),
        files={"error": found.error_file} if found.error_file else {},
        places=places,
        clock_shift_ns=shifts_ns.get(node or "", 0) if found.shift_ns is None else found.shift_ns,
        when=span_before,
    )


def _laid_out(lines: Sequence[tuple[str, Line]]) -> tuple[list[str], list[tuple[str, int | None]]]:
    """Return the texts of lines and their places, those of one file apart from those of the next."""
    texts: list[str] = []
    places: list[tuple[str, int | None]] = []
    last = ""
    for name, line in lines:
        if line.text.strip():
            if last not in ("", name):
                texts += _OTHER_FILE
                places += [(name, None)] * len(_OTHER_FILE)
            last = name
        texts.append(line.text)
        places.append((name, line.number))
    return texts, places


def _says_nothing(incident: Incident) -> bool:
    return incident.scope == "not_in_text" and incident.category == "other" and not incident.evidence


def _standing(incident: Incident, last: str) -> Incident:
    """Return the verdict of a text that ends without a failure before the first step."""
    return dataclasses.replace(
        incident,
        category="hang_no_output",
        summary=f"no failure in the text; it ends with: {last.strip()[:120]}",
        hint="if the job stands still there, ask the ranks where they are: `supervisor stacks`, or py-spy dump --pid",
    )
