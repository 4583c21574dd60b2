"""The completion scripts in real shells: a key is pressed on a terminal, and the command that it makes is looked at."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from supervisor import known
from supervisor.cli.completion import SHELLS
from supervisor.inventory import load

# Completion runs the program; any other command is only noted.
PROGRAM = """#!/bin/sh
[ "$1" = completion ] && exec '{python}' -m supervisor "$@"
echo "$*" >> '{noted}'
"""
TYPED = {
    "cor\t": "cordon",
    "status ho\t": "status hosts.toml",
    "status hosts.toml tr\t": "status hosts.toml train-k3f9",
    "cordon hosts.toml --node we\t": "cordon hosts.toml --node west",
    "logs hosts.toml --rank=\t": "logs hosts.toml --rank=0",
    "up hosts.toml my\t": "up hosts.toml my script.py",
}
START = {
    "bash": ["bash", "--noprofile", "--norc", "-i"],
    "zsh": ["zsh", "-f", "-i"],
}
LOAD = {"bash": ". ./script", "zsh": "autoload -U compinit; compinit -D -u; . ./script"}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with an inventory whose job is known, a script, and the program in front of the PATH."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "supervisor"
    program.write_text(PROGRAM.format(python=sys.executable, noted=tmp_path / "noted"))
    program.chmod(0o755)
    (tmp_path / "hosts.toml").write_text('[[hosts]]\nname = "gpu[1-2]"\n[[hosts]]\nname = "west"\n')
    (tmp_path / "my script.py").touch()
    known.note(load(tmp_path / "hosts.toml"), [{"job": "train-k3f9", "state": "running", "world_size": 1}])
    return tmp_path


def type_into(shell: str, here: Path, text: str) -> None:
    """Type a text into an interactive shell on a terminal, and wait until the shell has ended."""
    (here / "script").write_text(SHELLS[shell].lstrip())
    ours, theirs = pty.openpty()
    mode = termios.tcgetattr(theirs)
    mode[3] &= ~termios.ICANON  # lines that wait for the shell to read them are longer than a terminal's limit
    termios.tcsetattr(theirs, termios.TCSANOW, mode)
    environment = {**os.environ, "TERM": "dumb", "HOME": str(here)}
    process = subprocess.Popen(
        START[shell], cwd=here, env=environment, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    )
    os.close(theirs)
    try:
        os.write(ours, text.encode())
        while _read(ours):
            pass
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:
        # The last process has closed the other end.
        return b""


@pytest.mark.parametrize("shell", START)
def test_tab_completes_in_a_shell_on_a_terminal(shell: str, here: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")
    lines = [LOAD[shell], *(f"supervisor {typed}" for typed in TYPED), "exit 0", ""]
    type_into(shell, here, "\n".join(lines))
    assert (here / "noted").read_text().splitlines() == list(TYPED.values())


@pytest.mark.skipif(shutil.which("fish") is None, reason="needs fish")
def test_fish_completes_with_descriptions(here: Path) -> None:
    (here / "script").write_text(SHELLS["fish"])
    asks = "".join(f"; complete -C 'supervisor {typed.rstrip()}'" for typed in TYPED)
    command = ["fish", "--no-config", "-c", f"source script{asks}"]
    environment = {**os.environ, "HOME": str(here)}
    done = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines() == [
        "cordon\tdo not readmit a node that leaves",
        "hosts.toml\tused before",
        "train-k3f9\trunning",
        "west\twest",
        "--rank=0\trank",
        "my script.py",
    ]
