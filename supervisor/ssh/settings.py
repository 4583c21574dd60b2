"""How to reach one SSH server, as ssh itself would, and whether asyncssh can do that.

In: a Host, or a jump host on the way to it. Out: Settings. No network, but for what `ssh -G` asks.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from supervisor.errors import HostError
from supervisor.inventory import sshconfig
from supervisor.inventory.sshconfig import Resolved, SshConfigError, options_of
from supervisor.inventory.targets import Hop, TargetError, parse_hops

if TYPE_CHECKING:
    from supervisor.inventory import Host

MAX_HOPS = 8
DEFAULT_KEYS = ("id_ed25519_sk", "id_ecdsa_sk", "id_ed25519", "id_ecdsa", "id_rsa")
DEFAULT_KNOWN_HOSTS = ("~/.ssh/known_hosts", "~/.ssh/known_hosts2", "/etc/ssh/ssh_known_hosts")
AGENT_VARIABLE = "SSH_AUTH_SOCK"
# asyncssh does all that ssh would if only these options differ from ssh's defaults: those that it is told, too, and
# those that change nothing for us. These are about sessions, forwarding and waiting, which we set ourselves, about what
# ssh prints, or about ways to log in: where asyncssh does not get in, ssh tries. Any other option needs ssh.
AS_WELL = re.compile(
    r"host(name|keyalias)?|port|user|(global|user)knownhostsfile|identit\w+|ignoreunknown|proxyjump|"
    r"addkeystoagent|batchmode|canonical\w+|checkhostip|clearallforwardings|compression|connect(ionattempts|timeout)|"
    r"control(master|path|persist)|enable\w+|escapechar|exitonforwardfailure|fingerprinthash|forkafterauthentication|"
    r"(dynamic|local|remote)?forward\w*|gatewayports|(gssapi|hostbased)\w+|hashknownhosts|ipqos|log(level|verbose)|"
    r"(kbdinteractive|password|preferred)authentications?|(local|permitlocal|remote)command|numberofpasswordprompts|"
    r"obscurekeystroketiming|permitremoteopen|proxyusefdpass|rekeylimit|requesttty|securitykeyprovider|s(end|et)env|"
    r"serveralive\w+|sessiontype|stdinnull|streamlocal\w+|stricthostkeychecking|syslogfacility|tag|tcpkeepalive|"
    r"tunnel(device)?|updatehostkeys|verifyhostkeydns|visualhostkey|xauthlocation"
)
# The options of an ssh command line that have a value.
_VALUED = re.compile(r"-[BbcDEeFIiJLlmOopQRSw]")


class Target(NamedTuple):
    """One destination of an ssh command line."""

    alias: str
    options: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Settings:
    """All that one SSH connection needs."""

    label: str
    """The node's name in the inventory, or "jump host x"."""
    target: Target
    host: str
    port: int
    user: str
    keys: tuple[Path, ...]
    only_these: bool
    """Whether only these keys are offered (identity_file of hosts.toml, or IdentitiesOnly)."""
    agent: str
    """Path of the ssh-agent's socket; empty: none."""
    known_hosts: tuple[Path, ...]
    jump: Target | None
    host_key_alias: str | None
    only_ssh: str
    """The options of the ssh configuration that only ssh itself can carry out; empty: asyncssh can, too."""
    control_path: str
    """The socket of the user's own shared connection; empty: none is configured."""
    checks_keys: bool
    """False: the configuration wants ssh to accept any host key, so it is told to ask."""
    marks_hosts: bool
    """Whether this ssh puts (user@host) before what a host asks, as it does since 8.5, which renamed that option."""
    digest: str
    """Names what the connection depends on, but for its jump host."""

    @property
    def alias(self) -> str:
        """Return the name on the command line."""
        return self.target.alias

    @property
    def where(self) -> str:
        """Return the address for messages."""
        return f"{self.host} port {self.port}"


def for_host(host: Host) -> Settings:
    """Return the settings of a host; raises HostError."""
    try:
        return _settings(host.name, Target(host.ssh, host.ssh_options), strict=host.identity_file)
    except SshConfigError as error:
        raise HostError(host.name, "resolve", str(error), error.hint) from error


def chain(host: Host, settings: Settings) -> list[Settings]:
    """Return all jump hosts before a target, the first one first; raises HostError.

    All are resolved before the first connection: in a circle each connection would wait for the others.
    """
    before: list[Settings] = []
    jump = settings.jump
    while jump is not None:
        if len(before) == MAX_HOPS:
            reason = f"more than {MAX_HOPS} jump hosts: does ProxyJump lead in a circle?"
            raise HostError(host.name, "resolve", reason)
        label = f"jump host {jump.alias}"
        try:
            before.insert(0, _settings(label, _beside(host, jump)))
        except SshConfigError as error:
            raise HostError(host.name, "resolve", f"{label}: {error}", error.hint) from error
        jump = before[0].jump
    return before


def _beside(host: Host, jump: Target) -> Target:
    """Return a jump host with the host's own key and host keys beside those of the ssh configuration."""
    options = jump.options
    if host.known_hosts is not None:
        files = sshconfig.resolve(*jump).value("userknownhostsfile")
        options += ("-o", f'UserKnownHostsFile="{host.known_hosts}" {files}')
    if host.identity_file is not None:
        options += ("-i", str(host.identity_file))
    return Target(jump.alias, options)


