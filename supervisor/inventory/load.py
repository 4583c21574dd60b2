"""Read hosts.toml, or make an inventory of this machine alone.

In: a path, a document, or nothing. Out: a checked, frozen Inventory, or an error for the first thing that is wrong.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import json
import os
import re
import socket
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from remote_agent.wire import JOB_NAME, Hook
from supervisor.inventory.model import (
    DEFAULTS,
    JOB,
    OCCASIONS,
    TABLES,
    DefaultsTable,
    Host,
    HostTable,
    Inventory,
    InventoryError,
    JobDefaults,
    Place,
    check_table,
    suggest_table,
)
from supervisor.inventory.pattern import MAX_NAMES, PatternError, expand
from supervisor.inventory.sshconfig import Resolved, SshConfigError, resolve, resolve_all
from supervisor.inventory.targets import CHECKS, TargetError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


TableLines = dict[str, list[dict[str, int]]]
"""Of each table of a name, in their order: the numbers of its lines by key; "" is its header."""


def load(path: Path | str) -> Inventory:
    """Read and check an inventory; raises InventoryError."""
    path = Path(path)
    document, lines = _parse(path)
    return dataclasses.replace(build(path, document, path.absolute().parent, lines), words=str(path.absolute()))


def is_inventory(path: Path) -> bool:
    """Tell whether a file is TOML with a list of hosts, valid or not."""
    try:
        return isinstance(_parse(path)[0].get("hosts"), list)
    except InventoryError:
        return False


def _lines(content: str) -> TableLines:
    lines: TableLines = {}
    table = ""
    for number, line in enumerate(content.split("\n"), 1):
        if header := re.match(r"\s*\[+\s*([\w-]+)\s*\]", line):
            table = header[1]
            lines.setdefault(table, []).append({"": number})
        elif table and (key := re.match(r"\s*([\w-]+)\s*[=.]", line)):
            lines[table][-1].setdefault(key[1], number)
    return lines


def _at(lines: TableLines, table: str, number: int = 1) -> dict[str, int]:
    return dict(enumerate(lines.get(table, ()), 1)).get(number, {})


def build(path: Path, document: Mapping[str, object], directory: Path, lines: TableLines | None = None) -> Inventory:
    """Check a document and return its inventory; raises InventoryError.

    `path`: its name in errors; `directory`: relative paths in it start here; `lines`: where its keys are, for errors.
    """
    lines = lines or {}
    for table in document:
        if table not in TABLES:
            raise Place(path, table).wrong("", "unknown table", suggest_table(table))
    job_place = Place(path, "[job]", _at(lines, "job"))
    job = check_table(job_place, _table(path, document, "job"), "job")
    defaults_place = Place(path, "[defaults]", _at(lines, "defaults"))
    defaults: DefaultsTable = check_table(defaults_place, _table(path, document, "defaults"), "defaults")
    _resolve_files(defaults_place, defaults, directory)
    hosts = []
    for place, host_table in _host_tables(path, document, lines):
        values: HostTable = check_table(place, host_table, "hosts")
        _resolve_files(place, values, directory)
        hosts.extend(_expand_hosts(place, values, (defaults_place, defaults), job))
        if len(hosts) > MAX_NAMES:
            raise place.wrong("name", f"with it the inventory has more than {MAX_NAMES} hosts", "list fewer hosts")
    hosts = _with_addresses(hosts)
    _refuse_duplicates(path, hosts)
    hooks = tuple(_hooks(path, document, lines))
    return Inventory(path, tuple(host for host, _place in hosts), _job(job_place, job, directory, hosts), hooks)


def _parse(path: Path) -> tuple[dict[str, object], TableLines]:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise InventoryError(
            f"{path}: there is no such file", "copy hosts.example.toml, or leave HOSTS out to run on this machine only"
        ) from None
    except OSError as error:
        raise InventoryError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        # Some editors write a byte order mark.
        content = data.decode("utf-8-sig")
        document = tomllib.loads(content)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InventoryError(f"{path}: line {line}: not UTF-8 text") from error
    except (ValueError, RecursionError) as error:
        # Other errors than TOMLDecodeError are raised if a number has too many digits, or lists are nested too deeply.
        raise InventoryError(f"{path}: not valid TOML: {error}", _toml_hint(str(error), data.decode())) from error
    if not _fits(document):
        raise InventoryError(f"{path}: not valid TOML: a number does not fit into 64 bits")
    return document, _lines(content)


def _fits(value: object) -> bool:
    """Return whether all whole numbers in a value fit into 64 bits, which is what TOML promises."""
    if isinstance(value, dict):
        return all(map(_fits, value.values()))
    if isinstance(value, list):
        return all(map(_fits, value))
    return not isinstance(value, int) or -(2**63) <= value < 2**63


def _toml_hint(message: str, content: str) -> str:
    match = re.search(r"line (\d+)", message)
    if match is None:
        return ""
    lines = content.splitlines()
    number = int(match[1])
    line = lines[number - 1].strip() if 0 < number <= len(lines) else ""
    return f"line {number} is: {line}" if line else ""


def _table(path: Path, document: Mapping[str, object], name: str) -> Mapping[str, object]:
    table = document.get(name, {})
    if not isinstance(table, dict):
        raise Place(path, name).wrong("", "must be a table", f"write [{name}] on a line of its own")
    return table


def _host_tables(
    path: Path, document: Mapping[str, object], lines: TableLines
) -> list[tuple[Place, Mapping[str, object]]]:
    tables = document.get("hosts")
    example = 'add a table: [[hosts]] on a line of its own, then name = "gpu1"'
    if not tables and not isinstance(tables, dict):
        raise Place(path, "[[hosts]]").wrong("", "the inventory has no hosts", example)
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise Place(path, "hosts").wrong("", "must be a list of tables", example)
    pairs = []
    for number, table in enumerate(tables, 1):
        name = table.get("name")
        title = f"[[hosts]] {name}" if isinstance(name, str) and name else f"[[hosts]] number {number}"
        place = Place(path, title, _at(lines, "hosts", number))
        pairs.append((place, table))
    return pairs


def _hooks(path: Path, document: Mapping[str, object], lines: TableLines) -> Iterator[Hook]:
    tables = document.get("hooks", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        hint = 'add a table: [[hooks]] on a line of its own, then on = ["failure"]'
        raise Place(path, "hooks").wrong("", "must be a list of tables", hint)
    for number, table in enumerate(tables, 1):
        place = Place(path, f"[[hooks]] number {number}", _at(lines, "hooks", number))
        values = check_table(place, table, "hooks")
        if "on" not in values:
            raise place.wrong("on", "is missing", f"say when: on = {json.dumps(OCCASIONS)}")
        if ("command" in values) == ("url" in values):
            raise place.wrong("", "needs either command or url", 'write command = "…" or url = "https://…"')
        if "kind" in values and "url" not in values:
            raise place.wrong("kind", "needs a url, and there is only a command", "leave it out, or write url instead")
        yield Hook(**values)


def _resolve_files(place: Place, values: DefaultsTable, directory: Path) -> None:
    if "identity_file" in values:
        values["identity_file"] = directory / values["identity_file"]
        _check_identity(place, values["identity_file"])
    if "known_hosts" in values:
        values["known_hosts"] = directory / values["known_hosts"]
        # A missing file is reported later, for each host, with the command that creates it.
        if os.path.exists(values["known_hosts"]):
            _check_readable(place, "known_hosts", values["known_hosts"])


def _check_readable(place: Place, key: str, file: Path) -> bytes:
    try:
        return file.read_bytes()
    except FileNotFoundError:
        raise place.wrong(key, f"{file}: there is no such file", "correct the path or leave the key out") from None
    except IsADirectoryError:
        raise place.wrong(key, f"{file} is a directory", "name a file in it") from None
    except OSError as error:
        raise place.wrong(key, f"{file} cannot be read: {error.strerror}", f"try: ls -l {file}") from error


def _check_identity(place: Place, file: Path) -> None:
    content = _check_readable(place, "identity_file", file)
    if b"PRIVATE KEY" not in content:
        public = file.suffix == ".pub" or content.startswith((b"ssh-", b"ecdsa-", b"sk-"))
        hint = f'write identity_file = "{file.with_suffix("")}"' if file.suffix == ".pub" else ""
        raise place.wrong("identity_file", f"{file} is {'a public' if public else 'not a private'} key", hint)


def _expand_hosts(
    place: Place, values: HostTable, defaults: tuple[Place, DefaultsTable], job: dict[str, Any]
) -> list[tuple[Host, Place]]:
    if "name" not in values:
        raise place.wrong("name", "is missing", 'every host needs one: name = "gpu1"')
    names = _names(place, "name", values["name"])
    for name in names:
        # A node's name is part of command lines and the common name of a certificate.
        if not JOB_NAME.fullmatch(name):
            hint = f'write ssh = "{name}" and give it a short name' if len(name) < 200 else ""
            raise place.wrong("name", f"{name!r} is not 1 to 64 letters, digits, dots, dashes or underscores", hint)
    common = _common(place, values, *defaults)
    common.setdefault("nproc_per_node", job.get("nproc_per_node", "auto"))
    _refuse_two_places(place, common.get("wrap", ""), job.get("container", ""), job.get("environment", ""))
    apart = bool(common.get("wrap") or job.get("container"))
    targets = _paired(place, "ssh", values.get("ssh"), values["name"], names) or names
    addresses = _paired(place, "address", values.get("address"), values["name"], names)
    env = dict(values.get("env", {}))
    # The agent itself reads this variable, which may be set among the workers' variables.
    if "SUPERVISOR_HOME" in job.get("env", {}):
        env.setdefault("SUPERVISOR_HOME", job["env"]["SUPERVISOR_HOME"])
    hosts = []
    for index, name in enumerate(names):
        ssh = targets[index]
        address = addresses[index] if addresses else ""
        host: HostTable = {**common, "name": name, "ssh": ssh, "address": address, "env": dict(env)}
        hosts.append((Host(**host, apart=apart), place))
    return hosts


def _refuse_two_places(place: Place, wrap: str, container: str, environment: str) -> None:
    """Raise InventoryError where ranks would have to run in two places."""
    named = [name for name, value in (("wrap", wrap), ("container", container), ("environment", environment)) if value]
    if len(named) > 1:
        text = f"the ranks would run in two places: {' and '.join(named)} are set"
        raise place.wrong("", text, "keep one: a container and a prefix bring packages of their own")


def run_in(inventory: Inventory, environment: str | None, container: str | None) -> Inventory:
    """Return the inventory with what `up` says about where the ranks run, None: nothing; raises InventoryError."""
    given = {"environment": environment, "container": container}
    named = {key: JOB[key](Place("up", f"--{key}"), "", value) for key, value in given.items() if value is not None}
    if not named:
        return inventory
    job = dataclasses.replace(inventory.job, **{"environment": "", "container": "", **named})
    for host in inventory.hosts:
        _refuse_two_places(Place("up", host.name), host.wrap, job.container, job.environment)
    hosts = tuple(dataclasses.replace(host, apart=bool(host.wrap or job.container)) for host in inventory.hosts)
    return dataclasses.replace(inventory, job=job, hosts=hosts)


def _common(place: Place, values: HostTable, defaults_place: Place, defaults: DefaultsTable) -> HostTable:
    """Return the values that all names of a pattern have, its own before those of [defaults]."""
    common: HostTable = {**defaults, **values}
    for key, value in common.items():
        # Patterns are checked name by name.
        if key in DEFAULTS:
            _checked(place if key in values else defaults_place, key, value)
    return common


def _checked(place: Place, key: str, value: Any) -> Any:
    """Return the value of a host's key; raises InventoryError for characters that no command line may have."""
    try:
        return CHECKS[key](value) if key in CHECKS else value
    except TargetError as error:
        raise place.wrong(key, str(error), error.hint) from error


