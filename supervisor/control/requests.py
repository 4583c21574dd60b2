"""The requests of operators that change a job: one function for all verbs, and a handler for those that need more.

In: the hub, a verb and its arguments. Out: the coordinator's reply, or RequestFailed with the reason; the outcome
comes as events. A verb without a handler here goes to the coordinator as it is, so a new one needs no line here.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import re
import signal
import time
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any

from remote_agent.text.names import ranges
from remote_agent.wire import Args, CallFailed, WireError
from remote_agent.wire.events import ENDED_STATES, LIVE_RANKS
from supervisor.control import admission, heal, promotion, resync
from supervisor.control.promotion import ATTACH
from supervisor.control.replies import all_messages, entry, failed_entry
from supervisor.errors import RequestFailed, SupervisorError, Unreachable, why
from supervisor.ssh.forward import Forward

if TYPE_CHECKING:
    from remote_agent.wire import NodeSpec
    from remote_agent.wire.answers import JobStacks, JobWindows, NodeWindows, RankStacks
    from remote_agent.wire.documents import EditedTree, NodeStatus, ReplyEntry, RequestReply, Status
    from supervisor.link.host_link import HostLink
    from supervisor.link.hub import Hub
    from supervisor.ssh.forward import Reader, Writer
    from supervisor.ssh.wires import Terminal

# A node that is up may take this long to join the coordinator, seconds.
JOIN_DEADLINE = 30.0
# An agent may take this long to answer for its own ranks, seconds.
REQUEST_DEADLINE = 60.0
# One agent may take this long to pass a request on and to answer, and all of them together this long, seconds.
ASK_DEADLINE = 12.0
VERB_DEADLINE = 25.0
# The pause between two tries while the coordinator moves to another node, seconds.
MOVING_PAUSE = 0.3
WITHOUT_COORDINATOR = ("moved", "no_coordinator", "not_coordinator")
"""How a request is refused while the next coordinator is elected, or the old one comes back."""
NOT_SAMPLED = "nothing was sampled: it has not imported torch.distributed yet, has ended, or its node is too busy"

AskNode = Callable[["HostLink", "dict[str, int]"], Awaitable["dict[str, ReplyEntry]"]]


async def request(hub: Hub, verb: str, args: Args) -> RequestReply:
    """Carry out one verb; raises RequestFailed, Unreachable, HostError."""
    _refuse_read_only(hub, verb)
    if hub.follows:
        # The job may have reached the requested state already.
        await hub.until_current()
    args = {**args, "operator": hub.operator}
    if args.get("node"):
        args["node"] = _node_on(hub, str(args["node"]))
    await promotion.refuse_over(hub)
    handler = HANDLERS.get(verb)
    return await (handler(hub, verb, args) if handler is not None else _ask_coordinator(hub, verb, args))


async def edited(hub: Hub, *, to_restart: bool) -> EditedTree:
    """Return what has been edited (see resync.look); `to_restart`: if all agents have died, restart them first."""
    if to_restart and hub.attach is None:
        await hub.until_current()
        await heal.Healer(hub).revive_all()
    return await resync.look(hub)


async def _promote(hub: Hub, verb: str, args: Args) -> RequestReply:
    return await promotion.promote(hub, args.get("node"))


async def _resync(hub: Hub, verb: str, args: Args) -> RequestReply:
    """Bring all nodes another work tree, then restart the group from it; restart nothing if a node lacks the tree."""
    if hub.attach is None:
        await heal.Healer(hub).revive_all()
    restart, nodes = await resync.spread(hub, verb, args)
    if not restart:
        none: RequestReply = {
            "accepted": False,
            "message": "not all nodes have the work tree: nothing is restarted",
            "hint": "",
        }
        return {**none, "nodes": nodes}
    return {**await _ask_until_ready(hub, "restart", restart, "no_tree"), "nodes": nodes}


async def _signal(hub: Hub, verb: str, args: Args) -> RequestReply:
    """Send a signal to the processes of ranks; an agent refuses a rank whose process has been replaced."""
    name = str(args["signal"]).upper()
    name = name if name.startswith("SIG") else f"SIG{name}"
    if name not in signal.Signals.__members__:
        raise RequestFailed(f"no signal named {name}", "USR1, USR2, INT, TERM, KILL, …", "usage")
    _refuse_stale(hub, args)

    async def send(link: HostLink, pids: dict[str, int]) -> dict[str, ReplyEntry]:
        request = {"pids": pids, "signal": name, "operator": args["operator"]}
        refused = (await link.call("signal", request, timeout_s=REQUEST_DEADLINE)).data["refused"]
        return {rank: entry(rank not in refused, refused.get(rank, "sent")) for rank in pids}

    return await _ask_ranks(hub, args["ranks"], send, f"{name} sent")


async def _keep(hub: Hub, verb: str, args: Args) -> RequestReply:
    """Save stacks and flight records of ranks next to their logs."""

    async def save(link: HostLink, pids: dict[str, int]) -> dict[str, ReplyEntry]:
        request = {"ranks": [int(rank) for rank in pids]}
        files = (await link.call("keep", request, timeout_s=REQUEST_DEADLINE)).data["files"]
        none = "the rank did not answer: `supervisor stacks` says why"
        return {rank: entry(bool(files.get(rank)), " ".join(files.get(rank, ())) or none) for rank in pids}

    return await _ask_ranks(hub, args["ranks"], save, "stacks and flight records saved")


async def _ask_ranks(hub: Hub, ranks: Iterable[int], ask: AskNode, done: str) -> RequestReply:
    """Ask the nodes of these ranks at once, with the process ids known here; returns an entry for each rank."""
    status: Status = hub.status or await hub.call("status")
    entries = {str(rank): entry(False, f"no rank {rank} runs in this job") for rank in sorted(ranks)}
    pids: dict[str, dict[str, int]] = {}
    for node in status.get("nodes", ()):
        here = {str(rank["rank"]): pid for rank in node.get("ranks", ()) if (pid := rank.get("pid"))}
        if chosen := {rank: pid for rank, pid in here.items() if rank in entries}:
            pids[str(node["name"])] = chosen

    async def one(node: str) -> None:
        link = hub.links.get(node)
        if link is None:
            entries.update(dict.fromkeys(pids[node], entry(False, f"{node} is not in this inventory")))
            return
        try:
            entries.update(await ask(link, pids[node]))
        except (CallFailed, WireError, asyncio.TimeoutError) as error:
            entries.update(dict.fromkeys(pids[node], entry(False, f"{node}: {why(error)}")))

    await asyncio.gather(*(one(node) for node in pids))
    accepted = [rank for rank, one_entry in entries.items() if one_entry["accepted"]]
    if not accepted:
        raise RequestFailed(all_messages(entries.values()), kind="ranks")
    return {"accepted": True, "message": f"{done}: rank {', '.join(accepted)}", "ranks": entries}


async def _add(hub: Hub, verb: str, args: Args) -> RequestReply:
    """Bring a node up, then ask the coordinator to take it in."""
    if "nodes" in args:
        return await _add_several(hub, args)
    name = str(args["node"])
    if _is_open(hub):
        # Nodes join by themselves: a torchrun there brings the agent up.
        return await _ask_coordinator(hub, "add", args)
    # An agent may run there already: nothing is brought up before that is known.
    await hub.reach()
    await hub.settle(nodes=[name])
    _refuse_stale(hub, args)
    seq = int(hub.events[-1]["seq"]) if hub.events else 0
    was_running = any(node["name"] == name and node["state"] == "running" for node in hub.status.get("nodes", ()))
    end = time.monotonic() + JOIN_DEADLINE
    while True:
        spec = await heal.bring_up_again(hub, name, full=True)
        try:
            return await _ask_until_ready(hub, "add", {**args, "spec": dataclasses.asdict(spec)}, "not_ready")
        except RequestFailed as refused:
            if refused.kind == "done" and not was_running:
                # A lost node: the coordinator admitted it as soon as its agent was back.
                return {"accepted": True, "message": refused.message, "generation": 0, "seq": seq}
            if refused.kind != "leaving" or time.monotonic() > end:
                raise
        # Its agent ends with its removal: then it needs another one.
        await hub.wait_change(MOVING_PAUSE)


async def _add_several(hub: Hub, args: Args) -> RequestReply:
    """Bring several nodes up at once, then ask for those that came up with one restart."""
    names = [str(name) for name in args["nodes"]]
    await hub.reach()
    await hub.settle(nodes=names)
    _refuse_stale(hub, args)
    issuer = admission.Issuer(hub, hub.job)
    bringing = [heal.bring_up_again(hub, name, full=True, issuer=issuer) for name in names]
    specs = await asyncio.gather(*bringing, return_exceptions=True)
    failed: dict[str, ReplyEntry] = {}
    up: dict[str, NodeSpec] = {}
    for name, spec in zip(names, specs, strict=True):
        if isinstance(spec, CallFailed):
            failed[name] = entry(False, spec.message, spec.hint)
        elif isinstance(spec, (SupervisorError, WireError, asyncio.TimeoutError)):
            failed[name] = failed_entry(name, spec)
        elif isinstance(spec, BaseException):
            raise spec
        else:
            up[name] = spec
    if not up:
        raise RequestFailed(all_messages(failed.values()), kind="bring_up")
    args = {**args, "nodes": list(up), "specs": [dataclasses.asdict(spec) for spec in up.values()]}
    try:
        reply = await _ask_until_ready(hub, "add", args, "not_ready")
    except RequestFailed as refused:
        if refused.kind != "not_ready":
            raise
        # Nodes that are ready need not wait for those that are not.
        reply = await _ask_coordinator(hub, "add", {**args, "late": True})
    nodes = reply.get("nodes") or {name: entry(True, reply["message"]) for name in up}
    return {**reply, "nodes": {**nodes, **failed}}


HANDLERS: dict[str, Callable[[Hub, str, Args], Awaitable[RequestReply]]] = {
    "add": _add,
    "promote": _promote,
    "sync": _resync,
    "rollback": _resync,
    "signal": _signal,
    "keep": _keep,
}


def _refuse_stale(hub: Hub, args: Args) -> None:
    """Refuse a request that was made for an earlier generation, and drop the condition.

    Bringing a lost node up may itself start the next generation.
    """
    expected = args.pop("if_generation", None)
    newest = _generation(hub)
    if expected is not None and expected != newest:
        raise RequestFailed(f"generation {expected} is over: the job is in generation {newest}", kind="stale")


async def _ask_until_ready(hub: Hub, op: str, args: Args, kind: str) -> RequestReply:
    """Repeat a request that is refused with `kind`: the coordinator does not know yet what a node's agent knows."""
    end = time.monotonic() + JOIN_DEADLINE
    while True:
        try:
            return await _ask_coordinator(hub, op, args, end)
        except RequestFailed as refused:
            if refused.kind != kind or time.monotonic() > end:
                raise
        await hub.wait_change(0.2)


