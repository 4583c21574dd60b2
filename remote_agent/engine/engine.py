"""The agent's child process that has the workers: it starts and stops this node's workers, generation by generation.

In: requests of the agent, at whose socket it calls. Out: answers and notices. When the connection ends, every worker
is killed at once.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import logging
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remote_agent.base.ports import NoFreePort, reached_as
from remote_agent.base.proc import slurm_ending
from remote_agent.base.streams import open_unix
from remote_agent.base.tasks import to_the_end, within
from remote_agent.engine import installed
from remote_agent.engine.launchers import own, torch_agent
from remote_agent.engine.launchers.launcher import Launch, LaunchContext, WorkerGroup
from remote_agent.engine.order import OWN_VARIABLES, Order, whole_environment
from remote_agent.engine.processes import Orphans, adopt_orphans
from remote_agent.engine.standby import Standby
from remote_agent.engine.torch_processes import Torch, TorchProcesses
from remote_agent.vitals import netif
from remote_agent.vitals.host_notes import HostNotes
from remote_agent.wire import Answer, Args, Channel, ChannelClosed, Problem, WireError

if TYPE_CHECKING:
    from remote_agent.wire.answers import (
        NetworkNotice,
        RankStacks,
        SampledRanks,
        StartedWorkers,
        StoppedWorkers,
        TorchFacts,
    )

log = logging.getLogger(__name__)

# A start takes milliseconds, on a node that swaps more; a `stop` that comes meanwhile waits for it.
START_S = 20.0
# From the agent's death to the end of all its workers at most two seconds may pass.
VANISH_S = 0.7
# After this share of the granted time the lease is checked again: if this process was stopped, the agent's renewal
# may be waiting in the pipe.
FIRST_LOOK = 0.9


async def launch(context: LaunchContext, order: Order) -> WorkerGroup:
    """Start the workers: by torch's own agent where the order has a rendezvous."""
    return await (own.start(context, order) if order.rendezvous is None else torch_agent.start(context, order))


