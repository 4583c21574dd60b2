"""The verdict across ranks and nodes: one cause, its victims, and no blame without a reason.

In: evidence as the engines of several nodes report it. Out: incidents.
"""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from remote_agent.diagnose.claims import LOST, OF_OTHERS
from remote_agent.diagnose.evidence import JobContext, RankEvidence
from remote_agent.diagnose.exits import decode_exit
from remote_agent.diagnose.incidents import iso_time
from remote_agent.diagnose.testimony import read_rank
from remote_agent.diagnose.tracebacks import find_traces
from remote_agent.diagnose.verdict import verdict
from remote_agent.text.shapes import shape
from remote_agent.wire.documents import IncidentDocument
from remote_agent.wire.events import AGENT_DIED
from tests.fast.cases import Case, read_cases

SECOND = 1_000_000_000
START = 1_795_000_000 * SECOND
NODES = {"n1": [0, 1], "n2": [2, 3]}


def trace(text: str, line: int = 88, function: str = "forward") -> str:
    return f'Traceback (most recent call last):\n  File "/w/train.py", line {line}, in {function}\n    go()\n{text}\n'


RESET = trace("RuntimeError: [gloo/transport/tcp/pair.cc:544] Connection closed by peer [10.0.0.3]:40112", 90, "step")


def rank(
    number: int, at_s: float, tail: str = "", code: int | None = 1, signal: str | None = None, **more: Any
) -> RankEvidence:
    node = more.pop("node", None) or next(name for name, ranks in NODES.items() if number in ranks)
    exit_: Any = {
        "rank": number, "local_rank": number % 2, "pid": 4000 + number, "code": code, "signal": signal,
        "t_ns": START + int(at_s * SECOND), "stopped_by_us": False, "error": None, "tail": tail,
        "stderr_lines": 100 + len(tail.splitlines()), "core": False, **more,
    }  # fmt: skip
    return RankEvidence.from_exit(exit_, node, {"stderr": f"/j/generation_0/rank_{number}/stderr.log"})


def stopped(
    number: int, at_s: float, tail: str = "", code: int | None = None, signal: str | None = "SIGTERM"
) -> RankEvidence:
    return rank(number, at_s, tail, code, signal, stopped_by_us=True)


def judge(*evidence: RankEvidence, **more: Any) -> IncidentDocument:
    more.setdefault("ranks_per_node", NODES)
    return verdict(evidence, JobContext(generation=2, incident_id=7, world_size=4, **more))


OOM = trace("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")


def test_the_contract_s_example() -> None:
    incident = judge(rank(3, 1.123, OOM), rank(0, 1.4, RESET), rank(1, 1.5, RESET), stopped(2, 2))
    answer: Any = incident
    assert answer.pop("fingerprint")
    assert answer.pop("evidence")[0] == {
        "node": "n2", "rank": 3, "file": "/j/generation_0/rank_3/stderr.log", "line": 104,
        "text": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    }  # fmt: skip
    assert answer.pop("hint")
    assert answer == {
        "id": 7, "generation": 2, "time": "2026-11-18T11:06:41.123Z", "category": "cuda_oom", "scope": "one_rank",
        "culprit_ranks": [3], "culprit_node": "n2", "at_least": False, "confidence": "established",
        "summary": "rank 3 (n2): CUDA out of memory in train.py:88 forward",
        "traceback": OOM.strip(), "exit": {"code": 1, "signal": None},
        "victims": [
            {"ranks": [0, 1], "category": "gloo_connection_reset",
             "summary": "2 x RuntimeError: [gloo/transport/tcp/pair.cc:544] Connection closed by peer [10.0.0.3]:40112"
             " in train.py:90 step"},
            {"ranks": [2], "category": "signal_preempted", "summary": "stopped by supervisor (SIGTERM)"},
        ],
        "missing": None,
        "why": [
            "rank 3 (n2), 11:06:41.123: failed by itself: CUDA out of memory in train.py:88 forward",
            f"ranks 0-1 (n1), 11:06:41.400: {LOST}: {RESET.splitlines()[-1]} in train.py:90 step",
            "rank 2 (n2), 11:06:42.000: was stopped by supervisor: stopped by supervisor (SIGTERM)",
            "so: the first that failed by itself, and all that failed alike, or those whom it accuses",
        ],
    }  # fmt: skip


def test_the_order_of_the_evidence_does_not_matter() -> None:
    evidence = [rank(3, 1, OOM), rank(0, 1.4, RESET), rank(1, 1.5, RESET), stopped(2, 2)]
    answers = [judge(*order) for order in itertools.permutations(evidence)]
    assert all(answer == answers[0] for answer in answers)


