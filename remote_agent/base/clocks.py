"""Clocks: the one for leases, and the offset between two machines' wall clocks.

In: the kernel's clocks, heartbeats and their answers. Out: monotonic seconds; offsets in nanoseconds.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from remote_agent.wire.documents import RankExit

# These are enough samples to include a fast one, and few enough to follow a clock that drifts.
CLOCK_SAMPLES = 16
# Unlike the monotonic clock, this clock also counts while the machine is suspended, as those of other machines do.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def now() -> float:
    """Return seconds of a clock that never goes back, for leases and whatever is compared with them."""
    return time.clock_gettime(_CLOCK)


class Echo:
    """The other side's lease clock in its last answer, and when that came: with it, a message shows its own delay.

    A link that was cut delivers a heartbeat seconds after it was sent. Its sender has then been without an answer for
    those seconds, too, and may elect another coordinator: a lease begins when the heartbeat was sent.
    """

    def __init__(self, answered: float | None = None) -> None:
        """Begin with the clock in an answer that has just come; None: there was none."""
        self._answered = answered
        self._came = now()

    def facts(self) -> dict[str, float]:
        """Return what a message that is sent now carries: the clock in that answer, and the seconds since it came."""
        return {} if self._answered is None else {"answered": self._answered, "since_answer": now() - self._came}

    @staticmethod
    def delay(args: Mapping[str, Any]) -> float:
        """Return how many seconds a message was under way at most; that of the answer before it is included."""
        if "answered" not in args:
            return 0.0
        return max(0.0, now() - float(args["answered"]) - float(args["since_answer"]))


class Offset:
    """How far the coordinator's wall clock is ahead of this machine's, measured by heartbeats as NTP does."""

    def __init__(self, ours: bool = False) -> None:
        """Start without a sample; `ours`: the coordinator runs on this machine."""
        self._samples: list[tuple[int, int]] = [(0, 0)] if ours else []

    def sample(self, sent_ns: int, received_there_ns: int, answered_there_ns: int) -> None:
        """Add a heartbeat by its times; call it when the answer arrives, which is the fourth time."""
        now_ns = time.time_ns()
        delay = (now_ns - sent_ns) - (answered_there_ns - received_there_ns)
        if delay < 0:
            # A clock was set in the meantime, so earlier samples are wrong too.
            self._samples = []
            return
        offset = ((received_there_ns - sent_ns) + (answered_there_ns - now_ns)) // 2
        self._samples = [*self._samples[-CLOCK_SAMPLES + 1 :], (delay, offset)]

    @property
    def ns(self) -> int:
        """Nanoseconds to add to this machine's time to get the coordinator's, by the sample with the least delay."""
        return min(self._samples)[1] if self._samples else 0

    @property
    def error_ns(self) -> int | None:
        """The largest possible error, half the least delay; None before the first sample."""
        return min(self._samples)[0] // 2 if self._samples else None

    def report(self) -> dict[str, int | None]:
        """Return the fields that `Clock.from_report` reads."""
        return {"offset_ns": self.ns, "clock_error_ns": self.error_ns}


class Clock(NamedTuple):
    """A member's wall clock as the coordinator knows it."""

    offset_ns: int = 0
    """The time to add to the member's time."""
    error_ns: int | None = None
    """How far the offset may be wrong; None before the first measurement."""

    @classmethod
    def from_report(cls, report: Mapping[str, Any]) -> Clock:
        """Read the fields of `Offset.report`."""
        return cls(int(report.get("offset_ns", 0)), report.get("clock_error_ns"))

    @property
    def offset_ms(self) -> float:
        """The contract's clock_offset_ms, by which the member's clock is ahead."""
        return round(-self.offset_ns / 1e6, 3)

    @property
    def error_ms(self) -> float | None:
        """The contract's clock_error_ms."""
        return None if self.error_ns is None else round(self.error_ns / 1e6, 3)

    def corrected(self, ended: RankExit) -> RankExit:
        """Return an Exit with its time in the coordinator's clock, and the correction."""
        t_ns = int(ended["t_ns"] or 0) + self.offset_ns
        return {**ended, "t_ns": t_ns, "shift_ns": self.offset_ns, "clock_error_ns": self.error_ns or 0}
