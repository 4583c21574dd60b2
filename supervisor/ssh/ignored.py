"""What of a work tree is not sent.

In: .gitignore files (through git itself where there is a repository and a git), `exclude` patterns, fixed names.
Out: yes or no for each path of a walk.
"""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

import pathspec

from supervisor.ssh.errors import SyncError

if TYPE_CHECKING:
    from pathlib import Path

# Never sent, whatever .gitignore says: history, caches, our own files.
NEVER = frozenset({".git", "__pycache__", ".supervisor"})
GIT_DEADLINE_S = 30.0


class Ignored:
    """The rules of one tree, learned while it is walked from the top down."""

    def __init__(self, root: Path, exclude: tuple[str, ...]) -> None:
        self._root = root
        try:
            self._exclude = pathspec.GitIgnoreSpec.from_lines(exclude)
        except ValueError as error:
            raise SyncError(f"exclude: {error}", "patterns are written as in .gitignore") from error
        self._by_git: set[str] = set()
        self._emptied: set[str] = set()
        """Directories that are kept, but none of their content."""
        self._covered: set[str] = set()
        """Directories whose rules git has applied already."""
        self._specs: dict[str, pathspec.GitIgnoreSpec] = {}

    def enter(self, directory: str, names: set[str]) -> None:
        """Learn the rules that begin in a directory; "" is the root."""
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
            self._specs[directory] = _read(self._root / directory / ".gitignore")

    def skips(self, path: str, is_directory: bool) -> bool:
        """Tell whether a path is not sent."""
        name = path.rpartition("/")[2]
        if name in NEVER or path in self._by_git or path.rpartition("/")[0] in self._emptied:
            return True
        shown = f"{path}/" if is_directory else path
        if self._exclude.match_file(shown):
            return True
        # A virtual environment works only where it was made.
        if is_directory and (self._root / path / "pyvenv.cfg").is_file():
            return True
        return self._by_files(path, shown)

    def _is_covered(self, directory: str) -> bool:
        return any(top == "" or directory == top or directory.startswith(f"{top}/") for top in self._covered)

    def _by_files(self, path: str, shown: str) -> bool:
        """Apply the .gitignore files from the root down: the last one that says anything wins."""
        verdict = False
        for directory in ("", *(path[:at] for at, char in enumerate(path) if char == "/")):
            spec = self._specs.get(directory)
            if spec is None:
                continue
            said = spec.check_file(shown[len(directory) + 1 :] if directory else shown).include
            if said is not None:
                verdict = said
        return verdict


def _read(file: Path) -> pathspec.GitIgnoreSpec:
    try:
        return pathspec.GitIgnoreSpec.from_lines(file.read_text(errors="surrogateescape").splitlines())
    except OSError as error:
        raise SyncError(f"{file}: cannot be read: {error.strerror}", f"try: ls -l {file}") from error
    except ValueError as error:
        raise SyncError(f"{file}: {error}", "correct the pattern") from error


def _ask_git(directory: Path) -> tuple[set[str], set[str]] | None:
    """Return the ignored paths, and the directories of which only the content is; None where git cannot tell."""
    listed = _git(directory, "ls-files", "-z", "--others", "--ignored", "--exclude-standard", "--directory")
    if listed is None:
        return None
    # git names a directory when all of its content is ignored, which does not mean that it is ignored itself.
    directories = {path for path in listed if path.endswith("/")}
    itself = _git(directory, "check-ignore", "-z", "--stdin", asked=directories) if directories else set()
    ignored = directories if itself is None else {path for path in directories if path in itself}
    if "./" in ignored:
        # A repository around it ignores all of it: then its rules say nothing about what is inside.
        return None
    emptied = {"" if path == "./" else path.rstrip("/") for path in directories - ignored}
    return (listed - directories) | {path.rstrip("/") for path in ignored}, emptied


def _git(directory: Path, *words: str, asked: set[str] | None = None) -> set[str] | None:
    """Return the paths that a git command prints, or None when there is no git or no repository."""
    # Started from a git hook, we would be told about another repository.
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
    # check-ignore says 1 for: none of them.
    if done.returncode not in (0, 1 if asked else 0):
        return None
    return {os.fsdecode(path) for path in done.stdout.split(b"\0") if path}
