"""Inventories that are not hosts.toml: a list of hosts, an MPI or DeepSpeed hostfile, a Slurm allocation. Pure.

In: the text of a command line or a file, an allocation's environment. Out: the document that hosts.toml would hold.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from typing import Any

from supervisor.inventory.model import InventoryError
from supervisor.inventory.pattern import PatternError, expand, fold, split

Document = dict[str, Any]
_TARGET = re.compile(r"(?:(?P<user>[^@:\s]+)@)?(?P<name>[^@:\s]+)(?::(?P<port>\d+))?")
# OpenMPI and DeepSpeed: `host slots=8 max_slots=8`; MPICH and Intel MPI: `host:8`.
_HOSTFILE_LINE = re.compile(r"(?P<name>[^\s:]+)(?::(?P<count>\d+))?(?P<rest>(?:\s+[\w-]+\s*=\s*\S+)*)")
_SLOTS = re.compile(r"\bslots\s*=\s*(\S+)")
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def from_hosts(text: str) -> Document:
    """Read `a,b`, `gpu[01-04]`, `user@host:port`; raises InventoryError."""
    try:
        words = [word.strip() for word in split(text)]
    except PatternError as error:
        raise InventoryError(f"--hosts: {error}", "write --hosts gpu[01-04], or --hosts a,b") from error
    hosts = []
    for word in words:
        found = _TARGET.fullmatch(word)
        if found is None:
            raise InventoryError(f"--hosts {text}: {word!r} is not a host", "write [user@]host[:port], as for ssh")
        entry: Document = {"name": found["name"]}
        if found["user"]:
            entry["user"] = found["user"]
        if found["port"]:
            entry["port"] = int(found["port"])
        hosts.append(entry)
    return {"hosts": hosts}


def from_hostfile(text: str, name: str) -> Document:
    """Read a hostfile called `name`; a host that stands there twice has the slots of both. Raises InventoryError."""
    slots: dict[str, int | None] = {}
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.partition("#")[0].strip()
        if not line:
            continue
        found = _HOSTFILE_LINE.fullmatch(line)
        if found is None:
            raise InventoryError(f"{name}:{number}: {line!r} is not understood", "write: host slots=8")
        count = _slots(found, f"{name}:{number}")
        known = slots.get(found["name"])
        slots[found["name"]] = count if known is None else known + (count or 1)
    if not slots:
        raise InventoryError(f"{name}: no host in it", "write one a line: host slots=8")
    return {"hosts": [_entry(host, count) for host, count in slots.items()]}


def _slots(found: re.Match[str], where: str) -> int | None:
    given = _SLOTS.search(found["rest"])
    text = given[1] if given is not None else found["count"]
    if text is None:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise InventoryError(f"{where}: slots={text}: must be a number above 0", "leave it out for one rank per GPU")
    return int(text)


def _entry(name: str, nproc: int | None) -> Document:
    return {"name": name} if nproc is None else {"name": name, "nproc_per_node": nproc}


def from_slurm(environ: Mapping[str, str], via: str = "auto") -> Document:
    """Read the environment of an allocation (sbatch, salloc): nodes, python3, and GPUs or tasks on each as ranks.

    `via`: how the nodes are reached. Raises InventoryError outside of an allocation. Names of variables: sbatch(1),
    OUTPUT ENVIRONMENT VARIABLES.
    """
    nodes = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    if not nodes:
        raise InventoryError("--slurm: SLURM_JOB_NODELIST is not set", "run inside an allocation: salloc, or sbatch")
    try:
        names = expand(nodes)
    except PatternError as error:
        raise InventoryError(f"--slurm: SLURM_JOB_NODELIST: {error}") from error
    gpus = gpus_per_node(environ)
    tasks = [None] * len(names) if gpus else _tasks(environ, len(names))
    counts = [gpus or count for count in tasks]
    groups: list[tuple[int | None, list[str]]] = []
    for name, count in zip(names, counts, strict=True):
        if groups and groups[-1][0] == count:
            groups[-1][1].append(name)
        else:
            groups.append((count, [name]))
    # A login on a node knows nothing of the environment that is active here, which srun takes along.
    python = shutil.which("python3", path=environ.get("PATH", ""))
    defaults = {"via": via} if python is None else {"python": python, "via": via}
    entries = [_entry(name, count) for count, group in groups for name in _patterns(group)]
    return {"defaults": defaults, "hosts": entries}


def with_own_roots(document: Document, shared: str) -> Document:
    """Give each host a root of its own in a directory that all of them see: a job's files there are one node's."""
    hosts = [
        {**entry, "name": name, "env": {"SUPERVISOR_HOME": f"{shared}/{name}"}}
        for entry in document["hosts"]
        for name in expand(entry["name"])
    ]
    return {**document, "hosts": hosts}


def _patterns(names: list[str]) -> list[str]:
    """Return one pattern for all, where it keeps their order: ranks follow it."""
    pattern = fold(names)
    return [pattern] if expand(pattern) == names else names


def gpus_per_node(environ: Mapping[str, str]) -> int | None:
    """Return the GPUs that an allocation has on each node, None where its environment tells of none."""
    for name in ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"):
        # Also h100:8.
        text = environ.get(name, "").rpartition(":")[2]
        if text.isdecimal() and int(text) > 0:
            return int(text)
    return None


def _tasks(environ: Mapping[str, str], nodes: int) -> list[int | None]:
    """Return the tasks of each node of `2(x3),1`; one task a node is how a launcher is started, and says nothing."""
    counts: list[int | None] = []
    for part in environ.get("SLURM_TASKS_PER_NODE", "").split(","):
        found = _TASKS.fullmatch(part.strip())
        if found is None:
            return [None] * nodes
        counts += [int(found[1])] * int(found[2] or 1)
    return counts if len(counts) == nodes and any(count != 1 for count in counts) else [None] * nodes


def to_toml(document: Document, comment: str) -> str:
    """Return the text of a hosts.toml that loads back to the same hosts."""
    lines = [f"# {comment}", ""]
    tables = [(f"[{name}]", document[name]) for name in ("job", "defaults") if document.get(name)]
    for head, table in [*tables, *(("[[hosts]]", entry) for entry in document["hosts"])]:
        lines += [head, *(f"{key} = {_value(value)}" for key, value in table.items()), ""]
    return "\n".join(lines)


def _value(value: object) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_value(one)}" for key, one in value.items()) + " }"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int) else '"' + str(value).replace("\\", "\\\\").replace('"', '\\"') + '"'
