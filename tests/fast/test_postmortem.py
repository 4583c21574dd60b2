"""`supervisor diagnose`: the cause of a run that is over, from whatever files it left."""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from remote_agent.diagnose.nccl import NcclText
from supervisor.cli import main
from supervisor.errors import UsageError
from supervisor.postmortem.diagnosis import diagnose
from supervisor.postmortem.files import find
from supervisor.postmortem.lines import FileLine, clean
from supervisor.postmortem.ranks import split_ranks
from tests.fast.journals import journal

CORPUS = Path(__file__).resolve().parents[3] / "shared" / "corpus"
BROKEN = """Traceback (most recent call last):
  File "/home/me/train.py", line 88, in forward
    return self.head(x)
ValueError: 7 classes, 6 labels
"""
PEER = """Traceback (most recent call last):
  File "/home/me/train.py", line 90, in step
    loss.backward()
RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:4711
"""


def write(root: Path, **files: str) -> Path:
    """Write files, `__` standing for a slash and `_dot_` for a dot."""
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def only(found: Any) -> Any:
    """Return the only incident."""
    (incident,) = found["incidents"]
    assert isinstance(incident, dict)
    return incident


def tagged(tag: str, text: str) -> str:
    return "".join(f"{tag}{line}\n" for line in text.splitlines())


def test_files_by_rank(tmp_path: Path) -> None:
    write(tmp_path, rank_0_dot_stderr_dot_log=PEER, rank_1_dot_stderr_dot_log=f"starting\n{BROKEN}")
    found = only(diagnose([tmp_path]))
    assert (found["category"], found["culprit_ranks"], found["scope"]) == ("user_exception", [1], "one_rank")
    assert found["summary"] == "rank 1: ValueError: 7 classes, 6 labels in train.py:88 forward"
    proof = found["evidence"][0]
    assert (Path(proof["file"]).name, proof["line"]) == ("rank_1.stderr.log", 5)
    assert [victim["ranks"] for victim in found["victims"]] == [[0]]


def test_a_log_whose_oldest_bytes_are_gone_is_read_all_the_same(tmp_path: Path) -> None:
    write(tmp_path, rank_0_dot_stderr_dot_log="starting\n")
    with (tmp_path / "rank_1.stderr.log").open("wb") as file:
        file.seek(4 << 20)
        file.write(b"\0" * 100 + f"starting\n{BROKEN}".encode())
    assert only(diagnose([tmp_path]))["culprit_ranks"] == [1]


@pytest.mark.parametrize(
    "tags",
    [
        ("[rank0]: ", "[rank1]: "),
        ("[default0]:", "[default1]:"),
        ("n1:0| ", "n2:1| "),
        ("0: ", "1: "),
        ("[node-a:0]", "[node-a:1]"),
    ],
    ids=["torch", "torchrun's tee", "supervisor", "srun -l", "host:rank"],
)
def test_interleaved_text_by_its_tags(tmp_path: Path, tags: tuple[str, str]) -> None:
    log = tmp_path / "slurm-4711.out"
    log.write_text(tagged(tags[0], PEER) + tagged(tags[1], BROKEN))
    found = only(diagnose([log]))
    assert (found["category"], found["culprit_ranks"]) == ("user_exception", [1])
    assert found["evidence"][0]["line"] == 8


