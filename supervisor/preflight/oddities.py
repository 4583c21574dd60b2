"""Which nodes differ from the others, and what would stop a job. Pure functions.

In: a Preflight: facts by node, connections between nodes, small all-reduces. Out: a table of facts, and findings with
what to do.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from remote_agent.text.names import by_value, size_text
from remote_agent.wire.events import HOST_NAME
from supervisor.inventory.pattern import fold
from supervisor.preflight.probe import GroupOutcome, Preflight, bad_groups

if TYPE_CHECKING:
    from remote_agent.wire.answers import CheckedFacts
    from remote_agent.wire.documents import Severity
    from supervisor.link.view import HostView

GB = 10**9
# Any checkpoint needs more than this.
DISK_ERROR, DISK_WARNING = GB // 10, 5 * GB
# Docker's default of 64 MB breaks the first DataLoader with workers; NCCL alone takes some MB for each pair of ranks.
SHM_WARNING = 512 * 2**20
OPEN_FILES_WARNING = 4096
# Beyond this, timestamps that the script itself writes differ too much; ours are corrected for clock skew.
CLOCK_WARNING_MS = 1000.0
# These name a device or an interface of one host, and so differ on purpose.
OWN_TO_A_HOST = re.compile(
    r"CUDA_VISIBLE_DEVICES|HIP_VISIBLE_DEVICES|.*_SOCKET_IFNAME|NCCL_IB_HCA|VIRTUAL_ENV|CONDA_PREFIX"
)
_OPEN_PORTS = "open all ports between nodes, each group uses a new one"
# Each entry has a part of an error's text and its most likely meaning.
CAUSES = (
    ("another machine", "that name or address leads to another machine: correct `address` in HOSTS"),
    ("Name or service", "the nodes cannot resolve that name: set `address` in HOSTS to a name that they can resolve"),
    ("name resolution", "the nodes cannot resolve that name now: set `address` in HOSTS to a numeric address"),
    ("no answer within", f"a firewall drops the packets, or `address` is wrong: {_OPEN_PORTS}"),
    ("No route", f"a firewall rejects the connection, or `address` is wrong: {_OPEN_PORTS}"),
)
REFUSED = "a firewall rejects the connection, or `address` in HOSTS is another machine's; each group uses a new port"
LOOPBACK = "that address is local to each machine: set `address` in HOSTS to one that the other nodes reach"
_BROKEN = "cannot be imported"


@dataclass(frozen=True)
class CheckFinding:
    """One thing that is wrong or differs: an `error` would stop a job, a `warning` may, `info` is worth knowing."""

    severity: Severity
    fact: str
    nodes: tuple[str, ...]
    text: str
    hint: str = ""


@dataclass(frozen=True)
class FactRow:
    """One fact: its values and the nodes that have each, the most frequent value first."""

    fact: str
    values: tuple[tuple[str, tuple[str, ...]], ...]
    odd: bool
    """The values differ and should not."""


@dataclass(frozen=True)
class Fact:
    """How to read one fact, and what a difference between nodes means."""

    name: str
    read: Callable[[CheckedFacts], str]
    severity: Severity | None
    """The severity of a difference; None: nodes may differ."""
    hint: str = ""


def _torch(key: str) -> Callable[[CheckedFacts], str]:
    return lambda facts: str(facts["torch"].get(key) or "none")


def _torch_version(facts: CheckedFacts) -> str:
    error = facts["torch"].get("error")
    return f"{_BROKEN}: {error}" if error else str(facts["torch"]["torch"])


def _python(facts: CheckedFacts) -> str:
    """Return the version that the ranks have, which may be another one than the agent's."""
    return str(facts["torch"].get("python") or facts["python"])


def _gpus(facts: CheckedFacts) -> str:
    names = Counter(facts["torch"].get("gpu_names", ()))
    return " + ".join(f"{count} x {name}" for name, count in names.items()) or "none"


def _limit(value: int | None) -> str:
    return "unlimited" if value is None else str(value)


def _shm(facts: CheckedFacts) -> str:
    return "none" if facts["shm"] is None else size_text(facts["shm"]["total"])


def _count(values: Sequence[object] | None, unknown: str = "") -> str:
    return unknown if values is None else str(len(values) or "none")


