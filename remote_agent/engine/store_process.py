"""The process that imports torch for the engine and serves the stores of its groups, one at a time.

In: on stdin, a socket, messages with an address and a listening socket. Out: an answer to each; it ends with the
engine.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import socket
from typing import Any

from remote_agent.base.proc import die_with_parent

MESSAGE_BYTES = 65536


def main(engine: int) -> int:
    """Serve until the engine has closed its end; returns the exit code."""
    die_with_parent()
    wire = socket.socket(fileno=os.dup(0))
    if os.getppid() != engine:
        return 1
    try:
        torch = import_torch()
    except BaseException as problem:
        _send(wire, broken=f"torch cannot be imported: {type(problem).__name__}: {problem}")
        raise
    _send(wire, ready=True)
    stores: list[Any] = []
    while True:
        data, descriptors, _, _ = socket.recv_fds(wire, MESSAGE_BYTES, 1)
        if not data:
            return 0
        # The store before belongs to a group that has ended.
        stores.clear()
        request, error = json.loads(data), ""
        if descriptors:
            try:
                stores.append(torch.open_store(request["host"], socket.socket(fileno=descriptors[0])))
            except (OSError, RuntimeError, ValueError) as problem:
                error = str(problem).partition("\n")[0] or type(problem).__name__
        _send(wire, number=request["number"], error=error)


def import_torch() -> Any:
    """Return the module torch_api; raises whatever a broken installation raises."""
    # The import creates many objects that stay: collecting garbage meanwhile would take a tenth of its time or more.
    gc.disable()
    try:
        return importlib.import_module("remote_agent.engine.torch_api")
    finally:
        gc.enable()
        gc.freeze()


def _send(wire: socket.socket, **message: Any) -> None:
    wire.send(json.dumps(message).encode())
