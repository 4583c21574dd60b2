"""The Pythons of this machine: `python -m tests.pythons` runs tests/fast on each that supervisor supports.

In: interpreters from the PATH and from pyenv. Out: interpreters by version; the exit code of the runs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SUPPORTED = ("3.10", "3.11", "3.12", "3.13")


def interpreters() -> dict[str, str]:
    """Return interpreters by version, 3.9 to 3.14."""
    found = {}
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for version in (f"3.{minor}" for minor in range(9, 15)):
        candidates = [*map(str, sorted(pyenv.glob(f"{version}.*/bin/python"))), shutil.which(f"python{version}")]
        path = next((path for path in candidates if path and _runs(path, version)), None)
        if path:
            found[version] = path
    return found


def _runs(path: str, version: str) -> bool:
    code = f"import sys; sys.exit('%d.%d' % sys.version_info[:2] != '{version}')"
    try:
        return subprocess.run([path, "-c", code], capture_output=True, check=False, timeout=20).returncode == 0
    except OSError:
        return False


def main() -> int:
    """Run tests/fast on each supported Python, in a virtual environment of its own; returns 1 if one of them fails."""
    found = interpreters()
    failed = [version for version in SUPPORTED if version in found and not _run_fast(version, found[version])]
    missing = [version for version in SUPPORTED if version not in found]
    print(f"failed: {failed or 'none'}; not on this machine: {missing or 'none'}", flush=True)
    return 1 if failed else 0


def _run_fast(version: str, interpreter: str) -> bool:
    print(f"Python {version}: {interpreter}", flush=True)
    environment = ROOT / ".venv" / f"python{version}"
    python = environment / "bin" / "python"
    commands: list[list[str | Path]] = [
        [interpreter, "-m", "venv", environment],
        [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--editable", ".[test]"],
        [python, "-m", "pytest", "-q", "-n", "auto", "-p", "no:cacheprovider", "tests/fast"],
    ]
    if python.exists():
        del commands[0]
    return all(subprocess.run(command, cwd=ROOT, check=False).returncode == 0 for command in commands)


if __name__ == "__main__":
    sys.exit(main())
