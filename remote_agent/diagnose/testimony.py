"""What the evidence of one rank says: what kind of claim it makes, its category, the lines that show it.

In: exit, error.json and text of a rank, the notes of its host. Out: Claims.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from remote_agent.diagnose.categories import CATEGORIES, OOM, PRESSURE
from remote_agent.diagnose.claims import (
    AWAITED,
    DIFFER,
    DONE,
    ENDED,
    FAILED,
    OF_OTHERS,
    STOPPED,
    TOLD,
    WAITED,
    Claim,
    Shown,
)
from remote_agent.diagnose.exits import SIGNAL_CATEGORIES, SIGNAL_HINTS, decode_exit, signal_name
from remote_agent.diagnose.hang.watchdogs import gave_up, read_wait
from remote_agent.diagnose.incidents import EvidenceLine
from remote_agent.diagnose.last_words import (
    SIDES,
    ends_soon_after,
    find_error,
    find_first_error,
    find_last,
    find_reason,
    is_handled,
    is_outlived,
    is_progress,
    is_survived,
    lines_in,
    own_lines,
    unfinished_work,
)
from remote_agent.diagnose.meanings import BETWEEN_RANKS, OF_RANKS, best_match, meaning_of
from remote_agent.diagnose.rosters import WAITS, absent_of, read_roster
from remote_agent.diagnose.signatures import SIGNATURES, Signature
from remote_agent.diagnose.signatures.host import WHO_KILLED
from remote_agent.diagnose.signatures.launcher import KILLERS, REACTIONS
from remote_agent.diagnose.signatures.python import hint_of
from remote_agent.diagnose.tracebacks import (
    HEAD,
    TRUNCATED,
    Trace,
    find_traces,
    join_traces,
    last_background_failure,
    last_exception,
    strip_tag,
    traces_of_error,
    untagged_lines,
)
from remote_agent.text.names import read_number
from remote_agent.text.shapes import KEPT_TEXTS, clip, fingerprint, lines_of, shape

if TYPE_CHECKING:
    from remote_agent.diagnose.evidence import RankEvidence
    from remote_agent.wire.documents import RankExit

_UNRELATED_WARNING = re.compile(r"(?:\[rank\d+\]:)?\[[IW]\d{4} ")
_OTHER_STREAM = re.compile(r"\b(?:stdout|nccl)\b[^/]*$")
# A connection to such a host was lost: as NCCL prints it, and torch's store.
_HOST_GONE = re.compile(
    r"(?:closed by remote peer |completion from peer |remote=|Connect to )\[?([\w.-]+)(<\d+>|\]:\d+)"
)
_UNREACHABLE = re.compile(r"client socket has failed to connect to any network address of \(([^()]{1,200})\)")
# A row of torchrun's table.
_ROW = re.compile(r"(?m)^\s*time +: (\S+)$(?:\n.*){0,3}\n\s*exitcode +: (-?\d+)")
# NCCL names the rank of the node that closed a connection, and its own device: both are numbered consecutively.
_PEER_CLOSED = re.compile(
    r"\[(\d+)\] NCCL INFO \[Service thread\] (?:Connection closed by|Could not receive type from) localRank (\d+)"
)
# Slurm, pdsh and the system log name a node like this.
_NODE_SAID = re.compile(
    r"^srun: error: ([\w.-]+): tasks? |Node failure on ([\w.-]+)|^pdsh@\S+: ([\w.-]+): "
    r"|^(?:\w{3} {1,2}\d{1,2} [\d:]{8}|\d{4}-\d\d-\d\dT\S+) ([\w.-]+) (?:kernel|\w*oom\w*|systemd[\w-]*)(?:\[\d+\])?: "
    r"|^(?=[\w.-]*\d)([A-Za-z][\w.-]{1,63}): .*Killed process \d|\(IP: ([\d.]+), | node/([\w.-]+) "
)
_TASK = re.compile(r"srun: error: [\w.-]+: (tasks? [\d,-]+): ")
_FULL_NOTE = re.compile(r"(.+): (?:0\.0 of .* MiB free|.*, no inode free)")
_MAX_NOTES = 3
# A process closes its connections before it exits, so the ranks that it disconnects may be seen to fail first.
_EXIT_NS = 5_000_000_000
# All ranks save a checkpoint together: they all raise the exception of one rank, and name that rank.
_RAISED_ON = re.compile(r"CheckpointException ranks:dict_keys\(\[(\d+(?:, \d+)*)\]")
# Python code does not raise these: an exception after one of them is a consequence.
_CRASHES = frozenset({"cuda_error", "host_oom_kill", "segfault", "bus_error_shm", "nccl_network", "sigabrt"})
_OF_CRASHES = [each for each in SIGNATURES if each.is_strong and each.category in _CRASHES]
# The fatal errors that faulthandler names after the signal; all others of Python name a reason.
_OF_SIGNALS = frozenset(
    {"Aborted", "Bus error", "Floating-point exception", "Floating point exception", "Illegal instruction"}
    | {"Segmentation fault"}
)
# The reason why a child process failed is in what it printed, not in the exception of its parent.
_CHILD_FAILED = re.compile(r"CalledProcessError$")
# Steps with that many gaps between them, for lines of others, were not written at once.
_CERTAIN_GAPS = 2
# Folders of a path: in a summary, its last part is enough.
_FOLDERS = re.compile(r"(?<![\w.])/(?:[\w.@+-]+/)+")
# These exceptions mean that something from a thread, a child process or a peer is missing.
_MISSING_INPUT = re.compile(
    r"(?:^|\.)(?:Empty|Full|TimeoutError|Timeout|EOFError|BrokenPipeError|ConnectionResetError|CancelledError"
    r"|Broken\w*(?:Pool|Executor|Barrier)\w*)$"
)
# Ranks in the text of an exception.
_RANK = re.compile(r"\b[Rr]ank(?:[ :=#]{0,2}|\()(\d{1,6})\b(?!\s*(?:[-/.]\s*)?\d)")
# This matches a list of ranks: "missing ranks: [2, 3]".
_LIST = re.compile(r"\b[Rr]anks?(?: (?:are|is))?[ :=]{0,3}[\[{(](?P<ranks>\d{1,6}(?:, ?\d{1,6})*)[\]})]")
# These are states of a rank in such a list, so of a process and not of an argument.
_STATES = r"missing|failed|dead|lost|crashed|stuck|hung|unresponsive|killed|aborted|absent|lagging|unreachable"
# These words say that a rank, or a part of it, is at fault alone.
_FAILS = (
    r"fails?|failed|failure|die[sd]|dead|crash(?:ed)?|raised?|exited|left|gone|missing|lost|killed|aborted|stuck|hangs?|hung"
    r"|did not|didn't|does not|never|not respond\w*|unresponsive|timed out|lags?|behind|corrupt\w*|nan|NaN|no \w+"
    r"|[Dd]ead ?[Ll]ock(?:ed)?|error|exception|invalid|bad|empty|wrong|unexpected"
)
# If two ranks differ in something, either of them may be at fault.
_DIFFERS = r"differs?|different|inconsistent|mismatch\w*|diverge[sd]|disagree[sd]?|unequal|not (?:equal|match|the same)"
# What follows a rank that all others differ from.
_UNLIKE_ALL = re.compile(r"\b(?:while|but|whereas) (?:all )?(?:the )?others?\b")
# What a library says of a rank for which it waited, or which it lost.
_NOT_HEARD = re.compile(
    r"\b(?:not received|did not receive|no response|waiting for|waited for|closed by|lost)\b[^.;:\n]{0,60}"
    r"\brank[ :]{0,2}[\[(]?(\d{1,6})\b(?![^\n]*group_name_)"
)
_NEAR = 48


def read_ranks(every: Iterable[RankEvidence], notes: Mapping[str, Sequence[str]]) -> list[Claim]:
    """Return what ended each rank; notes: by node.

    A rank that kept running until others had failed did not fail for the reason in its earlier output.
    """
    every = list(every)
    claims = [read_rank(each, notes.get(each.node or "", ())) for each in every]
    killers = list(_killers_in(every)) if any(map(_is_mere_kill, claims)) else []
    claims = [_or_told(each, killers) if _is_mere_kill(each) else each for each in claims]
    failures = (each for each in claims if each.kind in (FAILED, ENDED) and each.later is None and each.ended)
    first_ns = min((each.t_ns for each in failures if each.t_ns is not None), default=None)
    if first_ns is None:
        return claims
    return [each.later if each.later and (each.t_ns or 0) > first_ns - _EXIT_NS else each for each in claims]


def _killers_in(every: Iterable[RankEvidence]) -> Iterator[EvidenceLine]:
    """Yield the first line of each text that says who ends processes, and the first of who ends the rest of a job."""
    for each in every:
        matches = (pattern.search(each.tail) for pattern in (KILLERS, REACTIONS))
        yield from (_line(each, each.tail.count("\n", 0, match.start())) for match in matches if match is not None)


def _is_mere_kill(claim: Claim) -> bool:
    """Return whether a launcher or a shell says that a process was killed, and nothing says why."""
    return claim.is_row and claim.exit_signal == "SIGKILL" and not claim.proven and bool(claim.evidence)


def _or_told(claim: Claim, killers: Sequence[EvidenceLine]) -> Claim:
    """Return the claim of a process that was killed: where somebody said that he kills, it was told to end.

    A SIGKILL says how a process ended, not why: memory is only the most frequent reason.
    """
    row = claim.evidence[0]
    # Who ends the rest because of what happened before is not the reason for that.
    before = (each for each in killers if each.file == row.file and (each.line or 0) > (row.line or 0))
    late = [each for each in before if not KILLERS.search(each.text)]
    why = next((each.text for each in killers if each not in late), None)
    if why is None:
        return claim
    headline = f"killed by SIGKILL, by others as the text says: {why}"
    told = "signal_preempted"
    return dataclasses.replace(claim, kind=TOLD, category=told, headline=headline, hint=CATEGORIES[told].hint)


def read_rank(evidence: RankEvidence, notes: Sequence[str] = ()) -> Claim:
    """Return what this rank's evidence says; notes: from its node's kernel, cgroup and file systems."""
    claim = _with_context(_or_waits(_read(evidence, notes), evidence), evidence)
    raised = _RAISED_ON.search(evidence.tail) if claim.kind == FAILED and not claim.of(FAILED) else None
    if raised is not None:
        claim = dataclasses.replace(claim, says=FAILED, others=tuple(map(read_number, raised[1].split(", "))))
    related = CATEGORIES[claim.category].notes
    if claim.kind != FAILED or not notes:
        return claim
    related_notes = [note for note in notes if _names(note, evidence) or (related and re.search(related, note))]
    lines = dict.fromkeys((*claim.evidence, *_as_evidence(evidence, related_notes)))
    return dataclasses.replace(claim, evidence=tuple(lines))


def _with_context(claim: Claim, evidence: RankEvidence) -> Claim:
    """Return the claim with what else its author's text shows: its node, its peers, its watchdog, its threads."""
    rank, tail = evidence.rank, evidence.tail
    says, others, shown = claim.says, claim.others, _shown_in(tail)
    if shown.closed and rank is not None and claim.kind != FAILED and not others:
        own, other = shown.closed
        says, others = AWAITED, (rank - own + other,)
    is_report = rank is None and evidence.node is not None and not evidence.places
    # Each host once for each node that lost a connection to it.
    lost = {(evidence.nodes[number] if evidence.nodes else None, host, port) for number, host, port in shown.hosts}
    return dataclasses.replace(
        claim,
        says=says,
        others=others,
        node=_node_of(claim),
        hosts=tuple(sorted(host for _, host, _ in lost)),
        wait=None if rank is None or shown.wait is None else shown.wait._replace(rank=rank),
        shown=shown,
        listed=None if shown.roster is None else _line(evidence, shown.roster.line),
        report=lines_of(tail.strip())[0] if is_report and tail.strip() else "",
    )


