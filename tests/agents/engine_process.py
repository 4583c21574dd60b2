"""A real engine, driven as an agent drives it.

In: requests of a test. Out: answers and notices of an engine process; it is ended with the test.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import shutil
import sys
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from remote_agent.base.proc import stat_fields
from remote_agent.base.streams import serve_unix
from remote_agent.wire import Answer, Channel
from tests import known_torch

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
PROGRAM = (
    sys.executable,
    "-c",
    "import sys; from remote_agent.engine.engine import main; main(sys.argv[1], sys.argv[3])",
)
PY_SPY = shutil.which("py-spy", path=str(Path(sys.executable).parent))
DEADLINE_S = 60.0
T = TypeVar("T")


class EngineProcess:
    """One engine and what it has said so far."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        wire: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        root: Path,
    ) -> None:
        self.process = process
        self.root = root
        self.mains: dict[tuple[int, int], int] = {}
        self.exits: dict[tuple[int, int], Any] = {}
        self.assigned: list[Any] = []
        self.failed: list[Any] = []
        self.grouped: dict[tuple[int, int], Any] = {}
        self.standby: list[Any] = []
        self._changed = asyncio.Event()
        self._is_asked = False
        self.channel = Channel(*wire, self._hear)
        self.runner = asyncio.ensure_future(self.channel.run())

    async def _hear(self, op: str, args: Any, body: bytes) -> Answer:
        if op == "main":
            self.mains[args["generation"], args["rank"]] = args["t_ns"]
        elif op == "assigned":
            self.assigned.append(args)
        elif op == "grouped":
            self.grouped[args["generation"], args["rank"]] = args
        elif op == "order_failed":
            self.failed.append(args)
        elif op == "standby":
            self.standby.append(args)
        elif op == "exited":
            self.exits[args["generation"], args["exit"]["rank"]] = args["exit"]
        self._changed.set()
        return Answer({})

    async def call(self, op: str, **args: Any) -> Any:
        return (await self.channel.call(op, args, timeout=DEADLINE_S)).data

    async def go(self, script: str | Path, *args: str, **changes: Any) -> Any:
        if not self._is_asked:
            # As an agent does, so that what is known of torch counts.
            self._is_asked = True
            await self.call("hello", known=str(self.root / known_torch.NAME))
        return await self.call("go", **order(self.root, script, *args, **changes))

    async def wait_mains(self, generation: int, ranks: int = 1, base: int = 0) -> list[int]:
        keys = [(generation, rank) for rank in range(base, base + ranks)]
        await self.until(lambda: all(key in self.mains for key in keys), f"main of {keys}")
        return [self.mains[key] for key in keys]

    async def wait_exits(self, generation: int, ranks: int = 1, base: int = 0) -> list[Any]:
        keys = [(generation, rank) for rank in range(base, base + ranks)]
        await self.until(lambda: all(key in self.exits for key in keys), f"exit of {keys}")
        return [self.exits[key] for key in keys]

    async def wait_failed(self) -> Any:
        await self.until(lambda: self.failed, "order_failed")
        return self.failed[0]

    async def until(self, true: Any, what: str) -> None:
        async def wait() -> None:
            while not true():
                self._changed.clear()
                await self._changed.wait()

        try:
            await asyncio.wait_for(wait(), DEADLINE_S)
        except asyncio.TimeoutError as error:
            raise AssertionError(f"no {what}; main: {self.mains}, exits: {self.exits}") from error

    def text(self, stream: str = "stdout", generation: int = 0, rank: int = 0) -> str:
        return (self.root / f"generation_{generation}" / f"rank_{rank}" / f"{stream}.log").read_text()


def alive(pid: int) -> bool:
    """Tell whether a process runs; a dead one that nobody has waited for does not."""
    return stat_fields(pid)[:1] not in ([], ["Z"], ["X"])


def children_of(pid: int) -> list[int]:
    """Return the pids of a process's own children."""
    return [int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]


