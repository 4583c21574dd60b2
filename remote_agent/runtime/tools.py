"""A tool of the user's that may work for an hour: it is run to its end, and what it says is passed on.

In: a command, its folder and variables. Out: short lines of progress without secrets; `Failed` with its own last words.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import re
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

from remote_agent.base.proc import KILL_S, die_with_parent
from remote_agent.base.tasks import to_the_end
from remote_agent.text.controls import escape_controls
from remote_agent.text.names import SECRET_NAME

# Large packages are downloaded and compiled without a word for many minutes.
SILENCE_S = 30 * 60.0
SAY_EVERY_S = 0.25
READ_SIZE = 64 * 1024
# So many names of packages in one moment are passed on one by one.
HELD_LINES = 8
KEPT_LINES = 200
TAIL_LINES = 6
TAIL_LINE = 240
# A line of progress has less room than a reason.
SAY_CHARS = 100
TAIL = 600
SHORTEST_SECRET = 6
_USER_INFO = re.compile(r"://[^/\s@'\"]+@")
_ESCAPE_SEQUENCE = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_FRAME = " \t×╰─▶│├·"
_ERROR = re.compile(r"error\b", re.IGNORECASE)
# Neither progress nor a reason: a package that was installed, or advice, such as that uv's cache is on another disk.
_NO_REASON = re.compile(
    r"[+~-] \S|warning: |\[notice\]|Activate with:|Using C?Python|If (the cache and target|this is intentional)"
)
# pip's warnings may be a reason, such as those about an index that it cannot reach.
_NO_NEWS = re.compile(rf"WARNING: |{_NO_REASON.pattern}")
_UNIT = re.compile(r"(?<=\d)(?=(?:[kKMGT]i?B|ms|s|m)\b)")


class Failed(Exception):
    """A tool has failed; the text says how, in its own words."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """How a tool runs."""

    folder: Path | None = None
    variables: Mapping[str, str] | None = None
    """All that it has; None: those of this process."""
    kept: tuple[int, ...] = ()
    """The descriptors that it and what it starts keep open."""
    moves: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Paths that it prints, and what is shown in their place."""


async def run(command: list[str], say: Callable[[str], None], setting: Setting | None = None) -> None:
    """Run a tool to its end; raises OSError, Failed. On cancellation it is killed, and its process group."""
    how = setting or Setting()
    output = _Output(say, how.moves)
    loop = asyncio.get_running_loop()
    # A pipe of our own: a process that outlives the tool and holds its output is not waited for.
    reading, writing = os.pipe()
    os.set_blocking(reading, False)

    def readable() -> None:
        if not output.read_from(reading):
            loop.remove_reader(reading)

    loop.add_reader(reading, readable)
    try:
        try:
            child = await asyncio.create_subprocess_exec(
                *command,
                cwd=how.folder,
                env=how.variables,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=writing,
                stderr=writing,
                start_new_session=True,
                pass_fds=how.kept,
                preexec_fn=die_with_parent,
            )
        finally:
            os.close(writing)
        try:
            code = await _end_of(child, output)
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
            await to_the_end(_reap(child))
        output.read_from(reading)
    finally:
        loop.remove_reader(reading)
        os.close(reading)
    output.flush()
    if code != 0:
        ended = f"exit code {code}" if code > 0 else f"signal {-code}"
        raise Failed(f"failed: {output.tail() or ended}")


async def _end_of(child: asyncio.subprocess.Process, output: _Output) -> int:
    """Return a tool's exit code; raises Failed if it prints nothing for too long."""
    ended = asyncio.ensure_future(child.wait())
    try:
        while not ended.done():
            await asyncio.wait({ended}, timeout=SAY_EVERY_S)
            output.say_held()
            if time.monotonic() - output.heard > SILENCE_S:
                message = f"was killed: it has printed nothing for {SILENCE_S / 60:.0f} min"
                raise Failed(f"{message} · {output.last()}".rstrip(" ·"))
        return ended.result()
    finally:
        ended.cancel()


