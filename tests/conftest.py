"""What all tests share: an end on signals that lets everything be removed, and a look for what was left.

In: the test session.
Out: fixtures.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import inspect
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from supervisor.inventory import sshconfig
from tests import watch
from tests.cluster.fixtures import hosts_of
from tests.cluster.leftovers import MARK, below, describe, end, marked
from tests.flaky import LEFT
from tests.scratch import outer, scratch
from tests.stub import on_path

if TYPE_CHECKING:
    from supervisor.ssh import AgentFile

# Every process that a test starts inherits the mark, unless it goes through SSH to a host with an environment of its
# own; those are ended with their host.
# A worker of pytest-xdist has one below that of its session, which ends what a worker that was killed had started.
os.environ[MARK] = ".".join(filter(None, (os.environ.get(MARK), secrets.token_hex(8))))


def pytest_configure(config: pytest.Config) -> None:
    """SIGTERM and SIGHUP end the run as Ctrl-C does: with all fixtures torn down. Tests have a TMPDIR of their own."""
    held = ExitStack()
    held.enter_context(scratch())
    os.environ[watch.HELD] = f"{os.environ['TMPDIR']}/held.{os.getpid()}"
    importlib.import_module("tests.watch.held")
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(outer()))  # of tmp_path: the last three runs' are kept
    config.add_cleanup(held.close)
    config.add_cleanup(lambda: end(below(os.environ[MARK])))
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)
    # A shell that runs the suite in the background has these ignored, and every process of a test would inherit it.
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)


# A coroutine test has its own deadlines; this is the last one.
LONGEST_S = 280.0


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine in an event loop of its own."""
    test = pyfuncitem.function
    if not inspect.iscoroutinefunction(test):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(test).parameters}
    asyncio.run(asyncio.wait_for(test(**arguments), LONGEST_S))
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that share something, and all of a file in `fast`, stay on one worker; any worker takes each other test."""
    for item in items:
        if item.path.parent.name == "fast" or _shares(item):
            item.add_marker(pytest.mark.xdist_group(f"{item.path.parent.name}/{item.path.stem}"))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Where xdist distributes by groups, every group must have arrived in the names by which it does so.

    What has been loaded until now lasts, so the collector need not look at it after each test.
    """
    gc.collect()
    gc.freeze()
    if session.config.getoption("loadgroup", False) and "PYTEST_XDIST_WORKER" in os.environ:
        lost = [item for item in session.items if item.get_closest_marker("xdist_group") and "@" not in item.nodeid]
        if lost:
            raise pytest.UsageError(
                f"xdist has lost the groups of {len(lost)} tests: are its version and pytest's a pair?"
            )


# What the controller of pytest-xdist has been told: the tests of all workers, and those that have ended.
_collected: set[str] = set()
_ended: set[str] = set()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(ids: list[str]) -> None:
    """Note which tests a worker has."""
    _collected.update(ids)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note which tests have ended."""
    if report.when == "teardown":
        _ended.add(report.nodeid)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fail the run itself if tests have not run to their end, as where a worker died: none is tried again then."""
    if exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) and (missing := _collected - _ended):
        print(f"\n{len(missing)} tests have not ended, such as {min(missing)}")
        session.exitstatus = pytest.ExitCode.INTERNAL_ERROR


def _shares(item: pytest.Item) -> bool:
    assert isinstance(item, pytest.Function)
    return any(fixture.scope == "module" for found in item._fixtureinfo.name2fixturedefs.values() for fixture in found)


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind(pytestconfig: pytest.Config) -> Iterator[None]:
    """After the last test, no process that a test started is alive, and none of our namespaces exists."""
    yield
    left = marked(os.environ[MARK])
    names = [describe(pid) for pid in left]
    end(left)
    if left:
        noted = pytestconfig.rootpath / LEFT
        noted.parent.mkdir(exist_ok=True)
        noted.write_text("\n".join(names))
    assert not left, f"processes that tests left behind (ended now): {names}"


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Forget what a file has cached, and keep the collector from what it has loaded: it runs after each test."""
    assert isinstance(item, pytest.Function)
    if nextitem is None or nextitem.path != item.path:
        for one in vars(item.module).values():
            if hasattr(one, "cache_clear") and one.__module__ == item.module.__name__:
                one.cache_clear()
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def loops_answer(request: pytest.FixtureRequest) -> Iterator[None]:
    """Nothing holds an event loop for long: neither in this process, nor in an agent or a command that it starts."""
    held = Path(os.environ[watch.HELD])
    held.unlink(missing_ok=True)
    yield
    if held.exists() and request.path.parent.name in ("agents", "contract"):
        pytest.fail(f"an event loop was held:\n{held.read_text()}")


@pytest.fixture(autouse=True)
def own_garbage() -> Iterator[None]:
    """What a test leaves unclosed fails that test, not the one during which it happens to be collected."""
    yield
    gc.collect()


cluster = hosts_of(4, scope="function", agent=False)


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture
def ssh_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The operator's home, with an empty ~/.ssh: ssh itself would take it from the user list, not from HOME."""
    found = shutil.which("ssh")
    if found is None:
        pytest.skip("needs the ssh program")
    home = tmp_path / "operator"
    (home / ".ssh").mkdir(parents=True, mode=0o700)
    run = tempfile.mkdtemp(prefix="run-", dir="/tmp")  # a socket's path is short
    program = Path(run) / "bin" / "ssh"
    program.parent.mkdir()
    program.touch(mode=0o755)
    config = '-F "$HOME/.ssh/config"'
    program.write_text(f'#!/bin/sh\n[ -e "$HOME/.ssh/config" ] && set -- {config} "$@"\nexec {found} "$@"\n')
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    monkeypatch.setenv("XDG_RUNTIME_DIR", run)
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    monkeypatch.delenv("SUPERVISOR_HOME", raising=False)
    sshconfig.forget()
    yield home
    sshconfig.forget()
    for path in Path(run).glob("supervisor/*"):
        if path.is_socket():
            subprocess.run(["ssh", "-F", "none", "-S", path, "-O", "exit", "node"], capture_output=True, check=False)
    shutil.rmtree(run)


@pytest.fixture
def light_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines and ranks that this test starts on this machine import the package in `tests/stub` as torch."""
    monkeypatch.setenv("PYTHONPATH", on_path())


@pytest.fixture(scope="session")
def agent() -> AgentFile:
    """The agent that is pushed."""
    from supervisor.ssh import AgentFile  # asyncssh is slow to import, and most tests do not need it

    return AgentFile.build()
