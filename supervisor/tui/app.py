"""The application: one session, one timer, the screens, the navigation between them, theme and preferences.

In: a session, options of the command line, theme files. Out: an exit code. It implements `shell.Shell`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import time
from typing import TYPE_CHECKING, Any, ClassVar, Final

from textual import events
from textual.app import App, ScreenStackError
from textual.css.query import NoMatches

from remote_agent.text.controls import escape_controls
from remote_agent.wire.events import ENDED_STATES, Condition, EventType
from supervisor.paths import themes_dir
from supervisor.ssh.questions import questions
from supervisor.standard_streams import plain_error_console
from supervisor.tui import keys, preferences, terminal, themes
from supervisor.tui.dialogs.actions import ActionDialogs
from supervisor.tui.dialogs.base import Dialog
from supervisor.tui.dialogs.question import QuestionDialog
from supervisor.tui.logs.feed import BOTH
from supervisor.tui.looks import Glyphs
from supervisor.tui.model import JobView, take
from supervisor.tui.rows.spans import clean
from supervisor.tui.screens.base import LiveScreen
from supervisor.tui.screens.home import HomeScreen
from supervisor.tui.screens.incident import IncidentScreen
from supervisor.tui.screens.launch import LaunchScreen
from supervisor.tui.screens.lists import NodesScreen, RanksScreen
from supervisor.tui.screens.logs.screen import LogsScreen
from supervisor.tui.screens.map import MapScreen
from supervisor.tui.screens.nccl import NcclScreen
from supervisor.tui.screens.run import RunScreen
from supervisor.tui.shell import JobChoice, Level, Target
from supervisor.tui.widgets.tables import RankTable
from supervisor.wording import values
from supervisor.wording.events import EventRows
from supervisor.wording.incidents import is_open as is_open_incident

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Hashable, Sequence
    from contextlib import AbstractAsyncContextManager

    from textual.dom import DOMNode
    from textual.filter import LineFilter
    from textual.screen import Screen

    from remote_agent.wire.documents import JournalEvent
    from supervisor.session import Session
    from supervisor.ssh.questions import Question
    from supervisor.tui.rows.incident import LogPlace
    from supervisor.tui.source import HomeSource

Typed = events.Key | events.Paste
# Keys, Ctrl-C among them, wait at most this long for a screen, seconds.
DEADLINE: Final = 5.0
# A message that follows a key, such as that of a pressed button, may still be queued after the first round.
ROUNDS: Final = 2


class Keyboard:
    """The queue of typed keys: each is passed on once the screen, dialog or field that the last one opened is there."""

    def __init__(self, app: App[Any], pass_on: Callable[[Typed], Awaitable[None]]) -> None:
        self._app = app
        self._pass_on = pass_on
        self._waiting: asyncio.Queue[Typed] = asyncio.Queue()

    def put(self, event: Typed) -> None:
        """Queue a key or a paste."""
        if isinstance(event, events.Key) and event.key == "ctrl+j":
            # A terminal sends an enter that was typed before the screen started as ctrl+j.
            event = events.Key("enter", "\r")
        self._waiting.put_nowait(event)

    async def run(self) -> None:
        """Pass on what is typed, until cancelled or until the application has no screen."""
        with contextlib.suppress(ScreenStackError):
            here = self._here
            while True:
                event = await self._waiting.get()
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._settled(here), DEADLINE)
                here = self._here
                await self._pass_on(event)

    @property
    def _here(self) -> DOMNode:
        """The widget that gets the next key."""
        return self._app.focused or self._app.screen

    async def _settled(self, here: DOMNode) -> None:
        """Wait until all widgets have handled the last key and the target of the next one is settled."""
        same = 0
        while same < ROUNDS:
            for node in here.ancestors_with_self:
                passed = asyncio.Event()
                if node.call_later(passed.set):
                    await passed.wait()
            before, here = here, self._here
            same = same + 1 if here is before else 0
            if same and not any(node.message_queue_size for node in here.ancestors_with_self):
                return


_LEVELS: Final[dict[str, Level]] = {"warning": "warning", "error": "error"}
TICK_S: Final = 1 / 8
# The user is notified when the job gets into one of these.
CALLS_FOR_HELP: Final = (Condition.HUNG, Condition.SLOW, Condition.DEGRADED, Condition.FAILED)
HISTORY: Final = 32
DETACHED: Final = 0
# The user's theme files are checked for changes this often, seconds.
CHECK_EVERY_S: Final = 1.0


class SupervisorApp(App[int], inherit_bindings=False):
    """The terminal UI of one job."""

    TITLE = "supervisor"
    CSS_PATH: ClassVar[Any] = themes_dir() / "app.tcss"
    BINDINGS = []
    ENABLE_COMMAND_PALETTE = False
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
        keys.HOME: HomeScreen,
    }

    def __init__(
        self,
        source: Session,
        *,
        theme: str | None = None,
        read_only: bool = False,
        ascii_only: bool = False,
        config: keys.Config = keys.NO_CONFIG,
        home: HomeSource | None = None,
        has_job: bool = True,
        job_stays: bool = True,
    ) -> None:
        self._no_color_wanted = _no_color()
        super().__init__(ansi_color=True if self._no_color_wanted else None)
        # Textual's tracebacks pass through our stderr, which escapes codes for colours.
        self.error_console = plain_error_console()
        self._only_text = terminal.OnlyText()
        self.source = source
        self._event_rows = EventRows()
        self.preferences = preferences.Preferences()
        self.skins, self._problems = themes.load_all()
        self._theme_given = theme
        self._stamp = themes.stamp()
        self._recalled = ""
        self._css_file = ""
        self.recall()
        wanted = theme or self.preferences.theme or themes.DEFAULT_THEME
        if theme is None and wanted not in self.skins:
            wanted = themes.DEFAULT_THEME
        self._take_theme(themes.NO_COLOR_THEME if self._no_color_wanted else wanted)
        # Animations only cost bytes on a slow line.
        self.animation_level = "none"
        self.read_only = read_only
        self.home, self.has_job, self.job_stays = home, has_job, job_stays
        self.choice: JobChoice | None = None
        """The job that is to be shown next."""
        self.glyphs = Glyphs(ascii_only or not terminal.is_utf8())
        self.job_view: JobView = take(source)
        self.config = config
        self.key_table: Sequence[keys.KeyBinding] = (*keys.changed(config.keys), *keys.of_commands(config.commands))
        self.set_keymap({f"{name}.{mode}": keys for name, keys in config.keys.items() for mode in self.MODES})
        self.keyboard = Keyboard(self, self._take_typed)
        self._is_shown, self._drawn = asyncio.Event(), (-1, False)
        self._title = ""
        self._condition = ""
        self._called = False
        """The user was notified of something that has not ended well yet."""
        self._redraw_wanted = True
        self._paused_at: float | None = None
        self._history: list[str] = []
        self._announced = 0
        self._incident_opened = False
        self._was_launching = False
        self._leave_when_ended = False

    @property
    def bundle_text(self) -> str:
        made_s = self.source.made_s
        return "" if made_s is None else f"BUNDLE of {values.local_time_ns(int(made_s * 1e9)):%Y-%m-%d %H:%M}"

    def get_line_filters(self) -> Sequence[LineFilter]:
        """Return the filters through which the lines of all widgets pass."""
        return [*super().get_line_filters(), self._only_text]

    def _handle_exception(self, error: Exception) -> None:
        # A screen that opens while the application closes never gets its children.
        if self.is_running or not isinstance(error, NoMatches):
            super()._handle_exception(error)

    async def on_event(self, event: events.Event) -> None:
        """Queue keys, and drop those that arrive while the application closes."""
        if not self.is_running and isinstance(event, events.InputEvent):
            return
        if isinstance(event, (events.Key, events.Paste)) and not event.is_forwarded:
            self.keyboard.put(event)
        else:
            await super().on_event(event)

    async def _take_typed(self, event: Typed) -> None:
        """Pass a key from the queue to the widget that has the focus."""
        if self.is_running:
            await super().on_event(event)

    async def run_action(self, *asked: Any, **named: Any) -> bool:
        """Run no action while the application closes."""
        return self.is_running and await super().run_action(*asked, **named)

    # --- the tick

    def on_mount(self) -> None:
        """Start the timer."""
        self._is_shown.set()
        self.set_class(self.glyphs.ascii, "-ascii")
        for key in keys.of_commands(self.config.commands):
            self.bind(key.keys, key.action, show=False)
        if not self.has_job:
            self.switch_mode(keys.HOME)
        elif self.source.launching or self.job_view.problem:
            self.switch_mode("launch")
            self._was_launching = self.source.launching
        self.watch_themes()
        self.set_interval(TICK_S, self.tick)
        # A coroutine object instead of a function would never be awaited if the application ended before the worker.
        self.run_worker(self.keyboard.run, group="keys")  # type: ignore[arg-type]
        self.call_after_refresh(_settle_memory)

    def look_again(self) -> None:
        self._redraw_wanted = True
        self.call_next(self.tick)

    def tick(self) -> None:
        """Pass the newest state to the visible screen."""
        if not self.is_running:
            return
        source = self.source
        self.recall()
        if self._paused_at is not None:
            self._tick_paused()
            return
        drawn = (source.version, source.status_age_s > 3.0)
        changed = drawn != self._drawn or self._redraw_wanted
        if changed:
            self.job_view = take(source)
            self._drawn = drawn
            self._redraw_wanted = False
        screen = self.active_screen
        if screen is not None and screen.is_mounted and screen.size:
            screen.tick(self.job_view, source.status_age_s, changed)
        if changed:
            self._tell_terminal()
            if isinstance(self.screen, Dialog) and self.screen.is_mounted:
                self.screen.tick()
            self._steer()

    def _tell_terminal(self) -> None:
        """Set the terminal's title, and ring its bell when the job needs attention."""
        title, condition = self.job_view.title if self.has_job else self.TITLE, self.job_view.condition
        if title != self._title and self._driver is not None:
            if not self._title:
                self._driver.write(terminal.keep_title_sequence())
            self._driver.write(terminal.title_sequence(title))
            self._title = title
        if condition != self._condition and self._condition and not self.bundle_text:
            self._call_user(condition)
        self._condition = condition

    def _call_user(self, condition: str) -> None:
        """Notify the user of a failure, a hang, a lost node, of the recovery, and of the end."""
        job_view = self.job_view
        is_open = job_view.incident is not None and is_open_incident(job_view.incident)
        help_wanted = condition in CALLS_FOR_HELP or (condition == Condition.RESTARTING and is_open)
        recovered = self._called and condition == Condition.RUNNING
        if (help_wanted or recovered or condition in ENDED_STATES) and self._driver is not None:
            what = "running again" if recovered else job_view.look.word
            cause = job_view.incident["summary"] if help_wanted and job_view.incident else ""
            text = f"{what}: {cause}" if cause else what
            wanted = self.config.notice == "desktop"
            sequence = terminal.notice_sequence(f"supervisor {job_view.job}", text) if wanted else ""
            if sequence:
                self._driver.write(sequence)
            elif self.config.notice != "off":
                self.bell()
        self._called = help_wanted or (self._called and not recovered)

    def _tick_paused(self) -> None:
        """Redraw what the user changes, from the state at which the display was frozen."""
        screen, look = self.active_screen, self._redraw_wanted
        self._redraw_wanted = False
        if screen is not None and screen.is_mounted and screen.size:
            screen.tick_paused(self.job_view, self.source.status_age_s, look)

    @property
    def paused_s(self) -> float | None:
        return None if self._paused_at is None else time.monotonic() - self._paused_at

    def action_pause(self) -> None:
        """Freeze or resume the display."""
        self._paused_at = time.monotonic() if self._paused_at is None else None
        self.look_again()

    def copy(self, text: str) -> None:
        """Copy a text to the terminal's clipboard, and to a file for terminals that do not support that."""
        if not text:
            self.say("nothing to copy here: select a row")
            return
        # It may be pasted into a shell, which acts on control characters.
        text = escape_controls(text)
        self.copy_to_clipboard(text)
        try:
            self.say(f"{clean(text)[:60]}\nalso in {terminal.save_copy(text)}", title="copied")
        except OSError as error:
            self.say(str(error), title="copied to the terminal only", level="warning")

    def on_text_selected(self) -> None:
        """Copy what was selected with the mouse; the lines below may move, so nothing stays selected."""
        screen = self.screen
        if screen.selections:
            text = (screen.get_selected_text() or "").strip("\n")
            screen.clear_selection()
            if text:
                self.copy(text)

    async def lend(self, use: Callable[[terminal.Lent], Awaitable[None]]) -> None:
        await terminal.lend(self, use)

    @property
    def active_screen(self) -> LiveScreen | None:
        for screen in reversed(self.screen_stack):
            if isinstance(screen, LiveScreen):
                return screen
        return None

    def _steer(self) -> None:
        """Show new notices; change the screen when the launch or the job ends, unless a dialog is open."""
        for notice in self.source.notices[self._announced :]:
            self.say(notice.text, level=_LEVELS.get(notice.level, "information"), seconds=8)
        self._announced = len(self.source.notices)
        if len(self.screen_stack) > 1:
            return
        job_view = self.job_view
        if job_view.problem and self.current_mode == "map":
            self.switch_mode("launch")
        elif (
            self.current_mode == "launch" and self._was_launching and not self.source.launching and not job_view.problem
        ):
            self._was_launching = False
            self.switch_mode("map")
        if job_view.ended and self._leave_when_ended:
            self.exit(job_view.exit_status or 0)
        elif job_view.ended and job_view.state == "failed" and job_view.incident and not self._incident_opened:
            self._incident_opened = True
            self.open_incident()

    # --- notices

    def say(self, text: str, *, title: str = "", level: Level = "information", seconds: float = 6) -> None:
        """Show a notice; text from nodes is made safe to print."""
        safe = "\n".join(clean(line) for line in text.splitlines())
        self.notify(safe, title=clean(title), severity=level, timeout=seconds, markup=False)

    def unsay(self, title: str) -> None:
        for notice in [notice for notice in self._notifications if notice.title == title]:
            self._unnotify(notice)

    # --- themes

    def get_theme_variable_defaults(self) -> dict[str, str]:
        """Return variables that Textual's own style sheets need and a theme file may leave out."""
        return themes.VARIABLE_DEFAULTS

    def _take_theme(self, name: str) -> None:
        skin = self.skins.get(name)
        if skin is None:
            known = ", ".join(sorted(self.skins))
            self._problems.append(f"no theme named {name}; known themes: {known or 'none'}")
            skin = self.skins.get(themes.DEFAULT_THEME) or themes.fallback()
        self.palette = skin.palette
        self.register_theme(skin.theme)
        self.stylesheet.source.pop((self._css_file, ""), None)
        self._css_file = skin.css_file
        if skin.css:
            self.stylesheet.add_source(skin.css, (skin.css_file, ""), tie_breaker=1)
        if self.theme == skin.name and self.is_running:
            # Textual does not reload a theme that keeps its name.
            self.call_next(self.refresh_css, animate=False)
        self.theme = skin.name

    def set_skin(self, name: str) -> None:
        """Use a theme and redraw everything."""
        self._take_theme(name)
        self.look_again()

    def action_theme(self) -> None:
        """Use the next theme in the order of their names."""
        names = sorted(self.skins)
        if names:
            at = names.index(self.palette.name) if self.palette.name in names else -1
            self.set_skin(names[(at + 1) % len(names)])

    def watch_themes(self) -> None:
        """Report problems with the user's themes, and check their files for changes from now on."""
        self._report(self._problems)
        self.set_interval(CHECK_EVERY_S, self.reread_themes)

    def _report(self, problems: list[str]) -> None:
        for problem in problems:
            self.say(problem, title="theme", level="warning", seconds=10)

    def reread_themes(self) -> None:
        """Load changed theme files; a file with an error is reported, and the present theme stays."""
        stamp = themes.stamp()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        before, (skins, problems) = self.skins, themes.load_all()
        self._report(problems)
        name = self.palette.name
        if name not in skins or any(f"/{name}." in problem for problem in problems):
            # The colours stay while a file is being written.
            skins[name] = before.get(name) or themes.fallback()
        self.skins = skins
        if skins[name] != before.get(name):
            self.set_skin(name)

    # --- preferences

    def recall(self) -> None:
        """Load the preferences of this job as soon as its id is known."""
        if self.source.job == self._recalled:
            return
        self._recalled = self.source.job
        self.preferences = preferences.recall(self._recalled)
        known = self.preferences.theme in self.skins and not (self._theme_given or self._no_color_wanted)
        if known and self.is_running:
            self.set_skin(self.preferences.theme)

    def on_unmount(self) -> None:
        """Give the terminal its title back, and save the preferences of this job."""
        if self._title and self._driver is not None:
            self._driver.write(terminal.keep_title_sequence(back=True))
        if not self._no_color_wanted:
            self.preferences.theme = self.palette.name
        if self._recalled:
            preferences.keep(self._recalled, self.preferences)

    # --- navigation

    def action_go(self, mode: str) -> None:
        """Go to a screen."""
        if mode == keys.HOME and self.home is None:
            self.say("this screen shows one job only; `supervisor` without a command lists all")
        elif mode != keys.HOME and not self.has_job:
            self.say("no job is open; enter opens the selected one")
        elif mode != self.current_mode:
            self._history = [*self._history[-HISTORY:], self.current_mode]
            self.switch_mode(mode)
            self.look_again()

    @property
    def has_way_back(self) -> bool:
        return bool(self._history) or self.current_mode != self._first

    @property
    def _first(self) -> str:
        return "map" if self.has_job else keys.HOME

    def back(self) -> None:
        """Go back to the screen before, at last to the map."""
        mode = self._history.pop() if self._history else self._first
        if mode != self.current_mode:
            self.switch_mode(mode)
            self.look_again()

    def action_last(self) -> None:
        """Go to the previous screen; again: return."""
        if self._history:
            mode = self._history.pop()
            self._history.append(self.current_mode)
            self.switch_mode(mode)
            self.look_again()

    def _open_on(self, mode: str, work: Callable[[Screen[Any]], None]) -> None:
        """Go to a screen, and call a function with it once it is mounted."""
        self.action_go(mode)

        def later() -> None:
            if self.current_mode == mode and not self.screen_stack[0].is_mounted:
                self.call_later(later)
            elif self.current_mode == mode:
                work(self.screen_stack[0])

        self.call_later(later)

    def open_log(self, target: Target, generation: int | None = None, streams: tuple[str, ...] | None = None) -> None:
        self._open_on("logs", lambda screen: _logs(screen).open_target(target, generation, streams or BOTH))

    def open_place(self, place: LogPlace) -> None:
        self._open_on("logs", lambda screen: _logs(screen).open_place(place))

    def go_to_time(self, time_s: float) -> None:
        self._open_on("logs", lambda screen: _logs(screen).open_time(int(time_s * 1e9)))

    def open_incident(self, number: object = None) -> None:
        """Show an incident by its id, or the newest one."""
        self._open_on("incident", lambda screen: _incident(screen).open(number))

    def open_ranks_of(self, node: str) -> None:
        row = self.job_view.nodes_by_name.get(node)
        if row is None or not row.ranks:
            self.open_log(Target(node))
            return
        first = row.ranks[0].rank

        def select(screen: Screen[Any]) -> None:
            table = screen.query_one(RankTable)
            screen.show(self.job_view)  # type: ignore[attr-defined]
            table.select(first)

        self._open_on("ranks", select)

    def action_incident(self) -> None:
        """Show the newest incident."""
        self.open_incident()

    @property
    def event_rows(self) -> Sequence[JournalEvent]:
        self._event_rows.follow(self.source.events)
        return self._event_rows.rows

    def target_of_event(self, index: Hashable) -> Target:
        events = self.event_rows
        if not isinstance(index, int) or not 0 <= index < len(events):
            return Target()
        return Target(events[index]["node"] or None, events[index]["rank"])

    def open_event(self, index: Hashable) -> None:
        events = self.event_rows
        if isinstance(index, int) and 0 <= index < len(events) and events[index]["type"] == EventType.INCIDENT:
            self.open_incident(events[index]["detail"]["id"])
        else:
            self.open_log(self.target_of_event(index))

    def action_command(self, name: str) -> None:
        """Run one of the user's commands on the selection."""
        screen = self.active_screen
        if screen is not None and screen.NAME != keys.HOME:
            command = next(one for one in self.config.commands if one.id == name)
            ActionDialogs(self).begin(command, screen.selection())

    def action_answer(self) -> None:
        """Ask what ssh asks for the hosts that are waiting for it."""
        if not self.source.ask_user():
            self.say("no host needs an answer")

    async def ask(self, question: Question) -> str | None:
        """Ask the user what ssh asks, until it needs no answer any more."""
        await self._is_shown.wait()
        answer: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        title = f"ssh to {question.where}"
        if question.kind == "notice":
            self.say(clean(question.prompt), title=title, seconds=600)
            try:
                return await answer
            finally:
                self.unsay(title)
        dialog = QuestionDialog(question)

        def close(typed: str | None) -> None:
            if not answer.done():
                answer.set_result(typed)

        # Whoever asks is no part of the application: only what the application calls itself may open a screen.
        self.call_later(self.push_screen, dialog, close)
        try:
            return await answer
        finally:
            if answer.cancelled() and self.is_running:
                self.call_later(dialog.dismiss, None)

    def action_leave(self) -> None:
        """Ask whether to detach or to stop the job; exit at once if it has ended."""
        ActionDialogs(self).leave()

    def switch_to(self, choice: JobChoice) -> None:
        if self.source.launching:
            self.say("the launch is still running; q aborts it", level="warning")
            return
        self.choice = choice
        self.exit(DETACHED)

    def leave_at_end(self, wanted: bool) -> None:
        self._leave_when_ended = wanted


