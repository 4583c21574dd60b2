"""Nothing is destroyed by one key: every verb asks, says what it will do, and is refused in read-only."""

from __future__ import annotations

import asyncio
import datetime
import re
from typing import Any

import pytest

from supervisor.errors import RequestFailed
from supervisor.tui.dialogs import base
from supervisor.tui.dialogs.actions import ActionDialogs, changes, offered
from supervisor.tui.dialogs.ports import read_ports
from supervisor.tui.shell import Target
from tests.screens import recorded
from tests.screens.screens import compare, press, running, settle, text_of, type_key, until


@pytest.fixture(autouse=True)
def no_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of a test come faster than any hand."""
    monkeypatch.setattr(base, "GUARD_S", 0.0)


@pytest.mark.parametrize("action", [one for one in offered() if one.destructive], ids=lambda action: action.id)
def test_every_verb_asks_first(action: object) -> None:
    async def scenario() -> None:
        session = recorded.load("restarting_4x2")
        session.status["nodes"][1]["cordoned"] = True
        session.status["snapshots"] = [
            {"id": "a1", "path": "a.pt", "step": 1, "time_ns": 1, "bytes": 1, "nodes": ["n1"]}
        ]
        async with running(session, (120, 30)) as (app, pilot):
            name = next(entry for entry in offered() if entry is action)
            text = await press(app, pilot, "3", "x", name.key)
            if re.search(r"which \w+\?", text) or "signal to" in text:
                text = await press(app, pilot, "enter")
            assert "Effect" in text
            assert "Cancel" in text
            assert session.requests == []
            # The focus is on Cancel: enter does nothing else.
            await press(app, pilot, "enter")
            assert session.requests == []
            assert len(app.screen_stack) == 1

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "key", ["r", "m", "a", "S", "K", "P", "d", "k", "y", "delete", "backspace", "ctrl+d", "ctrl+k"]
)
def test_no_single_key_asks_the_cluster_for_anything(key: str) -> None:
    async def scenario() -> None:
        session = recorded.load("restarting_4x2")
        async with running(session) as (app, pilot):
            for mode in "1234567":
                await pilot.press(mode, key)
            await settle(app, pilot)
            assert session.requests == []

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("xr", "Restart group?"), (":stacks", "Dump stacks   "), ("4z", ", folded"), ("4/text", "/text\n"),
        ("4&lossy\r!tqdm\rv/z", "+lossy  -tqdm  ≥warn"), ("45-/zz", "/zz\n"), ("3jjl", "log of rank 2"),
        (":Logs screen\r/zz", "/zz\n"),
    ],
)  # fmt: skip
def test_letters_typed_ahead_of_a_screen_a_dialog_or_a_field_are_its_own(typed: str, said: str) -> None:
    async def scenario() -> None:
        async with running(recorded.load("running_2x2")) as (app, pilot):
            for key in typed:
                type_key(app, "enter" if key == "\r" else key)
            assert said in await settle(app, pilot)

    asyncio.run(scenario())


def test_restart_is_bound_to_the_generation_on_the_screen() -> None:
    async def scenario() -> None:
        session = recorded.load("running_2x2")
        async with running(session) as (app, pilot):
            text = await press(app, pilot, "x", "r")
            assert "stops all 4 ranks on 2 nodes" in text
            # The cluster moves on while the dialog is open: the agents are told which generation was meant.
            session.touch(status={**session.status, "generation": 1})
            await press(app, pilot, "y")
            assert session.requests == [("restart", {"if_generation": 0})]
            assert "restart accepted" in text_of(app)

    asyncio.run(scenario())


def test_a_snapshot_on_the_run_screen_is_gone_back_to_after_its_cost_is_shown() -> None:
    async def scenario() -> None:
        session = recorded.load("running_2x2")
        began = next(event for event in session.events if event["type"] == "generation_started")["time"]
        time_ns = int(datetime.datetime.fromisoformat(began.rstrip("Z") + "+00:00").timestamp() * 1e9)
        one = {"path": "snapshot.pt", "bytes": 2_000_000, "nodes": ["n1", "n2"], "skipped": False}
        kept = [{**one, "id": f"a{step}", "step": step, "time_ns": time_ns + step * 10**9} for step in (1, 2)]
        async with running(session, (120, 40)) as (app, pilot):
            assert "no node keeps a snapshot" in await press(app, pilot, "x", "b")
            session.touch(status={**session.status, "snapshots": kept})
            text = await press(app, pilot, "6")
            assert re.search(r"saved +◆ step 2 .* snapshot\.pt +2\.0 MB +on n\[1-2\]", text)
            assert "◆ step 1 " in text
            await press(app, pilot, "x", "b", "down")
            text = await press(app, pilot, "enter")
            assert "Go back to step 1?" in text
            assert "resumes from step 1 (snapshot.pt)" in text
            await press(app, pilot, "y")
            assert session.requests == [("restart", {"snapshot": "a1", "if_generation": 0})]

    asyncio.run(scenario())


def test_a_sync_names_what_changed_and_leaves_out_a_node_only_on_request() -> None:
    async def scenario() -> None:
        session = recorded.load("running_2x2")
        async with running(session, (120, 30)) as (app, pilot):
            text = await press(app, pilot, "R")
            assert "3 files, 12.0 kB: train.py, model.py, lib/data.py" in text
            assert "Roll back" not in text
            failed = {"n1": {"accepted": True}, "n2": {"accepted": False, "message": "n2: disk full"}}
            session.answer = {"accepted": False, "message": "nothing is restarted", "nodes": failed}
            text = await press(app, pilot, "right", "enter")
            assert session.requests == [("sync", {"digest": "b" * 64})]
            assert "1 of 2 nodes failed" in text
            assert "n2: disk full" in text
            session.answer = None
            await press(app, pilot, "right", "right", "enter")
            assert session.requests[1:] == [("sync", {"digest": "b" * 64, "partial": True})]
            session.changes = {"change": None, "tree": {"digest": "b" * 64, "previous": {"digest": "a" * 64}}}
            text = await press(app, pilot, "R")
            assert "no file has changed" in text
            await press(app, pilot, "right", "enter")
            assert session.requests[2:] == [("rollback", {})]

    asyncio.run(scenario())


def test_remove_is_about_the_selected_node() -> None:
    async def scenario() -> None:
        session = recorded.load("running_2x2")
        async with running(session) as (app, pilot):
            text = await press(app, pilot, "j", "x", "m")
            assert re.search(r"Target +n2 ", text)
            assert "4 ranks on 2 nodes -> 2 ranks on 1 node" in text
            await press(app, pilot, "right", "enter")
            assert session.requests == [("remove", {"node": "n2", "if_generation": 0})]

    asyncio.run(scenario())


def test_add_asks_which_node_when_the_selected_one_is_in() -> None:
    async def scenario() -> None:
        session = recorded.load("restarting_4x2")
        async with running(session) as (app, pilot):
            text = await press(app, pilot, "x", "a")
            assert "which node?" in text
            await press(app, pilot, "enter", "y")
            assert session.requests == [("add", {"node": "n4", "if_generation": 1})]

    asyncio.run(scenario())


def test_stop_wants_the_name_of_the_job() -> None:
    async def scenario() -> None:
        session = recorded.load("running_2x2")
        async with running(session) as (app, pilot):
            await press(app, pilot, "x", "S", *"train-k3f", "tab", "enter")
            assert session.requests == []
            await press(app, pilot, "escape", "x", "S", *"train-k3f9", "enter")
            assert session.requests == [("stop", {"kill": False})]

    asyncio.run(scenario())


def test_a_key_held_down_does_not_confirm(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        session = recorded.load("running_2x2")
        async with running(session) as (app, pilot):
            monkeypatch.setattr(base, "GUARD_S", 60.0)
            await press(app, pilot, "x", "r", "y", "y", "y")
            assert session.requests == []
            assert "Effect" in text_of(app)

    asyncio.run(scenario())


def test_a_refusal_is_shown_with_its_hint() -> None:
    async def scenario() -> None:
        session = recorded.load("running_2x2")
        session.refusal = RequestFailed("generation 0 is over", "look again, then decide", "stale")
        async with running(session) as (app, pilot):
            text = await press(app, pilot, "x", "r", "y")
            assert "generation 0 is over" in text
            assert "look again, then decide" in text

    asyncio.run(scenario())


def test_node_that_vanishes_while_its_dialog_is_open() -> None:
    async def scenario() -> None:
        session = recorded.load("running_2x2")
        async with running(session) as (app, pilot):
            await press(app, pilot, "j", "x", "m")
            nodes = session.status["nodes"][:1]
            session.hosts.pop("n2")
            session.touch(status={**session.status, "nodes": nodes, "generation": 1})
            session.refusal = RequestFailed("no node n2 in the group", kind="stale")
            assert "no node n2 in the group" in await press(app, pilot, "y")

    asyncio.run(scenario())


def test_menu_follows_the_job_while_it_is_open() -> None:
    async def scenario() -> None:
        session = recorded.load("running_2x2")
        async with running(session) as (app, pilot):
            text = await press(app, pilot, "j", "x")
            assert re.search("Add node +no eligible node", text)
            nodes = [session.status["nodes"][0], {**session.status["nodes"][1], "state": "removed", "ranks": []}]
            session.touch(status={**session.status, "nodes": nodes, "generation": 1})
            await until(app, pilot, lambda: re.search("Add node +n2", text_of(app)) is not None)
            await press(app, pilot, "a", "y")
            assert session.requests == [("add", {"node": "n2", "if_generation": 1})]

    asyncio.run(scenario())


def test_read_only_offers_nothing_and_sends_nothing() -> None:
    async def scenario() -> None:
        session = recorded.load("running_2x2")
        async with running(session, read_only=True) as (app, pilot):
            text = await press(app, pilot, "x")
            assert text.count("this supervisor is read-only") == sum(map(changes, offered()))
            for action in filter(changes, offered()):
                await press(app, pilot, action.key)
            await press(app, pilot, "enter", "escape")
            text = await press(app, pilot, "colon", *"restart")
            assert "Restart group" not in text
            await press(app, pilot, "enter", "escape")
            text = await press(app, pilot, "q")
            assert "Stop the job" not in text
            for action in filter(changes, offered()):
                ActionDialogs(app).begin(action, app.active_screen.selection() if app.active_screen else Target())
            await settle(app, pilot)
            assert session.requests == []

    asyncio.run(scenario())


def test_a_job_that_is_over_takes_no_orders() -> None:
    async def scenario() -> None:
        session = recorded.load("succeeded_2x2")
        async with running(session) as (app, pilot):
            text = await press(app, pilot, "x", "r")
            assert "the job has ended" in text
            assert session.requests == []

    asyncio.run(scenario())


def test_palette_runs_an_action_with_its_question() -> None:
    async def scenario() -> None:
        session = recorded.load("running_2x2")
        async with running(session) as (app, pilot):
            text = await press(app, pilot, "colon", *"restart gr", "enter")
            assert "Restart group?" in text
            await press(app, pilot, "escape", "ctrl+p", *"r3", "enter")
            await until(app, pilot, lambda: app.current_mode == "logs")
            assert "log of rank 3 on n2" in await settle(app, pilot)

    asyncio.run(scenario())


@pytest.mark.parametrize(("buttons", "later"), [(("right",), True), (("right", "right"), False)])
def test_the_level_of_nccls_log_is_set_for_the_next_group(buttons: tuple[str, ...], later: bool) -> None:
    async def scenario() -> None:
        session = recorded.load("running_2x2")
        async with running(session) as (app, pilot):
            text = await press(app, pilot, "x", "n", "n")
            assert "NCCL_DEBUG_SUBSYS=INIT,BOOTSTRAP,ENV,NET,GRAPH,TUNING" in text
            await press(app, pilot, *buttons, "enter")
            env = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,BOOTSTRAP,ENV,NET,GRAPH,TUNING"}
            assert session.requests == [("restart", {"env": env, "later": later, "if_generation": 0})]

    asyncio.run(scenario())


class Partly(recorded.RecordedSession):
    """A cluster that refuses one of several nodes."""

    async def request(self, verb: str, **args: Any) -> dict[str, Any]:
        """Accept n2 alone."""
        answer = await super().request(verb, **args)
        reported = {
            name: {"accepted": name == "n2", "message": f"{name} says so", "hint": ""} for name in args["nodes"]
        }
        return {**answer, "nodes": reported}


def test_marked_nodes_are_one_request_and_those_that_failed_can_be_tried_again() -> None:
    async def scenario() -> None:
        source = recorded.load("restarting_4x2")
        session = Partly()
        session.hosts, session.status, session.events = source.hosts, source.status, source.events
        async with running(session, (120, 30)) as (app, pilot):
            text = await press(app, pilot, "j", "space", "j", "space", "k")
            assert "2 marked" in text
            assert len(re.findall(r"^.◆. running +n[23]|^◆. running +n[23]", text, re.MULTILINE)) == 2
            text = await press(app, pilot, "x", "m")
            assert "Target    n2, n3" in text
            text = await press(app, pilot, "y")
            assert session.requests == [("remove", {"nodes": ["n2", "n3"], "if_generation": 1})]
            assert "1 done, 1 failed" in text
            # What was done is no longer marked.
            assert app.preferences.nodes == ["n3"]
            text = await press(app, pilot, "right", "enter")
            assert "Remove node n3" in text
            await press(app, pilot, "escape", "U")
            assert "marked" not in text_of(app)
            await press(app, pilot, "asterisk")
            assert app.preferences.nodes == ["n4"]

    asyncio.run(scenario())


def test_marks_of_ranks_stay_with_their_numbers() -> None:
    async def scenario() -> None:
        session = recorded.load("failed_4x2")
        async with running(session, (120, 30)) as (app, pilot):
            await press(app, pilot, "3", "j", "space")
            assert app.preferences.ranks == [1]
            assert re.search(r"^◆.*\b1 +n1", text_of(app), re.MULTILINE)

    asyncio.run(scenario())


def test_a_signal_goes_to_the_marked_ranks_after_a_question() -> None:
    async def scenario() -> None:
        session = recorded.load("running_2x2")
        async with running(session, (120, 30)) as (app, pilot):
            text = await press(app, pilot, "2", "x", "s")
            assert "select or mark a rank" in text
            await press(app, pilot, "3", "space", "j", "j", "space", "j")
            assert "signal to rank 0, 2" in await press(app, pilot, "x", "s")
            text = await press(app, pilot, "U")
            assert "Send USR1 to rank 0, 2" in text
            assert re.search("Target +rank 0 on n1, rank 2 on n2 ", text)
            assert session.requests == []
            await press(app, pilot, "y")
            assert session.requests == [("signal", {"ranks": [0, 2], "signal": "USR1", "if_generation": 0})]

    asyncio.run(scenario())


def test_flight_records_are_saved_without_a_question() -> None:
    async def scenario() -> None:
        session = recorded.load("running_2x2")
        async with running(session, (120, 30)) as (app, pilot):
            text = await press(app, pilot, "3", "j", "x", "f", "r")
            assert session.requests == [("keep", {"ranks": [1]})]
            assert "keep accepted" in text
            await press(app, pilot, "x", "f", "n")
            assert session.requests[1:] == [("keep", {"ranks": [0, 1]})]
            text = await press(app, pilot, "colon", *"unmark all")
            assert "Unmark all" in text
            assert "Mark.none" not in text

    asyncio.run(scenario())


def test_stacks_are_read_on_a_page_and_copied_also_by_who_only_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(ranks: list[int]) -> dict[str, Any]:
        raise RequestFailed("n2: no link")

    async def scenario() -> None:
        session = recorded.load("running_2x2")
        frames = [f'  File "/srv/train.py", line {line} in {what}' for line, what in ((88, "forward"), (61, "load"))]
        head = "Thread 0x7f01 (most recent call first):\n"
        session.python_stacks = {"0": head + frames[0], "1": head + frames[1], "3": head + frames[0]}
        async with running(session, read_only=True) as (app, pilot):
            copied: list[str] = []
            monkeypatch.setattr(app, "copy", copied.append)
            text = await press(app, pilot, "1", "j", "x", "d")
            assert re.search(r"n +node n2 +2-3", text)
            text = await press(app, pilot, "a")
            compare("stacks", {"80x24": text})
            await press(app, pilot, "y", "escape")
            # The odd one comes first; whose node does not answer is named.
            assert [line for line in copied[0].splitlines() if line and line[0] != " "] == [
                "rank 1:",
                "ranks 0,3:",
                "rank 2: no stack: n2: no answer in time",
            ]
            assert frames[1].strip() in copied[0]
            text = await press(app, pilot, "x", "d", "n")
            assert "rank 3:" in text
            assert "rank 0" not in text.partition("stacks of node n2")[2].partition("╯")[0]
            await press(app, pilot, "escape")
            monkeypatch.setattr(session, "stacks", refuse)
            assert "n2: no link" in await press(app, pilot, "x", "d", "n")
            assert session.requests == []

    asyncio.run(scenario())


def test_cordon_and_uncordon_offer_the_nodes_that_they_fit() -> None:
    async def scenario() -> None:
        session = recorded.load("running_2x2")
        session.status["nodes"][1]["cordoned"] = True
        async with running(session, (120, 30)) as (app, pilot):
            await press(app, pilot, "x", "c", "y")
            await press(app, pilot, "j", "x", "u", "y")
            assert session.requests == [("cordon", {"node": "n1"}), ("uncordon", {"node": "n2"})]

    asyncio.run(scenario())


def test_a_port_is_forwarded_listed_copied_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        session = recorded.load("running_2x2")
        async with running(session, (120, 30)) as (app, pilot):
            copied: list[str] = []
            monkeypatch.setattr(app, "copy", copied.append)
            text = await press(app, pilot, "3", "G", "F")
            assert "forward a port of n2" in text
            assert "enter opens it  esc closes" in text
            text = await press(app, pilot, "enter")
            assert session.requests == [("forward", {"node": "n2", "port": 6006, "local": None})]
            assert "http://127.0.0.1:7006 leads to port 6006 of n2" in text
            assert "Nothing listens" not in text
            # The field is replaced by what is typed, and says what it does not take.
            text = await press(app, pilot, "F", *"0", "enter")
            assert "a port is a number from 1 to 65535" in text
            text = await press(app, pilot, "backspace", *"9000:8888", "enter")
            assert session.requests[1:] == [("forward", {"node": "n2", "port": 8888, "local": 9000})]
            assert "Nothing listens there yet" in text
            text = await press(app, pilot, "2", "g", "F")
            assert text.count(" leads to port ") >= 2
            await press(app, pilot, "y", "escape")
            assert copied == ["http://127.0.0.1:9000"]
            # The same port of another node is another forward; of this node it ends.
            assert [one.port for one in session.forwards] == [6006, 8888]
            text = await press(app, pilot, "G", "F", "enter")
            assert "no longer leads to port 6006 of n2" in text
            assert [one.port for one in session.forwards] == [8888]

    asyncio.run(scenario())


def test_why_a_port_is_not_forwarded_is_said() -> None:
    async def scenario() -> None:
        session = recorded.load("running_2x2")
        session.refusal = RequestFailed("n1 is this machine: open http://localhost:6006")
        async with running(session) as (app, pilot):
            text = await press(app, pilot, "2", "g", "F", "enter")
            assert "n1 is this machine: open http://localhost:6006" in text
            assert session.forwards == []
            # Of a whole job of several nodes, none is meant.
            text = await press(app, pilot, "5", "F")
            assert "Forward port: select a node or a rank" in text

    asyncio.run(scenario())


@pytest.mark.parametrize("text", ["", ":", "6006:", ":6006", "0", "65536", "6006:0", "1:2:3"])
def test_what_is_no_port_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        read_ports(text)


def test_a_port_and_a_pair_of_ports_are_read() -> None:
    assert (read_ports("6006"), read_ports("1:65535")) == ((None, 6006), (1, 65535))
