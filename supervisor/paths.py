"""The directories of the package's own data files, and of the user's files.

In: the place of this module, XDG_CONFIG_HOME, XDG_STATE_HOME.
Out: `themes_dir()`, `examples_dir()`, `config_dir()`, `state_dir()`.
"""

from __future__ import annotations

from pathlib import Path

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
