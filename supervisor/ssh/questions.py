"""What ssh asks: a passphrase, a password, a code, whether a host key is right. It is asked where the user is.

In: ssh processes with the environment of an Asking, whose questions come back over a private socket (SSH_ASKPASS).
Out: each question, one after the other, on the terminal or by a screen; the answer goes to ssh
alone. Deadlines in which a question may fall are measured by `clock`, which stands still while one is open.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shlex
import stat
import sys
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from supervisor.errors import SupervisorError, one_line
from supervisor.paths import state_dir
from supervisor.standard_streams import ask_on_terminal, has_terminal

T = TypeVar("T")

# A path of a socket has at most 104 bytes on some systems, and ssh adds 17 while it makes one.
LONGEST_RUN_DIR = 60
LONGEST_QUESTION = 16 * 1024
# The helper that ssh runs: it passes the question on, and prints the answer. Exit code 1: there is none.
HELPER = """
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as s:
    s.connect(os.environ["SUPERVISOR_ASKPASS"])
    hint = os.environ.get("SSH_ASKPASS_PROMPT", "")
    s.sendall(json.dumps([os.environ["SUPERVISOR_ASKING"], " ".join(sys.argv[1:]), hint]).encode() + b"\\n")
    answer = b"".join(iter(lambda: s.recv(4096), b""))
if not answer.startswith(b"+"):
    sys.exit(1)
os.write(1, answer[1:] + b"\\n")
"""


class Question(NamedTuple):
    """One question of ssh."""

    where: str
    """The host or the jump host."""
    prompt: str
    """ssh's own text, which a server may have written."""
    kind: str = "secret"
    """secret, yes_no (the answer is a word, and visible), or notice (there is nothing to answer: a key waits to be
    touched)."""


Asker = Callable[[Question], Awaitable["str | None"]]


def run_dir() -> Path:
    """Return the directory of our sockets, made private to this user; raises SupervisorError."""
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    path = Path(base) / "supervisor"
    try:
        # After `su` it may be somebody else's; ssh would expand a percent sign.
        found = os.stat(base)
        is_ours = found.st_uid == os.getuid() and not found.st_mode & 0o022 and "%" not in base
    except (OSError, ValueError):
        is_ours = False
    if not is_ours or len(os.fsencode(path)) > LONGEST_RUN_DIR:
        path = Path(f"/tmp/supervisor-{os.getuid()}")
    try:
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        found = path.lstat()
    except OSError as error:
        raise SupervisorError(f"{path}: {error.strerror}", "set XDG_RUNTIME_DIR to a directory of yours") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        hint = "set XDG_RUNTIME_DIR to a directory that only you can enter"
        raise SupervisorError(f"{path}, where supervisor has its sockets, is not yours alone", hint)
    return path


class Asking:
    """The questions of one ssh process."""

    def __init__(self, where: str, may_ask: bool, marks_hosts: bool = False) -> None:
        self.where = where
        self.may_ask = may_ask
        self.marks_hosts = marks_hosts
        """Whether this ssh puts (user@host) before what a host asks: then no host can ask for a key's passphrase."""
        self.asked: list[str] = []
        """What has been asked."""
        self.unanswered = ""
        """The question to which there was no answer."""
        self.gave_up = asyncio.Event()
        """There is one: ssh is to end, since it would send an empty answer, and ask again."""
        self.withdrawn = False
        """ssh gave up before the user saw its question."""

    def give_up(self, prompt: str) -> None:
        """Note that there is no answer to a question."""
        self.unanswered = one_line(prompt)
        self.gave_up.set()


