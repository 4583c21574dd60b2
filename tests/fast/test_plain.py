"""Documents as text: what an operator reads in status, events, incidents."""

from __future__ import annotations

import time
from typing import Any

import pytest

from remote_agent.text.names import ranges, size_text
from remote_agent.wire.events import EventType
from supervisor.wording.events import EventRows, event_line, outcome_line
from supervisor.wording.incidents import category_text, incident_lines
from supervisor.wording.stacks import stacks_lines
from supervisor.wording.status import job_rows, status_lines, status_tail
from supervisor.wording.values import age, clock, date, date_ns, duration

STATUS: Any = {
    "job": "train-k3f9",
    "state": "running",
    "generation": 2,
    "restarts": 1,
    "max_restarts": 3,
    "world_size": 3,
    "coordinator": "n1",
    "started_at": "2026-11-20T10:00:00.123Z",
    "plan": "waiting for nodes",
    "nodes": [
        {
            "name": "n1",
            "address": "10.0.0.1",
            "state": "running",
            "group_rank": 0,
            "reason": None,
            "agent_pid": 4021,
            "clock_offset_ms": 0.42,
            "ranks": [
                {
                    "rank": 0,
                    "local_rank": 0,
                    "pid": 4100,
                    "state": "running",
                    "exit_code": None,
                    "step": 120,
                    "last_output_age_s": 0.2,
                },
                {
                    "rank": 1,
                    "local_rank": 1,
                    "pid": 4101,
                    "state": "failed",
                    "exit_code": 1,
                    "step": None,
                    "last_output_age_s": 400.0,
                },
            ],
        },
        {
            "name": "n2",
            "address": "10.0.0.2",
            "state": "lost",
            "group_rank": None,
            "reason": "no heartbeat\nfor 15 s",
            "agent_pid": None,
            "clock_offset_ms": None,
            "ranks": [],
        },
    ],
    "incident": {"id": 1, "summary": "rank 1 (n1): boom"},
}
INCIDENT: Any = {
    "id": 1,
    "generation": 0,
    "time": "2026-11-20T10:00:00.123Z",
    "category": "cuda_oom",
    "scope": "one_rank",
    "culprit_ranks": [3],
    "culprit_node": "n2",
    "confidence": "established",
    "summary": "rank 3 (n2): CUDA out of memory in train.py:88 forward",
    "evidence": [{"node": "n2", "rank": 3, "file": "stderr.log", "line": 412, "text": "OutOfMemoryError"}],
    "traceback": 'Traceback (most recent call last):\n  File "train.py", line 88\x1b[2J\nOutOfMemoryError',
    "exit": {"code": 1, "signal": None},
    "hint": "lower the batch size",
    "victims": [{"ranks": [0, 1, 2, 5], "category": "nccl_remote_error", "summary": "remote closed"}],
    "missing": {
        "collective": "ALLREDUCE",
        "seq": 44,
        "waiting": [0, 2],
        "missing": [1],
        "stacks": {"1": "train.py:9 in load"},
        "sources": {"train.py:9 in load": {"first": 8, "text": "def load():\n\tready.wait()\n\nload()"}},
    },
}


def event(kind: str, **fields: Any) -> Any:
    return {
        "seq": 1,
        "time": "2026-11-20T10:00:00.123Z",
        "type": kind,
        "generation": 1,
        "node": None,
        "rank": None,
        "detail": {},
        **fields,
    }


@pytest.mark.parametrize(
    ("numbers", "text"), [([], ""), ([0], "0"), ([0, 1, 2, 5], "0-2,5"), ([3, 1, 1, 9, 8], "1,3,8-9")]
)
def test_ranges(numbers: list[int], text: str) -> None:
    assert ranges(numbers) == text


def test_status_shows_the_job_nodes_ranks_and_incident() -> None:
    lines = status_lines(STATUS)
    text = "\n".join(lines)
    assert lines[0].startswith("job train-k3f9  running  generation 2  world size 3  restarts 1/3  coordinator n1")
    n1 = next(line for line in lines if line.startswith("n1 "))
    assert n1.split() == ["n1", "running", "0", "0-1", "10.0.0.1", "+0.4", "ms", "4021"]
    assert any(line.startswith("n2 ") and line.endswith("no heartbeat for 15 s") for line in lines)
    assert any(line.split() == ["1", "n1", "1", "4101", "failed", "1", "-", "6", "min"] for line in lines)
    assert "incident 1: rank 1 (n1): boom" in text
    assert "next: waiting for nodes" in text


