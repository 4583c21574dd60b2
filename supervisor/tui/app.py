"""The application: one session, one timer, the screens, the navigation between them, theme and preferences.

In: a session, options of the command line, theme files. Out: an exit code.
"""

from __future__ import annotations

import asyncio
import gc
import os
from typing import TYPE_CHECKING, Any, ClassVar, Final

from textual import events
from textual.app import App
from textual.css.query import NoMatches

from remote_agent.wire.events import ENDED_STATES, Condition
from supervisor.paths import themes_dir
from supervisor.ssh.questions import questions
from supervisor.standard_streams import plain_error_console
from supervisor.tui import keys, terminal, themes
from supervisor.tui.dialogs.actions import ActionDialogs
from supervisor.tui.dialogs.base import Dialog
from supervisor.tui.dialogs.question import QuestionDialog
from supervisor.tui.keyboard import Keyboard, Typed
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
from supervisor.tui.shell import DEFAULTS, DETACHED, JobChoice, Level, Shell, ShellOptions
from supervisor.wording.incidents import is_open as is_open_incident

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractAsyncContextManager

    from textual.filter import LineFilter

    from supervisor.session import Session
    from supervisor.ssh.questions import Question
    from supervisor.tui.source import HomeSource

_LEVELS: Final[dict[str, Level]] = {"warning": "warning", "error": "error"}
TICK_S: Final = 1 / 8
# The user is notified when the job gets into one of these.
CALLS_FOR_HELP: Final = (Condition.HUNG, Condition.SLOW, Condition.DEGRADED, Condition.FAILED)
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

    def __init__(self, source: Session, options: ShellOptions = DEFAULTS, *, theme: str | None = None) -> None:
        self._no_color_wanted = _no_color()
        super().__init__(ansi_color=True if self._no_color_wanted else None)
        # Textual's tracebacks pass through our stderr, which escapes codes for colours.
        self.error_console = plain_error_console()
        self._only_text = terminal.OnlyText()
        # Animations only cost bytes on a slow line.
        self.animation_level = "none"
        chosen = themes.Chooser(self, themes.NO_COLOR_THEME if self._no_color_wanted else theme)
        self.shell = Shell(self, source, chosen, options, self.tick)
        self._recall()
        self._config = config = options.config
        self.set_keymap({f"{name}.{mode}": keys for name, keys in config.keys.items() for mode in self.MODES})
        self.keyboard = Keyboard(self, self._take_typed)
        self._is_shown = asyncio.Event()
        self._title = ""
        self._condition = ""
        self._called = False
        """The user was notified of something that has not ended well yet."""
        self._announced = 0
        self._incident_opened = False
        self._was_launching = False

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
        shell = self.shell
        self.set_class(shell.glyphs.ascii, "-ascii")
        if not shell.has_job:
            self.switch_mode(keys.HOME)
        elif shell.source.launching or shell.job_view.problem:
            self.switch_mode("launch")
            self._was_launching = shell.source.launching
        self._report_themes()
        self.set_interval(CHECK_EVERY_S, self.reread_themes)
        self.set_interval(TICK_S, self.tick)
        # A coroutine object instead of a function would never be awaited if the application ended before the worker.
        self.run_worker(self.keyboard.run, group="keys")  # type: ignore[arg-type]
        self.call_after_refresh(_settle_memory)

    def tick(self) -> None:
        """Pass the newest state to the visible screen."""
        if not self.is_running:
            return
        shell = self.shell
        self._recall()
        if shell.paused_s is not None:
            self._tick_paused()
            return
        changed = shell.take()
        screen = self._live_screen
        if screen is not None:
            screen.tick(shell.job_view, shell.source.status_age_s, changed)
        if changed:
            self._tell_terminal()
            if isinstance(self.screen, Dialog) and self.screen.is_mounted:
                self.screen.tick()
            self._steer()

    @property
    def _live_screen(self) -> LiveScreen | None:
        """The screen that is visible, under a dialog or not, once it can draw."""
        screen = self.screen_stack[0]
        return screen if isinstance(screen, LiveScreen) and screen.is_mounted and screen.size else None

    def _tell_terminal(self) -> None:
        """Set the terminal's title, and ring its bell when the job needs attention."""
        shell = self.shell
        title, condition = shell.job_view.title if shell.has_job else self.TITLE, shell.job_view.condition
        if title != self._title and self._driver is not None:
            if not self._title:
                self._driver.write(terminal.keep_title_sequence())
            self._driver.write(terminal.title_sequence(title))
            self._title = title
        if condition != self._condition and self._condition and not shell.bundle_text:
            self._call_user(condition)
        self._condition = condition

    def _call_user(self, condition: str) -> None:
        """Notify the user of a failure, a hang, a lost node, of the recovery, and of the end."""
        job_view = self.shell.job_view
        is_open = job_view.incident is not None and is_open_incident(job_view.incident)
        help_wanted = condition in CALLS_FOR_HELP or (condition == Condition.RESTARTING and is_open)
        recovered = self._called and condition == Condition.RUNNING
        if (help_wanted or recovered or condition in ENDED_STATES) and self._driver is not None:
            what = "running again" if recovered else job_view.look.word
            cause = job_view.incident["summary"] if help_wanted and job_view.incident else ""
            text = f"{what}: {cause}" if cause else what
            wanted = self._config.notice == "desktop"
            sequence = terminal.notice_sequence(f"supervisor {job_view.job}", text) if wanted else ""
            if sequence:
                self._driver.write(sequence)
            elif self._config.notice != "off":
                self.bell()
        self._called = help_wanted or (self._called and not recovered)

    def _tick_paused(self) -> None:
        """Redraw what the user changes, from the state at which the display was frozen."""
        shell, screen = self.shell, self._live_screen
        wanted = shell.take_redraw()
        if screen is not None:
            screen.tick_paused(shell.job_view, shell.source.status_age_s, wanted)

    def action_pause(self) -> None:
        """Freeze or resume the display."""
        self.shell.pause()

    def on_text_selected(self) -> None:
        """Copy what was selected with the mouse; the lines below may move, so nothing stays selected."""
        screen = self.screen
        if screen.selections:
            text = (screen.get_selected_text() or "").strip("\n")
            screen.clear_selection()
            if text:
                self.shell.copy(text)

    def _steer(self) -> None:
        """Show new notices; change the screen when the launch or the job ends, unless a dialog is open."""
        shell = self.shell
        source, job_view = shell.source, shell.job_view
        for notice in source.notices[self._announced :]:
            shell.say(notice.text, level=_LEVELS.get(notice.level, "information"), seconds=8)
        self._announced = len(source.notices)
        if len(self.screen_stack) > 1:
            return
        if job_view.problem and self.current_mode == "map":
            self.switch_mode("launch")
        elif self.current_mode == "launch" and self._was_launching and not source.launching and not job_view.problem:
            self._was_launching = False
            self.switch_mode("map")
        if job_view.ended and shell.leaves_at_end:
            self.exit(job_view.exit_status or 0)
        elif job_view.ended and job_view.state == "failed" and job_view.incident and not self._incident_opened:
            self._incident_opened = True
            shell.open_incident()

    # --- themes

    def get_theme_variable_defaults(self) -> dict[str, str]:
        """Return variables that Textual's own style sheets need and a theme file may leave out."""
        return themes.VARIABLE_DEFAULTS

    def action_theme(self) -> None:
        """Use the next theme in the order of their names."""
        self.shell.themes.use_next()
        self.shell.look_again()

    def reread_themes(self) -> None:
        """Use changed theme files; what is wrong with one is a notice."""
        if self.shell.themes.reread():
            self.shell.look_again()
        self._report_themes()

    def _report_themes(self) -> None:
        for problem in self.shell.themes.take_problems():
            self.shell.say(problem, title="theme", level="warning", seconds=10)

    # --- preferences

    def _recall(self) -> None:
        """Load the preferences of this job as soon as its id is known."""
        if self.shell.recall():
            self.shell.themes.prefer(self.shell.preferences.theme)

    def on_unmount(self) -> None:
        """Give the terminal its title back, and save the preferences of this job."""
        if self._title and self._driver is not None:
            self._driver.write(terminal.keep_title_sequence(back=True))
        if not self._no_color_wanted:
            self.shell.preferences.theme = self.shell.palette.name
        self.shell.keep_preferences()

    # --- navigation

    def action_go(self, mode: str) -> None:
        """Go to a screen."""
        self.shell.go(mode)

    def action_last(self) -> None:
        """Go to the previous screen; again: return."""
        self.shell.last()

    def action_incident(self) -> None:
        """Show the newest incident."""
        self.shell.open_incident()

    def action_answer(self) -> None:
        """Ask what ssh asks for the hosts that are waiting for it."""
        if not self.shell.source.ask_user():
            self.shell.say("no host needs an answer")

    async def ask(self, question: Question) -> str | None:
        """Ask the user what ssh asks, until it needs no answer any more."""
        await self._is_shown.wait()
        answer: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        title = f"ssh to {question.where}"
        if question.kind == "notice":
            self.shell.say(clean(question.prompt), title=title, seconds=600)
            try:
                return await answer
            finally:
                for notice in [notice for notice in self._notifications if notice.title == title]:
                    self._unnotify(notice)
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
        ActionDialogs(self.shell).leave()


def _no_color() -> bool:
    """Return whether NO_COLOR is set and not empty; Textual would also honour an empty one."""
    if os.environ.get("NO_COLOR") == "":
        del os.environ["NO_COLOR"]
    return "NO_COLOR" in os.environ


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
        if app.shell.choice is not None:
            return app.shell.choice
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

    options = ShellOptions(config, read_only, ascii_only, home, has_job, job_stays)

    def make(source: Session) -> SupervisorApp:
        return SupervisorApp(source, options, theme=theme)

    return asyncio.run(run_app(session_factory, make, on_exit))
