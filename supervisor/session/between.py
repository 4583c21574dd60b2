"""What is odd between nodes: who does not reach whom, and which node does badly in all-reduces. A pure reading.

In: a preflight's connections and pairs. Out: findings, each with both ends and what to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from supervisor.inventory.pattern import fold
from supervisor.session.finding import Finding, Severity
from supervisor.session.preflight import Preflight, bad_groups

if TYPE_CHECKING:
    from collections.abc import Callable

# Of an error's text -> what it most likely means.
CAUSES = (
    ("another machine", "that name or address means another machine there: correct `address` in HOSTS"),
    ("Name or service", "the nodes do not know that name: give `address` in HOSTS one that they reach"),
    ("name resolution", "the nodes cannot resolve that name now: give `address` in HOSTS as a number"),
    (
        "no answer within",
        "a firewall drops it, or `address` is wrong: open all ports between nodes, each group takes one",
    ),
    ("No route", "a firewall rejects it, or `address` is wrong: open all ports between nodes, each group takes one"),
)
REFUSED = "a firewall rejects it, or `address` in HOSTS means another machine there: each group takes a free port"
LOOPBACK = "every machine has that address for itself: set `address` in HOSTS to what the other nodes reach"


def unreached(found: Preflight) -> Iterable[Finding]:
    """Yield every connection that did not come about; a node that is cut off one way or both is told once."""
    nodes = [name for name in found.facts if name in found.reach]
    errors = {
        (one, other): str(found.reach[one][other]["error"])
        for one in nodes
        for other in nodes
        if "error" in found.reach[one].get(other, {})
    }
    if errors and len(errors) == len(nodes) * (len(nodes) - 1):
        (_, other), error = next(iter(errors.items()))
        text = f"no node reaches any other: {error}"
        yield Finding("error", "reach", tuple(nodes), text, _cause(error, found.addresses[other]))
        return
    closed = _cut_off(nodes, nodes, lambda name, other: (other, name) in errors)
    mute = _cut_off(nodes, [name for name in nodes if name not in closed], lambda name, other: (name, other) in errors)
    for name in (name for name in nodes if name in closed or name in mute):
        address = found.addresses[name] if name in closed else found.addresses[_one_of(errors, 0, name)[0][1]]
        error = _one_of(errors, 1 if name in closed else 0, name)[1]
        text = f"no other node reaches it at {address}" if name in closed else "it reaches no other node"
        text += ", and it reaches none" if name in closed and name in mute else ""
        yield Finding("error", "reach", (name,), f"{text}: {error}", _cause(error, address))
    left = {pair: error for pair, error in errors.items() if pair[0] not in mute and pair[1] not in closed}
    yield from _pairs(left, found.addresses)


def _cut_off(nodes: Sequence[str], others: Sequence[str], blocked: Callable[[str, str], bool]) -> list[str]:
    """Return the nodes that are blocked from all others (where there are any)."""
    peers = {name: [other for other in others if other != name] for name in nodes}
    return [name for name in nodes if peers[name] and all(blocked(name, other) for other in peers[name])]


def _one_of(errors: Mapping[tuple[str, str], str], end: int, name: str) -> tuple[tuple[str, str], str]:
    return next(item for item in errors.items() if item[0][end] == name)


def _pairs(errors: Mapping[tuple[str, str], str], addresses: Mapping[str, str]) -> Iterable[Finding]:
    """Yield what is left, by source and error."""
    groups: dict[tuple[str, str], list[str]] = {}
    for (one, other), error in errors.items():
        groups.setdefault((one, error), []).append(other)
    for (one, error), others in groups.items():
        at = f" at {addresses[others[0]]}" if len(others) == 1 else ""
        text = f"{one} does not reach {fold(others)}{at}: {error}"
        yield Finding("error", "reach", (one, *others), text, _cause(error, addresses[others[0]]))


def _cause(error: str, address: str) -> str:
    if address == "localhost" or address.startswith(("127.", "::1")):
        return LOOPBACK
    return next((cause for words, cause in CAUSES if words in error), REFUSED)


def collectives(found: Preflight) -> Iterable[Finding]:
    """Yield the nodes that do badly even with a good partner; of other groups that do badly, what can be told."""
    groups = found.collectives or []
    bad = bad_groups(groups)
    good = {name for group in groups if group not in bad for name in group["nodes"]}
    culprits: dict[str, Mapping[str, Any]] = {}
    for group in bad:
        others = [name for name in group["nodes"] if name not in good]
        if len(others) == 1:
            culprits[others[0]] = group
    for name, worst in culprits.items():
        text = f"its all-reduce does badly with every partner: {_outcome(worst)}"
        yield Finding(
            _weight(worst), "collectives", (name,), text, "take it out, or mark it `spare`, until it is mended"
        )
    for group in bad:
        if culprits.keys() & set(group["nodes"]):
            continue
        text, hint = f"the all-reduce among them does badly: {_outcome(group)}", "check again with a node more"
        if good.issuperset(group["nodes"]):
            text, hint = f"{text}; each does well with others", "look at what lies between them"
        else:
            text += "; which of them is bad does not show"
        yield Finding(_weight(group), "collectives", tuple(group["nodes"]), text, hint)


def _weight(group: Mapping[str, Any]) -> Severity:
    return "error" if "error" in group else "warning"


def _outcome(group: Mapping[str, Any]) -> str:
    return str(group.get("error") or f"{group['ms']:.0f} ms for 16 MiB")
