"""The node's side of the work tree sync: report what is missing, receive it, put it in place.

In: a manifest, contents named by their hash. Out: `trees/<tree>/` as the operator has it. Files that the script created
there are not touched; a synced file that the script changed is moved to replaced/ before it is replaced.

`trees/.state/<tree>/` has the lock, state.json, incoming/, replaced/ and versions/: a manifest by digest, and blobs/ by
hash, which the versions share. A job can be switched to a version while its group runs from the tree.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import os
import secrets
import shutil
import stat
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remote_agent.base.files import atomic_write, disk_full, free_bytes, sync, try_lock
from remote_agent.tree.manifest import SHA256, File, Manifest, SyncPlan, SyncState, pack, stamp, unpack
from remote_agent.wire import Problem

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from remote_agent.base.paths import Home

# Kept free on the disk for the job's first files.
RESERVE = 16 * 1024 * 1024
_FULL = (errno.ENOSPC, errno.EDQUOT)
READ_SIZE = 1024 * 1024
# The contents of the kept versions, by hash.
BLOBS = "versions/blobs"


def left_in(plan: SyncPlan) -> list[str]:
    """Return what no sync has brought into a tree, newest first: files, and directories as `out/`.

    Directories in which synced files lie are searched; Python's own caches are not listed.
    """
    brought = {*plan.manifest.files, *plan.manifest.links, *plan.state.files}
    parents = plan.manifest.parents() | {path[: path.rindex("/")] for path in plan.state.files if "/" in path}
    entries: list[tuple[int, str]] = []
    waiting = [""]
    while waiting:
        base = waiting.pop()
        # A script that still runs may remove what we look at.
        with contextlib.suppress(OSError):
            for entry in os.scandir(plan.root / base):
                path = f"{base}{entry.name}"
                is_dir = entry.is_dir(follow_symlinks=False)
                if is_dir and path in parents:
                    waiting.append(f"{path}/")
                elif path not in brought and entry.name != "__pycache__":
                    entries.append((-entry.stat(follow_symlinks=False).st_mtime_ns, f"{path}/" if is_dir else path))
    return [path for _, path in sorted(entries)]


class TreeSync:
    """The syncs of one connection: one tree at a time, locked from plan to commit, or longer."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._lock: int | None = None
        self._plan: SyncPlan | None = None
        self._hashing: dict[str, Any] = {}

    def lock(self, tree: str) -> bool:
        """Lock a tree, or return False when another sync holds its lock; raises OSError, Problem."""
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
        """Drop the plan and release the lock; contents received so far are kept for the next try."""
        self._plan = None
        self._hashing.clear()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def plan(self, tree: str, body: bytes) -> SyncPlan:
        """Compare the disk with a manifest; the tree must be locked. Raises Problem, OSError."""
        manifest = unpack(body)
        root, side = self._home.tree(tree), self._side(tree)
        plan = SyncPlan(tree, root, side, manifest, SyncState.load(side / "state.json"), {}, {}, [], [], [])
        with _translated(plan):
            for place in (root, side / "incoming"):
                place.mkdir(mode=0o700, parents=True, exist_ok=True)
            _remove_unwanted(side / "incoming", {file.sha256 for file in manifest.files.values()})
            _check_directories(plan)
            for path in {**plan.state.files, **manifest.files}:
                self._look_at(plan, path)
            _check_files(plan)
            _compare(plan)
        plan.kept = Versions(side).contents()
        have = {*plan.present.values(), *complete(side / "incoming"), *plan.kept}
        wanted = {file.sha256: file.size for file in manifest.files.values()}
        plan.missing = {sha: size for sha, size in wanted.items() if sha not in have}
        needed = sum(manifest.files[path].size for path in plan.changed if path in manifest.files)
        if needed and needed + RESERVE > free_bytes(root):
            raise disk_full(root, needed + RESERVE)
        self._plan = plan
        return plan

    def put(self, tree: str, parts: list[list[Any]], body: bytes, packed: bool) -> None:
        """Receive pieces [sha256, offset, size, length] whose bytes are consecutive in the body; raises Problem."""
        plan = self._current(tree)
        with _translated(plan):
            try:
                data = zlib.decompress(body) if packed else body
                at = 0
                for sha, offset, size, length in parts:
                    self._put_one(plan, sha, offset, size, data[at : at + length])
                    at += length
            except (ValueError, TypeError, zlib.error) as error:
                raise Problem("bad_piece", f"piece of a file: {error}") from error

    def in_place(self, tree: str) -> list[str]:
        """Return the digest of the last sync, if it was completed."""
        digest = self._state(tree).digest if self._home.tree(tree).is_dir() else ""
        return [digest] if digest else []

    def digests(self, tree: str) -> list[str]:
        """Return the digests from which a group can be started: the tree in place and the kept versions."""
        return sorted({*self.in_place(tree), *Versions(self._side(tree)).digests()})

    def differences(self, tree: str, body: bytes) -> dict[str, Any]:
        """Return what a manifest would change: paths with sizes, and removed paths; raises Problem."""
        manifest, state = unpack(body), self._state(tree)
        changed = [[path, file.size] for path, file in manifest.files.items() if not _same(state.files.get(path), file)]
        changed += [[path, 0] for path, target in manifest.links.items() if state.links.get(path) != target]
        listed = {*manifest.files, *manifest.links}
        return {"changed": changed, "removed": [path for path in (*state.files, *state.links) if path not in listed]}

    def commit(self, tree: str, digest: str = "", *, keep_lock: bool = False) -> SyncPlan:
        """Put everything in place and release the lock, unless it is to be kept; raises Problem."""
        plan = self._complete(tree)
        with _translated(plan):
            put_in_place(plan, digest)
            shutil.rmtree(plan.side / "incoming", ignore_errors=True)
        self._plan = None
        if not keep_lock:
            self.close()
        return plan

    def stage(self, tree: str, digest: str, keep: Iterable[str] = ()) -> SyncPlan:
        """Keep what has arrived as a version, and the present tree too, which does not change; raises Problem.

        `keep`: older versions that stay.
        """
        plan = self._complete(tree)
        versions = Versions(plan.side)
        with _translated(plan):
            _keep_current(plan, versions)
            versions.add(plan, digest, plan.manifest)
            versions.prune({plan.state.digest, digest, *keep})
            shutil.rmtree(plan.side / "incoming", ignore_errors=True)
        self.close()
        return plan

    def switch(self, tree: str, digest: str) -> None:
        """Put a kept version in place; raises Problem.

        It and the previous version are kept. The tree must be locked, and no group may run from it.
        """
        side, before = self._side(tree), self._state(tree)
        versions = Versions(side)
        plan = self.plan(tree, pack(versions.manifest(digest)))
        with _translated(plan):
            _keep_current(plan, versions)
            # If this process dies halfway, the tree has no digest, and the next sync repairs it.
            dataclasses.replace(before, digest="").save(side / "state.json")
            put_in_place(self._complete(tree), digest)
            if before.digest:
                versions.prune({before.digest, digest})
            shutil.rmtree(side / "incoming", ignore_errors=True)
        self.close()

    def _complete(self, tree: str) -> SyncPlan:
        """Return the plan if all of its contents have arrived; raises Problem."""
        plan = self._current(tree)
        if not set(plan.missing) <= complete(plan.side / "incoming"):
            raise Problem("incomplete", f"tree {tree}: not all contents have arrived", "run it again")
        return plan

    def _state(self, tree: str) -> SyncState:
        return SyncState.load(self._side(tree) / "state.json")

    def _side(self, tree: str) -> Path:
        return self._home.tree(tree).parent / ".state" / tree

    def _current(self, tree: str) -> SyncPlan:
        if self._plan is None or self._plan.name != tree:
            raise Problem("no_plan", f"tree {tree}: call tree_plan first")
        return self._plan

    def _look_at(self, plan: SyncPlan, path: str) -> None:
        """Store the hash of the file at a path; it is read only when its stamp has changed."""
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
        plan.present[path] = hash_file(place)

    def _put_one(self, plan: SyncPlan, sha: str, offset: int, size: int, data: bytes) -> None:
        if plan.missing.get(sha) != size or offset + len(data) > size:
            raise ValueError(f"{sha} was not requested in this size")
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