def _is_open(hub: Hub) -> bool:
    """Tell whether nodes join by themselves: they have names of their own, not their hosts'."""
    return any(link.view.identity.get("node", name) != name for name, link in hub.links.items())


def _node_on(hub: Hub, name: str) -> str:
    """Return the one node that joined by itself on the host of that name, else the name; raises RequestFailed."""
    names = [str(node["name"]) for node in hub.status.get("nodes", ())]
    nodes = [node for node in names if re.fullmatch(re.escape(name) + "-[0-9a-f]{4}", node)]
    if not nodes or name in names or not _is_open(hub):
        return name
    if len(nodes) > 1:
        raise RequestFailed(f"{name} is {len(nodes)} nodes of this job", f"name one: {' '.join(nodes)}", "unknown_node")
    return nodes[0]


async def _ask_coordinator(hub: Hub, op: str, args: Args, latest: float = math.inf) -> RequestReply:
    """Send a request to the best live agent, which passes it to the coordinator; raises RequestFailed, Unreachable.

    `latest`: when to give up at the latest, as time.monotonic().
    """
    generation = _generation(hub)
    # The group may be restarting for another reason at this moment.
    protects = op == "restart" and generation >= 0 and "if_generation" not in args
    args |= {"if_generation": generation} if protects else {}
    end, has_said = min(latest, time.monotonic() + VERB_DEADLINE), False
    # An operator who is attached has one already.
    healer = heal.Healer(hub) if hub.attach is None else None
    # A group restarts with its agents, so the request is valid in that generation, too.
    if healer is not None and await healer.revive_all() and protects:
        args["if_generation"] = None
    await _ensure_coordinator(hub, op, args)
    while True:
        try:
            return await _ask_once(hub, op, args, generation, end)
        except RequestFailed as refused:
            # The next coordinator is asked as soon as there is one.
            if refused.kind not in WITHOUT_COORDINATOR or time.monotonic() > end:
                raise
            if refused.kind == "no_coordinator" and not has_said:
                has_said = True
                left = max(0.0, end - time.monotonic())
                hub.notice(f"{op} waits for a coordinator, up to {left:.0f} s: {refused.message}", "warning")
            if refused.kind == "no_coordinator" and healer is not None and await healer.revive(end) and protects:
                args["if_generation"] = None
        await hub.wait_change(MOVING_PAUSE)


