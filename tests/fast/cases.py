"""Cases that are written as texts in `data`: `=== field | field`, then a body, in which `--- name` begins a block."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

DATA = Path(__file__).parent / "data"


class Case(NamedTuple):
    fields: list[str]
    body: str

    @property
    def blocks(self) -> list[tuple[str, str]]:
        """The named blocks of the body, without the white space at their end."""
        parts = (part.partition("\n") for part in f"\n{self.body}".split("\n--- ")[1:])
        return [(name, text.rstrip()) for name, _, text in parts]


def read_cases(name: str) -> list[Case]:
    parts = (part.partition("\n") for part in (DATA / name).read_text().split("\n=== ")[1:])
    return [Case([field.strip() for field in head.split(" | ")], body) for head, _, body in parts]
