"""Lines of a feed, of which only those in view are here: loaded as one reads, and never moved by what is written.

In: a feed, jumps. Out: the lines in view, from a position that moves only where the reader moves it, or follows.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final, NamedTuple

from textual.message import Message

from remote_agent.wire import WireError
from supervisor.errors import SupervisorError
from supervisor.tui import words
from supervisor.tui.logs.feeds import Feed, RankFeed
from supervisor.tui.logs.merged import MergedFeed
from supervisor.tui.widgets.wrapped import WrappedView

if TYPE_CHECKING:
    from supervisor.session.logs import Clocks, Page
    from supervisor.tui.logs.log_row import Key, LogRow

# A page that takes longer counts as not coming, seconds.
LOAD_DEADLINE: Final = 10.0
# While nobody follows, the number of new lines is all that is asked for: this often, seconds.
COUNT_EVERY: Final = 0.5
RETRY_AFTER: Final = 1.0


class _Jump(NamedTuple):
    """A way to what came at a time, to one line of it where a key is given; 0: to the begin."""

    t_ns: int
    key: Key | None = None
    pages: tuple[Page, Page] | None = None
    """What lies around it, where that is known."""
    clocks: Clocks | None = None
    """What the time was made with."""


class FedView(WrappedView):
    """A window on a feed, with follow as a property of the view."""

    class Changed(Message):
        """Position, follow or what is loaded has changed."""

    def __init__(self, *, title: str = "", id: str | None = None, every_s: float = 0.0) -> None:  # noqa: A002
        super().__init__(title=title, id=id)
        self.feed: Feed | None = None
        self.follow = True
        self.pointer: Key | None = None
        """The line that a search or a jump has led to."""
        self.meant: tuple[int, Key | None] | None = None
        """Time and line that a jump has meant and that is not shown; the pointer is at its neighbour, if any."""
        self.strayed = False
        """The reader has moved since."""
        self.went = 0
        """How often he has gone to an end."""
        self.problem = ""
        """Why lines do not come."""
        self.held = False
        """Nobody can be asked yet: what is to be loaded waits."""
        self._every_s = every_s
        self._kick = asyncio.Event()
        self._direction = 1
        self._due = 0.0
        self._goal: int | None = None
        self._jump: _Jump | None = None
        """Where the reader goes to: it is not here yet."""

    def on_mount(self) -> None:
        """Start the one task that loads what is visible."""
        self.run_worker(self._keep_loaded(), name=f"load {self.id}", exit_on_error=False)

    # --- what is shown

    @property
    def unseen(self) -> int:
        """Lines that came since the reader left the end, below what he has had in view since."""
        return 0 if self.follow or self.feed is None else self.feed.news.lines

    @property
    def unseen_text(self) -> str:
        """The same in words: `+12 lines`, `+64 lines or more`."""
        news = self.feed.news if self.feed is not None else None
        more = "" if news is None else " or more" if news.or_more else " or fewer" if news.or_fewer else ""
        return f"+{words.count(self.unseen, 'line')}{more}"

    @property
    def absent_text(self) -> str:
        """Whose lines are missing, in words, or nothing."""
        absent = self.feed.absent if isinstance(self.feed, MergedFeed) else ()
        if not absent:
            return ""
        return f"without {absent[0] if len(absent) == 1 else words.count(len(absent), 'node')}"

    def open(self, feed: Feed) -> None:
        """Show another feed from its end."""
        self.feed = feed
        self.follow = True
        self.pointer = self.meant = None
        self.top = 0
        self._goal = self._jump = None
        self.problem = ""
        self._due = 0.0
        self.redraw()
        self._kick.set()

    def jump(self, index: int, key: Key | None = None) -> None:
        """Bring a line to the upper third of the view, and stop following."""
        self.follow = self.strayed = False
        self.pointer, self.meant, self._jump = key, None, None
        # Ahead of the first answer the feed does not know its length: the goal waits for it.
        self._goal = index
        if self.feed is not None and self.feed.count:
            self._reach_goal()
        self.redraw()
        self._kick.set()

    @property
    def is_on_its_way(self) -> bool:
        """What the reader has gone to is not here yet."""
        if self._jump is not None:
            return True
        return not self.follow and self.feed is not None and self.feed.count > 0 and not self.rows_here()

    def jump_to_key(
        self, t_ns: int, key: Key | None, pages: tuple[Page, Page] | None = None, clocks: Clocks | None = None
    ) -> None:
        """Bring a line into view, or the first one of a time; what lies around it is loaded if it is not here.

        pages: what lies around it, where that is known; clocks: what its time was made with.
        """
        index = self.feed.index_of(key) if self.feed is not None and key is not None else None
        # In a merged feed, what is on its way takes the place of what is here.
        if index is None or (self._jump is not None and isinstance(self.feed, MergedFeed)):
            self._go(_Jump(t_ns, key, pages, clocks))
        else:
            self.jump(index, key)

    def jump_to_time(self, t_ns: int) -> None:
        """Bring the first line that came then or later into view."""
        self.jump_to_key(max(1, t_ns), None)

    def _go(self, jump: _Jump) -> None:
        self.follow = self.strayed = False
        self.pointer, self.meant = jump.key, (jump.t_ns, jump.key)
        self._goal, self._jump = None, jump
        self.problem = ""
        self._kick.set()

    def set_pace(self, every_s: float) -> None:
        """How often a followed feed is asked, seconds."""
        self._every_s = every_s

    def _reach_goal(self) -> None:
        goal, feed = self._goal, self.feed
        if goal is None or feed is None:
            return
        up = -(self.body_height // 3)
        self.show_from(self.moved((goal, 0), up) if self.wrap else (goal + up, 0))
        # How many rows the lines above it take is known once they are here.
        is_sure = not self.wrap or all(feed.row(line) is not None for line in range(self.top, goal))
        self._goal = None if is_sure else goal

    def line_count(self) -> int:
        """How many lines there are."""
        count = self.feed.count if self.feed is not None else 0
        return max(count, 1)

    def rows_here(self) -> list[LogRow]:
        """What is in view and loaded."""
        feed = self.feed
        rows = (feed.row(line) for line in dict.fromkeys(line for line, _ in self.places())) if feed is not None else ()
        return [row for row in rows if row is not None]

    def _extent(self) -> tuple[int, int, int]:
        above, below = self.feed.beyond if isinstance(self.feed, MergedFeed) else (0, 0)
        top, last, total = super()._extent()
        return above + top, above + last + below, above + total + below

    # --- moving

    def _note_read(self) -> None:
        """Tell the feed what is in view: it is no news any more."""
        feed, rows = self.feed, self.rows_here()
        if feed is None or not rows:
            return
        is_whole = isinstance(feed, MergedFeed) and not feed.detached
        feed.news.read(rows, at_end=is_whole and feed.row(feed.count - 1) == rows[-1])

    def scroll_lines(self, delta: int) -> None:
        """Scroll; upwards ends following."""
        if delta < 0:
            self.follow = False
        self._direction = 1 if delta > 0 else -1
        self._goal = None
        self.strayed = True
        super().scroll_lines(delta)
        self._note_read()
        self._kick.set()
        self.post_message(self.Changed())

    def go_to_begin(self) -> None:
        """Go to the first line."""
        self._direction = -1
        self.went += 1
        if isinstance(self.feed, MergedFeed):
            self._go(_Jump(0))
        else:
            self._goal = self._jump = None
        self.follow, self.strayed = False, True
        self.scroll_to_line(0)
        self._kick.set()
        self.post_message(self.Changed())

    def set_follow(self, follow: bool) -> None:
        """Follow the end, or stay where we are."""
        self.went += 1
        if follow:
            if self.feed is not None and not self.follow:
                self.feed.forget_news()
            self.follow = self.strayed = True
            self._goal = self._jump = self.meant = None
            self._due = 0.0
            self.show_from(self._end())
        else:
            self.follow = False
        self._kick.set()
        self.post_message(self.Changed())

    # --- loading

    def tick(self) -> None:
        """Let the loader look whether there is something to do; called while the view is visible."""
        self._kick.set()

    async def _keep_loaded(self) -> None:
        while True:
            await self._kick.wait()
            self._kick.clear()
            feed = self.feed
            if feed is None or self.held or not self.body_height:
                continue
            if not (time.monotonic() >= self._due or self._wants(feed)):
                continue
            try:
                await asyncio.wait_for(self._load(feed), LOAD_DEADLINE)
                problem = ""
            except asyncio.TimeoutError:
                problem = f"no answer for {LOAD_DEADLINE:.0f} s"
            except SupervisorError as error:
                problem = error.message
            except (WireError, OSError, KeyError, TypeError, ValueError) as error:
                problem = f"{type(error).__name__}: {error}"
            if feed is not self.feed:
                continue
            self.problem = problem
            if problem:
                self._due = time.monotonic() + RETRY_AFTER
            self._arrived(feed)
            self._note_read()

    def _wants(self, feed: Feed) -> bool:
        if self.problem:
            return False
        return self._jump is not None or self._missing(feed)[0] is not None

    def _missing(self, feed: Feed) -> tuple[int | None, bool]:
        """What to load next: of what is in view, else (True) of what the reader scrolls to.

        At the end that he follows there is none: under a flood it would be another one each time.
        """
        top, height = self.top, self.body_height
        want = feed.missing(top, top + height - 1)
        if want is not None or self.follow:
            return want, False
        top += self._direction * height
        return feed.missing(top, top + height - 1, ahead=True), True

    async def _load(self, feed: Feed) -> None:
        """Load what is wanted; what a feed has brought is shown at once, as a line may be at another index by then."""
        jump = self._jump
        # Another feed may have been opened before the first step is made here: that one's jump is not for this one.
        if feed is not self.feed or (jump is not None and not await self._land(feed, jump)):
            return
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + (self._every_s if self.follow else COUNT_EVERY)
            await feed.refresh(self.body_height, lambda: self.follow)
            self._arrived(feed)
            await self._complete(feed)
        for _ in range(4):
            if feed is not self.feed or not await self._load_missing(feed):
                return

    async def _complete(self, feed: Feed) -> None:
        """Load what is read anew where a node is back whose lines are missing: the others stay where they are."""
        places, top, went = self.places(), self.top, self.went
        row = feed.row(places[min(self.body_height // 3, len(places) - 1)][0]) if places else None
        if self.follow or row is None or not isinstance(feed, MergedFeed) or not any(map(feed.news.tells, feed.absent)):
            return
        goal = await self._load_around(feed, _Jump(row.t_ns, row.key, clocks=feed.clocks))
        if feed is self.feed and went == self.went and self._jump is None:
            # The reader may have moved meanwhile; the goal counts what has come above.
            self._goal, feed.shifted = max(0, goal + self.top - top), 0
            self._arrived(feed)

    async def _land(self, feed: Feed, jump: _Jump) -> bool:
        """Load what a jump leads to, and show it; False if the reader has gone elsewhere meanwhile."""
        goal = await self._load_around(feed, jump)
        if feed is not self.feed or jump is not self._jump:
            return False
        self._jump = None
        self._arrived(feed)
        self._goal, row = goal, feed.row(goal)
        if row is not None:
            is_meant = row.is_at(jump.key)
            if is_meant or jump.key is None:
                self.meant = None
            if jump.t_ns and not is_meant:
                self.pointer = row.key
        self._arrived(feed)
        return True

    async def _load_missing(self, feed: Feed) -> bool:
        """Load what is missing in view, or where the reader scrolls to; False when that is all for now."""
        want, is_ahead = self._missing(feed)
        if want is not None:
            await feed.load(want)
            self._arrived(feed)
        return want is not None and not is_ahead

    async def _load_around(self, feed: Feed, jump: _Jump) -> int:
        """Load what a jump leads to; returns where the line is that is meant."""
        height, t_ns = self.body_height, jump.t_ns
        if isinstance(feed, RankFeed):
            return await feed.find_time(t_ns, height)
        if not isinstance(feed, MergedFeed):
            return 0
        await (feed.show_around(t_ns, height, jump.pages, jump.clocks) if t_ns else feed.show_begin(height))
        index = feed.index_of(jump.key) if jump.key is not None else None
        if index is not None:
            return index
        later = (at for at in range(feed.count) if (row := feed.row(at)) is not None and row.t_ns >= t_ns)
        return next(later, max(0, feed.count - 1))

    def _arrived(self, feed: Feed) -> None:
        if feed is not self.feed:
            return
        self.top = max(0, self.top + feed.shifted)
        if self._goal is not None:
            self._goal = max(0, self._goal + feed.shifted)
        feed.shifted = 0
        if self.follow:
            self.show_from(self._end())
        elif feed.count:
            self._reach_goal()
        self.redraw()
        self.post_message(self.Changed())
