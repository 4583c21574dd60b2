"""The snapshots that a node keeps: its own and those of other nodes, by content.

In: snapshots in place, contents from other nodes. Out: `jobs/<job>/snapshots/`: one file for each kept snapshot, and
`contents/`, named by their hash. **What is kept was read to its end while it did not change, so it is never torn.**
A kept content shares no inode with the working directory: a script that saves writes over the file that it saved last.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Union

from remote_agent.base.files import atomic_write
from remote_agent.snapshots.choice import NOTHING_SKIPPED, Skipped, slot_of
from remote_agent.snapshots.rules import InPlace, Stamp, is_regular, stamp_of
from remote_agent.snapshots.scan import is_inside, matches
from remote_agent.tree.manifest import SHA256, File, Manifest, pack, unpack
from remote_agent.wire import Problem
from remote_agent.wire.documents import SnapshotEntry
from remote_agent.wire.gate import Misfit, reader

PIECE = 1024 * 1024
# This many of each series are kept: one may be lost with the node that wrote it, or be the last before a loss spike.
KEPT = 2
# The share of the disk that stays free: what training itself writes must still fit.
RESERVED_SHARE = 0.1
# ioctl FICLONE: the copy shares its blocks with the original until one of them is written to.
_CLONE = 0x40049409
_ID = re.compile(r"[0-9a-f]{12}")
_ASIDE = re.compile(r"\.(.+)\.aside\d+")
Stop = Callable[[], Union[bool, None]]
_read_head = reader(SnapshotEntry)


class Abandoned(Exception):
    """The work was no longer wanted, or the files changed under it."""


@dataclasses.dataclass(frozen=True)
class KeptSnapshot:
    """One version of a snapshot, the same on every node that has it."""

    path: str
    """Relative to the working directory, or absolute."""
    time_ns: int
    """The time when it was written, by the coordinator's clock."""
    step: int | None
    exact: bool
    """The snapshot itself names its step; else it is what the rank had printed by then."""
    manifest: Manifest
    """Files by path relative to the directory in which it lies."""

    @functools.cached_property
    def id(self) -> str:
        """Its name, from its path and its contents."""
        contents = sorted((path, file.sha256) for path, file in self.manifest.files.items())
        return hashlib.sha256(json.dumps([self.path, contents]).encode()).hexdigest()[:12]

    @property
    def slot(self) -> str:
        """The series that it belongs to."""
        return slot_of(self.path)

    @property
    def size(self) -> int:
        """How many bytes it has."""
        return sum(file.size for file in self.manifest.files.values())

    def head(self) -> SnapshotEntry:
        """Return what other nodes need to know to choose it."""
        return {
            "id": self.id, "path": self.path, "time_ns": self.time_ns, "step": self.step, "exact": self.exact,
            "bytes": self.size,
        }  # fmt: skip

    def described(self) -> tuple[SnapshotEntry, bytes]:
        """Return what `read` takes."""
        return self.head(), pack(self.manifest)

    @classmethod
    def read(cls, head: object, body: bytes) -> KeptSnapshot:
        """Return a snapshot as another node describes it; raises Problem for one that would lie elsewhere."""
        try:
            entry, manifest = _read_head(head), unpack(body)
        except Misfit as error:
            raise Problem("bad_snapshot", f"the description of a snapshot: {error}") from error
        snapshot = cls(entry["path"], entry["time_ns"], entry["step"], entry.get("exact", False), manifest)
        name = snapshot.path.rpartition("/")[2]
        roots = {path.partition("/")[0] for path in manifest.files}
        if manifest.links or manifest.dirs or roots != {name} or snapshot.id != entry["id"]:
            raise Problem("bad_snapshot", f"snapshot {snapshot.path!r} does not match its description")
        return snapshot


