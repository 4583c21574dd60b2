"""Commands and web servers are told what happens, once, and hold nothing up; Prometheus reads the status."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from remote_agent.agent.hooks import LONGEST_QUEUE, Hooks
from remote_agent.agent.metrics import render
from remote_agent.wire import Hook, JobSpec
from tests.agents.engine_process import alive
from tests.agents.nodes import WAIT_S, Nodes
from tests.agents.test_agent import LIGHT, wait_gone
from tests.fast.journals import event
from tests.ports import reserved_port

SECRET = "s3cret"
WRITE = "cat >> heard; echo >> heard; echo $SUPERVISOR_JOB $SUPERVISOR_EVENT $SUPERVISOR_SUMMARY >> env"


class Web(ThreadingHTTPServer):
    """A web server that answers with what it is given, and 200 after that."""

    def __init__(self, *answers: int) -> None:
        super().__init__(("127.0.0.1", 0), Listener)
        self.answers = list(answers)
        self.heard: list[Any] = []
        self.url = f"http://127.0.0.1:{self.server_port}/{SECRET}"


class Listener(BaseHTTPRequestHandler):
    server: Web

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.heard.append(json.loads(body))
        self.send_response(self.server.answers.pop(0) if self.server.answers else 200)
        self.send_header("Location", "/elsewhere")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@contextlib.contextmanager
def web(*answers: int) -> Iterator[Web]:
    with Web(*answers) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def get(port: int, path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=WAIT_S) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return str(answer.read().decode())


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


async def until_lines(path: Path, count: int) -> list[str]:
    end = time.monotonic() + WAIT_S
    while len(found := [one["event"] for one in lines(path)]) < count:
        assert time.monotonic() < end, found
        await asyncio.sleep(0.05)
    return found


async def test_a_job_reports_to_its_hooks_and_prometheus(tmp_path: Path) -> None:
    everything = ("failure", "hang", "recovery", "end")
    slow = f": {SECRET}; tr '\\0' ' ' < /proc/$$/cmdline > argv; sleep 1000 & echo $! > pid; wait"

    def check_journal(nodes: Nodes, heard: list[tuple[str, str]]) -> None:
        written = lines(nodes.work / "heard")
        assert [one["event"] for one in written] == ["failure", "recovery", "end"]
        assert "told to fail" in written[0]["summary"]
        first = (nodes.work / "env").read_text().splitlines()[0]
        assert first == f"job-test failure {written[0]['summary']}"
        # Twice, as it answered 500 to the first.
        assert heard == [("failure", "incident"), ("failure", "incident"), ("end", "job_succeeded")]
        assert not alive(int((nodes.work / "pid").read_text()))
        argv = (nodes.work / "argv").read_text()
        assert "supervisor hook 3 of job-test" in argv
        job = nodes.journal("n1").parent
        for text in (argv, nodes.journal("n1").read_text(), (job / "agent.log").read_text()):
            assert SECRET not in text
        outcomes = [one["detail"] for one in lines(nodes.journal("n1")) if one["type"].startswith("hook_")]
        assert sorted((one["hook"], one["event"]) for one in outcomes) == [
            (1, "end"), (1, "failure"), (1, "recovery"), (2, "end"), (2, "failure"), (3, "end"),
        ]  # fmt: skip
        (failed,) = (one for one in outcomes if "reason" in one)
        assert failed["reason"] == "hook 3 (end): the command took more than 6 s and was killed"

    with web(500) as server, reserved_port() as port:
        hooks = (
            Hook(everything, command=WRITE),
            Hook(("failure", "end"), url=server.url),
            Hook(("end",), command=slow, timeout=6.0, retries=0),
        )
        async with Nodes(tmp_path, 1, LIGHT, hooks=hooks, metrics_port=port) as nodes:
            await nodes.launch()
            await nodes.until("generation_running")
            text = await asyncio.to_thread(get, port)
            assert 'supervisor_job_state{job="job-test",state="running"} 1\n' in text
            assert 'supervisor_ranks{job="job-test",state="running"} 1\n' in text
            with pytest.raises(urllib.error.HTTPError, match="404"):
                await asyncio.to_thread(get, port, "/")
            (nodes.work / "fail_0_0").touch()
            await nodes.until("incident_healed", generation=1)
            agent = (await nodes.call("n1", "status"))["nodes"][0]["agent_pid"]
            (nodes.work / "stop").touch()
            # Who looks on is not held up by a hook that hangs.
            seen = [event async for event in nodes.events("n1")]
            assert not [one for one in seen if one["type"] == "hook_failed"]
            await nodes.nodes["n1"].close()
            await wait_gone([agent])
            check_journal(nodes, [(one["event"], one["record"]["type"]) for one in server.heard])


def test_the_next_coordinator_sends_unsent_reports(tmp_path: Path) -> None:
    async def check(port: int) -> None:
        hooks = (Hook(("failure", "recovery", "end"), command=WRITE),)
        async with Nodes(tmp_path, 2, LIGHT, hooks=hooks, min_nodes=1, metrics_port=port) as nodes:
            await nodes.launch()
            taken = (await nodes.until("metrics_failed"))["detail"]
            assert taken["reason"] == f"no metrics on port {port} of 127.0.0.1: Address already in use"
            await nodes.until("generation_running")
            (nodes.work / "fail_0_1").touch()
            first = await nodes.until("hook_delivered", "n2")
            await nodes.until("hook_delivered", "n2", since=first["seq"])
            await nodes.call("n2", "remove", {"node": "n1"})
            await nodes.until("generation_running", "n2", generation=2)
            (nodes.work / "stop").touch()
            assert await until_lines(nodes.work / "heard", 3) == ["failure", "recovery", "end"]

    with socket.create_server(("127.0.0.1", 0)) as busy:
        asyncio.run(check(busy.getsockname()[1]))


class Desk:
    """Hooks with a journal, without a job."""

    def __init__(self, cwd: Path, *hooks: Hook) -> None:
        self.journal: list[Any] = []
        self.reported = asyncio.Event()
        self.hooks = Hooks(JobSpec("job", "x.py", (), hooks=hooks), str(cwd), self.record)

    def record(self, kind: str, **detail: Any) -> None:
        self.journal.append(event(len(self.journal) + 1, {"type": kind, "detail": detail}))
        self.hooks.receive(self.journal[-1])

    @property
    def failed(self) -> list[tuple[int, str]]:
        return [(one["detail"]["of"], one["detail"]["reason"]) for one in self.journal if one["type"] == "hook_failed"]


async def test_a_hook_that_hangs_has_its_time_after_the_end_and_no_more(tmp_path: Path) -> None:
    desk = Desk(tmp_path, Hook(("failure", "end"), command="echo $$ >> pids; sleep 1000", timeout=0.3, retries=20))
    desk.hooks.start([])
    desk.record("incident", summary="it failed")
    desk.record("job_failed", reason="it failed")
    begun = time.monotonic()
    await desk.hooks.finish()
    assert time.monotonic() - begun < 60.0
    left = "the job ended before it was delivered"
    assert desk.failed == [(1, f"hook 1 (failure): {left}"), (2, f"hook 1 (end): {left}")]
    assert not [pid for pid in (tmp_path / "pids").read_text().split() if alive(int(pid))]


async def test_a_report_that_the_journal_has_is_not_sent_again(tmp_path: Path) -> None:
    hook = Hook(("failure", "hang", "recovery"), command=WRITE)
    desk = Desk(tmp_path, hook)
    desk.record("incident", summary="a hang", ongoing=True)
    desk.record("hang_over", reason="it goes on")
    desk.record("hook_delivered", hook=1, event="hang", of=1)
    desk.record("generation_running", world_size=4)
    desk.record("incident", summary="rank 1 lost its connections", preliminary=True)
    desk.record("incident", summary="rank 0 failed")
    new = Desk(tmp_path, hook)
    new.journal = desk.journal
    new.hooks.start(new.journal)
    await new.hooks.finish()
    assert [(one["event"], one["summary"]) for one in lines(tmp_path / "heard")] == [
        ("recovery", "it goes on"),
        ("failure", "rank 0 failed"),
    ]
    assert new.failed == []
    await new.hooks.close()


async def test_a_failed_hook_says_why_and_not_where(tmp_path: Path) -> None:
    with web(302) as server, reserved_port() as silent:
        hooks = (
            Hook(("end",), url=f"http://127.0.0.1:{silent}/{SECRET}", retries=0),
            Hook(("end",), url=server.url, retries=0),
            Hook(("end",), command=f"exit 7 # {SECRET}", retries=0),
            Hook(("end",), command="kill -9 $$", retries=0),
        )
        desk = Desk(tmp_path, *hooks)
        desk.hooks.start([])
        desk.record("job_succeeded")
        await desk.hooks.finish()
        assert sorted(reason for _, reason in desk.failed) == [
            "hook 1 (end): 127.0.0.1: Connection refused",
            "hook 2 (end): 127.0.0.1: answered 302",
            "hook 3 (end): the command exited with 7",
            "hook 4 (end): the command was killed by signal 9",
        ]
        assert SECRET not in repr(hooks)
        await desk.hooks.close()


async def test_a_queue_is_bounded(tmp_path: Path) -> None:
    desk = Desk(tmp_path, Hook(("failure",), command="exit 0"))
    for _ in range(LONGEST_QUEUE + 1):
        desk.record("incident", summary="again")
    assert desk.failed == [(LONGEST_QUEUE + 1, "hook 1 (failure): 64 events are already waiting for this hook")]


def test_the_metrics_of_what_is_used() -> None:
    gpu = {"index": 1, "use": 98, "temp": 66, "power": 627.31, "mem_used": 10, "clock": 1980, "ecc": 0, "xid": None}
    vitals = {"age_s": 8.9, "every_s": 3.0, "cpu": 43.4, "mem_used": 5, "net_in": None, "gpus": [gpu]}
    progress = {"loss": "nan", "rate": 96021.0, "unit": "tok/s", "steps_s": 2.5, "lag": 0}
    rank = {"rank": 3, "state": "running", "step": 1, "last_output_age_s": 1, "progress": progress}
    node = {"name": "n1", "state": "running", "ranks": [{**rank, "vitals": {"cpu": 150.0, "rss": 7}}], "vitals": vitals}
    status: Any = {"job": "j", "state": "running", "generation": 0, "restarts": 0, "nodes": [node], "phases": {}}
    status["condition"] = "running"
    reported = {line for line in render(status).splitlines() if "node=" in line and "last_output" not in line}
    own, at = 'job="j",node="n1"', 'job="j",rank="3",node="n1"'
    assert reported == {
        f"supervisor_node_cpu_ratio{{{own}}} 0.434",
        f"supervisor_node_memory_used_bytes{{{own}}} 5",
        f'supervisor_gpu_use_ratio{{{own},gpu="1"}} 0.98',
        f'supervisor_gpu_memory_used_bytes{{{own},gpu="1"}} 10',
        f'supervisor_gpu_temperature_celsius{{{own},gpu="1"}} 66',
        f'supervisor_gpu_power_watts{{{own},gpu="1"}} 627.31',
        f'supervisor_gpu_sm_clock_hertz{{{own},gpu="1"}} 1980000000',
        f'supervisor_gpu_ecc_errors{{{own},gpu="1"}} 0',
        f"supervisor_rank_step{{{at}}} 1",
        f"supervisor_rank_cpu_ratio{{{at}}} 1.5",
        f"supervisor_rank_resident_bytes{{{at}}} 7",
        f"supervisor_rank_loss{{{at}}} NaN",
        f'supervisor_rank_throughput{{{at},unit="tok/s"}} 96021.0',
        f"supervisor_rank_steps_per_second{{{at}}} 2.5",
        f"supervisor_rank_lag_steps{{{at}}} 0",
    }
    vitals["age_s"] = 9.1
    old = render(status)
    assert "node_cpu_ratio{" not in old, "too old to be told"
    assert "rank_resident_bytes{" not in old
    assert "rank_loss{" in old


def test_the_metrics_of_a_status() -> None:
    rank = {"rank": 3, "state": "silent", "step": 120, "last_output_age_s": 61.5}
    new = {"rank": 4, "state": "running", "step": None, "last_output_age_s": None}
    status: Any = {
        "job": 'a"b\\', "state": "running", "generation": 2, "restarts": 1,
        "condition": "hung", "phases": {"stop": 210.0, "imports": 3104.2},
        "nodes": [
            {"name": "n1", "state": "running", "ranks": [rank, new]}, {"name": "n2", "state": "lost", "ranks": []},
        ],
    }  # fmt: skip
    text = render(status)
    samples = [line for line in text.splitlines() if not line.startswith("#")]
    shape = re.compile(r'supervisor_\w+\{(?:\w+="(?:[^"\\\n]|\\.)*",?)+\} -?[0-9.]+')
    assert all(shape.fullmatch(line) for line in samples), samples
    job = r'job="a\"b\\"'
    for name, value in (
        (f"generation{{{job}}}", 2),
        (f"restarts_total{{{job}}}", 1),
        (f'nodes{{{job},state="lost"}}', 1),
        (f'ranks{{{job},state="silent"}}', 1),
        (f'rank_step{{{job},rank="3",node="n1"}}', 120),
        (f'rank_last_output_seconds{{{job},rank="3",node="n1"}}', 61.5),
        (f"hang{{{job}}}", 1),
        (f'phase_seconds{{{job},phase="stop"}}', 0.21),
        (f'phase_seconds{{{job},phase="imports"}}', 3.1042),
    ):
        assert f"supervisor_{name} {value}" in samples
    assert not [line for line in samples if 'rank="4"' in line]
    over = render(status | {"condition": "running"})
    assert f"supervisor_hang{{{job}}} 0\n" in over
