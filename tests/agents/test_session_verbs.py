"""The verbs on real agents: what they print, where, and with which exit code."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import supervisor.inventory
from supervisor import known
from supervisor.cli import main
from supervisor.cli.home import KnownJobs
from supervisor.inventory import Inventory
from tests.agents.engine_process import await_death
from tests.agents.test_session_hosts import WAIT_S, Hosts, hosts


class Run:
    """What one command line did."""

    def __init__(self, status: int, out: bytes, err: str) -> None:
        self.status, self.out, self.err = status, out, err

    @property
    def lines(self) -> list[str]:
        return self.out.decode().splitlines()


class Cli:
    """`supervisor …` in this process, on hosts of the test."""

    def __init__(self, made: Hosts, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
        self.made = made
        self._capfd = capfd
        self.inventory = made.inventory()
        monkeypatch.setattr(supervisor.inventory, "load", self._load)
        monkeypatch.chdir(made.work)
        # What other tests have used is not known here.
        monkeypatch.setenv("XDG_STATE_HOME", str(made.root / "state"))

    def _load(self, path: Path) -> Inventory:
        job, folder = self.inventory.job, path.absolute().parent
        if folder != Path.cwd():
            job = dataclasses.replace(job, workdir=folder)
        return dataclasses.replace(self.inventory, words=str(path.absolute()), job=job)

    def __call__(self, *words: str) -> Run:
        self._capfd.readouterr()
        status = main(words)
        sys.stdout.flush()
        out, err = self._capfd.readouterr()
        return Run(status, out.encode(), err)

    def json(self, *words: str) -> Any:
        run = self(*words)
        assert run.status == 0, run.err
        return json.loads(run.out)


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Cli]:
    """One host with two ranks: half as many engines."""
    with hosts(tmp_path, 1) as made:
        cli = Cli(made, monkeypatch, capfd)
        cli.inventory = made.inventory(n1={"nproc_per_node": "2"})
        yield cli


def test_a_run_and_everything_that_reads_it(alone: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUPERVISOR_HOME", "/dev/null/none")  # this machine has no job of its own
    run = alone("up", "h.toml", "--headless", "--job", "job-t", "--env", "NCCL_DEBUG=INFO", "talk.py", "30")
    assert run.status == 0, run.err
    for rank in (0, 1):
        mine = [line for line in run.lines if line.startswith(f"n1:{rank}| ")]
        text = "".join(f"rank {rank} line {i} {'x' * (i % 50)}\n" for i in range(30))
        assert [line for line in mine if " line " in line and "half" not in line and "error" not in line] == [
            f"n1:{rank}| {line}" for line in text.splitlines()
        ]
        assert f"n1:{rank}| rank {rank} half line" in mine
        assert f"n1:{rank}| rank {rank} error line" in mine
    assert "job succeeded" in run.err
    Path("h.toml").touch()
    known = alone("completion", "--line", "logs", "h.toml", "--rank", "").lines
    assert known == ["words", "0\trank", "1\trank"], "as the run has left it"
    _check_readers(alone)
    Path("other").mkdir()
    Path("other/h.toml").touch()
    assert alone("jobs", "other/h.toml").status == 0
    asyncio.run(_check_home(alone))
    for words in (
        ["restart", "h.toml"],
        ["stop", "h.toml", "job-t"],
        ["stacks", "h.toml"],
        ["stacks", "h.toml", "job-t"],
    ):
        refused = alone(*words)
        assert (refused.status, "is over: succeeded" in refused.err) == (1, True), refused.err
    assert alone("clean", "h.toml", "nojob").status == 3
    cleaned = alone("clean", "h.toml")
    assert (cleaned.status, cleaned.lines[0]) == (0, "removed job-t on n1")
    assert alone("completion", "--line", "status", "h.toml", "").lines == ["words"], "nothing is known any more"
    assert alone.json("jobs", "h.toml", "--json")["jobs"] == []


async def _check_home(cli: Cli) -> None:
    home = KnownJobs()
    # The inventory of another directory with the same host was used last.
    assert Path(known.recall()[0].words).parent.name == "other"
    reading = asyncio.create_task(home.run())
    while not any(job.status for job in home.jobs):
        done, _ = await asyncio.wait({reading}, timeout=0.05)
        assert not done, reading.result()
    reading.cancel()
    await asyncio.wait({reading})
    assert [(one.listed["job"], one.status["state"], one.place) for one in home.jobs] == [
        ("job-t", "succeeded", "h.toml")
    ]
    assert home.jobs[0].incident is None
    assert home.asked == (1, 1)
    assert home.troubles == []


def _check_readers(cli: Cli) -> None:
    status = cli.json("status", "h.toml", "--json")
    assert (status["job"], status["state"], status["world_size"]) == ("job-t", "succeeded", 2)
    events = [json.loads(line) for line in cli("events", "h.toml", "job-t", "--json").lines]
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    reported = [event["detail"]["versions"] for event in events if event["type"] == "node_ready"]
    assert reported[0]["torch"]
    assert [job["job"] for job in cli.json("jobs", "h.toml", "--json")["jobs"]] == ["job-t"]
    incidents = cli.json("incidents", "h.toml", "--json")
    assert incidents["incidents"] == []
    assert (incidents["nccl"]["versions"], incidents["nccl"]["nranks"]) == (["2.26.2+cuda12.8"], 2)
    assert cli("logs", "h.toml", "--rank", "1", "--stream", "nccl").lines == [
        "n1:1| h:1:1 [0] NCCL INFO NCCL version 2.26.2+cuda12.8",
        "n1:1| h:1:1 [0] NCCL INFO comm 0 rank 1 nRanks 2",
    ]
    raw = cli("logs", "h.toml", "--raw", "--rank", "1")
    assert raw.out == (cli.made.home("n1") / "jobs/job-t/generation_0/rank_1/stdout.log").read_bytes()
    assert cli("logs", "h.toml", "--raw", "--rank", "7").status == 1
    assert cli("logs", "h.toml", "--rank", "7").status == 1
    assert cli("logs", "h.toml", "--generation", "9").status == 1
    assert len(cli("logs", "h.toml", "--rank", "0", "--stream", "stdout").lines) == 31
    reported = cli("logs", "h.toml", "--node", "n1", "--tail", "2", "--stream", "stderr").lines
    assert sorted(reported) == [f"n1:{rank}| rank {rank} error line" for rank in (0, 1)]
    assert sorted(cli("logs", "h.toml", "--grep", r"line 7\b", "--rank", "0-1").lines) == [
        f"n1:{rank}| rank {rank} line 7 xxxxxxx" for rank in (0, 1)
    ]
    assert len(cli("logs", "h.toml", "-f", "--stream", "stdout").lines) == 62
    assert len(cli("logs", "h.toml", "-f", "--tail", "3").lines) == 3
    assert cli("logs", "h.toml", "--since", "1h", "--grep", "error line").status == 0
    attached = cli("attach", "h.toml", "--headless")
    assert attached.status == 0
    assert "job succeeded" in attached.err
    assert sorted(attached.lines) == sorted(cli("logs", "h.toml").lines), "a finished job ends with its log"


def test_torchruns_options_choose_what_the_console_shows(tmp_path: Path, alone: Cli) -> None:
    words = f"--redirects 3 --tee rank1:2 --event-log-handler console --log-dir {tmp_path}/here".split()
    run = alone("up", "hosts.toml", "--headless", "--job", "job-t", *words, "talk.py", "3")
    assert (run.status, run.lines) == (0, ["n1:1| rank 1 error line"]), run.err
    events = [json.loads(line) for line in run.err.splitlines() if line.startswith("{")]
    assert [event["type"] for event in events][-1] == "job_succeeded"
    for rank in (0, 1):
        linked = tmp_path / "here" / "job-t_n1" / "attempt_0" / str(rank) / "stdout.log"
        assert linked.read_text().startswith(f"rank {rank} line 0")


def test_a_failure_is_reported_last(alone: Cli) -> None:
    run = alone("up", "hosts.toml", "--headless", "--max-restarts", "0", "--job", "job-t", "talk.py", "3", "0", "1")
    assert run.status == 1
    assert "n1:1| ValueError: rank 1 gives up" in run.lines
    tail = run.err[run.err.index("job failed") :]
    assert "incident 1" in tail
    assert "rank 1" in tail
    found = alone.json("incidents", "h.toml", "--json")["incidents"]
    assert [one["culprit_ranks"] for one in found] == [[1]]
    assert alone.json("status", "h.toml", "--json")["state"] == "failed"


def _status_with_nccl(cli: Cli) -> list[str]:
    """Return what `status` prints once the ranks have written NCCL's version, and the agents have read it."""
    end = time.monotonic() + WAIT_S
    while (status := cli("status", "h.toml").lines)[-1] != "nccl: 2.26.2+cuda12.8":
        assert time.monotonic() < end, status
    return status


