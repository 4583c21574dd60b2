"""Inventories other than hosts.toml: a list of hosts, an MPI or DeepSpeed hostfile, a Slurm or PBS allocation.

In: the text of a command line or a file, an allocation's environment. Out: the document that hosts.toml would have. To
add a source, add a function and a line to SOURCES: its option, `hosts --from` and the hints follow.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import TypedDict

from remote_agent.text.names import read_number
from supervisor.inventory.model import InventoryError
from supervisor.inventory.pattern import PatternError, expand, fold, split

HostEntry = TypedDict(
    "HostEntry",
    {"name": str, "ssh": str, "user": str, "port": int, "nproc_per_node": int, "env": dict[str, str]},
    total=False,
)
Document = TypedDict(
    "Document", {"job": Mapping[str, object], "defaults": dict[str, str], "hosts": list[HostEntry]}, total=False
)
# NFS and the parallel file systems of supercomputers.
NETWORK_DISKS = frozenset({"nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "wekafs", "panfs", "afs", "cifs", "smb3"})
_TARGET = re.compile(r"(?:(?P<user>[^@:\s]+)@)?(?P<name>[^@:\s]+)(?::(?P<port>[0-9]{1,5}))?")
# OpenMPI and DeepSpeed write `host slots=8 max_slots=8`; MPICH and Intel MPI write `host:8`.
_HOSTFILE_LINE = re.compile(r"(?P<name>[^\s:]+)(?::(?P<count>[0-9]{1,9}))?(?P<rest>(?:\s+[\w-]+\s*=\s*\S+)*)")
_SLOTS = re.compile(r"\bslots\s*=\s*(\S+)")
_TASKS = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")


def from_hosts(text: str) -> Document:
    """Read `a,b`, `gpu[01-04]`, `user@host:port`; raises InventoryError."""
    try:
        words = [word.strip() for word in split(text)]
    except PatternError as error:
        raise InventoryError(f"--hosts: {error}", "write --hosts gpu[01-04], or --hosts a,b") from error
    hosts = []
    for word in words:
        match = _TARGET.fullmatch(word)
        if match is None:
            raise InventoryError(f"--hosts {text}: {word!r} is not a host", "write [user@]host[:port], as for ssh")
        entry: HostEntry = {"name": match["name"]}
        if match["user"]:
            entry["user"] = match["user"]
        if match["port"]:
            entry["port"] = read_number(match["port"])
        hosts.append(entry)
    return {"hosts": hosts}


def from_hostfile(text: str, name: str) -> Document:
    """Read a hostfile called `name`; the slots of a host that is listed twice are added. Raises InventoryError."""
    slots: dict[str, int | None] = {}
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.partition("#")[0].strip()
        if not line:
            continue
        match = _HOSTFILE_LINE.fullmatch(line)
        if match is None:
            raise InventoryError(f"{name}:{number}: cannot read {line!r}", "write: host slots=8")
        count = _slots(match, f"{name}:{number}")
        known = slots.get(match["name"])
        slots[match["name"]] = count if known is None else known + (count or 1)
    if not slots:
        raise InventoryError(f"{name}: it has no host", "write one per line: host slots=8")
    return {"hosts": [_entry(host, count) for host, count in slots.items()]}


def read_hostfile(path: str) -> Document:
    """Read a hostfile; raises InventoryError."""
    try:
        return from_hostfile(Path(path).read_text(), path)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise InventoryError(f"--hostfile {path}: cannot be read: {reason}") from error


def _slots(match: re.Match[str], where: str) -> int | None:
    slots = _SLOTS.search(match["rest"])
    text = slots[1] if slots is not None else match["count"]
    if text is None:
        return None
    if not text.isdecimal() or read_number(text) < 1:
        raise InventoryError(f"{where}: slots={text}: must be a number above 0", "leave it out for one rank per GPU")
    return read_number(text)


def _entry(name: str, nproc: int | None) -> HostEntry:
    return {"name": name} if nproc is None else {"name": name, "nproc_per_node": nproc}


def from_slurm(environ: Mapping[str, str], via: str = "auto") -> Document:
    """Read the environment of an allocation (sbatch, salloc): nodes, python3, and GPUs or tasks on each as ranks.

    `via`: how the nodes are reached. Raises InventoryError outside an allocation. The variables are described in
    sbatch(1), OUTPUT ENVIRONMENT VARIABLES.
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
    # A login on a node does not have the environment that is active here.
    python = shutil.which("python3", path=environ.get("PATH", ""))
    defaults = {"via": via} if python is None else {"python": python, "via": via}
    entries: list[HostEntry] = []
    for count, group in itertools.groupby(zip(counts, names, strict=True), key=itemgetter(0)):
        entries += [_entry(name, count) for name in _patterns([name for _, name in group])]
    return {"defaults": defaults, "hosts": entries}


def from_allocation(via: str) -> Document:
    """Read the Slurm allocation of this process; raises InventoryError outside one."""
    return _on_shared_disks(from_slurm(os.environ, via))


