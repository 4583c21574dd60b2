"""docs/torchrun.md tells what every option of torchrun does here; its table of options is made from the program's."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from supervisor.cli import torchrun

DOCUMENT = Path(__file__).parents[2] / "docs" / "torchrun.md"
BEGIN, END = "<!-- options -->\n", "<!-- /options -->\n"
KINDS = (("supported", torchrun.ACTING), ("no effect", torchrun.SILENT), ("refused", torchrun.REFUSED))


def table() -> str:
    """Return the options as a Markdown table, in the order of `supervisor up --help`."""
    lines = ["| option | here | |", "|---|---|---|"]
    for kind, rows in KINDS:
        for flags, metavar, text in rows:
            words = ", ".join(f"`{flag}`" for flag in flags)
            value = f" `{metavar}`" if metavar else ""
            cells = [one.replace("|", "\\|").replace("<", "\\<") for one in (words + value, kind, text)]
            lines.append(f"| {' | '.join(cells)} |")
    return "".join(f"{line}\n" for line in lines)


def test_the_table_of_options_is_current() -> None:
    text = DOCUMENT.read_text()
    before, rest = text.split(BEGIN)
    found, after = rest.split(END)
    if os.environ.get("UPDATE_SNAPSHOTS"):
        DOCUMENT.write_text(f"{before}{BEGIN}{table()}{END}{after}")
        return
    assert found == table()


def test_every_variable_that_torchrun_gives_its_workers_has_a_row() -> None:
    agent = pytest.importorskip("torch.distributed.elastic.agent.server.local_elastic_agent")
    text = DOCUMENT.read_text()
    names = set(re.findall(r'"([A-Z]+_[A-Z_]+)"', Path(agent.__file__).read_text()))
    assert "MASTER_ADDR" in names
    assert sorted(name for name in names if name not in text) == []
