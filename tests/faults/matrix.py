"""The faults: what is done to a job, and what ends it.

In: a `Case`: hosts, the job, chance. Out: `FAULTS`. Each takes nodes, moments and durations from the case's own chance.

The clocks of the day are set per process (`tests/skew.py`): the kernel has one for all namespaces, and those that jump
are not the ones that timeouts are measured by. That a machine sleeps is "frozen": all its processes stop, and the
monotonic clock goes on. What cannot be made here: a kernel that hangs but answers pings, and a disk that hangs; to an
agent the latter is SIGSTOP.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import signal
from collections.abc import Callable
from pathlib import Path

from tests import skew
from tests.cluster.network import OPERATOR, ClusterError, command
from tests.faults.case import SMALL_DISK_MB, Case, Fault
from tests.faults.commands import Verb

_REFUSE = """
table inet faults {
  chain input {
    type filter hook input priority 0; policy accept;
    iifname eth0 tcp dport != 22 reject with tcp reset
  }
}
"""


# --- processes


def _signal(what: str, number: signal.Signals, *, all_nodes: bool = False) -> Callable[[Case], None]:
    """Send a signal to ranks, engines or agents of one node, or of all."""

    def apply(case: Case) -> None:
        nodes = case.nodes if all_nodes else case.some(most=1)
        pids = {"rank": case.workers, "engine": case.engines, "agent": case.agents}[what](*nodes)
        case.note(f"{number.name} to {what}s of {', '.join(nodes)}")
        if what == "agent" and all_nodes:
            case.unseen()
        if number == signal.SIGSTOP:
            case.stop(pids)
        else:
            case.kill(pids, number)

    return apply


def _coordinators_agent(number: signal.Signals) -> Callable[[Case], None]:
    def apply(case: Case) -> None:
        node = case.coordinator()
        case.note(f"{number.name} to the coordinator's agent, on {node}")
        pids = case.agents(node)
        if number == signal.SIGSTOP:
            case.stop(pids)
        else:
            case.kill(pids, number)

    return apply


def _some_agents_killed(case: Case) -> None:
    nodes = case.some(least=2)
    case.note(f"SIGKILL to agents of {', '.join(nodes)}")
    if len(nodes) == len(case.nodes):
        case.unseen()
    case.kill(case.agents(*nodes))


def _agent_killed_again(case: Case) -> None:
    (node,) = case.members()
    case.note(f"SIGKILL to the agent of {node} as often as it comes back, twice")
    for _ in range(2):
        case.kill(case.agents(node))
        case.sleep(0.5, 1.5)


def _agent_and_engine_killed(case: Case) -> None:
    (node,) = case.some(most=1)
    case.note(f"SIGKILL to agent and engine of {node} at once")
    case.kill([*case.agents(node), *case.engines(node)])


def _agent_stopped_and_killed(case: Case) -> None:
    (node,) = case.some(most=1)
    case.note(f"SIGSTOP to the agent of {node}, later SIGKILL")
    pids = case.agents(node)
    case.stop(pids)
    case.sleep(0.3, 1.5)
    case.kill(pids)


# --- hosts


def _crash(choose: Callable[[Case], list[str]], *, lose_disk: bool = False) -> Callable[[Case], None]:
    def apply(case: Case) -> None:
        nodes = choose(case)
        case.note(f"power failure of {', '.join(nodes)}{', the disk is lost' if lose_disk else ''}")
        if len(nodes) == len(case.nodes):
            case.unseen()
        for node in nodes:
            if lose_disk:
                case.heal_by(functools.partial(_add_back, case, node))
            case.crash(node, lose_disk=lose_disk)

    return apply


def _freeze(choose: Callable[[Case], list[str]]) -> Callable[[Case], None]:
    def apply(case: Case) -> None:
        nodes = choose(case)
        case.note(f"all processes of {', '.join(nodes)} stop")
        if len(nodes) == len(case.nodes):
            case.unseen()
        for node in nodes:
            case.freeze(node)

    return apply


def _coordinator(case: Case) -> list[str]:
    return [case.coordinator()]


def _member(case: Case) -> list[str]:
    return case.members()


def _all(case: Case) -> list[str]:
    return case.nodes


# --- links


def _cut(choose: Callable[[Case], list[str]]) -> Callable[[Case], None]:
    def apply(case: Case) -> None:
        for node in choose(case):
            case.note(f"{node} is cut off")
            case.cluster.cut(node)
        case.heal_by(case.cluster.heal)

    return apply


def _cut_off_and_stopped(case: Case) -> None:
    (node,) = case.some(most=1)
    pids = case.agents(node)
    case.note(f"{node} is cut off, and SIGSTOP to its agent before its lease is over")
    case.cluster.cut(node)
    case.heal_by(case.cluster.heal)
    case.sleep(0.0, 0.8)
    case.stop(pids)


def _pair(case: Case, first: str, second: str) -> None:
    case.note(f"{first} and {second} do not see each other")
    case.cluster.cut(first, second)
    case.heal_by(lambda: case.cluster.heal(first, second))


def _pair_with_coordinator(case: Case) -> None:
    _pair(case, case.coordinator(), *case.members())


def _pair_of_members(case: Case) -> None:
    first, second = case.members(2)
    _pair(case, first, second)


def _pairs_in_sequence(case: Case) -> None:
    """First one falls out, then two of those that are left lose each other."""
    coordinator = case.coordinator()
    for member in case.members(2):
        _pair(case, coordinator, member)
        case.sleep(1.0, 2.5)


def _pairs_at_random(case: Case) -> None:
    pairs = [(first, second) for place, first in enumerate(case.nodes) for second in case.nodes[place + 1 :]]
    for first, second in case.rng.sample(pairs, case.rng.randint(2, len(pairs) - 1)):
        _pair(case, first, second)
        case.sleep(0.0, 1.2)


def _halves(case: Case) -> None:
    side = case.some(most=len(case.nodes) - 1)
    other = [node for node in case.nodes if node not in side]
    case.note(f"{', '.join(side)} and {', '.join(other)} do not see each other")
    case.cluster.partition([*side], [*other])
    case.heal_by(case.cluster.heal)


def _halves_in_sequence(case: Case) -> None:
    for _ in range(2):
        _halves(case)
        case.sleep(0.8, 2.0)
        case.cluster.heal()
    _halves(case)


def _one_way(case: Case, source: str, target: str | None = None) -> None:
    case.note(f"what {source} sends {f'to {target} ' if target else ''}is lost")
    case.cluster.cut_one_way(source, target)
    case.heal_by(lambda: case.cluster.heal(source))


def _one_way_from_one(case: Case) -> None:
    (source,) = case.some(most=1)
    _one_way(case, source)


def _one_way_to_one(case: Case) -> None:
    (target,) = case.some(most=1)
    for source in case.nodes:
        if source != target:
            _one_way(case, source, target)


def _one_way_in_a_pair(case: Case) -> None:
    source, target = case.rng.sample([case.coordinator(), *case.members()], 2)
    _one_way(case, source, target)


def _flapping(case: Case) -> None:
    (node,) = case.some(most=1)
    case.note(f"{node} is cut off again and again")
    # One that is lost three times is left out, until the operator adds it.
    case.heal_by(functools.partial(_add_back, case, node), lambda: case.cluster.heal(node))
    for _ in range(case.rng.randint(3, 6)):
        case.cluster.cut(node)
        case.sleep(0.05, 0.7)
        case.cluster.heal(node)
        case.sleep(0.05, 0.4)


def _slow(case: Case) -> None:
    for node in case.some():
        delay_ms = case.rng.uniform(50, 250)
        case.note(f"{node} is {delay_ms:.0f} ms away, each way")
        case.cluster.delay(node, delay_ms)
    case.heal_by(case.cluster.heal)


def _lossy(case: Case) -> None:
    (node,) = case.some(most=1)
    loss = case.rng.uniform(0.05, 0.2)
    case.note(f"{node} loses {100 * loss:.0f} % of its frames")
    case.cluster.delay(node, 1, loss)
    case.heal_by(case.cluster.heal)


def _refused(case: Case) -> None:
    """A rule of a firewall that answers: connections look as if nothing listened there."""
    node = case.rng.choice([case.coordinator(), *case.members()])
    case.note(f"{node} answers everything but SSH with RST")
    netns = case.cluster.host(node).netns
    command("ip", "netns", "exec", netns, "nft", "-f", "-", stdin=_REFUSE)
    case.heal_by(lambda: command("ip", "netns", "exec", netns, "nft", "delete", "table", "inet", "faults"))


def _ssh_blocked(case: Case) -> None:
    for node in case.some():
        case.note(f"SSH to {node} is lost")
        case.cluster.block_ssh(node)
    case.unseen()
    case.heal_by(case.cluster.heal)


# --- the operator


def _operator_cut(case: Case) -> None:
    case.note("the operator's machine is cut off")
    case.hide()


def _operator_cut_from_some(case: Case) -> None:
    for node in case.some(most=len(case.nodes) - 1):
        case.note(f"the operator's machine and {node} do not see each other")
        case.cluster.cut(OPERATOR, node)
    case.heal_by(case.cluster.heal)


def _operator_killed(case: Case) -> None:
    case.note("the operator's program is killed, then two attach")
    case.operator.detach()
    case.operator.attach()
    case.operator.attach()


# --- disks


def _fill(case: Case, node: str) -> None:
    case.note(f"the disk of {node} is full")
    filler = case.cluster.host(node).home / "filler"
    case.heal_by(lambda: filler.unlink(missing_ok=True))
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while file.write(bytes(size)):
                    pass
    _assert_full(filler)


def _assert_full(filler: Path) -> None:
    try:
        with filler.open("ab", buffering=0) as file:
            file.write(bytes(1 << 13))
    except OSError as error:
        if error.errno == errno.ENOSPC:
            return
        raise
    raise ClusterError(f"{filler}: the disk is not full")


def _disk_full(choose: Callable[[Case], list[str]]) -> Callable[[Case], None]:
    def apply(case: Case) -> None:
        for node in choose(case):
            _fill(case, node)

    return apply


def _disk_full_and_restart(case: Case) -> None:
    (node,) = case.some(most=1)
    _fill(case, node)
    case.sleep(0.0, 0.5)
    case.verb("restart")


def _disk_full_and_killed(case: Case) -> None:
    (node,) = case.some(most=1)
    _fill(case, node)
    case.note(f"SIGKILL to the agent of {node}")
    case.kill(case.agents(node))


# --- clocks


def _clock_jumps(case: Case) -> None:
    for node in case.some():
        ahead_s = case.rng.choice((-1, 1)) * case.rng.choice((1, 30, 3600, 400 * 86400))
        case.note(f"the clock of {node} jumps by {ahead_s} s")
        skew.jump(case.clock(node), ahead_s)
        case.heal_by(functools.partial(skew.jump, case.clock(node), 0))


# --- commands that race with faults


def _break_by_chance(case: Case) -> None:
    case.rng.choice(
        (
            _coordinators_agent(signal.SIGKILL), _coordinators_agent(signal.SIGSTOP), _cut(_coordinator),
            _crash(_coordinator), _freeze(_coordinator), _pair_with_coordinator, _halves, _some_agents_killed,
        )
    )(case)  # fmt: skip


def _restart_races(case: Case) -> None:
    case.verb("restart")
    case.sleep(0.0, 0.3)
    _break_by_chance(case)
    for _ in range(2):
        case.verb("restart")


def _remove_races(case: Case) -> None:
    (node,) = case.members()
    removal = case.verb("remove", "--node", node)
    case.heal_by(lambda: _add_back(case, node, removal))
    case.sleep(0.0, 0.3)
    _break_by_chance(case)


def _coordinator_removed(case: Case) -> None:
    node = case.coordinator()
    removal = case.verb("remove", "--node", node)
    case.heal_by(lambda: _add_back(case, node, removal))
    case.sleep(0.0, 0.4)
    _break_by_chance(case)


def _add_races(case: Case) -> None:
    (node,) = case.members()
    removal = case.verb("remove", "--node", node)
    removal.answer()
    case.heal_by(lambda: _add_back(case, node, removal))
    case.verb("add", "--node", node)
    case.sleep(0.0, 0.5)
    _break_by_chance(case)


def _add_back(case: Case, node: str, *before: Verb) -> None:
    """Add a node, healed; a request that is under way or unnecessary is refused, which is an answer."""
    for verb in before:
        # A removal may wait for the next coordinator, and would remove what is added before that.
        verb.answer()
    case.verb("add", "--node", node).answer()


def _uncordon(case: Case, node: str, before: Verb) -> None:
    """Admit a node again, healed; the request before it may wait for a coordinator, and would come after this one."""
    before.answer()
    case.verb("uncordon", "--node", node).answer()


def _cordon_races(case: Case) -> None:
    (node,) = case.members()
    cordon = case.verb("cordon", "--node", node)
    case.heal_by(lambda: _uncordon(case, node, cordon))
    case.sleep(0.0, 0.3)
    _break_by_chance(case)
    case.verb("restart")


def _promote_races(case: Case) -> None:
    """Only where those out of reach are dead: the operator says so."""
    nodes = case.some(most=len(case.nodes) - 1)
    _crash(lambda _: nodes)(case)
    case.sleep(0.0, 1.5)
    case.verb("promote")


def _stop_races(case: Case) -> None:
    case.verb("stop")
    case.sleep(0.0, 0.1)
    _break_by_chance(case)


def _stop_beside(case: Case) -> None:
    _break_by_chance(case)
    case.sleep(0.0, 1.5)
    case.verb("stop", *(["--kill"] if case.rng.random() < 0.5 else []))


def _all_commands_at_once(case: Case) -> None:
    (node,) = case.members()
    case.verb("restart")
    cordon = case.verb("cordon", "--node", node)
    case.heal_by(lambda: _uncordon(case, node, cordon))
    for verb in ("status", "restart", "events", "incidents"):
        case.verb(verb)


def _ranks_signalled(case: Case) -> None:
    case.verb("signal", "--rank", str(case.rng.randrange(case.world)), "KILL")
    case.sleep(0.0, 0.2)
    _break_by_chance(case)


# --- several


_ONE_OVER_ANOTHER = (
    _signal("rank", signal.SIGKILL), _signal("engine", signal.SIGKILL), _signal("agent", signal.SIGKILL),
    _coordinators_agent(signal.SIGKILL), _coordinators_agent(signal.SIGSTOP), _some_agents_killed,
    _crash(_coordinator), _crash(_member), _cut(_coordinator), _cut(_member), _pair_with_coordinator,
    _pair_of_members, _pairs_at_random, _halves, _one_way_from_one, _one_way_in_a_pair, _slow,
)  # fmt: skip


def _sequence(case: Case) -> None:
    """Each of them while those before still last; a host that is down cannot fail again."""
    for fault in case.rng.sample(_ONE_OVER_ANOTHER, case.rng.randint(2, 4)):
        with contextlib.suppress(ClusterError):
            fault(case)
        case.sleep(0.0, 1.5)


def _sequence_with_healing(case: Case) -> None:
    for fault in case.rng.sample(_ONE_OVER_ANOTHER, case.rng.randint(2, 3)):
        fault(case)
        case.sleep(0.2, 1.8)
        case.heal()
        case.sleep(0.0, 1.0)


_SELF = "not needed"
_BOOT = "the host boots"
_ADD = "`add`, after the boot"
_CONT = "SIGCONT"
_LINKS = "the links"
_KILL, _STOP, _TERM = signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM
_REPAIR = "an attached supervisor restarts the agent"
_SHORT = (0.1, 1.0)

FAULTS = (
    Fault("rank killed", "SIGKILL to the ranks of one node", _SELF, _signal("rank", _KILL), _SHORT),
    Fault("rank terminated", "SIGTERM to the ranks of one node", _SELF, _signal("rank", _TERM), _SHORT),
    Fault("rank stopped", "SIGSTOP to the ranks of one node", _CONT, _signal("rank", _STOP)),
    Fault("all ranks killed", "SIGKILL to all ranks", _SELF, _signal("rank", _KILL, all_nodes=True), _SHORT),
    Fault("engine killed", "SIGKILL to one engine", _SELF, _signal("engine", _KILL), _SHORT),
    Fault("engine stopped", "SIGSTOP to one engine", _CONT, _signal("engine", _STOP)),
    Fault("all engines killed", "SIGKILL to all engines", _SELF, _signal("engine", _KILL, all_nodes=True), _SHORT),
    Fault("agent killed", "SIGKILL to one agent", _REPAIR, _signal("agent", _KILL)),
    Fault("coordinator's agent killed", "SIGKILL", _REPAIR, _coordinators_agent(_KILL)),
    Fault("several agents killed", "SIGKILL to two or more at once", _REPAIR, _some_agents_killed),
    Fault("all agents killed", "SIGKILL to all at once", _REPAIR, _signal("agent", _KILL, all_nodes=True)),
    Fault("agent killed twice", "SIGKILL, and again when it is back", _REPAIR, _agent_killed_again, attended=True),
    Fault("agent and engine killed", "SIGKILL to both at once", _REPAIR, _agent_and_engine_killed),
    Fault("agent stopped", "SIGSTOP to one agent", _CONT, _signal("agent", _STOP)),
    Fault("coordinator's agent stopped", "SIGSTOP", _CONT, _coordinators_agent(_STOP)),
    Fault("all agents stopped", "SIGSTOP to all at once", _CONT, _signal("agent", _STOP, all_nodes=True)),
    Fault("agent stopped, then killed", "SIGSTOP, later SIGKILL", _REPAIR, _agent_stopped_and_killed),
    Fault("host gone", "a member's power fails", _BOOT, _crash(_member)),
    Fault("coordinator's host gone", "its power fails", _BOOT, _crash(_coordinator)),
    Fault("host and its disk gone", "it boots with an empty disk", _ADD, _crash(_member, lose_disk=True)),
    Fault("coordinator's host and disk gone", "the same", _ADD, _crash(_coordinator, lose_disk=True)),
    Fault("several hosts gone", "power fails on one or more at once", _BOOT, _crash(Case.some)),
    Fault("all hosts gone", "power fails in the whole rack", _BOOT, _crash(_all), _SHORT),
    Fault("host frozen", "all processes of a member are stopped", _CONT, _freeze(_member)),
    Fault("coordinator's host frozen", "all its processes are stopped", _CONT, _freeze(_coordinator)),
    Fault("host cut off", "nothing reaches a member", _LINKS, _cut(_member)),
    Fault("coordinator cut off", "nothing reaches it", _LINKS, _cut(_coordinator)),
    Fault(
        "host cut off, then its agent stopped",
        "before its lease is over",
        "the links, and SIGCONT",
        _cut_off_and_stopped,
        (1.3, 2.0),
        node_timeouts=(4.0, 6.0, 15.0),
    ),
    Fault("several hosts cut off", "each from all others", _LINKS, _cut(Case.some)),
    Fault("link to the coordinator cut", "between it and a member", _LINKS, _pair_with_coordinator),
    Fault("link between members cut", "between two members", _LINKS, _pair_of_members),
    Fault("links cut in sequence", "two links of the coordinator, one later", _LINKS, _pairs_in_sequence),
    Fault("links cut at random", "any of them, one after the other", _LINKS, _pairs_at_random),
    Fault("network split", "into two sides", _LINKS, _halves),
    Fault("network split three times", "differently each time", _LINKS, _halves_in_sequence, (0.2, 1.5)),
    Fault("one way: nothing leaves", "what a node sends is lost", _LINKS, _one_way_from_one),
    Fault("one way: nothing arrives", "what is sent to a node is lost", _LINKS, _one_way_to_one),
    Fault("one way in a pair", "between the coordinator and a member", _LINKS, _one_way_in_a_pair),
    Fault("link flaps", "a node is cut off 3 to 6 times", "the link, and `add`", _flapping, _SHORT),
    Fault("links slow", "50 to 250 ms each way", _LINKS, _slow),
    Fault("link lossy", "5 to 20 % of the frames of a node", _LINKS, _lossy),
    Fault("connections refused", "a firewall that answers with RST", "the rule is removed", _refused),
    Fault("SSH blocked", "to one or more nodes", _LINKS, _ssh_blocked),
    Fault("operator cut off", "from all nodes", _LINKS, _operator_cut),
    Fault("operator cut off from some", "from one or more nodes", _LINKS, _operator_cut_from_some),
    Fault("operator killed", "and two attach", _SELF, _operator_killed, _SHORT, attended=True),
    Fault("disk full", "of a member", "space", _disk_full(_member), disk_mb=SMALL_DISK_MB),
    Fault("coordinator's disk full", "its home", "space", _disk_full(_coordinator), disk_mb=SMALL_DISK_MB),
    Fault("all disks full", "of every node", "space", _disk_full(_all), disk_mb=SMALL_DISK_MB),
    Fault("disk full and restart", "`restart` meanwhile", "space", _disk_full_and_restart, disk_mb=SMALL_DISK_MB),
    Fault("disk full and agent killed", "SIGKILL meanwhile", "space", _disk_full_and_killed, disk_mb=SMALL_DISK_MB),
    Fault("clocks jump", "1 s to 400 days, on one or more", "they jump back", _clock_jumps, clocks=True),
    Fault("restart races", "`restart` three times during a fault of the coordinator", _LINKS, _restart_races),
    Fault("remove races", "`remove` of a member during such a fault", "`add`", _remove_races),
    Fault("coordinator removed", "`remove` of it during such a fault", "`add`", _coordinator_removed),
    Fault("add races", "`remove`, then `add` during such a fault", "`add`", _add_races),
    Fault("cordon races", "`cordon` and `restart` during such a fault", "`uncordon`", _cordon_races),
    Fault("signal races", "`signal KILL` during such a fault", _LINKS, _ranks_signalled),
    Fault("promote races", "`promote` while hosts are gone", _BOOT, _promote_races),
    Fault("stop races", "`stop`, then such a fault", "`stop`", _stop_races, over=True),
    Fault("stop while broken", "such a fault, then `stop` or `stop --kill`", "`stop`", _stop_beside, over=True),
    Fault("many commands", "six at once", "`uncordon`", _all_commands_at_once, _SHORT),
    Fault("faults in sequence", "2 to 4 at random, overlapping", "all", _sequence),
    Fault("faults with healing between", "2 or 3 at random", "all", _sequence_with_healing, _SHORT),
)
BY_NAME = {fault.name: fault for fault in FAULTS}
