"""For whom the running group waits, or what limits it: when ranks are sampled, and what their windows mean. Pure.

In: windows of the ranks, pulses, time. Out: orders `sample`, the events `slow` and `slow_over`.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from remote_agent.coordinator import inputs
from remote_agent.coordinator import state as s
from remote_agent.diagnose import slow
from remote_agent.diagnose.hang.stragglers import NOBODY, find_stragglers
from remote_agent.diagnose.incidents import iso_time
from remote_agent.diagnose.slow import Slowness
from remote_agent.wire.documents import WINDOW_S
from remote_agent.wire.events import EventType

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from remote_agent.coordinator.transitions import Turn
    from remote_agent.diagnose.slow import Shares
    from remote_agent.wire.documents import SlowStatus

# In windows: the first bout, a bout while something is suspected, and of each PERIOD the ones that are always sampled.
FIRST, SUSPECTED, PERIOD, ROUTINE = 12, 12, 12, 2
# If a suspicion led to nothing, the next one counts after this many windows.
AGAIN = 60
# It takes so many windows in a row to say that ranks are slow, and that they are no longer.
ROUNDS = 3
# A window is judged without the ranks whose reports have not come by then.
LATE_S = 4.0
# To describe what is slow, so many other ranks are enough.
PEERS = 128
# GPUs that are idle for this share of so many seconds wait for something.
IDLE, IDLE_S = 0.5, 600.0
# More windows than this are not outstanding unless a node's clock is wrong.
MAX_PENDING = 6


def on_tick(turn: Turn) -> None:
    """Order bouts when it is time; judge the windows that are complete, or late."""
    state = turn.state
    if state.phase != s.RUNNING or not state.spec.slow:
        return
    now = turn.wall_ns / 1e9 / WINDOW_S
    if not state.watch.slow.began and ("process_group" in state.phases or state.stepped):
        _set(turn, began=int(now))
    _order(turn, int(now))
    _count_idle(turn)
    live = sum(rank.state == "running" for rank in state.ranks.values())
    for number, nodes in sorted(turn.state.watch.slow.pending.items()):
        if sum(map(len, nodes.values())) >= live or now > number + 1 + LATE_S / WINDOW_S:
            _judge(turn, number)


def _set(turn: Turn, **changes: object) -> None:
    watch = turn.state.watch
    turn.set(watch=dataclasses.replace(watch, slow=dataclasses.replace(watch.slow, **changes)))  # type: ignore[arg-type]


def _order(turn: Turn, now: int) -> None:
    """Have the ranks sampled: at the beginning, now and then, and as long as something is suspected."""
    watch = turn.state.watch.slow
    if not watch.began:
        return
    until, routine = watch.until, True
    if now < watch.began + FIRST:
        until = watch.began + FIRST
    elif now % PERIOD < ROUTINE:
        until = now - now % PERIOD + ROUTINE
    if watch.suspected and now < watch.suspected + SUSPECTED and watch.status is None:
        until, routine = max(until, watch.suspected + SUSPECTED), False
    if until > watch.until:
        _set(turn, until=until)
        for name in turn.state.members:
            turn.send(name, "sample", until=until, routine=routine)


def _suspect(turn: Turn) -> None:
    watch, now = turn.state.watch.slow, int(turn.wall_ns / 1e9 / WINDOW_S)
    if watch.began and watch.status is None and (not watch.suspected or now >= watch.suspected + AGAIN):
        # It is ordered anew also where a bout is under way: some ranks are sampled only for a reason.
        _set(turn, suspected=now, until=now)


def on_pulses(turn: Turn) -> None:
    """Take a complete round of pulses: who arrives last at the collectives is a second witness."""
    ranks, watch = turn.state.ranks, turn.state.watch
    nodes = {rank: ranks[rank].node for rank in watch.now if rank in ranks}
    last = find_stragglers({rank: watch.now[rank] for rank in nodes}, nodes)
    _set(turn, last=last if last.is_certain else NOBODY)
    if last.ranks:
        _suspect(turn)


def on_gpu_use(turn: Turn, percent: float) -> None:
    """Take how busy the GPUs of a node's ranks are."""
    watch = turn.state.watch.slow
    if turn.state.phase == s.RUNNING and turn.state.stepped:
        since = watch.gpus_since or turn.now
        _set(turn, gpus_since=since, gpus_used=watch.gpus_used + percent / 100, gpus_seen=watch.gpus_seen + 1)


def _count_idle(turn: Turn) -> None:
    """Say it if the GPUs were idle for most of the last minutes, and if they no longer are."""
    watch = turn.state.watch.slow
    if not watch.gpus_since or turn.now < watch.gpus_since + IDLE_S:
        return
    share = 1 - watch.gpus_used / watch.gpus_seen
    _set(turn, gpus_since=0.0, gpus_used=0.0, gpus_seen=0, gpus_idle=share if share > IDLE else 0.0)
    if watch.status is None or watch.status["limits"] == slow.IDLE:
        _conclude(turn, _idle(turn))


def _idle(turn: Turn) -> Slowness | None:
    share = turn.state.watch.slow.gpus_idle
    return Slowness((), None, share, slow.IDLE, None, None) if share else None


