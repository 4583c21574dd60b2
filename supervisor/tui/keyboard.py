"""The keys that are typed, each passed on when the screen is ready for it.

In: keys and pastes. Out: the same, one after the other.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Final

from textual import events
from textual.app import App, ScreenStackError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from textual.dom import DOMNode

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
