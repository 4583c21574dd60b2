"""A worker sees what it sees under torchrun: environment, arguments, `__main__`, signals."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from remote_agent.engine.order import Order, link_nccl, rank_directories, worker_environment
from supervisor.ssh.agent_file import MAIN
from tests.agents.engine_process import ROOT, SCRIPTS, SharedEngine, engine, order

# They name a place, a process or a run; both sides must have them.
MAY_DIFFER = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_RUN_ID"}
SEEN_BY_A_SHELL = {"PYTEST_CURRENT_TEST", "_", "SHLVL", "OLDPWD"}
EXTRA = {"USER_SAYS": "h\u00e9llo = world", "TORCHELASTIC_MAX_RESTARTS": "inherited"}


def under_torchrun(root: Path, ranks: int, env: dict[str, str], *options: str) -> list[dict[str, Any]]:
    root.mkdir()
    words = ["--nnodes", "1", "--nproc-per-node", str(ranks), "--max-restarts", "3", "--log-dir", f"{root}/logs"]
    words += [*options, str(SCRIPTS / "dump.py")]
    # The engine of a job has no terminal either.
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words, f"{root}/seen", "--option", "a b"],
        env={**env, "PWD": str(root)},
        cwd=root,
        stdin=subprocess.DEVNULL,
        check=True,
        timeout=60,
    )
    return [json.loads((root / f"seen{rank}").read_text()) for rank in range(ranks)]


def under_the_engine(root: Path, shared: SharedEngine, ranks: int, **changes: Any) -> list[dict[str, Any]]:
    root.mkdir()
    generation = shared.generation()

    async def run() -> None:
        port = (await shared.engine.call("prepare", generation=generation, host="127.0.0.1"))["port"]
        await shared.engine.go(
            SCRIPTS / "dump.py",
            f"{root}/seen",
            "--option",
            "a b",
            generation=generation,
            local_world_size=ranks,
            master_port=port,
            # How an inventory moves our root on a node; no business of the script.
            env={"USER_SAYS": EXTRA["USER_SAYS"], "SUPERVISOR_HOME": str(root)},
            cwd=str(root),
            **changes,
        )
        exits = await shared.engine.wait_exits(generation, ranks)
        assert [one["code"] for one in exits] == [0] * ranks
        await shared.engine.call("stop", generation=generation, grace_s=0.0)

    shared.do(run())
    return [json.loads((root / f"seen{rank}").read_text()) for rank in range(ranks)]


# Ranks, environment, options of torchrun, the same in an order.
CASES: dict[str, tuple[int, dict[str, str], list[str], dict[str, Any]]] = {
    "one rank": (1, {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "PYTHONPATH": ""}, [], {}),
    "one GPU each": (
        2,
        {"CUDA_VISIBLE_DEVICES": "3, 5"},
        ["--virtual-local-rank", "--signals-to-handle", "SIGTERM,SIGUSR2"],
        {"virtual_local_rank": True, "signals_to_handle": "SIGTERM,SIGUSR2"},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_worker_sees_what_torchrun_shows_it(tmp_path: Path, case: str) -> None:
    ranks, preset, options, changes = CASES[case]
    env = {key: value for key, value in os.environ.items() if key not in SEEN_BY_A_SHELL}
    env.update(EXTRA, **preset)
    theirs = under_torchrun(tmp_path / "theirs", ranks, env, *options)
    engine_env = {key: value for key, value in env.items() if key != "USER_SAYS"}
    with SharedEngine(tmp_path / "job").running(engine_env) as shared:
        ours = under_the_engine(tmp_path / "ours", shared, ranks, **changes)
    for rank in range(ranks):
        expected, found = theirs[rank], ours[rank]
        # The one variable of ours, which the script may use or not.
        assert found["environ"].pop("SUPERVISOR_METRICS").endswith(f"rank_{rank}/metrics.jsonl")
        assert sorted(found["environ"]) == sorted(expected["environ"])
        for name in found["environ"].keys() - MAY_DIFFER - {"PWD"}:
            assert (name, found["environ"][name]) == (name, expected["environ"][name])
        for one, root in ((found, "ours"), (expected, "theirs")):
            assert one["environ"].pop("PWD") == one.pop("cwd") == str(tmp_path / root)
            assert one["argv"].pop(1) == f"{tmp_path / root}/seen"
            del one["environ"], one["orig_argv"][3]
        assert found == expected


def test_the_environment_of_a_rank_in_the_middle(tmp_path: Path) -> None:
    with SharedEngine(tmp_path / "job").running() as shared:

        async def run() -> None:
            await shared.engine.go(
                SCRIPTS / "dump.py",
                f"{tmp_path}/seen",
                generation=5,
                run_id="train-1",
                role="trainer",
                group_rank=2,
                base_rank=4,
                local_world_size=2,
                world_size=9,
                group_world_size=4,
                master_addr="10.0.0.1",
                master_port=1234,
                restart_count=4,
                max_restarts=7,
            )
            await shared.engine.wait_exits(5, 2, base=4)

        shared.do(run())
    environ = json.loads((tmp_path / "seen5").read_text())["environ"]
    assert {name: environ[name] for name in sorted(environ) if name in EXPECTED} == EXPECTED
    assert environ["TORCHELASTIC_ERROR_FILE"] == str(tmp_path / "job" / "generation_5" / "rank_5" / "error.json")
    assert "SUPERVISOR_HOME" not in environ


def test_a_worker_without_a_device_of_its_own_is_refused(tmp_path: Path) -> None:
    given = order(tmp_path, "train.py", local_world_size=2, virtual_local_rank=True, env={"CUDA_VISIBLE_DEVICES": "7"})
    assert worker_environment(Order.from_args(given), 0, {})["CUDA_VISIBLE_DEVICES"] == "7"
    with pytest.raises(ValueError, match="local rank 1 is beyond the devices of CUDA_VISIBLE_DEVICES=7"):
        worker_environment(Order.from_args(given), 1, {})


def test_a_given_number_of_threads_stays(tmp_path: Path) -> None:
    given = order(tmp_path, "train.py", local_world_size=2, env={"OMP_NUM_THREADS": "3"})
    assert worker_environment(Order.from_args(given), 0, {})["OMP_NUM_THREADS"] == "3"


def test_nccl_is_asked_to_write_beside_the_ranks_own_output(tmp_path: Path) -> None:
    def found(env: dict[str, str]) -> str | None:
        given = order(tmp_path, "train.py", base_rank=2, world_size=3, env=env)
        return worker_environment(Order.from_args(given), 0, {}).get("NCCL_DEBUG_FILE")

    assert found({}) is None
    assert found({"NCCL_DEBUG": "INFO"}) == str(tmp_path / "generation_0" / "rank_2" / "nccl.log")
    assert found({"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": "/mine"}) == "/mine"


def test_the_users_own_nccl_file_is_a_ranks_if_it_is_that_process_own(tmp_path: Path) -> None:
    host = socket.gethostname().partition(".")[0]
    for path, link in (
        ("/mine/%h.%p.%%.%q", f"/mine/{host}.77.%.%q"),
        ("mine.%p", str(tmp_path / "mine.77")),
        ("/mine.%h", None),
    ):
        given = Order.from_args(order(tmp_path, "train.py", cwd=str(tmp_path), env={"NCCL_DEBUG_FILE": path}))
        directories = rank_directories(given)
        link_nccl(given, {0: 77}, directories)
        made = directories[0] / "nccl.log"
        assert (os.readlink(made) if made.is_symlink() else None) == link


EXPECTED = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "GROUP_RANK": "2",
    "ROLE_RANK": "5",
    "ROLE_NAME": "trainer",
    "WORLD_SIZE": "9",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_WORLD_SIZE": "4",
    "ROLE_WORLD_SIZE": "9",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "1234",
    "TORCHELASTIC_RESTART_COUNT": "4",
    "TORCHELASTIC_MAX_RESTARTS": "7",
    "TORCHELASTIC_RUN_ID": "train-1",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    "OMP_NUM_THREADS": "1",
}


async def test_an_engine_in_a_zipapp(tmp_path: Path) -> None:
    """As on a node, where no source lies about."""
    archive = tmp_path / "agent.pyz"
    with zipfile.ZipFile(archive, "w") as zipped:
        for path in (ROOT / "remote_agent").rglob("*.py"):
            zipped.write(path, path.relative_to(ROOT))
        zipped.writestr("__main__.py", MAIN)
    # It prints where our frames go.
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / "sitecustomize.py").write_text("print('welcome')")
    program = (sys.executable, "-S", str(archive), "engine", "--job")
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "start")}
    async with engine(tmp_path / "job", env, program, tmp_path) as one:
        (tmp_path / "job" / "fails.py").write_text("raise RuntimeError('in a zip')")
        await one.go("fails.py")
        ended = (await one.wait_exits(0))[0]
        assert ended["error"]["message"] == "RuntimeError: in a zip"
