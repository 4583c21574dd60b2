"""This node's part of a group that torch's own agents form: one torch agent, and the ranks it was given.

In: an Order with a rendezvous. Out: notices `assigned`, `main`, `exited` and `order_failed`; stacks; a complete end.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remote_agent import engine_boot, engine_pulse, engine_stacks
from remote_agent import engine_evidence as evidence
from remote_agent.engine_group import KILL_S, SWEEP_S, Tell, within
from remote_agent.engine_start import Order, worker_environment
from remote_agent.engine_watch import Orphans, Worker, send_signal, signal_name, signal_ranks
from remote_agent.paths import own_command
from remote_agent.wire import Problem

if TYPE_CHECKING:
    from remote_agent.host_notes import Host

log = logging.getLogger(__name__)

LOG = "torchrun.log"
# torch's agent ends its workers itself; its own SIGKILL for them comes before ours for it.
HEAD_START_S = 2.0

# What torch's agent is told of the order as it stands.
PASSED = (
    "rendezvous",
    "local_world_size",
    "group_rank",
    "role",
    "restart_count",
    "max_restarts",
    "virtual_local_rank",
    "signals_to_handle",
    "numa_binding",
    "shutdown_timeout",
    "cwd",
)
# What torchrun's main, not torch's agent, gives to its workers.
OF_TORCHRUN = ("OMP_NUM_THREADS", "PWD")


class Rank:
    """One rank that torch's agent has started; it is not our child, so only torch learns its exit status."""

    def __init__(self, rank: int, local_rank: int, pid: int, directory: Path) -> None:
        self.rank = rank
        self.local_rank = local_rank
        self.pid = pid
        self.directory = directory
        self.died_ns: int | None = None
        self.over_ns: int | None = None
        """When its script was over, as it says."""
        self.code: int | None = None
        self.reported = False
        self.sent: str | None = None
        """The last signal that an operator had us send."""
        self._pidfd = -1
        with contextlib.suppress(AttributeError, OSError):
            self._pidfd = os.pidfd_open(pid)

    def watch(self) -> None:
        """Note the time of its death."""
        if self._pidfd >= 0:
            asyncio.get_running_loop().add_reader(self._pidfd, self._died)

    def _died(self) -> None:
        self.died_ns = time.time_ns()
        self.close()

    def send(self, number: signal.Signals) -> bool:
        """Send it a signal; returns whether it was there, for sure."""
        return send_signal(self._pidfd, number)

    def close(self) -> None:
        """Stop watching."""
        if self._pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1


