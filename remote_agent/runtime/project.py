"""What an environment is made from: the files of a work tree that a lock file needs, and a copy of them.

In: the tree as it is in place or a kept version of it, the path of a lock file. Out: the files and local packages that
it names, the facts by which two environments differ, and a directory in which a tool may build without touching the
tree. A lock file is read line by line, because Python has a TOML reader only from 3.11 on and tools write these files
in one form. What lies outside of the tree is refused: a node would not have it, or not the same.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import posixpath
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from remote_agent.tree.manifest import MAX_ENTRIES, Manifest, SyncState
from remote_agent.tree.sync import BLOBS, Versions, hash_file
from remote_agent.wire import Problem

UV_LOCK, PYLOCK, REQUIREMENTS = "uv.lock", "pylock.toml", "requirements.txt"
# What describes a package: its editable install differs only with these, since its code stays where it is.
DESCRIPTIONS = ("pyproject.toml", "setup.py", "setup.cfg")
# No part of a package, whoever made them.
SKIPPED = {".git", ".hg", ".svn", ".venv", "venv", ".tox", ".nox", "__pycache__", "node_modules"}
SKIPPED |= {".mypy_cache", ".ruff_cache", ".pytest_cache"}
# The build of an editable package reads code and descriptions. What is larger is data, which it does not need.
MAX_EDITABLE_FILE = 4 * 1024 * 1024
MAX_LINKS = 8
_ARCHIVES = (".whl", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".zip")

_PYLOCK = re.compile(r"pylock(\.[^.]+)?\.toml")
_SOURCE = re.compile(r'source = \{ (editable|directory|virtual|path|registry) = ("(?:[^"\\]|\\.)*")')
_PATH = re.compile(r'(?<![\w-])path\s*=\s*("(?:[^"\\]|\\.)*"|\'[^\']*\')')
_EDITABLE = re.compile(r"(?<![\w-])editable\s*=\s*true")
_OPTION = re.compile(r"(-[rcef]|--requirement|--constraint|--editable|--find-links)[\s=]*(\S.*)")
_COMMENT = re.compile(r"(^|\s)#.*$")


def kind_of(file: str) -> str:
    """Return which kind of lock file a path names; raises Problem."""
    name = posixpath.basename(file)
    if name == UV_LOCK:
        return UV_LOCK
    if _PYLOCK.fullmatch(name):
        return PYLOCK
    if name.endswith(".txt"):
        return REQUIREMENTS
    raise Problem(
        "environment",
        f"{file} is no list of packages that this can install",
        "name a uv.lock, a requirements.txt (or another .txt), or a pylock.toml",
    )


class Files(Protocol):
    """The files of a work tree, by path relative to it."""

    def read(self, path: str) -> bytes | None:
        """Return the content of a file; None if there is none. Raises OSError."""

    def has(self, path: str) -> bool:
        """Return whether there is such a file."""

    def below(self, folder: str) -> list[str]:
        """Return the files and symbolic links of a folder, sorted, without caches; raises OSError, Problem."""

    def size(self, path: str) -> int:
        """Return a file's size; raises OSError."""

    def link(self, path: str) -> str | None:
        """Return where a symbolic link points to; None if it is none."""

    def sha256(self, path: str) -> str:
        """Return the hash of a file's content; raises OSError."""

    def copy(self, path: str, target: Path) -> None:
        """Copy a file, or a symbolic link as such, to an absent path; raises OSError."""


@functools.lru_cache(maxsize=16384)
def _hash_once(place: Path, *_identity: int) -> str:
    """Return the hash of a file's content, which is read again only once one of these numbers differs."""
    return hash_file(place)


