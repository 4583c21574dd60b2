"""Themes from files, checked before the application uses them: an invalid file leads to a notice, never to a crash.

In: `themes/*.toml` of the package and of the user's configuration, and the user's `NAME.tcss` for the theme NAME.
Out: Textual themes, palettes, structure; notices that name file and line.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from rich.errors import StyleSyntaxError
from rich.style import Style
from textual.app import App
from textual.color import Color, ColorParseError
from textual.css.errors import StylesheetError
from textual.css.stylesheet import Stylesheet, StylesheetParseError
from textual.css.tokenizer import TokenError
from textual.screen import ModalScreen, Screen
from textual.theme import Theme
from textual.widget import Widget
from textual.widgets import Button, Input, Static
from textual.widgets._toast import Toast, ToastRack

from supervisor.paths import config_dir, themes_dir
from supervisor.tui.rows.spans import Palette

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DEFAULT_THEME: Final = "default-dark"
# This theme has no colours, only attributes, for NO_COLOR.
NO_COLOR_THEME: Final = "mono"

# The roles of a theme, and their defaults.
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
_STYLED: Final = (App, Screen, ModalScreen, Widget, Button, Input, Static, Toast, ToastRack)


class ThemeError(ValueError):
    """A theme file that cannot be used: file and reason in one line."""


@dataclasses.dataclass(frozen=True)
class Skin:
    """One theme: Textual's and our part of it."""

    theme: Theme
    palette: Palette
    css_file: str = ""
    css: str = ""
    """The user's style sheet for it, in addition to the application's."""

    @property
    def name(self) -> str:
        """Its name."""
        return self.theme.name


def user_themes_dir() -> Path:
    """Return the folder of the user's themes."""
    return config_dir() / "themes"


def stamp() -> tuple[tuple[str, int, int], ...]:
    """Return a value that changes with the files of the user's themes."""
    try:
        files = [path for path in sorted(user_themes_dir().iterdir()) if path.suffix in (".toml", ".tcss")]
        return tuple((path.name, path.stat().st_mtime_ns, path.stat().st_size) for path in files)
    except OSError:
        return ()


def load_all() -> tuple[dict[str, Skin], list[str]]:
    """Return all usable themes by name, and one notice for each file that is not."""
    skins: dict[str, Skin] = {}
    notices: list[str] = []
    for folder in (themes_dir(), user_themes_dir()):
        for path in _files(folder, "*.toml", notices):
            try:
                skin = _ours(path) if folder == themes_dir() else load(path)
            except ThemeError as error:
                notices.append(str(error))
            else:
                skins[skin.name] = skin
    for path in _files(user_themes_dir(), "*.tcss", notices):
        try:
            if path.stem not in skins:
                raise ThemeError(f"{path}: belongs to no theme{_meant(path.stem, skins)}")
            skins[path.stem] = dress(skins[path.stem], path)
        except ThemeError as error:
            notices.append(str(error))
    return skins, notices


def _files(folder: Path, pattern: str, notices: list[str]) -> list[Path]:
    try:
        return sorted(folder.glob(pattern))
    except OSError as error:
        notices.append(f"{folder}: {error.strerror}")
        return []


def find(name: str) -> str:
    """Return the name of a theme that exists; raises ThemeError with the list of names, and a suggestion."""
    skins, notices = load_all()
    if name in skins:
        return name
    broken = [notice for notice in notices if f"/{name}." in notice]
    known = f"no theme named {name!r}{_meant(name, skins)}; known themes: {', '.join(sorted(skins))}"
    raise ThemeError("; ".join([known, *broken]))


def load(path: Path) -> Skin:
    """Return one theme file; raises ThemeError that names file, line and key."""
    text = _read(path)
    skin = _parsed(path, text)
    _try_variables(skin, path, text)
    return skin


@functools.cache
def _ours(path: Path) -> Skin:
    """Return a theme of this installation. Tests check its variables: that takes a third of a second for all themes."""
    return _parsed(path, _read(path))