def test_the_time_of_the_exception_counts_and_the_clock_is_corrected() -> None:
    """Rank 1 raised first, though its process ended last; its node's clock is 5 s ahead."""
    error: Any = {
        "message": "ValueError: bad",
        "callstack": trace("ValueError: bad"),
        "timestamp_ns": START + 6 * SECOND,
    }
    late = RankEvidence.from_exit(
        {"rank": 2, "code": 1, "signal": None, "t_ns": START + 4 * SECOND, "error": error, "tail": ""},
        "n2",
        clock_shift_ns=-5 * SECOND,
    )
    incident = judge(rank(0, 2, trace("KeyError: 'x'", 10, "load")), late)
    assert incident["culprit_ranks"] == [2]
    assert incident["time"] == iso_time(START + SECOND)
    assert [each["summary"] for each in incident["victims"]] == ["later: KeyError: 'x' in train.py:10 load"]


def test_nccls_warnings_count_where_it_writes_to_a_file_of_its_own() -> None:
    said = "h1:10:20 [0] misc/ibvwrap.cc:250 NCCL WARN Call to ibv_modify_qp failed with error No such device"
    exit_: Any = {"rank": 1, "code": 1, "signal": None, "t_ns": START, "tail": "RuntimeError: NCCL error", "nccl": said}
    files = {name: f"/j/generation_0/rank_1/{name}.log" for name in ("stderr", "nccl")}
    incident = judge(RankEvidence.from_exit(exit_ | {"stderr_lines": 7}, "n1", files))
    assert incident["category"] == "nccl_network"
    proof = incident["evidence"][0]
    assert (proof["file"], proof["text"]) == (files["nccl"], said)


def watchdog(number: int, seq: int, enqueued: int) -> str:
    tag = f"[rank{number}]:[E1120 10:00:00.1 ProcessGroupNCCL.cpp:632] [Rank {number}]"
    work = f"WorkNCCL(SeqNum={seq}, OpType=ALLREDUCE, NumelIn=1, Timeout(ms)=600000)"
    return (
        f"{tag} Watchdog caught collective operation timeout: {work} ran for 600004 milliseconds\n"
        f"{tag} last enqueued work: {enqueued}, last completed work: {seq - 1}\n"
    )


def test_ranks_that_never_reached_the_collective() -> None:
    incident = judge(*(rank(each, 1, watchdog(each, 44, 44), None, "SIGABRT") for each in (0, 2, 3)), stopped(1, 2))
    assert (incident["category"], incident["culprit_ranks"]) == ("nccl_timeout_watchdog", [1])
    assert incident["missing"] == {
        "collective": "ALLREDUCE", "seq": 44, "waiting": [0, 2, 3], "missing": [1], "stacks": {},
    }  # fmt: skip
    assert incident["summary"] == "rank 1 (n1): never reached ALLREDUCE number 44; ranks 0,2-3 were waiting"
    assert incident["confidence"] == "supported"
    behind = judge(*(rank(each, 1, watchdog(each, 44, 43 + (each != 2)), None, "SIGABRT") for each in range(4)))
    assert behind["culprit_ranks"] == [2]


def test_a_failed_thread_explains_a_missing_rank() -> None:
    said = stopped(1, 2, "Exception in thread Thread-1 (feed):\n" + trace("KeyError: 'x'", 7, "feed"))
    incident = judge(*(rank(each, 1, watchdog(each, 44, 44), None, "SIGABRT") for each in (0, 2, 3)), said)
    assert (incident["category"], incident["culprit_ranks"]) == ("user_exception", [1])
    assert incident["summary"].startswith(
        "rank 1 (n1): a thread failed with KeyError: 'x' in train.py:7 feed; never reached"
    )
    assert (incident["traceback"] or "").endswith("KeyError: 'x'")
    still: Any = {"collective": None, "seq": None, "waiting": [], "missing": [1], "stacks": {}}
    quiet = verdict([stopped(1, 2)], JobContext(hang=still, ranks_per_node={"n1": [0, 1]}))
    assert quiet["summary"] == "rank 1 (n1): the group made no progress"


def test_one_watchdog_alone_blames_nobody() -> None:
    incident = judge(rank(0, 1, watchdog(0, 44, 44), None, "SIGABRT"), *(stopped(each, 2) for each in (1, 2, 3)))
    assert (incident["scope"], incident["culprit_ranks"], incident["confidence"]) == ("not_in_text", [], "unknown")