def _names(place: Place, key: str, pattern: str) -> list[str]:
    try:
        return expand(pattern)
    except PatternError as error:
        raise place.wrong(key, str(error), 'write a pattern such as "gpu[01-16]"') from error


def _paired(place: Place, key: str, pattern: str | None, name: str, names: list[str]) -> list[str]:
    """Expand a pattern that is paired with the names one by one; `name`: their pattern."""
    if pattern is None:
        return []
    expanded = _names(place, key, pattern)
    if len(expanded) != len(names):
        raise place.wrong(
            key,
            f"{pattern!r} means {len(expanded)} hosts, but name = {name!r} means {len(names)}",
            "both patterns must have the same length",
        )
    return [_checked(place, key, one) for one in expanded]


def _with_addresses(hosts: list[tuple[Host, Place]]) -> list[tuple[Host, Place]]:
    """Return the hosts, those without an address with the one to which ssh connects; raises InventoryError."""
    resolve_all((host.ssh, host.ssh_options) for host, _place in hosts)
    return [
        (host if host.address else dataclasses.replace(host, address=_resolve(place, host).host), place)
        for host, place in hosts
    ]


def _resolve(place: Place, host: Host) -> Resolved:
    try:
        return resolve(host.ssh, host.ssh_options)
    except SshConfigError as error:
        raise place.wrong("ssh", str(error), error.hint) from error


