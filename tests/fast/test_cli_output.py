"""What reaches stdout and in which colours; which job a command is about, and what its verbs say they do."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import random
import re
from pathlib import Path
from typing import Any

import pytest

from remote_agent.agent.file_requests import FileRequests
from remote_agent.agent.requests import LOOKS
from remote_agent.base.paths import Home
from remote_agent.coordinator.operator_requests import VERBS
from remote_agent.wire import JobSpec, NodeSpec
from remote_agent.wire.documents import JournalEvent
from supervisor.actions import ACTIONS, BY_ID, BY_VERB
from supervisor.cli import colours, main
from supervisor.cli.entry import overview
from supervisor.cli.output import Writer
from supervisor.cli.status import contract
from supervisor.cli.steer import find_outcome
from supervisor.errors import RequestFailed, SupervisorError, Unreachable, UsageError
from supervisor.inventory import Host, Inventory, JobDefaults
from supervisor.link import jobs
from supervisor.link.host_link import OPEN
from supervisor.link.jobs import choose_job, group_jobs
from supervisor.session import Session
from supervisor.ssh.answers import SHAPES
from supervisor.tui.dialogs.actions import changes
from tests.fast.journals import event, journal


def test_a_reader_that_is_gone_breaks_the_writer_quietly() -> None:
    read, write = os.pipe()
    os.close(read)
    with open(write, "wb", buffering=0) as file:
        writer = Writer(file)
        writer.put(b"x")
        assert writer.close(10.0)
    assert writer.broken
    writer.put(b"y")
    assert not writer.full


def test_a_full_disk_is_no_reader_that_has_enough() -> None:
    with open("/dev/full", "wb", buffering=0) as file:
        writer = Writer(file)
        writer.put(b"x")
        assert writer.close(10.0)
    with pytest.raises(SupervisorError, match="stdout: No space left on device"):
        writer.check()


@pytest.mark.parametrize("buffering", [0, -1])
def test_a_pipe_that_does_not_block_loses_nothing(buffering: int) -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    text = random.Random(1).randbytes(500_000)
    with open(write, "wb", buffering=buffering) as file:
        writer = Writer(file)
        writer.put(text)
        got = b""
        while len(got) < len(text):
            got += os.read(read, 65536)
        assert writer.close(10.0)
    os.close(read)
    assert (got, writer.broken) == (text, False)


def test_a_slow_reader_is_noticed_and_does_not_block_the_loop() -> None:
    read, write = os.pipe()

    async def scenario(writer: Writer) -> None:
        for _ in range(6):
            writer.put(b"x" * 1024 * 1024)
        assert writer.full
        await asyncio.wait_for(writer.room(), 60)
        assert writer.full
        assert writer.stalled_s > 0
        assert not writer.close(0.05)

    with open(write, "wb", buffering=0) as file:
        writer = Writer(file)
        asyncio.run(scenario(writer))
        # A write that waits ends when its reader goes away.
        os.close(read)
        assert writer.close(10.0)
    assert writer.broken


def test_status_json_is_the_contracts_document() -> None:
    rank = {"rank": 0, "local_rank": 0, "pid": 1, "state": "running", "exit_code": None, "signal": None, "step": 1}
    node = {"name": "n1", "address": "a", "state": "running", "group_rank": 0, "reason": None, "ranks": [rank]}
    warning = {"kind": "slow", "node": "n1", "rank": 0, "message": "all others wait for it"}
    status: Any = {"job": "j", "state": "running", "nodes": [node], "plan": "x", "term": 3, "warnings": [warning]}
    document: Any = contract(status)
    assert list(document) == [
        *("job", "state", "generation", "restarts", "max_restarts", "world_size", "coordinator", "started_at"),
        *("nodes", "incident", "condition", "snapshots", "phases", "sampling", "slow", "warnings"),
    ]
    assert document["warnings"] == [warning]
    assert contract({"job": "j", "nodes": []})["warnings"] == []
    assert list(document["nodes"][0]) == [
        *("name", "address", "state", "group_rank", "reason", "agent_pid", "clock_offset_ms", "ranks"),
        *("clock_error_ms", "vitals", "start", "standby"),
    ]
    assert list(document["nodes"][0]["ranks"][0]) == [
        *("rank", "local_rank", "pid", "state", "exit_code", "step", "last_output_age_s", "progress", "vitals")
    ]


# --- outcomes


def events(*kinds: tuple[str, int]) -> list[JournalEvent]:
    return [
        {"seq": seq, "time": "", "type": kind, "generation": generation, "node": None, "rank": None, "detail": {}}
        for seq, (kind, generation) in enumerate(kinds, 1)
    ]


@pytest.mark.parametrize(
    ("op", "since", "generation", "kinds", "outcome"),
    [
        ("restart", 1, 1, [("generation_running", 0), ("generation_stopped", 0), ("generation_running", 1)], 3),
        ("restart", 1, 1, [("generation_running", 0), ("generation_stopped", 0), ("generation_started", 1)], None),
        ("restart", 0, 2, [("generation_running", 1)], None),
        ("restart", 0, 1, [("job_failed", 0)], 1),
        ("remove", 0, 1, [("node_removed", 0)], 1),
        ("remove", 0, 1, [("generation_stopped", 0), ("node_removed", 0)], None),
        ("remove", 0, 1, [("generation_stopped", 0), ("node_removed", 0), ("generation_running", 1)], 3),
        ("stop", 0, 1, [("generation_stopped", 0), ("generation_running", 1)], None),
        ("stop", 0, 1, [("generation_stopped", 0), ("job_stopped", 0)], 2),
        ("add", 0, 1, [("node_added", 0), ("generation_stopped", 0), ("generation_running", 1)], 3),
    ],
)
def test_what_ends_a_request(
    op: str, since: int, generation: int, kinds: list[tuple[str, int]], outcome: int | None
) -> None:
    found = find_outcome(events(*kinds), op, since, generation)
    assert (found["seq"] if found else None) == outcome


# --- choosing a job


def entry(job: str, created: int, *, live: bool = False, state: str = "running", **more: Any) -> Any:
    known = {"job": job, "created_ns": created, "live": live, "state": state, "generation": 0, "updated_ns": 0}
    return {"tree": None, "script": None, "world_size": 0, "warm_until_ns": None, **known, **more}


def test_the_one_live_job_is_meant_whoever_asks() -> None:
    answers = {"n1": [entry("old", 5, state="failed"), entry("new", 1, live=True)], "n2": [entry("new", 1)]}
    assert choose_job(answers, live_only=True) == "new"
    assert choose_job(answers, live_only=False) == "new"


def test_readers_take_the_newest_where_it_is_unclear() -> None:
    assert choose_job({"n1": [entry("a", 1), entry("b", 2)]}, live_only=False) == "b"
    both = {"n1": [entry("a", 1, live=True), entry("b", 2, live=True), entry("c", 3)]}
    assert choose_job(both, live_only=False) == "b"
    with pytest.raises(UsageError, match="2 jobs have not ended here: b a"):
        choose_job(both, live_only=True)


def test_a_job_whose_agents_have_all_died_is_meant_by_those_who_change_it() -> None:
    """Their request brings the agents back."""
    ended = entry("b", 2, state="succeeded")
    assert choose_job({"n1": [entry("a", 1), ended]}, live_only=True) == "a"
    with pytest.raises(UsageError, match="2 jobs have not ended here: c a"):
        choose_job({"n1": [entry("a", 1), ended, entry("c", 3)]}, live_only=True)


def test_no_job_to_choose() -> None:
    with pytest.raises(RequestFailed, match="the newest, a, is over: failed"):
        choose_job({"n1": [entry("a", 1, state="failed")]}, live_only=True)
    with pytest.raises(Unreachable, match="no jobs on"):
        choose_job({"n1": []}, live_only=False)


def test_an_agent_that_lingers_after_the_end_is_not_a_live_job() -> None:
    answers = {"n1": [entry("a", 1, live=True, state="succeeded")], "n2": [entry("b", 0, live=True)]}
    assert choose_job(answers, live_only=True) == "b"


def test_a_job_is_shown_as_its_newest_host_has_it_and_ended_where_any_has_its_end() -> None:
    old, new = entry("a", 1, generation=1, updated_ns=5), entry("a", 1, generation=4, updated_ns=2, state="failed")
    (row,) = group_jobs({"n1": [old], "n2": [new]})
    assert (row["job"], row["state"], row["generation"], row["hosts"]) == ("a", "failed", 4, ["n1", "n2"])
    # A node that was cut off and goes on writing.
    cut_off = entry("a", 1, generation=1, updated_ns=9, live=True)
    (row,) = group_jobs({"n1": [cut_off], "n2": [entry("a", 1, generation=1, updated_ns=5, state="succeeded")]})
    assert (row["state"], row["live"]) == ("succeeded", False)


@pytest.mark.parametrize(("end", "shown"), [((), ["degraded", "lost", "killed"]), (("job_stopped",), ["stopped"])])
def test_ranks_of_a_dead_agent_do_not_run(tmp_path: Path, end: tuple[str, ...], shown: list[str]) -> None:
    """Where all agents are dead, nobody can write that their ranks are."""
    files = Home(tmp_path).job("a")
    files.make()
    nodes = ("n1", "n2")
    files.spec.write_text(json.dumps(JobSpec("a", "train.py", tuple(NodeSpec(n, n, "1") for n in nodes)).to_json()))
    files.node.write_text('{"node": "n2"}')
    members = [{"node": node, "base_rank": rank, "nproc": 1} for rank, node in enumerate(nodes)]
    events: list[Any] = [
        {"type": "job_started"},
        *({"type": "node_ready", "node": node, "detail": {"nproc": 1}} for node in nodes),
        {"type": "generation_started", "detail": {"members": members, "world_size": 2}},
        {"type": "generation_running", "detail": {"world_size": 2, "pids": {"0": 10, "1": 11}}},
        *({"type": kind} for kind in end),
    ]
    files.events.write_text(journal(events))
    status = asyncio.run(FileRequests(files).handle("status", {}, b"")).data  # type: ignore[union-attr]
    own = status["nodes"][1]
    assert [status["state"], own["state"], own["ranks"][0]["state"]][: len(shown)] == shown


async def test_the_end_in_a_nodes_files_counts_more_than_an_agent_that_was_cut_off(tmp_path: Path) -> None:
    files = Home(tmp_path).job("a")
    files.make()
    nodes = tuple(NodeSpec(name, name, "1") for name in ("n1", "n2", "n3"))
    files.spec.write_text(json.dumps(JobSpec("a", "train.py", nodes).to_json()))
    files.node.write_text('{"node": "n2"}')
    # An operator may still leave after the end.
    kinds = ("job_started", "job_succeeded", "operator_detached")
    records: list[Any] = [{**event(seq, {"type": kind}), "term": 1} for seq, kind in enumerate(kinds, 1)]

    async def identity(count: int) -> Any:
        files.events.write_text("".join(f"{json.dumps(record)}\n" for record in records[:count]))
        return (await FileRequests(files).identity({})).data

    def best(**found: Any) -> str:
        hosts = tuple(Host(name, ssh=name, address=name) for name in found)
        session = Session(Inventory(Path("hosts.toml"), hosts, JobDefaults(workdir=Path())))
        for name, one in found.items():
            session.links[name].learn(one)
            session.links[name]._job = OPEN
        return session.opened_links()[0].host.name

    ended, before = await identity(3), await identity(1)
    cut_off = {
        "live": True, "term": 9, "journal_term": 1, "role": "waiting", "coordinator_reachable": False, "last_seq": 9,
    }  # fmt: skip
    assert best(n1=cut_off, n2=ended) == "n2"
    assert best(n1=cut_off, n2=before) == "n1"
    # The end of a coordinator that was out of office: the others went on without it.
    assert best(n1={**cut_off, "journal_term": 2}, n2=ended) == "n1"
    assert best(n1={**cut_off, "role": "coordinator", "coordinator_reachable": True}, n2=ended) == "n1"


async def test_the_one_live_job_is_chosen_when_all_hosts_have_been_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "GRACE", -1.0)
    hosts = tuple(Host(name, ssh=name, address=name) for name in ("n1", "n2"))
    session = Session(Inventory(Path("hosts.toml"), hosts, JobDefaults(workdir=Path())), live_only=True)
    session.links["n1"].jobs = [entry("a", 1, live=True)]
    choosing = asyncio.ensure_future(jobs.choose(session))
    await asyncio.sleep(0)
    session.touch()
    await asyncio.sleep(0.01)
    assert not choosing.done()
    session.links["n2"].jobs = [entry("b", 2, live=True)]
    session.touch()
    await choosing
    assert isinstance(session.failure, UsageError)


# Colours of what commands print: by what a line says, and only where they are wanted.


ESC = "\x1b"


def test_a_node_colours_nothing() -> None:
    shown = colours.coloured(f"next: {ESC}[31mred{ESC}]0;title\a")
    assert shown.count(ESC) == 2
    assert colours.coloured("a line of nobody") == "a line of nobody"


@pytest.mark.parametrize(
    ("mode", "terminal", "env", "wanted"),
    [
        ("auto", True, {}, True), ("auto", False, {}, False), ("auto", True, {"NO_COLOR": "1"}, False),
        ("auto", True, {"TERM": "dumb"}, False), ("always", False, {"NO_COLOR": "1"}, True), ("never", True, {}, False),
    ],
)  # fmt: skip
def test_who_gets_colours(
    monkeypatch: pytest.MonkeyPatch, mode: str, terminal: bool, env: dict[str, str], wanted: bool
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(colours, "out_is_terminal", lambda: terminal)
    assert colours.wanted(mode) is wanted


def test_diagnose_is_coloured_if_asked_and_plain_in_a_pipe(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "rank_0.log"
    log.write_text('Traceback (most recent call last):\n  File "a.py", line 1, in f\n    g()\nValueError: bad\n')
    assert main(["diagnose", str(log)]) == 0
    plain = capfd.readouterr().out
    assert main(["diagnose", "--color", "always", str(log)]) == 0
    shown = capfd.readouterr().out
    assert ESC not in plain
    assert f"{ESC}[1;31mincident 1{ESC}[m" in shown
    assert re.sub(r"\x1b\[[\d;]*m", "", shown) == plain


# The registry: one place for verbs, keys, confirmations; what they say they do.


@pytest.mark.parametrize("name", ["id", "verb", "key"])
def test_what_names_an_action_names_no_other(name: str) -> None:
    named = [getattr(action, name) for action in ACTIONS if getattr(action, name)]
    assert len(set(named)) == len(named)
    assert name != "key" or all(len(key) == 1 for key in named)


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
