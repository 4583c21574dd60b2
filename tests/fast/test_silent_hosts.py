"""Commands beside hosts that fall silent: they end soon, with what the others have, and name the silent ones.

In: connections that answer, never come up, or stop answering once the job is open. Out: what a command prints, and how
long it waits by its loop's clock.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from remote_agent.wire import Answer, CallFailed, ChannelClosed
from remote_agent.wire.frames import encode
from supervisor.cli import logs, options, record, snapshots, stacks
from supervisor.errors import HostError, RequestFailed, Unreachable
from supervisor.inventory import load
from supervisor.link import host_link
from supervisor.link.hub import Hub
from supervisor.logs.files import files
from supervisor.logs.live import follow
from supervisor.logs.selection import Selection
from supervisor.ssh.answers import HostChannel
from tests.fast import waiting

DEADLINE = 30.0
FILE = {"generation": 0, "rank": 0, "stream": "stdout", "size": 6}
JOB = {"job": "a", "node": "n1", "live": True, "state": "running", "created_ns": 1, "generation": 0, "world_size": 3}
STATUS: dict[str, Any] = {
    "job": "a", "state": "running", "generation": 0, "restarts": 0, "max_restarts": 3, "world_size": 3,
    "coordinator": "n1", "started_at": "2026-01-01T00:00:00.000Z", "nodes": [], "last_seq": 1,
}  # fmt: skip
EVENT = {
    "seq": 1, "type": "generation_running", "generation": 0, "time": "2026-01-01T00:00:00.000Z", "node": None,
    "rank": None, "detail": {},
}  # fmt: skip


class Node:
    """A connection to a host; `stops`: it answers nothing after it has opened the job; `refuses`: a request.

    Or `refuses` is "slow": its files take 25 s to list; "large": the list itself is on its way for so long.
    """

    refused = None

    def __init__(self, name: str, *, stops: bool, refuses: str) -> None:
        self.host, self.hello = SimpleNamespace(name=name), dict[str, Any]()
        self.closed = asyncio.Event()
        self.channel = self
        self.heard_at = 0.0
        self._answering: asyncio.Future[None] | None = None
        self._stops, self._refuses, self._silent = stops, refuses, False

    async def call(
        self, op: str, args: dict[str, Any] | None = None, body: bytes = b"", timeout: float = 30.0
    ) -> Answer:
        if self._silent:
            ended = asyncio.ensure_future(self.closed.wait())
            await asyncio.wait((ended,), timeout=timeout)
            if not ended.done():
                ended.cancel()
                raise asyncio.TimeoutError
            raise ChannelClosed("closed")
        self._silent = op == "identity" and self._stops
        if op == "log_list" and self._refuses in ("slow", "large"):
            self._answering = asyncio.ensure_future(self._answer_for(25))
            await self._answering
        elif self._refuses == "large" and self._answering is not None and not self._answering.done():
            # Whatever else is asked comes behind the large answer.
            await asyncio.wait_for(asyncio.shield(self._answering), timeout)
        return self._answer(op)

    async def _answer_for(self, seconds: int) -> None:
        for _ in range(seconds):
            await asyncio.sleep(1)
            self.heard_at = asyncio.get_running_loop().time() if self._refuses == "large" else 0.0

    def _answer(self, op: str) -> Answer:
        if op == self._refuses:
            raise CallFailed("usage", f"{op}: unknown argument 'level'", "")
        name, rank = self.host.name, int(self.host.name[1:]) - 1
        row = {"generation": 0, "rank": rank, "stream": "stdout", "line": 0, "offset": 0, "t_ns": rank + 1}
        # The coordinator is asked first.
        role = "coordinator" if name == "n1" else "member"
        merged = {"rows": [], "more": False, "since_ns": 0, "until_ns": 9}
        data: dict[str, Any] = {
            "jobs": {"jobs": [JOB]},
            "open": {"node": name},
            "identity": {"live": True, "role": role, "coordinator_reachable": True, "term": 1, "last_seq": 1},
            "status": STATUS,
            "incidents": {"incidents": [], "nccl": None},
            "log_list": {"files": [{**FILE, "rank": rank}]},
            "log_merged": merged,
            "log_rows": {"rows": [row]},
            "events": {"event": EVENT},
            "await_engine": {},
            "stacks": {"stacks": {str(rank): f"of {name}"}},
        }
        return Answer(data[op], f"from {name}".encode() if op == "log_rows" else b"")

    async def stream(self, op: str, args: dict[str, Any] | None = None) -> AsyncGenerator[Answer, None]:
        yield await self.call(op, args, timeout=1000.0)

    async def close(self) -> None:
        self.closed.set()


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Path, list[float]]]:
    """Return a function that makes hosts n1, n2 …, each "", "absent", "stops", or a request that it refuses."""

    def made(*kinds: str) -> tuple[Path, list[float]]:
        path, took = tmp_path / "hosts.toml", list[float]()
        path.write_text("".join(f'[[hosts]]\nname = "n{number}"\nssh = "n{number}"\naddress = "10.0.0.{number}"\n'
                                for number in range(1, len(kinds) + 1)))  # fmt: skip
        by_name = {f"n{number}": kind for number, kind in enumerate(kinds, 1)}

        async def connect(host: Any, *, deadline_s: float, **_: Any) -> Node:
            kind = by_name[host.name]
            if kind == "absent":
                await asyncio.sleep(deadline_s)
                raise HostError(host.name, "connect", f"timeout: no answer within {deadline_s:.0f} s")
            return Node(host.name, stops=kind == "stops", refuses="" if kind == "stops" else kind)

        def run(coroutine: Any) -> Any:
            async def timed() -> Any:
                loop = asyncio.get_running_loop()
                with monkeypatch.context() as patch:
                    patch.setattr(time, "monotonic", loop.time)
                    try:
                        return await coroutine
                    finally:
                        took.append(loop.time())

            return waiting.run(timed(), 300)

        monkeypatch.setattr(host_link, "connect", connect)
        for module in (logs, record, options):
            monkeypatch.setattr(module.asyncio, "run", run)
        return path, took

    return made


Hosts = Callable[..., tuple[Path, list[float]]]


@pytest.mark.parametrize("first", ["stops", ""], ids=["coordinator", "another node"])
@pytest.mark.parametrize("argument", ["", "--tail=9"])
def test_logs_of_the_hosts_that_answer(hosts: Hosts, capfd: Any, first: str, argument: str) -> None:
    """n4 accepts the connection and is then silent; two others stop answering when the job is open."""
    path, took = hosts(first, "", "stops", "absent")
    logs.run("logs", [str(path), "a", *filter(None, [argument])])
    out, said = capfd.readouterr()
    shown = ["n1", "n2"] if not first else ["n2"]
    assert [line.rpartition(" ")[2] for line in out.splitlines()] == shown
    named = sorted(line.split()[1] for line in said.splitlines())
    assert named == [f"{name}:" for name in ("n1", "n2", "n3", "n4") if name not in shown], said
    assert took[0] < DEADLINE


@pytest.mark.parametrize("first", ["stops", ""], ids=["coordinator", "another node"])
def test_a_report_ends_soon(hosts: Hosts, capfd: Any, first: str) -> None:
    path, took = hosts(first, "", "stops", "absent")
    record.run_report("report", [str(path), "a", "--json"])
    out, said = capfd.readouterr()
    assert json.loads(out)["job"] == "a"
    assert sorted(line.split()[1] for line in said.splitlines()) == [*(["n1:"] if first else []), "n3:", "n4:"]
    assert took[0] < DEADLINE


def test_hosts_that_stop_answering_together_are_waited_for_together(hosts: Hosts, capfd: Any) -> None:
    path, took = hosts("stops", "stops", "stops", "stops", "stops", "")
    snapshots.run("snapshots", [str(path), "a", "--json"])
    out, said = capfd.readouterr()
    assert json.loads(out) == {"job": "a", "snapshots": []}
    assert len(said.splitlines()) == 5
    assert took[0] < DEADLINE


def test_stacks_of_the_only_live_job(hosts: Hosts, capfd: Any) -> None:
    path, took = hosts("", "stops", "absent")
    stacks.run("stacks", [str(path), "--json"])
    out, said = capfd.readouterr()
    assert json.loads(out)["stacks"] == {"0": "of n1"}
    assert said == "supervisor: n2: no answer for 8 s; its data is not shown\n"
    assert took[0] < DEADLINE


def test_where_no_host_answers_any_more_that_is_the_error(hosts: Hosts) -> None:
    path, took = hosts("stops", "stops", "absent")
    with pytest.raises(Unreachable, match=r"n1: link: no answer for 8 s"):
        logs.run("logs", [str(path), "a"])
    assert took[0] < DEADLINE


@pytest.mark.parametrize("op", ["log_list", "log_rows"])
def test_a_node_that_refuses_a_request_that_others_answer_is_named(hosts: Hosts, capfd: Any, op: str) -> None:
    path, _ = hosts("", op, "")
    logs.run("logs", [str(path), "a"])
    out, said = capfd.readouterr()
    shown = [line.rpartition(" ")[2] for line in out.splitlines()]
    # Who does not say which files it has may still send their rows.
    assert shown == (["n1", "n3"] if op == "log_rows" else ["n1", "n2", "n3"])
    assert said == f"supervisor: n2: {op}: unknown argument 'level'; its data is not shown\n"


def test_what_every_node_refuses_is_the_users_error(hosts: Hosts) -> None:
    path, _ = hosts("log_rows", "log_rows")
    with pytest.raises(RequestFailed, match="unknown argument") as refused:
        logs.run("logs", [str(path), "a"])
    assert refused.value.kind == "usage"


@pytest.mark.parametrize("kind", ["slow", "large"])
def test_a_host_that_is_there_is_waited_for(hosts: Hosts, capfd: Any, kind: str) -> None:
    path, took = hosts("", kind)
    logs.run("logs", [str(path), "a"])
    out, said = capfd.readouterr()
    assert [line.rpartition(" ")[2] for line in out.splitlines()] == ["n1", "n2"]
    assert (said, took[0] >= 25) == ("", True)


def test_a_frame_that_is_still_arriving_is_heard() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=2**20)
        channel = HostChannel("n1", reader, SimpleNamespace(close=lambda: None))  # type: ignore[arg-type]
        running = asyncio.ensure_future(channel.run())
        whole = encode({"re": 1, "ok": {}}, b"x" * 300_000)
        heard = []
        for part in (whole[:100_000], whole[100_000:200_000]):
            await asyncio.sleep(1)
            at = loop.time()
            reader.feed_data(part)
            await asyncio.sleep(1)
            heard.append(channel.heard_at == at)
        assert heard == [True, True]
        reader.feed_eof()
        await running

    waiting.run(scenario(), 60)


@pytest.mark.parametrize("refuses", [["n2"], ["n1", "n2"]])
def test_a_node_that_refuses_to_be_followed_ends_no_others_log(refuses: list[str]) -> None:
    def link(name: str) -> Any:
        async def stream(_op: str, _args: Any) -> AsyncGenerator[Answer, None]:
            if name in refuses:
                raise CallFailed("usage", "unknown argument", "")
            yield Answer({"generation": 0, "rank": 0, "stream": "stdout", "offset": 0}, b"line\n")

        async def call(_op: str, _args: Any, **_more: Any) -> Answer:
            return Answer({"files": []})

        return SimpleNamespace(
            view=SimpleNamespace(name=name), active=True, opened=True, opened_at=1.0, is_malformed=False,
            stream=stream, call=call,
        )  # fmt: skip

    left_out: list[str] = []
    hub: Any = SimpleNamespace(
        links={name: link(name) for name in ("n1", "n2")}, ended=True, state="succeeded", follows=True,
        leave_out=lambda name, _reason: left_out.append(name),
    )  # fmt: skip

    async def read() -> list[str]:
        return [chunk.node async for chunk in follow(hub, Selection())]

    if refuses == ["n2"]:
        assert waiting.run(read(), 60) == ["n1"]
        assert set(left_out) == {"n2"}
    else:
        with pytest.raises(RequestFailed, match="unknown argument"):
            waiting.run(read(), 60)


def test_a_copy_of_a_log_is_not_followed_beside_the_log_itself_though_the_end_is_not_known_yet() -> None:
    """As with a node that was cut off while its job ended: it is asked before the end has been read elsewhere."""

    def link(name: str) -> Any:
        async def stream(_op: str, _args: Any) -> AsyncGenerator[Answer, None]:
            yield Answer({"generation": 0, "rank": 1, "stream": "stdout", "offset": 0}, name.encode())

        async def call(_op: str, _args: Any, **_more: Any) -> Answer:
            hub.ended = True
            return Answer({"files": [{**FILE, "rank": 1, "copy": name == "n1"}]})

        return SimpleNamespace(
            view=SimpleNamespace(name=name), active=True, opened=True, opened_at=1.0, is_malformed=False,
            stream=stream, call=call,
        )  # fmt: skip

    hub: Any = SimpleNamespace(
        links={name: link(name) for name in ("n1", "n2")}, ended=False, state="running", follows=True,
        leave_out=lambda _name, _reason: None,
    )  # fmt: skip

    async def read() -> list[bytes]:
        return [chunk.data async for chunk in follow(hub, Selection())]

    assert waiting.run(read(), 60) == [b"n2"]


@pytest.mark.parametrize("moment", ["before the work", "after it"])
def test_a_host_is_brought_up_although_its_connection_ends_with_the_agent_that_is_replaced(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Neither a connection that ended just before the request, nor one that ends with it, is the request's error."""
    path, _ = hosts("")
    at_once = Node.call

    async def call(node: Node, *args: Any, **options: Any) -> Answer:
        await asyncio.sleep(0.1)
        if node.closed.is_set():
            raise ChannelClosed("closed")
        return await at_once(node, *args, **options)

    monkeypatch.setattr(Node, "call", call)
    hub = Hub(load(path), "a")
    link = hub.links["n1"]

    async def start(node: Any) -> None:
        if moment == "after it":
            node.closed.set()

    async def check() -> None:
        hub.begin()
        await hub.wait_until(lambda: link.opened, DEADLINE)
        work = asyncio.ensure_future(link.bring_up(start))
        if moment == "before the work":
            link.node.closed.set()
        await work
        assert link.opened
        assert link.view.error is None
        await hub.close()

    waiting.run(check(), 300)


def test_a_copy_of_a_log_counts_only_while_nobody_has_the_log_itself(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = hosts("", "", "")
    listed = {
        "n1": [
            {**FILE, "rank": 0, "copy": False},
            {**FILE, "rank": 1, "copy": True},
            {**FILE, "rank": 9, "copy": True},
        ],
        "n2": [{**FILE, "rank": 1, "copy": False}],
        # Its agent is older than copies.
        "n3": [{**FILE, "rank": 2}],
    }
    at_once = Node._answer
    monkeypatch.setattr(
        Node, "_answer",
        lambda node, op: Answer({"files": listed[node.host.name]}) if op == "log_list" else at_once(node, op),
    )  # fmt: skip

    async def check() -> None:
        hub = Hub(load(path), "a")
        hub.begin()
        await hub.settle()
        found = await files(hub)
        await hub.close()
        assert [(file["rank"], file["node"]) for file in found] == [(0, "n1"), (1, "n2"), (2, "n3"), (9, "n1")]

    waiting.run(check(), 300)
