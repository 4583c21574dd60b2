"""Where files lie on a node, sockets with long paths, and the lock that says whether an agent lives."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from remote_agent.base.files import atomic_write
from remote_agent.base.paths import Home, agent_alive, lock_agent, unlock_agent
from remote_agent.base.proc import start_ticks
from remote_agent.base.streams import open_unix, serve_unix
from remote_agent.wire import Problem


def test_the_files_are_those_of_the_contract(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SUPERVISOR_HOME", raising=False)
    home = Home.from_environment()
    assert home.root == tmp_path / ".supervisor"
    monkeypatch.setenv("SUPERVISOR_HOME", "~/other")
    assert Home.from_environment().root == tmp_path / "other"
    files = home.job("train-k3f9")
    assert files.root == home.root / "jobs" / "train-k3f9"
    names = [path.name for path in (files.sock, files.pid, files.log, files.events)]
    assert names == ["agent.sock", "agent.pid", "agent.log", "events.jsonl"]
    assert files.rank(2, 5) == files.root / "generation_2" / "rank_5"


@pytest.mark.parametrize("name", ["", ".", "..", ".x", "-x", "a/b", "a b", "a\n", "ü", "x" * 65])
def test_names_that_could_leave_their_directory_are_refused(tmp_path: Path, name: str) -> None:
    for make in (Home(tmp_path).job, Home(tmp_path).tree):
        with pytest.raises(Problem, match="1 to 64 letters"):
            make(name)


def test_a_socket_may_lie_deep(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 120) / ("y" * 120) / "agent.sock"
    path.parent.mkdir(parents=True)
    path.write_text("a stale file")

    async def body() -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(await reader.readline())
            writer.close()

        server = await serve_unix(path, answer)
        assert path.is_socket()
        assert path.stat().st_mode & 0o777 == 0o600
        reader, writer = await open_unix(path)
        writer.write(b"hello\n")
        assert await reader.read() == b"hello\n"
        writer.close()
        await writer.wait_closed()
        server.close()
        await server.wait_closed()
        for refused in (path, path.with_name("none")):
            with pytest.raises(OSError):
                await open_unix(refused)

    before = set(os.listdir("/proc/self/fd"))
    asyncio.run(asyncio.wait_for(body(), 20))
    assert set(os.listdir("/proc/self/fd")) <= before


def test_the_lock_lives_and_dies_with_its_process(tmp_path: Path, repository: Path) -> None:
    files = Home(tmp_path).job("j")
    files.make()
    assert agent_alive(files) is None
    files.pid.write_text("99999999 1\n")
    # A file that an agent left says nothing: only the lock does.
    assert agent_alive(files) is None
    code = (
        "import sys,remote_agent.base.paths as p;from pathlib import Path;"
        "print(p.lock_agent(p.Home(Path(sys.argv[1])).job('j')) is not None,flush=True);sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=repository
    )
    assert holder.stdout is not None
    assert holder.stdin is not None
    assert holder.stdout.readline() == b"True\n"
    assert agent_alive(files) == holder.pid
    assert lock_agent(files) is None
    assert files.pid.read_text().split() == [str(holder.pid), str(start_ticks(holder.pid))]
    holder.kill()
    holder.wait()
    holder.stdin.close()
    holder.stdout.close()
    assert agent_alive(files) is None
    fd = lock_agent(files)
    assert fd is not None
    assert agent_alive(files) == os.getpid()
    os.close(fd)


def test_an_agent_whose_directory_was_removed_leaves_the_next_agent_its_socket(tmp_path: Path) -> None:
    files = Home(tmp_path).job("j")
    locks = []
    for _ in range(2):
        shutil.rmtree(tmp_path, ignore_errors=True)
        files.make()
        lock = lock_agent(files)
        assert lock is not None
        locks.append(lock)
        files.sock.touch()
    unlock_agent(files, locks[0])
    assert files.sock.exists()
    unlock_agent(files, locks[1])
    assert not files.sock.exists()
    assert agent_alive(files) is None


def test_looking_does_not_keep_an_agent_from_starting(tmp_path: Path) -> None:
    files = Home(tmp_path).job("j")
    files.make()
    files.pid.touch()
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            agent_alive(files)

    lookers = [threading.Thread(target=look) for _ in range(2)]
    for looker in lookers:
        looker.start()
    try:
        for _ in range(200):
            fd = lock_agent(files)
            assert fd is not None
            # As left by an agent that is dead.
            os.pwrite(fd, b"99999999 1".ljust(64), 0)
            os.close(fd)
    finally:
        stop.set()
        for looker in lookers:
            looker.join()


def test_a_write_is_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "f"
    atomic_write(path, b"one")
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"one", 0o600)
    atomic_write(path, b"two", 0o644)
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"two", 0o644)
    (tmp_path / "d").mkdir()
    with pytest.raises(OSError):
        atomic_write(tmp_path / "d", b"x")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["d", "f"]
    assert start_ticks(2**22 + 1) is None