@functools.lru_cache(KEPT_TEXTS)
def _shown_in(text: str) -> Shown:
    aside, address, row = last_background_failure(text), _UNREACHABLE.search(text), _ROW.search(text)
    return Shown(
        next(((int(own), int(other)) for own, other in _PEER_CLOSED.findall(text) if own != other), None),
        tuple((text.count("\n", 0, each.start()), each[1], each[2]) for each in _HOST_GONE.finditer(text)),
        read_wait(-1, text),
        "" if aside is None else _aside(aside),
        "" if address is None else address[1],
        read_roster(text),
        unfinished_work(untagged_lines(text)),
        None if row is None else (row[1], row[2]),
        text,
    )


def _or_waits(claim: Claim, evidence: RankEvidence) -> Claim:
    """Return the claim, or that of a text which tells of no failure, but lists who is there while somebody waits."""
    roster = _shown_in(evidence.tail).roster if claim.kind == DONE and evidence.exit is None else None
    if roster is None or not (roster.is_list or absent_of(roster, 0)):
        return claim
    if not any(map(WAITS.search, untagged_lines(evidence.tail)[roster.line :])):
        return claim
    line = _line(evidence, roster.line)
    return _with_time(_base(evidence, WAITED, "hang_no_output", line.text, evidence=(line,)), evidence)


