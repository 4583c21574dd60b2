"""A job on the cluster, driven through the command line only, as a user would.

In: a Cluster, a script, `[job]` keys. Out: `Job`: the running `up`, the verbs, the journal.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

from tests.cluster import Cluster
from tests.preloaded import Process, Program

WAIT_S = 120.0
# The hosts' files are this machine's: to look there takes no process.
POLL_S = 0.05
STEP = re.compile(rb"\bstep=(\d+)")


def until(look: Callable[[], Any], what: str, timeout_s: float = WAIT_S) -> Any:
    """Return the first true answer: what other processes do, and nothing announces."""
    end = time.monotonic() + timeout_s
    while not (found := look()):
        assert time.monotonic() < end, f"not within {timeout_s:g} s: {what}"
        time.sleep(POLL_S)
    return found


def journal(cluster: Cluster, node: str, job: str) -> list[dict[str, Any]]:
    """Return a node's own journal, from its disk."""
    path = cluster.host(node).home / ".supervisor" / "jobs" / job / "events.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def tail(path: Path) -> bytes:
    """Return the end of a file, some lines of it."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 4096))
        return file.read()


class Job:
    """`supervisor up --headless` in a process of its own, and the verbs beside it."""

    supervisor: ClassVar[Program] = Program("supervisor")
    """What starts these processes: the tests of `tests/contract` fork them."""

    def __init__(self, cluster: Cluster, work: Path, script: str, *arguments: str, **job: object) -> None:
        self.cluster = cluster
        self.work = work
        work.mkdir(parents=True, exist_ok=True)
        (work / "train.py").write_text(script)
        # Loading modules a second time on each host of each job costs more than the tests themselves.
        keys: dict[str, Any] = {"nproc_per_node": 2, "stop_grace": 3.0, "standby": "off", **job}
        self.inventory = cluster.inventory(work / "hosts.toml", **keys)
        self.arguments = arguments
        self.out = work.parent / f"{work.name}.out"
        self.err = work.parent / f"{work.name}.err"
        self.name: list[str] = []
        """The job's name as the verbs take it; empty: they find it."""
        self.up: Process | None = None

    def start(self, *options: str) -> Job:
        """Launch; returns at once."""
        if "--rdzv-backend" not in options and "--rdzv-conf" not in options:
            # The first group has all hosts, however long a loaded machine takes to import torch.
            options = (*options, "--rdzv-conf", f"last_call_timeout={WAIT_S:g}")
        given = next((options[options.index(word) + 1] for word in ("--job", "--rdzv-id") if word in options), "")
        job = given or secrets.token_hex(4)
        words = self.words("up", *options, *([] if given else ["--job", job]), "train.py", *self.arguments)
        self.name = [job]
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.up = self.supervisor.start(words, self.work, out=out, err=err)
        return self

    def words(self, verb: str, *options: str) -> list[str]:
        """Return the words of a verb on this inventory."""
        headless = ["--headless"] if verb == "up" and "--detach" not in options else []
        return [verb, str(self.inventory), *self.name, *headless, *options]

    def command(self, verb: str, *options: str) -> list[str]:
        """Return the command line of a verb on this inventory."""
        return [sys.executable, "-m", "supervisor", *self.words(verb, *options)]

    def wait(self, timeout_s: float = WAIT_S) -> int:
        """Return the exit code of `up`."""
        assert self.up is not None
        try:
            return self.up.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"up did not end: {self.errors()[-3000:]}") from None

    def run(self, verb: str, *options: str, timeout_s: float = WAIT_S) -> subprocess.CompletedProcess[bytes]:
        """Run one verb to its end."""
        return self.supervisor.run(self.words(verb, *options), self.work, timeout=timeout_s)

    def ask(self, verb: str, *options: str) -> Any:
        """Return a verb's JSON; it must exit with 0."""
        done = self.run(verb, *options, "--json")
        assert done.returncode == 0, (verb, done.returncode, done.stderr.decode()[-3000:])
        return json.loads(done.stdout)

    def journal(self) -> list[dict[str, Any]]:
        """Return the journal of the node that knows most, from its disk."""
        return max((journal(self.cluster, host.name, self.name[0]) for host in self.cluster.hosts), key=len)

    def until(self, kind: str, timeout_s: float = WAIT_S, **match: Any) -> dict[str, Any]:
        """Return the first event of that type with these values; waits for it."""

        def look() -> dict[str, Any] | None:
            wanted = {"type": kind, **match}.items()
            return next((event for event in self.journal() if wanted <= event.items()), None)

        found: dict[str, Any] = self._until(look, f"{kind} {match}", timeout_s)
        return found

    def until_step(self, step: int, timeout_s: float = WAIT_S) -> None:
        """Wait until every rank of the newest group that runs has printed that step."""
        self._until(lambda: self._steps(step), f"step {step}", timeout_s)

    def _steps(self, step: int) -> bool:
        running = [event for event in self.journal() if event["type"] == "generation_running"]
        if not running:
            return False
        place = f".supervisor/jobs/{self.name[0]}/generation_{running[-1]['generation']}/rank_*/stdout.log"
        reported = [STEP.findall(tail(path)) for host in self.cluster.hosts for path in host.home.glob(place)]
        made = [steps for steps in reported if steps and int(steps[-1]) >= step]
        return len(made) == int(running[-1]["detail"]["world_size"])

    def _until(self, look: Callable[[], Any], what: str, timeout_s: float) -> Any:
        end = time.monotonic() + timeout_s
        while not (found := look()):
            assert time.monotonic() < end, f"no {what} within {timeout_s:g} s: {self.errors()[-3000:]}"
            time.sleep(POLL_S)
        return found

    def watch(self, *words: str, fits: Callable[[dict[str, Any]], bool], timeout_s: float = WAIT_S) -> dict[str, Any]:
        """Follow a verb's JSON lines until one fits; the job is there."""
        out, out_end = os.pipe()
        with open(out, "rb") as lines, open(os.devnull, "wb") as nothing:
            with open(out_end, "wb") as written:
                process = self.supervisor.start(self.words(*words, "--json"), self.work, out=written, err=nothing)
            alarm = threading.Timer(timeout_s, process.kill)
            alarm.start()
            try:
                for line in lines:
                    found: dict[str, Any] = json.loads(line)
                    if fits(found):
                        return found
            finally:
                alarm.cancel()
                alarm.join()
                process.kill()
                process.wait()
        raise AssertionError(f"{words}: not what is waited for within {timeout_s:g} s: {self.errors()[-3000:]}")

    @staticmethod
    def ranks(status: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
        """Return the ranks of a status document, each with its node's name."""
        return {rank["rank"]: {**rank, "node": node["name"]} for node in status["nodes"] for rank in node["ranks"]}

    def pid(self, rank: int) -> int:
        """Return a rank's pid in the newest group; the hosts share this machine's pid space."""
        running = [event for event in self.journal() if event["type"] == "generation_running"]
        return int(running[-1]["detail"]["pids"][str(rank)])

    def files(self, generation: int, rank: int) -> Path:
        """Return where what a rank has written lies, on its node."""
        place = f".supervisor/jobs/{self.name[0]}/generation_{generation}/rank_{rank}"
        (found,) = (host.home / place for host in self.cluster.hosts if (host.home / place).exists())
        return found

    def finish(self) -> None:
        """Let the script end: it looks for a file."""
        for host in self.cluster.hosts:
            for tree in (host.home / ".supervisor" / "trees").glob(f"{self.work.name}-*"):
                (tree / "over").touch()

    def errors(self) -> str:
        """Return what `up` has written to stderr."""
        return self.err.read_text(errors="replace") if self.err.exists() else ""

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End `up`; what runs on the hosts ends with the cluster."""
        if self.up is not None and self.up.poll() is None:
            self.up.kill()
            self.up.wait(10)
