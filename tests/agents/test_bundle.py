"""A real job with a failure and a restart becomes one file, and that file shows what the job showed, but no secret."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import time
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from supervisor.bundle import open_inventory
from supervisor.logs.selection import Selection
from supervisor.session import Session
from supervisor.tui import times
from supervisor.tui.app import SupervisorApp
from supervisor.tui.shell import ShellOptions
from tests.agents.test_session_hosts import WAIT_S, Hosts, hosts
from tests.agents.test_session_verbs import Cli
from tests.screens.screens import press, rest, running_app, text_of, until

if TYPE_CHECKING:
    from supervisor.inventory import Inventory
    from supervisor.logs.rows import LogLine

# Rank 1 gives up once, at step 25 of 40, when rank 0 has done it; then they begin at step 20, and wait at 38. There
# rank 1 prints when rank 0 has: the order of lines in view does not depend on what is known of two hosts' clocks.
SCRIPT = """
import os, sys, time
rank, again = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
with open(os.environ["NCCL_DEBUG_FILE"], "w") as file:
    print("h:1:1 [0] NCCL INFO NCCL version 2.26.2+cuda12.8", file=file)
    if rank == 0 and not again:
        print("filler\\n" * 400_000, end="", file=file)
        print("-----BEGIN PRIVATE KEY-----\\nMIIEplanted\\n-----END PRIVATE KEY-----", file=file)
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
        raise ValueError("bad batch")  # password=planted-3x
