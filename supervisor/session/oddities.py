"""Which node differs from the others, and what would stop a job: a pure reading of a preflight.

In: facts by node, who reaches whom, small all-reduces. Out: a matrix of facts, and findings with what to do.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from supervisor.inventory.pattern import fold
from supervisor.session.between import collectives, unreached
from supervisor.session.finding import Finding, Severity

if TYPE_CHECKING:
    from supervisor.session.preflight import Preflight
    from supervisor.session.view import HostView

Facts = Mapping[str, Any]
GB = 10**9
# A checkpoint of any size needs more; so little is an oversight.
DISK_ERROR, DISK_WARNING = GB // 10, 5 * GB
# Docker's default of 64 MB breaks the first DataLoader with workers; NCCL alone takes some MB for each pair of ranks.
SHM_WARNING = 512 * 2**20
OPEN_FILES_WARNING = 4096
# Beyond this, times of different nodes are put right by us, but not in the script's own log.
CLOCK_WARNING_MS = 1000.0
# They name a device or an interface of one host: rarely the same everywhere, on purpose.
OWN_TO_A_HOST = re.compile(
    r"CUDA_VISIBLE_DEVICES|HIP_VISIBLE_DEVICES|.*_SOCKET_IFNAME|NCCL_IB_HCA|VIRTUAL_ENV|CONDA_PREFIX"
)


_BROKEN = "does not import"


@dataclass(frozen=True)
class Row:
    """One fact: its values with the nodes that have it, the majority's first."""

    fact: str
    values: tuple[tuple[str, tuple[str, ...]], ...]
    odd: bool
    """Whether differing from the majority means something."""


@dataclass(frozen=True)
class Fact:
    """How a fact is read, and what a difference means."""

    name: str
    read: Callable[[Facts], str]
    severity: Severity | None
    """Of a difference; None: nodes may differ."""
    hint: str = ""


def _torch(key: str) -> Callable[[Facts], str]:
    return lambda facts: str(facts["torch"].get(key) or "none")


def _torch_version(facts: Facts) -> str:
    error = facts["torch"].get("error")
    return f"{_BROKEN}: {error}" if error else str(facts["torch"]["torch"])


def _gpus(facts: Facts) -> str:
    names = Counter(facts["torch"].get("gpu_names", ()))
    return " + ".join(f"{count} x {name}" for name, count in names.items()) or "none"


def _limit(value: int | None) -> str:
    return "unlimited" if value is None else str(value)


def _shm(facts: Facts) -> str:
    return "none" if facts["shm"] is None else _size(facts["shm"]["total"])


def _count(found: list[Any] | None, unknown: str = "") -> str:
    return unknown if found is None else str(len(found) or "none")


def _size(value: float) -> str:
    return f"{value / GB:.1f} GB" if value >= GB else f"{value / 10**6:.0f} MB"


FACTS: tuple[Fact, ...] = (
    Fact("python", lambda facts: str(facts["python"]), "warning", "name the same interpreter: `python` in HOSTS"),
    Fact("torch", _torch_version, "error", "one group needs the same torch everywhere"),
    Fact("cuda", _torch("cuda"), "warning", "install torch for the same CUDA everywhere"),
    Fact("nccl", _torch("nccl"), "error", "NCCL talks to its own version only: install the same torch everywhere"),
    Fact("driver", lambda facts: str(facts["driver"] or "none"), "warning", "install the same driver everywhere"),
    Fact("gpus", _gpus, "warning", "the slowest GPU sets the pace; nproc_per_node of the host may be smaller"),
    Fact("code", lambda facts: str(facts["code"] or "synced by up"), "error", "set sync = true, or align the trees"),
    Fact("GPU processes", lambda facts: _count(facts["gpu_processes"], "cannot be told: no nvidia-smi"), None),
    Fact("left over", lambda facts: _count(facts["left_over"]), None),
    Fact("open files", lambda facts: _limit(facts["open_files"]), None),
    Fact("memlock", lambda facts: _limit(facts["memlock"]), None),
    Fact("/dev/shm", _shm, "info"),
    Fact("interpreter", lambda facts: str(facts["executable"]), None),
)  # fmt: skip
# Where nothing is synced, a launch compares the script alone.
SCRIPT = Fact("code", lambda facts: str(facts["script"]), "error", FACTS[6].hint)

# As many of them a launch has anyway.
QUICK = 4


def matrix(found: Preflight) -> list[Row]:
    """Return every fact with its values; variables that differ somewhere, or are set, each as a row."""
    rows = _rows(FACTS, found.facts) + (_spreads(found.facts) if found.facts else [])
    names = sorted({name for facts in found.facts.values() for name in facts["env"]})
    for name in names:
        values = {node: facts["env"].get(name, "(not set)") for node, facts in found.facts.items()}
        rows.append(_row(f"${name}", values, _env_severity(name)))
    return [row for row in rows if row.values]


