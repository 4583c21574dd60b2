"""The node's side of the work tree sync: say what is missing, take it, put it in place.

In: a manifest, contents named by their hash. Out: `trees/<tree>/` as the operator has it. Files that the script made
there are never touched; a synced file that the script changed is moved aside before it is replaced, never lost.

Beside the trees lies `trees/.state/<tree>/`: lock, state.json, incoming/, replaced/ and versions/.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import os
import shutil
import stat
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remote_agent.paths import try_lock
from remote_agent.tree_manifest import Plan, State, pack, stamp, unpack
from remote_agent.tree_place import complete, hash_file, put_in_place
from remote_agent.tree_versions import Versions, as_it_lies
from remote_agent.wire import Problem

if TYPE_CHECKING:
    from collections.abc import Iterable

    from remote_agent.paths import Home
    from remote_agent.tree_manifest import File

# Left free on the disk for the job's own first files.
RESERVE = 16 * 1024 * 1024
_FULL = (errno.ENOSPC, errno.EDQUOT)


def free_bytes(path: Path) -> int:
    """Return what this user may still write where the path is; raises OSError."""
    info = os.statvfs(path)
    return info.f_bavail * info.f_frsize


def full(path: Path, needed: int) -> Problem:
    """Return the refusal for a disk that has no room."""
    try:
        free = f"{free_bytes(path):,}"
    except OSError:
        free = "an unknown number of"
    return Problem(
        "disk_full",
        f"no space left for {path}: {needed:,} bytes are needed, {free} are free",
        "free some space (supervisor clean), or set SUPERVISOR_HOME through env to a larger disk",
    )


class TreeSync:
    """The sync of one bridge: at most one tree at a time, locked from plan to commit."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._lock: int | None = None
        self._plan: Plan | None = None
        self._hashing: dict[str, Any] = {}
        self.hashed_files = 0
        """How many files had to be read to know their content: 0 where nothing changed."""

    def lock(self, tree: str) -> bool:
        """Take the lock of a tree, or return False when another sync holds it; raises OSError, Problem."""
        self.close()
        side = self._side(tree)
        side.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(side / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        taken = False
        try:
            taken = try_lock(fd)
        finally:
            if not taken:
                os.close(fd)
        self._lock = fd if taken else None
        return taken

    def close(self) -> None:
        """Forget the plan and give the lock back; what came over the wire so far is kept for the next try."""
        self._plan = None
        self._hashing.clear()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def plan(self, tree: str, body: bytes) -> Plan:
        """Compare the disk with a manifest; the tree must be locked. Raises Problem, OSError."""
        manifest = unpack(body)
        root, side = self._home.tree(tree), self._side(tree)
        plan = Plan(tree, root, side, manifest, State.load(side / "state.json"), {}, {}, [], [], [])
        try:
            for place in (root, side / "incoming"):
                place.mkdir(mode=0o700, parents=True, exist_ok=True)
            _forget_unwanted(side / "incoming", {file.sha256 for file in manifest.files.values()})
            _check_directories(plan)
            for path in {**plan.state.files, **manifest.files}:
                self._look_at(plan, path)
            _check_files(plan)
            _compare(plan)
        except OSError as error:
            raise _translate(error, root, 0) from error
        plan.kept = Versions(side).contents()
        have = {*plan.present.values(), *complete(side / "incoming"), *plan.kept}
        wanted = {file.sha256: file.size for file in manifest.files.values()}
        plan.missing = {sha: size for sha, size in wanted.items() if sha not in have}
        needed = sum(manifest.files[path].size for path in plan.changed if path in manifest.files)
        if needed and needed + RESERVE > free_bytes(root):
            raise full(root, needed + RESERVE)
        self._plan = plan
        return plan

    def put(self, tree: str, parts: list[list[Any]], body: bytes, packed: bool) -> None:
        """Take pieces [sha256, offset, size, length] whose bytes follow each other in the body; raises Problem."""
        plan = self._current(tree)
        try:
            data = zlib.decompress(body) if packed else body
            at = 0
            for sha, offset, size, length in parts:
                self._put_one(plan, sha, offset, size, data[at : at + length])
                at += length
        except (ValueError, TypeError, zlib.error) as error:
            raise Problem("bad_piece", f"piece of a file: {error}") from error
        except OSError as error:
            raise _translate(error, plan.root, sum(plan.missing.values())) from error

    def in_place(self, tree: str) -> list[str]:
        """Return what the operator calls the contents that the last sync brought, if it ended."""
        digest = self._state(tree).digest if self._home.tree(tree).is_dir() else ""
        return [digest] if digest else []

    def digests(self, tree: str) -> list[str]:
        """Return what a group can be started from: what is in place, and the versions that are kept beside it."""
        return sorted({*self.in_place(tree), *Versions(self._side(tree)).digests()})

    def differences(self, tree: str, body: bytes) -> dict[str, Any]:
        """Return what a manifest changes of what is in place: paths with sizes, and what goes; raises Problem."""
        manifest, state = unpack(body), self._state(tree)
        changed = [[path, file.size] for path, file in manifest.files.items() if not _same(state.files.get(path), file)]
        changed += [[path, 0] for path, target in manifest.links.items() if state.links.get(path) != target]
        listed = {*manifest.files, *manifest.links}
        return {"changed": changed, "removed": [path for path in (*state.files, *state.links) if path not in listed]}

    def commit(self, tree: str, digest: str = "") -> Plan:
        """Put everything in place and give the lock back; raises Problem."""
        plan = self._whole(tree)
        try:
            put_in_place(plan, digest)
            shutil.rmtree(plan.side / "incoming", ignore_errors=True)
        except OSError as error:
            raise _translate(error, plan.root, sum(plan.missing.values())) from error
        self.close()
        return plan

    def stage(self, tree: str, digest: str, keep: Iterable[str] = ()) -> Plan:
        """Keep what has arrived beside the tree, which stays as it is, as is what lies there; raises Problem.

        `keep`: older versions that stay too.
        """
        plan = self._whole(tree)
        versions = Versions(plan.side)
        try:
            _keep_current(plan, versions)
            versions.add(plan, digest, plan.manifest)
            versions.prune({plan.state.digest, digest, *keep})
            shutil.rmtree(plan.side / "incoming", ignore_errors=True)
        except OSError as error:
            raise _translate(error, plan.root, sum(plan.missing.values())) from error
        self.close()
        return plan

    def switch(self, tree: str, digest: str) -> None:
        """Put a version in place that is kept beside the tree, from which nothing runs now; raises Problem.

        That and the one before are kept. The tree must be locked.
        """
        side, before = self._side(tree), self._state(tree)
        versions = Versions(side)
        plan = self.plan(tree, pack(versions.manifest(digest)))
        try:
            _keep_current(plan, versions)
            # Whoever dies in the middle leaves a tree that is called by no name, and is put in order by the next.
            dataclasses.replace(before, digest="").save(side / "state.json")
            put_in_place(self._whole(tree), digest)
            if before.digest:
                versions.prune({before.digest, digest})
            shutil.rmtree(side / "incoming", ignore_errors=True)
        except OSError as error:
            raise _translate(error, plan.root, 0) from error
        self.close()

    def _whole(self, tree: str) -> Plan:
        """Return the plan once all of its contents are here; raises Problem."""
        plan = self._current(tree)
        if not set(plan.missing) <= complete(plan.side / "incoming"):
            raise Problem("incomplete", f"tree {tree}: not all contents have arrived", "run it again")
        return plan

    def _state(self, tree: str) -> State:
        return State.load(self._side(tree) / "state.json")

    def _side(self, tree: str) -> Path:
        return self._home.tree(tree).parent / ".state" / tree

    def _current(self, tree: str) -> Plan:
        if self._plan is None or self._plan.name != tree:
            raise Problem("no_plan", f"tree {tree}: tree_plan must come first")
        return self._plan

    def _look_at(self, plan: Plan, path: str) -> None:
        """Learn the hash of what lies at a path, reading it only when its stamp is not the one we left."""
        place = plan.root / path
        try:
            info = os.lstat(place)
        except (FileNotFoundError, NotADirectoryError):
            return
        if not stat.S_ISREG(info.st_mode):
            return
        known = plan.state.files.get(path)
        if known is not None and plan.state.stamps.get(path) == stamp(info):
            plan.present[path] = known.sha256
            return
        self.hashed_files += 1
        plan.present[path] = hash_file(place)

    def _put_one(self, plan: Plan, sha: str, offset: int, size: int, data: bytes) -> None:
        if plan.missing.get(sha) != size or offset + len(data) > size:
            raise ValueError(f"{sha} was not asked for in this size")
        part = plan.side / "incoming" / f"{sha}.part"
        if offset == 0:
            self._hashing[sha] = hashlib.sha256()
        elif sha not in self._hashing or part.stat().st_size != offset:
            raise ValueError(f"{sha} at {offset} is out of order")
        with open(part, "wb" if offset == 0 else "ab", buffering=0) as file:
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]
        self._hashing[sha].update(data)
        if offset + len(data) == size:
            if self._hashing.pop(sha).hexdigest() != sha:
                part.unlink()
                raise Problem("changed", "a file changed while it was being sent", "run it again")
            os.replace(part, part.with_suffix(""))


