"""The menu of actions, the confirmation of each, and one request to the session once it is confirmed.

In: a selection, answers of dialogs. Out: requests to the session, and their results as notices.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from textual.app import SuspendNotSupported

from remote_agent.text.names import count, ranges
from remote_agent.wire import Args, WireError
from supervisor import actions
from supervisor.actions import ACTIONS, Action
from supervisor.errors import SupervisorError, why
from supervisor.tui import keys, times
from supervisor.tui.commands import Command
from supervisor.tui.dialogs.base import ButtonDialog, Confirm, ConfirmTyped, DialogButton, Menu, MenuItem, TextDialog
from supervisor.tui.dialogs.ports import PortDialog, Ports
from supervisor.tui.shell import Target
from supervisor.wording import values
from supervisor.wording.events import tree_change
from supervisor.wording.plan import plan
from supervisor.wording.stacks import stacks_lines
from supervisor.wording.status import snapshot_words

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from remote_agent.wire.documents import ReplyEntry, RequestReply
    from supervisor.tui.model import NodeRow
    from supervisor.tui.shell import Level, Shell
    from supervisor.tui.source import SessionSource
    from supervisor.tui.terminal import Lent

PROBLEMS: Final = (SupervisorError, WireError, OSError, asyncio.TimeoutError)
_OUTSIDE: Final = ("removed", "spare", "lost", "failed", "")
_ENDS: Final = "an unhandled signal ends the process, and the group restarts"
# Each entry has the name, the purpose, and the effect on the process of the rank.
SIGNALS: Final = (
    ("USR1", "many scripts save a snapshot on it; a script without a handler ends", _ENDS),
    ("TERM", "ask the process to exit; the group restarts", _ENDS),
    ("KILL", "end the process at once; the group restarts", "the process ends at once, and the group restarts"),
    ("INT", "Ctrl-C", _ENDS),
    ("STOP", "suspend the process until CONT, to test hangs", "the process is suspended; the others wait for it"),
    ("CONT", "resume the process", "a suspended process resumes; nothing ends"),
)


class RankSet(NamedTuple):
    """Ranks to which an action can apply."""

    key: str
    label: str
    ranks: list[int]


def offered(own: Sequence[Command] = ()) -> list[Action]:
    """Return the actions of the menu: those that change something, the question for stacks, and the user's commands."""
    ours = (action for action in ACTIONS if action.key and action.op and (changes(action) or action.op == "stacks"))
    return [*ours, *own]


def changes(action: Action) -> bool:
    """Return whether it changes the job or acts on the nodes; refused with --read-only."""
    return action.destructive or action.op in ("keep", "shell", "forward")


def _named(action: Action, names: Sequence[str]) -> str:
    # A button has one line.
    return f"{action.label} {', '.join(names) if len(names) < 4 else f'({len(names)})'}" if names else action.label


def _result_facts(results: Mapping[str, ReplyEntry]) -> list[tuple[str, str]]:
    """Return what each node or rank answered."""
    return [(name, f"{one['message']}  {one.get('hint') or ''}".strip()) for name, one in results.items()]


