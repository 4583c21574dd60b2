"""The agent's own log: what it keeps, and how much of it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from remote_agent.agent import agent_log


def record(line: int, text: str) -> logging.LogRecord:
    return logging.LogRecord("agent", logging.INFO, "agent.py", line, text, (), None)


def test_one_place_in_the_code_logs_a_few_lines_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("remote_agent.agent.agent_log.time.monotonic", lambda: now)
    sparing = agent_log.Sparing()
    assert sum(sparing.filter(record(1, "too many open files")) for _ in range(5000)) == agent_log.BURST
    assert sparing.filter(record(2, "another place"))
    now += agent_log.PERIOD_S
    next_one = record(1, "too many open files")
    assert sparing.filter(next_one)
    assert next_one.getMessage() == f"too many open files (and {5000 - agent_log.BURST} like it left out)"


def test_a_long_log_keeps_its_beginning_and_its_newest_lines(tmp_path: Path) -> None:
    path = tmp_path / "agent.log"
    lines = [b"%d %s\n" % (number, b"x" * 90) for number in range(30_000)]
    with open(path, "ab", buffering=0) as appending:
        appending.write(b"".join(lines))
        agent_log.cut(path)
        appending.write(b"the end\n")
    kept = path.read_bytes()
    assert len(kept) < agent_log.LIMIT
    first, _, newest = kept.partition(b" bytes are left out here]\n")
    left_out = int(first[first.rfind(b"[") + 1 :])
    first = first[: first.rfind(b"[")]
    assert b"".join(lines).startswith(first)
    assert (b"".join(lines) + b"the end\n").endswith(newest)
    assert left_out + len(first) + len(newest) == len(b"".join(lines)) + len(b"the end\n")


def test_a_short_log_or_none_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "agent.log"
    agent_log.cut(path)
    path.write_bytes(b"a line\n")
    agent_log.cut(path)
    assert path.read_bytes() == b"a line\n"