def _translate(error: OSError, root: Path, needed: int) -> Problem:
    if error.errno in _FULL:
        return full(root, needed)
    named = error.filename2 or error.filename
    name = os.fsdecode(named) if isinstance(named, (str, bytes, os.PathLike)) else str(root)
    return Problem(
        "tree_conflict",
        f"{name}: {error.strerror}",
        "something on the node is in the way; remove it there, or exclude it here",
    )


def _keep_current(plan: Plan, versions: Versions) -> None:
    """Keep what is in place, as it lies, so that it can be gone back to; raises Problem, OSError."""
    digest = plan.state.digest
    if digest and digest not in versions.digests():
        versions.add(plan, digest, as_it_lies(plan))


def _same(known: File | None, file: File) -> bool:
    """Tell whether a file is the same code; another user's umask makes no other."""
    return known is not None and known.sha256 == file.sha256 and not (known.mode ^ file.mode) & 0o100


def _forget_unwanted(incoming: Path, wanted: set[str]) -> None:
    """Remove what an earlier sync left: halves of files, and contents that nobody wants any more."""
    for name in os.listdir(incoming):
        if name not in wanted:
            (incoming / name).unlink()


def _check_directories(plan: Plan) -> None:
    """Refuse to write through a symbolic link or over a file that we did not put where a directory must be."""
    ours = {*plan.state.files, *plan.state.links}
    for path in sorted(plan.manifest.parents()):
        try:
            info = os.lstat(plan.root / path)
        except (FileNotFoundError, NotADirectoryError):
            continue
        if stat.S_ISDIR(info.st_mode) or path in ours:
            continue
        kind = "a symbolic link" if stat.S_ISLNK(info.st_mode) else "a file"
        raise Problem(
            "tree_conflict",
            f"{plan.root / path} is {kind} on the node, but a directory here",
            "remove it there, or exclude it here",
        )


