"""A rank that is started warm sees what one that is started cold sees, field by field."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from remote_agent.engine import boot_dir
from tests.agents.engine_process import PROGRAM, SharedEngine
from tests.agents.starts import RANKS, Shown, Starts, differences
from tests.examples import nightly
from tests.pythons import interpreters

ENDS = ("exception", "exit3", "exit_none", "import", "interrupt", "message", "os_exit", "syntax", "warns", "at_exit")
PROCESSES = ("forks", "handles", "pool_fork", "pool_forkserver", "pool_spawn", "runs", "thread")
SIGNALS = ("SIGABRT", "SIGKILL", "SIGSEGV", "SIGTERM")
KINDS = {"script": "everything.py", "module": "everything", "run_path": "everything.py"}
LONG = [pytest.param(one, marks=nightly) for one in ("module", "run_path")]
PYTHONS = ["3.13", *(pytest.param(one, marks=nightly) for one in ("3.9", "3.10", "3.12"))]


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starts]:
    root = tmp_path_factory.mktemp("starts")
    with SharedEngine(root).running() as shared:
        yield Starts(shared, root / "tree")


@pytest.fixture(scope="module")
def cold(starts: Starts) -> Shown:
    return starts.cold("everything.py", "--a", "b c")


def own_variables(shown: Shown, rank: int) -> dict[str, str]:
    """The variables that are new in each generation, as Python and C see them."""
    fields = shown.documents[rank]["fields"]
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_ERROR_FILE")
    assert fields["environ"] == fields["getenv"]
    assert sorted(fields["environ"]) == sorted(fields["c_environ"])
    variables = dict(line.split("=", 1) for line in fields["environ"])
    return {name: variables[name] for name in names}


def check_own_variables(shown: Shown) -> None:
    for rank in range(RANKS):
        own = own_variables(shown, rank)
        assert (own["RANK"], own["LOCAL_RANK"], own["WORLD_SIZE"]) == (str(rank), str(rank), str(RANKS))
        assert own["MASTER_PORT"] == str(shown.port)
        assert own["TORCHELASTIC_RESTART_COUNT"] == str(shown.generation)
        assert f"/generation_{shown.generation}/rank_{rank}/" in own["TORCHELASTIC_ERROR_FILE"]


def test_two_cold_starts_are_the_same_but_for_what_is_new_in_each(starts: Starts, cold: Shown) -> None:
    again = starts.cold("everything.py", "--a", "b c")
    assert [ended["code"] for ended in cold.exits] == [0, 0], cold.err
    failed = {name: value for name, value in cold.documents[0]["fields"].items() if str(value).startswith("Traceback")}
    assert not failed
    check_own_variables(again)
    assert differences(cold, again, {}) == []


@pytest.mark.parametrize(
    ("prelude", "field"),
    [
        ("os.umask(0o077)", "process.umask"),
        ("os.nice(5)", "scheduling.nice"),
        ("signal.signal(signal.SIGHUP, signal.SIG_IGN)", "signals.handlers.1"),
        ("os.dup2(0, 9)", "descriptors.9"),
        ("os.putenv('NEW', '1')", "c_environ"),
        ("warnings.simplefilter('ignore')", "filters"),
        ("import colorsys", "modules_by_then"),
        ("threading.Thread(target=lambda: time.sleep(60), daemon=True).start()", "threads.tasks"),
    ],
)
def test_one_deliberate_difference_is_found(starts: Starts, cold: Shown, prelude: str, field: str) -> None:
    """The comparison is no better than what it sees."""
    text = (starts.tree / "everything.py").read_text()
    changed = starts.tree / "changed.py"
    changed.write_text(text.replace('if __name__ == "__main__":\n', f'if __name__ == "__main__":\n    {prelude}\n'))
    found = differences(cold, starts.cold("changed.py", "--a", "b c"), {})
    assert any(line.startswith(f"rank 0 fields.{field}:") for line in found), found


@pytest.mark.parametrize("kind", ["script", *LONG])
def test_a_warm_start_shows_what_a_cold_one_shows(starts: Starts, kind: str) -> None:
    before = starts.cold(KINDS[kind], "--a", "b c", kind=kind)
    for _ in range(2):
        after = starts.warm(KINDS[kind], "--a", "b c", kind=kind)
        assert after.cold == ""
        check_own_variables(after)
        assert differences(before, after) == []
        # Two ranks, or two generations, never draw the same numbers.
        drawn = [document["drawn"][0] for document in (*before.documents, *after.documents)]
        assert len(set(drawn)) == 2 * RANKS


# It adopts the ranks, so that it knows when they have ended.
ENDED_AT_ONCE = """
import ctypes, os, signal
from remote_agent.engine.waiting import fork_ranks

ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)

class Engine:
    descriptor = os.open(os.devnull, os.O_RDONLY)

    def send(self, document):
        for pid in document["pids"]:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

for _ in range(2):
    assert fork_ranks([{}, {}], Engine()) is None
print("waits")
"""


def test_ranks_that_are_ended_before_they_begin_leave_the_process_waiting() -> None:
    """Another group may follow within milliseconds."""
    done = subprocess.run(
        [sys.executable, "-c", ENDED_AT_ONCE], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.stderr, done.returncode) == ("waits\n", "", 0)


def test_a_waiting_process_that_fails_never_runs_the_script(tmp_path: Path) -> None:
    """Only a rank does: here the order is missing, as after any error that nobody has thought of."""
    script = tmp_path / "train.py"
    script.write_text("print('training')\n")
    boot = boot_dir.waiting_directory(tmp_path)
    env = dict(os.environ)
    boot_dir.add_bootstrap(env, boot)
    command = [sys.executable, "-X", "supervisor=job", "-u", str(script)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.returncode) == ("", 1)


@pytest.mark.parametrize("version", PYTHONS)
def test_a_warm_start_on_other_pythons(tmp_path: Path, version: str) -> None:
    python = interpreters().get(version)
    if python is None:
        pytest.skip(f"no Python {version} here")
    with SharedEngine(tmp_path).running(program=(python, *PROGRAM[1:])) as shared:
        starts = Starts(shared, tmp_path / "tree")
        after = starts.warm("everything.py")
        assert after.cold == ""
        assert differences(starts.cold("everything.py"), after) == []


@pytest.mark.parametrize("act", [*ENDS, *PROCESSES, *SIGNALS])
def test_a_warm_start_ends_as_a_cold_one_does(starts: Starts, act: str) -> None:
    (starts.tree / "act").write_text(act)
    after = starts.warm("acts.py")
    before = starts.cold("acts.py")
    assert after.cold == ""
    assert differences(before, after, {}) == []
