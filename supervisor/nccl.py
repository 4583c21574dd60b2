"""How NCCL connects the nodes of a job: one picture of all nodes, with differences and surprises.

In: a hub, whose nodes are asked for what their agents have read of the NCCL output of their ranks. Out: a Fabric: facts
by node, transports by pair of nodes, oddities as text, the nodes that did not answer in time. Facts that are in no
output are left out. Imports `link`.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from remote_agent.text.names import by_value
from supervisor.inventory.pattern import fold

if TYPE_CHECKING:
    from remote_agent.wire.documents import NcclNode, Severity, Status
    from supervisor.link.hub import Hub

Pair = tuple[str, str]
RDMA_NETWORKS = re.compile(r"IB|RoCE|RDMA|UCX|Libfabric|OFI|SHARP", re.I)
# Bridges and similar: they lead to containers on the same machine, never to another machine.
LOCAL_INTERFACES = re.compile(r"(docker|br-|virbr|veth|cni|flannel|cali|lxc|podman)\w*|lo\b")
# The job as a whole has these facts, with their labels; its nodes have those below. diagnose/nccl.py reads them.
JOB_FACTS: Mapping[str, str] = {
    "version": "version", "network": "network", "gdr": "GPUDirect RDMA", "nvls": "NVLS", "channels": "channels",
    "rings": "rings", "trees": "trees", "gid": "GID index", "collnet": "collnet", "tuner": "tuner",
}  # fmt: skip
NODE_FACTS = ("plugin", "interface", "devices", "no_verbs")
# A difference between nodes has this severity and this advice.
DIFFERS: Mapping[str, tuple[Severity, str]] = {
    "version": ("error", "NCCL works only with the same version: install the same torch everywhere"),
    "network": ("error", "different network plug-ins cannot communicate: read the NET/ lines of the node that differs"),
    "plugin": ("warning", "install the same network plug-in everywhere"),
    "interface": ("info", "NCCL_SOCKET_IFNAME names the interface; it may differ by host"),
    "gid": ("warning", "RoCE needs the same kind of GID everywhere: NCCL_IB_GID_INDEX, show_gids on both"),
    "gdr": ("warning", "GPUDirect RDMA needs nvidia-peermem (or DMA-BUF) and the NIC near the GPU: lsmod on that node"),
    "nvls": ("warning", "NVLS needs NVSwitch and a running nv-fabricmanager: systemctl status on that node"),
    "channels": ("info", "the topology differs: nvidia-smi topo -m on both"),
    "tuner": ("info", "install the same tuner plug-in everywhere"),
}  # fmt: skip
MEANINGS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"Connection refused|connect returned", re.I), "a peer's process is gone, or a firewall blocks it"),
    (re.compile(r"Connection closed by remote peer|socketProgress", re.I), "the other rank died first: look there"),
    (re.compile(r"shared memory segment|/dev/shm|extend", re.I), "/dev/shm is full or too small: --shm-size"),
    (re.compile(r"Got (completion|CQE)|IbvCommError|wc_status|status=\d+ opcode", re.I), "the RDMA link broke"),
    (re.compile(r"Could not find a path for pattern", re.I), "no good topology: slower, but not a failure"),
    (re.compile(r"Cuda failure", re.I), "the GPU or its driver failed: read the rank's own error"),
    (re.compile(r"nvml", re.I), "the driver hides a GPU: does the container have all of them?"),
    (re.compile(r"Address already in use", re.I), "another process holds the port"),
    (re.compile(r"truncated|Mismatch|size mismatch", re.I), "ranks called collectives of different sizes"),
    (re.compile(r"iommu|HSA_FORCE", re.I), "the host is not set up for peer access: slow or unstable"),
)


class Oddity(NamedTuple):
    """One thing that differs or surprises."""

    severity: Severity
    nodes: tuple[str, ...]
    text: str
    hint: str = ""


class Warned(NamedTuple):
    """A warning of NCCL."""

    text: str
    meaning: str
    ranks: dict[int, str]
    """The ranks that printed it, and their nodes."""


@dataclass
class Fabric:
    """The NCCL facts of all nodes."""

    generation: int = -1
    nodes: dict[str, dict[str, str]] = field(default_factory=dict)
    """By node: facts as text."""
    ranks: dict[str, list[int]] = field(default_factory=dict)
    """By node: ranks with NCCL output."""
    pairs: dict[Pair, Counter[str]] = field(default_factory=dict)
    """By pair of nodes (also a node with itself): transports, weighted by the channels at both ends."""
    env: dict[str, dict[str, tuple[str, ...]]] = field(default_factory=dict)
    """Each value of a variable that NCCL read, and its nodes."""
    odd: list[Oddity] = field(default_factory=list)
    warned: list[Warned] = field(default_factory=list)
    silent: list[str] = field(default_factory=list)
    """Nodes that answered and have no NCCL output."""
    unanswered: list[str] = field(default_factory=list)
    """Nodes that did not answer."""

    def common(self, name: str) -> str:
        """Return the value of a fact that most nodes have, "" if none has it."""
        values = Counter(facts[name] for facts in self.nodes.values() if facts.get(name))
        return values.most_common(1)[0][0] if values else ""

    def all_of(self, name: str) -> str:
        """Return all values of a fact, the most frequent first."""
        return ", ".join(
            value for value, _ in Counter(facts[name] for facts in self.nodes.values() if facts.get(name)).most_common()
        )

    def inside(self) -> Counter[str]:
        """Return the transports between ranks of one node."""
        return sum((kinds for (one, other), kinds in self.pairs.items() if one == other), Counter())

    def between(self) -> Counter[str]:
        """Return the transports between nodes."""
        return sum((kinds for (one, other), kinds in self.pairs.items() if one != other), Counter())


def read(documents: Mapping[str, NcclNode | None], ranks: Mapping[int, str]) -> Fabric:
    """Return the picture; `documents`: in the job's order of nodes; `ranks`: the node of each rank."""
    answers = {node: document for node, document in documents.items() if document is not None}
    newest = max((int(document.get("generation", -1)) for document in answers.values()), default=-1)
    current = {
        node: document
        for node, document in answers.items()
        if document.get("generation") == newest and document.get("groups")
    }
    fabric = Fabric(generation=newest)
    fabric.unanswered = [node for node in documents if node not in answers]
    fabric.silent = [node for node in answers if node not in current]
    place = {**ranks, **{rank: node for node, document in current.items() for rank in _ranks(document)}}
    order = {node: at for at, node in enumerate(dict.fromkeys((*documents, *place.values())))}
    names = _names(current)
    for document in current.values():
        _join(fabric, document, names, place, order)
    for node, document in current.items():
        fabric.ranks[node] = sorted(_ranks(document))
        fabric.nodes[node] = _facts(fabric, node, document)
    fabric.env = _environment(current)
    fabric.warned = _warnings(current)
    fabric.odd = sorted(_oddities(fabric, current), key=lambda odd: ("error", "warning", "info").index(odd.severity))
    return fabric


