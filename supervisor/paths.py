"""The directories of the package's own data files, and of the user's files.

In: the place of this module, XDG_CONFIG_HOME, XDG_STATE_HOME.
Out: `themes_dir()`, `examples_dir()`, `config_dir()`, `state_dir()`; documents that are kept in the last one.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from platformdirs.unix import Unix

_PACKAGE = Path(__file__).resolve().parent
# XDG directories on macOS too, as ssh, git and torch use them.
_USER = Unix("supervisor")


def _data_dir(name: str) -> Path:
    packaged = _PACKAGE / f"_{name}"
    # A wheel has copies inside the package; a checkout (and so an editable install) has them next to it.
    return packaged if packaged.is_dir() else _PACKAGE.parent / name


def themes_dir() -> Path:
    """Return the directory of the built-in `*.toml` palettes and `*.tcss` structure files."""
    return _data_dir("themes")


def examples_dir() -> Path:
    """Return the directory of the example training scripts."""
    return _data_dir("examples")


def config_dir() -> Path:
    """Return the directory of the user's configuration."""
    return _USER.user_config_path


def state_dir() -> Path:
    """Return the directory of what the user has set on a screen."""
    return _USER.user_state_path


def recall(path: Path, largest: int) -> dict[str, Any]:
    """Return a document that was kept; an empty one if it is missing, broken or larger than `largest` bytes."""
    try:
        data = json.loads(path.read_text(encoding="utf-8")) if path.stat().st_size <= largest else None
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def keep(path: Path, data: dict[str, Any], most: int) -> None:
    """Keep a document in a file, and at most `most` files in its directory, those that were written last."""
    # A full or read-only disk must prevent neither the command nor the exit.
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        draft.write_text(json.dumps(data), encoding="utf-8")
        draft.replace(path)
        for old in kept(path.parent)[most:]:
            old.unlink()


def kept(folder: Path) -> list[Path]:
    """Return the files of the documents in a directory, the one that was written last first."""
    try:
        dated = [(path.stat().st_mtime, path) for path in folder.glob("*.json")]
    except OSError:
        # Another supervisor removes an old one at this moment.
        return []
    return [path for _time, path in sorted(dated, reverse=True)]