@pytest.mark.parametrize(
    ("why", "standby", "texts"),
    [
        (["", ""], [("ready", 283), ("ready", 290)], ["ranks started warm", "next start: n[1-2] warm (290 MB each)"]),
        (
            ["", "it has died"],
            [("ready", 283), ("loading", 0)],
            ["ranks started cold on n2: it has died", "next start: n1 warm (283 MB); n2 cold until modules are loaded"],
        ),
        (
            ["x", "x"],
            [("failed", 0), None],
            ["ranks started cold on n[1-2]: x", "next start: n1 cold: not enough memory"],
        ),
        ([None, None], [None, None], []),
    ],
)
def test_status_says_whether_starts_are_warm_and_why_not(why: list[Any], standby: list[Any], texts: list[str]) -> None:
    nodes: Any = [
        {
            **STATUS["nodes"][0],
            "name": f"n{number + 1}",
            "start": None if why[number] is None else {"warm": not why[number], "why": why[number]},
            "standby": one and {"state": one[0], "mb": one[1], "pid": 5, "modules": 9, "why": "not enough memory"},
        }
        for number, one in enumerate(standby)
    ]
    status: Any = {**STATUS, "nodes": nodes}
    tail = status_tail(status)
    assert [line for line in tail if line.startswith(("ranks started", "next start"))] == texts
    for node in (one for one in nodes if one["standby"]):
        node["standby"]["left_out"] = ["odd reads RANK when it is imported"]
    told = [line for line in status_tail(status) if line.startswith("not loaded")]
    assert told == (["not loaded early: odd reads RANK when it is imported"] if any(standby) else [])
    status["state"] = "succeeded"
    over = status_tail(status)
    assert not any(line.startswith("next start") for line in over)


HANG: Any = {
    **INCIDENT, "summary": "rank 3 (n2): stopped by a signal", "hint": "kill -CONT resumes it", "ongoing": True,
    "times_out_at": "2026-11-20T10:30:00.000Z", "restarts_at": None, "state": "open", "ended_at": None, "over": None,
}  # fmt: skip
HEALED: Any = {
    **HANG, "ongoing": False, "state": "healed", "ended_at": "2026-11-20T10:02:23.000Z",
    "over": "training resumed after 143 s",
}  # fmt: skip


def test_a_hang_has_times_of_day_where_the_text_stays() -> None:
    status: Any = {**STATUS, "condition": "hung", "incident": HANG}
    text = "\n".join(status_lines(status))
    assert text.startswith("job train-k3f9  hung  ")
    assert "next: waiting for you; torch times out at 10:30:00; `supervisor restart` starts" in text
    assert "incident 1 (hung since 10:00:00; torch times out at 10:30:00): rank 3 (n2)" in text
    assert "  hint: kill -CONT" in "\n".join(incident_lines(HANG))


def test_healed_incidents_are_described_in_the_past_without_advice() -> None:
    status: Any = {**STATUS, "condition": "running", "incident": HEALED}
    text = "\n".join([*status_lines(status), *incident_lines(HEALED)])
    assert "incident 1 (healed at 10:02:23: training resumed after 143 s): rank 3" in text
    assert "  state: healed at 10:02:23: training resumed after 143 s" in text
    for now in ("kill -CONT", "waiting for you", "times out"):
        assert now not in text
    failure: Any = {
        **INCIDENT,
        "state": "healed",
        "ended_at": "2026-11-20T10:01:00.000Z",
        "over": "generation 1 has made a step",
    }
    lines = incident_lines(failure)
    assert lines[-2:] == ["  state: healed at 10:01:00: generation 1 has made a step", "  hint: lower the batch size"]
    stopped: Any = {**HANG, "ongoing": False, "over": "restart"}
    assert "  state: hang ended: restart by an operator" in incident_lines(stopped)


def test_status_of_a_job_that_has_just_begun() -> None:
    lines = status_lines({"job": "j", "state": "starting", "generation": 0, "nodes": []})
    assert lines[0].startswith("job j  starting")


def test_events_are_one_safe_line_each() -> None:
    line = event_line(event("rank_failed", node="n2", rank=5, detail={"exit": {"code": None, "signal": "SIGKILL"}}))
    assert line.split() == ["10:00:00.123", "rank", "failed", "g1", "n2", "rank", "5", "killed", "by", "SIGKILL"]
    sent = event("signal_sent", detail={"ranks": [1, 2], "signal": "SIGUSR1", "operator": "me@here"})
    assert event_line(sent).endswith("SIGUSR1 to ranks 1-2, by me@here")
    assert "\n" not in event_line(event("job_failed", detail={"reason": "two\nlines"}))


