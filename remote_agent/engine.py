"""The agent's child that has torch: it starts and stops this node's workers, generation by generation.

In: requests on stdin. Out: answers and notices on stdout. When stdin ends, every worker is killed at once.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import gc
import importlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from remote_agent import allocation, engine_boot, engine_elastic, engine_watch
from remote_agent.engine_group import Group, within
from remote_agent.engine_start import OWN_VARIABLES, Order, link_logs, link_nccl, rank_directories, worker_environment
from remote_agent.host_notes import Host
from remote_agent.wire import Answer, Channel, ChannelClosed, Problem, WireError

log = logging.getLogger(__name__)

# A start takes milliseconds; a `stop` that comes meanwhile waits for it, on a node that swaps for longer.
START_S = 20.0
STORE_S = 30.0
# From the agent's death to the end of all its workers: two seconds are promised.
VANISH_S = 0.7
# Of what the agent grants: then a second look, as its word may wait in the pipe after this process stood still.
FIRST_LOOK = 0.9
REAP_S = 5


class Engine:
    """What this process is asked to do, one generation at a time."""

    def __init__(self, job: str) -> None:
        self._job = job
        # Only this thread starts processes: the kernel kills them when the thread that started them ends,
        # and torch does not install its signal handlers in it.
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "torch")
        self._torch: asyncio.Future[Any] = asyncio.ensure_future(self._in_thread(_import_torch))
        self._current = -1
        """The newest generation that was started."""
        self._floor = -1
        """No generation up to this one may be started any more."""
        self._group: Group | engine_elastic.ElasticGroup | None = None
        self._runner: asyncio.Task[None] | None = None
        self._starting: asyncio.Future[None] | None = None
        self._store: Any = None
        self._host = Host()
        self._granted_s = 0.0
        self._word = asyncio.Event()
        """Set by each word of the agent that it lives."""
        self._outbox: asyncio.Queue[tuple[str, dict[str, Any]]] = asyncio.Queue()
        self._ops = {
            "hello": self._hello,
            "lease": self._renew,
            "prepare": self._prepare,
            "go": self._go,
            "stop": self._stop,
            "stacks": self._stacks,
            "pulse": self._pulse,
            "signal": self._signal,
            "keep": self._keep,
        }

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer until the agent is gone, or stands still, then end every worker."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self._child_died)
        told = asyncio.Event()
        # In a Slurm step it comes to the workers as well, who may save; the agent says what follows.
        loop.add_signal_handler(signal.SIGTERM, lambda: None if allocation.ending() else told.set())
        await self._serve(Channel(reader, writer, self._handle), told)

    async def _serve(self, channel: Channel, told: asyncio.Event) -> None:
        # `closed` is set before `run` has ended what it serves: workers must not wait for that.
        waits = (channel.run(), self._send_notices(channel), channel.closed.wait(), told.wait(), self._outlast())
        tasks = [asyncio.ensure_future(wait) for wait in waits]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        await self._vanish()

    async def _renew(self, args: dict[str, Any]) -> dict[str, Any]:
        """The agent lives; for so many seconds more nobody gives its node up."""
        self._granted_s = float(args["s"])
        self._word.set()
        return {}

    async def _outlast(self) -> None:
        """Return when an agent that lives has stood still for too long: others may start the next group soon."""
        await self._word.wait()
        while await self._hears(FIRST_LOOK) or await self._hears(1.0 - FIRST_LOOK):
            self._word.clear()
        log.warning("the agent has said nothing for %.1f s", self._granted_s)

    async def _hears(self, share: float) -> bool:
        return await within(self._word, share * self._granted_s)

    async def _handle(self, op: str, args: dict[str, Any], body: bytes) -> Answer:
        handler = self._ops.get(op)
        if handler is None:
            raise Problem("unknown_op", f"no such request to an engine: {op}")
        return Answer(await handler(args))

    async def _in_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(function, *args))

    async def _finish_in_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run something that cannot be taken back half done: who is cancelled waits for its end all the same."""
        running = asyncio.ensure_future(self._in_thread(function, *args))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait({running})
            raise

    async def _torch_module(self) -> Any:
        """Return engine_torch once it is imported; raises Problem when it cannot be."""
        try:
            return await asyncio.shield(self._torch)
        except Exception as error:  # whatever a broken installation raises
            message = f"torch does not import: {type(error).__name__}: {error}"
            raise Problem("engine", message, f"look at {sys.executable} -c 'import torch'") from error

    async def _hello(self, args: dict[str, Any]) -> dict[str, Any]:
        torch = await self._torch_module()
        facts: dict[str, Any] = await self._in_thread(torch.facts)
        return facts

    async def _prepare(self, args: dict[str, Any]) -> dict[str, Any]:
        generation = _number(args, "generation")
        if generation <= self._floor:
            raise Problem("stale", f"generation {generation} is over")
        torch = await self._torch_module()
        # The one before served a generation that is over, perhaps on this very port.
        self._store = None
        opening = self._in_thread(torch.open_store, str(args.get("host")), _number({"port": 0, **args}, "port"))
        try:
            store = await asyncio.wait_for(opening, STORE_S)
        except (OSError, RuntimeError, ValueError, asyncio.TimeoutError) as error:
            text = str(error).partition("\n")[0] or "no answer"
            hint = "is the `address` of this host right?"
            raise Problem("store", f"no store on {args.get('host')}: {text}", hint) from error
        self._store = store if args.get("hold", True) else None
        return {"port": store.port}

    async def _go(self, args: dict[str, Any]) -> dict[str, Any]:
        order = Order.from_args(args)
        torch = await self._torch_module()
        if order.generation <= self._floor:
            raise Problem("stale", f"generation {order.generation} is over")
        if self._starting is not None or (self._group is not None and not self._group.ended.is_set()):
            raise Problem("busy", f"generation {self._current} still runs")
        self._current = self._floor = order.generation
        self._starting = asyncio.get_running_loop().create_future()
        group: Group | engine_elastic.ElasticGroup
        try:
            self._host.begin(Path(order.cwd), order.log_dir)
            if order.rendezvous is None:
                group, ranks = await self._start(torch, order)
            else:
                group, ranks = await self._start_torchrun(order)
        except (OSError, RuntimeError, ValueError) as error:
            await self._orphans().sweep((), VANISH_S)
            raise Problem("start", f"workers do not start: {type(error).__name__}: {error}") from error
        except asyncio.CancelledError:
            # Nobody waits for them any more.
            await self._orphans().sweep((), VANISH_S)
            raise
        finally:
            self._starting.set_result(None)
            self._starting = None
        # From here to the answer nothing else runs: no notice of this generation comes before it.
        self._group = group
        self._runner = asyncio.ensure_future(group.run())
        group.watch(lambda op, notice: self._outbox.put_nowait((op, notice)))
        answer: dict[str, Any] = {"ranks": ranks, "t_ns": time.time_ns()}
        if isinstance(group, engine_elastic.ElasticGroup):
            answer["agent"] = {"pid": group.agent.pid, "started": group.agent.started}
        return answer

    async def _start(self, torch: Any, order: Order) -> tuple[Group, list[dict[str, Any]]]:
        directories = rank_directories(order)
        link_logs(order, directories)
        boot = engine_boot.BootDirectory(order.log_dir)
        try:
            pids, reap = await self._spawn(torch, order, boot, directories)
            link_nccl(order, pids, directories)
        except BaseException:
            boot.close()
            raise
        workers = [
            engine_watch.Worker(order.base_rank + local_rank, local_rank, pid, directories[local_rank])
            for local_rank, pid in sorted(pids.items())
        ]
        group = Group(order.generation, boot, workers, reap, self._host, self._orphans())
        ranks = [
            {"rank": one.rank, "local_rank": one.local_rank, "pid": one.pid, "started": one.started} for one in workers
        ]
        return group, ranks

    async def _spawn(
        self, torch: Any, order: Order, boot: engine_boot.BootDirectory, directories: dict[int, Path]
    ) -> tuple[dict[int, int], Callable[[], None]]:
        """Start the workers; returns their pids by local rank, and what reaps them when they are dead."""
        context = await self._finish_in_thread(_start_workers, torch, self._job, order, boot.path, directories)
        return context.pids(), partial(context.close, signal.SIGKILL, REAP_S)

    def _orphans(self) -> engine_watch.Orphans:
        """Return what ends the children of this process that are nobody's."""
        return engine_watch.Orphans()

    async def _start_torchrun(self, order: Order) -> tuple[engine_elastic.ElasticGroup, list[dict[str, Any]]]:
        order.log_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        boot = engine_boot.BootDirectory(order.log_dir)
        try:
            process = await self._finish_in_thread(engine_elastic.start, self._job, order, boot)
        except BaseException:
            boot.close()
            raise
        return engine_elastic.ElasticGroup(order, boot, process, self._host), []

    async def _stop(self, args: dict[str, Any]) -> dict[str, Any]:
        generation = _number(args, "generation")
        if generation < self._current:
            raise Problem("stale", f"generation {generation} is over, {self._current} is here")
        # A `go` that comes later than its `stop` must not start anything.
        self._floor = max(self._floor, generation)
        if self._starting is not None:
            try:
                await asyncio.wait_for(asyncio.shield(self._starting), START_S)
            except asyncio.TimeoutError as error:
                raise Problem("stuck", f"workers of generation {self._current} are still being started") from error
        nothing: dict[str, Any] = {"exits": [], "stacks": {}}
        if self._group is None:
            return nothing
        # Also what an older generation left running: nothing up to this one may go on.
        answer = await self._group.stop(float(args.get("grace_s", 0.0)), bool(args.get("collect", False)))
        return answer if self._group.generation == generation else nothing

    def _live_group(self) -> Group | engine_elastic.ElasticGroup:
        if self._group is None or self._group.ended.is_set():
            raise Problem("no_workers", "no worker runs on this node")
        return self._group

    async def _stacks(self, args: dict[str, Any]) -> dict[str, Any]:
        return await self._live_group().stacks(args.get("ranks"))

    async def _pulse(self, args: dict[str, Any]) -> dict[str, Any]:
        return {"ranks": await self._live_group().pulses(bool(args.get("stacks")))}

    async def _keep(self, args: dict[str, Any]) -> dict[str, Any]:
        return {"files": await self._live_group().keep(args.get("ranks"))}

    async def _signal(self, args: dict[str, Any]) -> dict[str, Any]:
        return {"refused": self._live_group().send(args["pids"], str(args["signal"]))}

    async def _send_notices(self, channel: Channel) -> None:
        while True:
            op, args = await self._outbox.get()
            try:
                await channel.notify(op, args)
            except ChannelClosed:
                return
            except WireError as error:
                log.error("notice %s is not sent: %s", op, error)

    def _child_died(self) -> None:
        # While workers are being started nobody knows which children are theirs.
        if self._group is not None and self._starting is None:
            self._group.tend()

    async def _vanish(self) -> None:
        if self._starting is not None:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._starting), VANISH_S)
        if self._group is not None:
            await self._group.vanish(VANISH_S)
        await self._orphans().sweep((), VANISH_S)


