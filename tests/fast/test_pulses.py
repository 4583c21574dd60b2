"""What is read of a rank's stack and flight record: where it waits, and how far it has come."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from remote_agent.agent import member_loop
from remote_agent.engine.inspect.pulse import MAX_FRAMES, ended_part, read_flight, read_source, read_stack
from remote_agent.engine.inspect.stacks import merged_records
from remote_agent.logs.progress import StepReader

TORCH = "/opt/venv/lib/python3.11/site-packages/torch"
C10D = f"{TORCH}/distributed/distributed_c10d.py"
LOGGER = f"{TORCH}/distributed/c10d_logger.py"
DCP = f"{TORCH}/distributed/checkpoint"


def stack(*frames: tuple[str, str]) -> str:
    """A dump of Python's, with another thread first; `frames`: file and function, the innermost one first."""
    lines = "\n".join(f'  File "{file}", line 7 in {name}' for file, name in frames)
    return f'Thread 0x1 (most recent call first):\n  File "/x.py", line 1 in run\n\nThread 0x2:\n{lines}\n'


@pytest.mark.parametrize(
    ("frames", "inside"),
    [
        ([(C10D, "all_reduce"), (LOGGER, "wrapper")], "all_reduce"),
        ([(C10D, "_store_based_barrier"), (C10D, "init_process_group")], "init_process_group"),
        ([(f"{TORCH}/_ops.py", "__call__"), (f"{TORCH}/distributed/_functional_collectives.py", "wait_tensor")],
         "wait_tensor"),
        ([(f"{TORCH}/distributed/pipelining/schedules.py", "_wait_batch_p2p")], "_wait_batch_p2p"),
        ([(C10D, "gather_object"), (f"{DCP}/utils.py", "reduce_scatter"), (f"{DCP}/saver.py", "save")], "save"),
        ([(f"{TORCH}/serialization.py", "_save"), (f"{DCP}/filesystem.py", "_write_item"), (f"{DCP}/saver.py", "save")],
         None),
        ([(f"{DCP}/filesystem.py", "_write_files_from_queue"), (f"{DCP}/saver.py", "save")], None),
        ([(C10D, "_object_to_tensor"), (C10D, "all_gather_object")], None),
        ([(f"{TORCH}/nn/modules/linear.py", "forward"), (f"{TORCH}/distributed/fsdp/api.py", "forward")], None),
        ([("/usr/lib/python3.11/threading.py", "wait"), (C10D, "all_reduce")], None),
        ([], None),
    ],
)  # fmt: skip
def test_saving_packing_or_computing_in_torch_distributed_is_no_wait(
    frames: list[tuple[str, str]], inside: str | None
) -> None:
    assert read_stack(stack(*frames, ("/home/u/train.py", "<module>")))["inside"] == inside


def test_what_the_script_runs_itself_is_shown_from_the_outermost_function_on() -> None:
    own = [("/home/u/model.py", "one"), ("/home/u/train.py", "spin"), ("/home/u/train.py", "<module>")]
    runner = ("<frozen runpy>", "_run_code")
    shown = [["train.py", 7, "<module>"], ["train.py", 7, "spin"], ["model.py", 7, "one"]]
    assert read_stack(stack(*own, runner))["script"] == shown
    assert read_stack(stack((f"{TORCH}/nn/modules/linear.py", "forward"), *own))["script"] == []
    assert len(read_stack(stack(*[own[0]] * 500))["script"]) == MAX_FRAMES


def test_the_lines_around_a_frame_are_read_as_the_rank_sees_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text("".join(f"line {number}  \n" for number in range(1, 12)))
    monkeypatch.chdir(tmp_path)
    frame = read_stack(stack((f"{TORCH}/nn/modules/linear.py", "forward"), ("train.py", "main")))["frame"]
    assert frame == ("train.py", 7)
    assert read_source(os.getpid(), *frame) == {"first": 3, "text": "\n".join(f"line {n}" for n in range(3, 12))}
    assert read_source(os.getpid(), str(tmp_path / "train.py"), 1) == {
        "first": 1,
        "text": "\n".join(f"line {n}" for n in range(1, 6)),
    }
    # The file was replaced by a shorter one, or is no file.
    assert (read_source(os.getpid(), "train.py", 12), read_source(os.getpid(), "<string>", 1)) == (None, None)


THREADING = "/usr/lib/python3.12/threading.py"


@pytest.mark.parametrize(
    ("frames", "over"),
    [
        ([(THREADING, "_shutdown")], True),
        ([(THREADING, "join"), ("/usr/lib/python3.12/concurrent/futures/thread.py", "_python_exit"),
          (THREADING, "_shutdown")], True),
        ([(THREADING, "join"), ("/home/u/train.py", "<module>")], False),
        ([("/home/u/server.py", "_shutdown")], False),
        ([(THREADING, "_shutdown"), ("/home/u/train.py", "<module>")], False),
        ([], False),
    ],
)  # fmt: skip
def test_a_script_is_over_when_only_pythons_shutdown_is_on_its_stack(frames: list[tuple[str, str]], over: bool) -> None:
    assert read_stack(stack(*frames))["over"] is over


