"""The launcher for groups that torch's own agents form: one torch agent on this node, and the ranks it assigns.

In: an Order with a rendezvous. Out: notices `assigned`, `main`, `exited` and `order_failed`; a group that ends
completely.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from remote_agent.base.proc import own_command
from remote_agent.base.tasks import within
from remote_agent.engine import boot_dir, evidence
from remote_agent.engine.launchers.launcher import KILL_S, STUCK_HINT, SWEEP_S, LaunchContext, Notify, WorkerGroup
from remote_agent.engine.order import Order, worker_environment
from remote_agent.engine.processes import Death, RankProcess, Worker, exit_document, signal_name
from remote_agent.wire import Problem

if TYPE_CHECKING:
    from remote_agent.wire.answers import StartedProcess, StartedWorkers, StoppedWorkers

log = logging.getLogger(__name__)

LOG = "torchrun.log"
# torch's agent ends its workers itself, and its SIGKILL for them must come before ours for the agent.
HEAD_START_S = 2.0
# Variables that torchrun's main function sets for the workers, not torch's agent.
OF_TORCHRUN = ("OMP_NUM_THREADS", "PWD")


class AssignedRank(RankProcess):
    """A rank that torch's agent has started. It is not our child, so only torch gets its exit code."""

    died_ns: int | None = None
    code: int | None = None
    reported = False

    @property
    def is_alive(self) -> bool:
        return self.died_ns is None

    def watch(self) -> None:
        """Record the time of its death."""
        if self._pidfd >= 0:
            asyncio.get_running_loop().add_reader(self._pidfd, self._died)

    def _died(self) -> None:
        self.died_ns = time.time_ns()
        self.end_watch()


async def start(context: LaunchContext, order: Order) -> WorkerGroup:
    """Start torch's elastic agent in a process of its own."""
    order.log_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    boot = boot_dir.BootDirectory(order.log_dir, order.slow)
    try:
        process = await context.in_thread(_start_process, order, boot)
    except BaseException:
        boot.close()
        raise
    return TorchAgentGroup(context, order, boot, process)


def _start_process(order: Order, boot: boot_dir.BootDirectory) -> subprocess.Popen[bytes]:
    """Start the agent, in the thread that lives as long as this process; raises OSError."""
    shared = worker_environment(order, 0, {})
    env = {**order.env, **{name: shared[name] for name in OF_TORCHRUN if name in shared}}
    command = boot_dir.command(order, boot.path, env)
    worker_env = dict(env)
    if order.kind != "binary":
        boot_dir.add_bootstrap(worker_env, boot.path)
    own = {**dataclasses.asdict(order), "log_dir": str(order.log_dir)}
    document = {"order": own, "command": command, "worker_env": worker_env, "engine": os.getpid()}
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
        assert process.stdin is not None
        with process.stdin as feed:
            feed.write(json.dumps(document).encode() + b"\n")
    except OSError:
        process.kill()
        process.wait()
        raise
    return process


