"""What this node and its ranks use: processors, memory, disk, network and GPUs.

In: /proc, cgroups, file systems, the process that reads the GPUs; the ranks' pids. Out: documents with their age; None
for unknown values.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from remote_agent.base.files import disk_space, read_text
from remote_agent.base.proc import cgroup_folders
from remote_agent.vitals.gpus.gpu import SELECTORS, Gpu, gpu_of
from remote_agent.vitals.gpus.reader import GpuLink
from remote_agent.vitals.netif import interface_of

if TYPE_CHECKING:
    from remote_agent.base.tasks import Tasks
    from remote_agent.wire.documents import GpuVitals, NodeVitals, RankVitals

log = logging.getLogger(__name__)

# The interval while an operator is attached; otherwise every third measurement is taken.
WATCHED_S = 3.0
ALONE_ROUNDS = 3
# Processes of one rank's tree that are read, so that the cost stays bounded.
MAX_PROCESSES = 200
_TICKS_S = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
# `gpu_of` needs these variables of a worker.
_VARIABLES = ("LOCAL_RANK", *SELECTORS)


class HostUsage:
    """Reads usage from the files below `root`; `folder` is on the file system that matters to the job."""

    def __init__(self, folder: Path, root: Path = Path("/")) -> None:
        self._root = root
        self._folder = folder
        self._counts: dict[str, tuple[float, int]] = {}
        """Time and value of each counter at its last reading, by name."""
        self._ticks: tuple[int, int] | None = None
        """Ticks of all processors at the last reading: idle, total."""
        self._workers: dict[int, tuple[str, dict[str, str]]] = {}
        """Start time and environment by pid."""

    def read(self, now: float, interface: str | None) -> NodeVitals:
        """Return what the node uses, with the traffic of one interface; rates need two calls, else they are None."""
        used, total = self.memory()
        disk, shm = disk_space(self._folder), disk_space(self._root / "dev/shm")
        received, sent = self._network(interface)
        return {
            "cpu": self._processor(),
            "mem_used": used,
            "mem_total": total,
            "disk_free": None if disk is None else disk["free"],
            "disk_total": None if disk is None else disk["total"],
            "shm_free": None if shm is None else shm["free"],
            "shm_total": None if shm is None else shm["total"],
            "net_in": self._rate("received", received, now, 0),
            "net_out": self._rate("sent", sent, now, 0),
        }

    def read_rank(self, pid: int, now: float, devices: list[Gpu]) -> RankVitals:
        """Return a worker's cpu with its children (100: one core), its own rss, and the index of its GPU."""
        fields = self._stat(pid)
        started, env = self._workers.get(pid) or self._add_worker(pid, fields)
        if not fields or fields[19] != started:
            # It has ended, or does not run the script yet; the pid may belong to another process by now.
            return {"cpu": None, "rss": None, "gpu": None}
        ticks = sum(sum(map(int, each[11:15])) for each in map(self._stat, self._tree(pid)) if each)
        cores = self._rate(f"{pid}", ticks, now, 4)
        return {
            "cpu": None if cores is None else round(100 * cores / _TICKS_S, 1),
            "rss": int(fields[21]) * _PAGE,
            "gpu": gpu_of(env, devices),
        }

    def _add_worker(self, pid: int, fields: list[str]) -> tuple[str, dict[str, str]]:
        pairs = (entry.partition("=") for entry in self._text(f"proc/{pid}/environ").split("\0"))
        env = {name: value for name, _, value in pairs if name in _VARIABLES}
        if not fields or not env.get("LOCAL_RANK", "").isdigit():
            return "", {}
        self._workers[pid] = fields[19], env
        return self._workers[pid]

    def forget(self, pids: set[int]) -> None:
        """Forget all workers but these."""
        for pid in self._workers.keys() - pids:
            del self._workers[pid]
            self._counts.pop(f"{pid}", None)

    def _rate(self, name: str, count: int | None, now: float, digits: int) -> float | None:
        before = self._counts.pop(name, None)
        if count is None:
            return None
        self._counts[name] = (now, count)
        if before is None or now <= before[0]:
            return None
        return round(max(0, count - before[1]) / (now - before[0]), digits or None)

    def _text(self, name: str) -> str:
        return read_text(self._root / name)

    def _processor(self) -> float | None:
        """Return the use of all processors of the host, in percent."""
        words = self._text("proc/stat").partition("\n")[0].split()[1:9]
        if len(words) < 5:
            return None
        times = [int(word) for word in words]
        total, idle = sum(times), times[3] + times[4]
        before, self._ticks = self._ticks, (idle, total)
        if before is None or total <= before[1]:
            return None
        return round(100 * (1 - max(0, idle - before[0]) / (total - before[1])), 1)

    def memory(self) -> tuple[int | None, int | None]:
        """Return used and total bytes of the host, or of the cgroup with the lowest limit."""
        lines = (line.split() for line in self._text("proc/meminfo").splitlines())
        info = {words[0]: int(words[1]) * 1024 for words in lines if len(words) > 1 and words[1].isdigit()}
        total, available = info.get("MemTotal:"), info.get("MemAvailable:")
        used = None if total is None or available is None else total - available
        for is_v2, folder in cgroup_folders("memory", self._root):
            limit = self._number(folder / ("memory.max" if is_v2 else "memory.limit_in_bytes"))
            if limit is not None and (total is None or limit < total):
                held = self._number(folder / ("memory.current" if is_v2 else "memory.usage_in_bytes"))
                cache = "inactive_file" if is_v2 else "total_inactive_file"
                facts = (line.split() for line in read_text(folder / "memory.stat").splitlines())
                # The kernel frees this before it kills a process.
                spare = next((int(words[1]) for words in facts if words[0] == cache), 0)
                total, used = limit, None if held is None else max(0, held - spare)
        return used, total

    def _number(self, path: Path) -> int | None:
        text = read_text(path).strip()
        return int(text) if text.isdigit() else None

    def _network(self, interface: str | None) -> tuple[int | None, int | None]:
        for line in self._text("proc/net/dev").splitlines():
            name, _, counts = line.partition(":")
            if name.strip() == interface:
                words = counts.split()
                return int(words[0]), int(words[8])
        return None, None

    def _stat(self, pid: int) -> list[str]:
        return self._text(f"proc/{pid}/stat").rpartition(")")[2].split()

    def _tree(self, pid: int) -> Iterator[int]:
        """Yield a process and its descendants, as far as main threads have started them."""
        todo = [pid]
        for _ in range(MAX_PROCESSES):
            if not todo:
                return
            each = todo.pop()
            yield each
            todo += map(int, self._text(f"proc/{each}/task/{each}/children").split())


