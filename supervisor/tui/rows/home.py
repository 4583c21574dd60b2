"""The jobs of all inventories as rows: pure functions.

In: `source.HomeJob`s, glyphs, the time. Out: columns for a table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from remote_agent.wire.events import ENDED_STATES, Condition
from supervisor.tui import looks
from supervisor.tui.model import build
from supervisor.tui.rows.tables import Column
from supervisor.tui.training import newest
from supervisor.wording import values
from supervisor.wording.incidents import standing
from supervisor.wording.status import condition_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from supervisor.tui.looks import Glyphs
    from supervisor.tui.rows.spans import Row
    from supervisor.tui.source import HomeJob
    from supervisor.tui.training import Newest

PLACE_MAX: Final = 24
JOB_MAX: Final = 28
# Files of a job that nobody ended, and no agent.
_ABANDONED: Final = looks.Look("-", "-", "NO AGENT", "off")
_LISTED: Final = {"starting": Condition.LAUNCHING}


def look_of(job: HomeJob) -> looks.Look:
    """How the state of a job is shown."""
    state = str(job.listed.get("state") or "")
    if not job.listed.get("live") and state not in ENDED_STATES:
        return _ABANDONED
    ended = state in ENDED_STATES
    condition = state if ended else condition_of(job.status) or _LISTED.get(state, state)
    return looks.JOBS.get(condition, looks.UNKNOWN)


def home_columns(jobs: Sequence[HomeJob], glyphs: Glyphs, now_s: float) -> list[Column[HomeJob]]:
    """The columns of the table of jobs."""
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
