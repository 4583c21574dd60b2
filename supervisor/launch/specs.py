"""The description of a job, from the inventory and the command line.

In: an Inventory and UpOptions. Out: a Plan: the JobSpec and the hosts to bring up; the work tree. Looks for the script,
otherwise pure.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remote_agent.text.names import count
from remote_agent.wire import JOB_NAME, JobSpec, NodeSpec, Rendezvous
from supervisor.errors import UsageError
from supervisor.inventory.model import ENV_NAME, NPROC_WORDS, read_nproc
from supervisor.inventory.targets import TargetError, check_host
from supervisor.link.view import LaunchPlan
from supervisor.ssh import HostError
from supervisor.ssh.sync import Tree, scan, tree_name

if TYPE_CHECKING:
    from supervisor.inventory import Host, Inventory, JobDefaults

# Crockford's base 32: without i, l, o, u, which are easily misread.
LETTERS = "0123456789abcdefghjkmnpqrstvwxyz"
LONGEST_STEM = 40
# These fields of the description are made from more than one value.
MADE = {
    "job", "script", "nodes", "tree", "workdir", "env", "min_nodes", "max_nodes", "hooks", "rendezvous", "created_ns",
}  # fmt: skip
# An error names this many files if a tree differs.
SHOWN = 3


@dataclass(frozen=True)
class UpOptions:
    """The options of `up`; None: not given."""

    script: str
    args: tuple[str, ...] = ()
    kind: str = "script"
    job: str | None = None
    nnodes: str | None = None
    nproc_per_node: str | None = None
    max_restarts: int | None = None
    env: dict[str, str] = field(default_factory=dict)
    sync: bool = True
    force: bool = False
    """Run from a tree from which another job runs."""
    standalone: bool = False
    local_addr: str | None = None
    rendezvous: Rendezvous | None = None
    """The rendezvous without run_id and nnodes, which the plan fills in."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the job's description, under the same names."""


def make_plan(inventory: Inventory, options: UpOptions, cwd: Path) -> LaunchPlan:
    """Return what to launch; raises UsageError before anything is started."""
    if options.standalone and inventory.path is not None:
        raise UsageError(f"--standalone means this machine alone, and {inventory.path} names hosts", "leave one out")
    defaults = inventory.job
    syncs = inventory.path is not None and defaults.sync and options.sync
    if syncs:
        check_workdir(inventory)
    if defaults.environment:
        check_environment(defaults.workdir if inventory.path is not None else cwd, defaults.environment, syncs)
    script = locate_script(options, defaults.workdir, cwd, syncs=syncs, local=inventory.path is None)
    strangers = options.rendezvous is not None
    hosts, min_nodes, max_nodes = choose_hosts(inventory, options.nnodes, strangers=strangers)
    job = check_job(options.job) if options.job is not None else make_job_name(script)
    nproc = check_nproc(options.nproc_per_node, "--nproc-per-node") if options.nproc_per_node is not None else None
    if options.max_restarts is not None and options.max_restarts < 0:
        raise UsageError(f"--max-restarts {options.max_restarts}: must be 0 or more")
    spec = JobSpec(
        job=job,
        script=script,
        nodes=tuple(node_spec(_at(host, options, inventory), nproc) for host in hosts),
        # A script's files stay in its tree: another script, or a job with a name of its own, does not find them.
        tree=_tree_names(defaults.workdir, script, job)[options.job is not None] if syncs else None,
        workdir="." if syncs else str(defaults.workdir if inventory.path is not None else cwd),
        env={**defaults.env, **options.env},
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        hooks=inventory.hooks,
        rendezvous=make_rendezvous(options, job, len(hosts)),
        created_ns=time.time_ns(),
        **_settings(defaults, options),
    )
    return LaunchPlan(spec, tuple(host.name for host in hosts), shares_tree=options.force)


def check_workdir(inventory: Inventory) -> None:
    """Raise UsageError if the directory that is to be copied to the nodes does not exist."""
    if not os.path.isdir(inventory.job.workdir):
        text = f"{inventory.path}: [job].workdir: {inventory.job.workdir}: there is no such directory"
        raise UsageError(text, "name the directory of the script; relative paths begin at the inventory's directory")


def check_environment(workdir: Path, name: str, syncs: bool) -> None:
    """Raise UsageError if a lock file is not here, or what belongs to it; a tree that is not synced is not here."""
    if not syncs and not os.path.isdir(workdir):
        return
    needed = [name, os.path.join(os.path.dirname(name), "pyproject.toml")] if name.endswith("uv.lock") else [name]
    for path in needed:
        if not (workdir / path).is_file():
            hint = "uv lock writes it" if path == name and name.endswith("uv.lock") else "paths begin at the workdir"
            raise UsageError(f"environment: there is no {path} in {workdir}", hint)


def _tree_names(workdir: Path, script: str, job: str) -> tuple[str, str]:
    """Return the names on the nodes of a script's tree and of that of a job with a name of its own."""
    return tree_name(workdir, f"script {script}"), tree_name(workdir, f"job {job}")


