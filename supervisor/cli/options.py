"""Options and arguments that several verbs share.

In: argv of one verb. Out: parsed options, the inventory, the job's name.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import logging
import os
import re
import sys
import textwrap
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from supervisor.actions import BY_VERB
from supervisor.cli.entry import say
from supervisor.errors import UsageError
from supervisor.standard_streams import out_is_terminal

if TYPE_CHECKING:
    from remote_agent.wire.documents import Status
    from supervisor.inventory import Inventory
    from supervisor.inventory.sources import InventorySource
    from supervisor.session import Session


# The positional arguments of verbs, by their names in the usage.
TARGET = {
    "HOSTS": "an inventory (*.toml; default: this machine only)",
    "JOB": "an id from `supervisor jobs`",
    "BUNDLE": "a zip written by `supervisor report --bundle`",
    "SIGNAL": "the name of a signal, such as USR1",
}
# The arguments of verbs that change nothing.
LOOKS = "[HOSTS|BUNDLE] [JOB]"
# A hidden option of every verb: shell completion reads the options from the parser.
DESCRIBE = "--describe-options"
WIDTH = 100
# The end of a bundle's name.
SUFFIX = ".zip"
# The usual name of an inventory.
DEFAULT_NAME = "hosts.toml"


class Parser(argparse.ArgumentParser):
    """A parser whose errors are UsageErrors: one message, no usage dump."""

    def error(self, message: str) -> NoReturn:
        """Raise UsageError."""
        raise UsageError(message, f"{self.prog} --help")


class _Debug(argparse.Action):
    """Takes effect at once, so that later errors show their tracebacks; --debug after SCRIPT is the script's own."""

    def __call__(self, *_parsing: object) -> None:
        logging.getLogger().setLevel(logging.DEBUG)


