"""Python tracebacks in text and in torch's error file.

In: the text of a rank, with or without `[rank3]:` before each line; the file's bytes. Out: exceptions with frames and
message, in order; message, call stack and time of the error file, in whatever form torch wrote it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from remote_agent.text.names import read_number
from remote_agent.text.shapes import KEPT_TEXTS, lines_of
from remote_agent.wire.gate import Misfit, parse, record

if TYPE_CHECKING:
    from remote_agent.wire.documents import ErrorDocument

# Prefixes of a line: the rank, the process, the logger's time and place, in any combination.
_TAG = re.compile(
    r"^(?:\x1b\[[\d;]*m)*(?:\[(?:rank|default)?\d+\]: ?|\[[\w.-]+:\d+\]|\(\w+[ \[](?:\w+=?\d+\]? )?pid=\d+[^)]*\) ?"
    r"|\[\d{4}-\d\d-\d\dT[\d:.,]+Z?\] ?|(?:ERROR|WARNING|INFO|CRITICAL) \d\d-\d\d [\d:]+ \[[\w.]+:\d+\] ?)+"
)
_FRAME = re.compile(r'^[\s>]*File "(?P<file>[^"]+)", line (?P<line>\d+)(?:,? in (?P<function>.+?))?\s*$')
# A frame outside of a traceback: the beginning is not in the text, or it is a SyntaxError, which has none.
_HEADLESS = re.compile(r'^  File "[^"]+", line \d+(?:, in |$)')
_EXCEPTION = re.compile(r"^(?P<type>(?:[\w$<>]+\.)*[A-Za-z_]\w*)(?:: ?(?P<message>.*)|\s*)$")
_FAULT_HEAD = re.compile(r"^(?:Current thread|Thread) .*\(most recent call first\):")
_FATAL = re.compile(r"^(?P<type>Fatal Python error|Timeout)(?:: | (?=\(\d+:\d\d:\d\d))(?P<message>.+)$")
_NAMED_AS_ERROR = re.compile(r"(?:Error|Exception|Interrupt|Failure|Failed|Timeout|Expired)$")
HEAD = "Traceback (most recent call last):"
# A traceback that the library rich prints.
_BOX = re.compile(r"^\s*[╭┌].*Traceback \(most recent call last\)")
_BOX_FRAME = re.compile(r"^\s*[│|] (?P<file>\S+\.py):(?P<line>\d+)(?: in (?P<function>[^\s│|]+))?\s")
# The rest of such a line, where the path is long.
_BOX_FUNCTION = re.compile(r"^\s*[│|] in (?P<function>[^\s│|]+)")
_BOX_END = re.compile(r"^\s*[╰└]")
# This precedes the traceback of an exception that ended a thread or a task while the process kept running.
_BACKGROUND = (
    (re.compile(r"^Exception (?:ignored )?in thread "), "a thread"),
    (re.compile(r"(?:Task|Future) exception was never retrieved$"), "an asyncio task"),
    (re.compile(r"\bException in callback "), "an asyncio callback"),
    (re.compile(r"^Process \S+:$"), "a child process"),
)
# This precedes the traceback of an exception that Python or its logging only reports; the process continues.
_UNRAISABLE = re.compile(r"^(?:Exception ignored |Error in (?:sys|atexit)\.|--- Logging error ---$)")
# asyncio prints the task below its message.
SUBJECT = re.compile(r"^(?:future|task|handle): <")
# This is the exception type where the text ends before the exception.
TRUNCATED = "truncated traceback"
# In a message of several lines, these announce the next line, count errors or name things.
_LABEL = re.compile(r"^[\w ]{0,40}\b(?:error|reason|cause|details?|because|message)\b[\w ]{0,20}:$", re.IGNORECASE)
# This marks a place in the line of code above it; the line below says what is wrong there.
_CARETS = re.compile(r"^\s*~*\^[~^]*\s*$")
_PLACE_NAMED = re.compile(r"(?<![\w/])/[\w.-]+/[\w.-]|['\"`][^'\"`]+['\"`]")
_COUNT = re.compile(r"\b\d+ (?:[\w-]+ )?(?:errors?|exceptions?|problems?|failures?)\b")
_NAMES = re.compile(r"[\d'\"`/=<]|\w[._]\w|\b[a-z]+[A-Z]")
# The margin of an exception group, and the lines around its exceptions.
_GROUP = re.compile(r"^\s*\+ (?=Exception Group Traceback)")
_MARGIN = re.compile(r"^\s*(?:\+-[-+]*(?: \d+ |\.{3})?-*$|\+ (?=Exception Group Traceback)|\| ?)")
LINKS = ("During handling of the above exception", "The above exception was the direct cause")
# Ends a message of several lines.
_OTHER_TEXT = re.compile(
    r"^\s*$|^(?:During handling|The above exception) |^\[[EWIF]\d{0,4} |^\[\d{4}-\d\d-\d\d|^[EWIF]\d{4} |^\[rank\d+\]"
    r"|^Fatal Python error|^\d{4}-\d\d-\d\d|^(?:Original )?Traceback"
    r"|^Exception (?:ignored|in) |^Error in |^--- Logging error|^(?:ERROR:asyncio:)?(?:Task|Future) exception was"
    r"|^[A-Z]{4,8}:|^\(\w+ [^()]{1,60}\) |^Process \S+(?::$| exit)"
    # Launchers and shells print this for a process that has ended.
    r"|^\S+: line \d+: +\d+ [A-Z]|^(?:srun|slurmstepd|mpirun|prterun): |\bfailed \(exitcode: "
    r"|^\s*(?:time|host|rank|exitcode|error_file)\s+: |^\s*(?:Process name|Exit code): |^Child process |^[-=]{10}"
    r"|^(?:Killed|Terminated|Aborted|Segmentation fault)(?: \(core dumped\))?$"
)
_OF_SLURM = re.compile(r"^(?:srun|slurmstepd): ")
_MESSAGE_LINES = 8
_CHILD = re.compile(r"(?:^|/)multiprocessing/spawn\.py$")
_SPAWN = re.compile("torch/multiprocessing/spawn.py$")
# Frames of libraries, of Python and of our own bootstrap: not where the user looks first.
_LIBRARY = re.compile(
    r"(?:^|/)(?:site-packages|dist-packages|lib(?:64)?/python\d[\d.]*)/|^<|\.pyz/|(?:^|/)remote_agent/|^torch/|\.so\b"
    # Frames of compiled code carry the path that it was built from.
    r"|^(?!/).*\.(?:pyx|pxi)$"
)


@dataclasses.dataclass(frozen=True)
class StackFrame:
    """One frame of a stack."""

    file: str
    line: int
    function: str

    def place(self) -> str:
        """Return train.py:88 forward."""
        # Python names what has no name, such as a list comprehension.
        function = "" if self.function.startswith("<") or not self.function else f" {self.function}"
        return f"{os.path.basename(self.file)}:{self.line}{function}"


# Each is one place in a text, however alike: comparing the fields of thousands would take seconds.
@dataclasses.dataclass(frozen=True, eq=False)
class Trace:
    """One exception with its stack, outermost frame first; first_line and last_line count from 0 in the text."""

    type: str
    message: str
    frames: tuple[StackFrame, ...]
    first_line: int
    last_line: int
    text: str
    fault: bool = False
    """True for a dump by faulthandler: a crash, not an exception."""
    link: str = ""
    """Python's sentence that links it to the exception before it; empty if there is none."""
    background: str = ""
    """What it ended instead of the process: a thread, an asyncio task, a child process; empty for the process."""
    unraisable: bool = False
    """True where Python prints that it only reports the exception: in a destructor, an exit handler, a log record."""

    group: int = 0
    """Number, from 1, of the line that begins the exception group in which it is; 0: none."""

    @property
    def line(self) -> str:
        """Return type and the message's first line."""
        first = self.message.strip().partition("\n")[0].strip()
        return f"{self.type}: {first}" if first else self.type

    @functools.cached_property
    def headline(self) -> str:
        """Return type and the line of the message that names what is wrong, after the first one if that announces it.

        A label such as "Last error:" announces the line below it, and so does a marked place in quoted code; a heading
        ends with a colon, or counts errors; a first line without a name, number or path is followed by the next one.
        The second of two lines is a note of where it happened.
        """
        lines = [line.strip() for line in self.message.strip().splitlines()]
        marked = next((number for number, line in enumerate(lines[1:-1], 1) if _CARETS.match(line)), None)
        if marked is not None:
            return f"{self.type}: {lines[0]} {lines[marked + 1]}"
        for number in range(len(lines) - 2, 0, -1):
            if _LABEL.search(lines[number]) and lines[number + 1]:
                return f"{self.type}: {lines[number + 1]}"
        more = 0
        if len(lines) > 1:
            more = 2 if _COUNT.search(lines[0]) else int(lines[0].endswith(":") or not _NAMES.search(lines[0]))
            more = more or int(len(lines) == 2 and _PLACE_NAMED.search(lines[1]) is not None)
        return f"{self.type}: {' '.join(lines[: 1 + more])}" if lines else self.type

    @property
    def is_wrapper(self) -> bool:
        """Whether what it stands for is printed elsewhere.

        It is a group, or one that torch's spawn raises, or that of a process whose parent ended while it started it.
        """
        if self.group and self.text.startswith("Exception Group"):
            return True
        if self.lost_parent:
            return True
        return not self.message.strip() and any(_SPAWN.search(frame.file) for frame in self.frames[-1:])

    @property
    def lost_parent(self) -> bool:
        """Whether the traceback is of a process whose parent ended while starting it."""
        return any(_CHILD.search(frame.file) and frame.function == "_main" for frame in self.frames[-1:])

    @functools.cached_property
    def user_frame(self) -> StackFrame | None:
        """Return the innermost frame in the user's own code, else the innermost of all."""
        own = [frame for frame in self.frames if not _LIBRARY.search(frame.file)]
        return (own or list(self.frames) or [None])[-1]  # type: ignore[list-item]


