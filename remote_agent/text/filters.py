"""Filters: which records a view shows, by patterns.

In: patterns as typed, the lines of a record. Out: whether it is kept; whether some bytes may hold a record to keep.

A pattern without an upper case letter ignores case, as in a search. Patterns match the visible text of lines.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

from remote_agent.text.patterns import LINE_S, Pattern, TooLong, compile_pattern, ignores_case, within
from remote_agent.text.rows import without_escapes
from remote_agent.wire import Problem

_PATTERNS_LIMIT = 32


class Filter(NamedTuple):
    """Keeps a record if one of its lines matches one of `include` (none: any) and no line matches one of `exclude`."""

    include: tuple[Pattern, ...] = ()
    exclude: tuple[Pattern, ...] = ()

    def may_keep(self, data: bytes) -> bool:
        """False when no line in these bytes can match an included pattern."""
        data = without_escapes(data)
        return not self.include or any(_may_match(pattern, data) for pattern in self.include)

    def keeps(self, lines: Iterable[bytes]) -> bool:
        """True for a record that is shown; raises Problem (pattern) when a pattern takes too long."""
        if not self.include and not self.exclude:
            return True
        texts = list(map(without_escapes, lines))
        try:
            return within(LINE_S, lambda: self._keeps(texts))
        except TooLong:
            raise Problem(
                "pattern",
                f"the filter takes more than {LINE_S:g} s on: {texts[0][:80].decode(errors='replace')}",
                "fewer * and + in its patterns, or words between them",
            ) from None

    def _keeps(self, texts: list[bytes]) -> bool:
        if any(pattern.regex.search(text) for pattern in self.exclude for text in texts):
            return False
        return not self.include or any(pattern.regex.search(text) for pattern in self.include for text in texts)


def _may_match(pattern: Pattern, data: bytes) -> bool:
    if pattern.choices or pattern.scanner is None or b"\r" in data:
        return pattern.where(data) is not None
    try:
        return within(LINE_S, partial(pattern.scanner.search, data)) is not None
    except TooLong:
        # Trying line by line finds the one that takes too long.
        return True


def make_filter(include: Sequence[str] | None, exclude: Sequence[str] | None) -> Filter:
    """Return the filter of these patterns; raises Problem (pattern, usage)."""
    if len(include or ()) + len(exclude or ()) > _PATTERNS_LIMIT:
        raise Problem("usage", f"a filter has at most {_PATTERNS_LIMIT} patterns")
    return Filter(_compiled(include), _compiled(exclude))


def _compiled(patterns: Sequence[str] | None) -> tuple[Pattern, ...]:
    return tuple(compile_pattern(text, ignores_case(text)) for text in patterns or ())
