"""What an inventory is: its types, the keys of each table of hosts.toml, and the checks of their values.

In: a table as read by tomllib. Out: frozen objects, or an InventoryError with a suggestion. To add a key, add a line to
its table below and to EXAMPLES, and a field to its type; a `[job]` key is a field of JobDefaults alone, and goes to
the agents as it is if a field of JobSpec has its name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import os
import re
import shlex
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict, get_type_hints

from remote_agent.text.names import read_number
from remote_agent.wire import JobSpec, leases, read_ports
from supervisor.errors import UsageError
from supervisor.inventory import sshconfig

if TYPE_CHECKING:
    from remote_agent.wire import Hook

STANDBY = ("auto", "off")
NPROC_WORDS = ("auto", "gpu", "cpu", "xpu")
# Devices of other vendors, by their names in torch (its privateuse1 backend).
OTHER_DEVICES = ("npu", "hpu", "mlu", "musa", "gcu", "privateuseone")
AGENT_PYTHON = "python3"
UV_LOCK = "uv.lock"
OCCASIONS = ("failure", "hang", "slow", "recovery", "end")
CHATS = ("slack", "discord", "mattermost")
LOG_BOUND_LEAST = 16 * 1024 * 1024
ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class InventoryError(UsageError):
    """The inventory cannot be used; the message names file, key and what to write instead."""


@dataclasses.dataclass(frozen=True)
class Host:
    """One host and how to reach it. None: the value of ~/.ssh/config, else ssh's own default."""

    name: str
    ssh: str
    """The host name, address or alias of ~/.ssh/config to connect to."""
    address: str
    """The address at which the other nodes reach it."""
    user: str | None = None
    port: int | None = None
    identity_file: Path | None = None
    known_hosts: Path | None = None
    python: str = "python3"
    """The interpreter; behind a prefix or in a container that of the ranks, while the agent has python3."""
    prelude: str | None = None
    """Shell text that runs before python."""
    wrap: str = ""
    """Words that stand before the ranks' interpreter, such as `apptainer exec --nv train.sif`."""
    apart: bool = False
    """The ranks run behind a prefix, or in a container."""
    proxy_jump: str | None = None
    """[user@]host[:port], several separated by commas; "none" overrides ~/.ssh/config."""
    nproc_per_node: str = "auto"
    spare: bool = False
    env: dict[str, str] = dataclasses.field(default_factory=dict)
    via: str = "auto"
    """asyncssh, openssh (the ssh program), ssh (either), srun (a step of the Slurm allocation of this process), or
    auto: either, and srun if SSH fails in an allocation."""
    local: bool = False
    """This machine: no SSH."""

    @property
    def agent_python(self) -> str:
        """The interpreter of the agent."""
        return AGENT_PYTHON if self.apart else self.python

    @property
    def ssh_options(self) -> tuple[str, ...]:
        """Return what hosts.toml says as options of an ssh command line; raises SshConfigError."""
        known_hosts = (self.known_hosts,) if self.known_hosts is not None else ()
        return sshconfig.options_of(self.user, self.port, self.identity_file, known_hosts, self.proxy_jump)


Check = Callable[["Place", str, Any], Any]
"""Returns the value of a key as it is used; raises InventoryError."""


class Place:
    """The file and table of a value, for error messages; `lines`: those of its keys, and of its header under ""."""

    def __init__(self, file: Path | str, table: str, lines: Mapping[str, int] | None = None) -> None:
        self.file = file
        self.table = table
        self._lines = lines or {}

    def wrong(self, key: str, message: str, hint: str = "") -> InventoryError:
        """Return the error for one key of this table."""
        dot = "." if key else ""
        number = self._lines.get(key.partition(".")[0], self._lines.get(""))
        line = f"line {number}: " if number else ""
        return InventoryError(f"{self.file}: {line}{self.table}{dot}{key}: {message}", hint)


def _type_name(value: object) -> str:
    names = {bool: "true/false", int: "a whole number", float: "a number", str: "text", list: "a list", dict: "a table"}
    return names.get(type(value), type(value).__name__)


def text(place: Place, key: str, value: object) -> str:
    """Check for text that is not empty and has no NUL character."""
    if not isinstance(value, str):
        raise place.wrong(key, f"must be text in quotes, not {_type_name(value)}")
    if not value.strip():
        raise place.wrong(key, "is empty")
    if "\0" in value:
        raise place.wrong(key, "contains a NUL character")
    return value


