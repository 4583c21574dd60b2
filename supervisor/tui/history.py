"""The series that a screen shows: the nodes are asked in the background, and the newest answer is kept.

In: what a screen wants to show. Out: the series, and a redraw of the screen when newer ones have come.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from remote_agent.wire.events import ENDED_EVENTS
from supervisor.errors import SupervisorError
from supervisor.history import trimmed
from supervisor.tui import times
from supervisor.wording import values

if TYPE_CHECKING:
    from collections.abc import Sequence

    from supervisor.history import Series
    from supervisor.tui.model import Snapshot
    from supervisor.tui.shell import Shell

# How often the nodes are asked, seconds; for many ranks less often.
EVERY_S: Final = 2.0
MANY_S: Final = 5.0
MANY: Final = 64
LEAST_SPAN_S: Final = 60.0


class Past:
    """The history since the launch, of what was asked for last."""

    def __init__(self, shell: Shell) -> None:
        self._shell = shell
        self.series: Series | None = None
        self._wanted: tuple[object, ...] = ()
        self._asked_at = float("-inf")
        self._asking = False
        self._is_of_end = False

    def ask(self, snapshot: Snapshot, kinds: Sequence[str], ids: Sequence[int] | None, points: int) -> None:
        """Ask for these kinds, of these ranks or of all, unless the newest answer is new enough."""
        wanted = (tuple(kinds), None if ids is None else tuple(ids), points)
        every_s = EVERY_S if len(snapshot.ranks) <= MANY else MANY_S
        if self._asking:
            return
        if wanted == self._wanted and (self._is_of_end or time.monotonic() - self._asked_at < every_s):
            return
        self._asking, self._asked_at, self._wanted = True, time.monotonic(), wanted
        work = self._fetch(snapshot, kinds, ids, points)
        self._shell.run_worker(work, group="series", exit_on_error=False)

    async def _fetch(self, snapshot: Snapshot, kinds: Sequence[str], ids: Sequence[int] | None, points: int) -> None:
        try:
            series = await self._shell.source.series(kinds, ids, self._span_s(snapshot), points)
        except SupervisorError:
            # The bars above say what is wrong; the next try may succeed.
            return
        finally:
            self._asking = False
        self.series, self._is_of_end = trimmed(series), snapshot.ended
        self._shell.look_again()

    def _span_s(self, snapshot: Snapshot) -> float:
        began = values.local_time(snapshot.started_at)
        if began is None:
            return 600.0
        ended = next((event for event in self._shell.source.events if event.get("type") in ENDED_EVENTS), None)
        end = values.local_time(ended.get("time")) if ended is not None else None
        end_s = times.now() if end is None else end.timestamp()
        return max(LEAST_SPAN_S, end_s - began.timestamp())
