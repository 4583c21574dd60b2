"""What a dead rank left in its directory: the error file and the last lines.

In: files of a dead rank. Out: plain values; None for what is missing or broken.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from remote_agent.diagnose.tracebacks import read_error_document

if TYPE_CHECKING:
    from remote_agent.wire.documents import ErrorDocument, LastLine, RankExit

log = logging.getLogger(__name__)

TAIL_LINES = 40
TAIL_BYTES = 64 * 1024
# Lines of larger files are not counted: up to here it takes about 50 ms.
COUNT_BYTES = 64 * 1024 * 1024
ERROR_BYTES = 4 * 1024 * 1024
# A message or a call stack goes into every node's journal, so it is limited; its beginning and end matter most.
TEXT_CHARS = 32 * 1024
# The evidence of all ranks of a node goes into one frame, and twice if the node joins again, so it is limited too.
NODE_BYTES = 3 * 1024 * 1024
# The limit for a line is lower if many ranks of a node print long lines such as progress bars.
LINE_CHARS = (8192, 2048, 512, 128, 32)


def read_error(path: Path) -> ErrorDocument | None:
    """Return {message, callstack, timestamp_ns} of an error file, or None when it cannot be read."""
    try:
        with open(path, "rb") as file:
            text = file.read(ERROR_BYTES)
            modified_ns = os.fstat(file.fileno()).st_mtime_ns
    except OSError:
        return None
    error = read_error_document(text, modified_ns)
    if error is None:
        return None
    stack = error["callstack"]
    return {**error, "message": shortened(error["message"]), "callstack": None if stack is None else shortened(stack)}


def shortened(text: str, chars: int = TEXT_CHARS) -> str:
    """Return a text; of a long one its head, the number of characters left out, and its tail."""
    if len(text) <= chars:
        return text
    half = chars // 2
    return f"{text[:half]}\n… {len(text) - 2 * half} characters left out …\n{text[-half:]}"


def read_tail(path: Path) -> tuple[str, int | None]:
    """Return the last lines of a file, and its number of lines; None when it is too long to count them."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            start = max(0, size - TAIL_BYTES)
            file.seek(start)
            text = file.read(TAIL_BYTES)
            file.seek(0)
            count = _count_lines(file) if size <= COUNT_BYTES else None
    except OSError:
        return "", None
    lines = text.split(b"\n")
    if start > 0:
        # The first line is incomplete.
        lines = lines[1:] or lines
    if lines and not lines[-1]:
        lines.pop()
    return b"\n".join(lines[-TAIL_LINES:]).decode("utf-8", "replace"), count


def _count_lines(file: BinaryIO) -> int:
    count, last = 0, b"\n"
    while block := file.read(1 << 20):
        count += block.count(b"\n")
        last = block[-1:]
    return count + (last != b"\n")


def read_evidence(directory: Path, ranks: int = 1) -> RankExit:
    """Return what a dead rank left in its directory, limited to its share of `ranks` on this node.

    error; tail and stderr_lines; said: the last line of stdout and its number; nccl: the warnings of its nccl.log.
    """
    try:
        return _fitting(_read(directory), NODE_BYTES // max(1, ranks))
    except Exception:
        # The death must be reported whatever the script has written.
        log.exception("cannot read what is left in %s", directory)
        return {"error": None, "tail": "", "stderr_lines": None, "said": None, "nccl": ""}


def _fitting(document: RankExit, size: int) -> RankExit:
    """Cut long lines, then long texts, until the document takes at most `size` bytes on the wire."""
    cut: RankExit = document
    for chars in LINE_CHARS:
        if len(json.dumps(cut)) <= size:
            break
        shorter: Any = {key: _cut(value, chars) for key, value in document.items()}
        cut = shorter
    return cut


def _cut(value: object, chars: int) -> Any:
    if isinstance(value, dict):
        return {key: _cut(one, chars) for key, one in value.items()}
    if not isinstance(value, str):
        return value
    half = chars // 2
    lines = (line if len(line) <= chars else f"{line[:half]} … {line[-half:]}" for line in value.split("\n"))
    # A tail keeps all of its lines, because they are counted.
    return shortened("\n".join(lines), TAIL_LINES * (chars + 4))


def _read(directory: Path) -> RankExit:
    tail, lines = read_tail(directory / "stderr.log")
    nccl, _ = read_tail(directory / "nccl.log")
    warnings = [line for line in nccl.split("\n") if "WARN" in line]
    error = read_error(directory / "error.json")
    out, out_lines = read_tail(directory / "stdout.log")
    last = shortened(out.rpartition("\n")[2])
    last_output: LastLine | None = {"text": last, "line": out_lines} if last.strip() else None
    return {"error": error, "tail": tail, "stderr_lines": lines, "said": last_output, "nccl": "\n".join(warnings)}
