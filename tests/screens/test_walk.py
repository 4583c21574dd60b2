"""The walk of the docs shows the screens as they are (UPDATE_SNAPSHOTS=1 puts them in anew)."""

from __future__ import annotations

import os
import re
from pathlib import Path

from tests.screens.screens import stored

PICTURE = re.compile(r"<!-- snapshot: (\w+) -->\n```text\n(.*?)```\n", re.DOTALL)


def test_the_pictures_are_those_of_the_screen(repository: Path) -> None:
    path = repository / "docs" / "walk.md"
    text = path.read_text()
    found = PICTURE.findall(text)
    assert len(found) == text.count("<!-- snapshot:") > 4
    wanted = PICTURE.sub(lambda match: _picture(match[1]), text)
    if os.environ.get("UPDATE_SNAPSHOTS"):
        path.write_text(wanted)
    assert text == wanted or os.environ.get("UPDATE_SNAPSHOTS")


def _picture(name: str) -> str:
    # A screen's last lines may be empty; trailing blanks are cut in the snapshots.
    screen, _, size = name.rpartition("_")
    return f"<!-- snapshot: {name} -->\n```text\n{stored(screen)[size]}```\n"
