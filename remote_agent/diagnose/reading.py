"""What one rank's evidence says: its role in the failure, its category, the lines that show it.

In: exit, error.json and text of a rank, the notes of its host. Out: a Finding.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from remote_agent.diagnose.exits import CATEGORIES, decode_exit, signal_name
from remote_agent.diagnose.finding import Finding
from remote_agent.diagnose.hints import HINTS
from remote_agent.diagnose.model import Evidence, RankEvidence
from remote_agent.diagnose.pattern import GENERIC, NEUTRAL, PRIMARY, SECONDARY, Pattern, ranks_in
from remote_agent.diagnose.patterns import PATTERNS, RECEIVED
from remote_agent.diagnose.shapes import clip, lines_of, signature
from remote_agent.diagnose.traces import CUT, Trace, find_traces, join_traces, of_error, strip_tag

# Roles beside those of the patterns: failed without saying why, ended by us, ended well or still there.
UNEXPLAINED, STOPPED, FINE = "unexplained", "stopped", "fine"

_BY_THE_WAY = re.compile(r"(?:\[rank\d+\]:)?\[[IW]\d{4} ")
_OTHER_STREAM = re.compile(r"\b(?:stdout|nccl)\b[^/]*$")
_OOM_NOTE = re.compile(
    r"oom-kill|Out of memory: Killed process|Memory cgroup out of memory|oom_kill [1-9]|oom_reaper", re.I
)
_PRESSURE_NOTE = re.compile(r"memory pressure|page allocation failure|oom [1-9]", re.I)
# What a host says that belongs to a category, whichever process it names.
_RELATED = {
    "bus_error_shm": re.compile("^/dev/shm"),
    "dataloader_worker_killed": re.compile(f"^/dev/shm|{_OOM_NOTE.pattern}", re.I),
    "disk_full": re.compile(r"\d MiB free"),
    "host_oom_kill": re.compile(f"{_OOM_NOTE.pattern}|{_PRESSURE_NOTE.pattern}", re.I),
    "cuda_error": re.compile("Xid"),
}
_MAX_NOTES = 3
# A process closes its connections before it has ended, and those whom it breaks may be faster.
_LAST_STEPS_NS = 5_000_000_000
# A checkpoint is saved by all ranks: what one of them raises all raise, and say whose it is.
_RAISED_ON = re.compile(r"CheckpointException ranks:dict_keys\(\[(\d+(?:, \d+)*)\]")
# What a library for the web, or for remote files, raises is not about the ranks' own connections.
_WEB = re.compile(r"/(?:urllib|urllib3|http|httpx|httpcore|requests|aiohttp|botocore|huggingface_hub|gcsfs|s3fs)/")
# What cannot be read here came from other ranks, not from a file.
_FROM_OTHERS = re.compile("_tensor_to_object|all_gather|broadcast_object")
# What no Python code raises: an exception that follows it is about the consequence.
_CRASHES = frozenset({"cuda_error", "host_oom_kill", "segfault", "bus_error_shm", "nccl_network", "sigabrt"})
_ROLE_ORDER = {PRIMARY: 0, GENERIC: 1, SECONDARY: 2, NEUTRAL: 3}


def read_ranks(every: Iterable[RankEvidence], notes: Mapping[str, Sequence[str]]) -> list[Finding]:
    """Return what ended each rank; notes: by node.

    Who lived on after what he tells, until others had ended, did not end of that.
    """
    found = [read_rank(each, notes.get(each.node or "", ())) for each in every]
    themselves = (
        each for each in found if each.role in (PRIMARY, UNEXPLAINED) and each.outlived is None and each.ended
    )
    first_ns = min((each.t_ns for each in themselves if each.t_ns is not None), default=None)
    if first_ns is None:
        return found
    return [each.outlived if each.outlived and (each.t_ns or 0) > first_ns - _LAST_STEPS_NS else each for each in found]


def read_rank(evidence: RankEvidence, notes: Sequence[str] = ()) -> Finding:
    """Return what this rank's evidence says; notes: what its node's kernel, cgroup and file systems say."""
    found = _read(evidence, notes)
    raised = _RAISED_ON.search(evidence.tail) if found.role == PRIMARY and not found.named else None
    if raised is not None:
        found = dataclasses.replace(found, named=tuple(int(rank) for rank in raised[1].split(", ")))
    about = _RELATED.get(found.category)
    if found.role != PRIMARY or not notes:
        return found
    shown = [note for note in notes if _names(note, evidence) or (about is not None and about.search(note))]
    return dataclasses.replace(found, evidence=tuple(dict.fromkeys((*found.evidence, *_as_evidence(evidence, shown)))))


def _names(note: str, evidence: RankEvidence) -> bool:
    """Whether a line of the kernel's names this rank's process."""
    pid = (evidence.exit or {}).get("pid")
    return pid is not None and "MiB free" not in note and re.search(rf"\b{pid}\b", note) is not None


def _as_evidence(evidence: RankEvidence, notes: Sequence[str]) -> tuple[Evidence, ...]:
    return tuple(Evidence(evidence.node, None, None, None, clip(note)) for note in notes[:_MAX_NOTES])


def _read(evidence: RankEvidence, notes: Sequence[str]) -> Finding:
    exit_ = evidence.exit or {}
    code, signal = exit_.get("code"), signal_name(exit_.get("code"), exit_.get("signal"))
    if evidence.stopped_by_us:
        raised_ns = (evidence.error or {}).get("timestamp_ns")
        # A process that has recorded its exception may take seconds to end: those whom it broke may end first.
        failed = _from_text(evidence) if _before_our_signal(evidence, raised_ns) else None
        # The signal that ended it was ours, and is not how it failed.
        return dataclasses.replace(failed, exit_signal=None) if failed else _stopped(evidence, code, signal)
    if evidence.exit is not None and signal is None and code == 0:
        return _base(evidence, FINE, "other", decode_exit(code, None))
    if signal is not None:
        return _signalled(evidence, signal, notes)
    found = _from_text(evidence)
    if found is not None:
        return _stamped(found, evidence)
    if evidence.exit is None:
        return _base(evidence, FINE, "other", "")
    return _unexplained(evidence, decode_exit(code, None))


def _stamped(found: Finding, evidence: RankEvidence) -> Finding:
    """Return the finding with the time that the text tells, where nothing else does."""
    if found.t_ns is not None or evidence.when is None or not found.evidence:
        return found
    proof = found.evidence[0]
    if (proof.file, proof.line) not in evidence.places:
        return found
    index = list(evidence.places).index((proof.file, proof.line))
    stamp = evidence.when(lines_of(evidence.tail), index)
    return found if stamp is None else dataclasses.replace(found, t_ns=stamp[0], blur_ns=stamp[1])


def _unexplained(evidence: RankEvidence, how: str) -> Finding:
    """Judge an exit that is no success, without an exception: its last line may still say why."""
    lines = _last_lines(evidence)
    said = f", last line of stderr: {lines[0].text}" if lines else " and left nothing on stderr"
    return dataclasses.replace(
        _base(evidence, UNEXPLAINED, "other", clip(how + said)),
        hint="look at stdout too, and for sys.exit or os._exit in the script",
        evidence=lines,
        proven=True,
    )


def _base(evidence: RankEvidence, role: str, category: str, headline: str) -> Finding:
    exit_ = evidence.exit or {}
    code, signal = exit_.get("code"), exit_.get("signal")
    return Finding(
        rank=evidence.rank,
        node=evidence.node,
        t_ns=_time_of(evidence),
        role=role,
        category=category,
        headline=headline,
        hint=HINTS.get(category, ""),
        signature=signature(category, signal_name(code, signal) or "", "", headline),
        exit_code=None if code is None and signal is None else code,
        exit_signal=signal_name(code, signal) if signal or (code is not None and code < 0) else None,
    )


def _time_of(evidence: RankEvidence) -> int | None:
    """Return when the rank failed: when its exception was recorded or its script over, else when its end was seen."""
    exit_ = evidence.exit or {}
    told = ((evidence.error or {}).get("timestamp_ns"), exit_.get("over_ns"))
    times = [t_ns + evidence.clock_shift_ns for t_ns in told if t_ns is not None]
    return min([*times, *([exit_["t_ns"]] if exit_.get("t_ns") is not None else [])], default=None)


def _from_text(evidence: RankEvidence) -> Finding | None:
    """Return what the rank's exception or, without one, its text says; None: nothing known."""
    traces = find_traces(evidence.tail)
    if evidence.error and evidence.error.get("message"):
        own = of_error(str(evidence.error["message"]), evidence.error.get("callstack"))
    else:
        own = [trace for trace in traces if not (trace.fault or trace.quotes)]
    cut = own.pop() if own and own[-1].type == CUT else None
    found = _cause_in(evidence, own, traces)
    if found is None and cut is not None:
        return dataclasses.replace(_of_trace(evidence, cut, None, [cut], traces), role=UNEXPLAINED)
    end = own[-1] if own and not own[-1].link else None
    pattern = None if end is None else _meaning(end)
    if found is None or found.role != PRIMARY or end is None or pattern is None or pattern.role != SECONDARY:
        return found
    return dataclasses.replace(found, outlived=_of_trace(evidence, end, pattern, [end], traces))


