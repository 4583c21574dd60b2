"""`supervisor diagnose` on a gigabyte of logs.

In: nothing; the logs are made here. Out: seconds, megabytes a second and memory, as tables.
"""

from __future__ import annotations

import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench.report import Report, Table, seconds

SIZE = 1_000_000_000
RANKS = 8
CULPRIT = 5
CHUNK_LINES = 2_000
WORDS = ("the", "of", "model", "answer", "question", "because", "data", "seven", "a", "to", "river", "stone", "light")
FAILURE = """\
[rank5]: Traceback (most recent call last):
[rank5]:   File "/mnt/proj/pretrain.py", line 212, in <module>
[rank5]:     main(cfg)
[rank5]:   File "/mnt/proj/pretrain.py", line 167, in main
[rank5]:     loss.backward()
[rank5]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.96 GiB. GPU 5 has 79.10 GiB
"""
NCCL = """\
gpu-a:{pid}:{pid} [{rank}] NCCL INFO NCCL version 2.27.3+cuda12.8
gpu-a:{pid}:{pid} [{rank}] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.{rank}<0>
gpu-a:{pid}:{pid} [{rank}] NCCL INFO Using network IB
gpu-a:{pid}:{pid} [{rank}] NCCL INFO comm 0x55d1 rank {rank} nRanks 8 nNodes 1 localRanks 8 localRank {rank} MNNVL 0
"""


@dataclass(frozen=True)
class Made:
    """Logs and what is right about them."""

    title: str
    paths: list[Path]

    @property
    def size(self) -> int:
        return sum(path.stat().st_size for path in self.paths)


def run() -> Report:
    """Measure on four sorts of logs; returns the tables."""
    rows, data = [], []
    with tempfile.TemporaryDirectory(prefix="diagnose-") as folder:
        for make in (by_rank, of_many_ranks, interleaved, wordy):
            made = make(Path(folder), SIZE)
            measured = measure(made)
            data.append({"title": made.title, "bytes": made.size, **measured})
            rows.append(_row(data[-1]))
            for path in made.paths:
                path.unlink()
    head = ("logs", "diagnose", "MB/s", "CPU", "memory")
    notes = (
        f"{SIZE / 1e9:.0f} GB each; rank {CULPRIT} runs out of CUDA memory at the end",
        "all files are in the page cache; memory: of all processes",
    )
    return Report("diagnose", (Table("A gigabyte of logs", head, tuple(rows), notes),), {"runs": data})


def _row(found: dict[str, Any]) -> tuple[str, ...]:
    return (
        found["title"],
        seconds(found["diagnose_s"]),
        f"{found['bytes'] / 1e6 / found['diagnose_s']:.0f}",
        seconds(found["cpu_s"]),
        f"{found['memory_mb']:.0f} MB",
    )


def measure(made: Made) -> dict[str, float]:
    """Return seconds and memory; raises AssertionError for a wrong verdict."""
    command = [sys.executable, "-m", "supervisor", "diagnose", "--json", *map(str, made.paths)]
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        memory = _peak(process)
        answer = json.loads(process.stdout.read()) if process.stdout else {}
    took, after = time.monotonic() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
    (incident,) = answer["incidents"]
    assert (incident["category"], incident["culprit_ranks"]) == ("cuda_oom", [CULPRIT]), incident["summary"]
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"diagnose_s": took, "cpu_s": cpu, "memory_mb": memory / 1e6}


def _peak(process: subprocess.Popen[bytes]) -> int:
    """Return the most memory that the process and its children held together, looked at 20 times a second."""
    peak = 0
    while True:
        peak = max(peak, _resident(process.pid))
        try:
            process.wait(0.05)
        except subprocess.TimeoutExpired:
            continue
        return peak


def _resident(pid: int) -> int:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        own = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
    return own + sum(_resident(int(child)) for child in children)


def by_rank(folder: Path, size: int, ranks: int = RANKS) -> Made:
    """Make a file a rank: steps, NCCL's lines, progress bars."""
    paths = []
    for rank in range(ranks):
        path = folder / f"rank_{rank}.stderr.log"
        _write(path, size // ranks, NCCL.format(pid=4000 + rank, rank=rank), _steps, rank, rank == CULPRIT)
        paths.append(path)
    return Made(f"a file a rank, {ranks} ranks", paths)


def of_many_ranks(folder: Path, size: int) -> Made:
    """Make the same of a large job: none of the files is long."""
    return by_rank(folder, size, 512)


def interleaved(folder: Path, size: int) -> Made:
    """Make one file of all ranks, each line with its rank's tag."""
    path = folder / "slurm-4711.out"
    nccl = "".join(NCCL.format(pid=4000 + rank, rank=rank) for rank in range(RANKS))
    _write(path, size, nccl, _tagged, 0, True)
    return Made("one file", [path])


def wordy(folder: Path, size: int) -> Made:
    """Make a file in which hardly two lines are alike: generated text, long numbers in base 16."""
    path = folder / "slurm-4712.out"
    nccl = "".join(NCCL.format(pid=4000 + rank, rank=rank) for rank in range(RANKS))
    _write(path, size, nccl, _samples, 0, True)
    return Made("no two lines alike", [path])


def _write(
    path: Path, size: int, head: str, lines: Callable[[random.Random, int], Iterator[str]], rank: int, fails: bool
) -> None:
    chance = random.Random(rank)
    made = lines(chance, rank)
    with path.open("w") as file:
        written = file.write(head)
        while written < size:
            written += file.write("".join(next(made) for _ in range(CHUNK_LINES)))
        if fails:
            file.write(FAILURE)


def _steps(chance: random.Random, rank: int) -> Iterator[str]:
    step = 0
    while True:
        step += 1
        time_ = f"2025-03-18 04:{step // 60 % 60:02d}:{step % 60:02d},{step % 1000:03d}"
        numbers = f"loss={chance.random() * 3:.4f} grad_norm={chance.random():.3f} lr={1e-4 / step:.3e}"
        yield f"{time_} INFO trainer: step={step} {numbers} tokens/s={40_000 + step % 977}\n"
        if step % 50 == 0:
            bar = "█" * (step // 50 % 10)
            yield f"\rEpoch {step // 1000}:  {step % 100}%|{bar:10}| {step}/1000000 [03:11<04:35, 2.{step % 100}it/s]\n"


def _tagged(chance: random.Random, rank: int) -> Iterator[str]:
    for number, line in enumerate(_steps(chance, rank)):
        yield f"[rank{number % RANKS}]: {line}"


def _samples(chance: random.Random, rank: int) -> Iterator[str]:
    step = 0
    while True:
        step += 1
        said = " ".join(chance.choices(WORDS, k=12))
        yield f"[rank{step % RANKS}]: sample {chance.getrandbits(96):024x}: {said}\n"
