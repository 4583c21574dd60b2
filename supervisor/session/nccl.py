"""Ask all nodes what NCCL told there.

In: a session whose links answer. Out: their documents, and a Fabric; nodes that do not answer in time are named in it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from remote_agent.wire import CallFailed, WireError
from supervisor.session import fabric

if TYPE_CHECKING:
    from supervisor.session.session import Session

# A node reads some MB for it.
DEADLINE = 5.0
# How long links that are still being opened are waited for, where other nodes have something to tell.
PATIENCE = 2.0


def joined(told: dict[str, dict[str, Any] | None], status: dict[str, Any]) -> fabric.Fabric:
    """Return what the nodes say of each other; `status`: the job's nodes and ranks."""
    nodes = status.get("nodes", ())
    return fabric.read(told, {int(rank["rank"]): str(node["name"]) for node in nodes for rank in node.get("ranks", ())})


class NcclReader:
    """What a session knows of it; a node that has nothing newer sends nothing again."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._documents: dict[str, dict[str, Any]] = {}

    async def told(self, status: dict[str, Any]) -> dict[str, dict[str, Any] | None]:
        """Return what each node with ranks says, None where it does not answer; `status`: the job's nodes and ranks."""
        nodes = [str(node["name"]) for node in status.get("nodes", ()) if node.get("ranks")]
        links = self._session.links
        heard = await self._ask_all(nodes)
        if any(document.get("groups") for document in heard.values() if document is not None):
            await self._session.wait_until(lambda: all(links[name].tried for name in nodes if name in links), PATIENCE)
            late = [name for name in nodes if heard[name] is None]
            heard.update(await self._ask_all(late))
        return heard

    async def _ask_all(self, nodes: list[str]) -> dict[str, dict[str, Any] | None]:
        return dict(zip(nodes, await asyncio.gather(*(self._ask(name) for name in nodes)), strict=True))

    async def _ask(self, name: str) -> dict[str, Any] | None:
        link = self._session.links.get(name)
        known = self._documents.get(name, {})
        if link is None or not link.opened:
            return None
        try:
            answer = (await link.call("nccl", {"stamp": known.get("stamp", "")}, timeout_s=DEADLINE)).data
        except (CallFailed, WireError, asyncio.TimeoutError):
            return None
        if answer.get("stamp") != known.get("stamp"):
            self._documents[name] = known = answer
        return known