def test_a_node_s_own_report_counts_if_no_rank_failed() -> None:
    said = RankEvidence(None, "n2", tail="could not carry out the order: workers cannot be started: no such script")
    incident = judge(said, stopped(0, 1), stopped(1, 1, RESET))
    assert (incident["category"], incident["scope"], incident["culprit_node"]) == ("other", "outside_the_ranks", "n2")
    assert incident["summary"] == f"n2: {said.tail}"
    full = RankEvidence(None, "n2", tail="could not carry out the order: [Errno 28] No space left on device")
    incident = judge(full, stopped(0, 1))
    assert (incident["category"], incident["scope"], incident["culprit_node"]) == (
        "disk_full",
        "outside_the_ranks",
        "n2",
    )
    assert judge(said, rank(3, 1, OOM))["category"] == "cuda_oom"


def test_the_hint_for_a_lost_node_says_what_is_known_of_its_host() -> None:
    died, silent = (
        judge(lost_nodes={"n2": (1, reason)}) for reason in (f"{AGENT_DIED} (x)", "no heartbeat within 9 s")
    )
    assert died["hint"].startswith("host n2 answers, but the agent there died: see agent.log")
    assert silent["hint"].startswith("if n2 answers over SSH, see agent.log")
    assert ("power" in died["hint"], "power" in silent["hint"]) == (False, True)


def test_what_several_nodes_report_is_no_node_s_own() -> None:
    said = [RankEvidence(None, node, tail="could not carry out the order: no such directory") for node in NODES]
    incident = judge(*said)
    assert (incident["summary"], incident["culprit_node"]) == (f"2 nodes {said[0].tail}", None)


def test_512_ranks_yield_one_cause_and_one_line_of_victims() -> None:
    nodes = {f"n{node:02}": list(range(node * 8, node * 8 + 8)) for node in range(64)}
    evidence: list[RankEvidence] = []
    for node, ranks in nodes.items():
        for number in ranks:
            text = f"RuntimeError: [pair.cc:544] Connection closed by peer [10.0.{number}.1]:{40000 + number}"
            tail = trace("IndexError: list index out of range", 31, "collate") if number == 363 else trace(text, 90)
            evidence.append(rank(number, 1 + number / 1000, tail, node=node))
    incident = verdict(evidence, JobContext(world_size=512, ranks_per_node=nodes))
    assert incident["summary"] == "rank 363 (n45): IndexError: list index out of range in train.py:31 collate"
    (victims,) = incident["victims"]
    assert len(victims["ranks"]) == 511
    assert victims["summary"].startswith("511 x RuntimeError")
    assert len(incident["evidence"]) <= 12


def test_fingerprints_differ_between_failures_alone() -> None:
    def of(number: int, text: str, **more: Any) -> str:
        return judge(rank(number, 1, trace(text, **more)))["fingerprint"]

    one = of(0, "ValueError: bad batch 17 in /data/a/x.bin at 0x7fffaa")
    assert one == of(3, "ValueError: bad batch 99 in /data/b/y.bin at 0x7ffbbb", line=93)
    assert one != of(0, "ValueError: bad batch 17 in /data/a/x.bin at 0x7fffaa", function="backward")
    assert one != of(0, "KeyError: 'x'")
    kill = judge(rank(1, 1, "", None, "SIGKILL"))["fingerprint"]
    assert kill == judge(rank(2, 9, "last words\n", None, "SIGKILL"))["fingerprint"]
    assert kill != judge(rank(1, 1, "", None, "SIGSEGV"))["fingerprint"]
    lost = [judge(lost_nodes={node: (START, "gone")}) for node in ("n1", "n2")]
    assert lost[0]["fingerprint"] != lost[1]["fingerprint"]


def test_a_record_that_logging_could_not_format_is_not_the_reason() -> None:
    text = (
        "--- Logging error ---\nTraceback (most recent call last):\n"
        '  File "/usr/lib/python3.11/logging/__init__.py", line 1110, in emit\n    msg = self.format(record)\n'
        "TypeError: %d format: a real number is required, not str\nCall stack:\n"
        "  File \"/w/train.py\", line 4, in <module>\nMessage: 'kept %d shards'\nArguments: ('many',)\n"
    )
    incident = judge(rank(2, 1, f"{text}no usable shard under /data/mix3\n", code=5))
    assert (incident["category"], incident["exit"]["code"]) == ("other", 5)
    assert incident["summary"].endswith("exited with code 5, last line of stderr: no usable shard under /data/mix3")


