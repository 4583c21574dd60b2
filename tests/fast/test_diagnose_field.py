"""`supervisor diagnose` on failures of the field, composed by hand, and what no rule of it may forget.

In: `data/field_cases.txt`. Out: category and culprits as written there before the diagnosis had seen them.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from remote_agent.diagnose.signatures import SIGNATURES
from supervisor.postmortem import reading
from supervisor.postmortem.diagnosis import diagnose
from tests.bench import crossval


class Case(NamedTuple):
    title: str
    categories: list[str]
    ranks: list[int]
    files: dict[str, str]


def read_cases() -> list[Case]:
    text = (Path(__file__).parent / "data" / "field_cases.txt").read_text()
    cases = []
    for part in text.split("\n=== ")[1:]:
        head, _, body = part.partition("\n")
        title, categories, ranks = head.split(" | ")
        blocks = (block.partition("\n") for block in f"\n{body}".split("\n--- ")[1:])
        files = {name: f"{text.rstrip()}\n" for name, _, text in blocks}
        cases.append(Case(title, categories.split(), [int(rank) for rank in ranks.split() if rank != "-"], files))
    return cases


@pytest.mark.parametrize("case", read_cases(), ids=lambda case: case.title)
def test_a_failure_of_the_field(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in case.files.items():
        (tmp_path / name).write_text(text)
    found: list[Any] = diagnose([tmp_path])["incidents"]
    monkeypatch.setattr(reading, "WHOLE_BYTES", 0)
    monkeypatch.setattr(reading, "END_LINES", 1)
    assert diagnose([tmp_path])["incidents"] == found, "a long file says the same"
    if case.categories == ["healthy"]:
        assert found == []
        return
    (incident,) = found
    assert incident["category"] in case.categories, incident["summary"]
    assert incident["culprit_ranks"] == case.ranks, incident["summary"]


def test_no_rule_keys_on_what_is_incidental() -> None:
    """Paths, names, numbers, dates and users' own words changed, ranks permuted: the answers to the corpus stay."""
    if not crossval.CORPUS.is_dir():
        pytest.skip("no corpus here")
    cases = [json.loads(path.read_text()) for path in sorted(crossval.CORPUS.glob("*.json"))]
    for change in (crossval.incidental, crossval.permuted):
        lost = [case["id"] for case in cases if crossval.judge(change(case, random.Random(7))) != crossval.judge(case)]
        assert lost == []


def test_rules_are_taken_apart_and_put_together() -> None:
    for signature in SIGNATURES:
        parts = crossval.alternatives(signature.regex.pattern)
        assert "|".join(parts) == signature.regex.pattern
        assert all(re.compile(part) for part in parts)


def test_a_rule_begins_with_what_a_search_can_look_for() -> None:
    """Where all parts of an expression do, a long text is not tried at each place; two must look at whole lines."""
    parts = [part for signature in SIGNATURES for part in crossval.alternatives(signature.regex.pattern)]
    assert len([part for part in parts if not re.match(r"[\w /:]|\\\[", part)]) == 2
    for text, hits in (("OOMKilled", 1), ("xOOMKilled", 0), ("x\nKilled\n", 1), ("xKilled", 0)):
        assert sum(signature.regex.search(text) is not None for signature in SIGNATURES) == hits
