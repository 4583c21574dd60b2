"""What a node knows of its torch, handed from test to test: to find it out takes four seconds of a processor each time.

In: homes of agents before and after they ran. Out: their `torch.json`. A node takes only what its own installation,
interpreter and environment have named, so facts of another torch do not count there.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from pathlib import Path

NAME = "torch.json"


def _shared() -> Path:
    return Path(tempfile.gettempdir()) / NAME


def lend(home: Path) -> None:
    """Give a home what nodes of this run have found out before."""
    with contextlib.suppress(FileNotFoundError):
        shutil.copyfile(_shared(), home / NAME)


def keep(home: Path) -> None:
    """Keep for later nodes of this run what this one has found out."""
    found = _read(home / NAME)
    known = _read(_shared())
    if found.keys() - known.keys():
        # Two processes of the run at once: one of them finds out again.
        descriptor, part = tempfile.mkstemp(dir=_shared().parent)
        with os.fdopen(descriptor, "w") as file:
            json.dump({**known, **found}, file)
        Path(part).replace(_shared())


def _read(path: Path) -> dict[str, object]:
    try:
        found: dict[str, object] = json.loads(path.read_text())
    except OSError:
        return {}
    return found