def _cause_in(evidence: RankEvidence, own: list[Trace], traces: list[Trace]) -> Finding | None:
    chosen = _cause_of(own)
    hit = _best_hit(evidence.tail)
    if chosen is not None:
        trace, pattern = chosen
        earlier = hit is not None and hit[0].role in (PRIMARY, GENERIC) and not _ends(evidence.tail, trace, *hit)
        if hit is not None and pattern is None and _crashed_before(evidence.tail, trace, *hit):
            return _of_hit(evidence, *hit)
        wrapped = pattern is not None and pattern.role == NEUTRAL and hit is not None and hit[0].role == SECONDARY
        if pattern is None or pattern.role == PRIMARY or not (earlier or wrapped):
            return _of_trace(evidence, trace, pattern, own, traces)
    return _of_hit(evidence, *hit) if hit is not None else None


def _ends(text: str, trace: Trace, pattern: Pattern, match: re.Match[str]) -> bool:
    """Whether what was found is only this exception's own line."""
    return pattern.role == GENERIC and text.count("\n", 0, match.start()) == trace.last_line


def _crashed_before(text: str, trace: Trace, pattern: Pattern, match: re.Match[str]) -> bool:
    """Whether a crash of the machine's or the device's stands before an exception that has no meaning of its own."""
    line = text.count("\n", 0, match.start())
    return pattern.role == PRIMARY and pattern.category in _CRASHES and line < trace.first_line and not trace.fault


