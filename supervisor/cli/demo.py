"""`supervisor demo`: two SSH hosts inside this process, a real DDP run on them, and nothing left afterwards.

In: argv. Out: the exit status of `up`.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from remote_agent.wire.events import ENDED_EVENTS
from supervisor.cli.options import is_terminal, make_parser, parse
from supervisor.demo_hosts import DemoHosts, hosts_in_thread
from supervisor.paths import examples_dir
from supervisor.standard_streams import write_err

if TYPE_CHECKING:
    from collections.abc import Iterator

log = logging.getLogger(__name__)

_HOSTS = 2
_RANKS_PER_HOST = 2
_STOP_DEADLINE_S = 20.0
_AGENT_GRACE_S = 8.0  # an agent whose job is over stays for some seconds, so that its end can be read
# The headless run ends after some seconds; with the TUI there is time to try the keys.
_HEADLESS_ARGS = ("--epochs", "4", "--steps-per-epoch", "10", "--step-time", "0.05")
_TUI_ARGS = ("--epochs", "60", "--steps-per-epoch", "20", "--step-time", "0.1")

_NO_TORCH = """supervisor demo: {python} has no torch, and the demo trains with it
  hint: install it into the same environment, for example: {python} -m pip install torch numpy"""


def run(verb: str, argv: Sequence[str]) -> int:
    """Run the demo; returns the exit status."""
    parser = make_parser(verb, "", target=False)
    parser.add_argument("--headless", action="store_true", help="print the merged log instead of the TUI")
    options = parse(parser, argv)
    return run_demo(headless=options.headless or not is_terminal())


def run_demo(headless: bool) -> int:
    """Run the example on two embedded hosts and return the exit status of `up`; always cleans up."""
    if importlib.util.find_spec("torch") is None:
        write_err(_NO_TORCH.format(python=sys.executable) + "\n")
        return 1
    with (
        _terminated_as_interrupted(),
        tempfile.TemporaryDirectory(prefix="supervisor-demo-", ignore_cleanup_errors=True) as root,
        hosts_in_thread(_HOSTS, Path(root)) as hosts,
    ):
        toml = _prepare(hosts)
        try:
            return _up(toml, headless)
        finally:
            _outlast_signals()
            _end_job(hosts, toml)


def _prepare(hosts: DemoHosts) -> Path:
    workdir = hosts.root / "work"
    workdir.mkdir()
    shutil.copy(examples_dir() / "ddp" / "train.py", workdir / "train.py")
    job = {
        "workdir": "work",
        "nproc_per_node": _RANKS_PER_HOST,
        "min_nodes": 1,
        "max_restarts": 3,
        "stop_grace": 5.0,
        # All hosts share this machine's name, so gloo must not resolve it.
        "env": {"GLOO_SOCKET_IFNAME": "lo"},
    }
    return hosts.inventory(hosts.root / "hosts.toml", sys.executable, job)


def _up(toml: Path, headless: bool) -> int:
    from supervisor.cli import main  # not above: the command line imports this module

    where = str(toml.parent / "work" / "train.py")
    mode = ["--headless"] if headless else ["--ends-with-screen"]
    return main(["up", str(toml), *mode, where, *(_HEADLESS_ARGS if headless else _TUI_ARGS)])


def _end_job(hosts: DemoHosts, toml: Path) -> None:
    """End what `up` left running: a detached job, and agents that wait for their end to be read."""
    try:
        if hosts.processes() and not _is_over(hosts):
            write_err("demo: its hosts are part of this process, so the job ends with it\n")
            _stop(toml)
    except KeyboardInterrupt:
        log.info("interrupted again: ending everything at once")
    finally:
        write_err("demo: ending the agents and removing the hosts\n")
        killed = hosts.end_processes(_AGENT_GRACE_S)
        if killed:
            log.warning("the demo had to kill: %s", "; ".join(killed))


def _is_over(hosts: DemoHosts) -> bool:
    """Tell whether every journal on the hosts has the end of its job: then no stop is needed."""
    journals = [path for host in hosts.hosts for path in host.home.glob(".supervisor/jobs/*/events.jsonl")]
    return all(any(f'"{end}"' in journal.read_text() for end in ENDED_EVENTS) for journal in journals)


def _stop(toml: Path) -> None:
    # In another process: a signal may have ended this one's event loop.
    command = [sys.executable, "-m", "supervisor", "stop", str(toml)]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_STOP_DEADLINE_S,
            check=False,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        log.info("stop: status %d: %s", done.returncode, done.stderr.strip())
    except subprocess.TimeoutExpired:
        log.warning("stop did not answer within %g s", _STOP_DEADLINE_S)


def _outlast_signals() -> None:
    """Ignore further signals during the clean-up: a terminal that closes sends several."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            # Not SIG_IGN, which processes started during the clean-up would inherit.
            signal.signal(number, lambda _number, _frame: None)


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Let SIGTERM and a closed terminal end the demo through its clean-up."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
