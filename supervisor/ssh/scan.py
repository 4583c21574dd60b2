"""Read the work tree on this machine.

In: a directory and what to exclude: .gitignore files (read by git itself in a repository, else by pathspec), `exclude`
patterns, fixed names. Out: a Tree: every file with its hash, every link, every directory; or a SyncError
that names the obstacle.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import stat
import subprocess
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from remote_agent.text.names import size_text
from supervisor.errors import SyncError
from supervisor.inventory.sshconfig import SshConfigError, local_user

if TYPE_CHECKING:
    import pathspec

READ_SIZE = 1024 * 1024
# One frame must hold the list; a larger tree is a data set.
MAX_ENTRIES = 100_000
# A file that changes while it is read is read this many times.
TRIES = 3
BIGGEST_SHOWN = 5
WAYS_OUT = (
    "exclude them in [job] or .gitignore, raise sync_limit_mb, or copy the tree to the nodes and set sync = false"
)


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
    """The files that every node gets."""

    name: str
    """The same for the same operator and directory, so that files written by the script are found again."""
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
        """Return a hash of all contents; it ignores umasks and empty directories."""
        files = [(file.path, bool(file.mode & 0o100), file.sha256) for file in self.files]
        return hashlib.sha256(json.dumps([files, self.links]).encode()).hexdigest()


def tree_name(workdir: Path, user: str = "") -> str:
    """Return the tree's name on the nodes: the directory's name and a hash of operator, path and `user`.

    `user`: the script or the job that has a copy of its own, with the files that it writes there.
    """
    try:
        operator = local_user()
    except SshConfigError:
        operator = str(os.getuid())
    path = os.path.abspath(workdir)
    digest = hashlib.sha256(f"{operator}\0{path}\0{user}".encode("utf-8", "surrogateescape")).hexdigest()[:8]
    label = re.sub(r"[^A-Za-z0-9._-]", "-", os.path.basename(path)).strip("-._")[:40]
    return f"{label or 'tree'}-{digest}"


def scan(
    workdir: Path,
    exclude: tuple[str, ...] = (),
    limit_bytes: int | None = None,
    stop: threading.Event | None = None,
) -> Tree:
    """Read a work tree; raises SyncError, also when `stop` is set."""
    root = Path(os.path.abspath(workdir))
    if not root.is_dir():
        raise SyncError(f"workdir {root}: there is no such directory", "correct workdir in [job]")
    stop = stop or threading.Event()
    walk = _TreeWalk(root, Ignored(root, exclude), stop)
    walk.walk("")
    _check_size(root, walk.sizes, limit_bytes)
    files = [_read(root, path, stop) for path in sorted(walk.sizes)]
    present = tuple(file for file in files if file is not None)
    return Tree(tree_name(root), root, present, tuple(sorted(walk.links)), tuple(sorted(walk.dirs)))


class _TreeWalk:
    """Names, kinds and sizes of a tree; contents are read only once the tree is small enough."""

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
        """Raise SyncError as soon as there is too much: a walk may take minutes."""
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
        """Record one entry; return whether it is a directory to visit."""
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
    listing = ", ".join(f"{path} ({size_text(size)})" for path, size in biggest)
    reason = f"workdir {root} is {size_text(total)}, over the limit of {size_text(limit)}; biggest: {listing}"
    raise SyncError(reason, WAYS_OUT)


def _check_stop(stop: threading.Event) -> None:
    if stop.is_set():
        raise SyncError("reading the work tree was cancelled")


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
        # A file that has grown, such as a log, counts as it was when it was opened.
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


# --- what is not sent

# Never sent, whatever .gitignore says: history, caches, supervisor's own files.
NEVER = frozenset({".git", "__pycache__", ".supervisor"})
GIT_DEADLINE_S = 30.0


class Ignored:
    """The rules of one tree, read while it is walked from the top down."""

    def __init__(self, root: Path, exclude: tuple[str, ...]) -> None:
        self._root = root
        try:
            self._exclude = _patterns(exclude)
        except ValueError as error:
            raise SyncError(f"exclude: {error}", "patterns are written as in .gitignore") from error
        self._by_git: set[str] = set()
        self._emptied: set[str] = set()
        """Directories that are sent without their content."""
        self._covered: set[str] = set()
        """Directories whose rules git has applied."""
        self._specs: dict[str, pathspec.GitIgnoreSpec] = {}

    def enter(self, directory: str, names: set[str]) -> None:
        """Read the rules of a directory; "" is the root."""
        if directory == "" or ".git" in names:
            answer = _ask_git(self._root / directory)
            if answer is not None:
                ignored, emptied = answer
                prefix = f"{directory}/" if directory else ""
                self._by_git.update(prefix + path for path in ignored)
                self._emptied.update((prefix + path).rstrip("/") for path in emptied)
                self._covered.add(directory)
                return
        if not self._is_covered(directory) and ".gitignore" in names:
            self._specs[directory] = _read_patterns(self._root / directory / ".gitignore")

    def skips(self, path: str, is_directory: bool) -> bool:
        """Tell whether a path is not sent."""
        name = path.rpartition("/")[2]
        if name in NEVER or path in self._by_git or path.rpartition("/")[0] in self._emptied:
            return True
        entry = f"{path}/" if is_directory else path
        if self._exclude.match_file(entry):
            return True
        # A virtual environment works only where it was made.
        if is_directory and (self._root / path / "pyvenv.cfg").is_file():
            return True
        return self._by_files(path, entry)

    def _is_covered(self, directory: str) -> bool:
        return any(top == "" or directory == top or directory.startswith(f"{top}/") for top in self._covered)

    def _by_files(self, path: str, name: str) -> bool:
        """Apply the .gitignore files from the root down: the last match wins."""
        verdict = False
        for directory in ("", *(path[:at] for at, char in enumerate(path) if char == "/")):
            spec = self._specs.get(directory)
            if spec is None:
                continue
            match = spec.check_file(name[len(directory) + 1 :] if directory else name).include
            if match is not None:
                verdict = match
        return verdict


def _patterns(lines: Iterable[str]) -> pathspec.GitIgnoreSpec:
    # Half of the commands read no tree.
    import pathspec

    return pathspec.GitIgnoreSpec.from_lines(lines)


def _read_patterns(file: Path) -> pathspec.GitIgnoreSpec:
    try:
        return _patterns(file.read_text(errors="surrogateescape").splitlines())
    except OSError as error:
        raise SyncError(f"{file}: cannot be read: {error.strerror}", f"try: ls -l {file}") from error
    except ValueError as error:
        raise SyncError(f"{file}: {error}", "correct the pattern") from error


def _ask_git(directory: Path) -> tuple[set[str], set[str]] | None:
    """Return the ignored paths, and the directories whose content alone is ignored; None without git."""
    listed = _git(directory, "ls-files", "-z", "--others", "--ignored", "--exclude-standard", "--directory")
    if listed is None:
        return None
    # git lists a directory if all of its content is ignored, even if it is not ignored itself.
    directories = {path for path in listed if path.endswith("/")}
    itself = _git(directory, "check-ignore", "-z", "--stdin", asked=directories) if directories else set()
    ignored = directories if itself is None else {path for path in directories if path in itself}
    if "./" in ignored:
        # An outer repository ignores the whole tree: its rules say nothing about the content.
        return None
    emptied = {"" if path == "./" else path.rstrip("/") for path in directories - ignored}
    return (listed - directories) | {path.rstrip("/") for path in ignored}, emptied


def _git(directory: Path, *words: str, asked: set[str] | None = None) -> set[str] | None:
    """Return the paths that a git command prints, or None if there is no git or no repository."""
    # In a git hook these variables name another repository.
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(
            ["git", "-C", os.fspath(directory), *words],
            input=b"".join(os.fsencode(path) + b"\0" for path in asked or ()),
            capture_output=True,
            check=False,
            timeout=GIT_DEADLINE_S,
            env=env,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    # check-ignore returns 1 if none is ignored.
    if done.returncode not in (0, 1 if asked else 0):
        return None
    return {os.fsdecode(path) for path in done.stdout.split(b"\0") if path}