class ElasticGroup:
    """One generation's torch agent on this node. `run` must be awaited by an owner."""

    def __init__(
        self, order: Order, boot: engine_boot.BootDirectory, process: subprocess.Popen[bytes], host: Host
    ) -> None:
        self.generation = order.generation
        self.ended = asyncio.Event()
        """Set when torch's agent and all its workers are dead and reported, and nothing of theirs is left."""
        self.agent = Worker(-1, -1, process.pid, order.log_dir)
        self._process = process
        self._host = host
        self._boot = boot
        self._log_dir = order.log_dir
        self._ranks: dict[int, Rank] = {}
        self._exits: dict[int, dict[str, Any]] = {}
        self._trouble = ""
        self._tell: Tell = lambda _op, _args: None
        self._orphans = Orphans()
        self._dead = asyncio.Event()
        self._asked_ns: int | None = None
        """When we first signalled torch's agent: what it does from then on is our doing."""

    @property
    def _is_ours(self) -> bool:
        return self._asked_ns is not None

    def watch(self, tell: Tell) -> None:
        """Begin to report; `tell` is called with notices in the order in which things happened."""
        self._tell = tell
        asyncio.get_running_loop().add_reader(self._boot.pipe, self._hear)
        self.agent.watch(lambda _agent: self._dead.set())

    async def run(self) -> None:
        """Return when the generation has ended here, whatever ended it."""
        listening = asyncio.ensure_future(self._listen())
        await self._dead.wait()
        # The pipe ends with the agent: its workers do not have it.
        await asyncio.wait({listening}, timeout=KILL_S)
        listening.cancel()
        left = await self._orphans.sweep([self.agent], SWEEP_S)
        if left:
            log.warning("generation %d: %d descendants of torch's agent do not die", self.generation, left)
        self._hear()
        await self._report_rest()
        self._process.wait()
        self.close()
        self.ended.set()

    async def _listen(self) -> None:
        """Take in what torch's agent says, until it ends."""
        output = self._process.stdout
        if output is None:
            raise RuntimeError("torch's agent has no pipe")
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=1 << 24)
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), output)
        try:
            while line := await reader.readline():
                said = json.loads(line)
                if said["op"] == "assigned":
                    self._assigned(said)
                elif said["op"] == "failed":
                    await self._failed({int(rank): int(code) for rank, code in said["codes"].items()})
                else:
                    self._trouble = str(said["message"])
        finally:
            transport.close()

    def _assigned(self, said: dict[str, Any]) -> None:
        for rank in self._ranks.values():
            rank.close()
        ranks = [
            Rank(int(one["rank"]), int(one["local_rank"]), int(one["pid"]), self._log_dir / f"rank_{one['rank']}")
            for one in said["ranks"]
        ]
        self._ranks = {one.rank: one for one in ranks}
        for one in ranks:
            one.watch()
        notice = {"generation": self.generation, "ranks": said["ranks"], "world_size": said["world_size"]}
        self._tell("assigned", notice)
        self._hear()

    async def _failed(self, codes: dict[int, int]) -> None:
        """Report ranks that ended badly, the first to die first; torch sends SIGTERM to the others after it."""
        found = [self._ranks[rank] for rank in codes if rank in self._ranks]
        now_ns = time.time_ns()
        found.sort(key=lambda rank: (rank.died_ns or now_ns, -codes[rank.rank]))
        for place, rank in enumerate(found):
            rank.code = codes[rank.rank]
            told = self._is_ours or (place > 0 and rank.code in (-signal.SIGTERM, -signal.SIGKILL))
            await self._report(rank, told)

    async def _report_rest(self) -> None:
        """Report every rank that torch's agent said nothing of: by how the agent itself ended."""
        death = self.agent.death
        code = None if death is None else death.code
        if not self._ranks and code != 0 and not self._is_ours:
            how = self._trouble or self._last_line() or f"it ended with {code if code is not None else 'a signal'}"
            self._tell("order_failed", {"generation": self.generation, "message": f"torch's agent: {how}"})
        for rank in self._ranks.values():
            if not rank.reported:
                rank.code = 0 if code == 0 else None if self._is_ours else 1
                await self._report(rank, self._is_ours and code != 0)

    async def _report(self, rank: Rank, by_us: bool) -> None:
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(None, evidence.of_the_dead, rank.directory, len(self._ranks))
        rank.reported = True
        self._hear()
        t_ns = rank.died_ns or time.time_ns()
        if self._trouble and found["error"] is None and rank.code:
            found["error"] = {"message": f"torch's agent: {self._trouble}", "callstack": None, "timestamp_ns": t_ns}
        # Of torch a negative one stands for a signal.
        name = "SIGKILL" if rank.code is None else signal_name(-rank.code) if rank.code < 0 else None
        document = {
            "rank": rank.rank,
            "local_rank": rank.local_rank,
            "pid": rank.pid,
            "code": rank.code if name is None else None,
            "signal": name,
            "core": False,
            "t_ns": t_ns,
            "over_ns": rank.over_ns,
            "asked_ns": self._asked_ns,
            "sent": rank.sent,
            "stopped_by_us": by_us,
            **found,
        }
        document["notes"] = await self._host.explain(document)
        self._exits[rank.rank] = document
        self._tell("exited", {"generation": self.generation, "exit": document})

    def _last_line(self) -> str:
        tail, _ = evidence.read_tail(self._log_dir / LOG)
        return tail.strip().rpartition("\n")[2]

    def _hear(self) -> None:
        for what, rank, t_ns in self._boot.words():
            if what == "main":
                self._tell("main", {"generation": self.generation, "rank": rank, "t_ns": t_ns})
            elif rank in self._ranks:
                self._ranks[rank].over_ns = t_ns

    def tend(self) -> None:
        """Look after orphans: to be called when a child has died."""
        self.agent.look(lambda _agent: self._dead.set())
        self._orphans.changed.set()

    async def stop(self, grace_s: float, collect: bool) -> dict[str, Any]:
        """End torch's agent, which ends its workers; returns their exits and stacks. Raises Problem if one stays."""
        stacks = await engine_stacks.save(self._boot, self._alive()) if collect else {}
        self._asked_ns = self._asked_ns or time.time_ns()
        if self.agent.death is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.agent.pid, signal.SIGTERM)
        if not grace_s or not await within(self._dead, grace_s + HEAD_START_S):
            self.kill()
        if not await within(self.ended, 2 * KILL_S + SWEEP_S):
            hint = "it hangs in the kernel: look at dmesg"
            raise Problem("stuck", f"not dead after SIGKILL: torch's agent (pid {self.agent.pid}) or its workers", hint)
        return {"exits": self.exits(), "stacks": stacks}

    def kill(self) -> None:
        """Kill torch's agent: its workers die with their parent."""
        self._asked_ns = self._asked_ns or time.time_ns()
        if self.agent.death is None:
            self.agent.kill_group(signal.SIGKILL)

    async def vanish(self, deadline_s: float) -> None:
        """Kill everything at once, for an engine that must end; nothing is reported."""
        self.kill()
        await within(self._dead, deadline_s)
        await self._orphans.sweep([self.agent], deadline_s)
        self.close()

    def close(self) -> None:
        """Stop watching and remove the workers' directory."""
        self.agent.close()
        for rank in self._ranks.values():
            rank.close()
        if self._boot.pipe >= 0:
            asyncio.get_running_loop().remove_reader(self._boot.pipe)
        self._boot.close()

    def exits(self) -> list[dict[str, Any]]:
        """Return the exits so far, by rank."""
        return [self._exits[rank] for rank in sorted(self._exits)]

    async def stacks(self, ranks: Iterable[int] | None) -> dict[str, Any]:
        """Return stacks of the live ones of these ranks (None: all) and of their children, and why some have none."""
        wanted = [self._ranks[rank] for rank in (self._ranks if ranks is None else ranks) if rank in self._ranks]
        pids = {one.rank: one.pid if one.died_ns is None else None for one in wanted}
        return await engine_stacks.dump(self._boot, pids)

    async def keep(self, ranks: Iterable[int] | None) -> dict[str, list[str]]:
        """Save stacks and flight records of the live ones of these ranks (None: all); returns the files by rank."""
        chosen = {rank: path for rank, path in self._alive().items() if ranks is None or rank in ranks}
        return await engine_stacks.keep(self._boot, chosen)

    def send(self, pids: Mapping[str, int], name: str) -> dict[str, str]:
        """Send a signal to ranks that still have these pids; returns by rank why it was not sent."""
        return signal_ranks(self._ranks, pids, name)

    async def pulses(self, stacks: bool) -> dict[str, Any]:
        """Return what the live ranks are doing, by rank."""
        return await engine_pulse.pulses(self._boot, [self._ranks[rank] for rank in self._alive()], stacks)

    def _alive(self) -> dict[int, Path]:
        return {rank.rank: rank.directory for rank in self._ranks.values() if rank.died_ns is None}


