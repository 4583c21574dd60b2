"""A rank with torch that is started warm trains as one that is started cold."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.agents.engine_process import SharedEngine
from tests.agents.starts import RANKS, Starts, differences
from tests.examples import nightly

pytestmark = nightly
SCRIPT = "with_torch.py"


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starts]:
    root = tmp_path_factory.mktemp("starts")
    with SharedEngine(root).running() as shared:
        yield Starts(shared, root / "tree")


def test_torch_is_the_same_in_a_warm_start(starts: Starts) -> None:
    after = starts.warm(SCRIPT)
    again = starts.warm(SCRIPT)
    before = starts.cold(SCRIPT)
    assert (after.cold, again.cold) == ("", "")
    assert [ended["code"] for ended in before.exits] == [0] * RANKS, before.err
    assert differences(before, after) == []
    assert differences(before, again) == []
    documents = [*before.documents, *after.documents, *again.documents]
    for place, name in enumerate(("torch's seed", "torch", "random", "numpy", "numpy's generator")):
        assert len({document["drawn"][place] for document in documents}) == len(documents), name
