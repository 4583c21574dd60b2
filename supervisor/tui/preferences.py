"""What a user has set on the screens of one job, kept for the next time.

In: the id of a job. Out: its Preferences, read from and written to the user's state folder; a broken file is ignored.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Final, TypeVar

from remote_agent.wire import JOB_NAME
from supervisor import paths
from supervisor.logs.selection import ALL, LEVELS, RecordFilter

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


# A file has a few hundred bytes, and a few more for each mark.
JOBS_KEPT: Final = 200
MARKS_KEPT: Final = 4096
LARGEST: Final = 256 * 1024
T = TypeVar("T")


@dataclasses.dataclass
class Preferences:
    """What the user has set for one job."""

    theme: str = ""
    metric: str = "state"
    problems_only: bool = False
    recent: bool = False
    """Whether charts show the last minutes, not the whole run."""
    log_time: bool = True
    log_fold: bool = False
    log_wrap: bool = False
    log_filter: RecordFilter = ALL
    nodes: list[str] = dataclasses.field(default_factory=list)
    """The marked nodes, in the order in which they were marked."""
    ranks: list[int] = dataclasses.field(default_factory=list)
    """The marked ranks."""

    def toggle_mark(self, node: str | None, rank: int | None) -> None:
        """Mark a rank or a node, or remove its mark."""
        if rank is not None:
            _toggle(self.ranks, rank)
        elif node:
            _toggle(self.nodes, node)


def _toggle(marked: list[T], one: T) -> None:
    if one in marked:
        marked.remove(one)
    else:
        marked.append(one)


def _file(job: str) -> Path | None:
    return paths.state_dir() / "jobs" / f"{job}.json" if JOB_NAME.fullmatch(job) else None


def recall(job: str) -> Preferences:
    """Return the preferences of a job; what is missing or invalid has its default."""
    path = _file(job)
    return _read(paths.recall(path, LARGEST)) if path is not None else Preferences()


def _read(data: Mapping[str, object]) -> Preferences:
    preferences = Preferences()
    for name, default in dataclasses.asdict(preferences).items():
        value = data.get(name)
        if type(value) is not type(default):
            continue
        if isinstance(value, dict):
            value = _filter(value)
        if isinstance(value, list):
            kind = str if name == "nodes" else int
            value = [one for one in value[:MARKS_KEPT] if type(one) is kind]
        setattr(preferences, name, value)
    return preferences


def _filter(kept: Mapping[str, object]) -> RecordFilter:
    lists = (kept.get(name) for name in ("include", "exclude"))
    include, exclude = (tuple(one for one in each if type(one) is str) if type(each) is list else () for each in lists)
    return RecordFilter(include, exclude, str(kept["level"]) if kept.get("level") in LEVELS else "")


def keep(job: str, preferences: Preferences) -> None:
    """Save the preferences of a job, and delete those of the jobs that were viewed longest ago."""
    path = _file(job)
    if path is not None:
        paths.keep(path, dataclasses.asdict(preferences), JOBS_KEPT)
