"""Finding the coordinator, or becoming it.

In: a follower whose coordinator is gone. Out: a coordinator that more than half of the last group agreed upon.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Container
from typing import TYPE_CHECKING, Any

from remote_agent import clocks, member, peers, restore
from remote_agent.journal import chunks
from remote_agent.wire import Answer, CallFailed, WireError, split_endpoint

if TYPE_CHECKING:
    from remote_agent.agent import Agent
    from remote_agent.follower import Follower
    from remote_agent.wire import Items

log = logging.getLogger(__name__)

ASK_TIMEOUT_S = 5.0
HEIR_PAUSES_S = (0.1, 0.3, 1.0, 2.0)


def base(agent: Agent) -> list[str]:
    """Return the nodes whose majority elects: the last group, less what was removed; before the first, all nodes."""
    state = restore.fold(agent.spec, agent.journal.records)
    group = state.members or tuple(state.nodes)
    return [name for name in group if state.nodes[name].status not in ("removed", "failed")]


def order(agent: Agent) -> list[str]:
    """Return who may stand, in turn: the group without the coordinator that is gone."""
    return [name for name in base(agent) if name != agent.follower.member.coordinator]


async def ask(follower: Follower, name: str, op: str, args: dict[str, Any]) -> dict[str, Any] | None:
    """Return another node's answer to one question, or None when there is none; of one in pieces the records add up."""
    agent = follower.agent
    where = agent.members.get(name)
    if where is None or name == agent.node:
        return None
    try:
        return await _ask_at(follower, name, where, op, args)
    except (peers.PeerRefused, peers.PeerUnreachable):
        return None


async def _ask_at(
    follower: Follower, name: str, where: dict[str, Any], op: str, args: dict[str, Any]
) -> dict[str, Any] | None:
    agent = follower.agent
    channel = await peers.connect(agent.files, name, where["address"], int(where["port"]), agent.peer_handler(name))
    running = asyncio.ensure_future(channel.run())
    try:
        return await asyncio.wait_for(_whole(channel.stream(op, args)), ASK_TIMEOUT_S)
    except (WireError, CallFailed, asyncio.TimeoutError) as error:
        log.info("%s to %s: %s", op, name or "the endpoint", error)
        return None
    finally:
        # Not close(): a host without power would be waited for.
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def _whole(pieces: Items) -> dict[str, Any]:
    """Put an answer together: of several pieces each brings some records."""
    found: dict[str, Any] = {}
    records: list[dict[str, Any]] = []
    try:
        async for piece in pieces:
            found.update(piece.data)
            records += piece.data.get("records", ())
    finally:
        await pieces.aclose()
    return {**found, "records": records}


async def ask_around(follower: Follower) -> None:
    """Learn from the others whether a newer coordinator is there; one of an older term renews it for us."""
    agent = follower.agent
    # Who is connected to us follows us.
    known = agent.role.connected if agent.role is not None else frozenset()
    others = [name for name in agent.members if name not in {agent.node, follower.member.coordinator, *known}]
    asking = [ask(follower, name, "who", {"term": follower.member.term}) for name in others]
    answers = await asyncio.gather(_meet(follower, known), *asking)
    for found in answers:
        # A node that voted knows the term, and may have missed who won it.
        if found and found["coordinator"] and member.is_news(follower.member, int(found["term"]), found["coordinator"]):
            agent.memory.learn(found["members"])
            follower.follow(int(found["term"]), str(found["coordinator"]))


async def _meet(follower: Follower, connected: frozenset[str]) -> dict[str, Any] | None:
    """Ask at the job's endpoint, where it has one; a coordinator makes itself known there instead."""
    agent = follower.agent
    address, port = split_endpoint(agent.spec.endpoint, 0)
    if not port or port in {agent.port, *(agent.members[name]["port"] for name in connected)}:
        return None
    there = {"address": address, "port": port}
    found = None
    trouble = f"{agent.spec.endpoint}: no coordinator there yet"
    try:
        if agent.role is None:
            args = {"term": follower.member.term, "where": agent.members[agent.node]}
            found = await _ask_at(follower, "", there, "who", args)
        else:
            await _ask_at(follower, "", there, "announce", agent.announcement())
    except (peers.PeerRefused, peers.PeerUnreachable) as error:
        foreign = isinstance(error.__cause__, ssl.SSLCertVerificationError)
        trouble = f"{error} (another key or another --rdzv-id there)" if foreign else str(error)
    if agent.role is None and not follower.member.term:
        follower.trouble = "" if found and found["coordinator"] else trouble
    if found:
        # After a restart of all, nobody listens where it did; who is there learns it from who asks.
        agent.memory.learn({name: one for name, one in found["members"].items() if name != agent.node})
    return found


