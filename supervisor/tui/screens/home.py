"""Home: the jobs of all inventories that were used on this machine.

In: a `HomeSource`, which is read while the screen is visible. Out: one row per job; the job to which the user switches.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from textual import on

from remote_agent.text.names import count
from remote_agent.wire.events import ENDED_STATES, Condition
from supervisor.tui import keys, looks, times
from supervisor.tui.model import build
from supervisor.tui.rows.spans import EMPTY, Row, Span, clean, fit_row, spread
from supervisor.tui.rows.tables import Column
from supervisor.tui.screens.base import LiveScreen
from supervisor.tui.shell import JobChoice
from supervisor.tui.training import newest
from supervisor.tui.widgets.bars import AlertBar
from supervisor.tui.widgets.picker import Picker
from supervisor.tui.widgets.tables import LaidOut
from supervisor.wording import values
from supervisor.wording.incidents import standing
from supervisor.wording.status import condition_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from textual.widget import Widget
    from textual.worker import Worker

    from supervisor.tui.looks import Glyphs
    from supervisor.tui.model import JobView
    from supervisor.tui.source import HomeJob, HomeSource
    from supervisor.tui.training import Newest

PLACE_MAX: Final = 24
JOB_MAX: Final = 28
NO_JOB: Final = "no job yet; `supervisor up` launches one"
# The job has files and no recorded end, but no agent.
_ABANDONED: Final = looks.Look("-", "-", "NO AGENT", "off")
_LISTED: Final = {"starting": Condition.LAUNCHING}


class JobTable(LaidOut):
    """One row per job."""

    def __init__(self, id: str) -> None:  # noqa: A002
        super().__init__("jobs", NO_JOB, id)

    def show_jobs(self, jobs: Sequence[HomeJob], *, reading: bool) -> None:
        """Show a newer state; `reading`: hosts have not answered yet."""
        self.nothing = "asking the hosts" if reading and not jobs else NO_JOB
        self.show_items(
            jobs,
            home_columns(jobs, self.glyphs, times.now()),
            lambda job: JobChoice(job.words, str(job.listed.get("job"))),
            heading="jobs",
        )


class HomeScreen(LiveScreen):
    """All jobs, live ones first."""

    NAME = keys.HOME
    HAS_TABLES = True
    _reading: Worker[None] | None = None
    _drawn = (-1, 0)

    def body(self) -> Iterable[Widget]:
        """Yield one table."""
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

    def tick(self, job_view: JobView, age_s: float, changed: bool) -> None:
        """Show what the hosts have answered; ages grow by themselves."""
        super().tick(job_view, age_s, changed)
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
        """Return the id of the job."""
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
    """Return how many jobs there are in which states, and which hosts do not answer."""
    states = Counter(look_of(job) for job in home.jobs)
    answered, hosts = home.asked
    spans: list[Span] = [(f" {count(len(home.jobs), 'job')} ", "title")]
    for look, many in sorted(states.items(), key=lambda pair: pair[0].word):
        spans.append((f"  {glyphs.of(look)} {many} {look.word.lower()}", look.role))
    asked = f"{answered}/{hosts} hosts answered " if answered < hosts else f"{count(hosts, 'host')} "
    first, *others = home.troubles or [""]
    more = f" (and {len(others)} more)" if others else ""
    trouble: Row = ((f" ! {clean(first)}{more}", "warn"),) if first else EMPTY
    return spread(spans, [(asked, "dim")], width, glyphs.more), fit_row(trouble, width, glyphs.more)


def look_of(job: HomeJob) -> looks.Look:
    """Return how the state of a job is shown."""
    state = str(job.listed.get("state") or "")
    if not job.listed.get("live") and state not in ENDED_STATES:
        return _ABANDONED
    ended = state in ENDED_STATES
    condition = state if ended else condition_of(job.status) or _LISTED.get(state, state)
    return looks.JOBS.get(condition, looks.UNKNOWN)


def home_columns(jobs: Sequence[HomeJob], glyphs: Glyphs, now_s: float) -> list[Column[HomeJob]]:
    """Return the columns of the table of jobs."""
    progress = {id(job): _newest(job) for job in jobs}

    def state(job: HomeJob) -> Row:
        look = look_of(job)
        return ((f"{glyphs.of(look)} {look.word}", look.role),)

    def left_s(job: HomeJob) -> float | None:
        now = progress[id(job)]
        known = now.step is not None and now.total and now.pace and job.listed.get("live")
        return (now.total - now.step) / now.pace if known else None  # type: ignore[operator]

    def created_s(job: HomeJob) -> float | None:
        created = job.listed.get("created_ns")
        return created / 1e9 if isinstance(created, int) else None

    def age(job: HomeJob) -> str:
        created = created_s(job)
        return "-" if created is None else values.age(now_s - created)

    names = max((len(str(job.listed.get("job"))) for job in jobs), default=3)
    places = max((len(job.place) for job in jobs), default=5)
    steps = max((len(_step(now)) for now in progress.values()), default=4)
    times = max((len(_left(left_s(job))) for job in jobs), default=3)
    return [
        Column("state", 12, state, 9),
        Column("job", min(JOB_MAX, max(3, names)), lambda job: ((str(job.listed.get("job")), "title"),), 9),
        Column("hosts", min(PLACE_MAX, max(5, places)), lambda job: ((job.place, "text"),), 7),
        Column("ranks", 5, lambda job: ((str(job.listed.get("world_size") or "-"), "text"),), 3, at_right=True),
        Column(
            "step",
            max(4, steps),
            lambda job: ((_step(progress[id(job)]), "text"),),
            8,
            at_right=True,
            value=_at(progress),
        ),
        Column("ETA", max(3, times), lambda job: ((_left(left_s(job)), "text"),), 6, at_right=True, value=left_s),
        Column("age", 6, lambda job: ((age(job), "dim"),), 4, at_right=True, value=created_s),
        Column("last incident", 0, _incident, 5),
    ]


def _newest(job: HomeJob) -> Newest:
    name, ended = str(job.listed.get("job")), not job.listed.get("live")
    return newest(build(job.status, {}, (), job=name, ended=ended, stale=False))


def _at(progress: dict[int, Newest]) -> Any:
    return lambda job: progress[id(job)].step


def _step(now: Newest) -> str:
    if now.step is None:
        return "-"
    return f"{now.step:,}/{now.total:,}" if now.total else f"{now.step:,}"


def _left(seconds: float | None) -> str:
    return "-" if seconds is None else values.elapsed(seconds)


def _incident(job: HomeJob) -> Row:
    if job.incident is None:
        return ((str(job.status.get("failure") or ""), "bad"),)
    summary, now = str(job.incident.get("summary") or ""), standing(job.incident)
    open_now = job.incident.get("state") == "open"
    return ((f"{summary}{f' ({now})' if now else ''}", "bad" if open_now else "dim"),)
