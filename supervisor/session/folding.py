"""Lines of the same shape that many ranks print at the same moment, as one.

In: rows in the order of time. Out: folds in the order of their first rows; together they hold each row once.

**What folds depends on the rows and their times alone, not on how many are given at once.** Rows first become records
(a traceback is one). Equal records become folds, the k-th of a rank with the k-th of the others, whatever else a rank
says between them: a line that only one of them has moves no other one. At last folds whose numbers alone differ become
one: of what is left by itself, again the k-th of a rank with the k-th of the others. Both wait for the window, so a
fold is told at most two windows after its first row.
"""

from __future__ import annotations

import heapq
import re
from collections import deque
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Generic, Protocol, TypeVar

from remote_agent.diagnose.shapes import bare
from remote_agent.logs.rows import RecordReader

# Clocks of nodes differ, and so do the ranks' ways to the same line.
WINDOW_NS = 1_000_000_000
# A rank that writes indented lines only is no endless record.
RECORD_LIMIT = 512
# Bytes that may wait for the end of the window; what a row costs besides its text.
HELD_LIMIT = 16 * 1024 * 1024
_ROW_COST = 256
# Longer lines are not worth remembering.
_CACHED = 1024

_DIGITS = bytes.maketrans(b"123456789", b"000000000")
# Another step is another moment, whatever the clocks say.
_COUNTER = re.compile(rb"(?i)(?<![a-z])(?:step|iter(?:ation)?|epoch)[\"']?\s{0,4}[=:#]?\s{0,8}[\[(]?\s{0,4}(\d+)")


class FoldRow(Protocol):
    """What folding needs to know of a row."""

    @property
    def node(self) -> str:
        """Where it was written."""

    @property
    def generation(self) -> int:
        """In which generation."""

    @property
    def rank(self) -> int:
        """By whom."""

    @property
    def stream(self) -> str:
        """On which stream."""

    @property
    def t_ns(self) -> int:
        """When it came."""

    @property
    def text(self) -> bytes:
        """What it says."""


R = TypeVar("R", bound=FoldRow)
Key = tuple[int, str, tuple[object, ...]]


@lru_cache(4096)
def _bare(text: bytes) -> str:
    return bare(text.decode(errors="surrogateescape"))


def shape_of(text: bytes) -> tuple[str, tuple[bytes, ...]]:
    """Return what is equal for lines that fold: the text without its numbers, but for steps and epochs."""
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
        """Return what is equal for records that fold."""
        first = self.rows[0]
        return first.generation, first.stream, tuple(shape_of(row.text) for row in self.rows)


class Fold(Generic[R]):
    """Records of equal shape, one a rank, in the order in which they came."""

    __slots__ = ("differs", "key", "number", "records", "t_ns")

    def __init__(self, key: Key, t_ns: int) -> None:
        self.key = key
        self.t_ns = t_ns
        self.number = 0
        """Which one of its shape it is."""
        self.records: list[list[R]] = []
        self.differs = False
        """The numbers are not the same on all ranks."""

    def add(self, rows: list[R]) -> None:
        """Take another rank's record."""
        self.differs = self.differs or any(
            row.text != first.text for row, first in zip(rows, (self.records or [rows])[0], strict=True)
        )
        self.records.append(rows)

    @property
    def shown(self) -> list[R]:
        """The rows of the first rank, which stand for all."""
        return self.records[0]

    @property
    def ranks(self) -> list[int]:
        """The ranks, in order."""
        return sorted({rows[0].rank for rows in self.records})

    @property
    def rows(self) -> list[R]:
        """Every row, rank after rank."""
        return [row for rows in self.records for row in rows]


class _Equals(Generic[R]):
    """The folds of one text that wait, and where each rank stands in them."""

    __slots__ = ("first", "folds", "standing")

    def __init__(self) -> None:
        self.folds: deque[Fold[R]] = deque()
        self.first = 0
        """The number of the first fold that waits."""
        self.standing: dict[tuple[str, int], int] = {}
        """By rank: the number of the next fold that it may join."""

    def join(self, record: _Record[R], key: Key) -> Fold[R]:
        """Add a record to the next fold, a new one if there is none."""
        who = _who(record.rows)
        at = max(self.standing.get(who, 0) - self.first, 0)
        while at < len(self.folds) and not self.folds[at].records:
            # It went with another one.
            at += 1
        if at == len(self.folds):
            self.folds.append(Fold(key, record.t_ns))
        self.folds[at].add(record.rows)
        self.standing[who] = self.first + at + 1
        return self.folds[at]

    def take(self) -> bool:
        """Remove the first fold; False when it was the last one."""
        self.folds.popleft()
        self.first += 1
        return bool(self.folds)


