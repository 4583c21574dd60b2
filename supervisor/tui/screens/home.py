"""Home: the jobs of all inventories that were used on this machine.

In: a `HomeSource`, which is read while the screen is visible. Out: the job to which the user switches.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from textual import on

from remote_agent.text.names import count
from supervisor.tui import keys, times
from supervisor.tui.rows.home import home_columns, look_of
from supervisor.tui.rows.spans import EMPTY, Row, Span, clean, fit_row, spread
from supervisor.tui.rows.tables import Table
from supervisor.tui.screens.base import LiveScreen
from supervisor.tui.shell import JobChoice
from supervisor.tui.widgets.bars import AlertBar
from supervisor.tui.widgets.picker import Picker
from supervisor.tui.widgets.tables import LaidOut

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from textual.widget import Widget
    from textual.worker import Worker

    from supervisor.tui.looks import Glyphs
    from supervisor.tui.model import Snapshot
    from supervisor.tui.source import HomeJob, HomeSource


class JobTable(LaidOut):
    """One row per job."""

    def __init__(self, id: str) -> None:  # noqa: A002
        super().__init__("jobs", "no job yet; `supervisor up` launches one", id)

    def show_jobs(self, jobs: Sequence[HomeJob], *, reading: bool) -> None:
        """Show a newer state; `reading`: hosts have not answered yet."""
        self._again = lambda: self.show_jobs(jobs, reading=reading)
        columns = home_columns(jobs, self.glyphs, times.now())
        shown = self.chosen(jobs, columns)
        self.table = Table(columns, self.line_width, self.glyphs)
        self.head = self.table.head(self.order)
        self.heading = "jobs"
        self.show_filter(problems_only=False)
        if reading and not jobs:
            self.placeholder = ((" asking the hosts", "dim"),)
        self.show(
            [JobChoice(job.words, str(job.listed.get("job"))) for job in shown],
            lambda index: self.table.row(shown[index]),
        )


class HomeScreen(LiveScreen):
    """All jobs, live ones first."""

    NAME = keys.HOME
    HAS_TABLES = True
    _reading: Worker[None] | None = None
    _drawn = (-1, 0)

    def body(self) -> Iterable[Widget]:
        """One table."""
        yield JobTable("jobs")

    def on_screen_resume(self) -> None:
        """Ask the hosts from now on."""
        super().on_screen_resume()
        if self.shell.home is not None and self._reading is None:
            self._reading = self.run_worker(self.shell.home.run(), exit_on_error=True)

    def on_screen_suspend(self) -> None:
        """Ask no host for a screen that nobody sees; its rows stay."""
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def tick(self, snapshot: Snapshot, age_s: float, changed: bool) -> None:
        """Show what the hosts have answered; ages grow by themselves."""
        super().tick(snapshot, age_s, changed)
        home = self.shell.home
        if home is None or self.has_class("-small"):
            return
        drawn = (home.version, int(times.now()))
        if changed or drawn != self._drawn:
            self._drawn = drawn
            answered, hosts = home.asked
            self.query_one(JobTable).show_jobs(home.jobs, reading=answered < hosts)
        bar = self.query_one(AlertBar)
        bar.rows = summary_rows(home, bar.size.width, self.shell.glyphs)
        bar.redraw()

    def copied_text(self) -> str:
        """The id of the job."""
        chosen = self.query_one(JobTable).selected
        return chosen.job if isinstance(chosen, JobChoice) else ""

    @on(Picker.Opened)
    def switch(self, event: Picker.Opened) -> None:
        """Attach to the selected job."""
        if isinstance(event.key, JobChoice) and self.shell.home is not None:
            chosen = next(job for job in self.shell.home.jobs if event.key == (job.words, job.listed.get("job")))
            source = self.shell.source
            if event.key.job == source.job and any(host in source.hosts for host in chosen.listed.get("hosts", ())):
                self.call_later(self.run_action, "app.go('map')")
            else:
                self.shell.switch_to(event.key)


def summary_rows(home: HomeSource, width: int, glyphs: Glyphs) -> tuple[Row, Row]:
    """How many jobs there are in which states, and which hosts do not answer."""
    states = Counter(look_of(job) for job in home.jobs)
    answered, hosts = home.asked
    spans: list[Span] = [(f" {count(len(home.jobs), 'job')} ", "title")]
    for look, many in sorted(states.items(), key=lambda pair: pair[0].word):
        spans.append((f"  {glyphs.of(look)} {many} {look.word.lower()}", look.role))
    asked = f"{answered}/{hosts} hosts asked " if answered < hosts else f"{count(hosts, 'host')} "
    first, *others = home.troubles or [""]
    more = f" (and {len(others)} more)" if others else ""
    trouble: Row = ((f" ! {clean(first)}{more}", "warn"),) if first else EMPTY
    return spread(spans, [(asked, "dim")], width, glyphs.more), fit_row(trouble, width, glyphs.more)
