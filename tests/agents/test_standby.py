"""Ranks that are forked from a waiting process: like cold ones in every respect, and cold where anything is odd."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from remote_agent.base.proc import environment
from remote_agent.engine import boot_dir
from remote_agent.engine.processes import end_all_marked
from tests.agents.engine_process import DEADLINE_S, PROGRAM, SCRIPTS, EngineProcess, alive, engine
from tests.examples import nightly
from tests.pythons import interpreters

ACTS = SCRIPTS / "acts.py"

# What a script can see of its process, before and after it imports installed packages.
SCRIPT = """
import json, os, sys
names = list(sys.modules)
import resource, signal, subprocess, atexit, gc, warnings
before = {
    "argv": sys.argv, "path": sys.path[:], "hooks": len(sys.path_hooks),
    "main": sorted(vars(sys.modules["__main__"])), "flags": str(sys.flags), "options": sys._xoptions,
    "orig_argv": getattr(sys, "orig_argv", sys.argv)[1:],
    "environ": list(os.environ.items()), "cwd": os.getcwd(), "umask": os.umask(0o22),
    "child": sorted(subprocess.run(["env"], capture_output=True, text=True).stdout.splitlines()),
    "descriptors": sorted(os.listdir("/proc/self/fd"), key=int), "parent": os.getppid(),
    "leader": [os.getpgid(0) == os.getpid(), os.getsid(0) == os.getpid()], "tasks": len(os.listdir("/proc/self/task")),
    "handlers": [str(signal.getsignal(number)) for number in sorted(signal.valid_signals())],
    "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])), "limits": resource.getrlimit(resource.RLIMIT_NOFILE),
    "nice": os.getpriority(os.PRIO_PROCESS, 0), "policy": os.sched_getscheduler(0),
    "gc": [gc.isenabled(), gc.get_threshold(), gc.get_debug()], "frozen": gc.get_freeze_count() > 0,
    "oom": open("/proc/self/oom_score_adj").read(), "stdout": [sys.stdout.seekable(), sys.stdout.line_buffering],
}
import early.uses, early
from early import tool
import logging, random, threading
after = {
    "names": names, "tool": str(tool)[:14], "twice": early.uses.value, "path": sys.path,
    "written": os.environ.get("EARLY_WROTE"), "filters": [str(item) for item in warnings.filters],
    "main": threading.main_thread().native_id == os.getpid(), "spec": early.__spec__.origin, "file": early.__file__,
    "loader": type(early.__loader__).__name__, "seen": early.base.seen,
}
import early.late
after["now"] = hasattr(early, "late")
# The last line says that all of it is done.
with open(sys.argv[1], "a") as drawn:
    drawn.write(f"{random.random()}\\n")
print(json.dumps([before, after]), flush=True)
import time
if sys.argv[2:] != ["end"]:
    time.sleep(600)
"""
PACKAGE = {
    "__init__.py": "from early import base\nfrom early.tool import tool\nimport json\n",
    # It looks at all variables, as tqdm does.
    "base.py": "import sys\nimport atexit, os\natexit.register(sys.stdout.write, 'the end\\n')\n"
    "seen = sorted(name for name in os.environ if name in ('RANK', 'PATH'))\nos.environ['EARLY_WROTE'] = 'yes'\n"
    "sys.path.append('/early')\n",
    "tool.py": "def tool():\n    pass\n",
    "uses.py": "import warnings\nimport early.base\nwarnings.filterwarnings('ignore', message='early')\nvalue = 1\n",
    "late.py": "",
}
# Starts what outlives a rank: a program, and a copy of itself.
LEAVES = """
import early, json, os, subprocess, time
left = [os.fork()]
while left == [0]:
    time.sleep(600)
