"""What hosts build or pull before ranks start, as lines for a command without a screen.

In: the views of hosts. Out: lines, a few of them however much is printed there.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Collection
from typing import TYPE_CHECKING

from supervisor.cli.entry import say
from supervisor.link.tasks import cancel_all
from supervisor.wording.values import one_line

if TYPE_CHECKING:
    from supervisor.link.view import HostView
    from supervisor.session import Session

STEPS = ("build", "image")
# Each host says something this often, seconds, and nothing about a step that takes no longer than this.
EVERY = 3.0
SOON = 1.0


class Progress:
    """What was said last of each host."""

    def __init__(self) -> None:
        self._said: dict[str, tuple[str, float]] = {}

    def lines(self, views: Collection[HostView]) -> list[str]:
        """Return what is new; views: of all hosts of the launch or of the job."""
        now = time.monotonic()
        busy = [view for view in views if view.step in STEPS and not view.error and now - view.began[view.step] > SOON]
        lines = []
        for view in busy:
            before, at = self._said.get(view.name, ("", 0.0))
            if view.text != before and now - at >= EVERY:
                self._said[view.name] = view.text, now
                lines.append(f"{view.name}: {view.step}: {one_line(view.text)}")
        if lines:
            ready = sum(view.step == "ready" for view in views)
            lines[-1] += f" ({ready} of {len(views)} ready)" if ready else ""
        return lines


@contextlib.asynccontextmanager
async def said(session: Session) -> AsyncIterator[None]:
    """Print what hosts build or pull while a request is carried out."""

    async def watch() -> None:
        progress = Progress()
        while True:
            await session.wait_change(1.0)
            for line in progress.lines(session.hosts.values()):
                say(line)

    watching = asyncio.ensure_future(watch())
    try:
        yield
    finally:
        await cancel_all([watching])
