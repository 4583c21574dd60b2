"""The second try of `.ci/run`: what it makes of tests that failed, and when there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = """
from pathlib import Path

def test_once():
    seen = Path("seen")
    if not seen.exists():
        seen.touch()
        assert False

def test_always():
    assert False
"""


def test_a_test_that_failed_is_tried_once_more(tmp_path: Path, repository: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    env = {**os.environ, "PYTHONPATH": str(repository)}
    run = [sys.executable, "-m"]
    assert subprocess.run([*run, "pytest"], cwd=tmp_path, env=env, capture_output=True, check=False).returncode
    second = subprocess.run(
        [*run, "tests.flaky", "again"], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    lines = [line for line in second.stdout.splitlines() if line.startswith("FLAKY")]
    assert (second.returncode, lines) == (1, ["FLAKY test_it.py::test_once"])
