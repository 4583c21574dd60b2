"""The verdict of each generation that a set of log files shows: of those that failed, not of those that continued.

In: files. Out: the contract's documents: incidents, oldest first, and the facts about NCCL.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from remote_agent.diagnose.categories import CATEGORIES
from remote_agent.diagnose.evidence import JobContext, RankEvidence
from remote_agent.diagnose.last_words import OTHER_FILE, is_progress, last_error
from remote_agent.diagnose.nccl import NcclText
from remote_agent.diagnose.rosters import WAITS, read_roster
from remote_agent.diagnose.signatures.launcher import KILLS_ITSELF
from remote_agent.diagnose.tracebacks import HEAD, read_error_document
from remote_agent.diagnose.verdict import verdict
from remote_agent.text.names import name_ranks, read_number
from supervisor.postmortem.files import LeaveOut, RunFile, find
from supervisor.postmortem.flights import FlightRecords
from supervisor.postmortem.journal import Generation, RankRecord, read_journal
from supervisor.postmortem.lines import FileLine, Times
from supervisor.postmortem.ranks import CONTINUES, OF_PROCESS, of_one_rank, split_ranks
from supervisor.postmortem.reading import Progress, read_all

if TYPE_CHECKING:
    from remote_agent.wire.documents import Diagnosis, EvidenceEntry, IncidentDocument

# A longer file is no error file of torch.
ERROR_BYTES = 64 << 20
# Files outside of any run's directory have this group and generation.
LOOSE = ("", 0)
# A server kills itself: what the shell prints about that is not the cause.
_SHELL_REPORT = re.compile(r"(?:^|: +\d+ )Killed\b")
# This separates the lines of two files: it ends a message, and a truncated traceback.
_OTHER_FILE = ("", OTHER_FILE)
# A file whose lines name no rank, but whose own name does.
_NAMED_BY_FILE = re.compile(r"^rank[._-]?(\d{1,5})(?=[._-])")

# No job ran before 1980: an earlier time has got its year from this program.
_YEAR_KNOWN = "1980"
_MEETINGS = re.compile(
    r"\bCCL\b|\b[NR]CCL\b|nccl==|process[ _]group|distributed|rendezvous|c10d|world[ _]size|\bbarrier\b|waiting for"
    r"|global_rank",
    re.IGNORECASE,
)
# A line that names the process of a rank.
_PROCESS_OF = re.compile(
    r"\b[Rr]ank (?P<rank>\d+),? pid[ =:]{1,2}(?P<pid>\d+)\b|\(PID:(?P<pid2>\d+),.* RankID:(?P<rank2>\d+)\)"
    r"|^\s*exitcode\s*: -?\d+ \(pid: (?P<pid3>\d+)\)|:(?P<pid4>\d+):\d+ \[\d+\] [NR]CCL .*\brank (?P<rank4>\d+) nranks"
    r"|\(\w+\(rank=(?P<rank5>\d+)\) pid=(?P<pid5>\d+)"
)
_UNCAUGHT = re.compile(r"Traceback \(most recent call last\)|Fatal Python error|terminate called")
# Half-precision training sometimes reduces the scale of the loss, which is harmless if this many good steps follow, and
# in the first steps, in which it looks for that scale.
_OVERFLOW = re.compile(r"OVERFLOW! Rank \d+ Skipping step")
_STEP_NUMBER = re.compile(r"\b(?:step|iter(?:ation)?)\b\W{0,12}(\d{1,9})|\b(\d{1,9})/\d+ \[", re.IGNORECASE)
_FIRST_STEPS, _FEW = 100, 3
_SKIPPED = re.compile(rf"{_OVERFLOW.pattern}|\b(?:[Ll]oss|grad[_ ]norm)['\"]?[:=]? ?(?:nan|NaN)\b")
_GOOD_STEPS = 10
# This many steps show that a process continued if they were certainly printed after the failure. If stdout and stderr
# go to one file, Python may write buffered steps after the traceback that ended the process.
_CERTAIN_STEPS = 2
_ONE_STREAM = re.compile(r"\b(?:stdout|stderr)\b[^/]*$")
_RECORD = re.compile(r"\b(?:INFO|ERROR|WARNING|CRITICAL)\b")
_BAR = re.compile(r"\d%\|")
_FAILS = re.compile(r"fail|abort|crash|error|exception", re.IGNORECASE)
# After one of these, other lines only quote the process that has ended.
_ENDS = re.compile(
    r"exit ?code|[Ee]xited with|return code|terminated with|[Kk]illed|CANCELLED|[Rr]estart|[Ss]ignal \d|core dumped"
    r"|Connection (?:reset|closed)|^srun: |^slurmstepd: "
)
_END_LINES = 10
# Launchers and servers print such lines at the end of a run that succeeded; scripts print the last one.
_GROUP_SUCCEEDED = re.compile(r"WorkerState\.SUCCEEDED|worker group successfully finished")
_SUCCEEDED = re.compile(rf"exits successfully|Application shutdown complete|{_GROUP_SUCCEEDED.pattern}")
_FINISHED = re.compile(r"\b(?:[Tt]raining|TRAINING|[Jj]ob|[Rr]un) (?:has )?(?:finished|completed?|done|succeeded)\b")
# The host of a store may end before the others: torch warns of that.
_OF_STORES = re.compile(r"\[?W\d{3,4} \d.*(?:TCPStore|SocketImpl|c10d|rendezvous)|CCL (?:INFO|WARN) ")
_COUNT = re.compile(r"(?<![\d/.])(\d{1,9})/(\d{1,9})(?![\d/])")
# A scheduler says that the whole job has succeeded.
_JOB_SUCCEEDED = re.compile(
    r"\bCOMPLETED(?: +0:0\b| \(exit code 0\))|^Successfully completed\.|^\S+ +Succeeded +\d+[dhms]"
    r"|\bJob '\S+' succeeded"
)
_SUMMED_UP = "train_runtime"
_RETRIES = re.compile(r"\bretr(?:y|ying|ies)\b")
_SERVED = re.compile(r'HTTP/\d\.\d" 2\d\d\b')
# These are retried, mostly with success.
_TRIED_AGAIN = ("rendezvous_timeout", "gloo_connection_reset")


def diagnose(
    paths: Sequence[Path], progress: Progress = lambda _bytes: None, leave_out: LeaveOut = lambda _why: None
) -> Diagnosis:
    """Return {incidents, nccl} of the files under these paths; raises UsageError, OSError."""
    nccl, times = NcclText(), Times()
    runs: dict[tuple[str, int], Generation] = {}
    flights = FlightRecords()
    files = find(paths, leave_out)
    for file in files:
        why = ""
        if file.stream == "journal":
            why = read_journal(file, runs)
        elif file.stream == "flight":
            why = flights.add(file.path, file.rank or 0)
        elif file.stream == "error":
            rank = _generation(runs, file).rank(file.rank)
            with file.path.open("rb") as text:
                rank.error = read_error_document(text.read(ERROR_BYTES), file.path.stat().st_mtime_ns)
            rank.error_file = str(file.path)
            why = "" if rank.error else "not an error file of torch, or damaged"
        if why:
            leave_out(f"{file.path}: {why}")
    logs = [file for file in files if file.stream not in ("journal", "error", "flight")]
    with closing(read_all([file.path for file in logs], progress)) as read:
        for lines, file in zip(read, logs, strict=True):
            times.learn(lines)
            _add_lines(file, lines, _generation(runs, file), nccl)
    _join_loose(runs)
    for run in runs.values():
        _give_to_ranks(run)
    failed = [(run, _verdict(run, number, times)) for number, run in enumerate(_in_order(runs), 1) if not run.succeeded]
    incidents = [document for run, incident in failed for document in _incidents(run, incident)]
    ended_well = any(run.succeeded for run in runs.values())
    cut_short = bool(failed) and (failed[-1][0].stopped_on_request() or failed[-1][0].is_running())
    if not incidents and failed and not ended_well and not cut_short and never_started(texts := _texts(failed[-1][0])):
        incidents = [_hang(*failed[-1], texts)]
    nodes = {node: ranks for run in runs.values() for node, ranks in run.nodes.items()}
    incidents = flights.explain(incidents, nodes)
    numbered: list[IncidentDocument] = [{**document, "id": number} for number, document in enumerate(incidents, 1)]
    for each in numbered:
        each.pop("fingerprint", None)
    return {"incidents": numbered, "nccl": nccl.result()}


def _incidents(run: Generation, incident: IncidentDocument) -> list[IncidentDocument]:
    """Return the incidents of a generation: a hang and a failure, as far as they happened."""
    hang = [] if run.hang is None else [run.hang]
    if run.stopped_on_request():
        # No rank failed by itself: a traceback in its files was caught, or is due to our signal.
        return hang if run.incident is None else [*hang, run.incident]
    failure: IncidentDocument = {**incident, "evidence": [*incident["evidence"], *run.last_lines]}
    # The exception of a thread is in the log, and also in the incident of the hang that it led to.
    cause = failure["category"], failure["culprit_ranks"]
    is_known = any(one["traceback"] and (one["category"], one["culprit_ranks"]) == cause for one in hang)
    ranks = {number: each.lines for number, each in run.ranks.items()}
    lines = [line for own in ranks.values() for line in own]
    if (
        is_known
        or _is_empty(incident)
        or succeeded_after(incident, ranks)
        or was_retried(incident, lines)
        or was_over(incident, lines)
    ):
        return hang
    return hang if not run.nodes and was_survived(incident, ranks) else [*hang, failure]


def _has_ended(incident: IncidentDocument) -> bool:
    """Return whether the end of the culprit's process is known."""
    return any(value is not None for value in incident["exit"].values())


