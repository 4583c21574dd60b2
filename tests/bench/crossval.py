"""How far the rules of the diagnosis are fitted to the cases they were written with: `python -m tests.bench.crossval`.

In: labelled cases (default: ../shared/corpus/cases). Out: a table of scores, with incidental text changed, and without
the rules that only the cases of one source call for.

The rules are written by hand, so nothing can be trained on a part of the cases and tried on the rest. Instead each case
is changed in what must not matter: the answer has to stay. And for the cases of each source, the rules that no case of
another source calls for are taken away: what is left was not written for them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from remote_agent.diagnose import meanings
from remote_agent.diagnose.signatures import SIGNATURES
from supervisor.postmortem.diagnosis import diagnose
from tests.bench.report import Table

CORPUS = Path(__file__).resolve().parents[3] / "shared" / "corpus" / "cases"
Case = Any
Change = Callable[[Case, random.Random], Case]

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


@dataclasses.dataclass(frozen=True)
class Score:
    """Right answers of all that there are; a case that names no culprit, or one, has no say in the other's column."""

    category: tuple[int, int]
    culprit: tuple[int, int]
    restraint: tuple[int, int]

    def cells(self) -> tuple[str, str, str]:
        found = (self.category, self.culprit, self.restraint)
        category, culprit, restraint = (f"{right}/{total}" for right, total in found)
        return category, culprit, restraint


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


def score(cases: Sequence[Case]) -> Score:
    """Return how many answers are right."""
    columns = zip(*map(judge, cases), strict=True)
    rates = [[said for said in column if said is not None] for column in columns]
    category, culprit, restraint = ((sum(said), len(said)) for said in rates)
    return Score(category, culprit, restraint)


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


def tagged(form: str) -> Change:
    """All ranks in one text, each line with a tag; a case with text of no rank keeps that in a file of its own."""

    def change(case: Case, _chance: random.Random) -> Case:
        lines = [
            f"{form.format(block['rank'])}{line}"
            for block in case["ranks"]
            if block["rank"] is not None
            for line in block["text"].splitlines()
        ]
        rest = [block for block in case["ranks"] if block["rank"] is None]
        own = [{"rank": None, "stream": "stderr", "text": "\n".join(lines), "name": "all.log"}] if lines else []
        return {**case, "ranks": [*own, *rest]}

    return change


def truncated(case: Case, _chance: random.Random) -> Case:
    """The first third of each text is gone."""

    def text(old: str) -> str:
        lines = old.splitlines()
        return "\n".join(lines[len(lines) // 3 :])

    return _with_texts(case, text)


def longer(case: Case, chance: random.Random) -> Case:
    """A thousand steps before each text, with their losses."""
    steps = "".join(f"step={number} loss={chance.random():.4f}\n" for number in range(1000))
    return _with_texts(case, lambda text: f"{steps}{text}")


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


@contextmanager
def only(keep: Callable[[str], bool]) -> Iterator[None]:
    """Diagnose by those alternatives alone for which this is true."""
    left = []
    for signature in SIGNATURES:
        parts = [part for part in alternatives(signature.regex.pattern) if keep(part)]
        if parts:
            left.append(dataclasses.replace(signature, texts=tuple(parts)))
    with mock.patch.object(meanings, "SIGNATURES", tuple(left)):
        yield


def sources(cases: Sequence[Case]) -> dict[str, list[Case]]:
    """Return the cases by where they are from: a repository, where it is known."""
    found: dict[str, list[Case]] = {}
    for case in cases:
        place = re.search(r"github\.com/([\w.-]+/[\w.-]+)", case["source"])
        found.setdefault(place[1] if place else case["source"], []).append(case)
    return found


def without_own_rules(cases: Sequence[Case]) -> tuple[Score, int]:
    """Return the score where each source's cases are judged without the rules that only they call for."""
    groups = sources(cases)
    every = {part for signature in SIGNATURES for part in alternatives(signature.regex.pattern)}
    texts = {
        name: "\n".join(block["text"] for case in group for block in case["ranks"]) for name, group in groups.items()
    }
    hits = {part: {name for name, text in texts.items() if re.search(part, text, re.MULTILINE)} for part in every}
    said = []
    for name, group in groups.items():
        with only(lambda part, name=name: hits[part] != {name}):  # type: ignore[misc]
            said += [judge(case) for case in group]
    rates = [[one for one in column if one is not None] for column in zip(*said, strict=True)]
    category, culprit, restraint = ((sum(column), len(column)) for column in rates)
    return Score(category, culprit, restraint), sum(len(names) == 1 for names in hits.values())


CHANGES: dict[str, Change] = {
    "as they are": lambda case, _chance: case,
    "incidental text replaced": incidental,
    "ranks permuted": permuted,
    "one text, [rank3]: ": tagged("[rank{}]: "),
    "one text, [default3]:": tagged("[default{}]:"),
    "one text, srun's 3: ": tagged("{}: "),
    "one text, n1:3| ": tagged("n1:{}| "),
    "first third gone": truncated,
    "a thousand steps before": longer,
}


def main(argv: list[str] | None = None) -> int:
    """Print the table; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.crossval")
    parser.add_argument("folder", nargs="?", type=Path, default=CORPUS)
    parser.add_argument("--list", action="store_true", help="print each answer that a change made wrong")
    options = parser.parse_args(argv)
    cases: list[Case] = [json.loads(path.read_text()) for path in sorted(options.folder.glob("*.json"))]
    if not cases:
        parser.error(f"no cases in {options.folder}")
    rows = []
    right = {case["id"]: judge(case) for case in cases}
    for name, change in CHANGES.items():
        changed = [change(case, random.Random(case["id"])) for case in cases]
        rows.append((name, *score(changed).cells()))
        if options.list:
            lost = [case["id"] for case in changed if False in judge(case) and False not in right[case["id"]]]
            print(f"{name}: {', '.join(lost) or '-'}")
    found, alone = without_own_rules(cases)
    rows.append(("without rules of one source", *found.cells()))
    notes = (f"{alone} of the rules' alternatives are called for by the cases of one source only",)
    print(
        Table("Cases and what is changed in them", ("", "category", "culprit", "restraint"), tuple(rows), notes).text()
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
