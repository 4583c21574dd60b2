"""The application: one session, one timer, the screens and the way between them.

In: a session, options of the command line. Out: an exit status.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final

from textual import events
from textual.css.query import NoMatches

from supervisor.paths import themes_dir
from supervisor.session.filters import ALL
from supervisor.session.logs import Selection
from supervisor.tui import clipboard, keymap, keys, terminal
from supervisor.tui.cells import clean
from supervisor.tui.desk import Desk
from supervisor.tui.logs.folded import FoldedFeed
from supervisor.tui.logs.merged import MergedFeed
from supervisor.tui.model import Snapshot, take
from supervisor.tui.screens.base import LiveScreen, Target
from supervisor.tui.screens.dialogs import Dialog
from supervisor.tui.screens.incident import IncidentScreen
from supervisor.tui.screens.launch import LaunchScreen
from supervisor.tui.screens.lists import NodesScreen, RanksScreen
from supervisor.tui.screens.log_shown import BOTH
from supervisor.tui.screens.logs import LogsScreen
from supervisor.tui.screens.map import MapScreen
from supervisor.tui.screens.nccl import NcclScreen
from supervisor.tui.screens.run import RunScreen
from supervisor.tui.spark import History
from supervisor.tui.themed import Level, ThemedApp
from supervisor.tui.typed import Keyboard
from supervisor.tui.widgets.tables import RankTable
from supervisor.tui.words import Glyphs

if TYPE_CHECKING:
    from textual.screen import Screen

    from supervisor.session.filters import Filter
    from supervisor.tui.incident_rows import Place
    from supervisor.tui.source import SessionContext, Source
    from supervisor.tui.typed import Typed

_LEVELS: Final[dict[str, Level]] = {"warning": "warning", "error": "error"}
TICK_S: Final = 1 / 8
HISTORY: Final = 32
DETACHED: Final = 0


class SupervisorApp(ThemedApp, inherit_bindings=False):
    """The terminal UI of one job."""

    TITLE = "supervisor"
    CSS_PATH: ClassVar[Any] = themes_dir() / "app.tcss"
    BINDINGS = []
    ENABLE_COMMAND_PALETTE = False
    ALLOW_SELECT = False
    DEFAULT_MODE = "map"
    MODES = {
        "launch": LaunchScreen,
        "map": MapScreen,
        "nodes": NodesScreen,
        "ranks": RanksScreen,
        "logs": LogsScreen,
        "incident": IncidentScreen,
        "run": RunScreen,
        "nccl": NcclScreen,
    }

    def __init__(
        self,
        source: Source,
        *,
        theme: str | None = None,
        read_only: bool = False,
        ascii_only: bool = False,
        changed_keys: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(source, theme)
        # Movement that nobody asked for only costs bytes on a slow line.
        self.animation_level = "none"
        self.read_only = read_only
        self.key_table: Sequence[keys.Key] = keys.KEYS
        self.glyphs = Glyphs(ascii_only or not terminal.is_utf8())
        self.snapshot: Snapshot = take(source)
        self.key_table = keys.changed(changed_keys or {})
        self.set_keymap({f"{name}.{mode}": keys for name, keys in (changed_keys or {}).items() for mode in self.MODES})
        self.history = History()
        self.desk = Desk(self)
        self.keyboard = Keyboard(self, self._take_typed)
        self._drawn: tuple[int, bool] = (-1, False)
        self._look = True
        self._paused_at: float | None = None
        self._history: list[str] = []
        self._announced = 0
        self._incident_opened = False
        self._was_launching = False
        self.leave_when_ended = False

    # --- a recording, see replay.py

    @property
    def played(self) -> str:
        """What is said of the time where it is that of a recording."""
        return ""

    @property
    def turns(self) -> int:
        """How often the time has been put back."""
        return 0

    def _handle_exception(self, error: Exception) -> None:
        # What is opened as the application ends gets no children any more to look for.
        if self.is_running or not isinstance(error, NoMatches):
            super()._handle_exception(error)

    async def on_event(self, event: events.Event) -> None:
        """Keys that were typed ahead of the end are nobody's; the others take their turn."""
        if not self.is_running and isinstance(event, events.InputEvent):
            return
        if isinstance(event, (events.Key, events.Paste)) and not event.is_forwarded:
            self.keyboard.put(event)
        else:
            await super().on_event(event)

    async def _take_typed(self, event: Typed) -> None:
        """Hand a key, whose turn it is, to what has the focus."""
        if self.is_running:
            await super().on_event(event)

    async def run_action(self, *asked: Any, **named: Any) -> bool:
        """Nor does anything come of what they have led to."""
        return self.is_running and await super().run_action(*asked, **named)

    # --- the tick

    def on_mount(self) -> None:
        """Start the one timer."""
        self.set_class(self.glyphs.ascii, "-ascii")
        if self.source.launching or self.snapshot.problem:
            self.switch_mode("launch")
            self._was_launching = self.source.launching
        self.watch_themes()
        self.set_interval(TICK_S, self.tick)
        # A coroutine would be left behind where the application ends before it begins.
        self.run_worker(self.keyboard.run, group="keys")  # type: ignore[arg-type]
        self.call_after_refresh(_settle_memory)

    def look_again(self) -> None:
        """Draw the visible screen anew, soon."""
        self._look = True
        self.call_next(self.tick)

    def tick(self) -> None:
        """Hand the newest state to the screen that is visible; nothing else works."""
        if not self.is_running:
            return
        source = self.source
        self.recall()
        if self._paused_at is not None:
            self._tick_paused()
            return
        drawn = (source.version, source.status_age_s > 3.0)
        changed = drawn != self._drawn or self._look
        if changed:
            self.snapshot = take(source)
            if drawn != self._drawn:
                self.history.take(self.snapshot, time.monotonic())
            self._drawn = drawn
            self._look = False
        screen = self.live_screen
        if screen is not None and screen.is_mounted and screen.size:
            screen.tick(self.snapshot, source.status_age_s, changed)
        if changed:
            if isinstance(self.screen, Dialog) and self.screen.is_mounted:
                self.screen.tick()
            self._steer()

    def _tick_paused(self) -> None:
        """Draw what the user does, from the state at which he has stopped the screen."""
        screen, look = self.live_screen, self._look
        self._look = False
        if screen is not None and screen.is_mounted and screen.size:
            screen.tick_paused(self.snapshot, self.source.status_age_s, look)

    @property
    def paused_s(self) -> float | None:
        """Seconds since the user has stopped the screen; None while it moves."""
        return None if self._paused_at is None else time.monotonic() - self._paused_at

    def pause(self) -> None:
        """Stop the screen, or let it go on."""
        self._paused_at = time.monotonic() if self._paused_at is None else None
        self.look_again()

    def copy(self, text: str) -> None:
        """Hand a text to the terminal's clipboard, and to a file for the terminals that do not take it."""
        if not text:
            self.say("nothing to copy here: select a row")
            return
        handed = clipboard.sequence(text)
        if handed is not None and self._driver is not None:
            self._driver.write(handed)
        try:
            self.say(f"{clean(text)[:60]}\nalso in {clipboard.save(text)}", title="copied")
        except OSError as error:
            self.say(str(error), title="copied to the terminal alone", level="warning")

    @property
    def live_screen(self) -> LiveScreen | None:
        """The screen of the job that is visible, under a dialog or not."""
        for screen in reversed(self.screen_stack):
            if isinstance(screen, LiveScreen):
                return screen
        return None

    def _steer(self) -> None:
        """Move by itself where that is what everybody would do, and only from a screen without a dialog."""
        for notice in self.source.notices[self._announced :]:
            self.say(notice.text, level=_LEVELS.get(notice.level, "information"), seconds=8)
        self._announced = len(self.source.notices)
        if len(self.screen_stack) > 1:
            return
        snapshot = self.snapshot
        if snapshot.problem and self.current_mode == "map":
            self.switch_mode("launch")
        elif (
            self.current_mode == "launch" and self._was_launching and not self.source.launching and not snapshot.problem
        ):
            self._was_launching = False
            self.switch_mode("map")
        if snapshot.ended and self.leave_when_ended:
            self.exit(snapshot.exit_status or 0)
        elif snapshot.ended and snapshot.state == "failed" and snapshot.incident and not self._incident_opened:
            self._incident_opened = True
            self.open_incident()

    # --- ways

    def go(self, mode: str) -> None:
        """Go to a screen."""
        if mode != self.current_mode:
            self._history = [*self._history[-HISTORY:], self.current_mode]
            self.switch_mode(mode)
            self.look_again()

    @property
    def way_back(self) -> bool:
        """There is another screen to go back to."""
        return bool(self._history) or self.current_mode != "map"

    def back(self) -> None:
        """Go back; at the end of the way, to the map."""
        mode = self._history.pop() if self._history else "map"
        if mode != self.current_mode:
            self.switch_mode(mode)
            self.look_again()

    def last(self) -> None:
        """Change places with the screen before."""
        if self._history:
            mode = self._history.pop()
            self._history.append(self.current_mode)
            self.switch_mode(mode)
            self.look_again()

    def _on_screen(self, mode: str, work: Callable[[Screen[Any]], None]) -> None:
        """Go to a screen, and do something there once it is mounted."""
        self.go(mode)

        def later() -> None:
            if self.current_mode == mode and not self.screen_stack[0].is_mounted:
                self.call_later(later)
            elif self.current_mode == mode:
                work(self.screen_stack[0])

        self.call_later(later)

    def open_log(self, target: Target, generation: int | None = None, streams: tuple[str, ...] = BOTH) -> None:
        """Show the log of a rank, a node or all."""
        self._on_screen("logs", lambda screen: _logs(screen).open_target(target, generation, streams))

    def open_place(self, place: Place) -> None:
        """Show one line of a log."""
        self._on_screen("logs", lambda screen: _logs(screen).open_place(place))

    def open_incident(self, number: object = None) -> None:
        """Show an incident by its id, else the newest one."""
        self._on_screen("incident", lambda screen: _incident(screen).open(number))

    def go_to_rank_of(self, node: str) -> None:
        """Show the ranks, the first one of a node selected."""
        row = self.snapshot.nodes_by_name.get(node)
        if row is None or not row.ranks:
            self.open_log(Target(node))
            return
        first = row.ranks[0].rank

        def select(screen: Screen[Any]) -> None:
            table = screen.query_one(RankTable)
            screen.show(self.snapshot)  # type: ignore[attr-defined]
            table.select(first)

        self._on_screen("ranks", select)

    def target_of_event(self, index: Hashable) -> Target:
        """The node and rank that an event speaks of."""
        events = self.source.events
        if not isinstance(index, int) or not 0 <= index < len(events):
            return Target()
        node, rank = events[index].get("node"), events[index].get("rank")
        return Target(str(node) if node else None, rank if isinstance(rank, int) else None)

    def open_event(self, index: Hashable) -> None:
        """Show what an event speaks of: the incident, else the log."""
        events = self.source.events
        if isinstance(index, int) and 0 <= index < len(events) and events[index].get("type") == "incident":
            detail = events[index].get("detail")
            self.open_incident(detail.get("id") if isinstance(detail, dict) else None)
        else:
            self.open_log(self.target_of_event(index))

    def merged_feed(
        self,
        target: Target | None,
        generation: int | None = None,
        streams: tuple[str, ...] = BOTH,
        *,
        lines: Filter = ALL,
        folded: bool = False,
    ) -> MergedFeed:
        """The rows of a target by time, over all generations unless one is named; a rank may move between nodes."""
        where = target or Target()
        ranks = None if where.rank is None else [where.rank]
        nodes = [where.node] if where.node and where.rank is None else None
        wanted: int | str = "all" if generation is None else generation
        kind = FoldedFeed if folded else MergedFeed
        return kind(self.source, Selection(wanted, ranks, streams, nodes, lines))

    def leave(self) -> None:
        """Ask whether to detach or to stop; a job that is over needs no question."""
        self.desk.leave()


