"""What a process printed last, and whether it continued after a line.

In: lines of one rank. Out: whether a line was handled or survived, and which line says why the process ended.
"""

from __future__ import annotations

import errno
import functools
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Sequence

from remote_agent.diagnose.tracebacks import HEAD, SUBJECT, Trace, find_traces, untagged_lines
from remote_agent.text.levels import ERROR, WARN, level_of
from remote_agent.text.shapes import KEPT_TEXTS

# Training prints such lines at each step or epoch, and at its end.
_STEPS = re.compile(
    r"\b(?:step|iter|iteration|epoch)\b\W{0,3}\d|loss\b['\"]?\s*[:=]\s*-?\d|^\s*\d+%\||\b(?:tokens|samples|images)/s"
    r"|train_runtime|\b(?:training|job|run)\b.{0,20}\b(?:complete|completed|finished|done|succeeded)\b"
    r"|\b(?:finished|completed) training\b",
    re.IGNORECASE,
)
# Every match contains one of these words: looking for words is much faster.
_OF_STEPS = ("step", "iter", "epoch", "loss", "%|", "s/s", "training", "job", "run")
_HANDLED = re.compile(
    r"\bf(?:all|ell)(?:ing|s)? ?back\b|\bretry|\b(?:try|trying|tries) (?:again|another|the next)\b"
    r"|\bcontinu(?:ing|es)\b|\bignor(?:ed|ing)\b|\bskipp(?:ed|ing)\b|\binstead\b|\bdisabl(?:ed|ing)\b"
    r"|\breconnect(?:ed|ing)\b|\brecovered\b|\bnon-?fatal\b|\battempt \d+ ?(?:of|/)",
    re.IGNORECASE,
)
# The words of the C library for error numbers, as all programs print them.
_SYSTEM_WORDS = re.compile(
    ": (?:" + "|".join(re.escape(os.strerror(number)) for number in sorted(errno.errorcode)) + ")"
)
_NAMED = re.compile(r"\w(?:Error|Exception)\b")
_INFO = re.compile(r"\b(?:INFO|DEBUG|NOTICE|TRACE|info|debug)\b")
_FRONT = 120
# The most lines that a script prints between its failure and its end.
_LAST_LINES = 6
# This separates the lines of two files of a rank.
OTHER_FILE = "--"
# Such a line belongs to the record above it: frames, registers, further lines of a message.
_CONTINUED = re.compile(r"\s|$|frame #|#\d|[)\]}|+]|Exception raised from")
# torch's C++ code prints these while a process runs or ends.
_OF_TORCH = re.compile(r"(?:\[rank\d+\]:)?\[[EIW]\d{3,4} ")
_ENDING = re.compile(
    r"exit|abort|quit|shut|clean|stop|terminat|finish|fail|error|fatal|bye|giv(?:e|ing) up|cannot|can't|could ?n[o']t"
    r"|unable|panic",
    re.IGNORECASE,
)
# Native code prints these before it ends its process: the text of an exception, a failed check, a panic.
_WHAT = re.compile(r"^\s+what\(\):\s*(.*)")
_FATAL = re.compile(
    r"^F\d{4,8} |terminate called|[Cc]heck (?:failed|failure)|[Aa]ssert(?:ion)?\b.{0,200}\bfailed|\bpanic(?:ked)?\b"
    # The C++ runtime and glibc print the function or the kind of damage like this.
    r"|^(?:pure|deleted) virtual method called"
    r"|^\w+\(\): |^double free|^corrupted |^\*\*\* .*\*\*\*: terminated"
    r"|\bFATAL\b|\b[Ff]atal\b.{0,20}\berror\b|\bLLVM ERROR\b"
)
# A dump follows the reason.
_DUMP = re.compile(
    r"^(?:Fatal Python error: |Current thread|Thread 0x|goroutine \d+|stack backtrace:"
    r"|\*{3} (?:Aborted at|.*stack trace))"
)

# These are the upper and lower edge of a frame around a message, and its sides.
_EDGE, SIDES = re.compile(r"^[╭╰┌└╔╚][─═].*[─═╮╯┐┘╗╝]$"), "│┃║ "

