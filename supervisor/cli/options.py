"""What the verbs' command lines have in common.

In: argv of one verb. Out: parsed options, the inventory, the job's name.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from supervisor.actions import BY_VERB
from supervisor.errors import UsageError

if TYPE_CHECKING:
    from supervisor.inventory import Inventory


# The words that a verb may take, by the names that they have in its usage.
TARGET = {
    "HOSTS": "an inventory (*.toml; without it, this machine alone)",
    "JOB": "an id, as `supervisor jobs` lists them",
    "RECORDING": "what `supervisor record` wrote",
    "FILE": "the recording to write",
    "SIGNAL": "its name, such as USR1",
}
WIDTH = 100
# nfs, and what supercomputers have.
NETWORK_DISKS = frozenset({"nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "wekafs", "panfs", "afs", "cifs", "smb3"})


class Parser(argparse.ArgumentParser):
    """A parser whose errors are UsageErrors: one message, no usage dump."""

    def error(self, message: str) -> NoReturn:
        """Raise UsageError."""
        raise UsageError(message, f"{self.prog} --help")


class _Debug(argparse.Action):
    """Takes effect at once, so that mistakes further on show their tracebacks; a script's own --debug is not ours."""

    def __call__(self, *_parsing: object) -> None:
        logging.getLogger().setLevel(logging.DEBUG)


