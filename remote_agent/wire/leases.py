"""How long each part of a job may continue without a sign of the others: shares of node_timeout, and why they fit.

In: node_timeout in seconds. Out: seconds. All times run from one moment: when the newest heartbeat that was answered
was sent. A share below must be over before the next one begins, so that no worker lives when the next group starts:

    0 ── heartbeats ──► HELD ── the coordinator's workers end ──► LEASE ── a member's workers end ──► node_timeout

* A coordinator that has not held enough nodes for HELD stops its workers. They are gone by LEASE: from then on the
  members may elect another one.
* A member without an answer for LEASE stops its workers. They are gone by node_timeout: from then on a coordinator may
  form a group without this node.
* To end, workers get STOP from their engine (SIGKILL at once), then the engine is killed with them, which takes less
  than DEATH. `LOOK_S` is how late the end of a lease may be noticed.
* An engine whose agent is suspended ends its workers by itself: the agent never allows it more than what is left of its
  own lease, and STOP.

`holds` is these sentences as inequalities; a node_timeout for which one is false is refused.
"""

from __future__ import annotations

HELD = 0.6
LEASE = 0.8
STOP = 0.08
DEATH = 0.1
# A lease is checked, and renewed, this often.
LOOK_S = 0.05
RENEWAL = 1 / 30
HEARTBEAT = 1 / 15
# With a shorter timeout, one lost packet (TCP repeats it after 0.2 s, then 0.4 s) or a busy machine would cost a node.
MIN_NODE_TIMEOUT_S = 3.0


def holds(node_timeout: float) -> bool:
    """Return whether no share overlaps the next one with this node_timeout."""
    end = (STOP + DEATH) * node_timeout + LOOK_S
    in_time = HELD * node_timeout + end <= LEASE * node_timeout and LEASE * node_timeout + end <= node_timeout
    # Several heartbeats fit into the shortest share.
    return in_time and 5 * HEARTBEAT <= HELD and 3 * RENEWAL <= STOP + DEATH and node_timeout >= MIN_NODE_TIMEOUT_S
