"""`make gpu`: failures of NCCL and CUDA on one GPU, and whether supervisor names them; exit 0 if all are right.

    python -m tests.gpu [--save DIRECTORY] [-j JOBS] [WAY …]

Two embedded SSH hosts of two ranks each; all ranks share GPU 0. Without a GPU the ways that need none run over gloo,
and the others are named as left out. With --save, what the commands printed is kept for each way.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import datetime
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from supervisor.cli.demo import DemoHosts, hosts_in_thread
from tests.bench.report import Table
from tests.versions import served

HERE = Path(__file__).parent
HAS_GPU = torch.cuda.is_available()
HANG_AFTER_S = 10.0
# Whether torch records the collectives of the backend that the job uses.
HAS_RECORD = HAS_GPU or "fr_trace_json" in served()
# What an incident may take longer than `hang_after`; longer where stacks alone tell that ranks wait.
MORE_S = 3.0 if HAS_RECORD else 15.0
# If every rank waits, the network may be slow: three times `hang_after`.
ALL_WAIT_TIMES = 3
WAIT_S = 60.0
RANKS = 4
OTHERS = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_DEBUG": "INFO"}


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to fail, and the right answer."""

    victim: int
    at: int
    says: tuple[str, ...]
    """Parts of the incident's summary or evidence, of which one suffices; empty: there must be no incident."""
    culprits: tuple[int, ...]
    hangs: float = 0.0
    """How many times `hang_after` the group may stand still before that is reported; 0: it does not hang."""
    needs_gpu: bool = False
    steps: int = 100_000


WAYS = {
    "healthy": Way(9, 0, (), (), steps=120),
    "slow": Way(2, 0, (), ()),
    "sleep": Way(2, 20, ("idle at train.py",), (2,), 1),
    # NCCL may notice that the sizes of a collective differ.
    "desync": Way(2, 20, ("called broadcast", "message truncated"), (2,), 1),
    # Over gloo, ranks whose sizes differ abort.
    "shape": Way(2, 20, ("with 4096 elements [4096]",), (2,), 1, needs_gpu=True),
    "early": Way(2, 20, ("exited with code 0",), (2,), 1),
    "spin": Way(2, 20, ("all 4 ranks reached all_reduce",), (), ALL_WAIT_TIMES, needs_gpu=True),
    "exception": Way(3, 20, ("ValueError: bad sample in shard 7",), (3,)),
    "memory": Way(2, 20, ("CUDA out of memory",), (2,), needs_gpu=True),
    "assert": Way(1, 20, ("device-side assert",), (1,), needs_gpu=True),
    "access": Way(3, 20, ("illegal memory access",), (3,), needs_gpu=True),
    "duplicate": Way(9, 0, ("two ranks use the same GPU",), (0, 1, 2, 3), needs_gpu=True),
}


