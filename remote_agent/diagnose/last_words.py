"""What a process printed last, and whether it continued after a line.

In: lines of one rank. Out: whether a line was handled or survived, and which line says why the process ended.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from remote_agent.text.levels import ERROR, WARN, level_of

# What training prints at each step or epoch, and at its end.
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
_INFO = re.compile(r"\b(?:INFO|DEBUG|NOTICE|TRACE|info|debug)\b")
_FRONT = 120
# Separates the lines of two files of a rank.
OTHER_FILE = "--"
# Belongs to the record above it: frames, registers, further lines of a message.
_CONTINUED = re.compile(r"\s|$|frame #|#\d|[)\]}|+]|Exception raised from")
# Printed by torch's C++ code while a process runs or ends.
_OF_TORCH = re.compile(r"(?:\[rank\d+\]:)?\[[EIW]\d{3,4} ")
_ENDING = re.compile(
    r"exit|abort|quit|shut|clean|stop|terminat|finish|fail|error|fatal|bye|giv(?:e|ing) up|cannot|can't|unable|panic",
    re.IGNORECASE,
)
# What native code prints before it ends its process: the text of an exception, a failed check, a panic.
_WHAT = re.compile(r"^\s+what\(\):\s+(.+)")
_FATAL = re.compile(
    r"^F\d{4,8} |terminate called|[Cc]heck (?:failed|failure)|[Aa]ssert(?:ion)?\b.{0,200}\bfailed|\bpanic(?:ked)?\b"
    # As glibc prints them: the function, a kind of damage.
    r"|^\w+\(\): |^double free|^corrupted |^\*\*\* .*\*\*\*: terminated"
    r"|\bFATAL\b|\b[Ff]atal\b.{0,20}\berror\b|\bLLVM ERROR\b"
)
# The dump that follows the reason.
_DUMP = re.compile(
    r"^(?:Fatal Python error: |Current thread|Thread 0x|goroutine \d+|stack backtrace:|\*{3} .*stack trace)"
)


def is_progress(line: str) -> bool:
    """Whether training prints such a line at each step or at its end."""
    lowered = line.lower()
    return any(word in lowered for word in _OF_STEPS) and _STEPS.search(line) is not None


def is_handled(line: str) -> bool:
    """Whether the line is a warning, or says that the process continues; NCCL calls its errors warnings."""
    if "CCL WARN" in line:
        return False
    return _HANDLED.search(line) is not None or _level(line) == WARN


def is_survived(lines: Sequence[str], number: int) -> bool:
    """Whether the process continued after this line: steps or information follow it, after no error any other text."""
    is_error = _says_error(lines[number])
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


def _level(line: str) -> int:
    return level_of(line.encode())


def _says_error(line: str) -> bool:
    return _level(line) == ERROR or _ENDING.search(line) is not None or "CCL WARN" in line


def find_reason(lines: Sequence[str]) -> tuple[int, str] | None:
    """Return number and text of the line in which native code says why it ends the process; None: there is none."""
    end = next((number for number, line in enumerate(lines) if _DUMP.match(line)), len(lines))
    for number, line in enumerate(lines[:end]):
        what = _WHAT.match(line)
        if what is not None and not is_survived(lines[:end], number):
            return number, what[1]
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
    if first_error is not None:
        return first_error
    return None if last is None else (last[0], f"(last line of stderr) {last[1]}")
