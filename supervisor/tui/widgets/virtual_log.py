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

    from supervisor.tui.logs.row import LogRow

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
        row = feed.row(index)
        if row is None:
            return ((" ......", "log-gap"),), ""
        prefix, text, room = self._prefix(row), self._text(row), self.text_room()
        overlay = "rest" if row.is_at(self.pointer) else ""
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
        row = self.feed.row(index) if self.feed is not None else None
        if row is None:
            return [self.line_at(index)]
        room = self.text_room()
        text = self._text(row)
        overlay = "rest" if row.is_at(self.pointer) else ""
        first, *others = fold_row(text, room)
        indent = (" " * (self.line_width - room), "")
        return [((*self._prefix(row), *first), overlay), *(((indent, *other), overlay) for other in others)]

    def text_room(self) -> int:
        """Return cells for the text of a line."""
        before = 3 + self.show_time * TIME_WIDTH + self.show_source * (self.source_width + 1)
        return max(1, self.line_width - before)

    def _text(self, row: LogRow) -> Row:
        text = ansi.spans(row.text, {"error": "log-error", "warn": "log-warn"}.get(row.level, "text"))
        spans = text if self.pattern is None else ansi.highlight(text, self.pattern)
        if row.cut or row_width(text) >= ansi.MAX_CELLS:
            missing = row.cut + max(0, len(row.text) - len(text_of(text).encode()))
            return (*spans, (f"{self.glyphs.more} +{size_text(missing)}", "dim")) if missing else spans
        return spans

    def _prefix(self, row: LogRow) -> Row:
        spans: list[Span] = [(self.glyphs.pointer if row.is_at(self.pointer) else " ", "mark")]
        if self.show_time:
            spans.append((values.clock_ns(row.shown_ns) + " ", "time"))
        if self.show_source:
            spans.append((fit(row.who or f"{row.node} r{row.rank}", self.source_width, self.glyphs.more) + " ", "tag"))
        letter, role = {"error": ("E", "log-error"), "warn": ("W", "log-warn")}.get(row.level, (" ", ""))
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
        row = self.feed.row(places[y][0]) if self.feed is not None and 0 <= y < len(places) else None
        if row is not None:
            self.follow = False
            self.pointer, self.wanted = row.key, None
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
        return max((row_width(ansi.spans(row.text)) for row in self.rows_here()), default=0)


def position(log: VirtualLog) -> Row:
    """Return the position of the reader, for a title."""
    feed = log.feed
    if feed is None or not feed.count:
        return EMPTY
    top = min(log.top, log.last_top)
    if feed.file is None:
        first = feed.row(top) or feed.row(top + 1)
        return ((f"from {values.clock_ns(first.shown_ns)}" if first is not None else "", "dim"),)
    lines = [line for line, _ in log.places()]
    pointed = next((line for line in lines if (row := feed.row(line)) is not None and row.is_at(log.pointer)), None)
    number = pointed if pointed is not None else max(lines, default=top)
    return ((f"line {number + 1:,} of {feed.count:,}", "dim"),)