def succeeded_after(incident: IncidentDocument, ranks: Mapping[int | None, Sequence[tuple[str, FileLine]]]) -> bool:
    """Return whether it is said below all evidence that the run succeeded, and no process failed, as far as is known.

    A launcher's words about the whole group count for the files of its ranks as well; those about one process only
    where they are, as one of several may succeed before the others fail.
    """
    if _has_ended(incident):
        return False
    if any(_JOB_SUCCEEDED.search(line.text) for _, line in ranks.get(None, ())):
        return True
    if any(_fails(each["text"]) for each in incident["evidence"]):
        return False
    last = {
        each["file"]: each["line"] or 0 for each in sorted(incident["evidence"], key=lambda each: each["line"] or 0)
    }
    well: dict[str | None, int] = {}
    of_group = False
    for rank, lines in ranks.items():
        for name, line in lines:
            if _SUCCEEDED.search(line.text):
                well[name] = max(well.get(name, 0), line.number)
                of_group = of_group or (rank is None and _GROUP_SUCCEEDED.search(line.text) is not None)
            elif (rank is None or name in last) and _fails(line.text):
                last[name] = max(last.get(name, 0), line.number)
    of_ranks = {name for rank, lines in ranks.items() if rank is not None for name, _ in lines}
    of_ranks -= {name for name, _ in ranks.get(None, ())}
    if incident["traceback"] is not None and not of_group:
        return False
    return bool(last) and all(
        well.get(name, 0) > number or (of_group and name in of_ranks) for name, number in last.items()
    )


