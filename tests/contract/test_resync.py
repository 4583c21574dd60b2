"""The edited work tree on a running job of two real hosts: brought, started from, gone back from."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from tests.cluster import Cluster
from tests.cluster.fixtures import hosts_of
from tests.cluster.job import WAIT_S, Job
from tests.cluster.scripts import STEPS

pair = hosts_of(2, scope="function", stub_torch=True)


def said(job: Job, generation: int) -> set[tuple[str, bool]]:
    """Return what the ranks of a generation say of their code, and whether they go on from a snapshot."""
    files = [job.files(generation, rank) / "stdout.log" for rank in (0, 1)]
    found = [re.match(r"(\w+ code), .* step (\d+)\n", path.read_text()) for path in files]
    return {(line[1], line[2] != "0") for line in found if line is not None}


def test_edited_files_are_started_from_on_all_nodes_and_gone_back_from(pair: Cluster, tmp_path: Path) -> None:
    script = STEPS.replace('print(f"generation', 'print(f"old code, generation')
    work = tmp_path / "work"
    with Job(pair, work, script, nproc_per_node=1).start("--job", "edit") as job:
        job.until_step(2)
        assert said(job, 0) == {("old code", False)}
        assert f"no file of {work} has changed".encode() in job.run("restart", "--sync").stderr
        (work / "train.py").write_text(script.replace("old code", "new code"))
        (work / "lib").write_text("a file here")
        blocked = next((pair.host("n2").home / ".supervisor" / "trees").glob("work-*")) / "lib"
        blocked.mkdir()
        refused = job.run("restart", "--sync")
        assert refused.returncode == 1
        assert f"n2: sync: {blocked} is a directory on the node, but a file here" in refused.stderr.decode()
        assert "nothing is restarted" in refused.stderr.decode()
        assert not [event for event in job.journal() if event["type"] == "generation_stopped"]
        blocked.rmdir()
        plan = job.run("restart", "--sync", "--dry-run").stdout.decode()
        assert re.search(r"Code +2 files, [\d.]+ k?B: lib, train.py", plan)
        assert re.search(rf"Files +{work}\n", plan)
        shutil.copytree(work, tmp_path / "other")
        words = ["restart", "hosts.toml", "edit", "--sync", "--dry-run"]
        other = job.supervisor.run(words, tmp_path / "other", timeout=WAIT_S).stdout.decode()
        assert re.search(rf"Files +{tmp_path}/other: the job was launched from another directory\n", other)
        done = job.run("restart", "--sync")
        assert done.returncode == 0, done.stderr.decode()
        assert "generation 1 running" in done.stdout.decode()
        job.until_step(3)
        assert said(job, 1) == {("new code", True)}
        back = job.ask("restart", "--rollback")
        assert (back["outcome"]["type"], back["outcome"]["generation"]) == ("generation_running", 2)
        job.until_step(3)
        assert said(job, 2) == {("old code", True)}
        # A mistake costs no job.
        (work / "train.py").write_text("raise ValueError('typing error')")
        assert job.run("restart", "--sync").returncode == 0
        job.until("generation_running", generation=5)
        job.until_step(3)
        assert said(job, 5) == {("old code", True)}
        changes = [event["detail"] for event in job.journal() if event["type"] == "tree_changed"]
        assert [change["rollback"] for change in changes] == [False, True, False, True]
        assert changes[0]["paths"] == ["lib", "train.py"]
        assert job.run("stop").returncode == 0
        assert job.wait(WAIT_S) == 4
        versions = [host.home / ".supervisor" / "trees" / ".state" for host in pair.hosts]
        assert all(list(place.glob("*/versions")) for place in versions)
        cleaned = job.run("clean")
        assert cleaned.returncode == 0, cleaned.stderr.decode()
        assert not any(list(place.glob("*/versions")) for place in versions)
