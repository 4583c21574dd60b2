"""The series that a screen shows: the nodes are asked in the background, and the newest answer is kept.

In: what a screen wants to show. Out: the series, and a redraw of the screen when it is newer.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from remote_agent.wire.events import ENDED_EVENTS
from supervisor.errors import SupervisorError
from supervisor.history import query
from supervisor.tui import times
from supervisor.wording import values

if TYPE_CHECKING:
    from collections.abc import Sequence

    from supervisor.history import Series, SeriesQuery
    from supervisor.tui.model import JobView
    from supervisor.tui.shell import Shell

# The nodes are asked this often, seconds; if there are many ranks, less often.
EVERY_S: Final = 2.0
MANY_S: Final = 5.0
MANY: Final = 64
LEAST_SPAN_S: Final = 60.0
# There are two spans: the whole run, and this one, for which the agents keep what they sampled.
RECENT_S: Final = 480.0


class Past:
    """The history of what was asked for last."""

    def __init__(self, shell: Shell) -> None:
        self._shell = shell
        self.series: Series | None = None
        self._wanted: tuple[object, ...] = ()
        self._asked_at = float("-inf")
        self._asking = False
        self._is_of_end = False

    def ask(
        self,
        job_view: JobView,
        kinds: Sequence[str],
        ids: Sequence[int] | None,
        points: int,
        *,
        recent: bool = False,
        nodes: Sequence[str] | None = None,
    ) -> None:
        """Ask for these kinds, of these ranks or of all, unless the newest answer is new enough.

        recent: only of the last minutes. nodes: the ones that are asked; None: all.
        """
        wanted = (kinds, ids, points, recent, nodes)
        every_s = EVERY_S if len(job_view.ranks) <= MANY else MANY_S
        if self._asking:
            return
        if wanted == self._wanted and (self._is_of_end or time.monotonic() - self._asked_at < every_s):
            return
        self._asking, self._asked_at, self._wanted = True, time.monotonic(), wanted
        seconds = RECENT_S if recent else self._length_s(job_view)
        work = self._fetch(query(kinds, ids, seconds, points, nodes), job_view.ended)
        self._shell.app.run_worker(work, group="series", exit_on_error=False)

    async def _fetch(self, wanted: SeriesQuery, ended: bool) -> None:
        try:
            series = await self._shell.source.series(wanted)
        except SupervisorError:
            # The bars above say what is wrong; the next try may succeed.
            return
        finally:
            self._asking = False
        self.series, self._is_of_end = series, ended
        self._shell.look_again()

    def _length_s(self, job_view: JobView) -> float:
        """Return the seconds from the job's begin to its end, or to now."""
        began = values.local_time(job_view.started_at)
        if began is None:
            return 600.0
        ended = next((event for event in self._shell.source.events if event.get("type") in ENDED_EVENTS), None)
        end = values.local_time(ended.get("time")) if ended is not None else None
        end_s = times.now() if end is None else end.timestamp()
        return max(LEAST_SPAN_S, end_s - began.timestamp())
