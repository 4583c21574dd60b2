"""The keys of every screen; the letters of actions come from `supervisor.actions`.

In: config.toml: `[keys]`, with `id = "keys"`. Out: bindings, footers and help from one table; UsageError that names
file and line.

Never bound: ctrl+s q z a b h i j m, which terminals, shells and tmux use.
"""

from __future__ import annotations

import dataclasses
import difflib
import sys
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from textual.binding import Binding
from textual.keys import Keys, _character_to_key

from supervisor.errors import UsageError
from supervisor.paths import config_dir
from supervisor.tui.themes import at

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclasses.dataclass(frozen=True)
class KeyBinding:
    """One thing to do with a key."""

    id: str
    keys: str
    """The keys as Textual names them, separated by commas; the first one is shown."""
    action: str
    label: str
    """A few words, for the footer and the palette."""
    help: str
    """What it does, for the help and the palette."""
    where: str = "any"
    """any, job (any screen of a job), or the screens it belongs to, separated by spaces."""
    footer: int = 0
    """Order in the footer from the left, 0: not there."""
    bound: bool = True
    """False: a widget binds it; it is listed here for the help page."""
    palette: bool = False

    @property
    def first(self) -> str:
        """Its first key, as it is written in the footer."""
        return display(self.keys.split(",")[0])

    @property
    def click(self) -> str:
        """The action of a click on it; a widget's own key goes to the widget that has the focus."""
        if not self.bound:
            return f"app.simulate_key('{self.keys.split(',')[0]}')"
        return self.action if self.action.startswith("app.") else f"screen.{self.action}"


SCREENS: Final = (
    ("map", "Map"),
    ("nodes", "Nodes"),
    ("ranks", "Ranks"),
    ("logs", "Logs"),
    ("incident", "Incident"),
    ("run", "Run"),
    ("nccl", "NCCL"),
)

# Screens to which no number leads.
HOME: Final = "home"

# Its key is in the footer while one pane hides the others.
MAXIMIZE: Final = "pane.maximize"

_LISTS = "map nodes ranks run"
_PANES = "map nodes ranks run nccl"
_TABLES = "map nodes ranks home"
_CHARTS = "map nodes ranks"