left.append(subprocess.Popen(["sleep", "600"], start_new_session=True).pid)
print(json.dumps([{}, {"pids": left}]), flush=True)
time.sleep(600)
"""


class Node:
    """An engine, a script that imports an installed package, and the directory in which that is installed."""

    def __init__(self, engine: EngineProcess, root: Path) -> None:
        self.engine = engine
        self.root = root
        self.installed = root / "lib" / "site-packages"
        self.tree = root / "tree"
        self.script = self.tree / "train.py"
        self.generation = -1

    async def go(self, **changes: Any) -> tuple[str, dict[str, Any]]:
        """Stop what runs and start two ranks; returns why they are cold, and what rank 1 saw."""
        await self.stop()
        self.generation += 1
        defaults: dict[str, Any] = {
            "cwd": str(self.tree),
            "local_world_size": 2,
            "standby": str(self.root / "standby"),
            "env": {"PYTHONPATH": str(self.installed)},
        }
        words = changes.pop("words", (str(self.root / "random"),))
        answer = await self.engine.go(self.script, *words, generation=self.generation, **{**defaults, **changes})
        return answer["cold"], answer

    async def seen(self, rank: int = 1) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what a rank printed, once it has: before and after its imports."""
        path = self.root / f"generation_{self.generation}" / f"rank_{rank}" / "stdout.log"
        for _ in range(int(DEADLINE_S / 0.02)):
            # What follows the last newline may be half a line.
            lines = path.read_text().split("\n")[:-1] if path.exists() else []
            if any(line.startswith("[") for line in lines):
                before, after = json.loads(next(line for line in lines if line.startswith("[")))
                return before, after
            await asyncio.sleep(0.02)
        raise AssertionError(self.engine.text("stderr", self.generation, rank))

    async def stop(self) -> None:
        if self.generation >= 0:
            await self.engine.call("stop", generation=self.generation, grace_s=0.0)

    async def warm(self) -> Any:
        """Have the waiting process started; returns what it says once it has loaded its modules, or failed."""
        await self.seen(0)
        before = len(self.engine.standby)
        await self.engine.call("standby", generation=self.generation)
        await self.engine.until(lambda: len(self.engine.standby) > before and self.state() != "loading", "standby")
        return self.engine.standby[-1]

    def state(self) -> str:
        return str(self.engine.standby[-1]["state"])


@contextlib.asynccontextmanager
async def node(root: Path, script: str = SCRIPT, python: str = sys.executable) -> AsyncIterator[Node]:
    async with engine(root, program=(python, *PROGRAM[1:])) as process:
        one = Node(process, root)
        (one.installed / "early").mkdir(parents=True, exist_ok=True)
        for name, text in PACKAGE.items():
            (one.installed / "early" / name).write_text(text)
        one.tree.mkdir(exist_ok=True)
        one.script.write_text(script)
        yield one
        await one.stop()


OTHERS = [pytest.param(version, marks=nightly) for version in ("3.9", "3.10", "3.12")]


@pytest.mark.parametrize("version", ["this", "3.13", *OTHERS])
async def test_a_forked_rank_sees_what_a_cold_one_sees(tmp_path: Path, version: str) -> None:
    python = {"this": sys.executable, **interpreters()}.get(version)
    if python is None:
        pytest.skip(f"no Python {version} here")
    async with node(tmp_path, python=python) as one:
        assert (await one.go())[0] == "nothing was loaded before"
        cold = [await one.seen(rank) for rank in (0, 1)]
        facts = await one.warm()
        assert (facts["state"], facts["why"]) == ("ready", "")
        for _ in range(2):
            why, answer = await one.go()
            assert why == ""
            for rank, (before, after) in enumerate(cold):
                warm_before, warm_after = await one.seen(rank)
                # What shells and tools on the node read.
                assert b"RANK=%d" % rank in environment(answer["ranks"][rank]["pid"])
                # The collector need not copy what all ranks share.
                assert warm_before["frozen"]
                assert _plain({**warm_before, "frozen": before["frozen"]}, one.generation) == _plain(before, 0)
                # What is loaded early is in sys.modules, and has not seen the variables that vary.
                assert "early" in set(warm_after.pop("names")) - set(after["names"])
                assert (warm_after.pop("seen"), after["seen"]) == (["PATH"], ["PATH", "RANK"])
                rest = {name: value for name, value in after.items() if name not in ("names", "seen")}
                assert _plain(warm_after, one.generation) == _plain(rest, 0)
        assert len(set((tmp_path / "random").read_text().split())) == 6
        # Other arguments.
        assert (await one.go(words=("/dev/null", "later", "--more")))[0] == ""
        seen = (await one.seen())[0]
        assert seen["argv"] == [str(one.script), "/dev/null", "later", "--more"]
        if version != "3.9":  # it has no orig_argv
            assert seen["orig_argv"] == ["-u", str(one.script), "/dev/null", "later", "--more"]
        # A process that ends by itself: what it registered while it was loaded is called, its status is its own.
        assert (await one.go(words=("/dev/null", "end")))[0] == ""
        assert (await one.engine.wait_exits(one.generation, 2))[1]["code"] == 0
        assert one.engine.text("stdout", one.generation, 1).endswith("the end\n")


