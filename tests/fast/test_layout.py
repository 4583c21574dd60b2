"""Rules of the code: docstrings say what goes in and out, functions are short; links in documents lead somewhere."""

from __future__ import annotations

import ast
import fnmatch
import functools
import gc
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomli

from remote_agent.diagnose.categories import CATEGORIES
from remote_agent.wire.events import Condition, EventType, StopCause
from supervisor.actions import BY_VERB
from supervisor.cli import main

ROOT = Path(__file__).resolve().parent.parent.parent
FUNCTION_LINES = 60
_PACKAGES = ("remote_agent", "supervisor", "examples")
_ROOMS = tuple(f"{path.name}/" for above in ("", *_PACKAGES) for path in (ROOT / above).iterdir() if path.is_dir())


def _files(*packages: str) -> list[Path]:
    return sorted(path.relative_to(ROOT) for package in packages for path in (ROOT / package).rglob("*.py"))


@functools.cache
def _tree(path: Path) -> ast.Module:
    tree = ast.parse((ROOT / path).read_text())
    gc.freeze()  # the collector need not look at it after each test
    return tree


def _test_modules() -> list[Path]:
    # What lies in a directory that is no package is material of a test: scripts that fail, for example.
    return [path for path in _files("tests") if (ROOT / path).with_name("__init__.py").exists()]


def test_a_module_says_what_goes_in_and_out() -> None:
    wrong = []
    for path in _files(*_PACKAGES):
        docstring = ast.get_docstring(_tree(path)) or ""
        if not docstring.partition("\n")[0].endswith((".", ":")):
            wrong.append(f"{path}: the docstring's first line is not one sentence")
        wrong += [f"{path}: the docstring has no {word}" for word in ("In:", "Out:") if word not in docstring]
    assert not wrong, "\n".join(wrong)


def test_functions_are_small() -> None:
    long = [
        f"{path}:{node.lineno} {node.name}: {size} lines"
        for path in [*_files(*_PACKAGES), *_test_modules()]
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (size := _size(node)) > FUNCTION_LINES
    ]
    assert not long, "\n".join(long)


def _size(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1


def test_nothing_is_left_for_later() -> None:
    words = ("TODO", "FIXME", "XXX", "HACK")
    left = [f"{path}: {word}" for path in _files(*_PACKAGES) for word in words if word in (ROOT / path).read_text()]
    assert not left, "\n".join(left)


# The sink; what Textual draws on; a program of a node, which answers the one who asked.
_MAY_WRITE = ("standard_streams.py", "tui/terminal.py", "ssh/loader.py")
_WRITES = re.compile(
    r"(?:sys\.(?:__)?|from sys import .*\b)(?:stdout|stderr)(?:__)?\b|os\.write$|traceback\.print_"
    r"|from rich(?:\.console|\.progress)? import (?:print|Console|Progress)|import rich\b|print$"
)


def test_only_the_standard_streams_write_to_a_terminal() -> None:
    """Whatever a node says goes through `supervisor/standard_streams.py`, so that no terminal acts on it."""
    wrong = [
        f"{path}:{line}: {text}"
        for path in _files("supervisor")
        if path.relative_to("supervisor").as_posix() not in _MAY_WRITE
        for line, text in _writes(_tree(path))
    ]
    assert not wrong, "\n".join(wrong)


def _writes(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Import | ast.ImportFrom | ast.Name):
            text = ast.unparse(node)
            if _WRITES.match(text):
                yield node.lineno, text


def test_links_lead_to_what_a_source_distribution_has() -> None:
    project = tomli.loads((ROOT / "pyproject.toml").read_text())
    kept = project["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    broken = [f"{page.relative_to(ROOT)}: {link}" for page in pages for link in _broken_links(page, kept)]
    assert not broken, "\n".join(broken)


def _broken_links(page: Path, kept: list[str]) -> list[str]:
    broken = []
    for link, anchor in re.findall(r"\]\(((?!https?:)[^)#]*)(#[^)]*)?\)", page.read_text()):
        target = (page.parent / link).resolve() if link else page
        if not target.exists() or not any(
            fnmatch.fnmatch(f"/{target.relative_to(ROOT).parts[0]}", pattern) for pattern in kept
        ):
            broken.append(link)
        elif anchor and anchor[1:] not in _anchors(target):
            broken.append(link + anchor)
    return broken


def test_files_that_documents_name_exist() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "tests/README.md"]
    wrong = [
        f"{page.relative_to(ROOT)}: {name}"
        for page in pages
        for name in re.findall(r"`((?:[\w.]+/)+[\w.]*)`", page.read_text())
        if name.startswith(_ROOMS) and not any((ROOT / above / name).exists() for above in ("", *_PACKAGES))
    ]
    assert not wrong, "\n".join(wrong)


def _anchors(page: Path) -> list[str]:
    heads = re.findall(r"^#+ (.*)", page.read_text(), re.MULTILINE)
    return [re.sub(r"[^\w -]", "", head).lower().replace(" ", "-") for head in heads]


# What docs name exists, and what exists is named there.


_OPTION = re.compile(r"(?<![\w-])--?[a-z][a-z-]*(?![\w-])")


def test_the_words_of_the_wire_are_explained(repository: Path) -> None:
    page = (repository / "docs" / "json.md").read_text()
    words = [*EventType, *StopCause, *Condition, *CATEGORIES]
    assert not [str(word) for word in words if not re.search(rf"\b{word}\b", page)]


def test_options_are_documented_and_no_others(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pages = [*(repository / "docs").glob("*.md"), repository / "README.md"]
    documented = {option for page in pages for option in _OPTION.findall(page.read_text())}
    known: set[str] = set()
    missing = []
    for verb in BY_VERB:
        with pytest.raises(SystemExit, match="0"):
            main([verb, "--help"])
        for row in re.findall(r"^  (-.*)", capsys.readouterr().out, re.MULTILINE):
            spellings = set(_OPTION.findall(re.split(r"  +", row)[0]))
            known |= spellings
            if spellings.isdisjoint(documented) and "-h" not in spellings:
                missing.append(f"{verb} {row}")
    assert not missing, "\n".join(missing)
    # An option that hides a secret, as an example.
    commands = {*_OPTION.findall((repository / "docs" / "commands.md").read_text()), "--api-key"} - {"--api-key"}
    assert not {option for option in commands if option.startswith("--")} - known
