"""How the application looks: its theme, which follows the user's files, and what he has set for this job before.

In: the session's job, theme files, the state folder. Out: palette, style sheet, memory; notices.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final, Literal

from textual.app import App

from supervisor.tui import memory, theming
from supervisor.tui.cells import clean

if TYPE_CHECKING:
    from supervisor.tui.source import Source

Level = Literal["information", "warning", "error"]
# How often the user's themes are looked at for a change, seconds.
LOOK_S: Final = 1.0


class ThemedApp(App[int], inherit_bindings=False):
    """An application with our themes."""

    def __init__(self, source: Source, theme: str | None) -> None:
        self._no_color_wanted = _no_color()
        super().__init__(ansi_color=True if self._no_color_wanted else None)
        self.source = source
        self.memory = memory.Memory()
        self.skins, self._problems = theming.load_all()
        self._theme_given = theme
        self._stamp = theming.stamp()
        self._recalled = ""
        self._css_file = ""
        self.recall()
        wanted = theme or self.memory.theme or theming.DEFAULT_THEME
        if theme is None and wanted not in self.skins:
            wanted = theming.DEFAULT_THEME
        self._take_theme(theming.NO_COLOR_THEME if self._no_color_wanted else wanted)

    def say(self, text: str, *, title: str = "", level: Level = "information", seconds: float = 6) -> None:
        """Show a notice; text of nodes is made safe to print."""
        safe = "\n".join(clean(line) for line in text.splitlines())
        self.notify(safe, title=clean(title), severity=level, timeout=seconds, markup=False)

    def unsay(self, title: str) -> None:
        """Take the notices of this title away: they hold no more."""
        for notice in [notice for notice in self._notifications if notice.title == title]:
            self._unnotify(notice)

    def look_again(self) -> None:
        """Draw the visible screen anew, soon."""
        raise NotImplementedError

    # --- themes

    def get_theme_variable_defaults(self) -> dict[str, str]:
        """What Textual's own style sheets need and its own ansi themes define: a theme may leave it out."""
        return theming.VARIABLE_DEFAULTS

    def _take_theme(self, name: str) -> None:
        skin = self.skins.get(name)
        if skin is None:
            known = ", ".join(sorted(self.skins))
            self._problems.append(f"no theme named {name}; there are: {known or 'none'}")
            skin = self.skins.get(theming.DEFAULT_THEME) or theming.fallback()
        self.palette = skin.palette
        self.register_theme(skin.theme)
        self.stylesheet.source.pop((self._css_file, ""), None)
        self._css_file = skin.css_file
        if skin.css:
            self.stylesheet.add_source(skin.css, (skin.css_file, ""), tie_breaker=1)
        if self.theme == skin.name and self.is_running:
            # Textual looks at a theme of the same name only when it is told to.
            self.call_next(self.refresh_css, animate=False)
        self.theme = skin.name

    def set_skin(self, name: str) -> None:
        """Take a theme and draw everything with it."""
        self._take_theme(name)
        self.look_again()

    def next_theme(self) -> None:
        """Take the next theme in order of names."""
        names = sorted(self.skins)
        if names:
            at = names.index(self.palette.name) if self.palette.name in names else -1
            self.set_skin(names[(at + 1) % len(names)])

    def watch_themes(self) -> None:
        """Tell what is wrong with the user's themes, and look at them for changes from now on."""
        self._tell(self._problems)
        self.set_interval(LOOK_S, self.reread_themes)

    def _tell(self, problems: list[str]) -> None:
        for problem in problems:
            self.say(problem, title="theme", level="warning", seconds=10)

    def reread_themes(self) -> None:
        """Take what the user has changed in his themes; what cannot be used is told, and what is shown stays."""
        found = theming.stamp()
        if found == self._stamp:
            return
        self._stamp = found
        before, (skins, problems) = self.skins, theming.load_all()
        self._tell(problems)
        name = self.palette.name
        if name not in skins or any(f"/{name}." in problem for problem in problems):
            # A file that is being written must not take the colours away.
            skins[name] = before.get(name) or theming.fallback()
        self.skins = skins
        if skins[name] != before.get(name):
            self.set_skin(name)

    # --- memory

    def recall(self) -> None:
        """Take what was set for this job before, once it is known which job it is."""
        if self.source.job == self._recalled:
            return
        self._recalled = self.source.job
        self.memory = memory.recall(self._recalled)
        known = self.memory.theme in self.skins and not (self._theme_given or self._no_color_wanted)
        if known and self.is_running:
            self.set_skin(self.memory.theme)

    def on_unmount(self) -> None:
        """Keep what was set for the next look at this job."""
        if not self._no_color_wanted:
            self.memory.theme = self.palette.name
        if self._recalled:
            memory.keep(self._recalled, self.memory)


def _no_color() -> bool:
    """Whether the user wants no colour; an empty NO_COLOR means nothing, but Textual would take it for a yes."""
    if os.environ.get("NO_COLOR") == "":
        del os.environ["NO_COLOR"]
    return "NO_COLOR" in os.environ
