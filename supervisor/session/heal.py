"""What an operator's presence does for the job: a lost agent is started again, an orphaned group gets a coordinator.

In: the session's links and newest status. Out: start, assign and promote requests, each announced as a notice.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import time
from collections import defaultdict, deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from remote_agent.wire import CallFailed, JobSpec, SpecError, WireError
from supervisor.errors import RequestFailed, SupervisorError, why
from supervisor.session import bringup, ending, resync
from supervisor.session.certificates import Authority
from supervisor.session.specs import merge_host, read_tree_again
from supervisor.session.view import ENDED_STATES
from supervisor.ssh import HostError

if TYPE_CHECKING:
    from supervisor.session.link import Link
    from supervisor.session.session import Session

log = logging.getLogger(__name__)

# How often a node's agent is started again, and in which time, seconds.
RESTARTS = 3
RESTART_WINDOW = 600.0
# A link that has just found no agent may be ahead of the news that the job is over, seconds.
SETTLE = 1.5
INTERVAL = 1.0
IDENTITY_DEADLINE = 5.0
PROMOTE_DEADLINE = 30.0
# A node gives its old coordinator up after 0.8 of node_timeout; longer than the default of 15 s is waited for.
FORCE_DEADLINE = 20.0
# Nodes in these states are left alone.
OUT = ("removed", "failed", "draining")
# How long a link that reached no agent stays as it is before it looks for one again, seconds.
LOOK_AGAIN = 5.0
REOPEN_DEADLINE = 20.0


async def identities(session: Session) -> dict[str, dict[str, Any]]:
    """Ask every live agent that we reach who it is, in inventory order."""
    links = [link for link in session.links.values() if link.opened and link.view.live]

    async def ask(link: Link) -> dict[str, Any] | None:
        try:
            answer = (await link.call("identity", timeout_s=IDENTITY_DEADLINE)).data
        except (CallFailed, WireError, asyncio.TimeoutError):
            return None
        link.learn(answer)
        return answer

    answers = await asyncio.gather(*(ask(link) for link in links))
    return {link.view.name: answer for link, answer in zip(links, answers, strict=True) if answer is not None}


def _is_led(identity: dict[str, Any]) -> bool:
    """Whether an agent coordinates, or is in touch with the one that does."""
    return identity.get("role") == "coordinator" or bool(identity.get("coordinator_reachable"))


async def promote_if_orphaned(session: Session) -> bool:
    """Give the role to the first live agent when all that we reach have lost their coordinator; refusals are fine.

    Returns whether somebody took it. The agents check the quorum themselves.
    """
    if session.read_only or session.launching or ending.end_in_files(session) is not None:
        return False
    # The cheap look first: whoever coordinates, or hears the one that does, says so.
    known = [link.view.identity for link in session.opened_links(live=True)]
    if not known or any(one.get("role") == "coordinator" or one.get("coordinator_reachable", True) for one in known):
        return False
    found = await identities(session)
    if not found or any(map(_is_led, found.values())):
        return False
    if not any(one.get("coordinator") for one in found.values()):
        # A launch elsewhere has not come so far yet.
        return False
    for name in found:
        try:
            answer = (await session.links[name].call("promote", {"force": False}, timeout_s=PROMOTE_DEADLINE)).data
        except CallFailed as refused:
            log.info("promote %s: %s", name, refused.message)
            continue
        except (WireError, asyncio.TimeoutError):
            continue
        term = answer.get("term")
        session.notice(f"{name} takes the coordinator over (term {term}): the old one is gone", "warning", name)
        await identities(session)
        return True
    return False


async def promote_without(session: Session, gone: str) -> None:
    """Carry on without a coordinator that the operator removes and that we do not reach either, votes or not.

    Half of a group cannot elect: the other half might still train. An operator who removes the coordinator's node
    says that it does not. Raises RequestFailed when no agent takes the role.
    """
    link = session.links.get(gone)
    if link is None or (link.opened and link.view.live):
        return
    found = await identities(session)
    if found and not any(map(_is_led, found.values())):
        await _promote_by_force(session, found)


async def promote(session: Session, node: str | None) -> dict[str, Any]:
    """Give the role to that node, or to the first in reach, by an operator's word that what is not in reach is dead.

    Returns the answer of a request. Raises RequestFailed where a live coordinator is in reach, Unreachable.
    """
    # What joined by itself has a node's name, and the link its host's.
    hosts_of = {link.view.identity.get("node"): name for name, link in session.links.items()}
    node = hosts_of.get(node, node) if node is not None else None
    if node is not None and node not in session.links:
        hosts = " ".join(session.links)
        raise RequestFailed(f"no host {node!r} in the inventory", f"its hosts: {hosts}", "unknown_node")
    found = await identities(session)
    if not found:
        raise session.unreachable("no agent is alive there")
    for name, one in found.items():
        if _is_led(one):
            head = one.get("coordinator")
            raise RequestFailed(
                f"{head} coordinates the job, and {name} is in touch with it",
                f"to move the role away from it: supervisor remove --node {head}",
                "in_charge",
            )
    if node is not None and node not in found:
        raise RequestFailed(f"no agent of the job answers on {node}", f"in reach: {' '.join(found)}", "unreachable")
    if not any(one.get("coordinator") for one in found.values()):
        raise RequestFailed("the job has had no coordinator yet", "its launch was given up: supervisor stop", "launch")
    known = {name for one in found.values() for name in one.get("members", ())}
    seq = max(int(one.get("last_seq", 0)) for one in found.values())
    taker = await _promote_by_force(session, [node] if node else list(found), sorted(known - set(found)))
    return {"accepted": True, "message": f"{taker} takes the coordinator over", "generation": 0, "seq": seq}


async def _promote_by_force(session: Session, names: Iterable[str], given_up: Iterable[str] = ()) -> str:
    """Give the role to the first that takes it, votes or not, once its lease from the old coordinator is over.

    `given_up`: nodes that are not waited for. Returns who took it; raises RequestFailed when none does.
    """
    await session.settle()
    await ending.refuse_over(session)
    wish = {"force": True, "given_up": list(given_up), "operator": session.operator}
    last = ""
    end = time.monotonic() + FORCE_DEADLINE
    while True:
        for name in names:
            try:
                await session.links[name].call("promote", wish, timeout_s=PROMOTE_DEADLINE)
            except (CallFailed, WireError, asyncio.TimeoutError) as refused:
                last = f"{name}: {refused}"
                continue
            session.notice(f"{name} takes the coordinator over, by hand", "warning", name)
            return name
        if time.monotonic() > end:
            raise RequestFailed(f"nobody takes the coordinator over: {last}", "wait for node_timeout and ask again")
        await asyncio.sleep(INTERVAL)


async def promote_to_stop(session: Session) -> None:
    """Let somebody coordinate the end of a job that has no coordinator: no votes are needed to stop workers.

    A launch that died before it named a coordinator is given one here.
    """
    found = await identities(session)
    if not found or any(map(_is_led, found.values())):
        return
    if any(one.get("term") for one in found.values()):
        await _promote_by_force(session, found)
        return
    # A torchrun of others is a node by another name than its host's.
    nodes = {name: str(one["node"]) for name, one in found.items()}
    members = {node: found[name]["members"][node] for name, node in nodes.items()}
    absent = {name: "launch: it was given up" for name in session.links if name not in found}
    for name in found:
        await bringup.assign(session.links[name], bringup.FIRST_TERM, next(iter(members)), members, absent)


async def authority_of(session: Session) -> tuple[Authority, JobSpec]:
    """Return the job's authority and description from any node that has them; raises RequestFailed."""
    last = "no host of the job answers"
    for link in session.opened_links():
        try:
            data = (await link.call("ca")).data
            authority = Authority(data["ca"], data["ca_key"])
            spec = session.spec or JobSpec.from_json(data["spec"])
            return authority, spec
        except (CallFailed, WireError, asyncio.TimeoutError, SpecError, KeyError) as error:
            last = f"{link.view.name}: {error}"
    raise RequestFailed(f"cannot get the job's certificate authority: {last}")


