"""Long logs: which lines `diagnose` keeps of them, and how it finds those."""

from __future__ import annotations

import os
import random
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from supervisor.postmortem import reading
from supervisor.postmortem.diagnosis import diagnose
from supervisor.postmortem.reading import (
    AFTER,
    BEFORE,
    HOT,
    LINE_MEAN,
    ROUTINE,
    FirstAndLast,
    KeepLimit,
    LineScan,
    letters,
)
from tests.fast.test_postmortem import BROKEN


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


def plainly_picked(text: bytes, limit: KeepLimit) -> list[int]:
    """Return the numbers of the lines that are kept of a long file, by a look at each line."""
    lines = text.split(b"\n")[: -1 if text.endswith(b"\n") else None]
    hot = [at for at, line in enumerate(lines) if any(letters(word) in letters(line) for word in HOT)]
    around = {near for at in hot for near in range(at - BEFORE, at + AFTER + 1) if 0 <= near < len(lines)}
    ends = range(max(0, len(lines) - limit.end), len(lines))
    kept = sorted(around)
    middle = set(kept[limit.kept : -limit.kept])
    return [number + 1 for number in sorted((around - middle) | set(ends))]


@pytest.mark.parametrize("seed", range(4))
def test_of_a_long_file_the_same_is_kept_as_by_a_look_at_each_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
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
    assert [line.number for line in lines] == plainly_picked(text, KeepLimit(300, 300))
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


def test_words_of_trouble_are_found_in_lines_that_are_not_alike_and_those_are_not_remembered() -> None:
    found = LineScan()
    known = []
    for seed in range(3):
        lines = unlike(random.Random(seed), 2000)
        hot = [at for at, line in enumerate(lines) if any(letters(word) in letters(line) for word in HOT)]
        assert found.hot(b"\n".join(lines)) == hot
        known.append(len(found._cold))
    assert known[0] == known[2]


@pytest.mark.parametrize("kind", ["there", "failing", "not GNU's", "absent"])
def test_words_are_found_the_same_with_grep_without_it_and_where_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    lines = unlike(random.Random(1), 6000)
    hot = [at for at, line in enumerate(lines) if any(letters(word) in letters(line) for word in HOT)]
    grep, real = tmp_path / "grep", shutil.which("grep")
    if kind == "there":
        grep.symlink_to(real or "/bin/grep")
    elif kind != "absent":
        grep.write_text(
            f"#!/bin/sh\necho 'grep ({'GNU' if kind == 'failing' else 'BSD'} grep)'; [ $# = 1 ] || exit 2\n"
        )
        grep.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    reading._gnu_grep.cache_clear()
    try:
        assert (reading._gnu_grep() is None) == (kind in ("not GNU's", "absent"))
        assert len(letters(b"\n".join(lines))) > reading._GREP_BYTES
        assert LineScan().hot(b"\n".join(lines)) == hot
    finally:
        reading._gnu_grep.cache_clear()


def test_of_long_lines_fewer_are_kept() -> None:
    for size, most in ((LINE_MEAN // 2, 50), (LINE_MEAN, 50), (5 * LINE_MEAN, 10)):
        kept = FirstAndLast(50)
        for number in range(1000):
            kept.add((number, b"x" * size))
        assert [number for number, _ in kept.lines()] == [*range(most), *range(1000 - most, 1000)]


def test_lines_that_are_not_alike_are_judged_at_once(tmp_path: Path) -> None:
    chance = random.Random(0)
    log = tmp_path / "samples.log"
    log.write_text("".join(f"{number} {chance.getrandbits(300):075x}\n" for number in range(36_000)) + BROKEN)
    begin = time.process_time()
    (incident,) = diagnose([log])["incidents"]
    assert time.process_time() - begin < 1.5
    assert (incident["category"], incident["evidence"][0]["line"]) == ("user_exception", 36_004)


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


def test_lines_longer_than_pieces_and_freed_bytes_are_not_read_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    monkeypatch.setattr(reading, "PIECE", 20_000)
    log = tmp_path / "a.log"
    end = b"\nValueError: it broke\n"
    log.write_bytes(b"x" * 3_000_000 + end)
    before = read()
    ((first, error),) = reading.read_all([log])
    assert (first.text[:9], error.text) == ("xxxxxxxxx", "ValueError: it broke")
    assert read() - before < 4 * log.stat().st_size
    # As where log_bound frees the oldest bytes.
    log.write_bytes(b"")
    os.truncate(log, 1 << 30)
    with log.open("ab") as file:
        file.write(b"z" * 2_000_000 + end)
    before = read()
    ((error,),) = reading.read_all([log])
    assert error.text == "ValueError: it broke"
    assert read() - before < 10_000_000


def test_other_processes_pick_the_same_lines_and_a_dead_one_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = [tmp_path / name for name in ("a.log", "b.log")]
    for number, log in enumerate(logs):
        log.write_bytes(noisy(random.Random(number), 20_000))
    monkeypatch.setattr(reading, "WHOLE_BYTES", 1000)
    monkeypatch.setattr(reading, "PIECE", 200_000)
    alone = list(reading.read_all(logs))
    monkeypatch.setattr(reading, "HELP_BYTES", 0)
    monkeypatch.setattr(reading, "HELPERS_MAX", 2)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert list(reading.read_all(logs)) == alone
    helper = reading.PickProcess()
    process = helper._process
    assert process is not None
    process.communicate(timeout=20)  # the end of its stdin, as when we are killed
    assert process.returncode == 0
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert list(reading.read_all(logs)) == alone
