"""The base of all widgets: lines from a function, drawn only where they changed, with a scroll position in whole lines.

In: `line_count()` and `line_at(index)` of a subclass. Out: strips; cost depends on the lines on screen alone.

It does not build on Textual's ScrollView: there every growth of the content lays the screen out again and paints twice.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

from rich.segment import Segment
from textual.geometry import Offset, Region
from textual.screen import Screen, ScreenResultType
from textual.strip import Strip
from textual.widget import Widget

from supervisor.tui.rows.spans import EMPTY, Row, Span, clean, fit, fit_row, row_width, width_of
from supervisor.tui.shell import shell_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from rich.style import Style
    from textual import events
    from textual.selection import Selection

    from supervisor.tui.looks import Glyphs
    from supervisor.tui.rows.spans import Palette

# Strips kept per widget: several screens. One takes 1 to 3 kB.
STRIP_CACHE = 1000
WHEEL_LINES = 3
# The least width of a heading beside its note, cells.
HEADING = 24


class Drawn(NamedTuple):
    """One line as it is on the screen: equal values need no painting."""

    row: Row
    overlay: str
    edge: Span


class _Line(Strip):
    """A strip that does not refer to itself as its only part: such cycles wait for the garbage collector.

    With 512 ranks, that would stop the screen for 10 ms or more every second.
    """

    __slots__ = ()

    def divide(self, cuts: Iterable[int]) -> Sequence[Strip]:
        """Cut at these cells."""
        cuts = list(cuts)
        return (self,) if cuts == [self.cell_length] else super().divide(cuts)


class LineView(Widget, can_focus=True):
    """Lines under an optional title rule."""

    DEFAULT_CSS = "LineView { height: 1fr; width: 1fr; }"

    def __init__(self, *, title: str = "", id: str | None = None, classes: str | None = None) -> None:  # noqa: A002
        super().__init__(id=id, classes=classes)
        self.top = 0
        self.heading = title
        self.note: Row = EMPTY
        """Right part of the title rule."""
        self._rows: Sequence[Row] = ()
        """All lines, unless a view makes each one when it is drawn."""
        self._lines: list[Drawn] = []
        self._base: Style | None = None
        self._strips: OrderedDict[tuple[Drawn, int], Strip] = OrderedDict()
        self._selection: Selection | None = None
        self._make: Callable[[], None] = self.redraw

    @property
    def palette(self) -> Palette:
        """The colours of the theme."""
        return shell_of(self.app).palette

    @property
    def glyphs(self) -> Glyphs:
        """The drawing characters."""
        return shell_of(self.app).glyphs

    @property
    def body_height(self) -> int:
        """Lines that fit below the title."""
        return max(0, self.size.height - bool(self.heading))

    @property
    def line_width(self) -> int:
        """Cells of a line: the last one is the scroll bar's."""
        return max(0, self.size.width - 1)

    @property
    def last_top(self) -> int:
        """The scroll position at the end."""
        return max(0, self.line_count() - self.body_height)

    def line_count(self) -> int:
        """Return how many lines there are."""
        return len(self._rows)

    def line_at(self, index: int) -> tuple[Row, str]:
        """Return one line, and the role laid over it."""
        return self._rows[index], ""

    def scroll_to_line(self, top: int) -> None:
        """Show the lines from `top` on, as far as there are any."""
        self.top = max(0, min(top, self.last_top))
        self.redraw()

    def redraw(self) -> None:
        """Compute every visible line, and paint those that changed."""
        size = self.size
        if not self.is_attached or not size:
            return
        fresh = self._draw_all()
        old = self._lines
        self._lines = fresh
        if len(old) != len(fresh):
            self.refresh()
            return
        changed = [y for y, (before, now) in enumerate(zip(old, fresh, strict=False)) if before != now]
        if len(changed) * 2 > len(fresh):
            self.refresh()
        elif changed:
            self.refresh(*(Region(0, y, size.width, 1) for y in changed))

    def restyle(self) -> None:
        """Forget all strips: the theme has changed."""
        self._strips.clear()
        self._base = None
        self.refresh()

    def notify_style_update(self) -> None:
        """Forget all strips: the style sheet has changed."""
        super().notify_style_update()
        self._strips.clear()
        self._base = None

    def _draw_all(self) -> list[Drawn]:
        height = self.body_height
        self._stay_inside()
        lines = [Drawn(row, "", ("", "")) for row in self._title_lines()][: self.size.height]
        body = self._body()
        body += [(EMPTY, "")] * (height - len(body))
        edges = self._edges(height)
        lines += [Drawn(row, overlay, edge) for (row, overlay), edge in zip(body, edges, strict=True)]
        return lines

    def _stay_inside(self) -> None:
        """Keep the position inside the lines."""
        self.top = max(0, min(self.top, self.last_top))

    def _body(self) -> list[tuple[Row, str]]:
        """Return what is in view, from the top."""
        return [self.line_at(at) for at in range(self.top, min(self.top + self.body_height, self.line_count()))]

    def _extent(self) -> tuple[int, int, int]:
        """Return for the scroll bar the number of lines above the view, above the last possible view, and in all."""
        return self.top, self.last_top, self.line_count()

    def _edges(self, height: int) -> list[Span]:
        above, last, total = self._extent()
        if total <= height or not height:
            return [(" ", "")] * height
        size = max(1, round(height * height / total))
        start = round((height - size) * min(1.0, above / max(1, last)))
        inside = range(start, start + size)
        return [(self.glyphs.thumb, "dim") if y in inside else (self.glyphs.bar, "rule") for y in range(height)]

    def _title_lines(self) -> list[Row]:
        return [self._title_row()] if self.heading else []

    def _title_row(self) -> Row:
        width = self.size.width
        rule = self.glyphs.rule
        heading = clean(self.heading)
        shorter = width - row_width(self.note) - 7
        if HEADING <= shorter < width_of(heading):
            heading = fit(heading, shorter, self.glyphs.more)
        name: list[Span] = [
            (rule + " ", "rule"),
            (heading, "accent" if self.has_focus else "head"),
            (" ", ""),
        ]
        room = width - row_width(name) - 1
        note = self.note if row_width(self.note) + 3 <= room else EMPTY
        tail: list[Span] = [(" ", ""), *note, (" ", "")] if note else []
        fill = max(0, room - row_width(tail))
        return fit_row((*name, (rule * fill, "rule"), *tail, (rule, "rule")), width)

    def render_lines(self, crop: Region) -> list[Strip]:
        """Return lines of a part of the widget, styled."""
        strips = super().render_lines(crop)
        for strip in strips:
            strip.__class__ = _Line
        return strips

    # --- text selected with the mouse, by cells of the widget

    def text_select_all(self) -> None:
        """Select nothing: a double click opens a line."""

    def selection_updated(self, selection: Selection | None) -> None:
        """Show what is selected."""
        self._selection = selection
        self.refresh()

    def get_selection(self, selection: Selection) -> tuple[str, str]:
        """Return the selected text, and what ends it."""
        lines: list[str] = []
        for y in range(self.size.height):
            strip, cells = self._strip_at(y), self._selected_cells(selection, y)
            if cells is not None:
                lines.append(strip.crop(*cells).text.rstrip())
        return "\n".join(lines).rstrip("\n"), "\n"

    def _selected_cells(self, selection: Selection, y: int) -> tuple[int, int] | None:
        """Return from and to which cell a line is selected; titles and the scroll bar are no text."""
        span = selection.get_span(y) if y >= self.size.height - self.body_height else None
        if span is None:
            return None
        start, end = span
        width = self.size.width - bool(self._lines[y].edge[0])
        return min(start, width), width if end < 0 else max(start, min(end, width))

    def render_line(self, y: int) -> Strip:
        """Return one line of the widget, with what is selected."""
        strip = self._strip_at(y)
        cells = self._selected_cells(self._selection, y) if self._selection is not None else None
        if cells is None:
            return strip
        start, end = cells
        marked = Segment.apply_style(strip.crop(start, end), post_style=self.palette.style("hit"))
        return Strip.join([strip.crop(0, start), Strip(marked), strip.crop(end)])

    def _strip_at(self, y: int) -> Strip:
        """Return one line of the widget, cached."""
        width, height = self.size
        if len(self._lines) != height:
            self._lines = self._draw_all()
        if y >= len(self._lines) or not width:
            return Strip.blank(width)
        drawn = self._lines[y]
        key = (drawn, width)
        strip = self._strips.get(key)
        if strip is None:
            strip = self._strip(drawn, width)
            self._strips[key] = strip
            if len(self._strips) > STRIP_CACHE:
                self._strips.popitem(last=False)
        else:
            self._strips.move_to_end(key)
        return strip

    def _strip(self, drawn: Drawn, width: int) -> Strip:
        palette, more = self.palette, self.glyphs.more
        base = self._base = self._base or self.rich_style
        room = width - bool(drawn.edge[0])
        segments = palette.segments(drawn.row, room, base, drawn.overlay, more)
        if room < width:
            segments += palette.segments((drawn.edge,), 1, base)
        return Strip(segments, width)

    def on_mount(self) -> None:
        """Redraw on a new theme."""
        self.app.theme_changed_signal.subscribe(self, lambda theme: self.restyle())

    def show_made(self, make: Callable[[], None]) -> None:
        """Show what a function makes for the present size, now and whenever the size has changed."""
        self._make = make
        make()

    def on_resize(self) -> None:
        """Fill the new size."""
        self._make()

    def watch_has_focus(self, has_focus: bool) -> None:
        """Show the focus in the title and on the selected row."""
        super().watch_has_focus(has_focus)
        self.redraw()

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        """Scroll with the wheel."""
        event.stop()
        self.scroll_lines(WHEEL_LINES)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        """Scroll with the wheel."""
        event.stop()
        self.scroll_lines(-WHEEL_LINES)

    def scroll_lines(self, delta: int) -> None:
        """Move the view by some lines."""
        self.scroll_to_line(self.top + delta)


class CellSelection(Screen[ScreenResultType], inherit_bindings=False):
    """A screen on which the text of line views is selected by their cells.

    Textual looks for the place of each piece of text in its style; every line would have to be made anew for that.
    """

    def get_widget_and_offset_at(self, x: int, y: int) -> tuple[Widget | None, Offset | None]:
        """Return the widget at a cell of the screen, and the cell of it."""
        widget, offset = super().get_widget_and_offset_at(x, y)
        return widget, Offset(x, y) - widget.region.offset if isinstance(widget, LineView) else offset
