"""What the ranks of this node let NCCL say.

In: a job's directory. Out: of its newest generation, the contract's `nccl` object, None where NCCL said
nothing; and what each rank told of its network and connections.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from remote_agent.diagnose.nccl import NcclFacts
from remote_agent.diagnose.nccl_map import RankMap, node_map

# NCCL tells of itself when it starts: later lines of a long log change nothing.
HEAD_BYTES = 512 * 1024
# Every rank says the same but for its own connections.
RANKS = 16
_FILES = ("nccl.log", "stdout.log", "stderr.log")
_GENERATION = re.compile(r"generation_(\d+)\Z")
_RANK = re.compile(r"rank_(\d+)\Z")


def read_facts(root: Path) -> dict[str, Any] | None:
    """Return what the logs below `root` tell; it may take some 10 ms."""
    facts = NcclFacts()
    generations = _numbered(root, _GENERATION)
    for folder in _numbered(generations[-1], _RANK)[:RANKS] if generations else ():
        for line in _lines(folder):
            facts.feed(line)
    return facts.result()


def read_map(root: Path, known: str = "") -> dict[str, Any]:
    """Return `generation`, `stamp` and what its ranks told (`diagnose.nccl_map`); nothing more where `known` is the
    stamp. It may take some 100 ms.
    """
    generations = _numbered(root, _GENERATION)
    if not generations:
        return {"generation": -1, "stamp": ""}
    folders = _numbered(generations[-1], _RANK)
    sizes = [min(HEAD_BYTES, _size(folder / name)) for folder in folders for name in _FILES]
    generation = generations[-1].name.partition("_")[2]
    stamp = f"{generation}:{sum(sizes)}"
    told = {"generation": int(generation), "stamp": stamp}
    if stamp == known:
        return told
    return {**told, **node_map((_number(folder), _told(folder)) for folder in folders)}


def _told(folder: Path) -> RankMap:
    told = RankMap()
    for line in _lines(folder):
        told.feed(line)
    return told


def _lines(folder: Path) -> Iterator[str]:
    """Yield the lines of a rank that may be NCCL's."""
    for name in _FILES:
        for line in _head(folder / name).split(b"\n"):
            if b"CCL" in line or b"NET/" in line:
                yield line.decode("utf-8", "replace")


def _number(folder: Path) -> int:
    return int(folder.name.partition("_")[2])


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _numbered(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    try:
        found = [(int(match[1]), path) for path in folder.iterdir() if (match := pattern.match(path.name))]
    except OSError:
        return []
    return [path for _, path in sorted(found)]


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(HEAD_BYTES)
    except OSError:
        return b""