class Engine:
    """Carries out the agent's requests, one generation at a time."""

    def __init__(
        self, job: str, start_workers: Launch = launch, orphans: Orphans | None = None, torch: Torch | None = None
    ) -> None:
        self._start_workers = start_workers
        self._orphans = orphans or Orphans()
        # Only this thread starts processes: the kernel kills them when the thread that started them ends, and torch
        # does not install its signal handlers in it.
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "processes")
        self._torch = torch or TorchProcesses(job, self._finish_in_thread, self._orphans, self._store_failed)
        self._facts: asyncio.Task[TorchFacts] | None = None
        """The facts about the installed torch, once they have been requested."""
        # A name server that does not answer takes seconds.
        self._own_name = asyncio.ensure_future(netif.own_name_address())
        self._current = -1
        """The newest generation that was started."""
        self._floor = -1
        """Generations up to this one may no longer be started."""
        self._group: WorkerGroup | None = None
        self._runner: asyncio.Task[None] | None = None
        self._starting: asyncio.Future[None] | None = None
        self._prepared = -1
        """The newest generation for which a store was opened."""
        self._notes = HostNotes()
        self._granted_s = 0.0
        self._renewed = asyncio.Event()
        """Set by each sign of life of the agent."""
        self._outbox: asyncio.Queue[tuple[str, Mapping[str, object]]] = asyncio.Queue()
        self._standby = Standby(
            self._orphans, self._finish_in_thread, lambda facts: self._outbox.put_nowait(("standby", facts))
        )
        self._ops: dict[str, Callable[[Args], Awaitable[Mapping[str, object]]]] = {
            "hello": self._hello,
            "lease": self._renew,
            "prepare": self._prepare,
            "go": self._go,
            "stop": self._stop,
            "stacks": self._stacks,
            "pulse": self._pulse,
            "sample": self._sample,
            "signal": self._signal,
            "keep": self._keep,
            "standby": self._begin_standby,
            "rest": self._rest,
            "next": self._next,
        }

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer until the agent is gone or suspended, then end every worker."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self._child_died)
        terminated = asyncio.Event()
        # In a Slurm step the workers get this signal too and may save; the agent decides what follows.
        loop.add_signal_handler(signal.SIGTERM, lambda: None if slurm_ending() else terminated.set())
        await self._serve(Channel(reader, writer, self._handle), terminated)

    async def _serve(self, channel: Channel, terminated: asyncio.Event) -> None:
        # `closed` is set before `run` has ended its handlers, and workers must not wait for those.
        waits = (
            channel.run(),
            self._send_notices(channel),
            channel.closed.wait(),
            terminated.wait(),
            self._wait_for_silence(),
        )
        tasks = [asyncio.ensure_future(wait) for wait in waits]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        await self._vanish()

    async def _renew(self, args: Args) -> Mapping[str, object]:
        """Note that the agent is alive; for this many seconds the other nodes do not give up this node."""
        self._granted_s = float(args["s"])
        self._renewed.set()
        return {}

    async def _wait_for_silence(self) -> None:
        """Return when a live agent has been silent for too long: other nodes may start the next group soon."""
        await self._renewed.wait()
        while await self._is_renewed(FIRST_LOOK) or await self._is_renewed(1.0 - FIRST_LOOK):
            self._renewed.clear()
        log.warning("no message from the agent for %.1f s", self._granted_s)

    async def _is_renewed(self, share: float) -> bool:
        return await within(self._renewed, share * self._granted_s)

    async def _handle(self, op: str, args: Args, body: bytes) -> Answer:
        handler = self._ops.get(op)
        if handler is None:
            raise Problem("unknown_op", f"unknown request to an engine: {op}")
        return Answer(await handler(args))

    async def _in_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(function, *args))

    async def _finish_in_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        return await to_the_end(self._in_thread(function, *args))

    async def _installed(self, here: installed.Installation | None = None, nproc: str = "1") -> TorchFacts:
        """Return torch's facts; raises Problem when it cannot be imported."""
        if self._facts is None:
            here = here or installed.Installation("", self._torch.ask)
            self._facts = asyncio.ensure_future(here.facts(nproc))
        facts = await asyncio.shield(self._facts)
        if "error" in facts:
            hint = f"look at {sys.executable} -c 'import torch'"
            raise Problem("engine", f"torch cannot be imported: {facts['error']}", hint)
        return facts

    async def _hello(self, args: Args) -> TorchFacts:
        """Return what is installed; `order`: what `go` will probably have, to prepare for it meanwhile."""
        known, nproc = str(args.get("known") or ""), str(args.get("nproc") or "1")
        here = installed.Installation(known, self._torch.ask)
        remembered = here.remembered()
        if remembered is not None:
            await self._expect(args.get("order"), nproc, remembered)
        facts = await self._installed(here, nproc)
        if remembered is None:
            await self._expect(args.get("order"), nproc, facts)
        shown: TorchFacts = {
            "torch": facts["torch"],
            "python": facts["python"],
            "gpus": facts["gpus"],
            "devices": facts["devices"],
            "cuda": facts["cuda"],
            "nccl": facts["nccl"],
            "pid": os.getpid(),
        }
        return shown

    async def _expect(self, order: Any, nproc: str, facts: TorchFacts) -> None:
        """Start the waiting process for the ranks of an order that has not come yet."""
        count = int(nproc) if nproc.isdigit() else int(facts["devices"].get(nproc, 0))
        if not isinstance(order, dict) or not count:
            return
        sizes = {"local_world_size": count, "world_size": count * _number(order, "group_world_size")}
        with contextlib.suppress(Problem):
            expected = Order.from_args({**order, **sizes})
            self._standby.note_start(expected, whole_environment(expected, 0, facts["leaked"]), None)
            await self._standby.begin(is_urgent=True)

    def _store_failed(self, why: str) -> None:
        self._outbox.put_nowait(("order_failed", {"generation": self._prepared, "message": why}))

    async def _prepare(self, args: Args) -> Mapping[str, object]:
        generation = _number(args, "generation")
        if generation <= self._floor:
            raise Problem("stale", f"generation {generation} is over")
        await self._installed()
        host, port = str(args.get("host")), _number({"port": 0, **args}, "port")
        loop = asyncio.get_running_loop()
        try:
            # The previous store belongs to an ended generation and may use this very port.
            await self._torch.drop()
            listening = await loop.run_in_executor(None, reached_as, host, port, str(args.get("ports") or ""))
            port = listening.getsockname()[1]
            self._prepared = generation
            if args.get("hold", True):
                await self._torch.serve(host, listening)
            else:
                listening.close()
        except NoFreePort as error:
            raise Problem("ports", f"no store: {error}", "ss -ltnp shows what uses them") from error
        except (OSError, RuntimeError, ValueError, asyncio.TimeoutError) as error:
            text = str(error).partition("\n")[0] or "no answer"
            raise Problem("store", f"no store on {host}: {text}", "is the `address` of this host right?") from error
        return {"port": port}

    async def _go(self, args: Args) -> StartedWorkers:
        order = Order.from_args(args)
        leaked = (await self._installed())["leaked"]
        context = LaunchContext(self._notes, self._orphans, leaked, self._finish_in_thread, self._standby)
        if order.generation <= self._floor:
            raise Problem("stale", f"generation {order.generation} is over")
        self._refuse_while_running()
        self._current = self._floor = order.generation
        self._starting = asyncio.get_running_loop().create_future()
        try:
            order, notice = await self._with_sockets(order)
            self._notes.begin(Path(order.cwd), order.log_dir)
            group = await self._start_workers(context, order)
        except (OSError, RuntimeError, ValueError) as error:
            await self._orphans.sweep((), VANISH_S)
            raise Problem("start", f"workers cannot be started: {type(error).__name__}: {error}") from error
        except asyncio.CancelledError:
            # The agent no longer waits for them.
            await self._orphans.sweep((), VANISH_S)
            raise
        finally:
            self._starting.set_result(None)
            self._starting = None
        # Nothing else runs until the answer is sent, so no notice of this generation overtakes it.
        self._group = group
        self._runner = asyncio.ensure_future(group.run())
        group.watch(lambda op, notice: self._outbox.put_nowait((op, notice)))
        return {**group.answer(), "t_ns": time.time_ns(), "notice": notice}

    async def _with_sockets(self, order: Order) -> tuple[Order, NetworkNotice | None]:
        """Return the order with the variables by which other nodes reach its workers, and what to say about them."""
        if order.group_world_size == 1 and order.rendezvous is None:
            return order, None
        environment = {**os.environ, **order.env}
        sockets = await netif.sockets(order.address, await asyncio.shield(self._own_name), environment)
        notice: NetworkNotice | None = {"kind": sockets.kind, "message": sockets.notice} if sockets.notice else None
        return dataclasses.replace(order, env={**order.env, **sockets.variables}), notice

    async def _stop(self, args: Args) -> StoppedWorkers:
        generation = _number(args, "generation")
        if generation < self._current:
            raise Problem("stale", f"generation {generation} is over, {self._current} is here")
        # A `go` that arrives after its `stop` must not start anything.
        self._floor = max(self._floor, generation)
        if self._starting is not None:
            self._standby.stop_waiting()
            try:
                await asyncio.wait_for(asyncio.shield(self._starting), START_S)
            except asyncio.TimeoutError as error:
                raise Problem("stuck", f"workers of generation {self._current} are still being started") from error
        nothing: StoppedWorkers = {"exits": [], "stacks": {}}
        if self._group is None:
            return nothing
        # An older generation is stopped too: nothing up to this one may continue.
        answer = await self._group.stop(float(args.get("grace_s", 0.0)), bool(args.get("collect", False)))
        return answer if self._group.generation == generation else nothing

    def _live_group(self) -> WorkerGroup:
        if self._group is None or self._group.ended.is_set():
            raise Problem("no_workers", "no worker runs on this node")
        return self._group

    async def _stacks(self, args: Args) -> RankStacks:
        return await self._live_group().stacks(args.get("ranks"))

    async def _pulse(self, args: Args) -> Mapping[str, object]:
        return {"ranks": await self._live_group().pulses(bool(args.get("stacks")))}

    async def _sample(self, args: Args) -> SampledRanks:
        times = _number(args, "until_ns"), _number(args, "shift_ns")
        return await self._live_group().sample(*times, bool(args.get("routine")))

    async def _keep(self, args: Args) -> Mapping[str, object]:
        return {"files": await self._live_group().keep(args.get("ranks"))}

    async def _signal(self, args: Args) -> Mapping[str, object]:
        return {"refused": self._live_group().send(args["pids"], str(args["signal"]))}

    async def _begin_standby(self, args: Args) -> Mapping[str, object]:
        """Start the waiting process, now that the ranks have made steps."""
        if self._live_group().generation == _number(args, "generation"):
            await self._standby.begin()
        return {}

    async def _rest(self, args: Args) -> Mapping[str, object]:
        """Start the waiting process for the next job, now that this one is over."""
        self._refuse_while_running()
        # No rank runs here that it could slow down.
        await self._standby.begin(is_urgent=True)
        return {}

    async def _next(self, args: Args) -> Mapping[str, object]:
        """Serve another job: what is loaded stays, and all else is as if this process had just been started."""
        self._refuse_while_running()
        if args["env"] is not None:
            os.environ.clear()
            os.environ.update({str(name): str(value) for name, value in args["env"].items()})
        forget_own_variables()
        log_file = os.open(args["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        for number in (1, 2):
            os.dup2(log_file, number)
        os.close(log_file)
        self._current = self._floor = self._prepared = -1
        self._group = self._facts = None
        self._notes = HostNotes()
        return {}

    def _refuse_while_running(self) -> None:
        if self._starting is not None or (self._group is not None and not self._group.ended.is_set()):
            raise Problem("busy", f"generation {self._current} still runs")

    async def _send_notices(self, channel: Channel) -> None:
        while True:
            op, args = await self._outbox.get()
            try:
                await channel.notify(op, args)
            except ChannelClosed:
                return
            except WireError as error:
                log.error("cannot send notice %s: %s", op, error)

    def _child_died(self) -> None:
        # During a start, the pids of the workers are not known yet.
        if self._group is not None and self._starting is None:
            self._group.tend()

    async def _vanish(self) -> None:
        if self._starting is not None:
            self._standby.stop_waiting()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._starting), VANISH_S)
        if self._group is not None:
            await self._group.vanish(VANISH_S)
        await self._standby.close()
        await self._torch.close()
        await self._orphans.sweep((), VANISH_S)


