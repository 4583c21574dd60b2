"""Verdicts on failures that are written as texts, `data/verdict_stories.txt`: exits, times and stderr of ranks.

In: stories of four ranks on two nodes. Out: category, culprits, and words of the verdict.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from remote_agent.diagnose.evidence import JobContext, RankEvidence
from remote_agent.diagnose.signatures import SIGNATURES
from remote_agent.diagnose.verdict import verdict
from supervisor.postmortem import reading
from supervisor.postmortem.diagnosis import diagnose
from tests.fast import corpus
from tests.fast.cases import Case, read_cases

SECOND = 1_000_000_000
START = 1_795_000_000 * SECOND
NODES = {"n1": [0, 1], "n2": [2, 3]}


def trace(text: str) -> str:
    return f'Traceback (most recent call last):\n  File "/w/train.py", line 88, in forward\n    go()\n{text}'


# What stands for a text that many stories have.
TEXTS = {
    "@reset": trace("RuntimeError: [gloo/transport/tcp/pair.cc:544] Connection closed by peer [10.0.0.3]:40112"),
    "@oom": trace("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."),
    "@einops": trace("ModuleNotFoundError: No module named 'einops'"),
    **{f"@file{rank}": trace(f"FileNotFoundError: [Errno 2] No such file: '/data/{rank}.bin'") for rank in range(4)},
    "@key": trace("KeyError: 'x'"),
    "@value": trace("ValueError: bad batch"),
    "@mesh": trace(
        "RuntimeError: Gloo connectFullMesh failed with [/pytorch/gloo/transport/tcp/pair.cc:152] timed out "
        "connecting: SO_ERROR: Connection refused, remote=[127.0.1.1]:55175$3"
    ),
    "@remote": trace(
        "torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error"
    ),
    "@waited": trace("torch.distributed.DistStoreError: wait timeout after 10000ms, keys: /default_pg/0//barrier"),
    "@astray": trace(
        "torch.distributed.DistNetworkError: The client socket has failed to connect to any network address of "
        "(10.255.255.1, 41327)."
    ),
    "@nowhere": trace("RuntimeError: [enforce fail] ifa != nullptr. Unable to find address for: eth7"),
}
# rank 2: exit 1 at 0.5 raised, rank 3: SIGABRT at 1, rank 1: stopped exit 6 at 2 over 0.9 asked 1.5
_RANK = re.compile(
    r"rank (?P<rank>\d+): (?P<stopped>stopped )?(?:exit (?P<code>\d+)|(?P<signal>SIG\w+)) at (?P<at>[\d.]+)"
    r"(?: over (?P<over>[\d.]+))?(?: asked (?P<asked>[\d.]+))?(?P<raised> raised)?$"
)


class Story(NamedTuple):
    title: str
    categories: list[str]
    ranks: list[int]
    words: list[str]
    """Words of the summary; `!` before those that it must not have, `hint:` or another field."""
    blocks: list[tuple[str, str]]


def read_stories() -> list[Story]:
    stories = []
    for case in [*read_cases("verdict_stories.txt"), *read_cases("verdicts.txt")]:
        title, categories, ranks, words = case.fields
        culprits = [int(rank) for rank in ranks.split() if rank != "-"]
        blocks = [(head, _whole(text)) for head, text in case.blocks]
        stories.append(Story(title, categories.split(), culprits, words.split(" & "), blocks))
    return stories


def _whole(text: str) -> str:
    for name, whole in TEXTS.items():
        text = text.replace(name, whole)
    return text


def evidence_of(head: str, text: str) -> RankEvidence:
    match = _RANK.match(head)
    assert match is not None, head
    number, at_ns = int(match["rank"]), START + int(float(match["at"]) * SECOND)
    times = {f"{name}_ns": START + int(float(match[name]) * SECOND) for name in ("over", "asked") if match[name]}
    lines = text.splitlines()
    # As the bootstrap writes it: the exception that ended the script, with its whole traceback.
    begin = next((place for place, line in enumerate(lines) if "Traceback (most recent call last)" in line), 0)
    callstack = "\n".join(lines[begin:])
    error = {"message": callstack.rpartition("\n")[2], "callstack": callstack, "timestamp_ns": at_ns - SECOND // 100}
    exit_: Any = {
        "rank": number, "local_rank": number % 2, "pid": 4000 + number, "signal": match["signal"], "core": False,
        "code": None if match["code"] is None else int(match["code"]), "t_ns": at_ns, "tail": text,
        "stderr_lines": len(lines), "error": error if match["raised"] else None,
        "stopped_by_us": bool(match["stopped"]), **times,
    }  # fmt: skip
    return RankEvidence.from_exit(exit_, "n1" if number < 2 else "n2", {"stderr": f"rank_{number}/stderr.log"})


def judge(story: Story) -> Any:
    """Return the incident; ranks that the story does not mention were stopped by supervisor at the end."""
    looks = {
        name: json.loads(rest)
        for head, _ in story.blocks
        for name, _, rest in [head.partition(" ")]
        if rest[:1] in ("{", "[")
    }
    ranks = [evidence_of(head, text) for head, text in story.blocks if head.startswith("rank ")]
    known = {each.rank for each in ranks}
    last_s = max((((each.exit or {})["t_ns"] or 0) - START) / SECOND for each in ranks)
    alone = any(head == "nobody else" for head, _ in story.blocks)
    others = (rank for rank in range(0 if alone else 4) if rank not in known)
    ranks += [evidence_of(f"rank {rank}: stopped SIGTERM at {last_s + 1}", "") for rank in others]
    return verdict(ranks, JobContext(**{"world_size": 4, "ranks_per_node": NODES, **looks}))


def misses(story: Story) -> list[str]:
    """Return what is wrong with the verdict of a story."""
    incident = judge(story)
    summary, hint = incident["summary"], incident["hint"]
    wrong = [] if incident["category"] in story.categories else [f"category {incident['category']}"]
    if incident["culprit_ranks"] != story.ranks:
        wrong.append(f"culprits {incident['culprit_ranks']}")
    for word in story.words:
        plain = word.removeprefix("!")
        field, colon, rest = plain.partition(":")
        known = colon and field in incident
        holds = (rest in str(incident[field]) if known else plain in summary) is (plain == word)
        wrong += [] if holds else [f"{word!r}"]
    return [*wrong, summary, hint] if wrong else []


@pytest.mark.parametrize("story", read_stories(), ids=lambda story: story.title)
def test_a_story(story: Story) -> None:
    assert misses(story) == []


# `supervisor diagnose` on failures of the field, composed by hand, and what no rule of it may forget.


@pytest.mark.parametrize(
    "case",
    [case for name in ("field_cases", "log_cases", "claims", "who") for case in read_cases(f"{name}.txt")],
    ids=lambda case: case.fields[0],
)
def test_a_failure_of_the_field(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, categories, ranks, *words = case.fields
    for name, text in case.blocks:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n" if text else "")
    found: list[Any] = diagnose([tmp_path])["incidents"]
    monkeypatch.setattr(reading, "WHOLE_BYTES", 0)
    monkeypatch.setattr(reading, "END_LINES", 1)
    assert diagnose([tmp_path])["incidents"] == found, "a long file says the same"
    if categories == "healthy":
        assert found == []
        return
    incident = found[0]
    told = "+".join(each["category"] for each in found)
    assert told in categories.split(), incident["summary"]
    assert incident["culprit_ranks"] == [int(rank) for rank in ranks.split() if rank != "-"], incident["summary"]
    assert [word for word in " & ".join(words).split(" & ") if not _holds(word, incident, tmp_path)] == [], incident


def _holds(word: str, incident: Any, root: Path) -> bool:
    if word.startswith("at "):
        proof = incident["evidence"][0]
        return word[3:] == f"{Path(proof['file']).relative_to(root)}:{proof['line']}"
    plain = word.removeprefix("!")
    field, colon, rest = plain.partition(":")
    holds = rest in str(incident[field]) if colon and field in incident else plain in str(incident["summary"])
    return holds is (plain == word)


def test_no_rule_keys_on_what_is_incidental() -> None:
    """Paths, names, numbers, dates and users' own words changed, ranks permuted: the answers to the corpus stay."""
    if not corpus.CORPUS.is_dir():
        pytest.skip("no corpus here")
    cases = [json.loads(path.read_text()) for path in sorted(corpus.CORPUS.glob("*.json"))]
    for change in (corpus.incidental, corpus.permuted):
        lost = [case["id"] for case in cases if corpus.judge(change(case, random.Random(7))) != corpus.judge(case)]
        assert lost == []


def test_rules_are_taken_apart_and_put_together() -> None:
    for signature in SIGNATURES:
        parts = corpus.alternatives(signature.regex.pattern)
        assert "|".join(parts) == signature.regex.pattern
        assert all(re.compile(part) for part in parts)


def test_a_rule_begins_with_what_a_search_can_look_for() -> None:
    """Where all parts of an expression do, a long text is not tried at each place; two must look at whole lines."""
    parts = [part for signature in SIGNATURES for part in corpus.alternatives(signature.regex.pattern)]
    assert len([part for part in parts if not re.match(r"[\w /:]|\\\[", part)]) == 2
    for text, hits in (("OOMKilled", 1), ("xOOMKilled", 0), ("x\nKilled\n", 1), ("xKilled", 0)):
        assert sum(signature.regex.search(text) is not None for signature in SIGNATURES) == hits