def test_the_verdict_takes_the_row_of_what_was_known_before_it() -> None:
    def incident(seq: int, number: int, summary: str, **detail: Any) -> Any:
        return event("incident", seq=seq, time=f"t{seq}", detail={"id": number, "summary": summary, **detail})

    journal = [
        incident(1, 1, "a", preliminary=True),
        event("generation_stopped", seq=2),
        incident(3, 1, "b", preliminary=True),
        incident(4, 1, "b"),
        incident(5, 2, "c", preliminary=True),
        incident(6, 2, "d"),
        incident(7, 2, "e"),
    ]
    refined = [{**journal[3], "seq": 1, "time": "t1"}, journal[1], {**journal[5], "seq": 5, "time": "t5"}, journal[6]]
    rows = EventRows()
    assert rows.follow(journal) == rows.rows == refined
    # As a recording that goes back, and as a stream: a text that is on the terminal already is not written again.
    written = [rows.follow(journal[:count]) for count in range(len(journal) + 1)]
    assert written == [[], *([each] for each in journal[:3]), [], *([each] for each in journal[4:])]
    assert rows.rows == refined


@pytest.mark.parametrize(
    ("message", "reported"),
    [
        ("ValueError: \x1b[1mx\nsecond line", "ValueError: \\x1b[1mx"),
        (
            "ValueError: Caught in worker 0.\nOriginal Traceback (most recent call last):\n f\nKeyError: 1",
            "KeyError: 1",
        ),
        ({"message": "\nOSError: x"}, "OSError: x"),
    ],
)
def test_a_failed_rank_says_in_one_line_why(message: object, reported: str) -> None:
    failed = event("rank_failed", node="n2", rank=5, detail={"exit": {"code": 1}, "message": message})
    assert event_line(failed).endswith(f"exit 1: {reported}")


def test_only_a_job_that_goes_on_misses_its_coordinator() -> None:
    for state, notes in (("running", 1), ("succeeded", 0)):
        tail = status_tail({"state": state, "node": "n1", "coordinator_reachable": False})
        assert len(tail) == notes


def test_a_restart_is_shown_by_phase() -> None:
    phases = {"detect": 0.4, "stop": 210.0, "rendezvous": 20.0, "spawn": 50.0, "main": 490.0}
    running = event("generation_running", generation=3, detail={**phases, "world_size": 6})
    assert (
        outcome_line(running)
        == "generation 3 running: world size 6, 0.77 s (stop 0.21, rendezvous 0.02, spawn 0.05, main 0.49)"
    )
    late = event("generation_running", detail={**phases, "detect": 1500.0, "world_size": 6})
    assert "detect 1.50" in event_line(late)
    up = event("process_group_up", detail={"imports": 3104.0, "process_group": 70.0})
    assert event_line(up).endswith("process group up     g1                  imports 3.10, process group 0.07")
    assert event_line(event("first_step", detail={"first_step": 420.0})).endswith("first step 0.42")


def test_outcomes_of_other_kinds() -> None:
    stopped = event("job_stopped", detail={"reason": "an operator stopped the job"})
    assert outcome_line(stopped) == "job stopped: an operator stopped the job"
    removed = event("node_removed", node="n2", detail={"reason": "removed by an operator"})
    assert outcome_line(removed) == "node removed n2: removed by an operator"


def test_an_incident_names_culprit_victims_evidence_and_hint() -> None:
    text = "\n".join(incident_lines(INCIDENT))
    for words in (
        "CUDA out of memory in train.py:88",
        "CUDA out of memory, established; culprit: rank 3 on n2",
        "exit: exit 1",
        "failed as a consequence: ranks 0-2,5: NCCL error on another rank",
        "evidence: n2 rank 3 stderr.log:412: OutOfMemoryError",
        "hint: lower the batch size",
        "missing in ALLREDUCE 44: rank 1; waiting: ranks 0,2",
        "rank 1: train.py:9 in load\n         8  def load():\n      >  9      ready.wait()\n  evidence",
        "\\x1b[2J",
    ):
        assert words in text, words
    assert "\x1b" not in text


def test_an_incident_that_names_nobody() -> None:
    nobody: Any = {**INCIDENT, "culprit_ranks": [], "culprit_node": None}
    text = "\n".join(incident_lines(nobody))
    assert "no culprit named" in text


def test_equal_stacks_are_folded_and_the_odd_one_comes_first() -> None:
    # Another address, and another home, in each.
    text = 'Thread 0x7f{0}b (most recent call first):\n  File "/h{0}/.supervisor/trees/w-5dc20b50/t.py", line 3 in f'
    stacks = {str(rank): text.format(rank) for rank in (0, 1, 4)} | {"2": "c"}
    worker = {"pid": 7, "name": "pt_data_worker", "doing": "sleeps in pipe_read", "stack": "at x.py"}
    lines = stacks_lines(
        stacks, {"3": "n2 cannot be reached"}, {"1": [worker, {**worker, "pid": 8}]}, {"n1": "no\x1bpy-spy"}
    )
    assert lines[0] == "rank 2:"
    at = lines.index("ranks 0-1,4:")
    assert lines[at + 1 : at + 3] == ["  Thread (most recent call first):", '    File "t.py", line 3 in f']
    at = lines.index("rank 1: 2 x child process pt_data_worker sleeps in pipe_read")
    assert lines[at + 1] == "  at x.py"
    assert lines[-2:] == ["rank 3: no stack: n2 cannot be reached", "n1: no\\x1bpy-spy"]