KEYS: Final[tuple[KeyBinding, ...]] = (
    *(
        KeyBinding(f"screen.{name}", str(number), f"app.go('{name}')", title, f"{title} screen", palette=True)
        for number, (name, title) in enumerate(SCREENS, 1)
    ),
    KeyBinding(
        "open",
        "enter",
        "open",
        "open",
        "open: the ranks of a node, the log of a rank",
        _LISTS,
        10,
        bound=False,
    ),
    KeyBinding(
        "home.open",
        "enter",
        "open",
        "attach",
        "attach to this job; detaches from the current one",
        HOME,
        10,
        bound=False,
    ),
    KeyBinding(
        "evidence",
        "enter",
        "open",
        "line",
        "open the evidence in the log; unfold the ranks below",
        "incident",
        10,
        bound=False,
    ),
    KeyBinding("nccl.log", "enter", "open", "log", "open the NCCL log of that node", "nccl", 10, bound=False),
    KeyBinding(
        "detail",
        "enter",
        "detail",
        "whole line",
        "show the whole record, with file and time",
        "logs",
        45,
    ),
    KeyBinding(
        "logs",
        "l",
        "logs",
        "logs",
        "open the log of the selected rank or node",
        "map nodes ranks run nccl incident",
        20,
        palette=True,
    ),
    KeyBinding(
        "incident",
        "i",
        "app.incident",
        "incident",
        "open the newest incident",
        "map nodes ranks logs run nccl",
        48,
        palette=True,
    ),
    KeyBinding("act", "x", "act", "actions", "actions on the selection and on the job", "job", 50, palette=True),
    KeyBinding("sync", "R", "sync", "", "sync edited files and restart, or roll back", "job"),
    KeyBinding("shell", "B", "shell", "", "shell on the node, in the rank's work tree and environment", "job"),
    KeyBinding("forward", "F", "forward", "", "reach a port of the node: TensorBoard, Jupyter", "job"),
    KeyBinding("mark", "space", "mark", "mark", "mark or unmark; actions apply to the marked", "map nodes ranks"),
    KeyBinding("mark.failed", "asterisk", "mark_failed", "", "mark all that failed or were lost", "map nodes ranks"),
    KeyBinding("mark.none", "U", "unmark", "unmark all", "remove all marks", "map nodes ranks", palette=True),
    KeyBinding(
        "problems",
        "exclamation_mark",
        "problems",
        "",
        "show only nodes and ranks with problems, or all",
        "map nodes ranks",
    ),
    KeyBinding(
        "table.filter", "slash", "filter", "filter", "show only rows that contain a text", _TABLES, palette=True
    ),
    KeyBinding(
        "table.sort", "o", "sort(False)", "sort", "sort by the next column; a click on its name sorts, too", _TABLES
    ),
    KeyBinding("table.sort.back", "O", "sort(True)", "", "sort the other way round", _TABLES),
    KeyBinding("metric", "m", "metric", "", "heat map metric: state, output, lag, gpu, mem, cpu", "map"),
    KeyBinding(
        "chart",
        "c",
        "chart",
        "chart",
        "show the charts alone, or all panes again",
        _CHARTS,
        palette=True,
    ),
    KeyBinding(
        "chart.span", "z", "span", "span", "charts: the last 8 minutes, or the whole run", _CHARTS, palette=True
    ),
    KeyBinding("pane", "tab", "pane(1)", "pane", "next pane", _PANES, 60),
    KeyBinding("pane.back", "shift+tab", "pane(-1)", "", "previous pane", _PANES),
    KeyBinding(MAXIMIZE, "Z", "maximize", "maximize", "show only this pane, or all again", _PANES, palette=True),
    KeyBinding("log.follow", "f", "follow", "follow", "follow the end, or stop following", "logs", 10, palette=True),
    KeyBinding("log.find", "slash", "find", "find", "search this log for text or a pattern", "logs", 20),
    KeyBinding("log.next", "n", "hit(1)", "next", "next hit", "logs", 30),
    KeyBinding("log.previous", "N", "hit(-1)", "", "previous hit", "logs"),
    KeyBinding("log.errors", "e", "errors(1)", "errors", "next line that looks like an error", "logs", 35),
    KeyBinding("log.errors.previous", "E", "errors(-1)", "", "previous line that looks like an error", "logs"),
    KeyBinding(
        "log.traceback",
        "left_curly_bracket",
        "traceback(-1)",
        "previous traceback",
        "previous traceback",
        "logs",
        palette=True,
    ),
    KeyBinding(
        "log.traceback.next",
        "right_curly_bracket",
        "traceback(1)",
        "next traceback",
        "next traceback",
        "logs",
        palette=True,
    ),
    KeyBinding(
        "log.at", "at", "at", "go to a time", "go to a time: 14:03, -5m, 2026-11-20T14:03:20Z", "logs", palette=True
    ),
    KeyBinding(
        "log.line",
        "ctrl+g",
        "line",
        "go to a line",
        "go to a line of one stream of one rank",
        "logs",
        palette=True,
    ),
    KeyBinding(
        "log.include", "ampersand", "include", "keep", "filter: keep lines that match", "logs", 46, palette=True
    ),
    KeyBinding(
        "log.exclude", "exclamation_mark", "exclude", "drop", "filter: drop matching lines", "logs", palette=True
    ),
    KeyBinding(
        "log.level", "v", "level(1)", "level", "filter: all levels, warnings and errors, errors", "logs", palette=True
    ),
    KeyBinding("log.level.down", "V", "level(-1)", "", "filter: previous level", "logs"),
    KeyBinding("log.wider", "backspace", "wider", "wider", "remove the last filter", "logs", palette=True),
    KeyBinding(
        "log.filter",
        "backslash",
        "filter",
        "filter on or off",
        "switch the filter off or on; esc switches it off",
        "logs",
        palette=True,
    ),
    KeyBinding("log.scope", "M", "scope", "scope", "scope: this rank, its node, all ranks", "logs", 40),
    KeyBinding("log.stream", "s", "stream", "stream", "stream: stdout and stderr, one of these, nccl, all", "logs", 42),
    KeyBinding("log.rank", "less_than_sign", "rank(-1)", "", "log of the previous rank", "logs"),
    KeyBinding("log.rank.next", "greater_than_sign", "rank(1)", "", "log of the next rank", "logs"),
    KeyBinding("log.generation", "left_square_bracket", "generation(-1)", "", "log of the previous generation", "logs"),
    KeyBinding(
        "log.generation.next", "right_square_bracket", "generation(1)", "", "log of the next generation", "logs"
    ),
    KeyBinding(
        "log.fold",
        "z",
        "fold",
        "fold",
        "collapse identical lines across ranks; enter lists them",
        "logs",
        palette=True,
    ),
    KeyBinding("log.time", "t", "time", "", "show or hide the time of arrival", "logs"),
    KeyBinding(
        "log.save",
        "S",
        "save",
        "save",
        "save this log, filtered and folded as shown; esc cancels",
        "logs",
        palette=True,
    ),
    KeyBinding("log.wrap", "w", "wrap", "wrap", "wrap long lines, or cut them", "logs", palette=True),
    KeyBinding("log.source", "number_sign", "source", "", "show or hide node and rank", "logs"),
    KeyBinding("incident.older", "left_square_bracket", "turn(-1)", "older", "previous incident", "incident", 30),
    KeyBinding("incident.newer", "right_square_bracket", "turn(1)", "newer", "next incident", "incident", 31),
    KeyBinding("incident.why", "w", "why", "why", "show what was said by whom, and what decided", "incident", 32),
    KeyBinding("move", "up,down,j,k", "", "", "move by one line", "any", bound=False),
    KeyBinding("page", "pageup,pagedown", "", "", "move by one page", "any", bound=False),
    KeyBinding("edge", "g,G", "", "", "first line, last line; in a log G also follows", "any", bound=False),
    KeyBinding("half", "u,d", "", "", "half a page up, down", "logs", bound=False),
    KeyBinding(
        "side", "left,right,0,dollar_sign", "", "", "sideways; 0 first column, $ end of the lines", "logs", bound=False
    ),
    KeyBinding("copy", "y", "copy", "copy", "copy the row or line", "any", palette=True),
    KeyBinding(
        "pause", "p", "app.pause", "pause", "freeze or resume the display; the job is unaffected", "any", palette=True
    ),
    KeyBinding("answer", "A", "app.answer", "answer ssh", "answer what ssh asks for lost hosts", "job", palette=True),
    KeyBinding("palette", "colon,ctrl+p", "palette", "palette", "run any of these by name", "any", 70),
    KeyBinding("help", "question_mark,f1", "help", "help", "this page", "any", 80),
    KeyBinding("home", "H", f"app.go('{HOME}')", "home", "all jobs of the inventories used here; switch", palette=True),
    KeyBinding("theme", "T", "app.theme", "theme", "next theme", "any", palette=True),
    KeyBinding("back", "escape", "back", "back", "go back", "any", 75),
    KeyBinding("last", "minus", "app.last", "", "previous screen", "any"),
    KeyBinding("quit", "q,ctrl+c", "app.leave", "detach", "detach, or stop the job (asks)", "any", 90, palette=True),
)

