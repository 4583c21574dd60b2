"""What supervisors may ask where only a job's files are: status, journal, incidents, logs.

In: requests, a job's directory. Out: answers, streams. Where an agent lives, server.py adds what it alone can do.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, Union

from remote_agent import paths, restore
from remote_agent.diagnose.told import JOB_ENDS, told_incidents
from remote_agent.journal import Record, public, read_records
from remote_agent.logs import LogStore
from remote_agent.logs.nccl import read_facts, read_map
from remote_agent.status import document, history
from remote_agent.wire import Answer, Handler, Items, JobSpec, Problem

Op = Callable[["dict[str, Any]"], Union[Items, Awaitable[Answer]]]


class Desk:
    """The requests that need only files: journal and logs."""

    def __init__(self, files: paths.JobFiles, logs: LogStore) -> None:
        self.files = files
        self.logs = logs
        self.ops: dict[str, Op] = {
            "ca": self.ca,
            "events": self.events,
            "history": self.history,
            "incidents": self.incidents,
            "nccl": self.nccl,
            "log_list": lambda args: self.logs.list(),
            "log_read": lambda args: self.logs.read(**args),
            "log_window": lambda args: self.logs.window(**args),
            "log_merged": lambda args: self.logs.merged(**args),
            "log_follow": lambda args: self.logs.follow(**args),
            "log_search": lambda args: self.logs.search(**args),
        }

    async def handle(self, op: str, args: dict[str, Any], body: bytes) -> Answer | Items:
        """Answer one request; raises Problem."""
        serve = self.ops.get(op)
        if serve is None:
            raise Problem("unknown_op", f"this job cannot answer {op!r} now: {self.limits}")
        result = serve(args)
        return result if hasattr(result, "__aiter__") else await result  # type: ignore[return-value]

    limits = "this agent does not know the request"

    @property
    def records(self) -> list[Record]:
        """The journal as far as this node has it."""
        raise NotImplementedError

    @property
    def spec(self) -> JobSpec:
        """The job's description."""
        raise NotImplementedError

    async def history(self, args: dict[str, Any]) -> Items:
        """Stream what each record of the journal changed in the status."""
        for told in history(self.spec, list(self.records)):
            yield Answer(told)
            # A long journal of many ranks takes seconds: the heartbeats have their turn in between.
            await asyncio.sleep(0)

    async def events(self, args: dict[str, Any]) -> Items:
        """Stream journal records after `since`."""
        for record in self.records[max(0, int(args.get("since", 0))) :]:
            yield Answer({"event": public(record)})

    async def incidents(self, args: dict[str, Any]) -> Answer:
        """Answer with every incident so far, and with what NCCL said on this node."""
        incidents = told_incidents(self.records)
        facts = await asyncio.get_running_loop().run_in_executor(None, read_facts, self.logs.root)
        return Answer({"incidents": incidents, "nccl": facts})

    async def nccl(self, args: dict[str, Any]) -> Answer:
        """Answer with what each rank of this node let NCCL say; `stamp`: that of an answer the caller has already."""
        stamp = str(args.get("stamp", ""))
        return Answer(await asyncio.get_running_loop().run_in_executor(None, read_map, self.logs.root, stamp))

    async def ca(self, args: dict[str, Any]) -> Answer:
        """Answer with the job's authority and description, so that the operator can admit a node."""
        spec = self.spec.to_json()
        return Answer({"ca": self.files.ca.read_text(), "ca_key": self.files.ca_key.read_text(), "spec": spec})


class FileDesk(Desk):
    """A job whose agent is not there: it has ended, or its agent died."""

    limits = "no agent of it runs on this node"

    def __init__(self, files: paths.JobFiles) -> None:
        super().__init__(files, LogStore(files.root, live=False))
        self._records = read_records(files.events)
        self._node = str(json.loads(files.node.read_text())["node"])
        self._spec = JobSpec.from_json(json.loads(files.spec.read_text()))
        self._started = False
        self.ops.update(
            {
                "identity": self.identity,
                "status": self.status,
                "watch": self.watch,
                "attach": self.attach,
            }
        )

    @property
    def records(self) -> list[Record]:
        return self._records

    @property
    def spec(self) -> JobSpec:
        return self._spec

    async def handle(self, op: str, args: dict[str, Any], body: bytes) -> Answer | Items:
        if op.startswith("log_") and not self._started:
            self._started = True
            await self.logs.start()
        return await super().handle(op, args, body)

    async def identity(self, args: dict[str, Any]) -> Answer:
        """Answer who we are: nobody that could act."""
        term = self._records[-1].get("term", 0) if self._records else 0
        return Answer(
            {
                "job": self._spec.job,
                "node": self._node,
                "term": term,
                "role": "files",
                "coordinator": None,
                "coordinator_reachable": False,
                "live": False,
                "ended": any(record["type"] in JOB_ENDS for record in self._records),
                "peer_port": 0,
                "last_seq": len(self._records),
                "incarnation": "",
                "members": {},
            }
        )

    def _document(self) -> dict[str, Any]:
        state = restore.fold(self._spec, self._records)
        found = document(state, {}, None)
        return {**found, "coordinator_reachable": False, "node": self._node, "last_seq": len(self._records)}

    async def status(self, args: dict[str, Any]) -> Answer:
        """Answer with the status as the journal tells it."""
        return Answer(self._document())

    async def watch(self, args: dict[str, Any]) -> Items:
        """Send the one status there is."""
        yield Answer({"status": self._document()})

    async def attach(self, args: dict[str, Any]) -> Answer:
        """Nobody is there to be told."""
        return Answer({})


def reader_handler(files: paths.JobFiles) -> Handler:
    """Return what answers for a job whose agent is not there; raises OSError, ValueError for broken files."""
    return FileDesk(files).handle
