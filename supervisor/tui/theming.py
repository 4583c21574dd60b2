"""Themes from TOML files, checked in full before the application sees them: a bad file is a notice, never a crash.

In: `themes/*.toml` of the package and of the user's configuration. Out: Textual themes, palettes, notices.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import sys
from pathlib import Path
from typing import Any, Final

from rich.errors import StyleSyntaxError
from rich.style import Style
from textual.color import Color, ColorParseError
from textual.theme import Theme

from supervisor.paths import themes_dir
from supervisor.tui.cells import Palette

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DEFAULT_THEME: Final = "default-dark"
# Attributes only: what is left of a theme when the terminal's user asked for no colour.
NO_COLOR_THEME: Final = "mono"

# What a theme may say, and what is meant where it does not.
ROLES: Final[dict[str, str]] = {
    "title": "bold",
    "text": "",
    "dim": "dim",
    "accent": "bold",
    "key": "bold",
    "rule": "dim",
    "head": "dim",
    "bar": "",
    "cursor": "reverse",
    "rest": "underline",
    "ok": "",
    "done": "",
    "start": "dim",
    "warn": "bold",
    "bad": "bold reverse",
    "hung": "bold underline",
    "off": "dim",
    "alarm": "bold reverse",
    "time": "dim",
    "tag": "dim",
    "log-warn": "bold",
    "log-error": "bold",
    "log-gap": "dim",
    "hit": "reverse",
    "mark": "bold",
    "pill": "reverse",
}

VARIABLE_DEFAULTS: Final[dict[str, str]] = {
    "ansi-background": "ansi_default",
    "ansi-foreground": "ansi_default",
    "screen-selection-background": "ansi_bright_blue",
    "screen-selection-foreground": "ansi_black",
}

_FIELDS = {field.name for field in dataclasses.fields(Theme)}


class ThemeError(ValueError):
    """A theme file that cannot be used: file and reason in one line."""


@dataclasses.dataclass(frozen=True)
class Skin:
    """One theme: Textual's part and ours."""

    theme: Theme
    palette: Palette

    @property
    def name(self) -> str:
        """Its name."""
        return self.theme.name


def user_themes_dir() -> Path:
    """Where the user's own themes lie."""
    config = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(config).expanduser() / "supervisor" / "themes"


def load_all() -> tuple[dict[str, Skin], list[str]]:
    """All usable themes by name, and one notice for each file that is not."""
    skins: dict[str, Skin] = {}
    notices: list[str] = []
    for folder in (themes_dir(), user_themes_dir()):
        try:
            files = sorted(folder.glob("*.toml"))
        except OSError as error:
            notices.append(f"{folder}: {error.strerror}")
            continue
        for path in files:
            try:
                skin = load(path)
            except ThemeError as error:
                notices.append(str(error))
            else:
                skins[skin.name] = skin
    return skins, notices


def load(path: Path) -> Skin:
    """One theme file; raises ThemeError that names file and key."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ThemeError(f"{path}: {error}") from error
    return parse(data, path)


def parse(data: dict[str, Any], path: Path) -> Skin:
    """A theme from its table; raises ThemeError that names file and key."""
    fields = {key: value for key, value in data.items() if key != "roles"}
    fields.setdefault("name", path.stem)
    for key in fields:
        if key not in _FIELDS:
            raise ThemeError(f"{path}: unknown key {key!r}{_meant(key, _FIELDS)}")
    roles = data.get("roles", {})
    if not isinstance(roles, dict):
        raise ThemeError(f"{path}: roles must be a table")
    return Skin(_theme(fields, path), Palette(str(fields["name"]), _roles(roles, path)))


def _theme(fields: dict[str, Any], path: Path) -> Theme:
    for key, value in fields.items():
        wanted = {"dark": bool, "ansi": bool, "variables": dict, "luminosity_spread": float, "text_alpha": float}
        if not isinstance(value, wanted.get(key, str)):
            raise ThemeError(f"{path}: {key} must be a {wanted.get(key, str).__name__}, not {value!r}")
        if wanted.get(key, str) is str and key != "name":
            _check_color(key, value, path)
    try:
        theme = Theme(**fields)
        theme.to_color_system().generate()
    except (TypeError, ValueError, AttributeError, ColorParseError) as error:
        raise ThemeError(f"{path}: {error}") from error
    return theme


def _check_color(key: str, value: Any, path: Path) -> None:
    try:
        Color.parse(str(value))
    except ColorParseError as error:
        raise ThemeError(f"{path}: {key}: {error}") from error


def _roles(roles: dict[str, Any], path: Path) -> dict[str, Style]:
    styles: dict[str, Style] = {}
    for role, text in {**ROLES, **roles}.items():
        if role not in ROLES:
            raise ThemeError(f"{path}: unknown role {role!r}{_meant(role, ROLES)}")
        if not isinstance(text, str):
            raise ThemeError(f"{path}: role {role} must be a text such as 'bold #ff6b6b', not {text!r}")
        try:
            styles[role] = Style.parse(text)
        except StyleSyntaxError as error:
            raise ThemeError(f"{path}: role {role}: {error}") from error
    return styles


def _meant(key: str, known: Any) -> str:
    close = difflib.get_close_matches(key, list(known), 1)
    return f"; did you mean {close[0]!r}?" if close else ""


def fallback() -> Skin:
    """A theme that needs no file, for a broken installation."""
    return parse({"name": DEFAULT_THEME, "primary": "#6cb6ff"}, Path(DEFAULT_THEME))
