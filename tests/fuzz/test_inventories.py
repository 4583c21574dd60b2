"""Damaged inventories: hosts.toml, lists of hosts, hostfiles, Slurm's variables, patterns and what ssh says."""

from __future__ import annotations

from pathlib import Path

import pytest

from supervisor.errors import HostError, SupervisorError
from supervisor.inventory import Host, InventoryError, sshconfig
from supervisor.inventory.load import build, load
from supervisor.inventory.sources import from_hostfile, from_hosts, from_slurm, to_toml
from supervisor.launch.specs import UpOptions, make_plan
from supervisor.ssh.settings import for_host
from tests.fuzz import damages, seeds
from tests.fuzz.driver import fuzz

EXAMPLES = [(seeds.ROOT / "hosts.example.toml").read_bytes(), (seeds.OWN / "hosts.toml").read_bytes()]


@pytest.fixture(autouse=True)
def home(ssh_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without files, in which no command of a configuration is found."""
    monkeypatch.setenv("USER", "me")
    monkeypatch.setenv("PATH", "/nonexistent")
    return ssh_home


def test_hosts_toml(tmp_path: Path) -> None:
    path = tmp_path / "hosts.toml"
    (tmp_path / "train.py").touch()

    def run(data: bytes) -> None:
        path.write_bytes(data)
        make_plan(load(path), UpOptions(script=str(tmp_path / "train.py")), tmp_path)

    fuzz(run, EXAMPLES, damages.of_bytes, (SupervisorError,))


def test_other_sources(tmp_path: Path) -> None:
    """The first line names the source, the rest is a hostfile or Slurm's variables."""

    def run(data: bytes) -> None:
        kind, _, rest = data.decode("utf-8", "replace").partition("\n")
        if kind.startswith("slurm"):
            document = from_slurm(dict(line.split("=", 1) for line in rest.splitlines() if "=" in line))
        elif kind.startswith("hostfile"):
            document = from_hostfile(rest, "hostfile")
        else:
            document = from_hosts(rest)
        build(tmp_path / "hosts.toml", document, tmp_path)
        (tmp_path / "made.toml").write_text(to_toml(document, "made"))
        load(tmp_path / "made.toml")

    real = [
        b"slurm\nSLURM_JOB_NODELIST=gpu[01-04,07],login\nSLURM_TASKS_PER_NODE=2(x5),1\n",
        b"slurm\nSLURM_JOB_NODELIST=n[1-3]\nSLURM_GPUS_ON_NODE=h100:8\nPATH=/usr/bin\n",
        b"hostfile\n# ours\nn1 slots=8 max_slots=8\nn2:4\nn3 slots = 2\n",
        b"hosts\nann@gpu[01-16]:2222,login,10.0.0.3",
    ]
    fuzz(run, real, damages.of_bytes, (InventoryError,))


def test_what_ssh_says_of_its_configuration(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = home / "said"
    program = home / "ssh"
    program.touch(mode=0o755)
    program.write_text(f"#!/bin/sh\nexec /bin/cat {said}\n")
    monkeypatch.setenv("PATH", str(home))
    host = Host("gpu1", ssh="gpu1", address="gpu1")

    def run(data: bytes) -> None:
        said.write_bytes(data)
        sshconfig.forget()
        for_host(host)

    fuzz(run, [(seeds.OWN / "ssh_config").read_bytes()], damages.of_bytes, (HostError,))
