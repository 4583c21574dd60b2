"""The one reader of NCCL's (and RCCL's) output: its version, its network, and how its ranks are connected.

In: lines. Out: plain facts and links of a process, or of a node's ranks; the contract's `nccl` object of a whole text.
A fact that no line states is left out, never guessed.

NCCL counts ranks per communicator, so a link names its communicator; `supervisor.nccl` translates it.
To add a fact, add a row to PATTERNS or HEADED_PATTERNS.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from remote_agent.text.names import read_number
from remote_agent.text.shapes import clip

if TYPE_CHECKING:
    from remote_agent.wire.documents import NcclGroup, NcclOutput, NcclSummary

_WORD = re.compile(r"\b[NR]CCL\b")
_HEAD = re.compile(r"(?<![\w.-])(?P<host>[A-Za-z0-9][\w.-]*):(?P<pid>\d+):(?P<thread>\d+) \[-?\d+\]")
_SAYS = re.compile(r"\b[NR]CCL (?P<level>[A-Z]+) +(?P<text>.*)")
_WARNING = re.compile(r"\b[NR]?CCL WARN (?P<text>.+)")
# NCCL's own lines are shorter, except for the rings of thousands of ranks; other output may have any length.
_LINE_MAX = 4096
_WARNINGS = 20

# Name of a fact, a word that its line contains, its expression; the value is the first group that matches. The name of
# a network plug-in may have several words, such as `NCCL RDMA Plugin v8`.
PATTERNS: tuple[tuple[str, str, re.Pattern[str]], ...] = (
    ("version", "version", re.compile(r"\b[NR]CCL version\s*:?\s*(\d+\.\d+(?:\.\d+)?(?:\+\w+\.?\d*)?)")),
    (
        "network",
        "Using network",
        re.compile(r"Using network ([\w.-]+(?: (?![NR]CCL\b)(?:[A-Z][\w.-]*|v\d+)(?![\w.:-])){0,4})"),
    ),
    ("available", "NET/", re.compile(r"NET/(IB|Socket) : Using")),
    ("nranks", "anks", re.compile(r"\bn[Rr]anks (\d+)")),
    ("nodes", "nNodes", re.compile(r"\bnNodes (\d+)")),
    ("channels", "channels", re.compile(r"\b(\d+) coll channels")),
)
# These facts are in lines that begin with NCCL's own head.
HEADED_PATTERNS: tuple[tuple[str, str, re.Pattern[str]], ...] = (
    ("plugin", "plugin", re.compile(r"Loaded net plugin (.+?)(?: \(v\d+\))?$|P2P plugin (?:v\d+ )?([\w.-]+)")),
    ("plugin", "aws-ofi", re.compile(r"NET/OFI Initializing (aws-ofi-nccl \S+)")),
    ("collnet", "collnet plugin", re.compile(r"Loaded collnet plugin (\S+)")),
    ("tuner", "tuner plugin", re.compile(r"Using tuner plugin (\S+)")),
    ("gid", "G", re.compile(r"\bGID (?:index )?(\d+)\b|GidIndex (\d+)")),
    ("no_verbs", "libibverbs", re.compile(r"Failed to open (libibverbs\S*)")),
)
# The largest value of these facts counts, any value of those below, and the first value of all others.
_LARGEST = ("channels", "rings", "trees", "nranks", "nodes")
_ANY = ("nvls", "gdr_off")
# Only the contract's object has these facts.
_SUMMARY_ONLY = ("available", "nranks", "nodes", "transport")

_LISTED = re.compile(r"(?:OOB|Bootstrap\s*: Using|NET/Socket\s*: Using)(?P<list>[^;\n]*)")
_INTERFACE = re.compile(r"(?:\[\d+\])?(?<![\w.@-])([A-Za-z][\w.@-]*):(?=[\da-fA-F.:%\w-]*<\d+>)")
# A network is named after its plug-in; the name has several words only if the number of a device follows.
_TRANSPORT = re.compile(
    r"\bvia (?:(?P<net>(?:COLL)?NET/(?:[\w.-]+(?: [\w.-]+){0,4}(?=/\d)|[\w.-]+))"
    r"|(?P<near>[A-Z][A-Za-z0-9_]*(?:/[A-Za-z][A-Za-z_]*)?(?: pointer)?)"
    r"|direct shared memory\b)(?P<rest>(?:/\S*)?)"
)
_SOCKET = re.compile(r"/(\d+)")
_NVLS_CHANNELS = re.compile(r"\b(\d+) nvls channels")
_NVLS_USED = re.compile(r"NVLS (?:comm|multicast|Creating|Bind)|\bConnected NVLS\b", re.I)
_NVLS_UNAVAILABLE = "NVLS multicast support is not available"
_COMM = re.compile(
    r"\bcomm (?P<at>0x[\da-f]+) rank (?P<rank>\d+) n[rR]anks (?P<nranks>\d+)"
    r"(?:.*? commId (?P<id>0x[\da-f]+))?(?P<done>.*Init COMPLETE)?"
)
_LINK = re.compile(
    r"Channel (?P<channel>\d+)(?:/\d+)? : (?P<src>\d+)\[[\da-fx]+\] -> (?P<dst>\d+)\[[\da-fx]+\]"
    rf"(?P<receive> \[receive\])?(?: \[send\])? {_TRANSPORT.pattern}"
)
_RING = re.compile(r"Channel \d+/(\d+) : +\d+(?: +\d+)*\s*$")
_TREES = re.compile(r"Trees ((?:\[\d+\] \S+ ?)+)")
_DEVICE = re.compile(r"\[\d+\]([\w.-]+:\d+/[A-Za-z]+)")
_ENV = re.compile(r"\b((?:NCCL|RCCL)_\w+) set (?:by environment )?to (.*)")


class Comm(NamedTuple):
    """One communicator that the process is in."""

    key: str
    """Its id; in versions that print none, the same text in all processes of a size: `?4`."""
    rank: int
    nranks: int
    thread: str


class NcclProcess:
    """What one process printed about NCCL: `feed` takes its lines in order, `result` returns the facts."""

    def __init__(self) -> None:
        self.seen = False
        """Whether any line was NCCL's."""
        self.host = ""
        self.values: dict[str, dict[Any, None]] = {}
        """By fact: its values, in order, each once."""
        self.warnings: dict[str, int] = {}
        self._env: dict[str, str] = {}
        self._sockets: list[str] = []
        """The interfaces that NET/Socket counts as its devices."""
        self._comms: list[Comm] = []
        self._at: dict[str, str] = {}
        """By address of a communicator in this process: its key."""
        self._links: dict[tuple[str, int, int, str], set[int]] = {}
        self._early: dict[tuple[str, int, int, str], set[int]] = {}
        """Links whose communicator is not known yet."""
        self._named_last = False
        """Whether this version names a communicator only when it is complete."""

    def feed(self, line: str) -> None:
        """Read one line."""
        line = line[:_LINE_MAX]
        if not _may_be_nccl(line):
            return
        head, says = _HEAD.search(line), _SAYS.search(line)
        self.host = self.host or (head["host"] if head is not None else "")
        self._read(PATTERNS, line)
        self._read_interfaces(line)
        if "via" in line:
            self._read_transports(line)
        if "NVLS" in line or "nvls" in line:
            self._read_nvls(line)
        if "WARN" in line and (warning := _WARNING.search(line)) is not None:
            self._warn(clip(warning["text"]))
        self.seen = self.seen or says is not None or bool(self.values)
        if says is not None and says["level"] != "WARN":
            self._read_headed(says["text"].rstrip(), head["thread"] if head is not None else "")

    def _add(self, name: str, value: Any) -> None:
        self.values.setdefault(name, {})[value] = None

    def _read(self, facts: Sequence[tuple[str, str, re.Pattern[str]]], text: str) -> None:
        for name, word, pattern in facts:
            for match in pattern.finditer(text) if word in text else ():
                value = next(group for group in match.groups() if group is not None)
                self._add(name, read_number(value) if name in _LARGEST else value)

    def _read_interfaces(self, line: str) -> None:
        addresses = _LISTED.search(line) if "Using" in line or "OOB" in line else None
        if addresses is None:
            return
        names = _INTERFACE.findall(addresses["list"])
        # The first one is used; the others are used where a channel names them.
        for name in names[:1]:
            self._add("interface", name)
        if addresses[0].startswith("NET/Socket"):
            self._sockets = names

    def _read_transports(self, line: str) -> None:
        for match in _TRANSPORT.finditer(line):
            name, is_direct = _transport_of(match)
            self._add("transport", name)
            if is_direct:
                self._add("transport", "GDRDMA")
            device = _SOCKET.match(match["rest"]) if name == "NET/Socket" else None
            for interface in self._sockets[read_number(device[1]) :][:1] if device is not None else ():
                self._add("interface", interface)

    def _read_nvls(self, line: str) -> None:
        counts = _NVLS_CHANNELS.findall(line)
        if _NVLS_UNAVAILABLE in line:
            self._add("nvls", False)
        elif counts:
            self._add("nvls", any(map(read_number, counts)))
        elif _NVLS_USED.search(line):
            self._add("nvls", True)

    def _warn(self, text: str) -> None:
        if text in self.warnings or len(self.warnings) < _WARNINGS:
            self.warnings[text] = self.warnings.get(text, 0) + 1

    def _read_headed(self, text: str, thread: str) -> None:
        if text.startswith("Channel "):
            self._read_channel(text, thread)
            return
        if (comm := _COMM.search(text)) is not None:
            self._read_comm(comm, thread)
            return
        self._read(HEADED_PATTERNS, text)
        if (env := _ENV.search(text)) is not None:
            self._env[env[1]] = env[2].rstrip(".")
        if (trees := _TREES.match(text)) is not None:
            self._add("trees", trees[1].count("["))
        if "GPU Direct RDMA Disabled" in text:
            self._add("gdr_off", True)
        if text.startswith("NET/IB"):
            devices = text.partition("OOB")[0]
            if " Using" in devices:
                self._add("devices", tuple(_DEVICE.findall(devices)))
            elif "No device found" in devices:
                self._add("devices", ())

    def _read_comm(self, match: re.Match[str], thread: str) -> None:
        rank, nranks = read_number(match["rank"]), read_number(match["nranks"])
        self._named_last = self._named_last or bool(match["done"] and match["at"] not in self._at)
        key = match["id"] or self._at.get(match["at"]) or f"?{nranks}"
        self._at[match["at"]] = key
        comm = Comm(key, rank, nranks, thread)
        if not any(known[:3] == comm[:3] for known in self._comms):
            self._comms.append(comm)
        for (_, src, dst, transport), channels in self._early.items():
            if rank in (src, dst):
                self._links.setdefault((key, src, dst, transport), set()).update(channels)
        self._early.clear()
        if match["done"]:
            # The address may be reused by another communicator.
            self._at.pop(match["at"], None)

    def _read_channel(self, text: str, thread: str) -> None:
        match = _LINK.match(text)
        if match is None:
            if (ring := _RING.match(text)) is not None:
                self._add("rings", read_number(ring[1]))
            return
        src, dst = read_number(match["src"]), read_number(match["dst"])
        comm = None if self._named_last else self._comm_of(thread, dst if match["receive"] else src)
        transport, is_direct = _transport_of(match)
        links = self._early if comm is None else self._links
        key = (comm.key if comm is not None else "", src, dst, f"{transport}/GDRDMA" if is_direct else transport)
        links.setdefault(key, set()).add(read_number(match["channel"]))

    def _comm_of(self, thread: str, own: int) -> Comm | None:
        """Return the newest communicator in which the process has that rank, if possible one of this thread."""
        candidates = [comm for comm in reversed(self._comms) if comm.rank == own]
        return next((comm for comm in candidates if comm.thread == thread), candidates[0] if candidates else None)

    def facts(self) -> dict[str, object]:
        """Return what it has printed, by fact."""
        facts = {name: _one_of(name, values) for name, values in self.values.items() if name not in _SUMMARY_ONLY}
        return {**facts, "env": self._env}

    def comms(self) -> list[tuple[str, int, int]]:
        """Return its communicators: key, rank, nranks."""
        return [(comm.key, comm.rank, comm.nranks) for comm in self._comms]

    def links(self) -> list[tuple[str, int, int, str, int]]:
        """Return its links: key, from, to, transport, channels."""
        links = dict(self._links)
        if len(self._comms) < 2:
            # If the end of the text is cut off, no communicator is named; of several, any could be meant.
            key = self._comms[0].key if self._comms else "?"
            links.update({(key, *place[1:]): channels for place, channels in self._early.items()})
        return [(*place, len(channels)) for place, channels in links.items()]


