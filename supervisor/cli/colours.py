"""Colours of what the commands print: which word of a line means well, look here, or wrong.

In: plain lines, as `wording` makes them. Out: the same lines with codes for colours, if they are wanted.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Final

from remote_agent.text.controls import escape_controls
from remote_agent.wire.events import EventType, label
from supervisor.standard_streams import as_lines, out_is_terminal, write_coloured, write_out

if TYPE_CHECKING:
    from collections.abc import Sequence

    from supervisor.cli.options import Parser

_CODES: Final = {"bad": "1;31", "warn": "33", "good": "32", "name": "36", "dim": "2"}
_BAD: Final = (
    *(EventType.RANK_FAILED, EventType.INCIDENT, EventType.JOB_FAILED, EventType.NODE_LOST, EventType.NODE_FAILED),
    *(EventType.AGENT_LOST, EventType.QUORUM_LOST),
)
_WARN: Final = (
    *(EventType.WARNING, EventType.JOB_DEGRADED, EventType.JOB_STOPPED, EventType.GENERATION_STOPPED),
    *(EventType.STOP_REQUESTED, EventType.RESTART_REQUESTED, EventType.REMOVE_REQUESTED, EventType.NODE_REMOVED),
    *(EventType.HOOK_FAILED, EventType.METRICS_FAILED),
)
_GOOD: Final = (
    *(EventType.JOB_SUCCEEDED, EventType.GENERATION_RUNNING, EventType.FIRST_STEP, EventType.INCIDENT_HEALED),
    EventType.HANG_OVER,
)


def _either(types: Sequence[EventType]) -> str:
    return "|".join(re.escape(label(each)) for each in types)


_TIME: Final = r"(?P<dim>[\d-]{2}:[\d-]{2}:[\d-]{2}\.[\d-]{3}) "
# The first pattern that a line begins with colours its named groups.
_RULES: Final = tuple(
    re.compile(pattern)
    for pattern in (
        rf"{_TIME}(?P<bad>{_either(_BAD)})\b",
        rf"{_TIME}(?P<warn>{_either(_WARN)})\b",
        rf"{_TIME}(?P<good>{_either(_GOOD)})\b",
        _TIME,
        r"(?P<bad>incident \S+)",
        r"(?P<bad>error|failed:|a job on these hosts would fail)\b",
        r"(?P<warn>warning\b:?|note:)",
        r"(?P<good>next:|  hint:|a job on these hosts would start|\d+ hosts?, no problems found)",
        r"  (?P<name>evidence|victims|exit|missing in [^:]+|traceback|state|warning):",
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


def write(lines: Sequence[str], mode: str) -> None:
    """Print lines, in colours if they are wanted."""
    if wanted(mode):
        write_coloured("".join(f"{coloured(line)}\n" for line in as_lines(lines).splitlines()))
    else:
        write_out(as_lines(lines))
