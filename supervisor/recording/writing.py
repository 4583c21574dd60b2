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
from supervisor import __version__
from supervisor.errors import RequestFailed, SupervisorError, Unreachable, UsageError
from supervisor.recording import form, redact, statuses
from supervisor.recording.excerpts import Excerpt, Limit, excerpts
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


def check_free(path: Path) -> None:
    """Refuse a file that is there already: it may be the only recording of another job."""
    if path.exists():
        raise UsageError(f"{path} exists", "name another file, or remove this one")


async def write(
    session: Session, path: Path, *, limit: Limit, seen: Iterable[statuses.Seen] = ()
) -> tuple[int, list[str]]:
    """Write what the session can tell; return how many events, and why logs are missing.

    `limit`: how much of the logs; `seen`: the status by time, as `statuses.watch` saw it. Raises
    Unreachable, RequestFailed, UsageError where the file exists.
    """
    check_free(path)
    history = await session.stream("history")
    status = session.status if session.ended else await session.call("status")
    session.set_status(status)  # for the clocks of the nodes
    events = await session.journal()
    times = {event["seq"]: form.read_time(event["time"]) for event in events}
    last_ns = max(times.values(), default=0)
    end_ns = last_ns if status.get("state") in ENDED_STATES else max(last_ns, now_ns(session))
    told = list(statuses.rows(history, times, seen, (end_ns, status)))
    meta = {
        "format": form.FORMAT,
        "version": form.VERSION,
        "job": session.job,
        "recorded_at": now_ns(session),
        "supervisor": __version__,
        "logs": limit._asdict(),
        "end_ns": max(end_ns, told[-1]["t_ns"]),
        "nccl": (await session.call("incidents")).get("nccl"),
        "nccl_nodes": await session.nccl_told(status),
        "hosts": await hosts_told(session),
    }
    wanted = await excerpts(session, told_incidents(events), limit) if limit.a_file != 0 else {}
    with _private(path) as draft, zipfile.ZipFile(draft, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr(form.META, form.json_line(redact.document(meta)))
        file.writestr(form.EVENTS, b"".join(form.json_line(redact.document(event)) for event in events))
        file.writestr(form.STATUSES, b"".join(map(form.json_line, told)))
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
