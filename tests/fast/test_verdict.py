"""The verdict across ranks and nodes: one cause, its victims, and no blame without a reason.

In: evidence as the engines of several nodes report it. Out: incidents.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from remote_agent.diagnose.evidence import JobContext, RankEvidence
from remote_agent.diagnose.incidents import Incident
from remote_agent.diagnose.verdict import verdict

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


def judge(*evidence: RankEvidence, **more: Any) -> Incident:
    more.setdefault("ranks_per_node", NODES)
    return verdict(evidence, JobContext(generation=2, incident_id=7, world_size=4, **more))


OOM = trace("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")


def test_the_contract_s_example() -> None:
    incident = judge(rank(3, 1.123, OOM), rank(0, 1.4, RESET), rank(1, 1.5, RESET), stopped(2, 2))
    answer: Any = incident.to_json()
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
    }  # fmt: skip


MISSING = trace("ModuleNotFoundError: No module named 'einops'", 3, "<module>")


def test_ranks_that_were_stopped_before_they_got_there_may_be_affected_too() -> None:
    """An import fails on every rank that gets as far; those that we stopped first are neither blamed nor cleared."""
    incident = judge(rank(0, 1.0, MISSING), rank(1, 1.01, MISSING), stopped(2, 1.1), stopped(3, 1.1, "a warning"))
    assert (incident.category, incident.culprit_ranks) == ("permission_import_missing_module", (0, 1))
    assert incident.summary.startswith("at least ranks 0-1 (n1): ")
    assert (incident.confidence, incident.at_least) == ("supported", True)
    assert [each.summary for each in incident.victims] == ["2 x stopped by supervisor (SIGTERM); may be affected too"]
    alone = judge(rank(0, 1.0, MISSING), stopped(1, 1.1), stopped(2, 1.1), stopped(3, 1.1))
    assert (alone.summary[:15], alone.confidence) == ("at least rank 0", "supported")
    everywhere = judge(*(rank(number, 1.0, MISSING) for number in range(4)))
    assert (everywhere.summary[:11], everywhere.confidence, everywhere.at_least) == (
        "all 4 ranks",
        "established",
        False,
    )


def test_a_rank_that_had_lost_its_peer_is_not_affected() -> None:
    incident = judge(rank(0, 1.0, OOM), rank(1, 1.0, OOM), stopped(2, 1.1, RESET), stopped(3, 1.1, RESET))
    assert (incident.culprit_ranks, incident.confidence, incident.at_least) == ((0, 1), "established", False)


def test_the_order_of_the_evidence_does_not_matter() -> None:
    evidence = [rank(3, 1, OOM), rank(0, 1.4, RESET), rank(1, 1.5, RESET), stopped(2, 2)]
    answers = [judge(*order).to_json() for order in itertools.permutations(evidence)]
    assert all(answer == answers[0] for answer in answers)


def test_a_victim_that_was_seen_first_is_not_blamed() -> None:
    """A slow death, as with a core dump, is reaped after those it broke."""
    incident = judge(rank(0, 1.0, RESET), rank(2, 3.0, "", None, "SIGSEGV", core=True))
    assert (incident.category, incident.culprit_ranks, incident.culprit_node) == ("segfault", (2,), "n2")
    assert incident.summary == "rank 2 (n2): killed by SIGSEGV (invalid memory access); core dumped"
    assert incident.to_json()["exit"] == {"code": None, "signal": "SIGSEGV"}


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
    assert incident.culprit_ranks == (2,)
    assert incident.time_ns == START + SECOND
    assert [each.summary for each in incident.victims] == ["later: KeyError: 'x' in train.py:10 load"]


@pytest.mark.parametrize(("apart_s", "confidence"), [(0.5, "established"), (0.001, "supported")])
def test_an_order_within_the_clock_s_error_is_not_called_established(apart_s: float, confidence: str) -> None:
    incident = judge(
        rank(0, 1, trace("KeyError: 'x'", 10, "load")),
        rank(2, 1 + apart_s, trace("ValueError: bad")),
        clock_error_ms={"n1": 2.0, "n2": 2.0},
    )
    assert incident.culprit_ranks == (0,)
    assert incident.confidence == confidence


def test_nccls_warnings_count_where_it_writes_to_a_file_of_its_own() -> None:
    said = "h1:10:20 [0] misc/ibvwrap.cc:250 NCCL WARN Call to ibv_modify_qp failed with error No such device"
    exit_: Any = {"rank": 1, "code": 1, "signal": None, "t_ns": START, "tail": "RuntimeError: NCCL error", "nccl": said}
    files = {name: f"/j/generation_0/rank_1/{name}.log" for name in ("stderr", "nccl")}
    incident = judge(RankEvidence.from_exit(exit_ | {"stderr_lines": 7}, "n1", files))
    assert incident.category == "nccl_network"
    proof = incident.evidence[0]
    assert (proof.file, proof.text) == (files["nccl"], said)


def test_the_same_exception_everywhere_is_one_cause() -> None:
    """Also on ranks that we stopped while they failed; one that only got our signal is a victim."""
    same = [
        trace(f"FileNotFoundError: [Errno 2] No such file or directory: '/data/{each}.bin'", 5, "main")
        for each in range(4)
    ]
    all_of_them = judge(
        rank(0, 1, same[0]), rank(1, 1.1, same[1]), rank(2, 1.1, same[2]), stopped(3, 1.2, same[3], 1, None)
    )
    assert all_of_them.scope == "several_or_all_ranks"
    assert all_of_them.culprit_ranks == (0, 1, 2, 3)
    assert all_of_them.culprit_node is None
    assert all_of_them.summary.startswith("all 4 ranks (n1, n2): FileNotFoundError")
    assert all_of_them.victims == ()
    some = judge(rank(2, 1, same[2]), rank(3, 1.1, same[3]), stopped(0, 1.2), stopped(1, 1.2))
    assert (some.culprit_ranks, some.culprit_node) == ((2, 3), "n2")
    assert some.summary.startswith("at least ranks 2-3 (n2): FileNotFoundError")
    assert [(each.ranks, each.summary) for each in some.victims] == [
        ((0, 1), "2 x stopped by supervisor (SIGTERM); may be affected too")
    ]


def test_ranks_that_recorded_the_same_exception_before_our_signal_share_the_cause() -> None:
    """Torch and gloo may take seconds to end a process; what was only printed may have been caught."""
    text = trace("ValueError: bad config", 26, "main")
    record = {"message": "ValueError: bad config", "callstack": text, "timestamp_ns": START + SECOND}
    both = judge(rank(0, 3, text, error=record), rank(1, 4, text, None, "SIGTERM", stopped_by_us=True, error=record))
    assert both.culprit_ranks == (0, 1)
    assert judge(rank(0, 3, text, error=record), stopped(1, 4, text)).culprit_ranks == (0,)


def test_what_we_stopped_is_never_a_cause() -> None:
    incident = judge(*(stopped(each, 1, trace("ValueError: in the handler of SIGTERM")) for each in range(4)))
    assert incident.culprit_ranks == ()
    assert (incident.scope, incident.confidence) == ("not_in_text", "unknown")
    killed = judge(stopped(0, 1, "", None, "SIGKILL"), rank(1, 2, OOM))
    assert killed.culprit_ranks == (1,)


def test_a_lost_node_outranks_the_connections_it_broke() -> None:
    lost = {"n2": (START + SECOND, "no heartbeat within 15 s")}
    incident = judge(rank(0, 1.2, RESET), rank(1, 1.2, RESET), lost_nodes=lost)
    assert (incident.category, incident.scope, incident.culprit_node) == ("node_lost", "outside_the_ranks", "n2")
    assert incident.culprit_ranks == ()
    assert incident.confidence == "established"
    assert incident.summary == "node n2 lost: no heartbeat within 15 s (ranks 2-3)"
    assert incident.victims[0].ranks == (0, 1)


def test_a_failure_before_the_loss_of_a_node_is_the_cause() -> None:
    lost = {"n2": (START + 5 * SECOND, "no heartbeat within 15 s")}
    incident = judge(rank(0, 1, OOM), lost_nodes=lost)
    assert (incident.category, incident.culprit_ranks) == ("cuda_oom", (0,))
    assert incident.victims[-1].category == "node_lost"
    after = judge(rank(0, 6, OOM), lost_nodes=lost)
    assert (after.category, after.confidence) == ("node_lost", "supported")


def test_a_kill_from_outside_is_distinguished_from_the_oom_killer() -> None:
    incident = judge(rank(3, 1, "", None, "SIGKILL"), rank(0, 1.2, RESET))
    assert incident.category == "other"
    assert incident.summary == "rank 3 (n2): killed by SIGKILL from outside (not by supervisor)"
    assert incident.confidence == "supported"
    notes = {"n2": ["Out of memory: Killed process 4003 (python) total-vm:99kB"]}
    incident = judge(rank(3, 1, "", None, "SIGKILL"), rank(0, 1.2, RESET), host_notes=notes)
    assert (incident.category, incident.confidence) == ("host_oom_kill", "established")
    assert judge(rank(0, 1, "", None, "SIGKILL"), host_notes=notes).category == "other", "the notes of another node"
    counted = {"n2": ["/sys/fs/cgroup/memory.events: oom_kill 1 since the workers started"]}
    incident = judge(rank(3, 1, "", None, "SIGKILL"), host_notes=counted)
    assert (incident.category, incident.confidence) == ("host_oom_kill", "supported"), "of whichever process"


@pytest.mark.parametrize(
    ("evidence", "note", "shown"),
    [
        (rank(3, 1, "", None, "SIGBUS"), "/dev/shm: 0.0 of 64.0 MiB free afterwards", True),
        (rank(3, 1, "", None, "SIGSEGV"), "kernel: python[4003]: segfault at 0", True),
        (rank(3, 1, "", None, "SIGSEGV"), "kernel: python[4002]: segfault at 0", False),
        (rank(3, 1, "OSError: [Errno 28] No space left on device"), "/w: 0.0 of 4003 MiB free afterwards", True),
        (rank(3, 1, "RuntimeError: CUDA error: unknown error"), "kernel: NVRM: Xid (PCI:0000:3b:00): 79", True),
        (rank(3, 1, "ValueError: x"), "/w: 0.0 of 4003 MiB free afterwards", False),
        (stopped(3, 1, "", None, "SIGKILL"), "kernel: Out of memory: Killed process 4003", False),
    ],
)
def test_what_the_host_says_stands_with_what_it_explains(evidence: RankEvidence, note: str, shown: bool) -> None:
    lines = [line.text for line in judge(evidence, host_notes={"n2": [note, note]}).evidence]
    assert lines.count(note) == shown


def test_sigterm_from_outside_is_a_preemption_unless_something_failed_before() -> None:
    whole = judge(*(rank(each, 1 + each / 100, "", None, "SIGTERM") for each in range(4)))
    assert (whole.category, whole.scope, whole.culprit_ranks) == ("signal_preempted", "outside_the_ranks", ())
    one = judge(rank(2, 1, "", None, "SIGTERM"), rank(0, 1.3, RESET))
    assert (one.scope, one.culprit_ranks) == ("one_rank", (2,))
    assert one.summary == "rank 2 (n2): killed by SIGTERM (termination request) from outside (not by supervisor)"
    later = judge(rank(1, 0.5, OOM), rank(2, 1, "", None, "SIGTERM"))
    assert later.culprit_ranks == (1,)


def test_an_exit_without_words_comes_before_broken_connections() -> None:
    incident = judge(rank(1, 1, "", 3), rank(0, 1.2, RESET), rank(2, 1.3, RESET))
    assert (incident.culprit_ranks, incident.confidence) == ((1,), "supported")
    assert incident.summary == "rank 1 (n1): exited with code 3 and printed nothing on stderr"
    after = judge(rank(0, 1, RESET), rank(1, 2, "", 3))
    assert after.confidence == "unknown"


def test_a_rank_that_left_early_is_named() -> None:
    incident = judge(rank(3, 1, "", 0), rank(0, 1.2, RESET), rank(1, 1.2, RESET), stopped(2, 2, RESET))
    assert (incident.category, incident.culprit_ranks) == ("collective_desync", (3,))
    assert incident.summary.startswith("rank 3 (n2): left early: exited with code 0")


def test_a_rank_that_left_early_is_distinguished_from_one_stopped_in_time() -> None:
    """Its connections close while its process still ends: the others may be seen to fail first, and it is stopped."""
    broken = [rank(each, 1.2, RESET) for each in (0, 1, 3)]
    asked_ns = START + int(1.3 * SECOND)
    left = rank(2, 1.4, "", None, "SIGTERM", stopped_by_us=True, over_ns=START + SECOND, asked_ns=asked_ns)
    incident = judge(*broken, left)
    assert (incident.category, incident.culprit_ranks, incident.culprit_node) == ("collective_desync", (2,), "n2")
    assert incident.summary.startswith("rank 2 (n2): left early: its script had ended while ranks 0-1,3 still")
    unsure = judge(*broken, left, clock_error_ms={"n1": 150.0, "n2": 150.0})
    assert unsure.culprit_ranks == ()
    obeyed = rank(2, 1.4, "", None, "SIGTERM", stopped_by_us=True, over_ns=asked_ns + 1, asked_ns=asked_ns)
    quiet = judge(*broken, obeyed)
    assert (quiet.scope, quiet.culprit_ranks) == ("not_in_text", ())
    assert quiet.hint.startswith("check rank 2 first: all other ranks report failures; ")


@pytest.mark.parametrize(("asked_s", "culprits"), [(1.3, (2,)), (0.9, ())])
def test_a_rank_that_failed_before_our_signal_is_a_cause(asked_s: float, culprits: tuple[int, ...]) -> None:
    """A process with a recorded exception may take seconds to end: what it broke is seen first."""
    text = trace("ValueError: bad batch")
    record = {"message": "ValueError: bad batch", "callstack": text, "timestamp_ns": START + SECOND}
    asked_ns = START + int(asked_s * SECOND)
    slow = rank(2, 5, text, None, "SIGTERM", stopped_by_us=True, error=record, asked_ns=asked_ns)
    incident = judge(rank(0, 1.2, RESET), rank(1, 1.2, RESET), slow)
    assert incident.culprit_ranks == culprits
    assert (incident.category == "user_exception") == bool(culprits)
    assert incident.exit_signal is None


def test_a_rank_named_by_another_is_the_one() -> None:
    text = "RuntimeError: Rank 1 failed to pass monitoredBarrier in 30000 ms"
    incident = judge(rank(0, 1, trace(text, 20, "sync")), stopped(1, 2), stopped(2, 2), stopped(3, 2))
    assert (incident.culprit_ranks, incident.culprit_node) == ((1,), "n1")
    assert incident.summary == "rank 1 (n1): did not reach monitoredBarrier (reported by rank 0)"
    assert 0 in incident.victims[0].ranks or incident.evidence[0].rank == 0


def watchdog(number: int, seq: int, enqueued: int) -> str:
    tag = f"[rank{number}]:[E1120 10:00:00.1 ProcessGroupNCCL.cpp:632] [Rank {number}]"
    work = f"WorkNCCL(SeqNum={seq}, OpType=ALLREDUCE, NumelIn=1, Timeout(ms)=600000)"
    return (
        f"{tag} Watchdog caught collective operation timeout: {work} ran for 600004 milliseconds\n"
        f"{tag} last enqueued work: {enqueued}, last completed work: {seq - 1}\n"
    )


def test_ranks_that_never_reached_the_collective() -> None:
    incident = judge(*(rank(each, 1, watchdog(each, 44, 44), None, "SIGABRT") for each in (0, 2, 3)), stopped(1, 2))
    assert (incident.category, incident.culprit_ranks) == ("nccl_timeout_watchdog", (1,))
    assert incident.missing == {
        "collective": "ALLREDUCE", "seq": 44, "waiting": [0, 2, 3], "missing": [1], "stacks": {},
    }  # fmt: skip
    assert incident.summary == "rank 1 (n1): never reached ALLREDUCE number 44; ranks 0,2-3 were waiting"
    assert incident.confidence == "supported"
    behind = judge(*(rank(each, 1, watchdog(each, 44, 43 + (each != 2)), None, "SIGABRT") for each in range(4)))
    assert behind.culprit_ranks == (2,)


def test_a_failed_thread_explains_a_missing_rank() -> None:
    said = stopped(1, 2, "Exception in thread Thread-1 (feed):\n" + trace("KeyError: 'x'", 7, "feed"))
    incident = judge(*(rank(each, 1, watchdog(each, 44, 44), None, "SIGABRT") for each in (0, 2, 3)), said)
    assert (incident.category, incident.culprit_ranks) == ("user_exception", (1,))
    assert incident.summary.startswith(
        "rank 1 (n1): a thread failed with KeyError: 'x' in train.py:7 feed; never reached"
    )
    assert (incident.traceback or "").endswith("KeyError: 'x'")
    still: Any = {"collective": None, "seq": None, "waiting": [], "missing": [1], "stacks": {}}
    quiet = verdict([stopped(1, 2)], JobContext(hang=still, ranks_per_node={"n1": [0, 1]}))
    assert quiet.summary == "rank 1 (n1): the group made no progress"


def test_one_watchdog_alone_blames_nobody() -> None:
    incident = judge(rank(0, 1, watchdog(0, 44, 44), None, "SIGABRT"), *(stopped(each, 2) for each in (1, 2, 3)))
    assert (incident.scope, incident.culprit_ranks, incident.confidence) == ("not_in_text", (), "unknown")


def test_when_the_texts_do_not_say_the_verdict_says_so() -> None:
    incident = judge(rank(0, 1, RESET), rank(1, 1.1, RESET))
    assert (incident.scope, incident.confidence, incident.culprit_ranks) == ("not_in_text", "unknown", ())
    assert "no rank shows an earlier failure" in incident.summary
    assert incident.hint.startswith("check ranks 2-3 first")
    empty = verdict([], JobContext())
    assert (empty.category, empty.scope) == ("other", "not_in_text")
    assert empty.to_json()["time"] is None


def test_a_node_s_own_report_counts_if_no_rank_failed() -> None:
    said = RankEvidence(None, "n2", tail="could not carry out the order: workers cannot be started: no such script")
    incident = judge(said, stopped(0, 1), stopped(1, 1, RESET))
    assert (incident.category, incident.scope, incident.culprit_node) == ("other", "outside_the_ranks", "n2")
    assert incident.summary == f"n2: {said.tail}"
    full = RankEvidence(None, "n2", tail="could not carry out the order: [Errno 28] No space left on device")
    incident = judge(full, stopped(0, 1))
    assert (incident.category, incident.scope, incident.culprit_node) == ("disk_full", "outside_the_ranks", "n2")
    assert judge(said, rank(3, 1, OOM)).category == "cuda_oom"


def test_what_several_nodes_report_is_no_node_s_own() -> None:
    said = [RankEvidence(None, node, tail="could not carry out the order: no such directory") for node in NODES]
    incident = judge(*said)
    assert (incident.summary, incident.culprit_node) == (f"2 nodes {said[0].tail}", None)


FULL = "/j/generation_0: 0.0 of 40.0 MiB free afterwards"


@pytest.mark.parametrize("note", [FULL, "/work/run: 812.3 of 900.0 MiB free afterwards, no inode free"])
@pytest.mark.parametrize("said", ["", "Traceback (most recent call last):\n  File "])
def test_a_script_that_could_not_say_why_had_no_space_for_it(note: str, said: str) -> None:
    incident = judge(rank(2, 1, said), rank(0, 1.1, RESET), stopped(3, 2), host_notes={"n2": [note]})
    assert (incident.category, incident.confidence) == ("disk_full", "supported")
    assert (incident.culprit_ranks, incident.culprit_node) == ((2,), "n2")
    assert incident.summary == f"rank 2 (n2): exited with code 1, and no space is left in {note.split(':')[0]}"
    assert note in [line.text for line in incident.evidence]


def test_a_full_disk_explains_no_failure_that_has_a_reason() -> None:
    assert judge(rank(2, 1, OOM), host_notes={"n2": [FULL]}).category == "cuda_oom"
    assert judge(rank(0, 1), host_notes={"n2": [FULL]}).category == "other", "another node's disk"
    free = "/j/generation_0: 10.0 of 40.0 MiB free afterwards"
    assert judge(rank(2, 1), host_notes={"n2": [free]}).category == "other"


def test_512_ranks_yield_one_cause_and_one_line_of_victims() -> None:
    nodes = {f"n{node:02}": list(range(node * 8, node * 8 + 8)) for node in range(64)}
    evidence: list[RankEvidence] = []
    for node, ranks in nodes.items():
        for number in ranks:
            text = f"RuntimeError: [pair.cc:544] Connection closed by peer [10.0.{number}.1]:{40000 + number}"
            tail = trace("IndexError: list index out of range", 31, "collate") if number == 363 else trace(text, 90)
            evidence.append(rank(number, 1 + number / 1000, tail, node=node))
    incident = verdict(evidence, JobContext(world_size=512, ranks_per_node=nodes))
    assert incident.summary == "rank 363 (n45): IndexError: list index out of range in train.py:31 collate"
    (victims,) = incident.victims
    assert len(victims.ranks) == 511
    assert victims.summary.startswith("511 x RuntimeError")
    assert len(incident.evidence) <= 12


def test_fingerprints_hold_over_ranks_and_generations_and_differ_between_failures() -> None:
    def of(number: int, text: str, **more: Any) -> str:
        return judge(rank(number, 1, trace(text, **more))).fingerprint

    one = of(0, "ValueError: bad batch 17 in /data/a/x.bin at 0x7fffaa")
    assert one == of(3, "ValueError: bad batch 99 in /data/b/y.bin at 0x7ffbbb", line=93)
    assert one != of(0, "ValueError: bad batch 17 in /data/a/x.bin at 0x7fffaa", function="backward")
    assert one != of(0, "KeyError: 'x'")
    kill = judge(rank(1, 1, "", None, "SIGKILL")).fingerprint
    assert kill == judge(rank(2, 9, "last words\n", None, "SIGKILL")).fingerprint
    assert kill != judge(rank(1, 1, "", None, "SIGSEGV")).fingerprint
    lost = [judge(lost_nodes={node: (START, "gone")}) for node in ("n1", "n2")]
    assert lost[0].fingerprint != lost[1].fingerprint


def test_the_only_rank_with_a_wrong_store_address_is_the_culprit() -> None:
    waited = trace("torch.distributed.DistStoreError: wait timeout after 10000ms, keys: /default_pg/0//barrier")
    astray = "The client socket has failed to connect to any network address of (10.255.255.1, 41327)."
    lost = rank(2, 12, trace(f"torch.distributed.DistNetworkError: {astray}"))
    incident = judge(rank(0, 10, waited), rank(1, 10, waited), lost, rank(3, 10, waited))
    assert (incident.category, incident.culprit_ranks, incident.scope) == ("rendezvous_timeout", (2,), "one_rank")
    assert "(10.255.255.1, 41327)" in incident.summary
    # Where several do not reach it, or nobody waits, no rank is the odd one out.
    assert not judge(lost, rank(0, 10, waited)).culprit_ranks
    assert not judge(lost, rank(3, 12, lost.tail), rank(0, 10, waited), rank(1, 10, waited)).culprit_ranks


def test_the_only_rank_that_cannot_meet_the_others_is_the_culprit() -> None:
    lost = rank(2, 1, trace("RuntimeError: [enforce fail] ifa != nullptr. Unable to find address for: eth7"))
    incident = judge(lost, stopped(0, 2), stopped(1, 2), stopped(3, 2))
    assert (incident.category, incident.culprit_ranks, incident.scope) == ("rendezvous_timeout", (2,), "one_rank")
    assert not judge(lost, rank(3, 1, lost.tail), stopped(0, 2), stopped(1, 2)).culprit_ranks


def test_a_rank_that_received_a_wrong_size_is_no_culprit() -> None:
    got = "  what():  [enforce fail at pair.cc:456] op.preamble.length <= op.nbytes. 2000 vs 4."
    incident = judge(rank(1, 1, got, None, "SIGABRT"), rank(0, 1.2, RESET), rank(2, 1.2, RESET), stopped(3, 2))
    assert (incident.category, incident.culprit_ranks, incident.scope) == ("collective_desync", (), "not_in_text")
    assert "TORCH_DISTRIBUTED_DEBUG" in incident.hint


def test_the_rank_that_peers_lost_first_is_named_unless_it_lost_connections_too() -> None:
    gone = "n1:7:8 [{0}] NCCL INFO [Service thread] Connection closed by localRank 1"
    remote = trace("torch.distributed.DistBackendError: NCCL error, remote process exited or there was a network error")
    nodes = {"n1": [0, 1, 2, 3]}
    peers = [rank(0, 2, f"{gone.format(0)}\n{remote}"), stopped(2, 2, gone.format(2)), stopped(3, 2, gone.format(3))]
    assert judge(*peers, ranks_per_node=nodes).culprit_ranks == (1,)
    assert not judge(*peers, stopped(1, 1, remote), ranks_per_node=nodes).culprit_ranks
    assert not judge(*peers[:1], ranks_per_node=nodes).culprit_ranks, "one word is not enough"


MESH = (
    "RuntimeError: Gloo connectFullMesh failed with [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:152] timed "
    "out connecting: SO_ERROR: Connection refused, remote=[127.0.1.1]:55175$3"
)


def test_a_host_name_that_resolves_to_loopback_is_the_cause_where_gloo_fails_to_connect() -> None:
    evidence = [rank(3, 1.0, trace(MESH)), rank(1, 1.0, trace(MESH)), stopped(0, 2), stopped(2, 2)]
    incident = judge(*evidence, unreachable_names=["n1"])
    assert (incident.category, incident.culprit_ranks) == ("rendezvous_timeout", ())
    assert "gloo looked for ranks of another host at 127.0.1.1: the host name of n1 resolves" in incident.summary
    assert "GLOO_SOCKET_IFNAME" in incident.hint
    assert "the host name of a node resolves" in judge(*evidence).summary
    # On one host a loopback address is right, and the peer has failed for another reason.
    alone = judge(rank(0, 1.0, trace(MESH)), stopped(1, 2), ranks_per_node={"n1": [0, 1]})
    assert "Gloo connectFullMesh failed" in alone.summary
