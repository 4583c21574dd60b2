"""`status` of a job on 32 hosts by each way to connect, in one run.

In: a Cluster of 32 hosts on this machine. Out: a Report: the whole command, over asyncssh, over logins of ssh that are
open, and over logins that are made for it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.bench.report import Report, Table, ratio, seconds
from tests.cluster import Cluster, ClusterError

HOSTS = 32
RUNS = 5
TIMEOUT_S = 120.0
ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "import time\nfor step in range(10**6):\n    print('step', step, flush=True)\n    time.sleep(1)\n"
ASYNCSSH, OPEN, MADE = "asyncssh", "openssh, logged in before", "openssh, with its logins"


def _supervisor(*words: str, path: Path | None = None, run: Path | None = None) -> float:
    """Run a command, with the programs of a directory first; returns its seconds. Raises ClusterError.

    `run`: where its logins of ssh are, which are ended after it.
    """
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    if run is not None:
        run.mkdir(mode=0o700)
        env["XDG_RUNTIME_DIR"] = str(run)
    if path is not None:
        env["PATH"] = f"{path}{os.pathsep}{env['PATH']}"
    begun = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "supervisor", *words],
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise ClusterError(f"{' '.join(words)}: {done.stderr.decode(errors='replace')[-2000:]}")
    took = time.perf_counter() - begun
    _end(run.glob("supervisor/*") if run is not None else ())
    return took


def _end(sockets: Iterable[Path]) -> None:
    for socket in sockets:
        subprocess.run(["ssh", "-F", "none", "-S", socket, "-O", "exit", "x"], check=False, capture_output=True)


@contextlib.contextmanager
def _logged_in(cluster: Cluster, folder: Path) -> Iterator[Path]:
    """Hold a shared connection of the user's own to each host; yields a directory with an ssh that knows them."""
    paths = {host: str(folder / host.name) for host in cluster.hosts}
    config = folder / "config"
    config.write_text("".join(f"Host {host.address}\n  ControlPath {path}\n" for host, path in paths.items()))
    program = folder / "bin" / "ssh"
    program.parent.mkdir()
    program.touch(mode=0o755)
    program.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {config} "$@"\n')
    try:
        for host, path in paths.items():
            ssh, *options = cluster.ssh_command(host)
            subprocess.run([ssh, "-f", "-N", "-M", "-S", path, *options], check=True, timeout=TIMEOUT_S)
        yield program.parent
    finally:
        _end(map(Path, paths.values()))


def run() -> Report:
    """Measure; raises ClusterError, OSError, subprocess.SubprocessError."""
    with (
        tempfile.TemporaryDirectory(prefix="bench-", dir="/tmp") as name,
        Cluster(HOSTS, stub_torch=True, agent=True) as cluster,
    ):
        work = Path(name)
        (work / "train.py").write_text(SCRIPT)
        ways = {
            way: str(cluster.inventory(work / f"{way}.toml", defaults={"via": way}, nproc_per_node=1, standby="off"))
            for way in ("asyncssh", "openssh")
        }
        times: dict[str, list[float]] = {ASYNCSSH: [], OPEN: [], MADE: []}
        _supervisor("up", ways["asyncssh"], "--detach", str(work / "train.py"))
        try:
            with _logged_in(cluster, work) as path:
                for number in range(RUNS):
                    times[ASYNCSSH].append(_supervisor("status", ways["asyncssh"]))
                    times[OPEN].append(_supervisor("status", ways["openssh"], path=path))
                    times[MADE].append(_supervisor("status", ways["openssh"], run=work / f"run{number}"))
        finally:
            _supervisor("stop", ways["asyncssh"])
    middle = {way: statistics.median(values) for way, values in times.items()}
    rows = tuple((way, seconds(value), ratio(value, middle[ASYNCSSH])) for way, value in middle.items())
    notes = (f"{HOSTS} hosts on this machine; the median of {RUNS} runs in turn; the whole command",)
    table = Table("supervisor status", ("way to connect", "time", "asyncssh = 1"), rows, notes)
    return Report("transports", (table,), {"seconds": times})
