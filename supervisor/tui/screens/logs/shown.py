"""Which log is shown: ranks, streams, generation, filter, folded or not.

In: keys, the newest job view. Out: a feed in the view, the line that is read, the heading.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Final

from supervisor.logs.rows import clock_error_ms
from supervisor.logs.selection import RecordFilter, Selection
from supervisor.tui.logs.feed import BOTH, LATEST_NS, LogFeed
from supervisor.tui.logs.folded import FoldedFeed
from supervisor.tui.rows.spans import clean
from supervisor.tui.shell import Target
from supervisor.tui.widgets.virtual_log import position

if TYPE_CHECKING:
    from collections.abc import Callable

    from supervisor.logs.rows import LineKey, LogLine
    from supervisor.tui.model import JobView
    from supervisor.tui.rows.incident import LogPlace
    from supervisor.tui.rows.spans import Row
    from supervisor.tui.shell import Shell
    from supervisor.tui.widgets.virtual_log import VirtualLog

ALL: Final[tuple[str, ...]] = (*BOTH, "nccl")
STREAMS: Final[tuple[tuple[str, ...], ...]] = (BOTH, ("stdout",), ("stderr",), ("nccl",), ALL)


class ShownLog:
    """The log in the view; `opened` is called after another one was opened."""

    def __init__(self, shell: Shell, view: VirtualLog, opened: Callable[[], None]) -> None:
        self.view = view
        self.target = Target()
        self.streams = BOTH
        self.generation: int | None = None
        """The generation; None: the newest one."""
        self.folded = shell.preferences.log_fold
        self.filter = shell.preferences.log_filter
        self._shell = shell
        self._opened = opened
        self._last_rank: Target | None = None

    # --- opening

    def open_target(self, target: Target, generation: int | None = None, streams: tuple[str, ...] = BOTH) -> None:
        """Show the log of a rank, a node or all ranks."""
        self.target, self.generation, self.streams = target, generation, streams
        self._open()

    def open_place(self, place: LogPlace) -> None:
        """Show one line of one file, among those of its stream."""
        self.target = Target(place.node, place.rank)
        self.generation, self.streams = place.generation, (place.line_stream,)
        self._open()
        self.view.jump_to_key(LATEST_NS, (place.generation, place.rank, place.stream, place.line - 1))

    def use_filter(self, chosen: RecordFilter) -> None:
        """Use a filter for the next log that is opened."""
        self.filter = chosen

    def open_filtered(self, chosen: RecordFilter, key: LineKey | None) -> None:
        """Show what a filter passes; without a filter, show the generation of the line that is read."""
        self.filter = chosen
        feed = self._open()
        if key is not None and feed.selection.file is not None and key[0] != feed.selection.generation:
            self.generation = key[0]
            self._open()

    def _open(self) -> LogFeed:
        node, rank, newest = self.target.node, self.target.rank, self._shell.job_view.generation or 0
        nodes, ranks = [node] if node else None, None if rank is None else [rank]
        generation = newest if self.generation is None else self.generation
        selection = Selection(generation, ranks, self.streams, nodes, self.filter)
        if selection.file is None:
            # A rank may have moved between nodes.
            which, nodes = "all" if self.generation is None else self.generation, nodes if rank is None else None
            selection = dataclasses.replace(selection, generation=which, nodes=nodes)
        feed = (FoldedFeed if self.folded and selection.file is None else LogFeed)(self._shell.source, selection)
        self.view.show_source = selection.file is None
        self.view.open(feed)
        self._shell.look_again()
        self._opened()
        return feed

    def keep_up(self, job_view: JobView) -> None:
        """Follow a rank to another node and into the next generation, unless its log is being read."""
        feed = self.view.feed
        if feed is None:
            self.open_target(self.target)
        elif self.generation is None and self.target.rank is not None and (not feed.selection.file or self.view.follow):
            row, newest = job_view.rank(self.target.rank), job_view.generation
            if row is not None:
                self.target = Target(row.node, row.rank)
            file = feed.selection.file
            if file is not None and newest is not None and newest > file.generation:
                self._open()

    def _open_at_line(self) -> None:
        line = None if self.view.follow else self.place_read()
        self._open()
        if line is not None:
            self.view.jump_to_key(*line)

    # --- what the title says

    def heading(self) -> str:
        """Return the scope of the log in words."""
        node, rank, feed = self.target.node, self.target.rank, self.view.feed
        who = f"rank {rank} on {node}" if rank is not None else f"node {node}" if node else "all ranks"
        text = f"log of {who}, {'+'.join(self.streams)}"
        if self.generation is not None:
            text += f", generation {self.generation}"
        if feed is not None:
            text += (", folded" if feed.is_folded else "") + (", without NCCL's lines" if feed.hides_nccl else "")
        return clean(text)

    def title_parts(self) -> list[tuple[int, Row]]:
        """Return the parts of the view's state with their priority: the lowest is dropped first if there is no room."""
        view = self.view
        parts: list[tuple[int, Row]] = []
        if view.problem and view.feed is not None and view.feed.count:
            parts.append((4, ((clean(view.problem), "warn"),)))
        if view.absent_text:
            parts.append((3, ((clean(view.absent_text), "warn"),)))
        if view.left and not view.wrap:
            parts.append((1, ((f"column {view.left}", "dim"),)))
        parts.append((0, self._clock_error()))
        parts.append((5, ((" following ", "pill"),)) if view.follow else (2, position(view)))
        if view.new_lines_text:
            parts.append((5, ((f" {view.new_lines_text} ", "pill"),)))
        return parts

    def _clock_error(self) -> Row:
        """Return how well the clocks agree by which lines of several nodes are sorted."""
        feed = self.view.feed
        if feed is None or feed.selection.ranks is not None:
            return ()
        within_ms = clock_error_ms(self._shell.source.status, feed.selection.nodes)
        return () if within_ms is None else ((f"clocks within {within_ms:.1f} ms", "dim"),)

    # --- keys

    def action_scope(self) -> None:
        """Show the log of this rank, its node, all ranks, and the rank again."""
        node, rank = self.target.node, self.target.rank
        if rank is not None:
            self._last_rank = self.target
            self.open_target(Target(node))
        elif node:
            self.open_target(Target())
        else:
            first = next(iter(self._shell.job_view.ranks), None)
            self.open_target(self._last_rank or (Target(first.node, first.rank) if first else Target()))

    def action_stream(self) -> None:
        """Show the next choice of streams."""
        at = STREAMS.index(self.streams) if self.streams in STREAMS else 0
        self.streams = STREAMS[(at + 1) % len(STREAMS)]
        self._open()

    def action_rank(self, step: int) -> None:
        """Show the log of the next or previous rank."""
        ranks = self._shell.job_view.ranks
        if ranks:
            numbers = [row.rank for row in ranks]
            at = numbers.index(self.target.rank) if self.target.rank in numbers else -1 if step > 0 else 0
            row = ranks[(at + step) % len(ranks)]
            self.target = Target(row.node, row.rank)
            self._open()

    def action_generation(self, step: int) -> None:
        """Show the log of the next or previous generation."""
        newest = self._shell.job_view.generation or 0
        now = newest if self.generation is None else self.generation
        wanted = max(0, now + step) if self.generation is not None or step < 0 else None
        self.generation = None if wanted is None or wanted > newest else wanted
        self._open()

    def action_fold(self) -> None:
        """Collapse identical lines, or show all; the line that is read stays."""
        if self.view.feed is not None and self.view.feed.selection.file is not None:
            self._shell.say("one stream of one rank has nothing to fold; M widens the scope")
            return
        self.folded = self._shell.preferences.log_fold = not self.folded
        self._open_at_line()

    # --- the line that is read

    def line_read(self) -> tuple[int, LogLine] | None:
        """Return the line to which a jump led; otherwise the last line while following, or the first one in view.

        With its index.
        """
        here = [*self.view.lines_here().items()]
        other = (here[-1] if self.view.follow else here[0]) if here else None
        return next((one for one in here if self.view.points_at(one[0])), other)

    def place_read(self) -> tuple[int, LineKey | None]:
        """Return time and key of the line that is read, or of a jump's line in whose place its neighbour is shown."""
        read, wanted = self.line_read(), self.view.wanted
        if read is None:
            return wanted or (LATEST_NS, None)
        index, line = read
        return wanted if wanted is not None and self.view.points_at(index) else (line.t_ns, line.key)