def _cause_of(traces: list[Trace]) -> tuple[Trace, Pattern | None] | None:
    """Return the exception that tells the cause: the first with a meaning of its own, else the last that may be one."""
    judged = [(trace, _meaning(trace)) for trace in traces]
    for trace, pattern in judged:
        if pattern is not None and pattern.role == PRIMARY:
            return trace, pattern
    plain = [(trace, pattern) for trace, pattern in judged if pattern is None]
    if plain:
        return plain[-1]
    return judged[0] if judged else None


def _meaning(trace: Trace) -> Pattern | None:
    hit = _best_hit(f"{trace.type}: {trace.message}", [each for each in PATTERNS if each.role != GENERIC])
    if hit is None:
        return None
    if hit[0].category == "checkpoint_corrupt" and any(_FROM_OTHERS.search(frame.function) for frame in trace.frames):
        return next(each for each in PATTERNS if each.title == RECEIVED)
    web = hit[0].role == SECONDARY and any(_WEB.search(frame.file) for frame in trace.frames)
    return None if web else hit[0]


def _best_hit(text: str, patterns: Sequence[Pattern] = ()) -> tuple[Pattern, re.Match[str]] | None:
    """Return the hit of the weightiest role in the first line that has one, there the first of the table."""
    hits = [(pattern, match) for pattern in patterns or PATTERNS if (match := pattern.regex.search(text)) is not None]
    return min(hits, key=lambda hit: (_ROLE_ORDER[hit[0].role], text.rfind("\n", 0, hit[1].start())), default=None)


