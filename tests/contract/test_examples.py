"""The examples run under torch's own torchrun, save a snapshot and resume from it."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.examples import nightly

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed"),
]


# What torch's C++ threads say when a process that is done loses a race at its exit; seen once in some twenty runs.
_TORN_DOWN = "terminate called without an active exception"


def _torchrun(script: Path, directory: Path, *args: str, tries: int = 3) -> str:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
            *("--log-dir", str(directory.parent / f"{directory.name}.torchrun"), str(script), *args),
        ],
        cwd=directory,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if _TORN_DOWN in done.stderr and tries > 1:
        (directory / "snapshot.pt").unlink(missing_ok=True)
        return _torchrun(script, directory, *args, tries=tries - 1)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# torchrun's own agent, with ranks that are forked from a process in which torch is loaded: a rank that is not loads it
# and DDP for more than three seconds of a processor. Those that are `apart` have a directory each, as on hosts without
# a shared disk.
_LAUNCHER = """
import json, os, runpy, sys
import torch.nn.parallel
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

def run(apart, script, *args):
    if apart:
        os.environ["LOCAL_RANK"] = "0"
        os.makedirs(os.environ["RANK"], exist_ok=True)
        os.chdir(os.environ["RANK"])
    sys.argv = [script, *args]
    runpy.run_path(script, run_name="__main__")

sys.stdout.reconfigure(line_buffering=True)
for line in sys.stdin:
    directory, *words = json.loads(line)
    os.chdir(directory)
    config = LaunchConfig(1, 1, 2, rdzv_backend="c10d", rdzv_endpoint="localhost:0", start_method="fork")
    elastic_launch(config, run)(*words)
    print("over")
"""


class Launcher:
    """Runs scripts as two ranks each."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(self, script: Path, directory: Path, *args: str, apart: bool = False) -> str:
        """Return what the ranks print."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([str(directory), apart, str(script), *args]), file=self._process.stdin, flush=True)
        printed = ""
        for line in self._process.stdout:
            if line == "over\n":
                return printed
            printed += line
        raise AssertionError(f"the launcher has ended: {printed}")


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    log = tmp_path_factory.mktemp("launcher") / "stderr"
    with (
        log.open("w") as stderr,
        subprocess.Popen(
            [sys.executable, "-c", _LAUNCHER],
            env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(log.parent)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        ) as process,
    ):
        try:
            yield Launcher(process)
        finally:
            process.terminate()
            print(log.read_text())


def test_ddp_learns_and_resumes(repository: Path, tmp_path: Path, launcher: Launcher) -> None:
    script = repository / "examples" / "ddp" / "train.py"
    short = ["--steps-per-epoch", "10", "--step-time", "0"]
    first = _torchrun(script, tmp_path, "--epochs", "2", *short)
    assert first.count("step=20/20 loss=") == 2  # on each rank
    assert "saved snapshot.pt: epochs_run=2 step=20" in first
    assert "resumed" not in first
    # Two ranks write to one pipe: a line of one may begin within the other's.
    losses = [float(loss) for loss in re.findall(r"loss=(\d+\.\d{4})", first)]
    assert losses[-1] < losses[0] / 2
    assert [path.name for path in tmp_path.iterdir()] == ["snapshot.pt"]

    (tmp_path / "1").mkdir()
    (tmp_path / "snapshot.pt").rename(tmp_path / "1" / "snapshot.pt")
    second = launcher.run(script, tmp_path, "--epochs", "3", *short, apart=True)
    assert second.count("resumed from snapshot.pt: epochs_run=2 step=20") == 2
    assert "step=20/30 loss=" not in second
    assert second.count("step=30/30 loss=") == 2
    assert (tmp_path / "0" / "snapshot.pt").exists()


@nightly
def test_gpt_trains_and_resumes(repository: Path, tmp_path: Path, launcher: Launcher) -> None:
    script = repository / "examples" / "gpt" / "train.py"
    small = ["--batch-size", "4", "--context", "32", "--width", "32", "--log-every", "1"]
    first = launcher.run(script, tmp_path, "--steps", "4", *small)
    assert first.count("step=4/4 loss=") == 2
    second = launcher.run(script, tmp_path, "--steps", "6", *small)
    assert second.count("resumed from snapshot.pt: step=4") == 2
    assert "step=4/6 loss=" not in second
    assert second.count("step=6/6 loss=") == 2
