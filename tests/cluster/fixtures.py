"""Hosts for the tests of one file, or of one test, as a fixture; each test ends what it has started on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import pytest

from tests.cluster import Cluster, cluster_obstacle


def hosts_of(
    count: int, *, scope: Literal["module", "function"] = "module", **more: Any
) -> Callable[..., Iterator[Cluster]]:
    """Return a fixture of that many hosts; tests are skipped, with the reason, where there can be none.

    They have the agent already, unless `agent` says otherwise: test_openssh and test_first_run have the push.
    """
    more.setdefault("agent", True)

    @pytest.fixture(scope=scope)
    def hosts() -> Iterator[Cluster]:
        obstacle = cluster_obstacle()
        if obstacle:
            pytest.skip(obstacle)
        with Cluster(count, **more) as made:
            yield made

    return hosts
