"""What screens, dialogs and actions share: the job's state, the preferences, notices, the way between screens.

In: the application and its session. Out: what is shown, and where the user goes.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, NamedTuple, Protocol, cast

from remote_agent.text.controls import escape_controls
from remote_agent.wire.events import EventType
from supervisor.tui import keys, preferences, terminal
from supervisor.tui.looks import Glyphs
from supervisor.tui.model import JobView, take
from supervisor.tui.rows.spans import clean
from supervisor.wording import values
from supervisor.wording.events import EventRows

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from textual.app import App

    from remote_agent.wire.documents import JournalEvent
    from supervisor.session import Session
    from supervisor.tui.rows.incident import LogPlace
    from supervisor.tui.rows.spans import Palette
    from supervisor.tui.source import HomeSource
    from supervisor.tui.themes import Chooser

Level = Literal["information", "warning", "error"]
HISTORY: Final = 32
DETACHED: Final = 0


@dataclasses.dataclass(frozen=True)
class Target:
    """What the user has selected: a rank, a node, or (with neither) the whole job."""

    node: str | None = None
    rank: int | None = None


class LogOf(NamedTuple):
    """The log of what is selected; generation None: the newest, streams None: stdout and stderr."""

    target: Target
    generation: int | None = None
    streams: tuple[str, ...] | None = None


class LogTime(NamedTuple):
    """What all ranks printed at a time."""

    t_ns: int


class JobChoice(NamedTuple):
    """The job to which the user switches."""

    words: str
    """The inventory as on a command line; "" for this machine only."""
    job: str


class ActiveScreen(Protocol):
    """The screen of the job that is visible."""

    NAME: ClassVar[str]

    def selection(self) -> Target:
        """Return what is selected on it."""

    def run_action(self, action: str) -> Any:
        """Run the action of a key."""


class Opening(Protocol):
    """A screen that can be opened at something: a log, an incident, a rank."""

    def open(self, what: Any) -> None:
        """Show it."""


class ShellOptions(NamedTuple):
    """How the application was started."""

    config: keys.Config = keys.NO_CONFIG
    read_only: bool = False
    ascii_only: bool = False
    home: HomeSource | None = None
    """The jobs of all inventories; None where there is no switching."""
    has_job: bool = True
    """False: the application shows the home screen alone."""
    job_stays: bool = True
    """The job continues when the user leaves; False: its hosts are part of this program."""


DEFAULTS: Final = ShellOptions()


class Shell:
    """One job on the screen; `tick` draws what has changed."""

    def __init__(
        self, app: App[int], source: Session, themes: Chooser, options: ShellOptions, tick: Callable[[], None]
    ) -> None:
        self.app = app
        self.source = source
        self.themes = themes
        self.read_only, self.home = options.read_only, options.home
        self.has_job, self.job_stays = options.has_job, options.job_stays
        self.glyphs = Glyphs(options.ascii_only or not terminal.is_utf8())
        self.key_table: Sequence[keys.KeyBinding] = keys.changed(options.config.keys)
        self.preferences = preferences.Preferences()
        self.job_view: JobView = take(source)
        self.choice: JobChoice | None = None
        """The job that is to be shown next."""
        self.leaves_at_end = False
        self._tick = tick
        self._recalled = ""
        """The job whose preferences these are."""
        self._event_rows = EventRows()
        self._history: list[str] = []
        self._paused_at: float | None = None
        self._drawn = (-1, False)
        self._is_wanted = True
        """The screen is to be drawn again, whatever has changed."""

    # --- state

    @property
    def palette(self) -> Palette:
        """The colours of the theme."""
        return self.themes.palette

    def take(self) -> bool:
        """Take the session's newest state; returns whether there is something new to draw."""
        drawn = (self.source.version, self.source.status_age_s > 3.0)
        changed = drawn != self._drawn or self._is_wanted
        if changed:
            self.job_view = take(self.source)
            self._drawn, self._is_wanted = drawn, False
        return changed

    def take_redraw(self) -> bool:
        """Return whether a redraw was asked for, and forget that."""
        wanted, self._is_wanted = self._is_wanted, False
        return wanted

    def look_again(self) -> None:
        """Redraw the visible screen soon."""
        self._is_wanted = True
        self.app.call_next(self._tick)

    def recall(self) -> bool:
        """Load the preferences of this job as soon as its id is known; returns whether it did."""
        if self.source.job == self._recalled:
            return False
        self._recalled = self.source.job
        self.preferences = preferences.recall(self._recalled)
        return True

    def keep_preferences(self) -> None:
        """Save the preferences of this job."""
        if self._recalled:
            preferences.keep(self._recalled, self.preferences)

    @property
    def bundle_text(self) -> str:
        """When the bundle that is shown was made; "" on a job."""
        made_s = self.source.made_s
        return "" if made_s is None else f"BUNDLE of {values.local_time_ns(int(made_s * 1e9)):%Y-%m-%d %H:%M}"

    @property
    def paused_s(self) -> float | None:
        """Seconds since the user froze the display; None while it is live."""
        return None if self._paused_at is None else time.monotonic() - self._paused_at

    def pause(self) -> None:
        """Freeze or resume the display."""
        self._paused_at = time.monotonic() if self._paused_at is None else None
        self.look_again()

    @property
    def event_rows(self) -> Sequence[JournalEvent]:
        """The journal, an incident as one row."""
        self._event_rows.follow(self.source.events)
        return self._event_rows.rows

    def target_of_event(self, index: Hashable) -> Target:
        """Return the node and rank of an event."""
        events = self.event_rows
        if not isinstance(index, int) or not 0 <= index < len(events):
            return Target()
        return Target(events[index]["node"] or None, events[index]["rank"])

    def leave_at_end(self, wanted: bool) -> None:
        """Exit as soon as the job has ended, or do not."""
        self.leaves_at_end = wanted

    def set_theme(self, name: str) -> None:
        """Use a theme."""
        self.themes.use(name)
        self.look_again()

    # --- notices

    def say(self, text: str, *, title: str = "", level: Level = "information", seconds: float = 6) -> None:
        """Show a notice; text from nodes is made safe to print."""
        safe = "\n".join(clean(line) for line in text.splitlines())
        self.app.notify(safe, title=clean(title), severity=level, timeout=seconds, markup=False)

    def copy(self, text: str) -> None:
        """Copy a text to the terminal's clipboard, and to a file for terminals that do not support that."""
        if not text:
            self.say("nothing to copy here: select a row")
            return
        # It may be pasted into a shell, which acts on control characters.
        text = escape_controls(text)
        self.app.copy_to_clipboard(text)
        try:
            self.say(f"{clean(text)[:60]}\nalso in {terminal.save_copy(text)}", title="copied")
        except OSError as error:
            self.say(str(error), title="copied to the terminal only", level="warning")

    # --- navigation

    @property
    def first(self) -> str:
        """The screen that the user sees first."""
        return "map" if self.has_job else keys.HOME

    @property
    def active_screen(self) -> ActiveScreen:
        """The screen that is visible, under a dialog or not."""
        return cast("ActiveScreen", self.app.screen_stack[0])

    def go(self, mode: str) -> None:
        """Go to a screen."""
        if mode == keys.HOME and self.home is None:
            self.say("this screen shows one job only; `supervisor` without a command lists all")
        elif mode != keys.HOME and not self.has_job:
            self.say("no job is open; enter opens the selected one")
        elif mode != self.app.current_mode:
            self._history = [*self._history[-HISTORY:], self.app.current_mode]
            self._switch(mode)

    @property
    def has_way_back(self) -> bool:
        """Whether there is another screen to go back to."""
        return bool(self._history) or self.app.current_mode != self.first

    def back(self) -> None:
        """Go back to the screen before, at last to the first."""
        mode = self._history.pop() if self._history else self.first
        if mode != self.app.current_mode:
            self._switch(mode)

    def last(self) -> None:
        """Go to the previous screen; again: return."""
        if self._history:
            mode = self._history.pop()
            self._history.append(self.app.current_mode)
            self._switch(mode)

    def _switch(self, mode: str) -> None:
        self.app.switch_mode(mode)
        self.look_again()

    def _open(self, mode: str, what: object) -> None:
        """Go to a screen, and open something there once it is mounted."""
        self.go(mode)

        def later() -> None:
            if self.app.current_mode != mode:
                return
            screen = self.app.screen_stack[0]
            if screen.is_mounted:
                cast("Opening", screen).open(what)
            else:
                self.app.call_later(later)

        self.app.call_later(later)

    def open_log(self, where: Target | LogOf | LogPlace | LogTime) -> None:
        """Show a log: of what is selected, one line of it, or what all ranks printed at a time."""
        self._open("logs", where)

    def open_incident(self, number: object = None) -> None:
        """Show an incident by its id, or the newest one."""
        self._open("incident", number)

    def open_ranks_of(self, node: str) -> None:
        """Show the ranks with the first rank of a node selected."""
        row = self.job_view.nodes_by_name.get(node)
        if row is None or not row.ranks:
            self.open_log(Target(node))
        else:
            self._open("ranks", row.ranks[0].rank)

    def open_event(self, index: Hashable) -> None:
        """Show what an event is about: the incident, or the log."""
        events = self.event_rows
        if isinstance(index, int) and 0 <= index < len(events) and events[index]["type"] == EventType.INCIDENT:
            self.open_incident(events[index]["detail"]["id"])
        else:
            self.open_log(self.target_of_event(index))

    def switch_to(self, choice: JobChoice) -> None:
        """Detach, and show another job."""
        if self.source.launching:
            self.say("the launch is still running; q aborts it", level="warning")
            return
        self.choice = choice
        self.app.exit(DETACHED)


def shell_of(app: App[Any]) -> Shell:
    """Return the shell of an application that has one."""
    return cast("Shell", app.shell)  # type: ignore[attr-defined]
