"""What runners and loggers put before each line of a traceback.

In: the lines of one owner. Out: the same lines, tracebacks bare and in one piece where others' lines ran into them.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from supervisor.postmortem.ranks import Line

_HEAD = "Traceback (most recent call last):"
# So far below its head a traceback of this many lines at least is looked for.
_NEAR = 200
_LEAST = 3
_DIGIT = re.compile(r"\d")


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
