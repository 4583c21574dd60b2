"""Bytes over TCP are found in the kernel, whoever holds the connection."""

from __future__ import annotations

import os
import socket

import pytest

from remote_agent.engine_sockets import transferred


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_what_is_sent_and_received_counts_by_process(family: socket.AddressFamily, host: str) -> None:
    me = os.getpid()
    with socket.socket(family) as server:
        try:
            server.bind((host, 0))
        except OSError as error:
            pytest.skip(f"{host}: {error}")
        server.listen()
        with socket.socket(family) as here:
            here.connect(server.getsockname())
            there, _ = server.accept()
            with there:
                before = transferred([me])
                here.sendall(b"x" * 10_000)
                assert len(there.recv(10_000, socket.MSG_WAITALL)) == 10_000
                after = transferred([me, 1 << 22])
    assert before is not None
    assert after is not None
    # Both ends are ours; the last acknowledgement may still be on its way.
    assert 10_000 <= after[me] - before[me] <= 20_000
    assert after[1 << 22] == 0
