"""The registry: one place for verbs, keys, confirmations; what they say they do."""

from __future__ import annotations

import asyncio
import importlib
from pathlib import Path
from typing import Any

import pytest

from remote_agent.agent.requests import LOOKS
from remote_agent.coordinator.operator_requests import VERBS
from supervisor.actions import ACTIONS, BY_ID, BY_VERB
from supervisor.cli.entry import overview
from supervisor.errors import RequestFailed
from supervisor.inventory import Inventory, JobDefaults
from supervisor.session import Session
from supervisor.ssh.answers import SHAPES
from supervisor.tui.dialogs.actions import changes, offered

STATUS: Any = {
    "job": "train-k3f9",
    "generation": 2,
    "world_size": 4,
    "coordinator": "n1",
    "nodes": [
        {"name": "n1", "group_rank": 0, "ranks": [{"rank": 0}, {"rank": 1}]},
        {"name": "n2", "group_rank": 1, "ranks": [{"rank": 2}, {"rank": 3}]},
        {"name": "n3", "group_rank": None, "ranks": []},
    ],
}


def test_the_menu_has_room_for_every_text_at_80_columns() -> None:
    for action in offered():
        target = "n01: " if action.scope == "node" else ""
        assert len(target + action.help) <= 52, action.help


def test_ids_verbs_and_keys_are_unique() -> None:
    assert len({action.id for action in ACTIONS}) == len(ACTIONS)
    verbs = [action.verb for action in ACTIONS if action.verb]
    assert len(set(verbs)) == len(verbs)
    keys = [action.key for action in ACTIONS if action.key]
    assert len(set(keys)) == len(keys)
    assert all(len(key) == 1 for key in keys)


def test_the_command_line_has_every_verb_of_the_registry() -> None:
    for action in BY_VERB.values():
        module, _, function = action.runner.partition(".")
        assert callable(getattr(importlib.import_module(f"supervisor.cli.{module}"), function or "run"))
    text = overview()
    assert all(f"  {verb} " in text for verb in BY_VERB)


def test_whatever_the_coordinator_is_asked_is_a_verb_with_an_answer() -> None:
    assert VERBS.keys() <= {action.op for action in ACTIONS if action.destructive}
    assert VERBS.keys() <= SHAPES.keys()


def test_what_destroys_is_confirmed_and_goes_through_a_request() -> None:
    for action in ACTIONS:
        if action.destructive:
            assert action.confirm > 0
        if action.confirm == 2:
            assert action.destructive
    assert BY_ID["job.kill"].args == (("kill", True),)


def test_read_only_refuses_every_action_that_leaves_something_behind() -> None:
    session = Session(Inventory(None, (), JobDefaults(Path())), "any", read_only=True)
    for action in ACTIONS:
        # The agents refuse what is not in LOOKS: a new action is one or the other.
        assert action.op is None or changes(action) != (action.op in LOOKS), action.id
        if action.op and changes(action):
            with pytest.raises(RequestFailed, match=f"{action.op} refused: this supervisor is read-only"):
                asyncio.run(session.request(str(action.op), **dict(action.args)))


@pytest.mark.parametrize(
    ("name", "target", "words"),
    [
        ("job.restart", None, ("4 ranks on 2 nodes", "generation 3", "not charged")),
        ("node.remove", "n1", ("n1 (2 ranks)", "world size 2", "another node takes over as coordinator")),
        ("node.remove", "n2", ("n2 (2 ranks)", "world size 2")),
        ("node.add", "n3", ("n3", "generation 3", "4 ranks on 2 nodes")),
        ("job.stop", None, ("SIGTERM", "4 ranks on 2 nodes")),
        ("job.kill", None, ("SIGKILL", "nothing is saved")),
    ],
)
def test_effects_name_targets_and_consequences(name: str, target: str | None, words: tuple[str, ...]) -> None:
    effect = BY_ID[name].effect(STATUS, (target,) if target else ())
    assert all(word in effect for word in words), effect


def test_removing_another_node_does_not_move_the_coordinator() -> None:
    assert "coordinator" not in BY_ID["node.remove"].effect(STATUS, ("n2",))


def test_effects_survive_an_empty_status() -> None:
    for action in ACTIONS:
        assert action.effect({}, ("n1",))
