"""A real job with a failure and a restart becomes a file, and the file shows what the session showed."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import time
from pathlib import Path
from typing import Any

import pytest

from supervisor.logs.selection import Selection
from supervisor.recording import writing
from supervisor.recording.player import Player
from supervisor.recording.reading import load
from supervisor.recording.redact import MARK
from supervisor.recording.writing import Limit, watch, write
from supervisor.session import Session
from supervisor.tui import times
from supervisor.tui.app import SupervisorApp
from supervisor.tui.replay import ReplayApp
from tests.agents.test_session_hosts import WAIT_S, Hosts, hosts
from tests.agents.test_session_verbs import Cli
from tests.screens.screens import press, rest, running_app, text_of, until

# Rank 1 gives up once, at step 25 of 40, when rank 0 has done it; then they begin at step 20, and wait at 38. There
# rank 1 prints when rank 0 has: the order of lines in view does not depend on what is known of two hosts' clocks.
SCRIPT = """
import os, sys, time
rank, again = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
with open(os.environ["NCCL_DEBUG_FILE"], "w") as file:
    print("h:1:1 [0] NCCL INFO NCCL version 2.26.2+cuda12.8", file=file)
done = sys.argv[-1]
for step in range(20 * again, 40):
    after = {20: "-38", 39: "-39"}.get(step) if again and rank == 1 else None
    if after:
        while not os.path.exists(done + after):
            time.sleep(0.01)
        time.sleep(0.1)
    print(f"step {step} | loss {1 / (step + 1):.3f}", flush=True)
    if step == 0:
        print("login with HF_TOKEN=hf_abcdef", flush=True)
    if again and rank == 0 and step >= 38:
        open(f"{done}-{step}", "w").close()
    while step == 38 and not os.path.exists(done + "2"):
        time.sleep(0.01)
    if step == 25 and not again:
        if rank == 0:
            open(done, "w").close()
            time.sleep(60)
        while not os.path.exists(done):
            time.sleep(0.01)
        raise ValueError("bad batch")
