"""A preflight's requests to a node: they end with the connection, and a node in a poor state still answers."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from remote_agent.wire import MAGIC, encode

WAIT_S = 30.0


async def ask_and_hang_up(tmp_path: Path, repository: Path) -> tuple[int, str]:
    """Ask for facts where torch takes for ever to import, hang up meanwhile; return the status, the child's pid."""
    package = tmp_path / "slow" / "torch"
    package.mkdir(parents=True)
    fifo = tmp_path / "importing"
    os.mkfifo(fifo)
    text = f"import os, time\nopen({str(fifo)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
    (package / "__init__.py").write_text(text)
    paths = os.pathsep.join([str(package.parent), str(repository)])
    bridge = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "remote_agent", "connect",
        env={**os.environ, "PYTHONPATH": paths, "SUPERVISOR_HOME": str(tmp_path / "home")},
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        assert bridge.stdin is not None
        assert bridge.stdout is not None
        assert await bridge.stdout.readexactly(len(MAGIC)) == MAGIC
        bridge.stdin.write(encode({"id": 1, "op": "facts", "args": {"env": {}, "workdir": None}}))
        await bridge.stdin.drain()
        child = await asyncio.to_thread(fifo.read_text)
        bridge.stdin.close()
        return await bridge.wait(), child
    finally:
        if bridge.returncode is None:
            bridge.kill()
            await bridge.wait()


def test_a_preflight_ends_with_its_operator(tmp_path: Path, repository: Path) -> None:
    status, child = asyncio.run(asyncio.wait_for(ask_and_hang_up(tmp_path, repository), WAIT_S))
    assert status == 0
    assert not Path(f"/proc/{child}").exists()
