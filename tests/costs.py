"""A plugin of pytest that prints where a run's time goes: `make costs`.

In: how long each test took, and the processor time of its worker with the children that ended meanwhile.
Out: a table by file, the dearest first, with the file's lines, and a table by directory.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

SHOWN = 25
_began = pytest.StashKey[float]()


def _spent() -> float:
    return sum(os.times()[:4])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Note the processor time with the last phase of a test: it travels to the session with the report."""
    if call.when == "teardown":
        item.user_properties.append(("processor", _spent() - item.stash[_began]))
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """Look at the clock before a test's fixtures."""
    item.stash[_began] = _spent()
    return (yield)


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print both tables."""
    wall: dict[str, float] = defaultdict(float)
    processor: dict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in (each for each in reports if isinstance(each, pytest.TestReport)):
            name = report.nodeid.split("::")[0]
            wall[name] += report.duration
            if report.when == "teardown":
                processor[name] += sum(
                    float(str(spent)) for what, spent in report.user_properties if what == "processor"
                )
    lines = {name: float(Path(name).read_bytes().count(b"\n")) for name in wall}
    files = (wall, processor, lines)
    directories: tuple[dict[str, float], ...] = tuple(defaultdict(float) for _ in files)
    for found, whole in zip(directories, files, strict=True):
        for name, value in whole.items():
            found[str(Path(name).parent)] += value
    for title, columns, shown in (("directory", directories, None), ("file", files, SHOWN)):
        terminalreporter.write_line(f"\n| {title} | seconds | of processor time | lines |\n|---|---|---|---|")
        for name in sorted(columns[0], key=lambda name: -columns[0][name])[:shown]:
            terminalreporter.write_line(f"| `{name}` | {' | '.join(f'{column[name]:.0f}' for column in columns)} |")
