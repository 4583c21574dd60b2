"""A first job on machines as they are: their own names resolve to loopback, and to no other machine."""

from __future__ import annotations

from pathlib import Path

from tests.cluster import Cluster
from tests.cluster.fixtures import hosts_of
from tests.cluster.job import Job

SUM = """
import torch
from torch import distributed
distributed.init_process_group("gloo")
one = torch.ones(1)
distributed.all_reduce(one)
print(f"sum={one.item():g}")
distributed.destroy_process_group()
"""

hosts = hosts_of(2, resolve=False, agent=False)


def test_gloo_connects_hosts_whose_names_lead_to_loopback(hosts: Cluster, tmp_path: Path) -> None:
    with Job(hosts, tmp_path / "work", SUM, nproc_per_node=1, max_restarts=0).start() as job:
        assert job.wait() == 0, job.errors()[-3000:]
        assert job.out.read_text().count("sum=2") == 2
        warning = job.until("warning")
        assert warning["detail"]["kind"] == "interface"
        assert "resolves to 127.0.1.1: the workers use eth0 instead" in warning["detail"]["message"]