def is_of_launch(inventory: Inventory, job: str, script: str, tree: str | None) -> bool:
    """Tell whether a job's tree was copied from this inventory's directory, by this user: its name is made of both."""
    return tree in _tree_names(inventory.job.workdir, script, job)


def _settings(defaults: JobDefaults, options: UpOptions) -> dict[str, Any]:
    """Return the fields of the description that its sources have under the same name; the options decide."""
    names = {one.name for one in dataclasses.fields(JobSpec)} - MADE
    values = [(name, getattr(source, name, None)) for source in (defaults, options) for name in names]
    return {name: value for name, value in [*values, *options.settings.items()] if value is not None}


def make_rendezvous(options: UpOptions, job: str, hosts: int) -> Rendezvous | None:
    """Return torch's rendezvous, if torch forms the group; nodes outside the inventory may fill up --nnodes."""
    if options.rendezvous is None:
        return None
    nnodes = options.nnodes if options.nnodes is not None and parse_nnodes(options.nnodes)[1] > hosts else ""
    return dataclasses.replace(options.rendezvous, run_id=job, nnodes=nnodes)


def check_job(name: str) -> str:
    """Return a valid job name; raises UsageError."""
    if not JOB_NAME.fullmatch(name) or name.endswith(".toml"):
        raise UsageError(
            f"job name {name!r}: 1 to 64 letters, digits, dots, dashes or underscores, a letter or digit first, "
            "and not ending in .toml"
        )
    return name


def make_job_name(script: str) -> str:
    """Return `<script stem>-<4 letters>`."""
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(script).stem)[:LONGEST_STEM].strip("-._") or "job"
    return f"{stem}-{''.join(secrets.choice(LETTERS) for _ in range(4))}"


def check_nproc(value: str, where: str) -> str:
    """Return auto, a kind of device or a positive number as text; raises UsageError."""
    if text := read_nproc(value):
        return text
    words = ", ".join(NPROC_WORDS)
    raise UsageError(f"{where} {value!r}: must be {words}, another torch device such as npu, or a number")


def check_env(pairs: list[str]) -> dict[str, str]:
    """Return the variables of `--env K=V` (`--env K`: its value here); raises UsageError. Errors never show values."""
    env: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not ENV_NAME.fullmatch(name):
            raise UsageError(f"--env {name!r}: not a valid variable name", "write --env NAME=VALUE")
        if not equals:
            if name not in os.environ:
                raise UsageError(f"--env {name}: not set here", f"write --env {name}=VALUE")
            value = os.environ[name]
        env[name] = value
    return env


def parse_nnodes(text: str) -> tuple[int, int]:
    """Return (min, max) of torchrun's N or MIN:MAX; raises UsageError."""
    parts = text.split(":")
    if len(parts) > 2 or not all(part.strip().isdecimal() for part in parts):
        raise UsageError(f"--nnodes {text!r}: must be N or MIN:MAX")
    low, high = int(parts[0]), int(parts[-1])
    if low < 1 or high < low:
        raise UsageError(f"--nnodes {text!r}: MIN must be 1 or more, and MAX at least MIN")
    return low, high


def choose_hosts(
    inventory: Inventory, nnodes: str | None, *, strangers: bool = False
) -> tuple[tuple[Host, ...], int, int]:
    """Return the hosts to bring up (spares too), min_nodes and max_nodes; raises UsageError.

    `strangers`: nodes outside the inventory may join, so the inventory need not have all of them.
    """
    regular = [host for host in inventory.hosts if not host.spare]
    where = str(inventory.path or "this machine alone")
    if nnodes is not None:
        low, high = parse_nnodes(nnodes)
    else:
        low = inventory.job.min_nodes or len(regular)
        high = inventory.job.max_nodes or max(low, len(regular))
    if strangers:
        low = min(low, len(inventory.hosts))
    if low > len(inventory.hosts):
        what = f"--nnodes {nnodes}" if nnodes is not None else f"min_nodes = {low}"
        hint = "add hosts, or lower it" if inventory.path else "name an inventory: supervisor up hosts.toml …"
        raise UsageError(f"{what}: {where} has {count(len(inventory.hosts), 'host')}", hint)
    if high < low:
        raise UsageError(f"{where}: max_nodes = {high} is below min_nodes = {low}")
    taken = {host.name for host in regular[:high]}
    hosts = tuple(host for host in inventory.hosts if host.spare or host.name in taken)
    return hosts, low, high


def _at(host: Host, options: UpOptions, inventory: Inventory) -> Host:
    """Return the host; without an inventory, with the address of --local-addr."""
    if inventory.path is not None or options.local_addr is None:
        return host
    try:
        return dataclasses.replace(host, address=check_host(options.local_addr))
    except TargetError as error:
        raise UsageError(f"--local-addr: {error}", error.hint) from error


