"""Nothing is destroyed by one key: every verb asks, says what it will do, and is refused in read-only."""

from __future__ import annotations

import datetime
import re
from collections.abc import Sequence
from typing import Any

import pytest

from supervisor.actions import Action
from supervisor.errors import RequestFailed
from supervisor.tui.dialogs import base
from supervisor.tui.dialogs.actions import ActionDialogs, changes, offered
from supervisor.tui.dialogs.ports import read_ports
from tests.screens import recorded
from tests.screens.screens import compare, playing, press, running, settle, type_key


@pytest.mark.parametrize("action", [one for one in offered() if one.destructive], ids=lambda action: action.id)
async def test_every_verb_asks_first(action: Action) -> None:
    session = recorded.load("restarting_4x2")
    session.status["nodes"][1]["cordoned"] = True
    kept = {"id": "a1", "path": "a.pt", "step": 1, "time_ns": 1, "bytes": 1, "nodes": ["n1"]}
    session.status["snapshots"] = [kept]
    async with running(session, (120, 30)) as (app, pilot):
        text = await press(app, pilot, "3", "x", action.key)
        if re.search(r"which \w+\?", text) or "signal to" in text:
            text = await press(app, pilot, "enter")
        assert "Effect" in text
        assert "Cancel" in text
        # The focus is on Cancel: enter does nothing else.
        await press(app, pilot, "enter")
        assert session.requests == []
        assert len(app.screen_stack) == 1


async def test_no_single_key_asks_the_cluster_for_anything() -> None:
    async with playing("restarting_4x2") as (app, pilot, session):
        for mode in "1234567":
            for key in (*"rmaSKPdky", "delete", "backspace", "ctrl+d", "ctrl+k"):
                for typed in (mode, key, "escape", "escape"):
                    type_key(app, typed)
            await settle(app, pilot)
        assert session.requests == []


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("xr", "Restart group?"), (":stacks", "Dump stacks   "), ("4&lossy\r!tqdm\rv/z", "+lossy  -tqdm  ≥warn"),
        ("45-/zz", "/zz\n"), ("3jjl", "log of rank 2"), (":Logs screen\r/zz", "/zz\n"),
    ],
)  # fmt: skip
async def test_letters_typed_ahead_go_to_what_they_open(typed: str, said: str) -> None:
    async with running(recorded.load("running_2x2")) as (app, pilot):
        for key in typed:
            type_key(app, "enter" if key == "\r" else key)
        assert said in await settle(app, pilot)


ENV = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,BOOTSTRAP,ENV,NET,GRAPH,TUNING"}
SUBSYSTEMS = "NCCL_DEBUG_SUBSYS=INIT,BOOTSTRAP,ENV,NET,GRAPH,TUNING"
TO_SIGNAL = ("3", "space", "j", "j", "space", "j", "x", "s", "U")


@pytest.mark.parametrize(
    ("recording", "keys", "said", "yes", "verb", "args"),
    [
        ("running_2x2", "xr", "stops all 4 ranks on 2 nodes", "y", "restart", {}),
        ("running_2x2", "jxm", "4 ranks on 2 nodes -> 2 ranks on 1 node", ["right", "enter"], "remove", {"node": "n2"}),
        ("restarting_4x2", ("x", "a", "enter"), "n4", "y", "add", {"node": "n4"}),
        ("running_2x2", "xnn", SUBSYSTEMS, ["right", "enter"], "restart", {"env": ENV, "later": True}),
        ("running_2x2", "xnn", SUBSYSTEMS, ["right", "right", "enter"], "restart", {"env": ENV, "later": False}),
        ("running_2x2", TO_SIGNAL, "rank 0 on n1, rank 2 on n2 ", "y", "signal", {"ranks": [0, 2], "signal": "USR1"}),
    ],
)  # fmt: skip
async def test_a_verb_is_bound_to_the_generation_on_the_screen(
    recording: str, keys: Sequence[str], said: str, yes: Sequence[str], verb: str, args: dict[str, Any]
) -> None:
    async with playing(recording, (120, 30)) as (app, pilot, session):
        generation = session.status["generation"]
        assert said in await press(app, pilot, *keys)
        # The cluster moves on while the dialog is open: the agents are told which generation was meant.
        session.touch(status={**session.status, "generation": generation + 1})
        assert f"{verb} accepted" in await press(app, pilot, *yes)
        assert session.requests == [(verb, {**args, "if_generation": generation})]


