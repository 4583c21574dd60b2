"""Environments that hosts with nothing but Python build from a lock file, as a user sees them on the command line."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.agents.test_environments import BACKEND, UV
from tests.cluster import Cluster
from tests.cluster.fixtures import hosts_of
from tests.cluster.job import Job, until
from tests.cluster.scripts import STEPS
from tests.pythons import interpreters
from tests.stub import STUB

pytestmark = pytest.mark.skipif(not UV.exists(), reason="uv is not installed here")

pair = hosts_of(2)

SAYS = """
import importlib.util, sys
import torch, mine, small

later = "with later" if importlib.util.find_spec("later") else "without later"
print(f"{sys.executable} | {torch.__file__} | {mine.__file__} | {mine.WORD} | {later}", flush=True)
"""
SCRIPT = SAYS + STEPS
# A build that takes as long as a node's login says, or fails there.
SLOW = """
import os, time
time.sleep(float(os.environ.get("TEST_SLEEPS", "0")))
if "TEST_FAILS" in os.environ:
    raise SystemExit("no compiler xyz")
"""
# An agent whose job is over waits at most this long for its operators.
LINGER_S = 30.0
# A tool that is killed, and all that it has started, end within this time.
END_S = 10.0


def wheel(folder: Path, name: str, files: dict[str, str], version: str = "1.0") -> None:
    """Make a wheel by hand."""
    info = f"{name}-{version}.dist-info"
    files = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in files) + f"{info}/RECORD,,\n"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as file:
        for path, text in files.items():
            file.writestr(path, text)


class Site:
    """Two hosts with a bare Python, an index of small wheels that they reach, and the operator's project."""

    def __init__(self, cluster: Cluster, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cluster = cluster
        self.wheels = root / "wheels"
        self.work = root / "work"
        self.calls = root / "calls"
        self.bin = root / "bin"
        for folder in (self.wheels, self.work, self.bin):
            folder.mkdir()
        stub = (STUB / "torch" / "__init__.py").read_text()
        wheel(self.wheels, "torch", {"torch/__init__.py": stub}, "2.13.0+stub")
        for name in ("small", "later"):
            wheel(self.wheels, name, {f"{name}/__init__.py": ""})
        logged = self.bin / "uv"
        logged.write_text(f'#!/bin/sh\necho "$HOME $@" >> {self.calls}\nexec {UV} "$@"\n')
        logged.chmod(0o755)
        for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("PATH", str(UV.parent), prepend=os.pathsep)

    def prelude(self, *more: str, has_uv: bool = True, wheels: Path | None = None) -> str:
        """Return what a node runs before Python: the login has no uv and no index."""
        lines = [
            f"export PATH={f'{self.bin}:' if has_uv else ''}/usr/bin:/bin",
            "export UV_OFFLINE=1 UV_NO_INDEX=1 UV_CACHE_DIR=$HOME/cache",
            f"export UV_FIND_LINKS={shlex.quote(str(wheels or self.wheels))}",
            *more,
        ]
        return "; ".join(lines)

    def write(self, *needs: str, word: str = "one") -> None:
        """Write the project and its lock as a user does."""
        project = (
            f'[project]\nname = "mine"\nversion = "0.1"\nrequires-python = ">=3.9"\n'
            f"dependencies = {['torch', 'small', *needs]}\n"
            '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        )
        (self.work / "pyproject.toml").write_text(project)
        (self.work / "backend.py").write_text(SLOW + BACKEND)
        self.code(word)
        variables = {**os.environ, "UV_OFFLINE": "1", "UV_NO_INDEX": "1", "UV_FIND_LINKS": str(self.wheels)}
        subprocess.run([UV, "lock", "-q"], cwd=self.work, env=variables, check=True)

    def code(self, word: str) -> None:
        """Write the package of the tree."""
        code = self.work / "src" / "mine" / "__init__.py"
        code.parent.mkdir(parents=True, exist_ok=True)
        code.write_text(f"WORD = {word!r}\n")

    def job(
        self,
        prelude: str = "",
        hosts: dict[str, dict[str, object]] | None = None,
        script: str = SCRIPT,
        defaults: dict[str, object] | None = None,
        **job: Any,
    ) -> Job:
        """Return a job in this project."""
        made = Job(self.cluster, self.work, script)
        keys: dict[str, Any] = {"nproc_per_node": 1, "stop_grace": 3.0, "standby": "off", "environment": "uv.lock"}
        named = {"python": interpreters()["3.11"], "prelude": prelude or self.prelude(), **(defaults or {})}
        made.inventory = self.cluster.inventory(
            self.work / "hosts.toml", defaults=named, hosts=hosts, **{**keys, **job}
        )
        return made

    def environments(self, host: str) -> list[str]:
        """Return what is in a host's folder of environments, without the files that are locks."""
        folder = self.cluster.host(host).home / ".supervisor" / "environments"
        return sorted(path.name for path in folder.glob("*") if path.suffix != ".lock")

    def builds(self) -> list[str]:
        """Return the home of the node for each time that uv has filled an environment."""
        lines = [line.split() for line in self.calls.read_text().splitlines()] if self.calls.exists() else []
        return sorted(home for home, *words in lines if words[0] == "sync" or words[:2] == ["pip", "install"])


@pytest.fixture
def site(pair: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """Nothing of an earlier test's is on the hosts but the agent; nothing runs there afterwards."""
    yield Site(pair, tmp_path, monkeypatch)
    try:
        until(lambda: not [one for host in pair.hosts for one in ours(pair, host.name)], "nothing on hosts", LINGER_S)
    finally:
        for host in pair.hosts:
            for pid in ours(pair, host.name):
                os.kill(pid, signal.SIGKILL)
            for name in (".supervisor/environments", ".supervisor/jobs", ".supervisor/trees", "cache"):
                shutil.rmtree(host.home / name, ignore_errors=True)


def ours(cluster: Cluster, host: str) -> dict[int, str]:
    """Return the processes of a job on a host: agent, engine, ranks, and what builds."""
    words = (" serve ", " engine --job", "train.py", "uv", "sleep 300", " pip ", ".building", ".project")
    return {pid: line for pid, line in cluster.processes(host).items() if any(word in line for word in words)}


def said(job: Job, generation: int) -> list[list[str]]:
    """Return what each rank of a generation has said of itself, once it steps."""
    job.until("generation_running", generation=generation)
    job.until_step(0)
    texts = [(job.files(generation, rank) / "stdout.log").read_text() for rank in (0, 1)]
    return [text.splitlines()[0].split(" | ") for text in texts]


def steps(job: Job, generation: int) -> int:
    """Return the last step that rank 0 of a generation has made."""
    return int(re.findall(r"step=(\d+)", (job.files(generation, 0) / "stdout.log").read_text())[-1])


def hangs(site: Site, host: str) -> bool:
    return "sleep 300" in site.cluster.processes(host).values()


def stop(job: Job) -> None:
    assert job.run("stop").returncode == 0
    assert job.wait() == 4


def test_hosts_with_nothing_but_python(site: Site) -> None:
    site.write()
    prelude = site.prelude("export TEST_SLEEPS=4", has_uv=False)
    with site.job(prelude).start() as job:
        job.until_step(2)
        for rank, (python, torch, mine, word, later) in enumerate(said(job, 0)):
            home = site.cluster.host(rank).home / ".supervisor"
            (digest,) = site.environments(f"n{rank + 1}")
            assert re.fullmatch("[0-9a-f]{32}", digest)
            environment = home / "environments" / digest
            assert python == str(environment / "bin" / "python")
            assert torch.startswith(str(environment))
            assert Path(mine).parents[3] == home / "trees", mine
            assert (word, later) == ("one", "without later")
        stop(job)
    for host in ("n1", "n2"):
        assert re.search(rf"{host}: build: (?!looking)", job.errors()), job.errors()
    lent = {uv: uv.stat() for host in site.cluster.hosts for uv in host.home.glob(".supervisor/trees/uv.*/uv")}
    assert [uv.read_bytes() == UV.read_bytes() for uv in lent] == [True, True]
    with site.job(prelude).start() as again:
        again.until_step(1)
        stop(again)
    assert {uv: uv.stat().st_ino for uv in lent} == {uv: stat.st_ino for uv, stat in lent.items()}


def test_code_another_lock_and_the_way_back(site: Site) -> None:
    site.write()
    with site.job().start() as job:
        job.until_step(2)
        first = {host: site.environments(host) for host in ("n1", "n2")}
        site.code("two")
        done = job.run("restart", "--sync")
        assert done.returncode == 0, done.stderr.decode()
        job.until_step(2)
        assert [(word, later) for *_, word, later in said(job, 1)] == [("two", "without later")] * 2
        assert len(site.builds()) == 2, "an edit of editable code builds nothing"
        # The group runs while the next environment is built.
        site.write("later", word="three")
        slow = site.work / "backend.py"
        slow.write_text(slow.read_text().replace("def build(", "time.sleep(3)\n\ndef build(", 1))
        made = steps(job, 1)
        done = job.run("restart", "--sync")
        assert done.returncode == 0, done.stderr.decode()
        assert steps(job, 1) > made + 20, "a step takes 0.1 s, and the build more than three"
        (running,) = [event for event in job.journal() if event["type"] == "generation_running"][2:]
        stopped = [event for event in job.journal() if event["type"] == "generation_stopped"]
        assert len(stopped) == 2, running
        job.until_step(2)
        second = said(job, 2)
        assert [(word, later) for *_, word, later in second] == [("three", "with later")] * 2
        for host, python in zip(("n1", "n2"), (each[0] for each in second), strict=True):
            assert set(first[host]) < set(site.environments(host))
            assert Path(python).parents[1].name not in first[host]
        assert job.run("restart", "--rollback").returncode == 0
        job.until("generation_running", generation=3)
        job.until_step(2)
        third = said(job, 3)
        assert [(word, later) for *_, word, later in third] == [("two", "without later")] * 2
        assert [Path(python).parents[1].name for python, *_ in third] == [first[host][0] for host in ("n1", "n2")]
        assert len(site.builds()) == 4
        stop(job)
        before = job.run("clean")
        assert before.returncode == 0
        assert site.environments("n1") == site.environments("n2") == []
        assert re.search(r"[\d.]+ [kM]?B", before.stdout.decode() + before.stderr.decode()), before


def test_a_lock_that_cannot_be_built_costs_no_step(site: Site) -> None:
    site.write()
    with site.job().start() as job:
        job.until_step(2)
        site.write("later")
        (site.wheels / "later-1.0-py3-none-any.whl").rename(site.wheels / "gone")
        refused = job.run("restart", "--sync")
        errors = refused.stderr.decode()
        assert refused.returncode == 1, errors
        assert re.search(r"n1: .*later", errors), errors
        assert re.search(r"n2: .*later", errors), errors
        job.until_step(steps(job, 0) + 3)
        assert [e["generation"] for e in job.journal() if e["type"] == "generation_running"] == [0]
        # What belongs to the lock is missing: no node is left out for that, either.
        project = (site.work / "pyproject.toml").rename(site.work.parent / "aside")
        assert job.run("restart", "--sync").returncode == 1
        assert [node["state"] for node in job.ask("status")["nodes"]] == ["running", "running"]
        project.rename(site.work / "pyproject.toml")
        # The same files, once the index has the package.
        (site.wheels / "gone").rename(site.wheels / "later-1.0-py3-none-any.whl")
        assert job.run("restart", "--sync").returncode == 0
        job.until_step(2)
        assert said(job, 1)[0][-1] == "with later"
        stop(job)


@pytest.mark.parametrize("enough", [1, 2])
def test_one_node_cannot_build(site: Site, enough: int) -> None:
    site.write()
    hosts: dict[str, dict[str, object]] = {"n2": {"prelude": site.prelude("export TEST_FAILS=1")}}
    with site.job(hosts=hosts, min_nodes=enough).start() as job:
        if enough == 1:
            job.until_step(2)
            stop(job)
        else:
            assert job.wait() == 3
        assert re.search(r"n2.*build.*no compiler xyz", job.errors()), job.errors()
        assert not re.search(r"n1: build: .*no compiler", job.errors())
        assert site.environments("n2") == []


def test_ctrl_c_leaves_nothing(site: Site) -> None:
    site.write()
    hosts = [host.name for host in site.cluster.hosts]
    with site.job(site.prelude("export TEST_BUILD_HANGS=1")).start() as job:
        until(lambda: all(hangs(site, host) for host in hosts), "a build on each host")
        assert job.up is not None
        os.kill(job.up.pid, signal.SIGINT)
        code = job.wait()
        assert code == 130, (code, job.errors())
        until(lambda: not [one for host in hosts for one in ours(site.cluster, host)], "no process", END_S)
        for host in hosts:
            assert not list((site.cluster.host(host).home / ".supervisor" / "jobs").glob("*"))
            assert site.environments(host) == []


def test_nodes_that_come_back(site: Site) -> None:
    site.write()
    with site.job(min_nodes=1, max_restarts=5).start() as job:
        job.until_step(2)
        (agent,) = [pid for pid, line in site.cluster.processes("n2").items() if f" serve --job {job.name[0]}" in line]
        os.kill(agent, signal.SIGKILL)
        job.until("generation_running", generation=1)
        until(lambda: newest(job)["detail"]["world_size"] == 2, "both nodes again")
        job.until_step(1)
        assert job.run("remove", "--node", "n2").returncode == 0
        until(lambda: newest(job)["detail"]["world_size"] == 1, "one node")
        # It has to be built again.
        subprocess.run(["rm", "-rf", site.cluster.host("n2").home / ".supervisor" / "environments"], check=True)
        added = job.run("add", "--node", "n2")
        assert added.returncode == 0, added.stderr.decode()
        until(lambda: newest(job)["detail"]["world_size"] == 2, "both nodes again")
        job.until_step(1)
        generation = int(newest(job)["generation"])
        assert all(".supervisor/environments/" in python for python, *_ in said(job, generation))
        assert len(site.builds()) == 3
        stop(job)


def newest(job: Job) -> dict[str, Any]:
    return [event for event in job.journal() if event["type"] == "generation_running"][-1]


def test_no_token_is_shown(site: Site) -> None:
    """A list of requirements is resolved on the node, which asks the index; the other host has the packages."""
    (site.work / "needs.txt").write_text("torch\nsmall\n")
    index = "https://user:secret123@localhost:1/simple"
    # uv's cache is one in which nothing is.
    more = f"unset UV_OFFLINE UV_NO_INDEX UV_FIND_LINKS; export UV_CACHE_DIR=$HOME/cache/none UV_DEFAULT_INDEX={index}"
    hosts: dict[str, dict[str, object]] = {"n2": {"prelude": site.prelude(more)}}
    with site.job(hosts=hosts, script=STEPS, environment="needs.txt", min_nodes=1).start() as job:
        job.until_step(1)
        until(lambda: "n2: build: uv failed" in job.errors(), "the words of n2")
        assert "localhost:1" in job.errors(), job.errors()
        stop(job)
    files = [path for host in site.cluster.hosts for path in (host.home / ".supervisor").rglob("*") if path.is_file()]
    assert any(path.name == "agent.log" for path in files)
    files = [path for path in files if path.name != "hosts.toml"]
    assert not [path for path in (*files, job.out, job.err) if b"secret123" in path.read_bytes()]