class Run:
    """One job on two embedded hosts."""

    def __init__(self, name: str, root: Path, hosts: DemoHosts, save: Path | None) -> None:
        self._fault = ALIKE.get(name, name)
        self.way = WAYS.get(self._fault, Way(9, 0, (), ()))
        self._name, self.root, self._save = name, root, save
        self._notes = root / "notes"
        self._notes.mkdir()
        (root / "work").mkdir()
        shutil.copy(HERE / "job.py", root / "work/train.py")
        job = {
            "workdir": str(root / "work"), "nproc_per_node": RANKS // 2, "min_nodes": 1, "stop_grace": 3.0,
            "max_restarts": 3 if name == "kill" else 0, "hang_after": HANG_AFTER_S,
            "env": {**OTHERS, "GPU_NOTES": str(self._notes)},
        }  # fmt: skip
        self._hosts_toml = hosts.inventory(root / "hosts.toml", sys.executable, job)

    def ask(self, *words: str) -> Any:
        """Return what a command answers as JSON."""
        text = self._command(*words, "--json").stdout
        if self._save is not None:
            (self._save / self._name).mkdir(exist_ok=True)
            (self._save / self._name / f"{words[0]}.json").write_text(text)
        documents = [json.loads(line) for line in text.splitlines()]
        return documents if words[0] == "events" else documents[0] if documents else {}

    def _command(self, *words: str) -> subprocess.CompletedProcess[str]:
        verb, *more = words
        return command([verb, str(self._hosts_toml), *more], self.root)

    @contextlib.contextmanager
    def running(self) -> Iterator[subprocess.Popen[bytes]]:
        """Run the job; it is stopped at the end."""
        words = [self._fault, str(self.way.victim), str(self.way.at), str(self.way.steps)]
        script = str(self.root / "work/train.py")
        with (self.root / "up.out").open("wb") as out:
            up = subprocess.Popen(
                [sys.executable, "-m", "supervisor", "up", str(self._hosts_toml), "--headless", script, *words],
                stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=at_home(self.root),
            )  # fmt: skip
            try:
                yield up
            finally:
                if up.poll() is None:
                    self._command("stop", "--kill")
                with contextlib.suppress(subprocess.TimeoutExpired):
                    up.wait(WAIT_S)
                up.kill()
                up.wait()
                if self._save is not None:
                    self._keep(self._save / self._name)

    def _keep(self, target: Path) -> None:
        """Copy what `up` printed and the nodes' files of the job."""
        target.mkdir(exist_ok=True)
        shutil.copy(self.root / "up.out", target)
        for path in self.root.glob("hosts/*/.supervisor/jobs/*/**/*"):
            if path.suffix in (".log", ".json", ".jsonl", ".txt") and path.is_file():
                shutil.copy(path, target / "_".join(path.relative_to(self.root / "hosts").parts))

    def notes(self, what: str) -> list[dict[str, Any]]:
        """Return what the ranks have noted, by time."""
        return notes_in(self._notes, what)


def at_home(home: Path) -> dict[str, str]:
    return {**os.environ, "HOME": str(home)}


def command(words: list[str], home: Path) -> subprocess.CompletedProcess[str]:
    """Run `supervisor` with these words."""
    return subprocess.run(
        [sys.executable, "-m", "supervisor", *words],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=WAIT_S, check=False, env=at_home(home),
    )  # fmt: skip


def notes_in(directory: Path, what: str) -> list[dict[str, Any]]:
    """Return the ranks' notes of one kind, by time."""
    rows = [
        json.loads(line) for path in directory.iterdir() for line in path.read_text().splitlines() if line[-1:] == "}"
    ]
    return sorted((row for row in rows if row["what"] == what), key=lambda row: row["t"])


def until(fits: Callable[[], Any], within_s: float) -> Any:
    """Return the first true answer, or the last one."""
    end = time.monotonic() + within_s
    while not (found := fits()) and time.monotonic() < end:
        time.sleep(0.1)
    return found


def incidents(run: Run) -> list[dict[str, Any]]:
    return list(run.ask("incidents").get("incidents", []))


def judge(name: str, run: Run) -> tuple[bool, str]:
    """Run one way; returns whether the answer was right, and what it was."""
    way = run.way
    with run.running() as up:
        if way.hangs:
            until(lambda: len(run.notes("step")) >= RANKS * way.at, WAIT_S)
            found = until(lambda: incidents(run), way.hangs * HANG_AFTER_S + WAIT_S)
            stood_s = reported_at(run) - run.notes("step")[-1]["t"]
            said = f"{found[0]['summary']} (after {stood_s:.1f} s)" if found else "no incident"
            is_in_time = stood_s <= way.hangs * HANG_AFTER_S + MORE_S
            return bool(found) and is_in_time and fits(way, found[0]), said
        if name == "slow":
            warned = until(lambda: slow_ranks(run), 2 * WAIT_S)
            return [rank for rank, _ in warned] == [2], "; ".join(text for _, text in warned) or "no warning"
        up.wait(2 * WAIT_S)
        found = incidents(run)
        if not way.says:
            warned = slow_ranks(run)
            said = "; ".join([one["summary"] for one in found] + [text for _, text in warned])
            return not found and not warned and up.returncode == 0, said or "nothing, and the job succeeded"
        return bool(found) and fits(way, found[0]), found[0]["summary"] if found else "no incident"


