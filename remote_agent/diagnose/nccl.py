"""What a text says of NCCL (and RCCL): versions, network, ranks, how they are connected.

In: lines. Out: the contract's `nccl` object; a fact that the text does not tell is None or empty, never guessed.
"""

from __future__ import annotations

import re
from typing import Any

from remote_agent.diagnose.shapes import clip

_LINE = re.compile(r"\b[NR]CCL\b")
VERSION = re.compile(r"\b[NR]CCL version\s*:?\s*(\d+\.\d+(?:\.\d+)?(?:\+\w+\.?\d*)?)")
# A plug-in's name may have several words, `NCCL RDMA Plugin v8`; what else stands behind it is none of it.
NETWORK = r"Using network (?P<name>[\w.-]+(?: (?![NR]CCL\b)(?:[A-Z][\w.-]*|v\d+)(?![\w.:-])){0,4})"
_NETWORK = re.compile(rf"{NETWORK}|NET/(?P<own>IB|Socket) : Using")
_OOB = re.compile(r"(?:OOB|Bootstrap\s*: Using|NET/Socket\s*: Using)(?P<list>[^;\n]*)")
INTERFACE = re.compile(r"(?:\[\d+\])?(?<![\w.@-])([A-Za-z][\w.@-]*):(?=[\da-fA-F.:%\w-]*<\d+>)")
_RANKS = re.compile(r"\bn[Rr]anks (\d+)")
_NODES = re.compile(r"\bnNodes (\d+)")
_HOST = re.compile(r"(?<![\w.-])([A-Za-z0-9][\w.-]*):\d+:\d+ \[\d+\]")
# A network has the name of its plug-in, which has several words only where a device's number follows.
TRANSPORT = (
    r"\bvia (?:(?P<net>(?:COLL)?NET/(?:[\w.-]+(?: [\w.-]+){0,4}(?=/\d)|[\w.-]+))"
    r"|(?P<near>[A-Z][A-Za-z0-9_]*(?:/[A-Za-z][A-Za-z_]*)?(?: pointer)?)"
    r"|direct shared memory\b)(?P<rest>(?:/\S*)?)"
)
_TRANSPORT = re.compile(TRANSPORT)
_SOCKET = re.compile(r"/(\d+)")
CHANNELS = re.compile(r"\b(\d+) coll channels")
_NVLS_CHANNELS = re.compile(r"\b(\d+) nvls channels")
_NVLS_USED = re.compile(r"NVLS (?:comm|multicast|Creating|Bind)|\bConnected NVLS\b", re.I)
_NVLS_AWAY = re.compile(r"NVLS multicast support is not available")
_WARNING = re.compile(r"\b[NR]?CCL WARN (?P<text>.+)")
_WARNINGS = 20


def transport_of(found: re.Match[str]) -> tuple[str, bool]:
    """Return the name of a transport that TRANSPORT has found, and whether it is GPUDirect RDMA."""
    # Shared memory has no name in older versions.
    return found["net"] or found["near"] or "SHM/direct", "/GDRDMA" in found["rest"]


def says_nvls(text: str) -> bool | None:
    """Return whether a line tells that NVLS is in use, None where it tells nothing of it."""
    if _NVLS_AWAY.search(text):
        return False
    counts = _NVLS_CHANNELS.findall(text)
    if counts:
        return any(map(int, counts))
    return True if _NVLS_USED.search(text) else None


class NcclFacts:
    """Facts as lines come by; `result` tells them."""

    def __init__(self) -> None:
        self._seen = False
        self._versions: dict[str, None] = {}
        self._chosen: dict[str, None] = {}
        self._offered: dict[str, None] = {}
        self._bootstrap: dict[str, None] = {}
        self._sockets: dict[str, list[str]] = {}
        """By host: the interfaces that NET/Socket counts as its devices."""
        self._hosts: dict[str, None] = {}
        self._transports: dict[str, None] = {}
        self._warnings: dict[str, None] = {}
        self._ranks: list[int] = []
        self._nodes: list[int] = []
        self._channels: list[int] = []
        self._nvls: bool | None = None

    def feed(self, text: str) -> None:
        """Take one line in."""
        # There may be a million lines: most hold none of the words, and a look for a word costs little.
        if not ("CCL" in text and _LINE.search(text)) and "NET/" not in text:
            return
        self._seen = True
        if "version" in text:
            self._versions.update(dict.fromkeys(VERSION.findall(text)))
        found = _HOST.search(text)
        host = found[1] if found is not None else ""
        if host:
            self._hosts[host] = None
        if "Using" in text or "OOB" in text:
            self._network(text, host)
        if "anks" in text or "nNodes" in text:
            self._ranks += [int(number) for number in _RANKS.findall(text)]
            self._nodes += [int(number) for number in _NODES.findall(text)]
        if "via" in text:
            self._connected(text, host)
        if "NVLS" in text or "channels" in text:
            self._channels += [int(number) for number in CHANNELS.findall(text)]
            self._multicast(text)
        warning = _WARNING.search(text) if "WARN" in text else None
        if warning is not None and len(self._warnings) < _WARNINGS:
            self._warnings[clip(warning["text"])] = None

    def _connected(self, text: str, host: str) -> None:
        for found in _TRANSPORT.finditer(text):
            name, direct = transport_of(found)
            self._transports[name] = None
            if direct:
                self._transports["GDRDMA"] = None
            device = _SOCKET.match(found["rest"]) if name == "NET/Socket" else None
            if device is not None:
                number = int(device[1])
                self._bootstrap.update(dict.fromkeys(self._sockets.get(host, [])[number : number + 1]))

    def _multicast(self, text: str) -> None:
        nvls = says_nvls(text)
        if nvls is not None:
            # One communicator may have it where another, of fewer GPUs, has not.
            self._nvls = nvls or bool(self._nvls)

    def _network(self, text: str, host: str) -> None:
        network = _NETWORK.search(text)
        if network is not None:
            if network["name"]:
                self._chosen[network["name"]] = None
            else:
                self._offered[network["own"]] = None
        addresses = _OOB.search(text)
        if addresses is not None:
            # The first is the one that is used; the others are there too, and used where a channel goes over them.
            names = INTERFACE.findall(addresses["list"])
            self._bootstrap.update(dict.fromkeys(names[:1]))
            if addresses[0].startswith("NET/Socket"):
                self._sockets[host] = names

    def result(self) -> dict[str, Any] | None:
        """Return the facts, None where the text holds no line of NCCL."""
        if not self._seen:
            return None
        hosts = len(self._hosts) or None
        return {
            "versions": list(self._versions),
            "networks": list(self._chosen or self._offered),
            "interfaces": list(self._bootstrap),
            "nranks": max(self._ranks, default=None),
            "nodes": max(self._nodes, default=hosts),
            "transports": list(self._transports),
            "channels": max(self._channels, default=None),
            "nvls": self._nvls,
            "warnings": list(self._warnings),
        }
