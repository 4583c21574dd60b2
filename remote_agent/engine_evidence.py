"""What a rank tells of itself: error file and last lines when it is dead, stacks and collectives while it lives.

In: files of a dead rank, sockets of live ones. Out: plain values; whatever is missing or broken is None.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from pathlib import Path
from typing import Any

from remote_agent.diagnose import read_error_document

log = logging.getLogger(__name__)

TAIL_LINES = 40
TAIL_BYTES = 64 * 1024
# Above this nobody waits for the number of lines: about 50 ms of reading.
COUNT_BYTES = 64 * 1024 * 1024
ERROR_BYTES = 4 * 1024 * 1024
# Of a message or a call stack; it goes to every node's journal, and what matters is at its ends.
TEXT_CHARS = 32 * 1024
ANSWER_BYTES = 64 * 1024 * 1024
# What all ranks of a node leave goes into one frame, and twice where the node joins anew.
NODE_BYTES = 3 * 1024 * 1024
# Of a line, where a node has many ranks that leave much, such as progress bars.
LINE_CHARS = (8192, 2048, 512, 128, 32)


def read_error(path: Path) -> dict[str, Any] | None:
    """Return {message, callstack, timestamp_ns} of an error file; None when there is none that can be read."""
    try:
        with open(path, "rb") as file:
            text = file.read(ERROR_BYTES)
            modified_ns = os.fstat(file.fileno()).st_mtime_ns
    except OSError:
        return None
    error = read_error_document(text, modified_ns)
    if error is None:
        return None
    return {key: shortened(value) if isinstance(value, str) else value for key, value in error.items()}


def shortened(text: str, chars: int = TEXT_CHARS) -> str:
    """Return a text, of a long one its head and its tail, and how much is left out between them."""
    if len(text) <= chars:
        return text
    half = chars // 2
    return f"{text[:half]}\n… {len(text) - 2 * half} characters left out …\n{text[-half:]}"


def read_tail(path: Path) -> tuple[str, int | None]:
    """Return the last lines of a file as text, and how many lines it has; None lines when it is too long to count."""
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
        # The first one began before the window.
        lines = lines[1:] or lines
    if lines and not lines[-1]:
        lines.pop()
    return b"\n".join(lines[-TAIL_LINES:]).decode("utf-8", "replace"), count


def _count_lines(file: Any) -> int:
    count, last = 0, b"\n"
    while block := file.read(1 << 20):
        count += block.count(b"\n")
        last = block[-1:]
    return count + (last != b"\n")


def of_the_dead(directory: Path, ranks: int = 1) -> dict[str, Any]:
    """Return what a dead rank left in its directory, and no more than its share where its node has many ranks.

    error; tail and stderr_lines; said, the last line of stdout and its number; nccl, the warnings of its nccl.log.
    """
    try:
        return _fitting(_left_in(directory), NODE_BYTES // max(1, ranks))
    except Exception:
        # Its death must be told whatever a script has written.
        log.exception("what is left in %s cannot be read", directory)
        return {"error": None, "tail": "", "stderr_lines": None, "said": None, "nccl": ""}


def _fitting(found: dict[str, Any], size: int) -> dict[str, Any]:
    """Cut long lines, then long texts, until all takes no more than `size` on the wire."""
    cut = found
    for chars in LINE_CHARS:
        if len(json.dumps(cut)) <= size:
            break
        cut = {key: _cut(value, chars) for key, value in found.items()}
    return cut


def _cut(value: Any, chars: int) -> Any:
    if isinstance(value, dict):
        return {key: _cut(one, chars) for key, one in value.items()}
    if not isinstance(value, str):
        return value
    half = chars // 2
    lines = (line if len(line) <= chars else f"{line[:half]} … {line[-half:]}" for line in value.split("\n"))
    # A tail keeps all of its lines: they are counted.
    return shortened("\n".join(lines), TAIL_LINES * (chars + 4))


def _left_in(directory: Path) -> dict[str, Any]:
    tail, lines = read_tail(directory / "stderr.log")
    nccl, _ = read_tail(directory / "nccl.log")
    warnings = [line for line in nccl.split("\n") if "WARN" in line]
    error = read_error(directory / "error.json")
    out, out_lines = read_tail(directory / "stdout.log")
    last = shortened(out.rpartition("\n")[2])
    said = {"text": last, "line": out_lines} if last.strip() else None
    return {"error": error, "tail": tail, "stderr_lines": lines, "said": said, "nccl": "\n".join(warnings)}


async def ask(socket: str, handler: str) -> bytes:
    """Return what a rank's worker server answers; raises OSError or ValueError. It has no deadline of its own."""
    reader, writer = await asyncio.open_unix_connection(socket)
    try:
        request = f"POST /handler/{handler} HTTP/1.0\r\nHost: rank\r\nContent-Length: 0\r\n\r\n"
        writer.write(request.encode())
        await writer.drain()
        answer = b""
        while len(answer) < ANSWER_BYTES and (block := await reader.read(1 << 20)):
            answer += block
    finally:
        writer.close()
    head, separator, body = answer.partition(b"\r\n\r\n")
    status = head.split(b" ", 2)[1:2]
    if not separator or status != [b"200"]:
        raise ValueError(f"{handler}: {head[:200].decode('utf-8', 'replace')!r}")
    return body


def tidy_stacks(text: bytes) -> str:
    """Return a traceback dump without the threads that run no Python: the server's own."""
    blocks = text.decode("utf-8", "replace").rstrip("\n").split("\n\n")
    kept = [block for block in blocks if "<no Python frame>" not in block]
    return "\n\n".join(kept or blocks) + "\n"
