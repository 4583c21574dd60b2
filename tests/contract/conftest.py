"""What tests with real hosts share: a process that forks the commands of `supervisor`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from supervisor.actions import ACTIONS
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