async def _ask_once(hub: Hub, op: str, args: Args, generation: int, end: float) -> RequestReply:
    """Ask the agents one after the other until one answers; raises RequestFailed, Unreachable."""
    last = ""
    for link in hub.opened_links(live=True):
        left = max(1.0, end - time.monotonic())
        try:
            reply: RequestReply = (await link.call(op, args, timeout_s=min(ASK_DEADLINE, left))).data
            return reply
        except CallFailed as refused:
            raise RequestFailed(refused.message, refused.hint, refused.kind) from refused
        except (WireError, asyncio.TimeoutError) as broken:
            last = f"{link.view.name}: {why(broken)}"
            # It may have been carried out: the next agent must not carry it out a second time.
            if generation >= 0:
                args.setdefault("if_generation", generation)
    if not last:
        # Only files answer: the end of the job may not have been read yet.
        await hub.until_current()
    await promotion.refuse_over(hub)
    raise hub.unreachable(last or "no agent is alive there", ATTACH)


async def _ensure_coordinator(hub: Hub, op: str, args: Args) -> None:
    if await promotion.promote_if_orphaned(hub):
        return
    if op == "remove":
        for name in args.get("nodes") or [args["node"]]:
            await promotion.promote_without(hub, str(name))
    elif op == "stop":
        await promotion.promote_to_stop(hub)


