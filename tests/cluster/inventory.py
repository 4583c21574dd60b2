"""Writes a hosts.toml.

In: tables as mappings.
Out: the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path


def write_inventory(
    path: Path, job: Mapping[str, object], defaults: Mapping[str, object], hosts: Sequence[Mapping[str, object]]
) -> Path:
    """Write an inventory of these tables and return its path; raises TypeError for a value that TOML does not have."""
    parts = [_table("[job]", job), _table("[defaults]", defaults), *(_table("[[hosts]]", host) for host in hosts)]
    path.write_text("\n".join(parts))
    return path


def _table(head: str, table: Mapping[str, object]) -> str:
    return "".join([f"{head}\n", *(f"{key} = {_value(value)}\n" for key, value in table.items())])


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str | Path):
        return json.dumps(str(value))  # a JSON string is a TOML basic string
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{json.dumps(str(key))} = {_value(item)}" for key, item in value.items()) + " }"
    if isinstance(value, Sequence):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    raise TypeError(f"no TOML for {value!r}")
