"""A supervisor that is newer than the agents of a job, because somebody upgraded it while the job ran."""

from __future__ import annotations

import asyncio
import io
import subprocess
import tarfile
from pathlib import Path

import pytest

from remote_agent.agent.file_requests import JobRequests, arguments_of
from remote_agent.logs import LogStore
from supervisor.link.tasks import cancel_all
from supervisor.logs.selection import Selection
from supervisor.session import Session
from supervisor.ssh.agent_file import AgentFile
from supervisor.tui.logs.feed import LATEST_NS, Jump, LogFeed
from supervisor.tui.logs.finder import Finder
from supervisor.tui.screens.logs.record import fetch_record
from tests.agents.test_session_hosts import Hosts, hosts
from tests.agents.test_session_verbs import Cli

ROOT = Path(__file__).parents[2]
# The first version from which on newer supervisors lead its jobs.
EARLIER = "3ac6b57ee6e32328c986833e7c64d97466900e56"
SCRIPT = """
import os, sys, time
print("hello of rank", os.environ["RANK"], flush=True)
for step in range(100000):
    print(f"step {step} | loss 0.5", flush=True)
    time.sleep(0.1)
"""


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> AgentFile:
    """The agent of an earlier commit."""
    found = subprocess.run(
        ["git", "archive", EARLIER, "remote_agent"], cwd=ROOT, capture_output=True, timeout=60, check=False
    )
    if found.returncode:
        pytest.skip("the history of the repository is not here")
    folder = tmp_path_factory.mktemp("earlier")
    with tarfile.open(fileobj=io.BytesIO(found.stdout)) as archive:
        archive.extractall(folder)
    return AgentFile.build(folder / "remote_agent")


async def test_an_agent_ignores_arguments_that_it_does_not_know(tmp_path: Path) -> None:
    class Job(JobRequests):
        def __init__(self) -> None:
            self.logs = LogStore(tmp_path, live=False)

    answer = Job()._log(LogStore.list)({"of_tomorrow": True})
    assert (await answer).data == {"files": []}  # type: ignore[misc]
    assert {"pattern", "exact"} <= arguments_of(LogStore.rows)


async def read_on_screen(made: Hosts) -> None:
    """Read the log of rank 0 as the screen does: a line by its number, its record, hits that are there or come."""
    async with Session(made.inventory(), "job-t", follow=True) as session:
        await session.ready()
        await session.until_current()
        feed, key = LogFeed(session, Selection(0, [0], ("stdout",))), (0, 0, "stdout", 5)
        while feed.count < 12:
            await feed.refresh(20, lambda: True)
        line = feed.line(await feed.seek(Jump(LATEST_NS, key), 9))
        assert line is not None
        assert (line.key, line.text) == (key, b"step 4 | loss 0.5")
        assert (await fetch_record(session, line, feed.clocks)).text == "step 4 | loss 0.5"
        # The other node has nothing of this rank.
        found, is_complete = Finder(session, feed.selection, "step"), asyncio.Event()
        searching = asyncio.ensure_future(found.run(lambda: None, is_complete.set))
        await asyncio.wait_for(is_complete.wait(), 20)
        count = len(found.hits)
        assert count > 10
        while len(found.hits) < count + 5:
            await asyncio.sleep(0.05)
        await cancel_all([searching])


def test_a_job_of_an_earlier_agent_is_led_by_this_supervisor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], earlier: AgentFile
) -> None:
    with hosts(tmp_path, 2) as made:
        (made.work / "train.py").write_text(SCRIPT)
        cli = Cli(made, monkeypatch, capfd)
        with monkeypatch.context() as patch:
            patch.setattr(AgentFile, "build", lambda *_: earlier)
            run = cli("up", "h.toml", "--detach", "--job", "job-t", "train.py")
            assert run.status == 0, run.err
        assert AgentFile.build().sha256 != earlier.sha256

        assert cli.json("status", "h.toml", "--json")["state"] == "running"
        asyncio.run(asyncio.wait_for(read_on_screen(made), 60))
        for words in (
            "logs --tail 5", "logs --rank 0 --grep hello", "logs --level error", "logs --rank 1 --raw", "logs --fold",
            "events", "incidents", "report", "snapshots", "stacks", "signal CONT --rank 0", "jobs", "check",
            "cordon --node n2", "uncordon --node n2", "restart", "remove --node n2", "add --node n2",
        ):  # fmt: skip
            verb, *rest = words.split()
            run = cli(verb, "h.toml", *rest)
            assert run.status == 0, (words, run.err)
            assert "Error" not in run.err, (words, run.err)
        assert cli.json("status", "h.toml", "--json")["world_size"] == 2
        assert cli("stop", "h.toml").status == 0
        assert cli.json("status", "h.toml", "--json")["state"] == "stopped"
