"""What the verbs' command lines have in common.

In: argv of one verb. Out: parsed options, the inventory, the job's name.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from supervisor.actions import BY_VERB
from supervisor.errors import UsageError

if TYPE_CHECKING:
    from supervisor.inventory import Inventory


class Parser(argparse.ArgumentParser):
    """A parser whose errors are UsageErrors: one message, no usage dump."""

    def error(self, message: str) -> NoReturn:
        """Raise UsageError."""
        raise UsageError(message, f"{self.prog} --help")


def make_parser(verb: str, usage: str, *, target: bool = True) -> Parser:
    """Return a parser for one verb, its help taken from the registry; `target`: it takes [HOSTS] [JOB]."""
    parser = Parser(
        prog=f"supervisor {verb}",
        usage=f"supervisor {verb} {usage}",
        description=BY_VERB[verb].help,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if target:
        parser.add_argument(
            "target",
            nargs="*",
            metavar="HOSTS/JOB",
            help="HOSTS: an inventory (*.toml; without it, this machine alone); JOB: an id, needed if several are live",
        )
    parser.add_argument("--debug", action="store_true", help="log to stderr, and show tracebacks")
    return parser


def parse(parser: Parser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse options and positional words in any order; exits through SystemExit for --help only."""
    return parser.parse_intermixed_args(list(argv))


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


def load_inventory(hosts: str | None) -> Inventory:
    """Return the inventory, or this machine alone; raises InventoryError (a UsageError)."""
    from supervisor import inventory

    return inventory.local() if hosts is None else inventory.load(Path(hosts))


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
    """True when both stdin and stdout are a terminal."""
    try:
        return sys.stdin.isatty() and sys.stdout.isatty()
    except (AttributeError, ValueError):
        return False


def add_json(parser: Parser, what: str = "print one JSON document") -> None:
    """Add --json."""
    parser.add_argument("--json", action="store_true", help=what)


def add_screen(parser: Parser) -> None:
    """Add the options of the TUI and of headless runs."""
    parser.add_argument("--headless", action="store_true", help="no TUI: print the merged log")
    parser.add_argument("--theme", metavar="NAME", help="palette of the TUI")
    parser.add_argument("--read-only", "--read_only", action="store_true", help="refuse all that changes the job")
    parser.add_argument("--ascii", action="store_true", help="no characters beyond ASCII")


def given(options: argparse.Namespace, name: str) -> Any:
    """Return an option's value, None when it was not given."""
    return getattr(options, name, None)