def was_over(incident: IncidentDocument, files: Iterable[tuple[str, FileLine]]) -> bool:
    """Return whether training had printed its last step, or its summary, before all evidence: warnings of stores."""
    if not incident["evidence"] or not all(_OF_STORES.search(each["text"]) for each in incident["evidence"]):
        return False
    file, first = incident["evidence"][0]["file"], min(each["line"] or 0 for each in incident["evidence"])
    lines = sorted((line for name, line in files if name == file), key=lambda line: line.number)
    counted = [line for line in lines if _COUNT.search(line.text) or _SUMMED_UP in line.text]
    after = [line.text for line in lines if counted and line.number > counted[-1].number]
    if not counted or counted[-1].number > first or any(_fails(text) and not _OF_STORES.search(text) for text in after):
        return False
    counts = _COUNT.findall(counted[-1].text)
    return all(done == of for done, of in counts) and (is_progress(counted[-1].text) or not counts)


def _fails(text: str) -> bool:
    return _ENDS.search(text) is not None and _RETRIES.search(text) is None


def _texts(run: Generation) -> list[str]:
    lines = [line for rank in run.ranks.values() for _, line in rank.lines if line.text.strip()]
    return [line.text for line in sorted(lines, key=lambda line: line.number)]


def _in_order(runs: Mapping[tuple[str, int], Generation]) -> list[Generation]:
    return [runs[key] for key in sorted(runs) if runs[key].ranks or runs[key].lost]


