"""Recordings: how they are read, what is shown at a time, what is refused, and the report of one."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import random
import re
import time
import tracemalloc
import zipfile
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from remote_agent.text.rows import CLIP
from remote_agent.wire.status_diff import changes, merge
from supervisor.cli import main
from supervisor.cli.record import read_at, read_limit
from supervisor.errors import RequestFailed, UsageError
from supervisor.logs.rows import Clocks
from supervisor.logs.selection import RecordFilter, Selection
from supervisor.recording import reading, redact, writing
from supervisor.recording.file_format import Line, RecordingError, line_json, read_lines
from supervisor.recording.player import Player
from supervisor.recording.reading import Lines, load, with_gaps
from supervisor.recording.writing import Limit, evidence_lines
from tests.fast.log_files import append, log, opened
from tests.screens import recorded, recordings

REPORT = Path(__file__).parent.parent / "screens" / "snapshots" / "report.md"
ALL = Selection(generation="all")


class Clock:
    """A clock that goes when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return recordings.write(tmp_path / "job.rec")


def test_changes_and_what_they_make() -> None:
    old: Any = {"state": "running", "nodes": [{"name": "n1", "x": 1}, {"name": "n2", "x": 1}]}
    new: Any = {
        "state": "running",
        "plan": "p",
        "nodes": [{"name": "n3"}, {"name": "n1", "x": 1}, {"name": "n2", "x": 2}],
    }
    reported = changes(old, new)
    assert reported == {"plan": "p", "nodes": [{"name": "n3"}, {"name": "n2", "x": 2}], "order": ["n3", "n1", "n2"]}
    assert merge(old, reported) == new
    assert merge({}, changes({}, old)) == old
    assert changes(new, new) == {}


def test_a_line_keeps_its_bytes() -> None:
    line = Line(3, 80, 5, "E", b"\xff\x00 caf\xc3\xa9 \x1b[31m\r")
    later = line._replace(line=4)
    data = line_json(line) + line_json(later)
    for size in (1, 7, len(data)):
        assert list(read_lines(data[at : at + size] for at in range(0, len(data), size))) == [line, later]


async def test_a_line_that_is_cut_ends_with_a_mark(tmp_path: Path) -> None:
    append(log(tmp_path), b"y" * 100_000 + b"\n" + b"z" * CLIP + b"\n")
    file: Any = {"node": "n1", "generation": 0, "rank": 0, "stream": "stdout", "size": 100_000}
    async with opened(tmp_path, live=False) as store:
        link = SimpleNamespace(call=lambda _op, args, **_: store.window(**args))
        session: Any = SimpleNamespace(links={"n1": link}, status={})
        excerpt = writing.Excerpt(session, Clocks(session), file, None, ())
        lines = [line.text async for batch in excerpt.batches() for line in batch]
    assert lines == [b"y" * CLIP + "… +34.5 kB".encode(), b"z" * CLIP]


def test_gaps_are_reported_and_lines_keep_their_numbers() -> None:
    times = {5: 50, 6: 40, 1200: 90}
    recorded_lines = [Line(number, number * 10, t_ns, "I", b"line %d" % number) for number, t_ns in times.items()]
    lines = Lines(with_gaps(recorded_lines))
    assert [lines.total(t_ns) for t_ns in (0, 49, 50, 89, 90)] == [0, 0, 7, 7, 1201]
    shown = {row.line: row.text for row in lines.window(0, 1201)}
    assert list(shown) == list(range(1201))
    assert shown[0] == shown[7] == b"(not in the recording)"
    assert shown[4] == b"(5 lines up to here are not in the recording)"
    assert shown[1199] == b"(1,193 lines up to here are not in the recording)"
    assert shown[6] == b"line 6"


