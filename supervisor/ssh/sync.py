"""Bring a work tree to a node: only contents that are not there go over the link.

In: a Tree and a NodeLink. Out: SyncResult, or HostError.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import zlib
from collections import deque
from typing import TYPE_CHECKING, Any

from remote_agent.wire import CallFailed, WireError
from supervisor.ssh.errors import HostError, SyncError
from supervisor.ssh.scan import Tree, TreeFile, human, scan, tree_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from supervisor.ssh.link import NodeLink

__all__ = ["SyncError", "SyncResult", "Tree", "TreeFile", "push_tree", "scan", "tree_name"]

BATCH = 4 * 1024 * 1024
# Batches under way at once: enough to fill a long link, little enough to be held in memory for every node.
WINDOW = 4
PLAN_DEADLINE_S = 120.0
PUT_DEADLINE_S = 20.0 + WINDOW * BATCH / 30_000
COMMIT_DEADLINE_S = 120.0


@dataclasses.dataclass(frozen=True)
class SyncResult:
    """What a sync did. Bytes are counted as they went over the link."""

    root: str
    sent_bytes: int
    sent_files: int
    changed: int
    removed: int
    conflicts: tuple[str, ...] = ()
    """Files that somebody on the node had changed; their version is kept in `kept_in`."""
    kept_in: str | None = None


@dataclasses.dataclass
class _Batch:
    """Pieces of files that travel in one frame."""

    parts: list[list[Any]] = dataclasses.field(default_factory=list)
    data: bytearray = dataclasses.field(default_factory=bytearray)


async def push_tree(
    link: NodeLink,
    tree: Tree,
    progress: Callable[[str], None] | None = None,
    *,
    keep: Sequence[str] = (),
) -> SyncResult:
    """Make a node's copy equal to the tree here; raises HostError, SyncError.

    Where a job is open, its agent takes it as a version beside the copy, which its group runs from; `keep`: the digests
    of older versions that stay.
    """
    report = progress or _say_nothing
    name = link.host.name
    try:
        packed = await asyncio.to_thread(manifest, tree)
        report(f"comparing {len(tree.files)} files ({human(tree.size)})")
        plan = (await link.channel.call("tree_plan", {"tree": tree.name}, packed, timeout=PLAN_DEADLINE_S)).data
        sent_bytes, sent_files = await _send(link, tree, set(plan["missing"]), report)
        wish = {"tree": tree.name, "digest": tree.digest, "keep": list(keep)}
        done = (await link.channel.call("tree_commit", wish, timeout=COMMIT_DEADLINE_S)).data
    except CallFailed as error:
        raise HostError(name, "sync", _reason(error), error.hint) from error
    except asyncio.TimeoutError:
        raise HostError(name, "sync", "timeout: the node does not answer", "try again, or set sync = false") from None
    except WireError as error:
        hint = "try again: what was sent is kept"
        raise HostError(name, "sync", f"the connection was lost: {error}", hint) from error
    report(f"{done['changed']} changed, {done['removed']} removed, {human(sent_bytes)} sent")
    return SyncResult(
        root=done["root"],
        sent_bytes=sent_bytes,
        sent_files=sent_files,
        changed=done["changed"],
        removed=done["removed"],
        conflicts=tuple(done["conflicts"]),
        kept_in=done["kept_in"],
    )


def _say_nothing(_text: str) -> None:
    """Report to nobody."""


def _reason(error: CallFailed) -> str:
    return f"disk full: {error.message}" if error.kind == "disk_full" else error.message


def manifest(tree: Tree) -> bytes:
    """Return what a tree holds as the nodes read it."""
    data = {
        "files": [[file.path, file.mode, file.size, file.sha256] for file in tree.files],
        "links": tree.links,
        "dirs": tree.dirs,
    }
    return zlib.compress(json.dumps(data, separators=(",", ":")).encode(), 6)


async def _send(link: NodeLink, tree: Tree, missing: set[str], report: Callable[[str], None]) -> tuple[int, int]:
    """Send the missing contents, several batches under way at once; return bytes on the link and number of files."""
    chosen = {file.sha256: file for file in tree.files if file.sha256 in missing}
    total = sum(file.size for file in chosen.values())
    under_way: deque[asyncio.Task[int]] = deque()
    sent = read = 0
    batches = _batches(tree.root, list(chosen.values()))
    try:
        while True:
            batch = await asyncio.to_thread(next, batches, None)
            if batch is None:
                break
            if len(under_way) == WINDOW:
                sent += await under_way.popleft()
            read += len(batch.data)
            report(f"{human(read)} of {human(total)}")
            packed = await asyncio.to_thread(_pack, batch)
            # Tasks write in the order in which they are made, and so the pieces of a file arrive in order.
            under_way.append(asyncio.ensure_future(_put(link, tree, batch.parts, *packed)))
        while under_way:
            sent += await under_way.popleft()
    finally:
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
    return sent, len(chosen)


def _pack(batch: _Batch) -> tuple[bytes, bool]:
    """Return a frame's body and whether it is compressed, which sources gain from and model files do not."""
    data = bytes(batch.data)
    packed = zlib.compress(data, 1)
    return (packed, True) if len(packed) < 0.9 * len(data) else (data, False)


async def _put(link: NodeLink, tree: Tree, parts: list[list[Any]], body: bytes, is_packed: bool) -> int:
    args = {"tree": tree.name, "parts": parts, "packed": is_packed}
    await link.channel.call("tree_put", args, body, timeout=PUT_DEADLINE_S)
    return len(body)


def _batches(root: Path, files: list[TreeFile]) -> Iterator[_Batch]:
    """Yield the contents in frames of a bounded size: small files together, large ones in pieces; raises SyncError."""
    batch = _Batch()
    for file in files:
        offset = 0
        digest = hashlib.sha256()
        try:
            with open(root / file.path, "rb", buffering=0) as source:
                while offset < file.size or (file.size == 0 and not offset):
                    piece = source.read(min(BATCH - len(batch.data), file.size - offset)) if file.size else b""
                    if file.size and not piece:
                        raise _changed(root, file)
                    batch.parts.append([file.sha256, offset, file.size, len(piece)])
                    batch.data += piece
                    digest.update(piece)
                    offset += len(piece) or 1
                    if len(batch.data) >= BATCH:
                        yield batch
                        batch = _Batch()
        except OSError as error:
            raise _changed(root, file) from error
        if digest.hexdigest() != file.sha256:
            raise _changed(root, file)
    if batch.parts:
        yield batch


def _changed(root: Path, file: TreeFile) -> SyncError:
    hint = f'run it again; if it is an output: exclude = ["{file.path}"] in [job], or .gitignore'
    return SyncError(f"{root / file.path} changed while it was being sent", hint)
