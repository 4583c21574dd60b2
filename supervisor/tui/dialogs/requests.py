"""One request to the session: its confirmation before, its result after it.

In: an action, what it applies to, the answer of a dialog. Out: the request; its result as a notice, node by node.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING, Final

from remote_agent.text.names import count
from remote_agent.wire import Args, WireError
from supervisor.errors import SupervisorError, why
from supervisor.tui.dialogs.base import ButtonDialog, Confirm, ConfirmTyped, DialogButton
from supervisor.wording.plan import plan

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from remote_agent.wire.documents import ReplyEntry, RequestReply
    from supervisor.actions import Action
    from supervisor.tui.shell import Shell

PROBLEMS: Final = (SupervisorError, WireError, OSError, asyncio.TimeoutError)


def named(action: Action, names: Sequence[str]) -> str:
    """Return an action and what it applies to, in one line."""
    # A button has one line.
    return f"{action.label} {', '.join(names) if len(names) < 4 else f'({len(names)})'}" if names else action.label


def result_facts(results: Mapping[str, ReplyEntry]) -> list[tuple[str, str]]:
    """Return what each node or rank answered."""
    return [(name, f"{one['message']}  {one.get('hint') or ''}".strip()) for name, one in results.items()]


class Requests:
    """The requests of one screen."""

    def __init__(self, shell: Shell) -> None:
        self._shell = shell

    def confirm(self, action: Action, names: tuple[str, ...]) -> None:
        """Show target and effect; send the request once it is confirmed."""
        job_view, source = self._shell.job_view, self._shell.source
        facts = [
            ("Target", self.target_text(action, names)),
            ("Effect", action.effect(source.status, names)),
        ]
        if action.plan:
            snapshot_id = str(dict(action.args).get("snapshot", ""))
            facts += plan(str(action.op), names, source.status, source.events, snapshot_id).facts
        yes = named(action, names)
        generation = job_view.generation

        def answered(answer: str | None) -> None:
            if answer != "yes":
                self._shell.leave_at_end(False)
            else:
                self.begin(action, names, generation)

        dialog: Confirm = Confirm(f"{action.label}?", facts, yes)
        if action.confirm == 2 and job_view.job:
            dialog = ConfirmTyped(f"{action.label}?", facts, yes, job_view.job)
        self._shell.app.push_screen(dialog, answered)

    def target_text(self, action: Action, names: tuple[str, ...]) -> str:
        """Return what an action applies to: the job, nodes or ranks."""
        job_view = self._shell.job_view
        if action.scope != "rank":
            return ", ".join(names) or f"job {job_view.job}, {count(len(job_view.ranks), 'rank')}"
        rows = (job_view.rank(int(name)) for name in names)
        return ", ".join(f"rank {row.rank} on {row.node}" for row in rows if row is not None)

    def begin(self, action: Action, names: tuple[str, ...], generation: int | None) -> None:
        """Send a request; its result is shown once it is there. `generation`: the one that the user saw."""
        self._shell.app.run_worker(self._send(action, names, generation), exit_on_error=False, group="requests")

    async def _send(self, action: Action, names: tuple[str, ...], generation: int | None) -> None:
        """Send one request and show its result, node by node if it applies to several."""
        args: Args = dict(action.args)
        if action.scope == "node" and len(names) == 1:
            args["node"] = names[0]
        elif action.scope == "node" and names:
            args["nodes"] = list(names)
        if action.guarded and generation is not None:
            # The request is refused if the group has changed since the user saw it.
            args["if_generation"] = generation
        title = named(action, names)
        if action.op == "add":
            self._shell.say(f"{title}: bringing up; the job continues meanwhile", seconds=8)
        try:
            answer = await self._shell.source.request(str(action.op), **args)
        except PROBLEMS as error:
            self.refused(title, error)
        else:
            self._report(action, names, answer)

    def refused(self, title: str, error: Exception) -> None:
        """Show why a request has failed."""
        self._shell.leave_at_end(False)
        text, word = why(error), "failed"
        if isinstance(error, SupervisorError):
            text, word = f"{error.message}\n{error.hint}".rstrip(), "refused"
        self._shell.say(text, title=f"{title}: {word}", level="error", seconds=12)

    def _report(self, action: Action, names: tuple[str, ...], answer: RequestReply) -> None:
        """Show the result of a request; nodes where it failed stay marked, and it can be tried again on them."""
        ranks = {f"rank {rank}": one for rank, one in answer.get("ranks", {}).items()}
        all_of_them: dict[str, ReplyEntry] = {name: {"accepted": True, "message": ""} for name in names}
        results = ranks or answer.get("nodes") or all_of_them
        failed = tuple(name for name, one in results.items() if not one["accepted"])
        marked = self._shell.preferences.nodes
        marked[:] = [name for name in marked if name in failed or name not in results]
        self._shell.look_again()
        if not failed:
            self._shell.say(str(answer.get("message") or "accepted"), title=named(action, names))
            return
        again = DialogButton(
            "again", f"Try {failed[0] if len(failed) == 1 else f'these {len(failed)}'} again", danger=True
        )

        def answered(choice: str | None) -> None:
            if choice == "again" and action.scope == "rank":
                numbers = [int(name.split()[1]) for name in failed]
                request = dataclasses.replace(action, args=(*action.args, ("ranks", numbers)))
                self.confirm(request, tuple(map(str, numbers)))
            elif choice == "again":
                self.confirm(action, failed)

        title = f"{action.label}: {len(results) - len(failed)} done, {len(failed)} failed"
        buttons = [DialogButton("close", "Close"), again]
        self._shell.app.push_screen(ButtonDialog(title, result_facts(results), buttons, "close", "again"), answered)

    def warn(self, text: str) -> None:
        """Show why nothing is done."""
        self._shell.say(text, level="warning")
