"""What every run tries and what `make nightly` does: it tries `SUPERVISOR_EXAMPLES` times as many random examples.

In: the environment. Out: a decorator for a property; a mark for tests and cases that only `make nightly` runs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

TIMES = int(os.environ.get("SUPERVISOR_EXAMPLES", "1"))
nightly = pytest.mark.skipif(TIMES == 1, reason="for make nightly")


def examples(count: int, **more: Any) -> Callable[[Any], Any]:
    """Return hypothesis' settings for a property that tries this many examples in every run, however long one takes."""
    return settings(max_examples=count * TIMES, deadline=None, suppress_health_check=[HealthCheck.too_slow], **more)