async def stand(follower: Follower, force: bool = False, given_up: Container[str] = ()) -> str:
    """Ask for votes and take the role when more than half agree (force: in any case); returns "" or why not.

    `given_up`: nodes that are not asked, and so not waited for: an operator says that they are dead.
    """
    async with follower.standing:
        return "" if follower.agent.role is not None else await _stand(follower, force, given_up)


async def inherit(follower: Follower) -> str:
    """Take the role that its holder gives up; returns "" or why not."""
    refusal = await stand(follower)
    for pause_s in HEIR_PAUSES_S:
        if not refusal:
            break
        # Another member may not have read yet whose turn it is.
        await asyncio.sleep(pause_s)
        refusal = await stand(follower)
    return refusal


async def _stand(follower: Follower, force: bool, given_up: Container[str]) -> str:
    agent = follower.agent
    now = clocks.now()
    if not member.leaderless(follower.member, now):
        return f"{follower.member.coordinator} is in charge"
    term = follower.member.term + 1
    if not force:
        # A sounding leaves no trace: a node that cannot win must not raise everybody's term.
        refusal = (await _poll(follower, term, sounding=True, given_up=given_up))[1]
        if refusal:
            return refusal
    view, reason = member.vote(follower.member, term, agent.node, now)
    reason = reason or follower.promise(view)
    if reason:
        return reason
    answers, refusal = await _poll(follower, term, sounding=False, given_up=given_up)
    if follower.member.term != term or follower.member.voted != agent.node:
        return "another candidate came first"
    if refusal and not force:
        return refusal
    _catch_up(agent, answers)
    await agent.take_role(term, follower.former)
    return ""


async def renew(follower: Follower, term: int) -> None:
    """Raise the term of a coordinator that is in charge above one that a candidate without success has left behind."""
    agent = follower.agent
    role = agent.role
    if role is None or term < follower.member.term:
        return
    view, reason = member.vote(follower.member, term + 1, agent.node, clocks.now())
    if reason or follower.promise(view):
        return
    _, refusal = await _poll(follower, term + 1, sounding=False)
    if refusal or agent.role is not role:
        log.warning("term %d: %s", term + 1, refusal)
        return
    await agent.keep_role(term + 1)


async def _poll(
    follower: Follower, term: int, *, sounding: bool, given_up: Container[str] = ()
) -> tuple[list[dict[str, Any]], str]:
    """Ask for votes (sounding: only whether they would be given); returns the granting answers and "" or why not."""
    agent = follower.agent
    voters = base(agent)
    wish = {"term": term, "candidate": agent.node, "sounding": sounding, "journal": agent.journal.tail()}
    names = [name for name in voters if name != agent.node and name not in given_up]
    asked = {asyncio.ensure_future(ask(follower, name, "vote", wish)): name for name in names}
    granted: list[dict[str, Any]] = []
    refused: list[str] = []
    votes = int(agent.node in voters)
    waiting = set(asked)
    try:
        # A host without power answers nothing for seconds: a majority does not wait for it.
        while waiting and not member.quorum(votes, len(voters)):
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                found = task.result()
                if found and found["granted"]:
                    granted.append(found)
                    votes += 1
                else:
                    refused.append(f"{asked[task]}: {found['reason'] if found else 'no answer'}")
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    if member.quorum(votes, len(voters)):
        return granted, ""
    return granted, f"{votes} of {len(voters)} votes: more than half are needed ({'; '.join(sorted(refused))})"


def _catch_up(agent: Agent, answers: list[dict[str, Any]]) -> None:
    """Take over what the voter with the newest journal knows more than we do."""
    newest = max(answers, key=lambda found: tuple(found["newest"]), default=None)
    if newest is not None and newest["records"]:
        agent.journal.take(newest["records"], reset=newest["reset"])


async def give_vote(follower: Follower, args: dict[str, Any]) -> Items:
    """Answer a candidate; a granted vote brings along what the voter's journal has and the candidate's has not."""
    agent = follower.agent
    refusal = _decide(follower, args)
    answer = {"granted": not refusal, "reason": refusal}
    if refusal or args["sounding"]:
        yield Answer(answer)
        return
    journal, theirs = agent.journal, args["journal"]
    reset, records = journal.missing(theirs)
    newest = [journal.last_term, journal.last_seq]
    if newest <= [theirs["term"], theirs["seq"]]:
        records = []
    for chunk in chunks(records):
        yield Answer({**answer, "newest": newest, "reset": reset, "records": chunk})


def _decide(follower: Follower, args: dict[str, Any]) -> str:
    """Grant a vote or return why not; a sounding leaves no trace."""
    agent = follower.agent
    if agent.role is not None and follower.member.coordinator == agent.node:
        return f"{agent.node} is the coordinator"
    view, reason = member.vote(follower.member, int(args["term"]), str(args["candidate"]), clocks.now())
    return reason if reason or args["sounding"] else follower.promise(view)