async def test_a_forked_rank_ends_and_starts_processes_as_a_cold_one_does(tmp_path: Path) -> None:
    acts = [act for act in re.findall(r'^    "(\w+)":', ACTS.read_text(), re.MULTILINE) if act != "waits"]

    async def show(one: Node, why_cold: str | None, **changes: Any) -> Any:
        found: dict[str, Any] = {}
        for act in acts:
            assert (await one.go(words=(act,), local_world_size=1, **changes))[0] == why_cold
            (ended,) = await one.engine.wait_exits(one.generation)
            error = ended["error"] or {}
            texts = [one.engine.text(stream, one.generation) for stream in ("stdout", "stderr")]
            found[act] = [ended["code"], ended["signal"], error.get("message"), error.get("callstack"), *texts]
        return json.loads(re.sub(r"generation_\d+|\.run-\w+", "", json.dumps(found)))

    async with node(tmp_path, ACTS.read_text()) as one:
        await one.go(words=("waits",), local_world_size=1)
        await one.warm()
        assert await show(one, "") == await show(one, None, standby="")


def _plain(facts: dict[str, Any], generation: int) -> Any:
    """Return what a rank saw without what differs between any two generations, and what packages do when imported."""
    text = json.dumps(facts)
    for old in (f"generation_{generation}", ".run-", ".wait-"):
        text = text.replace(old, "")
    plain: dict[str, Any] = json.loads(text)
    for name in ("path", "environ", "child"):
        done = ("/early", ["EARLY_WROTE", "yes"], "EARLY_WROTE=yes")
        plain[name] = sorted(one for one in plain.get(name, ()) if one not in done)
    return plain


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("killed", "the waiting process has died"),
        ("stopped", "the waiting process did not answer within 3 s"),
        ("installed", "tool.py has changed"),
        ("shadowed", "early is a module of the work tree too"),
        ("variable", "OMP_NUM_THREADS has changed since the modules were loaded"),
    ],
)
async def test_anything_odd_makes_a_cold_start(tmp_path: Path, change: str, why: str) -> None:
    async with node(tmp_path) as one:
        await one.go()
        pid = (await one.warm())["pid"]
        changes: dict[str, Any] = {}
        if change in ("killed", "stopped"):
            os.kill(pid, signal.SIGKILL if change == "killed" else signal.SIGSTOP)
        elif change == "installed":
            (one.installed / "early" / "tool.py").write_text("def tool():\n    return 1\n")
        elif change == "shadowed":
            (one.tree / "early.py").write_text("from json import tool\nuses = 0\n")
        else:
            changes["env"] = {"PYTHONPATH": str(one.installed), "OMP_NUM_THREADS": "2"}
        cold, answer = await one.go(**changes)
        assert why in cold
        # The module of the work tree is not the package: these ranks end by themselves.
        assert change == "shadowed" or all(alive(rank["pid"]) for rank in answer["ranks"])
        assert len(await one.engine.wait_mains(one.generation, 2)) == 2
        if change != "shadowed":
            assert not alive(pid)
            # The next one is right again.
            assert (await one.warm())["state"] == "ready"
            assert (await one.go(**changes))[0] == ""


async def test_a_package_sees_the_variables_that_the_script_sets_before_it_imports_it(tmp_path: Path) -> None:
    sets = "import os\nos.environ['CACHE'] = '/scratch'\nos.environ.setdefault('MODE', 'offline')\nimport reads\n"
    script = sets + SCRIPT.replace('"tool": str(tool)', '"read": reads.read, "tool": str(tool)')
    async with node(tmp_path, script) as one:
        (one.installed / "reads.py").write_text("import os\nread = [os.environ.get('CACHE'), os.environ.get('MODE')]\n")
        await one.go()
        _, cold = await one.seen()
        await one.warm()
        assert (await one.go())[0] == ""
        _, warm = await one.seen()
        assert warm["read"] == cold["read"] == ["/scratch", "offline"]
        assert "early" in warm["names"]
        one.script.write_text(script.replace("/scratch", "/other"))
        assert (await one.go())[0] == "the script sets other variables than when its modules were loaded"
        assert (await one.seen())[1]["read"] == ["/other", "offline"]


# Loading it lasts as long as there is a file beside it.
LASTS = """
import os, time
open(__file__ + ".begun", "a").close()
while os.path.exists(__file__ + ".hold"):
    time.sleep(0.01)
"""


async def test_a_restart_does_not_wait_for_one_that_is_still_loading(tmp_path: Path) -> None:
    async with node(tmp_path, "import lasts\n" + SCRIPT) as one:
        module = one.installed / "lasts.py"
        hold, begun = (module.with_name(f"lasts.py.{name}") for name in ("hold", "begun"))
        module.write_text(LASTS)
        await one.go()
        await one.seen(0)
        begun.unlink()
        hold.touch()
        await one.engine.call("standby", generation=0)
        while not begun.exists():
            await asyncio.sleep(0.01)
        await one.engine.until(lambda: one.engine.standby, "standby")
        pid = one.engine.standby[-1]["pid"]
        assert (await one.go())[0] == "the waiting process was still loading modules"
        assert len(await one.engine.wait_mains(one.generation, 2)) == 2
        hold.unlink()
        await one.engine.until(lambda: one.state() != "loading", "standby")
        assert (one.state(), one.engine.standby[-1]["pid"]) == ("ready", pid)
        assert (await one.go())[0] == ""


