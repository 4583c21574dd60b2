"""The requests that a job's files answer: status, journal, incidents, logs.

In: requests, a job's directory. Out: answers, streams. A live agent adds its own in requests.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import stat
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Union

from remote_agent.base.files import read_json, read_text
from remote_agent.coordinator import replay
from remote_agent.coordinator.journal import public, read_records
from remote_agent.coordinator.status import document
from remote_agent.diagnose.incidents import incidents_in
from remote_agent.election import authorities
from remote_agent.history.keeper import HistoryKeeper
from remote_agent.logs import LogStore
from remote_agent.logs.nccl import read_facts, read_map
from remote_agent.snapshots.store import PIECE, Content, content_at, read_kept
from remote_agent.wire import Answer, Args, Items, JobSpec, Problem
from remote_agent.wire.events import ENDED_EVENTS, ENDED_STATES, Condition
from remote_agent.wire.status_pieces import pieces

if TYPE_CHECKING:
    from remote_agent.base import paths
    from remote_agent.wire.answers import Basis
    from remote_agent.wire.documents import JournalEvent, NodeStatus, RankStatus, Status

Op = Callable[["Args"], Union[Items, Awaitable[Union[Answer, Items]]]]
Records = Callable[[], "list[JournalEvent]"]
"""Returns the journal as far as this node has it."""


class JobRequests:
    """The requests that need only files: journal and logs."""

    def __init__(
        self, files: paths.JobFiles, spec: JobSpec, logs: LogStore, kept: HistoryKeeper, records: Records
    ) -> None:
        self.files = files
        self.spec = spec
        self.logs = logs
        self._kept = kept
        self._records = records
        self.ops: dict[str, Op] = {
            "describe": self.describe,
            "events": self.events,
            "incidents": self.incidents,
            "job_files": self.job_files,
            "nccl": self.nccl,
            "series": kept.answer,
            "log_list": self._log(LogStore.list),
            "log_read": self._log(LogStore.read),
            "log_merged": self._log(LogStore.merged),
            "log_follow": self._log(LogStore.follow),
            "log_rows": self._log(LogStore.rows),
            "snapshot_files": self.snapshot_files,
            "snapshot_read": self.snapshot_read,
        }

    def _log(self, method: Callable[..., Awaitable[Answer] | Items]) -> Op:
        """Return a request that passes on the arguments that a method has: a newer supervisor may send more."""
        known = arguments_of(method)
        return lambda args: method(self.logs, **{name: value for name, value in args.items() if name in known})

    async def handle(self, op: str, args: Args, body: bytes) -> Answer | Items:
        """Answer one request; raises Problem."""
        serve = self.ops.get(op)
        if serve is None:
            raise Problem("unknown_op", f"this job cannot answer {op!r} now: {self.limits}")
        result = serve(args)
        return result if hasattr(result, "__aiter__") else await result  # type: ignore[return-value]

    limits = "this agent does not know the request"
    is_for_node = False
    """Another node asks, which gets no descriptions."""

    async def job_files(self, args: Args) -> Items:
        """Stream the files that show what the job did here, in pieces: path and time, and where the piece begins.

        `log_bytes`: of each log that many bytes at its end, null: all. No keys, no snapshots, nothing but files. The
        first piece also has about how many bytes follow.
        """
        limit, history = args.get("log_bytes"), self.files.history
        sizes = await asyncio.to_thread(lambda: dict(_job_files(self.files)))
        if self.is_for_node:
            sizes.pop(self.files.spec, None)
        left = sum(size if limit is None else min(size, int(limit)) for size in sizes.values())
        about = {"path": history.name, "mtime_ns": time.time_ns(), "left": left}
        yield Answer({**about, "at": 0}, self._kept.history.to_bytes())
        for path in sizes:
            at = 0 if limit is None else await self.logs.end_of(path, int(limit))
            # A file may be removed while others are read.
            with contextlib.suppress(OSError):
                about = {"path": str(path.relative_to(self.files.root)), "mtime_ns": path.stat().st_mtime_ns}
                content = await asyncio.to_thread(Content, path)
                # Of a file that grows, this much is there now.
                for begin in range(at, max(at + 1, path.stat().st_size), PIECE):
                    yield Answer({**about, "at": begin}, await asyncio.to_thread(content.read, PIECE, begin))

    async def events(self, args: Args) -> Items:
        """Stream journal records after `since`."""
        for record in self._records()[max(0, int(args.get("since", 0))) :]:
            yield Answer({"event": public(record)})

    async def snapshot_files(self, args: Args) -> Answer:
        """Answer with path and files of a snapshot that is kept here; raises Problem."""
        kept = await asyncio.to_thread(read_kept, self.files.root / "snapshots")
        snapshot = kept.get(str(args["id"]))
        if snapshot is None:
            raise Problem("no_snapshot", f"snapshot {args['id']} is not kept on this node")
        files = [[path, file.mode, file.size, file.sha256] for path, file in snapshot.manifest.files.items()]
        return Answer({"path": snapshot.path, "files": files})

    async def snapshot_read(self, args: Args) -> Items:
        """Stream a content of a snapshot; raises Problem."""
        place = content_at(self.files.root / "snapshots", str(args["sha"]))
        try:
            content = await asyncio.to_thread(Content, place)
        except FileNotFoundError:
            raise Problem("no_snapshot", "it is no longer kept on this node") from None
        offset = 0
        while piece := await asyncio.to_thread(content.read, PIECE, offset):
            yield Answer({}, piece)
            offset += len(piece)

    async def incidents(self, args: Args) -> Answer:
        """Answer with every incident so far, and with NCCL's facts on this node."""
        incidents = incidents_in(self._records())
        facts = await asyncio.get_running_loop().run_in_executor(None, read_facts, self.logs.root)
        return Answer({"incidents": incidents, "nccl": facts})

    async def nccl(self, args: Args) -> Answer:
        """Answer with NCCL's output of each rank of this node; `stamp`: of an answer that the caller already has."""
        stamp = str(args.get("stamp", ""))
        return Answer(await asyncio.get_running_loop().run_in_executor(None, read_map, self.logs.root, stamp))

    async def describe(self, args: Args) -> Answer:
        """Answer with the job's description and the authorities that this node trusts, for another node."""
        return Answer({"ca": read_text(self.files.ca), "spec": self.spec.to_json()})

    def basis(self) -> Basis:
        """Return fingerprints of what `describe` answers: nodes of one job agree on them."""
        return {"authorities": authorities.read(self.files.ca), "program": self.spec.program_digest()}