def _join_loose(runs: dict[tuple[str, int], Generation]) -> None:
    """Add loose files, for example of a scheduler, to the run next to them if there is only one."""
    others = [key for key in runs if key != LOOSE]
    if LOOSE not in runs or len(others) != 1:
        return
    for number, loose in runs.pop(LOOSE).ranks.items():
        rank = runs[others[0]].rank(number)
        rank.node = rank.node or loose.node
        rank.lines += loose.lines


def _give_to_ranks(run: Generation) -> None:
    """Give each rank the lines of no rank that name its process, where the texts say which that is."""
    unowned = run.ranks.get(None)
    if unowned is None or not any(OF_PROCESS.search(line.text) for _, line in unowned.lines):
        return
    said = (
        (number, match.groupdict())
        for number, each in run.ranks.items()
        for _, line in each.lines
        if (match := _PROCESS_OF.search(line.text))
    )
    ranks: dict[str, int | None] = {}
    for number, groups in said:
        pid, rank = (
            next((text for key, text in groups.items() if text and key[:3] == name), None) for name in ("pid", "ran")
        )
        owner = number if rank is None else read_number(rank)
        # Processes of different hosts may have the same number.
        ranks[pid or ""] = owner if ranks.get(pid or "", owner) == owner else None
    left = []
    quoted: int | None = None
    for name, line in unowned.lines:
        about = OF_PROCESS.search(line.text)
        if about is not None:
            rank = ranks.get(next(filter(None, about.groups())))
            # Ray quotes the traceback of a worker below its name.
            quoted = rank if "ray::" in about.group() else None
        else:
            rank = quoted = quoted if CONTINUES.match(line.text) else None
        if rank is None:
            left.append((name, line))
        else:
            run.rank(rank).lines.append((name, line))
    unowned.lines[:] = left


def _generation(runs: dict[tuple[str, int], Generation], file: RunFile) -> Generation:
    return runs.setdefault((file.group, file.generation), Generation(file.generation))


def _add_lines(file: RunFile, lines: list[FileLine], run: Generation, nccl: NcclText) -> None:
    for line in lines:
        nccl.feed(line.text)
    lines = without_recovered(_without_server_kill(lines))
    name = str(file.path)
    if file.rank is not None:
        run.rank(file.rank).lines += [(name, line) for line in of_one_rank(lines)]
        return
    by_rank = split_ranks(lines)
    run.world = max([run.world, *(each.world for each in by_rank)])
    named = _NAMED_BY_FILE.search(file.path.name)
    if named is not None and all(rank_lines.rank is None for rank_lines in by_rank):
        run.rank(int(named[1])).lines += [(name, line) for line in of_one_rank(lines)]
        return
    for rank_lines in by_rank:
        rank = run.rank(rank_lines.rank)
        # The lines of no rank may be of several nodes.
        rank.node = rank.node or (rank_lines.node if rank_lines.rank is not None else None)
        rank.lines += [(name, line) for line in rank_lines.lines]


def _without_server_kill(lines: list[FileLine]) -> list[FileLine]:
    """Return the lines without a shell's report of a killed server that had killed itself after a process died."""
    ended = next((line.number for line in lines if KILLS_ITSELF in line.text), None)
    return [line for line in lines if ended is None or line.number < ended or not _SHELL_REPORT.search(line.text)]


def _verdict(run: Generation, number: int, times: Times) -> IncidentDocument:
    named = {rank: node for node, ranks in run.nodes.items() for rank in ranks}
    # A running rank has caught what it printed; a scheduler, however, may know of an end that the journal lacks.
    ended = {rank: record for rank, record in run.ranks.items() if rank is None or not run.is_running()}
    evidence = [_evidence(rank, record, named, run.shifts_ns, times) for rank, record in ended.items()]
    everyone = sorted(rank for rank in run.ranks if rank is not None)
    context = JobContext(
        generation=run.number,
        incident_id=number,
        world_size=sum(map(len, run.nodes.values())) or run.world or None,
        ranks_per_node=run.nodes or {"": everyone},
        lost_nodes=run.lost,
        hang=run.hang["missing"] if run.hang is not None and any(rank.exit for rank in run.ranks.values()) else None,
        host_notes=run.notes,
        clock_error_ms=run.clock_error_ms,
    )
    incident = verdict(evidence, context)
    ranks = {number: each.lines for number, each in run.ranks.items()}
    # A rank that went on after its failure leaves the verdict to the others.
    while not run.nodes and incident["culprit_ranks"] and incident["victims"] and was_survived(incident, ranks):
        evidence = [each for each in evidence if each.rank not in incident["culprit_ranks"]]
        incident = verdict(evidence, context)
    # Timestamps without a year only order lines; a journal and an error file have one.
    time = incident["time"] or ""
    # Somebody else's job cannot be asked by a command of ours.
    hint = incident["hint"] if run.nodes else incident["hint"].replace("supervisor stacks", "py-spy dump --pid PID")
    # Nobody observed how the ranks of a text ended: such verdicts are wrong too often (docs/failures.md).
    is_observed = any(rank.exit or rank.error for rank in run.ranks.values())
    confidence = incident["confidence"] if is_observed else incident["confidence"].replace("established", "supported")
    known = time if times.has_year or time > _YEAR_KNOWN else ""
    return {**incident, "time": known or None, "hint": hint, "confidence": confidence}


