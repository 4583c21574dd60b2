"""A log of any length: only the lines on the screen exist here, and reading is never disturbed by writing.

In: a feed. Out: rows of exact width; placeholders for what is on its way.
"""

from __future__ import annotations

import asyncio
import re
import time
from typing import TYPE_CHECKING, Final

from textual.binding import Binding
from textual.message import Message

from remote_agent.wire import WireError
from supervisor.errors import SupervisorError
from supervisor.tui import ansi, words
from supervisor.tui.cells import EMPTY, Row, Span, clean, crop_row, fit, row_width
from supervisor.tui.feeds import Feed, LogRow, MergedFeed
from supervisor.tui.widgets.lines import LineView

if TYPE_CHECKING:
    from supervisor.session.logs import Page

# A page that takes longer counts as not coming, seconds.
LOAD_DEADLINE: Final = 10.0
# While nobody follows, the number of new lines is all that is asked for: this often, seconds.
COUNT_EVERY: Final = 0.5
RETRY_AFTER: Final = 1.0
SIDE_STEP: Final = 16


class VirtualLog(LineView):
    """Lines of a feed, with follow as a property of the view."""

    BINDINGS = [
        Binding("up,k", "line(-1)", show=False),
        Binding("down,j", "line(1)", show=False),
        Binding("pageup,b", "page(-1.0)", show=False),
        Binding("pagedown,space", "page(1.0)", show=False),
        Binding("u", "page(-0.5)", show=False),
        Binding("d", "page(0.5)", show=False),
        Binding("home,g", "begin", show=False),
        Binding("end,G", "end", show=False),
        Binding("left", "side(-1)", show=False),
        Binding("right", "side(1)", show=False),
        Binding("0", "side(0)", show=False),
        Binding("dollar_sign", "side(2)", show=False),
    ]

    class Changed(Message):
        """Position, follow or what is loaded has changed."""

    def __init__(self, *, title: str = "", id: str | None = None, every_s: float = 0.0) -> None:  # noqa: A002
        super().__init__(title=title, id=id)
        self.feed: Feed | None = None
        self.follow = True
        self.left = 0
        self.pointer: tuple[int, int, str, int] | None = None
        """The line that a search or a jump has led to."""
        self.pattern: re.Pattern[str] | None = None
        """What is highlighted."""
        self.problem = ""
        """Why lines do not come."""
        self.show_time = True
        self.show_source = True
        self.waiting_text = "waiting for output"
        self._every_s = every_s
        self._kick = asyncio.Event()
        self._seen = 0
        self._direction = 1
        self._due = 0.0
        self._goal: int | None = None
        self._around: int | None = None
        self._pages: tuple[Page, Page] | None = None

    def on_mount(self) -> None:
        """Start the one task that loads what is visible."""
        self.run_worker(self._keep_loaded(), name=f"load {self.id}", exit_on_error=False)

    # --- what is shown

    @property
    def unseen(self) -> int:
        """Lines that came since the reader stopped following."""
        if self.follow or self.feed is None:
            return 0
        if isinstance(self.feed, MergedFeed):
            return self.feed.unseen
        return max(0, self.feed.count - self._seen)

    @property
    def unseen_text(self) -> str:
        """The same in words: `+12 lines`, `+64 lines or more`."""
        more = isinstance(self.feed, MergedFeed) and self.feed.more_unseen
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
        self._seen = 0
        self._goal = self._around = None
        self.problem = ""
        self._due = 0.0
        self.redraw()
        self._kick.set()

    def jump(self, index: int, key: tuple[int, int, str, int] | None = None) -> None:
        """Bring a line to the upper third of the view, and stop following."""
        self._stop_following()
        self.pointer = key
        # Ahead of the first answer the feed does not know its length: the goal waits for it.
        self._goal = index
        if self.feed is not None and self.feed.count:
            self._reach_goal()
        self.redraw()
        self._kick.set()

    def jump_to_time(self, t_ns: int, key: tuple[int, int, str, int], pages: tuple[Page, Page] | None = None) -> None:
        """Bring a line of a merged feed into view; what lies around it, `pages`, is loaded if it is not here."""
        feed = self.feed
        if not isinstance(feed, MergedFeed):
            return
        index = feed.index_of(key)
        if index is not None:
            self.jump(index, key)
            return
        self._stop_following()
        self.pointer = key
        self._around, self._pages = t_ns, pages
        self._kick.set()

    def set_pace(self, every_s: float) -> None:
        """How often a followed feed is asked, seconds."""
        self._every_s = every_s

    def _reach_goal(self) -> None:
        if self._goal is not None:
            self.top = max(0, min(self._goal - self.body_height // 3, self.last_top))
            self._goal = None
            self._seen = self.feed.count if self.feed is not None else 0

    def line_count(self) -> int:
        """How many lines there are."""
        count = self.feed.count if self.feed is not None else 0
        return max(count, 1)

    def line_at(self, index: int) -> tuple[Row, str]:
        """One line; a placeholder while it is not here."""
        feed = self.feed
        if feed is None or not feed.count:
            return ((f" {clean(self.problem) or self.waiting_text}", "warn" if self.problem else "dim"),), ""
        row = feed.row(index)
        if row is None:
            return ((" ......", "log-gap"),), ""
        marked = row.is_at(self.pointer)
        prefix = self._prefix(row, marked)
        text = ansi.spans(row.raw, {"error": "log-error", "warn": "log-warn"}.get(row.level, "text"))
        if self.pattern is not None:
            text = ansi.highlight(text, self.pattern)
        room = self.line_width - row_width(prefix)
        if row_width(text) - self.left <= room:
            return (*prefix, *crop_row(text, self.left, room)), "rest" if marked else ""
        return (*prefix, *crop_row(text, self.left, room - 1), (self.glyphs.more[:1], "dim")), "rest" if marked else ""

    def _prefix(self, row: LogRow, marked: bool) -> Row:
        spans: list[Span] = [(self.glyphs.pointer if marked else " ", "mark")]
        if self.show_time:
            spans.append((words.clock_ns(row.t_ns) + " ", "time"))
        if self.show_source:
            spans.append((fit(row.who or f"{row.node} r{row.rank}", self.source_width, self.glyphs.more) + " ", "tag"))
        letter, role = {"error": ("E", "log-error"), "warn": ("W", "log-warn")}.get(row.level, (" ", ""))
        return (*spans, (letter + " ", role))

    source_width = 8

    # --- moving

    def _stop_following(self) -> None:
        if self.follow:
            self.follow = False
            self._seen = self.feed.count if self.feed is not None else 0

    def action_line(self, delta: int) -> None:
        """Scroll by lines."""
        self.scroll_lines(delta)

    def action_page(self, pages: float) -> None:
        """Scroll by screens."""
        self.scroll_lines(int(pages * max(1, self.body_height - 1)))

    def scroll_lines(self, delta: int) -> None:
        """Scroll; upwards ends following."""
        if delta < 0:
            self._stop_following()
        self._direction = 1 if delta > 0 else -1
        self.scroll_to_line(self.top + delta)
        self._kick.set()
        self.post_message(self.Changed())

    def action_begin(self) -> None:
        """Go to the first line."""
        self._stop_following()
        self._direction = -1
        if isinstance(self.feed, MergedFeed):
            self.pointer, self._around = None, 0
        self.scroll_to_line(0)
        self._kick.set()
        self.post_message(self.Changed())

    def action_end(self) -> None:
        """Go to the end and follow."""
        self.set_follow(True)

    def set_follow(self, follow: bool) -> None:
        """Follow the end, or stay where we are."""
        if follow:
            self.follow = True
            self._goal = self._around = None
            self._due = 0.0
            self.scroll_to_line(self.last_top)
        else:
            self._stop_following()
        self._kick.set()
        self.post_message(self.Changed())

    def action_side(self, step: int) -> None:
        """Scroll sideways: back, on, to the first column (0), to the end of the longest visible line (2)."""
        if step == 2:
            self.left = max(0, self._longest() - self.line_width // 2)
        else:
            self.left = max(0, self.left + step * SIDE_STEP) if step else 0
        self.left = min(self.left, ansi.MAX_CELLS)
        self.redraw()
        self.post_message(self.Changed())

    def _longest(self) -> int:
        rows = (self.feed.row(self.top + y) for y in range(self.body_height)) if self.feed is not None else ()
        return max((row_width(ansi.spans(row.raw)) for row in rows if row is not None), default=0)

    # --- loading

    def tick(self) -> None:
        """Let the loader look whether there is something to do; called while the view is visible."""
        self._kick.set()

    async def _keep_loaded(self) -> None:
        while True:
            await self._kick.wait()
            self._kick.clear()
            feed = self.feed
            if feed is None or not self.body_height or not (time.monotonic() >= self._due or self._wants(feed)):
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

    def _wants(self, feed: Feed) -> bool:
        if self._around is not None:
            return True
        return not self.problem and feed.missing(self.top, self.top + self.body_height - 1) is not None

    async def _load(self, feed: Feed) -> None:
        if self._around is not None and isinstance(feed, MergedFeed):
            around, pages, self._around, self._pages = self._around, self._pages, None, None
            await (feed.show_around(around, self.body_height, pages) if around else feed.show_begin(self.body_height))
            self._goal = feed.index_of(self.pointer) if self.pointer is not None else 0
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

    def _arrived(self, feed: Feed) -> None:
        self.top = max(0, self.top + feed.shifted)
        if self._goal is not None:
            self._goal = max(0, self._goal + feed.shifted)
        feed.shifted = 0
        if self.follow:
            self.top = self.last_top
        elif feed.count:
            self._reach_goal()
        self.redraw()
        self.post_message(self.Changed())


def position(log: VirtualLog) -> Row:
    """Where the reader is, for a title."""
    feed = log.feed
    if feed is None or not feed.count:
        return EMPTY
    top = min(log.top, log.last_top)
    if isinstance(feed, MergedFeed):
        first = feed.row(top) or feed.row(top + 1)
        return ((f"from {words.clock_ns(first.t_ns)}" if first is not None else "", "dim"),)
    last = min(feed.count, top + log.body_height)
    return ((f"line {last:,} of {feed.count:,}", "dim"),)