def _ranks(document: NcclNode) -> list[int]:
    return [int(rank) for group in document["groups"] for rank in group["ranks"]]


def _names(documents: Mapping[str, NcclNode]) -> dict[tuple[str, int], int]:
    """Return the rank in the job by communicator and rank in it."""
    return {
        (str(key), int(inside)): int(rank)
        for document in documents.values()
        for rank, key, inside, _ in document.get("comms", ())
        if not str(key).startswith("?")
    }


def _join(
    fabric: Fabric,
    document: NcclNode,
    names: Mapping[tuple[str, int], int],
    place: Mapping[int, str],
    order: Mapping[str, int],
) -> None:
    for _, key, src, dst, transport, channels in document.get("links", ()):
        if key in ("?", f"?{len(place)}"):
            # An unnamed communicator of the job's size has the job's ranks.
            ends = [int(src), int(dst)]
        else:
            ends = [names.get((str(key), int(end)), -1) for end in (src, dst)]
        if all(end in place for end in ends):
            one, other = sorted((place[end] for end in ends), key=order.__getitem__)
            fabric.pairs.setdefault((one, other), Counter())[str(transport)] += int(channels)


def _facts(fabric: Fabric, node: str, document: NcclNode) -> dict[str, str]:
    """Return a node's facts as text; if its ranks differ, all values."""
    result: dict[str, str] = {}
    for name in (*JOB_FACTS, *NODE_FACTS):
        values = [value for group in document["groups"] if (value := _text(group["facts"].get(name)))]
        if values:
            result[name] = " + ".join(dict.fromkeys(values))
    away = [kinds for pair, kinds in fabric.pairs.items() if node in pair and pair[0] != pair[1]]
    over = Counter[str]()
    for kinds in away:
        over.update({kind: count for kind, count in kinds.items() if kind.startswith("NET/") and "Socket" not in kind})
    if over:
        direct = sum(count for kind, count in over.items() if kind.endswith("/GDRDMA"))
        result["gdr"] = "on" if direct == over.total() else "off" if not direct else "on some"
    elif any(group["facts"].get("gdr_off") for group in document["groups"]):
        result["gdr"] = "off"
    return result


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list):
        return " ".join(str(entry) for entry in value) or "none"
    return "" if value is None else str(value)