def _parsed(path: Path, text: str) -> Skin:
    try:
        return parse(tomllib.loads(text), path, text)
    except tomllib.TOMLDecodeError as error:
        line = re.search(r"line (\d+)", str(error))
        raise ThemeError(f"{path}:{line[1] if line else len(text.splitlines())}: {error}") from error


def _try_variables(skin: Skin, path: Path, text: str) -> None:
    variables = skin.theme.variables
    try:
        if variables:
            _check_css(skin, "", str(path), variables)
    except ThemeError:
        # One at a time, to find the invalid one.
        for key in variables:
            _check_css(skin, "", at(path, text, key, "variables"), {key: variables[key]})
        raise


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ThemeError(f"{path}: {error}") from error


def parse(data: Mapping[str, object], path: Path, text: str = "") -> Skin:
    """A theme from its table; raises ThemeError that names file, line and key."""
    fields = {key: value for key, value in data.items() if key != "roles"}
    fields.setdefault("name", path.stem)
    for key in fields:
        if key not in _FIELDS:
            raise ThemeError(f"{at(path, text, key)}: unknown key {key!r}{_meant(key, _FIELDS)}")
    roles = data.get("roles", {})
    if not isinstance(roles, dict):
        raise ThemeError(f"{at(path, text, 'roles')}: roles must be a table")
    return Skin(_theme(fields, path, text), Palette(str(fields["name"]), _roles(roles, path, text)))


def at(path: Path, text: str, key: str, table: str = "") -> str:
    """Return `file:line` of a key in a table of a TOML text; the file alone if it is not found."""
    inside = ""
    for number, line in enumerate(text.splitlines(), 1):
        head = re.match(r"\s*\[\s*([\w.-]+)\s*\]", line)
        inside = head[1] if head else inside
        here = head[1] == key if head else inside == table and re.match(rf"\s*[\"']?{re.escape(key)}[\"']?\s*=", line)
        if here:
            return f"{path}:{number}"
    return str(path)


def _theme(fields: dict[str, Any], path: Path, text: str) -> Theme:
    for key, value in fields.items():
        wanted = {"dark": bool, "ansi": bool, "variables": dict, "luminosity_spread": float, "text_alpha": float}
        if not isinstance(value, wanted.get(key, str)):
            word = wanted.get(key, str).__name__
            raise ThemeError(f"{at(path, text, key)}: {key} must be a {word}, not {value!r}")
        if wanted.get(key, str) is str and key != "name":
            _check_color(key, value, path, text)
    for key, value in fields.get("variables", {}).items():
        if not isinstance(value, str):
            raise ThemeError(f"{at(path, text, key, 'variables')}: {key} must be text, not {value!r}")
    try:
        theme = Theme(**fields)
        theme.to_color_system().generate()
    except (TypeError, ValueError, AttributeError, ColorParseError) as error:
        raise ThemeError(f"{path}: {error}") from error
    return theme


def _check_color(key: str, value: object, path: Path, text: str) -> None:
    try:
        Color.parse(str(value))
    except ColorParseError as error:
        raise ThemeError(f"{at(path, text, key)}: {key}: {error}") from error


def _roles(roles: Mapping[str, object], path: Path, text: str) -> dict[str, Style]:
    styles: dict[str, Style] = {}
    for role, value in {**ROLES, **roles}.items():
        try:
            styles[role] = _style(role, value)
        except ThemeError as error:
            raise ThemeError(f"{at(path, text, role, 'roles')}: {error}") from error
    return styles


def _style(role: str, value: object) -> Style:
    if role not in ROLES:
        raise ThemeError(f"unknown role {role!r}{_meant(role, ROLES)}")
    if not isinstance(value, str):
        raise ThemeError(f"role {role} must be text such as 'bold #ff6b6b', not {value!r}")
    try:
        return Style.parse(value)
    except StyleSyntaxError as error:
        raise ThemeError(f"role {role}: {error}") from error


