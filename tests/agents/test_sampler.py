"""The sampler inside a rank: what it sees, and that nothing of it can end or change a script, on every Python here.

The stress takes SUPERVISOR_STRESS_S seconds on each Python, 3 by default, an hour in `make nightly`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from remote_agent.engine import sampler
from tests.pythons import interpreters

SOURCE = Path(sampler.__file__)
PYTHONS = interpreters()
STRESS_S = float(os.environ.get("SUPERVISOR_STRESS_S", "3"))
START = f"""
import importlib.util, os, sys, time
spec = importlib.util.spec_from_file_location("supervisor_sampler", {str(SOURCE)!r})
sampler = importlib.util.module_from_spec(spec); spec.loader.exec_module(sampler)
sampler.WINDOW_NS = 500_000_000
here = sys.argv[1]
def count(): return len(os.listdir("/proc/self/task"))
sampler.start(here, 0)
"""


@pytest.fixture
def here(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / sampler.WAKE)
    return tmp_path


def order(here: Path, seconds: float, routine: int = 0) -> None:
    """Have the rank sampled for so long."""
    (here / sampler.ORDER).write_text(f"{time.time_ns() + int(seconds * 1e9)} 0 {routine}")
    until(lambda: wakes(here))


def wakes(here: Path) -> bool:
    try:
        os.close(os.open(here / sampler.WAKE, os.O_WRONLY | os.O_NONBLOCK))
    except OSError:
        return False
    return True


def until(is_so: Callable[[], object], seconds: float = 20.0) -> Any:
    end = time.monotonic() + seconds
    while not (found := is_so()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return found


def windows(here: Path, rank: int = 0) -> list[dict[str, Any]]:
    path = here / f"{rank}{sampler.SUFFIX}"
    return json.loads(path.read_text())["windows"] if path.exists() else []


@contextlib.contextmanager
def running(here: Path, script: str, *options: str, python: str = sys.executable) -> Iterator[subprocess.Popen[str]]:
    """Run a script in which the sampler has started, until it ends or the block does."""
    (here / "script.py").write_text(START + script)
    with subprocess.Popen(
        [python, *options, str(here / "script.py"), str(here)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


@pytest.mark.parametrize("version", PYTHONS)
def test_a_window_has_the_places_where_the_time_goes(here: Path, version: str) -> None:
    script = """
def naps():
    time.sleep(0.05)
def works():
    end = time.perf_counter() + 0.05
    while time.perf_counter() < end: sum(i for i in range(1000))
while True: naps(); works()
"""
    with running(here, script, python=PYTHONS[version]):
        order(here, 3.0)
        seen = until(lambda: windows(here)[1:])
    sites = {site[2]: site for site in seen[-1]["sites"]}
    phases = seen[-1]["phases"]
    assert phases.keys() == {"script"}
    wall_s, cpu_s = phases["script"]
    assert wall_s == pytest.approx(0.5, abs=0.02)
    # Others may have the processor.
    assert 0.01 < cpu_s < 0.4
    assert (sites["naps"][1], sites["naps"][3]) == ("script.py", START.count("\n") + 3)
    assert 0.1 < sites["naps"][4] < 0.42
    assert 0.05 < sites["works"][4] < 0.42


def test_a_call_that_keeps_the_gil_counts_for_its_own_line(here: Path) -> None:
    script = """
def holds():
    return sum(range(9_000_000))
while True: holds()
"""
    with running(here, script):
        order(here, 3.0)
        seen = until(lambda: windows(here)[1:])
    assert seen[-1]["sites"][0][2] == "holds"
    assert seen[-1]["sites"][0][4] > 0.4


def test_between_bouts_it_waits_in_the_kernel_without_a_descriptor(here: Path) -> None:
    script = """