def fits(way: Way, incident: dict[str, Any]) -> bool:
    text = " ".join([incident["summary"], *(line["text"] for line in incident["evidence"])])
    return any(part in text for part in way.says) and tuple(incident["culprit_ranks"]) == way.culprits


def slow_ranks(run: Run) -> list[tuple[int, str]]:
    """Return the ranks that were called slow, with the text."""
    return [(one["rank"], one["detail"]["message"]) for one in run.ask("events") if one["type"] == "slow"]


def reported_at(run: Run) -> float:
    """Return when the first incident was reported, now if there is none."""
    times = [one["time"] for one in run.ask("events") if one["type"] == "incident"]
    return datetime.datetime.fromisoformat(times[0].replace("Z", "+00:00")).timestamp() if times else time.time()


def kill_to_step(run: Run) -> tuple[bool, str]:
    """Kill a rank of a job whose waiting processes are ready; returns the seconds until every rank's next step."""
    with run.running():

        def is_ready() -> bool:
            nodes = run.ask("status").get("nodes", [])
            return bool(nodes) and all((one.get("standby") or {}).get("state") == "ready" for one in nodes)

        if not until(is_ready, WAIT_S):
            return False, "the waiting processes were not ready"
        waiting = {one["standby"]["pid"] for one in run.ask("status")["nodes"]}
        held = sorted(waiting & gpu_pids())
        seconds = killed(run.notes)
    ratio = f", torchrun {other:.1f} s" if (other := torchrun()) is not None else ", torchrun did not come back"
    held_text = f"; waiting processes hold GPU memory: {held}" if held else ""
    return seconds is not None and not held, f"{seconds or 0:.1f} s{ratio}{held_text}"


def killed(notes: Callable[[str], list[dict[str, Any]]]) -> float | None:
    """Kill rank 1 and return the seconds until every rank's next step."""
    until(lambda: len(notes("step")) > 100, WAIT_S)
    victim = [row for row in notes("begun") if row["rank"] == 1][-1]["pid"]
    begin = time.time()
    os.kill(victim, signal.SIGKILL)

    def firsts() -> dict[int, float] | None:
        first = {row["rank"]: row["t"] for row in reversed(notes("step")) if row["restarts"] == 1}
        return first if len(first) == RANKS else None

    first = until(firsts, WAIT_S)
    return max(first.values()) - begin if first else None


