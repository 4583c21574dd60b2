"""A job on the cluster, driven through the command line only, as a user would.

In: a Cluster, a script, `[job]` keys. Out: `Job`: the running `up`, the verbs, the journal.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.cluster import Cluster

WAIT_S = 120.0
POLL_S = 0.5


class Job:
    """`supervisor up --headless` in a process of its own, and the verbs beside it."""

    def __init__(self, cluster: Cluster, work: Path, script: str, *arguments: str, **job: object) -> None:
        self.cluster = cluster
        self.work = work
        work.mkdir(parents=True, exist_ok=True)
        (work / "train.py").write_text(script)
        keys: dict[str, Any] = {"nproc_per_node": 2, "stop_grace": 3.0, **job}
        self.inventory = cluster.inventory(work / "hosts.toml", **keys)
        self.arguments = arguments
        self.out = work.parent / f"{work.name}.out"
        self.err = work.parent / f"{work.name}.err"
        self.name: list[str] = []
        """The job's name as the verbs take it; empty: they find it."""
        self.up: subprocess.Popen[bytes] | None = None

    def start(self, *options: str) -> Job:
        """Launch; returns at once."""
        if "--rdzv-backend" not in options and "--rdzv-conf" not in options:
            # The first group has all hosts, however long a loaded machine takes to import torch.
            options = (*options, "--rdzv-conf", f"last_call_timeout={WAIT_S:g}")
        command = self.command("up", *options, "train.py", *self.arguments)
        self.name = [options[options.index("--job") + 1]] if "--job" in options else []
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.up = subprocess.Popen(
                command, cwd=self.work, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
            )
        return self

    def command(self, verb: str, *options: str) -> list[str]:
        """Return the command line of a verb on this inventory."""
        headless = ["--headless"] if verb == "up" and "--detach" not in options else []
        return [sys.executable, "-m", "supervisor", verb, str(self.inventory), *self.name, *headless, *options]

    def wait(self, timeout_s: float = WAIT_S) -> int:
        """Return the exit status of `up`."""
        assert self.up is not None
        try:
            return self.up.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"up did not end: {self.errors()[-3000:]}") from None

    def run(self, verb: str, *options: str, timeout_s: float = WAIT_S) -> subprocess.CompletedProcess[bytes]:
        """Run one verb to its end."""
        command = self.command(verb, *options)
        return subprocess.run(command, cwd=self.work, capture_output=True, timeout=timeout_s, check=False)

    def ask(self, verb: str, *options: str) -> Any:
        """Return a verb's JSON; it must exit with 0."""
        done = self.run(verb, *options, "--json")
        assert done.returncode == 0, (verb, done.returncode, done.stderr.decode()[-3000:])
        return json.loads(done.stdout)

    def events(self) -> list[dict[str, Any]]:
        """Return the journal."""
        done = self.run("events", "--json")
        assert done.returncode == 0, done.stderr.decode()
        return [json.loads(line) for line in done.stdout.splitlines()]

    def until(self, kind: str, timeout_s: float = WAIT_S, **match: Any) -> dict[str, Any]:
        """Return the first event of that type with these values; waits for it."""

        def fits(event: dict[str, Any]) -> bool:
            return bool(event["type"] == kind) and all(event[key] == value for key, value in match.items())

        return self._watch(["events", "-f", "--json"], fits, f"{kind} {match}", timeout_s)

    def until_step(self, step: int, timeout_s: float = WAIT_S) -> dict[str, Any]:
        """Return the first status in which every rank has made that step."""

        def fits(status: dict[str, Any]) -> bool:
            ranks = self.ranks(status)
            return bool(ranks) and all((rank["step"] or 0) >= step for rank in ranks.values())

        return self._watch(["status", "--watch", "--json"], fits, f"step {step}", timeout_s)

    def _watch(
        self, verb: list[str], fits: Callable[[dict[str, Any]], bool], what: str, timeout_s: float
    ) -> dict[str, Any]:
        """Follow a verb's JSON lines until one fits; a job that is not there yet is asked for again."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            with subprocess.Popen(
                self.command(*verb), cwd=self.work, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            ) as process:
                alarm = threading.Timer(max(0.0, end - time.monotonic()), process.kill)
                alarm.start()
                try:
                    for line in process.stdout or ():
                        found: dict[str, Any] = json.loads(line)
                        if fits(found):
                            return found
                finally:
                    alarm.cancel()
                    process.kill()
            time.sleep(POLL_S)
        raise AssertionError(f"no {what} within {timeout_s:g} s: {self.errors()[-3000:]}")

    @staticmethod
    def ranks(status: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
        """Return the ranks of a status document, each with its node's name."""
        return {rank["rank"]: {**rank, "node": node["name"]} for node in status["nodes"] for rank in node["ranks"]}

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
            os.kill(self.up.pid, signal.SIGKILL)
            self.up.wait(10)
