"""Folding: nothing is lost, whatever is alike becomes one, and how the rows are handed over makes no difference."""

from __future__ import annotations

import itertools
import time

from hypothesis import given
from hypothesis import strategies as st

from supervisor.cli.whole_lines import lines_of
from supervisor.logs.fold import Fold, Folder
from supervisor.logs.rows import LogLine
from tests.examples import examples

SECOND = 1_000_000_000
TEXTS = (
    b"step 1",
    b"step 2",
    b"loss 1.5",
    b"loss 2",
    b"  at x.py",
    b"Traceback (most recent call last):",
    b"E: no",
    b"",
)


def row(rank: int, text: bytes, t_s: float = 0.0, *, line: int = 0, stream: str = "stdout") -> LogLine:
    return LogLine(f"n{rank // 8}", 0, rank, stream, line, 0, int(t_s * SECOND), None, text)


def folded(rows: list[LogLine]) -> list[Fold[LogLine]]:
    folder: Folder[LogLine] = Folder()
    return [*folder.feed(rows), *folder.rest()]


def printed(rows: list[LogLine]) -> list[str]:
    return lines_of(folded(rows)).decode().splitlines()


@st.composite
def _logs(draw: st.DrawFn) -> list[LogLine]:
    written = st.tuples(st.integers(0, 3), st.sampled_from(TEXTS), st.sampled_from((0.0, 0.01, 0.4, 1.0, 2.5)))
    rows, t_s = [], 0.0
    for number, (rank, text, pause_s) in enumerate(draw(st.lists(written, max_size=60))):
        t_s += pause_s
        rows.append(row(rank, text, t_s, line=number))
    return rows


@examples(300)
@given(_logs(), st.lists(st.integers(1, 20)), st.sampled_from((16 * 1024 * 1024, 1500)))
def test_batches_make_no_difference_and_nothing_is_lost(rows: list[LogLine], sizes: list[int], limit: int) -> None:
    whole, parts = Folder[LogLine](limit=limit), Folder[LogLine](limit=limit)
    at_once = [*whole.feed(rows), *whole.rest()]
    left, in_parts = list(rows), []
    for size in [*sizes, len(rows)]:
        in_parts += parts.feed(left[:size])
        left = left[size:]
    in_parts += parts.rest()
    assert [fold.records for fold in in_parts] == [fold.records for fold in at_once]
    assert sorted(each.line for fold in at_once for each in fold.rows) == [each.line for each in rows]
    firsts = [fold.first_rows[0].line for fold in at_once]
    assert firsts == sorted(firsts)
    for fold in at_once:
        assert len(fold.records) == len({record[0].rank for record in fold.records})
        for record in fold.records:
            assert [each.line for each in record] == sorted(each.line for each in record)
            assert len({each.rank for each in record}) == 1


@st.composite
def _one_odd(draw: st.DrawFn) -> tuple[list[list[bytes]], list[LogLine], int]:
    """What all ranks print, line by line in any order, within a window; one of them prints something more."""
    trace = [b"Traceback (most recent call last):", b'  File "t.py", line 3', b"ValueError: no"]
    alike = st.sampled_from([[b"case 1"], [b"case 2"], [b"case 3"], [b"saved"], [b"loss 1.5"], [b"loss 2"], trace])
    said: list[list[bytes]] = draw(st.lists(alike, min_size=1, max_size=8))
    count = draw(st.integers(2, 4))
    lines = [[text for record in said for text in record] for _ in range(count)]
    odd: list[bytes] = draw(
        st.sampled_from([[b"case 9"], [b"case 1 ODD"], [b"odd"], [b"loss nan"], [*trace[:2], b"E: odd"]])
    )
    at = draw(st.integers(0, len(said)))
    lines[draw(st.integers(0, count - 1))] = [text for record in (*said[:at], odd, *said[at:]) for text in record]
    turns = draw(st.permutations([rank for rank in range(count) for _ in lines[rank]]))
    rows = [row(rank, lines[rank].pop(0), number / 1000, line=number) for number, rank in enumerate(turns)]
    return said, rows, count


@examples(100)
@given(_one_odd())
def test_an_odd_line_stands_alone_and_all_others_fold_as_without_it(
    case: tuple[list[list[bytes]], list[LogLine], int],
) -> None:
    said, rows, count = case
    folds = [([each.text for each in fold.first_rows], len(fold.records)) for fold in folded(rows)]
    assert sorted(texts for texts, ranks in folds if ranks == count) == sorted(said)
    assert [ranks for _, ranks in folds if ranks < count] == [1]


