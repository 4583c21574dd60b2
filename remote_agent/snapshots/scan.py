"""Find the snapshots that match the job's patterns, without following a link.

In: the working directory, patterns as `checkpoints/**` or `/data/run/*.pt`. Out: what lies there, by its stamps.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from remote_agent.snapshots.rules import (
    InPlace,
    Stamp,
    is_aside,
    is_directory_form,
    is_regular,
    is_temporary,
    stamp_of,
)

# One pattern matches at most this many entries: more than a run keeps, and fewer than would make a scan slow.
MAX_ENTRIES = 20_000
_WILD = frozenset("*?[")


class Scan(NamedTuple):
    """What matches the patterns."""

    snapshots: tuple[InPlace, ...]
    problems: tuple[str, ...]
    """Why something that matches is left out, one sentence each."""


def scan(base: Path, patterns: Sequence[str]) -> Scan:
    """Return the snapshots that match the patterns below `base`, or where an absolute pattern leads."""
    snapshots: dict[str, InPlace] = {}
    problems: list[str] = []
    for pattern in patterns:
        walk = _Walk(base, pattern)
        for one in walk.units():
            snapshots.setdefault(one.path, one)
        problems += walk.problems
    return Scan(tuple(snapshots.values()), tuple(dict.fromkeys(problems)))


def matches(pattern: str, path: str) -> bool:
    """Return whether a path, or a directory above it, matches a pattern: both relative, or both absolute."""
    parts = path.split("/")
    is_absolute = path.startswith("/")
    if is_absolute != pattern.startswith("/") or any(part in ("", ".", "..") for part in parts[is_absolute:]):
        return False
    return _matches(_split(pattern), parts)


def root_of(base: Path, pattern: str) -> Path:
    """Return the directory in which everything that matches a pattern lies."""
    return base.joinpath(*_fixed(_split(pattern)))


def is_inside(root: Path, base: Path, pattern: str) -> bool:
    """Return whether no link leads out of a pattern's directory: the working directory, unless it is absolute."""
    return pattern.startswith("/") or Path(os.path.realpath(root)).is_relative_to(os.path.realpath(base))


def _split(pattern: str) -> list[str]:
    """Return the parts of a pattern; the first one of an absolute pattern is empty."""
    parts = pattern.rstrip("/").split("/")
    return [part for number, part in enumerate(parts) if part not in ("", ".") or (number == 0 and not part)]


def _fixed(parts: list[str]) -> list[str]:
    """Return the leading parts without wildcards, but for the last part, which names the snapshot."""
    number = next((at for at, part in enumerate(parts) if _WILD & set(part)), len(parts))
    fixed = parts[: min(number, len(parts) - 1)]
    return ["/", *fixed[1:]] if fixed and not fixed[0] else fixed


def _matches(pattern: list[str], parts: list[str]) -> bool:
    if not pattern:
        return True
    if pattern[0] == "**":
        return _matches(pattern[1:], parts) or bool(parts and _matches(pattern, parts[1:]))
    return bool(parts) and fnmatchcase(parts[0], pattern[0]) and _matches(pattern[1:], parts[1:])


def _leads_on(pattern: list[str], parts: list[str]) -> bool:
    """Return whether something in that directory may match."""
    if not parts or not pattern or pattern[0] == "**":
        return True
    return fnmatchcase(parts[0], pattern[0]) and _leads_on(pattern[1:], parts[1:])


def is_open_for_writing(places: Sequence[Path]) -> bool:
    """Return whether a process of this user on this machine has one of these files open to write to it."""
    wanted = {os.path.realpath(place) for place in places}
    for pid in os.listdir("/proc"):
        # A process may end, or belong to another user.
        with contextlib.suppress(OSError, ValueError):
            for number in os.listdir(f"/proc/{int(pid)}/fd"):
                if os.readlink(f"/proc/{pid}/fd/{number}") in wanted and _writes(pid, number):
                    return True
    return False