def start(job: str, order: Order, boot: engine_boot.BootDirectory) -> subprocess.Popen[bytes]:
    """Start torch's agent, in the thread that lives as long as this process; raises OSError."""
    order.log_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    env = {**order.env, **_shared_environment(order)}
    command = engine_boot.command(job, order.kind, boot.path, env, [order.script, *order.args])
    worker_env = dict(env)
    if order.kind != "binary":
        engine_boot.add_bootstrap(worker_env, boot.path)
    document = {
        **{name: getattr(order, name) for name in PASSED},
        "log_dir": str(order.log_dir),
        "command": command,
        "worker_env": worker_env,
        "engine": os.getpid(),
    }
    with open(order.log_dir / LOG, "ab") as errors:
        process = subprocess.Popen(
            own_command("torchrun"),
            env={**os.environ, **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )
    try:
        # Together they fit a pipe's buffer, or the child reads.
        with process.stdin or contextlib.nullcontext() as feed:
            if feed is not None:
                feed.write(json.dumps(document).encode() + b"\n")
    except OSError:
        process.kill()
        process.wait()
        raise
    return process


def _shared_environment(order: Order) -> dict[str, str]:
    env = worker_environment(order, 0, {})
    return {name: env[name] for name in OF_TORCHRUN if name in env}