async def bring_up_again(session: Session, name: str, *, full: bool) -> dict[str, Any]:
    """Start the agent of a host (and, `full`, sync its tree), introduce it to the others, return its NodeSpec as JSON.

    Raises RequestFailed that names host and step. A host whose agent is alive already is only introduced.
    """
    link = session.links.get(name)
    if link is None:
        raise RequestFailed(
            f"no host {name!r} in the inventory", "its hosts: " + " ".join(session.links), "unknown_node"
        )
    try:
        authority, spec = await authority_of(session)
        spec = resync.as_now(session, merge_host(spec, link.host, session.inventory))
        moved = resync.changed_since_launch(session)
        leaving = await _is_leaving(session, link)
        if leaving or not (link.opened and link.view.live):
            if leaving:
                await _end(link)
            read = functools.partial(read_tree_again, session.inventory, spec, name) if full or moved else None
            material = bringup.Material(spec, authority, read=read, kept=moved, replaces=leaving)
            await bringup.start_on(session, name, material)
        elif moved:
            await resync.ensure(session, link, spec)
        await introduce(session, link, spec)
        return next(dataclasses.asdict(node) for node in spec.nodes if node.name == name)
    except HostError as error:
        link.fail(error.step, error.reason, error.hint)
        kind = error.__cause__.kind if isinstance(error.__cause__, CallFailed) else "bring_up"
        raise RequestFailed(f"{name}: {error.step}: {error.reason}", error.hint, kind) from error


