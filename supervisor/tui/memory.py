"""What a user has set on the screen of one job, kept from one look at it to the next.

In: a job. Out: a Memory, from a file of the user's state folder and into it; a broken file is as if never written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from supervisor.paths import state_dir
from supervisor.session.filters import ALL, LEVELS, Filter
from supervisor.tui.logs import bookmarks

if TYPE_CHECKING:
    from supervisor.tui.logs.bookmarks import Mark

# Nobody looks at older jobs again; a file has some hundred bytes, and some 60 a bookmark.
JOBS_KEPT: Final = 200
MARKS_KEPT: Final = 4096
LARGEST: Final = 256 * 1024
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclasses.dataclass
class Memory:
    """What is kept of one job; whoever shows it reads and writes it here."""

    theme: str = ""
    metric: str = "state"
    problems_only: bool = False
    log_time: bool = True
    log_fold: bool = False
    log_wrap: bool = False
    log_filter: Filter = ALL
    nodes: list[str] = dataclasses.field(default_factory=list)
    """The marked nodes, in the order in which they were marked."""
    ranks: list[int] = dataclasses.field(default_factory=list)
    """The marked ranks."""
    bookmarks: list[Mark] = dataclasses.field(default_factory=list)
    """Lines of the logs, in order of time."""


def _file(job: str) -> Path | None:
    return state_dir() / "jobs" / f"{job}.json" if _NAME.fullmatch(job) else None


def recall(job: str) -> Memory:
    """What is kept of a job; what is missing or odd is as at the first time."""
    path = _file(job)
    try:
        if path is None or path.stat().st_size > LARGEST:
            return Memory()
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return Memory()
    return _read(data) if isinstance(data, dict) else Memory()


def _read(data: dict[str, Any]) -> Memory:
    found = Memory()
    for name, default in dataclasses.asdict(found).items():
        value = data.get(name)
        if type(value) is not type(default):
            continue
        if isinstance(value, dict):
            value = _filter(value)
        if isinstance(value, list):
            kind = str if name == "nodes" else int
            chosen = [one for one in value[:MARKS_KEPT] if type(one) is kind]
            value = bookmarks.read(value) if name == "bookmarks" else chosen
        setattr(found, name, value)
    return found


def _filter(kept: dict[str, Any]) -> Filter:
    lists = (kept.get(name) for name in ("include", "exclude"))
    include, exclude = (tuple(one for one in each if type(one) is str) if type(each) is list else () for each in lists)
    return Filter(include, exclude, kept["level"] if kept.get("level") in LEVELS else "")


def keep(job: str, memory: Memory) -> None:
    """Write what is kept of a job, and forget the jobs that were looked at longest ago."""
    path = _file(job)
    if path is None:
        return
    # A full or read-only disk must not spoil the way out.
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        draft.write_text(json.dumps(dataclasses.asdict(memory)), encoding="utf-8")
        draft.replace(path)
        kept = sorted(path.parent.glob("*.json"), key=lambda one: one.stat().st_mtime, reverse=True)
        for old in kept[JOBS_KEPT:]:
            old.unlink()