class InPlace:
    """A tree as it lies on the disk."""

    def __init__(self, root: Path, listed: SyncState | None = None) -> None:
        self._root = root
        # A synced tree consists of what the sync has brought: the rest is output of the script, perhaps a lot of it.
        self._listed = None if listed is None else [*listed.files, *listed.links]

    def read(self, path: str) -> bytes | None:
        try:
            return (self._root / path).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def has(self, path: str) -> bool:
        return (self._root / path).is_file()

    def below(self, folder: str) -> list[str]:
        if self._listed is not None:
            return [path for path in _within(self._listed, folder) if os.path.lexists(self._root / path)]
        paths: list[str] = []
        for path in self._walk(f"{folder}/" if folder else ""):
            paths.append(path)
            if len(paths) > MAX_ENTRIES:
                raise Problem(
                    "environment",
                    f"{self._root / folder} has more than {MAX_ENTRIES:,} files, too many for a package",
                    "keep what the script writes outside of the package's directory",
                )
        return sorted(paths)

    def _walk(self, base: str) -> Iterator[str]:
        folder = self._root / base
        # An environment in the tree may have any name.
        if not folder.is_dir() or (folder / "pyvenv.cfg").exists():
            return
        for entry in os.scandir(folder):
            if entry.name in SKIPPED:
                continue
            if entry.is_dir(follow_symlinks=False):
                yield from self._walk(f"{base}{entry.name}/")
            elif entry.is_symlink() or entry.is_file():
                yield f"{base}{entry.name}"

    def size(self, path: str) -> int:
        return os.lstat(self._root / path).st_size

    def link(self, path: str) -> str | None:
        try:
            return os.readlink(self._root / path)
        except OSError:
            return None

    def sha256(self, path: str) -> str:
        place = self._root / path
        info = place.stat()
        return _hash_once(place, info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns)

    def copy(self, path: str, target: Path) -> None:
        shutil.copy2(self._root / path, target, follow_symlinks=False)


class Kept:
    """A version of a tree that is kept by contents, and that is not in place yet."""

    def __init__(self, manifest: Manifest, blobs: Path) -> None:
        self._manifest = manifest
        self._blobs = blobs

    def _file(self, path: str) -> str | None:
        """Return the path of the file itself where a path is a symbolic link to one."""
        for _ in range(MAX_LINKS):
            if path not in self._manifest.links:
                break
            path = posixpath.normpath(posixpath.join(posixpath.dirname(path), self._manifest.links[path]))
        return path if path in self._manifest.files else None

    def read(self, path: str) -> bytes | None:
        file = self._file(path)
        return None if file is None else (self._blobs / self._manifest.files[file].sha256).read_bytes()

    def has(self, path: str) -> bool:
        return self._file(path) is not None

    def below(self, folder: str) -> list[str]:
        """Return the files and symbolic links of a folder, sorted, without caches."""
        return _within([*self._manifest.files, *self._manifest.links], folder)

    def size(self, path: str) -> int:
        """Return a file's size; of a symbolic link, that of its target's name."""
        link = self.link(path)
        return self._manifest.files[path].size if link is None else len(link)

    def link(self, path: str) -> str | None:
        return self._manifest.links.get(path)

    def sha256(self, path: str) -> str:
        """Return the hash of a file's content."""
        return self._manifest.files[path].sha256

    def copy(self, path: str, target: Path) -> None:
        link = self.link(path)
        if link is not None:
            target.symlink_to(link)
            return
        file = self._manifest.files[path]
        shutil.copyfile(self._blobs / file.sha256, target)
        # Its owner must be able to remove it, and the tool to read it.
        target.chmod(file.mode | 0o600)


def files_of(place: Path, side: Path | None, version: str) -> Files:
    """Return the files of a tree; `side`: its directory of state, if it is synced. Raises Problem, OSError."""
    if version and side is not None:
        return Kept(Versions(side).manifest(version), side / BLOBS)
    return InPlace(place, None if side is None else SyncState.load(side / "state.json"))


def _within(paths: list[str], folder: str) -> list[str]:
    start = f"{folder}/" if folder else ""
    return sorted(path for path in paths if path.startswith(start) and SKIPPED.isdisjoint(path.split("/")))


@dataclasses.dataclass(frozen=True)
class Local:
    """Something in the tree that a lock file names."""

    path: str
    how: str
    """editable: its code is used where it is; directory: it is copied; file; virtual: only its description matters."""


