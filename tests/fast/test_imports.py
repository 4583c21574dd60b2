"""Modules import only from rooms above their own and in no circle; a node needs the standard library alone.

The order of the rooms is that of ARCHITECTURE.md's tree, from the bottom of the program to its entry points.
"""

from __future__ import annotations

import ast
import functools
import gc
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.pythons import interpreters

ROOT = Path(__file__).resolve().parents[2]


def _rooms() -> Iterator[str]:
    """Packages and modules, as ARCHITECTURE.md lists them; the entry points come last."""
    tree = (ROOT / "ARCHITECTURE.md").read_text().partition("```\nremote_agent/ ")[2].partition("```")[0]
    package = "remote_agent"
    for line in tree.splitlines()[1:]:
        name = re.split(r"[/.]", line.split()[0])[0]
        if line[0] != " ":
            yield f"{package}.__main__"
            package = name
            continue
        yield f"{package}.{name}"
        if name == "launch":
            yield TORCHRUN_HANDLER
    yield f"{package}.__main__"


# It runs on a node, in torchrun's process, and hands the node's side its certificate.
TORCHRUN_HANDLER = "supervisor.handlers"
# A room may import rooms above it in this list. A dotted name is a package or one module.
ROOMS = (*_rooms(),)

# What the operator's side may take from the node's: the wire, the diagnosis, the rules for patterns and records, the
# history's buckets, the choice of snapshots, and the coordinator's preview of what a request leads to.
SHARED = (
    "remote_agent.wire", "remote_agent.diagnose", "remote_agent.text", "remote_agent.history",
    "remote_agent.snapshots.choice", "remote_agent.coordinator.preview", "remote_agent.coordinator.state",
    "remote_agent",
)  # fmt: skip
# The only modules that may import torch.
TORCH = ("remote_agent.engine.torch_api", "remote_agent.engine.worker")


@dataclass(frozen=True)
class Import:
    """One imported name with its place; `lazy` inside a function and under TYPE_CHECKING."""

    module: str
    place: str
    name: str
    lazy: bool

    def __str__(self) -> str:
        return f"{self.place} imports {self.name}"


@functools.lru_cache(None)
def _trees() -> dict[str, tuple[Path, ast.Module]]:
    """Return the syntax tree of each module of the product by its dotted name."""
    trees = {}
    for package in ("remote_agent", "supervisor"):
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            trees[name] = path.relative_to(ROOT), ast.parse(path.read_text(), str(path))
    gc.freeze()  # the collector need not look at them after each test
    return trees


@functools.lru_cache(None)
def _imports() -> tuple[Import, ...]:
    return tuple(one for module, (path, tree) in _trees().items() for one in _imports_of(module, path, tree))


