"""A launch decides as soon as it can, and says what is in the way; its hosts are made up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from remote_agent.wire import Answer, CallFailed
from supervisor.errors import HostError, JobInTheWay, LaunchFailed, UsageError
from supervisor.launch import bringup
from supervisor.launch.launch import Launch
from supervisor.link.view import HostView, LaunchPlan
from supervisor.ssh.scan import Tree
from tests.fast import waiting
from tests.fast.world import spec

WAIT_S = 30.0
NAMES = ("n1", "n2", "n3", "n4")
StartOn = Callable[[str, bringup.Material], Awaitable[None]]


def launch(monkeypatch: pytest.MonkeyPatch, start_on: StartOn, **job: Any) -> list[str]:
    """Launch on n1 … n4, each of which is brought up by `start_on`; return the notices."""
    notices: list[str] = []

    def link(name: str) -> SimpleNamespace:
        view = HostView(name)
        return SimpleNamespace(host=SimpleNamespace(name=name), view=view, opened=False, fail=lambda *_: None)

    async def start(_hub: object, name: str, material: bringup.Material) -> None:
        await start_on(name, material)

    async def address(one: SimpleNamespace, _spec: object) -> dict[str, Any]:
        return {"address": one.host.name, "port": 1}

    async def assign(*_: object) -> None:
        notices.append("assigned")

    monkeypatch.setattr(bringup, "start_on", start)
    monkeypatch.setattr(bringup, "peer_address", address)
    monkeypatch.setattr(bringup, "assign", assign)
    monkeypatch.setattr("supervisor.launch.launch.quick", lambda _views: [])
    plan = LaunchPlan(spec(4, **job), NAMES)
    hub: Any = SimpleNamespace(
        inventory=SimpleNamespace(path=Path("hosts.toml")),
        links={name: link(name) for name in plan.hosts},
        notice=lambda text, *_: notices.append(text),
        own_late=lambda _tasks: None,
        trust=lambda _fingerprints: None,
    )
    waiting.run(Launch(plan).run(hub), WAIT_S)
    return notices


def test_a_launch_that_cannot_succeed_any_more_fails_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def start_on(name: str, _material: bringup.Material) -> None:
        if name == "n2":
            await asyncio.Event().wait()
        raise HostError(name, "connect", "connection refused")

    with pytest.raises(LaunchFailed, match="0 of 4 hosts came up and 3 failed, 2 are needed") as failed:
        launch(monkeypatch, start_on, min_nodes=2)
    assert [failure.host for failure in failed.value.failures] == ["n[1,3-4]"]
    # One error of three hosts is one line.
    assert str(failed.value).splitlines()[0] == "n[1,3-4]: connect: connection refused"


def test_a_live_job_with_the_same_tree_is_in_the_way_on_the_first_host_that_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def start_on(name: str, _material: bringup.Material) -> None:
        if name != "n3":
            await asyncio.Event().wait()
        raise JobInTheWay(
            name, "sync", "job old is live and runs from the same work tree", "supervisor attach HOSTS old"
        )

    with pytest.raises(UsageError, match="job old is live and runs from the same work tree on n3") as refused:
        launch(monkeypatch, start_on)
    assert (refused.value.exit_status, refused.value.hint) == (2, "supervisor attach hosts.toml old")


def test_files_of_earlier_runs_are_named_before_the_script_finds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    async def start_on(name: str, material: bringup.Material) -> None:
        material.left[name] = () if name == "n4" else ("snapshot.pt", "out/")

    first, *rest = launch(monkeypatch, start_on)
    assert first.startswith("n[1-3]: the work tree has files of earlier runs, which the script will find: snapshot.pt")
    assert set(rest) == {"assigned"}


class Trees:
    """What one launch meets: four hosts, each with a work tree that one launch at a time can lock."""

    def __init__(self, holders: dict[str, Trees], unreachable: str = "", hangs: str = "") -> None:
        self.holders = holders
        self.unreachable = unreachable
        self.hangs = hangs
        self.connected = {name: asyncio.Event() for name in NAMES}

    def connect(self, *names: str) -> None:
        """Let the launch reach hosts."""
        for name in names:
            self.connected[name].set()

    async def launch(self) -> None:
        await Launch(LaunchPlan(spec(4, min_nodes=3, settle_timeout=0.0), NAMES)).run(self.hub())

    def hub(self) -> Any:
        return SimpleNamespace(
            inventory=SimpleNamespace(path=Path("hosts.toml")),
            links={name: self.link(name) for name in NAMES},
            notice=lambda *_: None,
            set_spec=lambda _spec: None,
            own_late=lambda admissions: [admission.close() for admission in admissions.values()],
            trust=lambda _fingerprints: None,
        )

    def link(self, name: str) -> SimpleNamespace:
        async def bring_up(prepare: Callable[[Any], Awaitable[None]]) -> None:
            await self.connected[name].wait()
            if name == self.unreachable:
                raise HostError(name, "connect", "connection refused")
            await prepare(SimpleNamespace(host=host, channel=SimpleNamespace(call=call), start_agent=start_agent))

        async def call(op: str, *_: object, **__: object) -> Answer:
            if op == "open":
                raise CallFailed("no_such_job", "")
            if name == self.hangs:
                await asyncio.Event().wait()
            if op == "tree_plan" and self.holders.setdefault(name, self) is not self:
                raise CallFailed("tree_busy", "tree t is being synced by somebody else")
            done = {"root": "", "changed": 0, "removed": 0, "conflicts": [], "kept_in": None}
            return Answer({"missing": [], **done})

        async def start_agent(*_: object) -> dict[str, Any]:
            return {}

        async def idle(_timeout_s: float) -> None:
            return

        host = SimpleNamespace(name=name)
        return SimpleNamespace(
            host=host, view=HostView(name, live=True), opened=False, connected=False, bring_up=bring_up, idle=idle,
            fail=lambda *_: None, progress=lambda *_: None, learn_script=lambda _: None,
        )  # fmt: skip


@pytest.fixture
def light_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch does no more than to lock the trees of its hosts."""

    async def some(*_: object) -> dict[str, Any]:
        return {"address": "", "port": 1}

    async def tree(*_: object) -> Tree:
        return Tree("t", Path(), (), (), ())

    for name in ("engine", "peer_address", "assign"):
        monkeypatch.setattr(bringup, name, some)
    monkeypatch.setattr("supervisor.launch.launch.read_tree", tree)
    monkeypatch.setattr("supervisor.launch.launch.quick", lambda _views: [])


