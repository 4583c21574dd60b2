"""Which hosts of a job get connections of their own, and through which of them the others are asked.

In: the links of a hub, the newest status. Out: for a host without a connection the link that leads to it; links that
begin to connect; views that say through which host theirs is asked.

Up to LARGE hosts, all are connected to, and one that cannot be is asked through another. With more, a few are enough.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from remote_agent.wire.events import NodeState

if TYPE_CHECKING:
    from collections.abc import Mapping

    from remote_agent.wire.documents import Status
    from supervisor.link.host_link import HostLink

# With more hosts than this, not all are connected to, but this many that answer for the job: more if there are more
# than so many hosts for each.
LARGE = 64
DOORS = 3
HOSTS_OF_ONE = 340
# Nodes in these states have no agent that others reach: what they left is on their hosts.
AWAY = (NodeState.LOST, NodeState.FAILED)


class Doors:
    """The ways to the hosts of one job."""

    def __init__(self, links: Mapping[str, HostLink]) -> None:
        self._links = links
        self._places = {name: place for place, name in enumerate(links)}
        self._open: list[HostLink] = []
        self._nodes: dict[str, tuple[str, str]] = {}
        """The node on each host, and its state in the job."""

    def note(self, status: Status) -> None:
        """Take the nodes of the job and their states from a status."""
        nodes = {}
        for node in status.get("nodes", ()):
            name = str(node["name"])
            # A node that joined by itself is named after its host.
            host = name if name in self._links else name[:-5]
            nodes[host] = (name, str(node.get("state"))) if host not in nodes else (name, "")
        if nodes != self._nodes:
            self._nodes = nodes
            for name, link in self._links.items():
                if name not in nodes and nodes:
                    link.set_aside()
                elif nodes and nodes[name][1] in AWAY:
                    link.connect()
                link.show_way()

    def way_to(self, name: str) -> tuple[HostLink, str] | None:
        """Return a link whose agent passes requests on to the host's, and the node there; None: there is none."""
        node, state = self._nodes.get(name, ("", ""))
        if not self._open or state in ("", NodeState.REMOVED, *AWAY):
            return None
        turn = self._places[name] + self._links[name].turns
        return self._open[turn % len(self._open)], node

    def look(self) -> None:
        """Find the links that lead to others, and connect to further hosts while too few do."""
        found = [link for link in self._links.values() if link.passes_on]
        if found != self._open:
            self._open = found
            for link in self._links.values():
                link.show_way()
        rest = [link for link in self._links.values() if link.active and not link.direct]
        direct = [link for link in self._links.values() if link.direct] if rest else []
        good = sum(not link.tried or _answers(link) for link in direct)
        # If none of them answers for the job, twice as many are tried each time.
        enough = max(DOORS, len(self._links) // HOSTS_OF_ONE)
        more = enough - good if good else max(enough, len(direct))
        for link in rest[: max(0, more)]:
            link.connect()


def _answers(link: HostLink) -> bool:
    """Return True if the host knows how the job is: it has an agent, or files with the end."""
    return link.opened and (bool(link.view.live) or bool(link.view.identity.get("ended")))