def _aside(trace: Trace) -> str:
    """Return which exception ended a thread, a task or a child of a process."""
    place = f" in {trace.user_frame.place()}" if trace.user_frame is not None else ""
    return f"{trace.background} failed with {trace.headline}{place}"


def _node_of(claim: Claim) -> str | None:
    """Return the node that the claim's lines name: that of a scheduler, or of a host's own log, if it is one."""
    if claim.node is not None or not claim.evidence:
        return claim.node
    nodes = {
        (match and next(filter(None, match.groups()))) or each.node
        for each in claim.evidence
        for match in [_NODE_SAID.search(each.text) or _NODE_SAID.search(claim.traceback or "")]
    }
    return nodes.pop() if len(nodes) == 1 else None


def _names(note: str, evidence: RankEvidence) -> bool:
    """Return whether a line of the kernel log names this rank's process."""
    pid = (evidence.exit or {}).get("pid")
    return pid is not None and "MiB free" not in note and re.search(rf"\b{pid}\b", note) is not None


def _as_evidence(evidence: RankEvidence, notes: Sequence[str]) -> tuple[EvidenceLine, ...]:
    return tuple(EvidenceLine(evidence.node, None, None, None, clip(note)) for note in notes[:_MAX_NOTES])


def _read(evidence: RankEvidence, notes: Sequence[str]) -> Claim:
    exit_ = evidence.exit or {}
    code, signal = exit_.get("code"), signal_name(exit_.get("code"), exit_.get("signal"))
    if evidence.stopped_by_us:
        raised_ns = evidence.raised_ns
        # A process that has recorded its exception may take seconds to exit: the ranks it disconnects may exit first.
        failed = _from_text(evidence) if _before_our_signal(evidence, raised_ns) else None
        # The signal was ours: it is not how the rank failed.
        return dataclasses.replace(failed, exit_signal=None) if failed else _stopped(evidence, code, signal)
    if evidence.exit is not None and signal is None and code == 0:
        return _base(evidence, DONE, "other", decode_exit(code, None))
    if signal is not None:
        return _signalled(evidence, signal, notes)
    claim = _from_text(evidence)
    if claim is None and evidence.exit is None:
        return _base(evidence, DONE, "other", "")
    how = decode_exit(code, None)
    claim = _unexplained(evidence, how) if claim is None else _with_time(claim, evidence)
    full = next(filter(None, map(_FULL_NOTE.match, notes)), None) if claim.kind == ENDED else None
    return claim if full is None else _on_full_disk(claim, f"{how}, and no space is left in {full[1]}")


def _on_full_disk(claim: Claim, headline: str) -> Claim:
    """Return the claim of a script that could not say why it failed: there was no space for it."""
    return dataclasses.replace(
        claim,
        kind=FAILED,
        category="disk_full",
        headline=clip(headline),
        hint=CATEGORIES["disk_full"].hint,
        fingerprint=fingerprint("disk_full", "", "", ""),
        proven=False,
    )