async def test_a_snapshot_is_gone_back_to_after_its_cost_is_shown() -> None:
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


async def test_a_sync_names_what_changed() -> None:
    async with playing("running_2x2", (120, 30)) as (app, pilot, session):
        text = await press(app, pilot, "R")
        assert "3 files, 12.0 kB: train.py, model.py, lib/data.py" in text
        assert re.search("Files +/home/me/work", text)
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
        previous = {"digest": "a" * 64}
        session.changes |= {"change": None, "tree": {"digest": "b" * 64, "previous": previous}}
        text = await press(app, pilot, "R")
        assert "no file has changed" in text
        await press(app, pilot, "right", "enter")
        assert session.requests[2:] == [("rollback", {})]


async def test_the_menu_follows_the_job_while_it_is_open() -> None:
    async with playing("running_2x2") as (app, pilot, session):
        assert re.search("Add node +no eligible node", await press(app, pilot, "j", "x"))
        nodes = [session.status["nodes"][0], {**session.status["nodes"][1], "state": "removed", "ranks": []}]
        session.touch(status={**session.status, "nodes": nodes, "generation": 1})
        assert re.search("Add node +n2", await settle(app, pilot))
        await press(app, pilot, "a", "y")
        assert session.requests == [("add", {"node": "n2", "if_generation": 1})]


async def test_stop_wants_the_name_of_the_job() -> None:
    async with playing("running_2x2") as (app, pilot, session):
        await press(app, pilot, "x", "S", *"train-k3f", "tab", "enter")
        assert session.requests == []
        await press(app, pilot, "escape", "x", "S", *"train-k3f9", "enter")
        assert session.requests == [("stop", {"kill": False})]


async def test_a_key_held_down_does_not_confirm(monkeypatch: pytest.MonkeyPatch) -> None:
    async with playing("running_2x2") as (app, pilot, session):
        monkeypatch.setattr(base, "GUARD_S", 60.0)
        assert "Effect" in await press(app, pilot, "x", "r", "y", "y", "y")
        assert session.requests == []


async def test_a_refusal_is_shown_with_its_hint() -> None:
    session = recorded.load("running_2x2")
    session.refusal = RequestFailed("generation 0 is over", "look again, then decide", "stale")
    async with running(session) as (app, pilot):
        text = await press(app, pilot, "x", "r", "y")
        assert "generation 0 is over" in text
        assert "look again, then decide" in text
        session.requests.clear()
        session.touch(ended=True, status={**session.status, "state": "succeeded"})
        assert "the job has ended" in await press(app, pilot, "escape", "escape", "x", "r")
        assert session.requests == []


async def test_read_only_offers_nothing_and_sends_nothing() -> None:
    async with playing("running_2x2", read_only=True) as (app, pilot, session):
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
            ActionDialogs(app.shell).begin(action, app.shell.active_screen.selection())
        await settle(app, pilot)
        assert session.requests == []


async def test_the_palette_runs_an_action_and_opens_the_log_of_a_rank() -> None:
    async with running(recorded.load("running_2x2")) as (app, pilot):
        assert "Restart group?" in await press(app, pilot, "colon", *"restart gr", "enter")
        text = await press(app, pilot, "escape", "ctrl+p", *"r3", "enter")
        assert app.current_mode == "logs"
        assert "log of rank 3 on n2" in text


