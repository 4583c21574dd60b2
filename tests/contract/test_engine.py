"""An engine starts, watches and stops generations of real workers, and says what happened."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from remote_agent.base.files import read_text
from remote_agent.wire import CallFailed
from tests.agents.engine_process import DEADLINE_S, PY_SPY, SCRIPTS, SharedEngine, alive, children_of, engine, speak
from tests.fast.test_ports import neighbours

# The kernel's clock for the times of files ticks at least this often.
TICK_NS = 10_000_000


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedEngine]:
    with SharedEngine(tmp_path_factory.mktemp("engine")).running() as one:
        yield one


def refused(shared: SharedEngine, op: str, **args: Any) -> CallFailed:
    with pytest.raises(CallFailed) as caught:
        shared.do(shared.engine.call(op, **args))
    return caught.value


def script(shared: SharedEngine, name: str, text: str) -> str:
    (shared.root / name).write_text(text)
    return name


def test_hello_has_the_installed_versions(shared: SharedEngine) -> None:
    facts = shared.do(shared.engine.call("hello"))
    assert facts["torch"].startswith("2.")
    assert facts["python"] == ".".join(str(part) for part in sys.version_info[:3])
    assert isinstance(facts["gpus"], int)
    assert {"cuda", "nccl"} < facts.keys()


async def test_a_torch_that_does_not_import_is_one_clear_message(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import no_such_library\n")
    async with engine(tmp_path, {**os.environ, "PYTHONPATH": str(tmp_path)}) as one:
        for op, args in (("hello", {}), ("prepare", {"generation": 0, "host": "127.0.0.1"})):
            with pytest.raises(CallFailed) as caught:
                await one.call(op, **args)
            assert caught.value.kind == "engine"
            assert caught.value.message == (
                "torch cannot be imported: ModuleNotFoundError: No module named 'no_such_library'"
            )
        assert await one.call("stop", generation=0, grace_s=1.0) == {"exits": [], "stacks": {}}


def test_each_generation_has_a_store_of_its_own(shared: SharedEngine) -> None:
    first, second = shared.generation(), shared.generation()
    prepare = [shared.engine.call("prepare", generation=one, host="127.0.0.1") for one in (first, second)]
    ports = [shared.do(one)["port"] for one in prepare]
    assert ports[0] != ports[1]
    # Only the newest is served.
    with socket.create_connection(("127.0.0.1", ports[1]), 5):
        pass
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", ports[0]), 5)


async def test_ranks_may_meet_before_torch_is_imported_and_the_engine_never_imports_it(tmp_path: Path) -> None:
    rank = tmp_path / "rank.py"
    rank.write_text(
        "import os\n"
        "from torch.distributed import TCPStore\n"
        "store = TCPStore(os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']), is_master=False)\n"
        "store.set(os.environ['RANK'], 'here')\n"
        "store.wait(['0', '1'])\n"
    )
    async with engine(tmp_path) as one:
        port = (await one.call("prepare", generation=0, host="127.0.0.1"))["port"]
        await one.go(rank, master_port=port, local_world_size=2)
        assert [ended["code"] for ended in await one.wait_exits(0, 2)] == [0, 0]
        assert "libtorch" not in Path(f"/proc/{one.process.pid}/maps").read_text()


async def test_a_store_whose_process_dies_is_reported(tmp_path: Path) -> None:
    async with engine(tmp_path) as one:
        port = (await one.call("prepare", generation=3, host="127.0.0.1"))["port"]
        os.kill(await store_of(one.process.pid), signal.SIGKILL)
        assert await one.wait_failed() == {
            "generation": 3, "message": "the process that serves the store has died",
        }  # fmt: skip
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), 5)
        # The next group has one again.
        port = (await one.call("prepare", generation=4, host="127.0.0.1"))["port"]
        socket.create_connection(("127.0.0.1", port), 5).close()


async def store_of(engine: int) -> int:
    """Return the pid of the process that serves an engine's stores, once it has its own command line."""
    end = time.monotonic() + 20
    while not (stores := stores_of(engine)):
        assert time.monotonic() < end
        await asyncio.sleep(0.01)
    assert len(stores) == 1
    return stores[0]


def stores_of(engine: int) -> list[int]:
    """Return the pids of the processes that serve an engine's stores."""
    return [pid for pid in children_of(engine) if "\0store\0" in read_text(f"/proc/{pid}/cmdline")]


def test_a_store_on_an_address_that_is_not_ours(shared: SharedEngine) -> None:
    failed = refused(shared, "prepare", generation=shared.generation(), host="no-such-host.invalid")
    assert failed.kind == "store"
    assert "no-such-host.invalid" in failed.message


