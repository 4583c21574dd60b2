"""Search on all nodes at once.

In: a pattern, answers to log_search. Out: rows in the order in which the nodes find them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from remote_agent.wire import Answer, Args, CallFailed, WireError
from supervisor.errors import RequestFailed, Unreachable, why
from supervisor.link.tasks import cancel_all, within
from supervisor.logs.files import Failure, files, is_own, newest, sources
from supervisor.logs.rows import Clocks, LogLine

if TYPE_CHECKING:
    from remote_agent.wire.answers import LogPage
    from supervisor.link.host_link import HostLink
    from supervisor.link.hub import Hub
    from supervisor.logs.selection import Selection

# A node that searches sends an answer every 10 s; before that it may index a file for up to 60 s.
SILENCE = 90.0


@dataclass(frozen=True)
class _Notes:
    """The callbacks for what answers contain besides rows."""

    clocks: Clocks
    note_apart: Callable[[int], object] | None
    reached: dict[str, int] | None

    def take(self, name: str, answer: Answer) -> None:
        """Call them with the contents of an answer."""
        data: LogPage = answer.data
        if self.note_apart is not None:
            self.note_apart(data.get("apart", 0))
        if self.reached is not None and (begun_ns := data.get("begun_ns")):
            self.reached[name] = begun_ns


async def search(
    session: Hub,
    selection: Selection,
    *,
    pattern: str,
    ignore_case: bool = False,
    level: str | None = None,
    note_apart: Callable[[int], object] | None = None,
    reached: dict[str, int] | None = None,
    clocks: Clocks | None = None,
) -> AsyncGenerator[LogLine, None]:
    """Yield matching rows of all nodes as they are found; raises RequestFailed, and Unreachable after all others.

    `reached`: when each node was last searched; only later lines are searched, and the times are updated. A line may be
    yielded twice. `note_apart` is called with the number of matching lines of a stream not asked for. The times are by
    `clocks` if given.
    """
    args = {**selection.args(), "pattern": pattern, "ignore_case": ignore_case, "level": level}
    if selection.filter:
        args["shown"] = selection.filter.args()
    if selection.generation is None:
        args["generation"] = newest(await files(session, selection.nodes))
    clocks = clocks or Clocks(session)
    notes = _Notes(clocks, note_apart, reached)
    streams = []
    for link in sources(session, selection.nodes):
        again = {} if reached is None else {"again_ns": reached.get(link.view.name)}
        streams.append(_of_node(link, {**args, **again}, notes))
    async with aclosing(_at_once(streams)) as rows:
        async for row in rows:
            yield row


async def _of_node(link: HostLink, args: Args, notes: _Notes) -> AsyncGenerator[list[LogLine], None]:
    """Yield the hits of one node; raises RequestFailed, and Unreachable also when the node is silent too long."""
    name = link.view.name
    try:
        async with aclosing(link.stream("log_search", args)) as answers:
            while (answer := await within(anext(answers, None), SILENCE)) is not None:
                yield notes.clocks.rows(name, answer)
                notes.take(name, answer)
    except CallFailed as refused:
        raise RequestFailed(refused.message, refused.hint, refused.kind) from refused
    except (WireError, asyncio.TimeoutError) as broken:
        raise Unreachable(f"{name}: {why(broken)}") from broken


async def _at_once(streams: list[AsyncGenerator[list[LogLine], None]]) -> AsyncGenerator[LogLine, None]:
    """Yield the rows of all streams as they arrive; an unreachable node does not end the others."""
    waiting = {asyncio.ensure_future(_next(stream)): stream for stream in streams}
    broken: Failure | None = None
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                stream = waiting.pop(task)
                result = task.result()
                if isinstance(result, (Unreachable, RequestFailed)):
                    if not is_own(result):
                        raise result
                    broken = result
                elif result is not None:
                    waiting[asyncio.ensure_future(_next(stream))] = stream
                    for row in result:
                        yield row
        if broken is not None:
            raise broken
    finally:
        await cancel_all(waiting)
        for stream in streams:
            await stream.aclose()


async def _next(stream: AsyncGenerator[list[LogLine], None]) -> list[LogLine] | Failure | None:
    """Return the next rows of a stream, its error, or None at its end."""
    try:
        return await anext(stream, None)
    except (Unreachable, RequestFailed) as error:
        return error
