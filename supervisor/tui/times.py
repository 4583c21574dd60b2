"""The time of the screens: the present, or the time when a bundle was made.

In: another clock. Out: Unix time.
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
    """Take the time from another clock, such as that of a bundle."""
    global _clock
    before, _clock = _clock, clock
    try:
        yield
    finally:
        _clock = before