def node_map(ranks: Iterable[tuple[int, NcclProcess]]) -> NcclOutput:
    """Return what the ranks of a node printed: equal facts once, with the ranks that have them."""
    groups: list[NcclGroup] = []
    node: NcclOutput = {"groups": groups, "comms": [], "links": [], "warnings": []}
    for rank, process in ranks:
        if not process.seen:
            continue
        facts = process.facts()
        group = next((group for group in groups if group["facts"] == facts), None)
        if group is None:
            group = {"ranks": [], "facts": facts}
            groups.append(group)
        group["ranks"].append(rank)
        node["comms"] += [[rank, *comm] for comm in process.comms()]
        node["links"] += [[rank, *link] for link in process.links()]
        node["warnings"] += [[rank, text, count] for text, count in process.warnings.items()]
    return node


def summary(processes: Iterable[NcclProcess]) -> NcclSummary | None:
    """Return the contract's `nccl` object, None where no line is NCCL's."""
    seen = [process for process in processes if process.seen]
    if not seen:
        return None
    values: dict[str, dict[Any, None]] = {}
    for process in seen:
        for name, own in process.values.items():
            values.setdefault(name, {}).update(own)
    hosts = len({process.host for process in seen} - {""}) or None
    return {
        "versions": list(values.get("version", ())),
        "networks": list(values.get("network") or values.get("available") or ()),
        "interfaces": list(values.get("interface", ())),
        "nranks": max(values.get("nranks", ()), default=None),
        "nodes": max(values.get("nodes", ()), default=hosts),
        "transports": list(values.get("transport", ())),
        "channels": max(values.get("channels", ()), default=None),
        "nvls": any(values["nvls"]) if "nvls" in values else None,
        "warnings": list(dict.fromkeys(text for process in seen for text in process.warnings))[:_WARNINGS],
    }


