"""The variables of an operator's shell: those of the rank, without what is the rank's alone and without ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from remote_agent.bridge.shell import rank_environment


def environ(proc: Path, *entries: str) -> None:
    (proc / "7").mkdir(exist_ok=True)
    # A rank that was started warm has its own ones last, and room behind them.
    (proc / "7" / "environ").write_bytes("\0".join(entries).encode() + b"\0\0\0")


@pytest.mark.parametrize(
    ("given", "path"),
    [
        (("PYTHONPATH=/home/u/jobs/j/generation_0/.run-ab1:/lib",), "/lib"),
        (("PYTHONPATH=/home/u/jobs/j/.wait-ab1",), None),
        (("PYTHONPATH=/tmp/supervisor-run-a:/tmp/supervisor-run-a",), ""),
        (("PYTHONPATH=/home/u/jobs/j/.wait-ab1:/lib", "PYTHONPATH=/lib"), "/lib"),
        (("PYTHONPATH=/lib:/home/u/.run-x",), "/lib:/home/u/.run-x"),
        ((), None),
    ],
)
def test_it_has_the_ranks_variables_alone(tmp_path: Path, given: tuple[str, ...], path: str | None) -> None:
    own = ("TORCHELASTIC_ERROR_FILE=/x/error.json", "SUPERVISOR_METRICS=/x/metrics.jsonl")
    environ(tmp_path, "HOME=/home/u", "EQUAL=a=b", "RANK=0", *given, *own, "RANK=3")
    env = rank_environment(7, 3, tmp_path)
    assert env == {"HOME": "/home/u", "EQUAL": "a=b", "RANK": "3", **({} if path is None else {"PYTHONPATH": path})}


def test_another_process_is_not_taken_for_the_rank(tmp_path: Path) -> None:
    environ(tmp_path, "RANK=2")
    assert rank_environment(7, 3, tmp_path) is None
    assert rank_environment(8, 3, tmp_path) is None
