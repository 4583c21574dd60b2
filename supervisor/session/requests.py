"""What an operator asks of the job: restart, remove, add, cordon, stop, promote, signal.

In: a session and a verb. Out: the coordinator's answer, or RequestFailed with the reason; the outcome comes as events.
"""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any

from remote_agent.wire import CallFailed, WireError
from supervisor.errors import RequestFailed, SupervisorError, why
from supervisor.session import ending, heal, resync

if TYPE_CHECKING:
    from supervisor.session.link import Link
    from supervisor.session.session import Session

# How long a node that is up may take to join the coordinator, seconds.
JOIN_DEADLINE = 30.0
# A request to the coordinator may have to wait for a state change in progress, seconds.
REQUEST_DEADLINE = 60.0


async def request(session: Session, verb: str, args: dict[str, Any]) -> dict[str, Any]:
    """Ask the cluster to act; `add` brings the host up first. Raises RequestFailed, Unreachable, HostError."""
    if session.read_only:
        raise RequestFailed(f"{verb} refused: this supervisor is read-only", "leave --read-only out", "read_only")
    if session.fed:
        # What is asked for may be done already.
        await session.heard()
    wish = {**args, "operator": session.operator}
    if args.get("node"):
        wish["node"] = _node_on(session, str(args["node"]))
    await ending.refuse_over(session)
    if verb == "promote":
        return await heal.promote(session, wish.get("node"))
    if verb in ("sync", "rollback"):
        return await _resync(session, verb, wish)
    if verb in ("signal", "keep"):
        return await (_signal if verb == "signal" else _keep)(session, wish)
    return await (_add(session, wish) if verb == "add" else _steer(session, verb, wish))


async def _resync(session: Session, verb: str, wish: dict[str, Any]) -> dict[str, Any]:
    """Restart the group from another work tree, once all nodes have it; else nothing is restarted."""
    args, told = await resync.spread(session, verb, wish)
    if not args:
        return {**_told(False, "not all nodes have the work tree: nothing is restarted"), "nodes": told}
    answer = await _steer_when_ready(session, args, "restart", "no_tree")
    return {**answer, "nodes": told}


async def _signal(session: Session, wish: dict[str, Any]) -> dict[str, Any]:
    """Send a signal to ranks as this session sees them; their agents refuse those whose process is another by now."""
    name = str(wish["signal"]).upper()
    name = name if name.startswith("SIG") else f"SIG{name}"
    if name not in signal.Signals.__members__:
        raise RequestFailed(f"no signal named {name}", "USR1, USR2, INT, TERM, KILL, …", "usage")

    _refuse_old(session, wish)

    async def send(link: Link, pids: dict[str, int]) -> dict[str, dict[str, Any]]:
        args = {"pids": pids, "signal": name, "operator": wish["operator"]}
        refused = (await link.call("signal", args, timeout_s=REQUEST_DEADLINE)).data["refused"]
        return {rank: _told(rank not in refused, refused.get(rank, "sent")) for rank in pids}

    return await _ask_ranks(session, wish["ranks"], send, f"{name} sent")


async def _keep(session: Session, wish: dict[str, Any]) -> dict[str, Any]:
    """Let ranks' stacks and flight records be saved beside their logs."""

    async def save(link: Link, pids: dict[str, int]) -> dict[str, dict[str, Any]]:
        args = {"ranks": [int(rank) for rank in pids]}
        files = (await link.call("keep", args, timeout_s=REQUEST_DEADLINE)).data["files"]
        none = "no answer of the rank: `supervisor stacks` says why"
        return {rank: _told(bool(files.get(rank)), " ".join(files.get(rank, ())) or none) for rank in pids}

    return await _ask_ranks(session, wish["ranks"], save, "stacks and flight records saved")


AskNode = Callable[["Link", "dict[str, int]"], Awaitable["dict[str, dict[str, Any]]"]]


async def _ask_ranks(session: Session, ranks: Iterable[int], ask: AskNode, done: str) -> dict[str, Any]:
    """Ask the nodes of these ranks at once, with the pids as this session sees them; returns what came of each rank."""
    status = session.status or await session.call("status")
    told = {str(rank): _told(False, f"no rank {rank} runs in this job") for rank in sorted(ranks)}
    pids: dict[str, dict[str, int]] = {}
    for node in status.get("nodes", ()):
        here = {str(rank["rank"]): rank["pid"] for rank in node.get("ranks", ()) if rank.get("pid")}
        if chosen := {rank: pid for rank, pid in here.items() if rank in told}:
            pids[str(node["name"])] = chosen

    async def one(node: str) -> None:
        link = session.links.get(node)
        if link is None:
            told.update(dict.fromkeys(pids[node], _told(False, f"{node} is not in this inventory")))
            return
        try:
            told.update(await ask(link, pids[node]))
        except (CallFailed, WireError, asyncio.TimeoutError) as error:
            told.update(dict.fromkeys(pids[node], _told(False, f"{node}: {why(error)}")))

    await asyncio.gather(*(one(node) for node in pids))
    got = [rank for rank, answer in told.items() if answer["accepted"]]
    if not got:
        raise RequestFailed("; ".join(answer["message"] for answer in told.values()), kind="ranks")
    return {"accepted": True, "message": f"{done}: rank {', '.join(got)}", "ranks": told}


def _told(accepted: bool, message: str) -> dict[str, Any]:
    return {"accepted": accepted, "message": message, "hint": ""}


