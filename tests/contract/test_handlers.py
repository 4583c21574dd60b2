"""`torchrun --rdzv-backend supervisor`: unmodified torchruns that somebody else starts, steered by our coordinator."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from remote_agent.base.proc import stat_fields
from remote_agent.coordinator.journal import read_records
from remote_agent.engine.launchers.inside_torchrun import HandlerEngine, Handover
from tests.agents.engine_process import alive, order
from tests.cluster.job import Job
from tests.ports import reserved_port
from tests.preloaded import Preloaded, Process, Program, decoded

WAIT_S = 60.0
KEY = "a secret that all nodes have"
STEPS = """
import os, time
print("place", os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
assert "SUPERVISOR_RDZV_KEY" not in os.environ
while True:
    time.sleep(0.05)
"""


class Torchruns:
    """Torchruns of one job on this machine, each with an address and a home of its own."""

    def __init__(self, server: Program, root: Path, port: int, script: str, *options: str) -> None:
        self.server = server
        self.port = port
        self.root = root
        self.options = options
        self.running: dict[int, Process] = {}
        (root / "train.py").write_text(script)

    def start(self, number: int, *options: str, key: str | None = KEY, fresh: bool = False) -> None:
        """Start a node's torchrun; a `fresh` one is a process as from the command line."""
        # torch never removes the directory of logs that it makes for itself.
        env = {**os.environ, "SUPERVISOR_HOME": str(self.home(number)), "TMPDIR": str(self.root)}
        env.update({} if key is None else {"SUPERVISOR_RDZV_KEY": key})
        words = ["--rdzv-backend", "supervisor", "--rdzv-endpoint", f"127.0.0.1:{self.port}", "--rdzv-id", "job"]
        words += ["--local-addr", f"127.0.0.{number}", *self.options, *options, "train.py"]
        server = Program(self.server.module) if fresh else self.server
        with self.out(number).open("ab") as out:
            self.running[number] = server.start(words, self.root, out=out, err=out, environment=env)

    def home(self, number: int) -> Path:
        return self.root / f"home{number}"

    def out(self, number: int) -> Path:
        return self.root / f"{number}.out"

    def files(self, number: int) -> Path:
        return self.home(number) / "jobs" / "job"

    def node(self, number: int) -> str:
        return str(json.loads((self.files(number) / "node.json").read_text())["node"])

    def events(self, number: int) -> list[Any]:
        return read_records(self.files(number) / "events.jsonl")

    def until(self, number: int, kind: str, **match: Any) -> Any:
        """Return the first such event in a node's journal; waits for it."""

        def look() -> Any | None:
            found = (one for one in self.events(number) if one["type"] == kind)
            return next((one for one in found if match.items() <= one.items()), None)

        found: Any = self.wait_for(look, f"{kind} {match}")
        return found

    def wait_for(self, look: Callable[[], Any], what: str) -> Any:
        """Return what `look` finds; other processes' files tell nobody that they have changed."""
        end = time.monotonic() + WAIT_S
        while not (found := look()):
            if time.monotonic() > end:
                said = "\n".join(f"{path.name}: {path.read_text()[-2000:]}" for path in self.root.glob("*.out"))
                raise AssertionError(f"no {what}: {said}")
            time.sleep(0.05)
        return found

    def running_with(self, number: int, generation: int, world: int) -> dict[str, int]:
        """Wait for a generation of that size; returns the pids of its ranks."""
        detail = self.until(number, "generation_running", generation=generation)["detail"]
        assert detail["world_size"] == world
        pids: dict[str, int] = detail["pids"]
        return pids

    def running_world(self, number: int) -> int:
        """Return the world size of a node's newest group, if that runs."""
        groups = [one for one in self.events(number) if one["type"] in ("generation_started", "generation_running")]
        return int(groups[-1]["detail"]["world_size"]) if groups[-1]["type"] == "generation_running" else 0

    def ask(self, number: int, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a verb on a node's machine."""
        env = {**os.environ, "SUPERVISOR_HOME": str(self.home(number))}
        return decoded(Job.supervisor.run(words, self.root, timeout=WAIT_S, environment=env))

    def supervisor(self, number: int, *words: str) -> str:
        """Run a verb that must succeed; returns what it prints."""
        done = self.ask(number, *words)
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout

    def wait(self, number: int) -> int:
        """Return a torchrun's exit code."""
        try:
            return self.running[number].wait(WAIT_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(self.out(number).read_text()[-3000:]) from None

    def agent(self, number: int) -> int:
        return int((self.files(number) / "agent.pid").read_text().split()[0])


@pytest.fixture(scope="module")
def server() -> Iterator[Preloaded]:
    with contextlib.closing(Preloaded("torch.distributed.run")) as made:
        yield made


@contextlib.contextmanager
def torchruns(server: Preloaded, root: Path, script: str, *options: str) -> Iterator[Torchruns]:
    """Torchruns that end with the test, and with them all that is theirs."""
    with reserved_port(host="") as port:
        made = Torchruns(server, root, port, script, *options)
        try:
            yield made
        finally:
            for process in made.running.values():
                process.kill()
                process.wait()


def test_the_plugin_is_registered() -> None:
    (found,) = {one.value for one in entry_points(group="torchrun.handlers") if one.name == "supervisor"}
    assert found == "supervisor.handlers:handler", "the package was installed before it had the plugin: make .venv anew"


# Rank 0 is done before rank 1 fails: torchrun alone could not start it again. Then rank 1 lets the other one wait.
ONE_FAILS = """
import os, time
rank, again = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"]
# In one piece: torch puts a rank's name before each that it reads.
print(f"place {rank} {os.environ['WORLD_SIZE']} {again}", flush=True)
if again == "0" and rank == 0:
    os.mkfifo("pid")
    open("pid", "w").write(str(os.getpid()))
elif again == "0":
    while not os.path.exists("pid"):
        time.sleep(0.05)
    pid = open("pid").read()
    while open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.05)
    raise ValueError("boom")
else:
    import torch.distributed as dist
    dist.init_process_group("gloo")
    if rank == 1:
        open("go").read()
    dist.barrier()
    dist.destroy_process_group()
"""


def test_a_worker_fails_and_all_start_again_even_who_was_done(server: Preloaded, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "go")
    options = ("--nnodes", "2", "--max-restarts", "1", "--rdzv-conf", "hang_after=1.5")
    with torchruns(server, tmp_path, ONE_FAILS, *options) as job:
        job.start(1)
        job.until(1, "node_ready")
        job.start(2, "--redirects", "3", "--log-dir", str(tmp_path / "theirs"))
        hang = job.until(1, "incident", generation=1)["detail"]
        assert (hang["category"], hang["culprit_ranks"]) == ("hang_no_output", [1]), hang
        (tmp_path / "go").write_text("")
        assert (job.wait(1), job.wait(2)) == (0, 0), job.out(1).read_text() + job.out(2).read_text()
        incident = job.until(2, "incident")["detail"]
        assert incident["culprit_ranks"] == [1]
        assert "boom" in incident["summary"]
        masters = [one["detail"]["master"] for one in job.events(1) if one["type"] == "generation_started"]
        assert len(set(masters)) == 2
        # The console has what torchrun would show; our files have it too, and what its options ask for.
        assert "[default0]:place 0 2 1" in job.out(1).read_text()
        assert (job.files(1) / "generation_1/rank_0/stdout.log").read_text() == "place 0 2 1\n"
        assert "place" not in job.out(2).read_text()
        assert (job.files(2) / "generation_0/rank_1/stdout.log").read_text() == "place 1 2 0\n"
        (kept,) = (tmp_path / "theirs").glob("job_*/attempt_0/0/error.json")
        assert "boom" in kept.read_text()
        assert not any(alive(job.agent(number)) for number in (1, 2))
        # The same id again is another run: what is there of the first one is kept aside.
        assert '"succeeded"' in job.supervisor(1, "status", "job", "--json")


def test_nodes_come_and_go_and_coordinators_die(server: Preloaded, tmp_path: Path) -> None:
    options = ("--nnodes", "2:3", "--nproc-per-node", "2", "--max-restarts", "0", "--rdzv-conf", "node_timeout=5")
    with torchruns(server, tmp_path, STEPS, *options) as job:
        nodes_come_and_go_on_command_and_by_themselves(job)
        coordinators_die_and_come_back_with_nothing_or_with_all(job)
        job.supervisor(3, "stop", "job")
        assert [job.wait(number) for number in (1, 2, 3)] == [4, 4, 4]


def nodes_come_and_go_on_command_and_by_themselves(job: Torchruns) -> None:
    job.start(1)
    job.until(1, "node_ready")
    job.start(2)
    job.running_with(1, 0, 4)
    # What workers print is there at once, and stays when torchrun is killed.
    job.wait_for(lambda: "[default0]:place" in job.out(1).read_text(), "line of a worker")
    job.start(3)
    job.running_with(3, 1, 6)
    job.supervisor(3, "restart", "job", "--env", "NCCL_DEBUG=INFO")
    pids = job.running_with(3, 2, 6)
    victim, agent = job.running[3], job.agent(3)
    mine = [pid for pid in pids.values() if int(stat_fields(pid)[1]) == victim.pid]
    assert len(mine) == 2
    environ = Path(f"/proc/{mine[0]}/environ").read_bytes().split(b"\0")
    assert b"NCCL_DEBUG=INFO" in environ
    assert any(one.startswith(b"NCCL_DEBUG_FILE=") for one in environ)
    victim.kill()
    victim.wait()
    job.running_with(1, 3, 4)
    job.wait_for(lambda: not any(alive(pid) for pid in [agent, *mine]), "end of what the dead torchrun left")
    job.start(3)
    job.running_with(1, 4, 6)
    job.supervisor(3, "remove", "job", "--node", job.node(2))
    assert job.wait(2) == 0
    job.running_with(3, 5, 4)
    job.start(2)
    added = ("add", "job", "--node", job.node(2))
    job.wait_for(lambda: job.ask(3, *added).returncode == 0, "torchrun that was started again")
    job.running_with(2, 6, 6)


def coordinators_die_and_come_back_with_nothing_or_with_all(job: Torchruns) -> None:
    job.running[1].kill()
    job.running[1].wait()
    job.running_with(2, 7, 4)
    shutil.rmtree(job.home(1))
    job.start(1)
    job.running_with(2, 8, 6)
    (new,) = {job.until(number, "coordinator_changed")["node"] for number in (1, 2, 3)}
    assert new in (job.node(2), job.node(3))
    # A torchrun that is told to end takes its workers along, and the others go on.
    job.running[1].terminate()
    assert job.wait(1) == 1
    job.running_with(2, 9, 4)
    os.kill(job.agent(2), signal.SIGKILL)
    assert job.wait(2) == 1
    assert "the agent ended" in job.out(2).read_text()
    job.running[3].kill()
    job.running[3].wait()
    job.start(1, "--rdzv-conf", "node_timeout=5,join_timeout=3")
    assert job.wait(1) == 1
    said = job.out(1).read_text()
    assert "job: waiting for " in said
    assert "lost: 3 s (join_timeout) of waiting for " in said
    # All die and come back: they find each other, and the job goes on.
    for number in (1, 2, 3):
        job.start(number)
    job.wait_for(lambda: job.running_world(3) == 6, "group of all")


async def test_a_start_that_is_cancelled_leaves_torchruns_other_children_alone(tmp_path: Path) -> None:
    handover = Handover()
    engine = HandlerEngine("job", handover)
    with subprocess.Popen(["sleep", "60"]) as other:
        try:
            starting = asyncio.ensure_future(engine._go(order(tmp_path, "train.py")))
            work = await asyncio.to_thread(handover.take)
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            assert work.pids.cancelled()
            assert other.poll() is None
        finally:
            other.kill()


def test_a_job_that_fails_ends_torchrun_with_the_verdict(server: Preloaded, tmp_path: Path) -> None:
    script = "import os\nprint('hello', flush=True)\nraise ValueError(f\"no budget {os.environ['RANK']}\")"
    with torchruns(server, tmp_path, script, "--nnodes", "1", "--max-restarts", "0") as job:
        job.start(1, key=None, fresh=True)
        assert job.wait(1) == 1
        assert re.search(r"supervisor: job job: failed: .*rank 0 .*no budget 0", job.out(1).read_text())
        assert (job.home(1) / "rdzv.key").stat().st_mode & 0o777 == 0o600
        # A new run of the same name keeps the old one aside.
        job.start(1, key=None)
        assert job.wait(1) == 1
        assert (job.home(1) / "jobs/job.1/generation_0/rank_0/stdout.log").read_text() == "hello\n"


@contextlib.contextmanager
def watching(job: Torchruns, number: int) -> Iterator[Iterator[str]]:
    """What a headless supervisor on a node's machine says."""
    env = {**os.environ, "SUPERVISOR_HOME": str(job.home(number))}
    command = [sys.executable, "-m", "supervisor", "attach", "job", "--headless", "--read-only"]
    with subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            yield iter(process.stderr)
        finally:
            process.kill()


def test_who_does_not_know_the_secret_stays_out_and_says_so(server: Preloaded, tmp_path: Path) -> None:
    with torchruns(server, tmp_path, STEPS, "--nnodes", "2") as job:
        job.start(1)
        job.until(1, "node_ready")
        job.start(2, key="not the secret of this job")
        job.wait_for(lambda: "another key or another --rdzv-id" in job.out(2).read_text(), "refusal")
        assert [one["node"] for one in job.events(1) if one["type"] == "node_joined"] == [job.node(1)]
        needed = f"waiting for nodes: 2 are needed, connected: {job.node(1)}"
        job.wait_for(lambda: needed in job.out(1).read_text(), "number of nodes")
        # Verbs take the host's name where one node has it.
        host = job.node(1).rpartition("-")[0]
        assert f"{job.node(1)} holds the coordinator" in job.ask(1, "remove", "job", "--node", host).stderr
        with watching(job, 2) as said:
            assert "waiting for nodes" in next(line for line in said if "waiting" in line)
        job.supervisor(2, "stop", "job")
        assert job.wait(2) == 4
