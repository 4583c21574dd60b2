"""What NCCL tells of its network: read per rank, joined over nodes, and what is odd in it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from remote_agent.diagnose.nccl import NcclProcess, node_map
from supervisor import nccl
from supervisor.wording.status import fabric_lines

CORPUS = Path(__file__).resolve().parents[3] / "shared" / "corpus" / "nccl"
START = (
    "ncclCommInitRankConfig comm 0xa{pid} rank {rank} nranks {nranks} cudaDev 0 busId 1a000 commId {id} - Init START"
)


def reported(host: str, pid: int, *lines: str) -> NcclProcess:
    """What a process told, each line with NCCL's own head."""
    found = NcclProcess()
    for line in lines:
        found.feed(f"{host}:{pid}:{pid + 1} [0] NCCL {'' if line.startswith('WARN ') else 'INFO '}{line}")
    return found


def modern(rank: int, *lines: str, version: str = "2.27.3+cuda12.9", network: str = "IB") -> NcclProcess:
    """A rank of a job of four, one communicator."""
    start = START.format(pid=rank, rank=rank, nranks=4, id="0xbeef")
    devices = "NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.1<0>"
    return reported("h", 100 + rank, f"NCCL version {version}", devices, f"Using network {network}", start, *lines)


def link(src: int, dst: int, how: str, side: str = "") -> str:
    """One line of a connection."""
    return f"Channel 00/0 : {src}[0] -> {dst}[1] {side}via {how}"


def documents(*nodes: dict[int, NcclProcess]) -> dict[str, Any | None]:
    """What the nodes n1, n2 … answer."""
    return {f"n{at}": {"generation": 1, **node_map(ranks.items())} for at, ranks in enumerate(nodes, 1)}


def test_two_nodes_of_which_one_differs() -> None:
    n1 = {
        0: modern(0, link(0, 1, "P2P/CUMEM/read"), link(0, 2, "NET/IB/0(1)/GDRDMA/Shared", "[send] ")),
        1: modern(
            1, link(1, 0, "P2P/CUMEM"), "NVLS multicast support is available on dev 1", "NVLS comm 0x1 headRank 0"
        ),
    }
    n2 = {
        2: modern(2, link(2, 3, "SHM/direct/direct"), link(0, 2, "NET/Socket/0", "[receive] "), network="Socket"),
        3: modern(3, "NCCL_SOCKET_IFNAME set by environment to eth0", version="2.26.2+cuda12.8"),
    }
    found = nccl.read(documents(n1, n2), {0: "n1", 1: "n1", 2: "n2", 3: "n2"})
    assert found.pairs[("n1", "n1")] == {"P2P/CUMEM": 2}
    assert found.pairs[("n1", "n2")] == {"NET/IB/GDRDMA": 1, "NET/Socket": 1}
    assert found.pairs[("n2", "n2")] == {"SHM/direct": 1}
    assert found.nodes["n1"]["nvls"] == "on"
    assert found.nodes["n2"]["version"] == "2.27.3+cuda12.9 + 2.26.2+cuda12.8"
    texts = [odd.text for odd in found.odd]
    assert "n2 uses TCP sockets though it has mlx5_0:1/IB mlx5_1:1/IB" in texts
    assert "its ranks do not agree on the version: 2.27.3+cuda12.9 + 2.26.2+cuda12.8" in texts
    assert "n1 and n2 communicate over NET/IB/GDRDMA and NET/Socket" in texts
    assert found.env["NCCL_SOCKET_IFNAME"] == {"eth0": ("n2",)}


def test_wrong_choices_of_a_node_are_reported() -> None:
    def node(*ranks: int, interface: str = "eth0", more: str = "") -> dict[int, NcclProcess]:
        lines = (f"Bootstrap: Using {interface}:172.17.0.2<0>", "Using network Socket", more)
        return {rank: reported("h", rank + 1, *lines) for rank in ranks}

    texts = {
        odd.text: odd
        for odd in nccl.read(
            documents(
                node(0),
                node(1, interface="docker0"),
                node(2, more="NVLS multicast support is not available on dev 0 (NVLS_NCHANNELS 0)"),
            ),
            {0: "n1", 1: "n2", 2: "n3"},
        ).odd
    }
    assert texts["n2 chose docker0, which leads to no other machine"].nodes == ("n2",)
    assert "NCCL_SOCKET_IFNAME" in texts["n2 chose docker0, which leads to no other machine"].hint
    assert texts["interface docker0 on n2, most have eth0"].severity == "info"
    # A fact that other nodes do not tell is no difference.
    assert not any("NVLS" in text for text in texts)


def test_other_facts_of_a_line() -> None:
    found = reported(
        "h",
        1,
        "Channel 00/24 :    0   1   2   3",
        "Trees [0] 1/-1/-1->0->-1 [1] 2/3/-1->1->0",
        "NET/IB: Dev 0 Port 1 qpn 117 mtu 5 GID 3 (80FE/E4F)",
        "NET/IB : GPU Direct RDMA Disabled for HCA 0 'rocep1s0f0'",
        "Failed to open libibverbs.so[.1]",
        "24 coll channels, 24 collnet channels, 0 nvls channels, 32 p2p channels, 32 p2p channels per peer",
        "NCCL_PROTO set by environment to simple.",
        "TUNER/Plugin: Using tuner plugin nccl_ofi_tuner",
    )
    found.feed("x" * 1_000_000 + " NCCL INFO Using network Later")
    assert found.result()["facts"] == {
        "rings": 24,
        "trees": 2,
        "gid": "3",
        "gdr_off": True,
        "no_verbs": "libibverbs.so[.1]",
        "channels": 24,
        "nvls": False,
        "tuner": "nccl_ofi_tuner",
        "env": {"NCCL_PROTO": "simple"},
    }


