"""Colours of what the commands print: which word of a line means well, look here, or wrong.

In: plain lines, as `wording` makes them. Out: the same lines with codes for colours, if they are wanted.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Final

from remote_agent.text.controls import escape_controls
from remote_agent.wire.events import label
from supervisor.standard_streams import as_lines, out_is_terminal, write_coloured, write_out
from supervisor.wording.events import ROLES
from supervisor.wording.status import STATE_ROLES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from supervisor.cli.options import Parser

_CODES: Final = {
    "bad": "1;31", "hung": "33", "warn": "33", "start": "36", "ok": "32", "done": "32", "off": "2", "name": "36",
    "dim": "2",
}  # fmt: skip
_LABELS: Final = "|".join(
    f"(?P<{role}>{'|'.join(re.escape(label(kind)) for kind, its in ROLES.items() if its == role)})"
    for role in dict.fromkeys(ROLES.values())
)
# The first pattern that a line begins with colours its named groups.
_RULES: Final = tuple(
    re.compile(pattern)
    for pattern in (
        rf"(?P<dim>[\d-]{{2}}:[\d-]{{2}}:[\d-]{{2}}\.[\d-]{{3}}) (?:(?:{_LABELS})(?:  |$))?",
        r"(?P<bad>incident \S+|error\b|failed:|a job on these hosts would fail)",
        r"(?P<warn>warning\b:?|note:)",
        r"(?P<ok>next:|  hint:|a job on these hosts would start|\d+ hosts?, no problems found)",
        r"  (?P<name>evidence|failed as a consequence|exit|missing in [^:]+|traceback|state|warning):",
        r"(?P<name>[a-z][\w $./-]*?) +(?P<warn>!) ",
    )
)


def add_color(parser: Parser) -> None:
    """Add --color."""
    parser.add_argument(
        "--color",
        choices=("auto", "always", "never"),
        default="auto",
        help="colours; auto: on a terminal, without NO_COLOR",
    )


def wanted(mode: str) -> bool:
    """Return whether stdout gets colours: auto, always or never."""
    if mode != "auto":
        return mode == "always"
    return out_is_terminal() and os.environ.get("TERM") != "dumb" and not os.environ.get("NO_COLOR")


def coloured(line: str) -> str:
    """Return a line with codes for colours; nothing in the line itself is one."""
    line = escape_controls(line)
    match = next((match for rule in _RULES if (match := rule.match(line))), None)
    if match is None:
        return line
    text, at = "", 0
    for role in sorted((role for role, part in match.groupdict().items() if part is not None), key=match.start):
        begin, end = match.span(role)
        text += f"{line[at:begin]}\x1b[{_CODES[role]}m{line[begin:end]}\x1b[m"
        at = end
    return text + line[at:]


def coloured_state(cell: str) -> str:
    """Return a cell of a table, with codes for colours if it is the state of a rank, node or job."""
    cell, role = escape_controls(cell), STATE_ROLES.get(cell)
    return cell if role is None else f"\x1b[{_CODES[role]}m{cell}\x1b[m"


def write(lines: Sequence[str], mode: str) -> None:
    """Print lines, in colours if they are wanted."""
    if wanted(mode):
        write_coloured("".join(f"{coloured(line)}\n" for line in as_lines(lines).splitlines()))
    else:
        write_out(as_lines(lines))