class Vitals:
    """One agent's measurements: taken by its tasks, reported at any time."""

    def __init__(self, host: HostUsage, job: str, watched: Callable[[], bool]) -> None:
        self._host = host
        self._watched = watched
        self._gpus = GpuLink(job)
        self._interface: str | None = None
        """The network interface of the job."""
        self._taken = 0.0
        self._node: NodeVitals | None = None
        self._ranks: dict[int, RankVitals] = {}
        self._workers: dict[int, int] = {}
        """The pid by rank at the last measurement."""

    def start(self, tasks: Tasks, address: str, workers: Callable[[], Mapping[int, int]]) -> None:
        """Start measuring. `address`: this node's for the others; `workers`: returns pids by rank."""
        tasks.spawn(self._keep(address, workers), "vitals")
        tasks.spawn(self._gpus.keep(self._pause), "GPUs")

    async def _keep(self, address: str, workers: Callable[[], Mapping[int, int]]) -> None:
        self._interface = await interface_of(address)
        while True:
            self.measure(workers())
            await self._pause()

    async def _pause(self) -> None:
        for _ in range(ALONE_ROUNDS):
            await asyncio.sleep(WATCHED_S)
            if self._watched():
                return

    def measure(self, workers: Mapping[int, int]) -> None:
        """Measure everything once; takes milliseconds."""
        now = time.monotonic()
        try:
            self._node = self._host.read(now, self._interface)
            self._ranks = {rank: self._host.read_rank(pid, now, self._gpus.devices) for rank, pid in workers.items()}
            self._workers = dict(workers)
            self._host.forget(set(workers.values()))
        except (ValueError, IndexError):
            # Another kernel may write another format.
            log.exception("cannot read the node's usage")
            self._node, self._ranks = None, {}
        self._taken = now

    def report(self, workers: Mapping[int, int]) -> tuple[NodeVitals | None, dict[int, RankVitals]]:
        """Return the last measurement of the node and of these workers; `every_s`: the current interval."""
        if self._node is None:
            return None, {}
        now = time.monotonic()
        age_s = round(now - self._taken, 1)
        every_s = WATCHED_S * (1 if self._watched() else ALONE_ROUNDS)
        devices: list[GpuVitals] = [
            {"age_s": round(now - gpu["t"], 1), "index": gpu["index"], "name": gpu["name"], "use": gpu["use"],
             "mem_used": gpu["mem_used"], "mem_total": gpu["mem_total"], "temp": gpu["temp"], "power": gpu["power"],
             "power_limit": gpu["power_limit"], "clock": gpu["clock"], "ecc": gpu["ecc"], "xid": gpu["xid"]}
            for gpu in self._gpus.devices
        ]  # fmt: skip
        # The usage of a dead worker does not belong to its successor.
        same = [rank for rank in self._ranks if self._workers[rank] == workers.get(rank)]
        node: NodeVitals = {"age_s": age_s, "every_s": every_s, **self._node, "gpus": devices}
        return node, {rank: {"age_s": age_s, **self._ranks[rank]} for rank in same}