def _writes(pid: str, number: str) -> bool:
    with open(f"/proc/{pid}/fdinfo/{number}", encoding="ascii") as file:
        flags = next((line.split()[1] for line in file if line.startswith("flags:")), "0")
    return int(flags, 8) & os.O_ACCMODE != os.O_RDONLY


class _Walk:
    """The scan for one pattern."""

    def __init__(self, base: Path, pattern: str) -> None:
        self._base = base
        self._pattern = _split(pattern)
        self._text = pattern
        self._root = root_of(base, pattern)
        self._left = MAX_ENTRIES
        self.problems: list[str] = []

    def units(self) -> Iterator[InPlace]:
        """Yield each snapshot that matches."""
        if not is_inside(self._root, self._base, self._text):
            self.problems.append(self._leads_out(self._root))
            return
        yield from self._look(self._root)
        if self._left <= 0:
            self.problems.append(f"snapshots: {self._text} matches too many files: only {MAX_ENTRIES} are looked at")

    def _leads_out(self, place: Path) -> str:
        where = os.path.realpath(place)
        return f"snapshots: {self._name(place)} is a link that leads out of the work tree: name {where} itself"

    def _name(self, place: Path) -> str:
        """Return a path as snapshots are named."""
        return str(place) if self._text.startswith("/") else str(place.relative_to(self._base))

    def _look(self, directory: Path) -> Iterator[InPlace]:
        for entry in self._entries(directory):
            place = directory / entry.name
            name = self._name(place)
            parts = name.split("/")
            is_match = _matches(self._pattern, parts)
            if entry.is_symlink():
                if is_match and not is_inside(place, self._base, self._text):
                    self.problems.append(self._leads_out(place))
                elif is_match:
                    self.problems.append(f"snapshots: {name} is a link: other nodes get its target, not the link")
            elif entry.is_dir(follow_symlinks=False):
                if is_match and is_directory_form(entry.name, self._names(place)):
                    yield from self._directory(name, place)
                elif is_match or _leads_on(self._pattern, parts):
                    yield from self._look(place)
            elif is_match:
                with contextlib.suppress(FileNotFoundError):
                    stamp = _stamp(entry)
                    if stamp is not None:
                        yield InPlace(name, place, {entry.name: stamp})

    def _directory(self, name: str, place: Path) -> Iterator[InPlace]:
        """Yield a directory that is one snapshot, with all its files or not at all."""
        files = dict(self._inside(place, place.name))
        odd = next((path for path, stamp in files.items() if stamp is None), None)
        if odd is not None:
            self.problems.append(f"snapshots: {name} is left out: {odd.partition('/')[2]} in it is not a plain file")
        elif self._left > 0:
            yield InPlace(name, place, {path: stamp for path, stamp in files.items() if stamp is not None})

    def _inside(self, directory: Path, prefix: str) -> Iterator[tuple[str, Stamp | None]]:
        """Yield the stamp of each file below a directory, None for what is not a plain file."""
        for entry in self._entries(directory, is_left_out=is_temporary):
            name = f"{prefix}/{entry.name}"
            if entry.is_dir(follow_symlinks=False):
                yield from self._inside(directory / entry.name, name)
            else:
                with contextlib.suppress(FileNotFoundError):
                    yield name, _stamp(entry)

    def _names(self, directory: Path) -> list[str]:
        return [entry.name for entry in self._entries(directory)]

    def _entries(self, directory: Path, is_left_out: Callable[[str], bool] | None = None) -> list[os.DirEntry[str]]:
        """Return what lies in a directory, but for what is hidden or temporary; a script may remove it meanwhile."""
        left_out = is_left_out or is_aside
        with contextlib.suppress(OSError), os.scandir(directory) as entries:
            kept = [entry for entry in entries if not left_out(entry.name)][: max(0, self._left)]
            self._left -= len(kept)
            return sorted(kept, key=lambda entry: entry.name)
        return []


def _stamp(entry: os.DirEntry[str]) -> Stamp | None:
    """Return a plain file's stamp, None for anything else; raises FileNotFoundError."""
    info = entry.stat(follow_symlinks=False)
    return stamp_of(info) if is_regular(info) else None