# Kubernetes calls what ends a pod a warning: the kind of event, its reason, how long ago.
_EVENT = re.compile(r"^\s*Warning +[A-Z]\w+ +\d")
# Work that ranks do one by one, while others may wait for it: how much of it is done, or its beginning.
_PART = re.compile(
    r"(?<![\w./:-])(?P<done>\d+(?:\.\d+)?) ?(?:/|(?:out )?of) ?(?P<of>\d+(?:\.\d+)?)(?![\w./:-])"
    r"|(?<![\w.])(?P<percent>\d{1,2}(?:\.\d+)?) ?%"
)
_WORK = re.compile(
    r"\b(?:(?:down|up|re)?load|copy|tokeni[sz]|sav|writ|compil|extract|unpack|stag|pack|prepar|process|index|fetch"
    r"|merg|convert|shuffl|build|sync|filter|map|decompress|upload|preprocess|encod|flush)(?:p|t)?ing\b|\bcaching\b|\bMap\b",
    re.IGNORECASE,
)
_DONE = re.compile(r"\b(?:done|finished|completed?|saved|took|written|ready|loaded|100 ?%)\b", re.IGNORECASE)


def unfinished_work(lines: Sequence[str]) -> str:
    """Return the last line that is not of torch or NCCL, if it tells of work that is not done; else an empty text."""
    own = (line for line in reversed(lines) if line.strip() and not _OF_TORCH.match(line) and "CCL " not in line)
    last = next(own, "")
    if _DONE.search(last) or (is_progress(last) and not _WORK.search(last)):
        return ""
    parts = list(_PART.finditer(last))
    is_part = any(each["percent"] or float(each["done"]) < float(each["of"]) for each in parts)
    return last.strip() if is_part or (not parts and _WORK.search(last)) else ""


def begun_work(lines: Sequence[str]) -> Iterator[str]:
    """Yield the lines that say which work begins, without how much of it is done."""
    return (line.strip() for line in lines if _WORK.search(line) and not _PART.search(line))


def is_progress(line: str) -> bool:
    """Return whether training prints such a line at each step or at its end."""
    lowered = line.lower()
    return any(word in lowered for word in _OF_STEPS) and _STEPS.search(line) is not None


def is_handled(line: str) -> bool:
    """Return whether the line is a warning, or says that the process continues; NCCL calls its errors warnings."""
    if "CCL WARN" in line or _EVENT.match(line):
        return False
    return _HANDLED.search(line) is not None or _level(line) == WARN


def is_survived(lines: Sequence[str], number: int) -> bool:
    """Return whether the process continued after this line: steps or information follow, or any text after no error."""
    is_error = _says_error(lines[number]) or _FATAL.search(lines[number]) is not None
    for line in lines[number + 1 :]:
        if line == OTHER_FILE:
            return False
        if _CONTINUED.match(line) or _OF_TORCH.match(line) or "CCL " in line:
            continue
        if is_progress(line) or (_INFO.search(line[:_FRONT]) is not None and not _ENDING.search(line)):
            return True
        if not is_error and _level(line) != WARN and not _says_error(line):
            return True
    return False


def ends_soon_after(lines: Sequence[str], number: int) -> bool:
    """Return whether a process that has ended did so because of this line: only a few lines follow.

    A process that continues prints more lines, a step, or that it handled the failure.
    """
    after = [line for line in lines[number + 1 :] if line.strip() and not _CONTINUED.match(line)]
    return len(after) <= _LAST_LINES and not any(is_progress(line) or is_handled(line) for line in after)


def is_outlived(lines: Sequence[str], trace: Trace) -> bool:
    """Return whether the process continued after an exception; if that ended only a thread or a task, any text counts.

    That text may be more of the message if its first line announces it.
    """
    if not trace.background or trace.headline != trace.line:
        return is_survived(lines, trace.last_line)
    return any(line[:1].strip() for line in lines[trace.last_line + 1 :] if not _OF_TORCH.match(line))


def _level(line: str) -> int:
    return level_of(line.encode())


def find_error(lines: Sequence[str]) -> str:
    """Return the first line of level error, or with the system's words for one, after the last sign of progress.

    Empty if there is none.
    """
    number = _first_of_level_error(lines)
    return "" if number is None else lines[number].strip()


def last_error(lines: Sequence[str]) -> str:
    """Return the last line after all progress that names an error, also one that the process has survived.

    What NCCL could not load or open is none, because it goes on without.
    """
    after = itertools.takewhile(lambda line: not is_progress(line), reversed(lines))
    rest = (line for line in after if "CCL " not in line and not _INFO.search(line[:_FRONT]))
    named = (line for line in rest if _NAMED.search(line) or _SYSTEM_WORDS.search(line) or _level(line) == ERROR)
    return next(named, "").strip()


def _first_of_level_error(lines: Sequence[str]) -> int | None:
    begin = next((number for number in range(len(lines) - 1, -1, -1) if is_progress(lines[number])), -1)
    found = (
        number
        for number in range(begin + 1, len(lines))
        if _level(lines[number]) == ERROR or _SYSTEM_WORDS.search(lines[number])
    )
    return next((number for number in found if HEAD not in lines[number] and not is_handled(lines[number])), None)


