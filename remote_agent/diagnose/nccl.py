"""What a text says of NCCL (and RCCL): versions, network, ranks, how they are connected.

In: lines. Out: the contract's `nccl` object; a fact that the text does not tell is None or empty, never guessed.
"""

from __future__ import annotations

import re
from typing import Any

from remote_agent.diagnose.shapes import clip

_LINE = re.compile(r"\b[NR]CCL\b")
VERSION = re.compile(r"\b[NR]CCL version\s*:?\s*(\d+\.\d+(?:\.\d+)?(?:\+\w+\.?\d*)?)")
_NETWORK = re.compile(r"Using network (?P<name>[\w.-]+)|NET/(?P<own>IB|Socket) : Using")
_OOB = re.compile(r"(?:OOB|Bootstrap\s*: Using|NET/Socket\s*: Using)(?P<list>[^;\n]*)")
INTERFACE = re.compile(r"(?:\[\d+\])?(?<![\w.@-])([A-Za-z][\w.@-]*):(?=[\da-fA-F.:%\w-]*<\d+>)")
_RANKS = re.compile(r"\bn[Rr]anks (\d+)")
_NODES = re.compile(r"\bnNodes (\d+)")
_HOST = re.compile(r"(?<![\w.-])([A-Za-z0-9][\w.-]*):\d+:\d+ \[\d+\]")
_TRANSPORT = re.compile(r"\bvia ([A-Z][A-Za-z0-9_]*(?:/[A-Za-z][A-Za-z_]*)?(?: pointer)?)(?:/\d+)?(/GDRDMA)?")
CHANNELS = re.compile(r"\b(\d+) coll channels")
NVLS_USED = re.compile(r"NVLS (?:comm|multicast|Creating|Bind)|\bConnected NVLS\b", re.I)
NVLS_AWAY = re.compile(r"NVLS multicast support is not available")
_WARNING = re.compile(r"\b[NR]?CCL WARN (?P<text>.+)")
_WARNINGS = 20


class NcclFacts:
    """Facts as lines come by; `result` tells them."""

    def __init__(self) -> None:
        self._seen = False
        self._versions: dict[str, None] = {}
        self._chosen: dict[str, None] = {}
        self._offered: dict[str, None] = {}
        self._bootstrap: dict[str, None] = {}
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
        host = _HOST.search(text)
        if host is not None:
            self._hosts[host[1]] = None
        if "Using" in text or "OOB" in text:
            self._network(text)
        if "anks" in text or "nNodes" in text:
            self._ranks += [int(number) for number in _RANKS.findall(text)]
            self._nodes += [int(number) for number in _NODES.findall(text)]
        if "via" in text:
            self._connected(text)
        if "NVLS" in text or "channels" in text:
            self._channels += [int(number) for number in CHANNELS.findall(text)]
            self._multicast(text)
        warning = _WARNING.search(text) if "WARN" in text else None
        if warning is not None and len(self._warnings) < _WARNINGS:
            self._warnings[clip(warning["text"])] = None

    def _connected(self, text: str) -> None:
        for name, direct in _TRANSPORT.findall(text):
            self._transports[name] = None
            if direct:
                self._transports["GDRDMA"] = None

    def _multicast(self, text: str) -> None:
        if NVLS_AWAY.search(text):
            self._nvls = self._nvls or False
        elif NVLS_USED.search(text):
            self._nvls = True

    def _network(self, text: str) -> None:
        network = _NETWORK.search(text)
        if network is not None:
            if network["name"]:
                self._chosen[network["name"]] = None
            else:
                self._offered[network["own"]] = None
        addresses = _OOB.search(text)
        if addresses is not None:
            # The first is the one that is used; the others are there too.
            for name in INTERFACE.findall(addresses["list"])[:1]:
                self._bootstrap[name] = None

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