def _logs(screen: Screen[Any]) -> LogsScreen:
    assert isinstance(screen, LogsScreen)
    return screen


def _incident(screen: Screen[Any]) -> IncidentScreen:
    assert isinstance(screen, IncidentScreen)
    return screen


def _settle_memory() -> None:
    """What is there after the first paint stays: the collector need not look at it again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)


async def run_app(session_factory: Callable[[], SessionContext], make: Callable[[Source], SupervisorApp]) -> int:
    """Show what a session tells until the user leaves; returns the exit status."""
    async with session_factory() as source:
        app = make(source)
        with terminal.held(lambda: app.exit(DETACHED)):
            status = await app.run_async()
        return status if status is not None else app.return_code or DETACHED


def run_tui(
    session_factory: Callable[[], SessionContext], *, theme: str | None, read_only: bool, ascii_only: bool
) -> int:
    """Show a session until the user leaves; returns 0 detached or succeeded, 1 failed, 3 launch failed, 4 stopped.

    Raises UsageError for a bad config.toml before anything is begun.
    """
    changed_keys = keymap.load()

    def make(source: Source) -> SupervisorApp:
        return SupervisorApp(source, theme=theme, read_only=read_only, ascii_only=ascii_only, changed_keys=changed_keys)

    return asyncio.run(run_app(session_factory, make))
