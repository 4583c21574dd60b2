"""Tracebacks with something before each of their lines.

In: lines of several writers. Out: each traceback bare and in one piece, all else as it was.
"""

from __future__ import annotations

from supervisor.postmortem.lines import FileLine, without_prefixes

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
