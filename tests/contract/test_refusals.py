"""What cannot work is refused: one clear message, the right exit code, nothing left running."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import Cluster
from tests.cluster.fixtures import hosts_of
from tests.cluster.job import WAIT_S, Job
from tests.preloaded import decoded

IMPORT_ERROR = "import no_such_module_at_all\n"
HELLO = "print('hello')\n"


hosts = hosts_of(2, stub_torch=True)


def up(work: Path, inventory: Path, *options: str, script: str | None = HELLO) -> subprocess.CompletedProcess[str]:
    """Run `up --headless` on the inventory in `work`."""
    work.mkdir(exist_ok=True)
    if script is not None:
        (work / "train.py").write_text(script)
    words = ["up", str(inventory), "--headless", *options, "train.py"]
    return decoded(Job.supervisor.run(words, work, timeout=WAIT_S))


def check(done: subprocess.CompletedProcess[str], status: int, *words: str) -> None:
    """The status is right, every word is said, and no traceback of ours is shown."""
    assert done.returncode == status, (done.returncode, done.stderr[-3000:])
    for word in words:
        assert word in done.stderr, (word, done.stderr[-3000:])
    assert "Traceback" not in done.stderr, done.stderr[-3000:]


def check_clean(hosts: Cluster) -> None:
    """No process of ours runs on any host, 30 s later at the latest."""
    end = time.monotonic() + 30.0
    while left := [line for host in hosts.hosts for line in hosts.processes(host).values() if is_ours(line)]:
        assert time.monotonic() < end, left
        time.sleep(0.2)


def is_ours(line: str) -> bool:
    """Whether a command line is an agent's, an engine's or a worker's."""
    return "agent" in line or "train.py" in line


@pytest.fixture
def inventory(hosts: Cluster, tmp_path: Path) -> Any:
    """Return a writer of inventories in this test's folder."""

    def write(hosts_keys: dict[str, dict[str, object]] | None = None, **job: object) -> Path:
        (tmp_path / "work").mkdir(exist_ok=True)
        keys: dict[str, Any] = {"nproc_per_node": 1, **job}
        return hosts.inventory(tmp_path / "work" / "hosts.toml", hosts=hosts_keys, **keys)

    return write


def test_torch_is_missing(hosts: Cluster, inventory: Any, tmp_path: Path) -> None:
    python = str(Path(sys.base_prefix) / "bin" / "python3")
    torchless = {"python": python, "prelude": "export PYTHONNOUSERSITE=1; unset PYTHONPATH"}
    done = up(tmp_path / "work", inventory({"n2": torchless}, only=["n2"]))
    check(done, 3, "n2", "torch cannot be imported")
    check_clean(hosts)


def test_a_script_that_fails_at_import_on_every_rank(hosts: Cluster, inventory: Any, tmp_path: Path) -> None:
    keys = {"max_restarts": 5, "only": ["n1"], "nproc_per_node": 2}
    done = up(tmp_path / "work", inventory(**keys), script=IMPORT_ERROR)
    # The script's own traceback is part of the verdict.
    assert done.returncode == 1
    assert "no_such_module_at_all" in done.stderr
    assert "before the first step" in done.stderr
    assert "generation 2" not in done.stderr


def test_nothing_is_left_running(hosts: Cluster) -> None:
    """By any of the launches above."""
    check_clean(hosts)
