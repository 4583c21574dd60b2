"""Widths are exact, whatever the text; colours of a log are kept, and nothing else of its escapes."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.style import Style

from supervisor.tui.logs import ansi
from supervisor.tui.rows.spans import clean, crop_row, fit, fit_row, row_width, text_of, wrap
from supervisor.wording import values

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40) | st.text("a漢😀é\u0301\t\x1b[\r", max_size=40)


@given(TEXTS, st.integers(0, 50))
def test_fit_is_exact(text: str, width: int) -> None:
    made = fit(text, width)
    assert cell_len(made) == width
    assert clean(made) == made


@given(st.lists(st.tuples(TEXTS.map(clean), st.just("text")), max_size=5), st.integers(0, 60), st.integers(0, 60))
def test_crop_and_fit_row_are_exact(row: list[tuple[str, str]], left: int, width: int) -> None:
    assert row_width(crop_row(row, left, width)) == width
    assert row_width(fit_row(row, width)) == width


@given(TEXTS, st.integers(1, 60))
def test_wrap_stays_within_the_width_and_loses_no_word(text: str, width: int) -> None:
    lines = wrap(text, width)
    assert lines
    assert all(cell_len(line) <= max(width, 2) for line in lines)
    if width > 80:
        assert "".join("".join(lines).split()) == "".join(clean(text).split())


@pytest.mark.parametrize("text", ["\u3000" * 40 + "x" * 60, "\u5b66" * 20_000, "\u0301" * 20_000])
def test_wrap_ends_soon(text: str) -> None:
    started = time.process_time()
    assert "".join("".join(wrap(text, 70)).split()) == text.strip()
    assert time.process_time() - started < 2


@given(st.binary(max_size=300))
def test_any_bytes_become_a_row(raw: bytes) -> None:
    row = ansi.spans(raw)
    text = text_of(row)
    assert row_width(row) <= ansi.MAX_CELLS
    assert not re.search(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e]", text)


def test_colours_are_kept_and_everything_else_is_dropped() -> None:
    row = ansi.spans(b"a\x1b[31mred\x1b[0mb\x1b[2J\x1b]0;title\x07c\x1b[1;38;5;208mx\x1b[38;2;1;2;3my\x1b[")
    assert text_of(row) == "aredbcxy"
    assert row[1] == ("red", Style.parse("color(1)"))
    assert isinstance(row[4][1], Style)
    assert row[4][1].bold


def test_a_progress_bar_shows_its_last_state() -> None:
    assert text_of(ansi.spans(b" 5%|#    |\r10%|##   |\r15%|###  |\r")) == "15%|###  |"
    assert text_of(ansi.spans(b"windows line\r")) == "windows line"


def test_long_lines_are_capped() -> None:
    assert row_width(ansi.spans(b"x" * 100_000)) == ansi.MAX_CELLS
    assert row_width(ansi.spans("漢".encode() * 50_000)) == ansi.MAX_CELLS
    assert row_width(ansi.spans(b"\x1b[31mx\x1b[0m" * 20_000)) <= ansi.MAX_CELLS


def test_a_pattern_that_takes_for_ever_leaves_the_row_as_it_is() -> None:
    row = (("a" * 4000, "text"),)
    begun = time.monotonic()
    assert ansi.highlight(row, re.compile(r"(a+)+\d")) == row
    assert time.monotonic() - begun < 60


def test_highlight_goes_over_borders_of_colours() -> None:
    row = ansi.highlight((("one tw", "a"), ("o three two", "b")), re.compile("two"))
    assert text_of(row) == "one two three two"
    assert [text for text, role in row if role == "hit"] == ["tw", "o", "two"]
    assert ansi.highlight((("abc", "a"),), re.compile("x*")) == (("abc", "a"),)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0.42, "0.4 s"),
        (12, "12 s"),
        (98, "98 s"),
        (119, "119 s"),
        (121, "2 min"),
        (179, "2 min"),
        (240, "4 min"),
        (7500, "2 h"),
        (300_000, "3 d"),
    ],
)
def test_ages(seconds: float | None, text: str) -> None:
    assert values.age(seconds) == text
