"""`diagnose` on damaged logs, journals and error files: it reads what it can and says what it cannot."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

from supervisor.cli.diagnose import lines_of
from supervisor.errors import UsageError
from supervisor.postmortem.diagnosis import diagnose
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
            if path == root:
                continue
            if not path.exists() and not any(above.is_file() for above in path.parents):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(text)
        show([root])

    real = seeds.directories()
    fuzz(run, real, damages.mixed([*real, *seeds.journals()]), (UsageError,))


def job_in(root: Path) -> Path:
    """Write the logs of a job of two generations."""
    for generation in range(2):
        for rank in range(3):
            folder = root / f"generation_{generation}" / f"rank_{rank}"
            folder.mkdir(parents=True)
            (folder / "stderr.log").write_text(seeds.TRACE if rank == 1 else "starting\n")
    return root


def test_journals(tmp_path: Path) -> None:
    job = job_in(tmp_path / "jobs" / "train-a1")

    def run(data: bytes) -> None:
        (job / "events.jsonl").write_bytes(data)
        show([job])

    fuzz(run, seeds.journals(), damages.of_json_lines)


def test_error_files(tmp_path: Path) -> None:
    job = job_in(tmp_path / "jobs" / "train-a1")
    extra = {"py_callstack": seeds.TRACE, "timestamp": "1795169001"}
    real: list[Any] = [
        {"message": {"message": "ValueError: 7 classes, 6 labels", "extraInfo": extra}},
        {"message": "RuntimeError: closed\n by peer", "timestamp": 1795169001},
        {"message": {"message": {"message": "x"}, "errorCode": 1, "extraInfo": extra}},
    ]

    def run(data: bytes) -> None:
        (job / "generation_0" / "rank_0" / "error.json").write_bytes(data)
        show([job])

    fuzz(run, [json.dumps(document).encode() for document in real], damages.of_json)


def test_flight_records(tmp_path: Path) -> None:
    """Pickles are damaged as bytes, and JSON, too; the other ranks' records are whole."""
    path = tmp_path / "nccl_trace_rank_2"
    for rank in (0, 1):
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(document(done(1), call(2)), 2))

    def run(data: bytes) -> None:
        path.write_bytes(data)
        show([tmp_path])

    parted = document(done(1), call(2, "broadcast", 3, 5), call(1, group="1"))
    real = [pickle.dumps(parted, protocol) for protocol in (2, 4)]
    fuzz(run, [*real, json.dumps(parted).encode(), *(data for data, _ in HOSTILE.values())], damages.mixed(real))
