"""How many examples hypothesis tries: few in every run, `SUPERVISOR_EXAMPLES` times as many in `make nightly`.

In: the environment. Out: a decorator for a property.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, settings

TIMES = int(os.environ.get("SUPERVISOR_EXAMPLES", "1"))


def examples(count: int, **more: Any) -> Callable[[Any], Any]:
    """Return hypothesis' settings for a property that tries this many examples in every run, however long one takes."""
    return settings(max_examples=count * TIMES, deadline=None, suppress_health_check=[HealthCheck.too_slow], **more)
