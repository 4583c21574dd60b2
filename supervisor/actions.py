"""The registry of verbs: the command line's sub-commands, the TUI's keys, help, palette and confirmations come from it.

In: nothing. Out: `ACTIONS` in the order in which help shows them; the effect of each on a job, in words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from supervisor.plain import count

Scope = Literal["job", "node", "rank"]
Status = Mapping[str, Any]
Targets = Sequence[str]
Effect = Callable[[Status, Targets], str]


def _nothing(status: Status, targets: Targets) -> str:
    return "nothing is changed"


def _live_nodes(status: Status) -> list[Mapping[str, Any]]:
    return [node for node in status.get("nodes", ()) if node.get("group_rank") is not None]


def _ranks_on(status: Status, names: Targets) -> int:
    return sum(len(node.get("ranks", ())) for node in status.get("nodes", ()) if node.get("name") in names)


def _group(status: Status) -> str:
    nodes = count(len(_live_nodes(status)), "node")
    return f"{count(int(status.get('world_size') or 0), 'rank')} on {nodes}"


def _next(status: Status) -> int:
    generation = status.get("generation")
    return (-1 if generation is None else int(generation)) + 1


def _restart(status: Status, targets: Targets) -> str:
    return (
        f"stops all {_group(status)} and starts them again as generation {_next(status)}, "
        f"from their last snapshot; not charged to max_restarts"
    )


def _sync(status: Status, targets: Targets) -> str:
    return (
        f"brings the files to all nodes while the group goes on; then restarts all {_group(status)} from them, as "
        f"generation {_next(status)} and from the last snapshot; not charged to max_restarts"
    )


def _set(status: Status, targets: Targets) -> str:
    return f"the workers of all groups to come have {', '.join(targets)}; each rank's lines of NCCL go to its nccl.log"


def _remove(status: Status, targets: Targets) -> str:
    left = int(status.get("world_size") or 0) - _ranks_on(status, targets)
    moved = "; another node takes the coordinator over" if status.get("coordinator") in targets else ""
    return (
        f"drains {', '.join(targets)} ({count(_ranks_on(status, targets), 'rank')}); the group goes on as generation "
        f"{_next(status)} with world size {left}{moved}; not charged to max_restarts"
    )


def _add(status: Status, targets: Targets) -> str:
    who = ", ".join(targets)
    return (
        f"brings {who} up first, while the group goes on; then stops all {_group(status)} and starts them with "
        f"{who} as generation {_next(status)}; not charged to max_restarts"
    )


def _stop(status: Status, targets: Targets) -> str:
    return f"ends the job: SIGTERM to all {_group(status)}, SIGKILL after the grace period; logs stay on the nodes"


def _kill(status: Status, targets: Targets) -> str:
    return f"ends the job at once: SIGKILL to all {_group(status)}; nothing is saved; logs stay on the nodes"


def _promote(status: Status, targets: Targets) -> str:
    return (
        f"{', '.join(targets) or 'the first node in reach'} takes the coordinator over, votes or not, and generation "
        f"{_next(status)} is formed of the nodes in reach; you say that all others are dead: if they still train, "
        "two groups run; refused where a coordinator is in reach"
    )


def _cordon(status: Status, targets: Targets) -> str:
    return (
        f"{', '.join(targets)} stays in the group, and once it is lost or fails no new group takes it in, as a spare "
        "neither; nothing restarts"
    )


def _uncordon(status: Status, targets: Targets) -> str:
    return f"{', '.join(targets)} may be taken in again; where it waits and there is room, with a restart of the group"


def _signal(status: Status, targets: Targets) -> str:
    return (
        f"sends it to the process of rank {', '.join(targets)} and to nothing else; a script that does not handle it "
        "ends by it, and the group restarts"
    )


def _stacks(status: Status, targets: Targets) -> str:
    return "asks every rank for its Python stack; the ranks go on"


def _clean(status: Status, targets: Targets) -> str:
    return "deletes the logs and journals of finished jobs on the nodes; live jobs are left alone"


@dataclass(frozen=True)
class Choice:
    """Variables that an action sets together; None: the launch's value holds again."""

    id: str
    key: str
    label: str
    help: str
    env: tuple[tuple[str, str | None], ...]

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.env if value is not None) or "what the launch says"


def _level(key: str, label: str, text: str, level: str | None, parts: str | None = None) -> Choice:
    name = label.lower().replace(" ", "_")
    return Choice(name, key, label, text, (("NCCL_DEBUG", level), ("NCCL_DEBUG_SUBSYS", parts)))


NCCL_LEVELS: tuple[Choice, ...] = (
    _level("i", "INFO", "how it connects: what the NCCL screen needs", "INFO"),
    _level("w", "WARN", "its warnings alone", "WARN"),
    _level("v", "off", "its version alone", "VERSION"),
    _level("n", "INFO network", "INFO with network, graph and tuning", "INFO", "INIT,BOOTSTRAP,ENV,NET,GRAPH,TUNING"),
    _level("c", "INFO calls", "INFO with every collective: much, and slower", "INFO", "INIT,ENV,COLL,P2P"),
    _level("a", "INFO all", "all of its parts: very much", "INFO", "ALL"),
    _level("l", "as launched", "what the launch and the hosts say", None),
)


