"""Inventories that are not hosts.toml mean the same hosts, and say as clearly what is wrong with them."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import pytest

from supervisor import known
from supervisor.cli import home
from supervisor.cli.entry import main
from supervisor.cli.options import Parser, add_sources, load_inventory, source_words
from supervisor.errors import UsageError
from supervisor.inventory import InventoryError, load, local, sources

Hosts = list[tuple[str, str]]


def options(*words: str) -> argparse.Namespace:
    parser = Parser()
    add_sources(parser)
    return parser.parse_args(words)


def hosts(*words: str) -> Hosts:
    return [(host.name, host.nproc_per_node) for host in load_inventory(None, options(*words)).hosts]


@pytest.mark.parametrize(
    ("words", "said"),
    [(("--hosts", "a,b"), "--hosts a,b"), (("--hostfile", "f"), "--hostfile f"), (("--srun",), "--srun"), ((), None)],
)
def test_a_command_to_copy_names_the_source(words: tuple[str, ...], said: str | None) -> None:
    assert source_words(None, options(*words)) == said


def test_a_list_of_hosts() -> None:
    assert hosts("--hosts", "a,gpu[01-02]") == [("a", "auto"), ("gpu01", "auto"), ("gpu02", "auto")]
    found = load_inventory(None, options("--hosts", "ubuntu@10.0.0.1:2222,b"))
    assert [(host.name, host.user, host.port) for host in found.hosts] == [
        ("10.0.0.1", "ubuntu", 2222),
        ("b", None, None),
    ]
    assert found.job.workdir == Path.cwd()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("n1 slots=8\nn2 slots=4\n", [("n1", "8"), ("n2", "4")]),
        ("# a comment\n\nn1 slots=2 max_slots=4 # four at most\nn2\n", [("n1", "2"), ("n2", "auto")]),
        ("n1:2\nn2:2\n", [("n1", "2"), ("n2", "2")]),
        ("n1\nn1\nn2\n", [("n1", "auto"), ("n2", "auto")]),
        ("n1 slots=2\nn1 slots=3\n", [("n1", "5")]),
    ],
)
def test_hostfiles(tmp_path: Path, text: str, expected: Hosts) -> None:
    (tmp_path / "hostfile").write_text(text)
    assert hosts("--hostfile", str(tmp_path / "hostfile")) == expected


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"SLURM_JOB_NODELIST": "gpu[01-03]"}, [("gpu01", "auto"), ("gpu02", "auto"), ("gpu03", "auto")]),
        ({"SLURM_JOB_NODELIST": "a,b[2,4]", "SLURM_GPUS_ON_NODE": "8"}, [("a", "8"), ("b2", "8"), ("b4", "8")]),
        ({"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_GPUS_PER_NODE": "h100:4"}, [("n1", "4"), ("n2", "4")]),
        ({"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_TASKS_PER_NODE": "4(x2),2"}, [("n1", "4"), ("n2", "4"), ("n3", "2")]),
        ({"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "1(x2)"}, [("n1", "auto"), ("n2", "auto")]),
    ],
)
def test_allocations(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], expected: Hosts) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert hosts("--slurm") == expected


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--hosts", "a,,b"], "--hosts a,,b: '' is not a host"),
        (["--hosts", "gpu[1-"], "--hosts: 'gpu\\[1-': a bracket is not closed"),
        (["--hosts", "a,a"], "--hosts: .*two hosts are called a"),
        (["--hosts", "x;y@a"], "--hosts: .*a.user: 'x;y' is not a user name"),
        (["--hosts", "a$x"], r"--hosts: .*name: 'a\$x' is not 1 to 64 letters"),
        (["--hostfile", "/no/such"], "--hostfile /no/such: cannot be read: No such file"),
        (["--slurm"], "SLURM_JOB_NODELIST is not set"),
        (["--hosts", "a", "--slurm"], "--hosts and --slurm both name the hosts"),
    ],
)
def test_what_is_wrong_is_named(monkeypatch: pytest.MonkeyPatch, given: list[str], words: str) -> None:
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    with pytest.raises(UsageError, match=words):
        load_inventory(None, options(*given))


def test_an_allocation_takes_the_python_that_is_active_here(tmp_path: Path) -> None:
    python = tmp_path / "python3"
    python.write_text("")
    python.chmod(0o755)
    environ = {"SLURM_JOB_NODELIST": "n[1-2]"}
    assert sources.from_slurm(environ)["defaults"] == {"via": "auto"}
    made = sources.from_slurm({**environ, "PATH": f"/nowhere:{tmp_path}"})
    assert made["defaults"] == {"python": str(python), "via": "auto"}
    assert f'[defaults]\npython = "{python}"' in sources.to_toml(made, "an allocation")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("n1 slots=8\nn2 slots=many\n", "f:2: slots=many: must be a number above 0"),
        ("n1 slots 8\n", "f:1: cannot read 'n1 slots 8'"),
        ("# nothing\n", "f: it has no host"),
    ],
)
def test_a_hostfile_that_is_wrong_is_named_with_its_line(text: str, words: str) -> None:
    with pytest.raises(InventoryError, match=words):
        sources.from_hostfile(text, "f")


@pytest.mark.parametrize("words", [["hosts", "u@a:22,gpu[1-3]"], ["hostfile", "FILE"], ["slurm"], ["pbs"]])
def test_a_written_inventory_loads_back_to_the_same_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "rack[1-2]n[1-4],login")
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "2(x8),1")
    Path("FILE").write_text("n1 slots=8\nn2 slots=4\n")
    Path("nodes").write_text("n1.cluster\nn1.cluster\nn2.cluster\n")
    monkeypatch.setenv("PBS_NODEFILE", "nodes")
    assert main(["hosts", "--from", *words]) == 0
    Path("hosts.toml").write_text(capsys.readouterr().out)
    direct = load_inventory(None, options(f"--{words[0]}", *words[1:]))
    again = load(Path("hosts.toml"))
    assert (again.hosts, again.job) == (direct.hosts, direct.job)


def test_nodes_that_share_a_home_have_roots_of_their_own(tmp_path: Path) -> None:
    made = sources.with_own_roots({"hosts": [{"name": "n[1-2]", "nproc_per_node": 2}]}, "/home/u/.supervisor/nodes")
    (tmp_path / "hosts.toml").write_text(sources.to_toml(made, "an allocation"))
    found = [(host.name, host.nproc_per_node, host.env) for host in load(tmp_path / "hosts.toml").hosts]
    roots = [{"SUPERVISOR_HOME": f"/home/u/.supervisor/nodes/{name}"} for name in ("n1", "n2")]
    assert found == [("n1", "2", roots[0]), ("n2", "2", roots[1])]


def test_the_nodes_of_a_pbs_allocation_are_taken_once_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nodes").write_text("n1.cluster\nn1.cluster\nn2.cluster\n")
    monkeypatch.setenv("PBS_NODEFILE", str(tmp_path / "nodes"))
    assert [host["name"] for host in sources.from_pbs()["hosts"]] == ["n1.cluster", "n2.cluster"]
    monkeypatch.delenv("PBS_NODEFILE")
    with pytest.raises(InventoryError, match="PBS_NODEFILE is not set"):
        sources.from_pbs()


def test_hosts_needs_to_know_what_to_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hosts", "--from", "hostfile"]) == 2
    assert main(["hosts", "--from", "slurm", "x"]) == 2
    assert "needs an argument" in capsys.readouterr().err


def test_a_local_disk_is_not_shared(tmp_path: Path) -> None:
    assert not sources.is_shared(tmp_path)


@pytest.mark.parametrize("words", [["--slurm"], ["--srun"], ["--pbs"]])
def test_an_allocation_is_offered_inside_it_only(
    words: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A remembered allocation is none once it is over; inside one, it is there without having been used."""
    (source,) = (one for one in sources.SOURCES if one.option == words[0])
    for variable in {one.variable for one in sources.SOURCES if one.variable}:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("SUPERVISOR_HOME", str(tmp_path / "nobody"))
    known.note(dataclasses.replace(local(), words=words[0]))
    assert home.KnownJobs().asked == (0, 0)
    assert home.KnownJobs().troubles == []
    nodes = tmp_path / "nodes"
    nodes.write_text("n1\n")
    monkeypatch.setenv(source.variable, str(nodes) if source.name == "pbs" else "n1")
    assert home.KnownJobs().asked[1] > 0
    (tmp_path / "state").rename(tmp_path / "forgotten")
    assert home.KnownJobs().asked[1] > 0
