"""The workers of a node: its engine, the group that runs there, and the coordinator's orders for it.

In: orders; notices of the engine. Out: reports; an engine that is replaced when it dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from remote_agent.agent import orders
from remote_agent.agent.coordinator_link import CALL_TIMEOUT_S
from remote_agent.agent.engine_link import IMPORT_TIMEOUT_S
from remote_agent.agent.sampling import Sampling
from remote_agent.base import clocks
from remote_agent.base.tasks import Tasks
from remote_agent.coordinator.state import HEARTBEAT_S
from remote_agent.wire import Args, CallFailed, Problem, WireError

if TYPE_CHECKING:
    from remote_agent.agent.context import Context
    from remote_agent.agent.coordinator_link import CoordinatorLink
    from remote_agent.agent.engine_link import EngineLink, Notice
    from remote_agent.wire.documents import RankExit

log = logging.getLogger(__name__)

# An engine that keeps dying is given up; one that dies now and then is replaced, however long the job runs.
ENGINE_DEATHS = 3
ENGINE_WINDOW_S = 600.0
START_AGAIN_S = 3.0
# This is shorter than the coordinator's margin: an engine that does not stop its workers is killed before that ends.
STOP_MARGIN_S = 30.0
# Even without a grace period, workers that hold a GPU may take seconds to die.
KILL_MARGIN_S = 5.0
# Ranks that have made steps for this long have loaded what they need; so have those that print no steps after that.
STEADY_S = 3.0
SILENT_S = 60.0
# A coordinator must know these reports of the current generation; they are sent again after a new connection.
KEPT = ("recorded", "started", "assigned", "main", "grouping", "grouped", "exited", "idle", "order_failed")
Progress = Mapping[int, Mapping[str, Any]]
"""By rank, as `LogStore.progress` returns it."""


class Reporting(Protocol):
    """The node to which the workers belong: `MemberLoop`."""

    @property
    def link(self) -> CoordinatorLink: ...
    def report(self, op: str, args: Args) -> None: ...
    async def report_readiness(self) -> None: ...
    def lease_is_over(self) -> bool: ...


class LocalWorkers:
    """One node's engine and what runs in it."""

    def __init__(self, context: Context, node: Reporting, make_engine: Callable[[Notice], EngineLink]) -> None:
        """`make_engine` returns what starts this node's workers."""
        self._context = context
        self._node = node
        self._tasks = Tasks()
        self._make_engine = make_engine
        self.engine = make_engine(self._on_engine)
        self.running: int | None = None
        self.generation = -1
        self.begun_at = 0.0
        """The time when the newest workers were ordered."""
        self.incarnation = secrets.token_hex(8)
        self.reason = "its agent was restarted"
        """Why this incarnation of the node is another one than before."""
        self.reports: list[dict[str, Any]] = []
        """The reports that are sent again to the coordinator after a new connection."""
        self.sampling = Sampling(self, node.report, lambda: node.link.offset.ns)
        self._orders: asyncio.Queue[tuple[str, Args]] = asyncio.Queue()
        self._resuming: asyncio.Task[None] | None = None
        """The task that looks at snapshots or puts them in place."""
        self._closing = False
        self._replaced = asyncio.Event()
        """Set when an engine that was superseded has a successor."""

    def start(self) -> None:
        """Begin: the engine at once, workers when they are ordered."""
        self._tasks.spawn(self.keep_engine(), "engine")
        self._tasks.spawn(self.carry_out_orders(), "orders")
        self._tasks.spawn(self.sampling.keep(), "samples of the ranks")
        if self._context.spec.standby == "auto":
            self._tasks.spawn(self._keep_standby(), "standby")

    def close(self) -> None:
        """Replace no engine any more."""
        self._closing = True

    async def end_engine(self, kept: EngineLink | None) -> None:
        """End the engine with its workers, unless it is the one that is kept; it is not replaced any more."""
        self.close()
        if self.engine is not kept:
            await self.engine.close()

    async def end(self, kept: EngineLink | None = None) -> None:
        """End the engine with its workers, unless it is the one that is kept, and all else."""
        await self.end_engine(kept)
        await self._tasks.close()

    def nproc(self) -> int:
        """Return how many ranks this node runs; raises Problem when its engine or its GPUs are missing."""
        own = self._context.spec.node(self._context.node)
        return self.engine.nproc(own.nproc_per_node if own is not None else "auto")

    def pids(self) -> dict[int, int]:
        """Return the pid by rank of what runs here, as far as it is known."""
        if self.running is None:
            return {}
        started = [report["args"]["ranks"] for report in self.reports if report["op"] in ("started", "assigned")]
        return {int(rank["rank"]): int(rank["pid"]) for ranks in started for rank in ranks}

    # The engine

    async def keep_engine(self) -> None:
        """Keep an engine running; after it died, this node joins again, without workers."""
        deaths: list[float] = []
        was_up = False
        while True:
            greeting = self._tasks.spawn(self._greet(), "greet")
            how = await self.engine.run()
            greeting.cancel()
            if self._closing:
                return
            log.warning("the engine ended: %s", how)
            self._context.snapshots.end_group()
            if self.engine.is_superseded:
                self.engine = self._make_engine(self._on_engine)
                self._replaced.set()
                continue
            if self.running is not None:
                self._tasks.spawn(self._context.logs.finish(self.running), "finish the logs")
            self.running, self.reports = None, []
            if not self.engine.replaceable:
                # The node ends with the torchrun that had the workers.
                await self._node.link.send("gone", {"reason": how})
                self._context.life.finish(how, linger=False)
                return
            self.incarnation = secrets.token_hex(8)
            self.reason = f"its engine died ({how})"
            now = clocks.now()
            deaths = [*(when for when in deaths if now - when < ENGINE_WINDOW_S), now]
            if len(deaths) >= ENGINE_DEATHS:
                minutes = ENGINE_WINDOW_S / 60
                self.engine.give_up(f"its engine died {len(deaths)} times in {minutes:.0f} minutes, last: {how}")
            was_up = was_up or bool(self.engine.facts)
            if len(deaths) >= ENGINE_DEATHS or not (was_up or self.engine.has_served):
                self._node.report("unfit", {"reason": self.engine.problem})
                return
            if not self.engine.facts and not self.engine.has_served:
                # What starts containers may be starting again itself.
                await asyncio.sleep(START_AGAIN_S * len(deaths))
            self.engine = self._make_engine(self._on_engine)
            await self._node.link.rejoin()

    async def _enter(self, version: str | None) -> None:
        """Put the work tree of the next group in place, with an engine that runs in what it needs; raises Problem."""
        await self._context.tree.switch(version)
        old = self.engine
        if old.replaceable and old.ready.is_set() and old.runs_in != await self._context.runtime.name():
            self._replaced.clear()
            await old.give_way()
            await asyncio.wait_for(self._replaced.wait(), CALL_TIMEOUT_S)
            await asyncio.wait_for(self.engine.ready.wait(), IMPORT_TIMEOUT_S)
            if self.engine.problem is not None:
                raise Problem("engine", self.engine.problem)

    async def _greet(self) -> None:
        await self.engine.ready.wait()
        await self._node.report_readiness()

    async def _on_engine(self, op: str, args: Args) -> None:
        if op == "exited" and args["exit"]["code"] != 0:
            self._context.snapshots.end_group()
        self._node.report(op, args)

    async def _keep_standby(self) -> None:
        """Have the engine start a waiting process, once ranks have made steps, or have run long enough without any."""
        asked, seen, stepped_at = -1, -1, 0.0
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            generation, now = self.generation, clocks.now()
            if self.running != generation or asked == generation:
                continue
            ranks = self._context.logs.progress(generation).values()
            if seen != generation and any(rank["step"] is not None for rank in ranks):
                seen, stepped_at = generation, now
            since, patience_s = (stepped_at, STEADY_S) if seen == generation else (self.begun_at, SILENT_S)
            if now - since < patience_s:
                continue
            asked = generation
            try:
                await self.engine.call("standby", {"generation": generation}, CALL_TIMEOUT_S)
            except (CallFailed, WireError, asyncio.TimeoutError) as error:
                log.info("no waiting process: %s", str(error) or "no answer in time")

    # Orders

    def order(self, op: str, args: Args) -> None:
        """Queue an order of the coordinator; an immediate kill overtakes queued orders."""
        if op == "stop":
            self._context.snapshots.end_group()
        if op == "stop" and not args["grace_s"]:
            self._tasks.spawn(self.stop(args), "kill")
        elif op == "pulse":
            self._tasks.spawn(self._pulse(args), "pulse")
        elif op == "sample":
            self.sampling.order(args)
        else:
            self._orders.put_nowait((op, args))

    async def carry_out_orders(self) -> None:
        """Carry out queued orders until cancelled, whatever fails."""
        while True:
            op, args = await self._orders.get()
            try:
                await self._carry_out(op, args)
            except Exception:
                # A failed order only misses its deadline at the coordinator; the next one must still be carried out.
                log.exception("order %s", op)

    async def _carry_out(self, op: str, args: Args) -> None:
        if op == "stop":
            await self.stop(args)
        elif op in ("prepare", "go"):
            await self._try(op, args)
        elif op in ("snapshots", "restore"):
            await self._cancel_resuming()
            self._resuming = self._tasks.spawn(self._resume(op, args), op)
        elif op in ("leave", "end"):
            await self.stop({"generation": self.generation, "grace_s": 0.0, "collect": False})
            # A node that leaves may be added again at once: a new agent then replaces this one.
            self._context.life.finish(str(args.get("state") or args.get("reason")), linger=op == "end")

    async def _try(self, op: str, args: Args) -> None:
        generation = int(args["generation"])
        if generation < self.generation or (op == "go" and self.running is not None):
            log.warning("order %s of generation %d ignored: this node is in %d", op, generation, self.generation)
            return
        try:
            await (self._prepare(args) if op == "prepare" else self._go(args))
        except (OSError, Problem, WireError, asyncio.TimeoutError) as error:
            why = str(error) or "no answer in time"
            self._node.report("order_failed", {"generation": generation, "message": f"{op}: {why}"})

    async def _prepare(self, args: Args) -> None:
        if self.running is None:
            await self._enter(args.get("tree"))
        done = await self.engine.call("prepare", orders.prepare(self._context, args))
        self._node.report("prepared", {"generation": int(args["generation"]), "port": done["port"]})

    async def _go(self, args: Args) -> None:
        generation = int(args["generation"])
        self.generation, self.running, self.reports = generation, generation, []
        self.begun_at = clocks.now()
        await self._enter(args.get("tree"))
        if self.running == generation and self._node.lease_is_over():
            self.running = None
            await self._node.link.ask_for_lease()
            self._node.report("idle", {"generation": generation, "exits": []})
        # The generation may have been stopped already: a `go` may be read late, and switching the tree takes time.
        if self.running == generation:
            self._context.snapshots.begin_group()
            done = await self.engine.call("go", orders.go(self._context, args), CALL_TIMEOUT_S * 6)
            started = {name: done.get(name) for name in ("ranks", "notice", "cold")}
            self._node.report("started", {"generation": generation, **started})

    async def _resume(self, op: str, args: Args) -> None:
        """Say which snapshots this node has, or put those in place from which the next group resumes."""
        generation, snapshots = int(args["generation"]), self._context.snapshots
        if op == "snapshots":
            held = await snapshots.hold(args.get("keep") or ())
            self._node.report("held", {"generation": generation, "snapshots": held})
        else:
            report = await snapshots.restore(args["snapshots"], args.get("skipped") or ())
            self._node.report("placed", {"generation": generation, **report})

    async def _cancel_resuming(self) -> None:
        if self._resuming is not None:
            self._resuming.cancel()
            await asyncio.gather(self._resuming, return_exceptions=True)

    async def stop(self, args: Args, margin_s: float | None = None) -> None:
        """End the workers up to a generation, and report this node idle; margin_s: what the engine has after grace."""
        self._context.snapshots.end_group()
        await self._cancel_resuming()
        generation, ran = int(args["generation"]), self.running
        exits: list[RankExit] | None = []
        if ran is not None and ran <= generation:
            default_s = STOP_MARGIN_S if args["grace_s"] else KILL_MARGIN_S
            exits = await self._end_workers(ran, args, default_s if margin_s is None else margin_s)
            if exits is None:
                # The node is not idle yet: it joins again with its next engine.
                return
            if self.running == ran:
                self.running = None
            self._tasks.spawn(self._context.logs.finish(ran), "finish the logs")
        self._node.report("idle", {"generation": generation, "exits": exits})

    async def _end_workers(self, ran: int, args: Args, margin_s: float) -> list[RankExit] | None:
        """Return the exits of a generation's workers; None when they had to be ended together with their engine."""
        engine, grace_s = self.engine, float(args["grace_s"])
        if not engine.has_started:
            return []
        try:
            answer = await engine.call("stop", {**args, "generation": ran}, grace_s + margin_s)
        except (CallFailed, WireError, asyncio.TimeoutError) as error:
            if self.running == ran:
                log.warning("stop: %s; ending the engine", str(error) or "no answer in time")
                await (engine.close() if grace_s else engine.kill())
            return None
        return list(answer["exits"])

    async def _pulse(self, args: Args) -> None:
        """Report what the ranks are doing; without an answer of the engine nothing is reported."""
        with contextlib.suppress(CallFailed, WireError, asyncio.TimeoutError):
            answer = await self.engine.call("pulse", {"stacks": args["stacks"]}, CALL_TIMEOUT_S)
            ranks = with_steps(self._context.logs.progress(self.generation), answer["ranks"])
            self._node.report("pulse", {"generation": int(args["generation"]), "ranks": ranks})


def with_steps(progress: Progress, pulses: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return these pulses with `step`: the step and the loss that each rank has printed last."""
    steps = {str(rank): [seen["step"], seen["loss"]] for rank, seen in progress.items()}
    return {rank: {**pulse, "step": steps.get(rank)} for rank, pulse in pulses.items()}
