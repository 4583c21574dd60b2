"""A job as one file: what its ranks left on all nodes, without secrets, opened anywhere as a job that is over.

In: a session; a file that may come from a stranger. Out: a zip that only its owner may read; an inventory whose hosts
are its directories, unpacked for as long as this process runs, so that a bundle is read by the code that reads jobs.

    bundle.json              {"bundle": 1, "job", "made_ns", "supervisor", "hosts": facts of each host,
                             "status": how the job was, or null once it had ended,
                             "files": {member: [where its bytes begin, time of the last change in ns]}}
    nodes/<host>/<path>      a file of the job's directory there (see docs/security.md)

**A secret in a log is replaced by as many characters**: offsets, and with them the indexes of the logs, stay as they
are. Of a log whose beginning is left out, as of one that `log_bound` has cut, the front is a hole.
"""

import asyncio
import atexit
import functools
import json
import os
import re
import shutil
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, aclosing, contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, TypedDict

from remote_agent.text.names import size_text
from remote_agent.wire import JOB_NAME, CallFailed, WireError
from remote_agent.wire.answers import Large
from remote_agent.wire.documents import TimeNs, read_status
from remote_agent.wire.gate import Misfit, Name, parse, reader, row
from supervisor import __version__, redact
from supervisor.errors import SupervisorError, UsageError, why
from supervisor.inventory import Host, Inventory
from supervisor.inventory.model import JobDefaults
from supervisor.ssh.answers import EngineFacts, Hello

if TYPE_CHECKING:
    from remote_agent.wire.documents import Status
    from supervisor.link.host_link import HostLink
    from supervisor.session import Session

VERSION = 1
ABOUT = "bundle.json"
# A node may index a log of gigabytes before it sends its end, seconds.
PIECE_DEADLINE = 90.0
ENGINE_DEADLINE = 5.0
CHUNK = 1024 * 1024
# A line, or a private key, may be this long before it is searched for secrets in parts.
HELD_BYTES = 1024 * 1024
# Documents are parsed up to this size, and above it treated as text.
DOCUMENT_BYTES = 64 * 1024 * 1024
# What is unpacked may have this many bytes, and more if it has at most so many times the bytes of the file.
FREE_BYTES = 256 * 1024 * 1024
RATIO = 200
# The paths in a job's directory that a bundle may have; no part of one begins with a dot.
_PLACES = r"spec\.json|node\.json|events\.jsonl|history\.bin|generation_\d{1,9}(?:/\w[\w.@+-]{0,120}){1,4}"
_MEMBER = re.compile(rf"nodes/\w[\w.-]{{0,80}}/(?:{_PLACES})")


class BundledHost(TypedDict):
    """What was known of one host when the bundle was made."""

    name: Name
    state: str
    error: str | None
    hello: Hello
    engine: EngineFacts


class About(TypedDict):
    """The document of a bundle."""

    bundle: int
    job: Name
    made_ns: TimeNs
    hosts: list[BundledHost]
    status: Annotated[Any, lambda value: None if value is None else read_status(value)]
    files: dict[str, Annotated[list[Any], row(Large, TimeNs)]]


_read_about = reader(About, *About.__annotations__)


# --- making one


Bar = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
"""Shows how many of some bytes have arrived, like `progress_bar` of standard_streams."""


async def write(session: "Session", path: Path, log_bytes: int | None, bar: Bar) -> list[str]:
    """Write the bundle of a job; returns the hosts whose files are missing, each with the reason.

    `log_bytes`: how much of the end of each log, None: all. Raises Unreachable, RequestFailed, SupervisorError.
    """
    check_free(path)
    status: Status = session.status if session.ended else await session.call("status")
    session.set_status(status)
    missing: list[str] = []
    with (
        _private(path) as draft,
        zipfile.ZipFile(draft, "w", zipfile.ZIP_DEFLATED) as file,
        ThreadPoolExecutor(1) as one,
    ):
        # Only this thread writes into the file; a cancellation, too, waits for its end.
        made, do = _Files(file), functools.partial(asyncio.get_running_loop().run_in_executor, one)
        for name in session.hosts:
            try:
                await _write_node(made, session.links[name], log_bytes, bar, do)
            except (CallFailed, WireError, asyncio.TimeoutError, SupervisorError) as error:
                missing.append(f"{name}: {why(error)}")
        about = {
            "bundle": VERSION,
            "job": session.job,
            "made_ns": time.time_ns(),
            "supervisor": __version__,
            "hosts": await host_facts(session),
            "status": None if session.is_over else status,
        }
        await do(lambda: file.writestr(ABOUT, json.dumps({**redact.document(about), "files": made.places})))
    return missing


