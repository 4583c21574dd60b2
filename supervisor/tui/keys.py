"""The keys of every screen that move and look; those that act come from `supervisor.actions`.

In: nothing, or what the user has changed (`keymap.py`). Out: bindings, footers and help, all from one table.

Never bound here: ctrl+s q z a b h i j m, which terminals, shells and tmux use themselves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Final

from textual.binding import Binding


@dataclasses.dataclass(frozen=True)
class Key:
    """One thing to do with a key."""

    id: str
    keys: str
    """As Textual names them, separated by commas; the first one is shown."""
    action: str
    label: str
    """A few words, for the footer and the palette."""
    help: str
    """What it does, for the help page and the palette."""
    where: str = "any"
    """any, or the screens it belongs to, separated by spaces."""
    footer: int = 0
    """Order in the footer from the left, 0: not there."""
    bound: bool = True
    """False: a widget binds it; it is listed here for the help page."""
    palette: bool = False


SCREENS: Final = (
    ("map", "Map"),
    ("nodes", "Nodes"),
    ("ranks", "Ranks"),
    ("logs", "Logs"),
    ("incident", "Incident"),
    ("run", "Run"),
    ("nccl", "NCCL"),
)

_LISTS = "map nodes ranks run"
_PANES = "map nodes ranks run nccl"

KEYS: Final[tuple[Key, ...]] = (
    *(
        Key(f"screen.{name}", str(number), f"go('{name}')", title, f"{title} screen", palette=True)
        for number, (name, title) in enumerate(SCREENS, 1)
    ),
    Key(
        "open", "enter", "open", "open", "open what is selected: a node's ranks, a rank's log", _LISTS, 10, bound=False
    ),
    Key(
        "evidence",
        "enter",
        "open",
        "line",
        "evidence: its line in the log; victims: unfold",
        "incident",
        10,
        bound=False,
    ),
    Key("told", "enter", "open", "log", "what NCCL told on that node", "nccl", 10, bound=False),
    Key("detail", "enter", "detail", "whole line", "the whole record: a traceback, where and when it came", "logs", 45),
    Key(
        "logs",
        "l",
        "logs",
        "logs",
        "log of the selected rank or node",
        "map nodes ranks run nccl incident",
        20,
        palette=True,
    ),
    Key(
        "incident",
        "i",
        "incident",
        "incident",
        "the newest incident",
        "map nodes ranks logs run nccl",
        48,
        palette=True,
    ),
    Key("act", "x", "act", "actions", "what can be done with the selection and the job", "any", 50, palette=True),
    Key("sync", "R", "sync", "", "bring edited files to the nodes, restart; or roll back"),
    Key("mark", "space", "mark", "mark", "mark, or unmark: actions go to what is marked", "map nodes ranks"),
    Key("mark.failed", "asterisk", "mark_failed", "", "mark all that failed or was lost", "map nodes ranks"),
    Key("mark.none", "U", "unmark", "unmark all", "mark nothing", "map nodes ranks", palette=True),
    Key(
        "problems",
        "exclamation_mark",
        "problems",
        "",
        "in the tables only what has a problem, or all",
        "map nodes ranks",
    ),
    Key("metric", "m", "metric", "", "heat map of: state, output, lag, gpu, mem, cpu", "map"),
    Key("pane", "tab", "pane(1)", "pane", "next pane", _PANES, 60),
    Key("pane.back", "shift+tab", "pane(-1)", "", "previous pane", _PANES),
    Key("log.follow", "f", "follow", "follow", "follow the end, or stop following", "logs", 10, palette=True),
    Key("log.find", "slash", "find", "find", "find text or a pattern in this view", "logs", 20),
    Key("log.next", "n", "hit(1)", "next", "next hit", "logs", 30),
    Key("log.previous", "N", "hit(-1)", "", "previous hit", "logs"),
    Key("log.errors", "e", "errors(1)", "errors", "find lines that look like errors; again: the next one", "logs", 35),
    Key("log.errors.previous", "E", "errors(-1)", "", "the previous line that looks like an error", "logs"),
    Key(
        "log.traceback",
        "left_curly_bracket",
        "traceback(-1)",
        "traceback before",
        "the previous traceback",
        "logs",
        palette=True,
    ),
    Key(
        "log.traceback.next",
        "right_curly_bracket",
        "traceback(1)",
        "next traceback",
        "the next traceback",
        "logs",
        palette=True,
    ),
    Key("log.at", "at", "at", "go to a time", "go to a time: 14:03, -5m, 2026-11-20T14:03:20Z", "logs", palette=True),
    Key("log.line", "ctrl+g", "line", "go to a line", "go to a line, in one stream of one rank", "logs", palette=True),
    Key("log.mark", "m", "bookmark", "", "bookmark the line that is read, or take its mark away", "logs"),
    Key("log.mark.next", "apostrophe", "to_bookmark(1)", "next bookmark", "the next bookmark", "logs", palette=True),
    Key("log.mark.previous", "quotation_mark", "to_bookmark(-1)", "", "the previous bookmark", "logs"),
    Key("log.include", "ampersand", "include", "keep", "filter: keep only what matches", "logs", 46, palette=True),
    Key("log.exclude", "exclamation_mark", "exclude", "drop", "filter: drop what matches", "logs", palette=True),
    Key("log.level", "v", "level(1)", "level", "filter: all levels, warnings and errors, errors", "logs", palette=True),
    Key("log.level.down", "V", "level(-1)", "", "filter: the level before", "logs"),
    Key("log.wider", "backspace", "wider", "wider", "filter: take its last part away", "logs", palette=True),
    Key(
        "log.filter",
        "backslash",
        "filter",
        "filter on or off",
        "filter: off, or on again; esc takes it off",
        "logs",
        palette=True,
    ),
    Key("log.scope", "M", "scope", "scope", "scope: this rank, its node, all ranks", "logs", 40),
    Key("log.stream", "s", "stream", "stream", "stream: stdout and stderr, one of these, nccl, all", "logs", 42),
    Key("log.rank", "less_than_sign", "rank(-1)", "", "log of the previous rank", "logs"),
    Key("log.rank.next", "greater_than_sign", "rank(1)", "", "log of the next rank", "logs"),
    Key("log.generation", "left_square_bracket", "generation(-1)", "", "log of the generation before", "logs"),
    Key("log.generation.next", "right_square_bracket", "generation(1)", "", "log of the next generation", "logs"),
    Key(
        "log.fold",
        "z",
        "fold",
        "fold",
        "what ranks print alike at one moment, once; enter unfolds",
        "logs",
        palette=True,
    ),
    Key("log.time", "t", "time", "", "time of arrival on and off", "logs"),
    Key(
        "log.save", "S", "save", "save", "write all lines of these logs into a file; esc ends it", "logs", palette=True
    ),
    Key("log.pager", "o", "pager", "pager", "all lines of these logs in $PAGER", "logs", palette=True),
    Key("log.wrap", "w", "wrap", "wrap", "wrap long lines, or cut them at the screen's edge", "logs", palette=True),
    Key("log.source", "number_sign", "source", "", "node and rank on and off", "logs"),
    Key("incident.older", "left_square_bracket", "turn(-1)", "older", "the incident before", "incident", 30),
    Key("incident.newer", "right_square_bracket", "turn(1)", "newer", "the incident after", "incident", 31),
    Key("move", "up,down,j,k", "", "", "move by one line", "any", bound=False),
    Key("page", "pageup,pagedown", "", "", "move by one page", "any", bound=False),
    Key("edge", "g,G", "", "", "first line, last line; in a log G also follows", "any", bound=False),
    Key("half", "u,d", "", "", "half a page up, down", "logs", bound=False),
    Key(
        "side", "left,right,0,dollar_sign", "", "", "sideways; 0 first column, $ end of the lines", "logs", bound=False
    ),
    Key("copy", "y", "copy", "copy", "copy the row or line", "any", palette=True),
    Key(
        "pause", "p", "pause", "pause", "stop the screen, or let it go on; the job does not notice", "any", palette=True
    ),
    Key("palette", "colon,ctrl+p", "palette", "palette", "run any of these by name", "any", 70),
    Key("help", "question_mark,f1", "help", "help", "this page", "any", 80),
    Key("theme", "T", "theme", "theme", "next theme", "any", palette=True),
    Key("back", "escape", "back", "back", "back to the screen before", "any", 75),
    Key("last", "minus", "last", "", "the screen before, and forth again", "any"),
    Key("quit", "q,ctrl+c", "leave", "detach", "detach, or stop the job: asks", "any", 90, palette=True),
)

# On a recording, beside all others; bound by the application.
REPLAY: Final[tuple[Key, ...]] = (
    Key("replay.play", "p", "app.pause", "pause", "replay: let the time stand, or run again", footer=1, palette=True),
    Key(
        "replay.next", "full_stop", "app.step(1)", "next event", "replay: go to the next event", footer=2, palette=True
    ),
    Key(
        "replay.previous", "comma", "app.step(-1)", "previous", "replay: go to the event before", footer=3, palette=True
    ),
    Key("replay.faster", "right_parenthesis", "app.speed(1)", "faster", "replay: faster", footer=4, palette=True),
    Key("replay.slower", "left_parenthesis", "app.speed(-1)", "slower", "replay: slower", palette=True),
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
    "apostrophe": "'",
    "quotation_mark": '"',
    "comma": ",",
    "full_stop": ".",
    "asterisk": "*",
    "exclamation_mark": "!",
    "pageup": "pgup",
    "pagedown": "pgdn",
}


def shown(key: str) -> str:
    """A key as people write it."""
    return _SHOWN.get(key, key)


def changed(changes: Mapping[str, str]) -> tuple[Key, ...]:
    """The table with other keys for some ids."""
    return tuple(dataclasses.replace(key, keys=changes.get(key.id, key.keys)) for key in KEYS)


def of(screen: str, table: Sequence[Key] = KEYS) -> list[Key]:
    """The keys that work on a screen."""
    return [key for key in table if key.where == "any" or screen in key.where.split()]


def bindings(screen: str) -> list[Binding]:
    """The bindings of a screen."""
    return [
        Binding(key.keys, key.action, key.label, show=False, id=f"{key.id}.{screen}") for key in of(screen) if key.bound
    ]


def footer(screen: str, table: Sequence[Key] = KEYS) -> list[tuple[str, str]]:
    """Key and label of what matters on a screen, in order."""
    chosen = sorted((key for key in of(screen, table) if key.footer), key=lambda key: key.footer)
    return [(shown(key.keys.split(",")[0]), key.label) for key in chosen]
