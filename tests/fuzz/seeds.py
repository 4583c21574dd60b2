"""Real inputs to damage: the tests' own documents and logs, and the corpus beside the checkout where there is one.

In: the repository. Out: bytes.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from tests.fast.journals import journal
from tests.screens.recorded import DATA

ROOT = Path(__file__).resolve().parents[2]
OWN = Path(__file__).parent / "data"
CORPUS = ROOT.parent / "shared" / "corpus"
DOCUMENTS = ("failed_4x2", "restarting_4x2", "running_2x2", "succeeded_2x2")
TRACE = """Traceback (most recent call last):
  File "/home/me/train.py", line 88, in forward
    return self.head(x)
ValueError: 7 classes, 6 labels
"""
T_NS = 1_795_169_001_000_000_000
# An event of each type whose fields something reads, as a coordinator writes them; DOCUMENTS has the others.
EVENTS = (OWN / "events.jsonl").read_text()


@functools.lru_cache(None)
def document(name: str) -> dict[str, Any]:
    """Return the documents of a recorded job."""
    result: dict[str, Any] = json.loads((DATA / f"{name}.json").read_text())
    return result


def journals() -> list[bytes]:
    """Return the journals of jobs."""
    recorded = [journal(document(name)["events"]) for name in DOCUMENTS]
    return [text.encode() for text in (EVENTS, *recorded)]


def logs() -> list[bytes]:
    """Return the texts of failed runs; the corpus is not part of the project."""
    cases = (ROOT / "tests" / "fast" / "data" / "field_cases.txt").read_text().split("\n=== ")[1:]
    texts = [file.partition("\n")[2] for case in cases for file in case.split("\n--- ")[1:]]
    for path in sorted(CORPUS.glob("cases/*.json")):
        texts += [rank["text"] for rank in json.loads(path.read_text())["ranks"]]
    texts += [path.read_text(errors="replace")[:40_000] for path in sorted(CORPUS.glob("nccl/*.log"))]
    texts.append("n2:3| slurmstepd: error: *** JOB 1 ON n2 CANCELLED AT 2026-11-20T10:00:00 DUE TO NODE FAILURE ***\n")
    return [text.encode() for text in texts if text.strip()]


def directories() -> list[bytes]:
    """Return runs of several files, each after a line with its path."""
    error = json.dumps(
        {"message": {"message": "ValueError: x", "extraInfo": {"py_callstack": TRACE, "timestamp": "9"}}}
    )
    ours = {
        "job/events.jsonl": EVENTS,
        "job/agent.log": "agent\n",
        "job/generation_0/rank_0/stderr.log": "begin\n",
        "job/generation_0/rank_1/stderr.log": TRACE,
        "job/generation_0/rank_1/error.json": error,
        "job/generation_0/rank_2/nccl.log": "gpu-a:1:1 [0] NCCL INFO NCCL version 2.27.3+cuda12.8\n",
        "job/generation_0/torchrun.log": "W1121 06:37:58.309 2085 torch/distributed/elastic: closing signal SIGTERM\n",
    }
    torchrun = {f"x/attempt_{number}/{rank}/stderr.log": TRACE for number in range(2) for rank in range(2)}
    nodes = {f"{node}/job/events.jsonl": EVENTS for node in ("n1", "n2")}
    loose = {"slurm-7.out": "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2025-01-01T10:00:05 ***\n"}
    runs = [
        ours,
        {**torchrun, "x/attempt_0/0/error.json": error},
        {**nodes, **loose},
        {"rank_0.stdout.log": TRACE, **loose},
    ]
    return ["".join(f"--- {path}\n{text}" for path, text in run.items()).encode() for run in runs]