FACTS: tuple[Fact, ...] = (
    Fact("python", _python, "warning", "use the same interpreter: `python` in HOSTS"),
    Fact("torch", _torch_version, "error", "one group needs the same torch everywhere"),
    Fact("cuda", _torch("cuda"), "warning", "install torch for the same CUDA everywhere"),
    Fact("nccl", _torch("nccl"), "error", "NCCL works only with the same version: install the same torch everywhere"),
    Fact("place", _torch("place"), "warning", "a tag may name two images: pull it on all, or write image@sha256:…"),
    Fact("driver", lambda facts: str(facts["driver"] or "none"), "warning", "install the same driver everywhere"),
    Fact("gpus", _gpus, "warning", "the slowest GPU limits all; nproc_per_node can be smaller on one host"),
    Fact("code", lambda facts: str(facts["code"] or "synced by up"), "error", "set sync = true, or use the same files"),
    Fact("GPU processes", lambda facts: _count(facts["gpu_processes"], "unknown (nvidia-smi not found)"), None),
    Fact("left over", lambda facts: _count(facts["left_over"]), None),
    Fact("open files", lambda facts: _limit(facts["open_files"]), None),
    Fact("memlock", lambda facts: _limit(facts["memlock"]), None),
    Fact("/dev/shm", _shm, "info"),
    Fact("interpreter", lambda facts: str(facts["executable"]), None),
    Fact("reached by", lambda facts: facts.get("via", ""), None),
)  # fmt: skip
# A launch has the first facts anyway.
QUICK = 5


def matrix(result: Preflight) -> list[FactRow]:
    """Return one row for every fact, and for every variable that is set on a node."""
    rows = _rows(FACTS, result.facts) + (_spread_rows(result.facts) if result.facts else [])
    names = sorted({name for facts in result.facts.values() for name in facts["env"]})
    for name in names:
        values = {node: facts["env"].get(name, "(not set)") for node, facts in result.facts.items()}
        rows.append(_row(f"${name}", values, _env_severity(name)))
    return [row for row in rows if row.values]


def _rows(which: Iterable[Fact], by_node: Mapping[str, CheckedFacts]) -> list[FactRow]:
    return [
        _row(fact.name, {name: fact.read(facts) for name, facts in by_node.items()}, fact.severity) for fact in which
    ]


def _spread_rows(by_node: Mapping[str, CheckedFacts]) -> list[FactRow]:
    """Return rows for numbers that differ on every node: the lowest and the highest, and where."""
    error = max(facts["clock_error_ms"] for facts in by_node.values())
    shared = {node: facts["shm"] for node, facts in by_node.items()}
    homes = {node: [free for path, free in facts["disk_free"].items()] for node, facts in by_node.items()}
    return [
        _spread("clock", {node: facts["clock_offset_ms"] for node, facts in by_node.items()},
                lambda value: f"{value:+.1f} ms", f" against this machine, ± {error:.1f} ms"),
        _spread("free in home", {node: free[0] for node, free in homes.items()}, size_text),
        _spread("free in SUPERVISOR_HOME", {node: free[-1] for node, free in homes.items()}, size_text),
        _spread("free shm", {node: shm and shm["free"] for node, shm in shared.items()}, size_text),
        _spread("load", {node: facts["load"] for node, facts in by_node.items()}, lambda value: f"{value:.1f}"),
    ]  # fmt: skip


def _spread(name: str, by_node: Mapping[str, float | None], text: Callable[[float], str], unit: str = "") -> FactRow:
    known = {node: value for node, value in by_node.items() if value is not None}
    values = []
    if known:
        low, high = min(known, key=known.__getitem__), max(known, key=known.__getitem__)
        least, most = text(known[low]), text(known[high])
        span = least if least == most else f"{least} ({low}) to {most} ({high})"
        values.append((span + unit, tuple(known)))
    if len(known) < len(by_node):
        values.append(("unknown", tuple(node for node in by_node if node not in known)))
    return FactRow(name, tuple(values), odd=False)


