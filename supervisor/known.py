"""The inventories that were used on this machine, and their jobs: what completion offers without asking any host.

In: inventories as they are loaded, jobs as hosts report them. Out: `recall()`, read from the user's state folder; a
broken file is ignored.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from remote_agent.wire import JOB_NAME
from supervisor import paths

if TYPE_CHECKING:
    from pathlib import Path

    from supervisor.inventory import Inventory

INVENTORIES_KEPT: Final = 50
JOBS_KEPT: Final = 50
LARGEST: Final = 64 * 1024


class KnownJob(NamedTuple):
    """A job as it was last seen."""

    job: str
    state: str
    world_size: int


class Known(NamedTuple):
    """An inventory and its jobs."""

    words: str
    """The arguments that name it on a command line: a path or an option; "" for this machine only."""
    jobs: tuple[KnownJob, ...]
    """The one that was seen last comes first."""


def recall() -> list[Known]:
    """Return the known inventories that are still there, the one that was used last first."""
    known = (_read(path) for path in paths.kept(_folder()))
    return [one for one in known if one is not None and (one.words[:1] != "/" or os.path.exists(one.words))]


def note(inventory: Inventory, jobs: Sequence[Mapping[str, object]] = (), *, complete: bool = False) -> None:
    """Keep an inventory and its jobs (documents with job, state, world_size), newest first; `complete`: no others."""
    if inventory.words is None:
        return
    path = _folder() / f"{hashlib.sha256(inventory.words.encode()).hexdigest()[:16]}.json"
    before = _read(path)
    earlier = {one.job: one for one in before.jobs} if before is not None else {}
    merged = {job.job: job for one in jobs if (job := _job(one, earlier.get(str(one.get("job"))))) is not None}
    if not complete:
        merged |= {name: job for name, job in earlier.items() if name not in merged}
    data = {"words": inventory.words, "jobs": [job._asdict() for job in merged.values()][:JOBS_KEPT]}
    paths.keep(path, data, INVENTORIES_KEPT)


def _folder() -> Path:
    return paths.state_dir() / "known"


def _read(path: Path) -> Known | None:
    data = paths.recall(path, LARGEST)
    if not isinstance(data.get("words"), str) or not isinstance(data.get("jobs"), list):
        return None
    jobs = (_job(one, None) for one in data["jobs"] if isinstance(one, dict))
    return Known(data["words"], tuple(one for one in jobs if one is not None))


def _job(data: Mapping[str, object], before: KnownJob | None) -> KnownJob | None:
    """Return a job of which only some values may be known; None if it is not a job's document."""
    name, state, world = data.get("job"), data.get("state"), data.get("world_size")
    if not isinstance(name, str) or not JOB_NAME.fullmatch(name):
        return None
    state = state if isinstance(state, str) else before.state if before is not None else ""
    world = world if type(world) is int else before.world_size if before is not None else 0
    return KnownJob(name, state, world)
