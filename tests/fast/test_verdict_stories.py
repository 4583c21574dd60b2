"""Verdicts on failures that are written as texts, `data/verdict_stories.txt`: exits, times and stderr of ranks.

In: stories of four ranks on two nodes. Out: category, culprits, and words of the verdict.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from remote_agent.diagnose.evidence import JobContext, RankEvidence
from remote_agent.diagnose.verdict import verdict

SECOND = 1_000_000_000
START = 1_795_000_000 * SECOND
NODES = {"n1": [0, 1], "n2": [2, 3]}
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
    """Words of the summary; `!` before those that it must not have, `hint:` before those of the hint."""
    blocks: list[tuple[str, str]]


def read_stories(path: Path) -> list[Story]:
    stories = []
    for part in path.read_text().split("\n=== ")[1:]:
        head, _, body = part.partition("\n")
        title, categories, ranks, words = (each.strip() for each in head.split(" | "))
        blocks = [block.partition("\n") for block in f"\n{body}".split("\n--- ")[1:]]
        culprits = [int(rank) for rank in ranks.split() if rank != "-"]
        texts = [(name, text.rstrip()) for name, _, text in blocks]
        stories.append(Story(title, categories.split(), culprits, words.split(" & "), texts))
    return stories


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
        name: json.loads(rest) for head, _ in story.blocks for name, _, rest in [head.partition(" ")] if rest[:1] == "{"
    }
    ranks = [evidence_of(head, text) for head, text in story.blocks if head.startswith("rank ")]
    known = {each.rank for each in ranks}
    last_s = max((((each.exit or {})["t_ns"] or 0) - START) / SECOND for each in ranks)
    others = (rank for rank in range(4) if rank not in known)
    ranks += [evidence_of(f"rank {rank}: stopped SIGTERM at {last_s + 1}", "") for rank in others]
    return verdict(ranks, JobContext(world_size=4, ranks_per_node=NODES, **looks)).to_json()


def misses(story: Story) -> list[str]:
    """Return what is wrong with the verdict of a story."""
    incident = judge(story)
    summary, hint = incident["summary"], incident["hint"]
    wrong = [] if incident["category"] in story.categories else [f"category {incident['category']}"]
    if incident["culprit_ranks"] != story.ranks:
        wrong.append(f"culprits {incident['culprit_ranks']}")
    for word in story.words:
        if word.startswith("hint:"):
            holds = word[5:] in hint
        else:
            holds = word[1:] not in summary if word.startswith("!") else word in summary
        wrong += [] if holds else [f"{word!r}"]
    return [*wrong, summary, hint] if wrong else []


@pytest.mark.parametrize(
    "story", read_stories(Path(__file__).parent / "data" / "verdict_stories.txt"), ids=lambda story: story.title
)
def test_a_story(story: Story) -> None:
    assert misses(story) == []
