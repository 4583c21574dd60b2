"""`connect` and `start`: what a node says before a job is open, and how an agent comes up, once and detached."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import zlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from remote_agent.base.paths import Home, lock_agent
from remote_agent.base.streams import serve_unix
from remote_agent.bridge import starting
from remote_agent.tree.sync import TreeSync
from remote_agent.wire import CallFailed, Channel, ChannelClosed, Problem
from supervisor.ssh import AgentFile
from tests.agents.engine_process import await_death
from tests.agents.nodes import REPOSITORY, Node, Nodes

SLEEPS = "import time\ntime.sleep(600)\n"


@contextlib.asynccontextmanager
async def _node(root: Path) -> AsyncIterator[tuple[Node, Channel]]:
    node = Node("n1", root)
    try:
        yield node, await node.connect()
    finally:
        await node.close()


def _make_job(node: Node, name: str, records: list[dict[str, Any]] | None = None, tree: str | None = None) -> Home:
    """Write a job's files as an agent leaves them."""
    home = Home(node.home)
    files = home.job(name)
    files.make()
    spec = {"job": name, "script": "t.py", "nodes": [{"name": "n1", "address": "a"}], "tree": tree, "created_ns": 5}
    files.spec.write_text(json.dumps(spec))
    files.node.write_text(json.dumps({"node": "n1", "hostname": socket.gethostname()}))
    lines = [
        {"seq": at, "time": "2026-01-01T00:00:00Z", "generation": 0, "node": None, "rank": None, "detail": {}, **record}
        for at, record in enumerate(records or [], 1)
    ]
    files.events.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return home


async def test_jobs_are_listed_with_their_last_state(tmp_path: Path) -> None:
    ended: list[dict[str, Any]] = [{"type": "job_started"}, {"type": "job_failed", "detail": {"reason": "x"}}]

    async with _node(tmp_path) as (node, channel):
        assert (await channel.call("jobs")).data == {"jobs": []}
        home = _make_job(node, "done", ended)
        _make_job(node, "silent", [{"type": "job_started"}])
        (home.jobs / "broken").mkdir()
        (home.jobs / ".hidden").mkdir()
        lock = lock_agent(home.job("silent"))
        assert lock is not None
        found = {job["job"]: job for job in (await channel.call("jobs")).data["jobs"]}
        os.close(lock)
        assert list(found) == ["broken", "done", "silent"]
        assert (found["done"]["state"], found["done"]["live"], found["done"]["agent_pid"]) == ("failed", False, None)
        assert (found["silent"]["live"], found["silent"]["agent_pid"]) == (True, os.getpid())
        assert (found["done"]["node"], found["done"]["script"], found["done"]["created_ns"]) == ("n1", "t.py", 5)
        assert (found["broken"]["live"], found["broken"]["state"]) == (False, "starting")


async def test_clean_removes_what_is_over_and_nothing_else(tmp_path: Path) -> None:
    async with _node(tmp_path) as (node, channel):
        over: list[dict[str, Any]] = [{"type": "job_failed", "detail": {"reason": "x"}}]
        home = _make_job(node, "old")
        for name in ("older", "live"):
            _make_job(node, name, over)
        # Its agent died here; it may go on elsewhere.
        _make_job(node, "running", [{"type": "job_started"}])
        home.tree("work-1").mkdir(parents=True)
        lock = lock_agent(home.job("live"))
        assert lock is not None
        one = (await channel.call("clean", {"job": "old"})).data
        assert (one["removed"], one["kept"]) == (["old"], [])
        assert one["bytes"] > 100
        rest = (await channel.call("clean", {"job": None})).data
        os.close(lock)
        assert (rest["removed"], rest["kept"]) == (["older"], ["live", "running"])
        assert home.job_names() == ["live", "running"]
        assert home.tree("work-1").is_dir()
        for job, kind in (("none", "no_such_job"), ("../x", "bad_name"), (7, "bad_name")):
            with pytest.raises(CallFailed) as refused:
                await channel.call("clean", {"job": job})
            assert refused.value.kind == kind


