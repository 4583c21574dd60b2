"""The history of a live agent: sampled while the job runs, and kept in one file of the job's directory.

In: a function that returns the newest samples. Out: answers to `series`; the file, each minute and at the end.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from remote_agent.base.files import atomic_write
from remote_agent.history import pyramid
from remote_agent.history.pyramid import WIDTHS_S, History, Name
from remote_agent.wire import Answer, Args, Problem

log = logging.getLogger(__name__)

EVERY_S = 2.0
SAVE_S = 60.0


class HistoryKeeper:
    """The history of a job on this node; without `sample` as an ended job left it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._changed = False
        try:
            self.history = History.from_bytes(path.read_bytes())
        except OSError:
            self.history = History()

    async def keep(self, sample: Callable[[], tuple[float, Mapping[Name, float]]]) -> None:
        """Add the time and the samples that `sample` returns every two seconds, until cancelled."""
        saved = time.monotonic()
        while True:
            await asyncio.sleep(EVERY_S)
            time_s, samples = sample()
            self.history.add(time_s, samples)
            self._changed = self._changed or bool(samples)
            if time.monotonic() - saved >= SAVE_S:
                saved = time.monotonic()
                data, self._changed = self.history.to_bytes(), False
                await asyncio.get_running_loop().run_in_executor(None, self._write, data)

    def save(self) -> None:
        """Write what was added since the file was written last."""
        if self._changed:
            self._changed = False
            self._write(self.history.to_bytes())

    def _write(self, data: bytes) -> None:
        try:
            atomic_write(self._path, data)
        except OSError as error:
            # A full disk costs the history of a restarted agent, nothing else.
            log.warning("%s is not written: %s", self._path, error)

    async def answer(self, args: Args) -> Answer:
        """Answer `series`: the newest `count` buckets of a `level`, of `kinds` and `ids`.

        ids: ranks or GPUs; null: all.
        """
        level, count = int(args["level"]), int(args["count"])
        if not (0 <= level < len(WIDTHS_S) and 0 < count <= pyramid.BUCKETS):
            raise Problem("bad_request", f"no such span of the history: level {level}, {count} buckets")
        spans = self.history.spans(args["kinds"], args.get("ids"), level, count)
        first = next(iter(spans.values())).first if spans else 0
        names = [list(name) for name in spans]
        return Answer({"count": count, "first": first, "series": names}, pyramid.pack(spans.values()))
