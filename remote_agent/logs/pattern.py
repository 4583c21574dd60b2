"""Search patterns: what they cost and what a matching line must contain.

In: a regular expression as typed. Out: a compiled pattern with the literals to look for first; Problem ("pattern").

A pattern runs on the agent's only thread, which also keeps the node alive: what takes too long on one line is given up.
"""

from __future__ import annotations

import importlib
import re
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple, TypeVar

from remote_agent.logs.rows import without_escapes
from remote_agent.wire import Problem

# The standard library's own parser; its old name goes away with 3.13.
_parser: Any = importlib.import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")
_MAX_PATTERN = 4096
_MAX_BRANCHES = 8
_MAX_CHOICES = 3
_UNBOUNDED = 64
# For one line: some patterns take exponential time, and many a power of its length.
LINE_S = 0.1
_REPEATS = ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT")


_T = TypeVar("_T")


class TooLong(Exception):
    """A regular expression was given up."""


def _ring(_number: int, _frame: FrameType | None) -> None:
    raise TooLong


def within(seconds: float, work: Callable[[], _T]) -> _T:
    """Return work(), a search by a regular expression; raises TooLong once that has taken so many seconds.

    Of processor time: on a node where ranks leave us little of it a pattern is no slower. Python's matcher looks for
    signals as it goes; elsewhere than in the main thread nothing can interrupt it.
    """
    if threading.current_thread() is not threading.main_thread():
        return work()
    before = signal.signal(signal.SIGVTALRM, _ring)
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
        try:
            return work()
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    finally:
        signal.signal(signal.SIGVTALRM, before or signal.SIG_DFL)


class Pattern(NamedTuple):
    """A compiled pattern and how to find the lines worth trying."""

    regex: re.Pattern[bytes]
    choices: tuple[tuple[bytes, ...], ...]
    """Of each of these sets a matching line holds a member, in lower case when `lower`."""
    lower: bool
    plain: bool
    """True when the pattern is its literal: no regular expression need run."""
    scanner: re.Pattern[bytes] | None
    """Finds in a text of many lines, from any line's start, no later than the first line that matches."""

    def matches(self, text: bytes) -> bool:
        """True when what is seen of a row's text matches; raises TooLong when that cannot be told in time."""
        seen = without_escapes(text)
        return within(LINE_S, lambda: self.regex.search(seen)) is not None

    def where(self, text: bytes) -> bytes | None:
        """Return the text in which to look for `choices`, None when it lacks them all of a set."""
        where = text.lower() if self.lower and self.choices else text
        return where if all(any(literal in where for literal in choice) for choice in self.choices) else None


def ignores_case(pattern: str) -> bool:
    """True for a pattern without a capital letter, as in lnav and vim; that of \\S is none."""
    literal = re.sub(r"\\.", "", pattern)
    return literal == literal.lower()


def compile_pattern(pattern: str, ignore_case: bool) -> Pattern:
    """Return the pattern ready for use; raises Problem (pattern)."""
    if len(pattern) > _MAX_PATTERN:
        raise Problem("pattern", f"the pattern is over {_MAX_PATTERN} characters long")
    raw = pattern.encode("utf-8", "surrogateescape")
    flags = re.IGNORECASE if ignore_case else 0
    try:
        regex = re.compile(raw, flags)
        tree = _parser.parse(raw, flags)
    except (re.error, OverflowError, RecursionError) as bad:
        hint = "escape it to search for the text itself"
        raise Problem("pattern", f"not a regular expression: {bad}", hint) from None
    repeats = _open_repeats(tree)
    choices: list[tuple[bytes, ...]] = []
    if not tree.state.flags & re.IGNORECASE or ignore_case:
        choices = sorted(_choices(tree, ignore_case), key=_worth, reverse=True)[:_MAX_CHOICES]
    if not raw:
        # Each line of a level is looked for: nothing is to be matched.
        return Pattern(regex, (), ignore_case, True, None)
    plain = all(str(op) == "LITERAL" for op, _ in tree) and len(choices) == 1 and len(tree) == len(choices[0][0])
    scanner = re.compile(raw, flags | re.MULTILINE) if repeats < 2 and _scannable(tree) else None
    return Pattern(regex, tuple(choices), ignore_case, plain, scanner)


