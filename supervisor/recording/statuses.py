"""The status of a job by time: as the journal tells it, and, while somebody recorded it, as it was.

In: a session; what the nodes tell of each record of the journal. Out: the rows of status.jsonl.
"""

from __future__ import annotations

import asyncio
import heapq
import json
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

from remote_agent.wire.changes import changes, merge
from supervisor.recording import redact
from supervisor.session.hits import now_ns

if TYPE_CHECKING:
    from supervisor.session.session import Session

# Steps and ages change all the time: they are kept this often, seconds, and less often where there are many ranks.
SHORTEST = 5.0
RANKS_A_SECOND = 16
# So many rows after a whole document comes another one: nobody has to read all that was before a time.
WHOLE_EVERY = 64

Json = dict[str, Any]
Seen = tuple[int, bytes]
"""A time, and a status document, packed."""


async def watch(session: Session, stop: asyncio.Event) -> list[Seen]:
    """Return the status of a fed session by time, until the job is over or somebody says so."""
    seen: list[Seen] = []
    version, before, due = -1, None, 0.0
    while not session.ended and not stop.is_set():
        status, now = session.status, time.monotonic()
        lasting = _lasting(status)
        if status and (lasting != before or now >= due):
            seen.append((now_ns(session), zlib.compress(json.dumps(redact.document(status)).encode())))
            before, due = lasting, now + max(SHORTEST, (status.get("world_size") or 0) / RANKS_A_SECOND)
        version = await session.wait_change(1.0, version)
    return seen


def _lasting(status: Mapping[str, Any]) -> object:
    """Return what does not change all the time."""
    ranks = [
        (node.get("name"), node.get("state"), rank.get("rank"), rank.get("state"))
        for node in status.get("nodes", ())
        for rank in (node.get("ranks") or [{}])
    ]
    return status.get("state"), status.get("generation"), status.get("plan"), ranks


def rows(
    history: Iterable[Mapping[str, Any]], times: Mapping[int, int], seen: Iterable[Seen], last: tuple[int, Json]
) -> Iterator[Json]:
    """Yield the rows: `history` by the `times` of its records, what was `seen`, and the `last` status."""
    before: Json = {}
    before_ns = number = 0
    moments = heapq.merge(_told(history, times), _unpacked(seen), key=lambda moment: moment[0])
    for t_ns, status in chain(moments, [(last[0], redact.document(last[1]))]):
        whole = number % WHOLE_EVERY == 0
        told = changes({} if whole else before, status)
        if told and status != before:
            before, before_ns, number = merge({} if whole else before, told), max(before_ns, t_ns), number + 1
            yield {"t_ns": before_ns, "whole": whole, "changes": told}


def _told(history: Iterable[Mapping[str, Any]], times: Mapping[int, int]) -> Iterator[tuple[int, Json]]:
    status: Json = {}
    t_ns = 0
    for item in history:
        status = merge(status, redact.document(item["changes"]))
        # A coordinator that took over may have a clock that is behind; what came after the events is left out.
        t_ns = max(t_ns, times.get(item["seq"], 0))
        if item["seq"] in times:
            yield t_ns, status


def _unpacked(seen: Iterable[Seen]) -> Iterator[tuple[int, Json]]:
    for t_ns, packed in seen:
        yield t_ns, json.loads(zlib.decompress(packed))
