"""What tests leave behind is found by its mark."""

from __future__ import annotations

import secrets
import signal
import subprocess

from tests.agents.engine_process import await_variables
from tests.cluster.leftovers import MARK, below, end


def test_a_session_ends_what_a_worker_that_was_killed_had_started() -> None:
    session = secrets.token_hex(8)
    with subprocess.Popen(["sleep", "600"], env={MARK: f"{session}.worker"}) as process:
        try:
            await_variables(process.pid)
            assert below(session) == [process.pid]
            assert below("worker") == below(session[:-1]) == []
            end(below(session))
            assert process.wait(30) == -signal.SIGKILL
        finally:
            process.kill()