def from_pbs() -> Document:
    """Read the nodes of the PBS allocation of this process; raises InventoryError outside one.

    qsub(1): the file PBS_NODEFILE has a line for each chunk of a node.
    """
    path = os.environ.get("PBS_NODEFILE")
    if not path:
        raise InventoryError("--pbs: PBS_NODEFILE is not set", "run inside an allocation: qsub -I, or a job script")
    return _on_shared_disks(read_hostfile(path))


def _on_shared_disks(document: Document) -> Document:
    """Give each node its own root in a home directory that all nodes share; a shared work tree is not copied."""
    if is_shared(Path.home()):
        document = with_own_roots(document, f"{Path.home()}/.supervisor/nodes")
    if is_shared(Path.cwd()):
        document["job"] = {"sync": False}
    return document


def is_shared(directory: Path) -> bool:
    """Return whether other hosts see the directory: /proc/self/mounts names the type of its file system."""
    best = ("", "")
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _device, mount, kind = line.split()[:3]
        if directory.is_relative_to(mount) and len(mount) >= len(best[0]):
            best = (mount, kind)
    return best[1] in NETWORK_DISKS


def with_own_roots(document: Document, shared: str) -> Document:
    """Set a SUPERVISOR_HOME for each host in a shared directory: nodes must not share one."""
    hosts: list[HostEntry] = [
        {**entry, "name": name, "env": {"SUPERVISOR_HOME": f"{shared}/{name}"}}
        for entry in document["hosts"]
        for name in expand(entry["name"])
    ]
    return {**document, "hosts": hosts}


def _patterns(names: list[str]) -> list[str]:
    """Return one pattern for all names if it keeps their order, which is the order of ranks."""
    pattern = fold(names)
    return [pattern] if expand(pattern) == names else names


def gpus_per_node(environ: Mapping[str, str]) -> int | None:
    """Return the number of GPUs that an allocation has on each node, None if its environment has none."""
    for name in ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"):
        # A type may precede it: h100:8.
        text = environ.get(name, "").rpartition(":")[2]
        if text.isdecimal() and read_number(text) > 0:
            return read_number(text)
    return None


def _tasks(environ: Mapping[str, str], nodes: int) -> list[int | None]:
    """Return the tasks of each node from `2(x3),1`; None for one task per node, with which launchers are started."""
    counts: list[int | None] = []
    for part in environ.get("SLURM_TASKS_PER_NODE", "").split(","):
        match = _TASKS.fullmatch(part.strip())
        times = int(match[2] or 1) if match is not None else 0
        if match is None or len(counts) + times > nodes:
            return [None] * nodes
        counts += [int(match[1])] * times
    return counts if len(counts) == nodes and any(count != 1 for count in counts) else [None] * nodes


def to_toml(document: Document, comment: str) -> str:
    """Return the text of a hosts.toml that loads back to the same hosts."""
    lines = [f"# {comment}", ""]
    tables: list[tuple[str, Mapping[str, object]]] = [
        ("[job]", document.get("job", {})),
        ("[defaults]", document.get("defaults", {})),
        *(("[[hosts]]", entry) for entry in document["hosts"]),
    ]
    for head, table in tables:
        lines += [head, *(f"{key} = {_value(value)}" for key, value in table.items()), ""] if table else []
    return "\n".join(lines)


def _value(value: object) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_value(one)}" for key, one in value.items()) + " }"
    # Text, numbers, true and false, and lists of them are written alike in JSON and TOML.
    return json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True)
class InventorySource:
    """One option in the place of HOSTS."""

    name: str
    """The name of the option, and of the source after `supervisor hosts --from`."""
    metavar: str
    """The name of its argument; empty: it takes none."""
    help: str
    read: Callable[[str], Document]
    """The function that reads its argument; raises InventoryError."""
    variable: str = ""
    """The variable that is set inside an allocation of which it reads the nodes; empty: it reads no allocation."""
    number: str = ""
    """The variable with the number of that allocation."""
    scheduler: str = ""
    """What allocates."""

    @property
    def option(self) -> str:
        """The option of the command line."""
        return f"--{self.name}"


SOURCES = (
    InventorySource("hosts", "A,B", "hosts by name: a,b or gpu[01-04] or user@host:port", from_hosts),
    InventorySource("hostfile", "FILE", "an MPI or DeepSpeed hostfile: host slots=8", read_hostfile),
    InventorySource(
        "slurm",
        "",
        "the nodes of the current Slurm allocation, over SSH, or over srun where SSH is refused",
        lambda _: from_allocation("auto"),
        "SLURM_JOB_NODELIST",
        "SLURM_JOB_ID",
        "Slurm",
    ),
    InventorySource(
        "srun",
        "",
        "like --slurm, over srun without trying SSH",
        lambda _: from_allocation("srun"),
        "SLURM_JOB_NODELIST",
        "SLURM_JOB_ID",
        "Slurm",
    ),
    InventorySource(
        "pbs",
        "",
        "the nodes of the current PBS allocation, over SSH",
        lambda _: from_pbs(),
        "PBS_NODEFILE",
        "PBS_JOBID",
        "PBS",
    ),
)