def _generation(hub: Hub) -> int:
    """Return the newest generation that this hub knows of: the journal may be ahead of the status."""
    newest = hub.events[-1]["generation"] if hub.events else -1
    return max(int(hub.status.get("generation", -1)), int(newest))


# --- stacks, and what the time of ranks goes to

# A node whose ranks do not answer takes 3.5 s.
STACKS_DEADLINE = 20.0
# Two whole windows, and what is left of the one that runs.
WHY_DEADLINE = 60.0


async def collect_stacks(hub: Hub, ranks: list[int] | None) -> JobStacks:
    """Return what these ranks are doing; raises Unreachable, RequestFailed."""
    all_stacks: JobStacks = {"stacks": {}, "unreachable": {}, "children": {}, "notes": {}}
    status = await _live_status(hub, ranks)
    answers, unreachable = await _ask_live(hub, status, ranks, "stacks", {"ranks": ranks}, STACKS_DEADLINE)
    for name, answer in answers.items():
        own: RankStacks = answer
        all_stacks["stacks"].update(own["stacks"])
        unreachable.update(own["unreachable"])
        all_stacks["children"].update(own.get("children", {}))
        if note := own.get("note"):
            all_stacks["notes"][name] = note
    all_stacks["unreachable"] = {rank: text for rank, text in unreachable.items() if rank not in all_stacks["stacks"]}
    if not all_stacks["stacks"] and not all_stacks["unreachable"]:
        raise RequestFailed(f"job {hub.job} has no live rank" + (" of those" if ranks else ""))
    return all_stacks


async def collect_windows(hub: Hub, ranks: Collection[int] | None) -> JobWindows:
    """Have all ranks sampled, for whom `ranks` are of interest; return what their time went to.

    Raises Unreachable, RequestFailed.
    """
    status = await _live_status(hub, ranks)
    if not _live_ranks(status, ranks):
        raise RequestFailed(f"job {hub.job} has no live rank" + (" of those" if ranks else ""))
    answers, unreachable = await _ask_live(hub, status, None, "why", {}, WHY_DEADLINE)
    sampled: JobWindows = {"windows": {}, "nodes": {}, "unreachable": unreachable}
    for node in status["nodes"]:
        if node["name"] in answers:
            own: NodeWindows = answers[node["name"]]
            for rank in _ranks_of(node) & unreachable.keys():
                windows = {number: ranks[rank] for number, ranks in own["windows"].items() if rank in ranks}
                sampled["nodes"][rank] = node["name"]
                if windows:
                    sampled["windows"][rank] = windows
                    del unreachable[rank]
                else:
                    unreachable[rank] = own["off"].get(rank) or NOT_SAMPLED
    return sampled