def _with_time(claim: Claim, evidence: RankEvidence) -> Claim:
    """Return the claim with the time that the text shows, unless it has a time already."""
    if claim.t_ns is not None or evidence.time_of_line is None or not claim.evidence:
        return claim
    proof = claim.evidence[0]
    if (proof.file, proof.line) not in evidence.places:
        return claim
    index = list(evidence.places).index((proof.file, proof.line))
    time = evidence.time_of_line(lines_of(evidence.tail), index)
    return claim if time is None else dataclasses.replace(claim, t_ns=time[0], uncertainty_ns=time[1])


def _unexplained(evidence: RankEvidence, how: str) -> Claim:
    """Return the claim of an exit with an error code and no exception; its last line may still say why."""
    base, own = functools.partial(_base, evidence, ENDED, "other"), own_lines(evidence.tail)
    reason = find_reason(own)
    if reason is not None:
        return base(
            clip(f"{how}: {reason[1]}"),
            hint=CATEGORIES["sigabrt"].hint,
            evidence=(_line(evidence, reason[0]),),
            proven=True,
        )
    dump = next((trace for trace in find_traces(evidence.tail) if trace.fault), None)
    if dump is not None and dump.user_frame is not None:
        return base(
            clip(f"{how}: {_line(evidence, dump.first_line).text}"),
            place=dump.user_frame.place(),
            traceback=dump.text,
            evidence=(_line(evidence, dump.first_line),),
            hint="a timer of faulthandler ended the process: see what it was waiting for at the place shown"
            if dump.type == "Timeout"
            else "",
            proven=True,
        )
    lines = _last_line(evidence)
    error = find_first_error(own)
    if error is not None:
        return base(
            clip(f"{how}: {error[1]}"),
            hint=hint_of("", error[1]) or "check the lines around the one shown",
            evidence=(_line(evidence, error[0]),),
            proven=True,
        )
    last = f", last line of stderr: {lines[0].text}" if lines else " and printed nothing on stderr"
    return base(
        clip(how + last),
        hint="check stdout too, and look for sys.exit or os._exit in the script",
        evidence=lines,
        proven=True,
    )


def _base(evidence: RankEvidence, kind: str, category: str, headline: str, /, **more: Any) -> Claim:
    """Return the claim of this rank, with further fields, and for each that is not given what its exit says."""
    exit_ = evidence.exit or {}
    code, signal = exit_.get("code"), exit_.get("signal")
    name = signal_name(code, signal)
    if "fingerprint" not in more:
        more["fingerprint"] = fingerprint(category, name or "", "", headline)
    fields = {
        "hint": CATEGORIES[category].hint,
        "exit_code": None if code is None and signal is None else code,
        "exit_signal": name if signal or (code is not None and code < 0) else None,
        **more,
    }
    return Claim(evidence.rank, evidence.node, _time_of(evidence), kind, category, headline, **fields)


def _time_of(evidence: RankEvidence) -> int | None:
    """Return when its exception was recorded or its script ended, or else when its exit was observed."""
    exit_ = evidence.exit or {}
    recorded = (evidence.raised_ns, exit_.get("over_ns"))
    times = [t_ns + evidence.clock_shift_ns for t_ns in recorded if t_ns is not None]
    return min([*times, *([ended_ns] if (ended_ns := exit_.get("t_ns")) is not None else [])], default=None)


def _from_text(evidence: RankEvidence) -> Claim | None:
    """Return what the rank's exception or, without one, its text says; None: nothing known."""
    in_tail = find_traces(evidence.tail)
    if evidence.error and evidence.error.get("message"):
        traces = traces_of_error(str(evidence.error["message"]), evidence.error.get("callstack"))
        own = [trace for trace in traces if not (trace.is_wrapper or trace.unraisable)] or traces
    else:
        lines = untagged_lines(evidence.tail)
        ended = (evidence.exit or {}).get("code") is not None
        every = [trace for trace in in_tail if not (trace.fault or trace.is_wrapper or trace.unraisable)]
        own = [trace for trace in every if not ((ended or _was_caught(evidence, trace)) and is_outlived(lines, trace))]
        if not own and every and ends_soon_after(lines, every[-1].last_line) and not every[-1].background:
            own = [trace for trace in every if _is_in_chain_of(trace, every)]
    # If a thread fails after the process has failed, it fails as a consequence.
    first = next((number for number, trace in enumerate(own) if not trace.background), len(own))
    own = [trace for number, trace in enumerate(own) if number < first or not trace.background]
    truncated = own.pop() if own and own[-1].type == TRUNCATED else None
    claim = _cause_in(evidence, own, in_tail)
    if (claim is None or (claim.kind == ENDED and not own)) and truncated is None and evidence.exit is None:
        bare = last_exception("\n".join(own_lines(evidence.tail)))
        return claim if bare is None else _from_trace(evidence, bare, meaning_of(bare), [bare], [bare])
    if claim is None and truncated is not None:
        return dataclasses.replace(_from_trace(evidence, truncated, None, [truncated], in_tail), kind=ENDED)
    last = own[-1] if own and not own[-1].link else None
    meaning = None if last is None else meaning_of(last)
    if claim is None or claim.kind != FAILED or last is None or meaning is None or meaning.kind not in OF_OTHERS:
        return claim
    return dataclasses.replace(claim, later=_from_trace(evidence, last, meaning, [last], in_tail))