async def _add(session: Session, wish: dict[str, Any]) -> dict[str, Any]:
    if "nodes" in wish:
        return await _add_several(session, wish)
    name = str(wish["node"])
    if _is_open(session):
        # Nodes join by themselves: a torchrun there brings the agent up.
        return await _steer(session, "add", wish)
    # Its agent may be there: nothing is brought up before that is known.
    await session.settle(nodes=[name])
    _refuse_old(session, wish)
    seq = int(session.events[-1]["seq"]) if session.events else 0
    was_in = any(node["name"] == name and node["state"] == "running" for node in session.status.get("nodes", ()))
    wish["spec"] = await heal.bring_up_again(session, name, full=True)
    try:
        return await _steer_when_ready(session, wish)
    except RequestFailed as refused:
        if refused.kind == "done" and not was_in:
            # A lost node: it was admitted as soon as its agent was back.
            return {"accepted": True, "message": refused.message, "generation": 0, "seq": seq}
        raise


async def _add_several(session: Session, wish: dict[str, Any]) -> dict[str, Any]:
    """Bring all up at once, and let those that come up in with one restart."""
    names = [str(name) for name in wish["nodes"]]
    await session.settle(nodes=names)
    _refuse_old(session, wish)
    found = await asyncio.gather(
        *(heal.bring_up_again(session, name, full=True) for name in names), return_exceptions=True
    )
    failed: dict[str, dict[str, Any]] = {}
    up: dict[str, dict[str, Any]] = {}
    for name, spec in zip(names, found, strict=True):
        if isinstance(spec, (SupervisorError, CallFailed)):
            failed[name] = {"accepted": False, "message": spec.message, "hint": spec.hint}
        elif isinstance(spec, (WireError, asyncio.TimeoutError)):
            failed[name] = _told(False, f"{name}: {why(spec)}")
        elif isinstance(spec, BaseException):
            raise spec
        else:
            up[name] = spec
    if not up:
        raise RequestFailed("; ".join(entry["message"] for entry in failed.values()), kind="bring_up")
    wish.update(nodes=list(up), specs=list(up.values()))
    try:
        answer = await _steer_when_ready(session, wish)
    except RequestFailed as refused:
        if refused.kind != "not_ready":
            raise
        # Those that are there need not wait for those that do not come.
        answer = await _steer(session, "add", {**wish, "late": True})
    told = answer.get("nodes") or {name: {"accepted": True, "message": answer["message"], "hint": ""} for name in up}
    return {**answer, "nodes": {**told, **failed}}


def _refuse_old(session: Session, wish: dict[str, Any]) -> None:
    """Refuse what was planned for a generation that is over; to bring a lost node up may itself make the next one."""
    expected = wish.pop("if_generation", None)
    if expected is not None and expected != _generation(session):
        newest = _generation(session)
        raise RequestFailed(f"generation {expected} is over: the job is in generation {newest}", kind="stale")


async def _steer_when_ready(
    session: Session, wish: dict[str, Any], op: str = "add", kind: str = "not_ready"
) -> dict[str, Any]:
    """Ask again while the coordinator has not heard yet what a node's agent knows; `kind`: its refusal."""
    end = time.monotonic() + JOIN_DEADLINE
    while True:
        try:
            return await _steer(session, op, wish)
        except RequestFailed as refused:
            if refused.kind != kind or time.monotonic() > end:
                raise
        await session.wait_change(0.2)


def _is_open(session: Session) -> bool:
    """Whether nodes join by themselves: they have names of their own, not their hosts'."""
    return any(link.view.identity.get("node", name) != name for name, link in session.links.items())


def _node_on(session: Session, name: str) -> str:
    """Return the one node that joined by itself on the host of that name, else the name; raises RequestFailed."""
    nodes = [str(node["name"]) for node in session.status.get("nodes", ())]
    found = [node for node in nodes if re.fullmatch(re.escape(name) + "-[0-9a-f]{4}", node)]
    if not found or name in nodes or not _is_open(session):
        return name
    if len(found) > 1:
        raise RequestFailed(f"{name} is {len(found)} nodes of this job", f"name one: {' '.join(found)}", "unknown_node")
    return found[0]


async def _steer(session: Session, op: str, args: dict[str, Any]) -> dict[str, Any]:
    generation = _generation(session)
    if op == "restart" and generation >= 0:
        # The group that is meant may be restarting by itself.
        args.setdefault("if_generation", generation)
    await _have_a_coordinator(session, op, args)
    last = ""
    for link in session.opened_links(live=True):
        try:
            return (await link.call(op, args, timeout_s=REQUEST_DEADLINE)).data
        except CallFailed as refused:
            raise RequestFailed(refused.message, refused.hint, refused.kind) from refused
        except (WireError, asyncio.TimeoutError) as broken:
            last = f"{link.view.name}: {why(broken)}"
            # It may have been carried out: the next agent must not do it a second time.
            if generation >= 0:
                args.setdefault("if_generation", generation)
    if not last:
        # Files alone answer: what they tell of the job may be on its way.
        await session.heard()
    await ending.refuse_over(session)
    raise session.unreachable(last or "no agent is alive there")


async def _have_a_coordinator(session: Session, op: str, args: dict[str, Any]) -> None:
    if await heal.promote_if_orphaned(session):
        return
    if op == "remove":
        for name in args.get("nodes") or [args["node"]]:
            await heal.promote_without(session, str(name))
    elif op == "stop":
        await heal.promote_to_stop(session)


def _generation(session: Session) -> int:
    """Return the newest generation that this session has heard of: the journal may be ahead of the status."""
    told = session.events[-1]["generation"] if session.events else -1
    return max(int(session.status.get("generation", -1)), int(told))
