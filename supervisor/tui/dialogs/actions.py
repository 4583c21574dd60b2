"""The menu of actions, and what each asks before its confirmation: nodes, ranks, a signal, a snapshot, a level.

In: a selection, answers of dialogs. Out: requests, confirmed and sent by `requests`.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from remote_agent.text.names import count, ranges
from supervisor import actions
from supervisor.actions import ACTIONS, Action
from supervisor.errors import SupervisorError, why
from supervisor.tui import times
from supervisor.tui.dialogs.base import ButtonDialog, DialogButton, Menu, MenuItem, TextDialog
from supervisor.tui.dialogs.programs import Programs, target_name
from supervisor.tui.dialogs.requests import PROBLEMS, Requests
from supervisor.tui.dialogs.sync import SyncDialogs
from supervisor.tui.shell import Target
from supervisor.wording import values
from supervisor.wording.slow import Times
from supervisor.wording.stacks import stacks_lines
from supervisor.wording.status import snapshot_words

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from supervisor.session import Session
    from supervisor.tui.model import NodeRow
    from supervisor.tui.shell import Shell

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


def offered() -> list[Action]:
    """Return the actions of the menu: those that change something, and the question for stacks."""
    return [action for action in ACTIONS if action.key and action.op and (changes(action) or action.op in ANSWERS)]


def changes(action: Action) -> bool:
    """Return whether it changes the job or acts on the nodes; refused with --read-only."""
    return action.destructive or action.op in ("keep", "shell", "forward")


class ActionDialogs:
    """The dialogs before and after an action."""

    def __init__(self, shell: Shell) -> None:
        self._shell = shell
        self._requests = Requests(shell)
        programs = Programs(shell)
        self._asking: Mapping[str, Callable[[Any, Target], None]] = {
            "job": self._ask_job,
            "nodes": self._ask_nodes,
            "ranks": self._choose_ranks,
            "signal": self._choose_signal,
            "snapshot": self._choose_snapshot,
            "level": self._choose_value,
            "files": self._ask_sync,
            "shell": programs.open_shell,
            "port": programs.ask_port,
        }

    # --- menu

    def open_menu(self, target: Target) -> None:
        """Show the actions, each with its target."""

        actions_by_id = {action.id: action for action in offered()}

        def items() -> list[MenuItem]:
            return [self._item(action, target) for action in actions_by_id.values()]

        self._pick(
            f"actions on {target_name(self._shell, target)}",
            items,
            lambda name: self.begin(actions_by_id[name], target),
        )

    def _pick(self, title: str, items: Callable[[], list[MenuItem]], use: Callable[[str], None]) -> None:
        """Show a menu, and use the name of the item that is chosen, if one is."""

        def chosen(name: str | None) -> None:
            if name is not None:
                use(name)

        self._shell.app.push_screen(Menu(title, items), chosen)

    def _item(self, action: Action, target: Target) -> MenuItem:
        job_view = self._shell.job_view
        off = self._obstacle(action)
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
        return "the job has ended" if self._shell.job_view.ended else ""

    def _candidates(self, action: Action) -> list[NodeRow]:
        nodes = self._shell.job_view.nodes
        if action.cordoned is not None:
            nodes = tuple(node for node in nodes if node.cordoned == action.cordoned)
        return [node for node in nodes if node.state in action.states and not (action.op == "add" and node.ranks)]

    def _targets(self, action: Action, target: Target) -> tuple[str, ...]:
        """Return the nodes to which a verb applies: the marked ones if there are any, otherwise the selected one."""
        eligible = {row.name for row in self._candidates(action)}
        marked = [name for name in self._shell.preferences.nodes if name in self._shell.job_view.nodes_by_name]
        if marked and action.applies_to_several:
            return tuple(name for name in marked if name in eligible)
        return (target.node,) if target.node in eligible else ()

    # --- one action

    def begin(self, action: Action, target: Target) -> None:
        """Ask what the action asks, then for confirmation."""
        if obstacle := self._obstacle(action):
            self._requests.warn(f"{action.label}: {obstacle}")
        else:
            self._asking[action.asks](action, target)

    def _ask_job(self, action: Action, _target: Target) -> None:
        self._requests.confirm(action, ())

    def _ask_nodes(self, action: Action, target: Target) -> None:
        if names := self._targets(action, target):
            self._requests.confirm(action, names)
        else:
            self._choose_node(action)

    def _ask_sync(self, action: Action, _target: Target) -> None:
        # The worker is exclusive because the key may be pressed again while a large tree is read.
        work = SyncDialogs(self._shell).offer(action)
        self._shell.app.run_worker(work, exit_on_error=False, exclusive=True, group="edited")

    def _choose_node(self, action: Action) -> None:
        if not self._candidates(action):
            self._requests.warn(f"{action.label}: no eligible node")
            return

        def items() -> list[MenuItem]:
            rows = self._candidates(action)
            return [MenuItem(row.name, "", row.name, f"{row.look.word}  {row.why}".strip()) for row in rows]

        self._pick(f"{action.label}: which node?", items, lambda name: self._requests.confirm(action, (name,)))

    def _choose_snapshot(self, action: Action, _target: Target) -> None:
        if not self._shell.source.status.get("snapshots"):
            self._requests.warn(f"{action.label}: no node keeps a snapshot of this job")
            return

        def items() -> list[MenuItem]:
            kept = self._shell.source.status.get("snapshots") or ()
            return [MenuItem(one["id"], "", *snapshot_words(one)) for one in reversed(kept)]

        def chosen(name: str) -> None:
            label = next((item.label for item in items() if item.id == name), name)
            args = (("snapshot", name),)
            self._requests.confirm(dataclasses.replace(action, label=f"{action.label} to {label}", args=args), ())

        self._pick(f"{action.label}: to which snapshot?", items, chosen)

    def _choose_value(self, action: Action, _target: Target) -> None:
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
                self._requests.begin(dataclasses.replace(action, args=args), (), generation)

        self._shell.app.push_screen(ButtonDialog(f"{action.label}?", facts, buttons, "cancel"), answered)

    # --- actions on ranks

    def _choose_ranks(self, action: Action, target: Target) -> None:
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
        if action.op in ANSWERS:
            self._shell.app.push_screen(AnswerDialog(self._shell.source, str(action.op), ranks))
            return
        request = dataclasses.replace(action, args=(("ranks", ranks.ranks),))
        self._requests.begin(request, tuple(str(rank) for rank in ranks.ranks), None)

    def _choose_signal(self, action: Action, target: Target) -> None:
        ranks = self._marked_ranks() or ([target.rank] if target.rank is not None else [])
        if not ranks:
            self._requests.warn(f"{action.label}: select or mark a rank")
            return

        def chosen(name: str) -> None:
            args = (("ranks", ranks), ("signal", name))
            effect = next(effect for signal, _, effect in SIGNALS if signal == name)
            impact = f"sends the signal to the process of rank {{who}} only; {effect}"
            request = dataclasses.replace(action, label=f"Send {name} to rank", args=args, impact=impact)
            self._requests.confirm(request, tuple(str(rank) for rank in ranks))

        items = [MenuItem(name, name[0], name, note) for name, note, _ in SIGNALS]
        self._pick(f"signal to rank {', '.join(map(str, ranks))}", lambda: items, chosen)

    # --- leaving

    def leave(self) -> None:
        """Ask whether to detach (the default) or to stop the job; exit at once if it has ended."""
        job_view, failure = self._shell.job_view, self._shell.source.failure
        if not self._shell.has_job:
            self._shell.app.exit(0)
        elif job_view.ended or self._shell.bundle_text:
            self._shell.app.exit(job_view.exit_status or 0)
        elif failure is not None and not job_view.state:
            self._shell.app.exit(int(getattr(failure, "exit_status", 3)))
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
                self._shell.app.exit(0)
            elif answer == "stop":
                self._shell.leave_at_end(True)
                self.begin(actions.BY_ID["job.stop"], Target())

        self._shell.app.push_screen(ButtonDialog("Leave?", facts, buttons, "detach", "detach"), answered)

    def _ask_abort(self) -> None:
        facts = [("", "The hosts are still being brought up. Aborting stops what was started on them.")]
        buttons = [DialogButton("cancel", "Continue"), DialogButton("abort", "Abort the launch", danger=True)]

        def answered(answer: str | None) -> None:
            if answer == "abort":
                self._shell.app.run_worker(self._abort(), exit_on_error=False, group="requests")

        self._shell.app.push_screen(ButtonDialog("Leave?", facts, buttons, "cancel", "abort"), answered)

    async def _abort(self) -> None:
        self._shell.say("stopping what was started on the hosts")
        await self._shell.source.cancel_launch()
        self._shell.app.exit(int(getattr(self._shell.source.failure, "exit_status", 3)))


async def _stacks(source: Session, ranks: list[int]) -> list[str]:
    return stacks_lines(**await source.stacks(ranks))


async def _why(source: Session, ranks: list[int]) -> list[str]:
    is_all = len(ranks) == sum(len(node["ranks"]) for node in source.status["nodes"])
    return Times(await source.why()).lines(None if is_all else ranks)


# By request: the title of its dialog, what it says meanwhile, and what asks the nodes.
ANSWERS = {
    "stacks": ("stacks of", "asking {ranks}; they keep running", _stacks),
    "why": ("what takes the time of", "looking at all ranks for some 20 s; they keep running", _why),
}


class AnswerDialog(TextDialog):
    """What the nodes answer about some ranks; asks them when it opens."""

    WIDEST = 132

    def __init__(self, source: Session, op: str, ranks: RankSet) -> None:
        title, text, self._collect = ANSWERS[op]
        asked = values.clock_ns(int(times.now() * 1e9))[:8]
        super().__init__(f"{title} {ranks.label}, {asked}", text.format(ranks=count(len(ranks.ranks), "rank")))
        self._source = source
        self._ranks = ranks.ranks

    def on_mount(self) -> None:
        """Ask the nodes; closing the dialog cancels that."""
        super().on_mount()
        self.run_worker(self._ask(), exit_on_error=False)

    async def _ask(self) -> None:
        try:
            lines = await self._collect(self._source, self._ranks)
        except PROBLEMS as error:
            self.show_text(error.message if isinstance(error, SupervisorError) else why(error))
        else:
            self.show_text("\n".join(lines))
