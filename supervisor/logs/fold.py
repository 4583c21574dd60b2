"""Identical lines that many ranks print at the same moment, folded into one.

In: rows by time. Out: folds in the order of their first rows; each row is in exactly one fold.

**Folds depend on the rows and their times alone, not on how many rows arrive at once.** Rows are first grouped into
records (a traceback is one). Equal records become a fold, the k-th of a rank with the k-th of the other ranks, whatever
else a rank prints between them. Then folds that differ only in their numbers are joined, again the k-th of a rank with
the k-th of the others. Both steps wait for the window, so a fold is complete at most two windows after its first row.
"""

from __future__ import annotations

import heapq
import re
from collections import deque
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Generic, Protocol, TypeVar

from remote_agent.text.rows import RECORD_LIMIT, RecordReader
from remote_agent.text.shapes import bare

# The clocks of nodes differ, and so does the time at which ranks reach the same line.
WINDOW_NS = 1_000_000_000
# This many bytes may be held until the window ends; a row takes this much memory besides its text.
HELD_LIMIT = 16 * 1024 * 1024
_ROW_COST = 256
# Longer lines are not cached.
_CACHED = 1024

_DIGITS = bytes.maketrans(b"123456789", b"000000000")
# Lines of different steps are different moments, whatever the clocks say.
_COUNTER = re.compile(rb"(?i)(?<![a-z])(?:step|iter(?:ation)?|epoch)[\"']?\s{0,4}[=:#]?\s{0,8}[\[(]?\s{0,4}(\d+)")


class FoldRow(Protocol):
    """The fields of a row that folding uses."""

    @property
    def node(self) -> str:
        """The node that it was printed on."""

    @property
    def generation(self) -> int:
        """Its generation."""

    @property
    def rank(self) -> int:
        """Its rank."""

    @property
    def stream(self) -> str:
        """Its stream."""

    @property
    def t_ns(self) -> int:
        """Its time of arrival."""

    @property
    def text(self) -> bytes:
        """Its text."""


R = TypeVar("R", bound=FoldRow)
Key = tuple[int, str, tuple[object, ...]]


@lru_cache(4096)
def _bare(text: bytes) -> str:
    return bare(text.decode(errors="surrogateescape"))


def shape_of(text: bytes) -> tuple[str, tuple[bytes, ...]]:
    """Return a key that is equal for lines that fold: the text without its numbers, except steps and epochs."""
    zeros = text.translate(_DIGITS)
    return (_bare if len(text) <= _CACHED else _bare.__wrapped__)(zeros), tuple(_COUNTER.findall(text))


class _Record(Generic[R]):
    """A line and the lines that continue it."""

    __slots__ = ("is_open", "rows", "t_ns")

    def __init__(self, t_ns: int, row: R) -> None:
        self.t_ns = t_ns
        self.rows = [row]
        self.is_open = True

    def key(self) -> Key:
        """Return a key that is equal for records that fold."""
        first = self.rows[0]
        return first.generation, first.stream, tuple(shape_of(row.text) for row in self.rows)


class Fold(Generic[R]):
    """Records of equal shape, one per rank, in order of arrival."""

    __slots__ = ("differs", "key", "number", "records", "t_ns")

    def __init__(self, key: Key, t_ns: int) -> None:
        self.key = key
        self.t_ns = t_ns
        self.number = 0
        """Its number among the folds of its shape."""
        self.records: list[list[R]] = []
        self.differs = False
        """The numbers in the lines differ between the ranks."""

    def add(self, rows: list[R]) -> None:
        """Add the record of another rank."""
        self.differs = self.differs or any(
            row.text != first.text for row, first in zip(rows, (self.records or [rows])[0], strict=True)
        )
        self.records.append(rows)

    @property
    def first_rows(self) -> list[R]:
        """The rows of the first rank, which are shown for all."""
        return self.records[0]

    @property
    def ranks(self) -> list[int]:
        """The ranks, in order."""
        return sorted({rows[0].rank for rows in self.records})

    @property
    def rows(self) -> list[R]:
        """Every row, rank after rank."""
        return [row for rows in self.records for row in rows]


class _SameText(Generic[R]):
    """The open folds of one text, and the position of each rank in them."""

    __slots__ = ("first", "folds", "standing")

    def __init__(self) -> None:
        self.folds: deque[Fold[R]] = deque()
        self.first = 0
        """The number of the first open fold."""
        self.standing: dict[tuple[str, int], int] = {}
        """The number of the next fold that each rank may join."""

    def join(self, record: _Record[R], key: Key) -> Fold[R]:
        """Add a record to the next fold, a new one if there is none."""
        who = _who(record.rows)
        at = max(self.standing.get(who, 0) - self.first, 0)
        while at < len(self.folds) and not self.folds[at].records:
            # It was joined to another fold.
            at += 1
        if at == len(self.folds):
            self.folds.append(Fold(key, record.t_ns))
        self.folds[at].add(record.rows)
        self.standing[who] = self.first + at + 1
        return self.folds[at]

    def take(self) -> bool:
        """Remove the first fold; returns False when it was the last one."""
        self.folds.popleft()
        self.first += 1
        return bool(self.folds)


