"""How a script of PyTorch's fault-tolerance tutorial is used: other sizes on the way, unequal hosts, many jobs."""

from __future__ import annotations

import contextlib
import re
import subprocess
from pathlib import Path

from tests.cluster import Cluster
from tests.cluster.fixtures import hosts_of
from tests.cluster.job import Job
from tests.cluster.scripts import STEPS
from tests.examples import nightly

# Where torch would meet the other rank there is this job's own store, while all the others are there too.
MEETS = """
import os, socket, sys, time
from pathlib import Path

place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
socket.create_connection(place, 30).close()
print("met", os.environ["TORCHELASTIC_RUN_ID"], *place, flush=True)
Path(sys.argv[1], f"{os.environ['TORCHELASTIC_RUN_ID']}.{os.environ['RANK']}").touch()
while len(os.listdir(sys.argv[1])) < 10:
    time.sleep(0.1)
"""


hosts = hosts_of(4, stub_torch=True)


def test_four_unequal_hosts_then_two_then_four_from_the_snapshot(hosts: Cluster, tmp_path: Path) -> None:
    sizes = {"hosts": {"n1": {"nproc_per_node": 2}}, "nproc_per_node": 1, "min_nodes": 2}
    with Job(hosts, tmp_path / "work", STEPS, **sizes).start("--nnodes", "2:4") as job:
        job.until_step(1)
        assert job.run("remove", "--node", "n[3-4]").returncode == 0
        job.until_step(1)
        assert job.run("add", "--node", "n3,n4").returncode == 0
        job.until_step(1)
        first = (job.files(2, 0) / "stdout.log").read_text().splitlines()[0]
        assert re.fullmatch("generation 2 rank 0 of 5 starts at step [1-9][0-9]*", first)
        job.finish()
        assert job.wait() == 0, job.errors()
        groups = [one["detail"] for one in job.journal() if one["type"] == "generation_started"]
        sizes_of = [{member["node"]: member["nproc"] for member in group["members"]} for group in groups]
        all_of_them = {"n1": 2, "n2": 1, "n3": 1, "n4": 1}
        assert sizes_of == [all_of_them, {"n1": 2, "n2": 1}, all_of_them]
        assert {group["restarts"] for group in groups} == {0}


@nightly
def test_five_jobs_at_once_do_not_disturb_each_other(hosts: Cluster, tmp_path: Path) -> None:
    names = [f"job{number}" for number in range(5)]
    pairs = [("n1", "n2"), ("n3", "n4"), ("n1", "n3"), ("n2", "n4"), ("n1", "n4")]
    here = tmp_path / "here"
    here.mkdir()
    with contextlib.ExitStack() as stack:
        jobs = [
            stack.enter_context(
                Job(hosts, tmp_path / name, MEETS, str(here), nproc_per_node=1, only=pairs[number]).start("--job", name)
            )
            for number, name in enumerate(names)
        ]
        try:
            assert [job.wait() for job in jobs] == [0] * 5, [job.errors()[-300:] for job in jobs]
            places = set()
            for name, job in zip(names, jobs, strict=True):
                first, second = (line.partition("| ")[2] for line in job.out.read_text().splitlines())
                assert first == second
                assert first.startswith(f"met {name} ")
                places.add(first.removeprefix(f"met {name} "))
            assert len(places) == 5
        finally:
            for job in jobs:
                if job.up is not None and job.up.poll() is None:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        job.run("stop", timeout_s=60)