class FileRequests(JobRequests):
    """A job without a running agent: the job has ended, or its agent died."""

    limits = "no agent of it runs on this node"

    def __init__(self, files: paths.JobFiles) -> None:
        self._journal = records = read_records(files.events)
        spec = JobSpec.from_json(json.loads(files.spec.read_text()))
        super().__init__(files, spec, LogStore(files.root, live=False), HistoryKeeper(files.history), lambda: records)
        self._node = str(json.loads(files.node.read_text())["node"])
        self._started = False
        self.ops.update(identity=self.identity, status=self.status, watch=self.watch, attach=self.attach)

    async def handle(self, op: str, args: Args, body: bytes) -> Answer | Items:
        if op.startswith(("log_", "job_files")) and not self._started:
            self._started = True
            await self.logs.start()
        return await super().handle(op, args, body)

    async def identity(self, args: Args) -> Answer:
        """Answer that only files are here, and how much of the journal they have."""
        term = self._journal[-1].get("term", 0) if self._journal else 0
        return Answer(
            {
                "job": self.spec.job,
                "node": self._node,
                "term": term,
                "journal_term": term,
                "role": "files",
                "coordinator": None,
                "coordinator_reachable": False,
                "live": False,
                "ended": any(record["type"] in ENDED_EVENTS for record in self._journal),
                "peer_port": 0,
                "last_seq": len(self._journal),
                "incarnation": "",
                "members": {},
                **self.basis(),
            }
        )

    def _document(self) -> Status:
        if kept := read_json(self.files.status):
            return kept  # type: ignore[return-value]
        state = replay.fold(self.spec, self._journal)
        status = _without_agent(document(state, {}, None), self._node)
        return {**status, "coordinator_reachable": False, "node": self._node, "last_seq": len(self._journal)}

    async def status(self, args: Args) -> Answer | Items:
        """Answer with the status that the journal shows; `pieces`: as a stream of its pieces."""
        return in_pieces(self._document()) if args.get("pieces") else Answer(self._document())

    async def watch(self, args: Args) -> Items:
        """Send the status once: it does not change any more."""
        for piece in pieces(self._document()) if args.get("steps") else ({"status": self._document()},):
            yield Answer(piece)

    async def attach(self, args: Args) -> Answer:
        """Do nothing: no agent notes the operator."""
        return Answer({})


def arguments_of(method: Callable[..., object]) -> frozenset[str]:
    """Return the names of the arguments that a method has beside its object."""
    code = method.__code__
    return frozenset(code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount])


def _job_files(files: paths.JobFiles) -> Iterator[tuple[Path, int]]:
    """Yield the files of a bundle and their sizes: documents, and all that the ranks have left next to their logs."""
    folders = sorted(files.root.glob("generation_*"))
    for path in (files.spec, files.node, files.events, *(one for each in folders for one in sorted(each.rglob("*")))):
        with contextlib.suppress(OSError):
            about = path.lstat()
            if stat.S_ISREG(about.st_mode):
                yield path, about.st_size


async def in_pieces(status: Status) -> Items:
    """Stream a status that may be larger than a frame."""
    for piece in pieces(status):
        yield Answer(piece)


def _without_agent(status: Status, node: str) -> Status:
    """Return the status that a journal shows, corrected by what is certain: this node's ranks died with its agent."""
    own = next((one for one in status["nodes"] if one["name"] == node), None)
    if status["state"] in ENDED_STATES or own is None or own["state"] != "running":
        return status
    ranks: list[RankStatus] = [{**rank, "state": "killed"} for rank in own["ranks"]]
    lost: NodeStatus = {**own, "state": "lost", "reason": "no agent of the job runs there", "ranks": ranks}
    nodes = [lost if one is own else one for one in status["nodes"]]
    return {**status, "state": "degraded", "condition": str(Condition.DEGRADED), "nodes": nodes}