async def _is_leaving(session: Session, link: Link) -> bool:
    """Tell whether the host's agent is alive only to let operators read the end: it must not be used again."""
    if not (link.opened and link.view.live):
        return False
    nodes = (await session.call("status")).get("nodes", ())
    # One that is left out as failed may have no engine any more.
    out = ("removed", "failed")
    return any(node["name"] == link.view.name and node.get("state") in out for node in nodes)


async def _end(link: Link) -> None:
    """Tell an agent that is out of the job to end, so that another one can take its place."""
    try:
        await link.call("exit", timeout_s=IDENTITY_DEADLINE)
    except (CallFailed, WireError, asyncio.TimeoutError) as error:
        # It ends by itself once nobody is connected to it.
        log.info("%s: %s", link.view.name, error)


async def introduce(session: Session, link: Link, spec: JobSpec) -> None:
    """Tell a started agent who coordinates; raises HostError, RequestFailed."""
    found = await identities(session)
    mine = link.view.name
    others = {name: one for name, one in found.items() if name != mine}
    heads = [one for one in others.values() if one.get("coordinator")]
    newest = max(heads, key=lambda one: (int(one.get("term") or 0), one.get("role") == "coordinator"), default=None)
    if newest is None or newest["coordinator"] == mine:
        # Nobody else is left of the job, or all wait for this one: it carries on from the voters' journal.
        try:
            await link.call("promote", {"force": False}, timeout_s=PROMOTE_DEADLINE)
        except (CallFailed, WireError, asyncio.TimeoutError) as error:
            hint = error.hint if isinstance(error, CallFailed) else ""
            raise HostError(mine, "promote", why(error), hint) from error
        return
    members: dict[str, dict[str, Any]] = {**newest.get("members", {})}
    members[mine] = await bringup.peer_address(link, spec)
    coordinator = str(newest["coordinator"])
    if coordinator not in members:
        raise HostError(mine, "assign", f"nobody knows the address of the coordinator {coordinator}", "")
    await bringup.assign(link, int(newest["term"]), coordinator, members)


