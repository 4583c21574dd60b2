"""The log files on the nodes: which there are, and their bytes.

In: answers to log_list and log_read. Out: the list of all files; the rest of a long line; the bytes of one file.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from remote_agent.wire import Answer, Args, CallFailed, WireError
from supervisor.errors import RequestFailed, Unreachable, why

if TYPE_CHECKING:
    from supervisor.link.host_link import HostLink
    from supervisor.link.hub import Hub
    from supervisor.logs.rows import LogLine
    from supervisor.ssh.answers import LogFileEntry

READ_SIZE = 1024 * 1024
# A node may take this long to answer where it may have to read a file to its end first, seconds.
READ_DEADLINE = 60.0


def sources(session: Hub, nodes: list[str] | None) -> list[HostLink]:
    """Return the links that can serve logs now; raises RequestFailed for an unknown node, Unreachable for none."""
    for name in nodes or ():
        if name not in session.links:
            raise RequestFailed(f"no host {name!r} in the inventory", "its hosts: " + " ".join(session.links))
    links = [
        link
        for name, link in session.links.items()
        if link.can_be_asked and not link.is_malformed and (nodes is None or name in nodes)
    ]
    if not links:
        raise session.unreachable()
    return links


def hosts_of(session: Hub, ranks: list[int] | None) -> list[str] | None:
    """Return the hosts of these ranks of the newest group, so that no others are asked; None: any may have their files.

    Hosts that are connected are all asked: they may have files of ranks that are somewhere else now.
    """
    if not session.spared or not ranks:
        return None
    nodes = session.status.get("nodes", ())
    hosts = {rank["rank"]: node["name"] for node in nodes if node["name"] in session.links for rank in node["ranks"]}
    return sorted({hosts[rank] for rank in ranks}) if set(ranks) <= hosts.keys() else None


async def ask(session: Hub, node: str, op: str, args: Args, timeout_s: float = 30.0) -> Answer:
    """Send one request to one node; raises Unreachable, RequestFailed."""
    link = session.links.get(node)
    if link is None:
        raise RequestFailed(f"no host {node!r} in the inventory")
    with operator_errors(node):
        return await link.call(op, args, timeout_s=timeout_s)


@contextlib.contextmanager
def operator_errors(node: str) -> Iterator[None]:
    """Raise what a request to a node fails with as RequestFailed or Unreachable."""
    try:
        yield
    except CallFailed as refused:
        raise RequestFailed(refused.message, refused.hint, refused.kind) from refused
    except (WireError, asyncio.TimeoutError) as broken:
        raise Unreachable(f"{node}: {why(broken)}") from broken


Failure = Unreachable | RequestFailed


def is_own(error: Failure) -> bool:
    """Return whether an error is one node's own: it is out of reach, or does not know what others may know."""
    return isinstance(error, Unreachable) or error.kind == "usage"


def leave_out(session: Hub, failed: Mapping[str, Failure], count: int) -> None:
    """Leave out the nodes that failed; raises the first one's error if they are all of the `count` that were asked."""
    if failed and len(failed) == count:
        raise next(iter(failed.values()))
    for name, error in failed.items():
        if session.follows and isinstance(error, Unreachable):
            # It is connected to again, and its log continues where it was.
            continue
        session.leave_out(name, error.message.removeprefix(f"{name}: "))


async def files(session: Hub, nodes: list[str] | None = None) -> list[LogFileEntry]:
    """Return every log file on the nodes that answer, with `node` added, in order of generation and rank.

    Raises Unreachable, RequestFailed if none answers.
    """
    links = sources(session, nodes)
    failed: dict[str, Failure] = {}

    async def one(name: str) -> list[LogFileEntry]:
        try:
            answer = await ask(session, name, "log_list", {})
        except (Unreachable, RequestFailed) as error:
            if not is_own(error):
                raise
            failed[name] = error
            return []
        listed: list[LogFileEntry] = answer.data["files"]
        return [{**entry, "node": name} for entry in listed]

    answers = await asyncio.gather(*(one(link.view.name) for link in links))
    leave_out(session, failed, len(links))
    return sorted((entry for part in answers for entry in part), key=_key)


def _key(file: LogFileEntry) -> tuple[int, int, str]:
    return file["generation"], file["rank"], file["stream"]


def lost(session: Hub, nodes: list[str] | None) -> list[str]:
    """Return the nodes whose links were lost, or whose answers cannot be parsed."""
    links = session.links.items()
    absent = [name for name, link in links if link.opened_at and (not link.can_be_asked or link.is_malformed)]
    return [name for name in absent if nodes is None or name in nodes]


def newest(files: list[LogFileEntry]) -> int:
    """Return the newest generation with files on any node: a node that was removed has only older ones."""
    return max((int(file["generation"]) for file in files), default=0)


Asking = Callable[[str, str, "Args"], Awaitable[Answer]]
"""A log request to a node: its name, the request, its arguments."""


async def read_rest(asking: Asking, row: LogLine) -> AsyncGenerator[bytes, None]:
    """Yield the part of a row's line that follows its text."""
    place = {"generation": row.generation, "rank": row.rank, "stream": row.stream}
    offset = row.offset + len(row.text)
    end = offset + row.cut
    while offset < end:
        args = {**place, "offset": offset, "length": min(READ_SIZE, end - offset)}
        answer = await asking(row.node, "log_read", args)
        if not answer.body or int(answer.data["offset"]) > offset:
            # It was dropped or truncated meanwhile.
            return
        yield answer.body
        offset += len(answer.body)


async def read_raw(
    session: Hub, file: LogFileEntry, note_dropped: Callable[[int], None], *, follow: bool = False
) -> AsyncGenerator[bytes, None]:
    """Yield the bytes of one file; `follow`: until the job is over.

    `note_dropped` is called with the number of bytes that were dropped from the node's disk.
    """
    place = {"generation": file["generation"], "rank": file["rank"], "stream": file["stream"]}
    offset = 0
    while True:
        over = session.ended
        args = {**place, "offset": offset, "length": READ_SIZE}
        try:
            answer = await ask(session, file["node"], "log_read", args, READ_DEADLINE)
        except Unreachable:
            if not follow or over:
                raise
            # The link is opened again, and the file keeps the bytes.
            await session.wait_change(0.5)
            continue
        if int(answer.data["offset"]) > offset:
            note_dropped(int(answer.data["offset"]) - offset)
            offset = int(answer.data["offset"])
        if answer.body:
            yield answer.body
            offset += len(answer.body)
        elif not follow or over:
            return
        else:
            await session.wait_change(0.5)