def _environment(documents: Mapping[str, NcclNode]) -> dict[str, dict[str, tuple[str, ...]]]:
    result: dict[str, dict[str, dict[str, None]]] = {}
    for node, document in documents.items():
        for group in document["groups"]:
            for name, value in group["facts"].get("env", {}).items():
                result.setdefault(str(name), {}).setdefault(str(value), {})[node] = None
    return {name: {value: tuple(nodes) for value, nodes in values.items()} for name, values in sorted(result.items())}


def _warnings(documents: Mapping[str, NcclNode]) -> list[Warned]:
    result: dict[str, dict[int, str]] = {}
    for node, document in documents.items():
        for rank, text, _ in document.get("warnings", ()):
            result.setdefault(str(text), {})[int(rank)] = node
    return [Warned(text, meaning_of(text), ranks) for text, ranks in result.items()]


def meaning_of(warning: str) -> str:
    """Return what a warning of NCCL means, "" if unknown."""
    return next((meaning for pattern, meaning in MEANINGS if pattern.search(warning)), "")


# --- oddities


def _oddities(fabric: Fabric, documents: Mapping[str, NcclNode]) -> Iterable[Oddity]:
    yield from _differences(fabric)
    yield from _surprises(fabric)
    for name, values in fabric.env.items():
        if len(values) > 1 and "IFNAME" not in name and "HCA" not in name:
            texts = "; ".join(f"{value} on {fold(nodes)}" for value, nodes in values.items())
            yield Oddity("warning", _fewest(values), f"{name} differs: {texts}", "set it for all hosts in [job] env")
    for node in documents:
        for name in ("version", "network"):
            if " + " in fabric.nodes[node].get(name, ""):
                text = f"its ranks do not agree on the {name}: {fabric.nodes[node][name]}"
                yield Oddity("error", (node,), text, "all ranks of one node need the same environment")


