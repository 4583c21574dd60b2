"""`supervisor demo` runs a real job on its own hosts, and nothing of it is left, however it ends."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from supervisor.cli import demo
from supervisor.cli.demo import hosts_in_thread
from tests.cluster.leftovers import describe
from tests.cluster.network import process_state
from tests.cluster.scripts import STEPS
from tests.screens.test_pty import terminal

pytestmark = [
    pytest.mark.usefixtures("ssh_home"),
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed"),
]


# A demo whose script needs no torch: six imports of it take longer than all the rest.
LIGHT_DEMO = """
import sys
from pathlib import Path
from supervisor.__main__ import main
from supervisor.cli import demo
examples = Path(sys.argv.pop(1))
demo.examples_dir = lambda: examples
raise SystemExit(main())
"""


@pytest.fixture
def light_demo(tmp_path: Path, light_torch: None) -> list[str]:
    """The command of a demo that trains with a script of ours until it is ended."""
    script = tmp_path / "examples" / "ddp" / "train.py"
    script.parent.mkdir(parents=True)
    script.write_text(STEPS)
    return [sys.executable, "-c", LIGHT_DEMO, str(tmp_path / "examples"), "demo"]


@pytest.fixture
def temporary(tmp_path: Path) -> Path:
    """Where the demo makes its files, and nobody else does."""
    directory = tmp_path / "demo"
    directory.mkdir()
    return directory


def _start(command: list[str], directory: Path, repository: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*command, "--headless"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=repository,
        env={**os.environ, "TMPDIR": str(directory)},
    )


def _left(directory: Path) -> list[str]:
    """The processes of the demo's hosts that are alive, and the files below its temporary directory."""
    wanted = f"HOME={directory}/".encode()
    found = [str(path) for path in directory.iterdir()]
    for entry in os.listdir("/proc"):
        try:
            environment = Path(f"/proc/{entry}/environ").read_bytes() if entry.isdigit() else b""
        except OSError:
            continue
        if wanted in environment and process_state(int(entry)) not in {"", "Z", "X"}:
            found.append(describe(int(entry)))
    return found


def test_the_demo_trains_on_both_hosts_and_leaves_nothing(repository: Path, temporary: Path) -> None:
    with _start([sys.executable, "-m", "supervisor", "demo"], temporary, repository) as process:
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, out + err
    for rank in ("n1:0|", "n1:1|", "n2:2|", "n2:3|"):
        lines = [line for line in out.splitlines() if line.startswith(rank)]
        assert any("step=40/40 loss=" in line for line in lines), f"{rank} did not finish:\n{out}"
    assert _left(temporary) == []


def test_an_interrupt_ends_the_demo_and_leaves_nothing(
    repository: Path, temporary: Path, light_demo: list[str]
) -> None:
    with _start(light_demo, temporary, repository) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "step=" in line:
                break
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    assert process.returncode != 0, out + err
    assert "Traceback" not in err, err
    assert _left(temporary) == []


def test_a_window_that_is_closed_ends_the_demo_and_leaves_nothing(temporary: Path, light_demo: list[str]) -> None:
    with terminal(80, 24, light_demo, TMPDIR=str(temporary)) as tty:
        tty.wait_for(b"step=")
        tty.send(b"q")
        tty.wait_for(b"Leave?")
        # As from make, which keeps the signal for itself.
        tty.close()
        tty.process.wait(60)
    assert _left(temporary) == []


def test_without_torch_there_is_one_clear_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert demo.run_demo(headless=True) == 1
    message = capsys.readouterr().err
    assert f"torch, which is not installed for {sys.executable}" in message
    assert "pip install torch" in message


def test_a_terminal_that_is_gone_keeps_nothing_alive(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    master, terminal = os.openpty()
    gone = open(terminal, "w")  # noqa: SIM115  closing it fails
    os.close(master)
    with hosts_in_thread(1, temporary) as made, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", gone)
        demo.end_job(made, temporary / "hosts.toml")
    with pytest.raises(OSError, match="Input/output error"):
        gone.close()