class Store:
    """What one node keeps of one job's snapshots; not for use by two threads at once."""

    def __init__(self, root: Path, base: Path, patterns: Sequence[str], limit: int = 0) -> None:
        """`root`: a directory in the job's own; `base`: the working directory.

        `limit`: bytes that all kept snapshots may use, 0 for no other than free.
        """
        self._root = root
        self._contents = root / "contents"
        self._base = base
        self._patterns = tuple(patterns)
        self._limit = limit
        self._kept: dict[str, KeptSnapshot] = {}
        self._pinned: frozenset[str] = frozenset()
        self._skipped = NOTHING_SKIPPED
        self._expected: dict[str, KeptSnapshot] = {}
        """Those whose contents are arriving."""
        self._load()

    def _load(self) -> None:
        self._kept = read_kept(self._root)
        self.check()
        # Unfinished local copies are removed; contents of which a part has arrived from another node stay.
        for path in self._contents.glob("*.copy"):
            path.unlink()

    def pin(self, names: Iterable[str]) -> None:
        """Let these stay, however many newer ones their series have: the next group resumes from them."""
        self._pinned = frozenset(names)

    def skip(self, skipped: Skipped) -> None:
        """Drop what no longer counts first from now on."""
        self._skipped = skipped

    def _by_worth(self, slot: str) -> list[KeptSnapshot]:
        """Return the versions of a series: what no longer counts, then the oldest first."""
        series = [one for one in self.kept if one.slot == slot]
        return sorted(series, key=lambda one: not self._skipped.has(one.head()))

    def check(self) -> None:
        """Forget snapshots of which a content is gone: other nodes could not fetch them. Raises OSError."""
        for one in self.kept:
            if any(_size(self.path_of(file.sha256)) != file.size for file in one.manifest.files.values()):
                self._drop([one])

    @property
    def kept(self) -> tuple[KeptSnapshot, ...]:
        """The kept snapshots, oldest first."""
        return tuple(sorted(self._kept.values(), key=lambda one: (one.time_ns, one.id)))

    def get(self, name: str) -> KeptSnapshot:
        """Return a kept snapshot; raises Problem."""
        if name not in self._kept:
            raise Problem("no_snapshot", f"snapshot {name} is not kept on this node")
        return self._kept[name]

    def check_place(self, snapshot: KeptSnapshot) -> None:
        """Raise Problem for a snapshot that this node's own description of the job does not name."""
        pattern = next((one for one in self._patterns if matches(one, snapshot.path)), None)
        if pattern is None or not is_inside(self.place_of(snapshot).parent, self._base, pattern):
            raise Problem(
                "bad_snapshot", f"{snapshot.path} is not one of this job's snapshots, or lies outside the work tree"
            )

    def place_of(self, snapshot: KeptSnapshot) -> Path:
        """Return where a snapshot lies for the script."""
        return self._base / snapshot.path

    def keep(
        self,
        original: InPlace,
        time_ns: int,
        step: int | None,
        *,
        exact: bool,
        stop: Stop,
        elsewhere: Mapping[str, File] = MappingProxyType({}),
    ) -> KeptSnapshot:
        """Copy a complete snapshot and keep it; raises Abandoned, Problem where it does not fit, OSError.

        `elsewhere`: its files that were on other nodes, and whose contents are here.
        """
        # The snapshot is in place, so the last copy of an older one may be removed.
        self.make_room(slot_of(original.path), sum(stamp[0] for stamp in original.files.values()), spare=0)
        files = self._take_all(original, stop)
        snapshot = KeptSnapshot(original.path, time_ns, step, exact, Manifest({**files, **elsewhere}, {}, {}))
        self.add(snapshot)
        return snapshot

    def take_shards(self, path: str, names: Sequence[str], time_ns: int, stop: Stop) -> dict[str, File]:
        """Copy those files of a directory that are here, for the node that has its `.metadata`; as `keep`.

        `time_ns`: the latest time at which they may have changed, by this machine's clock.
        """
        place = self._base / path
        shards = KeptSnapshot(path, time_ns, None, False, Manifest({}, {}, {}))
        self.check_place(shards)
        stamps: dict[str, Stamp] = {}
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                info = os.lstat(place / name)
                if is_regular(info) and info.st_mtime_ns <= time_ns:
                    stamps[f"{place.name}/{name}"] = stamp_of(info)
        self.make_room(shards.slot, sum(stamp[0] for stamp in stamps.values()), spare=0)
        files = self._take_all(InPlace(path, place, stamps), stop)
        # The shards of the previous save are no longer fetched.
        older = [name for name, one in self._expected.items() if name == one.path and one.slot == shards.slot]
        for name in older:
            del self._expected[name]
        self._expected[path] = dataclasses.replace(shards, manifest=Manifest(files, {}, {}))
        self._sweep()
        return files

    def expect_shards(self, path: str, files: Mapping[str, File]) -> dict[str, tuple[int, int]]:
        """Return what `expect` does for the shards that another node has; raises Problem where they do not fit."""
        self.make_room(slot_of(path), sum(file.size for file in files.values()), spare=0)
        return self.expect(KeptSnapshot(path, time.time_ns(), None, False, Manifest(dict(files), {}, {})))

    def _take_all(self, original: InPlace, stop: Stop) -> dict[str, File]:
        """Copy these files into the contents, all of them as they were found or none."""
        self._contents.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            files = {path: self._take(original.place.parent / path, stop) for path in original.files}
            if any(stamp_of(os.lstat(original.place.parent / path)) != stamp for path, stamp in original.files.items()):
                raise Abandoned
        except BaseException:
            self._sweep()
            raise
        return files

    def _take(self, path: Path, stop: Stop) -> File:
        """Copy one file into the contents."""
        temporary = self._contents / f"{secrets.token_hex(8)}.copy"
        digest, size = hashlib.sha256(), 0
        try:
            source = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            with open(source, "rb", buffering=0) as file, open(temporary, "wb", buffering=0) as copy:
                mode = stat.S_IMODE(os.fstat(source).st_mode) & 0o777
                is_clone = _clone(copy.fileno(), source)
                with open(temporary, "rb", buffering=0) if is_clone else contextlib.nullcontext(file) as content:
                    while piece := content.read(PIECE):
                        if stop():
                            raise Abandoned
                        digest.update(piece)
                        size += len(piece)
                        if not is_clone:
                            _write(copy.fileno(), piece)
                os.fsync(copy.fileno())
            os.replace(temporary, self._contents / digest.hexdigest())
        finally:
            with contextlib.suppress(FileNotFoundError):
                temporary.unlink()
        return File(mode, size, digest.hexdigest())

    def expect(self, snapshot: KeptSnapshot) -> dict[str, tuple[int, int]]:
        """Return size and the bytes that are here by hash of each content that has yet to arrive."""
        self._expected[snapshot.id] = snapshot
        sizes = {file.sha256: file.size for file in snapshot.manifest.files.values()}
        return {
            sha: (size, min(size, _size(self._contents / f"{sha}.part")))
            for sha, size in sizes.items()
            if not (self._contents / sha).exists()
        }

    def receive(self, sha: str, here: int, pieces: Iterable[bytes | memoryview], stop: Stop) -> None:
        """Take what arrives of a content, if it is what its name says in the end; any thread may call it.

        `here`: how many bytes of it earlier connections have brought. Raises Abandoned, Problem, OSError, and what the
        pieces raise: then the part that has arrived stays.
        """
        self._contents.mkdir(mode=0o700, parents=True, exist_ok=True)
        part = self._contents / f"{sha}.part"
        digest = hashlib.sha256()
        with open(part, "a+b", buffering=0) as file:
            if os.fstat(file.fileno()).st_size != here:
                raise Problem("bad_piece", f"a piece at {here} is out of order")
            file.seek(0)
            while before := file.read(PIECE):
                digest.update(before)
            for piece in pieces:
                if stop():
                    raise Abandoned
                _write(file.fileno(), piece)
                digest.update(piece)
            os.fsync(file.fileno())
        if digest.hexdigest() != sha:
            part.unlink()
            raise Problem("bad_piece", "a copy of a snapshot arrived damaged")
        try:
            os.replace(part, self._contents / sha)
        except FileNotFoundError:
            # A newer snapshot has replaced this one meanwhile.
            raise Abandoned from None

    def give_up(self, name: str) -> None:
        """Remove what has arrived of a snapshot that does not fit; raises OSError."""
        if self._expected.pop(name, None) is not None:
            self._sweep()

    def add(self, snapshot: KeptSnapshot) -> None:
        """Keep a snapshot whose contents are here, and drop what is too old; raises OSError."""
        self._expected.pop(snapshot.id, None)
        known = self._kept.get(snapshot.id)
        if known is not None and known.time_ns >= snapshot.time_ns:
            return
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        head = json.dumps(snapshot.head()).encode()
        atomic_write(self._root / snapshot.id, head + b"\n" + pack(snapshot.manifest))
        self._kept[snapshot.id] = snapshot
        self._drop([one for one in self._by_worth(snapshot.slot)[:-KEPT] if one.id not in self._pinned])

    def path_of(self, sha: str) -> Path:
        """Return where a content lies."""
        return self._contents / sha

    def make_room(self, slot: str, needed: int, *, spare: int = 1) -> None:
        """Drop older copies of the same series, but for `spare` of them, until a new one fits; raises Problem."""
        series = [one for one in self._by_worth(slot) if one.id not in self._pinned]
        older = series[: max(0, len(series) - spare)]
        lacking = self._lacking(needed - sum(one.size for one in older))
        if lacking:
            raise Problem("no_room", f"no room for a copy of {slot}: {lacking}")
        while older and self._lacking(needed):
            self._drop([older.pop(0)])

    def _lacking(self, needed: int) -> str:
        """Return why this many bytes do not fit, "" if they do."""
        used = sum(one.size for one in self._kept.values())
        if self._limit and used + needed > self._limit:
            return f"{used + needed:,} bytes would be kept, and snapshots_limit is {self._limit:,}"
        place = next(path for path in (self._root, *self._root.parents) if path.exists())
        disk = shutil.disk_usage(place)
        free = disk.free - int(disk.total * RESERVED_SHARE)
        return "" if needed <= free else f"{needed:,} bytes are needed, {max(0, free):,} are free (a tenth stays free)"

    def _drop(self, snapshots: Sequence[KeptSnapshot]) -> None:
        for one in snapshots:
            (self._root / one.id).unlink()
            del self._kept[one.id]
        newest = {one.slot: one.time_ns for one in self.kept}
        self._expected = {name: one for name, one in self._expected.items() if one.time_ns > newest.get(one.slot, 0)}
        if snapshots:
            self._sweep()

    def _sweep(self) -> None:
        """Remove the contents that no snapshot needs."""
        wanted = (*self._kept.values(), *self._expected.values())
        used = {file.sha256 for one in wanted for file in one.manifest.files.values()}
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(self._contents):
                if name.partition(".")[0] not in used:
                    (self._contents / name).unlink()

    def put_in_place(self, snapshot: KeptSnapshot, changed_ns: int, stop: Stop) -> InPlace:
        """Put a kept snapshot where the script looks for it, at once; raises Abandoned, Problem, OSError.

        `changed_ns`: its time by this machine's clock.
        """
        self.check_place(snapshot)
        place = self.place_of(snapshot)
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # The same name each time: what a loss of power has left is removed by the next one.
        work = place.parent / f".{place.name}.{self._root.parent.name}.tmp"
        shutil.rmtree(work, ignore_errors=True)
        try:
            work.mkdir(mode=0o700)
            for path, file in snapshot.manifest.files.items():
                target = work / path
                target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                _copy(self._contents / file.sha256, target, stop)
                os.chmod(target, file.mode | 0o600)
                os.utime(target, ns=(changed_ns, changed_ns))
            if place.is_dir() and not place.is_symlink():
                os.rename(place, work / "before")
            os.rename(work / place.name, place)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        files = {path: stamp_of(os.lstat(place.parent / path)) for path in snapshot.manifest.files}
        return InPlace(snapshot.path, place, files)


