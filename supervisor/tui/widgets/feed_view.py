"""A view of the lines of a feed, which are loaded as they come into view; new lines never move what is read.

In: a feed, jumps. Out: the lines in view, at a position that only the reader moves, or that follows the end.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

from textual.message import Message

from remote_agent.text.names import count
from remote_agent.wire import WireError
from supervisor.errors import SupervisorError
from supervisor.tui.logs.feed import Jump
from supervisor.tui.widgets.lines import LineView

if TYPE_CHECKING:
    from supervisor.logs.rows import Clocks, LineKey, LogLine
    from supervisor.tui.logs.feed import LogFeed
    from supervisor.tui.rows.spans import Row

Place = tuple[int, int]
"""A line, and a row of it."""


class WrappedView(LineView):
    """Lines that are cut at the width of the screen, or wrapped."""

    def __init__(self, *, title: str = "", id: str | None = None) -> None:  # noqa: A002
        super().__init__(title=title, id=id)
        self.wrap = False
        self._sub = 0
        """The first row in view of the first line in view."""
        self._room = 0

    def rows_of(self, index: int) -> list[tuple[Row, str]]:
        """Return the rows of a wrapped line, at least one, each with its overlay."""
        return [self.line_at(index)]

    def text_room(self) -> int:
        """Return cells of a row for wrapped text."""
        return self.line_width

    @property
    def last_top(self) -> int:
        """The scroll position at the end."""
        return self._end()[0] if self.wrap else super().last_top

    def set_wrap(self, wrap: bool) -> None:
        """Wrap long lines, or cut them; the first line in view stays the first one."""
        self.wrap, self._sub = wrap, 0
        self.redraw()

    def places(self) -> list[Place]:
        """Return the line and row on each row of the view."""
        total = self.line_count()
        if not self.wrap:
            return [(line, 0) for line in range(self.top, min(self.top + self.body_height, total))]
        places: list[Place] = []
        line, sub = self.top, self._sub
        while len(places) < self.body_height and line < total:
            places += [(line, row) for row in range(sub, len(self.rows_of(line)))]
            line, sub = line + 1, 0
        return places[: self.body_height]

    def _end(self) -> Place:
        if not self.wrap:
            return self.last_top, 0
        last = self.line_count() - 1
        return self.moved((last, len(self.rows_of(last)) - 1), 1 - self.body_height) if last >= 0 else (0, 0)

    def moved(self, place: Place, rows: int) -> Place:
        """Return the place this many rows further down or up, within the lines."""
        line, sub = place
        sub += rows
        while sub < 0 and line > 0:
            line -= 1
            sub += len(self.rows_of(line))
        while sub > 0 and line < self.line_count() - 1 and sub >= (height := len(self.rows_of(line))):
            line += 1
            sub -= height
        return line, max(0, sub)

    def show_from(self, place: Place) -> None:
        """Show the lines from a place on."""
        self.top, self._sub = place if self.wrap else (place[0], 0)
        self._stay_inside()
        self.redraw()

    def scroll_to_line(self, top: int) -> None:
        """Show the lines from `top` on, as far as there are any."""
        self.show_from((max(0, top), 0))

    def scroll_lines(self, delta: int) -> None:
        """Move the view by some rows."""
        self.show_from(self.moved((self.top, self._sub), delta) if self.wrap else (self.top + delta, 0))

    def _stay_inside(self) -> None:
        if not self.wrap:
            super()._stay_inside()
            return
        room = self.text_room()
        if room != self._room:
            # The line that is read stays in view when the width changes.
            self._sub = self._sub * self._room // max(1, room)
            self._room = room
        self.top, self._sub = max((0, 0), min((self.top, self._sub), self._end()))
        self._sub = min(self._sub, len(self.rows_of(self.top)) - 1) if self.line_count() else 0

    def _body(self) -> list[tuple[Row, str]]:
        if not self.wrap:
            return super()._body()
        return [self.rows_of(line)[row] for line, row in self.places()]


# A page is awaited this long, seconds.
LOAD_DEADLINE: Final = 10.0
# New lines are looked for this often while the reader does not follow, seconds.
LOOK_EVERY: Final = 0.5
RETRY_AFTER: Final = 1.0


class FeedView(WrappedView):
    """A view of a feed that stays at its position or follows the end."""

    class Changed(Message):
        """The position, the follow mode or the loaded lines have changed."""

    def __init__(self, *, title: str = "", id: str | None = None, every_s: float = 0.0) -> None:  # noqa: A002
        super().__init__(title=title, id=id)
        self.feed: LogFeed | None = None
        self.follow = True
        self.pointer: LineKey | None = None
        """The line to which a search or a jump led."""
        self.wanted: tuple[int, LineKey | None] | None = None
        """Time and line of a jump that is not shown, as a filter drops it; the pointer is at its neighbour."""
        self.moved_since_jump = False
        """The reader has scrolled since the last jump."""
        self.end_moves = 0
        """How often the reader has gone to the first line or to the end."""
        self.problem = ""
        """Why lines cannot be loaded."""
        self.held = False
        """No host is connected yet: nothing is loaded."""
        self._every_s = every_s
        self._kick = asyncio.Event()
        self._direction = 1
        self._due = 0.0
        self._goal: int | None = None
        self._jump: Jump | None = None
        """The jump whose line is not loaded yet."""

    def on_mount(self) -> None:
        """Start the task that loads the lines in view."""
        self.run_worker(self._keep_loaded(), name=f"load {self.id}", exit_on_error=False)

    # --- what is shown

    @property
    def new_lines_text(self) -> str:
        """`new lines below`; "" if there are none or the view follows the end."""
        return "" if self.follow or self.feed is None else self.feed.new_lines_text

    @property
    def absent_text(self) -> str:
        """The nodes whose lines are missing, in words, or ""."""
        absent = self.feed.absent if self.feed is not None else ()
        if not absent:
            return ""
        return f"without {absent[0] if len(absent) == 1 else count(len(absent), 'node')}"

    def open(self, feed: LogFeed) -> None:
        """Show another feed, at its end."""
        self.feed = feed
        self.follow = True
        self.pointer = self.wanted = None
        self.top = 0
        self._goal = self._jump = None
        self.problem = ""
        self._due = 0.0
        self.redraw()
        self._kick.set()

    def jump(self, index: int, key: LineKey | None = None) -> None:
        """Show a line in the upper third of the view, and stop following."""
        self.follow = self.moved_since_jump = False
        self.pointer, self.wanted, self._jump = key, None, None
        # The feed does not know its length before the first answer.
        self._goal = index
        if self.feed is not None and self.feed.count:
            self._reach_goal()
        self.redraw()
        self._kick.set()

    @property
    def is_jumping(self) -> bool:
        """Whether the target of a jump is not loaded yet."""
        if self._jump is not None:
            return True
        return not self.follow and self.feed is not None and self.feed.count > 0 and not self.lines_here()

    def jump_to_key(self, t_ns: int, key: LineKey | None, clocks: Clocks | None = None) -> None:
        """Show a line, or the first line at a time by these clock offsets, and load the lines around it.

        Of a line of which only the number is known, the time is LATEST_NS.
        """
        index = self.feed.index_of(key) if self.feed is not None and key is not None else None
        # The feed replaces its rows by those of a pending jump.
        if index is None or self._jump is not None:
            self._go(Jump(t_ns, key, clocks))
        else:
            self.jump(index, key)

    def jump_to_time(self, t_ns: int) -> None:
        """Show the first line that arrived then or later."""
        self.jump_to_key(max(1, t_ns), None)

    def _go(self, jump: Jump) -> None:
        self.follow = self.moved_since_jump = False
        self.pointer, self.wanted = jump.key, (jump.t_ns, jump.key)
        self._goal, self._jump = None, jump
        self.problem = ""
        self._kick.set()

    def _reach_goal(self) -> None:
        goal, feed = self._goal, self.feed
        if goal is None or feed is None:
            return
        up = -(self.body_height // 3)
        self.show_from(self.moved((goal, 0), up) if self.wrap else (goal + up, 0))
        # The height of the wrapped lines above it is known once they are loaded.
        is_sure = not self.wrap or all(feed.line(index) is not None for index in range(self.top, goal))
        self._goal = None if is_sure else goal

    def line_count(self) -> int:
        """Return how many lines there are."""
        count = self.feed.count if self.feed is not None else 0
        return max(count, 1)

    def lines_here(self) -> dict[int, LogLine]:
        """Return the loaded lines in view, by index."""
        feed = self.feed
        here = dict.fromkeys(index for index, _ in self.places()) if feed is not None else ()
        return {index: line for index in here if feed is not None and (line := feed.line(index)) is not None}

    def points_at(self, index: int) -> bool:
        """Return whether the pointer is at a line."""
        return self.pointer is not None and self.feed is not None and self.feed.is_at(index, self.pointer)

    def _extent(self) -> tuple[int, int, int]:
        feed = self.feed
        if feed is None or feed.is_whole:
            return super()._extent()
        # Of a merged log that is not loaded as a whole, nobody knows how many lines it has: it has no scroll bar.
        first = next(iter(self.lines_here().values()), None) if feed.last_line else None
        return (0, 0, 0) if first is None else (first.line, feed.last_line - self.body_height, feed.last_line)

    # --- moving

    def _note_read(self) -> None:
        here = [*self.lines_here().values()]
        if self.feed is not None and here:
            self.feed.note_read(here)

    def scroll_lines(self, delta: int) -> None:
        """Scroll; scrolling up stops following."""
        if delta < 0:
            self.follow = False
        self._direction = 1 if delta > 0 else -1
        self._goal = None
        self.moved_since_jump = True
        super().scroll_lines(delta)
        self._note_read()
        self._kick.set()
        self.post_message(self.Changed())

    def go_to_begin(self) -> None:
        """Go to the first line."""
        self._direction = -1
        self.end_moves += 1
        if self.feed is not None:
            self._go(Jump(0))
        self.follow, self.moved_since_jump = False, True
        self.scroll_to_line(0)
        self._kick.set()
        self.post_message(self.Changed())

    def set_follow(self, follow: bool) -> None:
        """Follow the end, or stop following."""
        self.end_moves += 1
        if follow:
            if self.feed is not None and not self.follow:
                self.feed.forget_new_lines()
            self.follow = self.moved_since_jump = True
            self._goal = self._jump = self.wanted = None
            self._due = 0.0
            self.show_from(self._end())
        else:
            self.follow = False
        self._kick.set()
        self.post_message(self.Changed())

    # --- loading

    def tick(self) -> None:
        """Wake the loader; called while the view is visible."""
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

    def _wants(self, feed: LogFeed) -> bool:
        if self.problem:
            return False
        return self._jump is not None or self._missing(feed)[0] is not None

    def _missing(self, feed: LogFeed) -> tuple[int | None, bool]:
        """Return what to load next for the lines in view, or (True) for those to which the reader scrolls.

        While the view follows the end, nothing is loaded ahead: new lines would never let it finish.
        """
        top, height = self.top, self.body_height
        want = feed.missing(top, top + height - 1)
        if want is not None or self.follow:
            return want, False
        top += self._direction * height
        return feed.missing(top, top + height - 1, ahead=True), True

    async def _load(self, feed: LogFeed) -> None:
        """Load what is wanted, and show it after each step: the index of a line may have changed."""
        jump = self._jump
        # Another feed may have been opened meanwhile; the jump belongs to that one.
        if feed is not self.feed or (jump is not None and not await self._land(feed, jump)):
            return
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + (self._every_s if self.follow else LOOK_EVERY)
            await feed.refresh(self.body_height, lambda: self.follow)
            self._arrived(feed)
            await self._complete(feed)
        for _ in range(4):
            if feed is not self.feed or not await self._load_missing(feed):
                return

    async def _complete(self, feed: LogFeed) -> None:
        """Load the lines in view again when a node whose lines are missing is back; the position stays."""
        places, top, end_moves = self.places(), self.top, self.end_moves
        line = feed.line(places[min(self.body_height // 3, len(places) - 1)][0]) if places else None
        if self.follow or line is None or not feed.has_returned_node:
            return
        goal = await feed.seek(Jump(line.t_ns, line.key, clocks=feed.clocks), self.body_height)
        if feed is self.feed and end_moves == self.end_moves and self._jump is None:
            # The reader may have scrolled meanwhile; the goal includes rows inserted above.
            feed.take_shift()
            self._goal = max(0, goal + self.top - top)
            self._arrived(feed)

    async def _land(self, feed: LogFeed, jump: Jump) -> bool:
        """Load the target of a jump and show it; False if the reader has gone elsewhere meanwhile."""
        goal = await feed.seek(jump, self.body_height)
        if feed is not self.feed or jump is not self._jump:
            return False
        self._jump = None
        self._arrived(feed)
        self._goal, line = goal, feed.line(goal)
        if line is not None:
            is_wanted = feed.is_at(goal, jump.key)
            if is_wanted or jump.key is None:
                self.wanted = None
            if jump.t_ns and not is_wanted:
                self.pointer = line.key
        self._arrived(feed)
        return True

    async def _load_missing(self, feed: LogFeed) -> bool:
        """Load lines that are missing in view or ahead; False when there is nothing more to load now."""
        want, is_ahead = self._missing(feed)
        if want is not None:
            await feed.load(want)
            self._arrived(feed)
        return want is not None and not is_ahead

    def _arrived(self, feed: LogFeed) -> None:
        if feed is not self.feed:
            return
        shift = feed.take_shift()
        self.top = max(0, self.top + shift)
        if self._goal is not None:
            self._goal = max(0, self._goal + shift)
        if self.follow:
            self.show_from(self._end())
        elif feed.count:
            self._reach_goal()
        self.redraw()
        self.post_message(self.Changed())
