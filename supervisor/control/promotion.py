"""Promote another coordinator, because the old one is lost or the operator asks; end agents of a job that is over.

In: the hub's links. Out: requests to promote an agent, each shown as a notice; the end as the files have it; agents
that were cut off and end; RequestFailed if no agent accepts, or the job is over.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from remote_agent.wire import FIRST_TERM, CallFailed, WireError
from remote_agent.wire.events import ENDED_STATES
from supervisor.errors import RequestFailed
from supervisor.launch import bringup
from supervisor.launch.bringup import PROMOTE_DEADLINE

if TYPE_CHECKING:
    from remote_agent.wire.documents import RequestReply
    from supervisor.link.hub import Hub
    from supervisor.ssh.answers import Identity

log = logging.getLogger(__name__)

# A node gives up its old coordinator after 0.8 of node_timeout, whose default is 15 s.
FORCE_DEADLINE = 20.0
ATTACH = "`supervisor attach` starts the agents again where the hosts can be reached"
# The pause between two attempts to promote an agent, seconds.
RETRY = 1.0


def _is_led(identity: Identity) -> bool:
    """Tell whether an agent is the coordinator or can reach it."""
    return identity.get("role") == "coordinator" or bool(identity.get("coordinator_reachable"))


async def _unled(hub: Hub) -> dict[str, Identity]:
    """Return the identities of all agents in reach if none has a coordinator, else {}; before that, all are reached."""
    agents = await hub.identities()
    if hub.spared and agents and not any(map(_is_led, agents.values())):
        await hub.reach()
        agents = await hub.identities()
    return {} if any(map(_is_led, agents.values())) else agents


async def promote_if_orphaned(hub: Hub) -> bool:
    """Promote the first live agent if no agent in reach has a coordinator; returns whether one accepted.

    The agents check the quorum themselves, and may all refuse.
    """
    if hub.read_only or hub.launching or end_in_files(hub) is not None:
        return False
    # The first look is at what is already known: whether an agent is the coordinator or reaches it.
    known = [link.view.identity for link in hub.opened_links(live=True)]
    if not known or any(one.get("role") == "coordinator" or one.get("coordinator_reachable", True) for one in known):
        return False
    agents = await _unled(hub)
    if not agents:
        return False
    if not any(one.get("term") for one in agents.values()):
        # Another supervisor is still launching this job.
        return False
    for name in agents:
        try:
            answer = (await hub.links[name].call("promote", {"force": False}, timeout_s=PROMOTE_DEADLINE)).data
        except CallFailed as refused:
            log.info("promote %s: %s", name, refused.message)
            continue
        except (WireError, asyncio.TimeoutError):
            continue
        term = answer.get("term")
        hub.notice(f"{name} is the coordinator now (term {term}): the old one is lost", "warning", name)
        await hub.identities()
        return True
    return False


async def promote_without(hub: Hub, gone: str) -> None:
    """Promote an agent, without a quorum, if the operator removes the coordinator's node and it is out of reach.

    Half of a group cannot elect a coordinator, because the other half might still train. An operator who removes the
    coordinator's node says that it does not. Raises RequestFailed if no agent accepts.
    """
    link = hub.links.get(gone)
    if link is None or (link.opened and link.view.live):
        return
    if agents := await _unled(hub):
        await _promote_by_force(hub, agents, [gone])


async def promote(hub: Hub, node: str | None) -> RequestReply:
    """Promote that node, or the first in reach: the operator says that all nodes out of reach are dead.

    Returns the reply. Raises RequestFailed if a coordinator is in reach, Unreachable.
    """
    await hub.reach()
    # A node that joined by itself has a name of its own; its link has the host's.
    hosts_of = {link.view.identity.get("node"): name for name, link in hub.links.items()}
    node = hosts_of.get(node, node) if node is not None else None
    if node is not None and node not in hub.links:
        hosts = " ".join(hub.links)
        raise RequestFailed(f"no host {node!r} in the inventory", f"its hosts: {hosts}", "unknown_node")
    agents = await hub.identities()
    if not agents:
        raise hub.unreachable("no agent is alive there", ATTACH)
    known = {name for one in agents.values() for name in one.get("members", ())}
    away = sorted(known - set(agents))
    seq = max(int(one.get("last_seq", 0)) for one in agents.values())
    for name, one in agents.items():
        if _is_led(one):
            head = str(one.get("coordinator"))
            if node in (None, head) and await _let_continue(hub, head, away):
                message = f"{head} continues without {' '.join(away)}"
                return {"accepted": True, "message": message, "generation": 0, "seq": seq}
            raise RequestFailed(
                f"{head} is the coordinator, and {name} reaches it",
                f"to choose another coordinator: supervisor remove --node {head}",
                "in_charge",
            )
    if node is not None and node not in agents:
        raise RequestFailed(f"no agent of the job answers on {node}", f"in reach: {' '.join(agents)}", "unreachable")
    if not any(one.get("term") for one in agents.values()):
        raise RequestFailed("the job has had no coordinator yet", "its launch was abandoned: supervisor stop", "launch")
    promoted = await _promote_by_force(hub, [node] if node else list(agents), away)
    return {"accepted": True, "message": f"{promoted} is the coordinator now", "generation": 0, "seq": seq}


async def _let_continue(hub: Hub, head: str, away: list[str]) -> bool:
    """Let a coordinator that waits for too many nodes continue without those out of reach; return whether it waited."""
    request = {"force": True, "given_up": away, "operator": hub.operator}
    link = hub.links.get(head)
    if not away or link is None:
        return False
    answer = await link.try_call("promote", request, timeout_s=PROMOTE_DEADLINE)
    return answer is not None and bool(answer.get("went_on"))


async def _promote_by_force(hub: Hub, names: Iterable[str], given_up: Iterable[str] = ()) -> str:
    """Promote the first agent that accepts, without a quorum, once its lease from the old coordinator is over.

    `given_up`: nodes that it does not wait for. Returns its host; raises RequestFailed if none accepts.
    """
    await hub.reach()
    await hub.settle()
    await refuse_over(hub)
    request = {"force": True, "given_up": list(given_up), "operator": hub.operator}
    last = ""
    end = time.monotonic() + FORCE_DEADLINE
    while True:
        for name in names:
            try:
                await hub.links[name].call("promote", request, timeout_s=PROMOTE_DEADLINE)
            except (CallFailed, WireError, asyncio.TimeoutError) as refused:
                last = f"{name}: {refused}"
                continue
            hub.notice(f"{name} is the coordinator now: promoted by the operator", "warning", name)
            return name
        if time.monotonic() > end:
            raise RequestFailed(f"no agent took over as coordinator: {last}", "wait for node_timeout, then try again")
        await asyncio.sleep(RETRY)


async def promote_to_stop(hub: Hub) -> None:
    """Promote an agent so that a job without a coordinator can be stopped: stopping workers needs no quorum.

    A job whose launch ended before it had a coordinator gets its first one here.
    """
    agents = await _unled(hub)
    if not agents:
        return
    if any(one.get("term") for one in agents.values()):
        await _promote_by_force(hub, agents)
        return
    # A node that joined by itself has another name than its host.
    nodes = {name: str(one["node"]) for name, one in agents.items()}
    members = {node: agents[name]["members"][node] for name, node in nodes.items()}
    absent = {name: "launch: interrupted" for name in hub.links if name not in agents}
    for name in agents:
        await bringup.assign(hub.links[name], FIRST_TERM, next(iter(members)), members, absent)


# --- a job that is over

# An agent may take this long to accept that its job is over, and then to end, seconds.
OVER_DEADLINE = 5.0
GONE_DEADLINE = 10.0


def end_in_files(hub: Hub) -> Identity | None:
    """Return the identity of the best source if that is files with the job's end: no agent knows more."""
    best = next((link.view.identity for link in hub.opened_links()), None)
    return best if best is not None and best.get("ended") else None


