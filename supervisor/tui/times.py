"""The time of the screens: the present, or the time of a replay.

In: the clock of a replay. Out: Unix time.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_clock: Callable[[], float] = time.time


def now() -> float:
    """Return Unix time in seconds; the screens ask for it only here."""
    return _clock()


@contextlib.contextmanager
def read_from(clock: Callable[[], float]) -> Iterator[None]:
    """Take the time from another clock, such as that of a replay."""
    global _clock
    before, _clock = _clock, clock
    try:
        yield
    finally:
        _clock = before
