"""What NCCL tells of its network: read per rank, joined over nodes, and who is the odd one out."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from remote_agent.diagnose.nccl import NcclProcess, NcclText, node_map
from supervisor import nccl
from supervisor.cli.hosts import lines
from supervisor.errors import HostFailure
from supervisor.inventory.pattern import expand, fold
from supervisor.link.view import HostView
from supervisor.preflight import probe
from supervisor.preflight.oddities import findings, matrix, quick
from supervisor.preflight.probe import Preflight
from supervisor.wording.status import fabric_lines
from tests.fast.cases import DATA, Case, read_cases
from tests.fast.waiting import some

CORPUS = Path(__file__).resolve().parents[3] / "shared" / "corpus" / "nccl"


def shown(found: nccl.Fabric) -> list[str]:
    """All that is known of a fabric, and what `status` says of it."""
    lines = [f"{one} - {other}: {dict(ways)}" for (one, other), ways in sorted(found.pairs.items())]
    lines += [f"{node}: {facts}" for node, facts in found.nodes.items()]
    lines += [f"{odd.severity} {' '.join(odd.nodes)}: {odd.text} ({odd.hint})" for odd in found.odd]
    lines += [f"warned: {one.text} = {one.meaning}: {one.ranks}" for one in found.warned]
    lines += [f"{name}: {values}" for name, values in found.env.items()]
    return [*lines, f"silent: {found.silent}, not answered: {found.unanswered}", *fabric_lines(found)]


def of_node(text: str) -> dict[str, Any] | None:
    """What a node answers whose ranks have printed this."""
    processes: dict[int, NcclProcess] = {}
    for rank, _, line in (each.partition(" ") for each in text.splitlines()):
        if rank == "no":
            return None
        processes.setdefault(int(rank), NcclProcess()).feed(line)
    return {"generation": 1, **node_map(processes.items())}


@pytest.mark.parametrize("case", read_cases("fabrics.txt"), ids=lambda case: case.fields[0])
def test_the_fabric_that_follows_from_what_nccl_tells(case: Case) -> None:
    *nodes, (_, fabric) = case.blocks
    ranks = {line.split()[0]: name for name, text in nodes for line in text.splitlines() if line[0].isdigit()}
    where = {int(rank): name for rank, name in ranks.items()} if len(case.fields) == 1 else {}
    answers: Any = {name: of_node(text) for name, text in nodes}
    assert [line.rstrip() for line in shown(nccl.read(answers, where))] == fabric.splitlines()


def test_without_output_of_nccl_nothing_is_shown() -> None:
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
        facts: list[Any] = [found.facts() for found in processes.values()]
        assert {fact["network"] for fact in facts if "network" in fact} == set(entry["network"]), entry["file"]
        assert {one for fact in facts for one in fact.get("devices", ())} == set(entry["ib_devices"]), entry["file"]
        assert {fact["interface"] for fact in facts if "interface" in fact} >= set(entry["interfaces"]), entry["file"]
        assert {fact["version"] for fact in facts if "version" in fact} <= set(entry["nccl_version"]), entry["file"]
        kinds = {kind.partition("/GDRDMA")[0] for found in processes.values() for *_, kind, _ in found.links()}
        assert {kind.partition("/")[0] for kind in kinds} <= {kind.partition("/")[0] for kind in entry["transports"]}


# The facts of NCCL that `supervisor diagnose` reads: names as they are, and nothing that no line tells.


def nccl_of(*texts: str) -> Any:
    facts = NcclText()
    for text in texts:
        facts.feed(text if ":20 [0]" in text else f"h1:10:20 [0] NCCL INFO {text}")
    return some(facts.result())


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


# The odd one out among many, and the bad node among pairs.


def facts(**changes: Any) -> Any:
    return {
        "python": "3.11.7", "executable": "/opt/torch/bin/python",
        "torch": {"torch": "2.13.0+cu128", "cuda": "12.8", "nccl": "2.27.3", "gpu_names": ["NVIDIA H100"] * 8},
        "driver": "570.1", "gpu_processes": [], "env": {"NCCL_DEBUG": "WARN"}, "disk_free": {"/home/u": 10**12},
        "shm": {"total": 10**11, "free": 10**11}, "memlock": None, "open_files": 65536, "load": 1.0, "cpu_count": 64,
        "live_jobs": [], "left_over": [], "remarks": [], "sockets": {"kind": "", "message": ""}, "code": None,
        "clock_offset_ms": 0.3, "clock_error_ms": 0.4, **changes,
    }  # fmt: skip


def cluster(odd: dict[str, Any], count: int = 64) -> Preflight:
    names = [f"gpu{number:02}" for number in range(1, count + 1)]
    return Preflight(
        facts={name: facts(**odd.get(name, {})) for name in names}, addresses={name: name for name in names}
    )


def test_nodes_that_are_alike_are_fine() -> None:
    found = cluster({})
    assert findings(found) == []
    assert lines(found, matrix(found), [])[-1] == "64 hosts, no problems found"


def test_a_check_ends_with_what_a_launch_would_come_to() -> None:
    def last(found: Preflight) -> list[str]:
        problems = findings(found)
        return lines(found, matrix(found), problems)[-1:] + [line for line in lines(found, [], []) if "refused" in line]

    broken = {"torch": {"error": "No module named 'torch'"}}
    assert last(cluster({"gpu07": {"driver": "535.2"}})) == ["a job on these hosts would start: 1 warning"]
    # What is only worth knowing is no reason.
    assert last(cluster({"gpu07": {"load": 200.0}})) == ["a job on these hosts would start"]
    (failing,) = last(cluster({"gpu07": broken}))
    assert failing.startswith("a job on these hosts would fail: ")
    assert " on gpu07, " in failing
    found = cluster({}, 2)
    for name in ("n1", "n2", "n3"):
        found.unreachable[name] = HostFailure(name, "connect", "connection refused", "is sshd running there?")
    assert last(found) == [
        "a job on these hosts would fail: 3 of 5 hosts unusable (n[1-3])",
        "error    n[1-3]: connect: connection refused (is sshd running there?)",
    ]


ODD = [line.split(" -> ") for line in (DATA / "oddities.txt").read_text().splitlines()[1:]]


@pytest.mark.parametrize(("changes", "said"), ODD)
def test_the_odd_one_among_64_is_named(changes: str, said: str) -> None:
    severity, _, words = said.partition(": ")
    found = cluster({"gpu07": json.loads(changes)})
    told = findings(found)
    assert [(one.severity, one.nodes) for one in told if words in one.text] == [(severity, ("gpu07",))]
    assert told[0].severity == max((one.severity for one in told), key=["info", "warning", "error"].index)
    assert all(len(line) <= 150 for line in lines(found, matrix(found), told))


def test_a_launch_warns_of_what_it_sees_anyway() -> None:
    hello: Any = {"python": "3.11.7", "home": "/home/u/.supervisor", "disk_free": 10**12, "shm_free": 10**11}
    hello |= {"clock_offset_ms": 0.2, "clock_error_ms": 0.1}
    engine: Any = {"torch": "2.13.0+cpu", "cuda": None, "nccl": None}
    views = [HostView(f"n{number}", hello=hello, engine=engine) for number in range(1, 5)]
    assert quick(views) == []
    views[1].engine = engine | {"torch": "2.12.0+cpu"}
    views[1].script = "0123456789ab"
    views[2].hello = hello | {"disk_free": 10**8, "shm_free": 64 * 2**20}
    views[3].hello = hello | {"clock_offset_ms": -7000.0}
    assert [(one.fact, one.nodes) for one in quick(views)] == [
        ("torch", ("n2",)), ("code", ("n2",)), ("clock", ("n4",)), ("disk", ("n3",)), ("/dev/shm", ("n3",)),
    ]  # fmt: skip


def reach_of(names: list[str], blocked: set[tuple[str, str]], error: str = "no answer within 3 s") -> Preflight:
    found = cluster({}, len(names))
    assert list(found.facts) == names
    found.reach = {
        one: {other: {"error": error} if (one, other) in blocked else {"ms": 0.3} for other in names if other != one}
        for one in names
    }
    return found


def test_a_failed_connection_is_reported_once_with_both_ends() -> None:
    names = [f"gpu{number:02}" for number in range(1, 65)]
    everybody = {(one, other) for one in names for other in names if one != other}
    (only,) = findings(reach_of(names, everybody))
    assert (only.nodes, only.text) == (tuple(names), "no node reaches any other: no answer within 3 s")
    (only,) = findings(reach_of(names, {pair for pair in everybody if pair[1] == "gpu05"}))
    assert only.nodes == ("gpu05",)
    assert only.text.startswith("no other node reaches it at gpu05")
    (only,) = findings(reach_of(names, {pair for pair in everybody if pair[0] == "gpu05"}))
    assert only.nodes == ("gpu05",)
    assert only.text.startswith("it reaches no other node")
    first, second = findings(reach_of(names, {("gpu01", "gpu09"), ("gpu01", "gpu08"), ("gpu09", "gpu01")}))
    assert first.text == "gpu01 does not reach gpu[08-09]: no answer within 3 s"
    assert (second.nodes, second.text) == (
        ("gpu09", "gpu01"),
        "gpu09 does not reach gpu01 at gpu01: no answer within 3 s",
    )
    cut_off = {pair for pair in everybody if "gpu05" in pair}
    (only,) = findings(reach_of(names, cut_off))
    assert only.nodes == ("gpu05",)
    assert only.text == "no other node reaches it at gpu05, and it reaches no other node: no answer within 3 s"


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        ("another machine answers at that address", "leads to another machine"),
        ("Name or service not known", "cannot resolve that name:"),
        ("no answer within 3 s", "a firewall drops the packets"),
        ("No route to host", "a firewall rejects the connection"),
        ("Connection refused", "a firewall rejects the connection, or `address`"),
    ],
)
def test_the_likely_cause_of_a_blocked_connection_is_named(error: str, cause: str) -> None:
    (only,) = findings(reach_of(["gpu01", "gpu02", "gpu03"], {("gpu01", "gpu02")}, error))
    assert cause in only.hint


def test_clocks_are_held_against_the_other_nodes_and_not_against_this_machine() -> None:
    here_is_off = cluster({}, 4)
    for one in here_is_off.facts.values():
        one["clock_offset_ms"] += 90_000.0
    (only,) = findings(here_is_off)
    assert (only.severity, only.text) == ("info", "their clocks are +90.0 s off this machine's")
    two = cluster({"gpu02": {"clock_offset_ms": 2000.0}}, 2)
    (only,) = findings(two)
    assert (only.nodes, only.text) == (("gpu02",), "its clock is +2.0 s off this machine's")


def test_where_half_differ_nobody_is_the_odd_one() -> None:
    found = cluster({"gpu01": {"driver": "535.2"}}, count=2)
    (only,) = findings(found)
    assert set(only.nodes) == {"gpu01", "gpu02"}


FAILS: Any = {"error": "timed out"}
CRAWLS = {"ms": 400.0, "backend": "nccl"}


def play(bad: set[str], names: list[str], how: Any = FAILS) -> list[Any]:
    """Play both rounds: a group with a bad node fails, or crawls."""

    def outcome(number: int, group: list[str]) -> Any:
        return {
            "round": number,
            "nodes": group,
            **(how if bad & set(group) else {"ms": 20.0 + len(group), "backend": "nccl"}),
        }

    first = [outcome(1, group) for group in probe.pairs(names)]
    assert sorted(name for one in first for name in one["nodes"]) == sorted(names)
    suspects = [name for group in probe.bad_groups(first) for name in group["nodes"]]
    batches = probe.again(suspects, [name for name in names if name not in suspects])
    return first + [outcome(2, group) for groups in batches for group in groups]


@pytest.mark.parametrize(("how", "severity"), [(FAILS, "error"), (CRAWLS, "warning")])
@pytest.mark.parametrize("count", [3, 4, 5, 8, 9, 64])
def test_a_bad_node_is_isolated_in_two_rounds(count: int, how: Any, severity: str) -> None:
    names = [f"gpu{number:02}" for number in range(1, count + 1)]
    for bad in names:
        found = cluster({}, count)
        found.collectives = play({bad}, names, how)
        if how is CRAWLS and count == 3:
            # One group, and nothing to compare it with.
            assert findings(found) == []
            continue
        assert [(one.severity, one.nodes) for one in findings(found)] == [(severity, (bad,))]
    fine = cluster({}, count)
    fine.collectives = play(set(), names)
    assert findings(fine) == []


def test_of_two_nodes_the_bad_one_does_not_show() -> None:
    found = cluster({}, 2)
    found.collectives = play({"gpu02"}, ["gpu01", "gpu02"])
    (only,) = findings(found)
    assert only.nodes == ("gpu01", "gpu02")
    assert "unknown which" in only.text


def test_a_bad_link_between_two_good_nodes_is_named() -> None:
    found = cluster({}, 4)
    done = [(1, "gpu01", "gpu02"), (2, "gpu03", "gpu01"), (2, "gpu04", "gpu02")]
    found.collectives = [{"round": at, "nodes": list(pair), "ms": 20.0, "backend": "gloo"} for at, *pair in done]
    found.collectives.append({"round": 1, "nodes": ["gpu03", "gpu04"], "error": "timed out"})
    (only,) = findings(found)
    assert (only.severity, only.nodes) == ("error", ("gpu03", "gpu04"))
    assert "each is fine with other nodes" in only.text


@pytest.mark.parametrize(
    ("names", "pattern"),
    [
        (["gpu01", "gpu02", "gpu10"], "gpu[01-02,10]"), (["n9", "n10", "n11"], "n[9-11]"),
        (["login", "n3"], "n3,login"), (["r1n1", "r1n2", "r2n1"], "r1n[1-2],r2n1"),
        (["n0", "n1", "n00", "n01"], "n[0-1],n[00-01]"), (["10.0.0.1", "10.0.0.2"], "10.0.0.[1-2]"),
    ],
)  # fmt: skip
def test_names_are_folded_into_patterns_that_mean_the_same(names: list[str], pattern: str) -> None:
    assert fold(names) == pattern
    assert sorted(expand(pattern)) == sorted(names)
