"""What ssh's own configuration means for one host: OpenSSH says it (`ssh -G`), so nothing is read here.

In: the destination and the options of an ssh command line. Out: every option with its value; host name, port and user.
Without an ssh program there is no configuration: only hosts.toml and ssh's defaults count.
"""

from __future__ import annotations

import functools
import getpass
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from supervisor.errors import one_line
from supervisor.inventory.targets import TargetError, check_host, check_jump, check_user

# `Match exec` may ask a network service.
DEADLINE_S = 20.0
# More processes at once than cores: each waits for `Match exec`, or for a name server.
AT_ONCE = 16


class SshConfigError(ValueError):
    """The ssh configuration cannot be used; the text is ssh's own, with file and line, or names the key."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class Resolved(NamedTuple):
    """What ssh would do for a destination."""

    host: str
    port: int
    user: str
    options: Mapping[str, tuple[str, ...]]
    """Each option's values by its name in lower case, as `ssh -G` prints them; empty without an ssh program."""

    def value(self, option: str) -> str:
        """Return an option's only value, "" if it has none."""
        return next(iter(self.options.get(option, ())), "")


def program() -> str | None:
    """Return the path of the OpenSSH client on this machine."""
    return shutil.which("ssh")


def local_user() -> str:
    """Return the user name with which ssh logs in by default."""
    try:
        return getpass.getuser()
    except (KeyError, OSError) as error:
        raise SshConfigError("this machine does not know your user name; set USER") from error


def options_of(
    user: str | None = None,
    port: int | None = None,
    identity_file: Path | None = None,
    known_hosts: tuple[Path, ...] = (),
    proxy_jump: str | None = None,
) -> tuple[str, ...]:
    """Return the options of an ssh command line for values of hosts.toml; raises SshConfigError."""
    words: list[str] = []
    if user is not None:
        words += ["-l", _checked("user", check_user, user)]
    if port is not None:
        words += ["-p", str(port)]
    if identity_file is not None:
        # A server refuses after a few wrong keys, so those of an ssh-agent are not tried before it.
        words += ["-i", str(identity_file), "-o", "IdentitiesOnly=yes"]
    if known_hosts:
        files = " ".join(f'"{file}"' for file in known_hosts)
        words += ["-o", f"UserKnownHostsFile={files}", "-o", "GlobalKnownHostsFile=none"]
    if proxy_jump is not None:
        words += ["-o", f"ProxyJump={_checked('proxy_jump', check_jump, proxy_jump)}"]
    return tuple(words)


def resolve(alias: str, options: tuple[str, ...] = ()) -> Resolved:
    """Return what ssh would do for a destination with these options; raises SshConfigError.

    Each is asked once; `forget` has it asked again.
    """
    key = alias, options
    if key not in _resolved:
        try:
            _resolved[key] = _resolve(alias, options)
        except SshConfigError as error:
            _resolved[key] = error
    found = _resolved[key]
    if isinstance(found, SshConfigError):
        raise found
    return found


def resolve_all(destinations: Iterable[tuple[str, tuple[str, ...]]]) -> None:
    """Ask for many destinations at once; the errors are raised by `resolve`."""

    def one(destination: tuple[str, tuple[str, ...]]) -> None:
        try:
            resolve(*destination)
        except SshConfigError:
            return

    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(one, dict.fromkeys(destinations)))


def forget(*destinations: tuple[str, tuple[str, ...]]) -> None:
    """Ask for destinations again the next time: what `Match exec` and names mean changes with the network."""
    for destination in destinations or [*_resolved]:
        _resolved.pop(destination, None)


def changed(resolved: Resolved) -> dict[str, tuple[str, ...]]:
    """Return the options that differ from ssh's own defaults."""
    if not resolved.options:
        return {}
    defaults = _defaults()
    return {name: values for name, values in resolved.options.items() if defaults.get(name) != values}


_resolved: dict[tuple[str, tuple[str, ...]], Resolved | SshConfigError] = {}


@functools.cache
def _defaults() -> Mapping[str, tuple[str, ...]]:
    return _ask(("-F", "none"), "localhost")


def _resolve(alias: str, options: tuple[str, ...]) -> Resolved:
    # The names are checked before ssh sees them: `Match exec` and ProxyCommand give them to a shell.
    _checked("ssh", check_host, alias)
    if program() is None:
        given = dict(zip(options[::2], options[1::2], strict=False))
        return Resolved(alias, int(given.get("-p", 22)), given.get("-l") or local_user(), {})
    found = _ask(options, alias)
    host, port, user = (found.get(name, ("",))[0] for name in ("hostname", "port", "user"))
    if not host or not port.isdecimal() or not user:
        raise SshConfigError(f"ssh -G {alias} names no host: is {program()} OpenSSH?")
    return Resolved(host, int(port[:5]), user, found)


def _ask(options: tuple[str, ...], alias: str) -> Mapping[str, tuple[str, ...]]:
    try:
        process = subprocess.Popen(
            [program() or "ssh", "-G", "-T", *options, "--", alias],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        raise SshConfigError(f"ssh -G {alias}: {error.strerror}") from error
    with process:
        try:
            output, errors = process.communicate(timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            # A command of `Match exec` is in the same group.
            os.killpg(process.pid, signal.SIGKILL)
            reason = f"ssh -G {alias}: no answer within {DEADLINE_S:.0f} s"
            raise SshConfigError(reason, "does a command of Match exec wait for something?") from None
    if process.returncode:
        reason = one_line(errors.decode(errors="replace")) or f"exit code {process.returncode}"
        raise SshConfigError(f"ssh refuses its configuration: {reason}", f"try by hand: ssh -G {alias}")
    if b"\0" in output:
        raise SshConfigError(f"ssh -G {alias} prints no text: is {program()} OpenSSH?")
    found: dict[str, tuple[str, ...]] = {}
    for line in output.decode(errors="surrogateescape").splitlines():
        name, _, value = line.partition(" ")
        found[name.lower()] = (*found.get(name.lower(), ()), value)
    return found


def _checked(what: str, check: Callable[[str], str], value: str) -> str:
    try:
        return check(value)
    except TargetError as error:
        raise SshConfigError(f"{what}: {error}", error.hint) from error
