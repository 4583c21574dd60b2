"""Python tracebacks in text.

In: the text of a rank, with or without `[rank3]:` before each line. Out: exceptions with frames and message, in order.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Sequence

from remote_agent.diagnose.shapes import lines_of

# What stands before the text of a line: the rank, the process, the logger's time and place; one behind the other.
_TAG = re.compile(
    r"^(?:\x1b\[[\d;]*m)*(?:\[(?:rank|default)?\d+\]: ?|\[[\w.-]+:\d+\]|\(\w+ (?:\w+=?\d+ )?pid=\d+[^)]*\) ?"
    r"|\[\d{4}-\d\d-\d\dT[\d:.,]+Z?\] ?|(?:ERROR|WARNING|INFO|CRITICAL) \d\d-\d\d [\d:]+ \[[\w.]+:\d+\] ?)+"
)
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+)(?:,? in (?P<function>.+?))?\s*$')
# A frame outside of any traceback: the beginning is not in the text, or it is a SyntaxError, which has none.
_HEADLESS = re.compile(r'^  File "[^"]+", line \d+(?:, in |$)')
_EXCEPTION = re.compile(r"^(?P<type>(?:[\w$<>]+\.)*[A-Za-z_]\w*)(?:: ?(?P<message>.*)|\s*)$")
_FAULT_HEAD = re.compile(r"^(?:Current thread|Thread) .*\(most recent call first\):")
_FATAL = re.compile(r"^Fatal Python error: (?P<message>.+)$")
_NAMED_AS_ERROR = re.compile(r"(?:Error|Exception|Interrupt|Failure|Timeout|Expired)$")
_HEAD = "Traceback (most recent call last):"
# As the library rich draws it.
_BOX = re.compile(r"^[╭┌].*Traceback \(most recent call last\)")
_BOX_FRAME = re.compile(r"^[│|] (?P<file>\S+\.py):(?P<line>\d+) in (?P<function>[^\s│|]+)")
_BOX_END = re.compile("^[╰└]")
# What stands before the traceback of an exception that ended a part of a process, which goes on without it.
_PARTS = (
    (re.compile(r"^Exception (?:ignored )?in thread "), "a thread"),
    (re.compile(r"(?:Task|Future) exception was never retrieved$"), "an asyncio task"),
    (re.compile(r"\bException in callback "), "an asyncio callback"),
    (re.compile(r"^Process \S+:$"), "a child process"),
)
# asyncio names the task below its sentence.
_SUBJECT = re.compile(r"^(?:future|task|handle): <")
# In the place of the exception, where the text ends before it.
CUT = "a traceback, of which the end is missing"
_LINKS = ("During handling of the above exception", "The above exception was the direct cause")
# Where a message of several lines is over.
_OTHER_TEXT = re.compile(
    r"^\s*$|^\[[EWIF]\d{0,4} |^[EWIF]\d{4} |^\[rank\d+\]|^Fatal Python error|^\d{4}-\d\d-\d\d|^(?:Original )?Traceback"
    r"|^Exception (?:ignored )?in |^(?:ERROR:asyncio:)?(?:Task|Future) exception was|^ERROR:|^Process \S+:$"
    # Launchers, of a rank that has ended.
    r"|^(?:srun|slurmstepd|mpirun|prterun): |\bfailed \(exitcode: |^\s*(?:time|host|rank|exitcode|error_file)\s+: "
)
_MESSAGE_LINES = 8
_SPAWN = re.compile("torch/multiprocessing/spawn.py$")
# Frames of the libraries, of Python and of our own bootstrap: not where the user would look first.
_LIBRARY = re.compile(
    r"(?:^|/)(?:site-packages|dist-packages|lib(?:64)?/python\d[\d.]*)/|^<|\.pyz/|(?:^|/)remote_agent/|^torch/|\.so\b"
)


@dataclasses.dataclass(frozen=True)
class Frame:
    """One frame of a stack."""

    file: str
    line: int
    function: str

    def place(self) -> str:
        """Return train.py:88 forward."""
        function = "" if self.function in ("", "<module>") else f" {self.function}"
        return f"{os.path.basename(self.file)}:{self.line}{function}"


@dataclasses.dataclass(frozen=True)
class Trace:
    """One exception with its stack, outermost frame first; first_line and last_line count from 0 in the text."""

    type: str
    message: str
    frames: tuple[Frame, ...]
    first_line: int
    last_line: int
    text: str
    fault: bool = False
    """True for a dump by faulthandler: a crash, not an exception."""
    link: str = ""
    """Python's sentence that ties it to the exception before it; empty where it stands alone."""
    part: str = ""
    """What it ended, where that was not the process: a thread, an asyncio task, a child process."""

    @property
    def headline(self) -> str:
        """Return type and the message's first line."""
        first = self.message.strip().partition("\n")[0].strip()
        return f"{self.type}: {first}" if first else self.type

    @property
    def quotes(self) -> bool:
        """Return True where torch's parent of processes only shows below what one of them raised."""
        return not self.message.strip() and any(_SPAWN.search(frame.file) for frame in self.frames[-1:])

    @property
    def user_frame(self) -> Frame | None:
        """Return the innermost frame in the user's own code, else the innermost of all."""
        own = [frame for frame in self.frames if not _LIBRARY.search(frame.file)]
        return (own or list(self.frames) or [None])[-1]  # type: ignore[list-item]


