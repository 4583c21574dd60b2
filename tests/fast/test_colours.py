"""Colours of what commands print: by what a line says, and only where they are wanted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from supervisor.cli import colours, main

ESC = "\x1b"


@pytest.mark.parametrize(
    ("line", "role", "word"),
    [
        ("10:03:51.210 rank failed          g0   n2 rank 3      exit 1", "bad", "rank failed"),
        ("10:03:52.900 generation stopped   g0                  a rank failed", "warn", "generation stopped"),
        ("10:03:24.400 generation running   g0                  world size 8", "ok", "generation running"),
        ("10:03:21.000 operator attached                  ann@laptop", "dim", "10:03:21.000"),
        ("incident 1  generation 0  10:03:51.207", "bad", "incident 1"),
        ("  evidence: n2 rank 3 stderr.log:9: error", "name", "evidence"),
        ("  hint: lower the batch size", "ok", "  hint:"),
        ("failed: the same failure twice before the first step", "bad", "failed:"),
        ("error    n[1-3]: connect: connection refused", "bad", "error"),
        ("a job on these hosts would fail: 1 error on n1", "bad", "a job on these hosts would fail"),
        ("64 hosts, no problems found", "ok", "64 hosts, no problems found"),
        ("torch      ! 2.12.0  gpu07", "warn", "!"),
    ],
)
def test_a_line_is_coloured_by_what_it_says(line: str, role: str, word: str) -> None:
    shown = colours.coloured(line)
    assert f"{ESC}[{colours._CODES[role]}m{word}{ESC}[m" in shown
    assert re.sub(r"\x1b\[[\d;]*m", "", shown) == line


def test_a_node_colours_nothing() -> None:
    shown = colours.coloured(f"next: {ESC}[31mred{ESC}]0;title\a")
    assert shown.count(ESC) == 2
    assert colours.coloured("a line of nobody") == "a line of nobody"


@pytest.mark.parametrize(
    ("mode", "terminal", "env", "wanted"),
    [
        ("auto", True, {}, True), ("auto", False, {}, False), ("auto", True, {"NO_COLOR": "1"}, False),
        ("auto", True, {"TERM": "dumb"}, False), ("always", False, {"NO_COLOR": "1"}, True), ("never", True, {}, False),
    ],
)  # fmt: skip
def test_when_there_are_colours(
    monkeypatch: pytest.MonkeyPatch, mode: str, terminal: bool, env: dict[str, str], wanted: bool
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(colours, "out_is_terminal", lambda: terminal)
    assert colours.wanted(mode) is wanted


def test_diagnose_is_coloured_if_asked_and_plain_in_a_pipe(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "rank_0.log"
    log.write_text('Traceback (most recent call last):\n  File "a.py", line 1, in f\n    g()\nValueError: bad\n')
    assert main(["diagnose", str(log)]) == 0
    plain = capfd.readouterr().out
    assert main(["diagnose", "--color", "always", str(log)]) == 0
    shown = capfd.readouterr().out
    assert ESC not in plain
    assert f"{ESC}[1;31mincident 1{ESC}[m" in shown
    assert re.sub(r"\x1b\[[\d;]*m", "", shown) == plain
