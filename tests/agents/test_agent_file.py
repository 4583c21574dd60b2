"""The pushed agent: one small file, the same bytes for the same sources, which every shell and Python can start."""

from __future__ import annotations

import ast
import hashlib
import io
import json
import os
import resource
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from remote_agent.wire import MAGIC
from supervisor.ssh import AgentFile, loader
from supervisor.ssh.agent_file import ELSEWHERE, code_of

pytestmark = pytest.mark.usefixtures("ssh_home")

# Sent to every host over links that may be slow.
BUDGET_BYTES = 360_000


def test_the_agent_is_small_and_always_the_same(agent: AgentFile, tmp_path: Path, repository: Path) -> None:
    print(f"the agent has {len(agent.sent):,} bytes")
    assert len(agent.sent) < BUDGET_BYTES
    one, other = tmp_path / "one", tmp_path / "other"
    shutil.copytree(repository / "remote_agent", one, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(one, other)
    (other / "__pycache__").mkdir()
    (other / "__pycache__" / "x.py").touch()
    (other / "notes.txt~").touch()
    os.utime(other / "bridge" / "connect.py", (1, 1))
    assert AgentFile.build(one) == AgentFile.build(other)
    (other / "bridge" / "connect.py").write_text("")
    assert AgentFile.build(one).sha256 != AgentFile.build(other).sha256


def test_nothing_in_the_agent_needs_what_is_left_out(agent: AgentFile, repository: Path) -> None:
    with zipfile.ZipFile(io.BytesIO(agent.data)) as archive:
        nodes = [node for name in archive.namelist() for node in ast.walk(ast.parse(archive.read(name)))]
        left = {
            "remote_agent." + name[:-3].replace("/", ".")
            for name in ELSEWHERE
            if (repository / "remote_agent" / name).exists()
        }
        assert len(left) == len(ELSEWHERE)
        assert not any(f"remote_agent/{name}" in archive.namelist() for name in ELSEWHERE)
    named = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    named |= {f"{node.module}.{one.name}" for node in nodes if isinstance(node, ast.ImportFrom) for one in node.names}
    named |= {one.name for node in nodes if isinstance(node, ast.Import) for one in node.names}
    assert "remote_agent.engine.engine" in named
    assert not named & left


class EmptyDocstrings(ast.NodeTransformer):
    def visit_Expr(self, node: ast.Expr) -> ast.Expr:
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            node.value.value = ""
        return node


class WithoutTypes(ast.NodeTransformer):
    """Leaves nothing of what is imported for a type checker only, which never runs, and of the types of results."""

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815  the visitor's names

    def visit_If(self, node: ast.If) -> ast.If | None:
        return None if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING" else node


def test_the_pushed_code_is_the_source_without_its_docstrings_comments_and_imports_for_types(repository: Path) -> None:
    for path in (repository / "remote_agent").rglob("*.py"):
        source = path.read_bytes()
        sent = code_of(source)
        assert sent.count(b"\n") == source.count(b"\n"), path
        expected, found = (WithoutTypes().visit(ast.parse(code)) for code in (source, sent))
        lines = {node.lineno for node in ast.walk(expected) if isinstance(node, ast.stmt)}
        assert lines == {node.lineno for node in ast.walk(found) if isinstance(node, ast.stmt)}, path
        assert ast.dump(found) == ast.dump(EmptyDocstrings().visit(expected)), path


def greeter() -> AgentFile:
    """A program as large as the agent, of any bytes, that only greets: nothing of it is compiled on each new host."""
    output = io.BytesIO()
    with zipfile.ZipFile(output, "w") as archive:
        archive.writestr("__main__.py", f"import os; os.write(1, {MAGIC!r})")
        archive.writestr("more", os.urandom(BUDGET_BYTES))
    return AgentFile(output.getvalue(), hashlib.sha256(output.getvalue()).hexdigest())


SHELLS = [name for name in ("sh", "bash", "dash", "zsh", "tcsh", "csh", "fish", "ksh", "busybox") if shutil.which(name)]


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(
    ("home", "prelude"),
    [
        ("plain", None),
        ('it\'s a "$HOME" `x` \\ !home ü', None),
        ("plain", "true"),
        ("it's", "x='a b'\n[ \"$x\" = 'a b' ] && export Y=\"$x !\" # comment"),
    ],
)
def test_every_login_shell_runs_the_command(shell: str, home: str, prelude: str | None, tmp_path: Path) -> None:
    agent = greeter()
    command = loader.command(sys.executable, prelude, str(tmp_path / home), agent.sha256, len(agent.data))
    words = [shell, "sh", "-c", command] if shell == "busybox" else [shell, "-c", command]
    first = subprocess.run(words, input=agent.sent, capture_output=True, check=False, timeout=30)
    assert first.stdout == loader.NEED + b"\n" + MAGIC, first.stderr
    assert (tmp_path / home / "agents" / f"{agent.sha256}.pyz").read_bytes() == agent.data
    second = subprocess.run(words, input=b"", capture_output=True, check=False, timeout=30)
    assert second.stdout == MAGIC, second.stderr


def test_the_agent_is_compiled_once_for_each_python(agent: AgentFile, tmp_path: Path) -> None:
    pushed = tmp_path / "agents" / f"{agent.sha256}.pyz"
    compiled = pushed.with_suffix(f".{sys.implementation.cache_tag}.pyz")
    _connect(agent, tmp_path)
    assert {path.name for path in pushed.parent.iterdir()} == {pushed.name, compiled.name}
    assert compiled.stat().st_mode & 0o777 == 0o600
    with zipfile.ZipFile(compiled) as archive, zipfile.ZipFile(pushed) as source:
        modules = {f"{name}c" for name in source.namelist() if name.endswith(".py")}
        assert modules == set(archive.namelist()) - set(source.namelist())
        assert all(archive.read(name) == source.read(name) for name in source.namelist())
    made = compiled.stat()
    code = f"import sys;sys.path.insert(0,{str(compiled)!r});import remote_agent.base.paths as p;print(p.__file__)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/").stdout
    assert said == f"{compiled}/remote_agent/base/paths.pyc\n"
    _connect(agent, tmp_path)
    assert compiled.stat() == made


