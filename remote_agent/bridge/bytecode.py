"""The agent's file with its bytecode: Python keeps none for what it imports from a zip.

In: the zipapp as it was pushed, which runs. Out: `<its name>.<cache tag>.pyz` beside it, the same with every module
compiled for this Python; this process and later ones run from there. Compiling takes longer than all else that an agent
does until it answers.

Its first line is a seal that only this user can make: the loader runs no file that is damaged or that somebody else put
there, for the supervisor knows the hash of the pushed file, but not of this one.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys

from remote_agent.base import private

# This flag of a .pyc says that the source is not compared again.
_UNCHECKED = (1).to_bytes(4, "little")


def is_pushed(program: str) -> bool:
    """Tell whether this is the file as the supervisor sends it, named by its hash alone."""
    return re.fullmatch(r"[0-9a-f]{64}\.pyz", os.path.basename(program)) is not None


def become_compiled(pushed: str) -> None:
    """Run this command from the compiled file, which is made if it is not there; returns where it cannot be written."""
    with contextlib.suppress(OSError):
        os.execv(sys.executable, [sys.executable, "-S", compiled(pushed), *sys.argv[1:]])


def compiled(pushed: str) -> str:
    """Return the path of the compiled file, which is made if it is not there; raises OSError."""
    path = f"{os.path.splitext(pushed)[0]}.{sys.implementation.cache_tag}.pyz"
    key = _make_key(os.path.dirname(os.path.dirname(pushed)))
    if not private.is_sealed(path, key):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        _write(pushed, path, key)
    return path


def _make_key(home: str) -> bytes:
    """Return the key of this user's seals, made where there is none; raises OSError."""
    if not private.read_key(home):
        path = os.path.join(home, private.KEY)
        temporary = f"{path}.{os.getpid()}.tmp"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        try:
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(os.urandom(private.KEY_BYTES))
                file.flush()
                os.fsync(file.fileno())
            # The file is linked, not renamed: of several processes at once, all use the key of the first.
            with contextlib.suppress(FileExistsError):
                os.link(temporary, path)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
    return private.read_key(home)


def _write(pushed: str, path: str, key: bytes) -> None:
    import importlib.util
    import marshal
    import socket
    import zipfile

    # Many nodes may share a home, so each writes a temporary file of its own.
    temporary = f"{path}.{socket.gethostname()}.{os.getpid()}.tmp"
    try:
        with open(temporary, "x+b") as file, zipfile.ZipFile(pushed) as source:
            os.chmod(temporary, 0o600)
            file.seek(private.SEAL_BYTES)
            with zipfile.ZipFile(file, "w") as target:
                for entry in source.infolist():
                    data = source.read(entry)
                    target.writestr(entry, data, zipfile.ZIP_DEFLATED)
                    if entry.filename.endswith(".py"):
                        # Tracebacks show the file that is run.
                        where = os.path.join(path, entry.filename)
                        code = marshal.dumps(compile(data, where, "exec", dont_inherit=True, optimize=0))
                        head = importlib.util.MAGIC_NUMBER + _UNCHECKED + importlib.util.source_hash(data)
                        target.writestr(zipfile.ZipInfo(f"{entry.filename}c", entry.date_time), head + code)
            file.seek(private.SEAL_BYTES)
            seal = private.seal(key, file.read())
            file.seek(0)
            file.write(seal)
            file.flush()
            os.fsync(file.fileno())
        # The file is linked, not renamed: processes may already run from an existing one.
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