def make_parser(verb: str, usage: str = "[HOSTS] [JOB]", *, target: bool = True) -> Parser:
    """Return a parser for one verb, its help taken from the registry; `target`: its words are those of TARGET.

    `usage`: what the verb takes beside options, or options that are told in another form than their own.
    """
    parser = Parser(
        prog=f"supervisor {verb}",
        usage=f"supervisor {verb} {usage}".rstrip(),
        description=BY_VERB[verb].help,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if target:
        taken = {word: text for word, text in TARGET.items() if re.search(rf"\b{word}\b", usage)}
        told = "; ".join(f"{word}: {text}" for word, text in taken.items())
        parser.add_argument("target", nargs="*", metavar=" ".join(taken), help=told)
        add_sources(parser)
    words = "log to stderr, and show tracebacks"
    parser.add_argument("--debug", action=_Debug, nargs=0, default=argparse.SUPPRESS, help=words)
    return parser


def parse(parser: Parser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse options and positional words in any order; exits through SystemExit for --help only."""
    parser.usage = _usage(parser)
    return parser.parse_intermixed_args(list(argv))


def _usage(parser: Parser) -> str:
    """Return the parser's usage with each of its options, so that none is forgotten."""
    begin = parser.usage or ""
    named = {"-h", "--debug", *re.findall(r"--?[a-z][a-z-]*", begin)}
    own = (action for action in parser._optionals._group_actions if action.option_strings[0] not in named)
    # Only between options may a line end.
    parts = [one.replace(" ", "\xa0") for one in map(_in_usage, own)]
    indent = " " * len(f"usage: {parser.prog} ")
    lines = textwrap.wrap(
        " ".join([f"usage: {begin}", *parts]), WIDTH, subsequent_indent=indent, break_on_hyphens=False
    )
    return "\n".join(lines).replace("\xa0", " ").removeprefix("usage: ")


def _in_usage(action: argparse.Action) -> str:
    value = action.metavar or "|".join(action.choices or ())
    text = action.option_strings[0] if action.nargs == 0 else f"{action.option_strings[0]} {value}"
    return (text if action.required else f"[{text}]") + ("…" if isinstance(action.default, list) else "")


def split_target(words: Sequence[str]) -> tuple[str | None, str | None]:
    """Return (HOSTS, JOB) of the positional words; raises UsageError."""
    hosts: str | None = None
    job: str | None = None
    for word in words:
        if word.endswith(".toml"):
            if hosts is not None:
                raise UsageError(f"two inventories: {hosts} and {word}")
            hosts = word
        elif job is not None:
            raise UsageError(f"two jobs: {job} and {word}", "HOSTS must end in .toml")
        else:
            job = word
    if job is not None:
        from supervisor.session.specs import check_job

        check_job(job)
    return hosts, job


def add_sources(parser: Parser) -> None:
    """Add what may stand in the place of HOSTS."""
    group = parser.add_argument_group("in the place of HOSTS")
    group.add_argument(
        "--hosts", dest="host_list", metavar="A,B", help="hosts by name: a,b or gpu[01-04] or user@host:port"
    )
    group.add_argument("--hostfile", metavar="FILE", help="a hostfile of MPI or DeepSpeed: host slots=8")
    group.add_argument(
        "--slurm",
        action="store_const",
        const="auto",
        help="the nodes of the Slurm allocation that this runs in, by SSH or, where that is refused, by srun",
    )
    group.add_argument(
        "--srun", dest="slurm", action="store_const", const="srun", help="as --slurm, by srun without trying SSH"
    )


def load_inventory(hosts: str | None, options: argparse.Namespace) -> Inventory:
    """Return the inventory that the command line names, or this machine alone; raises InventoryError (a UsageError)."""
    from supervisor import inventory

    given = [hosts, options.host_list and "--hosts", options.hostfile and "--hostfile", options.slurm and "--slurm"]
    named = [one for one in given if one]
    if len(named) > 1:
        raise UsageError(f"{' and '.join(named)} both name the hosts", "give one of them")
    if hosts is not None:
        return inventory.load(Path(hosts))
    if not named:
        return inventory.local()
    return inventory.build(Path(named[0]), read_source(options), Path.cwd())


def load_target(options: argparse.Namespace) -> tuple[Inventory, str | None]:
    """Return the inventory and the job that the positional words name; raises UsageError."""
    hosts, job = split_target(options.target)
    return load_inventory(hosts, options), job


def read_source(options: argparse.Namespace) -> dict[str, Any]:
    """Return the document of --hosts, --hostfile or --slurm; raises InventoryError."""
    from supervisor.inventory import InventoryError, sources

    if options.host_list:
        return sources.from_hosts(options.host_list)
    if options.hostfile:
        try:
            text = Path(options.hostfile).read_text()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
            raise InventoryError(f"--hostfile {options.hostfile}: cannot be read: {reason}") from error
        return sources.from_hostfile(text, options.hostfile)
    document = sources.from_slurm(os.environ, options.slurm)
    # On a cluster the home is on a network disk, as a rule: what is there already is not sent to itself.
    if is_shared(Path.home()):
        document = sources.with_own_roots(document, f"{Path.home()}/.supervisor/nodes")
    return {**document, "job": {"sync": False}} if is_shared(Path.cwd()) else document


def is_shared(directory: Path) -> bool:
    """Whether a directory is on a file system that other hosts see, by its type in /proc/self/mounts."""
    best = ("", "")
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _device, mount, kind = line.split()[:3]
        if directory.is_relative_to(mount) and len(mount) >= len(best[0]):
            best = (mount, kind)
    return best[1] in NETWORK_DISKS


def source_words(hosts: str | None, options: argparse.Namespace) -> str | None:
    """Return the words that name the hosts again, for a command that the user may copy."""
    if options.host_list:
        return f"--hosts {options.host_list}"
    if options.hostfile:
        return f"--hostfile {options.hostfile}"
    if options.slurm:
        return "--srun" if options.slurm == "srun" else "--slurm"
    return hosts


def read_ranks(text: str) -> list[int]:
    """Return the ranks of `0,2-4`; raises argparse.ArgumentTypeError."""
    ranks: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise argparse.ArgumentTypeError(f"{text!r}: write ranks as 0,2-4")
        low, high = int(first), int(last) if dash else int(first)
        if high < low or high - low > 1_000_000:
            raise argparse.ArgumentTypeError(f"{text!r}: {part} is not a range")
        ranks.update(range(low, high + 1))
    return sorted(ranks)


def read_duration(text: str) -> float:
    """Return the seconds of `90`, `90s`, `10m`, `2h`, `1d`; raises argparse.ArgumentTypeError."""
    units = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
    number, unit = (text[:-1], text[-1]) if text and text[-1] in units else (text, "s")
    try:
        value = float(number)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r}: write 90s, 10m, 2h or 1d")
    return value * units[unit]


def is_terminal() -> bool:
    """True when both stdin and stdout are a terminal that can show a screen."""
    try:
        return sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    except (AttributeError, ValueError):
        return False


def add_json(parser: Parser, what: str = "print one JSON document") -> None:
    """Add --json."""
    parser.add_argument("--json", action="store_true", help=what)


def add_screen(parser: Parser) -> None:
    """Add the options of the TUI and of headless runs."""
    parser.add_argument("--headless", action="store_true", help="no TUI: print the merged log")
    parser.add_argument("--theme", metavar="NAME", type=read_theme, help="palette of the TUI")
    parser.add_argument("--read-only", "--read_only", action="store_true", help="refuse all that changes the job")
    parser.add_argument("--ascii", action="store_true", help="no characters beyond ASCII")


def read_theme(text: str) -> str:
    """Return the name of a theme that exists; raises argparse.ArgumentTypeError."""
    from supervisor.tui import theming  # here and not above: only a screen needs it

    try:
        return theming.find(text)
    except theming.ThemeError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def given(options: argparse.Namespace, name: str) -> Any:
    """Return an option's value, None when it was not given."""
    return getattr(options, name, None)


def read_seconds(what: str, text: str) -> float:
    """Return seconds of 0 or more; raises UsageError that begins with `what`."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e6:
        raise UsageError(f"{what}: must be seconds, 0 or more")
    return seconds