@pytest.mark.usefixtures("light_launch")
@pytest.mark.parametrize("first", ["connected", "unreachable", "silent"])
def test_of_two_launches_of_one_tree_at_the_same_time_one_starts(first: str) -> None:
    """Both lock the first host before the others; if it cannot be had, the next one."""

    async def body() -> None:
        holders: dict[str, Trees] = {}
        one, other = (Trees(holders, "n1" if first == "unreachable" else "") for _ in range(2))
        meet = NAMES[0] if first == "connected" else NAMES[1]
        start = asyncio.ensure_future(one.launch())
        one.connect(meet, *(["n1"] if first == "unreachable" else []))
        while meet not in holders:
            await asyncio.sleep(0.001)
        # It reaches the other hosts earlier than the launch that has the lock.
        other.connect(*(NAMES if first != "silent" else NAMES[1:]))
        with pytest.raises(UsageError, match=f"tree t is being synced by somebody else on {meet}"):
            await other.launch()
        assert set(holders.values()) == {one}, "the launch that is refused keeps nobody from starting"
        one.connect(*NAMES[1:])
        await start

    waiting.run(body(), WAIT_S)


@pytest.mark.usefixtures("light_launch")
def test_hosts_that_hang_before_their_tree_is_locked_keep_no_other_waiting() -> None:
    holders: dict[str, Trees] = {}
    one = Trees(holders, hangs="n1")
    one.connect(*NAMES)
    waiting.run(one.launch(), WAIT_S)
    assert set(holders) == {*NAMES[1:]}
