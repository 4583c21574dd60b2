"""Bytes over TCP are found in the kernel, whoever holds the connection."""

from __future__ import annotations

import contextlib
import errno
import os
import socket

import pytest

from remote_agent.engine.inspect.sockets import remote_ends, transferred


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_what_is_sent_and_received_counts_by_family_once(family: socket.AddressFamily, host: str) -> None:
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
                before = transferred({0: [me]})
                here.sendall(b"x" * 10_000)
                assert len(there.recv(10_000, socket.MSG_WAITALL)) == 10_000
                # What a forked child holds too is the same connection.
                after = transferred({0: [me, me], 1: [1 << 22]})
    assert before is not None
    assert after is not None
    # Both ends are ours; the last acknowledgement may still be on its way.
    assert 10_000 <= after[0] - before[0] <= 20_000
    assert after[1] == 0


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_silent_addresses_are_distinguished_from_those_that_answer(family: socket.AddressFamily, host: str) -> None:
    me = os.getpid()
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.socket(family))
        try:
            server.bind((host, 0))
        except OSError as error:
            pytest.skip(f"{host}: {error}")
        server.listen(0)
        end = f"{f'[{host}]' if ':' in host else host}:{server.getsockname()[1]}"
        # The second one finds its queue full, and its SYN is dropped.
        for _ in range(2):
            dialling = stack.enter_context(socket.socket(family))
            dialling.setblocking(False)
            assert dialling.connect_ex(server.getsockname()) in (0, errno.EINPROGRESS)
        silent, reached = remote_ends([me])[me]
    assert (silent.count(end), reached.count(end)) == (1, 1)
    assert remote_ends([1 << 22]) == {1 << 22: ([], [])}
