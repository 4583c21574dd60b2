"""NCCL's output on this node.

In: a job's directory. Out: for its newest generation, the contract's `nccl` object, None where NCCL printed nothing;
and the network and connections of each rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from remote_agent.diagnose.nccl import NcclProcess, node_map, summary
from remote_agent.logs.catalogue import numbered
from remote_agent.text.names import GENERATION_FOLDER, RANK_FOLDER

if TYPE_CHECKING:
    from remote_agent.wire.documents import NcclNode, NcclSummary

# NCCL prints its facts when it starts: later lines of a long log change nothing.
HEAD_BYTES = 512 * 1024
# All ranks print the same except for their own connections.
RANKS = 16
_FILES = ("nccl.log", "stdout.log", "stderr.log")


def read_facts(root: Path) -> NcclSummary | None:
    """Return the contract's `nccl` object from the logs below `root`; it may take some 10 ms."""
    generations = numbered(root, GENERATION_FOLDER)
    folders = numbered(generations[-1][1], RANK_FOLDER)[:RANKS] if generations else []
    return summary(_read(folder) for _, folder in folders)


def read_map(root: Path, known: str = "") -> NcclNode:
    """Return `generation`, `stamp` and the ranks' NCCL output (`diagnose.nccl`), without the output if `known` is the
    stamp. It may take some 100 ms.
    """
    generations = numbered(root, GENERATION_FOLDER)
    if not generations:
        return {"generation": -1, "stamp": ""}
    generation, newest = generations[-1]
    folders = numbered(newest, RANK_FOLDER)
    sizes = [min(HEAD_BYTES, _size(folder / name)) for _, folder in folders for name in _FILES]
    stamp = f"{generation}:{sum(sizes)}"
    answer: NcclNode = {"generation": generation, "stamp": stamp}
    if stamp == known:
        return answer
    return {**answer, **node_map((rank, _read(folder)) for rank, folder in folders)}


def _read(folder: Path) -> NcclProcess:
    process = NcclProcess()
    for line in _lines(folder):
        process.feed(line)
    return process


def _lines(folder: Path) -> Iterator[str]:
    """Yield the lines of a rank that may be NCCL's."""
    for name in _FILES:
        for line in _head(folder / name).split(b"\n"):
            if b"CCL" in line or b"NET/" in line:
                yield line.decode("utf-8", "replace")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(HEAD_BYTES)
    except OSError:
        return b""
