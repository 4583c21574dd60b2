"""Damaged logs, journals, error files and flight records: `diagnose` and a node read what they can."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

from remote_agent.coordinator import replay
from remote_agent.coordinator import status as coordinator_status
from remote_agent.coordinator.journal import public, read_records
from remote_agent.diagnose.incidents import incidents_in
from remote_agent.engine.inspect.pulse import read_flight
from remote_agent.engine.inspect.stacks import merged_records
from remote_agent.wire import JobSpec, NodeSpec
from supervisor.cli.diagnose import lines_of
from supervisor.errors import UsageError
from supervisor.postmortem.diagnosis import diagnose
from supervisor.wording.events import event_line, outcome_line
from supervisor.wording.incidents import incident_text
from supervisor.wording.status import status_lines
from tests.fast.test_flight import HOSTILE, call, document, done
from tests.fuzz import damages, seeds
from tests.fuzz.driver import fuzz


def show(paths: list[Path]) -> list[str]:
    """Diagnose, and print the result as text and as JSON; return what could not be read."""
    skipped: list[str] = []
    document: Any = diagnose(paths, leave_out=skipped.append)
    "\n".join([*lines_of(document), *skipped]).encode()
    json.dumps(document, allow_nan=False).encode()
    return skipped


def test_text(tmp_path: Path) -> None:
    log = tmp_path / "job.log"

    def run(data: bytes) -> None:
        log.write_bytes(data)
        show([log])

    texts = seeds.logs()
    fuzz(run, texts, damages.mixed(texts), (UsageError,))


def test_directories(tmp_path: Path) -> None:
    """The input is several files, each after a line `--- path`: logs, journals, error files."""
    root = tmp_path / "logs"

    def run(data: bytes) -> None:
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir()
        for part in data.split(b"--- ")[1:]:
            name, _, text = part.partition(b"\n")
            parts = [re.sub(r"[^\w.-]", "_", part)[:80] for part in name.decode("utf-8", "replace").split("/")]
            path = root.joinpath(*(part for part in parts[-6:] if part.strip(".")))
            if path != root and not path.exists() and not any(above.is_file() for above in path.parents):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(text)
        show([root])

    real = seeds.directories()
    mixed = damages.mixed([*real, *seeds.journals()])
    fuzz(run, real, lambda dice, data: dice.choice((mixed, damages.of_json_lines))(dice, data), (UsageError,))


def test_flight_records(tmp_path: Path) -> None:
    """Pickles are damaged as bytes, and JSON, too; the other ranks' records are whole. A node reads them as well."""
    path = tmp_path / "nccl_trace_rank_2"
    for rank in (0, 1):
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(document(done(1), call(2)), 2))

    def run(data: bytes) -> None:
        path.write_bytes(data)
        show([tmp_path])
        json.dumps(read_flight(merged_records([data]), seeds.T_NS), allow_nan=False)

    parted = document(done(1), call(2, "broadcast", 3, 5), call(1, group="1"))
    real = [pickle.dumps(parted, protocol) for protocol in (2, 4)]
    whole, mixed = json.dumps(parted).encode(), damages.mixed(real)
    fuzz(
        run,
        [*real, whole, *(data for data, _ in HOSTILE.values())],
        lambda dice, data: (damages.of_json if data == whole else mixed)(dice, data),
    )


def test_journals_of_a_node(tmp_path: Path) -> None:
    """What a node reads of its journal gives a status and a state to take over, for people too."""
    path = tmp_path / "events.jsonl"
    spec = JobSpec(job="a", script="t.py", nodes=(NodeSpec("n1", "10.0.0.1"), NodeSpec("n2", "10.0.0.2")))

    def run(data: bytes) -> None:
        path.write_bytes(data)
        records = read_records(path)
        status = coordinator_status.document(replay.fold(spec, records), {}, None)
        coordinator_status.document(replay.take_over(spec, "n1", 9, records, 100.0), {}, "n1")
        shown = [*status_lines(status), *map(event_line, records), *map(outcome_line, records)]
        shown += [line for incident in incidents_in(records) for line in incident_text(incident)]
        "\n".join(shown).encode()
        json.dumps([status, *map(public, records)], allow_nan=False)

    fuzz(run, seeds.journals(), damages.of_json_lines)