class Healer:
    """The watch of an attached session. `run` is owned by the session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._starts: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=RESTARTS))
        self._given_up: set[str] = set()
        self._brought: set[tuple[str, str]] = set()
        """Nodes and the work trees that they have been brought, or not, by us."""

    async def run(self) -> None:
        """Look once a second; once the job is over, only for agents that do not know it."""
        session = self._session
        while True:
            await asyncio.sleep(INTERVAL)
            if session.launching or session.failure is not None:
                continue
            controls = session.attach == "control" and not session.read_only
            try:
                if session.ended or session.state in ENDED_STATES:
                    if controls:
                        await ending.end_cut_off(session)
                    continue
                if controls:
                    await promote_if_orphaned(session)
                    await self._restart_lost()
                    await self._bring_trees()
                self._look_again()
            except (SupervisorError, HostError, CallFailed, WireError, asyncio.TimeoutError) as error:
                session.notice(f"healing: {error}", "warning")

    def _dead_links(self) -> list[Link]:
        now, links = time.monotonic(), self._session.links.values()
        return [link for link in links if link.opened and link.view.live is False and now - link.opened_at > SETTLE]

    async def _restart_lost(self) -> None:
        session = self._session
        if not session.status:
            return
        wanted = self._taking_part(*OUT)
        dead = [link for link in self._dead_links() if link.view.name in wanted]
        await asyncio.gather(*(self._restart(link) for link in dead))

    async def _bring_trees(self) -> None:
        """Bring nodes that came back the work tree that the group runs from now, once."""
        session = self._session
        digest = str((session.status.get("tree") or {}).get("digest"))
        lacking = {str(node["name"]) for node in session.status.get("nodes", ()) if node.get("lacks_tree")}
        for name in lacking & self._taking_part(*OUT):
            link = session.links.get(name)
            if link is None or not (link.opened and link.view.live) or (name, digest) in self._brought:
                continue
            self._brought.add((name, digest))
            try:
                _, spec = await authority_of(session)
                await resync.ensure(session, link, resync.as_now(session, spec))
            except (SupervisorError, CallFailed, WireError, asyncio.TimeoutError) as error:
                session.notice(f"{name}: without the work tree of the job: {error}", "warning", name)
            else:
                session.notice(f"{name}: it has the work tree of the job now", "info", name)

    def _taking_part(self, *out: str) -> set[str]:
        """Return the nodes of the job that are in none of these states."""
        return {node["name"] for node in self._session.status.get("nodes", ()) if node.get("state") not in out}

    async def _restart(self, link: Link) -> None:
        session, name = self._session, link.view.name
        if not await self._is_still_dead(link) or await self._is_over(link):
            return
        if session.ended or session.state in ENDED_STATES or name not in self._taking_part(*OUT):
            # The job ended, or the node was removed, while we looked.
            return
        if not self._may_start(name):
            return
        session.notice(f"{name}: its agent is gone; starting it again", "warning", name)
        try:
            await bring_up_again(session, name, full=False)
        except (SupervisorError, CallFailed, WireError, asyncio.TimeoutError) as error:
            if not (isinstance(error, RequestFailed) and error.kind == "already_running"):
                session.notice(f"{name}: {error}", "error", name)
        else:
            session.notice(f"{name}: its agent is back", "info", name)

    def _may_start(self, name: str) -> bool:
        starts = self._starts[name]
        now = time.monotonic()
        if len(starts) == RESTARTS and now - starts[0] < RESTART_WINDOW:
            if name not in self._given_up:
                self._given_up.add(name)
                self._session.notice(
                    f"{name}: its agent was lost {RESTARTS} times in {RESTART_WINDOW / 60:.0f} minutes; left alone. "
                    f"Look at agent.log on the host, then: supervisor add --node {name}",
                    "error",
                    name,
                )
            return False
        self._given_up.discard(name)
        starts.append(now)
        return True

    async def _is_still_dead(self, link: Link) -> bool:
        """Look again: somebody else may have started an agent where we only read files."""
        before = link.opened_at
        link.reopen()
        await self._session.wait_until(lambda: link.opened and link.opened_at != before, REOPEN_DEADLINE)
        return link.opened and link.opened_at != before and link.view.live is False

    async def _is_over(self, link: Link) -> bool:
        try:
            return (await link.call("status")).data.get("state") in ENDED_STATES
        except (CallFailed, WireError, asyncio.TimeoutError):
            return False

    def _look_again(self) -> None:
        """Somebody else may have started an agent where we only read files, or where nobody knew the job."""
        now = time.monotonic()
        for link in self._dead_links():
            if now - link.opened_at > LOOK_AGAIN:
                link.reopen()
        taking_part = self._taking_part("removed")
        for name, link in self._session.links.items():
            if name in taking_part and now - link.asked_at > LOOK_AGAIN:
                link.ask_again()