class ActionDialogs:
    """The dialogs before and after an action."""

    def __init__(self, shell: Shell) -> None:
        self._shell = shell

    # --- menu

    def open_menu(self, target: Target) -> None:
        """Show the actions, each with its target."""

        actions_by_id = {action.id: action for action in offered(self._shell.config.commands)}

        def items() -> list[MenuItem]:
            return [self._item(action, target) for action in actions_by_id.values()]

        self._pick(f"actions on {self._name(target)}", items, lambda name: self.begin(actions_by_id[name], target))

    def _pick(self, title: str, items: Callable[[], list[MenuItem]], use: Callable[[str], None]) -> None:
        """Show a menu, and use the name of the item that is chosen, if one is."""

        def chosen(name: str | None) -> None:
            if name is not None:
                use(name)

        self._shell.push_screen(Menu(title, items), chosen)

    def _item(self, action: Action, target: Target) -> MenuItem:
        job_view = self._shell.job_view
        off = self._obstacle(action)
        if isinstance(action, Command):
            letter = keys.display(action.key)
            return MenuItem(action.id, letter if len(letter) == 1 else "", action.label, action.help, off)
        if not off and not job_view.state:
            off = "the job cannot be reached" if job_view.problem else "still connecting to the job"
        elif not off and action.scope == "node" and not self._candidates(action):
            off = "no eligible node"
        note = action.help
        if action.scope == "node" and (names := self._targets(action, target)):
            note = f"{', '.join(names)}: {action.help}"
        return MenuItem(action.id, action.key, action.label, note, off)

    def _obstacle(self, action: Action) -> str:
        if self._shell.read_only and changes(action):
            return "this supervisor is read-only"
        # A command on this machine needs no job that runs.
        is_of_job = changes(action) or not isinstance(action, Command)
        return "the job has ended" if self._shell.job_view.ended and is_of_job else ""

    def _name(self, target: Target) -> str:
        if target.rank is not None:
            return f"rank {target.rank} on {target.node}"
        return target.node or self._shell.job_view.job or "the job"

    def _candidates(self, action: Action) -> list[NodeRow]:
        nodes = self._shell.job_view.nodes
        if action.op == "add":
            return [node for node in nodes if node.state in _OUTSIDE and not node.ranks]
        if action.op in ("cordon", "uncordon"):
            on = action.op == "uncordon"
            return [node for node in nodes if node.cordoned == on and node.state not in ("removed", "")]
        if action.op == "remove":
            return [node for node in nodes if node.state not in ("removed", "")]
        return [node for node in nodes if node.state in ("running", "ready")]

    def _targets(self, action: Action, target: Target) -> tuple[str, ...]:
        """Return the nodes to which a verb applies: the marked ones if there are any, otherwise the selected one."""
        eligible = {row.name for row in self._candidates(action)}
        marked = [name for name in self._shell.preferences.nodes if name in self._shell.job_view.nodes_by_name]
        if marked and action.applies_to_several:
            return tuple(name for name in marked if name in eligible)
        return (target.node,) if target.node in eligible else ()

    # --- one action

    def begin(self, action: Action, target: Target) -> None:
        """Ask for the node or the ranks if the selection does not name them, then for confirmation."""
        if obstacle := self._obstacle(action):
            self._warn(f"{action.label}: {obstacle}")
        elif action.op == "sync":
            # The worker is exclusive because the key may be pressed again while a large tree is read.
            self._shell.run_worker(self._offer_sync(action), exit_on_error=False, exclusive=True, group="edited")
        elif action.choices:
            self._choose_value(action)
        elif action.id == "job.back":
            self._choose_snapshot(action)
        elif isinstance(action, Command):
            self._begin_command(action, target)
        elif action.op in ("shell", "forward"):
            (self._open_shell if action.op == "shell" else self._ask_port)(action, target)
        elif action.scope == "rank":
            self._begin_on_ranks(action, target)
        elif action.scope != "node":
            self._confirm(action, ())
        elif names := self._targets(action, target):
            self._confirm(action, names)
        else:
            self._choose_node(action)

    def _open_shell(self, action: Action, target: Target) -> None:
        node = self._one_node(action, target)
        if node is None:
            return

        async def use(terminal: Lent) -> None:
            await self._shell.source.shell(terminal, node, target.rank)

        self._run_on_terminal(action, use)

    def _run_on_terminal(self, action: Action, use: Callable[[Lent], Awaitable[None]]) -> None:
        async def run() -> None:
            try:
                await self._shell.lend(use)
            except SuspendNotSupported:
                self._warn(f"{action.label}: this terminal cannot run one")
            except PROBLEMS as error:
                self._refused(action.label, error)

        self._shell.run_worker(run, exit_on_error=False, exclusive=True, group="shell")

    def _begin_command(self, command: Command, target: Target) -> None:
        """Run a command of the user on the selection, after a question if the user wants one."""
        node = self._one_node(command, target) if command.scope != "job" else None
        if command.scope != "job" and node is None:
            return
        if command.scope == "rank" and target.rank is None:
            self._warn(f"{command.label}: select a rank")
            return
        target = Target(node, target.rank)
        try:
            variables = command.variables(self._shell.job_view, node, target.rank)
        except LookupError as error:
            self._warn(f"{command.label}: {error}")
            return
        if not command.confirm:
            self._run_command(command, target, variables)
            return
        here = f"this machine, in {Path.cwd()}"
        where = f"{self._name(target)}, in the rank's directory and environment" if command.on_node else here
        facts = [("Command", command.line), ("Where", where)]
        for name in command.used:
            value = f"{name}={variables[name]}" if name in variables else f"{name}, set on the node"
            facts.append(("With" if len(facts) == 2 else "", value))

        def answered(answer: str | None) -> None:
            if answer == "yes":
                self._run_command(command, target, variables)

        self._shell.push_screen(Confirm(f"Run {command.label}?", facts, "Run"), answered)

    def _run_command(self, command: Command, target: Target, variables: dict[str, str]) -> None:
        async def use(terminal: Lent) -> None:
            if command.on_node and target.node is not None:
                await self._shell.source.shell(terminal, target.node, target.rank, command.line, variables)
            else:
                await terminal.run(["sh", "-c", command.line], {**os.environ, **variables})
            if command.wait:
                await terminal.wait_enter()

        self._run_on_terminal(command, use)

    def _one_node(self, action: Action, target: Target) -> str | None:
        """Return the selected node; otherwise a notice, and None."""
        rows = self._shell.job_view.nodes
        # If the whole job is selected and has one node, that node is meant.
        node = target.node or (rows[0].name if len(rows) == 1 else None)
        if node is None:
            self._warn(f"{action.label}: select a node or a rank")
        return node

    def _ask_port(self, action: Action, target: Target) -> None:
        node = self._one_node(action, target)
        if node is None:
            return

        def asked(ports: Ports | None) -> None:
            if ports is not None:
                work = self._forward(action, node, ports)
                self._shell.run_worker(work, exit_on_error=False, group="forward")

        self._shell.push_screen(PortDialog(node, self._shell.source.forwards), asked)

    async def _forward(self, action: Action, node: str, ports: Ports) -> None:
        """Open a forwarded port; end it if it is open."""
        source, say = self._shell.source, self._shell.say
        for one in source.forwards:
            if (one.node, one.port) == (node, ports.node) and ports.here in (None, one.local):
                await one.close()
                say(f"{one.url} no longer leads to port {one.port} of {node}", title=action.label)
                return
        try:
            forward = await source.forward(node, ports.node, ports.here)
        except PROBLEMS as error:
            self._refused(action.label, error)
            return
        text = f"{forward.url} leads to port {forward.port} of {node}"
        if not forward.is_answered:
            text += "\nNothing listens there yet. Start a program on the node; the port stays open."
        level: Level = "information" if forward.is_answered else "warning"
        say(f"{text}\nF lists it; y there copies the address.", title=action.label, level=level, seconds=15)

    def _choose_node(self, action: Action) -> None:
        if not self._candidates(action):
            self._warn(f"{action.label}: no eligible node")
            return

        def items() -> list[MenuItem]:
            rows = self._candidates(action)
            return [MenuItem(row.name, "", row.name, f"{row.look.word}  {row.why}".strip()) for row in rows]

        self._pick(f"{action.label}: which node?", items, lambda name: self._confirm(action, (name,)))

    def _choose_snapshot(self, action: Action) -> None:
        if not self._shell.source.status.get("snapshots"):
            self._warn(f"{action.label}: no node keeps a snapshot of this job")
            return

        def items() -> list[MenuItem]:
            kept = self._shell.source.status.get("snapshots") or ()
            return [MenuItem(one["id"], "", *snapshot_words(one)) for one in reversed(kept)]

        def chosen(name: str) -> None:
            label = next((item.label for item in items() if item.id == name), name)
            args = (("snapshot", name),)
            self._confirm(dataclasses.replace(action, label=f"{action.label} to {label}", args=args), ())

        self._pick(f"{action.label}: to which snapshot?", items, chosen)

    def _choose_value(self, action: Action) -> None:
        items = [MenuItem(choice.id, choice.key, choice.label, choice.help) for choice in action.choices]
        choices = {choice.id: choice for choice in action.choices}
        self._pick(f"{action.label}: which level?", lambda: items, lambda name: self._ask_when(action, choices[name]))

    def _ask_when(self, action: Action, choice: actions.Choice) -> None:
        """Ask whether to set a value for the next restart, or to restart the group with it now."""
        action = dataclasses.replace(action, label=f"{action.label} {choice.label}")
        job_view, status = self._shell.job_view, self._shell.source.status
        facts = [
            ("Target", f"job {job_view.job}"),
            ("Effect", action.effect(status, (str(choice),))),
            ("Restart", actions.BY_ID["job.restart"].effect(status, ())),
        ]
        buttons = [DialogButton("cancel", "Cancel"), DialogButton("later", "At the next restart", danger=True)]
        buttons.append(DialogButton("now", "Restart now", danger=True))
        generation = job_view.generation

        def answered(answer: str | None) -> None:
            if answer in ("later", "now"):
                args = (("env", dict(choice.env)), ("later", answer == "later"))
                self._begin_request(dataclasses.replace(action, args=args), (), generation)

        self._shell.push_screen(ButtonDialog(f"{action.label}?", facts, buttons, "cancel"), answered)

    def _confirm(self, action: Action, names: tuple[str, ...]) -> None:
        """Show target and effect; send the request once it is confirmed."""
        job_view, source = self._shell.job_view, self._shell.source
        facts = [
            ("Target", self._target_text(action, names)),
            ("Effect", action.effect(source.status, names)),
        ]
        if action.plan:
            snapshot_id = str(dict(action.args).get("snapshot", ""))
            facts += plan(str(action.op), names, source.status, source.events, snapshot_id).facts
        yes = _named(action, names)
        generation = job_view.generation

        def answered(answer: str | None) -> None:
            if answer != "yes":
                self._shell.leave_at_end(False)
            else:
                self._begin_request(action, names, generation)

        dialog: Confirm = Confirm(f"{action.label}?", facts, yes)
        if action.confirm == 2 and job_view.job:
            dialog = ConfirmTyped(f"{action.label}?", facts, yes, job_view.job)
        self._shell.push_screen(dialog, answered)

    def _target_text(self, action: Action, names: tuple[str, ...]) -> str:
        job_view = self._shell.job_view
        if action.scope != "rank":
            return ", ".join(names) or f"job {job_view.job}, {count(len(job_view.ranks), 'rank')}"
        rows = (job_view.rank(int(name)) for name in names)
        return ", ".join(f"rank {row.rank} on {row.node}" for row in rows if row is not None)

    # --- actions on ranks

    def _begin_on_ranks(self, action: Action, target: Target) -> None:
        if action.confirm:
            self._choose_signal(action, target)
            return
        sets = {ranks.key: ranks for ranks in self._rank_sets(target)}
        if len(sets) == 1:
            self._apply(action, *sets.values())
            return
        items = [MenuItem(key, key, ranks.label, ranges(ranks.ranks)) for key, ranks in sets.items()]
        self._pick(f"{action.label}: which ranks?", lambda: items, lambda key: self._apply(action, sets[key]))

    def _marked_ranks(self) -> list[int]:
        return [rank for rank in self._shell.preferences.ranks if self._shell.job_view.rank(rank) is not None]

    def _rank_sets(self, target: Target) -> list[RankSet]:
        """Return the marked ranks, the selected one, those of its node, all ranks of the job."""
        job_view = self._shell.job_view
        node = job_view.nodes_by_name.get(target.node or "")
        sets = [RankSet("m", "marked ranks", self._marked_ranks())]
        if target.rank is not None:
            sets.append(RankSet("r", f"rank {target.rank}", [target.rank]))
        if node is not None:
            sets.append(RankSet("n", f"node {node.name}", [row.rank for row in node.ranks]))
        everyone = RankSet("a", "the whole job", [row.rank for row in job_view.ranks])
        return [*(ranks for ranks in sets if ranks.ranks), everyone]

    def _apply(self, action: Action, ranks: RankSet) -> None:
        if action.op == "stacks":
            self._shell.push_screen(StacksDialog(self._shell.source, ranks))
            return
        request = dataclasses.replace(action, args=(("ranks", ranks.ranks),))
        self._begin_request(request, tuple(str(rank) for rank in ranks.ranks), None)

    def _choose_signal(self, action: Action, target: Target) -> None:
        ranks = self._marked_ranks() or ([target.rank] if target.rank is not None else [])
        if not ranks:
            self._warn(f"{action.label}: select or mark a rank")
            return

        def chosen(name: str) -> None:
            args = (("ranks", ranks), ("signal", name))
            effect = next(effect for signal, _, effect in SIGNALS if signal == name)
            impact = f"sends the signal to the process of rank {{who}} only; {effect}"
            request = dataclasses.replace(action, label=f"Send {name} to rank", args=args, impact=impact)
            self._confirm(request, tuple(str(rank) for rank in ranks))

        items = [MenuItem(name, name[0], name, note) for name, note, _ in SIGNALS]
        self._pick(f"signal to rank {', '.join(map(str, ranks))}", lambda: items, chosen)

    # --- the request

    def _begin_request(self, action: Action, names: tuple[str, ...], generation: int | None) -> None:
        self._shell.run_worker(self._send(action, names, generation), exit_on_error=False, group="requests")

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
        title = _named(action, names)
        if action.op == "add":
            self._shell.say(f"{title}: bringing up; the job continues meanwhile", seconds=8)
        try:
            answer = await self._shell.source.request(str(action.op), **args)
        except PROBLEMS as error:
            self._refused(title, error)
        else:
            self._report(action, names, answer)

    def _refused(self, title: str, error: Exception) -> None:
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
            self._shell.say(str(answer.get("message") or "accepted"), title=_named(action, names))
            return
        again = DialogButton(
            "again", f"Try {failed[0] if len(failed) == 1 else f'these {len(failed)}'} again", danger=True
        )

        def answered(choice: str | None) -> None:
            if choice == "again" and action.scope == "rank":
                numbers = [int(name.split()[1]) for name in failed]
                request = dataclasses.replace(action, args=(*action.args, ("ranks", numbers)))
                self._confirm(request, tuple(map(str, numbers)))
            elif choice == "again":
                self._confirm(action, failed)

        title = f"{action.label}: {len(results) - len(failed)} done, {len(failed)} failed"
        buttons = [DialogButton("close", "Close"), again]
        self._shell.push_screen(ButtonDialog(title, _result_facts(results), buttons, "close", "again"), answered)

    def _warn(self, text: str) -> None:
        self._shell.say(text, level="warning")

    # --- edited files

    async def _offer_sync(self, action: Action) -> None:
        """Read which files were edited, then ask whether to restart from them or to roll back."""
        source = self._shell.source
        try:
            edited = await source.edited()
        except PROBLEMS as error:
            self._refused(action.label, error)
            return
        change, previous = edited["change"], edited["tree"].get("previous")
        facts = [
            ("Target", self._target_text(action, ())),
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
                self._begin_sync(action, answer, {"digest": change["digest"]} if answer == "sync" and change else {})

        self._shell.push_screen(ButtonDialog(f"{action.label}?", facts, buttons, "cancel", "sync"), answered)

    def _begin_sync(self, action: Action, verb: str, args: Args) -> None:
        self._shell.run_worker(self._sync(action, verb, args), exit_on_error=False, group="requests")

    async def _sync(self, action: Action, verb: str, args: Args) -> None:
        if verb == "sync":
            self._shell.say(f"{action.label}: copying the files to the nodes; the job continues meanwhile", seconds=4)
        try:
            answer = await self._shell.source.request(verb, **args)
        except PROBLEMS as error:
            self._refused(action.label, error)
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
            *_result_facts(failed),
            ("", "Nothing was restarted. The other nodes keep the new files for the next attempt."),
        ]
        buttons = [DialogButton("cancel", "Cancel"), DialogButton("again", "Try again", danger=True)]
        if len(failed) < len(nodes):
            who = next(iter(failed)) if len(failed) == 1 else f"these {len(failed)}"
            buttons.append(DialogButton("partial", f"Continue without {who}", danger=True))

        def answered(choice: str | None) -> None:
            if choice in ("again", "partial"):
                self._begin_sync(action, verb, {**args, "partial": choice == "partial"})

        title = f"{action.label}: {len(failed)} of {count(len(nodes), 'node')} failed"
        self._shell.push_screen(ButtonDialog(title, facts, buttons, "cancel", "again"), answered)

    # --- leaving

    def leave(self) -> None:
        """Ask whether to detach (the default) or to stop the job; exit at once if it has ended."""
        job_view, failure = self._shell.job_view, self._shell.source.failure
        if not self._shell.has_job:
            self._shell.exit(0)
        elif job_view.ended or self._shell.bundle_text:
            self._shell.exit(job_view.exit_status or 0)
        elif failure is not None and not job_view.state:
            self._shell.exit(int(getattr(failure, "exit_status", 3)))
        elif self._shell.source.launching:
            self._ask_abort()
        else:
            self._ask_detach()

    def _ask_detach(self) -> None:
        job, stays = self._shell.job_view.job or "The job", self._shell.job_stays
        text = f"{job} continues without this screen. `supervisor attach` opens it again."
        facts = [("", text if stays else f"{job} runs on hosts inside this program and ends with it.")]
        buttons = [
            DialogButton("detach", "Detach" if stays else "End it and quit"),
            DialogButton("stop", "Stop the job", danger=True),
            DialogButton("cancel", "Cancel"),
        ]
        if self._shell.read_only or not stays:
            buttons.pop(1)

        def answered(answer: str | None) -> None:
            if answer == "detach":
                self._shell.exit(0)
            elif answer == "stop":
                self._shell.leave_at_end(True)
                self.begin(actions.BY_ID["job.stop"], Target())

        self._shell.push_screen(ButtonDialog("Leave?", facts, buttons, "detach", "detach"), answered)

    def _ask_abort(self) -> None:
        facts = [("", "The hosts are still being brought up. Aborting stops what was started on them.")]
        buttons = [DialogButton("cancel", "Continue"), DialogButton("abort", "Abort the launch", danger=True)]

        def answered(answer: str | None) -> None:
            if answer == "abort":
                self._shell.run_worker(self._abort(), exit_on_error=False, group="requests")

        self._shell.push_screen(ButtonDialog("Leave?", facts, buttons, "cancel", "abort"), answered)

    async def _abort(self) -> None:
        self._shell.say("stopping what was started on the hosts")
        await self._shell.source.cancel_launch()
        self._shell.exit(int(getattr(self._shell.source.failure, "exit_status", 3)))


class StacksDialog(TextDialog):
    """The Python stacks of some ranks; asks for them when it opens."""

    WIDEST = 132

    def __init__(self, source: SessionSource, ranks: RankSet) -> None:
        asked = values.clock_ns(int(times.now() * 1e9))[:8]
        text = f"asking {count(len(ranks.ranks), 'rank')}; they keep running"
        super().__init__(f"stacks of {ranks.label}, {asked}", text)
        self._source = source
        self._ranks = ranks.ranks

    def on_mount(self) -> None:
        """Ask the nodes; closing the dialog cancels that."""
        super().on_mount()
        self.run_worker(self._ask(), exit_on_error=False)

    async def _ask(self) -> None:
        try:
            stacks = await self._source.stacks(self._ranks)
        except PROBLEMS as error:
            self.show_text(error.message if isinstance(error, SupervisorError) else why(error))
        else:
            self.show_text("\n".join(stacks_lines(**stacks)))
