"""Where the files that come along with the package lie, in a checkout and in an installed wheel.

In: the place of this module.
Out: `themes_dir()`, `examples_dir()`.
"""

from __future__ import annotations

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
