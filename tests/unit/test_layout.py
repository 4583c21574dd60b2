"""The code keeps its own rules: a docstring that says what goes in and out, small files, small functions; the documents
lead to what is there, in a source distribution too."""

from __future__ import annotations

import ast
import fnmatch
import re
from pathlib import Path

import pytest
import tomli

ROOT = Path(__file__).resolve().parent.parent.parent
FILE_LINES = 400
FUNCTION_LINES = 60
_PACKAGES = ("remote_agent", "supervisor", "examples")


def _files(*packages: str) -> list[Path]:
    return sorted(path.relative_to(ROOT) for package in packages for path in (ROOT / package).rglob("*.py"))


def _test_modules() -> list[Path]:
    # What lies in a directory that is no package is material of a test: scripts that fail, for example.
    return [path for path in _files("tests") if (ROOT / path).with_name("__init__.py").exists()]


@pytest.mark.parametrize("path", _files(*_PACKAGES), ids=str)
def test_a_module_says_what_goes_in_and_out(path: Path) -> None:
    docstring = ast.get_docstring(ast.parse((ROOT / path).read_text())) or ""
    first = docstring.partition("\n")[0]
    assert first.endswith((".", ":")), f"{path}: the docstring's first line is one sentence, found {first!r}"
    missing = [word for word in ("In:", "Out:") if word not in docstring]
    assert not missing, f"{path}: the docstring has no {' and no '.join(missing)}"


@pytest.mark.parametrize("path", [*_files(*_PACKAGES), *_test_modules()], ids=str)
def test_files_and_functions_are_small(path: Path) -> None:
    text = (ROOT / path).read_text()
    lines = text.count("\n")
    assert lines <= FILE_LINES, f"{path} has {lines} lines"
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    long = [
        f"{path}:{node.lineno} {node.name}: {size} lines"
        for node in functions
        if (size := _size(node)) > FUNCTION_LINES
    ]
    assert not long, "\n".join(long)


def _size(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1


@pytest.mark.parametrize("path", _files(*_PACKAGES), ids=str)
def test_nothing_is_left_for_later(path: Path) -> None:
    text = (ROOT / path).read_text()
    words = [word for word in ("TODO", "FIXME", "XXX", "HACK") if word in text]
    assert not words, f"{path}: {words}"


@pytest.mark.parametrize("path", [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")], ids=lambda path: path.name)
def test_links_lead_to_what_a_source_distribution_has(path: Path) -> None:
    project = tomli.loads((ROOT / "pyproject.toml").read_text())
    kept = project["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    for link, anchor in re.findall(r"\]\(((?!https?:)[^)#]*)(#[^)]*)?\)", path.read_text()):
        target = (path.parent / link).resolve() if link else path
        assert target.exists(), link
        assert any(fnmatch.fnmatch(f"/{target.relative_to(ROOT).parts[0]}", one) for one in kept), link
        heads = re.findall(r"^#+ (.*)", target.read_text(), re.MULTILINE) if anchor else ()
        assert not anchor or anchor[1:] in [re.sub(r"[^\w -]", "", head).lower().replace(" ", "-") for head in heads]