@dataclasses.dataclass
class Project:
    """The files of a tree that one environment is built from."""

    kind: str
    file: str
    inputs: dict[str, bytes] = dataclasses.field(default_factory=dict)
    """Contents by path: the lock file, what it includes and what configures the tool."""
    locals: set[Local] = dataclasses.field(default_factory=set)

    @property
    def folder(self) -> str:
        """The folder of the lock file, in which the tool runs; empty for the tree itself."""
        return posixpath.dirname(self.file)

    @property
    def pins_python(self) -> bool:
        """Whether the project says which Python it wants."""
        return posixpath.join(self.folder, ".python-version") in self.inputs

    @property
    def has_editable(self) -> bool:
        """Whether the environment leads back into the tree."""
        return any(local.how == "editable" for local in self.locals)

    def facts(self, files: Files, place: Path) -> list[list[str]]:
        """Return what makes this environment differ from others; raises OSError, Problem."""
        facts = [[posixpath.relpath(path, self.folder or "."), _sha(data)] for path, data in self.inputs.items()]
        for local in sorted(self.locals, key=dataclasses.astuple):
            facts.append([local.how, posixpath.relpath(local.path or ".", self.folder or ".")])
            if local.how == "editable":
                # Its code is not in the environment, but the path of its code is.
                facts.append(["at", str(place / local.path)])
                for path in descriptions(local):
                    data = files.read(path)
                    facts.append([path, "" if data is None else _sha(data)])
            elif local.how != "virtual":
                paths = files.below(local.path) if local.how == "directory" else [local.path]
                facts += [[path, self._identity(files, path)] for path in paths]
        return facts

    @staticmethod
    def _identity(files: Files, path: str) -> str:
        link = files.link(path)
        return files.sha256(path) if link is None else f"link {link}"

    def copy(self, files: Files, target: Path) -> None:
        """Copy what a build needs into a directory, which is created; raises OSError, Problem.

        Of an editable package that is everything but large files: its build backend, its README and the files that
        give its version may be anywhere in it.
        """
        target.mkdir(mode=0o700)
        contents = dict(self.inputs)
        paths: set[str] = set()
        for local in self.locals:
            contents.update({path: data for path in descriptions(local) if (data := files.read(path)) is not None})
            if local.how == "file":
                paths.add(local.path)
            elif local.how == "directory":
                paths.update(files.below(local.path))
            elif local.how == "editable":
                paths.update(path for path in files.below(local.path) if files.size(path) <= MAX_EDITABLE_FILE)
        for path in paths - set(contents):
            place = target / path
            place.parent.mkdir(parents=True, exist_ok=True)
            files.copy(path, place)
        # These are written as contents, because a link may lead to what is not copied.
        for path, data in contents.items():
            place = target / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(data)


def descriptions(local: Local) -> list[str]:
    """Return the paths of the files that describe a local package; none for an archive."""
    return [] if local.how == "file" else [posixpath.join(local.path, name) for name in DESCRIPTIONS]


def read_project(file: str, files: Files) -> Project:
    """Read a lock file and what belongs to it; raises Problem, OSError."""
    file = inside("", file, "the job's environment")
    project = Project(kind_of(file), file)
    text = _include(project, files, file, "the job's environment")
    beside = {UV_LOCK: ("pyproject.toml", ".python-version", "uv.toml"), PYLOCK: (".python-version", "uv.toml")}
    for name in beside.get(project.kind, ("uv.toml",)):
        path = posixpath.join(project.folder, name)
        data = files.read(path)
        if data is not None:
            project.inputs[path] = data
    if project.kind == UV_LOCK:
        _check_uv(project)
        _read_uv(project, text)
    elif project.kind == PYLOCK:
        _read_pylock(project, text)
    else:
        _read_requirements(project, files, text, file)
    for local in project.locals:
        _check_present(project, files, local)
    return project


def inside(folder: str, named: str, file: str) -> str:
    """Return a path that a file names as one relative to the tree; raises Problem if it is outside of the tree."""
    path = posixpath.normpath(posixpath.join(folder, named))
    if path.startswith(("/", "../")) or path == ".." or "\0" in path:
        raise Problem(
            "environment",
            f"{file} names {named}, which is outside of the work tree",
            "move it into the work tree, start the job from a folder that has both, or name a published package",
        )
    return "" if path == "." else path