def test_a_line_that_one_rank_says_otherwise_moves_no_other_one() -> None:
    """Wherever it comes among the others, and if all of a rank comes at once."""

    def said(rank: int, number: int) -> LogLine:
        return row(rank, b"case 2 ODD" if (rank, number) == (1, 2) else b"case %d" % number)

    cases = [f"[0-3]| case {number}" for number in range(6)]
    cases[2] = "[0,2-3]| case 2"
    in_turn = [said(rank, number) for number in range(6) for rank in range(4)]
    assert printed(in_turn) == [*cases[:3], "n0:1| case 2 ODD", *cases[3:]]
    for ranks in itertools.permutations(range(4)):
        each_at_once = [said(rank, number) for rank in ranks for number in range(6)]
        assert sorted(printed(each_at_once)) == sorted([*cases, "n0:1| case 2 ODD"])


def test_one_line_of_many_ranks_and_the_odd_one_out() -> None:
    rows = [row(rank, b"step 120 loss=1.8%d lr 3e-4" % (rank % 7)) for rank in range(512)]
    rows[37] = row(37, b"step 120 loss=nan lr 3e-4")
    begun = time.process_time()
    assert printed(rows) == ["[0-36,38-511]~| step 120 loss=1.80 lr 3e-4", "n4:37| step 120 loss=nan lr 3e-4"]
    once_s = time.process_time() - begun
    begun = time.process_time()
    folded([row(rank, b"step %d loss=1.8" % step, step) for step in range(20) for rank in range(512)])
    # Twenty times the rows: their cost does not grow with their number.
    assert time.process_time() - begun < 20 * 5 * max(once_s, 0.02)
    begun = time.process_time()
    folded([row(at % 5000 == 4999, b"loss=1.%04d" % at, at / 10_000) for at in range(10_000)])
    assert time.process_time() - begun < 20 * 5 * max(once_s, 0.02), "nor if one rank prints far more than another"


def test_a_step_folds_with_the_same_step_only() -> None:
    assert printed(
        [row(0, b"step 120"), row(0, b"step 121", 0.6), row(1, b"step 120", 0.7), row(1, b"step 121", 1.3)]
    ) == [
        "[0-1]| step 120",
        "[0-1]| step 121",
    ]
    # One rank is a whole window ahead.
    assert printed([row(0, b"step 1"), row(0, b"step 2", 0.9), row(1, b"step 1", 1.1), row(1, b"step 2", 1.2)]) == [
        "n0:0| step 1",
        "[0-1]| step 2",
        "n0:1| step 1",
    ]


def test_a_rank_s_second_line_begins_a_new_row_even_in_a_burst() -> None:
    rows = [row(rank, b"saved part %d" % part) for rank in (0, 1) for part in (1, 2, 3)]
    assert printed(rows) == [f"[0-1]| saved part {part}" for part in (1, 2, 3)]


def test_streams_and_windows_are_kept_apart() -> None:
    assert printed([row(0, b"hello"), row(1, b"hello", stream="stderr")]) == ["n0:0| hello", "n0:1| hello"]
    assert printed([row(0, b"hello"), row(1, b"hello", 1.5)]) == ["n0:0| hello", "n0:1| hello"]


def test_a_traceback_folds_as_a_whole() -> None:
    def trace(rank: int, error: bytes) -> list[LogLine]:
        lines = (b"[rank%d]: Traceback (most recent call last):" % rank, b'[rank%d]:   File "t.py", line 3' % rank)
        return [row(rank, line) for line in (*lines, b"[rank%d]: %s" % (rank, error))]

    parts = [trace(0, b"ValueError: no"), trace(1, b"ValueError: no"), trace(2, b"OSError: disk")]
    shown = [each.text.decode() for each in parts[0]]
    odd = [each.text.decode() for each in parts[2]]
    expected = [*(f"[0-1]~| {text}" for text in shown), *(f"n0:2| {text}" for text in odd)]
    assert printed([each for part in parts for each in part]) == expected
    # As they come live: line by line from all ranks.
    assert printed([each for lines in zip(*parts, strict=True) for each in lines]) == expected


def test_what_waits_comes_once_its_time_is_over_and_when_it_is_too_much() -> None:
    folder = Folder[LogLine]()
    assert folder.feed([row(0, b"hello"), row(1, b"hello")]) == []
    assert folder.until(SECOND) == []
    assert [fold.ranks for fold in folder.until(SECOND + 1)] == [[0, 1]]
    full = Folder[LogLine](limit=10_000)
    assert sum(len(fold.rows) for fold in full.feed([row(0, b"x" * 1000)] * 100)) > 90


def test_a_long_line_costs_what_it_holds() -> None:
    begun = time.process_time()
    assert len(folded([row(rank, b"x" * 65_536) for rank in range(4)])) == 1
    # Looked through from each of its letters it takes minutes.
    assert time.process_time() - begun < 5.0