@contextlib.contextmanager
def _translated(plan: SyncPlan) -> Iterator[None]:
    """Raise Problem for what the file system refuses."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise disk_full(plan.root, sum(plan.missing.values())) from error
        named = error.filename2 or error.filename
        name = os.fsdecode(named) if isinstance(named, (str, bytes, os.PathLike)) else str(plan.root)
        raise Problem(
            "tree_conflict",
            f"{name}: {error.strerror}",
            "another file on the node is in the way; remove it there, or exclude it here",
        ) from error


def _keep_current(plan: SyncPlan, versions: Versions) -> None:
    """Keep the present tree as a version, so that the job can return to it; raises Problem, OSError."""
    digest = plan.state.digest
    if digest and digest not in versions.digests():
        versions.add(plan, digest, present_manifest(plan))


def _same(known: File | None, file: File) -> bool:
    """Return whether a file is the same; modes may differ by another user's umask."""
    return known is not None and known.sha256 == file.sha256 and not (known.mode ^ file.mode) & 0o100


def _remove_unwanted(incoming: Path, wanted: set[str]) -> None:
    """Remove what an earlier sync left: partial files, and contents that are no longer needed."""
    for name in os.listdir(incoming):
        if name not in wanted:
            (incoming / name).unlink()


def _check_directories(plan: SyncPlan) -> None:
    """Refuse a symbolic link or a foreign file where a directory must be."""
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