_SHOWN: Final = {
    "slash": "/",
    "colon": ":",
    "question_mark": "?",
    "escape": "esc",
    "minus": "-",
    "left_square_bracket": "[",
    "right_square_bracket": "]",
    "less_than_sign": "<",
    "greater_than_sign": ">",
    "dollar_sign": "$",
    "number_sign": "#",
    "left_parenthesis": "(",
    "right_parenthesis": ")",
    "left_curly_bracket": "{",
    "right_curly_bracket": "}",
    "at": "@",
    "ampersand": "&",
    "backslash": "\\",
    "comma": ",",
    "full_stop": ".",
    "asterisk": "*",
    "exclamation_mark": "!",
    "pageup": "pgup",
    "pagedown": "pgdn",
}


def display(key: str) -> str:
    """Return a key as it is written in the help."""
    return _SHOWN.get(key, key)


def changed(changes: Mapping[str, str]) -> tuple[KeyBinding, ...]:
    """Return the table with the keys that the user has changed."""
    return tuple(dataclasses.replace(key, keys=changes.get(key.id, key.keys)) for key in KEYS)


def of(screen: str, table: Sequence[KeyBinding] = KEYS) -> list[KeyBinding]:
    """Return the keys that work on a screen."""
    wheres = {"any", screen} | ({"job"} if screen != HOME else set())
    return [key for key in table if not wheres.isdisjoint(key.where.split())]


def bindings(screen: str) -> list[Binding]:
    """Return the bindings of a screen."""
    return [
        Binding(key.keys, key.action, key.label, show=False, id=f"{key.id}.{screen}") for key in of(screen) if key.bound
    ]