def _import_torch() -> Any:
    # What it makes stays: the collector would look through all of it again and again, for a tenth of the time and more.
    gc.disable()
    try:
        return importlib.import_module("remote_agent.engine_torch")
    finally:
        gc.enable()
        gc.freeze()


def _start_workers(torch: Any, job: str, order: Order, boot: Path, directories: dict[int, Path]) -> Any:
    """Start the workers, in the thread that lives as long as this process; returns torch's PContext."""
    leaked = torch.leaked_environment()
    envs, commands = {}, {}
    for local_rank in directories:
        env = worker_environment(order, local_rank, leaked)
        commands[local_rank] = engine_boot.command(job, order.kind, boot, env, [order.script, *order.args])
        if order.kind != "binary":
            engine_boot.add_bootstrap(env, boot)
        envs[local_rank] = env
    # Workers inherit the directory; everything of ours is absolute.
    os.chdir(order.cwd)
    files = torch.RankFiles(str(order.log_dir), {number: str(path) for number, path in directories.items()})
    return torch.start(order.role, commands, envs, files, order.numa_binding)


def _number(args: dict[str, Any], name: str) -> int:
    value = args.get(name)
    if not isinstance(value, int):
        raise Problem("bad_request", f"{name} is not a number: {value!r}")
    return value