def _children(op: str, value: Any) -> list[Any]:
    """Return the sub-patterns of one parsed item."""
    if op in _REPEATS:
        return [value[2]]
    if op == "SUBPATTERN":
        return [value[3]]
    if op == "BRANCH":
        return list(value[1])
    if op in ("ASSERT", "ASSERT_NOT"):
        return [value[1]]
    if op == "ATOMIC_GROUP":
        return [value]
    if op == "GROUPREF_EXISTS":
        return [part for part in value[1:] if part is not None]
    return []


def _open_repeats(tree: Any) -> int:
    """Count repeats without a small bound."""
    count = 0
    for op, value in tree:
        name = str(op)
        count += name in _REPEATS and int(value[1]) >= _UNBOUNDED
        count += sum(_open_repeats(child) for child in _children(name, value))
    return count


def _choices(tree: Any, lower: bool) -> list[tuple[bytes, ...]]:
    """Return sets of literals: each match holds a member of each set."""
    found: list[tuple[bytes, ...]] = []
    run = bytearray()
    for op, value in [*tree, (None, None)]:
        name = str(op)
        if name == "LITERAL" and value < 256:
            run.append(value)
            continue
        literal = bytes(run).lower() if lower else bytes(run)
        run = bytearray()
        # Lower case is done by bytes here, by the pattern's rules there: the same for ASCII only.
        if literal and b"\n" not in literal and not (lower and max(literal) >= 0x80):
            found.append((literal,))
        if name == "SUBPATTERN" and not value[1]:
            found.extend(_choices(value[3], lower))
        elif name == "BRANCH":
            found.extend(_branches(value[1], lower))
        elif name in _REPEATS and value[0] >= 1:
            found.extend(_choices(value[2], lower))
    return found


def _branches(branches: list[Any], lower: bool) -> list[tuple[bytes, ...]]:
    """Return one set with the best literal of each branch, if every branch has one."""
    members: list[bytes] = []
    for branch in branches:
        choices = _choices(branch, lower)
        if not choices:
            return []
        members.extend(sorted(choices, key=_worth)[-1])
    return [tuple(dict.fromkeys(members))] if len(members) <= _MAX_BRANCHES else []


def _worth(literals: tuple[bytes, ...]) -> tuple[int, int]:
    """Longer literals first, then fewer."""
    return min(map(len, literals)), -len(literals)


def _scannable(tree: Any, repeated: bool = False) -> bool:
    """True when a match in a line is also found in a text around it, and open repeats stay within their line."""
    for op, value in tree:
        name = str(op)
        if name in ("ASSERT_NOT", "ASSERT", "ATOMIC_GROUP", "POSSESSIVE_REPEAT", "GROUPREF_EXISTS"):
            return False
        if name == "AT" and str(value) not in ("AT_BEGINNING", "AT_BOUNDARY"):
            return False
        if repeated and not _avoids_newline(name, value):
            return False
        inside = repeated or (name in _REPEATS and int(value[1]) >= _UNBOUNDED)
        if not all(_scannable(child, inside) for child in _children(name, value)):
            return False
    return True


def _avoids_newline(op: str, value: Any) -> bool:
    if op == "LITERAL":
        return bool(value != 10)
    if op == "IN":
        return all(_member_avoids_newline(str(kind), item) for kind, item in value)
    return op in ("ANY", "SUBPATTERN", "BRANCH", *_REPEATS)


def _member_avoids_newline(kind: str, item: Any) -> bool:
    if kind == "RANGE":
        return not item[0] <= 10 <= item[1]
    if kind == "CATEGORY":
        return str(item) in ("CATEGORY_DIGIT", "CATEGORY_WORD")
    return kind == "LITERAL" and item != 10
