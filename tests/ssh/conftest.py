"""No test reads the ssh configuration or the keys of whoever runs it.

In: nothing. Out: an empty home, the agent file.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from supervisor.ssh import AgentFile


@pytest.fixture(autouse=True)
def ssh_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The operator's home, with an empty ~/.ssh."""
    home = tmp_path / "operator"
    (home / ".ssh").mkdir(parents=True, mode=0o700)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    monkeypatch.delenv("SUPERVISOR_HOME", raising=False)
    return home


@pytest.fixture(scope="session")
def agent() -> AgentFile:
    """The agent that is pushed."""
    return AgentFile.build()