class _SameShape(Generic[R]):
    """The open folds of one shape."""

    __slots__ = ("equals", "first", "folds", "waiting")

    def __init__(self) -> None:
        self.folds: deque[tuple[Fold[R], tuple[bytes, ...]]] = deque()
        """The folds in order, with their texts."""
        self.first = 0
        """The number of the first one."""
        self.equals: dict[tuple[bytes, ...], _SameText[R]] = {}
        self.waiting: dict[tuple[str, int], list[tuple[int, Fold[R]]]] = {}
        """A heap of the folds of each rank, some of which are complete."""

    def join(self, record: _Record[R], key: Key) -> Fold[R] | None:
        """Add a record to the next fold of its text; return the new fold if there is none."""
        text = tuple(row.text for row in record.rows)
        fold = self.equals.setdefault(text, _SameText()).join(record, key)
        is_fresh = len(fold.records) == 1
        if is_fresh:
            fold.number = self.first + len(self.folds)
            self.folds.append((fold, text))
        heapq.heappush(self.waiting.setdefault(_who(record.rows), []), (fold.number, fold))
        return fold if is_fresh else None

    def take(self) -> Fold[R]:
        """Remove the first fold, joined with those that differ only in numbers; empty if it was joined to another."""
        fold, text = self.folds.popleft()
        self.first += 1
        if not self.equals[text].take():
            del self.equals[text]
        if fold.records:
            self._gather(fold)
        return fold

    def _gather(self, fold: Fold[R]) -> None:
        ranks = {_who(rows) for rows in fold.records}
        nexts = [self._next(who) for who in list(self.waiting)]
        others = {other.number: other for other in nexts if other is not None}
        for _, other in sorted(others.items()):
            if other.t_ns - fold.t_ns > WINDOW_NS:
                break
            theirs = {_who(rows) for rows in other.records}
            if not theirs & ranks:
                for rows in other.records:
                    fold.add(rows)
                other.records = []
            # A later line of a rank must not be joined before an earlier one.
            ranks |= theirs
        fold.records.sort(key=lambda rows: rows[0].t_ns)

    def _next(self, who: tuple[str, int]) -> Fold[R] | None:
        """Return the first open fold with this rank in it."""
        heap = self.waiting[who]
        while heap and (heap[0][0] < self.first or not heap[0][1].records):
            heapq.heappop(heap)
        if not heap:
            del self.waiting[who]
            return None
        return heap[0][1]


def _who(rows: Sequence[FoldRow]) -> tuple[str, int]:
    return rows[0].node, rows[0].rank


class Folder(Generic[R]):
    """Folds rows as they arrive."""

    def __init__(self, limit: int = HELD_LIMIT) -> None:
        self._limit = limit
        self._now_ns = 0
        self._held = 0
        self._files: dict[tuple[str, int, int, str], tuple[RecordReader, _Record[R]]] = {}
        self._records: deque[_Record[R]] = deque()
        self._folds: deque[Fold[R]] = deque()
        self._shapes: dict[Key, _SameShape[R]] = {}

    def feed(self, rows: Iterable[R]) -> list[Fold[R]]:
        """Add rows; returns the folds that are complete now."""
        done: list[Fold[R]] = []
        for row in rows:
            if not self._continue(row):
                # A row that arrives late counts as new: complete folds do not change.
                self._now_ns = max(self._now_ns, row.t_ns)
                self._begin(row)
                self._settle(done)
            self._held += len(row.text) + _ROW_COST
            while self._held > self._limit:
                self._make_room(done)
        return done

    def until(self, t_ns: int) -> list[Fold[R]]:
        """Advance the time; returns the folds that are complete now."""
        done: list[Fold[R]] = []
        self._now_ns = max(self._now_ns, t_ns)
        self._settle(done)
        return done

    def rest(self) -> list[Fold[R]]:
        """Return all folds that are left, at the end of the rows."""
        done: list[Fold[R]] = []
        while self._records:
            self._join(self._records.popleft(), done)
        while self._folds:
            self._complete(done)
        self._files.clear()
        return done

    def _continue(self, row: R) -> bool:
        """Add a row to the newest record of its file, if it continues it."""
        reader, record = self._files.get((row.node, row.generation, row.rank, row.stream), (None, None))
        if reader is None or record is None or not reader.continues(row.text):
            return False
        if not record.is_open or row.t_ns - record.t_ns > WINDOW_NS or len(record.rows) >= RECORD_LIMIT:
            return False
        record.rows.append(row)
        return True

    def _begin(self, row: R) -> None:
        file = (row.node, row.generation, row.rank, row.stream)
        record = _Record(self._now_ns, row)
        known = self._files.get(file)
        if known is None:
            reader = RecordReader()
            reader.continues(row.text)
        else:
            reader = known[0]
            known[1].is_open = False
        self._files[file] = (reader, record)
        self._records.append(record)

    def _settle(self, done: list[Fold[R]]) -> None:
        """Fold complete records, then complete the folds that no record can join any more."""
        records = self._records
        while records and (not records[0].is_open or self._now_ns - records[0].t_ns > WINDOW_NS):
            self._join(records.popleft(), done)
        self._complete_before((records[0].t_ns if records else self._now_ns) - WINDOW_NS, done)

    def _join(self, record: _Record[R], done: list[Fold[R]]) -> None:
        record.is_open = False
        self._complete_before(record.t_ns - WINDOW_NS, done)
        key = record.key()
        fresh = self._shapes.setdefault(key, _SameShape()).join(record, key)
        if fresh is not None:
            self._folds.append(fresh)

    def _complete_before(self, t_ns: int, done: list[Fold[R]]) -> None:
        while self._folds and self._folds[0].t_ns < t_ns:
            self._complete(done)

    def _complete(self, done: list[Fold[R]]) -> None:
        key = self._folds.popleft().key
        shape = self._shapes[key]
        fold = shape.take()
        if not shape.folds:
            del self._shapes[key]
        if fold.records:
            self._held -= sum(len(row.text) + _ROW_COST for row in fold.rows)
            done.append(fold)

    def _make_room(self, done: list[Fold[R]]) -> None:
        """Complete the oldest fold early: too much is held."""
        if not self._folds:
            self._join(self._records.popleft(), done)
        self._complete(done)