class Described(Exception):
    """Carries the complete parser of a verb to the caller that asked for it by DESCRIBE."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        super().__init__(parser.prog)
        self.parser = parser


class _Describe(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_parsing: object) -> NoReturn:
        raise Described(parser)


def make_parser(verb: str, usage: str = "[HOSTS] [JOB]", *, target: bool = True) -> Parser:
    """Return a parser for one verb, with its help from the registry; `target`: its arguments are those of TARGET.

    `usage`: the verb's positional arguments, and options that the usage shows in a form of its own.
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
        words = "; ".join(f"{word}: {text}" if len(taken) > 1 else text for word, text in taken.items())
        parser.add_argument("target", nargs="*", metavar=" ".join(taken), help=words)
        add_sources(parser)
        parser.set_defaults(takes_bundle="BUNDLE" in taken)
    words = "log to stderr and show tracebacks"
    parser.add_argument("--debug", action=_Debug, nargs=0, default=argparse.SUPPRESS, help=words)
    parser.add_argument(DESCRIBE, action=_Describe, nargs=0, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    return parser


def parse(parser: Parser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse options and positional arguments in any order; raises SystemExit for --help only."""
    parser.usage = _usage(parser)
    return parser.parse_intermixed_args(list(argv))


def _usage(parser: Parser) -> str:
    """Return the parser's usage with all of its options."""
    begin = parser.usage or ""
    named = {"-h", "--debug", *re.findall(r"--?[a-z][a-z-]*", begin)}
    own = (
        action
        for action in parser._optionals._group_actions
        if action.option_strings[0] not in named and action.help != argparse.SUPPRESS
    )
    # Lines break between options only.
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
    """Return (HOSTS, JOB) of the positional arguments; raises UsageError."""
    hosts: str | None = None
    job: str | None = None
    for word in words:
        if word.endswith((".toml", SUFFIX)):
            if hosts is not None:
                raise UsageError(f"two inventories: {hosts} and {word}")
            hosts = word
        elif job is not None:
            raise UsageError(f"two jobs: {job} and {word}", "HOSTS must end in .toml")
        else:
            job = word
    if job is not None:
        from supervisor.launch.specs import check_job

        check_job(job)
    return hosts, job


class _Given(argparse.Action):
    """Collects (Source, its argument) in `options.sources`."""

    def __call__(self, parser: object, namespace: argparse.Namespace, values: object, option: object = None) -> None:
        namespace.sources = [*(namespace.sources or ()), (self.const, values or "")]


def add_sources(parser: Parser) -> None:
    """Add the options that replace HOSTS."""
    from supervisor.inventory.sources import SOURCES

    group = parser.add_argument_group("instead of HOSTS")
    for source in SOURCES:
        group.add_argument(
            source.option, dest="sources", action=_Given, const=source, nargs=None if source.metavar else 0,
            metavar=source.metavar or None, help=source.help,
        )  # fmt: skip


def load_inventory(hosts: str | None, options: argparse.Namespace) -> Inventory:
    """Return the inventory that the command line names, or this machine only; raises InventoryError (a UsageError).

    The same rule for all verbs: only what is named counts. The first line on stderr says so where nothing is named.
    """
    from supervisor import known

    inventory = _load_named(hosts, options)
    known.note(inventory)
    return inventory


def need_linux(what: str) -> None:
    """Raise UsageError where this machine, which a command would use as a node, cannot be one."""
    if sys.platform != "linux":
        raise UsageError(f"{what} needs Linux here", "name the hosts, which run Linux: in a hosts.toml, or by --hosts")


def _load_named(hosts: str | None, options: argparse.Namespace) -> Inventory:
    from supervisor import inventory

    sources = options.sources or ()
    named = [*([hosts] if hosts is not None else ()), *(source.option for source, _ in sources)]
    if len(named) > 1:
        raise UsageError(f"{' and '.join(named)} both name the hosts", "give one of them")
    if hosts is not None and hosts.endswith(SUFFIX):
        return _open_bundle(hosts, options)
    if hosts is not None:
        return inventory.load(Path(hosts))
    for source, text in sources:
        if source.variable:
            need_linux(source.option)
        return _from_source(source, text)
    need_linux("a job on this machine")
    if not option_value(options, "json") and not option_value(options, "raw"):
        unused = f"; {DEFAULT_NAME} here is not used unless you name it" if Path(DEFAULT_NAME).exists() else ""
        say(f"hosts: this machine only{unused}")
    return inventory.local()


def _open_bundle(name: str, options: argparse.Namespace) -> Inventory:
    from supervisor import bundle

    if not option_value(options, "takes_bundle"):
        raise UsageError(f"{name}: this command needs the hosts of the job, not a bundle")
    need_linux("opening a bundle")
    return bundle.open_inventory(Path(name))


def _from_source(source: InventorySource, text: str) -> Inventory:
    from supervisor import inventory

    name = source.option
    where = os.path.abspath(text) if source.metavar == "FILE" else text
    built = inventory.build(Path(name), source.read(text), Path.cwd())
    return dataclasses.replace(built, words=f"{name} {where}".rstrip())


def open_known(words: str) -> Inventory:
    """Return the inventory that `Inventory.words` named earlier; raises InventoryError."""
    from supervisor import inventory
    from supervisor.inventory.sources import SOURCES

    name, _, text = words.partition(" ")
    for source in SOURCES:
        if name == source.option:
            return _from_source(source, text)
    return inventory.load(Path(words)) if words else inventory.local()


def load_target(options: argparse.Namespace) -> tuple[Inventory, str | None]:
    """Return the inventory and the job that the positional arguments name; raises UsageError."""
    hosts, job = split_target(options.target)
    return load_inventory(hosts, options), job


def say_left_out(name: str, reason: str) -> None:
    """Say that what a host has is missing, and why."""
    say(f"{name}: {reason}; its data is not shown")


def in_session(
    options: argparse.Namespace,
    work: Callable[[Session], Awaitable[int | None]],
    *,
    follow: bool = False,
    live_only: bool = False,
) -> int:
    """Do the work on the job that the positional arguments name; returns its exit code, 0 for None."""
    inventory, job = load_target(options)
    from supervisor.session import Session

    async def connected() -> int:
        session = Session(inventory, job, follow=follow, live_only=live_only, note_left_out=say_left_out)
        async with session:
            await session.ready()
            return await work(session) or 0

    return asyncio.run(connected())


# A node that is no longer in the job may answer within this time all the same, seconds.
LATE_GRACE = 2.0


async def settle(session: Session, nodes: Sequence[str] | None = None) -> None:
    """Wait for the hosts (None: all) whose data is to be read, and name those that do not answer.

    Those of nodes that are lost or removed are not awaited for long. Raises Unreachable, RequestFailed.
    """
    from remote_agent.wire.events import NodeState

    is_spared = bool(session.spared)
    if not await session.settle(nodes, LATE_GRACE) and not is_spared:
        return
    status: Status = await session.call("status")
    # It says which hosts others can be asked about.
    session.set_status(status)
    out = (NodeState.LOST, NodeState.REMOVED)
    away = {node["name"] for node in status.get("nodes", ()) if node.get("state") in out}
    await session.settle(set(session.links if nodes is None else nodes) - away)
    # Only now hosts are connected to about which no other host can be asked.
    for view in await session.settle(nodes, LATE_GRACE if is_spared else 0.0):
        session.leave_out(view.name, f"{view.step}: {view.error or 'no answer yet'}")


def source_words(hosts: str | None, options: argparse.Namespace) -> str | None:
    """Return the arguments that name the hosts, for a command that the user can copy."""
    for source, text in options.sources or ():
        return f"{source.option} {text}".rstrip()
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
    from supervisor.inventory import model

    try:
        return model.read_duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: write 90s, 10m, 2h or 1d") from error


def is_terminal() -> bool:
    """Return whether both stdin and stdout are a terminal that can show a screen."""
    try:
        return sys.stdin.isatty() and out_is_terminal() and os.environ.get("TERM") != "dumb"
    except (AttributeError, ValueError):
        return False


def add_json(parser: Parser, what: str = "print one JSON document") -> None:
    """Add --json."""
    parser.add_argument("--json", action="store_true", help=what)


def add_screen(parser: Parser, of_what: str = "") -> None:
    """Add the options of the TUI and of headless runs."""
    parser.add_argument("--headless", action="store_true", help=f"print the merged log instead of the TUI{of_what}")
    parser.add_argument("--theme", metavar="NAME", type=read_theme, help="colours of the TUI")
    parser.add_argument(
        "--read-only", "--read_only", action="store_true", help="refuse every action that changes the job"
    )
    parser.add_argument("--ascii", action="store_true", help="use ASCII characters only")


def read_theme(text: str) -> str:
    """Return the name of a theme that exists; raises argparse.ArgumentTypeError."""
    from supervisor.tui import themes  # imported here: only a screen needs it

    try:
        return themes.find(text)
    except themes.ThemeError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def option_value(options: argparse.Namespace, name: str) -> Any:
    """Return the value of an option, None where the verb does not have it."""
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
