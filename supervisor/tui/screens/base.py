"""What every screen of the job has: the bars, a tick while it is visible, a selection, the keys that work everywhere.

In: ticks of the application. Out: requests to it: go to a screen, open a log, act, leave.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar, Final, TypeVar, cast

from textual.containers import Vertical
from textual.screen import Screen

from supervisor.actions import BY_ID
from supervisor.tui import keys
from supervisor.tui.cells import fit_row
from supervisor.tui.widgets.bars import AlertBar, Bar, KeyBar
from supervisor.tui.widgets.lines import Drawn, LineView
from supervisor.tui.widgets.picker import Picker
from supervisor.tui.widgets.tables import Page

if TYPE_CHECKING:
    from textual.app import ComposeResult
    from textual.binding import Binding
    from textual.widget import Widget

    from supervisor.tui.app import SupervisorApp
    from supervisor.tui.model import Snapshot

T = TypeVar("T")

SMALLEST: Final = (60, 16)


@dataclasses.dataclass(frozen=True)
class Target:
    """What the user has selected."""

    node: str | None = None
    rank: int | None = None


def way_out(snapshot: Snapshot) -> str:
    """What leaving means now, in a word."""
    if snapshot.ended or snapshot.problem:
        return "quit"
    return "give up" if snapshot.bringing_up and not snapshot.state else "detach"


class TooSmall(Bar):
    """One line instead of a broken page."""

    def _draw_all(self) -> list[Drawn]:
        width, height = self.app.size
        need = f"needs {SMALLEST[0]}x{SMALLEST[1]}, has {width}x{height}"
        row = fit_row(((need, "warn"),), self.size.width, self.glyphs.more)
        return [Drawn(row if y == 0 else (), "", ("", "")) for y in range(self.size.height)]


def _toggle(marked: list[T], one: T) -> None:
    if one in marked:
        marked.remove(one)
    else:
        marked.append(one)


class LiveScreen(Screen[None], inherit_bindings=False):
    """One screen of the job."""

    NAME: ClassVar[str] = ""
    ESCAPE_TO_MINIMIZE = False

    def __init_subclass__(cls, *, bind: Iterable[Binding] = (), **options: bool) -> None:
        if cls.NAME:
            cls.BINDINGS = [*keys.bindings(cls.NAME), *bind]
        super().__init_subclass__(**options)

    @property
    def tui(self) -> SupervisorApp:
        """The application."""
        return cast("SupervisorApp", self.app)

    def compose(self) -> ComposeResult:
        """Bars above and below the body."""
        yield TooSmall("small")
        yield AlertBar("alert")
        with Vertical(id="body"):
            yield from self.body()
        yield KeyBar(self.NAME)

    def body(self) -> Iterable[Widget]:
        """The widgets between the bars."""
        return ()

    def show(self, snapshot: Snapshot) -> None:
        """Show a newer state in the body."""

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """A key that is typed ahead of the first frame has nothing to act on yet."""
        return self.is_mounted or action == "go"

    def selection(self) -> Target:
        """What is selected."""
        return Target()

    def tick(self, snapshot: Snapshot, age_s: float, changed: bool) -> None:
        """Called 8 times a second while the screen is visible; `changed`: there is something new to draw."""
        small = self.size.width < SMALLEST[0] or self.size.height < SMALLEST[1]
        self.set_class(small, "-small")
        if small:
            self.query_one(TooSmall).redraw()
            return
        self.query_one(AlertBar).show(snapshot, age_s, paused_s=self.tui.paused_s, played=self.tui.played)
        if changed:
            self.show(snapshot)
            self.query_one(KeyBar).show(
                table=self.tui.key_table,
                theme=self.tui.palette.name,
                read_only=self.tui.read_only,
                marked=len(self.tui.memory.nodes) + len(self.tui.memory.ranks),
                way_out="quit" if self.tui.played else way_out(snapshot),
                way_back=self.tui.way_back,
            )

    def tick_paused(self, snapshot: Snapshot, age_s: float, changed: bool) -> None:
        """The tick while the user has stopped the screen: what moves by itself stays where it is."""
        LiveScreen.tick(self, snapshot, age_s, changed)

    def on_resize(self) -> None:
        """Lay out for the new size."""
        self.tui.look_again()

    def on_screen_resume(self) -> None:
        """Show what happened meanwhile."""
        self.tui.look_again()

    # --- keys that work everywhere

    def action_go(self, name: str) -> None:
        """Go to a screen."""
        self.tui.go(name)

    def action_back(self) -> None:
        """Go back."""
        self.tui.back()

    def action_last(self) -> None:
        """Go to the screen before this one."""
        self.tui.last()

    def action_logs(self) -> None:
        """Open the log of the selection."""
        self.tui.open_log(self.selection())

    def action_incident(self) -> None:
        """Open the newest incident."""
        self.tui.open_incident()

    def action_act(self) -> None:
        """Open the menu of actions."""
        self.tui.desk.open_menu(self.selection())

    def action_sync(self) -> None:
        """Ask whether the group shall start from the files as they are now."""
        self.tui.desk.begin(BY_ID["job.sync"], self.selection())

    def action_mark(self) -> None:
        """Mark what is selected, or unmark it."""
        target = self.selection()
        if target.rank is not None:
            _toggle(self.tui.memory.ranks, target.rank)
        elif target.node:
            _toggle(self.tui.memory.nodes, target.node)
        self.tui.look_again()

    def action_mark_failed(self) -> None:
        """Mark every node and every rank that failed or was lost."""
        memory, snapshot = self.tui.memory, self.tui.snapshot
        nodes = [node.name for node in snapshot.nodes if node.state in ("failed", "lost")]
        ranks = [row.rank for row in snapshot.ranks if row.state == "failed"]
        memory.nodes = list(dict.fromkeys([*memory.nodes, *nodes]))
        memory.ranks = list(dict.fromkeys([*memory.ranks, *ranks]))
        self.tui.look_again()

    def action_unmark(self) -> None:
        """Mark nothing."""
        self.tui.memory.nodes, self.tui.memory.ranks = [], []
        self.tui.look_again()

    def action_problems(self) -> None:
        """In the tables only what has a problem, or all."""
        self.tui.memory.problems_only = not self.tui.memory.problems_only
        self.tui.look_again()

    def action_pane(self, step: int) -> None:
        """Go to the next or previous pane; to a page only where it has more than fits."""
        shown = (view for view in self.query(LineView) if view.can_focus and view.is_on_screen and view.size.height)
        panes = [view for view in shown if not isinstance(view, Page) or view.has_more]
        if panes:
            at = panes.index(self.focused) if self.focused in panes else -step
            self.set_focus(panes[(at + step) % len(panes)], scroll_visible=False)

    def action_pause(self) -> None:
        """Stop the screen, or let it go on."""
        self.tui.pause()

    def copied(self) -> str:
        """What `y` takes: the selected row of the focused list."""
        return self.focused.text if isinstance(self.focused, Picker) else ""

    def action_copy(self) -> None:
        """Copy the row or line."""
        self.tui.copy(self.copied())

    def action_palette(self) -> None:
        """Open the palette."""
        self.tui.desk.open_palette()

    def action_help(self) -> None:
        """Open the help page."""
        self.tui.desk.open_help(self.NAME)

    def action_theme(self) -> None:
        """Take the next theme."""
        self.tui.next_theme()

    def action_leave(self) -> None:
        """Ask whether to detach or to stop."""
        self.tui.leave()