def test_a_store_listens_in_the_range_that_the_job_names(shared: SharedEngine) -> None:
    with neighbours() as (first, second):
        low, high = first.getsockname()[1], second.getsockname()[1]
        args: dict[str, Any] = {"host": "127.0.0.1", "ports": f"{low}-{high}"}
        failed = refused(shared, "prepare", generation=shared.generation(), **args)
        assert (failed.kind, f"no port is free in {low}-{high}" in failed.message) == ("ports", True)
        second.close()
        assert shared.do(shared.engine.call("prepare", generation=shared.generation(), **args))["port"] == high


async def test_two_nodes_reduce_over_the_store_of_the_first(tmp_path: Path) -> None:
    async with engine(tmp_path / "n1") as one, engine(tmp_path / "n2") as two:
        port = (await one.call("prepare", generation=1, host="127.0.0.1"))["port"]
        common = {"world_size": 2, "group_world_size": 2, "master_port": port, "restart_count": 1, "generation": 1}
        start_ns = time.time_ns()
        answers = await asyncio.gather(
            one.go(SCRIPTS / "collective.py", base_rank=0, **common),
            two.go(SCRIPTS / "collective.py", base_rank=1, group_rank=1, **common),
        )
        mains = await one.wait_mains(1) + await two.wait_mains(1, base=1)
        print(f"go -> all main(): {(max(mains) - start_ns) / 1e6:.1f} ms")
        exits = await one.wait_exits(1) + await two.wait_exits(1, base=1)
        assert [(end["rank"], end["code"], end["error"]) for end in exits] == [(0, 0, None), (1, 0, None)]
        assert [answer["ranks"][0]["pid"] for answer in answers] == [end["pid"] for end in exits]
        for engine_, rank in ((one, 0), (two, 1)):
            assert engine_.text("stdout", 1, rank) == "sum [8.0, 8.0] 2 1\n"
            # The worker server says nothing.
            assert "WorkerServer" not in engine_.text("stderr", 1, rank)


def test_stacks_and_flight_records_of_live_ranks(shared: SharedEngine) -> None:
    generation = shared.generation()

    async def run() -> tuple[dict[str, Any], dict[str, Any]]:
        one = shared.engine
        port = (await one.call("prepare", generation=generation, host="127.0.0.1"))["port"]
        await one.go(SCRIPTS / "collective.py", "wait", generation=generation, local_world_size=2, master_port=port)
        await speak(shared.rank_dir(generation, rank) for rank in (0, 1))
        kept = await one.call("keep", ranks=[1, 7])
        rank_1 = shared.rank_dir(generation, 1)
        assert kept["files"] == {"1": [str(rank_1 / "stacks.txt"), str(rank_1 / "flight.json")]}
        stacks = await one.call("stacks", ranks=None)
        return stacks, await one.call("stop", generation=generation, grace_s=5, collect=True)

    live, stopped = shared.do(run())
    assert live["unreachable"] == {}
    for rank in ("0", "1"):
        assert "in wait_in_training" in live["stacks"][rank]
        assert "<no Python frame>" not in live["stacks"][rank]
        assert "in wait_in_training" in stopped["stacks"][rank]
        assert (shared.rank_dir(generation, int(rank)) / "stacks.txt").read_text() == stopped["stacks"][rank]
        flight = json.loads((shared.rank_dir(generation, int(rank)) / "flight.json").read_text())
        assert [entry["profiling_name"] for entry in flight["entries"]] == ["gloo:all_reduce"] * 3
    assert [(end["rank"], end["signal"], end["stopped_by_us"]) for end in stopped["exits"]] == [
        (0, "SIGTERM", True),
        (1, "SIGTERM", True),
    ]
    # Nothing of ours stays beside the logs.
    assert sorted(path.name for path in shared.rank_dir(generation).parent.iterdir()) == ["rank_0", "rank_1"]


def test_stacks_of_a_script_without_torch(shared: SharedEngine) -> None:
    generation = shared.generation()
    name = script(shared, "waits.py", "import os\nread, _ = os.pipe()\nos.fork() or print()\nos.read(read, 1)\n")

    async def run() -> tuple[dict[str, Any], dict[str, Any]]:
        await shared.engine.go(name, generation=generation)
        await shared.engine.wait_mains(generation)
        await speak([shared.rank_dir(generation, 0)])
        stacks = await shared.engine.call("stacks", ranks=[0, 7])
        return stacks, await shared.engine.call("stop", generation=generation, grace_s=5, collect=True)

    stacks, stopped = shared.do(run())
    (child,) = stacks["children"]["0"]
    assert "waits.py" in child["name"]
    assert child["doing"].startswith("sleeps in ")
    if PY_SPY:
        assert "line 4 in <module>" in child["stack"]
        assert "line 4 in <module>" in stacks["stacks"]["0"]
    else:
        assert (stacks["stacks"], "py-spy is not installed" in stacks["note"]) == ({}, True)
        assert "torch.distributed" in stacks["unreachable"]["0"]
    assert stopped["stacks"] == {}
    assert refused(shared, "stacks", ranks=None).kind == "no_workers"


