"""A restart from edited files, or back to those before: what has changed, the copying, the nodes where it failed.

In: the edited tree, answers of dialogs. Out: the requests `sync` and `rollback`, and their results as notices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from remote_agent.text.names import count
from supervisor.tui.dialogs.base import ButtonDialog, DialogButton
from supervisor.tui.dialogs.requests import PROBLEMS, Requests, result_facts
from supervisor.wording import values
from supervisor.wording.events import tree_change
from supervisor.wording.plan import plan

if TYPE_CHECKING:
    from collections.abc import Mapping

    from remote_agent.wire import Args
    from remote_agent.wire.documents import ReplyEntry
    from supervisor.actions import Action
    from supervisor.tui.shell import Shell


class SyncDialogs:
    """The dialogs of the action `sync`."""

    def __init__(self, shell: Shell) -> None:
        self._shell = shell
        self._requests = Requests(shell)

    async def offer(self, action: Action) -> None:
        """Read which files were edited, then ask whether to restart from them or to roll back."""
        source = self._shell.source
        try:
            edited = await source.edited()
        except PROBLEMS as error:
            self._requests.refused(action.label, error)
            return
        change, previous = edited["change"], edited["tree"].get("previous")
        facts = [
            ("Target", self._requests.target_text(action, ())),
            ("Files", edited["place"]),
            ("Code", tree_change(change) if change else "no file has changed since the last sync"),
        ]
        if previous:
            since = values.clock_ns(previous.get("since_ns")).partition(".")[0]
            facts.append(("Before", f"work tree {previous['digest'][:8]} of {since}, still on the nodes"))
        facts.append(("Effect", action.effect(source.status, ())))
        titles = ("Lost", "Downtime")
        facts += [fact for fact in plan("restart", (), source.status, source.events).facts if fact[0] in titles]
        buttons = [DialogButton("cancel", "Cancel")]
        buttons += [DialogButton("sync", "Sync and restart", danger=True)] if change else []
        buttons += [DialogButton("rollback", "Roll back", danger=True)] if previous else []

        def answered(answer: str | None) -> None:
            if answer in ("sync", "rollback"):
                self._begin(action, answer, {"digest": change["digest"]} if answer == "sync" and change else {})

        self._shell.app.push_screen(ButtonDialog(f"{action.label}?", facts, buttons, "cancel", "sync"), answered)

    def _begin(self, action: Action, verb: str, args: Args) -> None:
        self._shell.app.run_worker(self._sync(action, verb, args), exit_on_error=False, group="requests")

    async def _sync(self, action: Action, verb: str, args: Args) -> None:
        if verb == "sync":
            self._shell.say(f"{action.label}: copying the files to the nodes; the job continues meanwhile", seconds=4)
        try:
            answer = await self._shell.source.request(verb, **args)
        except PROBLEMS as error:
            self._requests.refused(action.label, error)
            return
        self._shell.look_again()
        if answer["accepted"]:
            self._shell.say(str(answer["message"]), title=action.label)
        else:
            self._ask_without(action, verb, args, answer["nodes"])

    def _ask_without(self, action: Action, verb: str, args: Args, nodes: Mapping[str, ReplyEntry]) -> None:
        """Name the nodes that did not get the files, and ask whether to try again or to continue without them."""
        failed = {name: one for name, one in nodes.items() if not one["accepted"]}
        facts = [
            *result_facts(failed),
            ("", "Nothing was restarted. The other nodes keep the new files for the next attempt."),
        ]
        buttons = [DialogButton("cancel", "Cancel"), DialogButton("again", "Try again", danger=True)]
        if len(failed) < len(nodes):
            who = next(iter(failed)) if len(failed) == 1 else f"these {len(failed)}"
            buttons.append(DialogButton("partial", f"Continue without {who}", danger=True))

        def answered(choice: str | None) -> None:
            if choice in ("again", "partial"):
                self._begin(action, verb, {**args, "partial": choice == "partial"})

        title = f"{action.label}: {len(failed)} of {count(len(nodes), 'node')} failed"
        self._shell.app.push_screen(ButtonDialog(title, facts, buttons, "cancel", "again"), answered)
