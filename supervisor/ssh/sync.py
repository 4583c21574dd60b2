"""Sync a work tree to a node: only missing contents are sent.

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

from remote_agent.text.names import size_text
from remote_agent.wire import CallFailed, WireError
from supervisor.errors import HostError, JobInTheWay, SyncError
from supervisor.ssh.answers import MalformedAnswer
from supervisor.ssh.scan import Tree, TreeFile, scan, tree_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from supervisor.ssh.link import NodeLink

__all__ = ["SyncError", "SyncResult", "Tree", "TreeFile", "push_tree", "scan", "tree_name"]

BATCH = 4 * 1024 * 1024
# Batches in flight: enough to fill a link with high latency, few enough to hold in memory for every node.
WINDOW = 4
PLAN_DEADLINE_S = 120.0
PUT_DEADLINE_S = 20.0 + WINDOW * BATCH / 30_000
COMMIT_DEADLINE_S = 120.0


@dataclasses.dataclass(frozen=True)
class SyncResult:
    """The outcome of a sync. Bytes are counted as sent (compressed)."""

    root: str
    sent_bytes: int
    sent_files: int
    changed: int
    removed: int
    conflicts: tuple[str, ...] = ()
    """Files that had been changed on the node; those versions are kept in `kept_in`."""
    kept_in: str | None = None
    left: tuple[str, ...] = ()
    """Files and directories in the copy that no sync has brought, newest first."""


@dataclasses.dataclass
class _Batch:
    """Pieces of files that are sent in one frame."""

    parts: list[list[Any]] = dataclasses.field(default_factory=list)
    data: bytearray = dataclasses.field(default_factory=bytearray)


async def push_tree(
    link: NodeLink,
    tree: Tree,
    progress: Callable[[str], None] | None = None,
    *,
    keep: Sequence[str] = (),
    locked: Callable[[], None] | None = None,
) -> SyncResult:
    """Make a node's copy equal to the tree here; raises HostError, SyncError.

    If a job is open, its agent stores a new version next to the copy from which the group runs; `keep`: the digests of
    older versions to keep. `locked`: no other job may run from the copy: it is called once the copy is locked for this
    launch; JobInTheWay is raised if a live job runs from it, even if no file would change.
    """
    report = progress or _ignore
    name = link.host.name
    alone = locked is not None
    try:
        packed = await asyncio.to_thread(manifest, tree)
        report(f"comparing {len(tree.files)} files ({size_text(tree.size)})")
        request = {"tree": tree.name, "alone": alone}
        plan = (await link.channel.call("tree_plan", request, packed, timeout=PLAN_DEADLINE_S)).data
        if locked is not None:
            locked()
        sent_bytes, sent_files = await _send(link, tree, set(plan["missing"]), report)
        request = {"tree": tree.name, "digest": tree.digest, "keep": list(keep)}
        done = (await link.channel.call("tree_commit", request, timeout=COMMIT_DEADLINE_S)).data
    except CallFailed as error:
        # A tree that stays busy is that of another launch.
        refused = JobInTheWay if alone and error.kind in ("tree_in_use", "tree_busy") else HostError
        raise refused(name, "sync", _reason(error), error.hint) from error
    except asyncio.TimeoutError:
        raise HostError(name, "sync", "timeout: the node does not answer", "try again, or set sync = false") from None
    except MalformedAnswer:
        raise
    except WireError as error:
        hint = "try again: files already sent are kept"
        raise HostError(name, "sync", f"the connection was lost: {error}", hint) from error
    report(f"{done['changed']} changed, {done['removed']} removed, {size_text(sent_bytes)} sent")
    return SyncResult(
        root=done["root"],
        sent_bytes=sent_bytes,
        sent_files=sent_files,
        changed=done["changed"],
        removed=done["removed"],
        conflicts=tuple(done["conflicts"]),
        kept_in=done["kept_in"],
        left=tuple(plan.get("left", ())),
    )


def _ignore(_text: str) -> None:
    """Ignore progress."""


def _reason(error: CallFailed) -> str:
    return f"disk full: {error.message}" if error.kind == "disk_full" else error.message


def manifest(tree: Tree) -> bytes:
    """Return the list of a tree's files, links and directories as the nodes read it."""
    data = {
        "files": [[file.path, file.mode, file.size, file.sha256] for file in tree.files],
        "links": tree.links,
        "dirs": tree.dirs,
    }
    return zlib.compress(json.dumps(data, separators=(",", ":")).encode(), 6)


async def _send(link: NodeLink, tree: Tree, missing: set[str], report: Callable[[str], None]) -> tuple[int, int]:
    """Send the missing contents with several batches in flight; return the bytes sent and the number of files."""
    chosen = {file.sha256: file for file in tree.files if file.sha256 in missing}
    total = sum(file.size for file in chosen.values())
    in_flight: deque[asyncio.Task[int]] = deque()
    sent = read = 0
    batches = _batches(tree.root, list(chosen.values()))
    try:
        while True:
            batch = await asyncio.to_thread(next, batches, None)
            if batch is None:
                break
            if len(in_flight) == WINDOW:
                sent += await in_flight.popleft()
            read += len(batch.data)
            report(f"{size_text(read)} of {size_text(total)}")
            packed = await asyncio.to_thread(_pack, batch)
            # Tasks write in the order in which they are created, so the pieces of a file arrive in order.
            in_flight.append(asyncio.ensure_future(_put(link, tree, batch.parts, *packed)))
        while in_flight:
            sent += await in_flight.popleft()
    finally:
        for task in in_flight:
            task.cancel()
        await asyncio.gather(*in_flight, return_exceptions=True)
    return sent, len(chosen)


def _pack(batch: _Batch) -> tuple[bytes, bool]:
    """Return a frame's body and whether it is compressed: sources become smaller, model files do not."""
    data = bytes(batch.data)
    packed = zlib.compress(data, 1)
    return (packed, True) if len(packed) < 0.9 * len(data) else (data, False)


async def _put(link: NodeLink, tree: Tree, parts: list[list[Any]], body: bytes, is_packed: bool) -> int:
    args = {"tree": tree.name, "parts": parts, "packed": is_packed}
    await link.channel.call("tree_put", args, body, timeout=PUT_DEADLINE_S)
    return len(body)


def _batches(root: Path, files: list[TreeFile]) -> Iterator[_Batch]:
    """Yield the contents in frames of limited size: small files together, large ones in pieces; raises SyncError."""
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
