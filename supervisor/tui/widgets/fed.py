"""Lines of a feed, of which only those in view are here: loaded as one reads, and never moved by what is written.

In: a feed, jumps. Out: the lines in view, from a position that moves only where the reader moves it, or follows.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

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
        self._around: int | None = None
        self._pages: tuple[Page, Page] | None = None
        self._clocks: Clocks | None = None
        self._is_going = False
        """What lies around a time is being loaded."""

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
        more = self.feed is not None and self.feed.news.or_more
        return f"+{words.count(self.unseen, 'line')}{' or more' if more else ''}"

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
        self.pointer = None
        self.top = 0
        self._goal = self._around = None
        self.problem = ""
        self._due = 0.0
        self.redraw()
        self._kick.set()

    def jump(self, index: int, key: Key | None = None) -> None:
        """Bring a line to the upper third of the view, and stop following."""
        self._stop_following()
        self.pointer, self.strayed = key, False
        # Ahead of the first answer the feed does not know its length: the goal waits for it.
        self._goal = index
        if self.feed is not None and self.feed.count:
            self._reach_goal()
        self.redraw()
        self._kick.set()

    @property
    def is_on_its_way(self) -> bool:
        """What the reader has gone to is not here yet."""
        if self._around is not None or self._is_going:
            return True
        return not self.follow and self.feed is not None and self.feed.count > 0 and not self.rows_here()

    def jump_to_key(
        self, t_ns: int, key: Key, pages: tuple[Page, Page] | None = None, clocks: Clocks | None = None
    ) -> None:
        """Bring a line into view; in a merged feed what lies around it, `pages`, is loaded if it is not here.

        clocks: what its time was made with.
        """
        index = self.feed.index_of(key) if self.feed is not None else None
        is_merged = isinstance(self.feed, MergedFeed)
        # What is on its way takes the place of what is here.
        if is_merged and (index is None or self._around is not None or self._is_going):
            self._go_around(t_ns, key, pages, clocks)
        elif index is not None:
            self.jump(index, key)

    def jump_to_time(self, t_ns: int) -> None:
        """Bring the first line that came then or later into view."""
        self._go_around(max(1, t_ns), None)

    def _go_around(
        self,
        t_ns: int,
        key: Key | None,
        pages: tuple[Page, Page] | None = None,
        clocks: Clocks | None = None,
    ) -> None:
        self._stop_following()
        self.pointer, self.strayed = key, False
        self._goal = None
        self._around, self._pages, self._clocks = t_ns, pages, clocks
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

    # --- moving

    def _stop_following(self) -> None:
        self.follow = False

    def _note_read(self) -> None:
        """Tell the feed what is in view: it is no news any more."""
        feed, rows = self.feed, self.rows_here()
        if self.follow or feed is None or not rows:
            return
        is_whole = isinstance(feed, MergedFeed) and not feed.detached
        feed.news.read(rows, at_end=is_whole and feed.row(feed.count - 1) == rows[-1])

    def scroll_lines(self, delta: int) -> None:
        """Scroll; upwards ends following."""
        if delta < 0:
            self._stop_following()
        self._direction = 1 if delta > 0 else -1
        self._goal = None
        self.strayed = True
        super().scroll_lines(delta)
        self._note_read()
        self._kick.set()
        self.post_message(self.Changed())

    def go_to_begin(self) -> None:
        """Go to the first line."""
        self._stop_following()
        self._direction = -1
        self.strayed = True
        self.went += 1
        if isinstance(self.feed, MergedFeed):
            self.pointer, self._around = None, 0
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
            self._goal = self._around = None
            self._due = 0.0
            self.show_from(self._end())
        else:
            self._stop_following()
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
            if problem:
                self._due = time.monotonic() + RETRY_AFTER
            if feed is self.feed:
                self.problem = problem
                self._arrived(feed)
                self._note_read()

    def _wants(self, feed: Feed) -> bool:
        if self._around is not None:
            return True
        return not self.problem and feed.missing(self.top, self.top + self.body_height - 1) is not None

    async def _load(self, feed: Feed) -> None:
        if self._around is not None:
            around, self._around, self._is_going = self._around, None, True
            try:
                goal = await self._load_around(feed, around)
            finally:
                self._is_going = False
            if self._has_gone_on(feed):
                return
            if not self.follow:
                self._arrived(feed)
                self._goal = goal
                self._arrived(feed)
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + (self._every_s if self.follow else COUNT_EVERY)
            await feed.refresh(self.body_height, lambda: self.follow)
            if feed is self.feed:
                self._arrived(feed)
        height = self.body_height
        for _ in range(4):
            want = feed.missing(self.top, self.top + height - 1)
            if want is None:
                ahead = self.top + self._direction * height
                want = None if self.follow else feed.missing(ahead, ahead + height - 1)
                if want is None:
                    return
                await feed.load(want)
                return
            await feed.load(want)
            if feed is not self.feed:
                return
            self._arrived(feed)

    def _has_gone_on(self, feed: Feed) -> bool:
        return self._around is not None or feed is not self.feed

    async def _load_around(self, feed: Feed, t_ns: int) -> int | None:
        """Load what came at a time (0: at the begin); returns where the line is that is meant."""
        height = self.body_height
        if isinstance(feed, MergedFeed):
            pages, clocks, self._pages, self._clocks = self._pages, self._clocks, None, None
            await (feed.show_around(t_ns, height, pages, clocks) if t_ns else feed.show_begin(height))
            if self._has_gone_on(feed):
                return None
            index = feed.index_of(self.pointer) if self.pointer is not None else None
            if index is not None or not t_ns:
                return index or 0
            later = (at for at in range(feed.count) if (row := feed.row(at)) is not None and row.t_ns >= t_ns)
            goal = next(later, max(0, feed.count - 1))
        elif isinstance(feed, RankFeed):
            goal = await feed.find_time(t_ns, height)
        else:
            return None
        row = feed.row(goal)
        if row is not None:
            # Where nothing is, the line that was gone to is still the one to come back to.
            self.pointer = row.key
        return goal

    def _arrived(self, feed: Feed) -> None:
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
