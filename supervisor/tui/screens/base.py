"""The base of every screen of the job: the bars, a tick while it is visible, a selection, the keys of every screen.

In: ticks of the application. Out: calls of the `Shell`: go to a screen, open a log, act, leave.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

from textual.containers import Vertical

from remote_agent.wire.events import Condition
from supervisor.actions import BY_ID
from supervisor.tui import keys, times
from supervisor.tui.dialogs.actions import ActionDialogs
from supervisor.tui.dialogs.palette import open_help, open_palette
from supervisor.tui.rows.spans import fit_row
from supervisor.tui.shell import Target, shell_of
from supervisor.tui.widgets.ask import Ask
from supervisor.tui.widgets.bars import AlertBar, Bar, KeyBar
from supervisor.tui.widgets.chart_view import CHART_MIN, ChartView
from supervisor.tui.widgets.lines import CellSelection, Drawn, LineView
from supervisor.tui.widgets.picker import Picker
from supervisor.tui.widgets.tables import DetailPane, LaidOut
from supervisor.wording.goodput import start_waits

if TYPE_CHECKING:
    from collections.abc import Iterable

    from textual.app import ComposeResult
    from textual.binding import Binding
    from textual.widget import Widget

    from supervisor.tui.model import JobView
    from supervisor.tui.shell import Shell

SMALLEST: Final = (60, 16)
NO_TABLE: Final = "no table here: the heat map shows all ranks"
NO_TABLE_ALONE: Final = "no table in this pane; esc shows all panes"


def quit_label(job_view: JobView, shell: Shell) -> str:
    """Return what q does now, in a word or two."""
    if job_view.ended or job_view.problem or shell.bundle_text or not shell.has_job or not shell.job_stays:
        return "quit"
    return "abort" if job_view.bringing_up and not job_view.state else "detach"


class TooSmall(Bar):
    """One line instead of a broken page."""

    def _draw_all(self) -> list[Drawn]:
        width, height = self.app.size
        need = f"needs {SMALLEST[0]}x{SMALLEST[1]}, has {width}x{height}"
        row = fit_row(((need, "warn"),), self.size.width, self.glyphs.more)
        return [Drawn(row if y == 0 else (), "", ("", "")) for y in range(self.size.height)]


class LiveScreen(CellSelection[None], inherit_bindings=False):
    """One screen of the job."""

    NAME: ClassVar[str] = ""
    HAS_TABLES: ClassVar[bool] = False
    _filtered: LaidOut
    """The table that is being filtered."""
    ALLOW_IN_MAXIMIZED_VIEW = "#alert, #bottom"
    # An escape may be for the filter below the pane; `action_back` restores.
    ESCAPE_TO_MINIMIZE = False

    def __init_subclass__(cls, *, bind: Iterable[Binding] = (), **options: bool) -> None:
        if cls.NAME:
            cls.BINDINGS = [*keys.bindings(cls.NAME), *bind]
        super().__init_subclass__(**options)

    @property
    def shell(self) -> Shell:
        """The application."""
        return shell_of(self.app)

    def compose(self) -> ComposeResult:
        """Yield bars above and below the body."""
        yield TooSmall("small")
        yield AlertBar("alert")
        with Vertical(id="body"):
            yield from self.body()
        with Vertical(id="bottom"):
            if self.HAS_TABLES:
                yield Ask(self._filtered_table, id="filter")
            yield KeyBar(self.NAME)

    def body(self) -> Iterable[Widget]:
        """Return the widgets between the bars."""
        return ()

    def show(self, job_view: JobView) -> None:
        """Show a newer state in the body."""

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Return whether actions are possible: before the first frame there is nothing to act on."""
        return self.is_mounted

    def selection(self) -> Target:
        """Return what is selected."""
        return Target()

    def tick(self, job_view: JobView, age_s: float, changed: bool) -> None:
        """Called 8 times a second while the screen is visible; `changed`: there is something new to draw."""
        small = self.size.width < SMALLEST[0] or self.size.height < SMALLEST[1]
        self.set_class(small, "-small")
        if small:
            self.maximized = None
            self.query_one(TooSmall).redraw()
            return
        shell = self.shell
        # The journal is read only while the group imports, because it may be long.
        starts = job_view.condition == Condition.IMPORTING and shell.paused_s is None
        waits = start_waits(shell.source.events, times.now()) if starts else ""
        self.query_one(AlertBar).show(job_view, age_s, paused_s=shell.paused_s, bundle=shell.bundle_text, waits=waits)
        if changed:
            self.show(job_view)
            if self.maximized is not None and not self.maximized.display:
                self.maximized = None
            self.query_one(KeyBar).show(
                table=self.shell.key_table,
                theme=self.shell.palette.name,
                read_only=self.shell.read_only,
                marked=len(self.shell.preferences.nodes) + len(self.shell.preferences.ranks),
                quit_label=quit_label(job_view, self.shell),
                has_way_back=self.shell.has_way_back,
                has_job=self.shell.has_job,
                one_pane=self.maximized is not None,
            )

    def tick_paused(self, job_view: JobView, age_s: float, changed: bool) -> None:
        """Update the screen while the display is frozen."""
        LiveScreen.tick(self, job_view, age_s, changed)

    def on_resize(self) -> None:
        """Redraw for the new size."""
        self.shell.look_again()

    def on_screen_resume(self) -> None:
        """Show the newest state."""
        self.shell.look_again()

    # --- keys of tables

    def table(self) -> LaidOut | None:
        """Return the table that has the focus, else the first one that is shown."""
        tables = [table for table in self.query(LaidOut) if table.is_on_screen and table.size]
        return next((table for table in tables if table.has_focus), tables[0] if tables else None)

    def action_filter(self) -> None:
        """Ask for a text; the table follows while it is typed."""
        table = self.table()
        if table is None:
            self._say_no_table()
            return
        self._filtered = table
        self.query_one("#filter", Ask).ask("/", "a text; esc shows all", follow=table.filter_by, text=table.needle)

    def _say_no_table(self) -> None:
        self.shell.say(NO_TABLE if self.maximized is None else NO_TABLE_ALONE)

    def _filtered_table(self) -> Widget:
        return self._filtered

    def action_sort(self, back: bool) -> None:
        """Sort by the next column, or the other way round."""
        table = self.table()
        if table is None:
            self._say_no_table()
        elif back:
            table.sort_back()
        else:
            table.sort_next()

    # --- charts

    def place_chart(self, room: int) -> bool:
        """Show the charts if they have values and `room` is enough, or if they are shown alone; returns whether."""
        view = self.query_one(ChartView)
        view.display = view.is_maximized or (view.is_known and room >= CHART_MIN)
        view.styles.height = room
        alone = self._hint("chart", "all panes" if view.is_maximized else "alone")
        view.note = ((f"{self.span_hint}  {alone}", "dim"),)
        view.redraw()
        if view.has_focus and not view.display:
            self.set_focus(self.table(), scroll_visible=False)
        return view.display

    @property
    def span_hint(self) -> str:
        """What the key does that changes the span of the history."""
        return self._hint("chart.span", "whole run" if self.shell.preferences.recent else "last 8 min")

    def _hint(self, key_id: str, words: str) -> str:
        """Return a key with what it does, for a title."""
        return next(f"{key.first} {words}" for key in self.shell.key_table if key.id == key_id)

    def action_chart(self) -> None:
        """Show the charts alone, or all panes again."""
        view = self.query_one(ChartView)
        if view.is_maximized:
            self.action_maximize()
            return
        view.display = True
        self.set_focus(view, scroll_visible=False)
        self.maximize(view)
        self.call_after_refresh(self.shell.look_again)

    def action_span(self) -> None:
        """Show the last minutes of the history, or the whole run."""
        self.shell.preferences.recent = not self.shell.preferences.recent
        self.shell.look_again()

    # --- keys that work everywhere

    def action_back(self) -> None:
        """Show all panes again, or go back."""
        if self.maximized is not None:
            self.action_maximize()
        else:
            self.shell.back()

    def action_logs(self) -> None:
        """Open the log of the selection."""
        self.shell.open_log(self.selection())

    def action_act(self) -> None:
        """Open the menu of actions."""
        ActionDialogs(self.shell).open_menu(self.selection())

    def action_sync(self) -> None:
        """Ask whether to restart the group from the edited files."""
        ActionDialogs(self.shell).begin(BY_ID["job.sync"], self.selection())

    def action_shell(self) -> None:
        """Open a shell on the node of the selection."""
        ActionDialogs(self.shell).begin(BY_ID["rank.shell"], self.selection())

    def action_forward(self) -> None:
        """Ask which port of the node of the selection to forward."""
        ActionDialogs(self.shell).begin(BY_ID["node.forward"], self.selection())

    def action_mark(self) -> None:
        """Mark the selected node or rank, or remove its mark."""
        target = self.selection()
        self.shell.preferences.toggle_mark(target.node, target.rank)
        self.shell.look_again()

    def action_mark_failed(self) -> None:
        """Mark every failed or lost node and every failed rank."""
        preferences, job_view = self.shell.preferences, self.shell.job_view
        nodes = [node.name for node in job_view.nodes if node.state in ("failed", "lost")]
        ranks = [row.rank for row in job_view.ranks if row.state == "failed"]
        preferences.nodes = list(dict.fromkeys([*preferences.nodes, *nodes]))
        preferences.ranks = list(dict.fromkeys([*preferences.ranks, *ranks]))
        self.shell.look_again()

    def action_unmark(self) -> None:
        """Remove all marks."""
        self.shell.preferences.nodes, self.shell.preferences.ranks = [], []
        self.shell.look_again()

    def action_problems(self) -> None:
        """Show only nodes and ranks with problems, or all."""
        self.shell.preferences.problems_only = not self.shell.preferences.problems_only
        self.shell.look_again()

    def action_pane(self, step: int) -> None:
        """Focus the next or previous pane; a detail pane only if it has more lines than fit."""
        panes = [view for view in self._panes() if not isinstance(view, DetailPane) or view.has_more]
        if panes:
            at = panes.index(self.focused) if self.focused in panes else -step
            self.set_focus(panes[(at + step) % len(panes)], scroll_visible=False)

    def _panes(self) -> list[LineView]:
        """Return the panes that are shown and can have the focus."""
        return [view for view in self.query(LineView) if view.can_focus and view.is_on_screen and view.size.height]

    def action_maximize(self) -> None:
        """Show only the pane that has the focus, or all again."""
        if self.maximized is not None:
            self.maximized = None
        elif self.focused is None or len(self._panes()) < 2:
            self.shell.say("there is only one pane")
        else:
            self.maximize(self.focused)
        # The content of a pane may depend on its height.
        self.call_after_refresh(self.shell.look_again)

    def copied_text(self) -> str:
        """Return what `y` copies: the selected row of the focused list."""
        return self.focused.text if isinstance(self.focused, Picker) else ""

    def action_copy(self) -> None:
        """Copy the row or line."""
        self.shell.copy(self.copied_text())

    def action_palette(self) -> None:
        """Open the palette."""
        open_palette(self.shell)

    def action_help(self) -> None:
        """Open the help page."""
        open_help(self.shell, self.NAME)
