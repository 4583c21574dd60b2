"""The keys that the user has changed: the table `[keys]` of config.toml in the folder of his configuration.

In: `id = "keys"`, with the ids of `keys.KEYS`. Out: keys by id; UsageError that names file and line.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from textual.keys import Keys, _character_to_key

from supervisor.errors import UsageError
from supervisor.paths import config_dir
from supervisor.tui import keys
from supervisor.tui.theming import at

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_NAMED = {key.value for key in Keys} | {one for key in keys.KEYS for one in key.keys.split(",")}
_MODIFIERS = ("ctrl+", "alt+", "shift+")


def config_file() -> Path:
    """Where the user's configuration of the screen lies."""
    return config_dir() / "config.toml"


def load() -> dict[str, str]:
    """Keys by id, as far as the user has changed them; raises UsageError that names file, line and id."""
    path = config_file()
    try:
        text = path.read_text(encoding="utf-8")
        data = tomllib.loads(text)
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{path}: {error}") from error
    for name in data:
        if name != "keys":
            raise UsageError(f"{at(path, text, name)}: unknown key {name!r}", 'there is [keys], with id = "keys"')
    table = data.get("keys", {})
    if not isinstance(table, dict):
        raise UsageError(f"{at(path, text, 'keys')}: [keys] must be a table")
    changes = {name: _read(name, value, at(path, text, name, "keys")) for name, value in table.items()}
    _check_twice(changes, path, text)
    return changes


def _read(name: str, value: Any, where: str) -> str:
    """One entry, in Textual's names of keys."""
    known = {key.id: key for key in keys.KEYS}
    if name not in known:
        close = difflib.get_close_matches(name, known, 1)
        meant = f"did you mean {close[0]!r}? " if close else ""
        hint = f"{meant}there are: {', '.join(key.id for key in keys.KEYS if key.bound)}"
        raise UsageError(f"{where}: no key has the id {name!r}", hint)
    if not known[name].bound:
        raise UsageError(f"{where}: {name} belongs to the lists themselves and cannot be changed")
    words = (
        value if isinstance(value, list) else value.split(",") if isinstance(value, str) and value != "," else [value]
    )
    if not words or not all(isinstance(word, str) and word.strip() for word in words):
        raise UsageError(f'{where}: {name} must be a key such as "F" or "ctrl+o,f2", not {value!r}')
    return ",".join(_named(word.strip(), where) for word in words)


def _named(word: str, where: str) -> str:
    if len(word) == 1:
        return _character_to_key(word)
    base = word
    for modifier in _MODIFIERS:
        base = base.replace(modifier, "", 1) if base.startswith(modifier) else base
    if base not in _NAMED and len(base) != 1:
        hint = "write one character, or a name such as f5, enter, space, pageup, ctrl+o"
        raise UsageError(f"{where}: there is no key {word!r}", hint)
    return word


def _check_twice(changes: Mapping[str, str], path: Path, text: str) -> None:
    table = keys.changed(changes)
    for screen in dict.fromkeys(name for key in table for name in key.where.split()):
        clash = _find_clash(keys.of(screen, table), changes)
        if clash is not None:
            key, mine, other = clash
            where = at(path, text, mine, "keys")
            raise UsageError(f"{where}: {mine}: {keys.shown(key)!r} is {other}'s key on the screen {screen!r}")


def _find_clash(table: Sequence[keys.Key], changes: Mapping[str, str]) -> tuple[str, str, str] | None:
    """A key that two entries of one screen have, the entry that the user changed, and the other one."""
    owners: dict[str, str] = {}
    for entry in table:
        for key in entry.keys.split(","):
            other = owners.setdefault(key, entry.id)
            if other != entry.id and (entry.id in changes or other in changes):
                return (key, entry.id, other) if entry.id in changes else (key, other, entry.id)
    return None
