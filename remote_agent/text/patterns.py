"""Search patterns, with a time limit and the literals that a matching line must contain; filters made of them.

In: regular expressions as typed. Out: compiled patterns with literals to search for first; whether a record is kept;
Problem ("pattern").

Patterns run on the only thread of the agent, which also sends its heartbeats: a match that takes too long is aborted.
"""

from __future__ import annotations

import importlib
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any, NamedTuple, TypeVar

from remote_agent.text.rows import without_escapes
from remote_agent.wire import Problem

# This is the parser of the standard library; its old name was removed in 3.13.
_parser: Any = importlib.import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")
_MAX_PATTERN = 4096
_MAX_BRANCHES = 8
_MAX_CHOICES = 3
# Time limit for one line: some patterns take exponential or polynomial time in its length.
LINE_S = 0.1
# Time limit for several lines at once; if it is over, each is tried by itself.
TRY_S = 0.01
_REPEATS = ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT")

_T = TypeVar("_T")

_PATTERNS_LIMIT = 32


class TooLong(Exception):
    """A regular expression took too long."""


def _ring(_number: int, _frame: FrameType | None) -> None:
    raise TooLong


def within(seconds: float, work: Callable[[], _T]) -> _T:
    """Return work(), a search by a regular expression; raises TooLong after this many seconds of processor time.

    Processor time, because ranks may leave little of it to the agent. Python's matcher checks for signals while it
    runs; outside of the main thread nothing can interrupt it.
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
    """A compiled pattern and how to find candidate lines."""

    regex: re.Pattern[bytes]
    choices: tuple[tuple[bytes, ...], ...]
    """A matching line contains a member of each of these sets, in lower case when `lower`."""
    lower: bool
    plain: bool
    """True when the pattern is a literal: no regular expression needs to run."""

    def matches(self, text: bytes) -> bool:
        """Return whether the visible text matches; raises TooLong."""
        seen = without_escapes(text)
        return within(LINE_S, lambda: self.regex.search(seen)) is not None

    def tried(self, lines: Sequence[bytes]) -> list[bool]:
        """Return for each line without its escape codes whether it may match; all may if that takes too long."""
        search = self.regex.search
        try:
            # A row shows what follows the last \r.
            return within(TRY_S, lambda: [b"\r" in line or search(line) is not None for line in lines])
        except TooLong:
            return [True] * len(lines)

    def where(self, text: bytes) -> bytes | None:
        """Return the text in which to search for `choices`; None when it has no member of one of the sets."""
        where = text.lower() if self.lower and self.choices else text
        return where if all(any(literal in where for literal in choice) for choice in self.choices) else None


def ignores_case(pattern: str) -> bool:
    """Return True for a pattern without a capital letter, as in lnav and vim; the one in \\S does not count."""
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
    choices: list[tuple[bytes, ...]] = []
    if not tree.state.flags & re.IGNORECASE or ignore_case:
        choices = sorted(_choices(tree, ignore_case), key=_worth, reverse=True)[:_MAX_CHOICES]
    if not raw:
        # Every line matches.
        return Pattern(regex, (), ignore_case, True)
    plain = all(str(op) == "LITERAL" for op, _ in tree) and len(choices) == 1 and len(tree) == len(choices[0][0])
    return Pattern(regex, tuple(choices), ignore_case, plain)


def _choices(tree: Any, lower: bool) -> list[tuple[bytes, ...]]:
    """Return sets of literals; each match contains a member of each set."""
    choices: list[tuple[bytes, ...]] = []
    run = bytearray()
    for op, value in [*tree, (None, None)]:
        name = str(op)
        if name == "LITERAL" and value < 256:
            run.append(value)
            continue
        literal = bytes(run).lower() if lower else bytes(run)
        run = bytearray()
        # Bytes are lowered here, characters in the pattern: both agree only for ASCII.
        if literal and b"\n" not in literal and not (lower and max(literal) >= 0x80):
            choices.append((literal,))
        if name == "SUBPATTERN" and not value[1]:
            choices.extend(_choices(value[3], lower))
        elif name == "BRANCH":
            choices.extend(_branches(value[1], lower))
        elif name in _REPEATS and value[0] >= 1:
            choices.extend(_choices(value[2], lower))
    return choices


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
    """Return the sort key of literals: longer ones come first, then fewer."""
    return min(map(len, literals)), -len(literals)


class Filter(NamedTuple):
    """Keeps a record if one of its lines matches one of `include` (none: any) and no line matches one of `exclude`."""

    include: tuple[Pattern, ...] = ()
    exclude: tuple[Pattern, ...] = ()

    def may_keep(self, data: bytes) -> bool:
        """Return False when no line in these bytes can match an included pattern."""
        data = without_escapes(data)
        return not self.include or any(_may_match(pattern, data) for pattern in self.include)

    def keeps(self, lines: Iterable[bytes]) -> bool:
        """Return True for a record that is shown; raises Problem (pattern) when a pattern takes too long."""
        if not self.include and not self.exclude:
            return True
        texts = list(map(without_escapes, lines))
        try:
            return within(LINE_S, lambda: self._keeps(texts))
        except TooLong:
            raise Problem(
                "pattern",
                f"the filter takes more than {LINE_S:g} s on: {texts[0][:80].decode(errors='replace')}",
                "use fewer * and + in its patterns, or put words between them",
            ) from None

    def _keeps(self, texts: list[bytes]) -> bool:
        if any(pattern.regex.search(text) for pattern in self.exclude for text in texts):
            return False
        return not self.include or any(pattern.regex.search(text) for pattern in self.include for text in texts)


def _may_match(pattern: Pattern, data: bytes) -> bool:
    if pattern.choices:
        return pattern.where(data) is not None
    return any(pattern.tried(data.split(b"\n")))


def make_filter(include: Sequence[str] | None, exclude: Sequence[str] | None) -> Filter:
    """Return the filter of these patterns; raises Problem (pattern, usage)."""
    if len(include or ()) + len(exclude or ()) > _PATTERNS_LIMIT:
        raise Problem("usage", f"a filter has at most {_PATTERNS_LIMIT} patterns")
    return Filter(_compiled(include), _compiled(exclude))


def _compiled(patterns: Sequence[str] | None) -> tuple[Pattern, ...]:
    return tuple(compile_pattern(text, ignores_case(text)) for text in patterns or ())
