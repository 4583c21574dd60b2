"""Read ~/.ssh/config for one host, with asyncssh's own reader.

In: an alias, and user and port of hosts.toml. Out: the configuration; host name, port and user.
"""

from __future__ import annotations

import getpass
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

if TYPE_CHECKING:
    from asyncssh.config import SSHClientConfig


class SshConfigError(ValueError):
    """~/.ssh/config cannot be read; the text names file and line."""


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


def read_config(alias: str, user: str | None, port: int | None) -> SSHClientConfig:
    """Return the configuration of an alias; `user` and `port` override the files. Raises SshConfigError."""
    # asyncssh takes a tenth of a second to import, and only those with a configuration file need it here.
    import asyncssh
    from asyncssh.config import ConfigParseError, SSHClientConfig

    # asyncssh reads an empty tuple as "not given".
    given: tuple[Any, ...] = (user if user is not None else (), alias, port if port is not None else ())
    try:
        config = SSHClientConfig.load(None, config_files(), False, False, False, local_user(), *given)
        if config.has_match_final():
            # As ssh does: read again with `Match final`; values that are already set stay.
            config = SSHClientConfig.load(config, config_files(), False, False, True, local_user(), *given)
    except (ConfigParseError, asyncssh.IllegalUserName, OSError, UnicodeDecodeError) as error:
        raise SshConfigError(f"cannot read the ssh configuration: {error}") from error
    return cast("SSHClientConfig", config)


def resolve(alias: str, user: str | None, port: int | None) -> Resolved:
    """Return host name, port and user of an alias; `user` and `port` override the files. Raises SshConfigError."""
    if not config_files():
        return Resolved(alias, port or 22, user or local_user())
    config = read_config(alias, user, port)
    return Resolved(
        str(config.get("Hostname", alias)), int(str(config.get("Port", 22))), str(config.get("User") or local_user())
    )
