"""`supervisor diagnose`: the cause of a run that is over, from whatever files it left."""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from supervisor.cli import main
from supervisor.errors import UsageError
from supervisor.postmortem import reading
from supervisor.postmortem.diagnosis import diagnose
from supervisor.postmortem.files import find
from supervisor.postmortem.lines import FileLine, clean, without_prefixes
from supervisor.postmortem.ranks import split_ranks
from supervisor.postmortem.reading import (
    AFTER,
    BEFORE,
    HOT,
    LINE_MEAN,
    ROUTINE,
    FirstAndLast,
    LineScan,
    letters,
)
from tests.fast.journals import INCIDENT, event, journal
from tests.fast.waiting import some

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


def test_a_log_whose_oldest_bytes_are_gone_is_read_all_the_same(tmp_path: Path) -> None:
    write(tmp_path, rank_0_dot_stderr_dot_log="starting\n")
    with (tmp_path / "rank_1.stderr.log").open("wb") as file:
        file.seek(4 << 20)
        file.write(b"\0" * 100 + f"starting\n{BROKEN}".encode())
    assert only(diagnose([tmp_path]))["culprit_ranks"] == [1]


def test_a_job_of_ours_that_succeeded_has_no_incident(tmp_path: Path) -> None:
    write(tmp_path, generation_0__rank_0__stderr_dot_log="NCCL version 2.27.3\n" + PEER, generation_0__x_dot_log="")
    assert only(diagnose([tmp_path]))["category"] == "gloo_connection_reset"
    event = {"type": "job_succeeded", "generation": 0, "node": None, "rank": None, "detail": {"reason": ""}}
    (tmp_path / "events.jsonl").write_text(journal([event]))
    assert diagnose([tmp_path])["incidents"] == []


def test_a_healthy_text_has_no_incident(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, healthy_dot_log="step=1 loss=2.0\n")
    assert main(["diagnose", str(tmp_path)]) == 0
    assert capfd.readouterr().out.startswith("no failure found in these logs; if the job hangs")


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


def test_snapshots_and_keys_of_our_job_directory_are_no_logs(tmp_path: Path) -> None:
    write(tmp_path, generation_0__rank_0__stderr_dot_log=BROKEN, snapshots__contents__5e=BROKEN, tls__ca_dot_pem="x")
    (tmp_path / "snapshots" / "contents" / "34").write_bytes(gzip.compress(b"weights"))
    left: list[str] = []
    assert len(find([tmp_path], left.append)) == 3, "no job of ours: they may be logs"
    assert left
    left.clear()
    write(tmp_path, events_dot_jsonl="")
    assert [found.path.name for found in find([tmp_path], left.append)] == ["events.jsonl", "stderr.log"]
    assert left == []


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
    waited = "torch.distributed.DistStoreError: wait timeout after 600000ms, keys: /default_pg/0//cpu//0/barrier"
    write(tmp_path, rank_0_dot_stderr_dot_log=waited, rank_1_dot_log="copying: 2 of 8 GB\n", rank_2_dot_log=waited)
    assert main(["diagnose", "--json", str(tmp_path)]) == 0
    assert only(json.loads(capfd.readouterr().out))["evidence"][0]["file"] is None, "the line has no place"
    assert main(["diagnose"]) == 2
    assert main(["diagnose", str(tmp_path / "no")]) == 2
    assert "no such file" in capfd.readouterr().err


def test_the_score_on_real_failures(tmp_path: Path) -> None:
    """Floors, not goals: `../shared/corpus/score.py --list` shows each miss."""
    if not CORPUS.is_dir():
        pytest.skip("no corpus here")
    made = some(importlib.util.spec_from_file_location("score", CORPUS / "score.py"))
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


# Tracebacks with something before each of their lines.


TRACE = ["Traceback (most recent call last):", '  File "train.py", line 3, in main', "    step()", "KeyError: 'x'"]


def numbered(texts: list[str]) -> list[FileLine]:
    return [FileLine(number, text) for number, text in enumerate(texts, 1)]


def test_lines_of_two_pods_are_separated() -> None:
    one, two = ([f"[pod/w-{pod}/main] {text}" for text in TRACE] for pod in (0, 1))
    mixed = [text for pair in zip(one, two, strict=True) for text in pair]
    assert [line.text for line in without_prefixes(numbered(mixed))] == [one[0], *TRACE[1:], two[0], *TRACE[1:]]


def test_a_time_may_differ_from_line_to_line() -> None:
    lines = numbered([f"2025-01-02 03:04:0{second} - app - {text}" for second, text in enumerate(TRACE)])
    found = without_prefixes(lines)
    assert [line.text for line in found] == [lines[0].text, *TRACE[1:]]
    assert [line.number for line in found] == [1, 2, 3, 4]


def test_words_before_the_first_line_alone_are_no_prefix() -> None:
    lines = numbered([f"Scheduler hit an exception: {TRACE[0]}", *TRACE[1:], "[pod/w-0/main] step 3"])
    assert without_prefixes(lines) == lines
    cut_off = numbered(["app: Traceback (most recent call last):", "app:   step()", "other: step 3"])
    assert without_prefixes(cut_off) == cut_off


