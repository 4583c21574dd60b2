"""The facts of NCCL that `supervisor diagnose` reads: names as they are, and nothing that no line tells."""

from __future__ import annotations

from typing import Any

import pytest

from remote_agent.diagnose.nccl import NcclText


def nccl_of(*texts: str) -> Any:
    facts = NcclText()
    for text in texts:
        facts.feed(text if ":20 [0]" in text else f"h1:10:20 [0] NCCL INFO {text}")
    found = facts.result()
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("line", "network", "transports"),
    [
        ("Using network AWS Libfabric", "AWS Libfabric", []),
        ("Using network NCCL RDMA Plugin v8", "NCCL RDMA Plugin v8", []),
        # Two processes that write at once, and people who write beside a line.
        ("Using network IB H2:1:2 [0] NCCL INFO Connected all rings", "IB", []),
        ("Using network Socket NCCL version 2.21.5+cuda12.4", "Socket", []),
        ("Using network IBext      # The plug-in", "IBext", []),
        ("Channel 00/0 : 0[0] -> 8[0] [send] via NET/AWS Libfabric/0/GDRDMA", None, ["NET/AWS Libfabric", "GDRDMA"]),
        ("Channel 00/0 : 1[1] -> 2[2] [receive] via NET/IBext_v8/0(1)/GDRDMA", None, ["NET/IBext_v8", "GDRDMA"]),
        ("Channel 00/0 : 1[1] -> 2[2] [receive] via NET/Socket comm 0x1 nRanks 02", None, ["NET/Socket"]),
        ("Channel 00 : 1[1000] -> 0[2000] via direct shared memory", None, ["SHM/direct"]),
        ("Channel 00 : 1[1000] -> 0[2000] via P2P/direct pointer", None, ["P2P/direct pointer"]),
    ],
)
def test_names_of_networks_and_transports(line: str, network: str | None, transports: list[str]) -> None:
    found = nccl_of(line)
    assert (found["networks"], found["transports"]) == ([network] if network else [], transports)


def test_an_interface_counts_if_a_channel_of_its_host_uses_it() -> None:
    lines = [
        "h1:10:20 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0> [1]eth1:10.1.0.1<0> [2]eth2:10.2.0.1<0>",
        "h2:10:20 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.2<0> [1]veth7:10.9.0.1<0>",
        "h2:10:20 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [send] via NET/Socket/0",
    ]
    assert nccl_of(*lines)["interfaces"] == ["eth0"]
    used = "h1:10:20 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[0] [send] via NET/Socket/1/Shared"
    assert nccl_of(*lines, used)["interfaces"] == ["eth0", "eth1"]
    assert nccl_of(*lines, used.replace("Socket/1", "Socket/7"))["interfaces"] == ["eth0"]


@pytest.mark.parametrize(("counts", "nvls"), [((), None), ((0,), False), ((0, 16, 0), True)])
def test_nvls_follows_from_its_channels(counts: tuple[int, ...], nvls: bool | None) -> None:
    lines = [f"16 coll channels, 16 collnet channels, {count} nvls channels, 16 p2p channels" for count in counts]
    assert nccl_of("NCCL_NVLS_ENABLE set by environment to 0.", *lines)["nvls"] is nvls