def join_traces(traces: Sequence[Trace]) -> str:
    """Return the text of several tracebacks, chained ones with Python's sentence between them."""
    texts: list[str] = []
    for trace in traces:
        if texts and trace.link:
            texts.append(trace.link)
        texts.append(trace.text)
    return "\n\n".join(texts)


def strip_tag(line: str) -> str:
    """Return a line without the rank's tag."""
    tag = _TAG.match(line)
    return line if tag is None else line[tag.end() :]


@functools.lru_cache(KEPT_TEXTS)
def untagged_lines(text: str) -> tuple[str, ...]:
    """Return the lines without the rank's tags."""
    return tuple(map(strip_tag, lines_of(text)))


@functools.lru_cache(KEPT_TEXTS)
def find_traces(text: str) -> tuple[Trace, ...]:
    """Return all tracebacks and crash dumps in the text, in order."""
    lines = list(untagged_lines(text))
    groups = _strip_groups(lines)
    traces: list[Trace] = []
    number = 0
    # Frames up to here have no exception below them, whichever of them is read first.
    fruitless = 0
    while number < len(lines):
        trace: Trace | None = None
        if lines[number].rstrip().endswith(HEAD):
            trace, _ = _read_traceback(lines, number)
            last = traces[-1] if traces else None
            if trace is not None and last is not None and number <= last.first_line + last.text.count("\n"):
                # The message of the exception before quotes it.
                number = trace.last_line + 1
                continue
        elif _BOX.match(lines[number]):
            trace = _read_box(lines, number)
        elif number >= fruitless and _HEADLESS.match(lines[number]):
            trace, fruitless = _read_traceback(lines, number - 1)
        elif _FATAL.match(lines[number]):
            trace = _read_fault(lines, number)
        elif (bare := _EXCEPTION.match(lines[number])) and (
            (number in groups and not lines[number - 1].strip()) or (traces and lines[number - 1].startswith(LINKS))
        ):
            # An exception in a group that was never raised has no traceback; of a linked one it may be cut out.
            link = lines[number - 1] if lines[number - 1].startswith(LINKS) else ""
            trace = Trace(bare["type"], bare["message"] or "", (), number, number, lines[number], link=link)
        if trace is not None:
            trace = dataclasses.replace(trace, group=groups.get(number, 0))
            if trace.link and traces:
                before = traces[-1]
                trace = dataclasses.replace(trace, background=before.background, unraisable=before.unraisable)
            traces.append(trace)
            number = trace.last_line + 1
        else:
            number += 1
    return tuple(traces)


