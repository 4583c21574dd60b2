"""The rule of who may form a group, checked in all its histories by a model checker: protocol.pml, run by spin.

The model is written from the words of ARCHITECTURE.md, "Who decides"; it shares nothing with the code. `FLAWS` are
parts of the rule that are taken away one at a time: without each of them two groups run at once, and spin must see it.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.examples import nightly

MODEL = Path(__file__).parent / "protocol.pml"
LIMIT_S = 600.0
# Three nodes: how many groups may be proposed, in how many terms, and how many disks get lost.
SMALL = ["-DGROUPS=3", "-DTERMS=2"]
LARGE = [["-DGROUPS=4", "-DTERMS=2", "-DLOSSES=1"], ["-DGROUPS=3", "-DTERMS=3", "-DLOSSES=1"]]
# For a search of minutes; the others take as long to compile as to run.
FOR_LONG = ["-O2", "-DCOLLAPSE"]
LONG_FLAWS = ("OWN_GROUP", "LAST_ONLY", "NO_PROMISE")
FLAWS = ["ANY_TIE", "EARLY_GO", "TORN_JOURNAL", *(pytest.param(one, marks=nightly) for one in LONG_FLAWS)]

pytestmark = pytest.mark.skipif(
    shutil.which("spin") is None or shutil.which("gcc") is None, reason="no spin or no gcc: apt-get install spin gcc"
)


def violations(directory: Path, *defines: str, compiler: Sequence[str] = ("-O1",)) -> int:
    """Return how many histories the model checker has found in which two groups run; it stops at the first."""

    def run(*command: str) -> str:
        done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=LIMIT_S)
        assert done.returncode == 0, (done.stdout + done.stderr)[-2000:]
        return done.stdout

    run("spin", *defines, "-a", str(MODEL))
    run("gcc", *compiler, "-w", "-DSAFETY", "-DNOREDUCE", "-o", "pan", "pan.c")
    printed = run("./pan", "-m20000", "-n")
    assert "max search depth too small" not in printed
    (counted,) = [line for line in printed.splitlines() if "errors:" in line]
    return int(counted.rpartition("errors:")[2])


def test_no_history_has_two_groups(tmp_path: Path) -> None:
    assert violations(tmp_path, *SMALL) == 0


@nightly
@pytest.mark.parametrize("size", LARGE)
def test_no_longer_history_has_two_groups(tmp_path: Path, size: list[str]) -> None:
    assert violations(tmp_path, *size, compiler=FOR_LONG) == 0


@pytest.mark.parametrize("flaw", FLAWS)
def test_without_a_part_of_the_rule_two_groups_run(tmp_path: Path, flaw: str) -> None:
    assert violations(tmp_path, "-DGROUPS=4", "-DTERMS=2", f"-D{flaw}") == 1


@nightly
def test_if_a_node_without_its_disk_counted_two_groups_would_run(tmp_path: Path) -> None:
    assert violations(tmp_path, "-DGROUPS=4", "-DTERMS=2", "-DSAME_DISK", "-DLOSSES=1", compiler=FOR_LONG) == 1