def _evidence(
    rank: int | None, record: RankRecord, named: Mapping[int, str], shifts_ns: Mapping[str, int], times: Times
) -> RankEvidence:
    node = record.node or (named.get(rank) if rank is not None else None)
    texts, places, nodes = _joined(record.lines)
    error = record.error
    if error is not None and record.raised_ns is not None:
        error = {**error, "timestamp_ns": record.raised_ns}
    return RankEvidence(
        rank=rank,
        node=node,
        exit=record.exit,
        error=error,
        tail="\n".join(texts),
        files={"error": record.error_file} if record.error_file else {},
        places=places,
        nodes=nodes if rank is None and node is None else (),
        clock_shift_ns=shifts_ns.get(node or "", 0) if record.shift_ns is None else record.shift_ns,
        time_of_line=times.of_line,
    )


def _joined(
    lines: Sequence[tuple[str, FileLine]],
) -> tuple[list[str], list[tuple[str, int | None]], list[str | None]]:
    """Return the texts of lines, their places and their nodes, with a separator between two files, or two nodes."""
    texts: list[str] = []
    nodes: list[str | None] = []
    places: list[tuple[str, int | None]] = []
    last, last_node = "", None
    for name, line in lines:
        if line.text.strip():
            if last not in ("", name) or (last_node and line.node and last_node != line.node):
                texts += _OTHER_FILE
                places += [(name, None)] * len(_OTHER_FILE)
                nodes += [None] * len(_OTHER_FILE)
            last, last_node = name, line.node
        texts.append(line.text)
        places.append((name, line.number))
        nodes.append(line.node)
    return texts, places, nodes


def _is_empty(incident: IncidentDocument) -> bool:
    return incident["scope"] == "not_in_text" and incident["category"] == "other" and not incident["evidence"]


def _hang(run: Generation, incident: IncidentDocument, texts: Sequence[str]) -> IncidentDocument:
    """Return the verdict of a text that ends before the first step, and whose lines are no failure of a rank."""
    roster = read_roster("\n".join(texts)) if any(map(_waits, texts)) else None
    absent = sorted(set(range(roster.of)) - roster.ranks) if roster is not None else []
    error = last_error(texts)
    found: IncidentDocument = {
        **incident,
        "category": "hang_no_output",
        "summary": f"no rank got to its first step; the last error in the log: {error[:120]}"
        if error
        else f"no failure in the log, which ends with: {texts[-1].strip()[:120]}",
        "hint": "if the job hangs there, py-spy dump --pid PID shows where a rank is",
        "why": ["so: it ends while the ranks meet, before the first step"],
    }
    met = "rendezvous_timeout"
    if roster is not None and roster.twice and absent:
        twice = f"{name_ranks(sorted(roster.twice))} of {roster.of} were started twice"
        found["category"], found["summary"] = met, f"{twice}, and {name_ranks(absent)} never"
        found["hint"] = "give each node its own node rank (--node-rank, NODE_RANK)"
    elif roster is not None and len(absent) == 1 < len(roster.ranks):
        said = f"rank {absent[0]} never came: all other {len(roster.ranks)} ranks say that they are there or wait"
        own = last_error([line.text for _, line in run.rank(absent[0]).lines])
        found["category"], found["summary"] = met, f"{said}; its own last error: {own}" if own else said
        found["hint"], found["scope"], found["culprit_ranks"] = CATEGORIES[met].hint, "one_rank", absent
    return found


