"""Inventories that are not hosts.toml mean the same hosts, and say as clearly what is wrong with them."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import re
import shlex
import tracemalloc
from pathlib import Path

import pytest
from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet
from hypothesis import given
from hypothesis import strategies as st

from supervisor import known
from supervisor.cli import home
from supervisor.cli.entry import main
from supervisor.cli.headless import end_of_allocation
from supervisor.cli.options import Parser, add_sources, load_inventory, source_words
from supervisor.errors import UsageError
from supervisor.inventory import Host, PatternError, expand, load, local, sources
from supervisor.inventory.pattern import fold
from supervisor.ssh import AgentFile, HostError, connect
from supervisor.ssh.srun import environment, is_node, words
from tests.fast.cases import DATA

Hosts = list[tuple[str, str]]


def options(*words: str) -> argparse.Namespace:
    parser = Parser()
    add_sources(parser)
    return parser.parse_args(words)


@pytest.mark.parametrize(
    ("words", "said"),
    [(("--hosts", "a,b"), "--hosts a,b"), (("--hostfile", "f"), "--hostfile f"), (("--srun",), "--srun"), ((), None)],
)
def test_a_command_to_copy_names_the_source(words: tuple[str, ...], said: str | None) -> None:
    assert source_words(None, options(*words)) == said


def meant(line: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The hosts that a command line of sources.txt means."""
    for variable in ("SLURM_JOB_NODELIST", "PBS_NODEFILE"):
        monkeypatch.delenv(variable, raising=False)
    given = [word.partition("=") if re.match("[A-Z_]+=", word) else word for word in shlex.split(line)]
    for one in given:
        if one[0] == "FILE":
            Path("FILE").write_text(one[2].replace("|", "\n"))
        elif isinstance(one, tuple):
            monkeypatch.setenv(one[0], one[2])
    try:
        found = load_inventory(None, options(*(word for word in given if isinstance(word, str)))).hosts
    except UsageError as refused:
        return f"refused: {refused.message}"
    return " ".join(f"{host.name}:{host.nproc_per_node}".removesuffix(":auto") for host in found)


SOURCES = [line.split(" -> ") for line in (DATA / "sources.txt").read_text().splitlines()[1:]]


@pytest.mark.parametrize(("line", "hosts"), SOURCES)
def test_which_hosts_are_named(line: str, hosts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert meant(line, monkeypatch) == hosts


def test_a_host_of_a_list_may_have_a_user_and_a_port() -> None:
    found = load_inventory(None, options("--hosts", "ubuntu@10.0.0.1:2222,b"))
    assert [(host.name, host.user, host.port) for host in found.hosts] == [
        ("10.0.0.1", "ubuntu", 2222), ("b", None, None),
    ]  # fmt: skip
    assert found.job.workdir == Path.cwd()


def test_an_allocation_takes_the_python_that_is_active_here(tmp_path: Path) -> None:
    python = tmp_path / "python3"
    python.write_text("")
    python.chmod(0o755)
    environ = {"SLURM_JOB_NODELIST": "n[1-2]"}
    assert sources.from_slurm(environ)["defaults"] == {"via": "auto"}
    made = sources.from_slurm({**environ, "PATH": f"/nowhere:{tmp_path}"})
    assert made["defaults"] == {"python": str(python), "via": "auto"}
    assert f'[defaults]\npython = "{python}"' in sources.to_toml(made, "an allocation")


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


def test_hosts_needs_to_know_what_to_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hosts", "--from", "hostfile"]) == 2
    assert main(["hosts", "--from", "slurm", "x"]) == 2
    assert "needs an argument" in capsys.readouterr().err


def test_a_local_disk_is_not_shared(tmp_path: Path) -> None:
    assert not sources.is_shared(tmp_path)


@pytest.mark.parametrize("words", [["--slurm"], ["--srun"], ["--pbs"]])
def test_an_allocation_is_offered_inside_it(words: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("variable", "said"),
    [
        ("SLURM_JOB_ID", "Slurm ends allocation 7 (SIGTERM)"),
        ("PBS_JOBID", "PBS ends allocation 7 (SIGTERM)"),
        ("OTHER", "the allocation ends (SIGTERM)"),
    ],
)
def test_who_ends_an_allocation_is_named(variable: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "PBS_JOBID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, "7")
    assert end_of_allocation() == said


# Node-set patterns: written order, zero padding, mistakes; the same names as ClusterShell where that can tell.


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("n1", ["n1"]), ("n[1-3]", ["n1", "n2", "n3"]), ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("n[0-12/4]", ["n0", "n4", "n8", "n12"]), ("n[3,1,7-8]", ["n3", "n1", "n7", "n8"]),
        ("b1,a[1-2]", ["b1", "a1", "a2"]), ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("10.0.[0-1].5", ["10.0.0.5", "10.0.1.5"]), ("fd00::[1-2]", ["fd00::1", "fd00::2"]), ("n[007]", ["n007"]),
    ],
)  # fmt: skip
def test_names_come_in_written_order(pattern: str, names: list[str]) -> None:
    assert expand(pattern) == names


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("n[", "not closed"), ("n]", "do not match"), ("n[[1]]", "do not match"), ("n[]", "not a list of numbers"),
        ("n[a-c]", "not a list of numbers"), ("n[1-]", "not a list of numbers"),
        ("n[3-1]", "runs backwards; write 1-3"), ("n[08-100]", "mixes widths; write 008-100"),
        ("n[1-3/0]", "step 0"), ("a,,b", "an empty name"), ("", "an empty name"),
        ("n[1-10000000]", "more than 4096"), ("n[1-100]x[1-100]", "more than 4096"),
        (",".join(["n[1-4000]"] * 2), "more than 4096"), ("n[" + ",".join(["1-4096"] * 2) + "]", "more than 4096"),
        ("n" + "[1-4096]" * 2, "more than 4096"), ("n[" + "1" * 5000 + "]", "not a list of numbers"),
        ("n[1-4]" + "9" * 300, "a name is longer than 255 characters"),
    ],
)  # fmt: skip
def test_mistakes_are_named(pattern: str, message: str) -> None:
    with pytest.raises(PatternError, match=message):
        expand(pattern)


