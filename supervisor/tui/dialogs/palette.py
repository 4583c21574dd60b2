"""The command palette and the help page, both made from the table of keys and the registry of actions.

In: the shell, the name of a screen. Out: the chosen entry is run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from textual import events, on
from textual.binding import Binding
from textual.fuzzy import Matcher
from textual.widgets import Input

from supervisor import actions
from supervisor.tui import keys, looks
from supervisor.tui.dialogs.actions import ActionDialogs, changes, offered
from supervisor.tui.dialogs.base import Dialog, RowsDialog
from supervisor.tui.rows.spans import Row, fit, wrap
from supervisor.tui.shell import Target
from supervisor.tui.widgets.picker import Picker

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from textual.widget import Widget

    from supervisor.tui.shell import Shell


# The longest list of keys is `left right 0 $`; a space follows.
KEYS_WIDTH: Final = 15
RANKS_LISTED: Final = 1024
_EVERYWHERE: Final = ("any", "job")


class PaletteEntry(NamedTuple):
    """One line of the palette or of the help page."""

    id: str
    label: str
    help: str
    key: str = ""


class CommandPalette(Dialog[str]):
    """Type part of a name; enter runs the selected entry."""

    BINDINGS = [
        Binding("up", "move(-1)", show=False, priority=True),
        Binding("down", "move(1)", show=False, priority=True),
    ]

    def __init__(self, entries: Sequence[PaletteEntry]) -> None:
        super().__init__("palette")
        self._entries = entries
        self._matching = list(entries)

    def content(self) -> Iterable[Widget]:
        """Yield a field and the entries that match."""
        field = Input(id="query", compact=True, placeholder="name of an action, screen, node, rank (r12) or theme")
        field.cursor_blink = False
        yield field
        picker = Picker(id="matches")
        picker.can_focus = False
        picker.leads = True
        picker.placeholder = ((" no match", "dim"),)
        yield picker

    def on_mount(self) -> None:
        """Show all entries."""
        self._fill()

    def lay_out(self) -> None:
        self._fill()
        self.query_one(Picker).styles.height = max(3, min(14, self.app.size.height - 7))

    @on(Input.Changed)
    def narrow(self, event: Input.Changed) -> None:
        """Show the entries that match, best first."""
        words = event.value.strip()
        if words:
            matcher = Matcher(words)
            scored = [(max(matcher.match(e.label), matcher.match(e.help) * 0.6), e) for e in self._entries]
            self._matching = [entry for score, entry in sorted(scored, key=lambda pair: -pair[0]) if score > 0]
        else:
            self._matching = list(self._entries)
        self._fill()
        self.query_one(Picker).action_edge(False)

    def _fill(self) -> None:
        entries = self._matching
        self.query_one(Picker).show([entry.id for entry in entries], lambda index: self._row(entries[index]))

    def _row(self, entry: PaletteEntry) -> Row:
        room = min(28, self.inner_width // 2)
        rest = max(0, self.inner_width - room - 8)
        label, note = fit(entry.label, room, self.more), fit(entry.help, rest, self.more)
        return ((f" {label} ", "title"), (f"{note} ", "dim"), (entry.key, "key"))

    def action_move(self, delta: int) -> None:
        """Move in the list while the field keeps the focus."""
        self.query_one(Picker).action_step(delta)

    @on(Input.Submitted)
    def run_selected(self) -> None:
        """Run what is selected."""
        selected = self.query_one(Picker).selected
        self.dismiss(selected if isinstance(selected, str) else None)

    def on_click(self, event: events.Click) -> None:
        """Close the box on a click outside of it."""
        if event.widget is self:
            self.dismiss(None)


class Help(RowsDialog):
    """The keys of a screen."""

    BINDINGS = [Binding("question_mark,f1", "cancel", show=False)]

    def __init__(self, title: str, sections: Sequence[tuple[str, Sequence[PaletteEntry]]]) -> None:
        super().__init__(title)
        self._sections = sections

    def rows(self) -> Sequence[Row]:
        """Return keys and what they do, section by section."""
        rows: list[Row] = []
        for title, entries in self._sections:
            if rows:
                rows.append(())
            rows.append(((f" {title}", "accent"),))
            for entry in entries:
                for number, line in enumerate(wrap(entry.help, self.inner_width - KEYS_WIDTH - 1)):
                    rows.append((("  " + fit("" if number else entry.key, KEYS_WIDTH), "key"), (line, "text")))
        return rows


def open_palette(shell: Shell) -> None:
    """Open the palette for the visible screen."""
    screen = shell.active_screen
    target = screen.selection()

    def chosen(name: str | None) -> None:
        if name is not None:
            _run(shell, name, target)

    shell.app.push_screen(CommandPalette(_entries(shell, screen.NAME)), chosen)


def _entries(shell: Shell, screen: str) -> list[PaletteEntry]:
    job_view = shell.job_view
    bound = [key for key in keys.of(screen, shell.key_table) if key.palette]
    offers = [one for one in offered() if not (shell.read_only and changes(one))] if screen != keys.HOME else []
    ranks = job_view.ranks[:RANKS_LISTED]
    return [
        *(PaletteEntry(f"key:{k.action}", _titled(k.label), k.help, k.first) for k in bound),
        *(PaletteEntry(f"act:{one.id}", one.label, one.help, f"x {one.key}") for one in offers),
        *(PaletteEntry(f"node:{node.name}", node.name, f"log of node {node.name}") for node in job_view.nodes),
        *(PaletteEntry(f"rank:{row.rank}", f"r{row.rank}", f"log of rank {row.rank} on {row.node}") for row in ranks),
        *(PaletteEntry(f"theme:{name}", name, "theme", "T") for name in sorted(shell.themes.skins)),
    ]


def _run(shell: Shell, name: str, target: Target) -> None:
    kind, _, value = name.partition(":")
    if kind == "theme":
        shell.set_theme(value)
    elif kind == "node":
        shell.open_log(Target(value))
    elif kind == "rank":
        row = shell.job_view.rank(int(value))
        shell.open_log(Target(row.node if row else None, int(value)))
    elif kind == "act":
        ActionDialogs(shell).begin(actions.BY_ID[value], target)
    elif kind == "key":
        shell.app.call_later(shell.active_screen.run_action, value)


def open_help(shell: Shell, screen: str) -> None:
    """Show the keys of a screen, and the letters of the menu of actions."""
    bound = keys.of(screen, shell.key_table)
    offers = offered()
    letters = [PaletteEntry(one.id, one.label, one.help, keys.display(one.key)) for one in offers]
    sections = [
        ("this screen", [_help_entry(key) for key in bound if key.where not in _EVERYWHERE]),
        ("everywhere", [_help_entry(key) for key in bound if key.where in _EVERYWHERE]),
        ("after x (changes to the job ask for confirmation)", letters if screen != keys.HOME else []),
        ("glyphs", _glyph_entries(shell.glyphs)),
    ]
    shell.app.push_screen(Help(f"help: {screen}", [section for section in sections if section[1]]))


def _titled(name: str) -> str:
    return name[:1].upper() + name[1:]


def _help_entry(key: keys.KeyBinding) -> PaletteEntry:
    return PaletteEntry(key.id, key.label, key.help, " ".join(keys.display(one) for one in key.keys.split(",")))


def _glyph_entries(glyphs: looks.Glyphs) -> list[PaletteEntry]:
    states = [PaletteEntry(name, name, f"rank {look.word}", glyphs.of(look)) for name, look in looks.RANKS.items()]
    return [*states, PaletteEntry("old", "old", "no current state: no connection", glyphs.of(looks.NO_LINK))]
