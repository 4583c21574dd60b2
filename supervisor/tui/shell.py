"""What screens, dialogs and actions need of the application.

In: nothing. Out: the `Shell` protocol, which `app.SupervisorApp` implements, and the `Target` of an action.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence

    from textual.screen import Screen

    from remote_agent.wire.documents import JournalEvent
    from supervisor.session import Session
    from supervisor.tui.keys import KeyBinding
    from supervisor.tui.looks import Glyphs
    from supervisor.tui.model import JobView
    from supervisor.tui.preferences import Preferences
    from supervisor.tui.rows.incident import LogPlace
    from supervisor.tui.rows.spans import Palette
    from supervisor.tui.source import HomeSource
    from supervisor.tui.terminal import Lent
    from supervisor.tui.themes import Skin

T = TypeVar("T")
Level = Literal["information", "warning", "error"]


@dataclasses.dataclass(frozen=True)
class Target:
    """What the user has selected: a rank, a node, or (with neither) the whole job."""

    node: str | None = None
    rank: int | None = None


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


class Shell(Protocol):
    """The application, as the parts that it is composed of see it."""

    source: Session
    job_view: JobView
    preferences: Preferences
    palette: Palette
    glyphs: Glyphs
    key_table: Sequence[KeyBinding]
    read_only: bool
    home: HomeSource | None
    """The jobs of all inventories; None where there is no switching."""
    job_stays: bool
    """The job continues when the user leaves; False: its hosts are part of this program."""
    has_job: bool
    """False: the application shows the home screen alone."""

    # --- state

    @property
    def event_rows(self) -> Sequence[JournalEvent]:
        """The journal, an incident as one row."""

    @property
    def skins(self) -> Mapping[str, Skin]:
        """The usable themes by name."""

    @property
    def active_screen(self) -> ActiveScreen | None:
        """The screen of the job that is visible, under a dialog or not."""

    @property
    def is_running(self) -> bool:
        """False while the application closes."""

    @property
    def paused_s(self) -> float | None:
        """Seconds since the user froze the display; None while it is live."""

    @property
    def bundle_text(self) -> str:
        """When the bundle that is shown was made; "" on a job."""

    @property
    def has_way_back(self) -> bool:
        """Whether there is another screen to go back to."""

    # --- notices and dialogs

    def say(self, text: str, *, title: str = "", level: Level = "information", seconds: float = 6) -> None:
        """Show a notice."""

    def unsay(self, title: str) -> None:
        """Remove the notices with this title."""

    def copy(self, text: str) -> None:
        """Copy a text to the clipboard."""

    def push_screen(self, screen: Screen[T], callback: Callable[[T | None], Any] | None = None) -> Any:
        """Open a dialog; `callback` gets its answer."""

    def run_worker(self, work: Any, *, group: str, exit_on_error: bool, exclusive: bool = False) -> Any:
        """Run a coroutine in the background."""

    async def lend(self, use: Callable[[Lent], Awaitable[None]]) -> None:
        """Take the screen off the terminal while it is used; raises what `use` raises, SuspendNotSupported."""

    def call_later(self, callback: Callable[..., Any], *args: Any) -> Any:
        """Call a function after the messages that are already waiting."""

    def look_again(self) -> None:
        """Redraw the visible screen soon."""

    def set_skin(self, name: str) -> None:
        """Use a theme."""

    # --- navigation

    def back(self) -> None:
        """Go back."""

    def open_log(self, target: Target, generation: int | None = None, streams: tuple[str, ...] | None = None) -> None:
        """Show the log of a rank, a node or all ranks."""

    def open_place(self, place: LogPlace) -> None:
        """Show one line of a log."""

    def go_to_time(self, time_s: float) -> None:
        """Show what all ranks printed at a time."""

    def open_event(self, index: Hashable) -> None:
        """Show what an event is about: the incident, or the log."""

    def target_of_event(self, index: Hashable) -> Target:
        """Return the node and rank of an event."""

    def open_ranks_of(self, node: str) -> None:
        """Show the ranks with the first rank of a node selected."""

    def switch_to(self, choice: JobChoice) -> None:
        """Detach, and show another job."""

    def leave_at_end(self, wanted: bool) -> None:
        """Exit as soon as the job has ended, or do not."""

    def exit(self, result: int) -> None:
        """Exit with this status."""
