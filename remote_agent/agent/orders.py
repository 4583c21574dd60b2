"""What this node's workers start with: its own description of the job, and from the coordinator only their ranks.

In: the coordinator's `prepare` and `go`. Out: the engine's orders. **The agent of another node cannot choose what
runs here**: program, arguments, directories and environment are those that the operator has brought to this node.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from remote_agent.coordinator import environment
from remote_agent.wire import Args, Problem

if TYPE_CHECKING:
    from remote_agent.agent.context import Context
    from remote_agent.wire import NodeSpec, Rendezvous
    from remote_agent.wire.documents import OrderedMeeting

# The coordinator decides these values: who takes part, and where they meet.
STORE = ("generation", "port", "hold")
RANKS = (
    "generation",
    "group_rank",
    "base_rank",
    "local_world_size",
    "world_size",
    "group_world_size",
    "master_addr",
    "master_port",
    "restart_count",
    "max_restarts",
)


def hello(context: Context) -> dict[str, object]:
    """Return what the engine needs to know before the coordinator's first order."""
    spec = context.spec
    own = spec.node(context.node)
    known: dict[str, object] = {
        "nproc": own.nproc_per_node if own is not None else "auto",
        "known": str(context.files.home.torch),
    }
    if spec.standby == "off" or spec.rendezvous is not None:
        return known
    # These ranks are placeholders; the engine fills in the real numbers.
    ranks: Args = {**dict.fromkeys(RANKS, 0), "group_world_size": max(1, len(spec.nodes)), "master_addr": ""}
    return {**known, "order": go(context, ranks)}


def prepare(context: Context, args: Args) -> dict[str, object]:
    """Return the coordinator's `prepare` for this node, which opens a store at its own address only."""
    own = {"host": context.address, "ports": context.spec.ports}
    return {**{name: args[name] for name in STORE if name in args}, **own}


def go(context: Context, args: Args) -> dict[str, object]:
    """Return the coordinator's `go` with what this node knows; raises Problem for what a coordinator may not order."""
    spec = context.spec
    own = spec.node(context.node)
    return {
        **{name: args[name] for name in RANKS if name in args},
        "rendezvous": _rendezvous(spec.rendezvous, own, args.get("rendezvous")),
        "env": {**spec.env, **(own.env if own is not None else {}), **_set_while_running(args.get("set_env") or {})},
        "run_id": spec.job,
        "role": spec.role,
        "address": context.address,
        "cwd": context.workdir,
        "kind": spec.kind,
        "script": spec.script,
        "args": list(spec.args),
        "log_dir": str(context.files.generation(int(args["generation"]))),
        "links": f"{spec.log_dir}/{spec.job}_{context.node}" if spec.log_dir else "",
        "numa_binding": spec.numa_binding or "",
        "signals_to_handle": spec.signals_to_handle or "",
        "virtual_local_rank": spec.virtual_local_rank,
        "shutdown_timeout": max(1, round(spec.stop_grace)),
        "slow": spec.slow,
        "standby": str(context.files.home.standby) if spec.standby == "auto" else "",
    }


def _set_while_running(asked: Mapping[str, object]) -> dict[str, str]:
    """Return the variables that operators have set; raises Problem for one that a coordinator may not order."""
    variables = {str(name): str(value) for name, value in asked.items()}
    for name, value in variables.items():
        refused = environment.refusal(name, value)
        if refused:
            raise Problem("not_settable", f"the coordinator's order is refused: {refused}")
    return variables


def _rendezvous(asked: Rendezvous | None, own: NodeSpec | None, order: Args | None) -> OrderedMeeting | None:
    """Return how torch's agents meet: backend and settings as described, the place as ordered; raises Problem."""
    if asked is None and order is None:
        return None
    if asked is None or order is None:
        raise Problem("bad_request", "the coordinator's order is refused: this job uses another rendezvous")
    run_id, nnodes = str(order["run_id"]), str(order["nnodes"])
    if not re.fullmatch(re.escape(asked.run_id) + r"(\.\d+)?", run_id) or not re.fullmatch(r"\d+(:\d+)?", nnodes):
        raise Problem("bad_request", f"the coordinator's order is refused: run {run_id!r}, nodes {nnodes!r}")
    return {
        "backend": asked.backend,
        "conf": asked.conf,
        "run_id": run_id,
        "nnodes": nnodes,
        "endpoint": str(order["endpoint"]),
        "is_ours": bool(order["is_ours"]),
        "local_addr": own.address if own is not None else str(order["local_addr"]),
    }