def _check_files(plan: Plan) -> None:
    """Refuse to put a file where a directory holds what we did not put there."""
    ours = {*plan.state.files, *plan.state.links}
    for path in (*plan.manifest.files, *plan.manifest.links):
        place = plan.root / path
        if path in plan.present or place.is_symlink() or not place.is_dir():
            continue
        held = (os.path.relpath(os.path.join(at, name), plan.root) for at, _, names in os.walk(place) for name in names)
        if path not in plan.state.dirs or not set(held) <= ours:
            raise Problem(
                "tree_conflict",
                f"{place} is a directory on the node, but a file here",
                "remove it there, or exclude it here",
            )


def _compare(plan: Plan) -> None:
    """Fill in what changes, what goes and what somebody on the node changed."""
    manifest, state = plan.manifest, plan.state
    for path, file in manifest.files.items():
        if plan.present.get(path) != file.sha256 or _mode(plan.root / path) != file.mode:
            plan.changed.append(path)
            if plan.present.get(path) != file.sha256 and _is_foreign(plan, path):
                plan.conflicts.append(path)
    for path, target in manifest.links.items():
        if _link(plan.root / path) != target:
            plan.changed.append(path)
            if _is_foreign(plan, path):
                plan.conflicts.append(path)
    plan.changed.extend(path for path in manifest.dirs if not (plan.root / path).is_dir())
    listed = {*manifest.files, *manifest.links}
    gone = [path for path in (*state.files, *state.links) if path not in listed]
    for path in gone:
        if os.path.lexists(plan.root / path) and _is_inside(plan, path) and not _is_foreign(plan, path):
            plan.removed.append(path)


def _is_foreign(plan: Plan, path: str) -> bool:
    """Tell whether a file or link lies at a path that is not what the last sync put there."""
    link = _link(plan.root / path)
    if link is not None:
        return plan.state.links.get(path) != link
    try:
        if not stat.S_ISREG(os.lstat(plan.root / path).st_mode):
            return False
    except OSError:
        return False
    known = plan.state.files.get(path)
    return known is None or plan.present.get(path) != known.sha256


def _is_inside(plan: Plan, path: str) -> bool:
    """Tell whether no directory on the way has become a symbolic link: never remove what lies elsewhere."""
    parent = os.path.dirname(path)
    return os.path.realpath(plan.root / parent) == os.path.join(os.path.realpath(plan.root), parent).rstrip("/")


def _mode(path: Path) -> int | None:
    try:
        return stat.S_IMODE(os.lstat(path).st_mode) & 0o777
    except OSError:
        return None


def _link(path: Path) -> str | None:
    try:
        return os.readlink(path)
    except OSError:
        return None