def _no_color() -> bool:
    """Return whether NO_COLOR is set and not empty; Textual would also honour an empty one."""
    if os.environ.get("NO_COLOR") == "":
        del os.environ["NO_COLOR"]
    return "NO_COLOR" in os.environ


def _logs(screen: Screen[Any]) -> LogsScreen:
    assert isinstance(screen, LogsScreen)
    return screen


def _incident(screen: Screen[Any]) -> IncidentScreen:
    assert isinstance(screen, IncidentScreen)
    return screen


def _settle_memory() -> None:
    """Keep the garbage collector from scanning, again and again, what exists after the first paint."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)


def _say_nothing(_source: Session) -> None:
    """Leave the terminal as it was."""


async def run_app(
    session_factory: Callable[[], AbstractAsyncContextManager[Session]],
    make: Callable[[Session], SupervisorApp],
    on_exit: Callable[[Session], None] = _say_nothing,
) -> int | JobChoice:
    """Show a session until the user leaves; returns the exit code, or the job to which the user switches.

    `on_exit`: called when the screen is gone, unless another one follows.
    """
    async with session_factory() as source:
        app = make(source)
        with questions().on_screen(app.ask), terminal.held(lambda: app.exit(DETACHED)):
            status = await app.run_async()
        if app.choice is not None:
            return app.choice
        on_exit(source)
        return status if status is not None else app.return_code or DETACHED


def run_tui(
    session_factory: Callable[[], AbstractAsyncContextManager[Session]],
    *,
    theme: str | None,
    read_only: bool,
    ascii_only: bool,
    on_exit: Callable[[Session], None] = _say_nothing,
    home: HomeSource | None = None,
    has_job: bool = True,
    job_stays: bool = True,
) -> int | JobChoice:
    """Show a session until the user leaves; returns 0 detached or succeeded, 1 failed, 3 launch failed, 4 stopped.

    Returns the job to which the user switches instead. `on_exit` is called when the terminal is as it was, and the
    session still there. `home`: all jobs of all inventories; without `has_job` the application shows only these.
    `job_stays`: see `Shell`.
    Raises UsageError for a bad config.toml before anything is started.
    """
    config = keys.load_config()

    def make(source: Session) -> SupervisorApp:
        return SupervisorApp(
            source, config=config, theme=theme, read_only=read_only, ascii_only=ascii_only, home=home, has_job=has_job,
            job_stays=job_stays,
        )  # fmt: skip

    return asyncio.run(run_app(session_factory, make, on_exit))