def test_a_rank_that_cannot_answer_does_not_hold_up_the_stop(shared: SharedEngine) -> None:
    generation = shared.generation()
    name = script(shared, "frozen.py", "import torch.distributed, os, signal; os.kill(os.getpid(), signal.SIGSTOP)")

    async def run() -> tuple[dict[str, Any], float]:
        answer = await shared.engine.go(name, generation=generation)
        pid = answer["ranks"][0]["pid"]
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            await asyncio.sleep(0.02)
        start = time.monotonic()
        stopped = await shared.engine.call("stop", generation=generation, grace_s=0.2, collect=True)
        return stopped, time.monotonic() - start

    stopped, seconds = shared.do(run())
    assert stopped["exits"][0]["signal"] == "SIGKILL"
    assert 1.5 < seconds < 30.0


def test_a_failure_is_reported_at_once_with_its_evidence(shared: SharedEngine) -> None:
    generation = shared.generation()
    name = script(
        shared,
        "one_fails.py",
        "import os, sys, time\n"
        "if os.environ['RANK'] == '0': time.sleep(600)\n"
        "print('line\\n' * 100, file=sys.stderr)\n"
        "raise RuntimeError(f'{time.time_ns()}')\n",
    )

    async def run() -> Any:
        await shared.engine.go(name, generation=generation, local_world_size=2)
        ended = (await shared.engine.wait_exits(generation, base=1))[0]
        heard_ns = time.time_ns()
        stopped = await shared.engine.call("stop", generation=generation, grace_s=5, collect=True)
        assert [end["stopped_by_us"] for end in stopped["exits"]] == [True, False]
        raised_ns = int(ended["error"]["message"].removeprefix("RuntimeError: "))
        print(f"raise -> told: {(heard_ns - raised_ns) / 1e6:.1f} ms")
        # A file's time is that of the kernel's last tick.
        assert raised_ns - TICK_NS <= ended["error"]["timestamp_ns"] <= ended["t_ns"] <= heard_ns
        return ended

    ended = shared.do(run())
    assert (ended["rank"], ended["local_rank"], ended["code"], ended["signal"]) == (1, 1, 1, None)
    assert len(ended["tail"].splitlines()) == 40
    assert ended["tail"].endswith(ended["error"]["message"])
    assert ended["stderr_lines"] == 101 + len(ended["error"]["callstack"].splitlines())


def test_a_grace_that_is_not_used_ends_in_sigkill(shared: SharedEngine, tmp_path: Path) -> None:
    generation = shared.generation()

    async def run() -> tuple[dict[str, Any], dict[str, Any], float]:
        await shared.engine.go(SCRIPTS / "stubborn.py", f"{tmp_path}/pids", generation=generation)
        while not (tmp_path / "pids0").exists():
            await asyncio.sleep(0.02)
        start = time.monotonic()
        slow = asyncio.ensure_future(shared.engine.call("stop", generation=generation, grace_s=60.0))
        await asyncio.sleep(0.2)
        assert not slow.done()
        # An operator who cannot wait asks again.
        fast = await shared.engine.call("stop", generation=generation, grace_s=0.1)
        return fast, await slow, time.monotonic() - start

    fast, slow, seconds = shared.do(run())
    assert fast["exits"] == slow["exits"]
    assert fast["exits"][0]["signal"] == "SIGKILL"
    assert seconds < 30.0
    pids = [int(pid) for pid in (tmp_path / "pids0").read_text().split()]
    assert len(pids) == 4
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []


@pytest.mark.parametrize("way", ["die", "leave"])
def test_what_a_dead_worker_left_is_killed(shared: SharedEngine, tmp_path: Path, way: str) -> None:
    generation = shared.generation()
    name = script(
        shared,
        "first_of_two.py",
        "import os, runpy, time\n"
        "if os.environ['RANK'] == '1': time.sleep(600)\n"
        f"runpy.run_path({str(SCRIPTS / 'stubborn.py')!r}, run_name='__main__')\n",
    )

    async def run() -> list[int]:
        await shared.engine.go(name, f"{tmp_path}/pids", way, generation=generation, local_world_size=2)
        await shared.engine.wait_exits(generation)
        pids = [int(pid) for pid in (tmp_path / "pids0").read_text().split()]
        # While the other rank goes on.
        left = pids[1:]
        for _ in range(int(DEADLINE_S / 0.02)):
            left = [pid for pid in left if alive(pid)]
            if not left:
                break
            await asyncio.sleep(0.02)
        assert (generation, 1) not in shared.engine.exits
        await shared.engine.call("stop", generation=generation, grace_s=5)
        return left

    assert shared.do(run()) == []


