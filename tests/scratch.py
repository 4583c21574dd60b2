"""A directory for what processes under test put into the temporary one and, killed, never remove.

In: the environment of this process, which what it starts inherits. Out: TMPDIR there, removed at the end; and
XDG_STATE_HOME, as the user's own settings of a job are neither read nor written.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

OUTER = "SUPERVISOR_TEST_TMP"


def outer() -> Path:
    """The temporary directory that outlives this run: what is found there again by the next one belongs into it."""
    return Path(os.environ.get(OUTER) or tempfile.gettempdir())


@contextmanager
def scratch() -> Iterator[None]:
    """A TMPDIR for this process and all it starts; inside another one, as in the workers of pytest-xdist, that one."""
    if OUTER in os.environ:
        yield
        return
    os.environ[OUTER] = tempfile.gettempdir()
    # Short: sockets lie below it, whose paths may have 107 bytes.
    directory = tempfile.mkdtemp(prefix="sv-")
    os.environ["TMPDIR"] = tempfile.tempdir = directory
    state = os.environ.get("XDG_STATE_HOME")
    os.environ["XDG_STATE_HOME"] = f"{directory}/state"
    try:
        yield
    finally:
        del os.environ["XDG_STATE_HOME"]
        if state is not None:
            os.environ["XDG_STATE_HOME"] = state
        shutil.rmtree(directory, ignore_errors=True)
        os.environ["TMPDIR"] = tempfile.tempdir = os.environ.pop(OUTER)
