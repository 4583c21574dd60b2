"""Tests that fail now and then: a second try for `.ci/run`, and the search for them on purpose.

    python -m tests.flaky again    the tests that failed in the last run, once more, alone
    python -m tests.flaky          the suite quiet, beside two processes that burn a core each, and on one core

In: what pytest has noted of its last run. Out: a line `FLAKY path::test` for each that passes then; a table of what
failed where. The exit code is 0 if nothing failed, or if at most MAX_FLAKY tests failed and pass now.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

# Where pytest's own `--last-failed` finds what failed.
NOTED = Path(".pytest_cache/v/cache/lastfailed")
# What processes the tests of the last run left behind: the test that pytest notes for it is only the last one.
LEFT = Path(".pytest_cache/left_behind")
# More than these have a common cause.
MAX_FLAKY = 3
BURNERS = 2
MODES = {"quiet": (), "busy": (), "one core": ("taskset", "-c", "0")}
# pytest-xdist appends the group by which it distributes a test.
GROUP = re.compile(r"@\w+/\w+$")


class Tried:
    """A plugin of pytest that notes how each test ended."""

    def __init__(self) -> None:
        self.passed: dict[str, bool] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note one phase of a test: each must pass."""
        self.passed[report.nodeid] = self.passed.get(report.nodeid, True) and report.passed


def failed() -> list[str]:
    """Return the tests that failed in the last run, sorted; a path alone is a file that could not be loaded."""
    try:
        return sorted({GROUP.sub("", name) for name in json.loads(NOTED.read_text())})
    except FileNotFoundError:
        return []


def again(names: list[str]) -> int:
    """Run those tests once more, one after the other; returns the exit code for the whole run."""
    if not names or not all("::" in name for name in names):
        print("no test failed by itself: nothing is tried again")
        return 1
    if LEFT.exists():
        print(f"tests left processes behind: nothing is tried again\n{LEFT.read_text()}")
        return 1
    if len(names) > MAX_FLAKY:
        print(f"{len(names)} tests failed: more than {MAX_FLAKY} are not tried again")
        return 1
    tried = Tried()
    status = pytest.main(["-n", "0", *names], plugins=[tried])
    for name in names:
        if tried.passed.get(name):
            print(f"FLAKY {name}")
    return 0 if status == 0 and all(tried.passed.get(name) for name in names) else 1


@contextlib.contextmanager
def burning(count: int) -> Iterator[None]:
    """Keep that many cores busy."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def search() -> int:
    """Run the suite in each mode and print what failed where; returns 0 if nothing did."""
    found: dict[str, list[str]] = {}
    for mode, prefix in MODES.items():
        NOTED.unlink(missing_ok=True)
        began = time.monotonic()
        with burning(BURNERS if mode == "busy" else 0):
            status = subprocess.run([*prefix, "make", "--no-print-directory", "suite"], check=False).returncode
        names = failed() if status else []
        print(f"{mode}: {len(names)} failed, {time.monotonic() - began:.0f} s, status {status}", flush=True)
        for name in names or (["the run itself"] if status else []):
            found.setdefault(name, []).append(mode)
    for name, modes in sorted(found.items()):
        print(f"{', '.join(modes):24}  {name}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(again(failed()) if sys.argv[1:] == ["again"] else search())
