"""`supervisor check` on real hosts: the odd one out is named, and who does not reach whom."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import Cluster
from tests.cluster.fixtures import hosts_of
from tests.cluster.job import Job, until
from tests.preloaded import decoded
from tests.stub import STUB

# With torch; all others have none, or a stub of it.
pair = hosts_of(2)
three = hosts_of(3, stub_torch=True)
nameless = hosts_of(2, scope="function", resolve=False, stub_torch=True)


def check(inventory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return decoded(Job.supervisor.run(["check", str(inventory), *words], Path.cwd(), timeout=240))


def document(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.stdout, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def named(found: dict[str, Any], fact: str) -> list[list[str]]:
    return [finding["nodes"] for finding in found["findings"] if finding["fact"] == fact]


def not_reached(found: dict[str, Any]) -> list[list[str]]:
    assert all(finding["severity"] == "error" for finding in found["findings"] if finding["fact"] == "reach")
    return named(found, "reach")


@pytest.fixture(scope="module")
def torchless(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter without torch: seconds less on each host, for what has nothing to do with it."""
    python = tmp_path_factory.mktemp("torchless") / "python"
    python.write_text(f'#!/bin/sh\nunset PYTHONPATH\nexec {sys._base_executable} "$@"\n')  # type: ignore[attr-defined]
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    return str(python)


def test_hosts_that_are_alike_have_nothing_odd_and_their_collectives_work(pair: Cluster) -> None:
    done = check(pair.inventory(), "--json", "--collectives")
    found = document(done)
    assert (done.returncode, found["ok"], found["unreachable"]) == (0, True, {}), done.stdout + done.stderr
    assert all(finding["severity"] != "error" for finding in found["findings"])
    assert {name: sorted(hops) for name, hops in found["reach"].items()} == {"n1": ["n2"], "n2": ["n1"]}
    assert all(hop["ms"] > 0 for hops in found["reach"].values() for hop in hops.values())
    (group,) = found["collectives"]
    assert (group["nodes"], group["backend"]) == (["n1", "n2"], "gloo")
    assert {node["torch"]["torch"] for node in found["nodes"].values()} == {"2.13.0+cpu"}


def test_the_odd_one_out_is_named(three: Cluster, torchless: str, tmp_path: Path) -> None:
    # No torch, and a variable that only one host has; a secret stays where it is.
    odd = {"n2": {"python": torchless, "env": {"NCCL_DEBUG": "INFO", "TORCH_TOKEN": "hunter2"}}}
    inventory = three.inventory(tmp_path / "odd.toml", hosts=odd)
    done = check(inventory)
    assert done.returncode == 1
    assert "hunter2" not in done.stdout + done.stderr
    torch = next(line for line in done.stdout.splitlines() if line.startswith("error") and "torch" in line)
    assert torch.startswith("error    n2: torch cannot be imported: ModuleNotFoundError: No module named 'torch'")
    assert "warning  n2: $NCCL_DEBUG is INFO on n2; n[1,3] have (not set)" in done.stdout
    assert max(len(line) for line in done.stdout.splitlines() if "n[1,3]" in line) < 120


def test_a_host_that_its_peers_do_not_reach_is_named_with_both_ends(
    three: Cluster, torchless: str, tmp_path: Path
) -> None:
    light = {"python": torchless}
    three.cut("n1", "n3")
    try:
        found = document(check(three.inventory(tmp_path / "light.toml", defaults=light), "--json"))
    finally:
        three.heal("n1")
        three.heal("n3")
    assert sorted(not_reached(found)) == [["n1", "n3"], ["n3", "n1"]]
    wrong = three.inventory(tmp_path / "wrong.toml", defaults=light, hosts={"n2": {"address": "127.0.1.1"}})
    done = check(wrong, "--json")
    assert (not_reached(document(done)), done.returncode) == ([["n2"]], 1)
    assert "that address is local to each machine" in done.stdout


def test_a_host_that_does_not_answer_is_exit_status_3(three: Cluster, torchless: str, tmp_path: Path) -> None:
    inventory = three.inventory(tmp_path / "down.toml", defaults={"python": torchless}, hosts={"n3": {"port": 1}})
    done = check(inventory, "--json")
    found = document(done)
    assert (done.returncode, list(found["unreachable"]), list(found["nodes"])) == (3, ["n3"], ["n1", "n2"])
    assert "connection refused" in found["unreachable"]["n3"]["reason"]


def test_hosts_may_be_named_without_an_inventory(three: Cluster, tmp_path: Path, ssh_home: Path) -> None:
    config = [f"IdentityFile {three.identity_file}", f"UserKnownHostsFile {three.known_hosts}", "User root"]
    config += [f"Host {host.name}\n  HostName {host.address}" for host in three.hosts]
    (ssh_home / ".ssh" / "config").write_text("\n".join(config) + "\n")
    (tmp_path / "hostfile").write_text("n1 slots=2\nn3 slots=1\n")
    for words in (["--hosts", "n[1,3]"], ["--hostfile", str(tmp_path / "hostfile")]):
        done = Job.supervisor.run(["jobs", *words, "--json"], tmp_path, timeout=60, environment={**os.environ})
        assert (done.returncode, json.loads(done.stdout or b"{}")) == (0, {"jobs": [], "unreachable": {}}), done.stderr


def test_a_host_whose_name_leads_back_to_itself_is_named(nameless: Cluster, torchless: str, tmp_path: Path) -> None:
    done = check(nameless.inventory(), "--json")
    names = nameless.inventory(tmp_path / "names.toml", defaults={"python": torchless}, hosts={"n2": {"address": "n2"}})
    unreachable = check(names, "--json")
    assert named(document(done), "own name") == [["n1", "n2"]], done.stdout
    assert "127.0.1.1" in done.stdout
    assert done.returncode == 0
    found = document(unreachable)
    assert (unreachable.returncode, not_reached(found)) == (1, [["n2"]]), unreachable.stdout
    (hint,) = [one["hint"] for one in found["findings"] if one["fact"] == "reach"]
    assert "cannot resolve that name" in hint


def test_nothing_of_a_check_stays(three: Cluster) -> None:
    def is_clean() -> bool:
        return not any(b"agents/" in cmdline(pid) for host in three.hosts for pid in three.pids(host))

    # A bridge ends once its node's sshd has noticed.
    until(is_clean, "the end of all bridges")


def cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_this_machine_alone(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "supervisor", "check", "--json"],
        capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "SUPERVISOR_HOME": str(tmp_path), "PYTHONPATH": str(STUB)},
    )  # fmt: skip
    found = document(done)
    assert (done.returncode, found["ok"], len(found["nodes"]), found["reach"]) == (0, True, 1, {}), done.stderr


def test_a_home_that_is_not_there_is_said_and_no_crash(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "supervisor", "check"], capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "SUPERVISOR_HOME": str(tmp_path), "HOME": str(tmp_path / "no"), "PYTHONPATH": str(STUB)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{tmp_path / 'no'} does not exist" in done.stdout
