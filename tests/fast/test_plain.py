"""Documents as text: what an operator reads in status, events, incidents."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from remote_agent.text.names import ranges, size_text
from remote_agent.wire.events import EventType
from supervisor.tui.generations import Runs
from supervisor.wording.events import EventRows, event_line, event_text, outcome_line
from supervisor.wording.incidents import category_text, incident_text
from supervisor.wording.plan import plan
from supervisor.wording.stacks import stacks_lines
from supervisor.wording.status import job_rows, status_lines, status_tail
from supervisor.wording.values import age, clock, date, date_ns, duration
from tests.fast.cases import DATA, Case, read_cases

SHOWN: dict[str, Callable[[Any], list[str]]] = {
    "status": status_lines,
    "tail": status_tail,
    "incident": incident_text,
    "event": lambda document: [event_line(document)],
    "outcome": lambda document: [outcome_line(document)],
    "stacks": lambda document: stacks_lines(*document),
    "plan": lambda document: [f"{name}: {text}" for name, text in plan(*document).facts],
    "jobs": lambda document: [" | ".join(row) for row in job_rows(document)],
}


@pytest.fixture
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("utc")
@pytest.mark.parametrize("case", read_cases("plain.txt"), ids=lambda case: case.fields[0])
def test_what_an_operator_reads_of_a_document(case: Case) -> None:
    (_, document), (_, text) = case.blocks
    shown = "\n".join(line.rstrip() for line in SHOWN[case.fields[1]](json.loads(document)))
    if os.environ.get("UPDATE_SNAPSHOTS"):
        page = DATA / "plain.txt"
        page.write_text(page.read_text().replace(f"{document}\n--- text\n{text}\n", f"{document}\n--- text\n{shown}\n"))
    assert shown == text
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f]", shown)


def event(kind: str, **fields: Any) -> Any:
    return {
        "seq": 1, "time": "2026-11-20T10:00:00.123Z", "type": kind, "generation": 1, "node": None, "rank": None,
        "detail": {}, **fields,
    }  # fmt: skip


def test_the_verdict_takes_the_row_of_what_was_known_before_it() -> None:
    def incident(seq: int, number: int, summary: str, **detail: Any) -> Any:
        return event("incident", seq=seq, time=f"t{seq}", detail={"id": number, "summary": summary, **detail})

    journal = [
        incident(1, 1, "a", preliminary=True), event("generation_stopped", seq=2),
        incident(3, 1, "b", preliminary=True), incident(4, 1, "b"), incident(5, 2, "c", preliminary=True),
        incident(6, 2, "d"), incident(7, 2, "e"),
    ]  # fmt: skip
    refined = [{**journal[3], "seq": 1, "time": "t1"}, journal[1], {**journal[5], "seq": 5, "time": "t5"}, journal[6]]
    rows = EventRows()
    assert rows.follow(journal) == rows.rows == refined
    # As a recording that goes back, and as a stream: a text that is on the terminal already is not written again.
    written = [rows.follow(journal[:count]) for count in range(len(journal) + 1)]
    assert written == [[], *([each] for each in journal[:3]), [], *([each] for each in journal[4:])]
    assert rows.rows == refined


# What the gate requires of a detail, where a text has it.
NEEDED: dict[str, Any] = {
    EventType.NODE_JOINED: {"spec": {"name": "n9", "address": "h9"}},
    EventType.NODE_READY: {"nproc": 2},
    EventType.RANK_FAILED: {"exit": {"code": 1, "signal": None}},
}


@pytest.mark.parametrize("kind", EventType)
def test_every_type_of_event_has_words_also_without_details(kind: EventType) -> None:
    needed = NEEDED.get(kind, {})
    assert "_" not in event_line(event(kind, detail=needed))
    assert "_" not in event_line(event(kind, detail={**needed, "reason": "why", "operator": "me"}))


def test_times_are_in_the_operators_zone_and_utc_only_where_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Kolkata")
    time.tzset()
    try:
        assert clock("2026-11-20T10:00:00.123Z") == "15:30:00"
        assert clock("2026-11-20T10:00:00.123Z", millis=True, utc=True) == "10:00:00.123"
        assert date("2026-11-20T23:00:00.123Z") == "2026-11-21 04:30:00"
        assert date_ns(1_700_000_000_207_000_000, millis=True) == "2023-11-15 03:43:20.207"
    finally:
        monkeypatch.undo()
        time.tzset()
    assert clock(None) == "--:--:--"
    assert date_ns(0) == "-"


@pytest.mark.parametrize(
    ("word", "values"),
    [
        (ranges, {(): "", (0,): "0", (0, 1, 2, 5): "0-2,5", (3, 1, 1, 9, 8): "1,3,8-9"}),
        (size_text, {999: "999 B", 1500: "1.5 kB", 150e3: "150 kB", 999_960: "1.0 MB", 3.2e9: "3.2 GB"}),
        (duration, {0.003: "0.003 s", 0.84: "0.84 s", 4.2: "4.2 s", 59.97: "1 min", 200: "3 min 20 s"}),
        (duration, {7500: "2 h 05 min"}),
        (age, {None: "-", 0.2: "0.2 s", 42: "42 s", 400: "6 min", 7200: "2 h", 259200: "3 d"}),
        (category_text, {"hang_no_output": "hang", None: "other", "of_a_newer_agent": "of a newer agent"}),
    ],
)
def test_numbers_and_names_in_words(word: Callable[[Any], str], values: dict[Any, str]) -> None:
    assert {value: word(value) for value in values} == values


# Which work tree a group starts from: all of its nodes have it, the journal says it, the next coordinator knows it.


OLD, NEW = "a" * 64, "b" * 64
TOLD = {"files": 2, "bytes": 1200, "paths": ["train.py", "model.py"]}


@pytest.mark.parametrize(
    ("detail", "text"),
    [
        ({"digest": NEW, **TOLD, "operator": "me@x"}, "bbbbbbbb, 2 files, 1.2 kB: train.py, model.py; by me@x"),
        ({"digest": OLD, "rollback": True, "reason": "it fails"}, "back to aaaaaaaa: it fails"),
        ({"digest": OLD, "rollback": True, "without": ["n3"]}, "back to aaaaaaaa; without n3; by an operator"),
    ],
)
def test_a_change_is_shown_with_the_run(detail: Any, text: str) -> None:
    event: Any = {"type": "tree_changed", "generation": 0, "time": "2026-11-21T14:02:00.000Z", "detail": detail}
    assert event_text(event) == text
    runs = Runs()
    started: Any = {"type": "generation_started", "generation": 1, "time": "2026-11-21T14:02:01.000Z"}
    facts = {"tree": detail["digest"], "world_size": 2, "restarts": 0, "members": []}
    started["detail"] = facts
    runs.follow([event, started])
    assert runs.runs[0].tree.startswith(f"{text} at ")
