"""Imports go one way, the node's side needs the standard library alone, and the headless side starts light."""

from __future__ import annotations

import ast
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
FROM_AGENT = (
    "remote_agent.wire",
    "remote_agent.diagnose",
    # What a pattern may cost, and which lines are one record, is the same on both sides.
    "remote_agent.logs.filters",
    "remote_agent.logs.pattern",
    "remote_agent.logs.rows",
    "remote_agent.__version__",
)
PLUGIN = ROOT / "supervisor" / "handlers.py"
# The parts of the operator's side that may not know of the command line, in the order of the data.
LOWER = ("inventory", "ssh", "session", "postmortem", "recording")


@dataclass(frozen=True)
class Import:
    """One imported name with its place; `lazy` when it happens inside a function or for type checkers alone."""

    path: Path
    line: int
    name: str
    lazy: bool

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line} imports {self.name}"


@functools.lru_cache
def _imports(package: str) -> list[Import]:
    return list(_read(package))


def _read(package: str) -> Iterator[Import]:
    for path in sorted((ROOT / package).rglob("*.py")):
        tree = ast.parse(path.read_text(), str(path))
        lazy = {id(inner) for node in ast.walk(tree) if _defers(node) for inner in ast.walk(node)}
        for node in ast.walk(tree):
            for name in _names(node, path):
                yield Import(path, getattr(node, "lineno", 0), name, id(node) in lazy)


def _defers(node: ast.AST) -> bool:
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.dump(node.test)
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def _names(node: ast.AST, path: Path) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parts = path.relative_to(ROOT).with_suffix("").parts[: -node.level]
            base = ".".join([*parts, *([base] if base else [])])
        return [f"{base}.{alias.name}" for alias in node.names]
    return []


