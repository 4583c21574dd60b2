"""From a login shell to a running agent.

In: the streams of the command on a node. Out: the same streams, after the agent's greeting; or a HostError with the
output of the node.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from typing import TYPE_CHECKING

from remote_agent.text.names import size_text
from remote_agent.wire import MAGIC, PROTOCOL
from supervisor.errors import HostError
from supervisor.ssh import loader, reasons

if TYPE_CHECKING:
    from collections.abc import Callable

    from supervisor.inventory import Host
    from supervisor.ssh.agent_file import AgentFile
    from supervisor.ssh.wires import Wire

    Progress = Callable[[str, str], None]

BOOT_DEADLINE_S = 20.0
# `module load` or `conda activate` on a busy shared file system.
PRELUDE_DEADLINE_S = 40.0
# A push on a slower link counts as stuck.
SLOWEST_BYTES_PER_S = 30_000
# Banner, motd and other output of a login shell.
MAX_NOISE = 64 * 1024
READ_SIZE = 16 * 1024
PUSH_CHUNK = 64 * 1024
EXIT_DEADLINE_S = 2.0
SHOWN = 600
BY_HAND = "try it by hand in a shell there"
_TOKEN = re.compile(rb"SUPERVISOR-(?:NEED|ERROR|AGENT)\b[^\n]*\n")


def command(host: Host, agent: AgentFile, *words: str) -> str:
    """Return the command that a host's login shell runs: the bridge, or the part of the agent in `words`."""
    home = host.env.get("SUPERVISOR_HOME")
    return loader.command(host.agent_python, host.prelude, home, agent.sha256, len(agent.data), words or ("connect",))


async def boot(host: Host, wire: Wire, agent: AgentFile, progress: Progress) -> None:
    """Read token lines until the agent runs, and push the agent if it is missing; raises HostError."""
    progress("python", host.agent_python)
    noise = bytearray()
    pushed = False
    while True:
        deadline = BOOT_DEADLINE_S + (PRELUDE_DEADLINE_S if host.prelude and not pushed else 0)
        deadline += len(agent.sent) / SLOWEST_BYTES_PER_S if pushed else 0
        step = "push" if pushed else "prelude" if host.prelude else "python"
        try:
            line = await asyncio.wait_for(_line(wire, noise), deadline)
        except asyncio.TimeoutError:
            error = reasons.timeout_error(host.name, step, deadline)
            hint = BY_HAND if step == "prelude" else error.hint
            raise HostError(host.name, step, error.reason + _output_tail(wire, noise), hint) from None
        if line is None:
            raise await _ended(host, wire, noise, step)
        if line == loader.NEED and not pushed:
            pushed = True
            progress("push", f"sending the agent, {size_text(len(agent.sent))}")
            await _push(host, wire, agent)
        elif line.startswith(loader.ERROR):
            raise _refusal(host, wire, line)
        elif line == MAGIC.strip():
            return
        else:
            reason = f"the agent there speaks {line.decode(errors='replace')!r}, not protocol {PROTOCOL}"
            raise HostError(host.name, "start", reason, "use the same version of supervisor")


async def _line(wire: Wire, noise: bytearray) -> bytes | None:
    """Return the next token line and drop what precedes it; None: the stream ended, or has too much other output."""
    while len(noise) <= MAX_NOISE:
        # A token may stand inside a line: a banner may lack its newline.
        token = _TOKEN.search(bytes(noise))
        if token is not None:
            del noise[: token.end()]
            return token[0].strip()
        try:
            chunk = await wire.reader.read(READ_SIZE)
        except ConnectionError:
            return None
        if not chunk:
            return None
        noise.extend(chunk)
    return None


async def _push(host: Host, wire: Wire, agent: AgentFile) -> None:
    try:
        for at in range(0, len(agent.sent), PUSH_CHUNK):
            wire.writer.write(agent.sent[at : at + PUSH_CHUNK])
            deadline = BOOT_DEADLINE_S + PUSH_CHUNK / SLOWEST_BYTES_PER_S
            await asyncio.wait_for(wire.writer.drain(), deadline)
    except asyncio.TimeoutError:
        raise reasons.timeout_error(host.name, "push", BOOT_DEADLINE_S) from None
    except OSError:
        # The loader has failed; its error is still to be read.
        return


# This is the advice for each kind of error of the loader.
_HINTS = {
    "disk_full": "free some space there, or set SUPERVISOR_HOME through env to a larger disk",
    "home_not_writable": 'set env = { SUPERVISOR_HOME = "/a/directory/you/may/write" } for this host',
    "home_not_private": "make it yours alone (chown, chmod go-w), or set "
    'env = { SUPERVISOR_HOME = "/a/directory/of/your/own" } for this host',
    "python_too_old": 'python 3.9 or newer is needed: set python = "/path/to/python3" for this host',
}


def _refusal(host: Host, wire: Wire, line: bytes) -> HostError:
    try:
        data = json.loads(line[len(loader.ERROR) :])
        step, kind, message = str(data["step"]), str(data["kind"]), str(data["message"])
    except (ValueError, KeyError, TypeError):
        return HostError(host.name, "push", line.decode(errors="replace"))
    if kind == "prelude":
        output = tail(bytes(wire.stderr))
        return HostError(host.name, step, f"prelude failed: {message}{output}", BY_HAND)
    hint = _HINTS.get(kind, "")
    return HostError(host.name, step, f"{kind.replace('_', ' ')}: {message}" if hint else message, hint)


async def _ended(host: Host, wire: Wire, noise: bytearray, step: str) -> HostError:
    """Return why the command ended before the agent ran."""
    if len(noise) > MAX_NOISE:
        hint = "make the shell's start files silent for sessions without a terminal"
        return HostError(host.name, step, f"the login shell never stops printing{_output_tail(wire, noise)}", hint)
    status = None
    with contextlib.suppress(asyncio.TimeoutError):
        status = await asyncio.wait_for(wire.wait_exit(), EXIT_DEADLINE_S)
    output = _output_tail(wire, noise)
    if step == "push":
        return HostError(host.name, step, f"the node closed the connection during the push{output}")
    if status == 127:
        hint = 'install it there, or set python = "/path/to/python3" for this host'
        return HostError(host.name, "python", f"no {host.agent_python} there: command not found{output}", hint)
    if status == 126:
        return HostError(
            host.name, "python", f"{host.agent_python} there cannot be executed{output}", f"ls -l {host.agent_python}"
        )
    end = "was killed or cut off" if status is None or status < 0 else f"exited with code {status}"
    if step == "prelude":
        return HostError(host.name, step, f"prelude failed: the shell {end}{output}", BY_HAND)
    if host.via == "srun":
        return HostError(host.name, step, f"srun {end} before the agent ran{output}", f"try: srun -w {host.ssh} true")
    reason = f"the login shell, or {host.agent_python}, {end} before the agent ran{output}"
    return HostError(host.name, step, reason, f"try by hand there: {host.agent_python} -V; is it a Python?")


def _output_tail(wire: Wire, noise: bytearray) -> str:
    return tail(bytes(wire.stderr) or bytes(noise))


def tail(output: bytes) -> str:
    """Return the end of a command's output for a message: "; it printed: …", or nothing."""
    text = " / ".join(line.strip() for line in output.decode(errors="replace").splitlines() if line.strip())
    printable = "".join(char if char.isprintable() else "?" for char in text)
    return f"; it printed: {printable[-SHOWN:]}" if printable else ""
