"""A log of any length, of which only the lines in view are drawn.

In: a feed. Out: rows of exact width; placeholders for lines that are being loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from textual.binding import Binding

from remote_agent.text.names import size_text
from supervisor.tui.logs import ansi
from supervisor.tui.rows.spans import EMPTY, Row, Span, clean, crop_row, fit, fold_row, row_width, text_of
from supervisor.tui.widgets.feed_view import FeedView
from supervisor.wording import values

if TYPE_CHECKING:
    import re

    from textual.selection import Selection

    from supervisor.logs.rows import LogLine
    from supervisor.tui.logs.feed import LogFeed

SIDE_STEP: Final = 16
NONE_PASSES: Final = "no line passes the filter; backspace removes the last filter"
LOOKING: Final = "looking for lines that pass the filter"
TIME_WIDTH: Final = len("03:04:11.207 ")


class VirtualLog(FeedView):
    """The lines of a log."""

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

    def __init__(self, *, title: str = "", id: str | None = None, every_s: float = 0.0) -> None:  # noqa: A002
        super().__init__(title=title, id=id, every_s=every_s)
        self.left = 0
        self.pattern: re.Pattern[str] | None = None
        """The pattern that is highlighted."""
        self.show_time = True
        self.show_source = True
        """Whether each line begins with its node and rank."""
        self.source_width = 8
        self.waiting_text = "waiting for output"

    # --- what is shown

    def line_at(self, index: int) -> tuple[Row, str]:
        """Return one line; a placeholder while it is not loaded."""
        feed = self.feed
        if feed is None or not feed.count:
            return ((f" {clean(self.problem) or self._empty_text()}", "warn" if self.problem else "dim"),), ""
        line = feed.line(index)
        if line is None:
            return ((" ......", "log-gap"),), ""
        prefix, text, room = self._prefix(feed, index, line), self._text(line), self.text_room()
        overlay = "rest" if self.points_at(index) else ""
        if row_width(text) - self.left <= room:
            return (*prefix, *crop_row(text, self.left, room)), overlay
        return (*prefix, *crop_row(text, self.left, room - 1), (self.glyphs.more[:1], "dim")), overlay

    def _empty_text(self) -> str:
        feed = self.feed
        if self.held or feed is None or not feed.selection.filter:
            return self.waiting_text
        return NONE_PASSES if feed.is_whole and feed.clocks is not None else LOOKING

    def rows_of(self, index: int) -> list[tuple[Row, str]]:
        """Return one line, wrapped behind its time and source."""
        feed = self.feed
        line = feed.line(index) if feed is not None else None
        if feed is None or line is None:
            return [self.line_at(index)]
        room = self.text_room()
        overlay = "rest" if self.points_at(index) else ""
        first, *others = fold_row(self._text(line), room)
        indent = (" " * (self.line_width - room), "")
        return [
            ((*self._prefix(feed, index, line), *first), overlay),
            *(((indent, *other), overlay) for other in others),
        ]

    def text_room(self) -> int:
        """Return cells for the text of a line."""
        before = 3 + self.show_time * TIME_WIDTH + self.show_source * (self.source_width + 1)
        return max(1, self.line_width - before)

    def _text(self, line: LogLine) -> Row:
        text = ansi.spans(line.text, {"error": "log-error", "warn": "log-warn"}.get(line.mark, "text"))
        spans = text if self.pattern is None else ansi.highlight(text, self.pattern)
        if line.cut or row_width(text) >= ansi.MAX_CELLS:
            missing = line.cut + max(0, len(line.text) - len(text_of(text).encode()))
            return (*spans, (f"{self.glyphs.more} +{size_text(missing)}", "dim")) if missing else spans
        return spans

    def _prefix(self, feed: LogFeed, index: int, line: LogLine) -> Row:
        spans: list[Span] = [(self.glyphs.pointer if self.points_at(index) else " ", "mark")]
        if self.show_time:
            spans.append((values.clock_ns(feed.stands_ns(index)) + " ", "time"))
        if self.show_source:
            spans.append((fit(feed.who(index), self.source_width, self.glyphs.more) + " ", "tag"))
        letter, role = {"error": ("E", "log-error"), "warn": ("W", "log-warn")}.get(line.mark, (" ", ""))
        return (*spans, (letter, role), (" ", ""))

    # --- moving

    def action_line(self, delta: int) -> None:
        """Scroll by lines."""
        self.scroll_lines(delta)

    def action_page(self, pages: float) -> None:
        """Scroll by screens."""
        self.scroll_lines(int(pages * max(1, self.body_height - 1)))

    def selection_updated(self, selection: Selection | None) -> None:
        """Stop following: the lines stay where they are while they are selected."""
        super().selection_updated(selection)
        if selection is not None and self.follow:
            self.follow = False
            self.post_message(self.Changed())

    def point_to(self, y: int) -> None:
        """Point to the line on a row of the widget, to copy or open it."""
        places = self.places()
        y -= self.size.height - self.body_height
        line = self.feed.line(places[y][0]) if self.feed is not None and 0 <= y < len(places) else None
        if line is not None:
            self.follow = False
            self.pointer, self.wanted = line.key, None
            self.redraw()
            self.post_message(self.Changed())

    def action_begin(self) -> None:
        """Go to the first line."""
        self.go_to_begin()

    def action_end(self) -> None:
        """Go to the end and follow."""
        self.set_follow(True)

    def action_side(self, step: int) -> None:
        """Scroll sideways: left, right, to the first column (0), to the end of the longest visible line (2)."""
        if self.wrap:
            return
        if step == 2:
            self.left = max(0, self._longest() - self.line_width // 2)
        else:
            self.left = max(0, self.left + step * SIDE_STEP) if step else 0
        self.left = min(self.left, ansi.MAX_CELLS)
        self.redraw()
        self.post_message(self.Changed())

    def _longest(self) -> int:
        return max((row_width(ansi.spans(line.text)) for line in self.lines_here().values()), default=0)


def position(log: VirtualLog) -> Row:
    """Return the position of the reader, for a title."""
    feed = log.feed
    if feed is None or not feed.count:
        return EMPTY
    if feed.selection.file is None:
        top = min(log.top, log.last_top)
        first_ns = feed.stands_ns(top) or feed.stands_ns(top + 1)
        return ((f"from {values.clock_ns(first_ns)}" if first_ns else "", "dim"),)
    here = log.lines_here()
    read = next((line for index, line in here.items() if log.points_at(index)), [None, *here.values()][-1])
    of = f" of {feed.last_line:,}" if feed.last_line else ""
    return ((f"line {read.line + 1:,}{of}", "dim"),) if read is not None else EMPTY
