"""`supervisor man`: print the manual page, made from the registry of verbs and their parsers.

In: argv; the parsers of all verbs. Out: the page `supervisor.1` in roff on stdout.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from supervisor import __version__
from supervisor.actions import ACTIONS
from supervisor.cli.completion import describe, named_options
from supervisor.cli.entry import NOTES, SUMMARY, SYNOPSIS
from supervisor.cli.options import make_parser, parse
from supervisor.cli.output import write_lines


def run(verb: str, argv: Sequence[str]) -> int:
    """Print the page; returns the exit status."""
    parser = make_parser(verb, "> supervisor.1", target=False)
    parser.epilog = "to read it:     supervisor man | man -l -\nto install it:  supervisor man > DIR/man1/supervisor.1"
    parse(parser, argv)
    write_lines(list(page()))
    return 0


def page() -> Iterator[str]:
    """Yield the lines of the page."""
    yield f'.TH SUPERVISOR 1 "" "supervisor {__version__}" "User Commands"'
    yield from (".SH NAME", f"supervisor \\- {_text(SUMMARY.rstrip('.'))}")
    yield from (".SH SYNOPSIS", f".B {_text(SYNOPSIS)}")
    yield ".SH DESCRIPTION"
    for line in NOTES:
        yield from (_text(line), ".br")
    yield ".SH COMMANDS"
    for action in ACTIONS:
        if action.verb:
            yield from _command(describe(action.verb))


def _command(parser: argparse.ArgumentParser) -> Iterator[str]:
    usage = " ".join((parser.usage or "").split())
    yield from (f".SS {_text(parser.prog)}", f".B {_text(usage)}", ".PP", f"{_text(parser.description or '')}.")
    formatter = parser._get_formatter()
    options = dict(named_options(parser))
    for group in parser._action_groups:
        mine = [one for one in group._group_actions if one in options and one.dest != "help"]
        if mine and group is not parser._optionals:
            yield from (".PP", f"{_text(group.title or '')}:")
        for one in mine:
            names = ", ".join(options[one])
            value = "" if one.nargs == 0 else f" {one.metavar or '|'.join(map(str, one.choices or ()))}"
            yield from (".TP", f".B {_text(names + value)}", _text(formatter._expand_help(one)))
    if parser.epilog:
        yield from (".PP", ".nf", *map(_text, parser.epilog.splitlines()), ".fi")


def _text(text: str) -> str:
    """Return a text of which roff takes nothing as a request."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{text}" if text[:1] in (".", "'") else text