def last_exception(text: str) -> Trace | None:
    """Return the exception with which a text ends, without a traceback; None if it ends otherwise."""
    lines = untagged_lines(text)
    for number in range(len(lines) - 1, max(-1, len(lines) - _MESSAGE_LINES), -1):
        exception = _EXCEPTION.match(lines[number])
        if exception is not None and exception["message"] != "" and _NAMED_AS_ERROR.search(exception["type"]):
            below = itertools.takewhile(lambda line: not _OTHER_TEXT.match(line), lines[number + 1 :])
            message = "\n".join([exception["message"] or "", *below]).strip()
            return Trace(exception["type"], message, (), number, number, "\n".join(lines[number:]))
        # Launchers tell below it how they end the job.
        if lines[number][:1].strip() and not _OF_SLURM.match(lines[number]):
            return None
    return None


def _strip_groups(lines: list[str]) -> dict[int, int]:
    """Remove the margins of exception groups; return, by line, the number of the line that begins its group, from 1."""
    groups: dict[int, int] = {}
    begin = 0
    for number, line in enumerate(lines):
        margin = _MARGIN.match(line) if begin or "Exception Group" in line else None
        begin = (begin or number + 1) if margin is not None and (begin or _GROUP.match(line)) else 0
        if margin is not None and begin:
            groups[number] = begin
            lines[number] = line[margin.end() :]
    return groups


