"""What the user asks of ranks: a signal, their stacks on a page, their stacks and flight records in files.

In: an action, a selection or marks. Out: one request for these ranks; a page to read.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING, Final, NamedTuple

from remote_agent.wire import WireError
from supervisor.errors import SupervisorError
from supervisor.plain import ranges
from supervisor.plain_stacks import stacks_lines
from supervisor.tui import words
from supervisor.tui.screens.dialogs import Menu, MenuItem, TextDialog

if TYPE_CHECKING:
    from supervisor.actions import Action
    from supervisor.tui.app import SupervisorApp
    from supervisor.tui.desk import Desk
    from supervisor.tui.screens.base import Target
    from supervisor.tui.source import Source

SIGNALS: Final = (
    ("USR1", "what many scripts save a snapshot on; it ends those that do not handle it"),
    ("TERM", "asks it to end; the group restarts"),
    ("KILL", "ends it at once; the group restarts"),
    ("INT", "Ctrl-C"),
    ("STOP", "it stands still until CONT: for tests of hangs"),
    ("CONT", "lets it go on"),
)


class Whose(NamedTuple):
    """Ranks that an action may be about."""

    key: str
    label: str
    ranks: list[int]


def begin(app: SupervisorApp, desk: Desk, action: Action, target: Target) -> None:
    """Ask which ranks are meant, and what else has to be asked."""
    if action.confirm:
        _signal(app, desk, action, target)
        return
    choices = _choices(app, target)
    if len(choices) == 1:
        _do(app, desk, action, choices[0])
        return

    def chosen(key: str | None) -> None:
        whose = next((whose for whose in choices if whose.key == key), None)
        if whose is not None:
            _do(app, desk, action, whose)

    items = [MenuItem(whose.key, whose.key, whose.label, ranges(whose.ranks)) for whose in choices]
    app.push_screen(Menu(f"{action.label}: of which ranks?", lambda: items), chosen)


def _marked(app: SupervisorApp) -> list[int]:
    return [rank for rank in app.memory.ranks if app.snapshot.rank(rank) is not None]


def _choices(app: SupervisorApp, target: Target) -> list[Whose]:
    """What is marked, what is selected, all of the job: the nearest first."""
    everyone = [row.rank for row in app.snapshot.ranks]
    node = app.snapshot.nodes_by_name.get(target.node or "")
    found = [Whose("m", "what is marked", _marked(app))]
    if target.rank is not None:
        found.append(Whose("r", f"rank {target.rank}", [target.rank]))
    if node is not None:
        found.append(Whose("n", f"node {node.name}", [row.rank for row in node.ranks]))
    return [*(whose for whose in found if whose.ranks), Whose("a", "the whole job", everyone)]


def _do(app: SupervisorApp, desk: Desk, action: Action, whose: Whose) -> None:
    if action.op == "stacks":
        app.push_screen(StacksPage(app.source, whose))
        return
    wish = dataclasses.replace(action, args=(("ranks", whose.ranks),))
    names = tuple(str(rank) for rank in whose.ranks)
    app.run_worker(desk.send(wish, names, None), exit_on_error=False, group="requests")


class StacksPage(TextDialog):
    """Where ranks are, from the moment of the question on."""

    WIDEST = 132

    def __init__(self, source: Source, whose: Whose) -> None:
        asked = words.clock_ns(int(words.now() * 1e9))[:8]
        super().__init__(
            f"stacks of {whose.label}, {asked}", f"asking {words.count(len(whose.ranks), 'rank')}; they go on"
        )
        self._source = source
        self._ranks = whose.ranks

    def on_mount(self) -> None:
        """Ask; who closes the page waits no longer."""
        super().on_mount()
        self.run_worker(self._ask(), exit_on_error=False)

    async def _ask(self) -> None:
        try:
            found = await self._source.stacks(self._ranks)
        except (SupervisorError, WireError, OSError, asyncio.TimeoutError) as error:
            self.tell(str(error.args[0] if error.args else "") or "no answer")
        else:
            self.tell("\n".join(stacks_lines(**found)))


def _signal(app: SupervisorApp, desk: Desk, action: Action, target: Target) -> None:
    ranks = _marked(app) or ([target.rank] if target.rank is not None else [])
    if not ranks:
        app.say(f"{action.label}: select or mark a rank", level="warning")
        return

    def chosen(name: str | None) -> None:
        if name is not None:
            wish = dataclasses.replace(action, label=f"Send {name} to rank", args=(("ranks", ranks), ("signal", name)))
            desk.confirm(wish, tuple(str(rank) for rank in ranks))

    items = [MenuItem(name, name[0], name, note) for name, note in SIGNALS]
    app.push_screen(Menu(f"signal to rank {', '.join(map(str, ranks))}", lambda: items), chosen)
