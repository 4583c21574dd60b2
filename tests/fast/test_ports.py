"""Where we listen for other nodes: in the range that a firewall lets through, or anywhere."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Iterator

import pytest

from remote_agent.base.ports import NoFreePort, bind, listening, reached_as
from remote_agent.wire import read_ports

HERE = "127.0.0.1"


@contextlib.contextmanager
def neighbours() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yield two sockets that listen at consecutive ports; the system gives these to nobody who asks for any port."""
    with contextlib.ExitStack() as stack:
        while True:
            port = random.randrange(10_000, 28_000)
            try:
                first, second = (stack.enter_context(bind(HERE, number)) for number in (port, port + 1))
            except OSError:
                continue
            break
        yield first, second


def test_the_first_free_port_of_the_range_is_taken_and_a_full_one_is_named() -> None:
    with neighbours() as (first, second):
        low, high = first.getsockname()[1], second.getsockname()[1]
        with pytest.raises(NoFreePort, match=f"no port is free in {low}-{high}, the range that `ports` in"):
            listening(f"{low}-{high}", HERE)
        second.close()
        with listening(f"{low}-{high}", HERE) as free:
            assert free.getsockname()[1] == high
    with listening() as anywhere:
        assert anywhere.getsockname()[1] > 0


def test_an_address_that_is_not_ours_is_not_called_a_full_range() -> None:
    with pytest.raises(OSError, match="assign requested address") as refused:
        listening("29500-29501", "192.0.2.1")
    assert not isinstance(refused.value, NoFreePort)


@pytest.mark.parametrize("text", ["29500", "2-1", "5-5", "0-9", "1-65536", "a-b", "1-2-3", "-"])
def test_what_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not FIRST-LAST"):
        read_ports(text)


def test_a_store_s_port_waits_for_whoever_accepts_and_an_address_of_another_machine_is_refused() -> None:
    with reached_as(HERE) as server, socket.create_connection((HERE, server.getsockname()[1]), 5) as client:
        client.sendall(b"early")
        accepted, _ = server.accept()
        with accepted:
            assert accepted.recv(5) == b"early"
    with pytest.raises(OSError, match="no-such-host|not known|resolution"):
        reached_as("no-such-host.invalid")
    # Something listens there, but it is not we.
    with bind("127.0.0.2", 0) as other, pytest.raises(OSError, match="timed out|in use"):
        reached_as("127.0.0.2", other.getsockname()[1], timeout_s=0.2)
