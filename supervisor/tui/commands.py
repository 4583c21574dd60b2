"""The user's own commands: the tables `[commands.NAME]` of config.toml.

In: such a table; a job and a selection. Out: actions with a command line, and the variables that it runs with;
UsageError that names file and line.

No text is ever inserted into a command line: `sh` gets the line as it is written, and the values as its environment.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from supervisor.actions import Action
from supervisor.errors import UsageError
from supervisor.tui.themes import at

if TYPE_CHECKING:
    from pathlib import Path

    from supervisor.tui.model import JobView

SCOPES: Final = ("job", "node", "rank")
HERE, NODE = "here", "node"
# Each field accepts a value of this type, or one of these words, of which the first is the default.
FIELDS: Final[dict[str, type | tuple[str, ...]]] = {
    "key": str, "command": str, "scope": SCOPES, "on": (HERE, NODE), "confirm": bool, "wait": bool,
}  # fmt: skip
# Each variable has a value in this scope and in those below it.
VARIABLES: Final = {
    "JOB": "job", "GENERATION": "job", "HOSTS": "job", "NODE": "node", "RANK": "rank", "PID": "rank", "LOGS": "rank",
}  # fmt: skip
# Only the node knows where its files are.
OF_THE_NODE: Final = "LOGS"
EXAMPLE: Final = 'for example: [commands.top] key = "h", command = "htop -p $PID", scope = "rank", on = "node"'
# Nodes report some of the values; a command that does not quote them must still get one word that is no option.
_VALUE: Final = re.compile(r"[A-Za-z0-9_][\w.,:-]*", re.ASCII)
_NAME: Final = re.compile(r"\$\{?([A-Z][A-Z0-9_]*)")


@dataclass(frozen=True)
class Command(Action):
    """A command line on a key; `key` is Textual's name of it."""

    line: str = ""
    on_node: bool = False
    """Whether it runs where the rank runs, instead of on this machine."""
    wait: bool = True
    """Whether its output stays, after its end, until enter is pressed."""
    place: str = ""
    """File and line of its key."""

    @property
    def used(self) -> list[str]:
        """Our variables in the line, in the order of their first use."""
        return [name for name in dict.fromkeys(_NAME.findall(self.line)) if name in VARIABLES]

    def variables(self, job_view: JobView, node: str | None, rank: int | None) -> dict[str, str]:
        """Return the variables that have a value for a selection; raises LookupError if the line needs another one."""
        row = job_view.rank(rank) if rank is not None else None
        known = {
            "JOB": job_view.job,
            "GENERATION": job_view.generation if (job_view.generation or 0) >= 0 else None,
            "HOSTS": ",".join(one.name for one in job_view.nodes),
            "NODE": node if self.scope != "job" else None,
            "RANK": rank if self.scope == "rank" else None,
            "PID": row.pid if row is not None and self.scope == "rank" else None,
        }
        values = {name: str(value) for name, value in known.items() if value not in (None, "")}
        for name in self.used:
            if name not in values and name != OF_THE_NODE:
                raise LookupError(f"${name} has no value at the moment")
        unsafe = {name: value for name, value in values.items() if not _VALUE.fullmatch(value)}
        for name, value in unsafe.items():
            if name in self.used:
                raise LookupError(f"${name} would be {value!r}, which a shell may interpret")
        return {name: value for name, value in values.items() if name not in unsafe}


def read(table: object, path: Path, text: str) -> tuple[Command, ...]:
    """Read the commands of a configuration; raises UsageError."""
    if not isinstance(table, dict):
        raise UsageError(f"{at(path, text, 'commands')}: [commands] must be a table", EXAMPLE)
    return tuple(_read(name, fields, path, text) for name, fields in table.items())


def _place(path: Path, text: str, name: str, field: str = "") -> str:
    """Return file and line of a field, or of the command."""
    places = ((field, f"commands.{name}"), (f"commands.{name}", ""), (name, "commands"), ("commands", ""))
    return next((place for place in (at(path, text, *one) for one in places) if place != str(path)), str(path))


def _read(name: str, fields: object, path: Path, text: str) -> Command:
    where = _place(path, text, name)
    if not isinstance(fields, dict):
        raise UsageError(f"{where}: commands.{name} must be a table", EXAMPLE)
    for field, value in fields.items():
        _check(f"{_place(path, text, name, field)}: commands.{name}", field, value)
    for field in ("key", "command"):
        if not fields.get(field):
            raise UsageError(f"{where}: commands.{name} has no {field}", EXAMPLE)
    line = fields["command"]
    command = Command(
        id=f"commands.{name}", verb="", key=fields["key"], label=name, help=line, op="command", line=line,
        scope=fields.get("scope", SCOPES[0]), asks="command", on_node=fields.get("on") == NODE,
        confirm=1 if fields.get("confirm") else 0, wait=fields.get("wait", True),
        place=_place(path, text, name, "key"),
    )  # fmt: skip
    if command.on_node and command.scope == "job":
        hint = 'write scope = "node" or scope = "rank"; the selection says which node is meant'
        raise UsageError(f'{_place(path, text, name, "on")}: commands.{name}: on = "node" needs a node', hint)
    _check_variables(command, _place(path, text, name, "command"))
    return command


def _check(where: str, field: str, value: object) -> None:
    accepted = FIELDS.get(field)
    if accepted is None:
        close = difflib.get_close_matches(field, FIELDS, 1)
        meant = f"did you mean {close[0]!r}? " if close else ""
        raise UsageError(f"{where}: unknown field {field!r}", f"{meant}fields: {', '.join(FIELDS)}")
    if isinstance(accepted, tuple) and value not in accepted:
        raise UsageError(f"{where}: {field} cannot be {value!r}", f"write one of: {', '.join(accepted)}")
    if isinstance(accepted, type) and not isinstance(value, accepted):
        kind = "true or false" if accepted is bool else "text in quotes"
        raise UsageError(f"{where}: {field} cannot be {value!r}", f"write {kind}")


def _check_variables(command: Command, where: str) -> None:
    """Refuse a variable that can have no value; `${NAME}` and text in single quotes are the shell's."""
    scope = SCOPES.index(command.scope)
    allowed = [name for name, least in VARIABLES.items() if SCOPES.index(least) <= scope]
    if not command.on_node and OF_THE_NODE in allowed:
        allowed.remove(OF_THE_NODE)
    outside = re.sub(r"'[^']*'|\$\{", "", command.line)
    for name in _NAME.findall(outside):
        if name not in allowed:
            what = "has no value for this scope and machine" if name in VARIABLES else "is unknown"
            hint = f"variables here: {', '.join(allowed)}; write ${{{name}}} for another variable of the shell"
            raise UsageError(f"{where}: {command.id}: ${name} {what}", hint)
