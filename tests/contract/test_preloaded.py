"""A forked command is as one from the command line: to both of them everything looks alike, and both end alike."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.preloaded import Preloaded, Program

WAIT_S = 60.0
MODULE = """
import atexit, json, os, random, signal, sys, threading, time
atexit.register(print, "at exit")

def main():
    streams = {
        stream.fileno(): (stream.encoding, stream.errors, stream.line_buffering, stream.write_through, stream.isatty())
        for stream in (sys.stdin, sys.stdout, sys.stderr)
    }
    handlers = [str(signal.getsignal(number)) for number in sorted(signal.valid_signals())]
    files = sorted(number for number in range(64) if os.path.exists(f"/proc/self/fd/{number}"))
    leads = os.getpid() == os.getsid(0) == os.getpgrp()
    looks = sys.argv, sys.orig_argv, sys.path, os.getcwd(), dict(os.environ), time.tzname
    print(json.dumps((looks, streams, handlers, files, leads)), sys.stdin.read(), len(threading.enumerate()))
    print("an error \\udc80", file=sys.stderr)
    if sys.argv[1] == "raise":
        raise ValueError("boom")
    if sys.argv[1] == "signal":
        os.kill(os.getpid(), signal.SIGINT)
    if sys.argv[1] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if sys.argv[1] == "wait":
        signal.pause()
    return 7

if __name__ == "__main__":
    sys.exit(main())
"""


def test_all_looks_as_it_does_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "looks.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    environment = {**os.environ, "TZ": "UTC+3", "ONE_MORE": "é"}
    del environment["HOME"]
    plain = Program("looks")
    with contextlib.closing(Preloaded("looks")) as forked:
        for word, status in (("return", 7), ("raise", 1), ("signal", -signal.SIGINT), ("kill", -signal.SIGKILL)):
            done, other = (
                program.run([word, "é"], tmp_path, timeout=WAIT_S, environment=environment)
                for program in (plain, forked)
            )
            assert (other.returncode, other.stdout) == (done.returncode, done.stdout), word
            assert other.returncode == status
            # The frames above `main` are others.
            assert other.stderr.splitlines()[0] == done.stderr.splitlines()[0] == b"an error \\udc80"
            assert other.stderr.splitlines()[-1] == done.stderr.splitlines()[-1]
        for program in (plain, forked):
            with pytest.raises(subprocess.TimeoutExpired):
                program.run(["wait"], tmp_path, timeout=0.5)
        with forked.piped(["wait"], tmp_path) as (process, _, errors):
            assert errors.readline()
            assert process.poll() is None
            process.terminate()
            assert process.wait(WAIT_S) == process.poll() == -signal.SIGTERM
        first, second = (forked.run(["return"], tmp_path, timeout=WAIT_S) for _ in range(2))
        assert first.stdout == second.stdout
    assert not Path(f"/proc/{process.pid}").exists()
