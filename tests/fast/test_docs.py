"""What docs name exists, and what exists is named there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from remote_agent.diagnose.signatures import CATEGORIES
from remote_agent.wire.events import Condition, EventType, StopCause
from supervisor.actions import BY_VERB
from supervisor.cli import main

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
