"""Recordings as `supervisor record` writes them, made of the documents of tests/screens/data.

In: the name of a document. Out: a file.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

from remote_agent.wire.status_diff import changes
from supervisor.recording import file_format
from tests.screens.recorded import RecordedSession, load

LETTERS = {"error": "E", "warn": "W", None: "I"}
HELLO = {"python": "3.11.7", "cpu_count": 8, "executable": "/opt/venv/bin/python", "version": "0.1.0"}
TORCH = {"torch": "2.7.0+cu128", "cuda": "12.8", "nccl": "2.26.2", "gpus": 2}
NCCL: Any = {"versions": ["2.26.2+cuda12.8"], "networks": ["Socket"], "nranks": 8, "warnings": []}


def statuses_of(session: RecordedSession) -> list[Any]:
    """A job that comes up, runs, and ends as the document tells."""
    times = {event["type"]: file_format.read_time(event["time"]) for event in session.events}
    well = {"state": "running", "exit_code": None, "signal": None}
    nodes = [
        {**node, "state": "running", "ranks": [{**rank, **well} for rank in node["ranks"]]}
        for node in session.status["nodes"]
    ]
    doing = {"state": "running", "condition": "running", "incident": None, "failure": None}
    running = {**session.status, **doing, "nodes": nodes}
    moments = [("job_started", {**running, "state": "starting"}), ("generation_running", running)]
    last_ns = max(times.values())
    reported: list[Any] = []
    before: Any = {}
    for t_ns, status in [*((times[kind], status) for kind, status in moments), (last_ns, session.status)]:
        reported.append({"t_ns": t_ns, "whole": not reported, "changes": changes(before, status)})
        before = status
    return reported


def lines_of(session: RecordedSession) -> dict[file_format.NodeStream, list[file_format.Line]]:
    """All lines of a document."""
    return {
        file: [
            file_format.Line(at, at * 80, line.t_ns, LETTERS[line.level], line.text) for at, line in enumerate(lines)
        ]
        for file, lines in session.files.items()
    }


def write(
    path: Path,
    name: str = "failed_4x2",
    *,
    session: RecordedSession | None = None,
    logs: dict[file_format.NodeStream, list[file_format.Line]] | None = None,
    events: list[Any] | None = None,
    statuses: list[Any] | None = None,
    **meta: Any,
) -> Path:
    """Write a recording; `session`, `logs`, `events`, `statuses`: not those of the document; `meta`: of itself."""
    session = session or load(name)
    session.events = events or session.events
    events = [
        {**event, "detail": session.incidents[0]} if event["type"] == "incident" else event for event in session.events
    ]
    reported = statuses or statuses_of(session)
    about = {
        "format": file_format.FORMAT, "version": file_format.VERSION, "job": session.job,
        "supervisor": "0.1.0", "nccl": NCCL,
        "end_ns": reported[-1]["t_ns"],
        "hosts": [
            {"name": host.name, "state": "up", "step": "ready", "text": "", "error": None, "hint": "",
             "hello": {**HELLO, "python": "3.12.1"} if host.name == "n4" else HELLO, "engine": TORCH}
            for host in session.hosts.values()
        ],
        **meta,
    }  # fmt: skip
    index = []
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr(file_format.META, file_format.json_line(about))
        file.writestr(file_format.EVENTS, b"".join(map(file_format.json_line, events)))
        file.writestr(file_format.STATUSES, b"".join(map(file_format.json_line, reported)))
        for number, ((node, generation, rank, stream), rows) in enumerate((logs or lines_of(session)).items()):
            file.writestr(f"logs/{number}", b"".join(map(file_format.line_json, rows)))
            index.append(
                {"node": node, "generation": generation, "rank": rank, "stream": stream, "size": len(rows) * 80,
                 "lines": len(rows), "begin_ns": rows[0].t_ns, "member": f"logs/{number}", "error": None}
            )  # fmt: skip
        file.writestr(file_format.LOGS, b"".join(map(file_format.json_line, index)))
    return path