async def test_marked_nodes_are_one_request() -> None:
    session = recorded.load("restarting_4x2")
    reported = {name: {"accepted": name == "n2", "message": f"{name} says so", "hint": ""} for name in ("n2", "n3")}
    session.answer = {"accepted": True, "message": "remove accepted", "generation": 3, "seq": 40, "nodes": reported}
    async with running(session, (120, 30)) as (app, pilot):
        text = await press(app, pilot, "j", "space", "j", "space", "k")
        assert "2 marked" in text
        assert len(re.findall(r"^.◆. running +n[23]|^◆. running +n[23]", text, re.MULTILINE)) == 2
        assert "Target    n2, n3" in await press(app, pilot, "x", "m")
        text = await press(app, pilot, "y")
        assert session.requests == [("remove", {"nodes": ["n2", "n3"], "if_generation": 1})]
        assert "1 done, 1 failed" in text
        # What was done is no longer marked.
        assert app.shell.preferences.nodes == ["n3"]
        assert "Remove node n3" in await press(app, pilot, "right", "enter")
        assert "marked" not in await press(app, pilot, "escape", "U")
        await press(app, pilot, "asterisk")
        assert app.shell.preferences.nodes == ["n4"]


async def test_marks_of_ranks_stay_with_their_numbers() -> None:
    async with playing("running_2x2", (120, 30)) as (app, pilot, _):
        assert "select or mark a rank" in await press(app, pilot, "2", "x", "s")
        text = await press(app, pilot, "3", "space", "j", "j", "space", "j")
        assert re.findall(r"^[ ▸]?◆.* (\d) +n\d", text, re.MULTILINE) == ["0", "2"]
        assert "signal to rank 0, 2" in await press(app, pilot, "x", "s")


async def test_flight_records_are_saved_without_a_question() -> None:
    async with playing("running_2x2", (120, 30)) as (app, pilot, session):
        text = await press(app, pilot, "3", "j", "x", "f", "r")
        assert session.requests == [("keep", {"ranks": [1]})]
        assert "keep accepted" in text
        await press(app, pilot, "x", "f", "n")
        assert session.requests[1:] == [("keep", {"ranks": [0, 1]})]
        text = await press(app, pilot, "colon", *"unmark all")
        assert "Unmark all" in text
        assert "Mark.none" not in text


async def test_stacks_are_read_and_copied_by_who_only_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(ranks: list[int]) -> dict[str, Any]:
        raise RequestFailed("n2: no link")

    session = recorded.load("running_2x2")
    frames = [f'  File "/srv/train.py", line {line} in {what}' for line, what in ((88, "forward"), (61, "load"))]
    head = "Thread 0x7f01 (most recent call first):\n"
    session.python_stacks = {"0": head + frames[0], "1": head + frames[1], "3": head + frames[0]}
    async with running(session, read_only=True) as (app, pilot):
        copied: list[str] = []
        monkeypatch.setattr(app.shell, "copy", copied.append)
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


async def test_cordon_and_uncordon_offer_the_nodes_that_they_fit() -> None:
    session = recorded.load("running_2x2")
    session.status["nodes"][1]["cordoned"] = True
    async with running(session, (120, 30)) as (app, pilot):
        await press(app, pilot, "x", "c", "y")
        await press(app, pilot, "j", "x", "u", "y")
        assert session.requests == [("cordon", {"node": "n1"}), ("uncordon", {"node": "n2"})]


async def test_a_port_is_forwarded_listed_copied_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    async with playing("running_2x2", (120, 30)) as (app, pilot, session):
        copied: list[str] = []
        monkeypatch.setattr(app.shell, "copy", copied.append)
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


async def test_why_a_port_is_not_forwarded_is_said() -> None:
    session = recorded.load("running_2x2")
    session.refusal = RequestFailed("n1 is this machine: open http://localhost:6006")
    async with running(session) as (app, pilot):
        assert "n1 is this machine: open http://localhost:6006" in await press(app, pilot, "2", "g", "F", "enter")
        assert session.forwards == []
        # Of a whole job of several nodes, none is meant.
        assert "Forward port: select a node or a rank" in await press(app, pilot, "5", "F")


@pytest.mark.parametrize("text", ["", ":", "6006:", ":6006", "0", "65536", "6006:0", "1:2:3"])
def test_what_is_no_port_is_refused(text: str) -> None:
    assert (read_ports("6006"), read_ports("1:65535")) == ((None, 6006), (1, 65535))
    with pytest.raises(ValueError):
        read_ports(text)
