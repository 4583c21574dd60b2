"""A port of this machine that belongs to one test, whatever other tests and their clients take meanwhile."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def reserved_port(port: int = 0, host: str = "127.0.0.1") -> Iterator[int]:
    """Return a port that refuses connections until a program of the test listens on it; 0: any free one.

    A socket stays bound to it, so the kernel gives it to nobody else. SO_REUSEADDR, which servers set, too, lets one
    of them listen there all the same.
    """
    with socket.socket() as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        yield bound.getsockname()[1]
