"""A job becomes a file: its journal, its status at every change, and excerpts of its logs.

In: a session. Out: a recording, readable by its owner alone; nothing where it could not be finished.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import aclosing, contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from remote_agent.diagnose.told import told_incidents
from remote_agent.wire import CallFailed, WireError
from remote_agent.wire.changes import changes, merge
from supervisor import __version__
from supervisor.errors import RequestFailed, SupervisorError, Unreachable, UsageError
from supervisor.recording import form, redact
from supervisor.recording.excerpts import Excerpt, excerpts
from supervisor.recording.reading import HOST
from supervisor.session.hits import now_ns
from supervisor.session.tasks import cancel_all
from supervisor.session.view import ENDED_STATES

if TYPE_CHECKING:
    from supervisor.session.link import Link
    from supervisor.session.session import Session

# So many files are asked for at once; an excerpt beyond this waits on the disk.
AT_ONCE = 8
HELD_BYTES = 4 * 1024 * 1024
CHUNK = 1024 * 1024
ENGINE_DEADLINE = 5.0

Json = dict[str, Any]


class StatusLog:
    """The status document by time, as changes."""

    def __init__(self, told: Iterable[Mapping[str, Any]], times: Mapping[int, int]) -> None:
        self.rows: list[Json] = []
        self._last: Json = {}
        for item in told:
            if item["seq"] in times:
                self._keep(times[item["seq"]], redact.document(item["changes"]))

    def add(self, t_ns: int, status: Mapping[str, Any]) -> None:
        """Take the status as it is at that time."""
        self._keep(t_ns, changes(self._last, redact.document(status)))

    def _keep(self, t_ns: int, told: Json) -> None:
        if told:
            self._last = merge(self._last, told)
            self.rows.append({"t_ns": max(t_ns, self.rows[-1]["t_ns"] if self.rows else 0), "changes": told})


async def watch(session: Session, stop: asyncio.Event) -> list[tuple[int, Json]]:
    """Return each status of a fed session with its time, until the job is over or somebody says so."""
    seen: list[tuple[int, Json]] = []
    version = -1
    while not session.ended and not stop.is_set():
        if session.status and (not seen or session.status is not seen[-1][1]):
            seen.append((now_ns(session), session.status))
        version = await session.wait_change(1.0, version)
    return seen


def check_free(path: Path) -> None:
    """Refuse a file that is there already: it may be the only recording of another job."""
    if path.exists():
        raise UsageError(f"{path} exists", "name another file, or remove this one")


async def write(
    session: Session, path: Path, *, limit: int | None, seen: Iterable[tuple[int, Json]] = ()
) -> tuple[int, list[str]]:
    """Write what the session can tell; return how many events, and why logs are missing.

    `limit`: bytes of each log's end, 0: none, None: all; `seen`: the status by time, as `watch` saw it. Raises
    Unreachable, RequestFailed, UsageError where the file exists.
    """
    check_free(path)
    history = await session.stream("history")
    status = session.status if session.ended else await session.call("status")
    session.set_status(status)  # for the clocks of the nodes
    events = await session.journal()
    times = {event["seq"]: form.read_time(event["time"]) for event in events}
    told = StatusLog(history, times)
    last_ns = max(times.values(), default=0)
    for t_ns, one in seen:
        told.add(t_ns, one)
    over = status.get("state") in ENDED_STATES
    end_ns = last_ns if over else max(last_ns, now_ns(session))
    told.add(end_ns, status)
    incidents = told_incidents(events)
    meta = {
        "format": form.FORMAT,
        "version": form.VERSION,
        "job": session.job,
        "recorded_at": now_ns(session),
        "supervisor": __version__,
        "logs": "all" if limit is None else limit,
        "end_ns": max(end_ns, told.rows[-1]["t_ns"] if told.rows else 0),
        "nccl": (await session.call("incidents")).get("nccl"),
        "hosts": await hosts_told(session),
    }
    wanted = await excerpts(session, incidents, limit) if limit != 0 else {}
    with _private(path) as draft, zipfile.ZipFile(draft, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr(form.META, form.json_line(redact.document(meta)))
        file.writestr(form.EVENTS, b"".join(form.json_line(redact.document(event)) for event in events))
        file.writestr(form.STATUSES, b"".join(map(form.json_line, told.rows)))
        index = await _write_logs(file, wanted)
        file.writestr(form.LOGS, b"".join(map(form.json_line, index)))
    return len(events), sorted({str(one["error"]) for one in index if one["error"]})


async def hosts_told(session: Session) -> list[Json]:
    """Return the hosts of the job: how far we have come with each, and what it says of itself."""
    engines = await asyncio.gather(*(_engine(session.links[name]) for name in session.hosts))
    return [
        {
            **{key: getattr(view, key) for key in HOST},
            "hello": view.hello,
            "engine": engine,
        }
        for view, engine in zip(session.hosts.values(), engines, strict=True)
    ]


async def _engine(link: Link) -> Json:
    """Return what torch on the host says of itself, {} where no agent is there to ask."""
    if link.view.live:
        with suppress(CallFailed, WireError, asyncio.TimeoutError):
            return (await link.call("await_engine", timeout_s=ENGINE_DEADLINE)).data
    return link.view.engine


async def _write_logs(file: zipfile.ZipFile, wanted: Mapping[form.File, Excerpt]) -> list[Json]:
    """Write the excerpts, a few at once, and return the index of them."""
    room = asyncio.Semaphore(AT_ONCE)
    writing = asyncio.Lock()

    async def one(key: form.File, excerpt: Excerpt) -> Json:
        node, generation, rank, stream = key
        member = f"logs/{node}/generation_{generation}/rank_{rank}/{stream}.jsonl"
        async with room:
            with tempfile.SpooledTemporaryFile(HELD_BYTES) as held:
                begin_ns, error = await _collect(excerpt, held)
                if begin_ns is not None:
                    async with writing:
                        await _copy(held, file, member)
        return {
            "node": node,
            "generation": generation,
            "rank": rank,
            "stream": stream,
            "size": excerpt.size,
            "lines": excerpt.total,
            "begin_ns": begin_ns,
            "member": member if begin_ns is not None else None,
            "error": error,
        }

    tasks = [asyncio.ensure_future(one(key, excerpt)) for key, excerpt in wanted.items()]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await cancel_all(tasks)


async def _collect(excerpt: Excerpt, held: IO[bytes]) -> tuple[int | None, str | None]:
    """Write an excerpt's lines; return the time of the first one, and why it ends before its end."""
    begin_ns: int | None = None
    try:
        async with aclosing(excerpt.parts()) as parts:
            async for lines in parts:
                if lines and begin_ns is None:
                    begin_ns = lines[0].t_ns
                held.write(b"".join(map(form.line_json, lines)))
    except (RequestFailed, Unreachable) as error:
        # A node that goes away now takes the rest of its logs along, not the recording.
        return begin_ns, error.message
    return begin_ns, None


async def _copy(held: IO[bytes], file: zipfile.ZipFile, member: str) -> None:
    held.seek(0)
    with file.open(member, "w", force_zip64=True) as out:
        while data := held.read(CHUNK):
            out.write(data)
            # The links have their turn in between.
            await asyncio.sleep(0)


@contextmanager
def _private(path: Path) -> Iterator[IO[bytes]]:
    """Yield a file that its owner alone may read; it gets its name once it is whole."""
    draft: Path | None = None
    try:
        number, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        draft = Path(name)
        with os.fdopen(number, "wb") as file:
            yield file
        draft.rename(path)
    except OSError as error:
        raise SupervisorError(f"{path}: {error.strerror or error}") from error
    finally:
        if draft is not None:
            draft.unlink(missing_ok=True)
