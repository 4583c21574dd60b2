"""A few cases of the fault matrix, always the same; `make faults` runs all of them, with many seeds."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.cluster import cluster_obstacle
from tests.faults.case import run
from tests.faults.matrix import BY_NAME

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(cluster_obstacle() is not None, reason=cluster_obstacle() or ""),
]


@pytest.mark.parametrize("fault", ["connections refused", "host and its disk gone", "all agents killed"])
def test_what_holds_while_something_fails(fault: str, tmp_path: Path) -> None:
    result = run(dataclasses.replace(BY_NAME[fault], hosts=(3,)), 1, tmp_path)
    assert not result.violations, (result.did, result.violations)
