"""What cannot work is refused: one clear message, the right exit code, nothing left running."""

from __future__ import annotations

import os
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


def test_one_host_unreachable(hosts: Cluster, inventory: Any, tmp_path: Path) -> None:
    done = up(tmp_path / "work", inventory({"n2": {"port": 9}}))
    check(done, 3, "n2", "refused")
    check_clean(hosts)


def test_one_host_unreachable_but_enough_others(hosts: Cluster, inventory: Any, tmp_path: Path) -> None:
    done = up(tmp_path / "work", inventory({"n2": {"port": 9}}, min_nodes=1))
    check(done, 0, "n2", "refused")
    assert "n1:0| hello" in done.stdout


def test_all_hosts_unreachable(hosts: Cluster, inventory: Any, tmp_path: Path) -> None:
    done = up(tmp_path / "work", inventory({"n1": {"port": 9}, "n2": {"port": 9}}, min_nodes=1))
    check(done, 3, "n1", "n2", "refused")


def test_wrong_key(hosts: Cluster, inventory: Any, tmp_path: Path) -> None:
    key = tmp_path / "other_key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    done = up(tmp_path / "work", inventory({"n1": {"identity_file": str(key)}}, only=["n1"]))
    check(done, 3, "n1", "auth", "root")


def test_unknown_and_changed_host_key(hosts: Cluster, inventory: Any, tmp_path: Path) -> None:
    empty = tmp_path / "known_hosts"
    empty.write_text("")
    toml = inventory({"n1": {"known_hosts": str(empty)}}, only=["n1"])
    check(up(tmp_path / "work", toml), 3, "n1", "host key", "ssh-keyscan")
    lines = hosts.known_hosts.read_text().splitlines()
    first, second = (next(line for line in lines if host.address in line) for host in hosts.hosts)
    empty.write_text(f"{first.split()[0]} {second.split(' ', 1)[1]}\n")
    check(up(tmp_path / "work", toml), 3, "n1", "host key")


def test_python_is_missing(inventory: Any, tmp_path: Path) -> None:
    toml = inventory({"n2": {"python": "/no/such/python"}}, only=["n2"])
    check(up(tmp_path / "work", toml), 3, "n2", "/no/such/python")


def test_torch_is_missing(hosts: Cluster, inventory: Any, tmp_path: Path) -> None:
    python = str(Path(sys.base_prefix) / "bin" / "python3")
    torchless = {"python": python, "prelude": "export PYTHONNOUSERSITE=1; unset PYTHONPATH"}
    done = up(tmp_path / "work", inventory({"n2": torchless}, only=["n2"]))
    check(done, 3, "n2", "torch cannot be imported")
    check_clean(hosts)


def test_disk_full_at_the_push(hosts: Cluster, inventory: Any, tmp_path: Path) -> None:
    root = hosts.hosts[1].home / "small"
    made = hosts.exec("n2", ["sh", "-c", f"mkdir {root} && mount -t tmpfs -o mode=0700,size=32k tmpfs {root}"])
    assert made.returncode == 0, made.stderr
    try:
        done = up(tmp_path / "work", inventory({"n2": {"env": {"SUPERVISOR_HOME": str(root)}}}, only=["n2"]))
        check(done, 3, "n2", str(root))
        assert "full" in done.stderr or "No space left" in done.stderr
    finally:
        hosts.exec("n2", ["umount", str(root)])


def test_the_script_is_missing(inventory: Any, tmp_path: Path) -> None:
    check(up(tmp_path / "work", inventory(), script=None), 2, "train.py")


def test_a_script_that_fails_at_import_on_every_rank(hosts: Cluster, inventory: Any, tmp_path: Path) -> None:
    keys = {"max_restarts": 5, "only": ["n1"], "nproc_per_node": 2}
    done = up(tmp_path / "work", inventory(**keys), script=IMPORT_ERROR)
    # The script's own traceback is part of the verdict.
    assert done.returncode == 1
    assert "no_such_module_at_all" in done.stderr
    assert "before the first step" in done.stderr
    assert "generation 2" not in done.stderr


@pytest.mark.parametrize("count", ["0", "-1", "many"])
def test_a_bad_number_of_workers(inventory: Any, tmp_path: Path, count: str) -> None:
    check(up(tmp_path / "work", inventory(), f"--nproc-per-node={count}"), 2, "nproc")


def test_a_bad_inventory(tmp_path: Path) -> None:
    path = tmp_path / "hosts.toml"
    path.write_text('[job]\nmax_restart = 3\n[[hosts]]\nname = "n1"\n')
    check(up(tmp_path, path), 2, "hosts.toml", "max_restart", "max_restarts")
    path.write_text("[job\n")
    check(up(tmp_path, path), 2, "hosts.toml")
    check(up(tmp_path, tmp_path / "none.toml"), 2, "none.toml")
    assert os.listdir(tmp_path).count("hosts.toml") == 1


def test_nothing_is_left_running(hosts: Cluster) -> None:
    """By any of the launches above."""
    check_clean(hosts)
