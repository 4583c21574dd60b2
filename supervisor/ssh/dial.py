"""One connection of asyncssh.

In: Settings; behind a jump host, a socket that leads through it. Out: an authenticated connection, or
HostError: NeedsSsh where ssh itself may get in.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TYPE_CHECKING, Any

from supervisor.ssh import reasons
from supervisor.ssh.reasons import Attempt
from supervisor.ssh_library import asyncssh

if TYPE_CHECKING:
    from collections.abc import Callable

    from supervisor.ssh.settings import Settings

    Progress = Callable[[str, str], None]

RESOLVE_DEADLINE_S = 10.0
CONNECT_DEADLINE_S = 20.0
# A dead connection is noticed after four intervals.
KEEPALIVE_S = 15.0
KEEPALIVE_COUNT = 3
# sshd drops connections at random when many arrive at once (MaxStartups): two more attempts, spread out.
RETRY_PAUSES_S = (0.3, 1.0)
MAX_ADDRESSES = 4


class _Client(asyncssh.SSHClient):
    """Records how far the handshake got; trusts only keys in known_hosts."""

    def __init__(self, attempt: Attempt, progress: Progress) -> None:
        self._attempt = attempt
        self._progress = progress

    def connection_made(self, conn: asyncssh.SSHClientConnection) -> None:
        """Record the peer's address."""
        peer = conn.get_extra_info("peername")
        self._attempt.address = str(peer[0]) if peer else ""

    def validate_host_public_key(self, host: str, addr: str, port: int, key: asyncssh.SSHKey) -> bool:
        """Record the offered key and refuse it: it is not among the trusted keys."""
        self._attempt.offered = key
        return False

    def begin_auth(self, username: str) -> None:
        """Record that the host key is trusted and authentication begins."""
        self._attempt.step = "auth"
        self._progress("auth", f"as {username}")


async def dial(settings: Settings, passed_on: socket.socket | None, progress: Progress) -> asyncssh.SSHClientConnection:
    """Connect and authenticate; the caller hangs up. Raises HostError; NeedsSsh where ssh itself may get in.

    `passed_on`: the socket of a process that passes bytes on, through a jump host; it is closed with the connection.
    """
    pauses = iter(RETRY_PAUSES_S)
    while True:
        attempt = Attempt()
        try:
            return await _once(settings, passed_on, progress, attempt)
        except (asyncssh.ConnectionLost, ConnectionResetError) as error:
            pause = next(pauses, None)
            if pause is None or passed_on is not None or attempt.step != "connect" or attempt.offered is not None:
                raise reasons.ssh_error(settings, attempt, error) from error
            await asyncio.sleep(pause)
        except asyncio.TimeoutError:
            raise reasons.timeout_error(settings.label, attempt.step, CONNECT_DEADLINE_S, settings.where) from None
        except (asyncssh.Error, OSError, ValueError, asyncio.IncompleteReadError) as error:
            raise reasons.ssh_error(settings, attempt, error) from error


async def _once(
    settings: Settings, passed_on: socket.socket | None, progress: Progress, attempt: Attempt
) -> asyncssh.SSHClientConnection:
    if passed_on is not None:
        progress("connect", f"{settings.where} through {settings.jump.alias if settings.jump else ''}")
    sock = passed_on or await _tcp(settings, progress)
    try:
        return await asyncio.wait_for(_handshake(settings, progress, attempt, sock), CONNECT_DEADLINE_S)
    except BaseException:
        sock.close()
        raise


async def _handshake(
    settings: Settings, progress: Progress, attempt: Attempt, sock: socket.socket
) -> asyncssh.SSHClientConnection:
    keys = [str(path) for path in settings.keys]
    options: dict[str, Any] = {}
    if settings.only_these and keys:
        public = await asyncio.to_thread(_public_halves, keys)
        # Ask the agent only for these keys: a server refuses after a few wrong ones.
        options["agent_identities"] = public or None
    return await asyncssh.connect(
        settings.host,
        settings.port,
        username=settings.user,
        known_hosts=reasons.trusted_keys(settings),
        host_key_alias=settings.host_key_alias,
        # `ssh -G` has said what the files mean.
        config=None,
        client_keys=keys,
        ignore_encrypted=True,
        agent_path=settings.agent,
        client_factory=lambda: _Client(attempt, progress),
        password_auth=False,
        kbdint_auth=False,
        keepalive_interval=KEEPALIVE_S,
        keepalive_count_max=KEEPALIVE_COUNT,
        # A node neither uses the operator's keys nor gets the operator's variables.
        agent_forwarding=False,
        send_env=[],
        login_timeout=CONNECT_DEADLINE_S,
        connect_timeout=None,
        sock=sock,
        **options,
    )


def _public_halves(files: list[str]) -> list[asyncssh.SSHKey]:
    public = []
    for file in files:
        with contextlib.suppress(OSError, asyncssh.KeyImportError):
            public.append(asyncssh.read_public_key(f"{file}.pub"))
    return public


async def _tcp(settings: Settings, progress: Progress) -> socket.socket:
    """Return a connected socket; try every address of the name. Raises HostError."""
    loop = asyncio.get_running_loop()
    progress("resolve", settings.host)
    try:
        addresses = await asyncio.wait_for(
            loop.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM),
            RESOLVE_DEADLINE_S,
        )
    except asyncio.TimeoutError:
        raise reasons.timeout_error(settings.label, "resolve", RESOLVE_DEADLINE_S, settings.host) from None
    except (OSError, UnicodeError) as error:
        gai = error if isinstance(error, OSError) else socket.gaierror(socket.EAI_NONAME, str(error))
        raise reasons.network_error(settings, gai) from error
    progress("connect", settings.where)
    failure: OSError | None = None
    deadline = CONNECT_DEADLINE_S / min(len(addresses), MAX_ADDRESSES)
    for family, kind, protocol, _name, address in addresses[:MAX_ADDRESSES]:
        try:
            return await asyncio.wait_for(_connect_socket(settings, (family, kind, protocol), address), deadline)
        except asyncio.TimeoutError:
            failure = failure or OSError(110, "no answer")
        except OSError as error:
            failure = error
    if failure is None or failure.errno == 110:
        raise reasons.timeout_error(settings.label, "connect", CONNECT_DEADLINE_S, settings.where)
    raise reasons.network_error(settings, failure)


async def _connect_socket(settings: Settings, kind: tuple[int, int, int], address: Any) -> socket.socket:
    sock = socket.socket(*kind)
    try:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, address)
    except BaseException:
        sock.close()
        raise
    return sock


async def hang_up(connection: asyncssh.SSHClientConnection) -> None:
    """Close a connection; abort it if that takes too long."""
    connection.close()
    try:
        await asyncio.wait_for(connection.wait_closed(), 2.0)
    except asyncio.TimeoutError:
        connection.abort()
    except (asyncssh.Error, OSError):
        return
