"""The application on a recording: the same screens, and keys for the time.

In: a player. Out: what the player shows, read-only.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, ClassVar

from textual.binding import Binding

from supervisor.tui import keys, words
from supervisor.tui.app import SupervisorApp, run_app

if TYPE_CHECKING:
    from textual.binding import BindingType

    from supervisor.recording.player import Player
    from supervisor.tui.source import Source


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
    def played(self) -> str:
        """The time that is shown, and how it runs."""
        player = self.player
        return f"REPLAY {words.clock_ns(player.now_ns)[:8]} x{player.speed:g} {player.standing}".rstrip()

    @property
    def turns(self) -> int:
        """How often the time has been put back."""
        return self.player.turns

    def pause(self) -> None:
        """Let the time stand, or run again."""
        self.player.pause()
        self.look_again()

    def action_pause(self) -> None:
        """Let the time stand, or run again."""
        self.pause()

    def action_step(self, direction: int) -> None:
        """Go to the next event, or to the one before."""
        self.player.step(direction)
        self.look_again()

    def action_speed(self, direction: int) -> None:
        """Let the time run faster or slower."""
        self.player.faster(direction)
        self.look_again()

    def leave(self) -> None:
        """Nothing goes on that one would have to ask about."""
        self.exit(0)


def run_replay(player: Player, *, theme: str | None, ascii_only: bool) -> int:
    """Show a recording until the user leaves; returns 0."""

    def make(_source: Source) -> ReplayApp:
        return ReplayApp(player, theme=theme, ascii_only=ascii_only)

    with words.told_by(player.now_s):
        return asyncio.run(run_app(lambda: player, make))