def _number(args: Args, name: str) -> int:
    value = args.get(name)
    if not isinstance(value, int):
        raise Problem("bad_request", f"{name} is not a number: {value!r}")
    return value


async def _run(job: str, wire: Path) -> None:
    await Engine(job).serve(*await open_unix(wire))


def inherit_nothing_unusual() -> None:
    """Undo the agent's signal handlers, mask and variables, so that workers start as under torchrun."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        # A worker would inherit SIG_IGN; a handler is reset when it starts.
        signal.signal(number, lambda _number, _frame: None)
    forget_own_variables()


def forget_own_variables() -> None:
    """Remove the variables that are for the agent only."""
    for name in OWN_VARIABLES:
        os.environ.pop(name, None)


def main(job: str, wire: str) -> int:
    """Serve the agent that waits at a socket until it is gone; then end this process despite its threads."""
    # What workers inherit as stdin is empty, and what the engine prints goes where its log goes.
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    layout = "%(asctime)s engine %(levelname)s %(message)s"
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format=layout)
    inherit_nothing_unusual()
    adopt_orphans()
    status = 1
    try:
        asyncio.new_event_loop().run_until_complete(_run(job, Path(wire)))
        status = 0
    except BaseException:
        log.exception("the engine failed")
        raise
    finally:
        os._exit(status)
