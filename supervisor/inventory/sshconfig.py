"""What ~/.ssh/config says about a host, as ssh itself would read it.

In: an alias, and what hosts.toml already decided. Out: host name, port and user.
"""

from __future__ import annotations

import getpass
import os
from pathlib import Path
from typing import NamedTuple


class SshConfigError(ValueError):
    """~/.ssh/config cannot be read; the text names file and line."""


class Resolved(NamedTuple):
    """Where an alias leads."""

    host: str
    port: int
    user: str


def config_files() -> list[Path]:
    """Return the configuration files that exist, the user's first."""
    files = [Path("~/.ssh/config").expanduser(), Path("/etc/ssh/ssh_config")]
    return [file for file in files if os.access(file, os.R_OK)]


def local_user() -> str:
    """Return the name ssh would log in with by default."""
    try:
        return getpass.getuser()
    except (KeyError, OSError) as error:
        raise SshConfigError("this machine does not know your user name; set USER") from error


def resolve(alias: str, user: str | None, port: int | None) -> Resolved:
    """Return where an alias leads; user and port win over the file. Raises SshConfigError."""
    files = config_files()
    if not files:
        return Resolved(alias, port or 22, user or local_user())
    # asyncssh takes a tenth of a second to import, and only those with a configuration file need it here.
    from asyncssh.config import ConfigParseError, SSHClientConfig

    try:
        # An empty tuple is asyncssh's word for "not given".
        given = (user if user is not None else (), alias, port if port is not None else ())
        config = SSHClientConfig.load(None, files, False, False, False, local_user(), *given)
    except (ConfigParseError, OSError, UnicodeDecodeError) as error:
        raise SshConfigError(f"cannot read the ssh configuration: {error}") from error
    return Resolved(
        str(config.get("Hostname", alias)), int(str(config.get("Port", 22))), str(config.get("User") or local_user())
    )