async def _live_status(hub: Hub, ranks: Collection[int] | None) -> Status:
    """Return the newest status; raises Unreachable, RequestFailed if the job is over, or has not all of these ranks."""
    status: Status = await hub.call("status")
    if status["state"] in ENDED_STATES:
        raise RequestFailed(f"job {hub.job} is over: {status['state']}", kind="ended")
    hub.set_status(status)
    known = sorted(int(rank) for node in status["nodes"] for rank in _ranks_of(node))
    if missing := sorted(set(ranks or ()).difference(known)):
        raise RequestFailed(f"job {hub.job} has no rank {missing[0]}", f"its ranks: {ranges(known) or 'none yet'}")
    return status


async def _ask_live(
    hub: Hub, status: Status, ranks: list[int] | None, op: str, args: Args, deadline_s: float
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return by node what the agents of these ranks (None: all) answer, and by rank why there is no answer; "": none.

    Raises Unreachable.
    """
    unreachable = _live_ranks(status, ranks)
    nodes = [node["name"] for node in status.get("nodes", ()) if unreachable.keys() & _ranks_of(node)]

    def is_asked(link: HostLink) -> bool:
        way = hub.way_to(link.view.name)
        return bool(link.view.live) if link.opened else way is not None and way[1] in nodes

    links = [link for link in hub.links.values() if is_asked(link)]
    if not links:
        raise hub.unreachable("no agent is alive there")
    answers: dict[str, Any] = {}

    async def one(name: str) -> None:
        try:
            answers[name] = (await hub.links[name].call(op, args, timeout_s=deadline_s)).data
        except (CallFailed, WireError, asyncio.TimeoutError) as error:
            for node in status.get("nodes", ()):
                if node["name"] == name:
                    reasons = {str(rank["rank"]): f"{name}: {why(error)}" for rank in node.get("ranks", ())}
                    unreachable.update({rank: text for rank, text in reasons.items() if rank in unreachable})

    await asyncio.gather(*(one(link.view.name) for link in links))
    return answers, unreachable


def _ranks_of(node: NodeStatus) -> set[str]:
    return {str(rank["rank"]) for rank in node.get("ranks", ())}


def _live_ranks(status: Status, ranks: Collection[int] | None) -> dict[str, str]:
    """Return the live ranks among these (None: all), with the reason that holds until the node answers."""
    return {
        str(rank["rank"]): f"{node['name']} cannot be reached"
        for node in status.get("nodes", ())
        for rank in node.get("ranks", ())
        if rank.get("state") in LIVE_RANKS and (ranks is None or rank["rank"] in ranks)
    }


async def open_shell(hub: Hub, terminal: Terminal, node: str, rank: int | None) -> None:
    """Run a shell where a rank of a node runs, on this terminal.

    Raises RequestFailed, Unreachable, HostError.
    """
    _refuse_read_only(hub, "shell")
    await hub.reach([node])
    link = _link_to(hub, node)
    ranks = [one for each in hub.status.get("nodes", ()) if each["name"] == node for one in each.get("ranks", ())]
    pids = {one["rank"]: one.get("pid") for one in ranks}
    chosen = min(pids, default=0) if rank is None else rank
    words = ["--job", hub.job, "--rank", str(chosen), "--pid", str(pids.get(chosen) or 0)]
    await link.node.run_on(terminal, hub.agent, "shell", *words)


async def forward_port(hub: Hub, node: str, port: int, local: int | None) -> Forward:
    """Forward a port of this machine to a port of a node (see Forward.open), over whatever connection there is then.

    Raises RequestFailed, Unreachable, HostError.
    """
    _refuse_read_only(hub, "forward")

    async def connect() -> tuple[Reader, Writer]:
        await hub.reach([node])
        return await _link_to(hub, node).node.open_port(port)

    forward = Forward(node, port, connect)
    await forward.open(local)
    return forward


def _refuse_read_only(hub: Hub, verb: str) -> None:
    if hub.read_only and hub.made_s is not None:
        refusal = f"{verb} refused: {hub.inventory.path} is a bundle"
        raise RequestFailed(refusal, "name the hosts of the job", "read_only")
    if hub.read_only:
        raise RequestFailed(f"{verb} refused: this supervisor is read-only", "leave --read-only out", "read_only")


def _link_to(hub: Hub, node: str) -> HostLink:
    link = hub.links.get(node)
    if link is None or not link.opened:
        raise Unreachable(f"no connection to {node}")
    return link