async def _reap(child: asyncio.subprocess.Process) -> None:
    # A process that hangs in the kernel ends when the kernel lets it; the lock stays with it until then.
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(child.wait(), KILL_S)


class _Output:
    """What a tool prints: its last lines, and a few lines of progress a second. No secret passes."""

    def __init__(self, say: Callable[[str], None], moves: Mapping[str, str]) -> None:
        self._say = say
        self._moves = moves
        self._secrets = _secrets(os.environ)
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._rest = b""
        self._too_long = False
        self._held: deque[str] = deque(maxlen=HELD_LINES)
        self._said = 0.0
        self.heard = time.monotonic()
        """When it last printed something."""

    def read_from(self, pipe: int) -> bool:
        """Read what is in a pipe that does not block; returns whether more may follow."""
        try:
            while chunk := os.read(pipe, READ_SIZE):
                self._feed(chunk)
        except BlockingIOError:
            return True
        return False

    def _feed(self, chunk: bytes) -> None:
        self.heard = time.monotonic()
        *lines, self._rest = re.split(rb"[\r\n]+", self._rest + chunk)
        if lines and self._too_long:
            del lines[0]
            self._too_long = False
        # Nobody reads a very long line, and a piece of it could begin or end within a secret.
        for line in lines:
            if len(line) <= READ_SIZE:
                self._add(line)
        if len(self._rest) > READ_SIZE or self._too_long:
            self._rest = b""
            self._too_long = True

    def flush(self) -> None:
        """Pass on what has not been said yet."""
        self._add(self._rest)
        self._rest = b""
        # What is still held is older than the last line, and no news any more.
        for text in [*self._held][-1:]:
            self._say(text)
        self._held.clear()

    def say_held(self) -> None:
        """Pass on the oldest line of progress that is held, if the one before was long enough ago."""
        if self._held and time.monotonic() - self._said >= SAY_EVERY_S:
            self._said = time.monotonic()
            self._say(self._held.popleft())

    def last(self) -> str:
        """Return the last line."""
        return self._lines[-1][:TAIL_LINE] if self._lines else ""

    def tail(self) -> str:
        """Return the lines that most likely say why the tool failed."""
        lines = [line for line in self._lines if not _NO_REASON.match(line)] or list(self._lines)
        last = lines[-TAIL_LINES:]
        # The first error names the package; a long output of its build may follow.
        first = next((line for line in lines if _ERROR.match(line)), None)
        if first is not None:
            # What precedes it are tries that failed, or no trouble at all.
            last = last[last.index(first) :] if first in last else [first, *last[1:]]
        last = [line if len(line) <= TAIL_LINE else f"{line[: TAIL_LINE - 1]}…" for line in last]
        while len(" · ".join(last)) > TAIL:
            del last[1]
        return " · ".join(last)

    def _add(self, raw: bytes) -> None:
        text = self._clean(raw.decode(errors="replace"))
        if not text:
            return
        self._lines.append(text)
        if not _NO_NEWS.match(text):
            start = text[0].lower() if text[1:2].islower() else text[0]
            self._held.append(_UNIT.sub(" ", start + text[1:SAY_CHARS]))
            self.say_held()

    def _clean(self, text: str) -> str:
        text = _ESCAPE_SEQUENCE.sub("", text)
        for old, new in self._moves.items():
            text = text.replace(old, new)
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return escape_controls(_USER_INFO.sub("://***@", text)).strip(_FRAME)


def _secrets(variables: Mapping[str, str]) -> list[str]:
    """Return the values that must not be shown, the longest first."""
    values = {value.strip() for name, value in variables.items() if SECRET_NAME.search(name)}
    for value in variables.values():
        for match in _USER_INFO.finditer(value):
            values.update(match[0][3:-1].split(":"))
    return sorted((value for value in values if len(value) >= SHORTEST_SECRET), key=len, reverse=True)