def test_detach_steer_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    with hosts(tmp_path, 2, min_nodes=1) as made:
        cli = Cli(made, monkeypatch, capfd)
        all_of_them = ("--rdzv-conf", "last_call_timeout=60")
        up = cli("up", "hosts.toml", "--detach", "--job", "job-t", *all_of_them, "talk.py", "100000", "0.05")
        assert (up.status, up.lines) == (0, ["job-t"])
        assert "supervisor attach hosts.toml job-t" in up.err
        refused = cli("restart", "h.toml", "--env", "TOKEN=secret", "--later")
        assert (refused.status, "only NCCL_*, TORCH_* and GLOO_*" in refused.err) == (1, True), refused.err
        later = cli("restart", "h.toml", "--env", "NCCL_DEBUG=INFO", "--later")
        assert later.lines == ["environment set: NCCL_DEBUG=INFO, from generation 1 on"]
        assert not (made.home("n1") / "jobs/job-t/generation_0/rank_0/nccl.log").exists()
        restart = cli("restart", "h.toml", "--env", "NCCL_DEBUG_SUBSYS=INIT")
        assert restart.status == 0
        assert restart.lines[0].startswith("generation 1 running: world size 2, ")
        status = _status_with_nccl(cli)
        assert "set by operators: NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT, since generation 1" in status
        assert cli("cordon", "h.toml", "--node", "n2").lines == [
            "n2 stays until it leaves the group, and is not admitted again"
        ]
        assert cli("uncordon", "h.toml", "--node", "n2").lines == ["n2 may be admitted again"]
        # Python's start is over once it prints; a signal that it does not handle would end it.
        sent = cli("signal", "h.toml", "--rank", "1,7", "CONT")
        assert (sent.status, sent.lines) == (1, ["rank 1: sent", "rank 7: no rank 7 runs in this job"])
        reported = [
            one for one in map(json.loads, cli("events", "h.toml", "--json").lines) if one["type"] == "signal_sent"
        ]
        assert [(one["node"], one["detail"]["ranks"], one["detail"]["signal"]) for one in reported] == [
            ("n2", [1], "SIGCONT")
        ]
        # A script without torch has neither.
        kept = cli("stacks", "h.toml", "--save")
        assert (kept.status, "supervisor stacks` says why" in kept.err) == (1, True)
        planned = cli("remove", "h.toml", "--node", "n2", "--dry-run")
        assert (planned.status, planned.lines[0]) == (0, "World     2 ranks on 2 nodes -> 1 rank on 1 node")
        assert planned.lines[-1].endswith("(from 1 earlier restart)")
        removed = cli.json("remove", "h.toml", "--node", "n2", "--json")
        assert removed["accepted"]
        assert removed["outcome"]["detail"]["world_size"] == 1
        assert cli("remove", "h.toml", "--node", "n2").status == 1
        # One of them is in already: the other one joins all the same.
        added = cli("add", "h.toml", "--node", "n[1-2]")
        assert (added.status, "n1 is already in the group" in added.err) == (1, True)
        assert added.lines[0].startswith("generation 3 running: world size 2")
        again = cli("up", "hosts.toml", "--headless", "--job", "job-t", "talk.py", "1")
        assert again.status == 2
        assert "a job named job-t already exists on n1 n2" in again.err
        assert f"supervisor attach {made.inventory().path} job-t" in again.err
        assert cli.json("status", "h.toml", "--json")["state"] == "running"
        # Where its agent is gone, its files are still those of a job that runs.
        agent = made.agents()["n2/job-t"]
        os.kill(agent, signal.SIGKILL)
        await_death(agent)
        kept = cli("clean", "h.toml")
        assert (kept.status, kept.lines) == (0, ["kept job-t: its agent is still running on n1"])
        assert cli("clean", "h.toml", "job-t").status == 1
        assert (made.home("n2") / "jobs/job-t/generation_0").is_dir()
        assert cli("stop", "h.toml").lines == ["job stopped: an operator stopped the job"]


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (("up", "h.toml", "no.py"), 2, "does not exist"),
        (("up", "h.toml", "--nproc-per-node", "0", "talk.py"), 2, "nproc-per-node"),
        (("status", "h.toml"), 3, "no jobs on"),
        (("stop", "h.toml", "nobody"), 3, "no job named nobody"),
        (("jobs", "h.toml", "x"), 2, "no JOB"),
        (("sttus",), 2, "did you mean `supervisor status`?"),
        (("diagnose", "x"), 2, "no such file or directory"),
        (("remove", "h.toml"), 2, "--node"),
    ],
)
def test_mistakes_are_one_message_and_the_right_status(
    words: tuple[str, ...],
    status: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    with hosts(tmp_path, 1) as made:
        run = Cli(made, monkeypatch, capfd)(*words)
    assert run.status == status, run.err
    assert run.out == b""
    assert message in run.err
    assert "Traceback" not in run.err
    assert run.err.startswith("supervisor: ") or ": " in run.err.splitlines()[0]


PROGRAM = """
import sys
from pathlib import Path
sys.path.insert(0, {repository!r})
import supervisor.inventory
from tests.agents.test_session_hosts import Hosts
from supervisor.inventory import Host, Inventory, JobDefaults
hosts = (Host("n1", "localhost", "127.0.0.1", python=sys.executable, nproc_per_node="2", local=True,
              env={{"SUPERVISOR_HOME": {home!r}}}),)
job = JobDefaults(workdir=Path({work!r}), min_nodes=1, max_nodes=1, stop_grace=600.0)
supervisor.inventory.load = lambda path: Inventory(Path("hosts.toml"), hosts, job)
from supervisor.cli import main
sys.exit(main(sys.argv[1:]))
"""


@contextlib.contextmanager
def _spawn(made: Hosts, repository: Path, *words: str, **streams: Any) -> Iterator[subprocess.Popen[bytes]]:
    """`supervisor …` as a process of its own, which is over after this."""
    program = PROGRAM.format(repository=str(repository), home=str(made.home("n1")), work=str(made.work))
    with subprocess.Popen([sys.executable, "-c", program, *words], cwd=made.work, **streams) as process:
        try:
            yield process
        finally:
            process.kill()


def _wait_for(path: Path, text: bytes) -> None:
    end = time.monotonic() + WAIT_S
    while not path.exists() or text not in path.read_bytes():
        assert time.monotonic() < end, path.read_bytes() if path.exists() else path
        time.sleep(0.05)


STUBBORN = """
import signal, sys, time
if sys.argv[1] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("begun", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(("mode", "presses"), [("kind", 1), ("stubborn", 2)])
def test_ctrl_c_stops_and_a_second_one_kills(mode: str, presses: int, tmp_path: Path, repository: Path) -> None:
    """The second one does not wait for the grace, which is longer than the test."""
    out, err = tmp_path / "out", tmp_path / "err"
    with hosts(tmp_path, 1) as made, out.open("wb") as stdout, err.open("wb") as stderr:
        (made.work / "wait.py").write_text(STUBBORN)
        words = ("up", "h.toml", "--headless", "--job", "j", "wait.py", mode)
        with _spawn(made, repository, *words, stdout=stdout, stderr=stderr) as process:
            _wait_for(out, b"begun")
            _wait_for(err, b"generation running")
            process.send_signal(signal.SIGINT)
            if presses == 2:
                _wait_for(err, b"Ctrl-C again kills")
                _wait_for(err, b"stop requested")
                process.send_signal(signal.SIGINT)
            assert process.wait(WAIT_S) == 130
    assert b"job stopped" in err.read_bytes()
    assert b"Traceback" not in err.read_bytes()


def test_a_closed_terminal_does_not_touch_the_job(tmp_path: Path, repository: Path) -> None:
    err, nothing = tmp_path / "err", subprocess.DEVNULL
    with hosts(tmp_path, 1) as made, err.open("wb") as stderr:
        (made.work / "wait.py").write_text(STUBBORN)
        words = ("up", "h.toml", "--headless", "--job", "j", "wait.py", "kind")
        with _spawn(made, repository, *words, stdout=nothing, stderr=stderr) as process:
            _wait_for(err, b"generation running")
            process.send_signal(signal.SIGHUP)
            assert process.wait(WAIT_S) == -signal.SIGHUP
        assert list(made.agents()) == ["n1/j"]
        with _spawn(made, repository, "status", "h.toml", "--json", stdout=subprocess.PIPE) as process:
            assert json.loads(process.communicate(timeout=WAIT_S)[0])["state"] == "running"
        with _spawn(made, repository, "stop", "h.toml", stdout=nothing) as process:
            assert process.wait(WAIT_S) == 0


def test_a_reader_that_has_enough_ends_the_watch_and_not_the_job(tmp_path: Path, repository: Path) -> None:
    with hosts(tmp_path, 1) as made:
        read, write = os.pipe()
        words = ("up", "h.toml", "--headless", "--job", "j", "talk.py", "100000", "0.01")
        with _spawn(made, repository, *words, stdout=write, stderr=subprocess.PIPE) as process:
            os.close(write)
            assert os.read(read, 10)
            os.close(read)
            _, err = process.communicate(timeout=WAIT_S)
            assert process.returncode == 0
            assert b"stdout is closed; the job keeps running: supervisor attach h.toml j" in err
        assert list(made.agents()) == ["n1/j"]


def test_ctrl_c_once_the_job_is_over_ends_the_writing_of_its_log(tmp_path: Path, repository: Path) -> None:
    lines, err = 400_000, tmp_path / "err"
    with hosts(tmp_path, 1) as made, err.open("wb") as stderr:
        (made.work / "flood.py").write_text(f"for number in range({lines}): print(number, 'x' * 90)\n")
        words = ("up", "h.toml", "--headless", "--job", "j", "flood.py")
        with _spawn(made, repository, *words, stdout=subprocess.PIPE, stderr=stderr) as process:
            # Until then nobody reads, and what is written is more than all buffers hold.
            _wait_for(err, b"job succeeded")
            process.send_signal(signal.SIGINT)
            _wait_for(err, b"the job has ended; the rest of its log stays on the nodes")
            out, _ = process.communicate(timeout=WAIT_S)
        assert process.returncode == 0
        assert 0 < out.count(b"\n") < lines
        assert out.endswith(b"x\n")
        assert b"Traceback" not in err.read_bytes()


def test_no_textual_and_no_torch_without_a_screen(tmp_path: Path, repository: Path) -> None:
    with hosts(tmp_path, 1) as made:
        program = PROGRAM.format(repository=str(repository), home=str(made.home("n1")), work=str(made.work)).replace(
            "sys.exit(main(sys.argv[1:]))",
            "main(sys.argv[1:]); print(sorted({'torch', 'textual', 'rich'} & set(sys.modules)))",
        )
        done = subprocess.run(
            [sys.executable, "-c", program, "jobs", "h.toml"],
            cwd=made.work,
            capture_output=True,
            check=True,
            timeout=WAIT_S,
        )
        assert done.stdout.splitlines()[-1] == b"[]"
