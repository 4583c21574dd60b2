"""The registry of verbs: sub-commands, shell completion, keys, menu, palette, help and confirmations come from it.

In: nothing. Out: `ACTIONS` in the order of `supervisor --help`; the effect of each on a job as text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from remote_agent.text.names import count
from remote_agent.wire.events import EventType, NodeState

if TYPE_CHECKING:
    from remote_agent.wire.documents import Status

Scope = Literal["job", "node", "rank"]
Asks = Literal["job", "nodes", "ranks", "signal", "snapshot", "level", "files", "shell", "port"]
# A removed node is none any more; one that has no state yet has not joined.
_OF_JOB = tuple(state for state in NodeState if state != NodeState.REMOVED)
_OUTSIDE = (NodeState.REMOVED, NodeState.SPARE, NodeState.LOST, NodeState.FAILED, "")
Targets = Sequence[str]


def _terms(status: Status, targets: Targets) -> dict[str, object]:
    """Return what the effect of an action is described with."""
    nodes = status.get("nodes", ())
    world = int(status.get("world_size") or 0)
    generation = status.get("generation")
    ranks = sum(len(node.get("ranks", ())) for node in nodes if node.get("name") in targets)
    live = count(sum(node.get("group_rank") is not None for node in nodes), "node")
    return {
        "who": ", ".join(targets),
        "successor": ", ".join(targets) or "the first reachable node",
        "group": f"{count(world, 'rank')} on {live}",
        "next": (-1 if generation is None else int(generation)) + 1,
        "ranks": count(ranks, "rank"),
        "left": world - ranks,
        "moved": "; another node takes over as coordinator" if status.get("coordinator") in targets else "",
    }


@dataclass(frozen=True)
class Choice:
    """Variables that an action sets together; None restores the value of the launch."""

    id: str
    key: str
    label: str
    help: str
    env: tuple[tuple[str, str | None], ...]

    def __str__(self) -> str:
        return (
            " ".join(f"{name}={value}" for name, value in self.env if value is not None) or "the values of the launch"
        )


def _level(key: str, label: str, text: str, level: str | None, parts: str | None = None) -> Choice:
    name = label.lower().replace(" ", "_")
    return Choice(name, key, label, text, (("NCCL_DEBUG", level), ("NCCL_DEBUG_SUBSYS", parts)))


NCCL_LEVELS: tuple[Choice, ...] = (
    _level("i", "INFO", "how NCCL connects: what the NCCL screen needs", "INFO"),
    _level("w", "WARN", "warnings only", "WARN"),
    _level("v", "off", "the version only", "VERSION"),
    _level("n", "INFO network", "INFO with network, graph and tuning", "INFO", "INIT,BOOTSTRAP,ENV,NET,GRAPH,TUNING"),
    _level("c", "INFO calls", "INFO with every collective: much output, slower", "INFO", "INIT,ENV,COLL,P2P"),
    _level("a", "INFO all", "all subsystems: very much output", "INFO", "ALL"),
    _level("l", "as launched", "the values of the launch and the hosts", None),
)


@dataclass(frozen=True)
class Action:
    """One verb. `key` is its letter on the screen, "" for a verb without one."""

    id: str
    verb: str
    """The sub-command, "" for an action of the screen only."""
    key: str
    label: str
    """The text of a button and of the palette."""
    help: str
    """One line, for --help, the help screen and the palette."""
    scope: Scope = "job"
    confirm: Literal[0, 1, 2] = 0
    """0: no confirmation; 1: a dialog with targets and effect; 2: the operator types the job's name."""
    impact: str = "changes nothing"
    """What will happen, in one line, with the names of `_terms`."""
    destructive: bool = False
    """It changes the job; --read-only refuses it."""
    op: str | None = None
    """The agents' request, for `Session.request` (destructive actions) or `Session.call`."""
    args: tuple[tuple[str, Any], ...] = ()
    """Fixed arguments of the request."""
    asks: Asks = "job"
    """What the screen asks for before the confirmation, unless the selection says it."""
    states: tuple[str, ...] = (NodeState.RUNNING, NodeState.READY)
    """The states of the nodes that the screen offers it for."""
    cordoned: bool | None = None
    """It is offered only for nodes that are cordoned, or are not; None: for both."""
    choices: tuple[Choice, ...] = ()
    """Environments of which the operator chooses one, for the next group or with a restart now."""
    runner: str = "steer"
    """The module of supervisor.cli that runs the sub-command, and its function: `run(verb, argv)` unless named."""
    plan: bool = False
    """It changes the group's members: it has --dry-run and accepts several nodes."""
    immediate: bool = False
    """The answer is the outcome: no event follows that the sub-command would wait for."""
    guarded: bool = False
    """The screen sends the generation that it showed: the agents refuse the request once that is over."""
    outcomes: tuple[EventType, ...] = ()
    """Events that end the request, in addition to generation_running and the end of the job."""

    @property
    def applies_to_several(self) -> bool:
        """Whether it applies to several nodes at once."""
        return self.scope == "node" and (self.plan or self.immediate)

    def effect(self, status: Status, targets: Targets) -> str:
        """Return what will happen to these nodes or ranks, in one line."""
        return self.impact.format(**_terms(status, targets))


