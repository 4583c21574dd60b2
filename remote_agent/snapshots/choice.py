"""From which snapshots a group resumes: one of each series.

In: what the nodes keep, what no longer counts, an operator's choice. Out: the chosen ones.

Without a choice it is the newest of each series. **Files of one save belong together**: who goes back to one of them
gets the others with it, whichever was written first, and no later version of any series.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from remote_agent.wire.documents import SnapshotEntry, SnapshotsChosenDetail

# Numbers behind such a word tell ranks and parts from each other, not one snapshot from the next.
_NUMBER = re.compile(r"((?:rank|shard|part|proc|worker|node|gpu|mp|tp|pp|dp|of|model)[-_.]{0,2})?\d+", re.I)
# One save writes its files within this time, where nothing else says which belong together.
SAVE_NS = 1_000_000_000
WHICH_THERE_ARE = "nodes keep the two newest of each series, and `supervisor snapshots` lists them"
"""The hint for an id that no node has, or has any more."""
Entry = TypeVar("Entry", bound="SnapshotEntry")
Span = tuple[int, int]
"""Times in ns: the first one excluded, the last one included."""


def slot_of(path: str) -> str:
    """Return what the successive snapshots of one series have in common: their path with `#` for the step."""
    return _NUMBER.sub(lambda match: match[0] if match[1] else "#", path)


def is_within(spans: Iterable[Span], time_ns: int) -> bool:
    """Return whether a time lies in one of these spans."""
    return any(begin < time_ns <= end for begin, end in spans)


@dataclasses.dataclass(frozen=True)
class Skipped:
    """What no longer counts, as an operator has gone back to an earlier snapshot."""

    spans: tuple[Span, ...] = ()
    """Spans of time whose snapshots do not count."""
    but: frozenset[str] = frozenset()
    """The snapshots from which the job has resumed last: they count, also those that their save wrote later."""

    @classmethod
    def noted(cls, detail: SnapshotsChosenDetail) -> Skipped:
        """Return what a `snapshots_chosen` of the journal says."""
        spans = tuple((begin, end) for begin, end in detail["skipped"])
        return cls(spans, frozenset(one["id"] for one in detail["snapshots"]))

    def has(self, one: SnapshotEntry) -> bool:
        """Return whether a snapshot does not count."""
        return one["id"] not in self.but and is_within(self.spans, one["time_ns"])

    def without(self, named: SnapshotEntry) -> Skipped:
        """Return what does not count for one who goes on from there: what was skipped together with it counts again."""
        spans = (span for span in self.spans if not is_within([span], named["time_ns"]))
        return Skipped(tuple(spans), self.but)

    def after(self, chosen: Iterable[SnapshotEntry], named: SnapshotEntry | None, now_ns: int) -> Skipped:
        """Return what does not count once the job has resumed; `named`: it has gone back to that one."""
        spans = self.spans if named is None else (*self.without(named).spans, (named["time_ns"], now_ns))
        return Skipped(spans, frozenset(one["id"] for one in chosen))


NOTHING_SKIPPED = Skipped()


def choose(kept: Iterable[Entry], skipped: Skipped, named: Entry | None = None) -> list[Entry]:
    """Return the newest snapshot of each series that counts, or with `named` what belongs to it.

    A series of which all versions are newer than `named` has none.
    """
    kept = sorted(kept, key=lambda each: (each["time_ns"], each["id"]))
    skipped = skipped if named is None else skipped.without(named)
    series: dict[str, list[Entry]] = {}
    for one in kept:
        if not skipped.has(one) or (named is not None and one["id"] == named["id"]):
            series.setdefault(slot_of(one["path"]), []).append(one)
    if named is None:
        return [versions[-1] for versions in series.values()]
    end_ns = _end_of_save(named, [one["time_ns"] for one in kept if slot_of(one["path"]) == slot_of(named["path"])])
    found = (_belonging_to(named, end_ns, versions) for versions in series.values())
    return [one for one in found if one is not None]


def _end_of_save(named: SnapshotEntry, own_ns: Iterable[int]) -> int:
    """Return until when files belong to the save of a snapshot: half the way to the next one of its series.

    `own_ns`: when the versions of its own series were written.
    """
    time_ns = named["time_ns"]
    later = [other - time_ns for other in own_ns if other > time_ns]
    earlier = [time_ns - other for other in own_ns if other < time_ns]
    return time_ns + (min(later or earlier) // 2 if later or earlier else SAVE_NS)


def _belonging_to(named: Entry, end_ns: int, versions: Iterable[Entry]) -> Entry | None:
    """Return the version of a series that was saved with a snapshot, or else before it."""
    step, time_ns = _exact_step(named), named["time_ns"]

    def is_of_this_step(one: Entry) -> bool:
        return step is not None and _exact_step(one) == step

    def is_later(one: Entry) -> bool:
        its_step = _exact_step(one)
        is_of_later_step = step is not None and its_step is not None and its_step > step
        return is_of_later_step or (one["time_ns"] > end_ns and not is_of_this_step(one))

    def distance(one: Entry) -> tuple[bool, bool, int]:
        return one["id"] != named["id"], not is_of_this_step(one), abs(one["time_ns"] - time_ns)

    return min((one for one in versions if not is_later(one)), key=distance, default=None)


def _exact_step(one: SnapshotEntry) -> int | None:
    return one["step"] if one.get("exact") else None