def test_a_stop_before_its_start_prevents_it(shared: SharedEngine) -> None:
    generation = shared.generation()
    assert shared.do(shared.engine.call("stop", generation=generation, grace_s=1.0)) == {"exits": [], "stacks": {}}
    name = script(shared, "never.py", "")
    with pytest.raises(CallFailed) as caught:
        shared.do(shared.engine.go(name, generation=generation))
    assert caught.value.kind == "stale"
    assert refused(shared, "prepare", generation=generation, host="127.0.0.1").kind == "stale"


def test_a_stop_during_the_start_ends_it(shared: SharedEngine) -> None:
    generation = shared.generation()
    name = script(shared, "waits.py", "import time; time.sleep(600)")
    # With torch's facts known, the order to start is the first to be carried out.
    shared.do(shared.engine.call("hello"))

    async def run() -> tuple[dict[str, Any], dict[str, Any]]:
        going = asyncio.ensure_future(shared.engine.go(name, generation=generation, local_world_size=4))
        await asyncio.sleep(0)
        stopped = await shared.engine.call("stop", generation=generation, grace_s=5.0)
        return await going, stopped

    gone, stopped = shared.do(run())
    assert [end["pid"] for end in stopped["exits"]] == [rank["pid"] for rank in gone["ranks"]]
    assert [rank for rank in gone["ranks"] if Path(f"/proc/{rank['pid']}").exists()] == []


def test_old_generations_are_refused(shared: SharedEngine) -> None:
    old, new = shared.generation(), shared.generation()
    name = script(shared, "waits.py", "import time; time.sleep(600)")

    async def run() -> list[str]:
        kinds = []
        await shared.engine.go(name, generation=new)
        for op, generation in (("stop", old), ("go", old), ("go", new), ("prepare", old)):
            with pytest.raises(CallFailed) as caught:
                if op == "go":
                    await shared.engine.go(name, generation=generation)
                else:
                    await shared.engine.call(op, generation=generation, grace_s=0, host="127.0.0.1")
            kinds.append(caught.value.kind)
        with pytest.raises(CallFailed) as caught:
            await shared.engine.go(name, generation=new + 1)
        kinds.append(caught.value.kind)
        first = await shared.engine.call("stop", generation=new, grace_s=5)
        # Asked again, it answers the same at once.
        assert await shared.engine.call("stop", generation=new, grace_s=5) == first
        return kinds

    assert shared.do(run()) == ["stale", "stale", "stale", "stale", "busy"]


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"cwd": "/no/such/place"}, "cwd", "/no/such/place"),
        ({"kind": "shell"}, "bad_request", "shell"),
        ({"local_world_size": 0}, "bad_request", "0 workers"),
        ({"log_dir": "relative"}, "bad_request", "relative"),
        ({"master_port": "80"}, "bad_request", "master_port"),
        ({"log_dir": "/proc/no"}, "start", "/proc/no"),
        ({"env": {"PYTHON_EXEC": "/no/such/python"}}, "start", "/no/such/python"),
    ],
)
def test_an_order_that_cannot_be_carried_out(
    shared: SharedEngine, changes: dict[str, Any], kind: str, words: str
) -> None:
    with pytest.raises(CallFailed) as caught:
        shared.do(shared.engine.go("x.py", generation=shared.generation(), **changes))
    assert caught.value.kind == kind
    assert words in caught.value.message
    assert refused(shared, "dance").kind == "unknown_op"


def test_earlier_logs_of_a_generation_are_kept_aside(shared: SharedEngine) -> None:
    generation = shared.generation() + 1
    earlier = shared.rank_dir(generation)
    earlier.mkdir(parents=True)
    (earlier / "stdout.log").write_text("precious")
    ended, out, _ = shared.run(script(shared, "says.py", "print('new')"))
    assert (ended["code"], out) == (0, b"new\n")
    assert (earlier.with_name("rank_0.old1") / "stdout.log").read_text() == "precious"


def test_ps_names_the_job_and_the_script(shared: SharedEngine) -> None:
    generation = shared.generation()
    name = script(shared, "waits.py", "import time; time.sleep(600)")

    async def run() -> bytes:
        answer = await shared.engine.go(name, generation=generation)
        await shared.engine.wait_mains(generation)
        line = Path(f"/proc/{answer['ranks'][0]['pid']}/cmdline").read_bytes()
        await shared.engine.call("stop", generation=generation, grace_s=5)
        return line

    words = shared.do(run()).decode().split("\0")
    assert words == [sys.executable, "-X", "supervisor=run", "-u", name, ""]