@pytest.mark.parametrize(
    ("op", "args", "kind"),
    [
        ("open", {"job": "none"}, "no_such_job"),
        ("open", {"job": "../../etc"}, "bad_name"),
        ("open", {}, "bad_name"),
        ("open", {"job": "empty"}, "broken_job"),
        ("start", {}, "bad_request"),
        ("start", {"spec": {"job": "x"}, "node": "n1"}, "bad_request"),
        ("start", {"spec": {"job": "../x", "script": "s", "nodes": []}, "node": "n1"}, "bad_name"),
        ("start", {"spec": {"job": "x", "script": "s", "nodes": [], "tree": "../t"}, "node": "n1"}, "bad_name"),
        ("tree_plan", {"tree": "../x"}, "bad_name"),
        ("tree_put", {"tree": "t", "parts": []}, "no_plan"),
        ("tree_commit", {"tree": "t"}, "no_plan"),
    ],
)
async def test_bad_requests_are_refused_and_the_bridge_goes_on(
    tmp_path: Path, op: str, args: dict[str, Any], kind: str
) -> None:
    async with _node(tmp_path) as (node, channel):
        Home(node.home).make()
        (node.home / "jobs" / "empty").mkdir()
        with pytest.raises(CallFailed) as refused:
            await channel.call(op, args)
        assert refused.value.kind == kind, refused.value
        assert (await channel.call("hello")).data["protocol"] == 1


def packed(content: bytes) -> bytes:
    """Return a manifest of one file with that content."""
    manifest = {"files": [["f", 0o644, 1, hashlib.sha256(content).hexdigest()]], "links": [], "dirs": []}
    return zlib.compress(json.dumps(manifest).encode())


@pytest.mark.parametrize("ends", ["with an agent", "with a refused start", "with its connection"])
async def test_of_two_launches_from_one_tree_the_second_waits_for_the_first(tmp_path: Path, ends: str) -> None:
    request = {"tree": "t", "alone": True}

    async with _node(tmp_path) as (node, first):
        second = await node.connect()
        (missing,) = (await first.call("tree_plan", request, packed(b"x"))).data["missing"]
        await first.call("tree_put", {"tree": "t", "parts": [[missing, 0, 1, 1]]}, b"x")
        await first.call("tree_commit", {"tree": "t"})
        planning = asyncio.ensure_future(second.call("tree_plan", request, packed(b"x")))
        # Both ask the same node: what comes after this answer has seen the lock.
        third = await node.connect()
        assert not planning.done(), "the files are in place, and the agent does not run yet"
        files = _make_job(node, "first", [{"type": "job_started"}], tree="t").job("first")
        agent = lock_agent(files) if ends == "with an agent" else None
        if ends == "with its connection":
            await first.close()
        else:
            with pytest.raises(CallFailed):
                await first.call("start", {})
        if agent is not None:
            with pytest.raises(CallFailed, match="job first is live and runs from the same work tree"):
                await planning
            os.close(agent)
        else:
            assert (await planning).data["changed"] == 0, "nothing blocks the next launch"
        await third.close()


async def test_a_tree_in_use_is_not_changed_under_a_job(tmp_path: Path) -> None:
    async with _node(tmp_path) as (node, channel):
        home = _make_job(node, "running", [{"type": "job_started"}], tree="t")
        plan = (await channel.call("tree_plan", {"tree": "t"}, packed(b"x"))).data
        assert plan["missing"] == [hashlib.sha256(b"x").hexdigest()]
        await channel.call("tree_put", {"tree": "t", "parts": [[plan["missing"][0], 0, 1, 1]]}, b"x")
        await channel.call("tree_commit", {"tree": "t"})
        lock = lock_agent(home.job("running"))
        assert lock is not None
        # The same content again changes nothing, and so disturbs nobody.
        assert (await channel.call("tree_plan", {"tree": "t"}, packed(b"x"))).data["changed"] == 0
        with pytest.raises(CallFailed, match="job running is live and runs from the same work tree") as refused:
            await channel.call("tree_plan", {"tree": "t", "alone": True}, packed(b"x"))
        assert all(word in refused.value.hint for word in ("supervisor attach HOSTS running", "--job NAME", "--force"))
        with pytest.raises(CallFailed) as refused:
            await channel.call("tree_plan", {"tree": "t"}, packed(b"y"))
        assert refused.value.kind == "tree_in_use"
        assert "job running runs from tree t" in refused.value.message
        assert "--no-sync" in refused.value.hint
        os.close(lock)


