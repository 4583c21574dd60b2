"""What the hosts of a cluster hold, seen from this machine, which they all are.

In: a Cluster. Out: the journal of a job, from a host's files; the moment when no process of ours is left.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.cluster import Cluster
from tests.cluster.leftovers import end as kill

QUIET_S = 30.0
POLL_S = 0.1
END_S = 10.0


def journal(cluster: Cluster, job: str) -> list[dict[str, Any]]:
    """Return the events of a job from the first host's file; a half-written last line is left out."""
    path = cluster.hosts[0].home / ".supervisor" / "jobs" / job / "events.jsonl"
    *whole, _rest = path.read_bytes().split(b"\n")
    return [json.loads(line) for line in whole]


def event_ns(event: dict[str, Any]) -> int:
    """Return an event's time in nanoseconds since the epoch; it is written in milliseconds."""
    moment = datetime.datetime.fromisoformat(str(event["time"]).replace("Z", "+00:00"))
    return round(moment.timestamp() * 1000) * 1_000_000


def processes(cluster: Cluster) -> list[int]:
    """Return the pids of our agents, engines and bridges on all hosts: they run from a file in a host's home."""
    mark = os.fsencode(cluster.directory)
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            words = Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if any(word.startswith(mark) and word.endswith(b".pyz") for word in words):
            found.append(int(entry))
    return found


def wait_quiet(cluster: Cluster) -> int:
    """Wait until no process of ours is left, so that one measurement does not slow the next.

    Returns how many had to be killed because they did not end by themselves.
    """
    end = time.monotonic() + QUIET_S
    while left := processes(cluster):
        if time.monotonic() > end:
            kill(left)
            return len(left)
        time.sleep(POLL_S)  # not our children: nothing tells us when they end
    return 0


@contextlib.contextmanager
def ended(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """Whatever happens, the process is over after this: asked first, then killed."""
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(END_S)