def _role(pattern: Pattern | None) -> str:
    if pattern is None or pattern.role == GENERIC:
        return PRIMARY
    # What torch says before any error of NCCL's tells of no other one.
    waited = pattern.category == "nccl_timeout_watchdog"
    return (SECONDARY if waited else UNEXPLAINED) if pattern.role == NEUTRAL else pattern.role


def _of_trace(
    evidence: RankEvidence, trace: Trace, pattern: Pattern | None, own: list[Trace], in_tail: list[Trace]
) -> Finding:
    category = pattern.category if pattern is not None else "user_exception"
    title = pattern.title if pattern is not None else ""
    frame = trace.user_frame
    seen = next((each for each in in_tail if each.headline == trace.headline), None)
    if seen is not None:
        line = Evidence(evidence.node, evidence.rank, *evidence.place(seen.last_line), clip(trace.headline))
    else:
        line = Evidence(evidence.node, evidence.rank, evidence.files.get("error"), None, clip(trace.headline))
    place = f"{frame.file.rpartition('/')[2]}:{frame.function}" if frame is not None else ""
    return dataclasses.replace(
        _base(evidence, _role(pattern), category, title or clip(trace.headline) or "failed"),
        place=frame.place() if frame is not None else "",
        hint=(pattern.hint if pattern is not None else "") or HINTS[category],
        signature=signature(category, trace.type, place, trace.message),
        traceback=join_traces(own),
        evidence=(line,),
        **ranks_in(pattern, f"{trace.type}: {trace.message}"),
        proven=trace.type != CUT,
    )


def _of_hit(evidence: RankEvidence, pattern: Pattern, match: re.Match[str]) -> Finding:
    line = _line(evidence, evidence.tail.count("\n", 0, match.start()))
    text = line.text
    base = _base(evidence, _role(pattern), pattern.category, pattern.title or text)
    return dataclasses.replace(
        base,
        hint=pattern.hint or HINTS[pattern.category],
        signature=signature(pattern.category, "", "", pattern.title or text),
        evidence=(line,),
        **ranks_in(pattern, match.group()),
        # Who sends SIGKILL is not told.
        proven=pattern.signal != "SIGKILL" and (bool(pattern.signal) or "exitcode" in match.group()),
        exit_signal=pattern.signal if pattern.signal and pattern.role == PRIMARY else base.exit_signal,
    )


def _line(evidence: RankEvidence, number: int) -> Evidence:
    """Return a line of the text, counted from 0, as evidence."""
    text = strip_tag(lines_of(evidence.tail)[number]).strip() if evidence.tail else ""
    return Evidence(evidence.node, evidence.rank, *evidence.place(number), clip(text))


def _signalled(evidence: RankEvidence, signal: str, notes: Sequence[str]) -> Finding:
    """Judge a death by a signal that was not ours."""
    if signal == "SIGKILL":
        return _killed(evidence, notes)
    category = CATEGORIES.get(signal, "other")
    exit_ = evidence.exit or {}
    headline = decode_exit(exit_.get("code"), signal)
    if category == "signal_preempted":
        headline += _sender(exit_, signal)
    elif signal == "SIGABRT":
        # abort() is the last step: what asked for it stands above.
        found = _from_text(evidence)
        if found is not None and found.category not in ("sigabrt", "signal_preempted"):
            return found
    if exit_.get("core"):
        headline += "; core dumped"
    dump = next((trace for trace in find_traces(evidence.tail) if trace.fault), None)
    frame = dump.user_frame if dump is not None else None
    place = f"{frame.file.rpartition('/')[2]}:{frame.function}" if frame is not None else ""
    return dataclasses.replace(
        _base(evidence, PRIMARY, category, headline),
        place=frame.place() if frame is not None else "",
        signature=signature(category, signal, place, ""),
        traceback=dump.text if dump is not None else None,
        evidence=_where_it_was(evidence) if dump is None else (_line(evidence, dump.first_line),),
        proven=True,
    )