ACTIONS: tuple[Action, ...] = (
    Action("job.up", "up", "", "Launch", "launch a job and watch it (a TUI on a terminal)", runner="up"),
    Action(
        "job.attach", "attach", "", "Attach", "open the TUI on a running or finished job",
        runner="up.run_attach",
    ),
    Action(
        "job.status", "status", "", "Status", "show the job's state, its nodes and ranks",
        op="status", runner="status",
    ),
    Action(
        "job.logs", "logs", "l", "Logs", "show, search or follow the output of ranks",
        scope="rank", runner="logs",
    ),
    Action(
        "job.events", "events", "v", "Events", "show the job's journal of events",
        op="events", runner="status.run_events",
    ),
    Action(
        "job.incidents", "incidents", "i", "Incident", "show failures and their causes",
        op="incidents", runner="status.run_incidents",
    ),
    Action(
        "job.snapshots", "snapshots", "", "Snapshots", "list the snapshots that the nodes keep",
        runner="snapshots",
    ),
    Action(
        "job.restart", "restart", "r", "Restart group", "restart the whole worker group",
        confirm=1, destructive=True, op="restart", plan=True, guarded=True,
        impact="stops all {group} and starts them again as generation {next}, from their last snapshot; not charged to"
        " max_restarts",
    ),
    Action(
        "job.back", "", "b", "Go back", "restart from a snapshot that the nodes keep",
        confirm=1, asks="snapshot", destructive=True, op="restart", plan=True, guarded=True,
        impact="stops all {group} and starts them again as generation {next}, from this snapshot; later ones no longer "
        "count; not charged to max_restarts",
    ),
    Action(
        "job.sync", "", "R", "Sync files", "restart from the edited files, or roll back",
        confirm=1, asks="files", destructive=True, op="sync",
        impact="copies the files to all nodes while the group keeps running; then restarts all {group} from them as "
        "generation {next}, from the last snapshot; not charged to max_restarts",
    ),
    Action(
        "nccl.debug", "", "n", "NCCL debug", "set NCCL's log level for the next group",
        confirm=1, asks="level", destructive=True, op="restart", choices=NCCL_LEVELS, guarded=True,
        impact="sets {who} for the workers of future groups; NCCL writes to each rank's nccl.log",
    ),
    Action(
        "node.remove", "remove", "m", "Remove node", "remove nodes from the job",
        scope="node", confirm=1, asks="nodes", states=_OF_JOB, destructive=True, op="remove", plan=True, guarded=True,
        outcomes=(EventType.NODE_REMOVED,),
        impact="drains {who} ({ranks}); the group restarts as generation {next} with world size {left}{moved}; not "
        "charged to max_restarts",
    ),
    Action(
        "node.add", "add", "a", "Add node", "add nodes of the inventory to the job",
        scope="node", confirm=1, asks="nodes", states=_OUTSIDE, destructive=True, op="add", plan=True, guarded=True,
        impact="brings {who} up while the group keeps running; then stops all {group} and starts them with {who} as "
        "generation {next}; not charged to max_restarts",
    ),
    Action(
        "job.stop", "stop", "S", "Stop job", "end the job",
        confirm=2, destructive=True, op="stop", args=(("kill", False),),
        impact="ends the job: SIGTERM to all {group}, SIGKILL after the grace period; logs stay on the nodes",
    ),
    Action(
        "job.kill", "", "K", "Kill job", "end the job at once, without the grace period",
        confirm=2, destructive=True, op="stop", args=(("kill", True),),
        impact="ends the job at once: SIGKILL to all {group}; nothing is saved; logs stay on the nodes",
    ),
    Action(
        "node.promote", "promote", "P", "Promote node", "force a new coordinator",
        scope="node", confirm=1, asks="nodes", destructive=True, op="promote", outcomes=(EventType.JOB_DEGRADED,),
        impact="{successor} takes over as coordinator, even without a majority, and the reachable nodes form "
        "generation {next}. All other nodes must be dead: if they still train, two groups run. Refused while a "
        "coordinator is reachable",
    ),
    Action(
        "node.cordon", "cordon", "c", "Cordon node", "do not readmit a node that leaves",
        scope="node", confirm=1, asks="nodes", states=_OF_JOB, cordoned=False, destructive=True, op="cordon",
        immediate=True,
        impact="{who} stays in the current group; after it is lost or fails, no new group includes it, not even as a "
        "spare; nothing restarts",
    ),
    Action(
        "node.uncordon", "uncordon", "u", "Uncordon node", "let future groups include a node again",
        scope="node", confirm=1, asks="nodes", states=_OF_JOB, cordoned=True, destructive=True, op="uncordon",
        immediate=True,
        impact="new groups may include {who} again; if it is waiting and there is room, the group restarts",
    ),
    Action(
        "rank.signal", "signal", "s", "Signal rank", "send a signal to the processes of ranks",
        scope="rank", confirm=1, asks="signal", destructive=True, op="signal", guarded=True,
        runner="stacks.run_signal",
        impact="sends the signal to the process of rank {who} only",
    ),
    Action(
        "rank.keep", "", "f", "Save flight", "save stacks and flight records next to the logs",
        scope="rank", asks="ranks", op="keep",
    ),
    Action(
        "rank.stacks", "stacks", "d", "Dump stacks", "show Python stacks of live ranks, grouped",
        scope="rank", asks="ranks", op="stacks", runner="stacks",
        impact="reads the Python stack of every rank; the ranks keep running",
    ),
    Action(
        "rank.why", "why", "y", "Why slow", "show what the time of ranks goes to, and for which one the others wait",
        scope="rank", asks="ranks", op="why", runner="stacks.run_why",
        impact="looks at each rank for some 20 s; the ranks keep running",
    ),
    Action(
        "rank.shell", "", "B", "Shell", "a shell in the rank's directory and environment",
        scope="rank", asks="shell", op="shell",
    ),
    Action(
        "node.forward", "", "F", "Forward port", "reach a port of the node: TensorBoard, Jupyter",
        scope="rank", asks="port", op="forward",
    ),
    Action(
        "hosts.check", "check", "", "Check", "check the hosts without launching, and show where they differ",
        runner="hosts.run_check",
    ),
    Action(
        "hosts.write", "hosts", "", "Hosts", "write a hosts.toml from a list, a hostfile or an allocation",
        runner="hosts",
    ),
    Action("jobs.list", "jobs", "", "Jobs", "list the jobs on these hosts", runner="jobs"),
    Action(
        "jobs.clean", "clean", "", "Clean", "remove files of finished jobs from the nodes",
        confirm=1, destructive=True, runner="jobs",
        impact="deletes the logs and journals of finished jobs on the nodes; live jobs are kept",
    ),
    Action(
        "job.report", "report", "", "Report", "write the post-mortem of a job, or the job itself as one file",
        runner="report",
    ),
    Action(
        "logs.diagnose", "diagnose", "", "Diagnose", "find the root cause in existing log files; needs no cluster",
        runner="diagnose",
    ),
    Action(
        "shell.completion", "completion", "", "Completion", "print the completion script of a shell: bash, zsh or fish",
        runner="completion",
    ),
    Action("shell.man", "man", "", "Manual", "print the manual page of all commands", runner="completion.run_man"),
    Action(
        "demo.run", "demo", "", "Demo", "run a real DDP job on two embedded SSH hosts; nothing to configure",
        runner="demo",
    ),
)  # fmt: skip

BY_ID: Mapping[str, Action] = {action.id: action for action in ACTIONS}
BY_OP: Mapping[str, Action] = {action.op: action for action in reversed(ACTIONS) if action.op and action.verb}
BY_VERB: Mapping[str, Action] = {action.verb: action for action in ACTIONS if action.verb}