def _include(project: Project, files: Files, path: str, named_by: str) -> str:
    data = files.read(path)
    if data is None:
        raise Problem(
            "environment",
            f"{named_by} names {path}, which is not in the work tree",
            "check its spelling, and that no ignore rule keeps it from being synced",
        )
    project.inputs[path] = data
    return data.decode(errors="replace")


def _check_uv(project: Project) -> None:
    if posixpath.join(project.folder, "pyproject.toml") not in project.inputs:
        hint = "uv.lock and its pyproject.toml must lie in one folder of the work tree"
        raise Problem("environment", f"there is no pyproject.toml beside {project.file}", hint)


def _check_present(project: Project, files: Files, local: Local) -> None:
    paths = [local.path] if local.how == "file" else descriptions(local)
    if not any(files.has(path) for path in paths) and not (local.how == "directory" and files.below(local.path)):
        raise Problem(
            "environment",
            f"{project.file} names {local.path or '.'}, which is no package in the work tree",
            "check that no ignore rule keeps it from being synced",
        )


def _read_uv(project: Project, text: str) -> None:
    for line in text.splitlines():
        match = _SOURCE.match(line)
        if match is None:
            continue
        how, named = match[1], json.loads(match[2])
        if how == "registry":
            # A URL, or a folder of wheels. An absolute one is the node's own, and its wheels are listed with hashes.
            if "://" in named or named.startswith("/"):
                continue
            how = "directory"
        project.locals.add(Local(inside(project.folder, named, project.file), {"path": "file"}.get(how, how)))


def _read_pylock(project: Project, text: str) -> None:
    """Find the paths in a file that has each package's source on one line, or in a table of its own."""
    for table in re.split(r"^(?=\[)", text, flags=re.MULTILINE):
        in_table = table.startswith("[packages.directory]")
        for line in table.splitlines():
            match = _PATH.search(line)
            if match is None or line.lstrip().startswith("#"):
                continue
            named = json.loads(match[1]) if match[1][0] == '"' else match[1][1:-1]
            how = "file"
            if in_table or "directory" in line[: match.start()]:
                how = "editable" if _EDITABLE.search(table if in_table else line) else "directory"
            project.locals.add(Local(inside(project.folder, named, project.file), how))


def _read_requirements(project: Project, files: Files, text: str, file: str) -> None:
    for raw in re.sub(r"\\\r?\n", " ", text).splitlines():
        line = _COMMENT.sub("", raw).strip()
        option = _OPTION.match(line)
        # A URL may be of an index, an archive or a repository. None of them is in the tree.
        if "://" in line or (option is None and line.startswith("-")):
            continue
        if option is None:
            named = _local_path(line.partition("@")[2] or line)
            if named.startswith((".", "/")) or "/" in named or named.endswith(_ARCHIVES):
                _add_local(project, named, file, "directory")
        elif option[1] in ("-e", "--editable"):
            _add_local(project, _local_path(option[2]), file, "editable")
        elif option[1] in ("-f", "--find-links"):
            # An absolute folder of wheels is the node's own.
            if not option[2].startswith("/"):
                _add_local(project, _local_path(option[2]), file, "directory")
        else:
            # pip and uv take an included file relative to the one that includes it, but packages relative to the
            # folder in which they run.
            path = inside(posixpath.dirname(file), _local_path(option[2]), file)
            if path not in project.inputs:
                _read_requirements(project, files, _include(project, files, path, file), path)


def _local_path(requirement: str) -> str:
    """Return the path in a requirement, without extras, conditions and options."""
    named = re.split(r"\s*;|\s+--", requirement, maxsplit=1)[0].strip().strip("\"'")
    named = re.sub(r"\[[^\]]*\]$", "", named)
    return named[len("file:") :] if named.startswith("file:") else named


def _add_local(project: Project, named: str, file: str, how: str) -> None:
    project.locals.add(Local(inside(project.folder, named, file), "file" if named.endswith(_ARCHIVES) else how))


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
