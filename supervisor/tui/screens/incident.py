"""What failed first and why, what failed as a consequence, and what to do now.

In: incidents. Out: the log at a line of evidence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual import on

from supervisor.tui import times
from supervisor.tui.rows.incident import PageLine, incident_page
from supervisor.tui.rows.spans import Row, clean
from supervisor.tui.screens.base import LiveScreen
from supervisor.tui.shell import LogOf, Target
from supervisor.tui.widgets.picker import Picker

if TYPE_CHECKING:
    from collections.abc import Iterable

    from textual.widget import Widget

    from remote_agent.wire.documents import IncidentDocument
    from supervisor.tui.model import JobView


def _before_the_verdict(job_view: JobView) -> Row:
    """Return what is shown without an incident: nothing has failed, or its cause is still being found."""
    failed = [rank for rank in job_view.ranks if rank.state == "failed"]
    if not failed:
        return ((" no failure so far", "ok"),)
    ranks = f"rank {failed[0].rank} ({failed[0].node})" if len(failed) == 1 else f"{len(failed)} ranks"
    how = " or ".join(sorted({rank.outcome for rank in failed}))
    return ((f" {ranks} failed", "bad"), (f", {how}; finding the first failure", "text"))


class IncidentScreen(LiveScreen):
    """One incident at a time, the newest first."""

    NAME = "incident"

    def body(self) -> Iterable[Widget]:
        """Yield one page."""
        yield Picker(title="incident", id="incident")

    def on_mount(self) -> None:
        """Begin with the newest."""
        self._back = 0
        self._unfolded = self._why = False
        self._lines: list[PageLine] = []
        self._seen = 0
        self._drawn_s = 0

    def tick(self, job_view: JobView, age_s: float, changed: bool) -> None:
        """Redraw every second, because the page shows durations and the time that is left."""
        now_s = int(times.now())
        super().tick(job_view, age_s, changed or now_s != self._drawn_s)
        self._drawn_s = now_s

    def show(self, job_view: JobView) -> None:
        """Show the incident; the one that is read stays when a new one arrives."""
        picker = self.query_one(Picker)
        incidents = self.shell.source.incidents
        if self._back and len(incidents) > self._seen:
            self._back += len(incidents) - self._seen
        self._seen = len(incidents)
        incident = self._current()
        if incident is None:
            picker.heading, picker.note = "incident", ()
            picker.placeholder = _before_the_verdict(job_view)
            picker.show((), lambda index: ())
            return
        self._lines = incident_page(
            incident,
            job_view,
            picker.line_width or self.size.width - 1,
            self.shell.glyphs,
            unfolded=self._unfolded,
            why=self._why,
            now_s=times.now() - (self.shell.paused_s or 0.0),
        )
        lines = self._lines
        picker.heading = f"incident {incident['id']}, generation {incident['generation']}"
        picker.note = ((f"{len(incidents) - self._back} of {len(incidents)}", "dim"),)
        picker.show([line.key for line in lines], lambda index: lines[index].row)

    def open(self, number: object) -> None:
        """Show the incident with this id, else the newest."""
        incidents = self.shell.source.incidents
        at = next((at for at, incident in enumerate(incidents) if incident.get("id") == number), len(incidents) - 1)
        self._seen = len(incidents)
        self._turn_to(len(incidents) - 1 - at)

    def _turn_to(self, back: int) -> None:
        self._back = max(0, back)
        picker = self.query_one(Picker)
        picker.top = 0
        picker.action_edge(False)
        self.shell.look_again()

    def _current(self) -> IncidentDocument | None:
        incidents = self.shell.source.incidents
        self._back = max(0, min(self._back, len(incidents) - 1))
        return incidents[-1 - self._back] if incidents else self.shell.job_view.incident

    def selection(self) -> Target:
        """Return the culprit."""
        incident = self._current()
        if incident is None:
            return Target(None, None)
        ranks, node = incident["culprit_ranks"], incident["culprit_node"]
        return Target(clean(node) if node else None, ranks[0] if ranks else None)

    def action_turn(self, step: int) -> None:
        """Show an older or newer incident."""
        self._turn_to(self._back - step)

    def action_why(self) -> None:
        """Show or hide the claims that decided."""
        self._why = not self._why
        self.shell.look_again()

    def action_logs(self) -> None:
        """Open the culprit's log of that generation."""
        incident = self._current()
        self.shell.open_log(LogOf(self.selection(), incident["generation"] if incident else None))

    @on(Picker.Opened)
    def open_line(self, event: Picker.Opened) -> None:
        """Go to the evidence, or fold or unfold the section."""
        line = next((line for line in self._lines if line.key == event.key), None)
        if line is not None and line.place is not None:
            self.shell.open_log(line.place)
        elif line is not None and line.unfolds:
            self._unfolded = not self._unfolded
            self.shell.look_again()