class TorchAgentGroup(WorkerGroup):
    """One generation's torch agent on this node, and its workers."""

    def __init__(
        self, context: LaunchContext, order: Order, boot: boot_dir.BootDirectory, process: subprocess.Popen[bytes]
    ) -> None:
        super().__init__(context, order.generation, boot)
        self._agent = Worker(-1, -1, process.pid, order.log_dir)
        self._process = process
        self._log_dir = order.log_dir
        self._why_cold = "torch's own agent starts the ranks" if order.standby else None
        self._assigned: dict[int, AssignedRank] = {}
        self._error = ""
        """The message with which torch's agent failed."""
        self._asked_ns: int | None = None
        """The time when we first signalled torch's agent: we caused what it does from then on."""

    def answer(self) -> StartedWorkers:
        agent: StartedProcess = {"pid": self._agent.pid, "started": self._agent.started}
        return {"ranks": [], "agent": agent, "cold": self._why_cold}

    def watch(self, notify: Notify) -> None:
        super().watch(notify)
        self._agent.watch(lambda _agent: self._all_dead.set())

    async def run(self) -> None:
        listening = asyncio.ensure_future(self._listen())
        await self._all_dead.wait()
        # The pipe ends with the agent, because its workers do not inherit it.
        await asyncio.wait({listening}, timeout=KILL_S)
        listening.cancel()
        left = await self._orphans.sweep([self._agent], SWEEP_S)
        if left:
            log.warning("generation %d: %d descendants of torch's agent did not end", self.generation, left)
        self._read_pipe()
        await self._report_rest()
        self._process.wait()
        self.close()
        self.ended.set()

    async def _listen(self) -> None:
        """Read the messages of torch's agent until it ends."""
        output = self._process.stdout
        assert output is not None
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=1 << 24)
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), output)
        try:
            while line := await reader.readline():
                message = json.loads(line)
                if message["op"] == "assigned":
                    self._assign(message["ranks"], message["world_size"])
                elif message["op"] == "failed":
                    await self._failed({int(rank): int(code) for rank, code in message["codes"].items()})
                else:
                    self._error = str(message["message"])
        finally:
            transport.close()

    def _assign(self, started: list[StartedProcess], world_size: int) -> None:
        for rank in self._ranks.values():
            rank.end_watch()
        ranks = [
            AssignedRank(one["rank"], one["local_rank"], one["pid"], self._log_dir / f"rank_{one['rank']}")
            for one in started
        ]
        self._ranks = self._assigned = {one.rank: one for one in ranks}
        for one in ranks:
            one.watch()
        self._notify("assigned", {"generation": self.generation, "ranks": started, "world_size": world_size})
        self._read_pipe()

    async def _failed(self, codes: dict[int, int]) -> None:
        """Report failed ranks in the order of their deaths; torch sends SIGTERM to the others after the first."""
        failed = [self._assigned[rank] for rank in codes if rank in self._assigned]
        now_ns = time.time_ns()
        failed.sort(key=lambda rank: (rank.died_ns or now_ns, -codes[rank.rank]))
        for place, rank in enumerate(failed):
            rank.code = codes[rank.rank]
            was_stopped = place > 0 and rank.code in (-signal.SIGTERM, -signal.SIGKILL)
            await self._report(rank, self._asked_ns is not None or was_stopped)

    async def _report_rest(self) -> None:
        """Report the ranks that torch's agent did not report, by how the agent itself ended."""
        death = self._agent.death
        code = None if death is None else death.code
        is_ours = self._asked_ns is not None
        if not self._ranks and code != 0 and not is_ours:
            tail, _ = evidence.read_tail(self._log_dir / LOG)
            last_line = tail.strip().rpartition("\n")[2]
            ending = "it was ended by a signal" if code is None else f"it exited with code {code}"
            how = self._error or last_line or ending
            self._notify("order_failed", {"generation": self.generation, "message": f"torch's agent: {how}"})
        for rank in self._assigned.values():
            if not rank.reported:
                rank.code = 0 if code == 0 else None if is_ours else 1
                await self._report(rank, is_ours and code != 0)

    async def _report(self, rank: AssignedRank, stopped_by_us: bool) -> None:
        left = await self._evidence(rank)
        rank.reported = True
        self._read_pipe()
        t_ns = rank.died_ns or time.time_ns()
        if self._error and left["error"] is None and rank.code:
            left["error"] = {"message": f"torch's agent: {self._error}", "callstack": None, "timestamp_ns": t_ns}
        # torch writes a signal as a negative exit code.
        name = "SIGKILL" if rank.code is None else signal_name(-rank.code) if rank.code < 0 else None
        death = Death(rank.code if name is None else None, name, False, t_ns)
        await self._report_exit(exit_document(rank, death, self._asked_ns, stopped_by_us, left))

    def tend(self) -> None:
        self._agent.look(lambda _agent: self._all_dead.set())
        self._orphans.changed.set()

    async def stop(self, grace_s: float, collect: bool) -> StoppedWorkers:
        stacks = await self._save_stacks() if collect else {}
        self._asked_ns = self._asked_ns or time.time_ns()
        self._agent.send(signal.SIGTERM)
        if not grace_s or not await within(self._all_dead, grace_s + HEAD_START_S):
            self.kill()
        if not await within(self.ended, 2 * KILL_S + SWEEP_S):
            stuck = f"torch's agent (pid {self._agent.pid}) or its workers"
            raise Problem("stuck", f"not dead after SIGKILL: {stuck}", STUCK_HINT)
        return {"exits": self.exits(), "stacks": stacks}

    def kill(self) -> None:
        """Kill torch's agent; its workers die with their parent."""
        self._asked_ns = self._asked_ns or time.time_ns()
        if self._agent.death is None:
            self._agent.kill_group(signal.SIGKILL)

    def _children(self) -> Sequence[Worker]:
        return [self._agent]
