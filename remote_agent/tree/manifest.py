"""The manifest of a work tree, the state of its last sync, and the plan of the next one.

In: a manifest from the wire, the state file. Out: checked, plain objects; nothing here changes the tree.
"""

from __future__ import annotations

import dataclasses
import json
import re
import zlib
from typing import TYPE_CHECKING

from remote_agent.base.files import atomic_write
from remote_agent.wire import Problem

if TYPE_CHECKING:
    import os
    from pathlib import Path

# 100,000 entries are about 15 MB of JSON; a larger tree is probably a data set.
MAX_ENTRIES = 100_000
MAX_TEXT = 64 * 1024 * 1024
SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclasses.dataclass(frozen=True)
class File:
    """One regular file."""

    mode: int
    size: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The contents of a tree, by path relative to its root."""

    files: dict[str, File]
    links: dict[str, str]
    dirs: dict[str, int]

    def parents(self) -> set[str]:
        """Return every directory that must exist, listed or implied."""
        paths = set(self.dirs)
        for path in (*self.files, *self.links, *self.dirs):
            paths.update(path[:index] for index, char in enumerate(path) if char == "/")
        return paths


def stamp(stat: os.stat_result) -> tuple[int, int, int, int]:
    """Return values that change with the file: size, times of content and inode in ns, inode."""
    return (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)


@dataclasses.dataclass
class SyncState:
    """What the last sync wrote; a file with the same stamp need not be read again."""

    files: dict[str, File] = dataclasses.field(default_factory=dict)
    stamps: dict[str, tuple[int, int, int, int]] = dataclasses.field(default_factory=dict)
    links: dict[str, str] = dataclasses.field(default_factory=dict)
    dirs: dict[str, int] = dataclasses.field(default_factory=dict)
    digest: str = ""
    """The operator's digest of all contents."""

    @classmethod
    def load(cls, path: Path) -> SyncState:
        """Read the state file; without a valid one every file is read again."""
        try:
            data = json.loads(path.read_bytes())
            return cls(
                files={name: File(*entry) for name, entry in data["files"].items()},
                stamps={name: (entry[0], entry[1], entry[2], entry[3]) for name, entry in data["stamps"].items()},
                links=dict(data["links"]),
                dirs=dict(data["dirs"]),
                digest=str(data.get("digest", "")),
            )
        except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError):
            return cls()

    def save(self, path: Path) -> None:
        """Write the state file; raises OSError."""
        files = {name: [file.mode, file.size, file.sha256] for name, file in self.files.items()}
        data = {"files": files, "stamps": self.stamps, "links": self.links, "dirs": self.dirs, "digest": self.digest}
        atomic_write(path, json.dumps(data, separators=(",", ":")).encode())


@dataclasses.dataclass
class SyncPlan:
    """One sync, from `tree_plan` to `tree_commit`."""

    name: str
    root: Path
    side: Path
    manifest: Manifest
    state: SyncState
    present: dict[str, str]
    """Hash by path of every regular file of the old or new manifest, as it is on the disk now."""
    missing: dict[str, int]
    """Size by hash of the contents that must be sent."""
    changed: list[str]
    removed: list[str]
    conflicts: list[str]
    """Paths that were changed on the node and that the operator has too."""
    kept: set[str] = dataclasses.field(default_factory=set)
    """Hashes of contents that belong to kept versions."""


def pack(manifest: Manifest) -> bytes:
    """Return a manifest in the format of `unpack`."""
    files = [[path, file.mode, file.size, file.sha256] for path, file in manifest.files.items()]
    data = {"files": files, "links": list(manifest.links.items()), "dirs": list(manifest.dirs.items())}
    return zlib.compress(json.dumps(data, separators=(",", ":")).encode(), 6)


def unpack(body: bytes) -> Manifest:
    """Read a manifest from the wire, zlib over JSON; raises Problem for paths that could leave the tree."""
    try:
        inflater = zlib.decompressobj()
        text = inflater.decompress(body, MAX_TEXT)
        if inflater.unconsumed_tail:
            raise ValueError("over the limit")
        data = json.loads(text)
        files = {str(path): File(int(mode), int(size), str(sha)) for path, mode, size, sha in data["files"]}
        links = {str(path): str(link) for path, link in data["links"]}
        dirs = {str(path): int(mode) for path, mode in data["dirs"]}
    except (zlib.error, ValueError, KeyError, TypeError) as error:
        raise Problem("bad_manifest", f"cannot read the list of files: {error}") from error
    if len(files) + len(links) + len(dirs) > MAX_ENTRIES:
        raise Problem("bad_manifest", f"the tree has more than {MAX_ENTRIES} entries")
    manifest = Manifest(files, links, dirs)
    _check(manifest)
    return manifest


def _check(manifest: Manifest) -> None:
    if len({*manifest.files, *manifest.links, *manifest.dirs}) != (
        len(manifest.files) + len(manifest.links) + len(manifest.dirs)
    ):
        raise Problem("bad_manifest", "one path is listed twice")
    for path in (*manifest.files, *manifest.links, *manifest.dirs):
        if path.startswith("/") or "\0" in path or any(part in ("", ".", "..") for part in path.split("/")):
            raise Problem("bad_manifest", f"path {path!r} would leave the tree")
    for path in manifest.parents():
        if path in manifest.files or path in manifest.links:
            raise Problem("bad_manifest", f"path {path!r} is a directory and something else")
    for path, file in manifest.files.items():
        if not SHA256.fullmatch(file.sha256) or file.size < 0 or not 0 <= file.mode <= 0o777:
            raise Problem("bad_manifest", f"path {path!r} has a bad size, mode or hash")
    if any(not 0 <= mode <= 0o777 for mode in manifest.dirs.values()):
        raise Problem("bad_manifest", "a directory has a bad mode")
    if any(not link or "\0" in link for link in manifest.links.values()):
        raise Problem("bad_manifest", "a symbolic link has a bad target")
