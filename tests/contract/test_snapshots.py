"""Three hosts and a spare with a disk each, rank 0 the only saver: its host loses power and disk, the job goes on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from remote_agent.snapshots.rules import Verdict, judge
from remote_agent.snapshots.scan import scan
from tests.bench.resume import LIGHT, ONE, SAVER, burn, copies, start
from tests.cluster import Cluster
from tests.cluster.fixtures import hosts_of
from tests.cluster.job import until

hosts = hosts_of(4, scope="function", stub_torch=True)
SAVES = """
import torch, torch.distributed.checkpoint as dcp
state = {"weights": torch.rand(5000)}
torch.save(state, "snapshot.pt")
dcp.save(state, checkpoint_id="sharded", no_dist=True)
"""


def test_what_torch_itself_saves_is_complete(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", SAVES], cwd=tmp_path, check=True, timeout=120)
    found = scan(tmp_path, ["snapshot.pt", "sharded"]).snapshots
    assert [judge(one) for one in found] == [Verdict("torch", True), Verdict("dcp", True)]


def test_the_only_savers_host_burns_and_the_job_resumes_at_its_last_complete_snapshot(
    hosts: Cluster, tmp_path: Path
) -> None:
    """`python -m tests.bench.resume` does it at random moments, and with other ways to save."""
    with start(hosts, tmp_path, SAVER.format(form=LIGHT, savers=ONE), ["snapshot.pt"]) as job:
        job.until("generation_running")
        until(lambda: copies(hosts, without="n1"), "a copy")
        back = burn(hosts, job, "n1")
        # Saved at 49, 99, …
        assert back["step"] > 0
        assert back["step"] % 50 == 0
        # Each save lets the oldest one go.
        for name in ("n2", "n3", "n4"):
            for tree in hosts.host(name).home.glob(".supervisor/trees/work-*"):
                (tree / "quiet").touch()
        # It was the coordinator, too: the others know what its ranks said last.
        (said,) = job.until("node_lost", generation=0, node="n1")["detail"]["said"]
        texts = [line["text"] for line in job.ask("status")["incident"]["evidence"]]
        assert f"last output on n1: {said[1]}" in texts
        # Without power it would be waited for by each verb.
        hosts.boot("n1")
        kept = back["id"]
        assert kept in [one["id"] for one in job.ask("snapshots")["snapshots"]]
        pulled = job.run("snapshots", "--pull", kept, "-o", str(tmp_path / "pulled.pt"))
        assert pulled.returncode == 0, pulled.stderr.decode()
        assert (tmp_path / "pulled.pt").stat().st_size > 2_000_000
        restarted = job.run("restart", "--from", kept)
        assert restarted.returncode == 0, restarted.stderr.decode()
        assert job.until("snapshots_chosen", generation=2)["detail"]["snapshots"][0]["id"] == kept
        job.finish()
        assert job.wait() == 0, job.errors()
