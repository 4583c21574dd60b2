"""What runners and loggers put around lines: prefixes before those of a traceback, records in JSON.

In: lines. Out: the same lines as they were said; tracebacks bare, in one piece where others' lines ran into them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from supervisor.postmortem.ranks import Line

_HEAD = "Traceback (most recent call last):"
# So far below its head a traceback of this many lines at least is looked for.
_NEAR = 200
_LEAST = 3
_DIGIT = re.compile(r"\d")
# Under these names loggers keep what was said, with the traceback behind it, when, and by whom.
_TEXTS = ("message", "msg", "event", "log", "exception", "exc_info", "exc_text", "stack_trace", "traceback")
_TIMES = ("timestamp", "@timestamp", "time", "ts", "asctime")
_RANKS = ("rank", "global_rank")


def unpacked(lines: Sequence[Line]) -> list[Line]:
    """Return the lines with those of records in JSON as a terminal would show them, each with its rank's tag."""
    found: list[Line] = []
    for line in lines:
        record = _record(line.text) if line.text.startswith("{") and line.text.endswith("}") else None
        texts = _texts(record) if record is not None else []
        found += [line._replace(text=text) for text in texts] or [line]
    return found


def _record(text: str) -> dict[str, Any] | None:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _texts(record: dict[str, Any]) -> list[str]:
    rank = next((record[name] for name in _RANKS if isinstance(record.get(name), int)), None)
    time = next((f"{record[name]} " for name in _TIMES if isinstance(record.get(name), str)), "")
    said = "\n".join(record[name] for name in _TEXTS if isinstance(record.get(name), str))
    tag = "" if rank is None else f"[rank{rank}]: "
    return [f"{tag}{'' if number else time}{text}" for number, text in enumerate(said.splitlines())]


def bare(lines: list[Line]) -> list[Line]:
    """Return the lines with no prefix before those of a traceback, whose first keeps it for its time."""
    lines = list(lines)
    for index in range(len(lines)):
        before, head, after = lines[index].text.partition(_HEAD)
        if not head or after.strip() or not before.strip():
            continue
        near = lines[index + 1 : index + _NEAR]
        own = _of_one(near, before)
        if len(own) + 1 < _LEAST:
            continue
        numbers = {each.number for each in own}
        shown = [each._replace(text=each.text[len(before) :]) for each in own]
        lines[index + 1 : index + _NEAR] = [*shown, *(each for each in near if each.number not in numbers)]
    return lines


def _of_one(near: list[Line], before: str) -> list[Line]:
    """Return the lines of a traceback below its head: those with the same prefix, or with another time in it."""
    exact = [each for each in near if each.text.startswith(before)]
    like = _DIGIT.sub("0", before)
    alike = [each for each in near if _DIGIT.sub("0", each.text[: len(before)]) == like]
    own = exact if len(exact) + 1 >= _LEAST else alike
    for count, each in enumerate(own, 1):
        # The exception's own line is the first that does not stand to the right.
        if each.text[len(before) : len(before) + 1].strip():
            return own[:count]
    return []
