"""The job's status for Prometheus, on this machine alone.

In: the status document. Out: `http://127.0.0.1:PORT/metrics` in the text format 0.0.4.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from remote_agent.base.tasks import Tasks
from remote_agent.wire.documents import is_old
from remote_agent.wire.events import Condition, EventType, NodeState, RankState, phases_of

if TYPE_CHECKING:
    from remote_agent.wire.documents import NodeStatus, Status

ADDRESS = "127.0.0.1"
REQUEST_S = 5.0
LONGEST_HEAD = 8192
JOB_STATES = ("starting", "running", "restarting", "degraded", "succeeded", "failed", "stopped")
Labels = Mapping[str, object]
Sample = tuple[Labels, object]
Family = tuple[str, str, str, "Iterable[Sample]"]
# Name, text, key in the document, by how much to multiply: Prometheus wants base units.
NODE_VITALS = (
    ("node_cpu_ratio", "CPU use of a node, 0 to 1.", "cpu", 0.01),
    ("node_memory_used_bytes", "Memory in use, of the node or of the job's cgroup.", "mem_used", 1),
    ("node_memory_bytes", "Memory of the node, or the limit of the job's cgroup.", "mem_total", 1),
    ("node_disk_free_bytes", "Free space where the job's files are.", "disk_free", 1),
    ("node_shm_free_bytes", "Free space of /dev/shm.", "shm_free", 1),
    ("node_receive_bytes_per_second", "Bytes per second received on the job's network interface.", "net_in", 1),
    ("node_transmit_bytes_per_second", "Bytes per second sent on the job's network interface.", "net_out", 1),
)
GPU_VITALS = (
    ("gpu_use_ratio", "Use of a GPU, 0 to 1.", "use", 0.01),
    ("gpu_memory_used_bytes", "Memory in use on a GPU.", "mem_used", 1),
    ("gpu_memory_bytes", "Memory of a GPU.", "mem_total", 1),
    ("gpu_temperature_celsius", "Temperature of a GPU.", "temp", 1),
    ("gpu_power_watts", "Power draw of a GPU.", "power", 1),
    ("gpu_sm_clock_hertz", "Clock of a GPU's processors.", "clock", 1_000_000),
    ("gpu_ecc_errors", "Uncorrected ECC errors of a GPU since its driver started.", "ecc", 1),
    ("gpu_xid", "Newest Xid of a GPU since the job started on the node.", "xid", 1),
)
RANK_VITALS = (
    ("rank_cpu_ratio", "CPU use of a rank and its children, in cores.", "cpu", 0.01),
    ("rank_resident_bytes", "Memory of a rank's process.", "rss", 1),
    ("rank_loss", "Last loss printed by a rank.", "loss", 1),
    ("rank_throughput", "Last throughput printed by a rank, in its unit.", "rate", 1),
    ("rank_steps_per_second", "Recent steps per second of a rank.", "steps_s", 1),
    ("rank_lag_steps", "Steps by which a rank is behind the median.", "lag", 1),
)
_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})


def render(status: Status) -> str:
    """Return the metrics of a status document; what is not known is left out."""
    nodes = status["nodes"]
    ranks = [(rank, {"rank": rank["rank"], "node": node["name"]}) for node in nodes for rank in node["ranks"]]
    families: tuple[Family, ...] = (
        ("job_state", "gauge", "1 for the current state of the job.", _states(JOB_STATES, [status["state"]])),
        ("generation", "gauge", "The newest generation, -1 before the first.", [({}, status["generation"])]),
        ("restarts_total", "counter", "Restarts charged to max_restarts.", [({}, status["restarts"])]),
        ("nodes", "gauge", "Nodes by state.", _states(NodeState, [node["state"] for node in nodes])),
        ("ranks", "gauge", "Ranks by state.", _states(RankState, [rank["state"] for rank, _ in ranks])),
        ("rank_step", "gauge", "Last step printed by a rank.", [(at, rank["step"]) for rank, at in ranks]),
        (
            "rank_last_output_seconds",
            "gauge",
            "Seconds since a rank's last output.",
            [(at, rank["last_output_age_s"]) for rank, at in ranks],
        ),
        (
            "phase_seconds",
            "gauge",
            "Time of each phase of the newest generation's start, as far as its ranks show it.",
            [({"phase": name}, round(ms / 1000, 4)) for name, ms in phases_of(status["phases"]).items()],
        ),
        ("hang", "gauge", "1 while the group hangs.", [({}, int(status["condition"] == Condition.HUNG))]),
        (
            "slow",
            "gauge",
            "The share of the time that the others wait for a rank or node, or that something limits all; 0: neither.",
            [({}, max((one["share"] for one in status.get("slow", ())), default=0))],
        ),
        *_vitals(nodes),
    )
    lines: list[str] = []
    for name, kind, meaning, samples in families:
        lines += [f"# HELP supervisor_{name} {meaning}", f"# TYPE supervisor_{name} {kind}"]
        lines += [
            f"supervisor_{name}{_labels({'job': status['job'], **labels})} {value}"
            for labels, value in samples
            if value is not None
        ]
    return "\n".join(lines) + "\n"


def _vitals(nodes: Iterable[NodeStatus]) -> Iterable[Family]:
    """Return what nodes, GPUs and ranks use, and how ranks get on."""
    hosts: list[tuple[Labels, Mapping[str, object]]] = []
    gpus: list[tuple[Labels, Mapping[str, object]]] = []
    ranks: list[tuple[Labels, Mapping[str, object]]] = []
    for node in nodes:
        vitals = node.get("vitals") or {}
        if not is_old(vitals):
            hosts.append(({"node": node["name"]}, vitals))
            gpus += [({"node": node["name"], "gpu": gpu.get("index")}, gpu) for gpu in vitals.get("gpus", ())]
        for rank in node["ranks"]:
            own = {} if is_old(vitals) else rank.get("vitals") or {}
            ranks.append(({"rank": rank["rank"], "node": node["name"]}, {**(rank.get("progress") or {}), **own}))
    for table, entries in ((NODE_VITALS, hosts), (GPU_VITALS, gpus), (RANK_VITALS, ranks)):
        for name, meaning, key, factor in table:
            yield name, "gauge", meaning, [_sample(labels, each, key, factor) for labels, each in entries]


def _sample(labels: Labels, values: Mapping[str, object], key: str, factor: float) -> Sample:
    if key == "rate":
        labels = {**labels, "unit": values.get("unit")}
    value = values.get(key)
    if isinstance(value, str):
        # JSON has no numbers for nan and inf, but Prometheus has.
        return labels, {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}.get(value)
    return labels, value if factor == 1 or not isinstance(value, (int, float)) else round(value * factor, 6)


def _states(known: Iterable[str], states: Iterable[str]) -> list[Sample]:
    counts = Counter(states)
    return [({"state": state}, counts[state]) for state in known]


def _labels(labels: Labels) -> str:
    quoted = (f'{name}="{str(value).translate(_ESCAPES)}"' for name, value in labels.items())
    return "{" + ",".join(quoted) + "}"


async def serve(port: int, status: Callable[[], Status], record: Callable[..., None]) -> None:
    """Answer until cancelled; a port that is not available is written to the journal, and the job continues."""
    requests = Tasks()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests.spawn(_answer(reader, writer, status), "metrics request")

    try:
        server = await asyncio.start_server(accept, ADDRESS, port, limit=LONGEST_HEAD)
    except OSError as error:
        # The error's own strerror is asyncio's, which repeats the address.
        reason = f"no metrics on port {port} of {ADDRESS}: {os.strerror(error.errno or 0)}"
        record(EventType.METRICS_FAILED, port=port, reason=reason)
        return
    try:
        await asyncio.get_running_loop().create_future()
    finally:
        server.close()
        await requests.close()


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, status: Callable[[], Status]) -> None:
    """Answer one request; the connection ends with it, or at the deadline."""
    broken = (OSError, EOFError, asyncio.LimitOverrunError, asyncio.TimeoutError)
    try:
        with contextlib.suppress(*broken):
            await asyncio.wait_for(_talk(reader, writer, status), REQUEST_S)
    finally:
        writer.transport.abort()


async def _talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, status: Callable[[], Status]) -> None:
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
