"""Python stacks of ranks as text: equal stacks grouped, the smallest group first; lines of a script around a place.

In: the stacks of each rank, as the nodes return them; the `sources` of a hang. Out: lines.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from remote_agent.text.names import name_ranks
from supervisor.wording.values import one_line, safe

if TYPE_CHECKING:
    from remote_agent.wire.answers import ChildStack
    from remote_agent.wire.documents import SourceExcerpt

Item = TypeVar("Item")
_ADDRESS = re.compile(r"(?m)(?<=^Thread )0x[0-9a-f]+ |(?<=^Current thread )0x[0-9a-f]+ ")
# This matches a place such as `train.py:88 in load`.
_LINE = re.compile(r":(\d{1,9}) in ")
# The directory of the work tree differs between nodes with different homes.
_TREE = re.compile(r'(?<=File ")[^"\n]*/trees/[^/"\n]+-[0-9a-f]{8}/')


def stacks_lines(
    stacks: Mapping[str, str],
    unreachable: Mapping[str, str],
    children: Mapping[str, Sequence[ChildStack]],
    notes: Mapping[str, str],
) -> list[str]:
    """Return equal stacks grouped, the smallest group first, because it differs; then those of child processes."""
    lines: list[str] = []
    for text, ranks in _grouped((_common(text), int(rank)) for rank, text in stacks.items()):
        lines += [f"{name_ranks(ranks)}:", *(f"  {line}" for line in safe(text).splitlines()), ""]
    below = (
        ((f"{one_line(child['name'])} {one_line(child['doing'])}", _common(child["stack"])), int(rank))
        for rank, processes in children.items()
        for child in processes
    )
    for (does, text), ranks in _grouped(below):
        lines += [f"{name_ranks(ranks)}: {len(ranks)} x child process {does}"]
        lines += [*(f"  {line}" for line in safe(text).splitlines()), ""]
    for reason, ranks in _grouped((reason, int(rank)) for rank, reason in unreachable.items()):
        lines.append(f"{name_ranks(ranks)}: no stack: {one_line(reason)}")
    return lines + [f"{one_line(node)}: {one_line(note)}" for node, note in notes.items()]


def numbered_source(place: str, source: SourceExcerpt) -> list[tuple[str, str, bool]]:
    """Return number, text, and whether a rank is there, of the lines around a place: those of its block, dedented."""
    texts = source["text"].expandtabs(4).split("\n")
    match = _LINE.search(place)
    here = int(match[1]) - source["first"] if match is not None else -1
    # Lines after the function have nothing to do with it.
    outer = min((text for text in texts[: here + 1] if text.strip()), key=_indent, default="")
    inside = _indent(outer) + outer.lstrip().startswith(("def ", "async def ", "class "))
    end = next(
        (at for at, text in enumerate(texts) if at > here >= 0 and text.strip() and _indent(text) < inside), None
    )
    lines = textwrap.dedent("\n".join(texts[:end])).rstrip().split("\n")
    digits = len(str(source["first"] + len(lines)))
    return [(f"{source['first'] + at:>{digits}}", text, at == here) for at, text in enumerate(lines)]


def _indent(text: str) -> int:
    return len(text) - len(text.lstrip())


def _common(stack: str) -> str:
    """Return a stack without the parts that differ between equal ones: addresses of threads, path of the work tree."""
    return _TREE.sub("", _ADDRESS.sub("", stack.strip()))


def _grouped(items: Iterable[tuple[Item, int]]) -> list[tuple[Item, list[int]]]:
    """Return the ranks of equal items, the smallest group first."""
    groups: dict[Item, list[int]] = {}
    for item, rank in items:
        groups.setdefault(item, []).append(rank)
    return sorted(groups.items(), key=lambda group: (len(group[1]), group[1]))