def _check_files(plan: SyncPlan) -> None:
    """Refuse a directory with foreign files where a file must be."""
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


def _compare(plan: SyncPlan) -> None:
    """Fill in the plan's changed, removed and conflicts."""
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


def _is_foreign(plan: SyncPlan, path: str) -> bool:
    """Return whether the file or link at a path differs from what the last sync wrote."""
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


def _is_inside(plan: SyncPlan, path: str) -> bool:
    """Return whether no parent directory has become a symbolic link: never remove files elsewhere."""
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


class Versions:
    """The kept versions of one tree."""

    def __init__(self, side: Path) -> None:
        self.root = side / "versions"
        self._blobs = side / BLOBS

    def digests(self) -> list[str]:
        """Return the digests of the versions."""
        try:
            return sorted(name for name in os.listdir(self.root) if SHA256.fullmatch(name))
        except FileNotFoundError:
            return []

    def contents(self) -> set[str]:
        """Return the hashes of their contents."""
        return complete(self._blobs)

    def manifest(self, digest: str) -> Manifest:
        """Return the manifest of a version; raises Problem."""
        if digest not in self.digests():
            raise Problem("no_tree", f"version {digest[:8]} of the work tree is not on this node")
        return unpack((self.root / digest).read_bytes())

    def add(self, plan: SyncPlan, digest: str, manifest: Manifest) -> None:
        """Keep a version whose contents have arrived or are in the tree; raises Problem, OSError."""
        if not SHA256.fullmatch(digest):
            raise Problem("bad_name", f"not the name of a version: {digest!r}")
        self._blobs.mkdir(mode=0o700, parents=True, exist_ok=True)
        present = {sha: plan.root / path for path, sha in plan.present.items()}
        incoming = plan.side / "incoming"
        have, arrived = self.contents(), complete(incoming)
        for sha in {file.sha256 for file in manifest.files.values()} - have:
            if sha in arrived:
                sync(incoming / sha)
                os.replace(incoming / sha, self._blobs / sha)
            else:
                self._copy(present[sha], sha)
        sync(self._blobs)
        atomic_write(self.root / digest, pack(manifest))

    def _copy(self, source: Path, sha: str) -> None:
        copy = self._blobs / f"{sha}.copy"
        shutil.copyfile(source, copy)
        if hash_file(copy) != sha:
            copy.unlink()
            raise Problem("changed", f"{source} changed while it was being kept", "run it again")
        sync(copy)
        os.replace(copy, self._blobs / sha)

    def prune(self, keep: Iterable[str]) -> None:
        """Remove all other versions, and contents that no version uses; raises OSError, Problem."""
        used: set[str] = set()
        for digest in self.digests():
            if digest in keep:
                used.update(file.sha256 for file in self.manifest(digest).files.values())
            else:
                (self.root / digest).unlink()
        for name in os.listdir(self._blobs):
            if name not in used:
                (self._blobs / name).unlink()


