"""What NCCL's own service (RAS) tells: asked of a process that answers as NCCL does, in the form of real answers."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from remote_agent.engine.inspect import ras
from tests.ports import reserved_port

# After the reports in NVIDIA/nccl#1911 and #1762; the numbers are others.
STATUS = """NCCL version 2.26.2 compiled with CUDA 12.6
CUDA runtime version 12060, driver version 12060

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      2          4            1          8        8

Communicators... (0.00s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         2         4         8         8   RUNNING  INCOMPLETE,MISMATCH

Errors
======

INCOMPLETE
  Missing communicator data from 1 job process
  Process 60004 on node 10.0.0.13 managing GPU 0

#0-0 (b3) INCOMPLETE
  Missing communicator data from 1 rank
  Rank 4 -- GPU 0 managed by process 60004 on node 10.0.0.13

Warnings
========

#0-0 (b3) MISMATCH
  Communicator ranks have different AllGather operation counts
  1 rank has launched up to operation 640
  Rank 2 -- GPU 2 managed by process 32302 on node 10.0.0.12

"""
HEALTHY = STATUS.partition("INCOMPLETE\n")[0] + "Warnings\n========\n\n"
COMPLAINTS = """\
INCOMPLETE: Missing communicator data from 1 job process; Process 60004 on node 10.0.0.13 managing GPU 0
#0-0 (b3) INCOMPLETE: Missing communicator data from 1 rank; Rank 4 -- GPU 0 managed by process 60004 on node 10.0.0.13
#0-0 (b3) MISMATCH: Communicator ranks have different AllGather operation counts; 1 rank has launched up to operation \
640; Rank 2 -- GPU 2 managed by process 32302 on node 10.0.0.12
"""
# A rank's process: it listens where NCCL_RAS_ADDR says, obeys line by line, and closes after a status.
RANK = """
import os, socketserver, sys
class Ras(socketserver.StreamRequestHandler):
    def handle(self):
        for line in self.rfile:
            words = line.decode().split()
            if words[:2] == ["CLIENT", "PROTOCOL"]:
                self.wfile.write(b"SERVER PROTOCOL 2\\n")
            elif words[:1] == ["TIMEOUT"]:
                self.wfile.write(b"OK\\n")
            elif words[-1:] == ["STATUS"] and os.environ["ANSWER"] != "never":
                return self.wfile.write(os.environ["ANSWER"].encode())
host, port = os.environ["NCCL_RAS_ADDR"].split(":")
socketserver.ThreadingTCPServer.allow_reuse_address = True
with socketserver.ThreadingTCPServer((host, int(port)), Ras) as server:
    print("ready", flush=True)
    server.serve_forever()
"""


@pytest.fixture
def free_port() -> Iterator[int]:
    with reserved_port() as port:
        yield port


@contextmanager
def rank(answer: str, port: int) -> Iterator[int]:
    environment = {**os.environ, "ANSWER": answer, "NCCL_RAS_ADDR": f"127.0.0.1:{port}"}
    command = [sys.executable, "-c", RANK]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process.pid
        finally:
            process.kill()


def ask(*pids: int) -> list[str]:
    return asyncio.run(ras.complaints(pids))


def test_its_errors_and_warnings_are_reported_in_one_line_each(free_port: int) -> None:
    with rank(STATUS, free_port) as pid:
        assert ask(pid) == COMPLAINTS.splitlines()
        assert ask(os.getpid()) == [], "who listens there is no rank of ours: another job's answer"


def test_a_healthy_job_has_no_complaints(free_port: int) -> None:
    with rank(HEALTHY, free_port) as pid:
        assert ask(pid) == []


def test_nobody_waits_long_for_its_answer(free_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ras, "WAIT_S", 0.2)
    with rank("never", free_port) as pid:
        begin = time.monotonic()
        assert ask(pid) == []
        assert time.monotonic() - begin < 30.0
    assert ask() == []
    assert ask(pid) == [], "the process is gone"
