"""What we use of torch works, or is done without, where torch lacks what older versions lack (tests/versions.py)."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import socket
import subprocess
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.versions import LACKS, LIBUV_SOCKET, ROOT, resolve


def remove(name: str) -> None:
    """Take away from this process's torch what a version lacks."""
    if name == LIBUV_SOCKET:
        without_libuv_socket()
        return
    path, _, field = name.partition(":")
    parent, _, last = path.rpartition(".")
    owner = resolve(parent)
    if not field:
        delattr(owner, last)
        sys.modules[path] = None  # type: ignore[assignment]
    elif dataclasses.is_dataclass(kind := getattr(owner, last)):
        kind.__dataclass_fields__.pop(field)
        kind.__init__ = refusing(kind.__init__, field)  # type: ignore[misc, method-assign]
    else:
        setattr(owner, last, refusing(kind, field))


def refusing(function: Any, parameter: str) -> Any:
    def call(*args: Any, **options: Any) -> Any:
        if parameter in options:
            raise TypeError(f"{function.__name__}() got an unexpected keyword argument '{parameter}'")
        return function(*args, **options)

    return call


def without_libuv_socket() -> None:
    from torch import distributed

    before: Any = distributed.TCPStore  # type: ignore[attr-defined]

    class TCPStore(before):  # type: ignore[misc]
        def __init__(self, *args: Any, use_libuv: bool = True, **options: Any) -> None:
            if use_libuv and "master_listen_fd" in options:
                raise NotImplementedError(
                    "The libuv TCPStore backend does not support initialization with an listen fd."
                )
            super().__init__(*args, use_libuv=use_libuv, **options)

    vars(distributed)["TCPStore"] = TCPStore


def use(version: str, folder: Path) -> None:
    """Use everything of `torch_api`, and the bootstrap, in a process that has loaded torch."""
    import torch

    torch.__version__ = version  # type: ignore[assignment]
    for name in LACKS[version]:
        if not name.startswith("/handler/"):
            remove(name)
    from remote_agent.engine import torch_api, worker
    from remote_agent.engine.launchers.torch_agent_process import launch_settings
    from remote_agent.engine.order import Order

    facts = torch_api.facts()
    assert facts["torch"] == version
    assert facts["devices"]["cpu"] >= 1
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        store = torch_api.open_store("127.0.0.1", listening)
    client = vars(torch_api)["TCPStore"]("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=20))
    client.set("key", "value")
    assert store.get("key") == b"value"
    files = torch_api.RankFiles(str(folder), {0: str(folder)})
    words = [sys.executable, "-c", "print('started')"]
    context = torch_api.start("rank", {0: words}, {0: dict(os.environ)}, files, "")
    assert context.wait(60) is not None
    assert (folder / "stdout.log").read_text() == "started\n"
    if "torch.numa.binding" in LACKS[version]:
        with pytest.raises(ValueError, match=f"needs torch 2.10 or newer; this is {version}"):
            torch_api.start("rank", {0: words}, {0: {}}, files, "node")
    order = Order(
        generation=0, run_id="job", role="default", group_rank=0, base_rank=0, local_world_size=1, world_size=1,
        group_world_size=1, address="127.0.0.1", master_addr="", master_port=0, restart_count=0, max_restarts=0, env={},
        cwd=str(folder), kind="script", script="", args=(), log_dir=folder, links="", numa_binding="",
        signals_to_handle="SIGTERM", virtual_local_rank=False, shutdown_timeout=5, slow=True, standby="",
        rendezvous={
            "backend": "c10d", "endpoint": f"127.0.0.1:{port}", "run_id": "job", "conf": "", "nnodes": "1",
            "is_ours": True, "local_addr": "127.0.0.1",
        },
    )  # fmt: skip
    torch_api.launch({**launch_settings(order), "logs_specs": files}, "", sys.executable, ["-c", "print('launched')"])
    assert (folder / "stdout.log").read_text() == "launched\n"
    worker.quietly(worker.report_group, str(folder))
    worker.record_collectives()
    os.environ["RANK"] = "0"
    worker.serve_stacks(str(folder))
    assert asyncio.run(asks(folder / "0.sock"))


async def asks(path: Path) -> bool:
    """Whether a worker server answers."""
    from remote_agent.engine.inspect.stacks import fetch

    return "ping" in json.loads(await fetch(str(path), ""))


def main(folder: Path) -> int:
    """Load torch once, and use it in a fork for each version that lacks something; returns how many fail."""
    import torch.distributed.elastic.agent.server.local_elastic_agent
    import torch.distributed.launcher.api
    import torch.numa.binding  # noqa: F401

    pids = {}
    for version in filter(LACKS.get, LACKS):
        (folder / version).mkdir()
        if (pid := os.fork()) == 0:
            try:
                use(version, folder / version)
            except BaseException:  # noqa: BLE001  a fork must not go on
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        pids[version] = pid
    failed = [version for version, pid in pids.items() if os.waitpid(pid, 0)[1]]
    print(f"failed: {failed}" if failed else f"right: {', '.join(pids)}", flush=True)
    return len(failed)


def test_what_older_versions_lack_is_done_without(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.contract.test_old_torch", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["right: 2.4.1, 2.6.0, 2.8.0, 2.11.0"]), done.stderr


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