class NcclText:
    """The processes that print into one text, by host and process id; `processes` are to be summarised."""

    def __init__(self) -> None:
        self._processes: dict[tuple[str, str], NcclProcess] = {}

    def feed(self, line: str) -> None:
        """Read one line."""
        if not _may_be_nccl(line):
            return
        head = _HEAD.search(line)
        process = ("", "") if head is None else (head["host"], head["pid"])
        self._processes.setdefault(process, NcclProcess()).feed(line)

    def result(self) -> NcclSummary | None:
        """Return the contract's `nccl` object, None where no line is NCCL's."""
        return summary(self._processes.values())


def _may_be_nccl(line: str) -> bool:
    """Return whether a line contains NCCL's name; there may be a million lines, and looking for a word is fast."""
    return ("CCL" in line and _WORD.search(line) is not None) or "NET/" in line


def _transport_of(match: re.Match[str]) -> tuple[str, bool]:
    """Return the name of a matched transport, and whether it is GPUDirect RDMA."""
    # Older versions have no name for shared memory.
    return match["net"] or match["near"] or "SHM/direct", "/GDRDMA" in match["rest"]


def _one_of(name: str, values: dict[Any, None]) -> Any:
    if name in _LARGEST:
        return max(values)
    first = next(iter(values))
    return any(values) if name in _ANY else list(first) if isinstance(first, tuple) else first