def test_a_home_whose_file_system_has_no_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(_fd: int, _how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    home = Home(tmp_path)
    files = home.job("a")
    files.make()
    takes: tuple[tuple[Path, Callable[[], object]], ...] = (
        (files.pid, lambda: lock_agent(files)),
        (tmp_path / "trees" / ".state" / "t" / "lock", lambda: TreeSync(home).lock("t")),
    )
    for place, take in takes:
        with pytest.raises(Problem, match="cannot lock files") as refused:
            take()
        assert (refused.value.kind, str(place) in refused.value.message) == ("no_locks", True)
        assert "SUPERVISOR_HOME" in refused.value.hint


async def test_an_agent_starts_once_detached_and_is_found_again(tmp_path: Path) -> None:
    async with Nodes(tmp_path, 1, SLEEPS) as nodes:
        # As seen from where a login begins, which is not where an agent runs.
        nodes.nodes["n1"].home = Path(os.path.relpath(nodes.nodes["n1"].home))
        # Two launches of one name at once: the keys of one must not meet the agent of the other.
        both = await asyncio.gather(nodes.start("n1"), nodes.start("n1"), return_exceptions=True)
        (refused,) = (one for one in both if isinstance(one, CallFailed))
        assert refused.kind == "already_running"
        (identity,) = (one for one in both if isinstance(one, dict))
        assert identity["live"]
        job = nodes.spec.job
        files = Home(nodes.nodes["n1"].home).job(job)
        pid = int(files.pid.read_text().split()[0])
        assert f"serve --job {job}" in Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
        assert os.getsid(pid) != os.getsid(0)
        fields = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        # Adopted: neither this process nor a bridge is its parent, and SIGHUP is caught, not ignored.
        assert int(fields["PPid"]) in {1, *_reapers()}
        assert int(fields["SigIgn"], 16) & 1 << signal.SIGHUP - 1 == 0
        assert int(fields["SigCgt"], 16) & 1 << signal.SIGHUP - 1
        os.kill(pid, signal.SIGHUP)
        assert files.root.stat().st_mode & 0o777 == 0o700
        for secret in (files.key, files.spec):
            assert secret.stat().st_mode & 0o777 == 0o600
        with pytest.raises(CallFailed) as twice:
            await nodes.start("n1")
        assert (twice.value.kind, f"pid {pid}" in twice.value.message) == ("already_running", True)
        await nodes.nodes["n1"].close()
        channel = await nodes.nodes["n1"].connect()
        assert (await channel.call("open", {"job": job})).data == {"live": True, "node": "n1"}
        assert (await channel.call("identity")).data["job"] == job
        os.kill(pid, signal.SIGKILL)
        await asyncio.wait_for(channel.closed.wait(), 60)
        with pytest.raises(ChannelClosed):
            await channel.call("identity")
        await asyncio.to_thread(await_death, pid)
        # A lost agent starts again on the directory that is there.
        await nodes.start("n1")
        assert int(files.pid.read_text().split()[0]) != pid


async def test_an_agent_whose_launch_is_killed_before_it_opens_the_job_ends_soon(tmp_path: Path) -> None:
    """It would block the same launch: nobody will ever name a coordinator."""

    async with Nodes(tmp_path, 1, SLEEPS) as nodes:
        await nodes.begin("n1")
        pid = int(Home(nodes.nodes["n1"].home).job(nodes.spec.job).pid.read_text().split()[0])
        await nodes.nodes["n1"].close()
        await asyncio.to_thread(await_death, pid)


def _reapers() -> set[int]:
    """Pids of this process's ancestors, any of which may have made itself the one that adopts orphans."""
    found, pid = set(), os.getppid()
    while pid > 0:
        found.add(pid)
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return found


async def test_nodes_that_share_a_home_are_distinguished(tmp_path: Path) -> None:
    async with Nodes(tmp_path, 2, SLEEPS) as nodes:
        nodes.nodes["n2"].home = nodes.nodes["n1"].home
        await nodes.start("n1")
        with pytest.raises(CallFailed) as shared:
            await nodes.start("n2")
        assert shared.value.kind == "shared_home"
        assert "belongs to node n1" in shared.value.message
        assert "SUPERVISOR_HOME" in shared.value.hint


async def test_an_agent_that_cannot_start_says_why(tmp_path: Path) -> None:
    async with _node(tmp_path) as (_, channel):
        spec = {"job": "x", "script": "s", "nodes": [{"name": "n1", "address": "a"}]}
        with pytest.raises(CallFailed) as failed:
            await channel.call("start", {"spec": spec, "node": "n1"})
        assert failed.value.kind == "no_certificate"
        with pytest.raises(CallFailed) as failed:
            await channel.call("start", {"spec": spec, "node": "n1", "ca": "x", "cert": "x", "key": "x"})
        assert failed.value.kind == "start"
        assert "the agent ended while it started" in failed.value.message
        assert "ssl.SSLError" in failed.value.message
        assert (await channel.call("jobs")).data["jobs"][0]["live"] is False


def test_a_step_that_does_not_begin_and_an_agent_that_does_not_accept_are_distinguished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Home(tmp_path)
    files = home.job("x")
    files.make()
    files.log.write_text("slow to import\n")

    async def awaited() -> str:
        with pytest.raises(Problem) as refused:
            await starting.await_agent(home, {"job": "x"})
        return refused.value.message

    monkeypatch.setattr(starting, "START_DEADLINE_S", 1.0)
    assert asyncio.run(awaited()) == "Slurm did not start the agent's step within 1 s"
    code = (
        "import sys,remote_agent.base.paths as p;from pathlib import Path;"
        "print(p.lock_agent(p.Home(Path(sys.argv[1])).job('x')),flush=True);sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=REPOSITORY) as silent:
        assert silent.stdout is not None
        assert silent.stdout.readline()
        message = f"the agent (pid {silent.pid}) accepted no connection within 1 s: slow to import"
        assert asyncio.run(awaited()) == message
        assert silent.wait() == -signal.SIGKILL


def test_a_bridge_that_stood_still_past_its_deadline_looks_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Home(tmp_path)
    home.job("x").make()
    monkeypatch.setattr(starting, "START_DEADLINE_S", 0.0)

    async def body() -> None:
        looked = asyncio.Event()

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            assert await reader.read() == b""
            writer.close()
            await writer.wait_closed()
            looked.set()

        server = await serve_unix(home.job("x").sock, accept)
        try:
            assert await starting.await_agent(home, {"job": "x"}) == {"agent_pid": os.getpid()}
            await looked.wait()
        finally:
            server.close()

    lock = lock_agent(home.job("x"))
    assert lock is not None
    try:
        asyncio.run(body())
    finally:
        os.close(lock)


def test_the_bridge_ends_with_its_input_and_at_junk(tmp_path: Path, repository: Path) -> None:
    env = {**os.environ, "SUPERVISOR_HOME": str(tmp_path), "PYTHONPATH": str(repository)}
    for data in (b"", b"\0\0", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100):
        done = subprocess.run(
            [sys.executable, "-m", "remote_agent", "connect"],
            input=data,
            env=env,
            capture_output=True,
            check=False,
            timeout=20,
        )
        assert done.stdout == b"SUPERVISOR-AGENT 1\n"
        assert done.returncode == 0
        assert b"Traceback" not in done.stderr


@pytest.mark.parametrize("version", ["3.9", "3.13"])
async def test_the_agent_file_connects_under_old_and_new_pythons(tmp_path: Path, version: str) -> None:
    pyenv = Path(os.environ.get("PYENV_ROOT", "/root/.pyenv")) / "versions"
    found = sorted(pyenv.glob(f"{version}.*/bin/python"))
    if not found:
        pytest.skip(f"no python {version} here")
    path = tmp_path / "agent.pyz"
    path.write_bytes(AgentFile.build().data)

    process = await asyncio.create_subprocess_exec(
        found[0],
        *("-W", "error", path, "connect"),
        env={**os.environ, "SUPERVISOR_HOME": str(tmp_path / "sup")},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdin is not None
    assert await process.stdout.readline() == b"SUPERVISOR-AGENT 1\n"
    channel = Channel(process.stdout, process.stdin)
    owner = asyncio.ensure_future(channel.run())
    assert (await channel.call("hello")).data["python"].startswith(version)
    digest = hashlib.sha256(b"x").hexdigest()
    manifest = {"files": [["d/f", 0o644, 1, digest]], "links": [["l", "d"]], "dirs": []}
    await channel.call("tree_plan", {"tree": "t"}, zlib.compress(json.dumps(manifest).encode()))
    await channel.call("tree_put", {"tree": "t", "parts": [[digest, 0, 1, 1]]}, b"x")
    assert (await channel.call("tree_commit", {"tree": "t"})).data["changed"] == 2
    assert (await channel.call("clean", {"job": None})).data["removed"] == []
    await channel.close()
    await asyncio.wait_for(process.wait(), 60)
    await owner
    assert process.returncode == 0
