"""What one rank lets NCCL (or RCCL) say of itself: its network, and over which transport it reaches which other rank.

In: the lines of one process, in order. Out: plain facts and links; what the text does not tell is left out, never
guessed. NCCL counts ranks per communicator, so a link names its communicator; who joins several ranks translates it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from remote_agent.diagnose.nccl import (
    CHANNELS,
    INTERFACE,
    NETWORK,
    TRANSPORT,
    VERSION,
    says_nvls,
    transport_of,
)
from remote_agent.diagnose.shapes import clip

_SAYS = re.compile(r"\b[NR]CCL (?P<level>[A-Z]+) +(?P<text>.*)")
_THREAD = re.compile(r":\d+:(\d+) \[-?\d+\]")
# NCCL's own lines are shorter, but for the rings of thousands of ranks; what else a rank prints may be of any length.
_LINE_MAX = 4096
_COMM = re.compile(
    r"\bcomm (?P<at>0x[\da-f]+) rank (?P<rank>\d+) n[rR]anks (?P<nranks>\d+)"
    r"(?:.*? commId (?P<id>0x[\da-f]+))?(?P<done>.*Init COMPLETE)?"
)
_LINK = re.compile(
    r"Channel (?P<channel>\d+)(?:/\d+)? : (?P<src>\d+)\[[\da-fx]+\] -> (?P<dst>\d+)\[[\da-fx]+\]"
    rf"(?P<receive> \[receive\])?(?: \[send\])? {TRANSPORT}"
)
_RING = re.compile(r"Channel \d+/(\d+) : +\d+(?: +\d+)*\s*$")
_TREES = re.compile(r"Trees ((?:\[\d+\] \S+ ?)+)")
_DEVICE = re.compile(r"\[\d+\]([\w.-]+:\d+/[A-Za-z]+)")
_ENV = re.compile(r"\b((?:NCCL|RCCL)_\w+) set (?:by environment )?to (.*)")
_SAID: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("network", re.compile(NETWORK)),
    ("plugin", re.compile(r"Loaded net plugin (.+?)(?: \(v\d+\))?$|P2P plugin (?:v\d+ )?([\w.-]+)")),
    ("plugin", re.compile(r"NET/OFI Initializing (aws-ofi-nccl \S+)")),
    ("collnet", re.compile(r"Loaded collnet plugin (\S+)")),
    ("tuner", re.compile(r"Using tuner plugin (\S+)")),
    ("gid", re.compile(r"\bGID (?:index )?(\d+)\b|GidIndex (\d+)")),
    ("no_verbs", re.compile(r"Failed to open (libibverbs\S*)")),
)
_WARNINGS = 10


class Comm(NamedTuple):
    """One communicator that the process is in."""

    key: str
    """Its id; where NCCL tells none, the same text in all processes of a size: `?4`."""
    rank: int
    nranks: int
    tid: str


class RankMap:
    """Facts of one process as its lines come by; `result` tells them."""

    def __init__(self) -> None:
        self.seen = False
        self._facts: dict[str, Any] = {}
        self._comms: list[Comm] = []
        self._at: dict[str, str] = {}
        """Address of a communicator in this process, and its key."""
        self._links: dict[tuple[str, int, int, str], set[int]] = {}
        self._early: dict[tuple[str, int, int, str], set[int]] = {}
        """Links whose communicator is still to be told."""
        self._named_last = False
        """It is a version that names a communicator when it is complete."""
        self._env: dict[str, str] = {}
        self._warnings: dict[str, int] = {}

    def feed(self, line: str) -> None:
        """Take one line in."""
        line = line[:_LINE_MAX]
        version = VERSION.search(line)
        if version is not None:
            self.seen = True
            self._facts.setdefault("version", version[1])
        found = _SAYS.search(line)
        if found is None:
            return
        self.seen = True
        thread = _THREAD.search(line, 0, found.start())
        text, tid = found["text"].rstrip(), thread[1] if thread is not None else ""
        if found["level"] == "WARN":
            text = clip(text)
            if text in self._warnings or len(self._warnings) < _WARNINGS:
                self._warnings[text] = self._warnings.get(text, 0) + 1
            return
        if text.startswith("Channel "):
            self._channel(text, tid)
        elif (comm := _COMM.search(text)) is not None:
            self._comm(comm, tid)
        else:
            self._fact(text)

    def _fact(self, text: str) -> None:
        for name, pattern in _SAID:
            said = pattern.search(text)
            if said is not None:
                self._facts.setdefault(name, next(group for group in said.groups() if group is not None))
        if (env := _ENV.search(text)) is not None:
            self._env[env[1]] = env[2].rstrip(".")
        if (trees := _TREES.match(text)) is not None:
            self._facts["trees"] = max(trees[1].count("["), self._facts.get("trees", 0))
        if (counts := CHANNELS.search(text)) is not None:
            self._facts["channels"] = max(int(counts[1]), self._facts.get("channels", 0))
        if (nvls := says_nvls(text)) is not None:
            self._facts["nvls"] = nvls or self._facts.get("nvls", False)
        if "GPU Direct RDMA Disabled" in text:
            self._facts["gdr_off"] = True
        self._addresses(text)

    def _addresses(self, text: str) -> None:
        kind, colon, rest = text.partition(":")
        kind = kind.rstrip()
        if kind == "NET/IB" and colon:
            devices, _, oob = rest.partition("OOB")
            if " Using" in devices:
                self._facts.setdefault("devices", _DEVICE.findall(devices))
            elif "No device found" in devices:
                self._facts.setdefault("devices", [])
            rest = oob
        elif kind not in ("Bootstrap", "NET/Socket"):
            return
        names = INTERFACE.findall(rest)
        if names:
            # The first is the one that is used first; the others are there too.
            self._facts.setdefault("interface", names[0])

    def _comm(self, found: re.Match[str], tid: str) -> None:
        rank, nranks = int(found["rank"]), int(found["nranks"])
        self._named_last = self._named_last or bool(found["done"] and found["at"] not in self._at)
        key = found["id"] or self._at.get(found["at"]) or f"?{nranks}"
        self._at[found["at"]] = key
        comm = Comm(key, rank, nranks, tid)
        if not any(known[:3] == comm[:3] for known in self._comms):
            self._comms.append(comm)
        for (_, src, dst, transport), channels in self._early.items():
            if rank in (src, dst):
                self._links.setdefault((key, src, dst, transport), set()).update(channels)
        self._early.clear()
        if found["done"]:
            # An address is used again.
            self._at.pop(found["at"], None)

    def _channel(self, text: str, tid: str) -> None:
        found = _LINK.match(text)
        if found is None:
            ring = _RING.match(text)
            if ring is not None:
                self._facts["rings"] = max(int(ring[1]), self._facts.get("rings", 0))
            return
        src, dst = int(found["src"]), int(found["dst"])
        comm = None if self._named_last else self._of(tid, dst if found["receive"] else src)
        transport, direct = transport_of(found)
        table = self._early if comm is None else self._links
        place = (comm.key if comm is not None else "", src, dst, f"{transport}/GDRDMA" if direct else transport)
        table.setdefault(place, set()).add(int(found["channel"]))

    def _of(self, tid: str, own: int) -> Comm | None:
        """Return the newest communicator in which the process has that rank, one of its thread before all others."""
        mine = [comm for comm in reversed(self._comms) if comm.rank == own]
        return next((comm for comm in mine if comm.tid == tid), mine[0] if mine else None)

    def result(self) -> dict[str, Any]:
        """Return `facts`, `comms` [[key, rank, nranks]], `links` [[key, from, to, transport, channels]], `warnings`."""
        links = dict(self._links)
        if len(self._comms) < 2:
            # Where the end of the text is cut off, no communicator is named; of several, any might be meant.
            key = self._comms[0].key if self._comms else "?"
            links.update({(key, *place[1:]): channels for place, channels in self._early.items()})
        return {
            "facts": {**self._facts, "env": self._env},
            "comms": [[comm.key, comm.rank, comm.nranks] for comm in self._comms],
            "links": [[*place, len(channels)] for place, channels in links.items()],
            "warnings": self._warnings,
        }


def node_map(ranks: Iterable[tuple[int, RankMap]]) -> dict[str, Any]:
    """Return what the ranks of a node told: equal facts once, with the ranks that have them."""
    groups: list[dict[str, Any]] = []
    found: dict[str, Any] = {"groups": groups, "comms": [], "links": [], "warnings": []}
    for rank, told in ranks:
        if not told.seen:
            continue
        said = told.result()
        group = next((group for group in groups if group["facts"] == said["facts"]), None)
        if group is None:
            groups.append(group := {"ranks": [], "facts": said["facts"]})
        group["ranks"].append(rank)
        found["comms"] += [[rank, *comm] for comm in said["comms"]]
        found["links"] += [[rank, *link] for link in said["links"]]
        found["warnings"] += [[rank, text, count] for text, count in said["warnings"].items()]
    return found
