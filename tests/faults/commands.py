"""The operator's side of a case: commands of the program as processes of their own, timed.

In: how a command line is made. Out: what each printed, when, and how long it took.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.faults.invariants import ANSWER_S, Document, Violation

# One that hangs is asked to end itself where it can still say why: the figure is a lower bound then.
_PATIENCE_S = 2 * ANSWER_S


@dataclass
class Answer:
    """A command that has ended."""

    words: tuple[str, ...]
    status: int
    seconds: float
    out: bytes
    err: str

    def violations(self) -> list[Violation]:
        """Judge it."""
        text = f"`{' '.join(self.words)}` exit code {self.status} after {self.seconds:.1f} s: {self.err[-400:].strip()}"
        late = self.seconds > ANSWER_S
        return [Violation("verb", text)] if late or "Traceback" in self.err else []


class Verb:
    """A command that runs beside the case."""

    def __init__(self, command: Sequence[str], words: Sequence[str], place: Path) -> None:
        self.words = tuple(words)
        self._out, self._err = place.with_suffix(".out"), place.with_suffix(".err")
        self._begun = time.monotonic()
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                command, cwd=place.parent, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
            )
        self._ended = 0.0
        # When it ends is noted at that moment, whatever the case waits for.
        self._waiter = threading.Thread(target=self._wait, daemon=True)
        self._waiter.start()

    def _wait(self) -> None:
        try:
            self.process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._ended = time.monotonic()

    def answer(self) -> Answer:
        """Wait for its end."""
        self._waiter.join()
        err = self._err.read_text(errors="replace")
        return Answer(self.words, self.process.returncode, self._ended - self._begun, self._out.read_bytes(), err)

    def end(self) -> None:
        """Kill it, if it still runs."""
        self.process.kill()
        self._waiter.join()


class Watch:
    """`status --watch --json`: every document with the time at which it came."""

    def __init__(self, command: Sequence[str], place: Path) -> None:
        self.documents: list[Document] = []
        self._place = place
        with place.open("wb") as err:
            self._process = subprocess.Popen(
                command, cwd=place.parent, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=err,
                start_new_session=True,
            )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for text in self._process.stdout or ():
            with contextlib.suppress(ValueError):  # the line that a kill cut off
                self.documents.append(Document(time.monotonic_ns(), json.loads(text)))

    def ended(self) -> str | None:
        """Return how it ended, with its last words; None while it runs."""
        status = self._process.poll()
        return None if status is None else f"exit code {status}: {self._place.read_text(errors='replace')[-400:]}"

    def end(self) -> None:
        """Kill it, if it still runs."""
        self._process.kill()
        self._process.wait()
        self._reader.join()
        if self._process.stdout is not None:
            self._process.stdout.close()


class Operator:
    """All commands of one case; all that still run are killed at its end."""

    def __init__(self, place: Path, command: Callable[..., list[str]]) -> None:
        place.mkdir()
        self._place = place
        self._command = command
        self._numbers = itertools.count()
        self._verbs: list[Verb] = []
        self._attached: list[subprocess.Popen[bytes]] = []
        self.watch: Watch | None = None

    def begin(self, verb: str, *options: str) -> Verb:
        """Start a command."""
        place = self._place / f"{next(self._numbers)}-{verb}"
        started = Verb(self._command(verb, *options), (verb, *options), place)
        self._verbs.append(started)
        return started

    def run(self, verb: str, *options: str) -> Answer:
        """Run a command to its end."""
        return self.begin(verb, *options).answer()

    def answers(self) -> list[Answer]:
        """Wait for the end of each command that has been started since the last call, and of `run`."""
        verbs, self._verbs = self._verbs, []
        return [verb.answer() for verb in verbs]

    def begin_watch(self) -> Watch:
        """Look at the status from now on."""
        self.watch = Watch(self._command("status", "--watch", "--json"), self._place / "watch.err")
        return self.watch

    def attach(self) -> subprocess.Popen[bytes]:
        """Attach; what it prints is thrown away."""
        place = self._place / f"attach-{len(self._attached)}.err"
        with place.open("wb") as err:
            attached = subprocess.Popen(
                self._command("attach", "--headless"), cwd=self._place, stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, stderr=err, start_new_session=True,
            )  # fmt: skip
        self._attached.append(attached)
        return attached

    @property
    def attached(self) -> bool:
        """Whether anybody is."""
        return any(one.poll() is None for one in self._attached)

    def detach(self) -> None:
        """Kill all that are attached."""
        for one in self._attached:
            if one.poll() is None:
                os.kill(one.pid, signal.SIGKILL)
            one.wait()

    def end(self) -> None:
        """Kill all that still runs."""
        self.detach()
        if self.watch is not None:
            self.watch.end()
        for verb in self._verbs:
            verb.end()
