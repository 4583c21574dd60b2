"""The first code that runs on a node: it finds the agent or requests it, then executes it.

In: argv (sha256, size, the agent's own arguments); the agent's bytes on stdin if the node lacks it. Out: token lines on
stdout, then the agent.

It must parse under every Python, so that an old one gets a clear error. A token line is

    SUPERVISOR-NEED                     send 8 bytes of length (big-endian) and the agent, compressed by zlib
    SUPERVISOR-ERROR {"step", "kind", "message"}
    SUPERVISOR-AGENT <protocol>         the agent is running: frames follow
"""

from __future__ import annotations

import base64
import functools
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import remote_agent
from supervisor.ssh.agent_file import code_of

NEED = b"SUPERVISOR-NEED"
ERROR = b"SUPERVISOR-ERROR"

_CODE = r"""
import hashlib, sys
def say(text):
    os.write(1, (text + "\n").encode("utf-8"))
def fail(step, kind, message):
    import json
    say("SUPERVISOR-ERROR " + json.dumps({"step": step, "kind": kind, "message": message}))
    os._exit(9)
def refuse(error, path):
    import errno
    text = "%s: %s" % (getattr(error, "filename", None) or path, error.strerror)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        while not os.path.isdir(path):
            path = os.path.dirname(path)
        disk = os.statvfs(path)
        free = disk.f_bavail * disk.f_frsize
        fail("push", "disk_full", "%s: %d bytes are needed, %d are free" % (text, size, free))
    fail("push", "home_not_writable", text)
def read(count):
    parts = []
    while count:
        part = os.read(0, min(count, 65536))
        if not part:
            os._exit(9)
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
def fetch(agents, path):
    import struct, zlib
    say("SUPERVISOR-NEED")
    packed = read(struct.unpack(">Q", read(8))[0])
    try:
        data = zlib.decompress(packed)
    except zlib.error:
        data = b""
    if hashlib.sha256(data).hexdigest() != sha:
        fail("push", "damaged", "the agent arrived damaged")
    part = "%s.%d.tmp" % (path, os.getpid())
    try:
        with open(part, "wb") as file:
            os.chmod(part, 0o600)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.rename(part, path)
    except OSError as error:
        try:
            os.unlink(part)
        except OSError:
            pass
        refuse(error, agents)
def hashed(path):
    try:
        with open(path, "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()
    except OSError:
        return ""
sha = sys.argv[2]
size = int(sys.argv[3])
if sys.version_info[:2] < (3, 9):
    fail("python", "python_too_old", "%s is Python %d.%d.%d" % ((sys.executable,) + tuple(sys.version_info[:3])))
if not sys.executable:
    fail("python", "python_broken", "this Python does not know its own path")
home = os.path.abspath(os.path.expanduser(os.environ.get("SUPERVISOR_HOME") or "~/.supervisor"))
agents = os.path.join(home, "agents")
try:
    make_private(home)
    make_own(agents)
except Untrusted as error:
    fail("push", "home_not_private", str(error))
except OSError as error:
    refuse(error, home)
path = os.path.join(agents, sha + ".pyz")
if hashed(path) != sha:
    fetch(agents, path)
# The agent with its bytecode, which the first start makes (remote_agent/bridge/bytecode.py).
compiled = path[:-3] + str(sys.implementation.cache_tag) + ".pyz"
if is_sealed(compiled, read_key(home)):
    path = compiled
# -S: what needs the installation's start files runs them itself, where their output mixes with nothing.
os.execv(sys.executable, [sys.executable, "-S", path] + sys.argv[4:])
"""


@functools.cache
def text() -> str:
    """Return the loader's code: the rules for private directories and sealed files of remote_agent, and its own."""
    private = (Path(remote_agent.__file__).parent / "base" / "private.py").read_bytes()
    return re.sub(r"\n{2,}", "\n", code_of(private).decode()) + _CODE


# `python -c` puts the current directory, the user's home, before the standard library; -S leaves only that library.
STUB = "import sys;sys.path=[p for p in sys.path if p];import binascii;exec(binascii.a2b_base64(sys.argv[1]))"

# On clusters `module` is a shell function that only login shells define.
MODULES = (
    "command -v module >/dev/null 2>&1 || for f in /etc/profile.d/lmod.sh /etc/profile.d/modules.sh"
    " /usr/share/lmod/lmod/init/sh /usr/share/modules/init/sh; do [ -r $f ] && . $f && break; done; :"
)
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 _./:=+,@%^~-")


def command(
    python: str, prelude: str | None, home: str | None, sha256: str, size: int, part: Sequence[str] = ("connect",)
) -> str:
    """Return the command for a node's login shell, whichever shell it is; `part`: the part of the agent to run."""
    loader = base64.b64encode(text().encode()).decode()
    words = [_double(python), "-S", "-c", _double(STUB), loader, sha256, str(size), *part]
    if home:
        words = ["env", f"SUPERVISOR_HOME={_double(home, tilde=False)}", *words]
    start = "exec " + " ".join(words)
    if not prelude:
        return f"sh -c {shlex.quote(start)}" if _is_literal(start) else f"sh -c 'eval {_octal(start)}'"
    check = (
        f'[ $s -eq 0 ] || {{ printf \'{ERROR.decode()} {{"step": "prelude", "kind": "prelude", '
        '"message": "it exited with code %d"}\\n\' $s; exit 9; }'
    )
    script = "\n".join(
        [
            "{",
            MODULES if "module " in prelude or "ml " in prelude else ":",
            prelude,
            # The prelude must neither read the agent's bytes nor write between the frames.
            "} </dev/null >&2",
            "s=$?",
            check,
            start,
        ]
    )
    # Preludes are written for bash if there is one: `source`, `conda activate`, `module`.
    return f'sh -c \'S={_octal(script)}; command -v bash >/dev/null 2>&1 && exec bash -c "$S"; eval "$S"\''


def _double(text: str, tilde: bool = True) -> str:
    """Quote for sh in double quotes; a leading ~/ is the node's home, not the operator's."""
    start = ""
    if tilde and text.startswith("~/"):
        start, text = '"$HOME"/', text[2:]
    for char in '\\"$`':
        text = text.replace(char, "\\" + char)
    return f'{start}"{text}"'


def _is_literal(script: str) -> bool:
    """Tell whether every login shell, also csh and fish, reads these characters literally in single quotes."""
    return not set(script) & set("'!\\\n")


def _octal(script: str) -> str:
    """Return an sh word for any script, in characters that no login shell changes."""
    text = "".join(
        char if char in _PLAIN else "".join(f"\\0{byte:03o}" for byte in char.encode("utf-8", "surrogateescape"))
        for char in script
    )
    return f'"$(printf %b "{text}")"'