def _imports_of(module: str, path: Path, tree: ast.Module) -> Iterator[Import]:
    lazy = {id(inner) for node in ast.walk(tree) if _defers(node) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for name in _names(node):
                yield Import(module, f"{path}:{node.lineno}", name, id(node) in lazy)


def _defers(node: ast.AST) -> bool:
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.dump(node.test)
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def _names(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    assert not node.level, "imports are absolute"
    return [f"{node.module}.{alias.name}" for alias in node.names]


def _in(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def _module_of(name: str) -> str:
    """Return the module of ours that holds an imported name, or the empty string."""
    while name and name not in _trees():
        name = name.rpartition(".")[0]
    return name


def _room(module: str) -> str:
    return max((room for room in ROOMS if _in(module, room)), key=len, default="")


def _check(wrong: Iterator[Import] | list[Import]) -> None:
    lines = [str(one) for one in wrong]
    assert not lines, "\n".join(lines)


def test_a_room_imports_only_rooms_above_it() -> None:
    packages = ("remote_agent", "supervisor")  # `__init__` of the root: the version and a paragraph, nothing imported
    homeless = [module for module in _trees() if module not in packages and not _room(module)]
    assert not homeless, f"not in the table of rooms: {homeless}"
    wrong = []
    for one in _imports():
        here, there = _room(one.module), _room(_module_of(one.name))
        if here and there and ROOMS.index(there) > ROOMS.index(here):
            wrong.append(one)
    _check(wrong)


def test_the_paragraph_of_each_folder_names_the_folders_that_it_imports() -> None:
    """Those that its own modules import, without what lies in folders below it; its own room is not named."""
    folders = {module for module, (path, _) in _trees().items() if path.name == "__init__.py" and "." in module}
    imported: dict[str, set[str]] = {folder: set() for folder in folders}
    for one in _imports():
        folder = one.module if one.module in folders else one.module.rpartition(".")[0]
        there = _room(_module_of(one.name))
        if folder in folders and there not in ("", _room(folder)):
            imported[folder].add(there)
    wrong = []
    for folder in sorted(folders):
        text = " ".join((ast.get_docstring(_trees()[folder][1]) or "").split())
        said = re.search(r"Imports (nothing|every|of|`)[^.]*\.", text)
        if said is None or _folders_in(said[0], folder) != imported[folder]:
            wrong.append(f"{folder}: imports {sorted(imported[folder])}, says {said and said[0]}")
    assert not wrong, "\n".join(wrong)


def _folders_in(sentence: str, folder: str) -> set[str]:
    """Read "Imports `wire` and `text`.", "Imports every folder above except `logs`; of the node's side `wire`."."""
    own = folder.partition(".")[0]
    mine, _, theirs = sentence.partition("of the node's side")
    named = {f"{own}.{name}" for name in re.findall(r"`(\w+)`", mine)}
    if "every folder above" in mine:
        above = ROOMS[: ROOMS.index(_room(folder))]
        named = {room for room in above if _in(room, own)} - named
    return named | {f"remote_agent.{name}" for name in re.findall(r"`(\w+)`", theirs)}


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports inside functions and for type checkers count too."""
    graph: dict[str, set[str]] = {module: set() for module in _trees()}
    for one in _imports():
        if (target := _module_of(one.name)) not in ("", one.module):
            graph[one.module].add(target)
    graphlib.TopologicalSorter(graph).prepare()


@dataclass(frozen=True)
class Owner:
    """A class of ours whose objects have a field of some name."""

    module: str
    name: str
    is_record: bool

    def may_be_set_in(self, module: str) -> bool:
        """Its own module; if it is a record (a dataclass), its whole folder; if it is a widget, all screens."""
        folder = self.module.rpartition(".")[0]
        if folder == "supervisor.tui.widgets":
            return _in(module, "supervisor.tui")
        return _in(module, folder if self.is_record and "." in folder else self.module)


@functools.lru_cache(None)
def _owners() -> dict[str, set[Owner]]:
    """Return by the name of a field the classes of ours whose objects have it."""
    owners: dict[str, set[Owner]] = {}
    for module, (_, tree) in _trees().items():
        for made in ast.walk(tree):
            if isinstance(made, ast.ClassDef):
                marks = [ast.unparse(mark) for mark in made.decorator_list]
                is_record = any("dataclass" in mark for mark in marks)
                for name in () if "frozen=True" in str(marks) else _fields(made):
                    owners.setdefault(name, set()).add(Owner(module, made.name, is_record))
    return owners


def _fields(made: ast.ClassDef) -> Iterator[str]:
    for node in ast.walk(made):
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load) and _is_own(node.value):
            yield node.attr
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node in made.body:
            yield node.target.id


def test_a_function_assigns_only_to_fields_of_its_own_modules_objects() -> None:
    wrong = {
        f"{path}:{line} assigns to {target}"
        for module, (path, tree) in _trees().items()
        for line, target in _foreign_assignments(module, tree)
    }
    assert not wrong, "\n".join(sorted(wrong))


def _foreign_assignments(module: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Stores to `a.b.c` where no class with a field `c` allows it; `a` is neither just created nor of a library."""
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    foreign = [name.split(".") for node in imports for name in _names(node) if not _module_of(name)]
    libraries = {name for names in foreign for name in (names[0], names[-1])}
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        args = [arg for arg in ast.walk(function) if isinstance(arg, ast.arg) and arg.annotation is not None]
        types = {arg.arg: set(_words(arg.annotation)) for arg in args if arg.annotation is not None}
        created = {*_created(function), "options"}  # argparse makes the options
        for node in ast.walk(function):
            if not isinstance(node, ast.Attribute) or isinstance(node.ctx, ast.Load) or _is_own(node.value):
                continue
            annotated = types.get(ast.unparse(node.value), set())
            is_textual = isinstance(node.value, ast.Attribute) and node.value.attr == "styles"
            if is_textual or {_root(node.value), *annotated} & libraries or ast.unparse(node.value) in created:
                continue
            owners = _owners().get(node.attr, set())
            owners = {owner for owner in owners if owner.name in annotated} or owners
            if owners and not any(owner.may_be_set_in(module) for owner in owners):
                yield node.lineno, ast.unparse(node)


def _is_own(value: ast.expr) -> bool:
    return isinstance(value, ast.Name) and value.id in ("self", "cls")


def _root(value: ast.expr) -> str:
    """The first name of `a.b(c)[d].e`."""
    while not isinstance(value, ast.Name):
        value = next(inner for inner in ast.iter_child_nodes(value) if isinstance(inner, ast.expr))
    return value.id


def _created(function: ast.AST) -> Iterator[str]:
    """The names to which a function assigns a new object of a class."""
    for node in ast.walk(function):
        if not isinstance(node, ast.Assign | ast.AnnAssign) or not isinstance(node.value, ast.Call):
            continue
        if ast.unparse(node.value.func).rpartition(".")[2].lstrip("_")[:1].isupper():
            yield from map(ast.unparse, node.targets if isinstance(node, ast.Assign) else [node.target])


def _words(annotation: ast.expr) -> Iterator[str]:
    """The first name of each dotted name in an annotation, quoted or not."""
    for node in ast.walk(annotation):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from _words(ast.parse(node.value, mode="eval").body)


def test_a_node_needs_the_standard_library_alone() -> None:
    allowed = set(sys.stdlib_module_names) | {"remote_agent", "torch"}
    _check(one for one in _imports() if _in(one.module, "remote_agent") and one.name.split(".")[0] not in allowed)


def test_torch_is_imported_by_its_one_door_and_by_the_ranks_alone() -> None:
    _check(one for one in _imports() if _in(one.name, "torch") and not _in(one.module, *TORCH))


def test_the_operators_side_takes_only_shared_rooms_of_the_nodes_side() -> None:
    for one in _imports():
        if _in(one.module, "supervisor") and one.module != TORCHRUN_HANDLER and _in(one.name, "remote_agent"):
            assert {_room(_module_of(one.name)), _module_of(one.name)} & {"", *SHARED}, str(one)


def test_the_wire_the_text_rules_and_the_diagnosis_need_nothing_else() -> None:
    """The operator's side imports them, and a post mortem on any machine has no more."""
    rooms = ("remote_agent.wire", "remote_agent.text", "remote_agent.diagnose")
    own = [one for one in _imports() if _in(one.module, *rooms) and _in(one.name, "remote_agent")]
    _check(one for one in own if not _in(one.name, *rooms))


def test_torchs_plugin_imports_nothing_until_it_is_used() -> None:
    """torch loads it in every process that imports torch.distributed.elastic."""
    own = [one for one in _imports() if one.module == TORCHRUN_HANDLER and not one.lazy]
    _check(one for one in own if one.name.split(".")[0] not in sys.stdlib_module_names)


def test_only_the_command_line_imports_the_tui_and_only_to_open_it() -> None:
    for one in _imports():
        if not _in(one.module, "supervisor.tui") and _in(one.name, "supervisor.tui", "textual"):
            assert (one.lazy, _in(one.module, "supervisor.cli", "supervisor.__main__")) == (True, True), str(one)


def test_the_screens_use_these_members_of_a_session_alone() -> None:
    """Whoever replaces the session of a screen, as the tests do, needs no others."""
    text = "\n".join(path.read_text() for path in (ROOT / "supervisor" / "tui").rglob("*.py"))
    used = set(re.findall(r"\b_?source\.([a-z_]+)", text)) - {"pop"}
    assert sorted(used) == [
        "ask_user", "cancel_launch", "edited", "ended", "events", "failure", "forward", "forwards", "from_line",
        "hosts", "incidents", "job", "launching", "made_s", "merged", "nccl", "notices", "request", "rows", "series",
        "shell", "stacks", "status", "status_age_s", "version", "why",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("modules", "slow"),
    [
        (("supervisor.__main__", "supervisor.cli"), ("torch", "textual", "rich")),
        (("remote_agent.__main__", "remote_agent.bridge.connect"),
         ("asyncio", "argparse", "dataclasses", "hashlib", "logging", "shutil", "subprocess")),
        (("remote_agent.agent.jobs", "remote_agent.coordinator.status"),
         ("asyncio", "remote_agent.coordinator.inputs", "remote_agent.diagnose.hang.stalls", "zipfile")),
    ],
    ids=["the command line", "the bridge of a connection", "the jobs of a node"],
)  # fmt: skip
def test_what_starts_for_every_command_imports_little(modules: tuple[str, ...], slow: tuple[str, ...]) -> None:
    code = f"import sys, {', '.join(modules)}; print([name for name in {slow} if name in sys.modules])"
    alone = ["-S"] if modules[0].startswith("remote_agent") else []
    done = subprocess.run(
        [sys.executable, *alone, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_a_command_that_uses_ssh_starts_without_a_compiler(tmp_path: Path) -> None:
    for name in ("gcc", "cc", "ld"):
        program = tmp_path / name
        program.write_text(f'#!/bin/sh\necho "{name} $*" >> {tmp_path}/started\n')
        program.chmod(0o755)
    code = "import supervisor.ssh, supervisor.cli.demo, supervisor.inventory.sshconfig"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert not (tmp_path / "started").exists(), (tmp_path / "started").read_text()


INTERPRETERS = interpreters()
_COMPILE = """
import sys
from pathlib import Path
for path in sorted(Path(sys.argv[1]).rglob("*.py")):
    compile(path.read_text(encoding="utf-8"), str(path), "exec", dont_inherit=True)
"""
_START = """
NEED_TORCH = ("torch_api.py", "preflight.py", "torch_agent_process.py", "torchrun_handler.py")
import importlib, runpy, sys, warnings
from pathlib import Path
warnings.simplefilter("error")
sys.dont_write_bytecode = True
root = Path(sys.argv[1])
sys.path.insert(0, str(root))
for path in sorted((root / "remote_agent").rglob("*.py")):
    if path.name in ("__main__.py", "worker.py", *NEED_TORCH):
        compile(path.read_text(encoding="utf-8"), str(path), "exec", dont_inherit=True)
        continue
    parts = path.relative_to(root).with_suffix("").parts
    importlib.import_module(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
assert "torch" not in sys.modules
sys.argv[1:] = ["connect", "--help"]
runpy.run_module("remote_agent", run_name="__main__")
"""


@pytest.mark.parametrize("version", sorted(INTERPRETERS))
def test_every_python_compiles_the_program_and_starts_the_agent(version: str) -> None:
    codes = {"remote_agent": _START} if version == "3.9" else {"remote_agent": _START, "supervisor": _COMPILE}
    for package, code in codes.items():
        place = str(ROOT if code == _START else ROOT / package)
        command = [INTERPRETERS[version], "-I", "-c", code, place]
        done = subprocess.run(command, cwd="/", capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