def test_nvls_is_off_where_no_communicator_has_channels_for_it() -> None:
    def nvls(*counts: int) -> object:
        lines = (f"{count + 2} coll channels, {count} nvls channels, 2 p2p channels" for count in counts)
        return reported("h", 1, *lines).result()["facts"].get("nvls")

    assert [nvls(), nvls(0), nvls(0, 16), nvls(16, 0)] == [None, False, True, True]


def test_ranks_of_other_communicators_are_those_of_the_job() -> None:
    # Ranks 1 and 3 are 0 and 1 of a communicator of two.
    def rank(number: int, inside: int, *lines: str) -> NcclProcess:
        start = START.format(pid=f"b{number}", rank=inside, nranks=2, id="0xfeed")
        return modern(number, start, *lines)

    answers = documents({0: modern(0), 1: rank(1, 0, link(0, 1, "NET/IB/0", "[send] "))}, {2: modern(2), 3: rank(3, 1)})
    assert nccl.read(answers, {}).pairs == {("n1", "n2"): {"NET/IB": 1}}


def test_versions_that_name_a_communicator_last() -> None:
    def old(rank: int, *lines: str) -> NcclProcess:
        return reported("h", rank + 1, *lines)

    done = "comm 0x7f{0} rank {0} nranks 2 cudaDev 0 busId 1a000 - Init COMPLETE"
    other = "comm 0x8f{0} rank 0 nranks 1 cudaDev 0 busId 1a000 - Init COMPLETE"
    answers = documents(
        {0: old(0, "Channel 00 : 0[1a000] -> 1[1c000] [send] via NET/IB/0", done.format(0))},
        {1: old(1, "Channel 01 : 1[1c000] -> 0[1a000] via direct shared memory", done.format(1), other.format(1))},
    )
    assert nccl.read(answers, {}).pairs == {("n1", "n2"): {"NET/IB": 1, "SHM/direct": 1}}


def test_a_plug_ins_name_is_whole() -> None:
    ways = ("NET/AWS Libfabric/0/GDRDMA", "NET/IBext_v8/1(2)/GDRDMA/Shared", "NET/GCP-FasTrak/0", "SHM/direct/direct")
    one = {0: modern(0, *(link(0, 1, way) for way in ways), network="AWS Libfabric")}
    found = nccl.read(documents(one, {1: modern(1, network="NCCL RDMA Plugin v8")}), {0: "n1", 1: "n2"})
    assert set(found.pairs["n1", "n2"]) == {
        "NET/AWS Libfabric/GDRDMA", "NET/IBext_v8/GDRDMA", "NET/GCP-FasTrak", "SHM/direct",
    }  # fmt: skip
    assert [facts["network"] for facts in found.nodes.values()] == ["AWS Libfabric", "NCCL RDMA Plugin v8"]


def test_warnings_have_a_meaning_and_silent_nodes_are_named() -> None:
    refused = "WARN socketPollConnect: connect returned Connection refused, exceeded error retry count (35)"
    answers: Any = {**documents({0: modern(0, refused)}, {}), "n3": None}
    found = nccl.read(answers, {0: "n1", 1: "n2", 2: "n3"})
    assert [(one.meaning, one.ranks) for one in found.warned] == [
        ("a peer's process is gone, or a firewall blocks it", {0: "n1"})
    ]
    assert (found.silent, found.unanswered) == (["n2"], ["n3"])
    lines = fabric_lines(found)
    assert lines[0] == "nccl: 2.27.3+cuda12.9, network IB"
    assert lines[-1] == "  missing: n3 did not answer; n2 no NCCL output"
    assert fabric_lines(nccl.read({"n1": {"generation": -1, "stamp": ""}}, {})) == []


def test_the_corpus_of_real_logs() -> None:
    """What each process tells, together, is what people read in the log."""
    if not CORPUS.is_dir():
        pytest.skip("no corpus here")
    for entry in json.loads((CORPUS / "index.json").read_text()):
        processes: dict[str, NcclProcess] = {}
        process = ""
        for line in (CORPUS / entry["file"]).read_text(errors="replace").splitlines():
            head = re.search(r"[A-Za-z0-9][\w.-]*:\d+(?=:\d+ \[)", line)
            process = head[0] if head else process
            processes.setdefault(process, NcclProcess()).feed(line)
        answers = [found.result() for found in processes.values()]
        facts = [answer["facts"] for answer in answers]
        assert {fact["network"] for fact in facts if "network" in fact} == set(entry["network"]), entry["file"]
        assert {one for fact in facts for one in fact.get("devices", ())} == set(entry["ib_devices"]), entry["file"]
        assert {fact["interface"] for fact in facts if "interface" in fact} >= set(entry["interfaces"]), entry["file"]
        assert {fact["version"] for fact in facts if "version" in fact} <= set(entry["nccl_version"]), entry["file"]
        kinds = {kind.partition("/GDRDMA")[0] for answer in answers for *_, kind, _ in answer["links"]}
        assert {kind.partition("/")[0] for kind in kinds} <= {kind.partition("/")[0] for kind in entry["transports"]}