def footer(screen: str, table: Sequence[KeyBinding] = KEYS) -> list[KeyBinding]:
    """Return the entries in the footer of a screen, in order."""
    return sorted((key for key in of(screen, table) if key.footer), key=lambda key: key.footer)


_NAMED = {key.value for key in Keys} | {one for key in KEYS for one in key.keys.split(",")}
_MODIFIERS = ("ctrl+", "alt+", "shift+")


FREE_KEY: Final = 'choose a free key, such as f5 or ctrl+t; ? lists the keys, and [keys] changes the others: act = "X"'

# How the user is notified; a terminal that shows no desktop notifications rings its bell instead.
NOTICES: Final = ("bell", "desktop", "off")


def config_file() -> Path:
    """Return the user's configuration of the screens."""
    return config_dir() / "config.toml"


class Config(NamedTuple):
    """What a user has set for all jobs."""

    keys: dict[str, str]
    """The changed keys by id."""
    notice: str
    """One of NOTICES."""


NO_CONFIG: Final = Config({}, NOTICES[0])


def load_config() -> Config:
    """Return the user's configuration; raises UsageError that names file, line and id."""
    path = config_file()
    try:
        text = path.read_text(encoding="utf-8")
        data = tomllib.loads(text)
    except FileNotFoundError:
        return NO_CONFIG
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{path}: {error}") from error
    for name in data:
        if name not in ("keys", "notice"):
            hint = 'there are notice = "bell", and [keys] with id = "keys"'
            raise UsageError(f"{at(path, text, name)}: unknown key {name!r}", hint)
    notice = data.get("notice", NOTICES[0])
    if notice not in NOTICES:
        hint = f"write one of: {', '.join(NOTICES)}"
        raise UsageError(f"{at(path, text, 'notice')}: notice cannot be {notice!r}", hint)
    table = data.get("keys", {})
    if not isinstance(table, dict):
        raise UsageError(f"{at(path, text, 'keys')}: [keys] must be a table")
    changes = {name: _read_entry(name, value, at(path, text, name, "keys")) for name, value in table.items()}
    _check_twice(changed(changes), {name: at(path, text, name, "keys") for name in changes})
    return Config(changes, notice)


def _read_entry(name: str, value: Any, where: str) -> str:
    """Return one entry, in Textual's names of keys."""
    known = {key.id: key for key in KEYS}
    if name not in known:
        close = difflib.get_close_matches(name, known, 1)
        meant = f"did you mean {close[0]!r}? " if close else ""
        hint = f"{meant}known ids: {', '.join(key.id for key in KEYS if key.bound)}"
        raise UsageError(f"{where}: no key has the id {name!r}", hint)
    if not known[name].bound:
        raise UsageError(f"{where}: {name} is a key of every list and cannot be changed")
    words = (
        value if isinstance(value, list) else value.split(",") if isinstance(value, str) and value != "," else [value]
    )
    if not words or not all(isinstance(word, str) and word.strip() for word in words):
        raise UsageError(f'{where}: {name} must be a key such as "X" or "ctrl+o,f2", not {value!r}')
    return ",".join(_key_name(word.strip(), where) for word in words)


def _key_name(word: str, where: str) -> str:
    if len(word) == 1:
        return _character_to_key(word)
    base = word
    for modifier in _MODIFIERS:
        base = base.replace(modifier, "", 1) if base.startswith(modifier) else base
    if base not in _NAMED and len(base) != 1:
        hint = "write one character, or a name such as f5, enter, space, pageup, ctrl+o"
        raise UsageError(f"{where}: there is no key {word!r}", hint)
    return word


def _check_twice(table: Sequence[KeyBinding], places: Mapping[str, str]) -> None:
    for screen in dict.fromkeys(name for key in table for name in key.where.split()):
        clash = _find_clash(of(screen, table), places)
        if clash is not None:
            key, mine, other = clash
            text = f"{places[mine]}: {mine}: {display(key)!r} is {other}'s key on the screen {screen!r}"
            raise UsageError(text, FREE_KEY)


def _find_clash(table: Sequence[KeyBinding], own: Collection[str]) -> tuple[str, str, str] | None:
    """Return a key that two entries of one screen have, the entry that is the user's, and the other one."""
    owners: dict[str, str] = {}
    for entry in table:
        for key in entry.keys.split(","):
            other = owners.setdefault(key, entry.id)
            if other != entry.id and (entry.id in own or other in own):
                return (key, entry.id, other) if entry.id in own else (key, other, entry.id)
    return None
