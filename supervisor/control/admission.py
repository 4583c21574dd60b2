"""What a joining node receives, and what the others receive about it: the job's description, accepted authorities.

In: what linked nodes report of themselves; the authorities that this session has made. Out: a description and
authorities that no single node can forge; nodes that trust them.

An authority lives for one command. It certifies nodes, all linked nodes get its certificate, and its key is gone. A
node learns of an authority over its own link to an operator only. What this session has not made itself counts if more
than half of the linked nodes report it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Collection
from typing import TYPE_CHECKING

from remote_agent.wire import CallFailed, JobSpec, SpecError, WireError
from remote_agent.wire.documents import time_ns
from remote_agent.wire.events import EventType
from supervisor.errors import RequestFailed, why
from supervisor.inventory.pattern import fold
from supervisor.launch.certificates import Authority, fingerprints, make_authority

if TYPE_CHECKING:
    from supervisor.link.host_link import HostLink
    from supervisor.link.hub import Hub
    from supervisor.ssh.answers import Identity

log = logging.getLogger(__name__)

TRUST_DEADLINE = 10.0


class Issuer:
    """The authority of one command, made when the first node needs it."""

    def __init__(self, hub: Hub, job: str) -> None:
        self._hub = hub
        self._job = job
        self._authority: Authority | None = None

    def authority(self) -> Authority:
        """Return it; the nodes do not trust it before `spread`."""
        if self._authority is None:
            self._authority = make_authority(self._job)
            self._hub.trust(fingerprints(self._authority.ca))
        return self._authority


def _trusted_by(link: HostLink) -> list[str]:
    """Return the fingerprints of the authorities that a node reports, its own first; [] for none."""
    reported = link.view.identity.get("authorities")
    return [str(one) for one in reported] if isinstance(reported, list) else []


def _common(reports: Collection[Collection[str]]) -> set[str]:
    """Return what more than half of the reports contain."""
    counts = Counter(each for report in reports for each in set(report))
    return {each for each, count in counts.items() if 2 * count > len(reports)}


def _believable(hub: Hub) -> set[str]:
    """Return the fingerprints of all authorities that the nodes of the job should trust."""
    reports = [known for link in hub.opened_links() if (known := _trusted_by(link))]
    return {*hub.authorities, *_common(reports)}


async def description(hub: Hub) -> JobSpec:
    """Return the job's description: our own, or the one that more than half of the linked nodes have.

    Raises RequestFailed.
    """
    if hub.spec is not None:
        return hub.spec
    await hub.reach()
    links = hub.opened_links()
    if not links:
        raise RequestFailed("cannot get the job's description: no host of the job answers")
    programs = {link.view.name: str(link.view.identity.get("program", "")) for link in links}
    common = _common([[program] for program in programs.values()])
    if not common:
        text = f"the nodes have different descriptions of the job: {' '.join(sorted(programs))}"
        raise RequestFailed(text, "one of them may have files of an older job of the same name: supervisor clean")
    (program,) = common
    others = [name for name, each in programs.items() if each != program]
    if others:
        hub.notice(
            f"{fold(others)}: its description of the job differs from that of the other nodes; not used", "warning"
        )
    last = ""
    for link in links:
        if programs[link.view.name] != program:
            continue
        try:
            spec = JobSpec.from_json((await link.call("describe")).data["spec"])
        except (CallFailed, WireError, asyncio.TimeoutError, SpecError, LookupError, AttributeError) as error:
            last = f"{link.view.name}: {why(error)}"
            continue
        if spec.program_digest() == program:
            return spec
        last = f"{link.view.name}: its description is not the one that it reports"
    raise RequestFailed(f"cannot get the job's description: {last}")


async def authorities(hub: Hub) -> dict[str, str]:
    """Return the authorities that the nodes of the job should trust, as PEM text by fingerprint."""
    wanted = _believable(hub)
    for link in hub.opened_links():
        unknown = wanted - hub.authorities.keys()
        if not unknown & set(_trusted_by(link)):
            continue
        try:
            pems = fingerprints(str((await link.call("describe")).data["ca"]))
        except (CallFailed, WireError, asyncio.TimeoutError, LookupError, ValueError) as error:
            log.info("authorities of %s: %s", link.view.name, why(error))
            continue
        hub.trust({each: pem for each, pem in pems.items() if each in wanted})
    return {each: hub.authorities[each] for each in wanted & hub.authorities.keys()}


def is_certified(hub: Hub, link: HostLink) -> bool:
    """Return whether the node has a certificate for this job that the others accept, or are asked to accept."""
    known = _trusted_by(link) if link.opened else []
    return bool(known) and known[0] in _believable(hub)


async def removed_ns(hub: Hub, name: str) -> int:
    """Return the time of the newest event if the node was removed, else 0: its certificates up to then are void.

    Raises Unreachable, RequestFailed.
    """
    events = hub.events or await hub.journal()
    of_node = (event["type"] for event in reversed(events) if event["node"] == name)
    last = next((kind for kind in of_node if kind in (EventType.NODE_REMOVED, EventType.NODE_ADDED)), None)
    return time_ns(events[-1]["time"]) if last == EventType.NODE_REMOVED else 0


async def spread(hub: Hub) -> None:
    """Send every linked node the authorities that it does not know; the next call repeats what failed."""
    wanted = _believable(hub)
    links = [link for link in hub.opened_links(live=True) if (known := _trusted_by(link)) and not wanted <= set(known)]
    if not links:
        return
    pems = await authorities(hub)

    async def notify(link: HostLink) -> None:
        text = "".join(pem for each, pem in pems.items() if each not in _trusted_by(link))
        answer: Identity | None = await link.try_call("trust", {"ca": text}, timeout_s=TRUST_DEADLINE)
        link.learn(answer or {})

    await asyncio.gather(*(notify(link) for link in links))


def uninformed(hub: Hub, name: str) -> list[str]:
    """Return the other nodes of the job to which this node's authority cannot be sent now."""
    reached = {link.view.name for link in hub.opened_links(live=True)}
    nodes = hub.status.get("nodes", ())
    taking_part = [str(node["name"]) for node in nodes if node.get("state") not in ("removed", "failed", "lost")]
    return [each for each in taking_part if each not in reached and each != name]
