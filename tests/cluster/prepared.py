"""The agent as it lies on a host that has had it before: pushed, and compiled for this Python.

In: nothing. Out: a directory to copy as a host's `.supervisor`, which is made once in a run: push and compilation take
half a second of a processor on each new host.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path


def prepared() -> Path:
    """Return that directory, in the temporary one of this run."""
    made = Path(tempfile.gettempdir()) / "prepared"
    if not made.exists():
        part = Path(tempfile.mkdtemp())
        _make(part)
        try:
            part.rename(made)
        except OSError:
            # Another process of the run was first.
            shutil.rmtree(part)
    return made


def _make(directory: Path) -> None:
    from remote_agent.bridge import bytecode
    from supervisor.ssh import AgentFile  # asyncssh is slow to import, and most processes do not need it

    agent = AgentFile.build()
    (directory / "agents").mkdir(mode=0o700)
    pushed = directory / "agents" / f"{agent.sha256}.pyz"
    pushed.touch(mode=0o600)
    pushed.write_bytes(agent.data)
    bytecode.compiled(str(pushed))
