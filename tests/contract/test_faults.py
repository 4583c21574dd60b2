"""A few faults of the matrix on one job, always the same; `make faults` runs all of them, with many seeds."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.cluster import cluster_obstacle
from tests.examples import nightly
from tests.faults.matrix import BY_NAME
from tests.faults.row import run

pytestmark = [
    nightly,
    pytest.mark.skipif(cluster_obstacle() is not None, reason=cluster_obstacle() or ""),
]


def test_what_holds_while_one_thing_after_the_other_fails(tmp_path: Path) -> None:
    names = ("connections refused", "host and its disk gone", "all agents killed")
    row = [dataclasses.replace(BY_NAME[name], hosts=(3,), node_timeouts=(4.0,)) for name in names]
    results = run(row, 1, tmp_path)
    assert not [(result.did, result.violations) for result in results if result.violations]
    assert [result.fault for result in results] == [*names]