@functools.lru_cache(KEPT_TEXTS)
def _progress_in(text: str) -> tuple[int, ...]:
    """Return the numbers of the lines that training prints at each step, counted from 0."""
    return tuple(number for number, line in enumerate(untagged_lines(text)) if is_progress(line))


def _was_caught(evidence: RankEvidence, trace: Trace) -> bool:
    """Return whether a rank has caught an exception: it logged it as an error, or made steps after it.

    The steps count between lines of other ranks only: a process that ends may write all that it had buffered at once.
    """
    if evidence.rank is None:
        return False
    above = lines_of(evidence.tail)[max(0, trace.first_line - 1) : trace.first_line + 1]
    if any(" ERROR" in line and HEAD not in line[:40] for line in above):
        return True
    places = evidence.places
    after = [number for number in _progress_in(evidence.tail) if trace.last_line < number < len(places)]
    steps = [places[number][1] or 0 for number in after]
    return sum(later - step > 1 for step, later in zip(steps, steps[1:])) >= _CERTAIN_GAPS


def _cause_in(evidence: RankEvidence, own: Sequence[Trace], in_tail: Sequence[Trace]) -> Claim | None:
    exit_ = evidence.exit or {}
    trace, meaning = _cause_of(own) or (None, None)
    if trace is not None:
        awaited = next((each for each in reversed(in_tail) if each.background and not each.unraisable), None)
        if meaning is None and awaited is not None and _MISSING_INPUT.search(trace.type):
            trace, meaning, own = awaited, meaning_of(awaited), [awaited]
        if meaning is None and not _names_a_crash(evidence.tail):
            # Only a crash would count more: that is known without reading the rest of the text.
            return _from_trace(evidence, trace, meaning, own, in_tail)
    match = _match_in(evidence.tail, exit_.get("code") is not None or exit_.get("signal") is not None)
    if trace is not None:
        earlier = match is not None and match[0].kind == FAILED and not _ends(evidence.tail, in_tail, *match)
        if match is not None and _crashed_before(evidence.tail, trace, meaning, *match):
            return _from_match(evidence, *match)
        if meaning is not None and meaning.category == "collective_desync":
            # A rank that had given up waiting for the others before is not like them, because it has not heard of them.
            before = "\n".join(lines_of(evidence.tail)[: trace.first_line])
            waited = best_match(before, [each for each in SIGNATURES if each.kind == WAITED])
            if waited is not None and gave_up(before):
                return _from_match(evidence, *waited)
        wrapped = meaning is not None and meaning.kind == ENDED and match is not None and match[0].kind in OF_OTHERS
        if meaning is None or meaning.is_strong or not (earlier or wrapped):
            return _from_trace(evidence, trace, meaning, own, in_tail)
    return _from_match(evidence, *match) if match is not None else None


def _is_in_chain_of(trace: Trace, every: Sequence[Trace]) -> bool:
    """Return whether an exception is the last one, or one from which that was raised."""
    begin = max(number for number, each in enumerate(every) if not (each.link and number))
    return every.index(trace) >= begin


def _ends(text: str, traces: Iterable[Trace], meaning: Signature, match: re.Match[str]) -> bool:
    """Return whether the match is only the own line of one of these exceptions, which have been read already."""
    line = text.count("\n", 0, match.start())
    return meaning.weak and any(trace.last_line == line for trace in traces)


def _crashed_before(text: str, trace: Trace, own: Signature | None, meaning: Signature, match: re.Match[str]) -> bool:
    """Return whether the job ended before an exception, or a host or device crashed before one without a meaning."""
    line = text.count("\n", 0, match.start())
    crashed = meaning.category in _CRASHES if own is None else meaning.category == "signal_preempted"
    # A scheduler counts what its host killed when all has ended.
    counted = own is None and meaning.category == "host_oom_kill" and not meaning.signal and " event" in match.group()
    return meaning.is_strong and (counted or (crashed and line < trace.first_line)) and not trace.fault


def _cause_of(traces: Sequence[Trace]) -> tuple[Trace, Signature | None] | None:
    """Return the exception that shows the cause: the first FAILED one, or else the last one without a meaning.

    Exceptions that are raised because of another one, or while it is handled, have its meaning.
    """
    every = [(trace, meaning_of(trace)) for trace in traces]
    for trace, meaning in every:
        if meaning is not None and meaning.is_strong:
            return trace, meaning
    plain: list[Trace] = []
    begins_plain = True
    for trace, meaning in every:
        begins_plain = begins_plain if trace.link else meaning is None
        if meaning is None and begins_plain:
            plain.append(trace)
    if plain:
        group = [trace for trace in plain if trace.group == plain[-1].group] if plain[-1].group else plain[-1:]
        # In a group, the first exception counts, together with those that were raised because of it.
        linked = itertools.takewhile(lambda trace: trace.link, group[1:])
        return [group[0], *linked][-1], None
    chain = [each for each in every if each[1] is not None] if all(trace.link for trace, _ in every[1:]) else every[:1]
    return chain[-1] if chain else None


@functools.lru_cache(KEPT_TEXTS)
def _names_a_crash(text: str) -> bool:
    return any(each.regex.search(text) for each in _OF_CRASHES)