def node_spec(host: Host, nproc: str | None = None) -> NodeSpec:
    """Return the node's part of the job description; `nproc`: the command line's value for all hosts."""
    return NodeSpec(
        name=host.name,
        address=host.address,
        nproc_per_node=nproc if nproc is not None else host.nproc_per_node,
        spare=host.spare,
        env=dict(host.env),
        python=host.python if host.apart else "",
        wrap=host.wrap,
    )


def merge_host(spec: JobSpec, host: Host, inventory: Inventory) -> JobSpec:
    """Return the description with this host among the nodes, in the inventory's order."""
    if spec.node(host.name) is not None:
        return spec
    order = {one.name: place for place, one in enumerate(inventory.hosts)}
    added = dataclasses.replace(node_spec(host), spare=False)
    nodes = sorted([*spec.nodes, added], key=lambda node: order.get(node.name, len(order)))
    return dataclasses.replace(spec, nodes=tuple(nodes))


def tree_for(inventory: Inventory, spec: JobSpec, stop: threading.Event | None = None) -> Tree | None:
    """Read the work tree under the job's name for it, None if it is not synced; raises UsageError, SyncError.

    This may take seconds; setting `stop` ends it.
    """
    if spec.tree is None:
        return None
    job = inventory.job
    tree = scan(job.workdir, job.exclude, job.sync_limit_mb * 1024 * 1024, stop)
    needed = {"environment": spec.environment}
    if spec.kind in ("script", "run_path"):
        needed["script"] = spec.script
    sent = {file.path for file in tree.files}
    for what, name in needed.items():
        here = job.workdir / name
        if what == "environment" and name and not here.is_file():
            raise UsageError(f"environment {name} is not in the work tree {job.workdir}", "restore the file")
        if name and name not in sent and here.is_file() and not here.is_symlink():
            raise UsageError(
                f"{what} {name} is excluded from the work tree {job.workdir} by `exclude` or a .gitignore",
                "remove the pattern that excludes it",
            )
    return dataclasses.replace(tree, name=spec.tree)


async def read_tree(inventory: Inventory, spec: JobSpec) -> Tree | None:
    """Read the work tree in a thread that ends with its caller; raises UsageError, SyncError."""
    stop = threading.Event()
    try:
        return await asyncio.to_thread(tree_for, inventory, spec, stop)
    finally:
        stop.set()


async def read_tree_again(inventory: Inventory, spec: JobSpec, node: str) -> Tree | None:
    """Read the work tree for another node of a job; raises HostError if it differs from what the others run."""
    tree = await read_tree(inventory, spec)
    if tree is None or spec.tree_digest in ("", tree.digest):
        return tree
    newer = [file.path for file in tree.files if file.mtime_ns > spec.created_ns]
    more = f" and {len(newer) - SHOWN} more" if len(newer) > SHOWN else ""
    changed = f" (newer than it: {', '.join(newer[:SHOWN])}{more})" if newer else ""
    raise HostError(
        node,
        "sync",
        f"it is missing the work tree of {spec.job} and would run different code: {inventory.job.workdir} "
        f"has changed since the launch or the last sync{changed}",
        "restore the files and add the node, or copy the new files to all nodes: restart --sync",
    )


def locate_script(options: UpOptions, workdir: Path, cwd: Path, *, syncs: bool, local: bool) -> str:
    """Return the script as the workers name it; raises UsageError if it does not exist."""
    script = options.script
    if options.kind == "module" or (options.kind == "binary" and "/" not in script):
        return script
    if local:
        _check_exists(cwd / script, script, f"in {cwd}")
        return script
    if not syncs and not os.path.isdir(workdir):
        # The tree is only on the nodes.
        return script
    place = next((path for path in (cwd / script, workdir / script) if os.path.exists(path)), workdir / script)
    looked = f"in {cwd}" if cwd == workdir else f"in {cwd} or in the workdir {workdir}"
    _check_exists(place, script, looked)
    inside = _inside(place, workdir)
    if inside is not None:
        # A program without a slash would be searched for in PATH.
        return f"./{inside}" if options.kind == "binary" and "/" not in inside else inside
    if syncs:
        raise UsageError(
            f"script {place} is outside the workdir {workdir}, which is synced to the nodes",
            "set `workdir` in [job], or use --no-sync if the nodes already have it",
        )
    return str(place)


def _check_exists(path: Path, script: str, looked: str) -> None:
    if os.path.isdir(path) and not os.path.exists(path / "__main__.py"):
        raise UsageError(f"script {script} is a directory")
    if not os.path.exists(path):
        raise UsageError(f"script {script} does not exist {looked}")


def _inside(path: Path, workdir: Path) -> str | None:
    for one, base in ((os.path.abspath(path), os.path.abspath(workdir)), (path.resolve(), workdir.resolve())):
        relative = os.path.relpath(one, base)
        if relative != ".." and not relative.startswith("../"):
            return relative
    return None
