"""Node-set patterns: `gpu[01-16]`, `rack[1-2]n[1-4]`, `n[1,3,5-7]`, `n[0-12/4]`, `a,b`.

In: a pattern. Out: the names in written order, so that two patterns can be paired one by one. (ClusterShell's NodeSet
reads the same language but is a sorted set: `address = "10.0.0.[2,1]"` would be paired with the wrong names.)
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable

from remote_agent.text.names import runs

# The limit for one pattern, and for an inventory: a typing error such as n[1-10000000] must not use up the memory.
MAX_NAMES = 4096
# No name of a host is longer.
MAX_CHARS = 255
SHOWN = 80
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18})(?:/([0-9]{1,18}))?)?")
_LAST_NUMBER = re.compile(r"(?<![0-9])([0-9]{1,18})([^0-9]*)\Z")
_PART = re.compile(r"\[([^\[\]]*)\]")


class PatternError(ValueError):
    """A pattern that cannot be read."""


def expand(pattern: str) -> list[str]:
    """Return the names of a pattern in written order; raises PatternError."""
    names: list[str] = []
    for text in split(pattern):
        names.extend(_expand_one(text.strip(), pattern))
        if len(names) > MAX_NAMES:
            raise PatternError(f"{shortened(pattern)} has more than {MAX_NAMES} names")
    return names


def shortened(pattern: str) -> str:
    """Return a pattern for a message, in quotes."""
    return repr(pattern if len(pattern) <= SHOWN else f"{pattern[:SHOWN]}…")


def split(pattern: str) -> list[str]:
    """Return the parts between commas outside brackets; raises PatternError."""
    pieces = [""]
    depth = 0
    for char in pattern:
        depth += {"[": 1, "]": -1}.get(char, 0)
        if depth not in (0, 1):
            raise PatternError(f"{shortened(pattern)}: brackets do not match")
        if char == "," and depth == 0:
            pieces.append("")
        else:
            pieces[-1] += char
    if depth:
        raise PatternError(f"{shortened(pattern)}: a bracket is not closed")
    return pieces


def _expand_one(text: str, pattern: str) -> list[str]:
    if not text:
        raise PatternError(f"{shortened(pattern)}: an empty name")
    choices, count = [], 1
    for index, piece in enumerate(_PART.split(text)):
        # Every second piece was inside brackets.
        choice = [piece] if index % 2 == 0 else _numbers(piece, pattern)
        count *= len(choice)
        if count > MAX_NAMES:
            raise PatternError(f"{shortened(pattern)} has more than {MAX_NAMES} names")
        choices.append(choice)
    if sum(max(map(len, choice)) for choice in choices) > MAX_CHARS:
        raise PatternError(f"{shortened(pattern)}: a name is longer than {MAX_CHARS} characters")
    return ["".join(combination) for combination in itertools.product(*choices)]


def _numbers(text: str, pattern: str) -> list[str]:
    numbers: list[str] = []
    for piece in text.split(","):
        match = _RANGE.fullmatch(piece.strip())
        if match is None:
            raise PatternError(
                f"{shortened(pattern)}: [{text[:SHOWN]}] is not a list of numbers and ranges such as [1-4,7]"
            )
        first, last, step = match[1], match[2] or match[1], int(match[3] or 1)
        padded = any(number.startswith("0") and len(number) > 1 for number in (first, last))
        if padded and len(first) != len(last):
            raise PatternError(f"{shortened(pattern)}: {piece} mixes widths; write {first.zfill(len(last))}-{last}")
        low, high = int(first), int(last)
        if high < low:
            raise PatternError(f"{shortened(pattern)}: {piece} runs backwards; write {last}-{first}")
        if step < 1:
            raise PatternError(f"{shortened(pattern)}: {piece} has step 0")
        if len(numbers) + (high - low) // step >= MAX_NAMES:
            raise PatternError(f"{shortened(pattern)} has more than {MAX_NAMES} names")
        width = len(first) if padded else 0
        numbers.extend(str(number).zfill(width) for number in range(low, high + 1, step))
    return numbers


def fold(names: Iterable[str]) -> str:
    """Return names as a short pattern, `gpu[01-03,07],login`; `expand` returns the same names."""
    parsed = {name: _LAST_NUMBER.search(name) for name in names}
    # gpu10 continues gpu01 to gpu09, but n10 continues n9: a width with a leading zero holds for all of that length.
    padded = {(*_around(one), len(one[1])) for one in parsed.values() if one is not None and one[1].startswith("0")}
    groups: dict[tuple[str, int, str], list[int]] = {}
    for one in parsed.values():
        if one is not None:
            before, after = _around(one)
            width = len(one[1]) if (before, after, len(one[1])) in padded else 0
            groups.setdefault((before, width, after), []).append(int(one[1]))
    groups_as_text = [_fold_group(*key, set(numbers)) for key, numbers in groups.items()]
    return ",".join([*groups_as_text, *(name for name, one in parsed.items() if one is None)])


def _around(number: re.Match[str]) -> tuple[str, str]:
    """Return what a name has before and after its last number."""
    return number.string[: number.start()], number[2]


def _fold_group(before: str, width: int, after: str, numbers: set[int]) -> str:
    ends = [(str(first).zfill(width), str(last).zfill(width)) for first, last in runs(numbers)]
    texts = [first if first == last else f"{first}-{last}" for first, last in ends]
    return f"{before}{texts[0]}{after}" if len(numbers) == 1 else f"{before}[{','.join(texts)}]{after}"