def join_traces(traces: Sequence[Trace]) -> str:
    """Return tracebacks one below the other, chained ones with Python's sentence between them."""
    parts: list[str] = []
    for trace in traces:
        if parts and trace.link:
            parts.append(trace.link)
        parts.append(trace.text)
    return "\n\n".join(parts)


def strip_tag(line: str) -> str:
    """Return a line without the rank's tag before it."""
    tag = _TAG.match(line)
    return line if tag is None else line[tag.end() :]


def find_traces(text: str) -> list[Trace]:
    """Return all tracebacks and crash dumps in the text, in order."""
    lines = [strip_tag(line) for line in lines_of(text)]
    traces: list[Trace] = []
    number = 0
    while number < len(lines):
        found: Trace | None = None
        if lines[number].rstrip().endswith(_HEAD):
            found = _read_traceback(lines, number)
        elif _BOX.match(lines[number]):
            found = _read_box(lines, number)
        elif _HEADLESS.match(lines[number]):
            found = _read_traceback(lines, number - 1)
        elif _FATAL.match(lines[number]):
            found = _read_fault(lines, number)
        if found is not None:
            if found.link and traces:
                found = dataclasses.replace(found, part=traces[-1].part)
            traces.append(found)
            number = found.last_line + 1
        else:
            number += 1
    return traces


def find_ended_part(text: str) -> Trace | None:
    """Return the last exception that ended a thread, an asyncio task or a child process of a process that went on."""
    return next((trace for trace in reversed(find_traces(text)) if trace.part), None)


def _read_traceback(lines: list[str], start: int) -> Trace | None:
    """Read the frames behind this line, and the exception behind them."""
    headless = start < 0 or not lines[start].rstrip().endswith(_HEAD)
    indent = 0 if headless else len(lines[start]) - len(lines[start].lstrip())
    frames: list[Frame] = []
    number = start + 1
    while number < len(lines):
        line = lines[number]
        frame = _FRAME.match(line)
        if frame is not None:
            frames.append(Frame(frame["file"], int(frame["line"]), frame["function"] or ""))
        elif line.strip() and len(line) - len(line.lstrip()) <= indent:
            break
        number += 1
    if number >= len(lines):
        body = "\n".join(lines[start:])
        return None if headless or not frames else Trace(CUT, "", tuple(frames), start, number - 1, body)
    exception = _EXCEPTION.match(lines[number].strip())
    if exception is None or (headless and not _NAMED_AS_ERROR.search(exception["type"])):
        return None
    last = number
    message = [exception["message"] or ""]
    while last + 1 < len(lines) and len(message) < _MESSAGE_LINES and not _OTHER_TEXT.match(lines[last + 1]):
        last += 1
        message.append(lines[last])
    body = "\n".join(lines[start + headless : last + 1])
    before = next((line for line in reversed(lines[: max(start, 0)]) if line.strip()), "").strip()
    link = before if before.startswith(_LINKS) else ""
    said = lines[start - 2].strip() if start > 1 and _SUBJECT.match(before) else before
    part = next((name for pattern, name in _PARTS if pattern.search(said)), "")
    return Trace(exception["type"], "\n".join(message), tuple(frames), start, number, body, link=link, part=part)


def _read_box(lines: list[str], start: int) -> Trace | None:
    """Read a traceback that is drawn in a frame, and the exception below it."""
    end = next((number for number in range(start + 1, len(lines)) if _BOX_END.match(lines[number])), len(lines))
    exception = _EXCEPTION.match(lines[end + 1].strip()) if end + 1 < len(lines) else None
    if exception is None:
        return None
    drawn = (_BOX_FRAME.match(line) for line in lines[start:end])
    frames = tuple(Frame(each["file"], int(each["line"]), each["function"]) for each in drawn if each is not None)
    text = "\n".join(lines[start : end + 2])
    return Trace(exception["type"], exception["message"] or "", frames, start, end + 1, text)


def _read_fault(lines: list[str], start: int) -> Trace:
    """Read `Fatal Python error: …` and the stack of the thread that it names first."""
    frames: list[Frame] = []
    last = start
    inside = False
    for number in range(start + 1, len(lines)):
        frame = _FRAME.match(lines[number])
        if _FAULT_HEAD.match(lines[number]):
            if inside:
                break
            inside = True
        elif frame is not None and inside:
            frames.append(Frame(frame["file"], int(frame["line"]), frame["function"] or ""))
        elif lines[number].strip():
            break
        last = number
    fatal = _FATAL.match(lines[start])
    message = fatal["message"] if fatal is not None else ""
    text = "\n".join(lines[start : last + 1])
    return Trace("Fatal Python error", message, tuple(reversed(frames)), start, last, text, fault=True)


def of_error(message: str, callstack: str | None) -> list[Trace]:
    """Return the exceptions of an error.json: those of its call stack, or its message alone."""
    traces = find_traces(callstack or "")
    if traces:
        return traces
    first, _, rest = message.partition("\n")
    exception = _EXCEPTION.match(first.strip())
    if exception is None or not (exception["message"] or exception["type"][:1].isupper()):
        return [Trace("", message, (), 0, 0, callstack or message)]
    text = (exception["message"] or "") + ("\n" + rest if rest else "")
    return [Trace(exception["type"], text, (), 0, 0, callstack or message)]