class _Likes(Generic[R]):
    """The folds of one shape that wait."""

    __slots__ = ("equals", "first", "folds", "waiting")

    def __init__(self) -> None:
        self.folds: deque[tuple[Fold[R], tuple[bytes, ...]]] = deque()
        """In order, with their texts."""
        self.first = 0
        """The number of the first one."""
        self.equals: dict[tuple[bytes, ...], _Equals[R]] = {}
        self.waiting: dict[tuple[str, int], list[tuple[int, Fold[R]]]] = {}
        """By rank: a heap of the folds that it is in, some of them gone."""

    def join(self, record: _Record[R], key: Key) -> Fold[R] | None:
        """Add a record to the next fold of its text; return the new fold if there is none."""
        text = tuple(row.text for row in record.rows)
        fold = self.equals.setdefault(text, _Equals()).join(record, key)
        is_fresh = len(fold.records) == 1
        if is_fresh:
            fold.number = self.first + len(self.folds)
            self.folds.append((fold, text))
        heapq.heappush(self.waiting.setdefault(_who(record.rows), []), (fold.number, fold))
        return fold if is_fresh else None

    def take(self) -> Fold[R]:
        """Remove the first fold, with those that differ in their numbers alone; it is empty if it went with another."""
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
            # Of a rank, what it has said later is not gathered before what it has said first.
            ranks |= theirs
        fold.records.sort(key=lambda rows: rows[0].t_ns)

    def _next(self, who: tuple[str, int]) -> Fold[R] | None:
        """Return the first fold that waits with this rank in it."""
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
    """Folds rows as they come."""

    def __init__(self, limit: int = HELD_LIMIT) -> None:
        self._limit = limit
        self._now_ns = 0
        self._held = 0
        self._files: dict[tuple[str, int, int, str], tuple[RecordReader, _Record[R]]] = {}
        self._records: deque[_Record[R]] = deque()
        self._folds: deque[Fold[R]] = deque()
        self._likes: dict[Key, _Likes[R]] = {}

    def feed(self, rows: Iterable[R]) -> list[Fold[R]]:
        """Take rows; return the folds that are complete now."""
        done: list[Fold[R]] = []
        for row in rows:
            if not self._continue(row):
                # A row that is told late belongs to now: what is told already stays.
                self._now_ns = max(self._now_ns, row.t_ns)
                self._begin(row)
                self._settle(done)
            self._held += len(row.text) + _ROW_COST
            while self._held > self._limit:
                self._give_way(done)
        return done

    def until(self, t_ns: int) -> list[Fold[R]]:
        """Learn that it is this late; return the folds that are complete now."""
        done: list[Fold[R]] = []
        self._now_ns = max(self._now_ns, t_ns)
        self._settle(done)
        return done

    def rest(self) -> list[Fold[R]]:
        """Return all that is left: nothing more comes."""
        done: list[Fold[R]] = []
        while self._records:
            self._join(self._records.popleft(), done)
        while self._folds:
            self._tell(done)
        self._files.clear()
        return done

    def _continue(self, row: R) -> bool:
        """Add a row to its file's newest record, if it goes on there."""
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
        """Pass on the records that are whole, then the folds that nothing can join any more."""
        records = self._records
        while records and (not records[0].is_open or self._now_ns - records[0].t_ns > WINDOW_NS):
            self._join(records.popleft(), done)
        self._tell_before((records[0].t_ns if records else self._now_ns) - WINDOW_NS, done)

    def _join(self, record: _Record[R], done: list[Fold[R]]) -> None:
        record.is_open = False
        self._tell_before(record.t_ns - WINDOW_NS, done)
        key = record.key()
        fresh = self._likes.setdefault(key, _Likes()).join(record, key)
        if fresh is not None:
            self._folds.append(fresh)

    def _tell_before(self, t_ns: int, done: list[Fold[R]]) -> None:
        while self._folds and self._folds[0].t_ns < t_ns:
            self._tell(done)

    def _tell(self, done: list[Fold[R]]) -> None:
        key = self._folds.popleft().key
        likes = self._likes[key]
        fold = likes.take()
        if not likes.folds:
            del self._likes[key]
        if fold.records:
            self._held -= sum(len(row.text) + _ROW_COST for row in fold.rows)
            done.append(fold)

    def _give_way(self, done: list[Fold[R]]) -> None:
        """Tell the oldest fold before its time: too much waits."""
        if not self._folds:
            self._join(self._records.popleft(), done)
        self._tell(done)