def _refuse_duplicates(path: Path, hosts: list[tuple[Host, Place]]) -> None:
    names: dict[str, Place] = {}
    doors: dict[tuple[str, int, str | None], str] = {}
    peers: dict[str, str] = {}
    for host, place in hosts:
        if host.name in names:
            raise place.wrong("name", f"two hosts are called {host.name}", "every host needs its own name")
        names[host.name] = place
        resolved = _resolve(place, host)
        address, port = resolved.host, resolved.port
        # Behind different jump hosts the same private address is another machine.
        door = (_canonical(address), port, resolved.value("proxyjump") or resolved.value("proxycommand"))
        if door in doors:
            raise place.wrong(
                "ssh",
                f"{doors[door]} and {host.name} are both at {address} port {port}",
                "a host can be only one node; for several workers on it set nproc_per_node",
            )
        doors[door] = host.name
        peer = _canonical(host.address)
        if peer in peers and not _is_loopback(peer):
            raise place.wrong(
                "address",
                f"{peers[peer]} and {host.name} have the same address {host.address}",
                "set for each the address at which the other nodes reach it",
            )
        peers[peer] = host.name


def _canonical(address: str) -> str:
    try:
        return str(ipaddress.ip_address(address.strip("[]")))
    except ValueError:
        return address.lower().rstrip(".")