def read_kept(root: Path) -> dict[str, KeptSnapshot]:
    """Return the snapshots that are kept in a directory, by id."""
    kept: dict[str, KeptSnapshot] = {}
    with contextlib.suppress(FileNotFoundError):
        for name in sorted(os.listdir(root)):
            if _ID.fullmatch(name):
                # An entry that was not written whole cannot be used; the next copy writes it again.
                with contextlib.suppress(OSError, ValueError, KeyError, Problem):
                    head, _, body = (root / name).read_bytes().partition(b"\n")
                    snapshot = KeptSnapshot.read(json.loads(head), body)
                    kept[snapshot.id] = snapshot
    return kept


def content_at(root: Path, sha: str) -> Path:
    """Return where a content lies that is kept in a directory; raises Problem for an invalid name."""
    if not SHA256.fullmatch(sha):
        raise Problem("bad_request", f"not the name of a content: {sha!r}")
    return root / "contents" / sha


class Content:
    """A content as it is sent, piece by piece, by threads; raises OSError.

    It is closed with its last reference: a thread may open or read it when its reader has given up already.
    """

    def __init__(self, place: Path) -> None:
        self._file = -1
        self._file = os.open(place, os.O_RDONLY | os.O_CLOEXEC)

    def read(self, size: int, offset: int) -> bytes:
        """Return the bytes from an offset on, b"" at the end."""
        return os.pread(self._file, size, offset)

    def __del__(self) -> None:
        if self._file >= 0:
            os.close(self._file)