def test_a_pattern_that_means_too_many_names_costs_no_memory() -> None:
    tracemalloc.start()
    try:
        for pattern in ("n[" + ",".join(["1-4096"] * 500) + "]", "n" + "[1-4096]" * 500):
            with pytest.raises(PatternError, match="more than 4096") as refused:
                expand(pattern)
            assert len(str(refused.value)) < 200
        _size, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8_000_000


_range = st.builds(
    lambda low, more, step: f"{low}-{low + more}/{step}", st.integers(0, 200), st.integers(0, 15), st.integers(1, 4)
)
_padded = st.builds(lambda low, more: f"{low:02}-{low + more:02}", st.integers(0, 80), st.integers(0, 15))
_bracket = st.lists(_range, min_size=1, max_size=3).map(",".join) | _padded


@given(st.lists(_bracket, min_size=1, max_size=2))
def test_the_names_are_those_of_clustershell(brackets: list[str]) -> None:
    pattern = "n" + "x".join(f"[{bracket}]" for bracket in brackets)
    assert set(expand(pattern)) == set(NodeSet(pattern, resolver=RESOLVER_NOGROUP))


def test_names_with_numbers_that_nobody_writes_are_shown_as_they_are() -> None:
    long = "n" + "9" * 50_000
    assert fold([long, "n1", "n2", "n\u0663", "n1x" * 20_000]) == f"n[1-2],{'n1x' * 20_000},{long},n\u0663"


# What srun is asked: one step with all of a node, whatever the allocation says of other steps.


pytestmark = pytest.mark.usefixtures("ssh_home")

HOST = Host(name="a", ssh="n1", address="n1", via="srun")


def test_options_for_other_steps_do_not_reach_ours() -> None:
    kept = {
        "PATH": "/bin", "SLURM_JOB_ID": "7", "SLURM_CONF": "/c", "SLURM_SUBMIT_DIR": "/d",
        "SLURM_ARRAY_TASK_ID": "1",
    }  # fmt: skip
    dropped = {"SLURM_LABELIO": "1", "SLURM_MEM_PER_CPU": "9", "SRUN_CPUS_PER_TASK": "2", "SLURM_EXPORT_ENV": "NONE"}
    assert environment({**kept, **dropped}) == kept


@pytest.mark.parametrize(("environ", "gpus"), [({}, []), ({"SLURM_GPUS_ON_NODE": "8"}, ["--gpus-per-node=8"])])
def test_a_step_has_all_of_its_node(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], gpus: list[str]) -> None:
    for name, value in {"SLURM_JOB_ID": "7", **environ}.items():
        monkeypatch.setenv(name, value)
    line = words(HOST, "env x", "--unbuffered")
    assert line[:2] == ["srun", "--jobid=7"]
    assert line[-4:] == ["--unbuffered", "sh", "-c", "exec env x"]
    assert {"--overlap", "--nodelist=n1", "--nodes=1", "--ntasks=1", "--cpu-bind=none", "--mem=0"} < set(line)
    assert [word for word in line if "gpus" in word] == gpus


def test_srun_that_fails_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, agent: AgentFile) -> None:
    async def reason() -> str:
        with pytest.raises(HostError) as caught:
            await connect(HOST, agent=agent)
        return str(caught.value)

    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert asyncio.run(reason()).startswith("a: connect: srun: SLURM_JOB_ID is not set")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    (tmp_path / "srun").write_text("#!/bin/sh\necho srun: error: no such node >&2\nexit 1\n")
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    said = "a: python: srun exited with code 1 before the agent ran; it printed: srun: error: no such node"
    assert asyncio.run(reason()).startswith(said)


@pytest.mark.parametrize(
    ("ssh", "is_reached"), [("n1", True), ("n2.cluster", True), ("n3", False), ("login", False), ("10.0.0.1", False)]
)
def test_srun_stands_in_for_ssh_only_on_nodes_of_the_allocation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ssh: str, is_reached: bool
) -> None:
    (tmp_path / "srun").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    host = dataclasses.replace(HOST, ssh=ssh)
    assert is_node(host) == is_reached
    monkeypatch.delenv("SLURM_JOB_NODELIST")
    assert not is_node(host)
