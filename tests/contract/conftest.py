"""What tests with real hosts share: a process that forks the commands of `supervisor`; and a place for OpenSSH."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from supervisor.actions import ACTIONS
from tests.cluster.door import Door, Operator, door_obstacle
from tests.cluster.job import Job
from tests.preloaded import Preloaded


@pytest.fixture(scope="session", autouse=True)
def forked_commands(nothing_left_behind: None) -> Iterator[None]:
    """Commands are forked from a process that has loaded what the verbs need; it starts with the first of them.

    They start as from a shell in test_demo, test_by_keys, test_slurm, and where a test has another PYTHONPATH.
    """
    verbs = sorted({action.runner.partition(".")[0] for action in ACTIONS if action.verb})
    with (
        contextlib.closing(Preloaded("supervisor", *(f"supervisor.cli.{name}" for name in verbs))) as commands,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(Job, "supervisor", commands)
        yield


@pytest.fixture(scope="module")
def door() -> Iterator[Door]:
    """A place with servers, whose users are not this machine's."""
    obstacle = door_obstacle()
    if obstacle:
        pytest.skip(obstacle)
    files = [Path("/etc") / name for name in ("passwd", "shadow", "hosts")]
    before = [file.read_bytes() for file in files]
    with Door() as made:
        yield made
    assert [file.read_bytes() for file in files] == before, "this machine's own files have changed"


@pytest.fixture
def operator(door: Door) -> Iterator[Operator]:
    """Who uses ssh there: a new home."""
    with Operator(door) as made:
        yield made
