"""What the ranks of this node let NCCL say.

In: a job's directory. Out: the contract's `nccl` object of the newest generation, None where NCCL said nothing.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from remote_agent.diagnose.nccl import NcclFacts

# NCCL tells of itself when it starts: later lines of a long log change nothing.
HEAD_BYTES = 512 * 1024
# Every rank says the same but for its own connections.
RANKS = 16
_GENERATION = re.compile(r"generation_(\d+)\Z")
_RANK = re.compile(r"rank_(\d+)\Z")


def read_facts(root: Path) -> dict[str, Any] | None:
    """Return what the logs below `root` tell; it may take some 10 ms."""
    facts = NcclFacts()
    generations = _numbered(root, _GENERATION)
    for folder in _numbered(generations[-1], _RANK)[:RANKS] if generations else ():
        for name in ("nccl.log", "stdout.log", "stderr.log"):
            for line in _head(folder / name).split(b"\n"):
                if b"CCL" in line or b"NET/" in line:
                    facts.feed(line.decode("utf-8", "replace"))
    return facts.result()


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
