"""py-spy's answers: read as Python's own stacks, and told why there are none; it never holds anything up."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from pathlib import Path

import pytest

from remote_agent.engine.inspect import children
from remote_agent.engine.inspect.children import NOT_ALLOWED, NOT_INSTALLED, is_at_a_file, spy

LIB = "/usr/lib/python3.11/multiprocessing"
DUMP = f"""\
Process 7: python -u train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread 7 (idle): "MainThread"
    Data.__getitem__ (/work/train.py:26)
    BaseProcess._bootstrap ({LIB}/process.py:314)
    <module> (/work/train.py:99)
Thread 8 (active+gil): "Thread-1 (feed)"
    _time_logger.<locals>.wrapper (/work/x (1).py:7)
    feed (/work/x.py:8)
"""
STACK = f"""\
Thread Thread-1 (feed) (most recent call first):
  File "/work/x (1).py", line 7 in wrapper
  File "/work/x.py", line 8 in feed

Thread MainThread (most recent call first):
  File "/work/train.py", line 26 in __getitem__
  File "{LIB}/process.py", line 314 in _bootstrap
"""


@pytest.mark.parametrize(
    ("script", "stacks", "note"),
    [
        (f"cat <<'END'\n{DUMP}END", {7: STACK, 9: STACK}, ""),
        ("echo Permission Denied: Try running again >&2; exit 1", {}, NOT_ALLOWED),
        ("echo Error: No such process >&2; exit 1", {}, ""),
        ("exec sleep 600", {}, "py-spy took longer than 0.3 s there"),
        (None, {}, NOT_INSTALLED),
    ],
    ids=["stacks", "not allowed", "gone", "slow", "not installed"],
)
def test_what_py_spy_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, stacks: dict[int, str], note: str
) -> None:
    if script is not None:
        (tmp_path / "py-spy").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "py-spy").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    if script is None:
        monkeypatch.setenv("PATH", os.defpath)
    monkeypatch.setattr(children, "SPY_S", 0.3 if note.startswith("py-spy took") else 60.0)
    assert asyncio.run(asyncio.wait_for(spy([7, 9]), 120)) == (stacks, note)


CALLS = {"x86_64": {"read": 0, "close": 3, "futex": 202}, "aarch64": {"read": 63, "close": 57, "futex": 98}}


@pytest.mark.skipif(os.uname().machine not in CALLS, reason="the numbers of its system calls are not known here")
@pytest.mark.parametrize(
    ("call", "what", "expected"),
    [("read", "file", True), ("close", "pipe", True), ("read", "pipe", False), ("read", "/dev/null", False),
     ("futex", "file", False), ("", "file", False)],
)  # fmt: skip
def test_a_rank_held_at_a_file_is_distinguished_from_one_that_waits_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, what: str, expected: bool
) -> None:
    with contextlib.ExitStack() as stack:
        ends = os.pipe() if what == "pipe" else [os.open(str(tmp_path / "x") if what == "file" else what, os.O_CREAT)]
        for end in ends:
            stack.callback(os.close, end)
        said = f"{CALLS[os.uname().machine][call]} 0x{ends[0]:x} 0x0\n" if call else "running\n"
        monkeypatch.setattr(children, "read_text", lambda path: said)
        assert is_at_a_file(os.getpid()) is expected