"""
ALL = Selection(generation="all", streams=("stdout", "stderr"))
SCREENS = "123456"
REDACTED = "[redacted]"
# As long as what stands for it: a line that is too long for the screen is cut at the same place.
SECRET, QUOTED = "hunter2xxx", "planted-3x"
PLANTED = (SECRET, "planted", "hf_abcdef", "in-a-variable")


def part(text: str) -> list[str]:
    """What a screen tells, without the line of the time and those of the keys."""
    for secret in (SECRET, QUOTED):
        text = text.replace(secret, REDACTED)
    lines = text.replace("hf_abcdef", "*********").splitlines()[1:-2]
    return [line for line in lines if line.strip()]


async def screens_of(app: SupervisorApp) -> dict[str, list[str]]:
    """What every screen shows when it has nothing more to do."""
    found = {}
    async with running_app(app, (100, 30)) as pilot:
        for name in SCREENS:
            await press(app, pilot, name)
            found[name] = part(await rest(app, pilot))
    return found


async def come_to(app: SupervisorApp, expected: dict[str, list[str]]) -> None:
    """Wait until each screen shows what is expected: what it shows comes from the nodes, in its time."""

    def shows(name: str) -> bool:
        return part(text_of(app)) == expected[name]

    async with running_app(app, (100, 30)) as pilot:
        for name in SCREENS:
            await press(app, pilot, name)
            with contextlib.suppress(AssertionError):
                await until(app, pilot, functools.partial(shows, name))
            assert part(text_of(app)) == expected[name], f"screen {name}"


async def opened(inventory: Inventory) -> Session:
    """A session that knows all of a job that is over; to be closed."""
    session = Session(inventory, follow=True)
    await session.__aenter__()
    await session.ready()
    await session.settle()
    await session.until_current()
    while not session.ended:
        await session.wait_change(0.5)
    return session


def compared(made: Hosts, path: Path) -> None:
    """The session, asked again without a trace, and its bundle show the same on every screen, and have equal rows."""

    async def compare() -> None:
        now_s = time.time()
        bundle, session = await opened(open_inventory(path)), await opened(made.inventory())
        try:
            with times.read_from(lambda: now_s):
                shown = await screens_of(SupervisorApp(bundle, ShellOptions(read_only=True)))
                await come_to(SupervisorApp(session, ShellOptions(read_only=True)), shown)
            assert len(bundle.events) == len(session.events)
            assert [event["time"] for event in bundle.events] == [event["time"] for event in session.events]
            given, kept = [(await one.merged(ALL, 4096)).rows for one in (session, bundle)]
            assert kept == [hidden(row) for row in given]
            assert sum(b"HF_TOKEN=*********" in row.text for row in kept) == 2
        finally:
            await session.close()
            await bundle.close()

    asyncio.run(compare())


def hidden(row: LogLine) -> LogLine:
    text = row.text.replace(b"hf_abcdef", b"*********").replace(QUOTED.encode(), b"*" * len(QUOTED))
    return row._replace(text=text)


def reported(document: dict[str, Any]) -> None:
    """The report of the job tells what happened, in numbers."""
    first, second = document["generations"]
    assert (first["cause"], first["first_step"], first["last_step"]) == ("launch", 0, 25)
    assert (second["cause"], second["first_step"], second["last_step"], second["steps_lost"]) == ("failure", 20, 39, 6)
    assert second["total_ms"] > 0
    assert document["args"][:2] == ["--api-key", REDACTED]
    assert (document["state"], document["charged_restarts"]) == ("succeeded", 1)
    assert document["incidents"][0]["culprit_ranks"] == [1]
    assert document["nccl"]["versions"] == ["2.26.2+cuda12.8"]
    assert document["environment"][0]["fact"] == "python"


def texts_of(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as file:
        return {name: file.read(name) for name in file.namelist()}


def test_a_job_as_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    path, live, done = tmp_path / "job.zip", tmp_path / "live.zip", tmp_path / "done"
    with hosts(tmp_path, 2) as made:
        (made.work / "train.py").write_text(SCRIPT)
        cli = Cli(made, monkeypatch, capfd)
        script = ["train.py", "--api-key", SECRET, str(done)]
        env = ["--env", "NCCL_DEBUG=INFO", "--env", "WANDB_API_KEY=in-a-variable"]
        run = cli("up", "hosts.toml", "--detach", "--job", "job-t", *env, *script)
        assert run.status == 0, run.err

        end = time.monotonic() + WAIT_S
        while json.dumps(status := cli.json("status", "h.toml", "--json")).count('"step": 38') < 2:
            assert time.monotonic() < end, status
        assert cli("report", "h.toml", "--bundle", str(live)).status == 0
        (tmp_path / "done2").touch()
        while cli.json("status", "h.toml", "--json")["state"] != "succeeded":
            assert time.monotonic() < end
        # What the agents still tell of a job that is over, ages and clocks, is never the same twice.
        made.end()

        run = cli("report", "h.toml", "job-t", "--bundle", str(path))
        assert (run.status, run.out.decode().split(",")[0]) == (0, "job-t: 2 nodes"), run.err
        assert path.stat().st_mode & 0o777 == 0o600
        assert list(tmp_path.glob(".*.zip*")) == []
        from_hosts = cli.json("report", "h.toml", "--json")
        compared(made, path)

        cli.inventory = made.inventory(n2={"python": "/none/python"})
        run = cli("report", "h.toml", "--bundle", str(tmp_path / "part.zip"), "--logs", "1M")
        assert (run.status, "n2: " in run.err, "missing from the bundle" in run.err) == (0, True, True), run.err
    from_bundle = cli.json("report", str(path), "--json")
    reported(from_bundle)
    assert from_bundle == from_hosts

    for one in (path, live):
        found = {
            name: [secret for secret in PLANTED if secret.encode() in text] for name, text in texts_of(one).items()
        }
        assert {name: secrets for name, secrets in found.items() if secrets} == {}
        assert not any("tls" in name or "sock" in name for name in found)

    incidents = cli.json("diagnose", str(path), "--json")["incidents"]
    assert [one["culprit_ranks"] for one in incidents] == [[1]]
    assert incidents[0]["evidence"][0]["file"].startswith(f"{path}/nodes/n2/generation_0/rank_1/")

    # A job that goes on is shown as it was.
    shown = cli.json("status", str(live), "--json")
    assert (shown["state"], json.dumps(shown).count('"step": 38')) == ("running", 2)
    watched = cli("attach", str(live), "--headless")
    assert "n1:0| step 38 | loss 0.026" in watched.lines
    for words in (("restart",), ("stop",), ("signal", "USR1", "--rank", "0")):
        assert cli(words[0], str(live), *words[1:]).status == 2

    # Of a longer log there is the end, with the lines' numbers, and a line that stands for what is missing.
    partial = cli("logs", str(tmp_path / "part.zip"), "--rank", "0", "--stream", "nccl", "--generation", "0").lines
    assert "MB were dropped here: log_bound, or --logs of a bundle" in partial[0]
    assert 1_000_000 < sum(len(line) - len("n1:0| ") + 1 for line in partial) < 2_600_000
    assert partial[-2:] == ["n1:0| ***********", "n1:0| *************************"]