def line(place: Place, key: str, value: object) -> str:
    """Check for one line of text without spaces around it."""
    content = text(place, key, value)
    if content != content.strip() or not content.isprintable():
        raise place.wrong(key, f"contains spaces or control characters: {content!r}")
    return content


def file(place: Place, key: str, value: object) -> Path:
    """Check for a path; return it with the home directory in place of ~."""
    path = line(place, key, value)
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise place.wrong(key, f"{path}: {error}") from error


def target(place: Place, key: str, value: object) -> str:
    """Check for a pattern of host names, addresses or aliases without a user; `load` checks the names in it."""
    name = line(place, key, value)
    if "@" in name:
        user, _, host = name.rpartition("@")
        raise place.wrong(key, f"{name!r} contains a user name", f'write {key} = "{host}" and user = "{user}"')
    return name


def truth(place: Place, key: str, value: object) -> bool:
    """Check for true or false."""
    if not isinstance(value, bool):
        raise place.wrong(key, f"must be true or false, not {value!r}", f"write {key} = true or {key} = false")
    return value


def size(place: Place, key: str, value: object) -> int:
    """Check for a size with a unit (K, M, G or T, powers of 1024); return bytes."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?)\s*([KMGT])(?:i?B)?", value) if isinstance(value, str) else None
    if match is None:
        raise place.wrong(key, f"must be a size in K, M, G or T, not {value!r}")
    count = int(float(match[1]) * 1024 ** ("KMGT".index(match[2]) + 1))
    if count < LOG_BOUND_LEAST:
        raise place.wrong(key, f"must be 16M or more, not {value}")
    return count


def one_of(words: Sequence[str]) -> Callable[[Place, str, object], str]:
    """Make a check for one of these words."""

    def check(place: Place, key: str, value: object) -> str:
        if value not in words:
            raise place.wrong(key, f"must be {', '.join(words[:-1])} or {words[-1]}, not {value!r}")
        return str(value)

    return check


def whole(low: int, high: int | None = None) -> Callable[[Place, str, Any], int]:
    """Make a check for a whole number from `low` to `high`."""

    def check(place: Place, key: str, value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool):
            hint = f"write {key} = {value}" if isinstance(value, str) and value.isdigit() else ""
            raise place.wrong(key, f"must be a whole number, not {value!r}", hint)
        if value < low or (high is not None and value > high):
            span = f"from {low} to {high}" if high is not None else f"{low} or more"
            raise place.wrong(key, f"must be {span}, not {value}")
        return value

    return check


def seconds(zero: bool) -> Callable[[Place, str, Any], float]:
    """Make a check for a number of seconds; `zero`: 0 is allowed."""

    def check(place: Place, key: str, value: object) -> float:
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise place.wrong(key, f"must be a number of seconds, not {value!r}")
        if not (0 <= value < float("inf")) or (value == 0 and not zero):
            raise place.wrong(key, f"must be {'0 or more' if zero else 'more than 0'} seconds, not {value}")
        return float(value)

    return check


def read_duration(text: str) -> float:
    """Return the seconds of `90`, `90s`, `10m`, `2h`, `1d`; raises ValueError."""
    units = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
    number, unit = (text[:-1], text[-1]) if text and text[-1] in units else (text, "s")
    value = float(number)
    if not 0 <= value < 1e9:
        raise ValueError(text)
    return value * units[unit]


def lasting(place: Place, key: str, value: object) -> float:
    """Check for a time such as "10m"; return seconds."""
    with contextlib.suppress(ValueError):
        if not isinstance(value, bool) and isinstance(value, (str, int, float)):
            return read_duration(str(value))
    raise place.wrong(key, f"must be a duration in s, m, h or d, not {value!r}")


def lease_timeout(place: Place, key: str, value: object) -> float:
    """Check for a node_timeout whose shares do not overlap: leases.py has the table."""
    timeout_s = seconds(zero=False)(place, key, value)
    if not leases.holds(timeout_s):
        least = leases.MIN_NODE_TIMEOUT_S
        raise place.wrong(key, f"must be at least {least:g} seconds, not {timeout_s:g}", f"write {key} = {least:g}")
    return timeout_s


def port_range(place: Place, key: str, value: object) -> str:
    """Check for FIRST-LAST, a range of two or more ports; return it without blanks."""
    try:
        ports = read_ports(line(place, key, value))
    except ValueError as error:
        raise place.wrong(key, str(error)) from error
    return f"{ports[0]}-{ports[-1]}"


def read_nproc(text: str) -> str:
    """Return auto, a kind of device or a number of 1 or more as text, otherwise ""; the node checks what it has."""
    text = text.strip().lower()
    if text.isdecimal():
        return str(read_number(text) or "")
    return text if text in (*NPROC_WORDS, *OTHER_DEVICES) else ""


def nproc(place: Place, key: str, value: object) -> str:
    """Check for what `read_nproc` reads, or a positive number; return it as text."""
    if isinstance(value, str) and (text := read_nproc(value)):
        return text
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return str(value)
    words = ", ".join(NPROC_WORDS)
    raise place.wrong(key, f"must be {words} or a number of 1 or more, not {value!r}")


def environment(place: Place, key: str, value: object) -> dict[str, str]:
    """Check for a table of texts."""
    if not isinstance(value, dict):
        raise place.wrong(key, f"must be a table, not {_type_name(value)}")
    for name, content in value.items():
        if not ENV_NAME.fullmatch(name):
            raise place.wrong(f"{key}.{name}", "is not a valid name for an environment variable")
        if not isinstance(content, str):
            text = str(content).lower() if isinstance(content, bool) else content
            raise place.wrong(f"{key}.{name}", f"must be text, not {_type_name(content)}", f'write {name} = "{text}"')
        if "\0" in content:
            raise place.wrong(f"{key}.{name}", "contains a NUL character")
    return dict(value)


def texts(place: Place, key: str, value: object) -> tuple[str, ...]:
    """Check for a list of texts."""
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise place.wrong(key, f"must be a list of strings, not {value!r}")
    return tuple(value)


def snapshot_patterns(place: Place, key: str, value: object) -> tuple[str, ...]:
    """Check for a list of patterns that name files of the working directory, or are absolute."""
    patterns = texts(place, key, value)
    for pattern in patterns:
        parts = pattern.split("/")
        if not pattern.strip() or "\0" in pattern or ".." in parts or not any(part not in ("", ".") for part in parts):
            raise place.wrong(key, f"{pattern!r} names no file of the working directory")
    return patterns


def prefix(place: Place, key: str, value: object) -> str:
    """Check for words as a shell reads them."""
    words = line(place, key, value)
    try:
        shlex.split(words)
    except ValueError as error:
        raise place.wrong(key, f"{words!r}: {error}") from error
    return words


def lock_file(place: Place, key: str, value: object) -> str:
    """Check for the path of a lock file in the work tree."""
    path = os.path.normpath(line(place, key, value))
    if path.startswith(("/", "../")):
        raise place.wrong(key, f"{path} is not in the work tree", f'write {key} = "{UV_LOCK}"')
    name = os.path.basename(path)
    if not (name == UV_LOCK or re.fullmatch(r"pylock(\.[^.]+)?\.toml", name) or name.endswith(".txt")):
        raise place.wrong(key, f"{path} is not uv.lock, pylock.toml or a file of requirements (*.txt)")
    return path


def mounts(place: Place, key: str, value: object) -> tuple[str, ...]:
    """Check for a list of absolute paths, each with :ro or not."""
    paths = texts(place, key, value)
    for path in paths:
        if not re.fullmatch(r"/[^:\0]*(:ro)?", path):
            raise place.wrong(key, f"{path!r} is not /PATH or /PATH:ro: it has the same path in the container")
    return paths


def occasions(place: Place, key: str, value: object) -> tuple[str, ...]:
    """Check for the list of events of a hook."""
    if not isinstance(value, list) or not value:
        raise place.wrong(key, "must be a list of events")
    for word in value:
        if word not in OCCASIONS:
            near = difflib.get_close_matches(str(word), OCCASIONS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known events: {', '.join(OCCASIONS)}"
            raise place.wrong(key, f"{word!r} is not an event", hint)
    return tuple(value)


def web(place: Place, key: str, value: object) -> str:
    """Check for an http or https address; no message shows it, since it may contain a token."""
    address = text(place, key, value)
    # urlsplit accepts more than urlopen.
    valid = address.isascii() and address.isprintable() and " " not in address
    user = False
    try:
        parts = urllib.parse.urlsplit(address)
        valid = valid and parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        user = "@" in parts.netloc
    except ValueError:
        valid = False
    if not valid:
        raise place.wrong(key, "is not an http:// or https:// address")
    if user:
        raise place.wrong(
            key, "contains a user name, which would not be sent", "put a token in the path, or use command"
        )
    return address


@dataclasses.dataclass(frozen=True)
class JobDefaults:
    """The [job] table: types and checks of its keys, without nproc_per_node, which each Host has.

    The command line overrides it. Defaults that an agent knows, too, are the description's own.
    """

    workdir: Annotated[Path, line]
    min_nodes: Annotated[int, whole(1)] = 1
    max_nodes: Annotated[int, whole(1)] = 1
    max_restarts: Annotated[int, whole(0)] = 3
    sync: Annotated[bool, truth] = True
    sync_limit_mb: Annotated[int, whole(1)] = 512
    """Largest work tree that is sent, in MB (10^6 bytes)."""
    exclude: Annotated[tuple[str, ...], texts] = ()
    env: Annotated[dict[str, str], environment] = dataclasses.field(default_factory=dict)
    coordinator_port: Annotated[int, whole(0, 65535)] = JobSpec.coordinator_port
    ports: Annotated[str, port_range] = JobSpec.ports
    """FIRST-LAST: where agents and stores listen; empty: at any free port."""
    node_timeout: Annotated[float, lease_timeout] = JobSpec.node_timeout
    """Seconds without a heartbeat after which a node is lost."""
    stop_grace: Annotated[float, seconds(zero=True)] = JobSpec.stop_grace
    """Seconds from SIGTERM to SIGKILL."""
    hang_after: Annotated[float, seconds(zero=True)] = JobSpec.hang_after
    hang_restart: Annotated[float, seconds(zero=True)] = JobSpec.hang_restart
    slow: Annotated[bool, truth] = JobSpec.slow
    """Whether ranks are sampled now and then, to say which one the others wait for, and why."""
    metrics_port: Annotated[int, whole(0, 65535)] = JobSpec.metrics_port
    """The port on which the coordinator serves Prometheus metrics on its machine; 0: none."""
    standby: Annotated[str, one_of(STANDBY)] = JobSpec.standby
    """auto: each node keeps a process that waits with modules loaded, for restarts; off: none."""
    keep_warm: Annotated[float, lasting] = JobSpec.keep_warm
    """For how many seconds after the end of a job it waits for the next job of the same tree."""
    log_bound: Annotated[int, size] = JobSpec.log_bound
    """How many bytes the logs of a rank may use in each generation; 0: no limit."""
    snapshots: Annotated[tuple[str, ...], snapshot_patterns] = JobSpec.snapshots
    """What ranks save to and resume from: patterns, relative to the working directory or absolute."""
    snapshots_limit: Annotated[int, size] = JobSpec.snapshots_limit
    """How many bytes the copies of snapshots may use on each node; 0: no limit but the disk."""
    environment: Annotated[str, lock_file] = JobSpec.environment
    """The lock file of the work tree from which each node builds what the ranks need."""
    extras: Annotated[tuple[str, ...], texts] = JobSpec.extras
    """The extras of its project."""
    container: Annotated[str, line] = JobSpec.container
    """The image in whose container the ranks run."""
    mounts: Annotated[tuple[str, ...], mounts] = JobSpec.mounts
    """What the container has of the host at the same paths: /PATH or /PATH:ro."""


@dataclasses.dataclass(frozen=True)
class Inventory:
    """The hosts in the order of their ranks, and the defaults of `up`."""

    path: Path | None
    """The file of the inventory; None: this machine only."""
    hosts: tuple[Host, ...]
    job: JobDefaults
    hooks: tuple[Hook, ...] = ()
    made_s: float | None = None
    """Unix time of the bundle that stands for the hosts: they are directories, and nothing on them can be changed."""
    words: str | None = dataclasses.field(default=None, compare=False)
    """The arguments that name it on a command line, with absolute paths; "": this machine only; None: nothing does."""

    def host(self, name: str) -> Host | None:
        """Return the host of that name, or None."""
        return next((host for host in self.hosts if host.name == name), None)


class DefaultsTable(TypedDict, total=False):
    """The table [defaults]; the fields of Host with these names have its values."""

    user: Annotated[str, line]
    port: Annotated[int, whole(1, 65535)]
    identity_file: Annotated[Path, file]
    known_hosts: Annotated[Path, file]
    python: Annotated[str, line]
    prelude: Annotated[str, text]
    wrap: Annotated[str, prefix]
    proxy_jump: Annotated[str, line]
    via: Annotated[str, one_of(("auto", "asyncssh", "openssh", "ssh", "srun"))]


class HostTable(DefaultsTable, total=False):
    """One table [[hosts]]; name, ssh and address may be patterns."""

    name: Annotated[str, line]
    ssh: Annotated[str, target]
    address: Annotated[str, target]
    nproc_per_node: Annotated[str, nproc]
    spare: Annotated[bool, truth]
    env: Annotated[dict[str, str], environment]


def _checks(kind: type) -> dict[str, Check]:
    return {name: hint.__metadata__[0] for name, hint in get_type_hints(kind, include_extras=True).items()}


JOB: dict[str, Check] = {"nproc_per_node": nproc, **_checks(JobDefaults)}
DEFAULTS = _checks(DefaultsTable)
HOSTS = _checks(HostTable)
HOOKS: dict[str, Check] = {
    "on": occasions,
    "command": text,
    "url": web,
    "kind": one_of(CHATS),
    "timeout": seconds(zero=False),
    "retries": whole(0, 20),
}
TABLES = {"job": JOB, "defaults": DEFAULTS, "hosts": HOSTS, "hooks": HOOKS}
# A value that is valid for each key, for suggestions.
EXAMPLES = {
    "nproc_per_node": '"auto"', "min_nodes": "1", "max_nodes": "4", "max_restarts": "3", "workdir": '"."',
    "sync": "true", "sync_limit_mb": "512", "exclude": '["*.pt", "data/"]', "env": '{ NCCL_DEBUG = "WARN" }',
    "coordinator_port": "29400", "ports": '"29500-29999"', "node_timeout": "15.0", "stop_grace": "15.0",
    "hang_after": "30.0", "hang_restart": "600.0", "slow": "true", "metrics_port": "9400", "standby": '"auto"',
    "keep_warm": '"10m"', "log_bound": '"2G"', "snapshots": '["snapshot.pt", "checkpoints/**"]',
    "snapshots_limit": '"50G"', "environment": '"uv.lock"', "extras": '["cu128"]',
    "container": '"docker.io/pytorch/pytorch:2.9.0-cuda12.8-cudnn9-runtime"', "mounts": '["/data", "/scratch:ro"]',
    "wrap": '"apptainer exec --nv train.sif"', "user": '"ubuntu"', "port": "22", "identity_file": '"~/.ssh/id_ed25519"',
    "known_hosts": '"~/.ssh/known_hosts"', "python": '"python3"', "prelude": '"module load cuda"',
    "proxy_jump": '"login.example.org"', "via": '"openssh"', "name": '"gpu1"', "ssh": '"gpu1.example.org"',
    "address": '"10.0.0.1"', "spare": "false", "on": '["failure", "end"]', "command": '"./notify.sh"',
    "url": '"https://example.org/hook"', "kind": '"slack"', "timeout": "10.0", "retries": "3",
}  # fmt: skip


def check_table(place: Place, table: Mapping[str, object], which: str) -> Any:
    """Return the checked values of one table, of the types of its checks; raises InventoryError for a wrong key."""
    known = TABLES[which]
    values = {}
    for key, value in table.items():
        if key not in known:
            raise place.wrong(key, "unknown key", _suggestion(key, which))
        try:
            values[key] = known[key](place, key, value)
        except InventoryError as error:
            raise InventoryError(error.message, error.hint or f"write {key} = {EXAMPLES[key]}") from error
    return values


def _suggestion(key: str, which: str) -> str:
    elsewhere = [name for name, table in TABLES.items() if key in table and name != which]
    if elsewhere:
        return f"{key} belongs in {' or '.join(_header(name) for name in elsewhere)}"
    near = difflib.get_close_matches(key.replace("-", "_").lower(), TABLES[which], n=1)
    if near:
        return f"did you mean {near[0]}? for example {near[0]} = {EXAMPLES[near[0]]}"
    return f"known keys: {', '.join(sorted(TABLES[which]))}"


def suggest_table(name: str) -> str:
    """Return a suggestion for an unknown table or key at the top level."""
    elsewhere = [table for table, keys in TABLES.items() if name in keys]
    if elsewhere:
        return f"{name} belongs in {' or '.join(_header(table) for table in elsewhere)}"
    near = difflib.get_close_matches(name.lower(), [*TABLES, "host", "default", "hook"], n=1)
    meant = {"host": "hosts", "default": "defaults", "hook": "hooks"}.get(near[0], near[0]) if near else ""
    return f"did you mean {_header(meant)}?" if meant else "known tables: [job], [defaults], [[hosts]], [[hooks]]"


def _header(table: str) -> str:
    return f"[[{table}]]" if table in ("hosts", "hooks") else f"[{table}]"
