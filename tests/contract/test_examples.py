"""The examples run under torch's own torchrun, save a snapshot and resume from it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed"),
]


# What torch's C++ threads say when a process that is done loses a race at its exit; seen once in some twenty runs.
_TORN_DOWN = "terminate called without an active exception"


def _torchrun(script: Path, directory: Path, *args: str, tries: int = 3) -> str:
    snapshot = directory / "snapshot.pt"
    before = snapshot.read_bytes() if snapshot.exists() else None
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
        snapshot.unlink(missing_ok=True)
        if before is not None:
            snapshot.write_bytes(before)
        return _torchrun(script, directory, *args, tries=tries - 1)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# Each rank sees files of its own, as on hosts without a shared disk.
_OWN_DIRECTORY = """
import os, runpy, sys
os.environ["LOCAL_RANK"] = "0"
os.makedirs(os.environ["RANK"], exist_ok=True)
os.chdir(os.environ["RANK"])
sys.argv[0] = {script!r}
runpy.run_path({script!r}, run_name="__main__")
"""


def test_ddp_learns_and_resumes(repository: Path, tmp_path: Path) -> None:
    script = repository / "examples" / "ddp" / "train.py"
    short = ["--steps-per-epoch", "10", "--step-time", "0"]
    first = _torchrun(script, tmp_path, "--epochs", "2", *short)
    assert first.count("step=20/20 loss=") == 2  # on each rank
    assert "saved snapshot.pt: epochs_run=2 step=20" in first
    assert "resumed" not in first
    losses = [float(line.rpartition("loss=")[2]) for line in first.splitlines() if "loss=" in line]
    assert losses[-1] < losses[0] / 2
    assert [path.name for path in tmp_path.iterdir()] == ["snapshot.pt"]

    apart = tmp_path / "apart.py"
    apart.write_text(_OWN_DIRECTORY.format(script=str(script)))
    (tmp_path / "1").mkdir()
    (tmp_path / "snapshot.pt").rename(tmp_path / "1" / "snapshot.pt")
    second = _torchrun(apart, tmp_path, "--epochs", "3", *short)
    assert second.count("resumed from snapshot.pt: epochs_run=2 step=20") == 2
    assert "step=20/30 loss=" not in second
    assert second.count("step=30/30 loss=") == 2
    assert (tmp_path / "0" / "snapshot.pt").exists()


def test_gpt_trains_and_resumes(repository: Path, tmp_path: Path) -> None:
    script = repository / "examples" / "gpt" / "train.py"
    small = ["--batch-size", "4", "--context", "32", "--width", "32", "--log-every", "1"]
    first = _torchrun(script, tmp_path, "--steps", "4", *small)
    assert first.count("step=4/4 loss=") == 2
    second = _torchrun(script, tmp_path, "--steps", "6", *small)
    assert second.count("resumed from snapshot.pt: step=4") == 2
    assert "step=4/6 loss=" not in second
    assert second.count("step=6/6 loss=") == 2
