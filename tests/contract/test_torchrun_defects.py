"""Known defects of stock torchrun: ours does not have them. `python -m tests.bench defects` shows both.

For `make nightly`: what makes the difference has tests of its own.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench import contest, defects
from tests.bench.defects import SCENARIOS, Scenario
from tests.cluster import Cluster
from tests.cluster.fixtures import hosts_of
from tests.examples import nightly

pytestmark = nightly


hosts = hosts_of(defects.HOSTS)
light_hosts = hosts_of(defects.HOSTS, stub_torch=True)


# Other tests show that ours keeps these: test_acceptance.py, test_patterns.py, test_succession.py, test_hangs.py.
ELSEWHERE = (
    "worker killed, gloo",
    "host gone",
    "rank 0's host gone",
    "agent killed",
    "a third host",
    "restart on",
    "a rank hangs",
)
HERE = [scenario for scenario in SCENARIOS if not scenario.name.startswith(ELSEWHERE)]


@pytest.mark.parametrize("scenario", HERE, ids=lambda scenario: scenario.name)
def test_ours_keeps_the_promise(request: pytest.FixtureRequest, tmp_path: Path, scenario: Scenario) -> None:
    needs_torch = "torch" in scenario.setting.script
    cluster: Cluster = request.getfixturevalue("hosts" if needs_torch else "light_hosts")
    found = defects.play(scenario, contest.ours, cluster, tmp_path / "ours", scenario.promise_s)
    print(f"\n{scenario.name}: {found}")
    assert scenario.kept(found), found
