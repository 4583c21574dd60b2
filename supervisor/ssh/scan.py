"""The work tree as it lies here.

In: a directory and what to leave out. Out: Tree: every file with its hash, every link, every directory; or a
SyncError that names what is in the way.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import stat
import threading
from pathlib import Path

from supervisor.inventory.sshconfig import SshConfigError, local_user
from supervisor.ssh.errors import SyncError
from supervisor.ssh.ignored import Ignored

READ_SIZE = 1024 * 1024
# One frame must hold the list; more is no work tree but a data set.
MAX_ENTRIES = 100_000
# A file that is written to while it is read is tried again this often.
TRIES = 3
BIGGEST_SHOWN = 5
WAYS_OUT = "exclude them in [job] or .gitignore, raise sync_limit_mb, or put the tree on the nodes and set sync = false"


@dataclasses.dataclass(frozen=True)
class TreeFile:
    """One regular file; size in bytes."""

    path: str
    mode: int
    size: int
    sha256: str
    mtime_ns: int


@dataclasses.dataclass(frozen=True)
class Tree:
    """What every node shall have."""

    name: str
    """The same for the same operator and directory, so that what the script wrote there is found again."""
    root: Path
    files: tuple[TreeFile, ...]
    links: tuple[tuple[str, str], ...]
    dirs: tuple[tuple[str, int], ...]

    @property
    def size(self) -> int:
        """Bytes in all files."""
        return sum(file.size for file in self.files)

    @property
    def digest(self) -> str:
        """Return what changes with any content; another user's umask or an empty directory makes no other code."""
        files = [(file.path, bool(file.mode & 0o100), file.sha256) for file in self.files]
        return hashlib.sha256(json.dumps([files, self.links]).encode()).hexdigest()


def tree_name(workdir: Path) -> str:
    """Return the tree's name on the nodes: the directory's name and a hash of operator and path."""
    try:
        operator = local_user()
    except SshConfigError:
        operator = str(os.getuid())
    path = os.path.abspath(workdir)
    digest = hashlib.sha256(f"{operator}\0{path}".encode("utf-8", "surrogateescape")).hexdigest()[:8]
    label = re.sub(r"[^A-Za-z0-9._-]", "-", os.path.basename(path)).strip("-._")[:40]
    return f"{label or 'tree'}-{digest}"


def scan(
    workdir: Path,
    exclude: tuple[str, ...] = (),
    limit_bytes: int | None = None,
    stop: threading.Event | None = None,
) -> Tree:
    """Read a work tree; raises SyncError, also when somebody sets `stop`."""
    root = Path(os.path.abspath(workdir))
    if not root.is_dir():
        raise SyncError(f"workdir {root}: there is no such directory", "correct workdir in [job]")
    stop = stop or threading.Event()
    found = _Walk(root, Ignored(root, exclude), stop)
    found.walk("")
    _check_size(root, found.sizes, limit_bytes)
    files = [_read(root, path, stop) for path in sorted(found.sizes)]
    present = tuple(file for file in files if file is not None)
    return Tree(tree_name(root), root, present, tuple(sorted(found.links)), tuple(sorted(found.dirs)))


class _Walk:
    """Names, kinds and sizes; contents are read only when it is clear that the tree may be sent."""

    def __init__(self, root: Path, ignored: Ignored, stop: threading.Event) -> None:
        self.root = root
        self.ignored = ignored
        self.stop = stop
        self.sizes: dict[str, int] = {}
        self.links: list[tuple[str, str]] = []
        self.dirs: list[tuple[str, int]] = []

    def walk(self, directory: str) -> None:
        """Visit a directory and all below it, without following links."""
        below = [directory]
        while below:
            current = below.pop()
            entries = self._entries(current)
            self.ignored.enter(current, {entry.name for entry in entries})
            self._check_count()
            for entry in entries:
                path = f"{current}/{entry.name}" if current else entry.name
                if self._visit(entry, path):
                    below.append(path)

    def _check_count(self) -> None:
        """Raise SyncError as soon as it is clear that there is too much: a walk may take minutes."""
        _check_stop(self.stop)
        if len(self.sizes) + len(self.links) + len(self.dirs) > MAX_ENTRIES:
            what = f"holds more than {MAX_ENTRIES:,} files and directories"
            raise SyncError(f"workdir {self.root} {what}", WAYS_OUT)

    def _entries(self, directory: str) -> list[os.DirEntry[str]]:
        place = self.root / directory
        try:
            with os.scandir(place) as entries:
                return list(entries)
        except FileNotFoundError:
            # Removed since its parent was listed.
            return []
        except OSError as error:
            raise _unreadable(place, directory, error) from error

    def _visit(self, entry: os.DirEntry[str], path: str) -> bool:
        """Note one entry; return whether it is a directory to be visited."""
        is_directory = entry.is_dir(follow_symlinks=False)
        if self.ignored.skips(path, is_directory):
            return False
        try:
            info = entry.stat(follow_symlinks=False)
            if is_directory:
                self.dirs.append((path, stat.S_IMODE(info.st_mode) & 0o777))
            elif stat.S_ISLNK(info.st_mode):
                self.links.append((path, os.readlink(entry.path)))
            elif stat.S_ISREG(info.st_mode):
                self.sizes[path] = info.st_size
        except FileNotFoundError:
            return False
        # Sockets, pipes and devices belong to this machine.
        return is_directory


def _check_size(root: Path, sizes: dict[str, int], limit: int | None) -> None:
    total = sum(sizes.values())
    if limit is None or total <= limit:
        return
    biggest = sorted(sizes.items(), key=lambda item: -item[1])[:BIGGEST_SHOWN]
    shown = ", ".join(f"{path} ({human(size)})" for path, size in biggest)
    raise SyncError(f"workdir {root} is {human(total)}, over the limit of {human(limit)}; biggest: {shown}", WAYS_OUT)


def _check_stop(stop: threading.Event) -> None:
    if stop.is_set():
        raise SyncError("reading the work tree was given up")


def _read(root: Path, path: str, stop: threading.Event) -> TreeFile | None:
    place = root / path
    for _ in range(TRIES):
        _check_stop(stop)
        try:
            with open(place, "rb", buffering=0) as file:
                before = os.fstat(file.fileno())
                digest = hashlib.sha256()
                size = 0
                while chunk := file.read(min(READ_SIZE, before.st_size - size)):
                    _check_stop(stop)
                    digest.update(chunk)
                    size += len(chunk)
                after = os.fstat(file.fileno())
        except FileNotFoundError:
            # Removed since its directory was listed.
            return None
        except OSError as error:
            raise _unreadable(place, path, error) from error
        # A log that somebody appends to is what it was when it was opened.
        has_grown = after.st_size > before.st_size == size
        if has_grown or (before.st_size, before.st_mtime_ns) == (after.st_size, after.st_mtime_ns):
            mode = stat.S_IMODE(after.st_mode) & 0o777
            return TreeFile(path, mode, size, digest.hexdigest(), after.st_mtime_ns)
    raise SyncError(
        f"{place} keeps changing while it is read", f'if it is an output: exclude = ["{path}"] in [job], or .gitignore'
    )


def _unreadable(place: Path, path: str, error: OSError) -> SyncError:
    hint = f'make it readable, or exclude = ["{path}"] in [job]'
    return SyncError(f"{place}: cannot be read: {error.strerror}", hint)


def human(size: float) -> str:
    """Return a number of bytes as people write it."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