def test_a_traceback_below_a_tagged_line_belongs_to_it(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text(f"[2025-02-01 07:03:55 TP0] ready\n[2025-02-01 07:03:56 TP1] it failed\n{BROKEN}\nbye\n")
    assert only(diagnose([log]))["culprit_ranks"] == [1]


def test_torchruns_directories_know_local_ranks_of_one_node_only(tmp_path: Path) -> None:
    one = write(tmp_path / "one", run_x__attempt_0__0__stderr_dot_log=PEER, run_x__attempt_0__1__stderr_dot_log=BROKEN)
    assert only(diagnose([one]))["culprit_ranks"] == [1]
    two = write(
        tmp_path / "two", a__run_x__attempt_0__0__stderr_dot_log=PEER, b__run_y__attempt_0__0__stderr_dot_log=BROKEN
    )
    found = only(diagnose([two]))
    assert (found["category"], found["culprit_ranks"]) == ("user_exception", [])


def test_the_text_of_one_file_does_not_continue_in_another(tmp_path: Path) -> None:
    write(tmp_path, rank_1_dot_stderr_dot_log=BROKEN, rank_1_dot_stdout_dot_log="a line\nof stdout\n")
    found = only(diagnose([tmp_path]))
    assert (found["culprit_ranks"], found["traceback"].splitlines()[-1]) == ([1], BROKEN.splitlines()[-1])
    # Nor is the end of a traceback that was cut off there.
    cut = BROKEN.rpartition("ValueError")[0]
    write(tmp_path, rank_1_dot_stderr_dot_log=cut, rank_1_dot_stdout_dot_log="Starting\nTypeError: 7\n\n")
    found = only(diagnose([tmp_path]))
    proof = found["evidence"][0]
    assert (found["traceback"], Path(proof["file"]).name, proof["line"]) == (None, "rank_1.stdout.log", 2)


@pytest.mark.parametrize(
    ("died", "category", "ranks"),
    [
        ("task 2: Segmentation fault (core dumped)", "segfault", [2]),
        ("task 2: Terminated", "signal_preempted", []),
        ("", "signal_preempted", []),
    ],
)
def test_a_step_that_is_cancelled_after_a_tasks_death_was_ended_by_srun(
    tmp_path: Path, died: str, category: str, ranks: list[int]
) -> None:
    fatal = "2: Fatal Python error: Segmentation fault\n" if ranks else ""
    srun = [f"srun: error: node2: {died}\n"] if died else []
    step = "slurmstepd: error: *** STEP 123.0 ON node1 CANCELLED AT 2025-01-01T10:00:05 ***\n"
    log = tmp_path / "slurm-123.out"
    log.write_text("".join([*(f"{rank}: step\n" for rank in range(4)), fatal, *srun, step]))
    found = only(diagnose([log]))
    assert (found["category"], found["culprit_ranks"]) == (category, ranks)


def test_a_node_that_only_a_text_names_may_be_lost(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    log.write_text(
        "n2:3| slurmstepd: error: *** JOB 1 ON n2 CANCELLED AT 2026-11-20T10:00:00 DUE TO NODE FAILURE ***\n"
    )
    found = only(diagnose([log]))
    assert (found["category"], found["culprit_node"], found["time"]) == ("node_lost", "n2", "2026-11-20T10:00:00.000Z")


@pytest.mark.parametrize(
    "text",
    [
        BROKEN.replace("88", "8" * 5000),
        tagged(f"[rank{'7' * 5000}]: ", BROKEN),
        f"[Rank 1] WorkNCCL(SeqNum={'9' * 5000}, OpType=ALLREDUCE) timed out\n",
        f"h:1:1 [0] NCCL INFO comm 0x1 rank {'9' * 5000} nRanks {'9' * 5000} - Init COMPLETE\n",
    ],
    ids=["line", "rank", "collective", "NCCL"],
)
def test_a_number_of_thousands_of_digits_is_no_error(tmp_path: Path, text: str) -> None:
    log = tmp_path / "job.log"
    log.write_text(f"{text}{BROKEN}")
    assert only(diagnose([log]))["category"] == "user_exception"


def test_a_launchers_text_belongs_to_the_run_beside_it(tmp_path: Path) -> None:
    reported = "W1121 06:37:58.309000 2085 torch/distributed/elastic: Sending process 2121 closing signal SIGTERM\n"
    write(tmp_path / "torchrun", run_x__attempt_0__0__stderr_dot_log=BROKEN)
    (tmp_path / "torchrun" / "slurm-1.out").write_text(reported)
    assert only(diagnose([tmp_path / "torchrun"]))["category"] == "user_exception"
    ours = write(
        tmp_path / "ours", generation_1__rank_0__stderr_dot_log=BROKEN, generation_1__torchrun_dot_log=reported
    )
    write(ours, generation_2__rank_0__stderr_dot_log="", events_dot_jsonl="", agent_dot_log=PEER)
    found = only(diagnose([ours]))
    assert (found["generation"], found["category"]) == (1, "user_exception")


def test_torchruns_last_words_name_the_rank(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    log.write_text(
        "E0709 17:05:39.816000 56204 torch/distributed/elastic/multiprocessing/api.py:874] failed (exitcode: -9) "
        "local_rank: 2 (pid: 56213) of binary: /usr/bin/python\n"
    )
    found = only(diagnose([log]))
    assert (found["category"], found["culprit_ranks"]) == ("host_oom_kill", [2])


def test_a_text_that_ends_before_the_first_step_may_show_a_hang(tmp_path: Path) -> None:
    log = tmp_path / "quiet.log"
    log.write_text("starting\nh1:10:10 [0] NCCL INFO Bootstrap: Using eth0:10.0.0.1<0>\n")
    found = only(diagnose([log]))
    assert (found["category"], found["scope"], found["confidence"]) == ("hang_no_output", "not_in_text", "unknown")
    assert found["culprit_ranks"] == []
    assert "NCCL INFO Bootstrap" in found["summary"]


def test_a_job_of_ours_that_succeeded_has_no_incident(tmp_path: Path) -> None:
    write(tmp_path, generation_0__rank_0__stderr_dot_log="NCCL version 2.27.3\n" + PEER, generation_0__x_dot_log="")
    assert only(diagnose([tmp_path]))["category"] == "gloo_connection_reset"
    event = {"type": "job_succeeded", "generation": 0, "node": None, "rank": None, "detail": {"reason": ""}}
    (tmp_path / "events.jsonl").write_text(journal([event]))
    assert diagnose([tmp_path])["incidents"] == []


def test_a_healthy_text_has_no_incident(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "healthy.log"
    log.write_text("h1:10:10 [0] NCCL INFO Bootstrap: Using eth0:10.0.0.1<0>\nstep=1 loss=2.0\n")
    assert main(["diagnose", str(log)]) == 0
    assert capfd.readouterr().out.startswith("no failure found in these logs; if the job hangs")
    # What is tried again is no failure where the run gets on behind it.
    lost = "[c10d] The client socket has failed to connect to [n1]:29500 (errno: 111 - Connection refused).\n"
    log.write_text(f"{lost}step=1 loss=2.0\n")
    assert diagnose([log])["incidents"] == []
    log.write_text(f"step=1 loss=2.0\n{lost}")
    assert only(diagnose([log]))["category"] == "rendezvous_timeout"


def test_timestamps_decide_which_of_two_equal_failures_was_first(tmp_path: Path) -> None:
    text = "[2025-01-01 10:00:{:02d}] RuntimeError: CUDA error: an illegal memory access was encountered\n"
    write(tmp_path, rank_0_dot_stderr_dot_log=text.format(9), rank_1_dot_stderr_dot_log=text.format(5))
    assert only(diagnose([tmp_path]))["culprit_ranks"] == [1]


@pytest.mark.parametrize(
    ("behind", "culprits"),
    [
        ((None, None), [0, 1]),
        # Whatever stood before this line came in the first 50 ms of that second.
        (("E0101 10:00:05.050 1 x.cpp:1] bye", None), [0]),
        ((None, "E0101 10:00:05.050 1 x.cpp:1] bye"), [1]),
        (("E0101 10:00:05.400 1 x.cpp:1] bye", "[2025-01-01 10:00:05] bye"), [0, 1]),
        (("[2025-01-01 10:00:05] bye", "E0101 10:00:06.010 1 x.cpp:1] bye"), [0, 1]),
    ],
)
def test_the_next_timestamp_limits_the_uncertainty_of_whole_seconds(
    behind: tuple[str | None, str | None], culprits: list[int], tmp_path: Path
) -> None:
    text = "[2025-01-01 10:00:05] RuntimeError: CUDA error: an illegal memory access was encountered\n"
    logs = [text + (f"{line}\n" if line else "") for line in behind]
    write(tmp_path, rank_0_dot_stderr_dot_log=logs[0], rank_1_dot_stderr_dot_log=logs[1])
    found = only(diagnose([tmp_path]))
    assert found["culprit_ranks"] == culprits
    # That far it is a guess.
    assert len(culprits) > 1 or found["confidence"] == "supported"


def test_a_timestamp_without_a_year_is_used_for_order_and_not_shown(tmp_path: Path) -> None:
    text = "E709 17:05:{:02d}.5 here.py:1] RuntimeError: CUDA error: an illegal memory access was encountered\n"
    write(tmp_path, rank_0_dot_stderr_dot_log=text.format(9), rank_1_dot_stderr_dot_log=text.format(5))
    found = only(diagnose([tmp_path]))
    assert (found["culprit_ranks"], found["time"]) == ([1], None)


def test_the_rank_that_all_others_got_a_wrong_size_from_is_the_odd_one(tmp_path: Path) -> None:
    said = "here.cc:225 NCCL WARN Message truncated : received 6144 bytes instead of 2048\n"
    write(tmp_path, **{f"rank_{rank}_dot_stderr_dot_log": said if rank else "ready\n" for rank in range(4)})
    found = only(diagnose([tmp_path]))
    assert (found["category"], found["culprit_ranks"], found["confidence"]) == ("collective_desync", [0], "supported")


def test_a_launchers_own_lines_are_not_the_failed_ranks(tmp_path: Path) -> None:
    (tmp_path / "job.out").write_text(
        "W0401 00:26:06.9 1 torch/distributed/elastic/api.py:897] Sending process 7 closing signal SIGTERM\n"
        f"{BROKEN}"
        "E0401 00:26:08.2 1 torch/distributed/elastic/api.py:869] failed (exitcode: 1) local_rank: 3 (pid: 9) of b\n"
    )
    found = only(diagnose([tmp_path / "job.out"]))
    assert (found["category"], found["culprit_ranks"]) == ("user_exception", [3])


def test_facts_of_nccl() -> None:
    facts = NcclText()
    assert facts.result() is None
    for text in (
        "h1:10:10 [0] NCCL INFO Bootstrap: Using eth0:10.0.0.1<0>",
        "h1:10:10 [0] NCCL INFO NCCL version 2.26.2+cuda12.8",
        "h1:10:20 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0>",
        "h1:10:20 [0] NCCL INFO Using network Socket",
        "h2:11:21 [0] NCCL INFO comm 0x1 rank 1 nRanks 2 nNodes 2 localRanks 1 localRank 0 MNNVL 0",
        "h2:11:21 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0",
        "h2:11:21 [0] NCCL INFO 2 coll channels, 2 collnet channels, 0 nvls channels, 2 p2p channels",
        "h2:11:21 [0] misc/socket.cc:50 NCCL WARN socketProgress: Connection closed by remote peer",
    ):
        facts.feed(text)
    found = facts.result()
    assert found is not None
    assert (found["versions"], found["networks"], found["interfaces"]) == (["2.26.2+cuda12.8"], ["Socket"], ["eth0"])
    assert (found["nranks"], found["nodes"], found["channels"], found["nvls"]) == (2, 2, 2, False)
    assert (found["transports"], found["warnings"]) == (
        ["NET/Socket"],
        ["socketProgress: Connection closed by remote peer"],
    )


def test_ranks_of_ncclls_lines_are_what_nccl_says() -> None:
    texts = [
        "h1:10:20 [0] NCCL INFO comm 0x1 rank 4 nranks 8 cudaDev 0 busId 1b000",
        "h2:10:20 [0] NCCL INFO comm 0x1 rank 5 nranks 8 cudaDev 0 busId 1b000",
        "h2:10:33 [0] NCCL WARN Call to ibv_modify_qp failed",
    ]
    parts = split_ranks([FileLine(number, text) for number, text in enumerate(texts, 1)])
    assert [(part.rank, part.node, len(part.lines)) for part in parts] == [(4, "h1", 1), (5, "h2", 2)]


def test_long_words_take_linear_time() -> None:
    begin = time.process_time()
    split_ranks([FileLine(number, "x" * 8000) for number in range(100)])
    assert time.process_time() - begin < 1.0


def test_a_line_is_shown_as_a_terminal_would() -> None:
    assert clean("10%\r100%\x1b[31m red\x1b[0m\0\r\n") == "100% red"
    assert clean("\x1b]0;a title\x07text\x18\x7f\tend\n") == "text\tend"


def test_files_that_are_no_logs_are_ignored(tmp_path: Path) -> None:
    write(tmp_path, notes_dot_txt=BROKEN, _dot_hidden=BROKEN, model_dot_pt="x", __pycache____x_dot_txt="y")
    (tmp_path / "binary.out").write_bytes(bytes(range(256)) * 64)
    (tmp_path / "nul.out").write_bytes(b"\0" * 1000)
    (tmp_path / "copied.log").write_bytes(b"step 1\n" + b"\0" * 400 + b"step 2\n")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "broken").symlink_to("nowhere")
    assert [found.path.name for found in find([tmp_path])] == ["binary.out", "copied.log", "notes.txt"]


def test_a_missing_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nowhere: no such file"):
        find([tmp_path / "nowhere"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="no log file found"):
        find([tmp_path / "empty"])


def test_unreadable_logs_are_listed_in_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad"
    bad.mkdir()
    (bad / "old.log.gz").write_bytes(gzip.compress(BROKEN.encode()))
    (bad / "wide.log").write_bytes(BROKEN.encode("utf-16"))
    (bad / "rank_3.stderr.log").symlink_to("/proc/self/mem")
    (bad / "data.tar.gz").write_bytes(gzip.compress(b"no log"))
    (bad / "a.out").write_bytes(b"\0" * 1000)
    (bad / "loop").symlink_to("loop")
    gunzip = f"{bad}/old.log.gz: compressed: unpack it first (gunzip)"
    rest = f"{bad}/rank_3.stderr.log: Input/output error; {bad}/wide.log: UTF-16: convert it first"
    assert main(["diagnose", str(bad)]) == 2
    assert f"supervisor: {bad}: no log file found\n  hint: {gunzip}; {rest}" in capfd.readouterr().err
    odd = bad / os.fsdecode(b"\xff.log")
    odd.write_text("x" * 100_000 + f"\n{BROKEN}")
    assert main(["diagnose", "--json", str(bad)]) == 0
    reported = capfd.readouterr()
    assert only(json.loads(reported.out))["evidence"][0]["file"] == str(odd)
    assert reported.err.startswith(f"supervisor: skipped: {gunzip}; {rest}")
    for name, why in (("a.out", "not a text file"), ("rank_3.stderr.log", "Input/output error"), ("loop", "no such")):
        assert main(["diagnose", str(bad / name)]) == 2
        assert capfd.readouterr().err.startswith(f"supervisor: {bad}/{name}: {why}")


def test_the_verb(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, rank_0_dot_stderr_dot_log=BROKEN)
    assert main(["diagnose", str(tmp_path)]) == 0
    out = capfd.readouterr().out
    assert "rank 0: ValueError: 7 classes, 6 labels in train.py:88 forward" in out
    assert main(["diagnose", "--json", str(tmp_path)]) == 0
    found = json.loads(capfd.readouterr().out)
    assert set(found) == {"incidents", "nccl"}
    assert found["nccl"] is None
    assert main(["diagnose"]) == 2
    assert main(["diagnose", str(tmp_path / "no")]) == 2
    assert "no such file" in capfd.readouterr().err


def test_the_score_on_real_failures(tmp_path: Path) -> None:
    """Floors, not goals: `../shared/corpus/score.py --list` shows each miss."""
    if not CORPUS.is_dir():
        pytest.skip("no corpus here")
    made = importlib.util.spec_from_file_location("score", CORPUS / "score.py")
    assert made is not None
    assert made.loader is not None
    score = importlib.util.module_from_spec(made)
    sys.modules["score"] = score
    made.loader.exec_module(score)
    rows = []
    for number, path in enumerate(sorted((CORPUS / "cases").glob("*.json"))):
        case = json.loads(path.read_text())
        folder = tmp_path / str(number)
        folder.mkdir()
        score.lay_out(case, folder)
        rows.append(score.judge(case, diagnose([folder])))
    rates = {key: [row[key] for row in rows if row[key] is not None] for key in ("category", "culprit", "restraint")}
    shares = {key: sum(values) / len(values) for key, values in rates.items()}
    assert shares["category"] >= 0.95, shares
    assert shares["culprit"] >= 0.8, shares
    assert shares["restraint"] >= 1.0, shares
