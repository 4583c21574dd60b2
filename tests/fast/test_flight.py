"""Flight records of torch: where ranks part, and files that are no records. Records in the form of NCCL's."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from remote_agent.diagnose import flight_files
from remote_agent.diagnose.flight import Record, compare, read
from remote_agent.diagnose.flight_files import parse_flight_record
from remote_agent.wire.gate import MAX_DEPTH, Misfit
from supervisor.postmortem.diagnosis import diagnose
from tests.fast.waiting import some

WORLD = (0, 1, 2)
LIBRARY = {"name": "all_reduce", "filename": "/v/site-packages/torch/distributed/distributed_c10d.py", "line": 3245}


def call(seq: int, op: str = "all_reduce", *sizes: int, done: bool = False, group: str = "0", **more: Any) -> Any:
    """One entry as NCCL's recorder writes it."""
    return {
        "frames": [LIBRARY, {"name": "step", "filename": "/home/me/train.py", "line": 80 + seq}],
        "record_id": seq, "pg_id": int(group), "process_group": (group, "default_pg" if group == "0" else "pair"),
        "collective_seq_id": seq, "p2p_seq_id": 0, "op_id": seq, "profiling_name": f"nccl:{op}",
        "time_created_ns": 1_795_169_000_000_000_000 + seq, "input_sizes": [list(sizes or (4,))],
        "input_dtypes": ["Float"], "output_sizes": [list(sizes or (4,))], "output_dtypes": ["Float"],
        "state": "completed" if done else "scheduled", "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None, "retired": done, "timeout_ms": 600000, "is_p2p": False, **more,
    }  # fmt: skip


def done(seq: int, op: str = "all_reduce", *sizes: int, **more: Any) -> Any:
    return call(seq, op, *sizes, done=True, **more)


def document(*entries: Any, world: Sequence[int] = WORLD) -> Any:
    ranks = {"0": str(list(world)), "1": "[0, 1]", "2": "[1, 2]"}
    config = {name: {"name": name, "desc": "", "ranks": own} for name, own in ranks.items()}
    return {"version": "2.4", "pg_config": config, "nccl_comm_state": {}, "entries": list(entries)}


def records(*calls: Sequence[Any] | None) -> dict[int, Record]:
    """Rank by rank what it called; None: it left no record."""
    return {rank: read(json.loads(json.dumps(document(*own)))) for rank, own in enumerate(calls) if own is not None}


P2P: Any = {"is_p2p": True, "profiling_name": "nccl:send 0->1"}
PARTINGS: tuple[tuple[str, tuple[Sequence[Any] | None, ...], tuple[int, ...], str], ...] = (
    ("op", ([call(1)], [call(1, "broadcast")], [call(1)]), (1,),
     "called broadcast 1 at train.py:81 in step where ranks 0,2 called all_reduce at train.py:81 in step"),
    ("size", ([call(1, "all_reduce", 4)], [call(1, "all_reduce", 2, 2)], [call(1, "all_reduce", 5)]), (2,),
     "called all_reduce 1 with 5 elements [5] at train.py:81 in step, ranks 0-1 with 4 [4] at train.py:81 in step"),
    ("dtype", ([call(1, input_dtypes=["Half"])], [call(1)], [call(1)]), (0,), "called all_reduce 1 with Half at "),
    ("order", ([call(1, "a"), call(2, "b")], [call(1, "b"), call(2, "a")], [call(1, "a"), call(2, "b")]), (1,),
     "called b [4] before a [4] at train.py:81 in step, ranks 0,2 in the other order"),
    ("left_out", ([call(1, "a"), call(2, "b"), call(3, "c")],) * 2 + ([call(1, "b"), call(2, "c")],), (2,),
     "left out a [4] (number 1), which ranks 0-1 called at train.py:81 in step; went on with b at train.py:81 in step"),
    ("extra", ([call(1, "x"), call(2, "a"), call(3, "b")],) + ([call(1, "a"), call(2, "b")],) * 2, (0,),
     "called x 1 [4] at train.py:81 in step in addition to what ranks 1-2 called"),
    ("group", ([call(1)], [call(1, group="1")], [call(1)]), (1,),
     "waiting in all_reduce 1 of group 1 (pair) at train.py:81 in step, ranks 0,2 in all_reduce 1 of the default "),
    ("group", ([done(1), call(1, group="1")], [done(1), call(1, group="2")], [done(1), call(2)]), (0, 1, 2),
     "ranks waiting for each other in different groups: rank 0 in all_reduce 1 of group 1 (pair) at "),
    ("ahead", ([done(1)], [done(1), call(2)], [done(1)]), (1,),
     "entered all_reduce 2 [4] at train.py:82 in step, which ranks 0,2 never entered"),
    ("missing", ([done(1), call(2)], [done(1), call(2)], [done(1)]), (2,),
     "never entered all_reduce 2 [4] after all_reduce 1 at train.py:81 in step; ranks 0-1 waiting in it at "),
    # Rank 1 waits for rank 2 in the pair; that one waits for nobody.
    ("missing", ([call(1)], [call(1, group="2")], []), (2,), "never entered all_reduce 1 [4]; rank 0 waiting in it"),
    ("missing", ([call(1)], [call(1)], None), (2,), "left no flight record, and may have ended before all_reduce 1 "),
    ("missing", ([call(1), call(1, **P2P)], [call(1)], [call(1, **P2P)]), (2,), "never entered all_reduce 1 [4]; "),
    ("unfinished", ([call(1)],) * 3, (), "all 3 ranks entered all_reduce 1 at train.py:81 in step, and none of them "),
    ("unfinished", ([done(1)], [call(1)], [done(1)]), (),
     "all 3 ranks entered all_reduce 1 at train.py:81 in step, and rank 1 did not finish it"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "calls", "culprits", "says"), PARTINGS, ids=[f"{n} {one[0]}" for n, one in enumerate(PARTINGS)]
)
def test_where_they_part(
    kind: str, calls: tuple[Sequence[Any] | None, ...], culprits: tuple[int, ...], says: str
) -> None:
    parting = some(compare(records(*calls)))
    assert (parting.kind, parting.culprits) == (kind, culprits), parting
    assert parting.headline.startswith(says), parting.headline


