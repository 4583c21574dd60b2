"""What this node and its ranks use at this moment: processor, memory, disk, network, and what its GPUs do.

In: /proc, cgroups, file systems, the process that reads the GPUs; the ranks' pids. Out: documents that tell how old
they are; what cannot be known is None.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remote_agent import gpus
from remote_agent.host_notes import memory_folders
from remote_agent.netif import interface_of
from remote_agent.paths import own_command

if TYPE_CHECKING:
    from remote_agent.tasks import Tasks

log = logging.getLogger(__name__)

# From one measurement to the next while somebody looks; while nobody does, every third is taken.
WATCHED_S = 3.0
ALONE_ROUNDS = 3
# A driver in trouble may take long; then its reader is killed, and tried again later.
GPU_ANSWER_S = 15.0
GPU_AGAIN_S = 60.0
GPU_END_S = 2.0
# Of one rank's process tree, so that the cost stays bounded.
MOST_PROCESSES = 200
_TICKS_S = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
Document = dict[str, Any]


class Host:
    """This host's files under `root`, read again and again; `folder`: on the file system that matters to the job."""

    def __init__(self, folder: Path, root: Path = Path("/")) -> None:
        self._root = root
        self._folder = folder
        self.interface: str | None = None
        """The network interface of the job."""
        self._before: dict[str, tuple[float, int]] = {}
        """Time and value of what is counted, by name."""
        self._idle: tuple[int, int] | None = None
        """Ticks of all processors: idle ones, all."""
        self._workers: dict[int, tuple[str, dict[str, str]]] = {}

    def read(self, now: float) -> Document:
        """Return what the node uses; rates are since the last call, None at the first one."""
        used, total = self._memory()
        received, sent = self._network()
        return {
            "cpu": self._processor(),
            "mem_used": used,
            "mem_total": total,
            **_space("disk", self._folder),
            **_space("shm", self._root / "dev/shm"),
            "net_in": self._rate("received", received, now, 0),
            "net_out": self._rate("sent", sent, now, 0),
        }

    def read_rank(self, pid: int, now: float, devices: list[gpus.Gpu]) -> Document:
        """Return what a worker uses: cpu with its children (100: one core), its own rss; and which GPU is its own."""
        fields = self._stat(pid)
        started, env = self._workers.get(pid) or self._meet(pid, fields)
        if not fields or fields[19] != started:
            # It has ended, or is not yet the script; the number may be another process's by now.
            return {"cpu": None, "rss": None, "gpu": None}
        ticks = sum(sum(map(int, each[11:15])) for each in map(self._stat, self._tree(pid)) if each)
        cores = self._rate(f"{pid}", ticks, now, 4)
        return {
            "cpu": None if cores is None else round(100 * cores / _TICKS_S, 1),
            "rss": int(fields[21]) * _PAGE,
            "gpu": gpus.gpu_of(env.get("CUDA_VISIBLE_DEVICES"), int(env["LOCAL_RANK"]), devices),
        }

    def _meet(self, pid: int, fields: list[str]) -> tuple[str, dict[str, str]]:
        env = self._environment(pid)
        if not fields or not env.get("LOCAL_RANK", "").isdigit():
            return "", {}
        self._workers[pid] = fields[19], env
        return self._workers[pid]

    def forget(self, pids: set[int]) -> None:
        """Forget all workers but these."""
        for pid in self._workers.keys() - pids:
            del self._workers[pid]
            self._before.pop(f"{pid}", None)

    def _rate(self, name: str, count: int | None, now: float, digits: int) -> float | None:
        before = self._before.pop(name, None)
        if count is None:
            return None
        self._before[name] = (now, count)
        if before is None or now <= before[0]:
            return None
        return round(max(0, count - before[1]) / (now - before[0]), digits or None)

    def _text(self, *parts: str) -> str:
        with contextlib.suppress(OSError):
            return self._root.joinpath(*parts).read_text(encoding="utf-8", errors="replace")
        return ""

    def _processor(self) -> float | None:
        """Return how busy all processors of the host have been, in percent."""
        words = self._text("proc/stat").partition("\n")[0].split()[1:9]
        if len(words) < 5:
            return None
        times = [int(word) for word in words]
        total, idle = sum(times), times[3] + times[4]
        before, self._idle = self._idle, (idle, total)
        if before is None or total <= before[1]:
            return None
        return round(100 * (1 - max(0, idle - before[0]) / (total - before[1])), 1)

    def _memory(self) -> tuple[int | None, int | None]:
        """Return used and total bytes: of the host, or of the cgroup whose limit is the tightest."""
        lines = (line.split() for line in self._text("proc/meminfo").splitlines())
        info = {words[0]: int(words[1]) * 1024 for words in lines if len(words) > 1 and words[1].isdigit()}
        total, available = info.get("MemTotal:"), info.get("MemAvailable:")
        used = None if total is None or available is None else total - available
        for is_v2, folder in memory_folders(self._root):
            limit = self._number(folder / ("memory.max" if is_v2 else "memory.limit_in_bytes"))
            if limit is not None and (total is None or limit < total):
                held = self._number(folder / ("memory.current" if is_v2 else "memory.usage_in_bytes"))
                cache = "inactive_file" if is_v2 else "total_inactive_file"
                facts = (line.split() for line in self._text(str(folder / "memory.stat")).splitlines())
                # What the kernel gives back before it kills is not in use.
                spare = next((int(words[1]) for words in facts if words[0] == cache), 0)
                total, used = limit, None if held is None else max(0, held - spare)
        return used, total

    def _number(self, path: Path) -> int | None:
        text = self._text(str(path)).strip()
        return int(text) if text.isdigit() else None

    def _network(self) -> tuple[int | None, int | None]:
        for line in self._text("proc/net/dev").splitlines():
            name, _, counts = line.partition(":")
            if name.strip() == self.interface:
                words = counts.split()
                return int(words[0]), int(words[8])
        return None, None

    def _stat(self, pid: int) -> list[str]:
        return self._text(f"proc/{pid}/stat").rpartition(")")[2].split()

    def _tree(self, pid: int) -> Iterator[int]:
        """Yield a process and its descendants, as far as their parents' first threads have started them."""
        todo = [pid]
        for _ in range(MOST_PROCESSES):
            if not todo:
                return
            each = todo.pop()
            yield each
            todo += map(int, self._text(f"proc/{each}/task/{each}/children").split())

    def _environment(self, pid: int) -> dict[str, str]:
        pairs = (entry.partition("=") for entry in self._text(f"proc/{pid}/environ").split("\0"))
        return {name: value for name, _, value in pairs if name in ("LOCAL_RANK", "CUDA_VISIBLE_DEVICES")}


