"""Errors and warnings of NCCL's RAS service (since 2.24): processes that do not answer, counts that differ.

In: the ranks' processes. Out: one line for each error or warning; none where the service does not answer.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path

from remote_agent.engine.inspect.children import in_time
from remote_agent.engine.inspect.sockets import listen_alone
from remote_agent.text.shapes import clip

ADDRESS = b"localhost:28028"
# The service asks all processes of the job: how long it waits for them, and how long we wait for it.
ANSWER_S, WAIT_S = 1, 3.0
MAX_LINES = 8
MAX_BYTES = 1 << 20
_HEADING = re.compile(r"^(?:Errors|Warnings)\n=+$", re.MULTILINE)


async def complaints(pids: Sequence[int]) -> list[str]:
    """Return the errors and warnings of the RAS service at which these processes listen."""
    try:
        address = await in_time(lambda: _address(pids))
        text = await asyncio.wait_for(_ask(*address), WAIT_S) if address is not None else ""
    except (OSError, asyncio.TimeoutError):
        return []
    _, *sections = _HEADING.split(text)
    blocks = (
        block.split("\n") for part in sections for block in re.split(r"\n{2,}", part.strip("\n")) if block.strip()
    )
    return [clip(f"{first}: {'; '.join(line.strip() for line in rest)}") for first, *rest in blocks][:MAX_LINES]


def _address(pids: Sequence[int]) -> tuple[str, int] | None:
    """Return host and port; None unless these processes, and no others, listen there."""
    environment = Path(f"/proc/{pids[0]}/environ").read_bytes().split(b"\0") if pids else []
    value = next((one.partition(b"=")[2] for one in environment if one.startswith(b"NCCL_RAS_ADDR=")), ADDRESS)
    host, _, port = value.decode(errors="replace").rpartition(":")
    return (host.strip("[]"), int(port)) if port.isdigit() and listen_alone(int(port), pids) else None


async def _ask(host: str, port: int) -> str:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(b"CLIENT PROTOCOL 2\nTIMEOUT %d\nVERBOSE STATUS\n" % ANSWER_S)
        text = b""
        while len(text) < MAX_BYTES and (more := await reader.read(MAX_BYTES)):
            text += more
        return text.decode(errors="replace")
    finally:
        writer.close()