def present_manifest(plan: SyncPlan) -> Manifest:
    """Return the manifest of the last sync with its files as they are now: the script may have changed them."""
    files = {
        path: File(file.mode, os.lstat(plan.root / path).st_size, plan.present[path])
        for path, file in plan.state.files.items()
        if path in plan.present
    }
    return Manifest(files, plan.state.links, plan.state.dirs)


def hash_file(path: Path) -> str:
    """Return the sha256 of a file; raises OSError."""
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(READ_SIZE):
            digest.update(chunk)
    return digest.hexdigest()


def complete(incoming: Path) -> set[str]:
    """Return the hashes of the contents that are complete."""
    try:
        return {name for name in os.listdir(incoming) if "." not in name}
    except FileNotFoundError:
        return set()


def put_in_place(plan: SyncPlan, digest: str) -> None:
    """Change the tree to the manifest; raises OSError."""
    _set_aside(plan)
    _stage_moved(plan)
    _remove_gone(plan)
    _write(plan, digest)


def _set_aside(plan: SyncPlan) -> None:
    """Move files that were changed on the node to replaced/<time>/."""
    if not plan.conflicts:
        return
    keep = plan.side / "replaced" / time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    for path in plan.conflicts:
        place = keep / path
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.replace(plan.root / path, place)
        plan.present.pop(path, None)


def _stage_moved(plan: SyncPlan) -> None:
    """Copy contents from another path, before that is replaced or removed, or from a kept version."""
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


def _remove_gone(plan: SyncPlan) -> None:
    for path in plan.removed:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(plan.root / path)
    needed = plan.manifest.parents()
    for path in sorted(plan.state.dirs, reverse=True):
        if path not in needed:
            # A directory that is not empty has files of the script.
            with contextlib.suppress(OSError):
                os.rmdir(plan.root / path)


def _write(plan: SyncPlan, digest: str) -> None:
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
    _sync_names(plan)
    stamps = {path: stamp(os.lstat(plan.root / path)) for path in manifest.files}
    dirs = dict.fromkeys(manifest.parents(), 0o700)
    SyncState(manifest.files, stamps, manifest.links, dirs, digest).save(plan.side / "state.json")


def _sync_names(plan: SyncPlan) -> None:
    """Make the names in the tree durable before the state that lists them: after a loss of power that is believed."""
    # A directory may be new, or may be gone together with its last file.
    named = {os.path.dirname(path) for path in (*plan.changed, *plan.removed)}
    for path in sorted(named | {os.path.dirname(path) for path in (*named, *plan.state.dirs) if path}):
        if (plan.root / path).is_dir():
            sync(plan.root / path)


def _write_file(plan: SyncPlan, path: str, file: File, uses: dict[str, int]) -> None:
    place = plan.root / path
    if plan.present.get(path) == file.sha256:
        sync(place, file.mode)
        return
    blob = plan.side / "incoming" / file.sha256
    uses[file.sha256] -= 1
    if uses[file.sha256]:
        copy = blob.with_suffix(".copy")
        shutil.copyfile(blob, copy)
        blob = copy
    sync(blob, file.mode)
    os.replace(blob, place)
