"""A verb while the job has no coordinator, or the node is leaving: it waits; every other refusal is told at once."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from remote_agent.wire import Answer, CallFailed
from supervisor.control import heal, requests
from supervisor.errors import RequestFailed


class OneAgent:
    """A hub with one agent, which answers with these refusals first."""

    read_only = follows = launching = False
    operator, state = "somebody", "running"

    def __init__(self, refusals: list[str]) -> None:
        self.refusals = list(refusals)
        self.status = {"generation": 4}
        self.events: list[dict[str, Any]] = []
        self.notices: list[str] = []
        self.view = SimpleNamespace(name="n1", identity={"role": "member", "coordinator_reachable": True}, live=True)
        self.links = {"n1": self}

    def opened_links(self, live: bool | None = None) -> list[OneAgent]:
        return [self]

    async def call(self, op: str, args: dict[str, Any], *, timeout_s: float) -> Answer:
        if self.refusals:
            kind = self.refusals.pop(0)
            raise CallFailed(kind, f"it is {kind}", "")
        return Answer({"accepted": True, "message": op, "generation": 4, "seq": 1})

    async def settle(self, nodes: list[str]) -> None:
        """All have answered."""

    async def wait_change(self, timeout_s: float) -> int:
        await asyncio.sleep(0)
        return 0

    def notice(self, text: str, level: str) -> None:
        self.notices.append(text)


def cordon(hub: Any) -> dict[str, Any]:
    return asyncio.run(requests.request(hub, "cordon", {"node": "n1"}))


def test_a_verb_waits_for_the_next_coordinator_and_says_so_once() -> None:
    hub = OneAgent(["no_coordinator", "not_coordinator", "no_coordinator", "moved"])
    assert cordon(hub)["accepted"]
    assert hub.notices == ["cordon waits for a coordinator, up to 25 s: it is no_coordinator"]


def test_a_verb_that_finds_no_coordinator_in_time_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "VERB_DEADLINE", 0.0)
    with pytest.raises(RequestFailed, match="it is no_coordinator"):
        cordon(OneAgent(["no_coordinator"] * 1000))


def test_any_other_refusal_is_the_answer() -> None:
    hub = OneAgent(["cordoned"])
    with pytest.raises(RequestFailed, match="it is cordoned"):
        cordon(hub)
    assert hub.notices == []


def test_a_node_that_is_being_removed_is_added_once_it_is_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its agent ends with the removal: it is started again before the coordinator is asked again."""
    started = []

    async def start(_hub: object, name: str, *, full: bool) -> dict[str, Any]:
        started.append(name)
        return {"name": name}

    monkeypatch.setattr(heal, "bring_up_again", start)
    hub: Any = OneAgent(["leaving", "leaving"])
    hub.status["nodes"] = [{"name": "n1", "state": "draining"}]
    assert asyncio.run(requests.request(hub, "add", {"node": "n1"}))["generation"] == 4
    assert started == ["n1", "n1", "n1"]
