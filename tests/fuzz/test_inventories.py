"""Damaged inventories: hosts.toml, lists of hosts, hostfiles, Slurm's variables, patterns and ~/.ssh/config."""

from __future__ import annotations

from pathlib import Path

import pytest

from supervisor.errors import HostError, SupervisorError
from supervisor.inventory import Host, InventoryError
from supervisor.inventory.load import build, load
from supervisor.inventory.pattern import PatternError, expand, fold
from supervisor.inventory.sources import from_hostfile, from_hosts, from_slurm, to_toml
from supervisor.launch.specs import UpOptions, make_plan
from supervisor.ssh.settings import for_hop, for_host, hops
from tests.fuzz import damages
from tests.fuzz.driver import fuzz

EXAMPLE = (Path(__file__).resolve().parents[2] / "hosts.example.toml").read_bytes()
WHOLE = b"""
[job]
workdir = "."
min_nodes = 1
max_nodes = 3
max_restarts = 2
nproc_per_node = 2
sync = true
exclude = ["*.pt"]
env = { NCCL_DEBUG = "INFO" }
node_timeout = 15.0
hang_after = 30
log_bound = "1G"

[defaults]
user = "ann"
python = "/opt/venv/bin/python"
prelude = "module load cuda"

[[hosts]]
name = "gpu[01-04]"
address = "10.0.0.[1-4]"
port = 2222
proxy_jump = "ann@gate:22,other"

[[hosts]]
name = "n9"
ssh = "n9.example.org"
spare = true
env = { SUPERVISOR_HOME = "/local/x" }

[[hooks]]
on = ["end", "failure"]
url = "https://example.org/hook"
"""
SSH_CONFIG = b"""
Host gpu* !gpu9
    HostName %h.example.org
    User ann
    Port 2222
    IdentityFile ~/.ssh/id_ed25519
    IdentitiesOnly yes
    ProxyJump gate
    ForwardAgent yes
    UserKnownHostsFile ~/.ssh/known_hosts /dev/null
Host gate
    ProxyCommand nc -X connect %h %p
    BindAddress 10.0.0.1
    AddressFamily inet
    IdentityAgent $SSH_AUTH_SOCK
    HostKeyAlias gate.example.org
Match final host gpu1
    SetEnv A=b
    SendEnv LANG LC_*
Match host "*.example.org" user ann
    StrictHostKeyChecking no
Include ~/.ssh/config.d/*
Host *
    ServerAliveInterval 30
    Compression yes
"""


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

    fuzz(run, [EXAMPLE, WHOLE], damages.of_bytes, (SupervisorError,))


def test_other_sources(tmp_path: Path) -> None:
    """The first line is the option's value, the rest a hostfile or Slurm's variables."""

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


def test_patterns() -> None:
    def run(data: bytes) -> None:
        pattern = data.decode("utf-8", "replace")
        fold(pattern.split(","))
        names = list(dict.fromkeys(expand(pattern)))
        if not any(set("[], \t\n") & set(name) or name != name.strip() for name in names):
            assert set(expand(fold(names))) == set(names)

    real = [
        b"gpu[01-16]",
        b"rack[1-2]n[1-4]",
        b"n[1,3,5-7],m[0-12/4]",
        b"a,b,c",
        b"node[001-004]-ib",
        b"10.0.[0-3].[1-9]",
    ]
    fuzz(run, real, damages.of_bytes, (PatternError,))


def test_ssh_config(home: Path) -> None:
    def run(data: bytes) -> None:
        (home / ".ssh" / "config").write_bytes(data)
        for name in ("gpu1", "gate", "other"):
            host = Host(name, ssh=name, address=name)
            settings = for_host(host)
            for hop in hops(name, settings.jump or "gate:22"):
                for_hop(host, hop)

    fuzz(run, [SSH_CONFIG, b"Host *\n    User me\n"], damages.of_bytes, (HostError,))