def check_free(path: Path) -> None:
    """Raise UsageError for a name that no bundle has, or an existing file: it may be the only one of another job."""
    if path.suffix != ".zip":
        raise UsageError(f"{path}: the name of a bundle ends in .zip")
    if path.exists():
        raise UsageError(f"{path} exists", "name another file, or remove this one")


async def host_facts(session: "Session") -> list[BundledHost]:
    """Return the hosts of the job: the state of each connection, and the facts that each host reports."""
    if session.inventory.path is not None and session.inventory.made_s is not None:
        return _open(session.inventory.path)[1]["hosts"]
    engines = await asyncio.gather(*(_engine(session.links[name]) for name in session.hosts))
    return [
        {"name": view.name, "state": view.state, "error": view.error, "hello": view.hello, "engine": engine}
        for view, engine in zip(session.hosts.values(), engines, strict=True)
    ]


async def _engine(link: "HostLink") -> EngineFacts:
    """Return the facts about torch on the host, {} without a live agent."""
    facts: EngineFacts | None = (
        await link.try_call("await_engine", timeout_s=ENGINE_DEADLINE) if link.view.live or link.through else None
    )
    return link.view.engine if facts is None else facts


async def _write_node(
    made: "_Files", link: "HostLink", log_bytes: int | None, bar: Bar, do: Callable[..., Awaitable[None]]
) -> None:
    """Write the files of one host, one after the other; `do` calls a function in a thread."""
    name, advance = link.view.name, None
    asked = link.whole_stream("job_files", {"log_bytes": log_bytes}, timeout_s=PIECE_DEADLINE)
    with ExitStack() as shown:
        try:
            async with aclosing(asked) as pieces:
                async for piece in pieces:
                    data, body = piece.data, piece.body
                    advance = advance or shown.enter_context(bar(name, data.get("left", 0)))
                    await do(made.put, f"nodes/{name}/{data['path']}", [data["at"], data["mtime_ns"]], body)
                    advance(len(body))
        finally:
            await do(made.close)


class _Files:
    """The files of nodes in a bundle while they are written, one after the other, without what looks like a secret."""

    def __init__(self, file: zipfile.ZipFile) -> None:
        self.places: dict[str, list[int]] = {}
        self._file = file
        self._name = ""
        self._out: IO[bytes] | None = None
        self._rest = b""

    def put(self, name: str, about: list[int], data: bytes) -> None:
        """Write the next bytes of the file that is written, or the first ones of another."""
        if name != self._name:
            self.close()
            self._name = name
            # A node could name any path.
            if _MEMBER.fullmatch(name) and name not in self.places:
                self.places[name] = about
                info = zipfile.ZipInfo(name, time.localtime()[:6])
                info.compress_type = zipfile.ZIP_DEFLATED
                self._out = self._file.open(info, "w", force_zip64=True)
        if self._out is not None:
            data = self._rest + data
            end = self._judged(data)
            self._out.write(self._cleaned(data[:end]))
            self._rest = data[end:]

    def close(self) -> None:
        """Write the rest of the last file."""
        if self._out is not None:
            self._out.write(self._cleaned(self._rest))
            self._out.close()
        self._name, self._out, self._rest = "", None, b""

    def _judged(self, data: bytes) -> int:
        """Return how many bytes can be judged by themselves, such as whole lines."""
        if self._name.endswith((".bin", ".idx")):
            return len(data)
        if self._name.endswith(".json"):
            return 0 if len(data) <= DOCUMENT_BYTES else len(data)
        end = data.rfind(b"\n") + 1
        key = data.rfind(b"-----BEGIN ")
        if key >= 0 and b"-----END " not in data[key:]:
            end = min(end, key)
        return len(data) if len(data) - end > HELD_BYTES else end

    def _cleaned(self, data: bytes) -> bytes:
        kind = Path(self._name).suffix
        if kind == ".jsonl":
            return b"".join(map(_clean_document, data.splitlines(keepends=True)))
        if kind == ".json":
            return _clean_document(data)
        return data if kind in (".bin", ".idx") else redact.same_length(data)


