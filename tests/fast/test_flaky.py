"""The second try of `.ci/run`: which tests get one, and what it makes of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.flaky import LEFT, again

HELPER = """
import pathlib

def fail_once(name):
    seen = pathlib.Path(name)
    if not seen.exists():
        seen.touch()
        assert False
"""
ONCE = "def test_{0}():\n    helper.fail_once('{0}')\n"
ALWAYS = "def test_{0}():\n    assert False\n"


@pytest.mark.parametrize(
    ("tests", "status", "flaky"),
    [
        ({"a": ONCE, "b": ONCE}, 0, "ab"),
        ({"a": ONCE, "b": ALWAYS}, 1, "a"),
        ({"a": "not Python"}, 1, ""),
    ],
    ids=["passes alone", "fails again", "cannot be loaded"],
)
def test_a_test_that_failed_is_tried_once_more(
    tmp_path: Path, repository: Path, tests: dict[str, str], status: int, flaky: str
) -> None:
    (tmp_path / "helper.py").write_text(HELPER)
    (tmp_path / "test_it.py").write_text("import helper\n" + "".join(text.format(name) for name, text in tests.items()))
    env = {**os.environ, "PYTHONPATH": str(repository)}
    run = [sys.executable, "-m"]
    assert subprocess.run([*run, "pytest"], cwd=tmp_path, env=env, capture_output=True, check=False).returncode
    again = [*run, "tests.flaky", "again"]
    second = subprocess.run(again, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    lines = [line for line in second.stdout.splitlines() if line.startswith("FLAKY")]
    assert (second.returncode, lines) == (status, [f"FLAKY test_it.py::test_{name}" for name in flaky])


def test_many_tests_that_failed_have_a_common_cause(capsys: pytest.CaptureFixture[str]) -> None:
    assert again([f"test_it.py::test_{number}" for number in range(4)]) == 1
    assert "more than 3 are not tried again" in capsys.readouterr().out


def test_nothing_is_tried_again_if_processes_were_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """pytest notes the last test for them, which passes alone."""
    monkeypatch.chdir(tmp_path)
    LEFT.parent.mkdir()
    LEFT.write_text("sleep 600")
    assert again(["test_it.py::test_last"]) == 1
    assert "sleep 600" in capfd.readouterr().out