@functools.lru_cache(KEPT_TEXTS)
def _match_in(text: str, has_ended: bool) -> tuple[Signature, re.Match[str]] | None:
    """Return the best match in a rank's text, as far as the process did not survive it.

    If its exit is not known, a warning still counts if there is nothing else.
    """
    lines = untagged_lines(text)
    ends = [match.start() for match in re.finditer("\n", text)]
    outlived = (
        each
        for each in find_traces(text)
        if each.unraisable or each.lost_parent or (has_ended and is_outlived(lines, each))
    )
    reported = lines_in(lines, outlived)

    def counts(meaning: Signature, place: int) -> bool:
        number = bisect.bisect_left(ends, place)
        if number in reported:
            return False
        if meaning.category in BETWEEN_RANKS and has_ended and number < len(lines):
            return OF_RANKS.search(lines[number]) is not None
        # Steps with a bad loss are judged by the steps that follow.
        if meaning.kind != FAILED or meaning.category == "nan_loss" or number >= len(lines):
            return True
        # A launcher warns that it was told to end.
        is_warning = is_handled(lines[number]) and meaning.category != "signal_preempted"
        return not is_warning and not (has_ended and is_survived(lines, number))

    match = best_match(text, (), counts)
    if match is not None or has_ended:
        return match
    return best_match(text, (), lambda _, place: bisect.bisect_left(ends, place) not in reported)


def _kind(meaning: Signature | None) -> str:
    if meaning is None:
        return FAILED
    # torch prints it before any NCCL error, so it does not say which one.
    waited = meaning.category == "nccl_timeout_watchdog"
    return WAITED if waited and meaning.kind == ENDED else meaning.kind


def _from_trace(
    evidence: RankEvidence, trace: Trace, meaning: Signature | None, own: Sequence[Trace], in_tail: Sequence[Trace]
) -> Claim:
    category = meaning.category if meaning is not None else "user_exception"
    title = meaning.title if meaning is not None else ""
    frame = trace.user_frame
    printed = next((each for each in in_tail if each.headline == trace.headline), None)
    child = next((each.headline for each in own if _CHILD_FAILED.search(each.type)), None)
    above = next((each.first_line for each in in_tail if each.headline == child), None)
    child_error = "" if above is None else find_error(own_lines(evidence.tail)[:above])
    special = (meaning.hint if meaning is not None else "") or hint_of(trace.type, trace.message)
    place = (evidence.files.get("error"), None) if printed is None else evidence.place(printed.last_line)
    node = evidence.nodes[printed.last_line] if printed is not None and evidence.nodes else evidence.node
    function = f"{frame.file.rpartition('/')[2]}:{frame.function}" if frame is not None else ""
    # Several processes that print the same exception may name one rank each.
    alike = [each for each in own if shape(each.line) == shape(trace.line) and each.frames[:1] == trace.frames[:1]]
    alike = alike if evidence.rank is None and trace in alike else [trace]
    chains = [[each, *_chain_of(each, own)] for each in alike]
    all_said = [[_others_in(each, meaning if each in alike else None, evidence.rank) for each in one] for one in chains]
    said = [next((one for one in each if one[1]), ("", ())) for each in all_said]
    says = next((one for one, _ in said if one), "")
    others = tuple(dict.fromkeys(rank for one, ranks in said if one == says for rank in ranks))
    return _base(
        evidence,
        _kind(meaning),
        category,
        title or clip(_full_headline(trace, own, child_error)) or "failed",
        place=frame.place() if frame is not None else "",
        hint=special or CATEGORIES[category].hint,
        fingerprint=fingerprint(category, trace.type, function, trace.message),
        traceback=join_traces(own),
        evidence=(EvidenceLine(node, evidence.rank, *place, clip(trace.line)),),
        says=says,
        others=others,
        is_want=meaning is None and _MISSING_INPUT.search(trace.type) is not None,
        proven=trace.type != TRUNCATED,
        times=_times(trace, alike, evidence.tail),
    )


def _times(trace: Trace, alike: Sequence[Trace], text: str) -> int:
    """Return how many processes printed an exception: one that went on between two of them may have printed both."""
    between = untagged_lines(text)[alike[0].first_line : alike[-1].first_line]
    if len(alike) > 1 and any(is_handled(line) or is_progress(line) for line in between):
        return 1
    # Processes that print at once may do so into each other.
    return max(1, sum(shape(line) == shape(trace.line) for each in alike for line in each.text.split("\n")))


def _chain_of(trace: Trace, own: Sequence[Trace]) -> Sequence[Trace]:
    """Return the exceptions that are linked to this one, with itself."""
    at = own.index(trace) if trace in own else 0
    begin = max((number for number, each in enumerate(own[: at + 1]) if not each.link), default=0)
    return [*own[begin : begin + 1], *itertools.takewhile(lambda each: each.link, own[begin + 1 :])]


def _full_headline(trace: Trace, own: Sequence[Trace], child_error: str) -> str:
    """Return the headline of an exception, and that of the one from which its chain began.

    `child_error` is the error printed before it: where a child process failed, its own words say why.
    """
    before = own[: own.index(trace)] if trace.link and trace in own else []
    root = next((each for each in reversed(before) if not each.link), None)
    if child_error and _CHILD_FAILED.search((root or trace).type):
        child_error = _FOLDERS.sub("", child_error)
        if _CHILD_FAILED.search(trace.type):
            return f"{child_error} (printed by a child process; then {trace.headline})"
        return f"{trace.headline} (a child process printed: {child_error})"
    if root is None:
        return trace.headline
    return f"{trace.headline} ({'from' if 'direct cause' in trace.link else 'while handling'} {root.headline})"


