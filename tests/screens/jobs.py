"""Jobs of 2, 16, 64 and 512 ranks as their agents would have told them, each at another point of its life.

In: how many ranks. Out: a recording with journal, incident, what nodes and ranks use, logs, and what NCCL told.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.screens import fabrics, recorded
from tests.screens.recorded import Line, RecordedSession

RANKS = (2, 16, 64, 512)
BEGIN_NS = 1795168800 * 1_000_000_000
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 3 has 1.02 GiB free."
TRACE = (
    "Traceback (most recent call last):",
    '  File "/home/ann/.supervisor/trees/gpt-3f9a1c22/train_gpt.py", line 188, in main',
    "    loss = step(model, batch)",
    '  File "/home/ann/.supervisor/trees/gpt-3f9a1c22/train_gpt.py", line 88, in step',
    '    logits = model(batch["tokens"])',
    OOM,
)


def job(ranks: int) -> RecordedSession:
    """2: runs, on CPUs; 16: failed and over; 64: lost a node and starts again; 512: runs again, two ranks silent."""
    nodes = 2 if ranks <= 16 else ranks // 8
    session = recorded.many(nodes, ranks // nodes)
    _begin(session)
    {2: _runs, 16: _failed, 64: _starts_again, 512: _runs_again}[ranks](session)
    if ranks > 2:
        session.fabric = fabrics.sample(nodes)
    return session


def _tell(session: RecordedSession, at_s: float, kind: str, generation: int = -1, **more: Any) -> None:
    minute, second = divmod(at_s, 60)
    known = {"node": more.pop("node", None), "rank": more.pop("rank", None)}
    time = f"2026-11-20T10:{minute:02.0f}:{second:06.3f}Z"
    session.events.append(
        {"seq": len(session.events) + 1, "time": time, "type": kind, "generation": generation, **known, "detail": more}
    )


def _form(session: RecordedSession, at_s: float, generation: int, *, runs: bool = True, without: int = 0) -> None:
    status = session.status
    entries = status["nodes"][: len(status["nodes"]) - without]
    members = [{"node": node["name"], "nproc": len(node["ranks"])} for node in entries]
    world = sum(member["nproc"] for member in members)
    status.update(generation=generation, restarts=generation, world_size=world)
    _tell(session, at_s, "generation_started", generation, world_size=world, members=members, restarts=generation)
    if runs:
        took = {"detect": 12.0, "stop": 840.0, "rendezvous": 61.0, "spawn": 95.0, "main": 3120.0}
        took = took if generation else {**took, "detect": 0.0, "stop": 0.0}
        _tell(session, at_s + 4, "generation_running", generation, **took, world_size=world, pids={})


def _begin(session: RecordedSession) -> None:
    _tell(session, 0, "operator_attached", operator="ann@laptop")
    _tell(session, 0.1, "job_started", script="train_gpt.py")
    for at, node in enumerate(session.status["nodes"]):
        _tell(session, 1 + at / 100, "node_ready", node=node["name"], nproc=len(node["ranks"]), returned=False)
    _form(session, 2, 0)


def _print(session: RecordedSession, generation: int, first: int, at_s: float) -> None:
    """Let every rank print three steps."""
    for node in session.status["nodes"]:
        for rank in node["ranks"]:
            number = rank["rank"]
            lines = [
                Line(
                    BEGIN_NS + int((at_s + each) * 1e9) + number * 100_000, None,
                    f"step {first + each} | loss {1.9 - each / 100 + number % 7 / 1e3:.4f} | 96,021 tok/s".encode(),
                )
                for each in range(3)
            ]  # fmt: skip
            session.files[node["name"], generation, number, "stdout"] = lines


def _ranks(session: RecordedSession, change: Callable[[int], dict[str, Any]]) -> None:
    for node in session.status["nodes"]:
        for rank in node["ranks"]:
            rank.update(change(rank["rank"]))


def _fails(session: RecordedSession) -> tuple[str, int]:
    """A rank runs out of memory after 12 minutes, and all others follow; returns its node and number."""
    nodes = session.status["nodes"]
    node, at_s = nodes[len(nodes) // 2], 12 * 60 + 31.2
    culprit = node["ranks"][3]["rank"]
    others = [rank["rank"] for each in nodes for rank in each["ranks"] if rank["rank"] != culprit]
    _print(session, 0, 9118, at_s - 4)
    file = f"/home/ann/.supervisor/jobs/{session.job}/generation_0/rank_{culprit}/stderr.log"
    t_ns = BEGIN_NS + int(at_s * 1e9)
    lines = [Line(t_ns, "error" if text[0] in "Tt" else None, text.encode()) for text in TRACE]
    session.files[node["name"], 0, culprit, "stderr"] = lines
    closed = "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:41233"
    session.files[nodes[0]["name"], 0, 0, "stderr"] = [Line(t_ns + 412_000_000, "error", closed.encode())]
    summary = f"rank {culprit} ({node['name']}): CUDA out of memory in train_gpt.py:88 step"
    incident = {
        "id": 1, "generation": 0, "time": "2026-11-20T10:12:31.207Z", "category": "cuda_oom", "scope": "one_rank",
        "culprit_ranks": [culprit], "culprit_node": node["name"], "confidence": "established", "summary": summary,
        "evidence": [
            {"node": node["name"], "rank": culprit, "file": file, "line": 6, "text": OOM},
            {"node": node["name"], "rank": None, "file": "events.jsonl", "line": None,
             "text": f"first exit of the group: rank {culprit}, 412 ms before any other"},
        ],
        "traceback": "\n".join(TRACE), "exit": {"code": 1, "signal": None},
        "hint": "Lower the batch size or the sequence length, or set PYTORCH_ALLOC_CONF=expandable_segments:True.",
        "victims": [
            {"ranks": others[:-8], "category": "gloo_connection_reset", "summary": "connection closed by its peer"},
            {"ranks": others[-8:], "category": "signal_preempted", "summary": "SIGTERM after the group was stopped"},
        ],
        "missing": None, "state": "open", "ended_at": None, "over": None,
    }  # fmt: skip
    ended = {"code": 1, "signal": None}
    _tell(session, at_s, "rank_failed", 0, node=node["name"], rank=culprit, exit=ended, message=OOM[6:])
    _tell(session, at_s + 0.4, "rank_failed", 0, node=nodes[0]["name"], rank=0, exit=ended, message=closed)
    _tell(session, at_s + 1.6, "generation_stopped", 0, cause="failure", stop_ms=1204.5)
    _tell(session, at_s + 1.7, "incident", 0, id=1, category="cuda_oom", summary=summary)
    session.incidents.append(incident)
    session.status["incident"] = incident
    return node["name"], culprit


def _runs(session: RecordedSession) -> None:
    recorded.measured(session, gpus=False)
    _print(session, 0, 18238, 45 * 60)


def _failed(session: RecordedSession) -> None:
    recorded.measured(session)
    _, culprit = _fails(session)

    def ended(rank: int) -> dict[str, Any]:
        killed = rank >= 12 and rank != culprit
        how = {"exit_code": None, "signal": "SIGTERM"} if killed else {"exit_code": 1, "signal": None}
        return {"state": "killed" if killed else "failed", "step": 9120, **how}

    _ranks(session, ended)
    reason = f"max_restarts (0) is used up: {session.incidents[0]['summary']}"
    session.status.update(state="failed", max_restarts=0, restarts=0, failure=reason)
    session.incidents[0].update(state="over", ended_at="2026-11-20T10:12:33.000Z", over="job failed")
    _tell(session, 12 * 60 + 33, "job_failed", 0, reason=reason)
    session.ended = True


def _starts_again(session: RecordedSession) -> None:
    _fails(session)
    lost = session.status["nodes"][-1]
    _tell(session, 12 * 60 + 46, "node_lost", 0, node=lost["name"], reason="no heartbeat within 15 s")
    _form(session, 12 * 60 + 46.1, 1, runs=False, without=1)
    lost.update(state="lost", reason="no heartbeat within 15 s", group_rank=None, ranks=[])
    host = session.hosts[lost["name"]]
    host.state, host.step, host.live = "lost", "connect", None
    host.error, host.hint = "connection refused by 10.0.0.8 port 22", "is sshd running there? next attempt in 8 s"
    _ranks(session, lambda rank: {"state": "starting", "step": None, "last_output_age_s": None})
    session.status.update(state="restarting", plan="starting generation 1 on n[000-006]")


def _runs_again(session: RecordedSession) -> None:
    recorded.measured(session)
    _fails(session)
    _form(session, 12 * 60 + 34, 1)
    session.incidents[0].update(
        state="healed", ended_at="2026-11-20T10:12:38.000Z", over="generation 1 has made a step"
    )
    _print(session, 1, 18238, 45 * 60)
    _ranks(session, lambda rank: {"state": "silent", "last_output_age_s": 94.0} if rank in (139, 332) else {})