def _clean_document(data: bytes) -> bytes:
    """Return a JSON document without its secrets; what is none is cleaned as a text."""
    try:
        return json.dumps(redact.document(json.loads(data)), separators=(",", ":")).encode() + b"\n"
    except (ValueError, RecursionError):
        return redact.same_length(data)


@contextmanager
def _private(path: Path) -> Iterator[IO[bytes]]:
    """Yield a file that only its owner may read; it gets its name when it is complete."""
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


# --- opening one

# What zipfile raises for a file that is damaged, encrypted, or packed in another way.
_DAMAGES = (zipfile.BadZipFile, zlib.error, RuntimeError, NotImplementedError, EOFError, ValueError, OverflowError)


def unpack(path: Path, folder: Path) -> About:
    """Write the files of a bundle into a directory, as `nodes/<host>/…`; returns its document. Raises UsageError."""
    names, about = _open(path)
    try:
        with zipfile.ZipFile(path) as file:
            size = sum(file.getinfo(name).file_size for name in names)
            if size > max(FREE_BYTES, RATIO * path.stat().st_size):
                raise UsageError(f"{path}: its {size_text(size)} are more than any bundle of this size has")
            if size > shutil.disk_usage(folder).free:
                raise UsageError(f"{path}: {size_text(size)} do not fit into {folder}", "set TMPDIR to a larger disk")
            for name in names:
                place = folder / name
                place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                begin, changed_ns = about["files"][name]
                with file.open(name) as packed, place.open("wb") as out:
                    out.seek(begin)
                    shutil.copyfileobj(packed, out, CHUNK)
                os.utime(place, ns=(changed_ns, changed_ns))
    except (OSError, *_DAMAGES) as error:
        raise UsageError(f"{path}: cannot be unpacked: {error}") from error
    return about


def _open(path: Path) -> tuple[list[str], About]:
    """Return the members of a bundle, and its document; raises UsageError."""
    try:
        with zipfile.ZipFile(path) as file:
            if file.getinfo(ABOUT).file_size > DOCUMENT_BYTES:
                raise Misfit(f"{ABOUT} is larger than any")
            about: About = _read_about(parse(file.read(ABOUT)))
            names = file.namelist()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from error
    except KeyError:
        raise UsageError(f"{path}: this is no bundle", "`supervisor report --bundle FILE` writes one") from None
    except (Misfit, *_DAMAGES) as error:
        raise UsageError(f"{path}: this is no bundle, or damaged: {error}") from error
    if about["bundle"] > VERSION:
        raise UsageError(f"{path}: a newer version of supervisor made it", f"this one reads version {VERSION}")
    strange = [name for name in names if name != ABOUT and not (_MEMBER.fullmatch(name) and name in about["files"])]
    if strange or len(set(names)) < len(names) or not JOB_NAME.fullmatch(about["job"]):
        raise UsageError(f"{path}: this is no bundle, or damaged: {(strange or [about['job']])[0]!r} is in it")
    return [name for name in names if name != ABOUT], about


def open_inventory(path: Path) -> Inventory:
    """Return an inventory whose hosts are those of a bundle, each with its part of the job; raises UsageError.

    They are in a directory that is removed when this process ends.
    """
    folder = Path(tempfile.mkdtemp(prefix="supervisor-bundle-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    about = unpack(path, folder)
    hosts, specs = [], sorted(folder.glob("nodes/*/spec.json"))
    for place in sorted(folder.glob("nodes/*")):
        # No node gets it from another one through which the operator asked; it is the same everywhere.
        if specs and not (place / "spec.json").exists():
            shutil.copy(specs[0], place)
        # Beside the hosts: a name with anything added to it may be that of another one.
        root = folder / "homes" / place.name / "jobs" / about["job"]
        root.parent.mkdir(mode=0o700, parents=True)
        place.rename(root)
        if about["status"] is not None:
            (root / "status.json").write_text(json.dumps(about["status"]))
        env = {"SUPERVISOR_HOME": str(root.parent.parent)}
        hosts.append(Host(place.name, "localhost", "127.0.0.1", python=sys.executable, env=env, local=True))
    if not hosts:
        raise UsageError(f"{path}: no host's files are in it")
    # In the order of the job's hosts.
    order = {host["name"]: place for place, host in enumerate(about["hosts"])}
    hosts.sort(key=lambda host: order.get(host.name, len(order)))
    return Inventory(path, tuple(hosts), JobDefaults(Path.cwd(), sync=False), made_s=about["made_ns"] / 1e9)
