"""Node-set patterns: written order, zero padding, mistakes; the same names as ClusterShell where that can tell."""

from __future__ import annotations

import tracemalloc

import pytest
from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet
from hypothesis import given
from hypothesis import strategies as st

from supervisor.inventory import PatternError, expand
from supervisor.inventory.pattern import fold


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("n1", ["n1"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("n[0-12/4]", ["n0", "n4", "n8", "n12"]),
        ("n[3,1,7-8]", ["n3", "n1", "n7", "n8"]),
        ("b1,a[1-2]", ["b1", "a1", "a2"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("10.0.[0-1].5", ["10.0.0.5", "10.0.1.5"]),
        ("fd00::[1-2]", ["fd00::1", "fd00::2"]),
        ("n[007]", ["n007"]),
    ],
)
def test_names_come_in_written_order(pattern: str, names: list[str]) -> None:
    assert expand(pattern) == names


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("n[", "not closed"),
        ("n]", "do not match"),
        ("n[[1]]", "do not match"),
        ("n[]", "not a list of numbers"),
        ("n[a-c]", "not a list of numbers"),
        ("n[1-]", "not a list of numbers"),
        ("n[3-1]", "runs backwards; write 1-3"),
        ("n[08-100]", "mixes widths; write 008-100"),
        ("n[1-3/0]", "step 0"),
        ("a,,b", "an empty name"),
        ("", "an empty name"),
        ("n[1-10000000]", "more than 4096"),
        ("n[1-100]x[1-100]", "more than 4096"),
        (",".join(["n[1-4000]"] * 2), "more than 4096"),
        ("n[" + ",".join(["1-4096"] * 2) + "]", "more than 4096"),
        ("n" + "[1-4096]" * 2, "more than 4096"),
        ("n[" + "1" * 5000 + "]", "not a list of numbers"),
        ("n[1-4]" + "9" * 300, "a name is longer than 255 characters"),
    ],
)
def test_mistakes_are_named(pattern: str, message: str) -> None:
    with pytest.raises(PatternError, match=message):
        expand(pattern)


def test_a_pattern_that_means_too_many_names_costs_no_memory() -> None:
    tracemalloc.start()
    try:
        for pattern in ("n[" + ",".join(["1-4096"] * 500) + "]", "n" + "[1-4096]" * 500):
            with pytest.raises(PatternError, match="more than 4096") as refused:
                expand(pattern)
            assert len(str(refused.value)) < 200
        _size, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8_000_000


_range = st.builds(
    lambda low, more, step: f"{low}-{low + more}/{step}", st.integers(0, 200), st.integers(0, 15), st.integers(1, 4)
)
_padded = st.builds(lambda low, more: f"{low:02}-{low + more:02}", st.integers(0, 80), st.integers(0, 15))
_bracket = st.lists(_range, min_size=1, max_size=3).map(",".join) | _padded


@given(st.lists(_bracket, min_size=1, max_size=2))
def test_the_names_are_those_of_clustershell(brackets: list[str]) -> None:
    pattern = "n" + "x".join(f"[{bracket}]" for bracket in brackets)
    assert set(expand(pattern)) == set(NodeSet(pattern, resolver=RESOLVER_NOGROUP))


def test_names_with_numbers_that_nobody_writes_are_shown_as_they_are() -> None:
    long = "n" + "9" * 50_000
    assert fold([long, "n1", "n2", "n\u0663", "n1x" * 20_000]) == f"n[1-2],{'n1x' * 20_000},{long},n\u0663"
