"""Whose status is followed, when the agent that was followed falls silent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from remote_agent.wire import Answer
from supervisor.inventory import Inventory, JobDefaults
from supervisor.link import updates
from supervisor.session import Session
from supervisor.wording.events import EventRows


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
        launching=False, events=[], state="running", ended=False, status={},
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


def test_while_nodes_are_lost_the_others_are_asked_whom_they_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator on the smaller side of a split network answers for as long as it lasts."""
    monkeypatch.setattr(updates, "SILENCE", 0.01)
    monkeypatch.setattr(updates, "REST", 0.0)
    asked: list[str] = []
    lost = {"nodes": [{"name": "n1", "state": "running"}, {"name": "n2", "state": "lost"}]}
    first, second = SilentLink("n1", asked, is_there=True), SilentLink("n2", asked, is_there=True)
    links = [first]

    async def check() -> None:
        turned = asyncio.Event()

        def set_status(status: dict[str, Any]) -> None:
            if status["from"] == "n2":
                turned.set()

        async def identities() -> None:
            links.insert(0, second)
            second.rank_as_source = lambda: (2, 0)  # type: ignore[method-assign]

        hub: Any = SimpleNamespace(
            opened_links=lambda: links, launching=False, events=[], state="degraded", ended=False, status=lost,
            set_status=set_status, confirm_status=lambda: None,
            identities=identities,
        )  # fmt: skip
        following = asyncio.ensure_future(updates.Updates(hub).run())
        await asyncio.wait_for(turned.wait(), 60)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)

    asyncio.run(check())
    assert asked.index("n1 watch") < asked.index("n2 watch")


class JournalLink(SilentLink):
    """A link to an agent with that journal, which waits at its end."""

    def __init__(self, name: str, asked: list[str], types: list[str]) -> None:
        super().__init__(name, asked, is_there=True)
        place = {"time": name, "generation": 0, "node": "n1", "rank": None, "detail": {}}
        self.journal = [{**place, "seq": number, "type": kind} for number, kind in enumerate(types, start=1)]
        self.all_sent = asyncio.Event()

    async def call(self, op: str, *, timeout_s: float = 0.0) -> Answer:
        return Answer({})

    async def stream(self, op: str, args: Any = None) -> AsyncGenerator[Answer, None]:
        if op == "events":
            for event in self.journal[args["since"] :]:
                yield Answer({"event": dict(event)})
            self.all_sent.set()
        await asyncio.Event().wait()


@pytest.mark.parametrize(
    "second",
    [
        ["job_started", "generation_proposed", "coordinator_changed", "job_degraded", "job_succeeded"],
        ["job_started", "coordinator_changed", "job_succeeded"],
    ],
    ids=["longer", "as long"],
)
def test_a_journal_whose_end_was_lost_with_its_coordinator_is_followed_as_it_went_on(second: list[str]) -> None:
    """Whoever follows has at the end the events of the agent that lives, whatever it was told before."""
    asked: list[str] = []
    lost = JournalLink("n1", asked, ["job_started", "generation_proposed", "generation_running"])
    lives = JournalLink("n2", asked, second)
    lives.journal[0] = lost.journal[0]
    hub: Any = Session(Inventory(Path("hosts.toml"), (), JobDefaults(workdir=Path())))
    rows, read = EventRows(), [0]

    async def check() -> None:
        hub.opened_links = lambda: [lost if lost.opened else lives]
        following = asyncio.ensure_future(updates.Updates(hub).run())
        await asyncio.wait_for(lost.all_sent.wait(), 60)
        read[0] = len(rows.follow(hub.events))
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        lost.opened = False
        await asyncio.wait_for(updates.Updates(hub).run(), 60)

    asyncio.run(check())
    assert hub.events == lives.journal
    assert read == [3]
    # What is new to a reader is what replaced the end: the part that is the same is not told again.
    assert rows.follow(hub.events) == lives.journal[1:]
    assert rows.rows == lives.journal


@pytest.mark.parametrize("state", ["stopped", "running"])
def test_an_end_counts_once_the_best_source_has_it_too(state: str) -> None:
    """Hosts that the coordinator no longer reached may continue; else nobody waits for more, as the agents wait."""
    over = JournalLink("n1", [], ["job_started", "job_stopped"])
    best = JournalLink("n2", [], ["job_started", "coordinator_changed"])
    best.journal[0] = over.journal[0]
    best.rank_as_source = lambda: (2, 0)  # type: ignore[method-assign]
    hub: Any = Session(Inventory(Path("hosts.toml"), (), JobDefaults(workdir=Path())))
    hub.opened_links = lambda: [best, over] if hub.events else [over]

    async def call(op: str, *, timeout_s: float = 0.0) -> Answer:
        return Answer({"state": state})

    best.call = call  # type: ignore[method-assign]

    async def check() -> None:
        following = asyncio.ensure_future(updates.Updates(hub).run())
        waiting = asyncio.ensure_future(best.all_sent.wait())
        await asyncio.wait((following, waiting), timeout=60, return_when=asyncio.FIRST_COMPLETED)
        for task in (following, waiting):
            task.cancel()
        await asyncio.gather(following, waiting, return_exceptions=True)

    asyncio.run(check())
    assert hub.ended == (state == "stopped")
    assert hub.events == (over.journal if state == "stopped" else best.journal)


class FilesLink(SilentLink):
    """A link to the files of a dead agent: one status, which takes a moment, and a journal that ends at once."""

    async def stream(self, op: str, args: object = None) -> AsyncGenerator[Answer, None]:
        if op == "watch":
            await asyncio.sleep(0.05)
            yield Answer({"status": {"state": "degraded"}})


def test_a_status_that_comes_after_the_end_of_the_journal_is_taken() -> None:
    """Without it nobody knows which agents the job needs, and none is restarted."""
    hub: Any = Session(Inventory(Path("hosts.toml"), (), JobDefaults(workdir=Path())))
    hub.opened_links = lambda: [FilesLink("n1", [], is_there=True)]

    async def check() -> None:
        following = asyncio.ensure_future(updates.Updates(hub).run())
        await hub.wait_until(lambda: bool(hub.status), 10)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)

    asyncio.run(check())
    assert hub.status == {"state": "degraded"}


def test_a_status_of_a_host_that_is_gone_stands_for_less_than_ten_seconds() -> None:
    assert 2 * updates.SILENCE + updates.REST < 10