def test_the_time_runs_stands_and_jumps(path: Path) -> None:
    clock = Clock()
    player = Player(load(path), speed=2.0, clock=clock)
    begin, times = player.recording.begin_ns, player.recording.event_times_ns
    assert (len(player.events), player.status["state"], player.incidents) == (2, "starting", [])
    version = player.version
    clock.now += 1.0
    assert player.version > version
    assert (player.now_ns, player.standing) == (begin + 2_000_000_000, "")
    player.pause()
    clock.now += 10
    assert (player.now_ns, player.standing, player.turns) == (begin + 2_000_000_000, "paused", 0)
    player.step(1)
    assert player.now_ns == next(t for t in times if t > begin + 2_000_000_000)
    player.seek(times[-2])
    assert (player.status["state"], player.ended, [one["id"] for one in player.incidents]) == ("running", False, [1])
    player.step(1)
    assert (player.ended, player.standing, player.status) == (True, "end", recorded.load("failed_4x2").status)
    player.step(-1)
    assert (player.now_ns, player.turns, player.status["state"], player.ended) == (times[-2], 1, "running", False)
    player.faster(1)
    assert player.speed == 5.0
    player.faster(-1)
    player.faster(-1)
    player.faster(-1)
    assert player.speed == 1.0
    player.seek(times[-1])
    player.pause()
    assert (player.now_ns, player.standing) == (begin, "")


async def test_logs_are_shown_as_they_were(path: Path) -> None:
    recording = load(path)
    player = Player(recording, recording.end_ns, paused=True)

    async def rows(selection: Selection = ALL, count: int = 10_000, **bounds: Any) -> list[Any]:
        return (await player.merged(selection, count, **bounds)).rows

    whole = await rows()
    assert len(whole) == sum(one["lines"] for one in recording.files.values()) > 100
    assert whole == sorted(whole, key=lambda row: row.t_ns)
    # Page by page, backwards and forwards, each row once.
    pages, before = list(await rows(count=7)), None
    while before != (before := pages[0].t_ns):
        pages[:0] = await rows(count=7, before_ns=before)
    assert pages == whole
    assert (await rows(count=5, after_ns=0))[:5] == whole[:5]
    file = next(key for key in recording.files if key[3] == "stderr")
    args = {"generation": file[1], "rank": file[2], "stream": file[3], "line": -2, "count": 2}
    answer = await player.log(file[0], "log_window", args)
    assert (len(answer.data["rows"]), answer.data["total_lines"]) == (2, recording.files[file]["lines"])
    hits = [row async for row in player.search(ALL, pattern="out of MEMORY", ignore_case=True, level="error")]
    assert hits
    assert all(row.rank == 3 for row in hits)
    with pytest.raises(RequestFailed, match="the pattern takes more than"):
        _ = [row async for row in player.search(ALL, pattern=r"(.|..)+\x01")]
    # As on the nodes: a record with all of its lines, and what is not in the recording.
    narrow = RecordFilter(("out of memory",), ("no such word",), "error")
    kept = await rows(dataclasses.replace(ALL, filter=narrow))
    assert {row.rank for row in kept if row.level} == {3}
    tracebacks = [row for row in kept if row.text.startswith(b"Traceback")]
    assert tracebacks
    assert [row for row in kept if b"not in the recording" in row.text] == [
        row for row in whole if b"not in the recording" in row.text
    ]
    player.seek(whole[50].t_ns)
    assert [row for row in await rows() if row.t_ns > whole[50].t_ns] == []
    assert (await player.merged(ALL, 3)).more
    with pytest.raises(RequestFailed, match="this is a recording"):
        await player.request("stop", kill=True)


@pytest.mark.parametrize("count", [1, 2, 7, 300])
@pytest.mark.parametrize("files", [1, 3, 40])
def test_pages_of_many_files_hold_each_row_once(files: int, count: int, tmp_path: Path) -> None:
    dice = random.Random(files * count)
    base = 1_795_169_001_000_000_000
    logs = {
        ("n1", 0, rank, "stdout"): [
            Line(at, at * 9, base + t_ns, "I", b"%d" % at)
            for at, t_ns in enumerate(sorted(dice.choices(range(60), k=dice.randrange(1, 12))))
        ]
        for rank in range(files)
    }
    recording = load(recordings.write(tmp_path / "job.rec", logs=logs))
    whole = sorted(line.t_ns for lines in logs.values() for line in lines)
    for now_ns in (base + 29, recording.end_ns):
        there = [t_ns for t_ns in whole if t_ns <= now_ns]
        for forwards in (False, True):
            rows: list[Any] = []
            more, edge = True, 0 if forwards else now_ns + 1
            while more:
                bounds = (None, edge) if forwards else (edge, None)
                page, more = asyncio.run(reading.merged(recording, ALL, count, now_ns, *bounds))
                assert len(page) >= min(count, len(there) - len(rows))
                rows = rows + page if forwards else page + rows
                edge = page[-1].t_ns + 1 if forwards else page[0].t_ns
            assert [row.t_ns for row in rows] == there
            assert len({(row.rank, row.line) for row in rows}) == len(there)


