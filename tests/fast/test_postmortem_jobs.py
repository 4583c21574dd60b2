"""`diagnose` on job directories of ours: what the journal adds to the files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from supervisor.cli import main
from supervisor.postmortem.diagnosis import diagnose
from tests.fast.journals import INCIDENT, event, journal
from tests.fast.test_postmortem import BROKEN, PEER, only, write


def test_a_job_directory_of_ours_has_one_incident_a_failed_generation(tmp_path: Path) -> None:
    job = tmp_path / "jobs" / "train-a1"
    write(
        job,
        generation_0__rank_0__stderr_dot_log="",
        generation_0__rank_1__stderr_dot_log="",
        generation_1__rank_0__stderr_dot_log="",
        generation_1__rank_1__stderr_dot_log=BROKEN,
        generation_2__rank_0__stdout_dot_log="step=1\n",
    )
    error = {"message": {"message": "ValueError: 7 classes, 6 labels", "extraInfo": {"py_callstack": BROKEN}}}
    (job / "generation_1" / "rank_1" / "error.json").write_text(json.dumps(error))
    members = [{"node": f"n{1 + at}", "group_rank": at, "base_rank": at, "nproc": 1} for at in range(2)]
    ended = {"exit": {"code": None, "signal": "SIGSEGV"}, "local_rank": 0, "pid": 5, "time_ns": 10**18, "message": None}
    reported = "kernel: python[5]: segfault at 0 ip 0"
    events = [
        {"type": "generation_started", "generation": 0, "node": None, "rank": None, "detail": {"members": members}},
        {"type": "rank_failed", "generation": 0, "node": "n1", "rank": 0, "detail": {**ended, "notes": [reported]}},
    ]
    (job / "events.jsonl").write_text(journal(events) + '{"type": "torn')
    first, second = diagnose([job])["incidents"]
    assert (first["generation"], first["category"], first["culprit_ranks"], first["culprit_node"]) == (
        0,
        "segfault",
        [0],
        "n1",
    )
    assert reported in [line["text"] for line in first["evidence"]]
    assert (second["generation"], second["category"], second["culprit_ranks"]) == (1, "user_exception", [1])
    assert [first["id"], second["id"]] == [1, 2]


def test_the_directories_of_one_job_on_several_nodes_are_one_run(tmp_path: Path) -> None:
    """The journal tells of the exit on both nodes; the words are on one. Of two jobs of one name each has its own."""
    start = {"type": "job_started", "generation": -1, "node": None, "rank": None, "detail": {}}
    ended = {"exit": {"code": 1, "signal": None}, "local_rank": 0, "pid": 5, "time_ns": 10**18, "message": None}
    failed = {
        "type": "rank_failed",
        "generation": 0,
        "node": "n2",
        "rank": 1,
        "detail": {**ended, "notes": ["reported"]},
    }
    for node, rank, text in (("n1", 0, ""), ("n2", 1, BROKEN)):
        write(tmp_path / node / "jobs" / "train-a1", **{f"generation_0__rank_{rank}__stderr_dot_log": text})
        (tmp_path / node / "jobs" / "train-a1" / "events.jsonl").write_text(journal([start, failed]))
    (incident,) = diagnose([tmp_path])["incidents"]
    assert (incident["category"], incident["culprit_ranks"]) == ("user_exception", [1])
    another = journal([{**start, "time": "2026-11-20T11:00:00.000Z"}, failed])
    (tmp_path / "n1" / "jobs" / "train-a1" / "events.jsonl").write_text(another)
    assert len(diagnose([tmp_path])["incidents"]) == 2


def test_the_journal_shows_who_left_early_whatever_the_clocks(tmp_path: Path) -> None:
    job, left_ns = tmp_path / "jobs" / "train-a1", 10**18
    said = {"message": "RuntimeError: Connection closed by peer [10.0.0.1]:4", "extraInfo": {"py_callstack": PEER}}
    write(job, generation_0__rank_0__error_dot_json="", generation_0__rank_1__stderr_dot_log="")
    file = job / "generation_0" / "rank_0" / "error.json"
    file.write_text(json.dumps({"message": said}))
    # Rank 0 failed a second later, on a clock that is five behind.
    os.utime(file, ns=(left_ns - 4 * 10**9, left_ns - 4 * 10**9))
    ended = {"exit": {"code": 1, "signal": None}, "time_ns": left_ns + 2 * 10**9, "shift_ns": 5 * 10**9}
    members = [{"node": f"n{1 + at}", "group_rank": at, "base_rank": at, "nproc": 1} for at in range(2)]
    left = {"left": [[1, left_ns + 9 * 10**9, left_ns - 3 * 10**9]], "clocks": {"n2": [3 * 10**9, 10**6]}}
    events = [
        {"type": "generation_started", "generation": 0, "node": None, "rank": None, "detail": {"members": members}},
        {"type": "rank_failed", "generation": 0, "node": "n1", "rank": 0, "detail": ended},
        {"type": "generation_stopped", "generation": 0, "node": None, "rank": None, "detail": left},
    ]
    (job / "events.jsonl").write_text(journal(events))
    found = only(diagnose([job]))
    assert (found["category"], found["culprit_ranks"], found["culprit_node"]) == ("collective_desync", [1], "n2")


def test_the_files_give_the_same_verdict_as_the_live_group(tmp_path: Path) -> None:
    """Who was stopped by us is no cause; who failed before a node was lost is; copied files have lost their times."""
    job, at_ns, behind_ns = tmp_path / "jobs" / "train-a1", 10**18, 5 * 10**9
    write(job, generation_0__rank_0__stderr_dot_log="", generation_0__rank_1__stderr_dot_log="")
    for rank, text in ((0, "ValueError: 7 classes, 6 labels"), (1, "RuntimeError: interrupted")):
        said = {"message": text, "extraInfo": {"timestamp": "1"}}
        (job / "generation_0" / f"rank_{rank}" / "error.json").write_text(json.dumps({"message": said}))
    raised_ns = at_ns - behind_ns + 2 * 10**9
    failed = {"exit": {"code": 1, "signal": None}, "time_ns": at_ns + 10**9, "shift_ns": 0, "raised_ns": at_ns}
    stopped = [1, at_ns + 3 * 10**9, 1, None, raised_ns, None, raised_ns - 10**9]
    members = [{"node": f"n{1 + at}", "group_rank": at, "base_rank": at, "nproc": 1} for at in range(3)]
    ended = {"stopped": [stopped], "clocks": {"n2": [behind_ns, 0]}}
    events = [
        {"type": "generation_started", "generation": 0, "node": None, "rank": None, "detail": {"members": members}},
        {"type": "rank_failed", "generation": 0, "node": "n1", "rank": 0, "detail": failed},
        {"type": "node_lost", "generation": 0, "node": "n3", "rank": None, "detail": {"alive_ns": at_ns + 10**9}},
        {"type": "generation_stopped", "generation": 0, "node": None, "rank": None, "detail": ended},
        {"type": "generation_stopped", "generation": 0, "node": None, "rank": None, "detail": {"stopped": ["torn"]}},
    ]
    (job / "events.jsonl").write_text(journal(events))
    found = only(diagnose([job]))
    assert (found["category"], found["culprit_ranks"], found["culprit_node"]) == ("user_exception", [0], "n1")
    assert found["time"] == "2001-09-09T01:46:40.000Z"


LOST: Any = {"alive_ns": 10**18, "reason": "no heartbeat within 10 s"}
FAILED: Any = {"exit": {"code": 1, "signal": None}, "time_ns": 10**18}
TOLD: Any = {**INCIDENT, "category": "hang_missing_rank", "culprit_ranks": [0], "summary": "it hangs"}
HANG = ("incident", {**TOLD, "fingerprint": "f", "ongoing": True})
PREEMPTED = ("incident", {**TOLD, "category": "signal_preempted", "fingerprint": "f"})
ONE: Any = {"node": "n1", "rank": 0, "detail": FAILED}
MANY = {"node": "n2", "group_rank": 1, "base_rank": 0, "nproc": 10**9}
ASKED = ("stop_requested", {"operator": "me"})


def ended(cause: str) -> tuple[str, Any]:
    return "generation_stopped", {"cause": cause}


@pytest.mark.parametrize(
    ("happened", "reported"),
    [
        *[([ended(cause)], []) for cause in ("restart", "removed", "added", "returned")],
        ([ASKED, ended("stop")], []),
        # Others fail when the first are stopped.
        ([ended("restart"), ("rank_failed", FAILED)], []),
        ([ASKED, ("rank_failed", FAILED), ended("stop")], []),
        # It was hanging, or not any more; its allocation was over.
        ([HANG, ended("restart")], ["hang_missing_rank"]),
        ([HANG, ("hang_over", {}), ended("restart")], []),
        ([ASKED, ended("stop"), PREEMPTED], ["signal_preempted"]),
        # A rank or a node was gone before an operator ended the job.
        ([("rank_failed", FAILED), ASKED, ended("stop")], ["other"]),
        ([("node_lost", LOST), ASKED, ended("stop")], ["node_lost"]),
        ([("node_lost", LOST), ended("restart")], ["node_lost"]),
        # It was stopped for a failure, or was about to be: the files tell; an exit is known, its reason is not.
        ([ended("failure")], ["user_exception"]),
        ([ended("node_lost")], ["user_exception"]),
        ([ended("")], ["user_exception"]),
        ([("rank_failed", FAILED)], ["other"]),
        # It gets on, or its journal was cut off.
        ([], []),
        ([("restart_requested", {})], []),
        ([HANG], ["hang_missing_rank"]),
        ([ASKED, ("rank_failed", FAILED)], []),
    ],
)
def test_a_running_or_stopped_group_failed_only_if_the_journal_says_so(
    tmp_path: Path, happened: list[tuple[str, Any]], reported: list[str]
) -> None:
    """A rank that prints a traceback and gets on has caught it."""
    job = tmp_path / "jobs" / "train-a1"
    write(job, generation_0__rank_0__stderr_dot_log="", generation_0__rank_1__stderr_dot_log=f"{BROKEN}step=9\n")
    members = [{"node": f"n{1 + at}", "group_rank": at, "base_rank": at, "nproc": 1} for at in range(2)]
    events = [
        {"type": kind, "generation": 0, "node": "n2", "rank": 1, "detail": detail}
        for kind, detail in (("generation_started", {"members": members}), *happened)
    ]
    (job / "events.jsonl").write_text(journal(events))
    assert [incident["category"] for incident in diagnose([job])["incidents"]] == reported


def test_a_group_stopped_on_request_before_its_first_step_is_no_hang(tmp_path: Path) -> None:
    job = write(tmp_path / "train-a1", generation_0__rank_0__stderr_dot_log="init_process_group: waiting for 1 rank\n")
    event = {"type": "generation_stopped", "generation": 0, "node": None, "rank": None, "detail": {"cause": "failure"}}
    for cause, found in (("failure", ["hang_no_output"]), ("stop", [])):
        event["detail"] = {"cause": cause}
        (job / "events.jsonl").write_text(journal([event]))
        assert [incident["category"] for incident in diagnose([job])["incidents"]] == found


def test_an_error_file_or_a_scheduler_may_record_an_end_that_the_journal_lacks(tmp_path: Path) -> None:
    job = write(tmp_path / "train-a1", generation_0__rank_0__stderr_dot_log=f"{BROKEN}step=9\n")
    members = [{"node": "n1", "group_rank": 0, "base_rank": 0, "nproc": 1}]
    event = {"type": "generation_started", "generation": 0, "node": None, "rank": None, "detail": {"members": members}}
    (job / "events.jsonl").write_text(journal([event]))
    assert diagnose([job])["incidents"] == []
    (job / "generation_0" / "slurm.out").write_text(
        "slurmstepd: error: *** JOB 7 CANCELLED AT 10:00 DUE TO TIME LIMIT ***\n"
    )
    assert only(diagnose([job]))["category"] == "signal_preempted"
    (job / "generation_0" / "slurm.out").unlink()
    said = {"message": "ValueError: 7 classes, 6 labels", "extraInfo": {"py_callstack": BROKEN}}
    (job / "generation_0" / "rank_0" / "error.json").write_text(json.dumps({"message": said}))
    assert only(diagnose([job]))["category"] == "user_exception"


def test_what_cannot_be_read_is_said_once_and_the_rest_counts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    job = write(tmp_path / "train-a1", generation_0__rank_0__stderr_dot_log=BROKEN)
    members = [{"node": "n1", "group_rank": 0, "base_rank": 0, "nproc": 1}]
    good = journal([{"type": "generation_started", "detail": {"members": members}}, {"type": "rank_failed", **ONE}])
    exploding = json.dumps(event(3, {"type": "generation_started", "detail": {"members": [MANY]}})) + "\n"
    (job / "events.jsonl").write_text(f'null\n{good}{exploding}{{"type": "torn')
    error = job / "generation_0" / "rank_0" / "error.json"
    error.write_text('{"message": ')
    assert main(["diagnose", str(job)]) == 0
    out, err = capfd.readouterr()
    assert "ValueError: 7 classes, 6 labels" in out
    assert f"{job / 'events.jsonl'}: 3 lines cannot be read: line 1 is not an object" in err
    assert f"{error}: not an error file of torch, or damaged" in err


def test_a_text_that_no_encoding_has_is_shown(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    job = write(tmp_path / "train-a1", generation_0__rank_0__stderr_dot_log="")
    (job / "generation_0" / "rank_0" / "error.json").write_text('{"message": "ValueError: \\udcff broke"}')
    assert main(["diagnose", str(job)]) == 0
    assert "ValueError: ? broke" in capfd.readouterr().out
