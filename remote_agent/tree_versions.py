"""The versions of a tree that its job can be switched to: kept beside it while a group runs from it.

In: a Plan whose contents have arrived. Out: `trees/.state/<tree>/versions/`: a manifest by digest, and blobs/ by hash,
which the versions share.
"""

from __future__ import annotations

import os
import re
import shutil
from typing import TYPE_CHECKING

from remote_agent.paths import atomic_write
from remote_agent.tree_manifest import File, Manifest, pack, unpack
from remote_agent.tree_place import BLOBS, complete, hash_file
from remote_agent.wire import Problem

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from remote_agent.tree_manifest import Plan

DIGEST = re.compile(r"[0-9a-f]{64}")


class Versions:
    """What is kept of one tree."""

    def __init__(self, side: Path) -> None:
        self.root = side / "versions"
        self._blobs = side / BLOBS

    def digests(self) -> list[str]:
        """Return the versions that are here."""
        try:
            return sorted(name for name in os.listdir(self.root) if DIGEST.fullmatch(name))
        except FileNotFoundError:
            return []

    def contents(self) -> set[str]:
        """Return the hashes of all their contents."""
        return complete(self._blobs)

    def manifest(self, digest: str) -> Manifest:
        """Return what a version holds; raises Problem."""
        if digest not in self.digests():
            raise Problem("no_tree", f"version {digest[:8]} of the work tree is not on this node")
        return unpack((self.root / digest).read_bytes())

    def add(self, plan: Plan, digest: str, manifest: Manifest) -> None:
        """Keep a version, of contents that have arrived or lie in the tree; raises Problem, OSError."""
        if not DIGEST.fullmatch(digest):
            raise Problem("bad_name", f"no name of a version: {digest!r}")
        self._blobs.mkdir(mode=0o700, parents=True, exist_ok=True)
        lying = {sha: plan.root / path for path, sha in plan.present.items()}
        incoming = plan.side / "incoming"
        have, arrived = self.contents(), complete(incoming)
        for sha in {file.sha256 for file in manifest.files.values()} - have:
            if sha in arrived:
                os.replace(incoming / sha, self._blobs / sha)
            else:
                self._copy(lying[sha], sha)
        atomic_write(self.root / digest, pack(manifest))

    def _copy(self, source: Path, sha: str) -> None:
        copy = self._blobs / f"{sha}.copy"
        shutil.copyfile(source, copy)
        if hash_file(copy) != sha:
            copy.unlink()
            raise Problem("changed", f"{source} changed while it was being kept", "run it again")
        os.replace(copy, self._blobs / sha)

    def prune(self, keep: Iterable[str]) -> None:
        """Remove all other versions, and contents that are in none; raises OSError, Problem."""
        used: set[str] = set()
        for digest in self.digests():
            if digest in keep:
                used.update(file.sha256 for file in self.manifest(digest).files.values())
            else:
                (self.root / digest).unlink()
        for name in os.listdir(self._blobs):
            if name not in used:
                (self._blobs / name).unlink()


def as_it_lies(plan: Plan) -> Manifest:
    """Return what the last sync brought as the node has it now: a file that the script changed is kept so."""
    files = {
        path: File(file.mode, os.lstat(plan.root / path).st_size, plan.present[path])
        for path, file in plan.state.files.items()
        if path in plan.present
    }
    return Manifest(files, plan.state.links, plan.state.dirs)
