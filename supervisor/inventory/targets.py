"""The characters of user names, host names and jump hosts: one rule for every inventory, option and ssh configuration.

In: a value of `user`, `ssh`, `address` or `proxy_jump`. Out: the value as it is, or a TargetError that says what to
write instead. ssh gives these values to a shell (`ProxyCommand` with %r and %h), to srun and to torch as arguments, so
no quote, space, `$` or leading dash gets through.
"""

from __future__ import annotations

import dataclasses
import re

from remote_agent.text.names import read_number

_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+@:-]{0,127}")
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,254}")
_SIX = re.compile(r"[0-9A-Fa-f]{0,4}(?::[0-9A-Fa-f.]{0,15}){2,8}(?:%[A-Za-z0-9_.-]{1,32})?")
# An address with colons is in brackets, or has no port.
_HOP = re.compile(
    r"(?:\[(?P<six>[^\[\]]+)\]|(?P<name>[^:\[\]]+|[^:\[\]]*(?::[^:\[\]]*){2,}))(?::(?P<port>[0-9]{1,5}))?"
)

_USER_HINT = "use a user name of letters, digits and . _ + @ : - that begins with a letter, a digit or _"
_HOST_HINT = (
    "write a DNS name (of another alphabet in its xn--… form), an IPv4 or IPv6 address, or an alias of "
    "letters, digits and . _ - in ~/.ssh/config"
)


class TargetError(ValueError):
    """A value with characters that are not allowed; `hint` says what to write instead."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


@dataclasses.dataclass(frozen=True)
class Hop:
    """One [user@]host[:port] of a ProxyJump."""

    host: str
    user: str | None = None
    port: int | None = None


def check_user(value: str) -> str:
    """Return a user name; raises TargetError."""
    if _USER.fullmatch(value) is None:
        raise TargetError(f"{value!r} is not a user name", _USER_HINT)
    return value


def check_host(value: str) -> str:
    """Return a host name, an address or an alias; raises TargetError."""
    if _HOST.fullmatch(value) is None and _SIX.fullmatch(value) is None:
        raise TargetError(f"{value!r} is not a host name, an address or an alias of ~/.ssh/config", _HOST_HINT)
    return value


def parse_hops(value: str) -> list[Hop]:
    """Return the hops of a ProxyJump, [user@]host[:port] with commas between them; raises TargetError."""
    chain = []
    for text in (part.strip() for part in value.split(",")):
        user, at, rest = text.removeprefix("ssh://").rpartition("@")
        parts = _HOP.fullmatch(rest)
        try:
            if parts is None:
                raise TargetError(f"{rest!r} is not host[:port]", _HOST_HINT)
            host = check_host(parts["six"] or parts["name"])
            chain.append(
                Hop(host, check_user(user) if at else None, read_number(parts["port"]) if parts["port"] else None)
            )
        except TargetError as error:
            hint = f"write for example me@login.example.org:22; {error.hint}"
            raise TargetError(f"{text!r} is not [user@]host[:port]", hint) from error
    return chain


def check_jump(value: str) -> str:
    """Return a ProxyJump without spaces, or none; raises TargetError."""
    if value.lower() != "none":
        parse_hops(value)
    return ",".join(part.strip() for part in value.split(","))


CHECKS = {"user": check_user, "ssh": check_host, "address": check_host, "proxy_jump": check_jump}
"""The check of each key of a host that takes part in command lines."""
