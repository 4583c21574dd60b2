"""What the user asks the cluster to do: menus and confirmations made from the registry, then one request each.

In: a selection, answers of dialogs. Out: requests to the session, and what came of them as notices.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from remote_agent.wire import WireError
from supervisor import actions
from supervisor.actions import ACTIONS, Action
from supervisor.errors import SupervisorError
from supervisor.membership import OPS, plan
from supervisor.tui import keys, of_ranks, resync, words
from supervisor.tui.screens.base import Target
from supervisor.tui.screens.dialogs import ButtonDialog, Choice, Confirm, ConfirmTyped, Menu, MenuItem
from supervisor.tui.screens.palette import Entry, Help, Palette

if TYPE_CHECKING:
    from supervisor.tui.app import SupervisorApp
    from supervisor.tui.model import NodeRow

# The verbs that take several nodes at once.
SEVERAL: Final = ("remove", "add", "cordon", "uncordon")
_OUTSIDE: Final = ("removed", "spare", "lost", "failed", "")
RANKS_IN_PALETTE: Final = 1024


def _named(action: Action, names: Sequence[str]) -> str:
    # A button has one line.
    return f"{action.label} {', '.join(names) if len(names) < 4 else f'({len(names)})'}" if names else action.label


def changes(action: Action) -> bool:
    """Whether it changes something, or leaves something on the nodes: who only looks may not."""
    return action.destructive or action.op == "keep"


def offered() -> list[Action]:
    """The actions of the menu: those that change something, and the question where the ranks are."""
    return [action for action in ACTIONS if action.key and action.op and (changes(action) or action.op == "stacks")]


class Desk:
    """Asks, confirms, sends."""

    def __init__(self, app: SupervisorApp) -> None:
        self._app = app

    # --- menu

    def open_menu(self, target: Target) -> None:
        """The actions, with what each would be about."""

        def items() -> list[MenuItem]:
            return [self._item(action, target) for action in offered()]

        def chosen(name: str | None) -> None:
            action = next((action for action in offered() if action.id == name), None)
            if action is not None:
                self.begin(action, target)

        self._app.push_screen(Menu(f"actions on {self._name(target)}", items), chosen)

    def _item(self, action: Action, target: Target) -> MenuItem:
        off = self._obstacle(action)
        if not off and not self._app.snapshot.state:
            off = "the job cannot be reached" if self._app.snapshot.problem else "the job is not reached yet"
        elif not off and action.scope == "node" and not self._candidates(action):
            off = "no node for it"
        note = action.help
        if action.scope == "node" and (names := self._targets(action, target)):
            note = f"{', '.join(names)}: {action.help}"
        return MenuItem(action.id, action.key, action.label, note, off)

    def _obstacle(self, action: Action) -> str:
        if self._app.read_only and changes(action):
            return "this supervisor is read-only"
        return "the job is over" if self._app.snapshot.ended else ""

    def _name(self, target: Target) -> str:
        if target.rank is not None:
            return f"rank {target.rank} on {target.node}"
        return target.node or self._app.snapshot.job or "the job"

    def _candidates(self, action: Action) -> list[NodeRow]:
        nodes = self._app.snapshot.nodes
        if action.op == "add":
            return [node for node in nodes if node.state in _OUTSIDE and not node.ranks]
        if action.op in ("cordon", "uncordon"):
            on = action.op == "uncordon"
            return [node for node in nodes if node.cordoned == on and node.state not in ("removed", "")]
        if action.op == "remove":
            return [node for node in nodes if node.state not in ("removed", "")]
        return [node for node in nodes if node.state in ("running", "ready")]

    def _targets(self, action: Action, target: Target) -> tuple[str, ...]:
        """The nodes that a verb would be about: the marked ones, where there are any, else the selected one."""
        fitting = {row.name for row in self._candidates(action)}
        marked = [name for name in self._app.memory.nodes if name in self._app.snapshot.nodes_by_name]
        if marked and action.op in SEVERAL:
            return tuple(name for name in marked if name in fitting)
        return (target.node,) if target.node in fitting else ()

    # --- one action

    def begin(self, action: Action, target: Target) -> None:
        """Ask for the node if none is selected that fits, then for consent."""
        if obstacle := self._obstacle(action):
            self._warn(f"{action.label}: {obstacle}")
        elif action.op == "sync":
            resync.offer(self._app, action)
        elif action.choices:
            self._choose_value(action)
        elif action.scope == "rank":
            of_ranks.begin(self._app, self, action, target)
        elif action.scope != "node":
            self.confirm(action, ())
        elif names := self._targets(action, target):
            self.confirm(action, names)
        else:
            self._choose_node(action)

    def _choose_node(self, action: Action) -> None:
        if not self._candidates(action):
            self._warn(f"{action.label}: no node for it")
            return

        def items() -> list[MenuItem]:
            rows = self._candidates(action)
            return [MenuItem(row.name, "", row.name, f"{row.look.word}  {row.why}".strip()) for row in rows]

        def chosen(name: str | None) -> None:
            if name is not None:
                self.confirm(action, (name,))

        self._app.push_screen(Menu(f"{action.label}: which one?", items), chosen)

    def _choose_value(self, action: Action) -> None:
        items = [MenuItem(choice.id, choice.key, choice.label, choice.help) for choice in action.choices]

        def chosen(name: str | None) -> None:
            choice = next((choice for choice in action.choices if choice.id == name), None)
            if choice is not None:
                self._ask_when(dataclasses.replace(action, label=f"{action.label} {choice.label}"), choice)

        self._app.push_screen(Menu(f"{action.label}: which one?", lambda: items), chosen)

    def _ask_when(self, action: Action, choice: actions.Choice) -> None:
        """Whether a value is set for whenever there is a next group, or the group is restarted with it."""
        snapshot = self._app.snapshot
        facts = [
            ("Target", f"job {snapshot.job}"),
            ("Effect", action.effect(self._app.source.status, (str(choice),))),
            ("Restart", actions.BY_ID["job.restart"].effect(self._app.source.status, ())),
        ]
        buttons = [Choice("cancel", "Cancel"), Choice("later", "At the next restart", danger=True)]
        buttons.append(Choice("now", "Restart now", danger=True))
        generation = snapshot.generation

        def answered(answer: str | None) -> None:
            if answer in ("later", "now"):
                wish = dataclasses.replace(action, args=(("env", dict(choice.env)), ("later", answer == "later")))
                self._app.run_worker(self.send(wish, (), generation), exit_on_error=False, group="requests")

        self._app.push_screen(ButtonDialog(f"{action.label}?", facts, buttons, "cancel"), answered)

    def confirm(self, action: Action, names: tuple[str, ...]) -> None:
        """Say what it leads to; send it with consent."""
        snapshot, source = self._app.snapshot, self._app.source
        facts = [
            ("Target", self._about(action, names)),
            ("Effect", action.effect(source.status, names)),
        ]
        if action.op in OPS:
            facts += plan(str(action.op), names, source.status, source.events).facts
        yes = _named(action, names)
        generation = snapshot.generation

        def answered(answer: str | None) -> None:
            if answer != "yes":
                self._app.leave_when_ended = False
            else:
                self._app.run_worker(self.send(action, names, generation), exit_on_error=False, group="requests")

        dialog: Confirm = Confirm(f"{action.label}?", facts, yes)
        if action.confirm == 2 and snapshot.job:
            dialog = ConfirmTyped(f"{action.label}?", facts, yes, snapshot.job)
        self._app.push_screen(dialog, answered)

    def _about(self, action: Action, names: tuple[str, ...]) -> str:
        snapshot = self._app.snapshot
        if action.scope != "rank":
            return ", ".join(names) or f"job {snapshot.job}, {words.count(len(snapshot.ranks), 'rank')}"
        rows = (snapshot.rank(int(name)) for name in names)
        return ", ".join(f"rank {row.rank} on {row.node}" for row in rows if row is not None)

    async def send(self, action: Action, names: tuple[str, ...], generation: int | None) -> None:
        """Send one request, and say what came of it, node by node where it is about several."""
        args: dict[str, Any] = dict(action.args)
        if action.scope == "node" and len(names) == 1:
            args["node"] = names[0]
        elif action.scope == "node" and names:
            args["nodes"] = list(names)
        if action.op in (*OPS, "signal") and generation is not None:
            # What the user saw is part of these: they are refused when it has changed since.
            args["if_generation"] = generation
        what = _named(action, names)
        if action.op == "add":
            self._app.say(f"{what}: bringing up; the job goes on meanwhile", seconds=8)
        try:
            answer = await self._app.source.request(str(action.op), **args)
        except SupervisorError as error:
            self._app.leave_when_ended = False
            text = f"{error.message}\n{error.hint}" if error.hint else error.message
            self._app.say(text, title=f"{what}: refused", level="error", seconds=12)
        except (WireError, OSError, asyncio.TimeoutError) as error:
            self._app.leave_when_ended = False
            self._app.say(str(error) or "no answer", title=f"{what}: failed", level="error", seconds=12)
        else:
            self._report(action, names, answer)

    def _report(self, action: Action, names: tuple[str, ...], answer: dict[str, Any]) -> None:
        """Say what came of a request; those of several nodes that failed can be tried again, and stay marked."""
        ranks = {f"rank {rank}": one for rank, one in answer.get("ranks", {}).items()}
        told = ranks or answer.get("nodes") or {name: {"accepted": True} for name in names}
        failed = tuple(name for name, one in told.items() if not one["accepted"])
        marked = self._app.memory.nodes
        marked[:] = [name for name in marked if name in failed or name not in told]
        self._app.look_again()
        if not failed:
            self._app.say(str(answer.get("message") or "accepted"), title=_named(action, names))
            return
        facts = [(name, f"{one['message']}  {one.get('hint') or ''}".strip()) for name, one in told.items()]
        again = Choice("again", f"Try {failed[0] if len(failed) == 1 else f'these {len(failed)}'} again", danger=True)

        def answered(choice: str | None) -> None:
            if choice == "again" and action.scope == "rank":
                numbers = [int(name.split()[1]) for name in failed]
                self.confirm(
                    dataclasses.replace(action, args=(*action.args, ("ranks", numbers))), tuple(map(str, numbers))
                )
            elif choice == "again":
                self.confirm(action, failed)

        title = f"{action.label}: {len(told) - len(failed)} done, {len(failed)} failed"
        self._app.push_screen(ButtonDialog(title, facts, [Choice("close", "Close"), again], "close"), answered)

    def _warn(self, text: str) -> None:
        self._app.say(text, level="warning")

    # --- leaving

    def leave(self) -> None:
        """Detach is the default; stopping asks once more."""
        app, snapshot = self._app, self._app.snapshot
        if snapshot.ended:
            app.exit(snapshot.exit_status or 0)
        elif app.source.failure is not None and not snapshot.state:
            app.exit(int(getattr(app.source.failure, "exit_status", 3)))
        elif app.source.launching:
            self._ask_abort()
        else:
            self._ask_detach()

    def _ask_detach(self) -> None:
        app = self._app
        job = app.snapshot.job
        facts = [("", f"{job or 'The job'} goes on without this screen. `supervisor attach` brings it back.")]
        choices = [Choice("detach", "Detach"), Choice("stop", "Stop the job", danger=True), Choice("cancel", "Cancel")]
        if app.read_only:
            choices.pop(1)

        def answered(answer: str | None) -> None:
            if answer == "detach":
                app.exit(0)
            elif answer == "stop":
                app.leave_when_ended = True
                self.begin(actions.BY_ID["job.stop"], Target())

        app.push_screen(ButtonDialog("Leave?", facts, choices, "detach"), answered)

    def _ask_abort(self) -> None:
        app = self._app
        facts = [("", "The hosts are still being brought up. Giving up stops what has been started there.")]
        choices = [Choice("cancel", "Go on"), Choice("abort", "Give up the launch", danger=True)]

        def answered(answer: str | None) -> None:
            if answer == "abort":
                app.run_worker(self._abort(), exit_on_error=False, group="requests")

        app.push_screen(ButtonDialog("Leave?", facts, choices, "cancel"), answered)

    async def _abort(self) -> None:
        self._app.say("stopping what has been started")
        await self._app.source.cancel_launch()
        self._app.exit(int(getattr(self._app.source.failure, "exit_status", 3)))

    # --- palette and help

    def open_palette(self) -> None:
        """Everything by name."""
        app = self._app
        screen = app.live_screen
        if screen is None:
            return
        target = screen.selection()

        def chosen(name: str | None) -> None:
            if name is not None:
                self._run_entry(name, target)

        app.push_screen(Palette(self._entries(screen.NAME)), chosen)

    def _entries(self, screen: str) -> list[Entry]:
        app = self._app
        entries = [
            Entry(f"key:{key.action}", _titled(key.label), key.help, keys.shown(key.keys.split(",")[0]))
            for key in keys.of(screen, app.key_table)
            if key.palette
        ]
        offers = [action for action in offered() if not (app.read_only and changes(action))]
        entries += [Entry(f"act:{action.id}", action.label, action.help, f"x {action.key}") for action in offers]
        entries += [Entry(f"node:{node.name}", node.name, f"log of node {node.name}") for node in app.snapshot.nodes]
        ranks = app.snapshot.ranks[:RANKS_IN_PALETTE]
        entries += [Entry(f"rank:{row.rank}", f"r{row.rank}", f"log of rank {row.rank} on {row.node}") for row in ranks]
        entries += [Entry(f"theme:{name}", name, "theme", "T") for name in sorted(app.skins)]
        return entries

    def _run_entry(self, name: str, target: Target) -> None:
        app = self._app
        kind, _, value = name.partition(":")
        if kind == "theme":
            app.set_skin(value)
        elif kind == "node":
            app.open_log(Target(value))
        elif kind == "rank":
            row = app.snapshot.rank(int(value))
            app.open_log(Target(row.node if row else None, int(value)))
        elif kind == "act":
            self.begin(actions.BY_ID[value], target)
        elif kind == "key" and app.live_screen is not None:
            app.call_later(app.live_screen.run_action, value)

    def open_help(self, screen: str) -> None:
        """The keys of a screen, and the letters of the menu of actions."""
        known = keys.of(screen, self._app.key_table)
        here = [key for key in known if key.where != "any"]
        everywhere = [key for key in known if key.where == "any"]
        sections = [
            ("this screen", [_help_entry(key) for key in here]),
            ("everywhere", [_help_entry(key) for key in everywhere]),
            ("after x; what changes the job asks first", [Entry(a.id, a.label, a.help, a.key) for a in offered()]),
            ("signs", _signs(self._app.glyphs)),
        ]
        self._app.push_screen(Help(f"help: {screen}", [section for section in sections if section[1]]))


def _titled(name: str) -> str:
    return name[:1].upper() + name[1:]


def _help_entry(key: keys.Key) -> Entry:
    return Entry(key.id, key.label, key.help, " ".join(keys.shown(one) for one in key.keys.split(",")))


def _signs(glyphs: words.Glyphs) -> list[Entry]:
    entries = [Entry(name, name, f"rank {look.word}", glyphs.of(look)) for name, look in words.RANKS.items()]
    old = Entry("old", "old", "too old to be shown as the present, or no link", glyphs.of(words.NO_LINK))
    return [*entries, old]
