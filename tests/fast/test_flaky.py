"""The second try of `.ci/run`: what it makes of tests that failed, and when there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import watch

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


# How a worker of pytest-xdist dies: in a test, or while it looks for tests.
DEATHS = {
    "in a test": "def test_dies():\n    os.kill(os.getpid(), 9)",
    "as it collects": "if os.environ['PYTEST_XDIST_WORKER'] == 'gw0':\n    os.kill(os.getpid(), 9)",
}
OTHERS = "\n@pytest.mark.parametrize('n', range(8))\ndef test_other(n):\n    time.sleep(0.05)\n"


@pytest.mark.parametrize("how", DEATHS)
def test_a_run_ends_although_a_worker_dies_and_nothing_of_it_is_tried_again(
    tmp_path: Path, repository: Path, how: str
) -> None:
    (tmp_path / "test_it.py").write_text(f"import os, time, pytest\n{DEATHS[how]}\n{OTHERS}")
    settings = ["-c", str(repository / "pyproject.toml"), "--rootdir", str(tmp_path), "-p", "tests.conftest"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *settings, "-n", "2", "--dist", "loadgroup", "test_it.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(repository)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    # With another status than that of tests that fail, `make suite` forgets which ones did.
    assert done.returncode not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED), done.stdout


HOG = """
import asyncio, time

async def waits():
    time.sleep(0.5)

async def hog():
    end = time.thread_time() + 0.5
    while time.thread_time() < end:
        pass

async def main():
    await asyncio.gather(asyncio.create_task(waits()), asyncio.create_task(hog()))

asyncio.run(main())
"""


@pytest.mark.parametrize("options", [(), ("-S",)])
def test_a_callback_that_holds_a_loop_is_noted_in_every_process(tmp_path: Path, options: tuple[str, ...]) -> None:
    """The processor time counts: whoever waits for a busy machine holds nothing."""
    noted = tmp_path / "held"
    env = {**os.environ, **watch.variables(), watch.HELD: str(noted)}
    done = subprocess.run(
        [sys.executable, *options, "-c", HOG], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    (line,) = noted.read_text().splitlines()
    assert "coro=<hog()" in line