def take_wire() -> tuple[int, int]:
    """Return private copies of stdin and stdout; then stdin is empty and stdout goes to stderr, for whoever prints."""
    wire = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return wire


async def _connect(read_fd: int, write_fd: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_fd, "rb", 0))
    transport, protocol = await loop.connect_write_pipe(
        lambda: asyncio.StreamReaderProtocol(asyncio.StreamReader()), os.fdopen(write_fd, "wb", 0)
    )
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


async def _run(job: str, wire: tuple[int, int]) -> None:
    reader, writer = await _connect(*wire)
    await Engine(job).serve(reader, writer)


def inherit_nothing_unusual() -> None:
    """Undo what the agent set for itself, so that workers start as under torchrun: signals, mask, variables."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        # Not SIG_IGN, which a worker would inherit: a handler is reset when it starts.
        signal.signal(number, lambda _number, _frame: None)
    for name in OWN_VARIABLES:
        os.environ.pop(name, None)


def main(job: str) -> int:
    """Serve the agent on stdin and stdout until it is gone; then this process ends, whatever torch's threads do."""
    wire = take_wire()
    layout = f"%(asctime)s engine {job} %(levelname)s %(message)s"
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format=layout)
    inherit_nothing_unusual()
    engine_watch.adopt_orphans()
    status = 1
    try:
        asyncio.new_event_loop().run_until_complete(_run(job, wire))
        status = 0
    except BaseException:
        log.exception("the engine fails")
        raise
    finally:
        os._exit(status)
