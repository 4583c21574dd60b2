"""The windows of the ranks' samplers (engine/sampler.py), with what the node shows of them.

In: the generation's boot directory, its live ranks, until when they are to be sampled. Out: RankWindows by rank.

A processor that others use, and a cgroup's limit, slow a rank down without a trace in its own stack. Who uses its
processor is looked up only for ranks that wait for one.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remote_agent.base.files import read_text
from remote_agent.base.proc import cgroup_folders, stat_fields
from remote_agent.engine.inspect import sockets
from remote_agent.engine.inspect.children import descendants, process_tree
from remote_agent.engine.sampler import ORDER, SUFFIX, WAKE, WINDOW_NS
from remote_agent.engine.worker import SAMPLER
from remote_agent.wire.documents import SLOW_OFF

if TYPE_CHECKING:
    from remote_agent.engine.processes import RankProcess
    from remote_agent.wire.answers import SampledRanks
    from remote_agent.wire.documents import RankWindow, TakenBy

_TICKS = os.sysconf("SC_CLK_TCK")
_ROOT = Path("/")
# A rank that waits for a processor for this share of a window: somebody else has it.
WAITS = 0.1
# Another process that uses less of a processor is not the reason.
BUSY = 0.2
# A processor that idles for this share of the time is free.
FREE = 0.3
# Readings of the kernel's counters that are remembered, about one in two seconds.
MAX_READINGS = 20
# Of the connections to each other address that carry this much in a window, the busiest is reported; at most so many.
LEAST_SENT, MAX_LINKS = 1_000_000, 8
# Fewer readings of a window tell nothing.
FEWEST_READINGS = 3


class PhaseReader:
    """Orders and reads the windows of one generation's ranks."""

    def __init__(self, boot: Path) -> None:
        self._boot = boot
        self._throttled: dict[int, list[tuple[int, float]]] = {}
        """By pid: when (ns), and for how many seconds its cgroups had been throttled by then."""
        self._connections: list[tuple[int, dict[int, dict[int, sockets.Connection]]]] = []
        """When (ns), and by pid and inode what the kernel had counted by then."""
        self._used: tuple[float, dict[int, int], dict[int, int]] | None = None
        """When all processes were read last, what each had used of the processors, and how long each of those idled."""
        self._processors: dict[int, int] = {}
        """By rank: the processor for which it waits."""
        self._taken: dict[int, TakenBy] = {}
        self._seen: dict[int, int] = {}
        """By rank: the newest window that was returned."""

    def sample(self, ranks: Sequence[RankProcess], until_ns: int, shift_ns: int, routine: bool) -> SampledRanks:
        """Have these ranks sampled until then, and return their new windows.

        until_ns: by this node's clock; shift_ns: what to add for the coordinator's; routine: nothing is suspected.
        """
        if not (self._boot / f"{SAMPLER}.py").exists():
            return {"windows": {}, "off": {str(one.rank): f"sampling is off: {SLOW_OFF}" for one in ranks}}
        order = self._boot / ORDER
        with contextlib.suppress(OSError):
            (self._boot / f"{ORDER}.new").write_text(f"{until_ns} {shift_ns} {int(routine)}", encoding="ascii")
            os.rename(self._boot / f"{ORDER}.new", order)
            # Nobody listens while all are sampling.
            os.close(os.open(self._boot / WAKE, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC))
        now_ns = time.time_ns()
        for one in ranks:
            self._throttled.setdefault(one.pid, []).append((now_ns, throttled_s(one.pid)))
            del self._throttled[one.pid][:-MAX_READINGS]
        self._connections.append((now_ns, sockets.connections({one.pid: (one.pid,) for one in ranks}) or {}))
        del self._connections[:-MAX_READINGS]
        self._look_for_takers(ranks)
        answer: SampledRanks = {"windows": {}, "off": {}}
        for one in ranks:
            document = _read(self._boot / f"{one.rank}{SUFFIX}")
            if "off" in document:
                answer["off"][str(one.rank)] = str(document["off"])
            for window in document.get("windows", ()):
                number = int(window["window"])
                if number > self._seen.get(one.rank, -1):
                    self._seen[one.rank] = number
                    row = self._row(one, window, shift_ns)
                    answer["windows"].setdefault(str(number), {})[str(one.rank)] = row
        return answer

    def _row(self, one: RankProcess, window: dict[str, Any], shift_ns: int) -> RankWindow:
        end_ns = (int(window["window"]) + 1) * WINDOW_NS - shift_ns
        readings = self._throttled[one.pid]
        begun, ended = (
            min(readings, key=lambda reading: abs(reading[0] - at_ns))[1] for at_ns in (end_ns - WINDOW_NS, end_ns)
        )
        if window["delay_s"] >= WAITS * WINDOW_NS / 1e9:
            self._processors[one.rank] = window["processor"]
        else:
            self._processors.pop(one.rank, None)
        return {
            "looks": window["looks"],
            "phases": window["phases"],
            "disk_s": window["disk_s"],
            "delay_s": window["delay_s"],
            "throttled_s": round(min(WINDOW_NS / 1e9, ended - begun), 3),
            "faults": window["faults"],
            "cuda": window["cuda"],
            "taken": self._taken.get(one.rank),
            "sites": window["sites"],
            "links": self._links(one.pid, end_ns - WINDOW_NS, end_ns),
        }

    def _links(self, pid: int, begin_ns: int, end_ns: int) -> list[tuple[str, str, float, float]]:
        """Return how fast a rank sent to other addresses: both ends, Gbit/s, and how often bytes had to wait."""
        readings = [own.get(pid, {}) for at_ns, own in self._connections if begin_ns <= at_ns < end_ns]
        if len(readings) < FEWEST_READINGS:
            return []
        first, last = readings[0], readings[-1]
        busiest: dict[tuple[bytes, bytes], int] = {}
        sent = {inode: last[inode].sent - first[inode].sent for inode in first.keys() & last.keys()}
        for inode in sorted(sent, key=sent.__getitem__):
            ends = last[inode].local, last[inode].remote
            if sent[inode] >= LEAST_SENT and ends[0] != ends[1]:
                busiest[ends] = inode
        links = []
        for (local, remote), inode in sorted(busiest.items(), key=lambda item: -sent[item[1]])[:MAX_LINKS]:
            each = [one[inode] for one in readings if inode in one]
            speed = 8e-9 * statistics.median(one.speed for one in each)
            waits = sum(one.queued > 0 for one in each) / len(each)
            links.append((str(sockets.address(local)), str(sockets.address(remote)), round(speed, 3), round(waits, 2)))
        return links

    def _look_for_takers(self, ranks: Sequence[RankProcess]) -> None:
        """Note which other process uses most of the processor for which a rank waits."""
        if not self._processors:
            self._used = None
            return
        now, fields = time.monotonic(), {pid: each for pid in _pids() if len(each := stat_fields(pid)) > 36}
        ticks = {pid: int(each[11]) + int(each[12]) for pid, each in fields.items()}
        idle = idle_ticks()
        if self._used is not None and now > self._used[0]:
            since, before, idle_before = self._used
            used, free = _shares(before, ticks, now - since), _shares(idle_before, idle, now - since)
            tree = process_tree()
            for one in ranks:
                self._taken.pop(one.rank, None)
                processor = self._processors.get(one.rank)
                if processor is None or any(free.get(each, 0.0) >= FREE for each in _allowed(one.pid)):
                    # It might run elsewhere: nobody has taken its processors, something else keeps it from them.
                    continue
                others = used.keys() - set(descendants(one.pid, tree)) - {os.getpid()}
                busy = [pid for pid in others if int(fields[pid][36]) == processor and used[pid] >= BUSY]
                if busy:
                    pid = max(busy, key=used.__getitem__)
                    name = read_text(f"/proc/{pid}/comm").strip()
                    self._taken[one.rank] = {"name": name, "pid": pid, "share": round(used[pid], 2)}
        self._used = now, ticks, idle


