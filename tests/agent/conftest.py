"""What tests with agents in their own process share."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator

import pytest


@pytest.fixture
def drop_half_open() -> Iterator[None]:
    """After the test, forget connections that were still in their handshake: no loop can close those before 3.13."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
