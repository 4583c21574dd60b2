"""Keys in the order in which they are typed, each to where the ones before it have led.

In: keys and pasted text. Out: the same, one at a time.

**No key is handed on before all that the last one has led to is there: another screen, a dialog, a field to type in.**
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final

from textual import events
from textual.app import ScreenStackError

if TYPE_CHECKING:
    from textual.app import App
    from textual.dom import DOMNode

Typed = events.Key | events.Paste
# A screen that takes longer does not hold up what is typed, Ctrl-C among it, seconds.
DEADLINE: Final = 5.0
# What a widget tells another because of a key (a button: it was pressed) may still be on its way behind the first one.
ROUNDS: Final = 2


class Keyboard:
    """What is typed, on its way into an application."""

    def __init__(self, app: App[Any], hand_on: Callable[[Typed], Awaitable[None]]) -> None:
        self._app = app
        self._hand_on = hand_on
        self._waiting: asyncio.Queue[Typed] = asyncio.Queue()

    def put(self, event: Typed) -> None:
        """Take what has just been typed."""
        if isinstance(event, events.Key) and event.key == "ctrl+j":
            # So a terminal hands on an enter that was typed before the screen had it, as a shell would.
            event = events.Key("enter", "\r")
        self._waiting.put_nowait(event)

    async def run(self) -> None:
        """Hand on what is typed, until cancelled or until the application has no screen any more."""
        with contextlib.suppress(ScreenStackError):
            here = self._here
            while True:
                event = await self._waiting.get()
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._settled(here), DEADLINE)
                here = self._here
                await self._hand_on(event)

    @property
    def _here(self) -> DOMNode:
        """Where a key goes to now."""
        return self._app.focused or self._app.screen

    async def _settled(self, here: DOMNode) -> None:
        """Go behind the last key, from where it went up to the application, until where the next one goes stays."""
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
