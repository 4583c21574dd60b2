"""What is remembered of an installed torch: it counts while the installation is as it was."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from remote_agent.engine import installed

FACTS = {"torch": "2.13.0", "devices": {"cpu": 4, "auto": 4}, "leaked": {}, "only_cpu": True}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package torch that is found first, and that nothing may import here."""
    package = tmp_path / "site" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError\n")
    (package / "version.py").write_text("__version__ = '2.13.0'\n")
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(sys, "path", [str(package.parent), *sys.path])
    return package


class Node:
    def __init__(self, root: Path, answer: dict[str, Any]) -> None:
        self.asked = 0
        self.answer = answer
        self._known = str(root / "torch.json")

    async def _ask(self) -> dict[str, Any]:
        self.asked += 1
        return self.answer

    def facts(self, nproc: str = "2") -> dict[str, Any]:
        return asyncio.run(installed.Installation(self._known, self._ask).facts(nproc))


def test_torch_is_asked_once_for_each_state_of_its_files(tmp_path: Path, package: Path) -> None:
    node = Node(tmp_path, FACTS)
    assert [node.facts(), node.facts(), node.facts("auto")] == [FACTS] * 3
    assert node.asked == 1
    (package / "version.py").write_text("__version__ = '2.14.0'\n")
    os.utime(package / "version.py", ns=(1, 1))
    node.answer = {**FACTS, "torch": "2.14.0"}
    assert node.facts()["torch"] == "2.14.0"
    # A package that is installed or removed beside it may be one that it needs.
    os.utime(package.parent, ns=(1, 1))
    node.facts()
    assert node.asked == 3


def test_devices_are_counted_each_time_where_there_may_be_some(tmp_path: Path, package: Path) -> None:
    node = Node(tmp_path, {**FACTS, "only_cpu": False})
    for nproc in ("8", "8", "auto", "gpu"):
        node.facts(nproc)
    assert node.asked == 3


def test_a_torch_that_is_broken_is_asked_again(tmp_path: Path, package: Path) -> None:
    node = Node(tmp_path, {"error": "ImportError: libcudart.so.13"})
    assert node.facts() == node.facts() == node.answer
    assert node.asked == 2
    node.answer = FACTS
    (tmp_path / "torch.json").write_text("[not json")
    assert node.facts() == FACTS