def _others_in(trace: Trace, meaning: Signature | None, rank: int | None) -> tuple[str, tuple[int, ...]]:
    """Return what an exception says of other ranks, and of which."""
    text = f"{trace.type}: {trace.message}"
    known = ("", ()) if meaning is None else meaning.others_in(text)
    return known if known[1] or _kind(meaning) != FAILED else _accused(text, rank)


def _unheard(text: str) -> tuple[int, ...]:
    """Return the rank from which nothing came, as the text of one that waited for it says."""
    return tuple(map(read_number, _NOT_HEARD.findall(text)))[:1]


def _accused(text: str, rank: int | None) -> tuple[str, tuple[int, ...]]:
    """Return what a text says of the only other rank that it names: FAILED or DIFFER, and the rank.

    Several are accused only in a list; one that is only mentioned is not accused.
    """
    listed = _LIST.search(text)
    if listed is not None:
        near = f"{text[: listed.start()][-_NEAR:]} {text[listed.end() :][:_NEAR]}"
        ranks = tuple(map(read_number, listed["ranks"].split(",")))
        if re.search(rf"\b(?:{_STATES}|did not|didn't|never)\b", near) and rank not in ranks:
            return FAILED, ranks
    others = {read_number(match[1]): match for match in _RANK.finditer(text) if read_number(match[1]) != rank}
    if len(others) != 1:
        return "", ()
    ((other, match),) = others.items()
    before = re.split(r"[.;\n,](?:\s|$)", text[: match.start()])[-1]
    after = re.split(r"[.;\n,](?:\s|$)", text[match.end() :])[0][:_NEAR]
    around = f"{before[-_NEAR:]} {after}"
    if re.search(rf"\b(?:{_DIFFERS})\b", around):
        return DIFFER, (other,)
    of_it = re.search(rf"\b(?:{_FAILS})\b.{{0,24}}\b(?:from|of|on|in|by)(?: \w+)? $", before)
    it_failed = re.match(rf"['\")\]]?(?:'s [\w ]{{1,30}})? ?(?:\([^)]*\) )?(?:\w+ ){{0,2}}(?:{_FAILS})\b", after)
    if not (of_it or it_failed or _UNLIKE_ALL.search(after)):
        return "", ()
    return FAILED, (other,)


def _from_match(evidence: RankEvidence, meaning: Signature, match: re.Match[str]) -> Claim:
    line = _line(evidence, evidence.tail.count("\n", 0, match.start()))
    # A task may be a launcher of several ranks: then only its number tells where to look.
    task = _TASK.match(line.text) if evidence.rank is None and meaning.title else None
    headline = (f"{task[1]}: " if task is not None else "") + (meaning.title or line.text)
    base = _base(evidence, _kind(meaning), meaning.category, headline)
    says, others = meaning.others_in(match.group())
    own_text = "" if evidence.rank is None else evidence.tail
    if not others and evidence.rank is None and meaning.kind == FAILED:
        says, others = _accused(line.text, None)
    elif not others and meaning.kind in OF_OTHERS and (others := _unheard(line.text) or _unheard(own_text)):
        says = AWAITED
    return dataclasses.replace(
        base,
        hint=meaning.hint or CATEGORIES[meaning.category].hint,
        fingerprint=fingerprint(meaning.category, "", "", meaning.title or line.text),
        evidence=(line, *_alike_elsewhere(evidence, meaning, line)),
        is_row=bool(meaning.signal or meaning.kind == ENDED) and not line.text.startswith("Fatal Python error"),
        says=says,
        others=others,
        # The text does not name the sender of SIGKILL.
        proven=meaning.signal != "SIGKILL" and (bool(meaning.signal) or "exitcode" in match.group()),
        exit_signal=meaning.signal if meaning.signal and meaning.is_strong else base.exit_signal,
    )


def _alike_elsewhere(evidence: RankEvidence, meaning: Signature, first: EvidenceLine) -> list[EvidenceLine]:
    """Return the first line of the same meaning of another node, in a text of no rank."""
    matches = meaning.regex.finditer(evidence.tail) if evidence.rank is None and first.node is not None else ()
    lines = (_line(evidence, evidence.tail.count("\n", 0, match.start())) for match in matches)
    return list(itertools.islice((line for line in lines if line.node not in (None, first.node)), 1))


def _line(evidence: RankEvidence, number: int) -> EvidenceLine:
    """Return a line of the text, counted from 0, as evidence."""
    text = untagged_lines(evidence.tail)[number].strip() if evidence.tail else ""
    node = evidence.nodes[number] if evidence.nodes else evidence.node
    return EvidenceLine(node, evidence.rank, *evidence.place(number), clip(text))


