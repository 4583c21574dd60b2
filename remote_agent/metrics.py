"""The job's status for Prometheus, on this machine alone.

In: the status document. Out: `http://127.0.0.1:PORT/metrics` in the text format 0.0.4.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from remote_agent.tasks import Tasks

ADDRESS = "127.0.0.1"
REQUEST_S = 5.0
LONGEST_HEAD = 8192
JOB_STATES = ("starting", "running", "restarting", "degraded", "succeeded", "failed", "stopped")
NODE_STATES = ("connecting", "ready", "running", "draining", "removed", "lost", "failed", "spare")
RANK_STATES = ("starting", "running", "silent", "succeeded", "failed", "killed")
Document = dict[str, Any]
Sample = tuple["dict[str, Any]", Any]


def render(status: Document) -> str:
    """Return the metrics of a status document; what is not known is left out."""
    nodes = status["nodes"]
    ranks = [(rank, {"rank": rank["rank"], "node": node["name"]}) for node in nodes for rank in node["ranks"]]
    incident = status["incident"] or {}
    hangs = (
        status["state"] == "running"
        and bool(incident.get("ongoing"))
        and incident.get("generation") == status["generation"]
    )
    families: tuple[tuple[str, str, str, Iterable[Sample]], ...] = (
        ("job_state", "gauge", "1 for the state that the job is in.", _states(JOB_STATES, [status["state"]])),
        ("generation", "gauge", "The newest generation, -1 before the first.", [({}, status["generation"])]),
        ("restarts_total", "counter", "Restarts charged to max_restarts.", [({}, status["restarts"])]),
        ("nodes", "gauge", "Nodes by state.", _states(NODE_STATES, [node["state"] for node in nodes])),
        ("ranks", "gauge", "Ranks by state.", _states(RANK_STATES, [rank["state"] for rank, _ in ranks])),
        ("rank_step", "gauge", "The last step that a rank has printed.", [(at, rank["step"]) for rank, at in ranks]),
        (
            "rank_last_output_seconds",
            "gauge",
            "Seconds since a rank's last output.",
            [(at, rank["last_output_age_s"]) for rank, at in ranks],
        ),
        ("hang", "gauge", "1 while the group hangs.", [({}, int(hangs))]),
    )
    lines: list[str] = []
    for name, kind, told, samples in families:
        lines += [f"# HELP supervisor_{name} {told}", f"# TYPE supervisor_{name} {kind}"]
        lines += [
            f"supervisor_{name}{_labels({'job': status['job'], **labels})} {value}"
            for labels, value in samples
            if value is not None
        ]
    return "\n".join(lines) + "\n"


def _states(known: Iterable[str], found: Iterable[str]) -> list[Sample]:
    counts = Counter(found)
    return [({"state": state}, counts[state]) for state in known]


def _labels(labels: dict[str, Any]) -> str:
    quoted = (f'{name}="{_escaped(str(value))}"' for name, value in labels.items())
    return "{" + ",".join(quoted) + "}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


async def serve(port: int, status: Callable[[], Document], record: Callable[..., None]) -> None:
    """Answer until cancelled; a port that cannot be had is written to the journal, and the job goes on."""
    requests = Tasks()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests.spawn(_answer(reader, writer, status), "metrics request")

    try:
        server = await asyncio.start_server(accept, ADDRESS, port, limit=LONGEST_HEAD)
    except OSError as error:
        # strerror is asyncio's own, with the address once more.
        told = f"no metrics on port {port} of {ADDRESS}: {os.strerror(error.errno or 0)}"
        record("metrics_failed", port=port, reason=told)
        return
    try:
        await asyncio.get_running_loop().create_future()
    finally:
        server.close()
        await requests.close()


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, status: Callable[[], Document]) -> None:
    """Answer one request; the connection ends with it, or at the deadline."""
    broken = (OSError, EOFError, asyncio.LimitOverrunError, asyncio.TimeoutError)
    try:
        with contextlib.suppress(*broken):
            await asyncio.wait_for(_talk(reader, writer, status), REQUEST_S)
    finally:
        writer.transport.abort()


async def _talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, status: Callable[[], Document]) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    method, _, rest = head.partition(b"\r\n")[0].partition(b" ")
    path = rest.partition(b" ")[0].partition(b"?")[0]
    if path != b"/metrics":
        outcome, kind, text = "404 Not Found", "text/plain", "only /metrics is here\n"
    elif method != b"GET":
        outcome, kind, text = "405 Method Not Allowed", "text/plain", "only GET\n"
    else:
        outcome, kind, text = "200 OK", "text/plain; version=0.0.4; charset=utf-8", render(status())
    body = text.encode()
    writer.write(f"HTTP/1.1 {outcome}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n".encode())
    writer.write(b"Connection: close\r\n\r\n" + body)
    writer.close()
    await writer.wait_closed()
