"""The operator's machine may be a Mac: the command line and the screen do without what only Linux has.

The hosts run on this machine as they are; only the operator's processes lack it (scripts/macos.py).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from supervisor.cli.demo import hosts_in_thread
from tests.agents.engine_process import SCRIPTS
from tests.screens.test_pty import terminal
from tests.stub import on_path

WAIT_S = 90.0
# Ranks that make steps until they are stopped.
SCRIPT = """
import time
for step in range(100000):
    print(f"step {step}/100000 loss=0.5", flush=True)
    time.sleep(0.1)
"""


class Mac:
    """Commands on a machine without what macOS lacks, with two hosts that can be reached by SSH."""

    def __init__(self, root: Path, hosts_toml: Path) -> None:
        (root / "mac").mkdir()
        shutil.copy(SCRIPTS / "macos.py", root / "mac/sitecustomize.py")
        self.hosts = str(hosts_toml)
        self.env = {**os.environ, "HOME": str(root), "PYTHONPATH": str(root / "mac")}

    def command(self, verb: str, *words: str) -> list[str]:
        return [sys.executable, "-m", "supervisor", verb, self.hosts, *words]

    def run(self, verb: str, *words: str) -> str:
        """Run a command, which must succeed; returns what it prints."""
        done = subprocess.run(
            self.command(verb, *words),
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=WAIT_S, check=False, env=self.env,
        )  # fmt: skip
        assert done.returncode == 0, f"{verb}: {done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        return done.stdout

    def ask(self, verb: str, *words: str) -> Any:
        return json.loads(self.run(verb, *words, "--json"))


@pytest.fixture
def mac(tmp_path: Path) -> Iterator[Mac]:
    (tmp_path / "hosts").mkdir()
    (tmp_path / "work").mkdir()
    (tmp_path / "work/train.py").write_text(SCRIPT)
    with hosts_in_thread(2, tmp_path / "hosts") as hosts:
        job = {"workdir": str(tmp_path / "work"), "min_nodes": 1, "nproc_per_node": 1}
        path = hosts.inventory(tmp_path / "hosts.toml", sys.executable, job)
        prelude = f"prelude = {json.dumps(f'export PYTHONPATH={on_path()}')}"
        path.write_text(path.read_text().replace("[defaults]\n", f"[defaults]\n{prelude}\n"))
        try:
            yield Mac(tmp_path, path)
        finally:
            hosts.end_processes(5)


def test_what_is_taken_away_is_gone(mac: Mac) -> None:
    code = "import os; os.listdir('/proc' if not hasattr(os, 'sched_getaffinity') else '/')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=mac.env)
    assert "FileNotFoundError: [Errno 2] No such file or directory: '/proc'" in done.stderr


@pytest.mark.parametrize(
    ("words", "what"),
    [(["demo", "--headless"], "the demo"), (["status"], "a job on this machine"), (["check", "--slurm"], "--slurm")],
)
def test_what_makes_this_machine_a_node_says_that_it_needs_linux(mac: Mac, words: list[str], what: str) -> None:
    command = [sys.executable, "-m", "supervisor", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False, env=mac.env)
    hint = "name the hosts, which run Linux: in a hosts.toml, or by --hosts"
    assert (done.returncode, done.stderr) == (2, f"supervisor: {what} needs Linux here\n  hint: {hint}\n")


def test_a_job_is_led_from_a_mac(mac: Mac, tmp_path: Path) -> None:
    mac.run("check")
    mac.run("up", "--detach", str(tmp_path / "work/train.py"))
    status = mac.ask("status")
    assert (status["state"], len(status["nodes"])) == ("running", 2)
    with terminal(100, 30, mac.command("attach"), **mac.env) as screen:
        screen.wait_for(b"train")
        screen.leave()
    assert "step " in mac.run("logs", "--tail", "5")
    stacks = mac.ask("stacks")
    assert stacks["stacks"].keys() | stacks["unreachable"].keys() == {"0", "1"}
    for words in (["restart"], ["remove", "--node", "n2"], ["add", "--node", "n2"], ["stop"]):
        mac.run(*words)
    assert mac.ask("incidents")["incidents"] == []
    assert "# " in mac.run("report")
    folders = sorted(str(path) for path in tmp_path.glob("hosts/*/.supervisor/jobs/*"))
    assert subprocess.run(mac.command("diagnose")[:-1] + folders, env=mac.env, check=False).returncode in (0, 1)
    assert len(mac.ask("jobs")["jobs"]) == 1
    mac.run("clean")
    assert mac.ask("jobs")["jobs"] == []