paths = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
print([path for path in paths if os.path.lexists(path) and here in os.readlink(path)], count(), flush=True)
time.sleep(60)
"""
    with running(here, script) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "[] 2\n"
        ticks = cpu(process.pid)
        time.sleep(0.3)
        assert cpu(process.pid) == ticks


def cpu(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


HANDLER = """
import signal, threading
signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))
threading.Timer(0.4, os.kill, (os.getpid(), signal.SIGTERM)).start()
while True: sum(range(1000))
"""
ENDS = {
    "the last line": ("time.sleep(0.4)", 0, ""),
    "sys.exit": ("time.sleep(0.4); sys.exit(7)", 7, ""),
    "an exception": ("time.sleep(0.4); raise KeyError('x')", 1, "KeyError: 'x'"),
    "os._exit": ("time.sleep(0.4); os._exit(5)", 5, ""),
    "SIGTERM": ("import signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, ""),
    "a handler of SIGTERM": (HANDLER, 9, ""),
    "exec": ("os.execv(sys.executable, [sys.executable, '-c', 'import sys; sys.exit(3)'])", 3, ""),
    "a directory that is gone": ("import shutil; shutil.rmtree(here)", 0, ""),
}


@pytest.mark.parametrize("version", PYTHONS)
@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize("sampled", [True, False], ids=["sampled", "waiting"])
def test_a_script_ends_as_it_would_without_it(here: Path, version: str, how: str, sampled: bool) -> None:
    code, status, said = ENDS[how]
    script = f"open(here + '/begun', 'w').close()\nwhile not os.path.exists(here + '/go'): time.sleep(0.005)\n{code}\n"
    with running(here, script, "-W", "error", python=PYTHONS[version]) as process:
        until((here / "begun").exists)
        if sampled:
            order(here, 60.0)
        (here / "go").touch()
        returned, out, err = ended(process)
    assert (returned, out) == (status, "")
    assert (said in err) if said else err == ""


@pytest.mark.parametrize("version", PYTHONS)
def test_a_fork_of_the_script_has_no_thread_of_ours(here: Path, version: str) -> None:
    script = """
import warnings; warnings.simplefilter("ignore")
end = time.monotonic() + 1.0
counts = set()
while time.monotonic() < end:
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.write(writer, b"%d" % count())
        sys.exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    counts.add(os.read(reader, 9)); os.close(reader); os.close(writer)
print(counts, count())
"""
    with running(here, script, python=PYTHONS[version]) as process:
        order(here, 60.0)
        assert ended(process) == (0, "{b'1'} 2\n", "")


STRESS = """
import gc, threading
gc.set_threshold(50)
sampler.PERIOD_S = 0.001
class Node:
    def __init__(self): self.me = self
    def __del__(self): time.sleep(0)
def deep(n): return deep(n - 1) if n else [Node() for _ in range(5)]
def gen():
    for i in range(20): yield Node()
def work():
    while time.monotonic() < end:
        deep(30); list(gen()); threading.Thread(target=deep, args=(3,)).start()
        try: {}[1]
        except KeyError: pass
end = time.monotonic() + SECONDS
threads = [threading.Thread(target=work) for _ in range(6)]
for one in threads: one.start()
work()
for one in threads: one.join()
"""


@pytest.mark.parametrize("version", PYTHONS)
def test_a_script_with_many_threads_and_collections_survives(here: Path, version: str) -> None:
    with running(here, STRESS.replace("SECONDS", str(STRESS_S)), python=PYTHONS[version]) as process:
        order(here, STRESS_S + 60)
        out, err = process.communicate(timeout=STRESS_S * 2 + 60)
        assert (process.returncode, out, err) == (0, "", "")
    assert sum(window["looks"] for window in windows(here)) > 20


def test_python_3_11_is_sampled_only_for_a_reason(here: Path) -> None:
    version = "3.11"
    if version not in PYTHONS:
        pytest.skip(f"no Python {version} here")
    with running(here, "while True: time.sleep(0.01)", python=PYTHONS[version]):
        order(here, 60.0, routine=1)
        time.sleep(1.5)
        assert windows(here) == []
        order(here, 60.0)
        until(lambda: windows(here))
