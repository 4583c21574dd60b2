"""Which node differs from the others, and what would stop a job: a pure reading of a preflight.

In: facts by node, who reaches whom, small all-reduces. Out: a matrix of facts, and findings with what to do.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from supervisor.inventory.pattern import fold
from supervisor.session.preflight import Preflight, bad_groups

if TYPE_CHECKING:
    from supervisor.session.view import HostView

Facts = Mapping[str, Any]
Severity = Literal["error", "warning", "info"]
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
class Finding:
    """One thing that is odd: `error` would stop a job, `warning` may, `info` is worth knowing."""

    severity: Severity
    fact: str
    nodes: tuple[str, ...]
    text: str
    hint: str = ""


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
    Fact("open files", lambda facts: _limit(facts["open_files"]), None),
    Fact("memlock", lambda facts: _limit(facts["memlock"]), None),
    Fact("/dev/shm", _shm, "info"),
    Fact("interpreter", lambda facts: str(facts["executable"]), None),
)  # fmt: skip

# As many of them a launch has anyway.
QUICK = 4


def matrix(found: Preflight) -> list[Row]:
    """Return every fact with its values; variables that differ somewhere, or are set, each as a row."""
    rows = _rows(FACTS, found.facts)
    names = sorted({name for facts in found.facts.values() for name in facts["env"]})
    for name in names:
        values = {node: facts["env"].get(name, "(not set)") for node, facts in found.facts.items()}
        rows.append(_row(f"${name}", values, _env_severity(name)))
    return [row for row in rows if row.values]


def _rows(which: Iterable[Fact], by_node: Mapping[str, Facts]) -> list[Row]:
    return [
        _row(fact.name, {name: fact.read(facts) for name, facts in by_node.items()}, fact.severity) for fact in which
    ]


def quick(views: Iterable[HostView]) -> list[Finding]:
    """Return what is odd in the facts that a launch has anyway: versions, disk, /dev/shm."""
    by_node = {view.name: {**view.hello, "torch": view.engine} for view in views}
    said = list(_differences(_rows(FACTS[:QUICK], by_node)))
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
        *_unreached(found),
        *_collectives(found),
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
    if abs(facts["clock_offset_ms"]) - facts["clock_error_ms"] > CLOCK_WARNING_MS:
        text = f"its clock is {facts['clock_offset_ms'] / 1000:+.1f} s off ours"
        yield odd("warning", "clock", text, "start chrony or systemd-timesyncd there")
    if facts["gpu_processes"]:
        text = f"processes are on its GPUs already: {'; '.join(facts['gpu_processes'][:4])}"
        yield odd("warning", "GPU processes", text, "another job, or left over: look before you end them")
    if facts["live_jobs"]:
        text = f"jobs run there already: {' '.join(facts['live_jobs'])}"
        yield odd("info", "jobs", text, "`supervisor jobs` lists them")
    if facts["load"] > 2 * facts["cpu_count"]:
        yield odd("info", "load", f"load is {facts['load']:.0f} on {facts['cpu_count']} CPUs")


def _of(node: str) -> Callable[..., Finding]:
    """Return what makes findings about one node."""

    def odd(severity: Severity, fact: str, text: str, hint: str = "") -> Finding:
        return Finding(severity, fact, (node,), text, hint)

    return odd


def _disk(free: int, path: str, odd: Callable[..., Finding]) -> Iterable[Finding]:
    if free < DISK_WARNING:
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


def _unreached(found: Preflight) -> Iterable[Finding]:
    nodes = [name for name in found.facts if name in found.reach]
    hint = "open the ports between the nodes (all of them: each group takes a free one), or correct `address` in HOSTS"
    for target in nodes:
        errors = {
            name: found.reach[name][target]["error"] for name in nodes if "error" in found.reach[name].get(target, {})
        }
        address = found.addresses[target]
        own = "" if not address.startswith("127.") else f"; {address} is an address that every machine has for itself"
        if errors and len(errors) == len(nodes) - 1:
            text = f"no other node reaches it at {address}: {next(iter(errors.values()))}{own}"
            yield Finding("error", "reach", (target,), text, hint)
        else:
            for name, error in errors.items():
                yield Finding(
                    "error", "reach", (name, target), f"{name} does not reach {target} at {address}: {error}{own}", hint
                )


def _collectives(found: Preflight) -> Iterable[Finding]:
    """Yield the nodes that do badly even with a good partner; of other groups that do badly, what can be told."""
    groups = found.collectives or []
    bad = bad_groups(groups)
    good = {name for group in groups if group not in bad for name in group["nodes"]}
    culprits: dict[str, Mapping[str, Any]] = {}
    for group in bad:
        others = [name for name in group["nodes"] if name not in good]
        if len(others) == 1:
            culprits[others[0]] = group
    for name, group in culprits.items():
        text = f"its all-reduce does badly with every partner: {_outcome(group)}"
        yield Finding(
            _weight(group), "collectives", (name,), text, "take it out, or mark it `spare`, until it is mended"
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


def _together(said: Iterable[Finding]) -> list[Finding]:
    """Return findings that say the same of several nodes as one."""
    merged: dict[tuple[Severity, str, str, str], tuple[str, ...]] = {}
    for one in said:
        key = (one.severity, one.fact, one.text, one.hint)
        merged[key] = tuple(dict.fromkeys((*merged.get(key, ()), *one.nodes)))
    return [Finding(severity, fact, nodes, text, hint) for (severity, fact, text, hint), nodes in merged.items()]