class Questions:
    """The questions of all ssh processes of one event loop."""

    def __init__(self) -> None:
        self._asker: Asker | None = None
        """Asks the user; None: on the terminal, if there is one."""
        self.on_demand = False
        """Hosts that are connected to again ask only once the user has called for the questions."""
        self._askings: dict[str, Asking] = {}
        self._turn, self._starting = asyncio.Lock(), asyncio.Lock()
        self._passphrases: dict[str, str] = {}
        """Of key files, by ssh's own question: the same file opens many hosts."""
        self._server: asyncio.Server | None = None
        self._helper = Path()
        self._open = 0
        self._open_since = self._stood_s = 0.0

    @contextlib.contextmanager
    def on_screen(self, asker: Asker) -> Iterator[None]:
        """Ask by a screen until the end of the block; hosts that are lost then wait until the user calls for it."""
        self._asker, self.on_demand = asker, True
        try:
            yield
        finally:
            self._asker, self.on_demand = None, False

    @property
    def can_ask(self) -> bool:
        """Tell whether anybody can answer."""
        return self._asker is not None or has_terminal()

    def remembers(self, prompt: str) -> bool:
        """Tell whether the answer to a question is known: the passphrase of a key file."""
        return prompt in self._passphrases

    def clock(self) -> float:
        """Return seconds of a clock that stands still while a question is open."""
        now = self._open_since if self._open else time.monotonic()
        return now - self._stood_s

    async def wait_for(self, work: Awaitable[T], timeout_s: float | None) -> T:
        """Wait like asyncio.wait_for, by `clock`; raises asyncio.TimeoutError. The work has ended when this returns."""
        task = asyncio.ensure_future(work)
        end = None if timeout_s is None else self.clock() + timeout_s
        try:
            while True:
                left = None if end is None else max(0.0, end - self.clock())
                done, _ = await asyncio.wait({task}, timeout=left)
                if done:
                    return task.result()
                if end is not None and self.clock() >= end:
                    raise asyncio.TimeoutError
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    @contextlib.asynccontextmanager
    async def environment(self, asking: Asking) -> AsyncIterator[dict[str, str]]:
        """Yield the variables for one ssh process, as long as it may ask."""
        folder = run_dir()
        path = folder / f"ask.{os.getpid()}"
        name = secrets.token_hex(8)
        self._askings[name] = asking
        try:
            async with self._starting:
                if self._server is None:
                    _sweep(folder)
                    path.unlink(missing_ok=True)
                    self._helper = _write_helper((folder, state_dir()))
                    self._server = await asyncio.start_unix_server(self._serve, path, limit=LONGEST_QUESTION)
            yield {
                **os.environ,
                "SSH_ASKPASS": str(self._helper),
                "SSH_ASKPASS_REQUIRE": "force",
                # ssh before 8.4 asks a helper only if there is a display.
                "DISPLAY": os.environ.get("DISPLAY") or ":",
                "SUPERVISOR_ASKPASS": str(path),
                "SUPERVISOR_ASKING": name,
            }
        finally:
            del self._askings[name]
            if not self._askings and self._server is not None:
                self._server.close()
                self._server = None
                path.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one question."""
        try:
            name, prompt, hint = json.loads(await reader.readline())
            asking = self._askings.get(name)
            if asking is not None:
                # The helper ends if ssh needs no answer any more.
                gone = asyncio.ensure_future(reader.read())
                answering = asyncio.ensure_future(self._answer(asking, str(prompt), str(hint)))
                await asyncio.wait({gone, answering}, return_when=asyncio.FIRST_COMPLETED)
                if asking.gave_up.is_set():
                    # Without an answer ssh would go on with an empty one: it is ended, and the helper with it.
                    await gone
                for task in (gone, answering):
                    task.cancel()
                answer, _ = await asyncio.gather(answering, gone, return_exceptions=True)
                if isinstance(answer, str):
                    writer.write(b"+" + answer.encode("utf-8", "surrogateescape"))
                    await writer.drain()
        except (ValueError, TypeError, OSError):
            return
        finally:
            writer.close()

    async def _answer(self, asking: Asking, prompt: str, hint: str) -> str | None:
        is_new = prompt not in asking.asked
        if hint != "none":
            asking.asked.append(prompt)
        of_key = asking.marks_hosts and prompt.startswith("Enter passphrase for key ")
        if of_key and is_new and prompt in self._passphrases:
            return self._passphrases[prompt]
        if of_key:
            self._passphrases.pop(prompt, None)
        if not asking.may_ask or not self.can_ask:
            asking.give_up(prompt)
            return None
        kind = "notice" if hint == "none" else "yes_no" if hint == "confirm" or "(yes/no" in prompt else "secret"
        asking.withdrawn = True
        with self.standing():
            async with self._turn:
                asking.withdrawn = False
                if of_key and is_new and prompt in self._passphrases:
                    # It was given for another host, while this question waited.
                    return self._passphrases[prompt]
                again = "" if is_new else "Permission denied, please try again.\n"
                answer = await (self._asker or _on_terminal)(Question(asking.where, again + prompt, kind))
        if answer is None:
            asking.give_up(prompt)
        elif of_key:
            self._passphrases[prompt] = answer
        elif hint == "confirm" and answer != "yes":
            return None
        return answer

    @contextlib.contextmanager
    def standing(self) -> Iterator[None]:
        """Keep the clock standing: a user is asked."""
        if not self._open:
            self._open_since = time.monotonic()
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1
            if not self._open:
                self._stood_s += time.monotonic() - self._open_since


def _sweep(folder: Path) -> None:
    """Remove the sockets of supervisors that were killed."""
    for path in folder.glob("ask.*"):
        try:
            os.kill(int(path.suffix[1:]), 0)
        except ProcessLookupError:
            path.unlink(missing_ok=True)
        except (OSError, ValueError):
            continue


def _write_helper(folders: Sequence[Path]) -> Path:
    """Return the helper that ssh runs, in the first of these folders that lets one run; raises SupervisorError."""
    for folder in folders:
        path, draft = folder / "askpass", folder / f"askpass.{os.getpid()}"
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            draft.touch(mode=0o700)
            draft.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -I -S -c {shlex.quote(HELPER)} "$@"\n')
            draft.replace(path)
            # False on a file system that is mounted noexec.
            if os.access(path, os.X_OK):
                return path
    raise SupervisorError(
        f"ssh cannot ask anything: no program may run in {' or '.join(map(str, folders))}",
        "set XDG_RUNTIME_DIR to a directory of yours that is not mounted noexec",
    )


async def _on_terminal(question: Question) -> str | None:
    text = f"{question.where}: {question.prompt.rstrip()} "
    return await ask_on_terminal(text, visible=question.kind == "yes_no", answered=question.kind != "notice")


_by_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Questions] = weakref.WeakKeyDictionary()


def questions() -> Questions:
    """Return the questions of the running event loop."""
    return _by_loop.setdefault(asyncio.get_running_loop(), Questions())