def _rows(which: Iterable[Fact], by_node: Mapping[str, Facts]) -> list[Row]:
    return [
        _row(fact.name, {name: fact.read(facts) for name, facts in by_node.items()}, fact.severity) for fact in which
    ]


def _spreads(by_node: Mapping[str, Facts]) -> list[Row]:
    """Return what is another number on every node: the least and the most of it, and where."""
    error = max(facts["clock_error_ms"] for facts in by_node.values())
    homes = {node: [free for path, free in facts["disk_free"].items()] for node, facts in by_node.items()}
    return [
        _spread("clock", {node: facts["clock_offset_ms"] for node, facts in by_node.items()},
                lambda value: f"{value:+.1f} ms", f" to ours, ± {error:.1f} ms"),
        _spread("free in home", {node: free[0] for node, free in homes.items()}, _size),
        _spread("free for us", {node: free[-1] for node, free in homes.items()}, _size, " in SUPERVISOR_HOME"),
        _spread("free shm", {node: (facts["shm"] or {}).get("free") for node, facts in by_node.items()}, _size),
        _spread("load", {node: facts["load"] for node, facts in by_node.items()}, lambda value: f"{value:.1f}"),
    ]  # fmt: skip


def _spread(name: str, by_node: Mapping[str, float | None], text: Callable[[float], str], unit: str = "") -> Row:
    known = {node: value for node, value in by_node.items() if value is not None}
    values = []
    if known:
        low, high = min(known, key=known.__getitem__), max(known, key=known.__getitem__)
        least, most = text(known[low]), text(known[high])
        said = least if least == most else f"{least} ({low}) to {most} ({high})"
        values.append((said + unit, tuple(known)))
    if len(known) < len(by_node):
        values.append(("cannot be told", tuple(node for node in by_node if node not in known)))
    return Row(name, tuple(values), odd=False)


def quick(views: Iterable[HostView]) -> list[Finding]:
    """Return what is odd in the facts that a launch has anyway: versions, script, clocks, disk, /dev/shm."""
    by_node = {view.name: {**view.hello, "torch": view.engine, "script": view.script} for view in views}
    said = list(_differences(_rows((*FACTS[:QUICK], SCRIPT), by_node)))
    said += _clocks(by_node)
    for name, facts in by_node.items():
        said += _disk(facts["disk_free"], facts["home"], _of(name))
        said += _shm_free(facts["shm_free"], _of(name))
    return _together(said)


def _env_severity(name: str) -> Severity:
    return "info" if OWN_TO_A_HOST.fullmatch(name) else "warning"


def _row(name: str, by_node: Mapping[str, str], severity: Severity | None) -> Row:
    groups: dict[str, list[str]] = {}
    for node, value in by_node.items():
        groups.setdefault(value, []).append(node)
    ordered = sorted(groups.items(), key=lambda item: -len(item[1]))
    return Row(
        name, tuple((value, tuple(nodes)) for value, nodes in ordered), severity is not None and len(ordered) > 1
    )


def findings(found: Preflight) -> list[Finding]:
    """Return all that is odd, the worst first."""
    said = [
        *_differences(matrix(found)),
        *(finding for node, facts in found.facts.items() for finding in _of_node(node, facts)),
        *_clocks(found.facts),
        *_own_names(found.facts),
        *unreached(found),
        *collectives(found),
    ]
    order = {"error": 0, "warning": 1, "info": 2}
    return sorted(_together(said), key=lambda finding: order[finding.severity])


def _differences(rows: Iterable[Row]) -> Iterable[Finding]:
    facts = {fact.name: fact for fact in FACTS}
    for row in rows:
        if not row.odd:
            continue
        known = facts.get(row.fact)
        severity = known.severity if known is not None else _env_severity(row.fact.removeprefix("$"))
        hint = known.hint if known is not None else "set it for all in [job] env, or for one host in its env"
        most, nodes = row.values[0]
        for value, odd in row.values[1:]:
            if _BROKEN in (value[: len(_BROKEN)], most[: len(_BROKEN)]):
                # Told for the node itself.
                continue
            split = len(odd) == len(nodes)
            majority = f"{fold(nodes)} {'have' if len(nodes) > 1 else 'has'} {most}"
            which = odd if not split else (*nodes, *odd)
            yield Finding(
                severity or "info", row.fact, which, f"{row.fact} is {value} on {fold(odd)}; {majority}", hint
            )


