"""Which log is shown: of a rank, a node or all, which streams, which generation, folded or not.

In: what the user chooses, the newest snapshot. Out: a feed in the view, and the line of it that is being read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from textual import on

from supervisor.session.filters import ALL as ALL_RECORDS
from supervisor.session.logs import Selection, clock_error_ms
from supervisor.tui.cells import clean, width_of
from supervisor.tui.logs.feeds import RankFeed
from supervisor.tui.logs.folded import FoldedFeed
from supervisor.tui.logs.merged import LATEST_NS, MergedFeed
from supervisor.tui.rows import fit_parts
from supervisor.tui.screens.base import LiveScreen, Target
from supervisor.tui.widgets.lines import HEADING
from supervisor.tui.widgets.virtual_log import VirtualLog, position

if TYPE_CHECKING:
    from supervisor.session.filters import Filter
    from supervisor.tui.cells import Row
    from supervisor.tui.incident_rows import Place
    from supervisor.tui.logs.log_row import Key, LogRow
    from supervisor.tui.model import Snapshot

BOTH: Final[tuple[str, ...]] = ("stdout", "stderr")
ALL: Final[tuple[str, ...]] = (*BOTH, "nccl")
STREAMS: Final[tuple[tuple[str, ...], ...]] = (BOTH, ("stdout",), ("stderr",), ("nccl",), ALL)
# Every frame of a merged view asks all nodes.
MERGED_EVERY_S: Final = 0.25


class ShownLog(LiveScreen):
    """A screen that shows one log."""

    filter: Filter = ALL_RECORDS
    """Which of its records are shown."""

    def on_mount(self) -> None:
        """Begin with all ranks."""
        self.target = Target()
        self.streams = BOTH
        self.generation: int | None = None
        self.folded = self.tui.memory.log_fold
        self.log_view.show_time = self.tui.memory.log_time
        self.log_view.wrap = self.tui.memory.log_wrap
        self._turns = self.tui.turns

    # --- what is shown

    @property
    def log_view(self) -> VirtualLog:
        """The log."""
        return self.query_one(VirtualLog)

    def open_target(self, target: Target, generation: int | None = None, streams: tuple[str, ...] = BOTH) -> None:
        """Show the log of a rank, a node, or all."""
        self._show_target(target, generation, streams)

    def _show_target(self, target: Target, generation: int | None = None, streams: tuple[str, ...] = BOTH) -> None:
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
        one_file = len(self.streams) == 1 and (one_file or self.streams != ("nccl",))
        if rank is not None and node and one_file and not self.filter:
            newest = self.tui.snapshot.generation or 0
            generation = newest if self.generation is None else self.generation
            feed = RankFeed(self.tui.source, node, generation, rank, self.streams[0])
            log.show_source = False
        else:
            lines = self.filter
            feed = self.tui.merged_feed(self.target, self.generation, self.streams, lines=lines, folded=self.folded)
            log.show_source = True
        log.set_pace(MERGED_EVERY_S if isinstance(feed, MergedFeed) else 0.0)
        log.open(feed)
        self.tui.look_again()
        return feed

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
        line = None if self.log_view.follow else self._line_read()
        self._open()
        if line is not None:
            self.log_view.jump_to_key(*line)

    # --- what is said of it

    @on(VirtualLog.Changed)
    def _title(self) -> None:
        log = self.log_view
        log.heading = "log of " + self.scope_text()
        room = self.size.width - min(HEADING, width_of(log.heading)) - 7
        log.note = fit_parts([part for part in self._parts(log, room) if part[1]], room, log.glyphs.more)
        log.redraw()

    def _parts(self, log: VirtualLog, room: int) -> list[tuple[int, Row]]:
        """How the view stands in so many cells; where not all fits, the lowest number goes first: it is seen anyway."""
        parts: list[tuple[int, Row]] = []
        if log.problem and log.feed is not None and log.feed.count:
            parts.append((4, ((clean(log.problem), "warn"),)))
        if log.absent_text:
            parts.append((3, ((clean(log.absent_text), "warn"),)))
        if log.left and not log.wrap:
            parts.append((1, ((f"column {log.left}", "dim"),)))
        parts.append((0, self._clocks(log)))
        if log.follow:
            parts.append((5, ((" following ", "pill"),)))
        else:
            parts.append((2, position(log)))
        if log.unseen:
            parts.append((5, ((f" {log.unseen_text} ", "pill"),)))
        return parts

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

    def _selection(self) -> Selection:
        feed = self.log_view.feed
        if isinstance(feed, RankFeed):
            # All lines of the file: NCCL's, too.
            streams = tuple({feed.stream: 0, "nccl": 0})
            return Selection(generation=feed.generation, ranks=[feed.rank], streams=streams, nodes=[feed.node])
        return self.tui.merged_feed(self.target, self.generation, self.streams, lines=self.filter).selection

    def selection(self) -> Target:
        """Whose log this is."""
        return self.target

    # --- keys that choose

    def action_scope(self) -> None:
        """This rank, its node, all, and back."""
        node, rank = self.target.node, self.target.rank
        if rank is not None:
            self._last_rank = Target(node, rank)
            self._show_target(Target(node))
        elif node:
            self._show_target(Target())
        else:
            first = next(iter(self.tui.snapshot.ranks), None)
            back = getattr(self, "_last_rank", Target(first.node, first.rank) if first else Target())
            self._show_target(back)

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
        line = None if log.follow else self._line_read()
        self.folded = self.tui.memory.log_fold = not self.folded
        self._open()
        if line is not None:
            log.jump_to_key(*line)

    # --- what is read of it

    def _row_read(self) -> LogRow | None:
        """The line that a jump has led to, else the last one while following, else the first one."""
        log, here = self.log_view, self.log_view.rows_here()
        other = (here[-1] if log.follow else here[0]) if here else None
        return next((row for row in here if row.is_at(log.pointer)), other)

    def _line_read(self) -> tuple[int, Key | None]:
        """Time and key of the line that is read, or was gone to where its neighbour stands for it, or nothing."""
        row, meant = self._row_read(), self.log_view.meant
        if row is None:
            return meant or (LATEST_NS, None)
        return meant if meant is not None and row.is_at(self.log_view.pointer) else (row.t_ns, row.key)

    def _time_read(self) -> int | None:
        """When the first line on the screen came; None while it follows."""
        first = next(iter(self.log_view.rows_here()), None)
        return first.t_ns if first is not None and not self.log_view.follow else None