def test_jobs_are_listed_with_their_hosts() -> None:
    rows = job_rows(
        [{"job": "a-1", "state": "running", "live": True, "created_ns": 1_700_000_000_000_000_000, "hosts": ["n1"]}]
    )
    assert rows[1][:3] == ["a-1", "running", "yes"]
    assert rows[1][5] == "2023-11-14 22:13:20"
    kept = {"job": "b-2", "state": "failed", "warm_until_ns": 1_700_000_000_000_000_000}
    assert [row[:4] for row in job_rows([kept, {"job": "a-1", "state": "running", "live": True}])] == [
        ["JOB", "STATE", "WARM UNTIL", "LIVE"],
        ["b-2", "failed", "22:13:20", "no"],
        ["a-1", "running", "--:--:--", "yes"],
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [(999, "999 B"), (1500, "1.5 kB"), (150e3, "150 kB"), (999_960, "1.0 MB"), (3.2e9, "3.2 GB"), (2.5e12, "2.5 TB")],
)
def test_sizes(value: float, text: str) -> None:
    assert size_text(value) == text


def test_status_shows_the_usage_of_nodes_and_ranks() -> None:
    gpu = {"index": 0, "use": 98, "mem_used": 71 << 30, "mem_total": 80 << 30, "temp": 66, "power": 627.3, "age_s": 1.0}
    vitals = {
        "age_s": 1.2, "every_s": 3.0, "cpu": 43.4, "mem_used": 5 << 30, "mem_total": 8 << 30, "disk_free": 1 << 40,
        "net_in": 1200.0, "net_out": None, "gpus": [gpu, {"index": 1, "use": None}],
    }  # fmt: skip
    progress = {"loss": 1.8831, "rate": 96021.0, "unit": "tok/s", "steps_s": 2.5, "lag": 0}
    first, second = STATUS["nodes"][0]["ranks"]
    ranks = [
        {**first, "progress": progress, "vitals": {"age_s": 1.2, "cpu": 101.2, "rss": 3 << 30, "gpu": 0}},
        {**second, "progress": {**progress, "loss": "nan", "rate": None}, "vitals": None},
    ]
    node: Any = {**STATUS["nodes"][0], "ranks": ranks, "vitals": vitals}
    status: Any = {**STATUS, "nodes": [node, STATUS["nodes"][1]]}
    lines = status_lines(status)
    assert lines[2].split("AGENT")[1].split() == ["CPU", "MEM", "DISK", "FREE", "NET", "IN/OUT", "GPU", "REASON"]
    assert lines[3].endswith("43%  5.0/8.0G  1.0T       1.2K/-      98%")
    assert "RATE          LAG  CPU   RSS   GPU  GPU MEM  TEMP  POWER" in lines[6]
    assert lines[7].endswith("1.883  96,021 tok/s  0    101%  3.0G  98%  71/80G   66C   627W")
    assert lines[8].endswith("nan    2.5 step/s    0    -     -     -    -        -     -")
    status["nodes"] = [{**node, "vitals": {**vitals, "age_s": 9.1}}]
    old = status_lines(status)
    assert "CPU" not in "".join(old)
    assert "LOSS" in old[5]


@pytest.mark.parametrize("kind", EventType)
def test_every_type_of_event_has_words_also_without_details(kind: EventType) -> None:
    assert "_" not in event_line(event(kind))
    assert "_" not in event_line(event(kind, detail={"reason": "why", "operator": "me"}))


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
    ("seconds", "text"),
    [(0.003, "0.003 s"), (0.84, "0.84 s"), (4.2, "4.2 s"), (59.97, "1 min"), (200, "3 min 20 s"), (7500, "2 h 05 min")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "-"), (0.2, "0.2 s"), (42, "42 s"), (400, "6 min"), (7200, "2 h"), (259200, "3 d")]
)
def test_ages(seconds: float | None, text: str) -> None:
    assert age(seconds) == text


def test_every_category_of_the_contract_has_a_display_name() -> None:
    assert category_text("hang_no_output") == "hang"
    assert category_text(None) == "other"
    assert category_text("of_a_newer_agent") == "of a newer agent"