def _of(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def _report(wrong: list[Import]) -> str:
    return "\n".join(str(one) for one in wrong)


def test_the_agent_imports_only_the_standard_library() -> None:
    allowed = set(sys.stdlib_module_names) | {"remote_agent"}
    wrong = [
        one
        for one in _imports("remote_agent")
        if one.name.split(".")[0] not in allowed and not (_of(one.name, "torch") and _may_use_torch(one.path))
    ]
    assert not wrong, _report(wrong)


def _may_use_torch(path: Path) -> bool:
    return path.parent.name == "remote_agent" and (path.name == "worker.py" or path.name.startswith("engine"))


def test_the_supervisor_never_imports_torch() -> None:
    wrong = [one for one in _imports("supervisor") if _of(one.name, "torch")]
    assert not wrong, _report(wrong)


def test_the_supervisor_takes_only_the_wire_and_the_diagnosis_from_the_agent() -> None:
    wrong = [
        one
        for one in _imports("supervisor")
        # The bare package tells where the files are that go into the zipapp.
        if _of(one.name, "remote_agent")
        and one.name != "remote_agent"
        and not _of(one.name, *FROM_AGENT)
        # It runs on a node, in torchrun's process, and gives the node's side its certificate.
        and one.path != PLUGIN
    ]
    assert not wrong, _report(wrong)


def test_torchs_plugin_imports_nothing_until_it_is_used() -> None:
    """torch loads it in every process that imports torch.distributed.elastic."""
    allowed = sys.stdlib_module_names
    wrong = [
        one
        for one in _imports("supervisor")
        if one.path == PLUGIN and not one.lazy and one.name.split(".")[0] not in allowed
    ]
    assert not wrong, _report(wrong)


def test_only_the_command_line_imports_the_tui() -> None:
    homes = (ROOT / "supervisor" / "tui", ROOT / "supervisor" / "cli")
    wrong = [
        one
        for one in _imports("supervisor")
        if _of(one.name, "supervisor.tui")
        and one.path != ROOT / "supervisor" / "__main__.py"
        and not any(home in one.path.parents for home in homes)
    ]
    assert not wrong, _report(wrong)


def test_the_command_line_imports_the_tui_only_when_it_opens_it() -> None:
    wrong = [
        one
        for one in _imports("supervisor")
        if _of(one.name, "supervisor.tui", "textual") and not one.lazy and "tui" not in one.path.parts
    ]
    assert not wrong, _report(wrong)


@pytest.mark.parametrize("part", LOWER)
def test_the_lower_parts_do_not_know_the_upper_ones(part: str) -> None:
    upper = [
        f"supervisor.{name}" for name in ("cli", "tui", "plain", "actions", "demo", *LOWER[LOWER.index(part) + 1 :])
    ]
    place = ROOT / "supervisor" / part
    wrong = [
        one
        for one in _imports("supervisor")
        if (place in one.path.parents or one.path == place.with_suffix(".py")) and _of(one.name, *upper)
    ]
    assert not wrong, _report(wrong)


def test_the_wire_and_the_diagnosis_need_nothing_else_of_the_agent() -> None:
    wrong = [
        one
        for one in [*_imports("remote_agent/wire"), *_imports("remote_agent/diagnose")]
        if _of(one.name, "remote_agent") and not _of(one.name, "remote_agent.wire", "remote_agent.diagnose")
    ]
    assert not wrong, _report(wrong)


@pytest.mark.parametrize("module", ["supervisor.__main__", "supervisor.cli"])
def test_the_command_line_starts_without_torch_and_without_a_screen(module: str) -> None:
    code = (
        f"import sys, {module}\n"
        "heavy = [name for name in ('torch', 'textual', 'rich') if name in sys.modules]\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr


def _interpreters() -> dict[str, str]:
    """Interpreters by version, 3.9 to 3.14, from the PATH and from pyenv."""
    found = {}
    pyenv = Path(os.environ.get("PYENV_ROOT", "/root/.pyenv")) / "versions"
    for minor in range(9, 15):
        version = f"3.{minor}"
        candidates = [*map(str, sorted(pyenv.glob(f"{version}.*/bin/python"))), shutil.which(f"python{version}")]
        for candidate in candidates:
            if candidate and _runs(candidate, version):
                found[version] = candidate
                break
    return found


def _runs(candidate: str, version: str) -> bool:
    code = f"import sys; sys.exit('%d.%d' % sys.version_info[:2] != '{version}')"
    try:
        return subprocess.run([candidate, "-c", code], capture_output=True, check=False, timeout=20).returncode == 0
    except OSError:
        return False


INTERPRETERS = _interpreters()
_COMPILE = """
import sys
from pathlib import Path
for path in sorted(Path(sys.argv[1]).rglob("*.py")):
    compile(path.read_text(encoding="utf-8"), str(path), "exec", dont_inherit=True)
"""
_IMPORT_ALL = """
import importlib, sys, warnings
from pathlib import Path
warnings.simplefilter("error")
sys.dont_write_bytecode = True
root = Path(sys.argv[1])
sys.path.insert(0, str(root))
for path in sorted((root / "remote_agent").rglob("*.py")):
    if path.name == "__main__.py" or path.name == "worker.py" or path.name.startswith("engine_torch"):
        continue
    parts = path.relative_to(root).with_suffix("").parts
    importlib.import_module(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
assert "torch" not in sys.modules
"""


def _run(interpreter: str, *args: str) -> None:
    done = subprocess.run([interpreter, *args], cwd="/", capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("version", sorted(INTERPRETERS))
def test_the_agent_compiles_imports_and_starts_on_every_python(version: str) -> None:
    interpreter = INTERPRETERS[version]
    _run(interpreter, "-c", _COMPILE, str(ROOT / "remote_agent"))
    _run(interpreter, "-I", "-c", _IMPORT_ALL, str(ROOT))
    start = f"import sys, runpy; sys.path.insert(0, {str(ROOT)!r}); sys.argv[1:] = ['connect', '--help']; "
    _run(interpreter, "-B", "-c", start + "runpy.run_module('remote_agent', run_name='__main__')")


@pytest.mark.parametrize("version", sorted(set(INTERPRETERS) - {"3.9"}))
def test_the_supervisor_compiles_on_every_python(version: str) -> None:
    _run(INTERPRETERS[version], "-c", _COMPILE, str(ROOT / "supervisor"))
