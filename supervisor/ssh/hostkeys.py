"""Host keys: which are trusted, and what to say about one that is not.

In: known_hosts files, the key a server offers. Out: trusted keys for asyncssh; reason and hint for people.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import asyncssh

if TYPE_CHECKING:
    from supervisor.ssh.settings import Settings

_cache: dict[tuple[object, ...], asyncssh.SSHKnownHosts] = {}


def read(settings: Settings) -> asyncssh.SSHKnownHosts:
    """Return the host keys of the known_hosts files; a file that is missing or a line that is damaged adds none."""
    stamps: list[object] = []
    for path in settings.known_hosts:
        try:
            info = path.stat()
            stamps.append((path, info.st_mtime_ns, info.st_size))
        except OSError:
            stamps.append(path)
    # Many hosts share one file, which may hold thousands of keys.
    key = tuple(stamps)
    if key not in _cache:
        _cache.clear()
        _cache[key] = _load(settings)
    return _cache[key]


def _load(settings: Settings) -> asyncssh.SSHKnownHosts:
    known = asyncssh.import_known_hosts("")
    for path in settings.known_hosts:
        try:
            lines = path.read_text(errors="replace").splitlines()
        except OSError:
            continue
        for line in lines:
            try:
                known.load(line)
            except ValueError:
                continue
    return known


def is_known(settings: Settings, address: str) -> bool:
    """Tell whether any key of this server is trusted."""
    port = settings.port if settings.port != 22 else None
    found = read(settings).match(settings.host_key_alias or settings.host, address, port)
    return bool(found[0] or found[1])


def complaint(settings: Settings, address: str, offered: asyncssh.SSHKey | None) -> tuple[str, str]:
    """Return reason and hint for a host key that is not trusted."""
    name = settings.host_key_alias or settings.host
    shown = name if settings.port == 22 else f"[{name}]:{settings.port}"
    files = " or ".join(short(str(path)) for path in settings.known_hosts[:2]) or "any known_hosts file"
    first = short(str(settings.known_hosts[0])) if settings.known_hosts else "~/.ssh/known_hosts"
    key = f" (it offers {offered.get_algorithm()} {offered.get_fingerprint()})" if offered is not None else ""
    if is_known(settings, address):
        reason = f"the host key of {shown} has changed: it is not the one in {files}{key}"
        hint = (
            "somebody may be listening in, or the machine was set up anew; if you know that it was: "
            f"ssh-keygen -f {first} -R '{shown}', then add the new key"
        )
        return reason, hint
    reason = f"host key of {shown} is not in {files}{key}"
    if settings.jump or settings.proxy_command:
        jump = f"-J {settings.jump} " if settings.jump else ""
        return reason, f"log in once by hand and check the fingerprint: ssh {jump}-p {settings.port} {settings.alias}"
    return reason, f"check the fingerprint, then add it with: ssh-keyscan -p {settings.port} {settings.host} >> {first}"


def short(path: str) -> str:
    """Return a path as people write it, with ~."""
    home = str(Path.home())
    return "~" + path[len(home) :] if path.startswith(home + "/") else path