def quick(views: Iterable[HostView]) -> list[CheckFinding]:
    """Return findings from the facts that a launch has anyway: versions, script, clocks, disk, /dev/shm."""
    hosts = {view.name: view for view in views}
    by_node: dict[str, CheckedFacts] = {
        name: {"python": view.hello["python"], "clock_offset_ms": view.hello["clock_offset_ms"],
               "clock_error_ms": view.hello["clock_error_ms"], "torch": view.engine}
        for name, view in hosts.items()
    }  # fmt: skip
    # Without sync, a launch compares only the script.
    script = _row("code", {name: str(view.script) for name, view in hosts.items()}, "error")
    items = list(_differences([*_rows(FACTS[:QUICK], by_node), script]))
    items += _clocks(by_node)
    for name, view in hosts.items():
        items += _disk(view.hello["disk_free"], view.hello["home"], _finding_for(name))
        items += _shm_free(view.hello["shm_free"], _finding_for(name))
    return _merged(items)


def _env_severity(name: str) -> Severity:
    return "info" if OWN_TO_A_HOST.fullmatch(name) else "warning"


def _row(name: str, by_node: Mapping[str, str], severity: Severity | None) -> FactRow:
    values = tuple((value, tuple(nodes)) for value, nodes in by_value(by_node.items()))
    return FactRow(name, values, severity is not None and len(values) > 1)


def findings(result: Preflight) -> list[CheckFinding]:
    """Return all findings, the most severe first."""
    items = [
        *_differences(matrix(result)),
        *(finding for node, facts in result.facts.items() for finding in _node_findings(node, facts)),
        *_clocks(result.facts),
        *_own_names(result.facts),
        *unreachable_pairs(result),
        *collectives(result),
    ]
    order = {"error": 0, "warning": 1, "info": 2}
    return sorted(_merged(items), key=lambda finding: order[finding.severity])


def _differences(rows: Iterable[FactRow]) -> Iterable[CheckFinding]:
    facts = {fact.name: fact for fact in FACTS}
    for row in rows:
        if not row.odd:
            continue
        known = facts.get(row.fact)
        severity = known.severity if known is not None else _env_severity(row.fact.removeprefix("$"))
        hint = known.hint if known is not None else "set it for all hosts in [job] env, or for one host in its own env"
        most, nodes = row.values[0]
        for value, others in row.values[1:]:
            if _BROKEN in (value[: len(_BROKEN)], most[: len(_BROKEN)]):
                # _node_findings reports it.
                continue
            split = len(others) == len(nodes)
            majority = f"{fold(nodes)} {'have' if len(nodes) > 1 else 'has'} {most}"
            which = others if not split else (*nodes, *others)
            yield CheckFinding(
                severity or "info", row.fact, which, f"{row.fact} is {value} on {fold(others)}; {majority}", hint
            )


def _node_findings(node: str, facts: CheckedFacts) -> Iterable[CheckFinding]:
    """Yield what is wrong with one node by itself."""
    finding = _finding_for(node)
    if facts["torch"].get("error"):
        text = f"torch {_BROKEN}: {facts['torch']['error']}"
        yield finding("error", "torch", text, "install it, or set `python` in HOSTS to an interpreter that has it")
    for text, way_out in facts["remarks"]:
        yield finding("warning", "container", text, way_out)
    for path, free in facts["disk_free"].items():
        yield from _disk(free, path, finding)
    yield from _shm_free(None if facts["shm"] is None else facts["shm"]["free"], finding)
    yield from _limits(facts, finding)
    if str(facts["code"]).startswith("no directory"):
        yield finding("error", "code", f"there is {facts['code']}", "set sync = true, or mount it on that node")
    if facts["gpu_processes"]:
        text = f"its GPUs are in use: {'; '.join(facts['gpu_processes'][:4])}"
        yield finding("warning", "GPU processes", text, "another job, or left over from one: check before ending them")
    if facts["left_over"]:
        pids = " ".join(str(one["pid"]) for one in facts["left_over"])
        names = " ".join(sorted({one["job"] for one in facts["left_over"]}))
        text = f"processes of {names} run without an agent: pid {pids}"
        yield finding("warning", "left over", text, "check them with ps, then end them with kill")
    if facts["live_jobs"]:
        text = f"other jobs run there: {' '.join(facts['live_jobs'])}"
        yield finding("info", "jobs", text, "`supervisor jobs` lists them")
    if facts["load"] > 2 * facts["cpu_count"]:
        yield finding("info", "load", f"load is {facts['load']:.0f} on {facts['cpu_count']} CPUs")


