"""How to reach one SSH server: hosts.toml first, then ~/.ssh/config, then ssh's own defaults.

In: a Host, or one hop of its ProxyJump. Out: Settings, with keys and host keys read from their files. No network.
"""

from __future__ import annotations

import dataclasses
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

from supervisor.errors import HostError
from supervisor.inventory.sshconfig import SshConfigError, local_user, read_config
from supervisor.inventory.targets import Hop, TargetError, parse_hops
from supervisor.ssh_library import asyncssh

if TYPE_CHECKING:
    from supervisor.inventory import Host
    from supervisor.ssh_library import SSHClientConfig

DEFAULT_KEYS = ("id_ed25519_sk", "id_ecdsa_sk", "id_ed25519", "id_ecdsa", "id_rsa")
DEFAULT_KNOWN_HOSTS = ("~/.ssh/known_hosts", "~/.ssh/known_hosts2", "/etc/ssh/ssh_known_hosts")
AGENT_VARIABLE = "SSH_AUTH_SOCK"


@dataclasses.dataclass(frozen=True)
class Settings:
    """All that one SSH connection needs."""

    label: str
    """The node's name in the inventory, or "jump host x"."""
    alias: str
    """The name to look up in ~/.ssh/config."""
    host: str
    port: int
    user: str
    keys: tuple[Path, ...]
    locked: tuple[Path, ...]
    """Key files with a passphrase: usable only through an ssh-agent."""
    only_these: bool
    """Whether only these keys are offered (identity_file of hosts.toml, or IdentitiesOnly)."""
    agent: str
    """Path of the ssh-agent's socket; empty: none."""
    known_hosts: tuple[Path, ...]
    jump: str | None
    proxy_command: str | None
    host_key_alias: str | None
    family: int
    bind: str | None

    @property
    def where(self) -> str:
        """Return the address for messages."""
        return f"{self.host} port {self.port}"


def for_host(host: Host) -> Settings:
    """Return the settings of a host; raises HostError."""
    config = _config(host.name, host.ssh, host.user, host.port)
    known = (host.known_hosts,) if host.known_hosts is not None else _known_hosts(config)
    jump = host.proxy_jump if host.proxy_jump is not None else config.get("ProxyJump")
    jump = None if str(jump or "none").lower() == "none" else str(jump)
    proxy = None if host.proxy_jump is not None else config.get("ProxyCommand")
    return _settings(host.name, host.ssh, config, host.identity_file, known, jump, proxy)


def for_hop(host: Host, hop: Hop) -> Settings:
    """Return the settings of a jump host on the way to a host; raises HostError."""
    config = _config(host.name, hop.host, hop.user, hop.port)
    # The user's own known_hosts also hold for jump hosts, which often serve other purposes too.
    own = (host.known_hosts,) if host.known_hosts is not None else ()
    identity = host.identity_file if not config.get("IdentityFile") else None
    jump = config.get("ProxyJump")
    jump = None if str(jump or "none").lower() == "none" else str(jump)
    known = tuple(dict.fromkeys((*own, *_known_hosts(config))))
    return _settings(f"jump host {hop.host}", hop.host, config, identity, known, jump, config.get("ProxyCommand"))


def hops(host: str, jump: str) -> list[Hop]:
    """Return the hops of a ProxyJump in order; raises HostError."""
    try:
        return parse_hops(jump)
    except TargetError as error:
        raise HostError(host, "resolve", f"proxy_jump {error}", error.hint) from error


def _config(node: str, alias: str, user: str | None, port: int | None) -> SSHClientConfig:
    try:
        return read_config(alias, user, port)
    except SshConfigError as error:
        raise HostError(node, "resolve", str(error), error.hint) from error


def _settings(
    label: str,
    alias: str,
    config: SSHClientConfig,
    identity: Path | None,
    known_hosts: tuple[Path, ...],
    jump: str | None,
    proxy_command: object,
) -> Settings:
    if identity is not None:
        files = [identity]
    else:
        named: Any = config.get("IdentityFile", [])
        files = [_file(name) for name in named or (f"~/.ssh/{key}" for key in DEFAULT_KEYS)]
    keys, locked = [], []
    for file in files:
        state = _key_state(label, file, strict=identity is not None)
        if state == "open":
            keys.append(file)
        elif state == "locked":
            locked.append(file)
    agent_path = _agent_path(config)
    if identity is not None and locked and not _is_socket(agent_path):
        reason = f"identity file {identity} is protected by a passphrase, and there is no ssh-agent"
        raise HostError(label, "auth", reason, f'run: eval "$(ssh-agent)" && ssh-add {identity}')
    return Settings(
        label=label,
        alias=alias,
        host=str(config.get("Hostname", alias)),
        port=int(str(config.get("Port", 22))),
        user=str(config.get("User") or local_user()),
        keys=tuple(keys),
        locked=tuple(locked),
        only_these=identity is not None or bool(config.get("IdentitiesOnly")),
        agent=agent_path if _is_socket(agent_path) else "",
        known_hosts=known_hosts,
        jump=jump,
        proxy_command=str(proxy_command) if proxy_command else None,
        host_key_alias=str(config.get("HostKeyAlias")) if config.get("HostKeyAlias") else None,
        family=int(str(config.get("AddressFamily", int(socket.AF_UNSPEC)))),
        bind=str(config.get("BindAddress")) if config.get("BindAddress") else None,
    )


def _known_hosts(config: SSHClientConfig) -> tuple[Path, ...]:
    """Return the files with host keys; "none" means no file: then no host is trusted."""
    user: Any = config.get("UserKnownHostsFile")
    everybody: Any = config.get("GlobalKnownHostsFile")
    if user is None and everybody is None:
        names = DEFAULT_KNOWN_HOSTS
    else:
        names = (
            *(DEFAULT_KNOWN_HOSTS[:2] if user is None else user),
            *(DEFAULT_KNOWN_HOSTS[2:] if everybody is None else everybody),
        )
    return tuple(map(_file, names))


def _file(name: str) -> Path:
    """Return the file of a name in the configuration; absolute, as only that keeps `~nobody` from being expanded."""
    return Path(os.path.abspath(os.path.expanduser(name)))


def _key_state(label: str, file: Path, strict: bool) -> str:
    """Tell whether a private key can be used: open, locked (passphrase) or absent."""
    try:
        pairs = asyncssh.load_keypairs([str(file)], ignore_encrypted=True)
    except (OSError, asyncssh.KeyImportError, asyncssh.KeyEncryptionError) as error:
        if strict:
            text = error.strerror if isinstance(error, OSError) else str(error)
            raise HostError(label, "auth", f"identity file {file}: {text}") from error
        return "absent"
    return "open" if pairs else "locked"


def _agent_path(config: SSHClientConfig) -> str:
    """Return the socket of the ssh-agent, "" for none; IdentityAgent may name a variable."""
    named = str(config.get("IdentityAgent", AGENT_VARIABLE) or "none")
    if named == AGENT_VARIABLE or named.startswith("$"):
        named = os.environ.get(named.lstrip("$"), "none")
    return "" if named.lower() == "none" else os.path.expanduser(named)


def _is_socket(path: str) -> bool:
    return bool(path) and Path(path).is_socket()