@pytest.mark.parametrize("name", ["pushed", "compiled"])
@pytest.mark.parametrize("damage", ["empty", "short", "other bytes"])
def test_a_damaged_agent_is_made_anew(name: str, damage: str, agent: AgentFile, tmp_path: Path) -> None:
    pushed = tmp_path / "agents" / f"{agent.sha256}.pyz"
    compiled = pushed.with_suffix(f".{sys.implementation.cache_tag}.pyz")
    _connect(agent, tmp_path)
    path = pushed if name == "pushed" else compiled
    whole = path.read_bytes()
    middle = len(whole) // 2
    path.write_bytes(
        {"empty": b"", "short": whole[:middle], "other bytes": whole[:middle] + b"?" + whole[middle + 1 :]}[damage]
    )
    _connect(agent, tmp_path, again=name == "pushed")
    assert pushed.read_bytes() == agent.data
    with zipfile.ZipFile(compiled) as archive:
        assert archive.testzip() is None
    assert {each.name for each in pushed.parent.iterdir()} == {pushed.name, compiled.name}


@pytest.mark.parametrize("has_key", [True, False])
def test_a_file_with_the_compiled_agents_name_that_only_claims_to_be_it_is_not_run(
    has_key: bool, agent: AgentFile, tmp_path: Path
) -> None:
    pushed = tmp_path / "agents" / f"{agent.sha256}.pyz"
    compiled = pushed.with_suffix(f".{sys.implementation.cache_tag}.pyz")
    if has_key:
        _connect(agent, tmp_path)
    pushed.parent.mkdir(exist_ok=True)
    output = io.BytesIO()
    with zipfile.ZipFile(output, "w") as archive:
        archive.writestr("__main__.py", f"open({str(tmp_path / 'ran')!r}, 'w')")
    content = output.getvalue()
    compiled.write_bytes(b"#%s\n" % hashlib.sha256(content).hexdigest().encode() + content)
    _connect(agent, tmp_path, again=not has_key)
    assert not (tmp_path / "ran").exists()
    with zipfile.ZipFile(compiled) as archive, zipfile.ZipFile(pushed) as source:
        assert archive.read("__main__.py") == source.read("__main__.py")


