"""The jobs that have a directory on this node: list them, remove the finished ones.

In: `jobs/`. Out: answers of the `jobs` and `clean` requests.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
from pathlib import Path
from typing import Any

from remote_agent.base.files import read_json
from remote_agent.base.paths import Home, JobFiles, agent_alive, lock_agent
from remote_agent.wire import JobSpec, Problem, SpecError
from remote_agent.wire.events import ENDED_STATES

# The states of this many jobs are remembered.
KEPT = 256


def describe(files: JobFiles) -> dict[str, Any]:
    """Return what this node knows of one job without asking its agent; raises OSError."""
    pid = agent_alive(files)
    spec = read_json(files.spec)
    described: dict[str, Any] = {
        "job": files.name,
        "node": read_json(files.node).get("node"),
        "live": pid is not None,
        "agent_pid": pid,
        "tree": spec.get("tree"),
        "script": spec.get("script"),
        "created_ns": spec.get("created_ns"),
        "updated_ns": _newest(files.events, files.spec, files.root),
        "state": "starting",
        "generation": 0,
        "world_size": 0,
    }
    with contextlib.suppress(SpecError):
        paths = files.spec, files.events
        state, generation, world_size = _shown(*paths, *map(_stamp, paths))
        described.update(state=state, generation=generation, world_size=world_size)
    return described


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Return what is different once a file has changed; None where there is none."""
    try:
        info = path.stat()
    except OSError:
        return None
    return info.st_ino, info.st_size, info.st_mtime_ns


@functools.lru_cache(maxsize=KEPT)
def _shown(spec: Path, journal: Path, *stamps: tuple[int, int, int] | None) -> tuple[str, int, int]:
    """Return state, generation and world size that a journal shows; raises SpecError.

    An operator's home screen asks every few seconds, for all jobs: a journal is read again once it has changed.
    """
    # Folding the journal needs half of the agent, which a mere connection does not load.
    from remote_agent.coordinator.journal import read_records
    from remote_agent.coordinator.replay import fold
    from remote_agent.coordinator.status import job_state

    state = fold(JobSpec.from_json(read_json(spec)), read_records(journal))
    return job_state(state), max(0, state.generation), len(state.ranks)


def _newest(*paths: Path) -> int | None:
    for path in paths:
        try:
            return path.stat().st_mtime_ns
        except OSError:
            continue
    return None


def running_from(home: Home, tree: str, but: str = "") -> str | None:
    """Return a job, but not that one, that is not over and whose agent runs here from a tree, or None."""
    for name in home.job_names():
        if name == but:
            continue
        files = home.job(name)
        uses_it = read_json(files.spec).get("tree") == tree and agent_alive(files) is not None
        if uses_it and describe(files)["state"] not in ENDED_STATES:
            return name
    return None


def clean(home: Home, job: object) -> dict[str, Any]:
    """Remove the files of one job that has no agent here, or of all jobs that are over; raises Problem."""
    if job is None:
        chosen = [home.job(name) for name in home.job_names()]
    else:
        chosen = [home.job(job)]
        if not chosen[0].root.is_dir():
            raise Problem("no_such_job", f"no job named {job} here", "`supervisor jobs` lists the jobs")
    removed, kept, size = [], [], 0
    for files in chosen:
        # A job without an agent here may still run on other nodes: its files are removed only if it is named.
        freed = _remove(files) if job is not None or _is_over(files) else None
        if freed is None:
            kept.append(files.name)
        else:
            removed.append(files.name)
            size += freed
    if not home.job_names() and home.standby.is_dir():
        # The list of modules that scripts load outlives their jobs, but is removed with the last one.
        size += _size(home.standby)
        shutil.rmtree(home.standby, ignore_errors=True)
    size += _remove_environments(home)
    return {"removed": removed, "bytes": size, "kept": kept}


def _remove_environments(home: Home) -> int:
    """Remove the environments that no job uses any more, and what killed builds have left; returns their size."""
    if not home.environments.is_dir():
        return 0
    # A mere connection does not load what builds environments.
    from remote_agent.runtime.environments import Environments
    from remote_agent.runtime.runtime import used_by

    def used() -> set[str]:
        return {digest for name in home.job_names() for digest in used_by(home.job(name))}

    all_here, size = Environments(home), 0
    all_here.end_orphans()
    for path in all_here.unused(used()):
        freed = _size(path)
        with contextlib.suppress(OSError, Problem):
            size += freed if all_here.remove(path, used) else 0
    return size


def _is_over(files: JobFiles) -> bool:
    try:
        return describe(files)["state"] in ENDED_STATES
    except OSError:
        return False


def _remove(files: JobFiles) -> int | None:
    """Remove a job's directory and return its size, or None when its agent is alive."""
    # The lock is held until the end, so that no agent can start in a directory that is being removed.
    lock = lock_agent(files)
    if lock is None:
        return None
    try:
        size = _size(files.root)
        tree = read_json(files.spec).get("tree")
        shutil.rmtree(files.root)
        size += _remove_versions(files.home, tree) if isinstance(tree, str) else 0
    except OSError as error:
        raise Problem("clean", f"{error.filename}: cannot be removed: {error.strerror}") from error
    finally:
        os.close(lock)
    return size


def _remove_versions(home: Home, tree: str) -> int:
    """Remove the previous versions of a tree, unless a job may go back to them; what the script wrote stays."""
    versions = home.tree(tree).parent / ".state" / tree / "versions"
    if running_from(home, tree) is not None or not versions.is_dir():
        return 0
    size = _size(versions)
    shutil.rmtree(versions)
    return size


def _size(root: Path) -> int:
    total = 0
    for directory, _dirs, names in os.walk(root):
        for name in names:
            info = os.lstat(os.path.join(directory, name))
            # What has another name, in the cache of uv, stays.
            total += info.st_size if info.st_nlink == 1 else 0
    return total