def last_background_failure(text: str) -> Trace | None:
    """Return the last exception that ended a thread, an asyncio task or a child process, not the process itself."""
    return next((trace for trace in reversed(find_traces(text)) if trace.background), None)


def _read_traceback(lines: list[str], start: int) -> tuple[Trace | None, int]:
    """Read the frames after this line, and the exception after them; returns also the number of the line after them."""
    headless = start < 0 or not lines[start].rstrip().endswith(HEAD)
    indent = 0 if headless else len(lines[start]) - len(lines[start].lstrip())
    frames: list[StackFrame] = []
    number = start + 1
    while number < len(lines):
        line = lines[number]
        frame = _FRAME.match(line)
        if frame is not None:
            file = frame["file"].replace("\\", "/")  # Windows uses backslashes
            frames.append(StackFrame(file, read_number(frame["line"]), frame["function"] or ""))
        elif line.strip() and len(line) - len(line.lstrip()) <= indent:
            break
        number += 1
    if number >= len(lines):
        body = "\n".join(lines[start:])
        cut = None if headless or not frames else Trace(TRUNCATED, "", tuple(frames), start, number - 1, body)
        return cut, number
    exception = _EXCEPTION.match(lines[number].strip())
    if exception is None or (headless and not _NAMED_AS_ERROR.search(exception["type"])):
        return None, number
    last = number
    message = [exception["message"] or ""]
    while last + 1 < len(lines) and len(message) < _MESSAGE_LINES and not _OTHER_TEXT.match(lines[last + 1]):
        last += 1
        message.append(lines[last])
    body = "\n".join(lines[start + headless : last + 1])
    before = _line_above(lines, start)
    link = before if before.startswith(LINKS) else ""
    intro = lines[start - 2].strip() if start > 1 and SUBJECT.match(before) else before
    background = next((name for pattern, name in _BACKGROUND if pattern.search(intro)), "")
    words = "\n".join(message)
    trace = Trace(exception["type"], words, tuple(frames), start, number, body, False, link, background)
    return dataclasses.replace(trace, unraisable=_UNRAISABLE.match(before) is not None), number


def _line_above(lines: Sequence[str], start: int) -> str:
    """Return the last line with text before this one."""
    return next((lines[above] for above in range(start - 1, -1, -1) if lines[above].strip()), "").strip()


