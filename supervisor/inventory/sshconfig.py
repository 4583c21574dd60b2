"""Read ~/.ssh/config for one host, with asyncssh's own reader.

In: an alias, and user and port of hosts.toml. Out: the configuration; host name, port and user, which hold only
characters that a ProxyCommand may see.
"""

from __future__ import annotations

import functools
import getpass
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from supervisor.inventory.targets import TargetError, check_host, check_user

if TYPE_CHECKING:
    from supervisor.ssh_library import SSHClientConfig

# ssh has the same limit.
MAX_INCLUDES = 16
# These limits hold for all files together, each as often as it is included. Each file and Include takes time, a line
# the square of its length; anything larger is an accident.
MAX_BYTES = 1024 * 1024
MAX_FILES = 1024
MAX_LINE = 8192


class SshConfigError(ValueError):
    """~/.ssh/config cannot be read or used; the text names file and line, or the key."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class Resolved(NamedTuple):
    """Host name, port and user of an alias."""

    host: str
    port: int
    user: str


def config_files() -> list[Path]:
    """Return the configuration files that exist, the user's first."""
    files = [Path("~/.ssh/config").expanduser(), Path("/etc/ssh/ssh_config")]
    return [file for file in files if os.access(file, os.R_OK)]


def local_user() -> str:
    """Return the user name with which ssh logs in by default."""
    try:
        return getpass.getuser()
    except (KeyError, OSError) as error:
        raise SshConfigError("this machine does not know your user name; set USER") from error


@functools.cache
def _reader() -> type[SSHClientConfig]:
    """Return asyncssh's reader with ssh's limit for Include."""
    # asyncssh takes a tenth of a second to import, and only those with a configuration file need it here.
    from supervisor.ssh_library import SSHClientConfig

    class Reader(SSHClientConfig):
        _opened: tuple[Path, ...] = ()
        _bytes = _files = 0

        def parse(self, path: Path) -> None:
            if path.resolve() in self._opened:
                self._error(f"Include leads back to {path}, which is being read")
            if len(self._opened) > MAX_INCLUDES:
                self._error(f"Include {path}: more than {MAX_INCLUDES} files, each included by the one before")
            data = _read_file(path)
            self._bytes += len(data)
            self._files += 1 + data.lower().count(b"include")
            if self._bytes > MAX_BYTES or self._files > MAX_FILES:
                most = f"{MAX_BYTES // 1024} KiB or {MAX_FILES} files and Includes"
                raise SshConfigError(f"{path}: the ssh configuration has more than {most} in total")
            opened, self._opened = self._opened, (*self._opened, path.resolve())
            super().parse(path)
            self._opened = opened

    return Reader


def _read_file(path: Path) -> bytes:
    """Return a file's beginning, more than MAX_BYTES if it has more; raises SshConfigError, OSError."""
    with open(path, "rb") as file:
        data = file.read(MAX_BYTES + 1)
    if b"\0" in data:
        raise SshConfigError(f"{path} contains a NUL character")
    long = next((number for number, line in enumerate(data.splitlines(), 1) if len(line) > MAX_LINE), None)
    if long is not None:
        raise SshConfigError(f"{path} line {long}: longer than {MAX_LINE} bytes")
    return data


def read_config(alias: str, user: str | None, port: int | None) -> SSHClientConfig:
    """Return the configuration of an alias; `user` and `port` override the files. Raises SshConfigError."""
    # The names are checked before anything is read, because `Match exec` and ProxyCommand run commands.
    _check("ssh", check_host, alias)
    if user is not None:
        _check("user", check_user, user)
    config = _read(alias, user, port)
    _check(f"HostName of {alias} in the ssh configuration", check_host, str(config.get("Hostname", alias)))
    _check(f"User of {alias} in the ssh configuration", check_user, str(config.get("User") or local_user()))
    return config


def _read(alias: str, user: str | None, port: int | None) -> SSHClientConfig:
    from supervisor.ssh_library import asyncssh

    # asyncssh reads an empty tuple as "not given".
    arguments: tuple[Any, ...] = (user if user is not None else (), alias, port if port is not None else ())
    try:
        config = _reader().load(None, config_files(), False, False, False, local_user(), *arguments)
        if cast("SSHClientConfig", config).has_match_final():
            # As in ssh, the files are read again with `Match final`; values that are already set stay.
            config = _reader().load(config, config_files(), False, False, True, local_user(), *arguments)
    except (asyncssh.IllegalUserName, OSError, ValueError, RuntimeError) as error:
        # Errors of pathlib for a path or a pattern of Include come as they are.
        raise SshConfigError(f"cannot read the ssh configuration: {error}") from error
    return cast("SSHClientConfig", config)


def _check(what: str, check: Callable[[str], str], value: str) -> None:
    try:
        check(value)
    except TargetError as error:
        raise SshConfigError(f"{what}: {error}", error.hint) from error


def resolve(alias: str, user: str | None, port: int | None) -> Resolved:
    """Return host name, port and user of an alias; `user` and `port` override the files. Raises SshConfigError."""
    if not config_files():
        return Resolved(alias, port or 22, user or local_user())
    config = read_config(alias, user, port)
    return Resolved(
        str(config.get("Hostname", alias)), int(str(config.get("Port", 22))), str(config.get("User") or local_user())
    )