def _is_loopback(address: str) -> bool:
    """Tell whether an address is loopback: several sshd may share it on different ports, as in the demo."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def _job(place: Place, job: dict[str, Any], directory: Path, hosts: list[tuple[Host, Place]]) -> JobDefaults:
    regular = sum(not host.spare for host, _place in hosts)
    if regular == 0:
        raise place.wrong("", "every host is a spare", "set spare = false on those that should run from the start")
    minimum = job.get("min_nodes", min(regular, job.get("max_nodes", regular)))
    if minimum > len(hosts):
        hint = f"set min_nodes to {len(hosts)} or less, or add hosts"
        raise place.wrong("min_nodes", f"is {minimum}, but the inventory has {len(hosts)} hosts", hint)
    maximum = job.get("max_nodes", max(regular, minimum))
    if minimum > maximum:
        raise place.wrong("min_nodes", f"is {minimum}, more than max_nodes, which is {maximum}", "swap the two")
    try:
        workdir = Path(job.get("workdir", ".")).expanduser()
    except RuntimeError as error:
        raise place.wrong("workdir", str(error)) from error
    apart = ("workdir", "min_nodes", "max_nodes", "nproc_per_node")
    rest = {key: value for key, value in job.items() if key not in apart}
    # normpath, not resolve: the tree's name on the nodes depends on the path as the operator writes it.
    absolute = Path(os.path.normpath(directory / workdir))
    return JobDefaults(workdir=absolute, min_nodes=minimum, max_nodes=maximum, **rest)


def local() -> Inventory:
    """Return an inventory of this machine only: no SSH, no sync, the current directory, torchrun's defaults."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname().partition(".")[0])[:64].lstrip("-._") or "localhost"
    host = Host(name, "localhost", "127.0.0.1", python=sys.executable, nproc_per_node="1", local=True)
    job = JobDefaults(workdir=Path.cwd(), sync=False, max_restarts=0)
    return Inventory(path=None, hosts=(host,), job=job, words="")