def trace_of(name: str, *, message: str, line: int = 3) -> str:
    return (
        f'Traceback (most recent call last):\n  File "/home/u/{name}", line {line}, in <module>\n    x()\n{message}\n'
    )


def test_the_exception_of_a_finished_script_comes_before_that_of_a_thread(tmp_path: Path) -> None:
    thread = "Exception in thread Thread-1 (feed):\n" + trace_of("feed.py", message="KeyError: 7")
    script = trace_of("train.py", message="ValueError: no lr")
    (tmp_path / "stderr.log").write_text(f"start\n{script}{thread}")
    reported = ended_part(tmp_path, is_over=True)
    # A script may print such a text and end well: only the error file tells that it has ended so.
    assert reported is not None
    assert (reported["part"], reported["headline"]) == ("a thread", "KeyError: 7")
    error = {"message": {"message": "ValueError: no lr", "extraInfo": {"py_callstack": script, "timestamp": "1"}}}
    (tmp_path / "error.json").write_text(json.dumps(error))
    reported = ended_part(tmp_path, is_over=True)
    assert reported is not None
    assert {**reported, "age_s": 0} == {
        "part": "the script", "type": "ValueError", "headline": "ValueError: no lr", "place": "train.py:3",
        "traceback": script.rstrip(), "line": 5, "age_s": 0,
    }  # fmt: skip
    # While the script runs, an error file of torch's `record` may tell of an exception that it has caught.
    reported = ended_part(tmp_path, is_over=False)
    assert reported is not None
    assert (reported["part"], reported["line"]) == ("a thread", 10)
    (tmp_path / "stderr.log").write_text("nothing\n")
    reported = ended_part(tmp_path, is_over=True)
    assert reported is not None
    assert (reported["headline"], reported["line"]) == ("ValueError: no lr", None)
    assert ended_part(tmp_path, is_over=False) is None


GONE = ("profiling_name", "time_created_ns")


def entry(number: int, *, retired: bool = True, pg_id: int = 0, backend: str = "gloo") -> dict[str, Any]:
    return {
        "process_group": ["0", "default_pg"], "pg_id": pg_id, "collective_seq_id": number, "retired": retired,
        "time_created_ns": 10**9, "profiling_name": f"{backend}:all_reduce", "state": "scheduled",
    }  # fmt: skip


def read(*entries: dict[str, Any]) -> Any:
    return flight(*entries)["0"]


def flight(*entries: dict[str, Any]) -> dict[str, Any]:
    return read_flight(merged_records([json.dumps({"entries": entries}).encode()]), 2 * 10**9)


def test_a_group_that_is_created_again_counts_from_the_start() -> None:
    old = [entry(number, retired=number < 9) for number in range(1, 10)]
    assert read(*old)["seq"] == 9
    again = read(*old, entry(1, pg_id=1), entry(2, pg_id=1))
    assert (again["last"], again.get("seq"), again["came"]["first"]) == (2, None, 1)
    # Two backends of one group count each for itself.
    both = flight(entry(3), entry(9, pg_id=1, backend="nccl", retired=False), entry(4))
    assert (both["0"]["last"], both["0"].get("seq"), both["0"]["came"]["first"]) == (4, None, 3)
    assert (both["0/nccl"]["last"], both["0/nccl"]["seq"], both["0/nccl"]["came"]["first"]) == (9, 9, 9)


def test_a_flight_record_entry_without_a_name_or_a_time_still_counts() -> None:
    bare = [{key: value for key, value in entry(7, retired=False).items() if key != gone} for gone in GONE]
    seen = [read(entry(6), one) for one in bare]
    assert [(one["last"], one["seq"], one["op"], one["age_s"]) for one in seen] == [
        (7, 7, "collective", 1.0),
        (7, 7, "all_reduce", 0.0),
    ]
    assert [one["came"]["first"] for one in seen] == [6, 6]


@pytest.mark.parametrize(
    "changes", [{"collective_seq_id": 1e400}, {"process_group": []}, {"timeout_ms": "10"}, {"time_created_ns": [1]}]
)
def test_a_flight_record_of_another_format_is_left_out(changes: dict[str, Any]) -> None:
    assert flight(entry(6), {**entry(7), **changes}) == {}


def test_a_pulse_has_the_last_step_that_its_rank_printed() -> None:
    reader = StepReader()
    reader.feed("stdout", b"[100/500] loss: 0.5\n", 1)
    seen = {3: {"step": reader.step, **reader.figures.values()}}
    found = member_loop.with_steps(seen, {"3": {"t": 1.0}, "4": {"t": 1.0}})
    assert found == {"3": {"t": 1.0, "step": [None, 0.5]}, "4": {"t": 1.0, "step": None}}