def _sender(exit_: Mapping[str, Any], signal: str) -> str:
    """Who sent the signal that ended a rank, when it was not the end of its group."""
    return ", which an operator sent" if exit_.get("sent") == signal else " from outside (not by supervisor)"


def _killed(evidence: RankEvidence, notes: Sequence[str]) -> Finding:
    oom = [note for note in notes if _OOM_NOTE.search(note)]
    named = [note for note in oom if _names(note, evidence)]
    pressure = [note for note in notes if _PRESSURE_NOTE.search(note)]
    shown = named or oom or pressure
    if shown:
        how = "killed by the host's OOM killer" if oom else "killed by SIGKILL while the host ran out of memory"
        return dataclasses.replace(
            _base(evidence, PRIMARY, "host_oom_kill", how),
            evidence=_as_evidence(evidence, shown),
            signature=signature("host_oom_kill", "SIGKILL", "", ""),
            proven=bool(named),
        )
    exit_ = evidence.exit or {}
    found = _base(evidence, PRIMARY, "other", f"killed by SIGKILL{_sender(exit_, 'SIGKILL')}; exit -9")
    dmesg = (
        "look at dmesg -T and at the cgroup's memory.events on the node: the OOM killer ends processes so, "
        "and so does anybody with kill -9"
    )
    return dataclasses.replace(
        found,
        hint="signal_sent in the events tells who" if exit_.get("sent") == "SIGKILL" else dmesg,
        signature=signature("other", "SIGKILL", "", ""),
        evidence=_where_it_was(evidence),
    )


def _before_our_signal(evidence: RankEvidence, t_ns: int | None) -> bool:
    """Whether something happened before we asked this rank to end, by the clock of its own node."""
    asked_ns = (evidence.exit or {}).get("asked_ns")
    return t_ns is not None and asked_ns is not None and t_ns < asked_ns


def _stopped(evidence: RankEvidence, code: int | None, signal: str | None) -> Finding:
    """Judge a rank that we ended: never a cause, but it may carry the cause's own exception."""
    how = f"stopped by supervisor ({signal})" if signal else f"stopped by supervisor (exit {code})"
    found = _from_text(evidence)
    if found is None and _before_our_signal(evidence, (evidence.exit or {}).get("over_ns")):
        return _base(evidence, FINE, "other", "its script was over")
    if found is None:
        return _base(evidence, STOPPED, "signal_preempted", how)
    # A process that has recorded its exception may take seconds to end: our signal came after it.
    failed_itself = found.role == PRIMARY and (code != 0 if signal is None else evidence.error is not None)
    return dataclasses.replace(
        found,
        role=STOPPED,
        category=found.category if failed_itself or found.role == SECONDARY else "signal_preempted",
        headline=found.headline if failed_itself or found.role == SECONDARY else how,
        place=found.place if failed_itself else "",
        signature=found.signature if failed_itself else "",
    )


def _last_lines(evidence: RankEvidence) -> tuple[Evidence, ...]:
    """Return the last line of stderr, or of a text that is not known to be of another stream, as evidence."""
    lines = lines_of(evidence.tail)
    for number in range(len(lines) - 1, -1, -1):
        file, place = evidence.place(number)
        is_said = lines[number].strip() and not _BY_THE_WAY.match(strip_tag(lines[number]))
        if is_said and not _OTHER_STREAM.search(file or ""):
            return (Evidence(evidence.node, evidence.rank, file, place, clip(lines[number])),)
    return ()


def _where_it_was(evidence: RankEvidence) -> tuple[Evidence, ...]:
    """Return the last line, of stdout where stderr has nothing but what torch notes by the way."""
    said = (evidence.exit or {}).get("said")
    told = [line for line in lines_of(evidence.tail) if line.strip()]
    if said and all(_BY_THE_WAY.match(strip_tag(line)) for line in told):
        place = evidence.files.get("stdout"), said["line"]
        return (Evidence(evidence.node, evidence.rank, *place, clip(said["text"])),)
    return _last_lines(evidence)
