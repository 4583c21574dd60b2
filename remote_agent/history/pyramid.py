"""Series of values at several resolutions: each level has the same number of buckets, four times as wide as before.

In: times in seconds since the epoch, values. Out: least, mean and greatest value by bucket, NaN where there is none.
Pure.

A bucket's number is the time divided by the level's width, so the buckets of all nodes coincide.
"""

from __future__ import annotations

import math
import struct
import sys
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

WIDTHS_S = (2, 8, 32, 128, 512, 2048)
"""Seconds of a bucket, by level."""
BUCKETS = 256
"""Buckets of each level: the finest level covers 8 minutes, the coarsest 6 days."""
_NAN = math.nan
# The bytes of one series with all its levels; with their names and lists, all series of a node stay below 8 MB.
_SERIES_BYTES = len(WIDTHS_S) * (3 * BUCKETS * 4 + 400)
MAX_SERIES = 7_500_000 // _SERIES_BYTES
# A series goes on if it has had a value in the last buckets of the finest level.
_RECENT = 8

Name = tuple[str, int]
"""What is measured (`loss`, `gpu_use` …), and of which rank or GPU; -1: of the node."""


class Span(NamedTuple):
    """Some buckets of one series: `first` is the number of the first one."""

    width_s: int
    first: int
    low: array[float]
    mean: array[float]
    high: array[float]


class Level:
    """The newest buckets of one width."""

    __slots__ = ("_count", "high", "low", "mean", "newest", "width_s")

    def __init__(self, width_s: int) -> None:
        self.width_s = width_s
        self.newest = -1
        """The number of the newest bucket; -1: none yet."""
        self.low = array("f", [_NAN]) * BUCKETS
        self.mean = array("f", [_NAN]) * BUCKETS
        self.high = array("f", [_NAN]) * BUCKETS
        self._count = 0
        """Values in the newest bucket."""

    def add(self, number: int, value: float) -> None:
        """Add a value to a bucket; a clock that was set back adds to the newest one."""
        at = number % BUCKETS
        if number > self.newest:
            for skipped in range(max(self.newest + 1, number - BUCKETS + 1), number):
                self._put(skipped % BUCKETS, _NAN, _NAN, _NAN)
            self._put(at, value, value, value)
            self.newest, self._count = number, 1
            return
        at = self.newest % BUCKETS
        self._count += 1
        self._put(
            at,
            min(self.low[at], value),
            self.mean[at] + (value - self.mean[at]) / self._count,
            max(self.high[at], value),
        )

    def _put(self, at: int, low: float, mean: float, high: float) -> None:
        self.low[at], self.mean[at], self.high[at] = low, mean, high

    def load(self, data: bytes, at: int) -> int:
        """Read a level from the bytes of a file; returns where the next one begins."""
        self.newest = max(-1, _NEWEST.unpack_from(data, at)[0])
        self._count = 1
        at += _NEWEST.size
        self.low, self.mean, self.high = unpack(data[at : at + 3 * BUCKETS * 4], BUCKETS)
        return at + 3 * BUCKETS * 4

    def span(self, first: int, count: int) -> Span:
        """Return `count` buckets from number `first` on."""
        oldest = self.newest - BUCKETS + 1
        kept = [number % BUCKETS if oldest <= number <= self.newest else -1 for number in range(first, first + count)]
        low, mean, high = (
            array("f", [values[at] if at >= 0 else _NAN for at in kept]) for values in (self.low, self.mean, self.high)
        )
        return Span(self.width_s, first, low, mean, high)


class History:
    """All series of one node; new series replace those that have ended, and have had no new value for longest."""

    def __init__(self) -> None:
        self._series: OrderedDict[Name, tuple[Level, ...]] = OrderedDict()

    def add(self, time_s: float, samples: Mapping[Name, float]) -> None:
        """Add the values of one moment."""
        numbers = [int(time_s // width) for width in WIDTHS_S]
        for name, value in samples.items():
            levels = self._series.get(name)
            if levels is None:
                oldest = next(iter(self._series.values()), None)
                if oldest and len(self._series) >= MAX_SERIES and numbers[0] - oldest[0].newest < _RECENT:
                    continue
                levels = self._series[name] = tuple(Level(width) for width in WIDTHS_S)
                if len(self._series) > MAX_SERIES:
                    self._series.popitem(last=False)
            else:
                self._series.move_to_end(name)
            for level, number in zip(levels, numbers):
                level.add(number, value)

    def names(self) -> list[Name]:
        """Return what there is."""
        return sorted(self._series)

    def spans(self, kinds: Iterable[str], ids: Iterable[int] | None, level: int, count: int) -> dict[Name, Span]:
        """Return the newest `count` buckets of a level for the series of these kinds, and of these ranks or of all."""
        last = max((levels[level].newest for levels in self._series.values()), default=-1)
        wanted, chosen = set(kinds), None if ids is None else {-1, *ids}
        return {
            name: self._series[name][level].span(last - count + 1, count)
            for name in self.names()
            if name[0] in wanted and (chosen is None or name[1] in chosen)
        }

    # --- the file: magic, then for each series its name and for each level the newest number, low, mean, high

    def to_bytes(self) -> bytes:
        """Return everything as the contents of a file."""
        parts = [_MAGIC]
        for (kind, number), levels in self._series.items():
            parts.append(_HEAD.pack(kind.encode(), number))
            for level in levels:
                parts.append(_NEWEST.pack(level.newest))
                parts += [_little(values).tobytes() for values in (level.low, level.mean, level.high)]
        return b"".join(parts)

    @classmethod
    def from_bytes(cls, data: bytes) -> History:
        """Return what `to_bytes` gave; what is damaged or cut off is left out."""
        history = cls()
        size = _HEAD.size + len(WIDTHS_S) * (_NEWEST.size + 3 * BUCKETS * 4)
        if not data.startswith(_MAGIC):
            return history
        for begin in range(len(_MAGIC), min(len(data), len(_MAGIC) + size * MAX_SERIES) - size + 1, size):
            kind, number = _HEAD.unpack_from(data, begin)
            levels, at = tuple(Level(width) for width in WIDTHS_S), begin + _HEAD.size
            for level in levels:
                at = level.load(data, at)
            history._series[kind.rstrip(b"\0").decode("ascii", "replace"), number] = levels
        return history


_MAGIC = b"supervisor history 1\n"
_HEAD = struct.Struct("<16si")
_NEWEST = struct.Struct("<q")


def _little(values: array[float]) -> array[float]:
    """Return the same values, or a copy in the order of bytes of files and wires."""
    if sys.byteorder == "little":
        return values
    values = array("f", values)
    values.byteswap()
    return values


def pack(spans: Iterable[Span]) -> bytes:
    """Return spans as float32 bytes, least significant first: of each series low, mean, high."""
    return b"".join(_little(values).tobytes() for span in spans for values in (span.low, span.mean, span.high))


def unpack(body: bytes, count: int) -> list[array[float]]:
    """Return float32 bytes as arrays of `count` values."""
    size = 4 * count
    arrays = []
    for begin in range(0, len(body), size):
        values = array("f", body[begin : begin + size])
        arrays.append(_little(values))
    return arrays
