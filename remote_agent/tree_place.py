"""Put a sync's plan in place: the contents that have arrived become the files of the tree.

In: a Plan whose contents are all in `incoming/` or in the tree. Out: `trees/<tree>/` as the manifest says, state.json.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
import time
from typing import TYPE_CHECKING

from remote_agent.tree_manifest import State, stamp

if TYPE_CHECKING:
    from pathlib import Path

    from remote_agent.tree_manifest import File, Plan

READ_SIZE = 1024 * 1024
# Beside the tree: the contents of the versions that are kept, by hash.
BLOBS = "versions/blobs"


def hash_file(path: Path) -> str:
    """Return the sha256 of a file; raises OSError."""
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(READ_SIZE):
            digest.update(chunk)
    return digest.hexdigest()


def complete(incoming: Path) -> set[str]:
    """Return the contents that have arrived as a whole, by hash."""
    try:
        return {name for name in os.listdir(incoming) if "." not in name}
    except FileNotFoundError:
        return set()


def put_in_place(plan: Plan, digest: str) -> None:
    """Make the tree what the manifest says; raises OSError."""
    _set_aside(plan)
    _stage_moved(plan)
    _remove_gone(plan)
    _write(plan, digest)


def _set_aside(plan: Plan) -> None:
    """Keep what was changed on the node under replaced/<time>/, out of the way of the operator's version."""
    if not plan.conflicts:
        return
    keep = plan.side / "replaced" / time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    for path in plan.conflicts:
        place = keep / path
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.replace(plan.root / path, place)
        plan.present.pop(path, None)


def _stage_moved(plan: Plan) -> None:
    """Copy contents that lie at another path, before that is replaced or removed, or with a version that is kept."""
    incoming = plan.side / "incoming"
    arrived = complete(incoming)
    source = {sha: plan.side / BLOBS / sha for sha in plan.kept}
    source.update({sha: plan.root / path for path, sha in plan.present.items()})
    for path in plan.changed:
        file = plan.manifest.files.get(path)
        if file is None or file.sha256 in arrived or plan.present.get(path) == file.sha256:
            continue
        shutil.copyfile(source[file.sha256], incoming / f"{file.sha256}.copy")
        os.replace(incoming / f"{file.sha256}.copy", incoming / file.sha256)
        arrived.add(file.sha256)


def _remove_gone(plan: Plan) -> None:
    for path in plan.removed:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(plan.root / path)
    needed = plan.manifest.parents()
    for path in sorted(plan.state.dirs, reverse=True):
        if path not in needed:
            # Not empty means that the script has put something there.
            with contextlib.suppress(OSError):
                os.rmdir(plan.root / path)


def _write(plan: Plan, digest: str) -> None:
    manifest = plan.manifest
    for path in sorted(manifest.parents()):
        place = plan.root / path
        place.mkdir(mode=0o700, exist_ok=True)
        if path in manifest.dirs:
            # The owner must be able to write, or the next sync could not.
            os.chmod(place, manifest.dirs[path] | 0o700)
    changed = set(plan.changed)
    uses: dict[str, int] = {}
    for path, file in manifest.files.items():
        if path in changed and plan.present.get(path) != file.sha256:
            uses[file.sha256] = uses.get(file.sha256, 0) + 1
    for path, file in manifest.files.items():
        if path in changed:
            _write_file(plan, path, file, uses)
    for path, target in manifest.links.items():
        if path in changed:
            temporary = plan.side / "incoming" / f"{secrets.token_hex(8)}.link"
            os.symlink(target, temporary)
            os.replace(temporary, plan.root / path)
    stamps = {path: stamp(os.lstat(plan.root / path)) for path in manifest.files}
    dirs = dict.fromkeys(manifest.parents(), 0o700)
    State(manifest.files, stamps, manifest.links, dirs, digest).save(plan.side / "state.json")


def _write_file(plan: Plan, path: str, file: File, uses: dict[str, int]) -> None:
    place = plan.root / path
    if plan.present.get(path) == file.sha256:
        os.chmod(place, file.mode)
        return
    blob = plan.side / "incoming" / file.sha256
    uses[file.sha256] -= 1
    if uses[file.sha256]:
        copy = blob.with_suffix(".copy")
        shutil.copyfile(blob, copy)
        blob = copy
    os.chmod(blob, file.mode)
    os.replace(blob, place)
