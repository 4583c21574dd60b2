"""Numbers and counts as people write them, and the names of the directories of ranks.

In: ranks, numbers of things, digits in a text. Out: numbers; `0-2,5`, `ranks 0-3`, `2 nodes`, `1.5 kB`; patterns.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_GENERATION, _RANK = r"generation_(\d{1,9})", r"rank_(\d{1,9})"
GENERATION_FOLDER, RANK_FOLDER = re.compile(rf"{_GENERATION}\Z"), re.compile(rf"{_RANK}\Z")
# The path of a log in a job's directory ends like this.
RANK_LOG = re.compile(rf"{_GENERATION}/{_RANK}/(stdout|stderr|nccl)\.log\Z")

# Variables of such a name may hold a secret: their values are never shown.
SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)


def read_number(digits: str) -> int:
    """Return the number that digits in a text stand for, of its first 18 where it has more: no program prints those."""
    return int(digits[:18])


def ranges(numbers: Iterable[int]) -> str:
    """Return `0-2,5` for 0, 1, 2, 5."""
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs(numbers))


def runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return the first and the last of consecutive numbers: (0, 2), (5, 5) for 0, 1, 2, 5."""
    found: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        first = found.pop()[0] if found and number == found[-1][1] + 1 else number
        found.append((first, number))
    return found


def name_ranks(ranks: Sequence[int]) -> str:
    """Return `rank 3`, `ranks 0-3,5`, or `no rank`."""
    return f"{'rank' if len(set(ranks)) == 1 else 'ranks'} {ranges(ranks)}" if ranks else "no rank"


def count(number: int, one: str) -> str:
    """Return `1 rank`, `2 ranks`."""
    return f"{number:,} {one if number == 1 else one + 's'}"


def size_text(size: float) -> str:
    """Return bytes as `999 B`, `12.3 MB` or `150 GB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 99.95 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def by_value(names: Iterable[tuple[str, str]]) -> list[tuple[str, list[str]]]:
    """Return the names that have each value, from pairs of name and value; the value of most names comes first."""
    groups: dict[str, list[str]] = {}
    for name, value in names:
        groups.setdefault(value, []).append(name)
    return sorted(groups.items(), key=lambda group: -len(group[1]))
