"""Node-set patterns: `gpu[01-16]`, `rack[1-2]n[1-4]`, `n[1,3,5-7]`, `n[0-12/4]`, `a,b`.

In: a pattern. Out: the names, in the order in which they are written, so that patterns can be paired one by one.
(ClusterShell's NodeSet reads the same language, but is a set: it sorts, and `address = "10.0.0.[2,1]"` would be
paired with the wrong names.)
"""

from __future__ import annotations

import itertools
import re

# A typing slip such as n[1-10000000] must not eat the memory.
MAX_NAMES = 4096
_RANGE = re.compile(r"(\d+)(?:-(\d+)(?:/(\d+))?)?")
_PART = re.compile(r"\[([^\[\]]*)\]")


class PatternError(ValueError):
    """A pattern that cannot be read."""


def expand(pattern: str) -> list[str]:
    """Return the names of a pattern in written order; raises PatternError."""
    names: list[str] = []
    for text in _split(pattern):
        names.extend(_expand_one(text.strip(), pattern))
        if len(names) > MAX_NAMES:
            raise PatternError(f"{pattern!r} means more than {MAX_NAMES} names")
    return names


def _split(pattern: str) -> list[str]:
    """Split at the commas outside of brackets."""
    pieces = [""]
    depth = 0
    for char in pattern:
        depth += {"[": 1, "]": -1}.get(char, 0)
        if depth not in (0, 1):
            raise PatternError(f"{pattern!r}: brackets do not match")
        if char == "," and depth == 0:
            pieces.append("")
        else:
            pieces[-1] += char
    if depth:
        raise PatternError(f"{pattern!r}: a bracket is not closed")
    return pieces


def _expand_one(text: str, pattern: str) -> list[str]:
    if not text:
        raise PatternError(f"{pattern!r}: an empty name")
    pieces = _PART.split(text)
    # Odd entries are what stood inside brackets.
    choices = [[piece] if index % 2 == 0 else _numbers(piece, pattern) for index, piece in enumerate(pieces)]
    count = 1
    for choice in choices:
        count *= len(choice)
    if count > MAX_NAMES:
        raise PatternError(f"{pattern!r} means more than {MAX_NAMES} names")
    return ["".join(combination) for combination in itertools.product(*choices)]


def _numbers(text: str, pattern: str) -> list[str]:
    numbers: list[str] = []
    for piece in text.split(","):
        match = _RANGE.fullmatch(piece.strip())
        if match is None:
            raise PatternError(f"{pattern!r}: [{text}] is not a list of numbers and ranges such as [1-4,7]")
        first, last, step = match[1], match[2] or match[1], int(match[3] or 1)
        padded = any(number.startswith("0") and len(number) > 1 for number in (first, last))
        if padded and len(first) != len(last):
            raise PatternError(f"{pattern!r}: {piece} mixes widths; write {first.zfill(len(last))}-{last}")
        low, high = int(first), int(last)
        if high < low:
            raise PatternError(f"{pattern!r}: {piece} runs backwards; write {last}-{first}")
        if step < 1:
            raise PatternError(f"{pattern!r}: {piece} has step 0")
        if (high - low) // step >= MAX_NAMES:
            raise PatternError(f"{pattern!r} means more than {MAX_NAMES} names")
        width = len(first) if padded else 0
        numbers.extend(str(number).zfill(width) for number in range(low, high + 1, step))
    return numbers