def on_unsampled(turn: Turn, event: inputs.Unsampled) -> None:
    """Note that ranks of a node cannot be sampled."""
    _set(turn, off=event.reason)


def on_windows(turn: Turn, event: inputs.Windows) -> None:
    """Take what a node reports of its ranks in a window."""
    state, now = turn.state, turn.wall_ns / 1e9 / WINDOW_S
    if state.phase != s.RUNNING or not now - MAX_PENDING < event.window <= now + 1:
        return
    # Each is reduced when it comes: those of thousands of ranks would hold up the loop.
    own = {
        rank: slow.shares_of(window, WINDOW_S)
        for rank, window in event.ranks.items()
        if rank in state.ranks and state.ranks[rank].node == event.node
    }
    pending = state.watch.slow.pending
    nodes = pending.get(event.window, {})
    known = nodes.get(event.node, {})
    _set(turn, pending={**pending, event.window: {**nodes, event.node: {**known, **own}}})


def _judge(turn: Turn, number: int) -> None:
    """See what a window shows, and whether it has been so for long enough."""
    watch = turn.state.watch.slow
    nodes = watch.pending[number].values()
    shares = {rank: one for ranks in nodes for rank, one in ranks.items() if one is not None}
    _set(turn, pending={each: known for each, known in watch.pending.items() if each > number})
    if turn.state.watch.hang is not None or slow.is_pause(shares):
        return
    found, before = _find(turn, shares, is_whole=True), watch.found
    rounds = watch.rounds + 1 if _is_same(found, before) else 1
    judged = (*watch.judged[1 - ROUNDS :], _some(turn, shares, found))
    _set(turn, found=found, rounds=rounds, judged=judged)
    if found is not None:
        _suspect(turn)
    if rounds < ROUNDS:
        return
    if found is not None:
        found = _find(turn, _mean(judged), is_whole=False)
        if found is None or not _is_same(found, turn.state.watch.slow.found):
            # Together they show less than each of them.
            return
    _conclude(turn, found or _idle(turn))


def _some(turn: Turn, shares: Mapping[int, Shares], found: Slowness | None) -> dict[int, Shares]:
    """Return the shares of the ranks of the node that was found, and of some others: enough to describe it."""
    ranks, every = turn.state.ranks, max(1, len(shares) // PEERS)
    node = found.node if found is not None else None
    return {rank: one for rank, one in shares.items() if rank % every == 0 or ranks[rank].node == node}


def _mean(judged: Sequence[Mapping[int, Shares]]) -> dict[int, Shares]:
    ranks = {rank for shares in judged for rank in shares}
    return {rank: slow.mean([shares[rank] for shares in judged if rank in shares]) for rank in ranks}


def _find(turn: Turn, shares: Mapping[int, Shares], *, is_whole: bool) -> Slowness | None:
    """Return what these shares show; `is_whole`: they should be those of all live ranks."""
    ranks, watch = turn.state.ranks, turn.state.watch
    nodes = {rank: one.node for rank, one in ranks.items() if one.state == "running" and (is_whole or rank in shares)}
    shares = {rank: one for rank, one in shares.items() if rank in nodes}
    groups = (group["ranks"] for pulse in watch.now.values() for group in pulse["groups"].values())
    stages = {tuple(group) for group in groups if group and 1 < len(group) < len(nodes)}
    known = watch.slow.status["ranks"] if watch.slow.status is not None else ()
    return slow.find_slowness(shares, nodes, stages, watch.slow.last, known)


def _is_same(one: Slowness | None, other: Slowness | None) -> bool:
    """Return whether both say the same: nothing, an equal limit, or ranks of which one is in both."""
    if one is None or other is None:
        return one is other
    if one.ranks and other.ranks:
        return bool(set(one.ranks) & set(other.ranks))
    return (one.phase, one.node) == (other.phase, other.node)


def _conclude(turn: Turn, found: Slowness | None) -> None:
    """Write to the journal what is slow now, and what no longer is, unless it is known."""
    watch = turn.state.watch.slow
    status = watch.status
    if status is not None and (found is None or not _is_known(found, status)):
        seconds = (turn.wall_ns - watch.since_ns) / 1e9
        who = f"{status['node']}" if status["node"] else "the job"
        reason = f"{who} is no longer slow, after {seconds:.0f} s"
        turn.emit(
            EventType.SLOW_OVER, node=status["node"], ranks=status["ranks"], seconds=round(seconds), reason=reason
        )
        _set(turn, status=None, suspected=0)
        status = None
    if found is None:
        return
    since_ns = turn.state.watch.slow.since_ns if status is not None else turn.wall_ns
    document = found.to_json(iso_time(since_ns))
    if status is None:
        rank = found.ranks[0] if len(found.ranks) == 1 else None
        turn.write(s.Emit(EventType.SLOW, turn.state.generation, found.node, rank, document))
    _set(turn, status=document, since_ns=since_ns)


def _is_known(found: Slowness, status: SlowStatus) -> bool:
    if found.ranks:
        return bool(set(found.ranks) & set(status["ranks"]))
    return (found.phase, found.node) == (status["limits"], status["node"])
