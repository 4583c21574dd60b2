"""The wheel alone is the program: it runs in an empty environment, outside the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ERROR = """Traceback (most recent call last):
  File "train.py", line 3, in <module>
ValueError: no such budget
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Path:
    """An environment with the wheel and nothing else; the libraries that it needs are those of this Python."""
    root = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    _run([*pip, "wheel", "--no-deps", "--wheel-dir", root, repository], root)
    (wheel,) = root.glob("*.whl")
    _run([sys.executable, "-m", "venv", "--without-pip", root / "venv"], root)
    python = root / "venv" / "bin" / "python"
    _run([*pip, "--python", python, "install", "--no-deps", "--no-index", wheel], root)
    (packages,) = (root / "venv" / "lib").glob("python*/site-packages")
    libraries = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "libraries.pth").write_text("\n".join(libraries))
    return root / "venv"


def _run(command: list[str | Path], cwd: Path) -> str:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_installed_program_shows_its_help(environment: Path, tmp_path: Path) -> None:
    code = "import remote_agent, supervisor; print(supervisor.__file__, remote_agent.__file__, sep='\\n')"
    files = _run([environment / "bin" / "python", "-c", code], tmp_path).splitlines()
    assert all(Path(file).is_relative_to(environment) for file in files), files
    assert "diagnose" in _run([environment / "bin" / "supervisor", "--help"], tmp_path)


def test_the_installed_program_finds_the_cause_of_a_failure(environment: Path, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank_0.log").write_text(ERROR)
    said = _run([environment / "bin" / "supervisor", "diagnose", "logs"], tmp_path)
    assert "no such budget" in said


def test_the_themes_and_examples_are_in_the_wheel(environment: Path, tmp_path: Path) -> None:
    code = "from supervisor import paths; print(paths.examples_dir(), paths.themes_dir(), sep='\\n')"
    directories = _run([environment / "bin" / "python", "-c", code], tmp_path).splitlines()
    for directory in map(Path, directories):
        assert directory.is_relative_to(environment)
        assert any(directory.iterdir())