def _shares(before: Mapping[int, int], ticks: Mapping[int, int], seconds: float) -> dict[int, float]:
    """Return the share of the time that each has used since then."""
    return {key: (count - before[key]) / _TICKS / seconds for key, count in ticks.items() if key in before}


def _allowed(pid: int) -> set[int]:
    """Return the processors on which a process may run."""
    with contextlib.suppress(OSError):
        return os.sched_getaffinity(pid)
    return set()


def idle_ticks() -> dict[int, int]:
    """Return for how long each processor has been idle since the start of the machine, in ticks."""
    rows = (line.split() for line in read_text("/proc/stat").splitlines())
    return {int(row[0][3:]): int(row[4]) for row in rows if row and re.fullmatch(r"cpu\d+", row[0])}


def _read(path: Path) -> dict[str, Any]:
    """Return what a sampler has written; {} where there is nothing, or nothing of ours."""
    with contextlib.suppress(OSError, ValueError):
        document = json.loads(path.read_bytes())
        return document if isinstance(document, dict) else {}
    return {}


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def throttled_s(pid: int, root: Path = _ROOT) -> float:
    """Return for how long a process's cgroups have been throttled since they exist, in seconds of one processor."""
    total = 0.0
    for is_v2, folder in cgroup_folders("cpu", root, str(pid)):
        facts = dict(line.split() for line in read_text(folder / "cpu.stat").splitlines() if line.count(" ") == 1)
        total += int(facts.get("throttled_usec", 0)) / 1e6 if is_v2 else int(facts.get("throttled_time", 0)) / 1e9
    return total