def _read_box(lines: list[str], start: int) -> Trace | None:
    """Read a traceback in a box, and the exception below it."""
    below = range(start + 1, len(lines))
    end = next((number for number in below if _BOX_END.match(lines[number]) or _BOX.match(lines[number])), len(lines))
    exception = _EXCEPTION.match(lines[end + 1].strip()) if end + 1 < len(lines) else None
    if exception is None:
        return None
    frames: list[StackFrame] = []
    for line, next_line in zip(lines[start:end], lines[start + 1 :]):
        frame = _BOX_FRAME.match(line)
        named = frame if frame is None or frame["function"] else _BOX_FUNCTION.match(next_line)
        if frame is not None and named is not None:
            frames.append(StackFrame(frame["file"], read_number(frame["line"]), named["function"]))
    text = "\n".join(lines[start : end + 2])
    before = _line_above(lines, start)
    link = before if before.startswith(LINKS) else ""
    return Trace(exception["type"], exception["message"] or "", tuple(frames), start, end + 1, text, link=link)


def _read_fault(lines: list[str], start: int) -> Trace:
    """Read `Fatal Python error: …` or `Timeout (…)!` of faulthandler, and the stack of the first thread below it."""
    frames: list[StackFrame] = []
    last = start
    inside = False
    for number in range(start + 1, len(lines)):
        frame = _FRAME.match(lines[number])
        if _FAULT_HEAD.match(lines[number]):
            if inside:
                break
            inside = True
        elif frame is not None and inside:
            frames.append(StackFrame(frame["file"], read_number(frame["line"]), frame["function"] or ""))
        elif lines[number].strip() and not lines[number].startswith("Python runtime state"):
            break
        last = number
    fatal = _FATAL.match(lines[start])
    kind, message = (fatal["type"], fatal["message"]) if fatal is not None else ("", "")
    text = "\n".join(lines[start : last + 1])
    return Trace(kind, message, tuple(reversed(frames)), start, last, text, fault=True)


# torch writes whole seconds; the file's modification time is finer, and correct unless the file was copied.
_TIMESTAMP_SLACK_NS = 2_000_000_000
# The year 2255: a larger number is no time.
_TIMESTAMP_MAX_S = 9_000_000_000
# The message is a text, or torch's object with the text, the call stack and the time.
_ERROR_DOCUMENT = record({"message": Any})


def read_error_document(text: bytes, modified_ns: int = 0) -> ErrorDocument | None:
    """Return {message, callstack, timestamp_ns}, None if unreadable; `modified_ns`: the file's modification time."""
    try:
        document = _ERROR_DOCUMENT(parse(text))
    except Misfit:
        return None
    inner = document["message"]
    if not isinstance(inner, dict):
        return _error(inner, None, document.get("timestamp"), modified_ns)
    extra = inner.get("extraInfo")
    extra = extra if isinstance(extra, dict) else {}
    return _error(inner.get("message"), extra.get("py_callstack"), extra.get("timestamp"), modified_ns)


def _error(message: Any, callstack: Any, timestamp: Any, modified_ns: int) -> ErrorDocument:
    try:
        written_s = int(timestamp)
    except (TypeError, ValueError, OverflowError):
        written_s = -1
    written_ns = written_s * 1_000_000_000 if 0 <= written_s <= _TIMESTAMP_MAX_S else modified_ns
    is_close = abs(modified_ns - written_ns) <= _TIMESTAMP_SLACK_NS
    return {
        "message": str(message),
        "callstack": None if callstack is None else str(callstack),
        "timestamp_ns": modified_ns if is_close else written_ns,
    }


def traces_of_error(message: str, callstack: str | None) -> Sequence[Trace]:
    """Return the exceptions of an error file: those of its call stack, or its message alone."""
    traces = find_traces(callstack or "")
    if traces:
        return traces
    first, _, rest = message.partition("\n")
    exception = _EXCEPTION.match(first.strip())
    if exception is None or not (exception["message"] or exception["type"][:1].isupper()):
        return [Trace("", message, (), 0, 0, callstack or message)]
    text = (exception["message"] or "") + ("\n" + rest if rest else "")
    return [Trace(exception["type"], text, (), 0, 0, callstack or message)]
