"""What operators see of other nodes through this one: for those to which they have no connection of their own.

In: requests for another node that change nothing. Out: that node's answers, passed on as data and never read here.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from remote_agent.base.tasks import within
from remote_agent.election.peers import PeerRefused, PeerUnreachable
from remote_agent.wire import Args, CallFailed, Items, Problem, WireError
from remote_agent.wire.channel import refuse

if TYPE_CHECKING:
    from remote_agent.base.tasks import Tasks
    from remote_agent.election.peers import Peers
    from remote_agent.wire import Channel

# A node is asked this often whether it is still there, and has as long to answer; a connection that nobody has used in
# between is closed.
LOOK_S = 5.0
# Requests that are passed on at once: each may hold the unread bytes of one stream. A supervisor has at most 128 calls,
# and some streams to each of 330 nodes.
MOST = 1000


class _Link:
    """The connection to one node, which all requests share: a node accepts few from another one."""

    def __init__(self) -> None:
        self.channel: Channel | None = None
        self.begun = asyncio.Event()
        """There is a channel, or a reason why there is none."""
        self.failure = ""
        self.users = 0
        self.is_used = True


class Relay:
    """Passes requests of operators on to other nodes."""

    def __init__(self, node: str, peers: Peers, tasks: Tasks) -> None:
        self._node = node
        self._peers = peers
        self._tasks = tasks
        self._links: dict[str, _Link] = {}

    async def answers(self, args: Args) -> Items:
        """Stream what a node answers to `op` with `args`; raises Problem: unreachable, busy, or the node's own."""
        node, request = str(args["node"]), {"op": args["op"], "args": args["args"]}
        if sum(link.users for link in self._links.values()) >= MOST:
            raise Problem("busy", f"{self._node} passes on {MOST} requests")
        link = self._links.get(node)
        if link is None:
            link = self._links[node] = _Link()
            self._tasks.spawn(self._keep(node, link), f"relay to {node}")
        link.users += 1
        link.is_used = True
        try:
            await link.begun.wait()
            if link.channel is None:
                raise WireError(link.failure)
            items = link.channel.stream("look", request)
            try:
                async for item in items:
                    yield item
            finally:
                await items.aclose()
        except WireError as error:
            reason = f"{self._node} does not reach {node}: {link.failure or error}"
            raise Problem("unreachable", reason) from error
        finally:
            link.users -= 1

    async def _keep(self, node: str, link: _Link) -> None:
        """Hold the connection while it is used and the node answers."""
        running: asyncio.Future[None] | None = None
        try:
            channel = await self._peers.connect(node, refuse)
            running = asyncio.ensure_future(channel.run())
            link.channel = channel
            link.begun.set()
            while link.users or link.is_used:
                link.is_used = False
                await within(channel.closed, LOOK_S)
                with contextlib.suppress(CallFailed):
                    # Any answer is a sign of life, and a refusal is a short one.
                    await channel.call("look", {"op": "", "args": {}}, timeout=LOOK_S)
        except KeyError:
            link.failure = "its address is unknown"
        except asyncio.TimeoutError:
            link.failure = f"no answer for {LOOK_S:g} s"
        except (PeerRefused, PeerUnreachable, WireError) as error:
            link.failure = str(error)
        finally:
            # The next request makes another one: this one may be closed by now.
            del self._links[node]
            link.begun.set()
            if running is not None:
                # close() would wait for a host without power.
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
