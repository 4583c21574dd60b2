"""What NCCL would tell on the nodes of a made-up job: the last but one differs in all that can differ.

In: how many nodes. Out: a Fabric, by the same code that reads real lines.
"""

from __future__ import annotations

import functools
from typing import Any

from remote_agent.diagnose.nccl import NcclProcess, node_map
from supervisor import nccl

START = "ncclCommInitRankConfig comm 0xa rank {0} nranks {1} cudaDev {2} busId 1a000 commId 0xbeef - Init START"


def _rank(node: int, local: int, nodes: int) -> NcclProcess:
    rank, world, odd = node * 8 + local, nodes * 8, node == nodes - 2
    name = "docker0" if odd else "bond0"
    lines = [
        "NCCL version 2.27.3+cuda12.9",
        f"NCCL_SOCKET_IFNAME set by environment to {name}",
        f"NCCL_IB_DISABLE set by environment to {int(odd)}",
        "NET/Plugin: Loaded net plugin NCCL RDMA Plugin v10 (v10)",
        f"NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB {name}:10.0.0.{node}<0>",
        f"Bootstrap: Using {name}:10.0.0.{node}<0>",
        f"Using network {'Socket' if odd else 'IB'}",
        START.format(rank, world, local),
        "Trees [0] 1/-1/-1->0->-1 [1] 1/-1/-1->0->-1",
        f"Channel 00/{2 if odd else 16} :    0   1   2   3",
        f"{2 if odd else 16} coll channels, 16 collnet channels, {0 if odd else 16} nvls channels, 16 p2p channels",
        "NVLS multicast support is not available on dev 0" if odd else "NVLS comm 0x1 headRank 0 nHeads 8",
        f"Channel 00/0 : {rank}[{local}] -> {rank // 8 * 8 + (local + 1) % 8}[0] via P2P/CUMEM/read",
    ]
    for peer in {(rank + 8) % world, (rank + 24) % world} - {rank}:
        # Who talks to the odd one has to do as it does.
        way = "NET/Socket/0" if odd or peer // 8 == nodes - 2 else f"NET/IB/{local}/GDRDMA"
        lines.append(f"Channel 00/0 : {rank}[{local}] -> {peer}[0] [send] via {way}")
    if odd and local == 3:
        lines.append("WARN socketPollConnect: connect returned Connection refused, exceeded error retry count (35)")
    found = NcclProcess()
    for line in lines:
        level = "" if line.startswith("WARN") else "INFO "
        found.feed(f"n{node:03d}:{4000 + rank}:{5000 + rank} [{local}] NCCL {level}{line}")
    return found


@functools.lru_cache
def sample(nodes: int) -> nccl.Fabric:
    """Return the picture of so many nodes of eight ranks, of which the last but one uses sockets."""
    answers: dict[str, Any] = {}
    for node in range(nodes):
        reported = [(node * 8 + local, _rank(node, local, nodes)) for local in range(8)]
        answers[f"n{node:03d}"] = {"generation": 1, **node_map(reported)}
    return nccl.read(answers, {rank: f"n{rank // 8:03d}" for rank in range(nodes * 8)})