TWO: tuple[Any, ...] = ({"pg_id": 0}, {"pg_id": 5})
AGREEING: dict[str, tuple[Sequence[Any], ...]] = {
    "all done": ([done(1), done(2)],) * 3,
    "dumps of different moments": ([done(1)], [done(1), done(2)], [done(1), done(2), done(3)]),
    "shape, not size": ([done(1, "all_reduce", 2, 3)], [done(1, "all_reduce", 6)], [done(1, "all_reduce", 3, 2)]),
    "uneven": ([done(1, "all_to_all", 1)], [done(1, "all_to_all", 2)], [done(1, "all_gather", 3)][:0]),
    "uneven and done": ([done(1, "all_gather", 1)], [done(1, "all_gather", 2)], [done(1, "all_gather", 3)]),
    "a ring that has lost calls": ([done(1, "broadcast"), done(2)], [done(2)], [done(2), done(3)]),
    "a group that was made anew": ([done(1, "a", **TWO[0]), done(1, "b", **TWO[1])], [done(1, "b", **TWO[1])], []),
    "nothing recorded": ([], [], []),
}  # fmt: skip


@pytest.mark.parametrize("name", AGREEING)
def test_ranks_that_agree_are_not_accused(name: str) -> None:
    assert compare(records(*AGREEING[name])) is None


def test_calls_of_gloo_that_have_timed_out_still_show_who_is_missing() -> None:
    gloo: Any = {"state": "scheduled", "profiling_name": "gloo:all_reduce"}
    parting = compare(
        records([done(1, **gloo), done(2, **gloo)], [done(1, **gloo)], [done(1, **gloo), done(2, **gloo)])
    )
    assert parting is not None
    assert (parting.kind, parting.culprits) == ("missing", (1,))


def test_numbers_that_no_rank_counts_to_take_no_time() -> None:
    parting = some(compare(records([done(1), call(2**62, "all_reduce", *[2**40] * 500)], [done(1)], [done(1)])))
    assert (parting.kind, parting.culprits) == ("ahead", (0,))


def write(folder: Path, *calls: Sequence[Any], suffix: str = "", protocol: int = 2) -> Path:
    folder.mkdir(exist_ok=True)
    for rank, own in enumerate(calls):
        data = document(*own)
        text = json.dumps(data).encode() if suffix == ".json" else pickle.dumps(data, protocol)
        (folder / f"nccl_trace_rank_{rank}{suffix}").write_bytes(text)
    return folder


@pytest.mark.parametrize(("suffix", "protocol"), [("", 2), ("", 4), (".pkl", 5), (".json", 0)])
def test_diagnose_reads_directories_of_them(tmp_path: Path, suffix: str, protocol: int) -> None:
    write(tmp_path, [done(1), call(2)], [done(1), call(2)], [done(1)], suffix=suffix, protocol=protocol)
    (tmp_path / "result_1.json").write_text('{"entries": 3}')
    skipped: list[str] = []
    (incident,) = diagnose([tmp_path], leave_out=skipped.append)["incidents"]
    assert (incident["category"], incident["culprit_ranks"], incident["confidence"]) == (
        "hang_no_output", [2], "established",
    )  # fmt: skip
    assert incident["missing"] == {
        "collective": "all_reduce", "seq": 2, "waiting": [0, 1], "missing": [2],
        "stacks": {"2": "train.py:81 in step, its last call"},
    }  # fmt: skip
    assert incident["victims"] == [{"ranks": [0, 1], "category": "hang_no_output", "summary": "in all_reduce 2"}]
    assert incident["evidence"][2]["text"] == "last call: all_reduce 1 [4] at train.py:81 in step"
    assert skipped == []
    # Of the files alone, rank 1 is as likely as rank 2 to be the one that is late.
    files = [tmp_path / f"nccl_trace_rank_{rank}{suffix}" for rank in (0, 1)]
    (partly,) = diagnose(files)["incidents"]
    assert (partly["culprit_ranks"], partly["confidence"]) == ([2], "supported")


