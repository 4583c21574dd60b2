"""A session on real agents: launch, watch, steer, heal, lose links, come back."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from supervisor.control import heal
from supervisor.errors import LaunchFailed, RequestFailed, Unreachable, UsageError
from supervisor.inventory import Inventory
from supervisor.launch import bringup
from supervisor.launch.certificates import make_authority
from supervisor.launch.specs import UpOptions, make_plan
from supervisor.link import hub as hub_module
from supervisor.logs import reader as follow_module
from supervisor.logs.files import ask
from supervisor.logs.pages import merged
from supervisor.logs.reader import LogReader
from supervisor.logs.selection import LogQuery, Selection
from supervisor.session import Session
from supervisor.ssh import HostError, NodeLink
from supervisor.ssh.wires import RemoteProgram
from tests.agents.test_session_hosts import WAIT_S, Hosts, hosts
from tests.examples import nightly

ALL = Selection(generation="all")


def planned(inventory: Inventory, made: Hosts, *args: str, **options: Any) -> Session:
    # The first group has all hosts, however long a loaded machine takes to import torch.
    options = {"settings": {"settle_timeout": WAIT_S}, "job": "job-t", **options}
    plan = make_plan(inventory, UpOptions("talk.py", args, **options), made.work)
    return Session(inventory, attach="control", plan=plan)


async def until(session: Session, done: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not done():
        assert session.failure is None, session.failure
        assert time.monotonic() < end, (session.status, session.events[-3:], session.notices)
        await session.wait_change(0.2)


def has(session: Session, kind: str, generation: int = 0) -> bool:
    return any(event["type"] == kind and event["generation"] >= generation for event in session.events)


def files_of(made: Hosts) -> dict[tuple[int, int, str], bytes]:
    found = {}
    for path in made.root.glob("n*/jobs/job-t/generation_*/rank_*/std*.log"):
        generation, rank = int(path.parents[1].name.split("_")[1]), int(path.parent.name.split("_")[1])
        found[generation, rank, path.stem] = path.read_bytes()
    return found


async def collect(session: Session, selection: Selection, start: str) -> dict[tuple[int, int, str], bytes]:
    got: dict[tuple[int, int, str], bytes] = {}
    async for chunk in session.follow(selection, start):
        key = (chunk.generation, chunk.rank, chunk.stream)
        assert chunk.offset == len(got.get(key, b"")) or start == "end", "a gap or a byte twice"
        got[key] = got.get(key, b"") + chunk.data
    return got


async def test_a_job_from_launch_to_end_over_links_that_are_lost(tmp_path: Path) -> None:
    """No byte and no event goes with them."""

    with hosts(tmp_path, 2) as made:
        async with planned(made.inventory(), made, "400", "0.005") as session:
            await session.ready()
            following = asyncio.ensure_future(collect(session, ALL, "begin"))
            for _ in range(6):
                await asyncio.sleep(0.3)
                for link in session.links.values():
                    link.reopen()
            got = await asyncio.wait_for(following, WAIT_S)
            await until(session, lambda: session.ended)
            assert session.state == "succeeded"
            assert [event["seq"] for event in session.events] == list(range(1, len(session.events) + 1))
            assert session.status["world_size"] == 2
        files = files_of(made)
        assert {key: text for key, text in files.items() if text} == got
        assert files[0, 1, "stdout"].endswith(b"rank 1 half line")
        # Read again by somebody else, from the files if the agents are gone.
        async with Session(made.inventory()) as later:
            await later.ready()
            assert await later.settle() == []
            assert later.job == "job-t"
            assert "job_succeeded" in [event["type"] for event in await later.journal()]
            reader = LogReader(later, LogQuery(Selection(streams=("stdout",), ranks=[1])))
            rows = [row async for row in reader.existing()]
            assert b"\n".join(row.text for row in rows) == files[0, 1, "stdout"]
            last = (await merged(later, Selection(streams=("stdout",)), 10)).rows
            assert 10 <= len(last) <= 12
            assert last[-1].text.endswith(b"half line")


class Typist:
    """A terminal on which somebody types one command."""

    kind, size, seen = "vt100", (80, 24), b""

    async def run(self, words: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        pipe = subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*words, env=env, stdin=pipe, stdout=pipe)
        self.seen, _ = await process.communicate(b'echo "is $RANK $PWD [$TORCHELASTIC_ERROR_FILE]"; exit\n')

    async def connect(self, program: RemoteProgram) -> None:
        raise AssertionError("these hosts are reached without SSH")


async def a_shell_is_where_the_rank_is(session: Session, made: Hosts) -> None:
    # Until the group runs, the status has no ranks of the node at all.
    await until(session, lambda: [bool(rank["pid"]) for rank in session.status["nodes"][1]["ranks"]] == [True])
    for rank in (None, 1):
        typist = Typist()
        await asyncio.wait_for(session.shell(typist, "n2", rank), WAIT_S)
        assert f"is 1 {made.home('n2') / 'trees'}/" in typist.seen.decode(), typist.seen
        assert b" []" in typist.seen
    gone = Typist()
    await asyncio.wait_for(session.shell(gone, "n2", 5), WAIT_S)
    assert b"rank 5 has ended" in gone.seen
    with pytest.raises(Unreachable, match="no connection to n9"):
        await session.shell(gone, "n9", None)
    with pytest.raises(RequestFailed, match="n2 is this machine: open http://localhost:6006"):
        await session.forward("n2", 6006, None)
    with pytest.raises(Unreachable, match="no connection to n9"):
        await session.forward("n9", 6006, None)
    assert session.forwards == []


async def a_lost_agent_is_started_again_while_somebody_controls(session: Session, made: Hosts) -> None:
    os.kill(made.agents()["n2/job-t"], signal.SIGKILL)
    await until(session, lambda: has(session, "node_lost"))
    lost = next(event["seq"] for event in session.events if event["type"] == "node_lost")
    # It may be back before the group without it was formed: then one follows, not two.
    await until(session, lambda: any(_is_whole(event) for event in session.events if event["seq"] > lost))
    await until(session, lambda: session.status["state"] == "running")
    assert any("agent lost; restarting it" in notice.text for notice in session.notices)
    assert [event["seq"] for event in session.events] == list(range(1, len(session.events) + 1))


def _is_whole(event: Mapping[str, Any]) -> bool:
    return bool(event["type"] == "generation_running" and event["detail"]["world_size"] == 2)


@pytest.mark.parametrize("killed", [pytest.param(("n1", "n3"), marks=nightly), ("n1", "n2", "n3")], ids=" ".join)
async def test_agents_that_are_killed_together_come_back_as_one_job(tmp_path: Path, killed: tuple[str, ...]) -> None:
    with hosts(tmp_path, 3, min_nodes=1) as made:
        async with planned(made.inventory(), made, "100000", "0.05") as session:
            await session.ready()
            await until(session, lambda: has(session, "generation_running"))
            for name in killed:
                os.kill(made.agents()[f"{name}/job-t"], signal.SIGKILL)
            await until(session, lambda: has(session, "coordinator_changed"))
            await until(session, lambda: session.status.get("world_size") == 3 and session.status["state"] == "running")
            assert [event["seq"] for event in session.events] == list(range(1, len(session.events) + 1))
            await session.request("stop", kill=True)
            await until(session, lambda: session.ended)


async def test_restart_remove_add_and_stop(tmp_path: Path) -> None:
    async def steer(session: Session, verb: str, **args: Any) -> None:
        answer = await session.request(verb, **args)
        await until(session, lambda: has(session, "generation_running", answer["generation"]))

    with hosts(tmp_path, 2, min_nodes=1) as made:
        async with planned(made.inventory(), made, "100000", "0.05") as session:
            await session.ready()
            await until(session, lambda: has(session, "generation_running"))
            await a_shell_is_where_the_rank_is(session, made)
            await a_lost_agent_is_started_again_while_somebody_controls(session, made)
            await steer(session, "restart")
            await steer(session, "remove", node="n1")
            await until(session, lambda: session.status.get("world_size") == 1)
            # From a tree with another name, where the script has been edited.
            edited = made.copy_work("elsewhere")
            script = edited.job.workdir / "talk.py"
            script.write_text(script.read_text() + "# edited")
            trees = made.home("n1") / "trees"
            trees.rename(made.home("n1") / "gone")
            async with Session(edited, follow=True, live_only=True) as other:
                await other.ready()
                with pytest.raises(RequestFailed, match=r"different code: .* \(newer than it: talk.py\)"):
                    await other.request("add", node="n1")
                # Where the node has the job's tree already, nobody cares for the files here.
                shutil.rmtree(trees, ignore_errors=True)
                (made.home("n1") / "gone").rename(trees)
                await steer(other, "add", node="n1")
                await steer(other, "remove", node="n1")
            # From outside: nothing but the inventory is known.
            async with Session(made.copy_work("copy"), follow=True, live_only=True) as other:
                await other.ready()
                await steer(other, "add", node="n1")
                await until(other, lambda: other.status.get("world_size") == 2)
                assert other.status["restarts"] == 0
                with pytest.raises(RequestFailed, match="n9"):
                    await other.request("add", node="n9")
                with pytest.raises(RequestFailed, match="already in the group"):
                    await other.request("add", node="n1")
                link = other.links["n1"]
                assert link.view.identity["build"] == other.agent.sha256
                # As if another supervisor had started it.
                link.learn({"build": "0" * 64, "version": "0.0.9"})
                with pytest.raises(RequestFailed, match=r"started by another supervisor \(0\.0\.9\): log_merged: Type"):
                    await ask(other, "n1", "log_merged", {"count": "many"})
                assert (await ask(other, "n1", "log_merged", {"count": 1, "of_tomorrow": 1})).data["rows"]
            await session.request("stop", kill=False)
            await until(session, lambda: session.ended)
            assert session.state == "stopped"
            made.end()
            async with Session(made.inventory(), "job-t", follow=True, live_only=True) as late:
                await late.ready()
                with pytest.raises(RequestFailed, match="is over: stopped"):
                    await late.request("stop", kill=False)
            with pytest.raises(RequestFailed, match="over"):
                await session.request("restart")


async def test_too_few_nodes_leave_nothing_behind(tmp_path: Path) -> None:
    with hosts(tmp_path, 2) as made:
        inventory = made.inventory(n2={"python": "/no/such/python3"})
        async with planned(inventory, made, "5") as session:
            with pytest.raises(LaunchFailed) as caught:
                await session.ready()
        assert caught.value.exit_status == 3
        assert re.search("[01] of 2 hosts came up.*, 2 are needed", str(caught.value))
        assert str(caught.value).startswith("n2: python: ")
        assert made.agents() == {}
        assert list(made.root.glob("n*/jobs/job-t")) == []


async def test_a_launch_that_is_given_up_leaves_nothing_behind(tmp_path: Path) -> None:
    with hosts(tmp_path, 2) as made:
        async with planned(made.inventory(), made, "5") as session:
            end = time.monotonic() + WAIT_S
            while not made.agents():
                assert time.monotonic() < end
                await session.wait_change(0.05)
            await session.cancel_launch()
            assert isinstance(session.failure, LaunchFailed)
        assert made.agents() == {}
        assert list(made.root.glob("n*/jobs/job-t")) == []


async def test_one_node_less_is_named_and_the_job_runs(tmp_path: Path) -> None:
    with hosts(tmp_path, 2, min_nodes=1) as made:
        inventory = made.inventory(n2={"python": "/no/such/python3"})
        async with planned(inventory, made, "5") as session:
            await session.ready()
            await until(session, lambda: session.ended)
            assert session.state == "succeeded"
            assert any(notice.node == "n2" and "starts without it" in notice.text for notice in session.notices)
            assert session.hosts["n2"].state == "failed"
            assert session.hosts["n2"].error


async def test_a_job_that_nobody_knows(tmp_path: Path) -> None:
    with hosts(tmp_path, 2) as made:
        for job in ("no-such", None):
            async with Session(made.inventory(), job) as session:
                with pytest.raises(Unreachable, match="no-such there|no jobs on"):
                    await session.ready()
            # A screen does not wait for `ready`: it looks at `failure`.
            async with Session(made.inventory(), job, attach="watch") as screen:
                await until(screen, lambda: isinstance(screen.failure, Unreachable))


async def test_a_failed_bring_up_is_reported_to_the_waiting_caller(tmp_path: Path) -> None:
    with hosts(tmp_path, 1) as made:
        async with Session(made.inventory(), "job-t") as session:
            link = session.links["n1"]
            link.held = True

            async def read() -> None:
                # Such as a script that a new .gitignore leaves out.
                raise UsageError("script talk.py is left out")

            spec = make_plan(made.inventory(), UpOptions("talk.py"), made.work).spec
            material = bringup.Material(dataclasses.replace(spec, tree=None), make_authority("job-t"), read=read)
            with pytest.raises(HostError, match="n1: sync: script talk.py is left out"):
                await asyncio.wait_for(
                    link.carry_out(lambda node: bringup._sync(session, link, node, material)), WAIT_S
                )

            async def broken(node: NodeLink) -> None:
                raise KeyError("missing")

            with pytest.raises(HostError, match="internal error: KeyError"):
                await asyncio.wait_for(link.carry_out(broken), WAIT_S)


async def test_a_host_that_joins_later_is_opened_by_who_watches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heal, "LOOK_AGAIN", 0.2)

    with hosts(tmp_path, 2) as made:
        async with planned(made.inventory(), made, "100000", "0.05", nnodes="1") as session:
            await session.ready()
            await until(session, lambda: has(session, "generation_running"))
            async with Session(made.inventory(), "job-t", attach="watch") as watch:
                await until(watch, lambda: watch.links["n2"].missing and bool(watch.status))
                await session.request("add", node="n2")
                await until(watch, lambda: watch.links["n2"].opened)
            await session.request("stop", kill=True)


async def test_an_error_of_a_job_is_reported_and_the_job_opened_again(tmp_path: Path) -> None:
    with hosts(tmp_path, 1) as made:
        (made.home("n1") / "jobs" / "broken").mkdir(parents=True)
        async with Session(made.inventory(), "broken") as session:
            with pytest.raises(Unreachable, match=r"the files of job broken cannot be read.*supervisor clean"):
                await session.ready()
            assert not session.links["n1"].missing


async def test_a_node_that_falls_silent_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "RECORD_DEADLINE", 0.5)
    monkeypatch.setattr(follow_module, "STUCK_WAIT", 0.5)

    with hosts(tmp_path, 1) as made:
        async with planned(made.inventory(), made, "1") as session:
            await until(session, lambda: session.ended)
            bridge = session.hosts["n1"].hello["pid"]
            os.kill(bridge, signal.SIGSTOP)
            try:
                with pytest.raises(Unreachable, match="n1: no answer in time"):
                    await session.journal()
                await asyncio.wait_for(collect(session, ALL, "begin"), 60)
            finally:
                # It may have been ended with its connection.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(bridge, signal.SIGCONT)


async def test_a_read_only_session_refuses(tmp_path: Path) -> None:
    with hosts(tmp_path, 1) as made:
        async with Session(made.inventory(), "any", read_only=True) as session:
            with pytest.raises(RequestFailed, match="read-only"):
                await session.request("stop", kill=False)
