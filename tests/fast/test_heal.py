"""The repair of a job while an operator is attached, and the tasks that do it; the hosts are made up."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from supervisor.control import admission, heal, promotion
from supervisor.inventory import Inventory, JobDefaults
from supervisor.session import Session

WAIT_S = 30.0


class Dead:
    """A link that has found no agent on its host."""

    def __init__(self, name: str) -> None:
        self.view = SimpleNamespace(name=name, live=False)
        self.opened = True
        self.opened_at = 0.0
        self.missing, self.asked_at = False, 0.0

    def reopen(self) -> None:
        self.opened_at = time.monotonic()

    def ask_again(self) -> None:
        """The host knows the job."""

    async def try_call(self, op: str, *, timeout_s: float) -> dict[str, Any]:
        return {"state": "running"}


class Silent(Dead):
    """One whose host does not answer any more; the next host is found without an agent only then."""

    def __init__(self, name: str, later: Dead) -> None:
        super().__init__(name)
        self._later = later
        later.opened = False

    async def try_call(self, op: str, *, timeout_s: float) -> dict[str, Any]:
        self._later.opened = True
        await asyncio.get_running_loop().create_future()
        return {}


def test_a_host_that_does_not_answer_does_not_delay_the_repair_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    second = Dead("n2")
    first = Silent("n1", second)
    nodes = [{"name": name, "state": "lost"} for name in ("n1", "n2")]

    async def nothing(*_: object) -> None:
        """There is nothing else to repair."""

    async def scenario() -> list[str]:
        restarted: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()

        async def start(_hub: object, name: str, *, full: bool) -> None:
            second.view.live = True
            restarted.set_result([name])

        monkeypatch.setattr(heal, "bring_up_again", start)
        tasks: list[asyncio.Task[None]] = []

        def own(work: Any, name: str) -> asyncio.Task[None]:
            tasks.append(asyncio.get_running_loop().create_task(work, name=name))
            return tasks[-1]

        hub: Any = SimpleNamespace(
            launching=False, failure=None, attach="control", read_only=False, ended=False, state="degraded",
            status={"nodes": nodes}, links={"n1": first, "n2": second}, notice=lambda *_: None, own=own,
            opened_links=lambda live: [], wait_until=nothing,
        )  # fmt: skip
        healer = asyncio.get_running_loop().create_task(heal.Healer(hub).run())
        try:
            return await asyncio.wait_for(restarted, WAIT_S)
        finally:
            for task in (healer, *tasks):
                task.cancel()

    monkeypatch.setattr(heal, "INTERVAL", 0.0)
    monkeypatch.setattr(heal, "SETTLE", -1.0)
    monkeypatch.setattr(admission, "spread", nothing)
    monkeypatch.setattr(promotion, "promote_if_orphaned", nothing)
    assert asyncio.run(scenario()) == ["n2"]


def test_a_task_that_has_ended_is_not_kept() -> None:
    """One is begun every second for as long as an operator is attached."""

    async def scenario() -> None:
        session = Session(Inventory(None, (), JobDefaults(Path())), "any")
        task = session.own(asyncio.sleep(0), "a check")
        ended = weakref.ref(task)
        await task
        del task
        # What the loop has to call when a task ends comes first.
        await asyncio.sleep(0)
        gc.collect()
        assert ended() is None
        await session.close()

    asyncio.run(scenario())


def test_an_agent_that_hears_only_now_that_its_node_was_removed_is_asked_to_end_again() -> None:
    """It was stopped or cut off: until it has joined the coordinator, it counts itself as part of the job."""
    answers: list[dict[str, Any] | None] = [None, None, {}]

    async def ask(op: str, *, timeout_s: float) -> dict[str, Any] | None:
        assert op == "exit"
        return answers.pop(0)

    async def wait(seconds: float) -> None:
        await asyncio.sleep(0)

    link: Any = SimpleNamespace(opened=True, view=SimpleNamespace(live=True), try_call=ask)
    asyncio.run(heal._end_leaving(SimpleNamespace(wait_change=wait), link))  # type: ignore[arg-type]
    assert answers == []


@pytest.mark.parametrize("joining", [True, False])
def test_an_agent_that_another_operator_has_just_started_is_not_taken_for_the_one_that_left(joining: bool) -> None:
    async def ask(op: str, *, timeout_s: float) -> dict[str, Any]:
        assert op == "identity"
        return {"joining": joining}

    async def call(op: str) -> dict[str, Any]:
        return {"nodes": [{"name": "n3", "state": "removed"}]}

    link: Any = SimpleNamespace(opened=True, view=SimpleNamespace(live=True, name="n3"), try_call=ask)
    assert asyncio.run(heal._is_leaving(SimpleNamespace(call=call), link)) is not joining  # type: ignore[arg-type]