"""
ALL = Selection(generation="all", streams=("stdout", "stderr", "nccl"))
SCREENS = "123456"
REDACTED = "[redacted]"
# As long as what stands for it: a line that is too long for the screen is cut at the same place.
SECRET = "hunter2".ljust(len(REDACTED), "x")


def part(text: str) -> list[str]:
    """What a screen tells, without the line of the time and those of the keys."""
    # The command of the job is on its own screen as it was given.
    lines = [line for line in text.replace(SECRET, REDACTED).splitlines()[1:-2] if line.strip()]
    # The history at the end is the nodes', and a recording of a job that is over has none.
    return lines[: next((at for at, line in enumerate(lines) if line.startswith("─ history of ")), len(lines))]


async def screens_of(app: SupervisorApp) -> dict[str, list[str]]:
    """What every screen of a recording shows when it has nothing more to do."""
    found = {}
    async with running_app(app, (100, 30)) as pilot:
        for name in SCREENS:
            await press(app, pilot, name)
            found[name] = part(await rest(app, pilot))
    return found


async def come_to(app: SupervisorApp, expected: dict[str, list[str]]) -> None:
    """Wait until each screen of a session shows what is expected: what it shows comes from the nodes, in its time."""

    def shows(name: str) -> bool:
        return part(text_of(app)) == expected[name]

    async with running_app(app, (100, 30)) as pilot:
        for name in SCREENS:
            await press(app, pilot, name)
            with contextlib.suppress(AssertionError):
                await until(app, pilot, functools.partial(shows, name))
            assert part(text_of(app)) == expected[name], f"screen {name}"


async def followed(made: Hosts, path: Path, go: Path) -> None:
    """Record the job while it runs, and let it go on once the last step but one of both ranks has been seen."""
    async with Session(made.inventory(), follow=True) as session:
        await session.ready()
        watching = asyncio.ensure_future(watch(session, asyncio.Event()))
        end = time.monotonic() + WAIT_S
        while json.dumps(session.status).count('"step": 38') < 2 or session.status["generation"] != 1:
            assert time.monotonic() < end, session.status
            await session.wait_change(0.2)
        go.touch()
        await write(session, path, limit=Limit(0), seen=await asyncio.wait_for(watching, WAIT_S))
    recording = load(path)
    assert recording.files == {}
    # Steps are those of their time, between what the journal tells.
    player = Player(recording, paused=True)
    found = []
    for t_ns in recording.status_times_ns:
        player.seek(t_ns)
        found.append((player.status["generation"], player.status["state"], '"step": 38' in json.dumps(player.status)))
    assert (1, "running", True) in found
    assert (0, "running", False) in found
    assert found[-1][:2] == (1, "succeeded")
    recording.close()


async def compared(made: Hosts, path: Path) -> None:
    """The session, asked again without a trace, and its recording at the end tell the same."""
    recording = load(path)
    # What counts on a screen counts to the same time on both.
    now_s = recording.end_ns / 1e9
    async with Player(recording, recording.end_ns) as player:
        with times.read_from(lambda: now_s):
            played = await screens_of(ReplayApp(player))
        noted = (await player.merged(ALL, 4096)).rows
        noted_events, incidents = player.events, player.incidents
    async with Session(made.inventory(), follow=True) as session:
        await session.ready()
        await session.settle()
        await session.until_current()
        while not session.ended:
            await session.wait_change(0.5)
        with times.read_from(lambda: now_s):
            await come_to(SupervisorApp(session, read_only=True), played)
        rows = (await session.merged(ALL, 4096)).rows
        assert [event["type"] for event in noted_events] == [event["type"] for event in session.events]
        assert incidents == session.incidents
    secret, marked = b"HF_TOKEN=hf_abcdef", f"HF_TOKEN={MARK}".encode()
    # Times of lines that came at once may be a nanosecond apart.
    expected = sorted(row._replace(t_ns=0, text=row.text.replace(secret, marked)) for row in rows)
    assert sorted(row._replace(t_ns=0) for row in noted) == expected
    assert sum(marked in row.text for row in noted) == 2


def partly(path: Path, *, whole: bool) -> None:
    """Every line once; of a limit that is smaller than the file, the end and what surrounds evidence."""
    recording = load(path)
    for file, one in recording.files.items():
        numbers = list(recording.lines(file).numbers)
        assert numbers == sorted(set(numbers))
        assert numbers[-1] == one["lines"] - 1
        assert not whole or len(numbers) == one["lines"]
    stdout, stderr = (recording.lines(("n2", 0, 1, stream)) for stream in ("stdout", "stderr"))
    assert len(stdout.rows) == (27 if whole else 5), "four lines, and one that tells of the gap"
    assert b"ValueError: bad batch" in stderr.rows[-1].text
    recording.close()


def reported(document: dict[str, Any]) -> None:
    """The report of the job tells what happened, in numbers."""
    first, second = document["generations"]
    assert (first["cause"], first["first_step"], first["last_step"]) == ("launch", 0, 25)
    assert (second["cause"], second["first_step"], second["last_step"], second["steps_lost"]) == ("failure", 20, 39, 6)
    assert second["total_ms"] > 0
    assert document["args"][:2] == ["--api-key", MARK]
    assert (document["state"], document["charged_restarts"]) == ("succeeded", 1)
    assert document["incidents"][0]["culprit_ranks"] == [1]
    assert document["nccl"]["versions"] == ["2.26.2+cuda12.8"]
    assert document["environment"][0]["fact"] == "python"


def test_a_job_is_recorded_played_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path, done = tmp_path / "job.rec", tmp_path / "done"
    with hosts(tmp_path, 2) as made:
        (made.work / "train.py").write_text(SCRIPT)
        cli = Cli(made, monkeypatch, capfd)
        script = ["train.py", "--api-key", SECRET, str(done)]
        run = cli("up", "hosts.toml", "--detach", "--job", "job-t", "--env", "NCCL_DEBUG=INFO", *script)
        assert run.status == 0, run.err
        asyncio.run(followed(made, tmp_path / "watched.rec", tmp_path / "done2"))
        # What the agents still tell of a job that is over, ages and clocks, is never the same twice.
        made.end()
        recorded = cli("record", "h.toml", "job-t", str(path))
        assert (recorded.status, recorded.out.decode().split(":")[0]) == (0, "job-t"), recorded.err
        assert path.stat().st_mode & 0o777 == 0o600
        assert cli("record", "h.toml", str(path)).err.startswith(f"supervisor: {path} exists")
        assert list(tmp_path.glob(".*.rec*")) == []
        live = cli.json("report", "h.toml", "--json")
        asyncio.run(compared(made, path))
        monkeypatch.setattr(writing, "ROWS", 4)
        monkeypatch.setattr(writing, "AROUND", 2)
        for size in ("all", "30"):
            assert cli("record", "h.toml", "--logs", size, str(tmp_path / size)).status == 0
            partly(tmp_path / size, whole=size == "all")
    said = cli.json("report", str(path), "--json")
    reported(said)
    reported(live)
    assert said == live
    assert SECRET.encode() not in path.read_bytes()
    assert SECRET not in json.dumps(said)
    played = cli("replay", str(path), "--headless")
    assert played.lines.count("n1:0| step 25 | loss 0.038") == 2