def set_aside(snapshot: InPlace) -> str:
    """Hide a snapshot from the script, beside its place; returns its new name. Raises OSError."""
    number = 1
    while (aside := snapshot.place.with_name(f".{snapshot.place.name}.aside{number}")).exists():
        number += 1
    os.rename(snapshot.place, aside)
    return aside.name


def remove_asides(snapshot: InPlace) -> None:
    """Remove what was hidden of the series of a snapshot that the job has saved since; raises OSError."""
    for name in os.listdir(snapshot.place.parent):
        match = _ASIDE.fullmatch(name)
        if match is not None and slot_of(match[1]) == slot_of(snapshot.place.name):
            aside = snapshot.place.with_name(name)
            if aside.is_dir() and not aside.is_symlink():
                shutil.rmtree(aside)
            else:
                aside.unlink()


def _clone(target: int, source: int) -> bool:
    """Make a file share the blocks of another; returns False where the file system cannot."""
    try:
        fcntl.ioctl(target, _CLONE, source)
    except OSError:
        return False
    return True


def _copy(source: Path, target: Path, stop: Stop) -> None:
    with open(source, "rb", buffering=0) as file, open(target, "wb", buffering=0) as copy:
        if not _clone(copy.fileno(), file.fileno()):
            while piece := file.read(PIECE):
                if stop():
                    raise Abandoned
                _write(copy.fileno(), piece)
        os.fsync(copy.fileno())


def _write(fd: int, piece: bytes | memoryview) -> None:
    view = memoryview(piece)
    while view:
        view = view[os.write(fd, view) :]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