def test_a_root_that_others_may_write_to_runs_nothing(agent: AgentFile, tmp_path: Path) -> None:
    home = tmp_path / "sup"
    _connect(agent, home)
    home.chmod(0o777)
    command = loader.command(sys.executable, None, str(home), agent.sha256, len(agent.data))
    done = subprocess.run(["sh", "-c", command], input=b"", capture_output=True, check=False, timeout=30)
    said = json.loads(done.stdout.removeprefix(loader.ERROR))
    assert (done.returncode, said["kind"]) == (9, "home_not_private")
    assert said["message"] == f"other users may write to {home} (mode 0777)"


def test_the_loader_is_parsed_by_old_pythons() -> None:
    tree = ast.parse(loader.text(), feature_version=(3, 4))
    new = (ast.JoinedStr, ast.AnnAssign, ast.NamedExpr, ast.AsyncFunctionDef)
    assert not [node for node in ast.walk(tree) if isinstance(node, new)]
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    arguments = [one for function in functions for one in (*function.args.args, *function.args.kwonlyargs)]
    assert not [one for one in arguments if one.annotation is not None]
    assert not [function.name for function in functions if function.returns is not None or function.args.kwonlyargs]


def test_an_agent_that_cannot_be_compiled_runs_as_it_came(agent: AgentFile, tmp_path: Path) -> None:
    limit = (len(agent.data) + 1023) // 1024 * 1024
    _connect(agent, tmp_path, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    assert [path.name for path in (tmp_path / "agents").iterdir()] == [f"{agent.sha256}.pyz"]


def _connect(agent: AgentFile, home: Path, *, again: bool = False, **options: Any) -> None:
    """Reach the agent as a supervisor does, with its bytes at hand if they are needed (again)."""
    command = loader.command(sys.executable, None, str(home), agent.sha256, len(agent.data))
    data = b"" if (home / "agents").exists() and not again else agent.sent
    done = subprocess.run(["sh", "-c", command], input=data, capture_output=True, check=False, timeout=30, **options)
    assert done.stdout.endswith(MAGIC), done.stderr


def test_a_push_that_breaks_off_leaves_nothing(agent: AgentFile, tmp_path: Path) -> None:
    command = loader.command(sys.executable, None, str(tmp_path), agent.sha256, len(agent.data))
    cut = agent.sent[:-1]
    done = subprocess.run(["sh", "-c", command], input=cut, capture_output=True, check=False, timeout=30)
    assert done.stdout == loader.NEED + b"\n"
    damaged = cut + b"x"
    done = subprocess.run(["sh", "-c", command], input=damaged, capture_output=True, check=False, timeout=30)
    assert b'"the agent arrived damaged"' in done.stdout
    assert list((tmp_path / "agents").iterdir()) == []


def test_a_program_beside_the_home_directory_does_not_shadow_the_library(agent: AgentFile, tmp_path: Path) -> None:
    (tmp_path / "hashlib.py").write_text("raise SystemExit('shadowed')")
    (tmp_path / "binascii.py").write_text("raise SystemExit('shadowed')")
    command = loader.command(sys.executable, None, str(tmp_path / "s"), agent.sha256, len(agent.data))
    done = subprocess.run(
        ["sh", "-c", command], input=agent.sent, capture_output=True, check=False, timeout=30, cwd=tmp_path
    )
    assert done.stdout.endswith(MAGIC), done.stderr


def test_a_tilde_is_the_nodes_home(agent: AgentFile, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(shutil.which("python3") or sys.executable)
    command = loader.command("~/bin/python", None, "~/sup", agent.sha256, len(agent.data))
    env = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        ["sh", "-c", command], input=agent.sent, capture_output=True, check=False, timeout=30, env=env
    )
    assert done.stdout.endswith(MAGIC), done.stderr
    assert (tmp_path / "sup" / "agents").is_dir()
