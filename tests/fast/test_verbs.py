"""A verb while the job has no coordinator, or the node is leaving: it waits; every other refusal is told at once."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from remote_agent.wire import Answer, CallFailed
from supervisor.control import heal, promotion, requests
from supervisor.errors import RequestFailed, Unreachable


class OneAgent:
    """A hub with one agent, which answers with these refusals first."""

    read_only = follows = launching = opened = ended = False
    attach = None
    operator, state = "somebody", "running"

    def __init__(self, refusals: list[str]) -> None:
        self.refusals = list(refusals)
        self.status: Any = {"generation": 4}
        self.events: list[Any] = []
        self.notices: list[str] = []
        self.view = SimpleNamespace(name="n1", identity={"role": "member", "coordinator_reachable": True}, live=True)
        self.links = {"n1": self}

    def opened_links(self, live: bool | None = None) -> list[OneAgent]:
        return [self]

    async def call(self, op: str, args: Any, *, timeout_s: float) -> Answer:
        if self.refusals:
            kind = self.refusals.pop(0)
            raise CallFailed(kind, f"it is {kind}", "")
        return Answer({"accepted": True, "message": op, "generation": 4, "seq": 1})

    async def settle(self, nodes: list[str]) -> None:
        """All have answered."""

    async def until_current(self) -> None:
        """There is nothing more to hear."""

    def unreachable(self, last: str) -> Unreachable:
        return Unreachable(last)

    async def wait_change(self, timeout_s: float) -> int:
        await asyncio.sleep(0)
        return 0

    def notice(self, text: str, level: str) -> None:
        self.notices.append(text)


def cordon(hub: Any) -> Any:
    return asyncio.run(requests.request(hub, "cordon", {"node": "n1"}))


def test_a_verb_waits_for_the_next_coordinator_and_says_so_once() -> None:
    hub = OneAgent(["no_coordinator", "not_coordinator", "no_coordinator", "moved"])
    assert cordon(hub)["accepted"]
    assert hub.notices == ["cordon waits for a coordinator, up to 25 s: it is no_coordinator"]


def test_a_verb_that_finds_no_coordinator_in_time_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "VERB_DEADLINE", 0.0)
    with pytest.raises(RequestFailed, match="it is no_coordinator"):
        cordon(OneAgent(["no_coordinator"] * 1000))


class Files(OneAgent):
    """A hub whose only agent has died; an agent that is started there answers."""

    def __init__(self) -> None:
        super().__init__([])
        self.status["nodes"] = [{"name": "n1", "state": "running"}]
        self.view.live, self.opened, self.opened_at = False, True, 0.0

    def opened_links(self, live: bool | None = None) -> list[OneAgent]:
        return [self] if live in (None, self.view.live) else []

    def reopen(self) -> None:
        self.opened_at = time.monotonic()

    async def wait_until(self, *_: object) -> None:
        """It is connected at once."""

    async def try_call(self, op: str, *_: object, **__: object) -> Any:
        return {"state": "degraded"}

    def own(self, work: Any, name: str) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(work, name=name)

    def notice(self, text: str, level: str, node: str = "") -> None:
        self.notices.append(text)


def test_a_verb_starts_the_agents_of_a_job_that_has_none_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """`stop` ends a job whose agents were all killed; nobody has to attach for that, which would continue it."""
    hub: Any = Files()

    async def start(_hub: object, name: str, *, full: bool) -> None:
        hub.view.live = True

    async def nothing(*_: object) -> None:
        """All are introduced, and have a coordinator."""

    monkeypatch.setattr(heal, "bring_up_again", start)
    monkeypatch.setattr(heal.Healer, "_exchange", nothing)
    monkeypatch.setattr(promotion, "promote_to_stop", nothing)
    assert asyncio.run(requests.request(hub, "stop", {"kill": False}))["accepted"]
    assert hub.notices == ["n1: agent lost; restarting it", "n1: agent restarted"]
    # An operator who is attached has a healer that does it.
    hub.view.live, hub.attach = False, "control"
    with pytest.raises(Unreachable):
        asyncio.run(requests.request(hub, "stop", {"kill": False}))


def test_any_other_refusal_is_the_answer() -> None:
    hub = OneAgent(["cordoned"])
    with pytest.raises(RequestFailed, match="it is cordoned"):
        cordon(hub)
    assert hub.notices == []


def test_a_node_that_is_being_removed_is_added_once_it_is_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its agent ends with the removal: it is started again before the coordinator is asked again."""
    started = []

    async def start(_hub: object, name: str, *, full: bool) -> Any:
        started.append(name)
        return {"name": name}

    monkeypatch.setattr(heal, "bring_up_again", start)
    hub: Any = OneAgent(["leaving", "leaving"])
    hub.status["nodes"] = [{"name": "n1", "state": "draining"}]
    assert asyncio.run(requests.request(hub, "add", {"node": "n1"}))["generation"] == 4
    assert started == ["n1", "n1", "n1"]