# It can do without, but then it would be another module.
NEEDS = """
import needs.first
try:
    import odd
except Exception:
    odd = None
"""


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("rank = os.environ.get('RANK')", "odd reads RANK when it is imported"),
        ("is_rank = 'LOCAL_RANK' in os.environ", "odd reads LOCAL_RANK when it is imported"),
        ("file = open(os.devnull)", "odd opens /dev/null when it is imported"),
        (
            "import threading, time; threading.Thread(target=time.sleep, args=(600,), daemon=True).start()",
            "odd starts a thread when it is imported",
        ),
    ],
)
async def test_a_package_that_cannot_be_loaded_early_is_left_out(tmp_path: Path, text: str, why: str) -> None:
    """And so is what cannot be imported without it."""
    script = SCRIPT.replace("import early.uses, early\n", "import early.uses, early, needs, odd\n")
    script = script.replace(
        '"tool": str(tool)', '"needs": [needs.odd.__name__, needs.first.__name__], "tool": str(tool)'
    )
    async with node(tmp_path, script) as one:
        (one.installed / "odd.py").write_text(f"import os\n{text}\n")
        (one.installed / "needs").mkdir()
        (one.installed / "needs" / "__init__.py").write_text(NEEDS)
        (one.installed / "needs" / "first.py").write_text("")
        await one.go()
        facts = await one.warm()
        assert (facts["state"], facts["left_out"]) == ("ready", [why, "needs needs odd"])
        assert (await one.go())[0] == ""
        _, after = await one.seen()
        assert "early" in after["names"]
        assert not {"odd", "needs", "needs.first"} & set(after["names"])
        assert after["needs"] == ["odd", "needs.first"]


async def test_the_waiting_process_dies_with_its_engine(tmp_path: Path) -> None:
    async with node(tmp_path) as one:
        await one.go()
        pid = (await one.warm())["pid"]
        _, answer = await one.go()
        pids = [pid, *(rank["pid"] for rank in answer["ranks"])]
        assert all(alive(each) for each in pids)
        one.engine.process.kill()
        await one.engine.process.wait()
        for _ in range(500):
            if not any(alive(each) for each in pids):
                break
            await asyncio.sleep(0.02)
        assert not any(alive(each) for each in pids)
        one.generation = -1


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


@pytest.mark.parametrize("length", [10, 5000])
async def test_what_a_forked_rank_has_started_is_known_without_its_engine(tmp_path: Path, length: int) -> None:
    """The next agent finds it by a variable in /proc, also where a rank's own variables have no room there."""
    async with node(tmp_path, LEAVES) as one:
        await one.go()
        await one.warm()
        cold, answer = await one.go(env={"PYTHONPATH": str(one.installed), "NCCL_DEBUG_FILE": "x" * length})
        assert cold == ""
        left = [pid for rank in (0, 1) for pid in (await one.seen(rank))[1]["pids"]]
        try:
            one.engine.process.kill()
            await one.engine.process.wait()
            one.generation = -1
            while any(alive(rank["pid"]) for rank in answer["ranks"]):
                await asyncio.sleep(0.02)
            assert all(alive(pid) for pid in left)
            assert end_all_marked(tmp_path, DEADLINE_S)
            while any(alive(pid) for pid in left):
                await asyncio.sleep(0.02)
        finally:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@pytest.mark.skipif(os.geteuid() != 0, reason="a mount namespace of one's own needs root")
def test_ranks_of_another_container_with_the_same_path_are_left_alone(tmp_path: Path) -> None:
    """Where containers share a PID namespace, a new agent sees the ranks of all of them."""
    root = tmp_path / "jobs" / "job"
    root.mkdir(parents=True)
    env = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(root / "generation_0" / "rank_0" / "error.json")}
    elsewhere = f"mount -t tmpfs tmpfs {root.parent} && mkdir {root} && exec sleep 600"
    with contextlib.ExitStack() as held:
        own, other = (
            held.enter_context(subprocess.Popen(command, env=env))
            for command in (["sleep", "600"], ["unshare", "--mount", "sh", "-c", elsewhere])
        )
        held.callback(other.kill)
        held.callback(own.kill)
        end = time.monotonic() + DEADLINE_S
        while Path(f"/proc/{other.pid}/comm").read_text() != "sleep\n":
            assert time.monotonic() < end
            time.sleep(0.01)
        assert end_all_marked(root, DEADLINE_S)
        assert (own.wait(DEADLINE_S), other.poll()) == (-signal.SIGKILL, None)
