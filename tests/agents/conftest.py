"""What tests with agents share: a stub in place of torch, and the end of connections that no loop can close."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator

import pytest

from tests.stub import on_path


@pytest.fixture(scope="package", autouse=True)
def stub_torch() -> Iterator[None]:
    """Engines import the package in `tests/stub` as torch: the real one takes more than a second of each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", on_path())
        yield


@pytest.fixture
def drop_half_open() -> Iterator[None]:
    """After the test, forget connections that were still in their handshake: no loop can close those before 3.13."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
