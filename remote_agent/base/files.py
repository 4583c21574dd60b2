"""Files: atomic writes, locks, free space, Unix sockets with long paths.

In: paths, bytes. Out: files as described; `Problem` where the file system cannot do it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remote_agent.wire import Problem

if TYPE_CHECKING:
    from remote_agent.wire.answers import Space


def atomic_write(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Write a file so that a reader sees either the old or the new content; raises OSError."""
    temporary = path.with_name(f".{path.name[:100]}.{os.urandom(6).hex()}.tmp")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(fd, "wb") as file:
            os.fchmod(fd, mode)
            file.write(data)
            file.flush()
            os.fsync(fd)
        os.replace(temporary, path)
        sync(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def sync(path: Path, mode: int | None = None) -> None:
    """Make a file's content, or the names in a directory, survive a loss of power; raises OSError.

    A new file needs both. `mode`: the file gets it first.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if mode is not None:
            os.fchmod(fd, mode)
        os.fsync(fd)
    finally:
        os.close(fd)


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object, or an empty one when the file is missing or damaged."""
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def read_text(path: str | Path) -> str:
    """Return the text of a file, such as one of /proc or sysfs; empty when it is gone or cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def set_aside(path: Path, mark: str) -> None:
    """Append `mark` and the first free number to the name of a file or directory; raises OSError."""
    number = 1
    while (aside := path.with_name(f"{path.name}{mark}{number}")).exists():
        number += 1
    path.rename(aside)


def try_lock(fd: int) -> bool:
    """Lock a file, or return False when it is locked; raises Problem where its file system has no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        message = f"{os.readlink(f'/proc/self/fd/{fd}')}: this file system cannot lock files ({error.strerror})"
        hint = 'use a local disk: set env = { SUPERVISOR_HOME = "/local/disk/supervisor" } for this host'
        raise Problem("no_locks", message, hint) from error
    return True


def free_bytes(path: Path) -> int:
    """Return how many bytes this user may still write there; raises OSError."""
    info = os.statvfs(path)
    return info.f_bavail * info.f_frsize


def disk_space(path: str | Path) -> Space | None:
    """Return the bytes of the file system there; None where that is unknown."""
    try:
        info = os.statvfs(path)
    except OSError:
        return None
    return {"total": info.f_blocks * info.f_frsize, "free": info.f_bavail * info.f_frsize}


def disk_free(path: str | Path) -> int | None:
    """Return the free bytes there; None where that is unknown."""
    space = disk_space(path)
    return None if space is None else space["free"]


def disk_full(path: Path, needed: int) -> Problem:
    """Return the error for a disk without enough space."""
    try:
        free = f"{free_bytes(path):,}"
    except OSError:
        free = "an unknown number of"
    return Problem(
        "disk_full",
        f"no space left for {path}: {needed:,} bytes are needed, {free} are free",
        "free some space (supervisor clean), or set SUPERVISOR_HOME through env to a larger disk",
    )


@contextlib.contextmanager
def short_name(path: Path) -> Iterator[str]:
    """Name a socket through a descriptor of its directory: a socket's path is limited to 107 bytes."""
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


def connect_unix(path: Path, timeout_s: float) -> socket.socket:
    """Return a blocking connection to a Unix socket whose path may be of any length; raises OSError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout_s)
        with short_name(path) as name:
            sock.connect(name)
        sock.settimeout(None)
        return sock
    except BaseException:
        sock.close()
        raise
