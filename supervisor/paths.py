"""Where the files that come along with the package lie, in a checkout and in an installed wheel, and those of the user.

In: the place of this module, XDG_CONFIG_HOME, XDG_STATE_HOME.
Out: `themes_dir()`, `examples_dir()`, `config_dir()`, `state_dir()`.
"""

from __future__ import annotations

import os
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def _data_dir(name: str) -> Path:
    packaged = _PACKAGE / f"_{name}"
    # The wheel carries copies inside the package; a checkout (and so an editable install) has them beside it.
    return packaged if packaged.is_dir() else _PACKAGE.parent / name


def themes_dir() -> Path:
    """The directory of the built-in `*.toml` palettes and `*.tcss` structure files."""
    return _data_dir("themes")


def examples_dir() -> Path:
    """The directory of the example training scripts."""
    return _data_dir("examples")


def config_dir() -> Path:
    """Where the user's configuration lies."""
    return _xdg("XDG_CONFIG_HOME", "~/.config")


def state_dir() -> Path:
    """Where what the user has set on a screen is kept."""
    return _xdg("XDG_STATE_HOME", "~/.local/state")


def _xdg(variable: str, default: str) -> Path:
    return Path(os.environ.get(variable) or default).expanduser() / "supervisor"