def _fewest(values: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    return min(values.values(), key=len)


def _differences(fabric: Fabric) -> Iterable[Oddity]:
    for name, (severity, hint) in DIFFERS.items():
        # _surprises reports nodes that use sockets although they have adapters.
        left_out = _on_sockets(fabric) if name == "network" else ()
        ordered = by_value((node, facts.get(name, "")) for node, facts in fabric.nodes.items() if node not in left_out)
        ordered = [(value, nodes) for value, nodes in ordered if value]
        word = JOB_FACTS.get(name, name)
        for value, nodes in ordered[1:]:
            usual, others = ordered[0]
            rest = f"most have {usual}" if len(others) > len(nodes) else f"{usual} on {fold(others)}"
            yield Oddity(severity, tuple(nodes), f"{word} {value} on {fold(nodes)}, {rest}", hint)


def _surprises(fabric: Fabric) -> Iterable[Oddity]:
    spread = len(fabric.nodes) + len(fabric.silent) + len(fabric.unanswered) > 1
    sockets = _on_sockets(fabric)
    if sockets and spread:
        devices = fabric.nodes[sockets[0]]["devices"]
        hint = "is NCCL_IB_DISABLE set, or NCCL_NET? The NET/IB lines of that node say why"
        yield Oddity("error", sockets, f"{fold(sockets)} uses TCP sockets though it has {devices}", hint)
    local = _which(fabric, lambda facts: bool(LOCAL_INTERFACES.match(facts.get("interface", ""))))
    if local and spread:
        names = " ".join(sorted({fabric.nodes[node]["interface"] for node in local}))
        hint = "set NCCL_SOCKET_IFNAME to the interface of the cluster's network"
        yield Oddity("error", local, f"{fold(local)} chose {names}, which leads to no other machine", hint)
    blind = _which(fabric, lambda facts: bool(facts.get("no_verbs")))
    if blind and spread:
        library = fabric.nodes[blind[0]]["no_verbs"]
        yield Oddity("info", blind, f"{fold(blind)} cannot open {library}: adapters stay unused", "install rdma-core")
    slow = [node for node, facts in fabric.nodes.items() if facts.get("gdr") == "off"]
    if slow and len(slow) == len(fabric.nodes) and RDMA_NETWORKS.search(fabric.common("network")):
        hint = DIFFERS["gdr"][1]
        yield Oddity("info", tuple(slow), "no GPUDirect RDMA on any node: data goes through main memory", hint)
    by_net = sorted({one for (one, other), kinds in fabric.pairs.items() if one == other and _networks(kinds)})
    if by_net:
        hint = "P2P and shared memory are off: NCCL_P2P_DISABLE, NCCL_SHM_DISABLE, or separate containers"
        yield Oddity("warning", tuple(by_net), "ranks of one node communicate over the network", hint)
    mixed = [pair for pair, kinds in fabric.pairs.items() if len(_networks(kinds)) > 1]
    for one, other in mixed[:4]:
        kinds = " and ".join(sorted(fabric.pairs[one, other]))
        yield Oddity(
            "warning", (one, other), f"{one} and {other} communicate over {kinds}", "compare the NIC of each rank"
        )


def _on_sockets(fabric: Fabric) -> tuple[str, ...]:
    """Return the nodes that have RDMA adapters and use TCP."""
    return _which(fabric, lambda facts: "Socket" in facts.get("network", "") and facts.get("devices", "none") != "none")


def _networks(kinds: Mapping[str, int]) -> set[str]:
    return {kind.removesuffix("/GDRDMA") for kind in kinds if kind.startswith("NET/")}


def _which(fabric: Fabric, holds: Callable[[Mapping[str, str]], bool]) -> tuple[str, ...]:
    return tuple(node for node, facts in fabric.nodes.items() if holds(facts))


# --- the nodes

# A node may have to read some MB of log.
DEADLINE = 5.0
# If other nodes have NCCL output, links that are still being opened are awaited this long.
PATIENCE = 2.0


def to_fabric(documents: Mapping[str, NcclNode | None], status: Status) -> Fabric:
    """Return the documents of all nodes as one picture; `status`: the job's nodes and ranks."""
    nodes = status.get("nodes", ())
    return read(documents, {int(rank["rank"]): str(node["name"]) for node in nodes for rank in node.get("ranks", ())})


class NcclReader:
    """Keeps the newest document of each node; a node sends it only if it has changed."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._documents: dict[str, NcclNode] = {}

    async def read(self, status: Status) -> dict[str, NcclNode | None]:
        """Return the document of each node that has ranks, None if it does not answer."""
        nodes = [str(node["name"]) for node in status.get("nodes", ()) if node.get("ranks")]
        links = self._hub.links
        documents = await self._ask_all(nodes)
        if any(document.get("groups") for document in documents.values() if document is not None):
            await self._hub.wait_until(
                lambda: not any(links[name].is_awaited for name in nodes if name in links), PATIENCE
            )
            late = [name for name in nodes if documents[name] is None]
            documents.update(await self._ask_all(late))
        return documents

    async def _ask_all(self, nodes: list[str]) -> dict[str, NcclNode | None]:
        return dict(zip(nodes, await asyncio.gather(*(self._ask(name) for name in nodes)), strict=True))

    async def _ask(self, name: str) -> NcclNode | None:
        link = self._hub.links.get(name)
        known = self._documents.get(name)
        if link is None or not link.can_be_asked:
            return None
        stamp = known.get("stamp", "") if known is not None else ""
        answer: NcclNode | None = await link.try_call("nccl", {"stamp": stamp}, timeout_s=DEADLINE)
        if answer is None:
            return None
        if known is None or answer.get("stamp") != known.get("stamp"):
            self._documents[name] = known = answer
        return known
