"""What a node reads: its damaged journal, and flight records of another torch."""

from __future__ import annotations

import json
from pathlib import Path

from remote_agent.coordinator import replay
from remote_agent.coordinator.journal import public, read_records
from remote_agent.coordinator.status import document, history
from remote_agent.diagnose.incidents import incidents_in
from remote_agent.engine.inspect.pulse import read_flight
from remote_agent.engine.inspect.stacks import merged_records
from remote_agent.wire import JobSpec, NodeSpec
from supervisor.wording.events import event_line, outcome_line
from supervisor.wording.incidents import incident_lines
from supervisor.wording.status import status_lines
from tests.fuzz import damages, seeds
from tests.fuzz.driver import fuzz


def test_journals(tmp_path: Path) -> None:
    """What a node reads of its journal gives a status, a history and a state to take over, for people too."""
    path = tmp_path / "events.jsonl"
    spec = JobSpec(job="a", script="t.py", nodes=(NodeSpec("n1", "10.0.0.1"), NodeSpec("n2", "10.0.0.2")))

    def run(data: bytes) -> None:
        path.write_bytes(data)
        records = read_records(path)
        status = document(replay.fold(spec, records), {}, None)
        list(history(spec, records))
        document(replay.take_over(spec, "n1", 9, records, 100.0), {}, "n1")
        shown = [*status_lines(status), *map(event_line, records), *map(outcome_line, records)]
        shown += [line for incident in incidents_in(records) for line in incident_lines(incident)]
        "\n".join(shown).encode()
        json.dumps([status, *map(public, records)], allow_nan=False)

    fuzz(run, seeds.journals(), damages.of_json_lines)


def test_flight_records() -> None:
    entries = [
        {
            "process_group": [str(number % 2), "default_pg"], "pg_id": number % 2, "collective_seq_id": 1 + number // 2,
            "retired": number < 4, "time_created_ns": seeds.T_NS + number, "profiling_name": "gloo:all_reduce",
            "state": "scheduled", "timeout_ms": 600000, "input_sizes": [[8]], "input_dtypes": ["Float"],
        }
        for number in range(8)
    ]  # fmt: skip
    record = {"version": "2.9", "entries": entries, "pg_config": {"0": {"name": "0", "desc": "x", "ranks": "[0, 1]"}}}

    def run(data: bytes) -> None:
        json.dumps(read_flight(merged_records([data]), seeds.T_NS + 10**9), allow_nan=False)

    fuzz(run, [json.dumps(record).encode()], damages.of_json)
