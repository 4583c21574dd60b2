"""Ask every host for the facts that matter to a launch, without launching.

In: an inventory. Out: a Preflight: facts by node, connections between nodes, times of small all-reduces, failed hosts.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from remote_agent.wire import CallFailed, WireError
from remote_agent.wire.answers import AllReduce, CheckedFacts, ProbeFacts, ProbePort, ProbeTarget, Reached
from supervisor.errors import HostFailure, why
from supervisor.ssh import AgentFile, HostError, NodeLink, connect_all

if TYPE_CHECKING:
    from supervisor.inventory import Inventory

CONNECT_DEADLINE = 30.0
# The node gives the import of torch two minutes.
FACTS_DEADLINE = 150.0
REACH_DEADLINE = 30.0
# One all-reduce between two nodes, including the import of torch.
COLLECTIVE_S = 60.0
COLLECTIVE_DEADLINE = 200.0
# The second round has at most this many batches: with more suspects it is no longer about single nodes.
BATCHES = 4
# An all-reduce is slow if it takes three times as long as the others, and at least this many ms longer.
SLOW, SLOW_MS = 3.0, 5.0
# Round trips for comparing clocks; the quickest one counts.
PINGS = 5
Say = Callable[[str], None]


class GroupOutcome(AllReduce, total=False):
    """How a small collective of some nodes went, in which round."""

    round: int
    nodes: list[str]


@dataclass
class Preflight:
    """The answers of all hosts."""

    facts: dict[str, CheckedFacts] = field(default_factory=dict)
    """By node, in inventory order."""
    unreachable: dict[str, HostFailure] = field(default_factory=dict)
    addresses: dict[str, str] = field(default_factory=dict)
    reach: dict[str, dict[str, Reached]] = field(default_factory=dict)
    """From node to node."""
    collectives: list[GroupOutcome] | None = None
    """None: not requested."""


async def preflight(inventory: Inventory, *, collectives: bool = False, say: Say = lambda text: None) -> Preflight:
    """Return the facts of all hosts; a host that fails is in `unreachable` with its reason."""
    result = Preflight(addresses={host.name: host.address for host in inventory.hosts})
    agent = await asyncio.to_thread(AgentFile.build)
    links = await connect_all(inventory.hosts, agent=agent, deadline_s=CONNECT_DEADLINE)
    up: dict[str, NodeLink] = {}
    for name, link in links.items():
        if isinstance(link, HostError):
            result.unreachable[name] = HostFailure(name, link.step, link.reason, link.hint)
        else:
            up[name] = link
    try:
        say(f"{len(up)} of {len(links)} hosts are up; asking for their facts")
        up = await _all(up, result, "facts", lambda link: _facts(link, inventory, result))
        result.facts = {host.name: result.facts[host.name] for host in inventory.hosts if host.name in result.facts}
        if len(up) > 1:
            say("connecting every node to every other")
            await _reach(up, inventory.job.ports, result)
        if collectives and len(up) > 1:
            result.collectives = await _rounds(up, inventory.job.ports, say)
    finally:
        await asyncio.gather(*(link.close() for link in links.values() if isinstance(link, NodeLink)))
    return result


async def _all(
    links: dict[str, NodeLink], result: Preflight, step: str, work: Callable[[NodeLink], Awaitable[None]]
) -> dict[str, NodeLink]:
    """Run work on all nodes at once; returns the nodes where it succeeded, the others become unreachable."""

    async def one(name: str) -> None:
        try:
            await work(links[name])
        except (CallFailed, WireError, asyncio.TimeoutError) as error:
            hint = error.hint if isinstance(error, CallFailed) else ""
            result.unreachable[name] = HostFailure(name, step, why(error), hint)

    await asyncio.gather(*(one(name) for name in links))
    return {name: link for name, link in links.items() if name not in result.unreachable}


async def _facts(link: NodeLink, inventory: Inventory, result: Preflight) -> None:
    host = link.host
    hellos = [link.hello, *[await link.ask_hello(REACH_DEADLINE) for _ in range(PINGS)]]
    clock = min(hellos, key=lambda hello: hello["clock_error_ms"])
    workdir = None if inventory.job.sync and inventory.path is not None else str(inventory.job.workdir)
    job = inventory.job
    place = {"python": host.python if host.apart else "", "wrap": host.wrap, "environment": job.environment,
             "container": job.container, "mounts": job.mounts}  # fmt: skip
    request = {"workdir": workdir, "env": {**job.env, **host.env}, "address": host.address, "place": place}
    facts: ProbeFacts = (await link.channel.call("facts", request, timeout=FACTS_DEADLINE)).data
    result.facts[host.name] = {**facts, **clock, "disk_free": facts["disk_free"], "via": link.via}


async def _reach(links: dict[str, NodeLink], ports: str, result: Preflight) -> None:
    targets: dict[str, ProbeTarget] = {}

    async def listen(link: NodeLink) -> None:
        port: ProbePort = (await link.channel.call("listen", {"ports": ports}, timeout=REACH_DEADLINE)).data
        targets[link.host.name] = {"address": link.host.address, **port}

    async def reach(link: NodeLink) -> None:
        name = link.host.name
        others = {other: target for other, target in targets.items() if other != name}
        answer = await link.channel.call("reach", {"targets": others}, timeout=REACH_DEADLINE)
        result.reach[name] = answer.data["reached"]

    links = await _all(links, result, "listen", listen)
    await _all(links, result, "reach", reach)


async def _rounds(links: dict[str, NodeLink], ports: str, say: Say) -> list[GroupOutcome]:
    """Return the outcome of two rounds of pairwise all-reduces, as in DLRover's network check.

    In the second round each suspect is paired with a good node: a suspect that fails again is bad, any other one had a
    bad partner.
    """
    names = list(links)
    say(f"all-reduce in pairs, round 1 of 2: {len(names)} nodes")
    groups = await _round(1, pairs(names), links, ports)
    suspects = [name for group in bad_groups(groups) for name in group["nodes"]]
    batches = again(suspects, [name for name in names if name not in suspects])
    if batches:
        say(f"round 2 of 2: {len(suspects)} suspects")
    for batch in batches:
        groups += await _round(2, batch, links, ports)
    return groups


def bad_groups(groups: Sequence[GroupOutcome]) -> list[GroupOutcome]:
    """Return the groups that failed, or were slow compared with the median (of two: with the quicker one)."""
    times = [group["ms"] for group in groups if "ms" in group]
    usual = statistics.median_low(times) if times else 0.0
    limit = max(SLOW * usual, usual + SLOW_MS)
    return [group for group in groups if "ms" not in group or group["ms"] > limit]


def pairs(names: Sequence[str]) -> list[list[str]]:
    """Return neighbouring nodes in pairs; of an odd number the last pair has three."""
    pairs = [list(names[at : at + 2]) for at in range(0, len(names), 2)]
    if len(pairs) > 1 and len(pairs[-1]) == 1:
        last = pairs.pop()
        pairs[-1] += last
    return pairs


def again(suspects: Sequence[str], good: Sequence[str]) -> list[list[list[str]]]:
    """Return batches of groups in which every suspect is paired with a good node and no other suspect."""
    if not good and len(suspects) == 3:
        return [[list(pair)] for pair in itertools.combinations(suspects, 2)]
    if not good:
        # No node is known to be good: pair each suspect with another partner, if there is one.
        return [pairs([*suspects[1:], suspects[0]])] if len(suspects) > 3 else []
    batches = [suspects[at : at + len(good)] for at in range(0, len(suspects), len(good))]
    return [[[suspect, partner] for suspect, partner in zip(batch, good)] for batch in batches[:BATCHES]]  # noqa: B905


async def _round(
    number: int, groups: Sequence[list[str]], links: dict[str, NodeLink], ports: str
) -> list[GroupOutcome]:
    outcomes = await asyncio.gather(*(_collective([links[name] for name in group], ports) for group in groups))
    return [{"round": number, "nodes": group, **outcome} for group, outcome in zip(groups, outcomes, strict=True)]


async def _collective(links: Sequence[NodeLink], ports: str) -> AllReduce:
    """Return the outcome of an all-reduce among these nodes."""
    request = {"world": len(links), "host": links[0].host.address, "timeout_s": COLLECTIVE_S, "ports": ports}
    try:

        async def start(rank: int, **store: Any) -> Any:
            one = {**request, "rank": rank, "address": links[rank].host.address, **store}
            return (await links[rank].channel.call("collective_start", one, timeout=COLLECTIVE_DEADLINE)).data

        opened = await start(0)
        others = [start(rank, **opened) for rank in range(1, len(links))]
        await asyncio.gather(*others)
        ends = [
            link.channel.call("collective_end", {"timeout_s": 2 * COLLECTIVE_S}, timeout=COLLECTIVE_DEADLINE)
            for link in links
        ]
        answers: list[AllReduce] = [answer.data for answer in await asyncio.gather(*ends)]
    except (CallFailed, WireError, asyncio.TimeoutError) as error:
        return {"error": why(error)}
    failed = [
        f"{link.host.name}: {data['error']}" for link, data in zip(links, answers, strict=True) if "error" in data
    ]
    if failed:
        return {"error": "; ".join(failed)}
    # The slowest rank counts.
    return max(answers, key=lambda data: data["ms"])
