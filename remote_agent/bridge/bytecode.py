"""The agent's file with its bytecode: Python keeps none for what it imports from a zip.

In: the zipapp as it was pushed, which runs. Out: `<its name>.<cache tag>.pyz` beside it, the same with every module
compiled for this Python; this process and later ones run from there. Compiling takes longer than all else that an agent
does until it answers.

Its first line is the hash of all that follows: the loader runs no file that is damaged.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import sys

# Of a .pyc: found by the hash of its source, which is not compared again.
_UNCHECKED = (1).to_bytes(4, "little")
_HEAD = b"#%s\n"
_HEAD_LENGTH = len(_HEAD % hashlib.sha256().hexdigest().encode())


def is_pushed(program: str) -> bool:
    """Tell whether this is the file as the supervisor sends it, named by its hash alone."""
    return re.fullmatch(r"[0-9a-f]{64}\.pyz", os.path.basename(program)) is not None


def become_compiled(pushed: str) -> None:
    """Run this command from the compiled file, which is made if it is not there; returns where it cannot be written."""
    compiled = f"{os.path.splitext(pushed)[0]}.{sys.implementation.cache_tag}.pyz"
    with contextlib.suppress(OSError):
        if not _is_whole(compiled):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(compiled)
            _write(pushed, compiled)
        os.execv(sys.executable, [sys.executable, compiled, *sys.argv[1:]])


def _is_whole(compiled: str) -> bool:
    with contextlib.suppress(OSError), open(compiled, "rb") as file:
        return file.read(_HEAD_LENGTH) == _HEAD % hashlib.sha256(file.read()).hexdigest().encode()
    return False


def _write(pushed: str, compiled: str) -> None:
    import importlib.util
    import marshal
    import socket
    import zipfile

    # A home that many nodes share: each has a part of its own.
    part = f"{compiled}.{socket.gethostname()}.{os.getpid()}.tmp"
    try:
        with open(part, "x+b") as file, zipfile.ZipFile(pushed) as source:
            os.chmod(part, 0o600)
            file.seek(_HEAD_LENGTH)
            with zipfile.ZipFile(file, "w") as target:
                for entry in source.infolist():
                    data = source.read(entry)
                    target.writestr(entry, data)
                    if entry.filename.endswith(".py"):
                        # Tracebacks show the file that is run.
                        where = os.path.join(compiled, entry.filename)
                        code = marshal.dumps(compile(data, where, "exec", dont_inherit=True, optimize=0))
                        head = importlib.util.MAGIC_NUMBER + _UNCHECKED + importlib.util.source_hash(data)
                        target.writestr(zipfile.ZipInfo(f"{entry.filename}c", entry.date_time), head + code)
            file.seek(_HEAD_LENGTH)
            head = _HEAD % hashlib.sha256(file.read()).hexdigest().encode()
            file.seek(0)
            file.write(head)
            file.flush()
            os.fsync(file.fileno())
        # Not renamed: where another one was first, processes already run from that.
        with contextlib.suppress(FileExistsError):
            os.link(part, compiled)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(part)