def test_the_place_stays_in_a_summary_of_a_long_message() -> None:
    incident = judge(rank(2, 1, trace(f"ValueError: {'a shard is not as the others ' * 20}", 88, "forward")))
    assert incident["summary"].endswith("… in train.py:88 forward")
    assert len(incident["summary"]) <= 240


# Diagnose: what one rank's evidence says. Tracebacks and crashes come from real Python processes.


def fail(tmp_path: Path, source: str, *options: str, name: str = "train.py") -> tuple[str, int]:
    """Run a script that fails; return its stderr and exit code."""
    script = tmp_path / name
    script.write_text(source)
    command = [sys.executable, *options, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.stderr, done.returncode


def ended(tail: str, code: int | None = 1, signal: str | None = None, **more: Any) -> RankEvidence:
    exit_: Any = {"rank": 3, "local_rank": 1, "pid": 4100, "code": code, "signal": signal, "t_ns": 10**18, **more}
    exit_ = {"stderr_lines": len(tail.splitlines())} | exit_ | {"tail": tail}
    return RankEvidence.from_exit(exit_, "n2", {"stderr": "/j/generation_0/rank_3/stderr.log"})


def test_an_exception_is_named_with_its_innermost_user_frame(tmp_path: Path) -> None:
    source = "import json\n\ndef load(text):\n    return json.loads(text)\n\ndef main():\n    load('{')\n\nmain()\n"
    tail, code = fail(tmp_path, source)
    found = read_rank(ended("a line before\n" + tail, code))
    assert found.category == "user_exception"
    assert found.text.startswith("json.decoder.JSONDecodeError: Expecting property name")
    assert found.place == "train.py:4 load"
    assert found.traceback == tail.strip()
    (line,) = found.evidence
    assert (line.file, line.line) == ("/j/generation_0/rank_3/stderr.log", len(tail.splitlines()) + 1)
    assert line.text.startswith("json.decoder.JSONDecodeError")


@pytest.mark.parametrize(
    "line",
    ['  File "<frozen runpy>", line 88, in _run_code', "╭──── Traceback (most recent call last) ────╮"],
    ids=["frame", "box"],
)
def test_beginnings_of_tracebacks_take_linear_time(line: str) -> None:
    def needed_s(lines: int) -> float:
        begun = time.process_time()
        assert not find_traces("\n".join([*[line] * lines, "done, 3 files"]))
        return time.process_time() - begun

    assert needed_s(2000) < 8 * 5 * max(needed_s(250), 0.005)


def test_error_json_is_preferred_and_found_again_in_the_text(tmp_path: Path) -> None:
    tail, _ = fail(tmp_path, "raise ValueError('bad batch')\n")
    late = 'Traceback (most recent call last):\n  File "x.py", line 1, in f\nOSError: late\n'
    noise = f"{tail}Exception ignored in atexit\n{late}"
    error = {"message": "ValueError: bad batch", "callstack": tail, "timestamp_ns": 5}
    found = read_rank(ended(noise, error=error))
    assert found.text == "ValueError: bad batch in train.py:1"
    assert found.evidence[0].line == len(tail.splitlines())
    assert found.t_ns == 5
    alone = read_rank(ended("", error={**error, "callstack": None}))
    assert alone.text == "ValueError: bad batch"


def test_a_crash_of_a_real_process_is_placed_by_faulthandler(tmp_path: Path) -> None:
    source = "import ctypes\n\ndef kernel():\n    ctypes.string_at(0)\n\nkernel()\n"
    tail, code = fail(tmp_path, source, "-X", "faulthandler")
    assert code == -11
    found = read_rank(ended(tail, None, "SIGSEGV", core=True))
    assert (found.category, found.place) == ("segfault", "train.py:4 kernel")
    assert found.headline == "killed by SIGSEGV (invalid memory access); core dumped"
    assert found.traceback is not None
    assert found.traceback.startswith("Fatal Python error")


@pytest.mark.parametrize("case", read_cases("exceptions.txt"), ids=lambda case: case.body[:40])
def test_an_exception_has_its_meaning_and_advice(case: Case) -> None:
    category, kind, *advice = case.fields
    tail = f'Traceback (most recent call last):\n  File "/w/train.py", line 88, in forward\n    go()\n{case.body}\n'
    found = read_rank(ended(tail))
    assert (found.category, found.kind, found.place) == (category, kind, "train.py:88 forward")
    assert found.hint or kind in OF_OTHERS
    assert all(word in found.hint for word in advice)


def test_a_kill_is_called_out_of_memory_only_with_evidence() -> None:
    killed = ended("step 3\n", None, "SIGKILL")
    bare = read_rank(killed)
    assert bare.category == "other"
    assert bare.headline == "killed by SIGKILL from outside (not by supervisor)"
    assert "dmesg" in bare.hint
    assert not bare.proven
    assert bare.evidence[0].text == "step 3"
    noted = ended("[W1121 15:42:23.187464347 socket.cpp:207] [c10d] x\n", None, "SIGKILL")
    noted = dataclasses.replace(noted, exit={**(noted.exit or {}), "said": {"text": "step=9", "line": 41}})
    assert [(one.text, one.line) for one in read_rank(noted).evidence] == [("step=9", 41)]
    asked = read_rank(dataclasses.replace(killed, exit={**(killed.exit or {}), "sent": "SIGKILL"}))
    assert (asked.headline, "dmesg" in asked.hint) == ("killed by SIGKILL, sent by an operator", False)
    other = read_rank(killed, ["kernel: oom-kill:constraint=CONSTRAINT_MEMCG", "kernel: Killed process 77 (python)"])
    assert (other.category, other.proven) == ("host_oom_kill", False)
    own = read_rank(killed, ["kernel: Memory cgroup out of memory: Killed process 4100 (python)"])
    assert (own.category, own.proven) == ("host_oom_kill", True)
    assert own.evidence[0].text.endswith("4100 (python)")


@pytest.mark.parametrize(
    ("code", "signal", "words"),
    [
        (0, None, "exited with code 0"),
        (1, None, "exited with code 1"),
        (None, "SIGKILL", "killed by SIGKILL (forced)"),
        (-11, None, "killed by SIGSEGV (invalid memory access)"),
        (-7, "SIGBUS", "killed by SIGBUS (memory without backing storage, for example because /dev/shm is full)"),
        (137, None, "exited with code 137, which is how a shell reports SIGKILL (forced)"),
        (200, None, "exited with code 200"),
        (255, None, "exited with code 255"),
        (247, None, "exited with code 247"),
        (None, None, "ended in an unknown way"),
    ],
)
def test_exits_in_words(code: int | None, signal: str | None, words: str) -> None:
    assert decode_exit(code, signal) == words


def test_shapes_forget_what_differs_between_ranks() -> None:
    one = shape("no file /data/n1/shard_03.bin at 0x7f00aa (attempt 3 of 10)")
    assert one == shape("no file /data/node22/shard_17.bin at 0x7e11bb (attempt 4 of 10)")
    assert one != shape("no directory /data/n1/shard_03.bin at 0x7f00aa (attempt 3 of 10)")


def fail_everywhere(ranks: int, message: str) -> tuple[IncidentDocument, float]:
    """Return the verdict on a script that fails on all ranks, and the seconds of processor time that it took."""
    lines = [f"loading shard {number}" for number in range(20)]
    evidence = []
    for rank in range(ranks):
        error = message.format(rank=rank)
        trace = f'Traceback (most recent call last):\n  File "/work/train.py", line 5, in main\n    f()\n{error}'
        document: Any = {"message": error, "callstack": trace, "timestamp_ns": 10**18}
        evidence.append(
            dataclasses.replace(
                ended("\n".join([*lines, trace]), error=document, rank=rank), rank=rank, node=f"n{rank // 8}"
            )
        )
    context = JobContext(
        world_size=ranks, ranks_per_node={f"n{at // 8}": range(at, at + 8) for at in range(0, ranks, 8)}
    )
    begun = time.process_time()
    return verdict(evidence, context), time.process_time() - begun


def test_equal_texts_are_judged_once() -> None:
    """A typo that fails 8,000 ranks costs little more than one that fails eight; the cost grows with the ranks."""
    fail_everywhere(8, "KeyError: 'labels'")
    incident, equal_s = fail_everywhere(4000, "KeyError: 'labels'")
    assert len(incident["culprit_ranks"]) == 4000
    assert incident["summary"].startswith("all 4000 ranks (500 nodes): KeyError: 'labels' in train.py:5 main")
    _, fewer_s = fail_everywhere(1000, "KeyError: 'labels'")
    assert equal_s < 4 * 3 * max(fewer_s, 0.02)
    _, different_s = fail_everywhere(1000, "ValueError: shard-{rank} of {rank} is bad")
    assert fewer_s < different_s / 2, "each text that differs is read"
