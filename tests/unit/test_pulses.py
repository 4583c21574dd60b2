"""What is read of a rank's stack and flight record: where it waits, and how far it has come."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

from remote_agent import heartbeat
from remote_agent.engine_pulse import read_flight, read_stack
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
def test_who_saves_packs_or_computes_in_torch_distributed_does_not_wait(
    frames: list[tuple[str, str]], inside: str | None
) -> None:
    assert read_stack(stack(*frames, ("/home/u/train.py", "<module>")))["inside"] == inside


GONE = ("profiling_name", "time_created_ns")


def entry(number: int, *, retired: bool = True, pg_id: int = 0, backend: str = "gloo") -> dict[str, Any]:
    return {
        "process_group": ["0", "default_pg"], "pg_id": pg_id, "collective_seq_id": number, "retired": retired,
        "time_created_ns": 10**9, "profiling_name": f"{backend}:all_reduce", "state": "scheduled",
    }  # fmt: skip


def read(*entries: dict[str, Any]) -> dict[str, Any]:
    return read_flight(json.dumps({"entries": entries}).encode(), 2 * 10**9)["0"]


def test_a_group_that_is_destroyed_and_made_again_begins_to_count_anew() -> None:
    old = [entry(number, retired=number < 9) for number in range(1, 10)]
    assert read(*old)["seq"] == 9
    again = read(*old, entry(1, pg_id=1), entry(2, pg_id=1))
    assert (again["last"], again.get("seq"), again["came"]["first"]) == (2, None, 1)
    # Two backends of one group count each for itself.
    both = read(entry(3), entry(9, pg_id=1, backend="nccl", retired=False), entry(4))
    assert (both["last"], both["seq"], both["came"]["first"]) == (9, 9, 3)


def test_an_entry_without_a_name_or_a_time_counts_for_what_it_tells() -> None:
    bare = [{key: value for key, value in entry(7, retired=False).items() if key != gone} for gone in GONE]
    seen = [read(entry(6), one) for one in bare]
    assert [(one["last"], one["seq"], one["op"], one["age_s"]) for one in seen] == [
        (7, 7, "collective", 1.0),
        (7, 7, "all_reduce", 0.0),
    ]
    assert [one["came"]["first"] for one in seen] == [6, 6]


def test_a_pulse_tells_what_its_rank_has_printed_last() -> None:
    reader = StepReader()
    reader.feed("stdout", b"[100/500] loss: 0.5\n", 1)
    seen = {3: {"step": reader.step, **reader.figures.told()}}
    follower = SimpleNamespace(generation=2, agent=SimpleNamespace(logs=SimpleNamespace(progress={2: seen}.get)))
    found = heartbeat.with_steps(cast("Any", follower), {"3": {"t": 1.0}, "4": {"t": 1.0}})
    assert found == {"3": {"t": 1.0, "step": [None, 0.5]}, "4": {"t": 1.0, "step": None}}