@dataclass(frozen=True)
class Action:
    """One verb. `key` is its letter in the TUI ("" where it has none there)."""

    id: str
    verb: str
    """The command line's sub-command, "" where it has none."""
    key: str
    label: str
    """What a button or a palette says."""
    help: str
    """One line, for --help, the help screen and the palette."""
    scope: Scope = "job"
    confirm: Literal[0, 1, 2] = 0
    """0 none, 1 a dialog with targets and effect, 2 the job's name must be typed."""
    effect: Effect = _nothing
    """(status, nodes or ranks) -> what will happen, in one line."""
    destructive: bool = False
    """Refused by --read-only."""
    op: str | None = None
    """The agents' request, for `Session.request` (destructive ones) or `Session.call`."""
    args: tuple[tuple[str, Any], ...] = ()
    """Fixed arguments of the request."""
    choices: tuple[Choice, ...] = ()
    """What it may set the workers' environment to: one is chosen, for the next group or with a restart now."""


ACTIONS: tuple[Action, ...] = (
    Action("job.up", "up", "", "Launch", "launch a job and watch it (TUI on a terminal)"),
    Action("job.attach", "attach", "", "Attach", "open the TUI on a running or finished job"),
    Action("job.status", "status", "", "Status", "show nodes, ranks and the job's state", op="status"),
    Action("job.logs", "logs", "l", "Logs", "show, search or follow what the ranks print", scope="rank"),
    Action("job.events", "events", "v", "Events", "show the job's journal: every fact, in order", op="events"),
    Action("job.incidents", "incidents", "i", "Incident", "show failures with their verdicts", op="incidents"),
    Action(
        "job.restart", "restart", "r", "Restart group", "restart the whole worker group, coordinated",
        confirm=1, effect=_restart, destructive=True, op="restart",
    ),
    Action(
        "job.sync", "", "R", "Sync files", "bring edited files to the nodes and restart from them, or roll back",
        confirm=1, effect=_sync, destructive=True, op="sync",
    ),
    Action(
        "nccl.debug", "", "n", "NCCL debug", "NCCL's log level for the next group, now or later",
        confirm=1, effect=_set, destructive=True, op="restart", choices=NCCL_LEVELS,
    ),
    Action(
        "node.remove", "remove", "m", "Remove node", "scale down by one node",
        scope="node", confirm=1, effect=_remove, destructive=True, op="remove",
    ),
    Action(
        "node.add", "add", "a", "Add node", "scale up by one node of the inventory",
        scope="node", confirm=1, effect=_add, destructive=True, op="add",
    ),
    Action(
        "job.stop", "stop", "S", "Stop job", "end the job",
        confirm=2, effect=_stop, destructive=True, op="stop", args=(("kill", False),),
    ),
    Action(
        "job.kill", "", "K", "Kill job", "end the job at once, without grace",
        confirm=2, effect=_kill, destructive=True, op="stop", args=(("kill", True),),
    ),
    Action(
        "node.promote", "promote", "P", "Promote node", "say that the coordinator's half is dead: a node takes over",
        scope="node", confirm=1, effect=_promote, destructive=True, op="promote",
    ),
    Action(
        "node.cordon", "cordon", "c", "Cordon node", "take a node into no new group; it stays in the one it is in",
        scope="node", confirm=1, effect=_cordon, destructive=True, op="cordon",
    ),
    Action(
        "node.uncordon", "uncordon", "u", "Uncordon node", "let new groups take a node in again",
        scope="node", confirm=1, effect=_uncordon, destructive=True, op="uncordon",
    ),
    Action(
        "rank.signal", "signal", "s", "Signal rank", "send a signal to the process of a rank",
        scope="rank", confirm=1, effect=_signal, destructive=True, op="signal",
    ),
    Action(
        "rank.keep", "", "f", "Save flight", "save stacks and flight records of ranks beside their logs",
        scope="rank", op="keep",
    ),
    Action(
        "rank.stacks", "stacks", "d", "Dump stacks", "show Python stacks of live ranks, grouped by equality",
        scope="rank", effect=_stacks, op="stacks",
    ),
    Action("hosts.check", "check", "", "Check", "what a launch would find on the hosts, and the odd one out"),
    Action("hosts.write", "hosts", "", "Hosts", "write a hosts.toml from a list, a hostfile or a Slurm allocation"),
    Action("jobs.list", "jobs", "", "Jobs", "list the jobs that the agents on these hosts know"),
    Action(
        "jobs.clean", "clean", "", "Clean", "remove files of finished jobs from the nodes",
        confirm=1, effect=_clean, destructive=True,
    ),
    Action("job.record", "record", "", "Record", "write a job into one file: its events, states and logs"),
    Action("job.replay", "replay", "", "Replay", "open a recording on the screen, at any time of the job"),
    Action("job.report", "report", "", "Report", "write a job's post-mortem, or a recording's, as Markdown or JSON"),
    Action("logs.diagnose", "diagnose", "", "Diagnose", "the root cause of existing log files; needs no cluster"),
    Action("demo.run", "demo", "", "Demo", "run a real DDP job on two embedded SSH hosts; nothing to configure"),
)  # fmt: skip

BY_ID: Mapping[str, Action] = {action.id: action for action in ACTIONS}
BY_VERB: Mapping[str, Action] = {action.verb: action for action in ACTIONS if action.verb}
