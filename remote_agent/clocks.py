"""Time: what leases are measured with, and the offset between two machines' wall clocks.

In: the kernel's clocks, heartbeats and their answers. Out: seconds that never go back, nanoseconds to add.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

# Enough to find a quiet moment of the network; few enough to follow a clock that drifts.
CLOCK_SAMPLES = 16
# Unlike the monotonic clock it counts while a machine is suspended: the others count on.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def now() -> float:
    """Return seconds of a clock that never goes back, for leases and everything compared with them."""
    return time.clock_gettime(_CLOCK)


class Offset:
    """How far the coordinator's wall clock is ahead of ours, from heartbeats and their answers (as NTP does)."""

    def __init__(self, ours: bool = False) -> None:
        """Begin without a sample; `ours`: the coordinator's clock is this very machine's."""
        self._samples: list[tuple[int, int]] = [(0, 0)] if ours else []

    def sample(self, sent_ns: int, received_there_ns: int, answered_there_ns: int) -> None:
        """Take one heartbeat's four times in; the fourth is now."""
        now_ns = time.time_ns()
        delay = (now_ns - sent_ns) - (answered_there_ns - received_there_ns)
        if delay < 0:
            # A clock was set meanwhile: what was measured before does not hold either.
            self._samples = []
            return
        offset = ((received_there_ns - sent_ns) + (answered_there_ns - now_ns)) // 2
        self._samples = [*self._samples[-CLOCK_SAMPLES + 1 :], (delay, offset)]

    @property
    def ns(self) -> int:
        """Nanoseconds to add to our time to get the coordinator's: of the sample with the shortest way."""
        return min(self._samples)[1] if self._samples else 0

    @property
    def error_ns(self) -> int | None:
        """That is right within so many nanoseconds, half the shortest way; None before the first sample."""
        return min(self._samples)[0] // 2 if self._samples else None

    def told(self) -> dict[str, int | None]:
        """Return what the coordinator is told: the offset, and how far it may be wrong."""
        return {"offset_ns": self.ns, "clock_error_ns": self.error_ns}


class Clock(NamedTuple):
    """A member's wall clock as the coordinator knows it."""

    offset_ns: int = 0
    """To be added to its time."""
    error_ns: int | None = None
    """None before it has measured."""

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> Clock:
        """Read what `Offset.told` says, among other things."""
        return cls(int(told.get("offset_ns", 0)), told.get("clock_error_ns"))

    def status(self) -> dict[str, float | None]:
        """Return the contract's clock_offset_ms, how far it is ahead, and clock_error_ms."""
        error_ms = None if self.error_ns is None else round(self.error_ns / 1e6, 3)
        return {"clock_offset_ms": round(-self.offset_ns / 1e6, 3), "clock_error_ms": error_ms}

    def corrected(self, ended: Mapping[str, Any]) -> dict[str, Any]:
        """Return a rank's end at the coordinator's time, with what was done to it."""
        t_ns = int(ended["t_ns"]) + self.offset_ns
        return {**ended, "t_ns": t_ns, "shift_ns": self.offset_ns, "clock_error_ns": self.error_ns or 0}
