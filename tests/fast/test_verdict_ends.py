"""What ended a rank, told from what it had lived through before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from supervisor.postmortem.diagnosis import diagnose
from tests.fast.journals import journal
from tests.fast.test_postmortem import BROKEN, only, write
from tests.fast.test_verdict import OOM, RESET, judge, rank, stopped, trace

WARNED = "WARNING: No module named 'flash_attn', falling back to sdpa\n"
BY_THE_WAY = "[W1122 12:54:51.203054698 socket.cpp:207] [c10d] The hostname of the client socket cannot be retrieved.\n"


@pytest.mark.parametrize("lived_through", [WARNED, OOM], ids=["a warning", "an exception that was caught"])
def test_a_rank_that_survived_a_failure_until_others_failed_is_a_victim(lived_through: str) -> None:
    # A process that exits closes its connections first: those whom it breaks may fail before its end is seen.
    for raised_s in (1.0, 3.0):
        incident = judge(rank(1, raised_s, lived_through + RESET), rank(2, 1.8, code=5), stopped(3, 4))
        assert (incident.category, incident.culprit_ranks, incident.exit_code) == ("other", (2,), 5)
        assert {each.ranks: each.category for each in incident.victims}[1,] == "gloo_connection_reset"
    incident = judge(rank(1, 1, OOM + RESET), rank(2, 90, code=5), stopped(3, 91))
    assert incident.culprit_ranks == (1,), "an end that came much later explains nothing"


def test_an_exception_raised_while_another_is_handled_does_not_mean_survival() -> None:
    during = "\nDuring handling of the above exception, another exception occurred:\n\n"
    incident = judge(rank(1, 1, OOM + during + RESET), rank(2, 1.2, code=5), stopped(3, 2))
    assert (incident.category, incident.culprit_ranks) == ("cuda_oom", (1,))


def test_an_exit_without_output_does_not_quote_unrelated_warnings_of_torch() -> None:
    incident = judge(rank(2, 1, BY_THE_WAY, code=3))
    assert "exited with code 3 and printed nothing on stderr" in incident.summary
    incident = judge(rank(2, 1, "config broken: lr must be > 0\n" + BY_THE_WAY, code=3))
    assert "last line of stderr: config broken" in incident.summary


def test_a_record_that_logging_could_not_format_is_not_the_reason() -> None:
    text = (
        "--- Logging error ---\nTraceback (most recent call last):\n"
        '  File "/usr/lib/python3.11/logging/__init__.py", line 1110, in emit\n    msg = self.format(record)\n'
        "TypeError: %d format: a real number is required, not str\nCall stack:\n"
        "  File \"/w/train.py\", line 4, in <module>\nMessage: 'kept %d shards'\nArguments: ('many',)\n"
    )
    incident = judge(rank(2, 1, f"{text}no usable shard under /data/mix3\n", code=5))
    assert (incident.category, incident.exit_code) == ("other", 5)
    assert incident.summary.endswith("exited with code 5, last line of stderr: no usable shard under /data/mix3")


def test_the_place_stays_in_a_summary_of_a_long_message() -> None:
    incident = judge(rank(2, 1, trace(f"ValueError: {'a shard is not as the others ' * 20}", 88, "forward")))
    assert incident.summary.endswith("… in train.py:88 forward")
    assert len(incident.summary) <= 240


def test_the_last_line_of_stderr_is_shown_and_not_of_stdout(tmp_path: Path) -> None:
    job = tmp_path / "jobs" / "train-a1"
    write(
        job,
        generation_0__rank_0__stdout_dot_log="step=1 loss=0.5\n",
        generation_0__rank_0__stderr_dot_log="config broken: lr must be > 0\n",
        generation_0__rank_1__stdout_dot_log="step=1 loss=0.5\n",
        generation_0__rank_1__stderr_dot_log=RESET,
    )
    start, at_ns = {"node": "n1", "group_rank": 0, "base_rank": 0, "nproc": 2}, 10**18
    ended = {"exit": {"code": 1, "signal": None}, "time_ns": at_ns + 10**9, "over_ns": at_ns}
    reset = [1, at_ns + 2 * 10**9, 1, None, at_ns + 10**8, None, at_ns + 3 * 10**8]
    events: list[dict[str, object]] = [
        {"type": "generation_started", "node": None, "rank": None, "detail": {"members": [start]}},
        {"type": "rank_failed", "node": "n1", "rank": 0, "detail": ended},
        {"type": "generation_stopped", "node": None, "rank": None, "detail": {"cause": "failure", "stopped": [reset]}},
    ]
    (job / "events.jsonl").write_text(journal(events))
    incident = only(diagnose([job]))
    assert incident["summary"].endswith("exited with code 1, last line of stderr: config broken: lr must be > 0")
    assert Path(incident["evidence"][0]["file"]).name == "stderr.log"
    assert incident["confidence"] == "supported", "the others failed after its script was over, if before its end"


def test_the_evidence_of_a_crash_is_the_line_of_faulthandler() -> None:
    dump = (
        "Fatal Python error: Segmentation fault\n\nThread 0x1 (most recent call first):\n"
        '  File "/w/train.py", line 8 in go\n'
        "\nExtension modules: numpy.core._multiarray_umath (total: 1)\n"
    )
    incident = judge(rank(2, 1, "step 7\n" + dump, code=None, signal="SIGSEGV"))
    assert incident.evidence[0].text == "Fatal Python error: Segmentation fault"


def test_a_sigkill_that_only_a_launcher_reports_is_no_proof_of_the_oom_killer(tmp_path: Path) -> None:
    write(tmp_path, job_dot_log="train.py failed (exitcode: -9) local_rank: 1 (pid: 42) of binary: python\n")
    incident = only(diagnose([tmp_path]))
    assert (incident["category"], incident["confidence"]) == ("host_oom_kill", "supported")


def test_a_node_is_not_named_for_a_rank_that_only_got_a_wrong_size() -> None:
    text = trace(
        "RuntimeError: [enforce fail at gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes. 64 vs 32"
    )
    incident = judge(rank(1, 1, text), rank(0, 1.1, RESET), stopped(2, 2), stopped(3, 2))
    assert (incident.category, incident.scope) == ("collective_desync", "not_in_text")
    assert (incident.culprit_ranks, incident.culprit_node) == ((), None)


def test_a_truncated_traceback_names_its_rank(tmp_path: Path) -> None:
    cut = BROKEN.rpartition("ValueError")[0]
    write(tmp_path, rank_3_dot_stderr_dot_log=cut, rank_0_dot_stderr_dot_log=RESET)
    incident = only(diagnose([tmp_path]))
    assert (incident["category"], incident["culprit_ranks"]) == ("user_exception", [3])
    assert "truncated traceback in " in incident["summary"]
    assert incident["confidence"] != "established"


@pytest.mark.parametrize("key", ["message", "exc_info"])
def test_a_traceback_in_a_json_record_is_read(tmp_path: Path, key: str) -> None:
    records: list[dict[str, object]] = [{"ts": "2026-01-01T00:00:01Z", "rank": at, "msg": "step 1"} for at in range(4)]
    records.append({"ts": "2026-01-01T00:00:02Z", "rank": 2, "level": "ERROR", "msg": "failed", key: BROKEN})
    write(tmp_path, job_dot_log="".join(json.dumps(record) + "\n" for record in records))
    incident = only(diagnose([tmp_path]))
    assert (incident["category"], incident["culprit_ranks"]) == ("user_exception", [2])
    assert incident["evidence"][0]["line"] == 5