WATCHDOG = (
    "[rank0]:[E1120 10:00:00.000 ProcessGroupNCCL.cpp:632] [Rank 0] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=2, OpType=ALLREDUCE, NumelIn=4, NumelOut=4, Timeout(ms)=600000) ran for 600020 milliseconds "
    "before timing out.\n"
)


def test_a_timeout_in_the_logs_is_explained_and_a_cause_is_not_replaced(tmp_path: Path) -> None:
    write(tmp_path / "dumps", [call(1)], [call(1, "broadcast")], [call(1)])
    log = tmp_path / "job.log"
    log.write_text(WATCHDOG)
    (explained,) = diagnose([tmp_path])["incidents"]
    assert (explained["category"], explained["culprit_ranks"], explained["id"]) == ("collective_desync", [1], 1)
    assert str(explained["evidence"][0]["file"]).endswith("nccl_trace_rank_0")
    assert explained["evidence"][-1]["file"] == str(log)
    log.write_text("[rank1]: Traceback (most recent call last):\n[rank1]:   File \"train.py\", line 7, in step\n"
                   "[rank1]:     raise ValueError('7 classes')\n[rank1]: ValueError: 7 classes\n")  # fmt: skip
    (own,) = diagnose([tmp_path])["incidents"]
    assert (own["category"], own["culprit_ranks"]) == ("user_exception", [1])
    assert "broadcast 1" in " ".join(line["text"] for line in own["evidence"])


class Runs:
    """Would run a command where it is unpickled as Python does it."""

    def __reduce__(self) -> Any:
        return (print, ("it ran",))


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


# Each list holds the one before ten times: 10^9 values in 60 bytes.
LAUGHS = b"\x80\x02]q\x00(K\x01K\x01K\x01e" + b"".join(
    b"]q" + bytes([n]) + b"(" + (b"h" + bytes([n - 1])) * 10 + b"e" for n in range(1, 10)
) + b"."  # fmt: skip
HOSTILE = {
    "code": (pickle.dumps({"entries": [Runs()]}, 2), "is not read: it would run code (GLOBAL)"),
    "code, protocol 4": (pickle.dumps({"entries": [Runs()]}, 4), "is not read: it would run code (STACK_GLOBAL)"),
    "cut": (pickle.dumps(document(call(1)), 2)[:400], "is cut off, or not a pickle"),
    "2 GB of text": (b"\x80\x02X\xff\xff\xff\x7fabc.", "is cut off, or not a pickle"),
    "another protocol inside": (b"\x80\x04\x80\xff].", "is cut off, or not a pickle"),
    "a frame of exabytes": (b"\x80\x04\x95" + b"\xff" * 8 + b"].", "is cut off, or not a pickle"),
    "an exabyte": (b"\x80\x04\x8d" + b"\xff" * 8 + b"abc.", "is cut off, or not a pickle"),
    "2^31 memos": (b"\x80\x02]r\xff\xff\xff\x7f.", "is not an object"),
    "a long number": (b"\x80\x02\x8a\xff" + b"\x01" * 255 + b".", "is not an object"),
    "a longer number": (b"\x80\x02\x8b\xff\xff\xff\x7f\x01.", "is not a flight record: LONG4"),
    "deep": (pickle.dumps(nested(400), 2), "is nested too deeply"),
    "deep JSON": (b'{"pg_config":' + b"[" * 100_000, "is not JSON"),
    "laughs": (LAUGHS, "has more than 4,000,000 values"),
    "inside itself": (b"\x80\x02]q\x00h\x00a.", "is nested too deeply"),
    "a deep tuple as a key": (b"\x80\x02}" + b")" + b"\x85" * 1_000_000 + b"K\x01s.", "is not plain data"),
    "a list as a key": (b"\x80\x02}(]K\x01u.", "is not plain data"),
    "another pickle": (pickle.dumps([1, 2], 2), "is not an object"),
    "another shape": (pickle.dumps({"entries": [{"process_group": 3}]}, 2), "entries.[].collective_seq_id is missing"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_no_flight_record_is_one_line(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, says = HOSTILE[name]
    write(tmp_path, [call(1)], [call(1)])
    path = tmp_path / "nccl_trace_rank_2"
    path.write_bytes(data)
    skipped: list[str] = []
    (incident,) = diagnose([tmp_path], leave_out=skipped.append)["incidents"]
    assert skipped == [f"{path}: {says}"]
    assert incident["culprit_ranks"] == [2], "the other records are read all the same"
    assert capsys.readouterr().out == ""


def test_what_is_read_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_files, "MAX_BYTES", 1 << 20)
    with pytest.raises(Misfit, match="is longer than 1 MB"):
        parse_flight_record(b"\x80\x02" + b" " * (1 << 20))
    assert parse_flight_record(pickle.dumps(nested(MAX_DEPTH - 1), 2)) == nested(MAX_DEPTH - 1)