def test_a_coordinator_whose_clock_is_behind_does_not_turn_the_time(tmp_path: Path) -> None:
    session = recorded.load("failed_4x2")
    session.events[5]["time"] = "2026-11-20T10:03:05.000Z"
    player = Player(load(recordings.write(tmp_path / "job.rec", events=session.events)), paused=True)
    seen = [len(player.events)]
    while player.standing != "end":
        player.step(1)
        seen.append(len(player.events))
    assert seen == sorted(seen)
    assert seen[-1] == len(session.events)


def test_sizes_of_logs() -> None:
    read = [read_limit(text) for text in ("all", "none", "500k", "2M", "17")]
    assert [limit.share(10_000) for limit in read] == [None, 0, 500_000, 2_000_000, 17]
    assert [Limit().share(files) for files in (0, 4, 640)] == [1_000_000, 1_000_000, 100_000]
    with pytest.raises(argparse.ArgumentTypeError, match="write all, none, or a size"):
        read_limit("much")


def test_what_is_no_recording_is_refused(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = path.read_bytes()
    broken = tmp_path / "broken.rec"
    middle = bytearray(data)
    middle[data.index(b"events.jsonl") + 40] ^= 0xFF
    cases = {
        b"": "not a recording",
        b"step 1\n" * 100: "not a recording",
        data[: len(data) // 2]: "the recording is cut short or damaged",
        data[:-10]: "the recording is cut short or damaged",
        bytes(middle): "the recording is cut short or damaged",
        recordings.write(tmp_path / "newer.rec", version=2).read_bytes(): "written by supervisor 0.1.0, in format 2",
        recordings.write(tmp_path / "other.rec", format="x").read_bytes(): "not a recording",
        recordings.write(tmp_path / "odd.rec", end_ns=None).read_bytes(): "the recording is cut short or damaged",
    }
    for content, said in cases.items():
        broken.write_bytes(content)
        for verb in ("replay", "report"):
            assert main([verb, str(broken)]) == 2
            assert capsys.readouterr().err.startswith(f"supervisor: {broken}: {said}"), said
    assert main(["replay", str(tmp_path / "none.rec")]) == 2
    assert "No such file" in capsys.readouterr().err


@pytest.mark.parametrize("member", ["recording.json", "events.jsonl", "status.jsonl", "logs.jsonl"])
@pytest.mark.parametrize("content", [b" " * 1000, b"[]," * 300, b'{"a":{}}\n' * 100])
def test_a_recording_of_too_much_is_refused(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], member: str, content: bytes
) -> None:
    large = _with(path, tmp_path / "large.rec", {member: content * 50_000})
    assert large.stat().st_size < 500_000
    tracemalloc.start()
    try:
        assert main(["report", str(large)]) == 2
        _size, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    said = f"supervisor: {large}: {member} in it is larger than any recording of this size"
    assert capsys.readouterr().err.startswith(said)
    assert peak < 64_000_000


@pytest.mark.parametrize(
    "content", [b"".join(b'[%d,0,0,"I",""]\n' % line for line in range(200_000)), b'[0,0,0,"I","' + b"x" * 30_000_000]
)
def test_a_log_of_too_much_is_refused(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    monkeypatch.setattr(reading, "FREE_BYTES", 1024 * 1024)
    monkeypatch.setattr(reading, "RATIO", 0)
    recording = load(_with(path, tmp_path / "large.rec", {"logs/0": content}))
    (file,) = (file for file, one in recording.files.items() if one["member"] == "logs/0")
    tracemalloc.start()
    try:
        with pytest.raises(RecordingError, match="logs/0 in it is larger than any recording of this size"):
            recording.lines(file)
        _size, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    recording.close()
    assert peak < 16_000_000


def test_a_recording_with_values_that_no_clock_has_is_damaged(path: Path, tmp_path: Path) -> None:
    for content in (b"[" * 100_000, b'{"format":"supervisor-recording","version":Infinity}'):
        with pytest.raises(RecordingError, match="cut short or damaged"):
            load(_with(path, tmp_path / "odd.rec", {"recording.json": content}))


def _with(path: Path, copy: Path, members: dict[str, bytes]) -> Path:
    """Return a copy of a recording with other contents of some members."""
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(copy, "w", zipfile.ZIP_DEFLATED) as target:
        for name in source.namelist():
            target.writestr(name, members.get(name, source.read(name)))
    return copy


def test_times_of_the_command_line(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    recording = load(path)
    second = 1_000_000_000
    assert read_at(None, recording) == recording.begin_ns
    assert read_at("end", recording) == recording.end_ns
    assert read_at("90s", recording) - recording.begin_ns == 90 * second
    assert read_at("2026-11-20T10:03:50Z", recording) - recording.begin_ns == 30 * second
    with pytest.raises(UsageError, match="--at 'noon'"):
        read_at("noon", recording)


def test_evidence_names_its_lines() -> None:
    session = recorded.load("failed_4x2")
    assert evidence_lines(session.incidents) == {("n2", 0, 3, "stderr"): [8, 5], ("n1", 0, 0, "stderr"): [1]}


def test_the_report_of_a_recording(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(path)]) == 0
    text = capsys.readouterr().out
    if os.environ.get("UPDATE_SNAPSHOTS") == "1":
        REPORT.write_text(text)
    assert text == REPORT.read_text()
    saved = tmp_path / "report.json"
    assert main(["report", str(path), "--json", "-o", str(saved)]) == 0
    assert saved.stat().st_mode & 0o777 == 0o600
    assert '"steps_lost": null' in saved.read_text()
    assert main(["report", str(path), "job-t"]) == 2


def test_replay_without_a_screen_prints_rows_and_events_in_order(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(path), "--headless"]) == 0
    out, err = capfd.readouterr()
    assert len(err.splitlines()) == len(load(path).events)
    assert "n1:0| [GPU0] step 1 | loss 2.3060 | 1.9 ms/step" in out
    assert main(["replay", str(path), "--headless", "--at", "end"]) == 0
    assert "job failed" in capfd.readouterr().err


def test_statuses_by_time_are_found_again_from_anywhere(tmp_path: Path) -> None:
    changes_told: Any = {"job": "j", "nodes": [{"name": "n1", "x": None}], "order": ["n1"]}
    history: list[Any] = [{"seq": 1, "changes": changes_told}]
    history += [{"seq": seq, "changes": {"generation": seq}} for seq in range(2, 6)]
    documents: Any = [{"job": "j", "nodes": [{"name": "n1", "x": at}]} for at in range(150)]
    seen = [(10 * at + 5, zlib.compress(json.dumps(one).encode())) for at, one in enumerate(documents)]
    last = (1495, documents[-1] | {"state": "failed"})
    made = list(writing.status_rows(history, {seq: 300 * seq for seq in range(1, 6)}, seen, last))
    assert [row["t_ns"] for row in made] == sorted(row["t_ns"] for row in made)
    assert sum(row["whole"] for row in made) == 1 + (len(made) - 1) // writing.WHOLE_EVERY
    recording = load(recordings.write(tmp_path / "job.rec", statuses=made))
    expected: list[Any] = []
    status: Any = {}
    for row in made:
        status = merge({} if row["whole"] else status, row["changes"])
        expected.append(status)
    for count in (1, 150, 3, 64, 65, len(made), 2, 0, 130):
        assert recording.status(count) == (expected[count - 1] if count else {})
    assert expected[-1]["state"] == "failed"
    assert [one["nodes"][0]["x"] for one in expected][29:33] == [29, None, 30, 31]


# What leaves the cluster has no secret in it, and keeps the rest.


M = redact.MARK


SECRET = (
    "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY", "--db-password", "apiKey", "OPENAI_APIKEY",
    "SLACK_WEBHOOK_URL", "AWS_ACCESS_KEY_ID", "token", "PGPASSWORD", "SSHPASS", "REDISCLI_AUTH", "MYSQL_PWD",
    "AccountKey", "SharedAccessKey", "awsSecretKey", "authToken", "X-Amz-Signature", "X-Amz-Security-Token",
    "passphrase",
)  # fmt: skip
ORDINARY = (
    "--tokenizer", "tokens", "--max-tokens", "seq", "PATH", "key", "NCCL_DEBUG", "PWD", "OLDPWD", "signature",
    "eos_token", "pad_token_id", "loss_per_token", "compass", "bypass", "keyboard", "primary_key", "num_passes",
)  # fmt: skip


def test_names_tell_what_is_secret() -> None:
    assert [name for name in (*SECRET, *ORDINARY) if redact.is_secret(name)] == [*SECRET]


def test_command_lines_and_documents_keep_what_is_no_secret() -> None:
    """In the words that are meant, * stands for what was a secret."""
    given = "env,PGPASSWORD=correct horse,PWD=/root,-H,Authorization: Token a,--lr,3e-4,--api-key,abc,--token=abc"
    meant = "env,PGPASSWORD=*,PWD=/root,-H,Authorization: Token *,--lr,3e-4,--api-key,*,--token=*"
    more = ["--password", "--quiet", "--max-tokens", "7"]
    words, expected = [*given.split(","), *more], [*meant.replace("*", M).split(","), *more]
    assert redact.argv(words) == expected
    env = {"HF_TOKEN": "x", "SSHPASS": "a b", "A": "b", "PWD": "/root", "eos_token": "</s>"}
    found = redact.document({"args": words, "env": env, "step": 3, "n": [{"password": ""}]})
    assert found == {"args": expected, "env": {**env, "HF_TOKEN": M, "SSHPASS": M}, "step": 3, "n": [{"password": ""}]}


TEXTS = (Path(__file__).parent / "data" / "redacted.txt").read_text().splitlines()
# Not in full, so that nobody who looks for secrets finds them here.
FORMS = (
    f"npm_{'a1B2' * 9}", "pypi-AgEIcHlwaS5vcmc" + "a1B2" * 5, "nvapi-" + "a1B2" * 5, f"gsk_{'a1B2' * 13}",
    f"xai-{'a1B2' * 20}", f"r8_{'a1B2' * 9}", f"sk_live_{'a1B2' * 6}", f"hvs.{'a1B2' * 6}",
    f"dop_v1_{'a1b2' * 16}", f"AGE-SECRET-KEY-1{'A1B2' * 14}",
)  # fmt: skip


@pytest.mark.parametrize("marked", [*TEXTS, *(f"«{form}»" for form in FORMS)])
def test_secrets_are_taken_out_and_the_rest_stays(marked: str) -> None:
    """Secrets stand between « and »."""
    kept = re.sub("«.*»", M, marked)
    assert redact.text(marked.replace("«", "").replace("»", "")) == kept
    assert redact.text(kept) == kept


@pytest.mark.parametrize(
    "piece",
    ["a.", "://", "https://x/hooks/", "hooks/", "eyJaaaaaaaaaa-", "sk-", "password=\\", "\\", "token", 'pass="',
     "--pass ", "authorization: ", "bearer ", "basic aaaaaaaa ", "x://u:p@", "cookie:", "SG.",
     "-----BEGIN PRIVATE KEY-----"],
)  # fmt: skip
def test_no_line_of_a_rank_takes_long(piece: str) -> None:
    begun = time.process_time()
    redact.text("https://x/hooks/ a://b@ password=" + piece * (60_000 // len(piece)))
    assert time.process_time() - begun < 2