def torchrun() -> float | None:
    """Return the same seconds under torchrun on this machine."""
    with tempfile.TemporaryDirectory(prefix="supervisor-gpu-") as folder:
        notes = Path(folder) / "notes"
        notes.mkdir()
        process = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS),
             "--max-restarts", "3", str(HERE / "job.py"), "kill", "9", "0", "100000"],
            env={**os.environ, **OTHERS, "GPU_NOTES": str(notes)}, start_new_session=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            return killed(lambda what: notes_in(notes, what))
        finally:
            process.kill()
            process.wait()
            # Each rank has a session of its own.
            for row in notes_in(notes, "begun"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(row["pid"], signal.SIGKILL)


def gpu_pids() -> set[int]:
    """Return the processes that hold memory of a GPU."""
    text = nvidia_smi("--query-compute-apps=pid")
    return {int(line) for line in text.splitlines() if line.strip().isdigit()}


def nvidia_smi(query: str) -> str:
    if not HAS_GPU:
        return ""
    words = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    return subprocess.run(words, capture_output=True, text=True, timeout=WAIT_S, check=False).stdout.strip()


def stacks(run: Run) -> tuple[bool, str]:
    """Ask a job with an idle rank for its stacks; returns whether they show where that rank is."""
    with run.running():
        until(lambda: len(run.notes("step")) >= RANKS * run.way.at, WAIT_S)
        found = run.ask("stacks")["stacks"]
    where = [rank for rank, text in found.items() if "in load_batch" in text]
    return where == [str(run.way.victim)], f"of ranks {', '.join(sorted(found))}; in load_batch: {', '.join(where)}"


def diagnose(run: Run) -> tuple[bool, str]:
    """Read the files of a job that failed; returns whether they say what the incident said."""
    with run.running() as up:
        up.wait(2 * WAIT_S)
        incident = incidents(run)[0]
    folders = sorted(str(path) for path in run.root.glob("hosts/*/.supervisor/jobs/*"))
    found = json.loads(command(["diagnose", *folders, "--json"], run.root).stdout)
    said = [[one["summary"], one["culprit_ranks"]] for one in found["incidents"]]
    return said == [[incident["summary"], [run.way.victim]]], "; ".join(text for text, _ in said)


def gpu_facts(run: Run) -> tuple[bool, str]:
    """Compare what `status` says of the GPU with nvidia-smi."""

    def gpus() -> list[Any]:
        return [gpu for node in run.ask("status").get("nodes", []) for gpu in (node["vitals"] or {}).get("gpus", [])]

    with run.running():
        own = until(gpus, WAIT_S)
        total_mib, power_w = nvidia_smi("--query-gpu=memory.total,enforced.power.limit").split(", ")
    said = [f"{round(gpu['mem_total'] / 2**20)} MiB, {gpu['power_limit']:.0f} W" for gpu in own]
    wanted = f"{total_mib} MiB, {float(power_w):.0f} W"
    return set(said) == {wanted}, f"{'; '.join(said)}; nvidia-smi: {wanted}"


def measured(name: str, save: Path | None) -> tuple[str, str, str]:
    """Return a row of the table."""
    if not HAS_GPU and (name == "facts" or (name in WAYS and WAYS[name].needs_gpu)):
        return name, "left out", "needs a GPU"
    with tempfile.TemporaryDirectory(prefix="supervisor-gpu-") as folder:
        (Path(folder) / "hosts").mkdir()
        with hosts_in_thread(2, Path(folder) / "hosts") as hosts:
            try:
                run = Run(name, Path(folder), hosts, save)
                is_right, said = SPECIAL[name](run) if name in SPECIAL else judge(name, run)
            except Exception as error:  # noqa: BLE001  the other rows are wanted all the same
                is_right, said = False, f"{type(error).__name__}: {error}"
            finally:
                hosts.end_processes(5)
    print(f"{name}: {'right' if is_right else 'WRONG'}: {said}", flush=True)
    return name, "right" if is_right else "WRONG", said


SPECIAL = {"kill": kill_to_step, "stacks": stacks, "diagnose": diagnose, "facts": gpu_facts}
# What these two do to the job.
ALIKE = {"stacks": "sleep", "diagnose": "exception"}


def main() -> int:
    """Run all ways and print the table; returns the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("ways", nargs="*")
    parser.add_argument("--save", type=Path)
    parser.add_argument("-j", type=int, default=4 if HAS_GPU else 1)
    options = parser.parse_args()
    if options.save is not None:
        options.save.mkdir(parents=True, exist_ok=True)
    names = options.ways or [*WAYS, *SPECIAL]
    with concurrent.futures.ThreadPoolExecutor(options.j) as pool:
        rows = tuple(pool.map(lambda name: measured(name, options.save), names))
    device = torch.cuda.get_device_name() if HAS_GPU else "no GPU: over gloo"
    print(Table(f"{device}, torch {torch.__version__}", ("way", "answer", "what was said"), rows, (), (0, 1, 2)).text())
    return 1 if any(row[1] == "WRONG" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