def _of_node(node: str, facts: Facts) -> Iterable[Finding]:
    """Yield what is wrong with a node by itself."""
    odd = _of(node)
    if facts["torch"].get("error"):
        text = f"torch {_BROKEN}: {facts['torch']['error']}"
        yield odd("error", "torch", text, "install it, or name the interpreter that has it: `python` in HOSTS")
    for path, free in facts["disk_free"].items():
        yield from _disk(free, path, odd)
    yield from _shm_free(None if facts["shm"] is None else facts["shm"]["free"], odd)
    yield from _limits(facts, odd)
    if str(facts["code"]).startswith("no directory"):
        yield odd("error", "code", f"there is {facts['code']}", "set sync = true, or mount it there")
    if facts["gpu_processes"]:
        text = f"processes are on its GPUs already: {'; '.join(facts['gpu_processes'][:4])}"
        yield odd("warning", "GPU processes", text, "another job, or left over: look before you end them")
    if facts["left_over"]:
        pids = " ".join(str(one["pid"]) for one in facts["left_over"])
        names = " ".join(sorted({one["job"] for one in facts["left_over"]}))
        text = f"processes of {names} are there, whose agent is gone: pid {pids}"
        yield odd("warning", "left over", text, "look at them with ps, then end them with kill")
    if facts["live_jobs"]:
        text = f"jobs run there already: {' '.join(facts['live_jobs'])}"
        yield odd("info", "jobs", text, "`supervisor jobs` lists them")
    if facts["load"] > 2 * facts["cpu_count"]:
        yield odd("info", "load", f"load is {facts['load']:.0f} on {facts['cpu_count']} CPUs")


def _clocks(by_node: Mapping[str, Facts]) -> Iterable[Finding]:
    """Yield clocks that are off the median of the nodes (of one or two nodes: off ours)."""
    offsets = {node: facts["clock_offset_ms"] for node, facts in by_node.items()}
    usual, whose = (statistics.median(offsets.values()), "the others'") if len(offsets) > 2 else (0.0, "ours")
    for node, offset in offsets.items():
        if abs(offset - usual) - by_node[node]["clock_error_ms"] > CLOCK_WARNING_MS:
            text = f"its clock is {(offset - usual) / 1000:+.1f} s off {whose}"
            yield Finding("warning", "clock", (node,), text, "start chrony or systemd-timesyncd there")
    if abs(usual) > CLOCK_WARNING_MS:
        text = f"their clocks are {usual / 1000:+.1f} s off the one here"
        yield Finding("info", "clock", tuple(offsets), text, "times here are put right; set the clock of this machine")


def _own_names(by_node: Mapping[str, Facts]) -> Iterable[Finding]:
    """Yield nodes whose own name leads back to themselves alone: gloo gives its address to the others."""
    hint = "NCCL does not mind; for gloo set GLOO_SOCKET_IFNAME in [job] env, or mend /etc/hosts there"
    for node, facts in by_node.items() if len(by_node) > 1 else ():
        addresses = facts["own_addresses"]
        if not all(one.startswith(("127.", "::1")) for one in addresses) or "GLOO_SOCKET_IFNAME" in facts["env"]:
            continue
        what = f"resolves to {' '.join(addresses)} there" if addresses else "does not resolve there"
        severity: Severity = "info" if facts["torch"].get("gpu_names") else "warning"
        yield Finding(severity, "own name", (node,), f"its own name {what}", hint)


def _of(node: str) -> Callable[..., Finding]:
    """Return what makes findings about one node."""

    def odd(severity: Severity, fact: str, text: str, hint: str = "") -> Finding:
        return Finding(severity, fact, (node,), text, hint)

    return odd


def _disk(free: int | None, path: str, odd: Callable[..., Finding]) -> Iterable[Finding]:
    if free is None:
        yield odd("warning", "disk", f"{path} is not there", "scripts that write below their home will fail")
    elif free < DISK_WARNING:
        hint = "`supervisor clean` removes the logs of finished jobs"
        yield odd("error" if free < DISK_ERROR else "warning", "disk", f"only {_size(free)} free at {path}", hint)


def _shm_free(free: int | None, odd: Callable[..., Finding]) -> Iterable[Finding]:
    if free is not None and free < SHM_WARNING:
        hint = "DataLoader workers and NCCL need it: docker run --shm-size, or mount -o remount,size=…"
        yield odd("warning", "/dev/shm", f"only {_size(free)} free in /dev/shm", hint)


def _limits(facts: Facts, odd: Callable[..., Finding]) -> Iterable[Finding]:
    files, memlock = facts["open_files"], facts["memlock"]
    if files is not None and files < OPEN_FILES_WARNING:
        yield odd("warning", "open files", f"at most {files} open files", "ulimit -n in `prelude`, or limits.conf")
    if memlock is not None and facts["torch"].get("gpu_names"):
        yield odd("warning", "memlock", f"memlock is limited to {_size(memlock)}", "InfiniBand needs it unlimited")


def _together(said: Iterable[Finding]) -> list[Finding]:
    """Return findings that say the same of several nodes as one."""
    merged: dict[tuple[Severity, str, str, str], tuple[str, ...]] = {}
    for one in said:
        key = (one.severity, one.fact, one.text, one.hint)
        merged[key] = tuple(dict.fromkeys((*merged.get(key, ()), *one.nodes)))
    return [Finding(severity, fact, nodes, text, hint) for (severity, fact, text, hint), nodes in merged.items()]