def _clocks(by_node: Mapping[str, CheckedFacts]) -> Iterable[CheckFinding]:
    """Yield clocks that differ from the median of the nodes (of one or two nodes: from this machine's)."""
    offsets = {node: facts["clock_offset_ms"] for node, facts in by_node.items()}
    usual, whose = (
        (statistics.median(offsets.values()), "the other nodes'") if len(offsets) > 2 else (0.0, "this machine's")
    )
    for node, offset in offsets.items():
        if abs(offset - usual) - by_node[node]["clock_error_ms"] > CLOCK_WARNING_MS:
            text = f"its clock is {(offset - usual) / 1000:+.1f} s off {whose}"
            yield CheckFinding("warning", "clock", (node,), text, "start chrony or systemd-timesyncd there")
    if abs(usual) > CLOCK_WARNING_MS:
        text = f"their clocks are {usual / 1000:+.1f} s off this machine's"
        yield CheckFinding(
            "info",
            "clock",
            tuple(offsets),
            text,
            "timestamps are corrected for clock skew; set the clock of this machine",
        )


def _own_names(by_node: Mapping[str, CheckedFacts]) -> Iterable[CheckFinding]:
    """Yield nodes whose own host name does not lead to the address at which the other nodes reach them."""
    for node, facts in by_node.items() if len(by_node) > 1 else ():
        sockets = facts["sockets"]
        if sockets["message"]:
            severity: Severity = "warning" if sockets["kind"] == HOST_NAME else "info"
            yield CheckFinding(severity, "own name", (node,), sockets["message"])


def _finding_for(node: str) -> Callable[..., CheckFinding]:
    """Return a function that makes findings about one node."""

    def finding(severity: Severity, fact: str, text: str, hint: str = "") -> CheckFinding:
        return CheckFinding(severity, fact, (node,), text, hint)

    return finding


def _disk(free: int | None, path: str, finding: Callable[..., CheckFinding]) -> Iterable[CheckFinding]:
    if free is None:
        yield finding(
            "warning", "disk", f"{path} does not exist", "scripts that write to their home directory will fail"
        )
    elif free < DISK_WARNING:
        hint = "`supervisor clean` removes the logs of finished jobs"
        severity: Severity = "error" if free < DISK_ERROR else "warning"
        yield finding(severity, "disk", f"only {size_text(free)} free at {path}", hint)


def _shm_free(free: int | None, finding: Callable[..., CheckFinding]) -> Iterable[CheckFinding]:
    if free is not None and free < SHM_WARNING:
        hint = "DataLoader workers and NCCL need it: docker run --shm-size, or mount -o remount,size=…"
        yield finding("warning", "/dev/shm", f"only {size_text(free)} free in /dev/shm", hint)


def _limits(facts: CheckedFacts, finding: Callable[..., CheckFinding]) -> Iterable[CheckFinding]:
    files, memlock = facts["open_files"], facts["memlock"]
    if files is not None and files < OPEN_FILES_WARNING:
        yield finding("warning", "open files", f"at most {files} open files", "ulimit -n in `prelude`, or limits.conf")
    if memlock is not None and facts["torch"].get("gpu_names"):
        text = f"memlock is limited to {size_text(memlock)}"
        yield finding("warning", "memlock", text, "InfiniBand needs it unlimited")


def _merged(items: Iterable[CheckFinding]) -> list[CheckFinding]:
    """Merge findings that have the same text for several nodes."""
    merged: dict[tuple[Severity, str, str, str], tuple[str, ...]] = {}
    for one in items:
        key = (one.severity, one.fact, one.text, one.hint)
        merged[key] = tuple(dict.fromkeys((*merged.get(key, ()), *one.nodes)))
    return [CheckFinding(severity, fact, nodes, text, hint) for (severity, fact, text, hint), nodes in merged.items()]


# --- between nodes


