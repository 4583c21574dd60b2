"""Cases of the corpus, changed in what must not matter: the rules of the diagnosis must say the same of them.

In: labelled cases. Out: their answers, and the same cases with other names, numbers and ranks.
"""

from __future__ import annotations

import random
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from supervisor.postmortem.diagnosis import diagnose

CORPUS = Path(__file__).resolve().parents[3] / "shared" / "corpus" / "cases"
Case = Any

_LIBRARY = re.compile(r"^(?:.*/)?(?:site-packages|dist-packages|python3(?:\.\d+)?)/|^[<_]|^/(?:dev|proc|sys|tmp/torch)")
_FILE = re.compile(r'File "([^"\n]+)"(, line )(\d+)((?:,? in )(\S+))?')
_PATH = re.compile(r"(?<![\w./<])/(?:[\w.@+-]+/)+[\w.@+-]+")
_HOST = re.compile(r"([A-Za-z][\w.-]*)(?=:\d+:\d+ \[\d+\])")
_ADDRESS = re.compile(r"\b(?:10|172|192)\.\d{1,3}\.\d{1,3}\.\d{1,3}\b")
_PID = re.compile(r"((?:pid|PID|process)[ :=]+)(\d{3,})")
_HEX = re.compile(r"\b0x[0-9a-f]{6,}\b")
_DATE = re.compile(r"\b(20\d\d)-(\d\d)-(\d\d)\b")
_MEASURED = re.compile(r"\b(\d+)\.(\d{2,})(?= ?(?:GiB|MiB|GB|MB|s\b|ms\b|it/s|%))")
_PLAIN = re.compile(r"\b((?:Key|Value|Type|Index|Name|Attribute|Assertion|ZeroDivision)Error: )(.+)")
_WORD = re.compile(r"[A-Za-z]{4,}")
# What stands for a rank: torch's and torchrun's tags, banners, NCCL's and servers' words.
_RANK = re.compile(
    r"(\[rank|\[default|\b[Rr]ank\s*[:=]?\s*|local_rank: |\bTP|rank=|\bDP)(\d+)(?![\d.])(?!\s*(?:%|nodes|ranks))"
)


def answer(case: Case) -> Any:
    """Return the first incident of a case, laid out as a user would have it."""
    with tempfile.TemporaryDirectory() as folder:
        for number, block in enumerate(case["ranks"]):
            name = block.get("name") or f"rank_{block['rank']}.{block['stream']}.log"
            name = f"log_{number}.txt" if block["rank"] is None and "name" not in block else name
            with Path(folder, name).open("a") as file:
                file.write(block["text"].rstrip("\n") + "\n")
        found: list[Any] = diagnose([Path(folder)])["incidents"]
    return found[0] if found else {}


def judge(case: Case) -> tuple[bool, bool | None, bool | None]:
    """Return whether category, culprit and restraint are right; None where the case does not ask."""
    expected, found = case["expected"], answer(case)
    named = found.get("culprit_ranks") or []
    accepted = {expected["category"], *expected.get("also_accept", [])} - set(expected.get("naive_wrong", []))
    scope = expected.get("culprit_scope")
    return (
        found.get("category") in accepted,
        named == [expected["culprit_rank"]] if scope == "one_rank" else None,
        len(named) != 1 if scope in ("not_in_text", "outside_the_ranks") else None,
    )


def _with_texts(case: Case, change: Callable[[str], str]) -> Case:
    return {**case, "ranks": [{**block, "text": change(block["text"])} for block in case["ranks"]]}


class _Names:
    """The same new name for the same old one."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._known: dict[str, str] = {}

    def word(self, old: str) -> str:
        made = "".join(self._chance.choices("bdfghklmprstvw", k=max(4, len(old))))
        return self._known.setdefault(old, made)

    def number(self, old: str) -> str:
        made = "".join(["1", *self._chance.choices("23456789", k=len(old) - 1)])
        return self._known.setdefault(old, made)

    def path(self, old: str) -> str:
        if _LIBRARY.search(old):
            return old
        *folders, name = old.split("/")
        stem, dot, end = name.rpartition(".")
        renamed = f"{self.word(stem)}{dot}{end}" if dot and stem else self.word(name)
        return "/".join([*(self.word(part) if part else "" for part in folders), renamed])


def incidental(case: Case, chance: random.Random) -> Case:
    """Other paths, scripts, functions, hosts, addresses, processes, years, sizes, and words of plain exceptions."""
    names = _Names(chance)
    # Times beside them have no year; leap years stay.
    years = chance.choice((4, 8, 12))

    def frame(match: re.Match[str]) -> str:
        path, line, number, into, function = match.groups()
        own = not _LIBRARY.search(path)
        named = f", in {names.word(function) if own and not function.startswith('<') else function}" if into else ""
        return f'File "{names.path(path)}"{line}{chance.randrange(1, 900) if own else number}{named}'

    def day(match: re.Match[str]) -> str:
        return f"{int(match[1]) + years}-{match[2]}-{match[3]}"

    def text(old: str) -> str:
        new = _FILE.sub(frame, old)
        new = _PATH.sub(lambda match: names.path(match.group()), new)
        new = _HOST.sub(lambda match: names.word(match[1]), new)
        new = _ADDRESS.sub(lambda match: "10." + ".".join(names.number(part) for part in match[0].split(".")[1:]), new)
        new = _PID.sub(lambda match: match[1] + names.number(match[2]), new)
        new = _HEX.sub(lambda match: "0x" + names.number(match[0][2:]), new)
        new = _MEASURED.sub(lambda match: f"{names.number(match[1])}.{names.number(match[2])}", new)
        if case["expected"]["category"] == "user_exception":
            new = _PLAIN.sub(lambda match: match[1] + _WORD.sub(lambda word: names.word(word[0]), match[2]), new)
        return _DATE.sub(day, new)

    return _with_texts(case, text)


def permuted(case: Case, chance: random.Random) -> Case:
    """Each rank under another number, wherever it is named; none where some are named by their place on a node."""
    if any("localRank" in block["text"] for block in case["ranks"]):
        return case
    named = [int(found[2]) for block in case["ranks"] for found in _RANK.finditer(block["text"])]
    filed = [block["rank"] for block in case["ranks"] if block["rank"] is not None]
    count = max([*named, *filed, case["expected"].get("culprit_rank") or 0]) + 1
    order = chance.sample(range(count), count)
    changed = _with_texts(case, lambda text: _RANK.sub(lambda match: f"{match[1]}{order[int(match[2])]}", text))
    for block in changed["ranks"]:
        block["rank"] = None if block["rank"] is None else order[block["rank"]]
    expected = dict(case["expected"])
    if expected.get("culprit_rank") is not None:
        expected["culprit_rank"] = order[expected["culprit_rank"]]
    return {**changed, "expected": expected}


def alternatives(text: str) -> list[str]:
    """Return the parts of a regular expression between its outermost bars."""
    parts, depth, at = [""], 0, 0
    while at < len(text):
        step = 2 if text[at] == "\\" else 1
        if text[at] == "[":
            step = text.index("]", at + 2) + 1 - at
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        if text[at] == "|" and depth == 0:
            parts.append("")
        else:
            parts[-1] += text[at : at + step]
        at += step
    return parts
