"""Whose status is followed, when the agent that was followed falls silent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

from remote_agent.wire import Answer
from supervisor.link import updates


class SilentLink:
    """A link to a host whose power fails after one status: nothing comes, and nothing ends; or to one that is there."""

    def __init__(self, name: str, asked: list[str], *, is_there: bool = False) -> None:
        self._is_there = is_there
        self.view = SimpleNamespace(name=name)
        self.opened = True
        self._asked = asked

    def rank_as_source(self) -> tuple[int, int]:
        return (1, 0)

    def learn(self, identity: object) -> None:
        pass

    def reopen(self) -> None:
        self.opened = False

    async def call(self, op: str, *, timeout_s: float) -> Answer:
        self._asked.append(f"{self.view.name} {op}")
        if self._is_there:
            return Answer({})
        await asyncio.wait_for(asyncio.Event().wait(), timeout_s)
        raise AssertionError

    async def stream(self, op: str, args: object = None) -> AsyncGenerator[Answer, None]:
        self._asked.append(f"{self.view.name} {op}")
        if op == "watch":
            yield Answer({"status": {"from": self.view.name}})
        await asyncio.Event().wait()


def test_of_hosts_that_are_gone_together_each_is_asked_once_and_the_one_that_answers_is_followed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(updates, "SILENCE", 0.05)
    monkeypatch.setattr(updates, "REST", 0.0)
    asked: list[str] = []
    seen: list[str] = []
    links = [SilentLink("n1", asked), SilentLink("n2", asked), SilentLink("n3", asked, is_there=True)]
    both = asyncio.Event()

    def set_status(status: dict[str, Any]) -> None:
        seen.append(status["from"])
        if len(seen) == 2:
            both.set()

    hub: Any = SimpleNamespace(
        opened_links=lambda: [link for link in links if link.opened],
        launching=False, events=[], state="running", ended=False,
        set_status=set_status, confirm_status=lambda: None,
    )  # fmt: skip

    async def check() -> None:
        following = asyncio.ensure_future(updates.Updates(hub).run())
        await asyncio.wait_for(both.wait(), 60)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)

    asyncio.run(check())
    assert seen == ["n1", "n3"]
    identities = ["n1 identity", "n2 identity", "n3 identity"]
    assert sorted(asked) == sorted(["n1 events", "n1 watch", *identities, "n3 events", "n3 watch"])


def test_a_status_of_a_host_that_is_gone_stands_for_less_than_ten_seconds() -> None:
    assert 2 * updates.SILENCE + updates.REST < 10
