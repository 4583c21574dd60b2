"""Logs that are followed over a restart and a lost link: each line once, none of what was before."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from supervisor.session.hits import hits
from supervisor.session.logs import Selection
from tests.agent.test_session import has, planned, until
from tests.agent.test_session_hosts import WAIT_S, Hosts, hosts
from tests.agent.test_session_verbs import Cli

pytestmark = [pytest.mark.torch, pytest.mark.e2e]
# The first generation goes on until it is stopped, and says something then; the second one ends by itself.
SCRIPT = """
import os, signal, sys, time
second = os.path.exists("begun")
open("begun", "w").close()
def last(number, frame):
    print("ERROR last words", flush=True)
    sys.exit(1)
signal.signal(signal.SIGTERM, last)
if not second:
    print("ERROR of the first generation", file=sys.stderr, flush=True)
number = 0
while not second or number < 3000:
    print(f"ERROR {second} {number}\\nfine", flush=number % 500 == 0)
    number += 1
    if not second:
        time.sleep(0.01)
"""
QUERY = {"pattern": "", "ignore_case": False, "level": "error", "since_ns": None}


def test_errors_are_told_once_over_a_restart_and_a_lost_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    async def scenario(made: Hosts) -> None:
        async with planned(made.inventory(), made) as session:
            told: list[str] = []

            async def follow() -> None:
                async for rows in hits(session, Selection(streams=("stdout",)), 0, dict(QUERY)):
                    told.extend(row.text.decode() for row in rows)

            await session.ready()
            following = asyncio.ensure_future(follow())
            await until(session, lambda: has(session, "generation_running") and bool(told))
            session.links["n1"].reopen()
            count = len(told)
            await until(session, lambda: len(told) > count)
            await session.request("restart")
            await asyncio.wait_for(following, WAIT_S)
            assert session.state == "succeeded"
        logs = [made.home("n1") / f"jobs/job-t/generation_{number}/rank_0/stdout.log" for number in (0, 1)]
        assert told == [line for log in logs for line in log.read_text().splitlines() if line != "fine"]
        assert "ERROR last words" in told

    with hosts(tmp_path, 1) as made:
        (made.work / "talk.py").write_text(SCRIPT)
        asyncio.run(scenario(made))
        cli = Cli(made, monkeypatch, capfd)
        last = [f"n1:0| ERROR True {number}" for number in range(3000)]
        assert cli("logs", "h.toml", "-f", "--level", "error", "--tail", "3").lines == last[-3:]
        assert cli("logs", "h.toml", "-f", "--level", "error").lines == last
        # The newest generation wrote nothing there.
        assert cli("logs", "h.toml", "-f", "--stream", "stderr").lines == []
        typo = cli("logs", "h.toml", "-f", "--node", "typo")
        assert (typo.status, "no host 'typo' in the inventory" in typo.err) == (1, True)
