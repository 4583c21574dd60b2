"""How torch's own agents find each other, for a job that asks for one of torch's rendezvous backends. Pure.

In: the job's Rendezvous, the group. Out: who opens the store, and what each torch agent is started with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from remote_agent.wire import PORTS, read_conf, split_endpoint

if TYPE_CHECKING:
    from remote_agent.state import State

# torch's own default (RendezvousTimeout of dynamic_rendezvous.py).
JOIN_TIMEOUT_S = 600.0


def join_timeout(state: State) -> float:
    """Return how many seconds torch's agents wait for each other."""
    conf = read_conf(state.spec.rendezvous.conf if state.spec.rendezvous is not None else "")
    try:
        return float(conf.get("join_timeout", JOIN_TIMEOUT_S))
    except ValueError:
        return JOIN_TIMEOUT_S


def opener(state: State) -> tuple[str, dict[str, Any]] | None:
    """Return the node that opens the group's store, and the order to do so; None when somebody else has it."""
    first = state.members[0]
    order: dict[str, Any] = {"generation": state.generation, "host": state.nodes[first].spec.address}
    wish = state.spec.rendezvous
    if wish is None:
        return first, order
    if wish.backend not in ("c10d", "static"):
        return None
    # torch's static agent opens its store itself: it only needs a port.
    held = {"hold": wish.backend == "c10d"}
    if not wish.endpoint:
        return first, {**order, **held, "port": 0}
    host, port = split_endpoint(wish.endpoint, PORTS[wish.backend])
    ours = [name for name in state.members if host in (name, state.nodes[name].spec.address)]
    if not ours:
        return None
    return ours[0], {"generation": state.generation, "host": state.nodes[ours[0]].spec.address, **held, "port": port}


def description(state: State, port: int) -> dict[str, Any] | None:
    """Return how others can join this group: backend, endpoint, run_id, nnodes; None for a group of our own.

    `port`: of the store that we opened, 0 where we did not.
    """
    wish = state.spec.rendezvous
    if wish is None:
        return None
    opened = opener(state)
    endpoint = f"{opened[1]['host']}:{port}" if opened is not None else wish.endpoint
    # Where the store outlives a group, torch closes the run in it for good when an agent leaves.
    suffix = f".{state.generation}" if state.generation and (opened is None) else ""
    nnodes = wish.nnodes or str(len(state.members))
    return {
        "backend": wish.backend,
        "endpoint": endpoint,
        "run_id": f"{wish.run_id}{suffix}",
        "nnodes": nnodes,
        "conf": wish.conf,
        "is_ours": opened is not None,
    }