def unreachable_pairs(result: Preflight) -> Iterable[CheckFinding]:
    """Yield every failed connection; a node that is cut off in one direction or both is reported once."""
    nodes = [name for name in result.facts if name in result.reach]
    errors = {
        (one, other): str(result.reach[one][other]["error"])
        for one in nodes
        for other in nodes
        if "error" in result.reach[one].get(other, {})
    }
    if errors and len(errors) == len(nodes) * (len(nodes) - 1):
        (_, other), error = next(iter(errors.items()))
        text = f"no node reaches any other: {error}"
        yield CheckFinding("error", "reach", tuple(nodes), text, _cause(error, result.addresses[other]))
        return
    closed = _cut_off(nodes, nodes, lambda name, other: (other, name) in errors)
    mute = _cut_off(nodes, [name for name in nodes if name not in closed], lambda name, other: (name, other) in errors)
    for name in (name for name in nodes if name in closed or name in mute):
        address = result.addresses[name] if name in closed else result.addresses[_one_of(errors, 0, name)[0][1]]
        error = _one_of(errors, 1 if name in closed else 0, name)[1]
        text = f"no other node reaches it at {address}" if name in closed else "it reaches no other node"
        text += ", and it reaches no other node" if name in closed and name in mute else ""
        yield CheckFinding("error", "reach", (name,), f"{text}: {error}", _cause(error, address))
    left = {pair: error for pair, error in errors.items() if pair[0] not in mute and pair[1] not in closed}
    yield from _pairs(left, result.addresses)


def _cut_off(nodes: Sequence[str], others: Sequence[str], blocked: Callable[[str, str], bool]) -> list[str]:
    """Return the nodes that are blocked from all others, if there are others."""
    peers = {name: [other for other in others if other != name] for name in nodes}
    return [name for name in nodes if peers[name] and all(blocked(name, other) for other in peers[name])]


def _one_of(errors: Mapping[tuple[str, str], str], end: int, name: str) -> tuple[tuple[str, str], str]:
    return next(item for item in errors.items() if item[0][end] == name)


def _pairs(errors: Mapping[tuple[str, str], str], addresses: Mapping[str, str]) -> Iterable[CheckFinding]:
    """Yield single failed connections, grouped by source and error."""
    groups: dict[tuple[str, str], list[str]] = {}
    for (one, other), error in errors.items():
        groups.setdefault((one, error), []).append(other)
    for (one, error), others in groups.items():
        at = f" at {addresses[others[0]]}" if len(others) == 1 else ""
        text = f"{one} does not reach {fold(others)}{at}: {error}"
        yield CheckFinding("error", "reach", (one, *others), text, _cause(error, addresses[others[0]]))


def _cause(error: str, address: str) -> str:
    if address == "localhost" or address.startswith(("127.", "::1")):
        return LOOPBACK
    return next((cause for words, cause in CAUSES if words in error), REFUSED)


def collectives(result: Preflight) -> Iterable[CheckFinding]:
    """Yield the nodes that are slow or fail even with a good partner, then the other bad groups."""
    groups = result.collectives or []
    bad = bad_groups(groups)
    good = {name for group in groups if group not in bad for name in group["nodes"]}
    culprits: dict[str, GroupOutcome] = {}
    for group in bad:
        others = [name for name in group["nodes"] if name not in good]
        if len(others) == 1:
            culprits[others[0]] = group
    for name, worst in culprits.items():
        text = f"all-reduce is slow or fails with every partner: {_outcome(worst)}"
        yield CheckFinding(
            _weight(worst),
            "collectives",
            (name,),
            text,
            "remove it from HOSTS, or mark it `spare`, until it is repaired",
        )
    for group in bad:
        if culprits.keys() & set(group["nodes"]):
            continue
        text, hint = f"all-reduce among them is slow or fails: {_outcome(group)}", "check again with one more node"
        if good.issuperset(group["nodes"]):
            text, hint = f"{text}; each is fine with other nodes", "check the network between them"
        else:
            text += "; unknown which of them is bad"
        yield CheckFinding(_weight(group), "collectives", tuple(group["nodes"]), text, hint)


def _weight(group: GroupOutcome) -> Severity:
    return "error" if "error" in group else "warning"


def _outcome(group: GroupOutcome) -> str:
    return str(group.get("error") or f"{group['ms']:.0f} ms for 16 MiB")