def _says_error(line: str) -> bool:
    return _level(line) == ERROR or _ENDING.search(line) is not None or "CCL WARN" in line


def find_reason(lines: Sequence[str]) -> tuple[int, str] | None:
    """Return number and text of the line in which native code says why it ends the process; None: there is none."""
    end = next((number for number, line in enumerate(lines) if _DUMP.match(line)), len(lines))
    for number, line in enumerate(lines[:end]):
        what = _WHAT.match(line)
        is_last = number and lines[number - 1].startswith("terminate called")
        if what is not None and (is_last or not is_survived(lines[:end], number)):
            # A message may begin with an empty line.
            below = (each.strip() for each in lines[number + 1 : end] if each.strip())
            text = what[1].strip() or next(below, "")
            if text:
                return number, text
    for number, line in enumerate(lines[:end]):
        if _FATAL.search(line) and not is_handled(line) and not is_survived(lines[:end], number):
            # Rust prints the message below the place.
            more = lines[number + 1].strip() if line.rstrip().endswith(":") and number + 1 < end else ""
            return number, f"{line.strip()} {more}".strip()
    return None


def find_last(lines: Sequence[str]) -> tuple[int, str] | None:
    """Return number and text of the first error after the last sign of progress, or else of the last record.

    Only what is above a dump is read. None: the process printed nothing after its progress.
    """
    last, first_error = _last_words(lines)
    if first_error is not None:
        return first_error
    return None if last is None else (last[0], f"(last line of stderr) {last[1]}")


def find_first_error(lines: Sequence[str]) -> tuple[int, str] | None:
    """Return number and text of the first error after the last sign of progress, if the last line is not part of it.

    Text after an error of a logger, or an empty line, is advice or a summary; the line below an error is its detail.
    """
    logged = _first_of_level_error(lines)
    rest = [] if logged is None else [line.strip() for line in lines[logged + 1 :] if line.strip()]
    if logged is not None and rest and ends_soon_after(lines, logged):
        detail = rest[0] if len(rest) == 1 and _INFO.search(rest[0][:_FRONT]) is None else ""
        return logged, f"{lines[logged].strip()} {detail}".strip()
    last, error = _last_words(lines)
    if last is None or error is None or last == error:
        return None
    if last[0] - error[0] > 1:
        apart = _level(error[1]) == ERROR or any(not line.strip() for line in lines[error[0] : last[0]])
        return error if apart else None
    return (error[0], f"{error[1]} {last[1]}") if _level(error[1]) == ERROR else None


def _last_words(lines: Sequence[str]) -> tuple[tuple[int, str] | None, tuple[int, str] | None]:
    """Return the last record after the last sign of progress, and the first error there."""
    end = next((number for number, line in enumerate(lines) if _DUMP.match(line)), len(lines))
    last: tuple[int, str] | None = None
    first_error: tuple[int, str] | None = None
    for number in range(end - 1, -1, -1):
        line = lines[number]
        if not line.strip() or _CONTINUED.match(line) or _OF_TORCH.match(line):
            continue
        if is_progress(line) or is_handled(line) or _INFO.search(line[:_FRONT]) is not None:
            break
        last = last or (number, line.strip())
        first_error = (number, line.strip()) if _says_error(line) else first_error
    return last, first_error


@functools.lru_cache(KEPT_TEXTS)
def own_lines(text: str) -> tuple[str, ...]:
    """Return the lines without tags and frames around a message; those of exceptions that are only reported, empty."""
    lines = untagged_lines(text)
    traces = find_traces(text)
    reported = lines_in(
        lines, (one for one in traces if one.unraisable or (one.background and is_outlived(lines, one)))
    )
    return tuple("" if number in reported else _unframed(line) for number, line in enumerate(lines))


def lines_in(lines: Sequence[str], traces: Iterable[Trace]) -> set[int]:
    """Return the numbers of the lines of these exceptions, each with the lines above it that say what it ended."""
    numbers: set[int] = set()
    for each in traces:
        first = each.first_line - 1
        numbers.update(range(first - int(first > 0 and SUBJECT.match(lines[first]) is not None), each.last_line + 1))
    return numbers


def _unframed(line: str) -> str:
    """Return a line without the frame that a library such as rich puts around a message."""
    if _EDGE.match(line):
        return ""
    return line.strip(SIDES) if line[:1] in "│┃║" else line