# `diagnose` on job directories of ours: what the journal adds to the files.


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
def test_what_the_journal_calls_a_failure(tmp_path: Path, happened: list[tuple[str, Any]], reported: list[str]) -> None:
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


def test_what_cannot_be_read_is_said_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
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


# Long logs: which lines `diagnose` keeps of them, and how it finds those.


def noisy(chance: random.Random, lines: int) -> bytes:
    """Return a log: steps, bars, text that differs, trouble here and there, a line without an end."""
    made: list[Callable[[], bytes]] = [
        lambda: b"step=%d loss=%f" % (chance.randrange(5000), chance.random()),
        lambda: b"\r".join(b"%d%%|%s| 2.%dit/s" % (at, b"\xe2\x96\x88" * at, at) for at in range(8)),
        lambda: chance.randbytes(30).replace(b"\n", b" "),
        lambda: b"",
        lambda: BROKEN.encode().rstrip(b"\n") + b"\r",
        lambda: b"x" * 20_000,
    ]
    return b"\n".join(chance.choices(made, (900, 30, 30, 9, 1, 1))[0]() for _ in range(lines))


def plainly_picked(text: bytes, limit: int) -> list[int]:
    """Return the numbers of the lines that are kept of a long file, by a look at each line."""
    lines = text.split(b"\n")[: -1 if text.endswith(b"\n") else None]
    hot = [at for at, line in enumerate(lines) if any(letters(word) in letters(line) for word in HOT)]
    around = {near for at in hot for near in range(at - BEFORE, at + AFTER + 1) if 0 <= near < len(lines)}
    ends = range(max(0, len(lines) - limit), len(lines))
    kept = sorted(around)
    middle = set(kept[limit:-limit])
    return [number + 1 for number in sorted((around - middle) | set(ends))]


@pytest.mark.parametrize("seed", range(4))
def test_of_a_long_file_the_right_lines_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    text = noisy(random.Random(seed), 12_000)
    log = tmp_path / "long.log"
    log.write_bytes(text)
    (whole,) = reading.read_all([log])
    monkeypatch.setattr(reading, "WHOLE_BYTES", 1000)
    monkeypatch.setattr(reading, "KEPT_MAX", 300)
    monkeypatch.setattr(reading, "PIECE", (40_000, 90_001)[seed % 2])
    monkeypatch.setattr(reading, "BLOCK", (9_000, 30_011)[seed // 2])
    seen: list[int] = []
    (lines,) = reading.read_all([log], seen.append)
    assert [line.number for line in lines] == plainly_picked(text, 300)
    assert all(whole[line.number - 1] == line for line in lines)
    assert sum(seen) == len(text)
    # Of a bar without any end the last state is shown, and what was written behind it.
    log.write_bytes(b"".join(b"%d%%|\r" % at for at in range(90_000)) + b"ValueError: 7\nend")
    assert [line.text for lines in reading.read_all([log]) for line in lines] == ["ValueError: 7", "end"]


def unlike(chance: random.Random, lines: int) -> list[bytes]:
    """Return lines of which no two are alike, now and then with a word of trouble somewhere in them."""
    made = [bytes(chance.choices(b"etaoinshrdlcumwfgypbvkxjqz TEN_:7\xe2", k=60)) for _ in range(lines)]
    for at in range(0, lines, 7):
        place = chance.randrange(60)
        made[at] = made[at][:place] + chance.choice(HOT) + made[at][place:]
    return made


def test_words_are_found_in_lines_that_are_not_alike() -> None:
    lines = unlike(random.Random(1), 6000)
    hot = [at for at, line in enumerate(lines) if any(letters(word) in letters(line) for word in HOT)]
    assert LineScan().hot(b"\n".join(lines)) == hot


def test_of_long_lines_fewer_are_kept() -> None:
    for size, most in ((LINE_MEAN // 2, 50), (LINE_MEAN, 50), (5 * LINE_MEAN, 10)):
        kept = FirstAndLast(50)
        for number in range(1000):
            kept.add((number, b"x" * size))
        assert [number for number, _ in kept.lines()] == [*range(most), *range(1000 - most, 1000)]


def test_a_line_with_many_words_of_trouble_takes_linear_time() -> None:
    begin = time.process_time()
    assert LineScan().hot(b"fine\n" + b"error=0.5 failed=1\r" * 20_000 + b"\nfine") == [1]
    assert time.process_time() - begin < 1.0


def test_what_comes_at_each_step_is_routine_among_lines_that_are_not_alike_too() -> None:
    seen, chance = LineScan(), random.Random(0)
    found = []
    for _ in range(4):
        lines = [b"loss is %f" % chance.random() for _ in range(ROUTINE // 2)]
        lines += [bytes(chance.choices(b"zqjvy", k=60)) for _ in range(ROUTINE)]
        found.append(len(seen.hot(b"\n".join(lines))))
    assert found == [ROUTINE // 2, ROUTINE // 2, 0, 0]
