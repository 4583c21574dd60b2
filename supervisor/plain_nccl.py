"""What NCCL told on all nodes, in a few lines: the short form of the NCCL screen. Pure.

In: a Fabric. Out: text without colour; nothing where NCCL told nothing.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from supervisor.inventory.pattern import fold
from supervisor.plain import one_line

if TYPE_CHECKING:
    from supervisor.session.fabric import Fabric

ODDITIES = 4


def fabric_lines(fabric: Fabric) -> list[str]:
    """Return what the job uses, who talks how, and what is odd, the worst first."""
    if not fabric.nodes:
        return []
    parts = [fabric.all_of("version"), f"network {network(fabric)}" if fabric.common("network") else ""]
    parts += [f"inside nodes {kinds(fabric.inside())}" if fabric.inside() else ""]
    parts += [f"between nodes {kinds(fabric.between())}" if fabric.between() else ""]
    parts += [f"NVLS {fabric.all_of('nvls')}" if fabric.common("nvls") else ""]
    lines = [one_line("nccl: " + ", ".join(part for part in parts if part))]
    lines += [f"  {'-' if odd.severity == 'info' else '!'} {one_line(odd.text)}" for odd in fabric.odd[:ODDITIES]]
    if len(fabric.odd) > ODDITIES:
        lines.append(f"  and {len(fabric.odd) - ODDITIES} more: the NCCL screen shows them")
    missing = absent(fabric)
    return [*lines, f"  not in it: {missing}"] if missing else lines


def absent(fabric: Fabric) -> str:
    """Return the nodes of which nothing is known, and why."""
    reasons = ((fabric.unheard, "did not answer"), (fabric.silent, "told nothing"))
    return "; ".join(f"{one_line(fold(nodes))} {why}" for nodes, why in reasons if nodes)


def network(fabric: Fabric) -> str:
    """Return the networks in use, that of most nodes first, with its plug-in where it is told."""
    plugin = fabric.common("plugin")
    name = fabric.all_of("network")
    return f"{name} ({plugin})" if plugin and plugin != name else name


def kinds(transports: Counter[str]) -> str:
    """Return transports, the one of most channels first."""
    return ", ".join(kind for kind, _ in transports.most_common())
