"""The log of a rank, of a node, or of all ranks by time.

In: the session's windows. Out: what the user reads; nothing of it moves unless he moves it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from textual import on
from textual.containers import Horizontal
from textual.widgets import Input, Static

from supervisor.session.logs import Selection, clock_error_ms
from supervisor.tui import ansi, words
from supervisor.tui.cells import clean, fit_row, row_width, width_of
from supervisor.tui.feeds import MergedFeed, RankFeed
from supervisor.tui.finder import Finder
from supervisor.tui.folded import FoldedFeed
from supervisor.tui.rows import name_width
from supervisor.tui.screens.base import LiveScreen, Target
from supervisor.tui.screens.dialogs import TextDialog
from supervisor.tui.widgets.lines import HEADING
from supervisor.tui.widgets.virtual_log import VirtualLog, position

if TYPE_CHECKING:
    from textual.widget import Widget

    from supervisor.tui.cells import Row, Span
    from supervisor.tui.feeds import LogRow
    from supervisor.tui.incident_rows import Place
    from supervisor.tui.model import Snapshot

BOTH: Final[tuple[str, ...]] = ("stdout", "stderr")
ALL: Final[tuple[str, ...]] = (*BOTH, "nccl")
STREAMS: Final[tuple[tuple[str, ...], ...]] = (BOTH, ("stdout",), ("stderr",), ("nccl",), ALL)
# Every frame of a merged view asks all nodes.
MERGED_EVERY_S: Final = 0.25
# Enough for all ranks of hundreds but one.
FOLD_WIDTH: Final = len("[0-36,38-511]~")


class FindInput(Input):
    """Where the pattern is typed."""

    BINDINGS = [("escape", "app.close_find", "back")]


class LogsScreen(LiveScreen):
    """One log view."""

    NAME = "logs"
    AUTO_FOCUS = "#log"

    def body(self) -> Iterable[Widget]:
        """The log, and a line to type in."""
        yield VirtualLog(title="log", id="log")
        with Horizontal(id="find") as find:
            find.display = False
            yield Static("/", id="slash")
            field = FindInput(id="pattern", compact=True, placeholder="text or regular expression")
            field.cursor_blink = False
            yield field

    def on_mount(self) -> None:
        """Begin with all ranks."""
        self.target = Target()
        self.streams = BOTH
        self.generation: int | None = None
        self.finder: Finder | None = None
        self.folded = self.tui.memory.log_fold
        self.log_view.show_time = self.tui.memory.log_time
        self._turns = self.tui.turns

    # --- what is shown

    @property
    def log_view(self) -> VirtualLog:
        """The log."""
        return self.query_one(VirtualLog)

    def open_target(self, target: Target, generation: int | None = None, streams: tuple[str, ...] = BOTH) -> None:
        """Show the log of a rank, a node, or all."""
        self.target = target
        self.generation = generation
        self.streams = streams
        self._open()

    def open_place(self, place: Place) -> None:
        """Show one line of one stream."""
        self.target = Target(place.node, place.rank)
        self.generation = place.generation
        self.streams = (place.stream,)
        feed = self._open(one_file=True)
        line = place.line - 1
        if isinstance(feed, RankFeed):
            key = (feed.generation, feed.rank, feed.stream, line)
            self.log_view.jump(feed.index_of(key), key)

    def _open(self, *, one_file: bool = False) -> MergedFeed | RankFeed:
        log = self.log_view
        node, rank = self.target.node, self.target.rank
        feed: MergedFeed | RankFeed
        # Lines of NCCL may stand in any file.
        if rank is not None and node and len(self.streams) == 1 and (one_file or self.streams != ("nccl",)):
            newest = self.tui.snapshot.generation or 0
            generation = newest if self.generation is None else self.generation
            feed = RankFeed(self.tui.source, node, generation, rank, self.streams[0])
            log.show_source = False
        else:
            feed = self.tui.merged_feed(self.target, self.generation, self.streams, folded=self.folded)
            log.show_source = True
        log.set_pace(MERGED_EVERY_S if isinstance(feed, MergedFeed) else 0.0)
        log.pattern, self.finder = None, None
        log.open(feed)
        self.tui.look_again()
        return feed

    def show(self, snapshot: Snapshot) -> None:
        """Keep the title right; the text looks after itself."""
        log = self.log_view
        if log.feed is None:
            self.open_target(self.target)
        self._keep_up(snapshot)
        width = name_width(snapshot.nodes) + 2 + len(str(max(1, len(snapshot.ranks) - 1)))
        log.source_width = max(width, FOLD_WIDTH) if self.folded else width
        self._title()

    def _keep_up(self, snapshot: Snapshot) -> None:
        """Go with a rank into the next generation, and to another node; what is being read stays."""
        feed = self.log_view.feed
        if self.generation is not None or self.target.rank is None:
            return
        if isinstance(feed, RankFeed) and not self.log_view.follow:
            return
        row = snapshot.rank(self.target.rank)
        if row is not None:
            self.target = Target(row.node, row.rank)
        newest = snapshot.generation
        if isinstance(feed, RankFeed) and newest is not None and newest > feed.generation:
            self._open()

    def _reread(self) -> None:
        """Read anew: the time of a recording was put back. The line that is being read stays, if it is there yet."""
        self._turns = self.tui.turns
        row = None if self.log_view.follow else self._row_read()
        feed = self._open()
        if row is not None and isinstance(feed, RankFeed):
            self.log_view.jump(row.line, row.key)
        elif row is not None:
            self.log_view.jump_to_time(row.t_ns, row.key)

    def tick(self, snapshot: Snapshot, age_s: float, changed: bool) -> None:
        """Let the log move."""
        super().tick(snapshot, age_s, changed)
        if self._turns != self.tui.turns:
            self._reread()
        self.log_view.tick()

    def tick_paused(self, snapshot: Snapshot, age_s: float, changed: bool) -> None:
        """A log is stopped by not following it; what one scrolls to has to come."""
        self.tick(snapshot, age_s, changed)

    @on(VirtualLog.Changed)
    def _title(self) -> None:
        log = self.log_view
        log.heading = "log of " + self.scope_text()
        log.note = self._note(log, self.size.width - min(HEADING, width_of(log.heading)) - 7)
        log.redraw()

    def _note(self, log: VirtualLog, room: int) -> Row:
        """How the view stands; where it does not fit, what can be seen anyway goes first."""
        parts: list[tuple[int, Row]] = []
        if self.finder is not None:
            parts.append((3, ((clean(self.finder.said()), "bad" if self.finder.problem else "mark"),)))
        if log.problem and log.feed is not None and log.feed.count:
            parts.append((4, ((clean(log.problem), "warn"),)))
        if log.absent_text:
            parts.append((3, ((clean(log.absent_text), "warn"),)))
        if log.left:
            parts.append((1, ((f"column {log.left}", "dim"),)))
        parts.append((0, self._clocks(log)))
        if log.follow:
            parts.append((5, ((" following ", "pill"),)))
        else:
            parts.append((2, position(log)))
        if log.unseen:
            parts.append((5, ((f" {log.unseen_text} ", "pill"),)))
        parts = [part for part in parts if part[1]]
        while len(parts) > 1 and sum(row_width(row) + 3 for _, row in parts) - 3 > room:
            parts.remove(min(parts, key=lambda part: part[0]))
        spans: list[Span] = []
        for _, row in parts:
            spans += [("   " if spans else "", ""), *row]
        return tuple(spans) if row_width(spans) <= room else fit_row(spans, max(0, room), log.glyphs.more)

    def _clocks(self, log: VirtualLog) -> Row:
        """How far the order of lines of different nodes can be trusted."""
        if not isinstance(log.feed, MergedFeed) or log.feed.selection.ranks is not None:
            return ()
        within_ms = clock_error_ms(self.tui.source.status, log.feed.selection.nodes)
        return () if within_ms is None else ((f"clocks within {within_ms:.1f} ms", "dim"),)

    def scope_text(self) -> str:
        """What is shown, in words."""
        node, rank = self.target.node, self.target.rank
        who = f"rank {rank} on {node}" if rank is not None else f"node {node}" if node else "all ranks"
        which = f", generation {self.generation}" if self.generation is not None else ""
        feed = self.log_view.feed
        how = ", folded" if isinstance(feed, FoldedFeed) else ""
        how += ", without NCCL's lines" if isinstance(feed, MergedFeed) and feed.apart else ""
        return clean(f"{who}, {'+'.join(self.streams)}{which}{how}")

    def selection(self) -> Target:
        """Whose log this is."""
        return self.target

    # --- keys

    def action_follow(self) -> None:
        """Follow, or stop following."""
        self.log_view.set_follow(not self.log_view.follow)

    def action_scope(self) -> None:
        """This rank, its node, all, and back."""
        node, rank = self.target.node, self.target.rank
        if rank is not None:
            self._last_rank = Target(node, rank)
            self.open_target(Target(node))
        elif node:
            self.open_target(Target())
        else:
            first = next(iter(self.tui.snapshot.ranks), None)
            back = getattr(self, "_last_rank", Target(first.node, first.rank) if first else Target())
            self.open_target(back)

    def action_stream(self) -> None:
        """The next choice of streams."""
        at = STREAMS.index(self.streams) if self.streams in STREAMS else 0
        self.streams = STREAMS[(at + 1) % len(STREAMS)]
        self._open()

    def action_rank(self, step: int) -> None:
        """The log of the next or previous rank."""
        ranks = self.tui.snapshot.ranks
        if not ranks:
            return
        numbers = [row.rank for row in ranks]
        at = numbers.index(self.target.rank) if self.target.rank in numbers else -1 if step > 0 else 0
        row = ranks[(at + step) % len(ranks)]
        streams = self.streams
        self.target = Target(row.node, row.rank)
        self.streams = streams
        self._open()

    def action_generation(self, step: int) -> None:
        """The log of the generation before or after."""
        newest = self.tui.snapshot.generation or 0
        now = newest if self.generation is None else self.generation
        wanted = max(0, now + step) if self.generation is not None or step < 0 else None
        self.generation = None if wanted is None or wanted > newest else wanted
        self._open()

    def action_fold(self) -> None:
        """Lines that are alike once, or all of them; the time that is read stays."""
        log = self.log_view
        if isinstance(log.feed, RankFeed):
            self.tui.say("one stream of one rank has nothing to fold; M widens the scope")
            return
        row = None if log.follow else self._row_read()
        self.folded = self.tui.memory.log_fold = not self.folded
        self._open()
        if row is not None:
            log.jump_to_time(row.t_ns, row.key)

    def _rows(self) -> list[LogRow]:
        """What is on the screen and here."""
        log = self.log_view
        rows = (log.feed.row(log.top + y) for y in range(log.body_height)) if log.feed is not None else ()
        return [row for row in rows if row is not None]

    def _row_read(self) -> LogRow | None:
        """The line that a jump has led to, else the last one while following, else the first one."""
        log, here = self.log_view, self._rows()
        other = (here[-1] if log.follow else here[0]) if here else None
        return next((row for row in here if row.is_at(log.pointer)), other)

    def _time_read(self) -> int | None:
        """When the first line on the screen came; None while it follows."""
        first = next(iter(self._rows()), None)
        return first.t_ns if first is not None and not self.log_view.follow else None

    def copied(self) -> str:
        """The whole line that a jump has led to, else the first one on the screen."""
        row = self._row_read()
        return ansi.plain(row.raw) if row is not None else ""

    def action_time(self) -> None:
        """Times on and off."""
        self.log_view.show_time = self.tui.memory.log_time = not self.log_view.show_time
        self.log_view.redraw()

    def action_source(self) -> None:
        """Node and rank on and off."""
        self.log_view.show_source = not self.log_view.show_source
        self.log_view.redraw()

    def action_detail(self) -> None:
        """The whole line that a jump has led to, else the first one on the screen."""
        row = self._row_read()
        if row is not None and row.fold is not None:
            lines = (f"{each.node} r{each.rank}  {ansi.plain(each.raw)}" for each in row.fold.rows)
            title = f"{words.count(len(row.fold.records), 'rank')} alike  {words.clock_ns(row.t_ns)}"
            self.tui.push_screen(TextDialog(title, "\n".join(lines)))
        elif row is not None:
            title = f"{row.node} rank {row.rank}  {row.stream} line {row.line + 1}  {words.clock_ns(row.t_ns)}"
            self.tui.push_screen(TextDialog(title, ansi.plain(row.raw)))

    # --- search

    def action_find(self) -> None:
        """Ask for a pattern."""
        self.query_one("#find").display = True
        self.query_one("#pattern", Input).focus()

    def close_find(self) -> None:
        """Back to the log."""
        self.query_one("#find").display = False
        self.log_view.focus()

    def action_back(self) -> None:
        """End a search first; then go back."""
        if self.finder is not None:
            self.finder, self.log_view.pattern = None, None
            self.workers.cancel_group(self, "find")
            self._title()
        else:
            super().action_back()

    @on(Input.Submitted, "#pattern")
    def _find(self, event: Input.Submitted) -> None:
        self.close_find()
        if event.value:
            self._search(event.value, None)

    def action_errors(self) -> None:
        """Search for what the agents take for errors."""
        self._search("", "error")

    def _search(self, text: str, level: str | None) -> None:
        try:
            feed = self.log_view.feed
            only = feed.stream if isinstance(feed, RankFeed) else None
            finder = Finder(self.tui.source, self._selection(), text, level, only)
        except ValueError as error:
            self.tui.say(str(error), level="error")
            return
        self.finder = finder
        self.log_view.pattern = finder.pattern
        around = self.log_view.body_height if type(feed) is MergedFeed else 0
        work = functools.partial(finder.run, lambda: self._found(finder), around, self._time_read())
        # A coroutine would be left behind where the next search comes before it begins.
        self.run_worker(work, group="find", exclusive=True)  # type: ignore[arg-type]
        self._title()

    def _selection(self) -> Selection:
        feed = self.log_view.feed
        if isinstance(feed, RankFeed):
            # All lines of the file: NCCL's, too.
            streams = tuple({feed.stream: 0, "nccl": 0})
            return Selection(generation=feed.generation, ranks=[feed.rank], streams=streams, nodes=[feed.node])
        return self.tui.merged_feed(self.target, self.generation, self.streams).selection

    def _found(self, finder: Finder) -> None:
        # The last word of a search may come while the application closes.
        if finder is not self.finder or not self.tui.is_running:
            return
        if finder.current < 0 and (finder.hits and not finder.running):
            self.action_hit(1)
        self._title()

    def action_hit(self, direction: int) -> None:
        """Go to the next or previous hit."""
        log, finder = self.log_view, self.finder
        feed = log.feed
        if finder is None or feed is None:
            return
        hit = finder.step(direction, self._time_read())
        if hit is None:
            return
        t_ns, key = hit
        if isinstance(feed, RankFeed):
            log.jump(feed.index_of(key), key)
        else:
            log.jump_to_time(t_ns, key, finder.pages(key))
        self._title()
