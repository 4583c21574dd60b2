"""Python stacks of ranks as lines of text: equal ones together, the odd one first.

In: what the nodes answer, by rank. Out: lines.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from remote_agent.diagnose.model import name_ranks
from supervisor.plain import one_line, safe

Found = TypeVar("Found")
_ADDRESS = re.compile(r"(?m)(?<=^Thread )0x[0-9a-f]+ |(?<=^Current thread )0x[0-9a-f]+ ")
# Where a node keeps its copy of the work tree: its home may lie elsewhere than another's.
_TREE = re.compile(r'(?<=File ")[^"\n]*/trees/[^/"\n]+-[0-9a-f]{8}/')


def stacks_lines(
    stacks: Mapping[str, str],
    unreachable: Mapping[str, str],
    children: Mapping[str, Sequence[Mapping[str, Any]]],
    notes: Mapping[str, str],
) -> list[str]:
    """Return stacks grouped by equality, the smallest group first: it is the odd one; then those of child processes."""
    lines: list[str] = []
    for text, ranks in _grouped((_common(text), int(rank)) for rank, text in stacks.items()):
        lines += [f"{name_ranks(ranks)}:", *(f"  {line}" for line in safe(text).splitlines()), ""]
    below = (
        ((f"{one_line(child['name'])} {one_line(child['doing'])}", _common(child["stack"])), int(rank))
        for rank, found in children.items()
        for child in found
    )
    for (does, text), ranks in _grouped(below):
        lines += [f"{name_ranks(ranks)}: {len(ranks)} x child process {does}"]
        lines += [*(f"  {line}" for line in safe(text).splitlines()), ""]
    for reason, ranks in _grouped((reason, int(rank)) for rank, reason in unreachable.items()):
        lines.append(f"{name_ranks(ranks)}: no stack: {one_line(reason)}")
    return lines + [f"{one_line(node)}: {one_line(note)}" for node, note in notes.items()]


def _common(stack: str) -> str:
    """Return a stack without what differs between equal ones: threads' addresses, where the work tree lies."""
    return _TREE.sub("", _ADDRESS.sub("", stack.strip()))


def _grouped(found: Iterable[tuple[Found, int]]) -> list[tuple[Found, list[int]]]:
    """Return the ranks of equal things, the smallest group first."""
    groups: dict[Found, list[int]] = {}
    for what, rank in found:
        groups.setdefault(what, []).append(rank)
    return sorted(groups.items(), key=lambda group: (len(group[1]), group[1]))
