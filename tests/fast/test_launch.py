"""A launch decides as soon as it can, and says what is in the way; its hosts are made up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from supervisor.errors import HostError, JobInTheWay, LaunchFailed, UsageError
from supervisor.launch import bringup
from supervisor.launch.launch import Launch
from supervisor.link.view import HostView, Plan
from tests.fast.world import spec

WAIT_S = 30.0
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
    monkeypatch.setattr("supervisor.launch.launch.LAST_REPORTS_S", 0.05)
    plan = Plan(spec(4, **job), ("n1", "n2", "n3", "n4"))
    hub: Any = SimpleNamespace(
        inventory=SimpleNamespace(path=Path("hosts.toml")),
        links={name: link(name) for name in plan.hosts},
        notice=lambda text, *_: notices.append(text),
        own_late=lambda _tasks: None,
        believe=lambda _fingerprints: None,
    )
    asyncio.run(asyncio.wait_for(Launch(plan).run(hub), WAIT_S))
    return notices


def test_a_launch_that_cannot_succeed_any_more_fails_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def start_on(name: str, _material: bringup.Material) -> None:
        if name == "n2":
            await asyncio.Event().wait()
        raise HostError(name, "connect", "connection refused")

    with pytest.raises(LaunchFailed, match="0 of 4 hosts came up and 3 failed, 2 are needed") as failed:
        launch(monkeypatch, start_on, min_nodes=2)
    assert [failure.host for failure in failed.value.failures] == ["n1", "n3", "n4"]


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