def await_death(pid: int) -> None:
    """Wait until a process that was told to end has ended: the kernel may take its time, even after SIGKILL."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([handle], [], [], DEADLINE_S)[0], f"process {pid} lives"
    finally:
        os.close(handle)


def await_variables(pid: int) -> None:
    """Wait until the kernel shows the variables of a program that has just been started."""
    while not Path(f"/proc/{pid}/environ").read_bytes():
        time.sleep(0.001)


def order(root: Path, script: str | Path, *args: str, **changes: Any) -> Any:
    """Return the arguments of `go` for one node, with changes."""
    generation = changes.get("generation", 0)
    ranks = changes.get("local_world_size", 1)
    return {
        "generation": generation,
        "run_id": "run",
        "role": "default",
        "group_rank": 0,
        "base_rank": 0,
        "local_world_size": ranks,
        "world_size": ranks,
        "group_world_size": 1,
        "address": "127.0.0.1",
        "master_addr": "127.0.0.1",
        "master_port": 29500,
        "restart_count": 0,
        "max_restarts": 3,
        "env": {},
        "cwd": str(root),
        "kind": "script",
        "script": str(script),
        "args": list(args),
        "log_dir": str(root / f"generation_{generation}"),
        "links": "",
        "numa_binding": "",
        "signals_to_handle": "",
        "virtual_local_rank": False,
        "shutdown_timeout": 15,
        "rendezvous": None,
        "slow": True,
        "standby": "",
        **changes,
    }


@contextlib.asynccontextmanager
async def engine(
    root: Path, env: dict[str, str] | None = None, program: tuple[str, ...] = PROGRAM, cwd: Path = ROOT
) -> AsyncIterator[EngineProcess]:
    """Start an engine and end it; what it printed is shown when the test fails. Given `env` is all that it gets."""
    root.mkdir(parents=True, exist_ok=True)
    log, path = root / "agent.log", root / "engine.sock"
    called: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Future()

    async def calls(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        called.set_result((reader, writer))

    server = await serve_unix(path, calls)
    with log.open("ab") as stderr:
        process = await asyncio.create_subprocess_exec(
            *program,
            *("job-1", "--wire", str(path)),
            stdout=stderr,
            stderr=stderr,
            cwd=cwd,
            env={**(os.environ if env is None else env), "SUPERVISOR_HOME": str(root)},
        )
    ended = asyncio.ensure_future(process.wait())
    either: set[asyncio.Future[Any]] = {called, ended}
    await asyncio.wait(either, timeout=DEADLINE_S, return_when=asyncio.FIRST_COMPLETED)
    server.close()
    if not called.done():
        ended.cancel()
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        raise AssertionError(f"the engine did not call: {log.read_text()}")
    one = EngineProcess(process, called.result(), root)
    known_torch.lend(root)
    try:
        yield one
        known_torch.keep(root)
    finally:
        await one.channel.close()
        try:
            await asyncio.wait_for(process.wait(), 60)
        except asyncio.TimeoutError:
            process.kill()
            await process.wait()
            raise
        finally:
            await asyncio.gather(one.runner, return_exceptions=True)
            # It closes itself some turns of the loop later, which may not come; asyncio.subprocess has no public way.
            process._transport.close()  # type: ignore[attr-defined]
            print(log.read_text())


class SharedEngine:
    """One engine for many tests: importing torch takes longer than all of them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.engine: EngineProcess
        self._loop = asyncio.new_event_loop()
        self._next = 0

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(3 * DEADLINE_S)

    def generation(self) -> int:
        self._next += 1
        return self._next

    def run(self, script: str | Path, *args: str, **changes: Any) -> tuple[Any, bytes, bytes]:
        """Run a script on one rank to its end; returns its exit and what it wrote."""
        generation = self.generation()

        async def work() -> Any:
            await self.engine.go(script, *args, generation=generation, **changes)
            try:
                return (await self.engine.wait_exits(generation))[0]
            finally:
                # Also the end of this generation's clean-up.
                await self.engine.call("stop", generation=generation, grace_s=0.0, collect=False)

        ended = self.do(work())
        files = self.rank_dir(generation)
        return ended, (files / "stdout.log").read_bytes(), (files / "stderr.log").read_bytes()

    def newest(self) -> Path:
        """Return the directory of rank 0 of the last generation."""
        return self.rank_dir(self._next)

    def rank_dir(self, generation: int, rank: int = 0) -> Path:
        return self.root / f"generation_{generation}" / f"rank_{rank}"

    @contextlib.contextmanager
    def running(self, env: dict[str, str] | None = None, program: tuple[str, ...] = PROGRAM) -> Iterator[SharedEngine]:
        thread = threading.Thread(target=self._loop.run_forever)
        thread.start()
        one = engine(self.root, env, program)
        try:
            self.engine = self.do(one.__aenter__())
            try:
                yield self
            finally:
                self.do(one.__aexit__(None, None, None))
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            thread.join(DEADLINE_S)
            self._loop.close()


async def speak(directories: Iterable[Path]) -> None:
    """Wait until each of these ranks has printed something."""
    files = [directory / "stdout.log" for directory in directories]
    for _ in range(1000):
        if all(path.stat().st_size for path in files):
            return
        await asyncio.sleep(0.02)
