"""The question before a group starts from another work tree, and the one after it where nodes did not get it.

In: what has been edited, the status, the answers of dialogs. Out: one request; the failed nodes by name.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from textual.binding import Binding
from textual.widgets import Button

from remote_agent.wire import WireError
from supervisor import plain
from supervisor.errors import SupervisorError
from supervisor.membership import plan
from supervisor.tui import words
from supervisor.tui.screens.dialogs import ButtonDialog, Choice

if TYPE_CHECKING:
    from supervisor.actions import Action
    from supervisor.tui.app import SupervisorApp
    from supervisor.tui.source import Json

# Of what a restart leads to: the rest stays as it is.
_FACTS: Final = ("Lost", "Downtime")


def offer(app: SupervisorApp, action: Action) -> None:
    """Look at what is edited here, then ask."""
    # One question: who presses the key again while a large tree is read waits for the last one.
    app.run_worker(_offer(app, action), exit_on_error=False, exclusive=True, group="edited")


class SyncDialog(ButtonDialog):
    """What has been edited, and the ways on from here."""

    BINDINGS = [Binding("y", "yes", show=False)]

    def action_yes(self) -> None:
        """Sync, as `y` goes on in every question; with nothing to sync it decides nothing."""
        for button in self.query("#sync").results(Button):
            button.press()


async def _offer(app: SupervisorApp, action: Action) -> None:
    try:
        found = await app.source.edited()
    except (SupervisorError, WireError, OSError, asyncio.TimeoutError) as error:
        _refused(app, action, error)
        return
    change, previous = found["change"], found["tree"].get("previous")
    facts = [("Target", f"job {app.snapshot.job}, {words.count(len(app.snapshot.ranks), 'rank')}")]
    facts.append(("Code", plain.tree_change(change) if change else "no file has changed since it was synced"))
    if previous:
        facts.append(("Before", f"{_name(previous)}, which is still on the nodes"))
    facts.append(("Effect", action.effect(app.source.status, ())))
    facts += [fact for fact in plan("restart", (), app.source.status, app.source.events).facts if fact[0] in _FACTS]
    choices = [Choice("cancel", "Cancel")]
    choices += [Choice("sync", "Sync and restart", danger=True)] if change else []
    choices += [Choice("rollback", "Roll back", danger=True)] if previous else []

    def answered(answer: str | None) -> None:
        if answer in ("sync", "rollback"):
            wish = {"digest": change["digest"]} if answer == "sync" else {}
            _begin(app, action, answer, wish)

    app.push_screen(SyncDialog(f"{action.label}?", facts, choices, "cancel"), answered)


def _name(tree: Json) -> str:
    return f"work tree {tree['digest'][:8]} of {words.clock_ns(tree.get('since_ns')).partition('.')[0]}"


def _begin(app: SupervisorApp, action: Action, verb: str, wish: Json) -> None:
    app.run_worker(_send(app, action, verb, wish), exit_on_error=False, group="requests")


async def _send(app: SupervisorApp, action: Action, verb: str, wish: Json) -> None:
    if verb == "sync":
        app.say(f"{action.label}: bringing the files to the nodes; the job goes on meanwhile", seconds=4)
    try:
        answer = await app.source.request(verb, **wish)
    except (SupervisorError, WireError, OSError, asyncio.TimeoutError) as error:
        _refused(app, action, error)
        return
    app.look_again()
    if answer["accepted"]:
        app.say(str(answer["message"]), title=action.label)
    else:
        _ask_without(app, action, verb, wish, answer)


def _ask_without(app: SupervisorApp, action: Action, verb: str, wish: Json, answer: dict[str, Any]) -> None:
    """Name the nodes that did not get it; nothing has been restarted."""
    failed = {name: one for name, one in answer["nodes"].items() if not one["accepted"]}
    facts = [(name, f"{one['message']}  {one.get('hint') or ''}".strip()) for name, one in failed.items()]
    facts.append(("", "Nothing is restarted. The other nodes keep the new files for the next try."))
    choices = [Choice("cancel", "Cancel"), Choice("again", "Try again", danger=True)]
    if len(failed) < len(answer["nodes"]):
        who = next(iter(failed)) if len(failed) == 1 else f"these {len(failed)}"
        choices.append(Choice("partial", f"Go without {who}", danger=True))

    def answered(choice: str | None) -> None:
        if choice in ("again", "partial"):
            _begin(app, action, verb, {**wish, "partial": choice == "partial"})

    title = f"{action.label}: {len(failed)} of {words.count(len(answer['nodes']), 'node')} failed"
    app.push_screen(ButtonDialog(title, facts, choices, "cancel"), answered)


def _refused(app: SupervisorApp, action: Action, error: Exception) -> None:
    text, hint = str(error.args[0] if error.args else "") or "no answer", getattr(error, "hint", "")
    app.say(f"{text}\n{hint}" if hint else text, title=f"{action.label}: refused", level="error", seconds=12)
