"""The application for a replay: the same screens, and keys that move the time.

In: the player of a recording. Out: its state at the chosen time, read-only.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, ClassVar

from textual.binding import Binding

from supervisor.tui import keys, times
from supervisor.tui.app import SupervisorApp, run_app
from supervisor.wording import values

if TYPE_CHECKING:
    from textual.binding import BindingType

    from supervisor.recording.player import Player
    from supervisor.tui.source import SessionSource


class ReplayApp(SupervisorApp):
    """The terminal UI of a recording."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(key.keys, key.action, key.label, show=False, id=key.id) for key in keys.REPLAY
    ]

    def __init__(self, player: Player, *, theme: str | None = None, ascii_only: bool = False) -> None:
        self.player = player
        super().__init__(player, theme=theme, read_only=True, ascii_only=ascii_only)
        self.key_table = (*keys.REPLAY, *self.key_table)

    @property
    def replay_status(self) -> str:
        """Time, speed and state of the replay."""
        player = self.player
        return f"REPLAY {values.clock_ns(player.now_ns)[:8]} x{player.speed:g} {player.standing}".rstrip()

    @property
    def replay_rewinds(self) -> int:
        """How often the replay was moved back in time."""
        return self.player.turns

    def action_pause(self) -> None:
        """Pause or resume the replay."""
        self.player.pause()
        self.look_again()

    def action_step(self, direction: int) -> None:
        """Go to the next or previous event."""
        self.player.step(direction)
        self.look_again()

    def go_to_time(self, time_s: float) -> None:
        """Go to a time of the recording."""
        self.player.seek(int(time_s * 1e9))
        self.look_again()

    def action_speed(self, direction: int) -> None:
        """Replay faster or slower."""
        self.player.faster(direction)
        self.look_again()

    def action_leave(self) -> None:
        """Exit without a question: no job is running."""
        self.exit(0)


def run_replay(player: Player, *, theme: str | None, ascii_only: bool) -> int:
    """Replay a recording until the user leaves; returns 0."""

    def make(_source: SessionSource) -> ReplayApp:
        return ReplayApp(player, theme=theme, ascii_only=ascii_only)

    with times.read_from(player.now_s):
        status = asyncio.run(run_app(lambda: player, make))
        assert isinstance(status, int), "a replay has no home screen"
        return status
