"""Real agents on this machine, one home each, reached as SSH would reach them: through `connect` on pipes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import TracebackType
from typing import Any

from remote_agent.base.proc import start_ticks
from remote_agent.wire import MAGIC, Channel, JobSpec, NodeSpec
from supervisor.launch.certificates import make_authority, sign_with
from tests import known_torch, watch

REPOSITORY = Path(__file__).resolve().parents[2]
WAIT_S = 60.0


class Node:
    """One home on this machine, its processes behind `prefix`; `close` ends the bridge that each `connect` makes."""

    def __init__(self, name: str, root: Path, prefix: tuple[str, ...] = ()) -> None:
        self.name = name
        self.prefix = prefix
        self.home = root / name
        self.home.mkdir()
        known_torch.lend(self.home)
        self._bridges: list[tuple[asyncio.subprocess.Process, Channel, asyncio.Task[None]]] = []
        self._opened: Channel | None = None

    async def connect(self) -> Channel:
        """Return the channel of a fresh `connect`."""
        path = f"{REPOSITORY}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        env = {**os.environ, "SUPERVISOR_HOME": str(self.home), **watch.variables(path)}
        process = await asyncio.create_subprocess_exec(
            *self.prefix, sys.executable, "-m", "remote_agent", "connect", env=env,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert process.stdout is not None
        assert process.stdin is not None
        assert await asyncio.wait_for(process.stdout.readexactly(len(MAGIC)), WAIT_S) == MAGIC
        channel = Channel(process.stdout, process.stdin)
        self._bridges.append((process, channel, asyncio.ensure_future(channel.run())))
        return channel

    async def open(self, job: str) -> Channel:
        """Return a fresh channel to the job's agent, or to its files."""
        channel = await self.connect()
        await channel.call("open", {"job": job})
        return channel

    async def opened(self, job: str) -> Channel:
        """Return the channel that the last one got, while it leads there: each takes a process."""
        if self._opened is None or self._opened.closed.is_set():
            self._opened = await self.open(job)
        return self._opened

    async def close(self) -> None:
        for process, channel, task in self._bridges:
            await channel.close()
            await asyncio.wait_for(process.wait(), WAIT_S)
            await asyncio.gather(task, return_exceptions=True)
            # It closes itself some turns of the loop later, which may not come; asyncio.subprocess has no public way.
            process._transport.close()  # type: ignore[attr-defined]
        self._bridges.clear()
        known_torch.keep(self.home)


class Nodes:
    """A job on several homes: `async with Nodes(tmp_path, 2, script) as nodes`."""

    def __init__(
        self, root: Path, count: int, script: str, *, nproc: int = 1, prefix: tuple[str, ...] = (), **changes: Any
    ) -> None:
        self.nodes = {f"n{number}": Node(f"n{number}", root, prefix) for number in range(1, count + 1)}
        work = root / "work"
        work.mkdir()
        (work / "train.py").write_text(script)
        specs = tuple(NodeSpec(name, "127.0.0.1", str(nproc)) for name in self.nodes)
        defaults: Any = {"min_nodes": count, "max_nodes": count, "max_restarts": 3, "stop_grace": 2.0}
        # The first group has all of them, however long a loaded machine takes to import torch.
        defaults["settle_timeout"] = WAIT_S
        # Loading torch a second time on each node costs more than most tests.
        defaults["standby"] = "off"
        self.spec = JobSpec(
            job="job-test", script="train.py", nodes=specs, workdir=str(work), **{**defaults, **changes}
        )
        self.authority = make_authority(self.spec.job)
        self.work = work

    async def __aenter__(self) -> Nodes:
        return self

    async def launch(self) -> None:
        """Start every agent and name n1 the coordinator."""
        members: dict[str, Any] = {}
        for name in self.nodes:
            members[name] = {"address": "127.0.0.1", "port": (await self.start(name))["peer_port"]}
        coordinator = {"node": "n1", **members["n1"]}
        for name in self.nodes:
            await self.call(name, "assign", {"term": 1, "coordinator": coordinator, "members": members})

    async def start(self, name: str) -> Any:
        """Start one agent; returns its identity."""
        await self.begin(name)
        return await self.call(name, "identity")

    async def begin(self, name: str) -> None:
        """Start one agent, and do not open its job."""
        leaf = sign_with(self.authority.ca, self.authority.ca_key, name)
        args = {
            "spec": self.spec.to_json(), "node": name, "ca": self.authority.ca,
            "cert": leaf.cert, "key": leaf.key,
        }  # fmt: skip
        channel = await self.nodes[name].connect()
        await channel.call("start", args, timeout=WAIT_S)

    def journal(self, name: str) -> Path:
        """Where a node keeps its journal."""
        return self.nodes[name].home / "jobs" / self.spec.job / "events.jsonl"

    async def call(self, name: str, op: str, args: Any | None = None) -> Any:
        """Ask one node's agent one thing."""
        channel = await self.nodes[name].opened(self.spec.job)
        return (await channel.call(op, args, timeout=WAIT_S)).data

    async def events(self, name: str, since: int = 0) -> AsyncIterator[Any]:
        """Follow one node's journal."""
        channel = await self.nodes[name].opened(self.spec.job)
        async with contextlib.aclosing(channel.stream("events", {"since": since, "follow": True})) as items:
            async for item in items:
                yield item.data["event"]

    async def until(self, kind: str, name: str = "n1", since: int = 0, **match: Any) -> Any:
        """Return the first event of that type (and with these values) after `since`."""

        async def look() -> Any:
            async with contextlib.aclosing(self.events(name, since)) as found:  # type: ignore[type-var]
                async for event in found:
                    if event["type"] == kind and all(event[key] == value for key, value in match.items()):
                        return event
            raise AssertionError(f"the journal ended without {kind}")

        try:
            return await asyncio.wait_for(look(), WAIT_S)
        except asyncio.TimeoutError:
            status = json.dumps((await self.call(name, "status"))["nodes"])
            raise AssertionError(f"no {kind} {match} within {WAIT_S:g} s; the nodes: {status}") from None

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End what still runs, by pid, and the bridges."""
        for node in self.nodes.values():
            await node.close()
            end_agent(node.home / "jobs" / self.spec.job / "agent.pid")


def end_agent(pid_file: Path) -> None:
    """Kill an agent that a test left, if it is still the one that wrote the file."""
    with contextlib.suppress(FileNotFoundError, ValueError, ProcessLookupError):
        pid, ticks = (int(word) for word in pid_file.read_text().split())
        if start_ticks(pid) == ticks:
            os.kill(pid, 9)