def _space(name: str, folder: Path) -> Document:
    try:
        space = os.statvfs(folder)
    except OSError:
        return {f"{name}_free": None, f"{name}_total": None}
    return {f"{name}_free": space.f_bavail * space.f_frsize, f"{name}_total": space.f_blocks * space.f_frsize}


class GpuLink:
    """The process that reads the GPUs: started where there may be some, replaced when it fails."""

    def __init__(self, job: str) -> None:
        self._job = job
        self.devices: list[gpus.Gpu] = []
        """As last read, with `t`, the monotonic time of that; empty where there is no GPU or nothing reads it."""

    async def keep(self, pause: Callable[[], Awaitable[None]]) -> None:
        """Read them again and again; returns where there are none."""
        if not gpus.may_be_here():
            return
        while await self._serve(pause):
            self.devices = []
            await asyncio.sleep(GPU_AGAIN_S)

    async def _serve(self, pause: Callable[[], Awaitable[None]]) -> bool:
        """Run one reader until it fails; False when it finds no GPU."""
        child = await asyncio.create_subprocess_exec(
            *own_command("gpus", "--job", self._job),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            while True:
                child.stdin.write(b"\n")
                line = await asyncio.wait_for(child.stdout.readline(), GPU_ANSWER_S)
                if not line:
                    return await asyncio.wait_for(child.wait(), GPU_END_S) != 0
                self.devices = json.loads(line)
                await pause()
        except (OSError, ValueError, asyncio.TimeoutError) as error:
            log.warning("the GPUs cannot be read: %s", str(error) or "no answer in time")
            return True
        finally:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(child.wait(), GPU_END_S)


class Vitals:
    """One agent's measurements: taken in turn by its tasks, told at any time."""

    def __init__(self, host: Host, job: str, watched: Callable[[], bool]) -> None:
        self._host = host
        self._watched = watched
        self._gpus = GpuLink(job)
        self._taken = 0.0
        self._node: Document | None = None
        self._ranks: dict[int, Document] = {}
        self._workers: dict[int, int] = {}
        """Whose these are: pid by rank."""

    def start(self, tasks: Tasks, address: str, workers: Callable[[], Mapping[int, int]]) -> None:
        """Begin; address: this node's for the others; workers: pid by rank of what runs here now."""
        tasks.spawn(self._keep(address, workers), "vitals")
        tasks.spawn(self._gpus.keep(self._pause), "GPUs")

    async def _keep(self, address: str, workers: Callable[[], Mapping[int, int]]) -> None:
        self._host.interface = await interface_of(address)
        while True:
            self.measure(workers())
            await self._pause()

    async def _pause(self) -> None:
        for _ in range(ALONE_ROUNDS):
            await asyncio.sleep(WATCHED_S)
            if self._watched():
                return

    def measure(self, workers: Mapping[int, int]) -> None:
        """Measure all once; takes milliseconds."""
        now = time.monotonic()
        try:
            self._node = self._host.read(now)
            self._ranks = {rank: self._host.read_rank(pid, now, self._gpus.devices) for rank, pid in workers.items()}
            self._workers = dict(workers)
            self._host.forget(set(workers.values()))
        except (ValueError, IndexError):
            # Another kernel, another form: what cannot be read is not known.
            log.exception("vitals")
            self._node, self._ranks = None, {}
        self._taken = now

    def told(self, workers: Mapping[int, int]) -> tuple[Document | None, dict[int, Document]]:
        """Return what is known of the node, and of these workers; `every_s`: how often it is measured now."""
        if self._node is None:
            return None, {}
        now = time.monotonic()
        age_s = round(now - self._taken, 1)
        every_s = WATCHED_S * (1 if self._watched() else ALONE_ROUNDS)
        devices = [
            {"index": gpu["index"], "age_s": round(now - gpu["t"], 1), **_without(gpu, "index", "t", "uuid")}
            for gpu in self._gpus.devices
        ]
        # What a dead worker used is not told of the one in its place.
        mine = [rank for rank in self._ranks if self._workers[rank] == workers.get(rank)]
        node = {"age_s": age_s, "every_s": every_s, **self._node, "gpus": devices}
        return node, {rank: {"age_s": age_s, **self._ranks[rank]} for rank in mine}


def _without(gpu: gpus.Gpu, *names: str) -> gpus.Gpu:
    return {name: value for name, value in gpu.items() if name not in names}
