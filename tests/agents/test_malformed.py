"""A node that answers nonsense is one failed host: every command works with the others."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from supervisor.inventory import Host
from tests.agents.test_session_hosts import hosts
from tests.agents.test_session_verbs import Cli

JOB = "job-t"
# Well-formed, and more important than what the true node says: it has a newer term and is the coordinator.
ANSWERS: dict[str, Any] = {
    "hello": {
        "protocol": 1, "version": "1", "hostname": "n2", "user": "u", "python": "3.11.2", "executable": "/bin/python3",
        "home": "/h", "cpu_count": 8, "disk_free": 10**12, "shm_free": None, "time_ns": 10**18, "pid": 7,
        "platform": "Linux x86_64", "uv": False,
    },
    "jobs": {"jobs": []},
    "open": {"live": True, "node": "n2"},
    "identity": {
        "job": JOB, "node": "n2", "term": 999, "role": "coordinator", "coordinator": "n2", "live": True, "peer_port": 1,
        "journal_term": 999,
        "coordinator_reachable": True, "last_seq": 999, "members": {"n2": {"address": "x", "port": 1}},
    },
}  # fmt: skip
NODE = """#!{python}
import asyncio, json, sys
sys.path.insert(0, {repository!r})
from remote_agent.base.streams import open_pipes
from remote_agent.wire import MAGIC, Answer, Channel, Problem
ANSWERS = json.loads({answers!r})

async def answer(op, args, body):
    return Answer(ANSWERS.get(op, {{"unheard": [op]}}))

async def main():
    sys.stdout.buffer.write(MAGIC)
    sys.stdout.buffer.flush()
    await Channel(*await open_pipes(sys.stdin.buffer, sys.stdout.buffer), answer).run()

asyncio.run(main())
"""


def test_commands_work_with_the_other_nodes(
    tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with hosts(tmp_path, 1) as made:
        cli = Cli(made, monkeypatch, capfd)
        (true,) = cli.inventory.hosts
        assert cli("up", "h.toml", "--headless", "--job", JOB, "talk.py", "3").status == 0
        for op, key in (("hello", "time_ns"), ("jobs", "jobs"), ("open", "live"), ("identity", "term"), ("status", "")):
            answers = {**ANSWERS, op: {name: value for name, value in ANSWERS.get(op, {}).items() if name != key}}
            node = _node(tmp_path / f"node_{op}", repository, answers)
            second = Host("n2", "localhost", "127.0.0.2", python=str(node), local=True)
            cli.inventory = dataclasses.replace(made.inventory(), hosts=(true, second))
            status = cli.json("status", "h.toml", JOB, "--json")
            assert (status["state"], [one["name"] for one in status["nodes"]]) == ("succeeded", ["n1"]), op
            run = cli("jobs", "h.toml")
            assert JOB in run.out.decode(), op
            if op in ("hello", "jobs"):
                assert f"its answer to `{op}` is malformed: {key} is missing" in run.err + run.out.decode()
            run = cli("logs", "h.toml", JOB)
            assert b"n1:0| rank 0 line 2" in run.out, (op, run.err)
            assert "n2: " in run.err, op
            assert b"job succeeded" in cli("events", "h.toml", JOB).out, op


def _node(path: Path, repository: Path, answers: dict[str, Any]) -> Path:
    """Return a program in the place of Python, which speaks for a node."""
    path.write_text(NODE.format(python=sys.executable, repository=str(repository), answers=json.dumps(answers)))
    path.chmod(0o755)
    return path