def _signalled(evidence: RankEvidence, signal: str, notes: Sequence[str]) -> Claim:
    """Return the claim of a process that was ended by a signal of others."""
    if signal == "SIGKILL":
        return _killed(evidence, notes)
    category = SIGNAL_CATEGORIES.get(signal, "other")
    exit_ = evidence.exit or {}
    headline = decode_exit(exit_.get("code"), signal)
    lines = own_lines(evidence.tail)
    last_words: tuple[int, str] | None = None
    if category == "signal_preempted":
        headline += _sender(exit_, signal)
    elif signal == "SIGABRT":
        # abort() is the last step: its reason is printed above.
        reason = _from_text(evidence)
        if reason is not None and reason.category not in ("sigabrt", "signal_preempted"):
            return reason
        last_words = find_reason(lines) or find_last(lines)
    dump = next((trace for trace in find_traces(evidence.tail) if trace.fault), None)
    if last_words is None and dump is not None and dump.message not in _OF_SIGNALS:
        last_words = dump.first_line, dump.message
    if exit_.get("core"):
        headline += "; core dumped"
    proof = _last_output(evidence) if dump is None else (_line(evidence, dump.first_line),)
    if last_words is not None:
        headline = clip(f"{headline}: {last_words[1]}")
        proof = (_line(evidence, last_words[0]),)
    frame = dump.user_frame if dump is not None else None
    function = f"{frame.file.rpartition('/')[2]}:{frame.function}" if frame is not None else ""
    return _base(
        evidence,
        FAILED,
        category,
        headline,
        place=frame.place() if frame is not None else "",
        fingerprint=fingerprint(category, signal, function, "" if last_words is None else last_words[1]),
        traceback=dump.text if dump is not None else None,
        evidence=proof,
        hint=(SIGNAL_HINTS.get(signal) if last_words is None else None) or CATEGORIES[category].hint,
        proven=True,
    )


def _sender(exit_: RankExit, signal: str) -> str:
    """Return who sent the signal that ended a rank."""
    return ", sent by an operator" if exit_.get("sent") == signal else " from outside (not by supervisor)"


def _killed(evidence: RankEvidence, notes: Sequence[str]) -> Claim:
    base = functools.partial(_base, evidence, FAILED)
    oom = [note for note in notes if re.search(OOM, note)]
    named = [note for note in oom if _names(note, evidence)]
    pressure = [note for note in notes if re.search(PRESSURE, note)]
    proof = named or oom or pressure
    if proof:
        how = "killed by the host's OOM killer" if oom else "killed by SIGKILL while the host ran out of memory"
        return base(
            "host_oom_kill",
            how,
            evidence=_as_evidence(evidence, proof),
            fingerprint=fingerprint("host_oom_kill", "SIGKILL", "", ""),
            proven=bool(named),
        )
    exit_ = evidence.exit or {}
    return base(
        "other",
        f"killed by SIGKILL{_sender(exit_, 'SIGKILL')}",
        hint="the event signal_sent names the operator" if exit_.get("sent") == "SIGKILL" else WHO_KILLED,
        fingerprint=fingerprint("other", "SIGKILL", "", ""),
        evidence=_last_output(evidence),
        proven=exit_.get("sent") == "SIGKILL",
    )


def _before_our_signal(evidence: RankEvidence, t_ns: int | None) -> bool:
    """Return whether something happened before we signalled this rank, by the clock of its own node."""
    asked_ns = (evidence.exit or {}).get("asked_ns")
    return t_ns is not None and asked_ns is not None and t_ns < asked_ns


def _stopped(evidence: RankEvidence, code: int | None, signal: str | None) -> Claim:
    """Return the claim of a rank that we ended: never a cause, but it may carry the cause's own exception."""
    how = f"stopped by supervisor ({signal})" if signal else f"stopped by supervisor (exit {code})"
    claim = _from_text(evidence)
    if claim is None and _before_our_signal(evidence, (evidence.exit or {}).get("over_ns")):
        if code and signal is None:
            return _unexplained(evidence, decode_exit(code, None))
        return _base(evidence, DONE, "other", "its script had ended")
    if claim is None:
        return _base(evidence, STOPPED, "signal_preempted", how)
    # A process that has recorded its exception may take seconds to exit: our signal came after it.
    failed_itself = claim.kind == FAILED and (code != 0 if signal is None else evidence.error is not None)
    keeps = failed_itself or claim.kind in OF_OTHERS
    return dataclasses.replace(
        claim,
        kind=STOPPED,
        category=claim.category if keeps else "signal_preempted",
        headline=claim.headline if keeps else how,
        place=claim.place if failed_itself else "",
        fingerprint=claim.fingerprint if failed_itself else "",
    )


def _last_line(evidence: RankEvidence) -> tuple[EvidenceLine, ...]:
    """Return the last line of stderr, or of a text whose stream is unknown, as evidence."""
    lines = [line if own else "" for line, own in zip(lines_of(evidence.tail), own_lines(evidence.tail))]
    for number in range(len(lines) - 1, -1, -1):
        file, line = evidence.place(number)
        counts = lines[number].strip() and not _UNRELATED_WARNING.match(strip_tag(lines[number]))
        if counts and not _OTHER_STREAM.search(file or ""):
            return (EvidenceLine(evidence.node, evidence.rank, file, line, clip(lines[number].strip(SIDES))),)
    return ()


def _last_output(evidence: RankEvidence) -> tuple[EvidenceLine, ...]:
    """Return the last line of stderr, or of stdout if stderr has nothing but torch's unrelated warnings."""
    last = (evidence.exit or {}).get("said")
    printed = [line for line in lines_of(evidence.tail) if line.strip()]
    if last and all(_UNRELATED_WARNING.match(strip_tag(line)) for line in printed):
        place = evidence.files.get("stdout"), last["line"]
        return (EvidenceLine(evidence.node, evidence.rank, *place, clip(last["text"])),)
    return _last_line(evidence)