def _waits(text: str) -> bool:
    """Return whether a line tells of waiting for other ranks, as Lightning does once it has said who it is."""
    return "GLOBAL_RANK" in text or WAITS.search(text) is not None


def never_started(lines: Iterable[str]) -> bool:
    """Return whether the text ends while the ranks meet each other, before any step.

    That some have come is no sign of it where nobody waits for the others.
    """
    meets = False
    for text in lines:
        if is_progress(text) or any(each.search(text) for each in (_SUCCEEDED, _JOB_SUCCEEDED, _FINISHED, _SERVED)):
            return False
        meets = meets or (_MEETINGS.search(text) is not None and (_waits(text) or read_roster(text) is None))
    return meets


def was_retried(incident: IncidentDocument, files: Iterable[tuple[str, FileLine]]) -> bool:
    """Return whether the incident is only lost connections, and the run made progress after them."""
    if incident["category"] not in _TRIED_AGAIN or any(
        each["category"] not in _TRIED_AGAIN for each in incident["victims"]
    ):
        return False
    went_on: dict[str, int] = {}
    for name, line in files:
        if _UNCAUGHT.search(line.text):
            return False
        if is_progress(line.text):
            went_on[name] = line.number
    return all((each["line"] or 0) < went_on.get(each["file"] or "", 0) for each in incident["evidence"])


def was_survived(incident: IncidentDocument, ranks: Mapping[int | None, Sequence[tuple[str, FileLine]]]) -> bool:
    """Return whether every rank continued training to the end of its text, in which no process ended."""
    if _has_ended(incident) or not incident["evidence"]:
        return False
    fatal = _SKIPPED if incident["category"] == "nan_loss" else _ENDS
    # A line of no rank that is no exception may be of a program that ran before the ranks.
    everyone = [line for own in ranks.values() for line in own] if incident["traceback"] is None else []
    return all(
        _went_on(ranks.get(each["rank"], ()), each, fatal)
        or (each["rank"] is None and _went_on(everyone, each, fatal, are_certain=True))
        for each in incident["evidence"]
    )


def _went_on(
    lines: Sequence[tuple[str, FileLine]], proof: EvidenceEntry, fatal: re.Pattern[str], are_certain: bool = False
) -> bool:
    own = sorted((line for name, line in lines if name == proof["file"]), key=lambda line: line.number)
    texts = [line.text for line in own if line.number > (proof["line"] or 0) and line.text.strip()]
    steps = [text for text in texts if is_progress(text)]
    if any(fatal.search(text) for text in texts) or not any(map(is_progress, texts[-_END_LINES:])):
        return False
    if len(steps) >= _GOOD_STEPS:
        return True
    if proof["rank"] is None and not are_certain and not _is_logged(own, proof):
        # The steps may be those of other ranks.
        return False
    in_order = are_certain or _ONE_STREAM.search(proof["file"] or "") is not None
    certain = [text for text in steps if in_order or _RECORD.search(text)]
    return sum(not (_BAR.search(text) or _FAILS.search(text)) for text in certain) >= _CERTAIN_STEPS


def _is_logged(lines: Sequence[FileLine], proof: EvidenceEntry) -> bool:
    """Return whether a logger printed the traceback to which this line belongs: the script has caught the exception."""
    above = [line.text for line in lines if line.number < (proof["line"] or 0)]
    head = next((number for number in range(len(above) - 1, 0, -1) if HEAD in above[number]), None)
    return head is not None and (_RECORD.search(above[head - 1]) or _RECORD.search(above[head])) is not None


def without_recovered(lines: list[FileLine]) -> list[FileLine]:
    """Return the lines without skipped steps that training recovered from: a later failure has another cause."""
    skipped = [index for index, line in enumerate(lines) if _OVERFLOW.search(line.text)]
    numbers = (match for line in lines[: skipped[-1]] if (match := _STEP_NUMBER.search(line.text))) if skipped else ()
    reached = max((read_number(match[1] or match[2]) for match in numbers), default=0)
    if skipped and (len(skipped) < _FEW or reached < _FIRST_STEPS):
        lines = [line for line in lines if not _OVERFLOW.search(line.text)]
    good = 0
    for line in lines:
        good = 0 if _SKIPPED.search(line.text) else good + is_progress(line.text)
    return [line for line in lines if good < _GOOD_STEPS or not _SKIPPED.search(line.text)]
