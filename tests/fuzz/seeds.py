"""Real inputs to damage: the tests' own documents and logs, and the corpus beside the checkout where there is one.

In: the repository. Out: bytes.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from tests.fast.journals import INCIDENT, journal
from tests.screens.recorded import DATA

ROOT = Path(__file__).resolve().parents[2]
CORPUS = ROOT.parent / "shared" / "corpus"
DOCUMENTS = ("failed_4x2", "restarting_4x2", "running_2x2", "succeeded_2x2")
TRACE = """Traceback (most recent call last):
  File "/home/me/train.py", line 88, in forward
    return self.head(x)
ValueError: 7 classes, 6 labels
"""
T_NS = 1_795_169_001_000_000_000
# An event of each type whose fields something reads, as a coordinator writes them.
EVENTS: list[dict[str, Any]] = [
    {"type": "job_started", "generation": -1, "detail": {"script": "t.py", "args": ["--x"], "nodes": ["n1", "n2"]}},
    {"type": "operator_attached", "generation": -1, "detail": {"operator": "me@laptop", "mode": "tui"}},
    {"type": "node_joined", "node": "n1", "detail": {"spec": {"name": "n1", "address": "10.0.0.1", "env": {}}}},
    {"type": "node_ready", "node": "n1", "detail": {"nproc": 1, "returned": False, "spare": False}},
    {"type": "node_ready", "node": "n2", "detail": {"nproc": 2, "returned": True, "spare": True}},
    {"type": "job_degraded", "detail": {"ready": 1, "needed": 2, "reason": "fewer than min_nodes are ready"}},
    {
        "type": "generation_started",
        "detail": {
            "world_size": 3, "restarts": 0, "master": "10.0.0.1:4000", "fingerprint": None, "env": {}, "tree": None,
            "members": [{"node": "n1", "group_rank": 0, "base_rank": 0, "nproc": 1},
                        {"node": "n2", "group_rank": 1, "base_rank": 1, "nproc": 2}],
            "rendezvous": {"backend": "c10d", "endpoint": "n1:29400", "run_id": "r"},
        },
    },
    {"type": "ranks_assigned", "node": "n1", "detail": {"ranks": [[0, 0, 4000]], "world_size": 3}},
    {"type": "generation_running", "detail": {"detect": 0.0, "stop": 1.5, "rendezvous": 20.0, "spawn": 3.0, "main": 9.1,
                                              "world_size": 3, "pids": {"0": 4000, "1": None}}},
    {"type": "warning", "node": "n1", "rank": 0, "detail": {"kind": "slow", "message": "rank 0 is slow"}},
    {"type": "incident", "detail": {**INCIDENT, "category": "hang_no_output", "ongoing": True, "fingerprint": "f",
                                    "culprit_ranks": [1], "missing": {"collective": "BROADCAST", "seq": 4,
                                                      "waiting": [0], "missing": [1], "stacks": {"1": "t.py:3"}}}},
    {"type": "signal_sent", "node": "n1", "detail": {"ranks": [0], "signal": "SIGUSR1", "operator": "me"}},
    {"type": "hang_over", "detail": {"reason": "training resumed after 40 s", "waited_s": 40.0}},
    {
        "type": "rank_failed", "node": "n2", "rank": 1,
        "detail": {"local_rank": 0, "pid": 4001, "exit": {"code": 1, "signal": None}, "sent": None, "time_ns": T_NS,
                   "shift_ns": 5, "raised_ns": T_NS - 9, "over_ns": T_NS - 5, "message": "ValueError: 7 classes",
                   "notes": ["kernel: Out of memory: Killed process 4001"]},
    },
    {"type": "node_lost", "node": "n1", "detail": {"reason": "silent for 15 s", "status": "lost", "alive_ns": T_NS}},
    {"type": "node_failed", "node": "n1", "detail": {"reason": "x", "status": "failed", "alive_ns": None}},
    {
        "type": "generation_stopped",
        "detail": {"cause": "failure", "stop_ms": 1204.5, "left": [[0, T_NS, T_NS]],
                   "stopped": [[2, T_NS + 5, -15, "SIGTERM", None, None, T_NS + 1]], "clocks": {"n2": [12, 1000]}},
    },
    {"type": "incident", "detail": {
        **INCIDENT, "time": "2026-11-20T10:03:51.207Z", "fingerprint": "f", "culprit_ranks": [1], "culprit_node": "n2",
        "evidence": [{"node": "n2", "rank": 1, "file": "rank_1/stderr.log", "line": 4, "text": "ValueError"}],
        "traceback": TRACE, "exit": {"code": 1, "signal": None},
        "victims": [{"ranks": [0, 2], "category": "other", "summary": "closed"}]}},
    {"type": "node_cordoned", "node": "n1", "detail": {"operator": "me", "status": "spare"}},
    {"type": "node_added", "node": "n1", "detail": {"nproc": 1, "operator": "me",
                                                    "spec": {"name": "n1", "address": "a", "nproc_per_node": "auto"}}},
    {"type": "environment_set", "detail": {"env": {"NCCL_DEBUG": "INFO"}, "from_generation": 1, "operator": "me"}},
    {"type": "tree_changed", "detail": {"digest": "b" * 64, "rollback": False, "files": 3, "bytes": 12000,
                                        "trees": [["a" * 64, T_NS], ["b" * 64, T_NS]], "paths": ["train.py"],
                                        "without": ["n3"], "operator": "me"}},
    {"type": "coordinator_changed", "node": "n2", "detail": {"former": "n1", "term": 2}},
    {"type": "coordinator_paused", "node": "n2", "detail": {"seconds": 30.0, "reason": "stood still"}},
    {"type": "quorum_lost", "detail": {"held": ["n2"], "members": ["n1", "n2"]}},
    {"type": "node_removed", "node": "n1", "detail": {"reason": "removed by an operator"}},
    {"type": "stop_requested", "detail": {"operator": "me", "kill": False, "reason": ""}},
    {"type": "hook_failed", "detail": {"hook": 1, "event": "end", "of": 4, "reason": "no answer"}},
    {"type": "from_the_future", "detail": {"what": [1]}},
    {"type": "job_failed", "detail": {"reason": "max_restarts (0) is used up", "restarts": 0}},
]  # fmt: skip


@functools.lru_cache(None)
def document(name: str) -> dict[str, Any]:
    """Return the documents of a recorded job."""
    result: dict[str, Any] = json.loads((DATA / f"{name}.json").read_text())
    return result


def journals() -> list[bytes]:
    """Return the journals of jobs."""
    recorded = [journal(document(name)["events"]) for name in DOCUMENTS]
    return [text.encode() for text in (journal(EVENTS), *recorded)]


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
        "job/events.jsonl": journal(EVENTS),
        "job/agent.log": "agent\n",
        "job/generation_0/rank_0/stderr.log": "begin\n",
        "job/generation_0/rank_1/stderr.log": TRACE,
        "job/generation_0/rank_1/error.json": error,
        "job/generation_0/rank_2/nccl.log": "gpu-a:1:1 [0] NCCL INFO NCCL version 2.27.3+cuda12.8\n",
        "job/generation_0/torchrun.log": "W1121 06:37:58.309 2085 torch/distributed/elastic: closing signal SIGTERM\n",
    }
    torchrun = {f"x/attempt_{number}/{rank}/stderr.log": TRACE for number in range(2) for rank in range(2)}
    nodes = {f"{node}/job/events.jsonl": journal(EVENTS) for node in ("n1", "n2")}
    loose = {"slurm-7.out": "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2025-01-01T10:00:05 ***\n"}
    runs = [
        ours,
        {**torchrun, "x/attempt_0/0/error.json": error},
        {**nodes, **loose},
        {"rank_0.stdout.log": TRACE, **loose},
    ]
    return ["".join(f"--- {path}\n{text}" for path, text in run.items()).encode() for run in runs]