def dress(skin: Skin, path: Path) -> Skin:
    """Return the theme with the user's style sheet; raises ThemeError that names file and line."""
    css = _read(path)
    _check_css(skin, css, str(path), skin.theme.variables)
    return dataclasses.replace(skin, css_file=str(path), css=css)


def _check_css(skin: Skin, css: str, where: str, variables: dict[str, str]) -> None:
    """Parse a style sheet with the variables of a theme; without one, all style sheets that use them."""
    known = {**VARIABLE_DEFAULTS, **skin.theme.to_color_system().generate(), **variables}
    sheet = Stylesheet(variables=known)
    if not css:
        for styled in _STYLED:
            sheet.add_source(styled.DEFAULT_CSS, (where, styled.__name__), is_default_css=True)
        sheet.read(themes_dir() / "app.tcss")
    else:
        sheet.add_source(css, (where, ""))
    try:
        sheet.parse()
    except TokenError as error:
        raise ThemeError(f"{where}:{error.start[0]}: {error}" if css else f"{where}: {error}") from error
    except StylesheetParseError as error:
        token, reason = next(entry for rule in error.errors.rules for entry in rule.errors)
        place = token.referenced_by or token
        text = str(getattr(reason, "summary", reason))
        raise ThemeError(f"{where}:{place.location[0] + 1}: {text}" if css else f"{where}: {text}") from error
    except StylesheetError as error:
        raise ThemeError(f"{where}: {error}") from error


def _meant(key: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(key, list(known), 1)
    return f"; did you mean {close[0]!r}?" if close else ""


def fallback() -> Skin:
    """Return a theme that needs no file, for a broken installation."""
    return parse({"name": DEFAULT_THEME, "primary": "#6cb6ff"}, Path(DEFAULT_THEME))


class Chooser:
    """The theme that an application uses, of all that there are."""

    def __init__(self, app: App[int], given: str | None) -> None:
        """`given`: what counts for every job."""
        self._app = app
        self._is_given = given is not None
        self.skins, self._problems = load_all()
        self._stamp = stamp()
        self._css_file = ""
        self.use(given or DEFAULT_THEME)

    def use(self, name: str) -> None:
        """Use a theme."""
        skin = self.skins.get(name)
        if skin is None:
            known = ", ".join(sorted(self.skins))
            self._problems.append(f"no theme named {name}; known themes: {known or 'none'}")
            skin = self.skins.get(DEFAULT_THEME) or fallback()
        self.palette = skin.palette
        app = self._app
        app.register_theme(skin.theme)
        app.stylesheet.source.pop((self._css_file, ""), None)
        self._css_file = skin.css_file
        if skin.css:
            app.stylesheet.add_source(skin.css, (skin.css_file, ""), tie_breaker=1)
        if app.theme == skin.name and app.is_running:
            # Textual does not reload a theme that keeps its name.
            app.call_next(app.refresh_css, animate=False)
        app.theme = skin.name

    def prefer(self, name: str) -> None:
        """Use the theme that a job had before, if it is there and no other one is given."""
        if name in self.skins and not self._is_given:
            self.use(name)

    def use_next(self) -> None:
        """Use the next theme in the order of their names."""
        names = sorted(self.skins)
        if names:
            at = names.index(self.palette.name) if self.palette.name in names else -1
            self.use(names[(at + 1) % len(names)])

    def take_problems(self) -> list[str]:
        """Return what was wrong with themes since the last call."""
        problems, self._problems = self._problems, []
        return problems

    def reread(self) -> bool:
        """Load changed theme files; with an error, the present theme stays. Returns whether it has changed."""
        newest = stamp()
        if newest == self._stamp:
            return False
        self._stamp = newest
        before, (skins, problems) = self.skins, load_all()
        self._problems += problems
        name = self.palette.name
        if name not in skins or any(f"/{name}." in problem for problem in problems):
            # The colours stay while a file is being written.
            skins[name] = before.get(name) or fallback()
        self.skins = skins
        has_changed = skins[name] != before.get(name)
        if has_changed:
            self.use(name)
        return has_changed