async def refuse_over(hub: Hub) -> None:
    """Raise RequestFailed if the job is over, by the newest status or by the files of a host.

    Hosts that were out of reach at the end may have continued: it is over once none that answers is in a newer term.
    """
    if end_in_files(hub) is None and hub.state not in ENDED_STATES:
        return
    await hub.settle()
    newest = max((int(link.view.identity.get("journal_term") or 0) for link in hub.opened_links()), default=0)
    if end_in_files(hub) is not None or newest > int(hub.status.get("journal_term") or 0):
        hub.set_status(await hub.call("status"))
    if hub.state in ENDED_STATES:
        ended = await end_cut_off(hub)
        also = f"; agents that were cut off and have been ended now: {' '.join(ended)}" if ended else ""
        raise RequestFailed(f"job {hub.job} is over: {hub.state}{also}", kind="ended")


async def end_cut_off(hub: Hub) -> list[str]:
    """End agents that were cut off when the job ended, if files have the end; returns their hosts.

    The coordinator ended with the job, so nobody else informs them. An agent that hears a coordinator refuses.
    """
    end = end_in_files(hub)
    if end is None:
        return []
    request = {"term": end["term"], "seq": end["last_seq"]}

    links = hub.opened_links(live=True)
    answers = await asyncio.gather(*(link.try_call("over", request, timeout_s=OVER_DEADLINE) for link in links))
    ending = [link for link, answer in zip(links, answers, strict=True) if answer is not None]
    for link in ending:
        text = f"{link.view.name}: its agent was cut off when the job ended; it ends now"
        hub.notice(text, "info", link.view.name)
    await hub.wait_until(lambda: not any(link.opened and link.view.live for link in ending), GONE_DEADLINE)
    return [link.view.name for link in ending]