def _settings(label: str, target: Target, strict: Path | None = None) -> Settings:
    resolved = sshconfig.resolve(*target)
    agent = _agent_path(resolved.value("identityagent"))
    jump, others = _jump(resolved)
    identity = (target, sorted(resolved.options.items()))
    return Settings(
        label=label,
        target=target,
        host=resolved.host,
        port=resolved.port,
        user=resolved.user,
        keys=_keys(resolved, strict),
        only_these=strict is not None or resolved.value("identitiesonly") == "yes",
        agent=agent if _is_socket(agent) else "",
        known_hosts=_known_hosts(target, resolved),
        jump=jump,
        host_key_alias=resolved.value("hostkeyalias") or None,
        only_ssh=", ".join(others),
        control_path=_set(resolved.value("controlpath")),
        checks_keys=resolved.value("stricthostkeychecking") not in ("false", "no", "off"),
        marks_hosts="pubkeyacceptedalgorithms" in resolved.options,
        digest=hashlib.sha256(repr(identity).encode("utf-8", "surrogateescape")).hexdigest()[:16],
    )


def _set(value: str) -> str:
    return "" if value.lower() == "none" else value


def _jump(resolved: Resolved) -> tuple[Target | None, list[str]]:
    """Return the jump host, and the options that only ssh itself can carry out."""
    different = sshconfig.changed(resolved)
    others = sorted(name for name in different if AS_WELL.fullmatch(name) is None)
    # Each may contain tokens that only ssh knows.
    others += [name for name in ("identityfile", "userknownhostsfile") if "%" in "".join(different.get(name, ()))]
    if hops := _set(resolved.value("proxyjump")):
        *before, last = _hops(hops)
        further = ("-o", f"ProxyJump={','.join(map(_text, before))}") if before else ()
        return Target(last.host, (*options_of(last.user, last.port), *further)), others
    jump = jump_of(resolved.value("proxycommand"))
    return jump, [name for name in others if name != "proxycommand" or jump is None]


def _hops(text: str) -> list[Hop]:
    try:
        return parse_hops(text)
    except TargetError as error:
        raise SshConfigError(f"proxy_jump {error}", error.hint) from error


def _text(hop: Hop) -> str:
    host = f"[{hop.host}]" if ":" in hop.host else hop.host
    return "".join((f"{hop.user}@" if hop.user else "", host, f":{hop.port}" if hop.port else ""))


def jump_of(command: str) -> Target | None:
    """Return the jump host of a ProxyCommand like `ssh -W %h:%p bastion`; None for every other command."""
    try:
        program, *words = shlex.split(command)
    except ValueError:
        return None
    options: list[str] = []
    names: list[str] = []
    leads = ""
    while words:
        word = words.pop(0)
        if word == "-W":
            leads = words.pop(0) if words else ""
        elif _VALUED.fullmatch(word) and words:
            # A shell would do this to a word that begins so.
            value = os.path.expanduser(words.pop(0))
            # As `-o` they do not take the place of what we ourselves say.
            name = {"-J": "ProxyJump", "-S": "ControlPath"}.get(word)
            options += [word, value] if name is None else ["-o", f"{name}={value}"]
        elif word.startswith("-"):
            options.append(word)
        else:
            names.append(word)
    if os.path.basename(program) != "ssh" or leads not in ("%h:%p", "[%h]:%p") or len(names) != 1:
        return None
    if re.search(r"[%$`;&|<>(){}\\*?]", "".join((*options, *names))):
        # ssh or a shell has to expand it.
        return None
    user, at, name = names[0].rpartition("@")
    return Target(name, (*options, *(("-l", user) if at else ())))


def _keys(resolved: Resolved, strict: Path | None) -> tuple[Path, ...]:
    """Return the key files that exist."""
    named = resolved.options.get("identityfile", tuple(f"~/.ssh/{key}" for key in DEFAULT_KEYS))
    files = [strict] if strict is not None else [_file(name) for name in named]
    return tuple(file for file in files if os.path.exists(file))


def _known_hosts(target: Target, resolved: Resolved) -> tuple[Path, ...]:
    """Return the files with host keys; "none" means no file."""
    prefix = "UserKnownHostsFile="
    given = [word.removeprefix(prefix) for word in target.options if word.startswith(prefix)]
    # ssh prints names with spaces as they are, so those of hosts.toml are taken from its own option.
    names = [name for word in given[:1] for name in shlex.split(word)]
    if not given and not resolved.options:
        names += DEFAULT_KNOWN_HOSTS
    for option in (() if given else ("userknownhostsfile",)) + ("globalknownhostsfile",):
        names += [name for name in resolved.value(option).split() if name != "none"]
    return tuple(dict.fromkeys(map(_file, names)))


def _file(name: str) -> Path:
    """Return the file of a name in the configuration; absolute, as only that keeps `~nobody` from being expanded."""
    return Path(os.path.abspath(os.path.expanduser(name)))


def _agent_path(named: str) -> str:
    """Return the socket of the ssh-agent, "" for none; IdentityAgent may name a variable."""
    named = named or AGENT_VARIABLE
    if named == AGENT_VARIABLE or named.startswith("$"):
        named = os.environ.get(named.lstrip("$"), "none")
    return "" if named.lower() == "none" else os.path.expanduser(named)


def _is_socket(path: str) -> bool:
    return bool(path) and Path(path).is_socket()
