"""Charts of a rank, a node and all ranks; the wall of GPUs; the speed of generations."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import re
from typing import Any

import pytest

from remote_agent.history.pyramid import History
from supervisor.errors import Unreachable
from supervisor.history import Series, SeriesQuery, query
from supervisor.tui import history, times, training
from supervisor.tui.generations import Runs
from supervisor.tui.looks import Glyphs
from supervisor.tui.model import JobView, take
from supervisor.tui.rows import charts
from supervisor.tui.rows.charts import Chart
from supervisor.tui.rows.series import MOST, asked, gpu_wall, node_charts, node_title, rank_charts, rank_title
from supervisor.tui.rows.spans import row_width, text_of
from supervisor.tui.screens.map import CHARTS_MIN, EVENTS_MIN, Dashboard, map_layout
from supervisor.tui.screens.run import run_columns
from supervisor.tui.widgets.chart_view import ChartView
from supervisor.wording import usage
from supervisor.wording.goodput import Goodput, Measured
from tests.screens.recorded import RecordedSession, many, measured, of_histories, trained
from tests.screens.screens import press, running, settle, until
from tests.screens.screens import text_of as text_on

GLYPHS, ASCII = Glyphs(), Glyphs(True)
NAN = math.nan


def job(nodes: int = 4, per_node: int = 2, *, gpus: bool = True) -> RecordedSession:
    return trained(measured(many(nodes, per_node), gpus=gpus), times.now(), 600)


def figures(*values: float, **more: Any) -> Chart:
    return Chart("loss", usage.figure, values, **more)


def of_ranks(*losses: list[float]) -> Series:
    """The history of ranks on one node, a value every two seconds."""
    history = History()
    for at in range(len(losses[0])):
        samples = {("loss", rank): row[at] for rank, row in enumerate(losses) if math.isfinite(row[at])}
        history.add(2.0 * at, samples)
    return of_histories(query(["loss"], None, 2.0 * len(losses[0]) - 2, 200), {"n1": history})


# --- pure


SHAPES = [(), (NAN,), (1.0,), (NAN, NAN, NAN), (1.0, NAN, 3.0), (2.0,) * 9, (0.0, -5.0), tuple(map(float, range(400)))]


@pytest.mark.parametrize("glyphs", [GLYPHS, ASCII])
@pytest.mark.parametrize(("width", "height"), [(80, 10), (160, 40), (20, 1), (5, 3), (0, 0), (80, -2)])
@pytest.mark.parametrize("values", SHAPES)
def test_a_chart_has_exactly_its_size(values: tuple[float, ...], width: int, height: int, glyphs: Glyphs) -> None:
    for chart in (figures(*values, median=values, low=values, high=values), figures(median=values), figures(*values)):
        rows = charts.chart_rows(chart, width, height, glyphs)
        assert [row_width(row) for row in rows] == [max(charts.GUTTER, width)] * max(0, height)
        assert len(charts.stacked([chart] * 3, width, height, glyphs)) <= max(0, height)
        if glyphs.ascii:
            assert all(text_of(row).isascii() for row in rows)


def test_a_chart_shows_its_newest_values() -> None:
    rest: Any = {"median": (1.0, 1.5, 1.0), "low": (0.5, 1.0, 1.0), "high": (3.0, 2.0, 4.0)}
    assert text_of(charts.values_row(figures(3.0, 2.0, NAN, **rest))) == "  loss   2   median 1   range 1 to 4"
    assert text_of(charts.values_row(figures(**rest))) == "  loss   median 1   range 1 to 4"
    assert text_of(charts.values_row(figures(3.0, median=(1.0,), low=(1.0,), high=(1.0,)))) == "  loss   3   median 1"
    assert text_of(charts.values_row(figures(3.0))) == "  loss   3"


def test_the_range_is_shaded_and_the_median_is_thin_unless_it_is_the_curve() -> None:
    rest: Any = {"median": (2.0,) * 3, "low": (0.0,) * 3, "high": (4.0,) * 3}

    def drawn(chart: Chart) -> list[str]:
        return [text_of(row)[charts.GUTTER :] for row in charts.chart_rows(chart, charts.GUTTER + 5, 3, ASCII)]

    assert drawn(figures(4.0, 4.0, 4.0, **rest)) == ["*****", "-----", ":::::"]
    assert drawn(figures(**rest)) == [":::::", "*****", ":::::"]


def test_the_axis_names_its_ends() -> None:
    row = charts.axis(3600.0, 4200.0, 80)
    assert row_width(row) == 80
    assert text_of(row).split() == ["10", "min", "01:00:00", "01:10:00"]
    assert text_of(charts.axis(86400.0, 3 * 86400.0, 80)).split()[2:] == ["01-02", "00:00", "01-04", "00:00"]


def test_a_rank_is_beside_the_median_and_the_range_of_all() -> None:
    series = of_ranks([1.0, 2.0, 3.0], [2.0, NAN, 5.0], [9.0, 4.0, 4.0])
    all_ranks = [[2.0, 3.0, 4.0], [1.0, 2.0, 3.0], [9.0, 4.0, 5.0]]
    for rank, own in ((0, [1.0, 2.0, 3.0]), (None, []), (7, [])):
        (chart,) = rank_charts(series, (), rank)
        assert list(chart.own) == own
        assert [list(values) for values in (chart.median, chart.low, chart.high)] == all_ranks
    (alone,) = rank_charts(of_ranks([1.0, 2.0, 3.0]), (), 0)
    assert (list(alone.own), alone.median, alone.low) == ([1.0, 2.0, 3.0], (), ())
    assert node_charts(series, "n1") == []


def test_the_gpu_of_a_rank_and_those_of_a_node_are_beside_all_others() -> None:
    session = job(2, 2)
    job_view = take(session)
    series = asyncio.run(session.series(query(("gpu_use", "cpu", "mem"), None, 600, 20)))
    (of_rank,) = rank_charts(series, job_view.ranks, 2)
    newest = {rank.rank: use for rank in job_view.ranks if (use := rank.gpu.get("use")) is not None}
    assert of_rank.own[-1] == newest[2]
    assert (of_rank.low[-1], of_rank.high[-1]) == (min(newest.values()), max(newest.values()))
    of_node = node_charts(series, "n000")
    assert [chart.name for chart in of_node] == ["gpu use", "cpu", "memory"]
    assert of_node[0].own[-1] == (newest[0] + newest[1]) / 2
    assert [(chart.own[-1], chart.low[-1], chart.high[-1]) for chart in of_node[1:2]] == [(12.5, 12.5, 13.5)]


@pytest.mark.parametrize("glyphs", [GLYPHS, ASCII])
@pytest.mark.parametrize(("width", "height"), [(79, 9), (79, 17), (159, 40), (59, 0), (10, 3)])
def test_the_wall_has_all_gpus_in_any_room(width: int, height: int, glyphs: Glyphs) -> None:
    session = job(1, 8)
    (node,) = take(session).nodes
    wanted = query(("gpu_use", "gpu_mem", "gpu_power", "gpu_temp"), None, 600, 20, nodes=["n000"])
    for series in (asyncio.run(session.series(wanted)), None):
        rows = [text_of(row) for row in gpu_wall(node, series, width, height, glyphs)]
        assert [row.split()[1] for row in rows if row.startswith("  gpu ")] == list("01234567")
        assert len(rows) <= max(9, height)
        assert all(len(row) <= width for row in rows) or width < 59
        assert all(row.isascii() for row in rows) or not glyphs.ascii


def test_a_gpu_of_which_little_is_known_has_what_is_known() -> None:
    session = job(1, 2)
    session.status["nodes"][0]["vitals"]["gpus"] = [{"index": 0, "use": 50}, {}]
    (node,) = take(session).nodes
    first, second = (text_of(row) for row in gpu_wall(node, None, 79, 3, GLYPHS)[1:])
    assert "50%" in first
    assert second.split()[:2] == ["gpu", "-"]
    session.status["nodes"][0]["vitals"]["gpus"] = []
    assert gpu_wall(take(session).nodes[0], None, 79, 20, GLYPHS) == []


def test_a_generation_has_its_median_step_time_and_its_throughput() -> None:
    session, runs = job(), Runs()
    runs.follow(session.events)
    series = asyncio.run(session.series(query(("step_s", "rate"), None, 600, 160)))
    columns = {column.name: column for column in run_columns(runs.runs, take(session), 160, GLYPHS, series)}
    assert [columns["step time"].text(run) for run in runs.runs] == ["0.77 s", "0.77 s"]
    assert [columns["tok/s"].text(run) for run in runs.runs] == ["768k", "768k"]
    assert not {"step time", "tok/s"} & {column.name for column in run_columns(runs.runs, take(session), 160, GLYPHS)}


# --- on the screen


def asking(session: RecordedSession, monkeypatch: pytest.MonkeyPatch) -> list[SeriesQuery]:
    asked: list[SeriesQuery] = []
    real = session.series

    async def series(wanted: SeriesQuery) -> Series:
        asked.append(wanted)
        return await real(wanted)

    monkeypatch.setattr(session, "series", series)
    return asked


async def test_a_rank_beside_the_others_and_the_last_minutes_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    session = job()
    asked_for = asking(session, monkeypatch)
    async with running(session, (160, 48)) as (app, pilot):
        await press(app, pilot, "3", "j", "j", "j", "j", "j")
        view = app.screen.query_one(ChartView)
        await until(app, pilot, lambda: view.is_known)
        text = await settle(app, pilot)
        assert "history of rank 5 beside all ranks" in text
        assert "step time   2.5 s   median 0.77 s   range 0.77 s to 2.5 s" in text
        assert "10 min 10:35:20" in text
        assert "z last 8 min  c alone" in text
        await press(app, pilot, "z")
        await until(app, pilot, lambda: "8 min 10:37:" in text_on(app))
        assert "z whole run  c alone" in await settle(app, pilot)
        assert (asked_for[-1].level, asked_for[-1].ids) == (0, None)
        # The other screens show the same span.
        await press(app, pilot, "1", "z")
        assert app.screen.query_one(ChartView).is_maximized, "the key of the charts shows them"
        await until(app, pilot, lambda: "8 min 10:37:" in text_on(app))
        assert "history of all ranks" in await settle(app, pilot)
        await press(app, pilot, "z")
        await until(app, pilot, lambda: "10 min 10:35:20" in text_on(app))
    assert all(one.buckets <= 2 * 160 for one in asked_for)


async def test_a_page_with_a_history_names_the_key_of_its_span() -> None:
    async with running(job(), (80, 24)) as (app, pilot):
        assert "z last 8 min" in await press(app, pilot, "3")
        assert "z whole run" in await press(app, pilot, "z")
        assert "z whole run" in await press(app, pilot, "2")
        assert "─ ranks" in await press(app, pilot, "3")
        assert "─ ranks" not in await press(app, pilot, "c")
        assert "z whole run  c all panes" in await settle(app, pilot)
        assert "─ ranks" in await press(app, pilot, "c")
        assert "─ ranks" in await press(app, pilot, "c", "escape")


async def test_charts_of_a_node_and_of_an_empty_history() -> None:
    async with running(job(2, 2, gpus=False), (80, 24)) as (app, pilot):
        await press(app, pilot, "c", "c", "2")
        await until(app, pilot, lambda: app.screen.query_one(ChartView).is_known)
        text = await settle(app, pilot)
        assert "history of node n000 beside all nodes" in text
        assert "cpu   12%   median 13%   range 12% to 14%" in text
    async with running(many(2, 2), (80, 24)) as (app, pilot):
        for keys in (("3", "c"), ("c", "2", "c"), ("c", "1", "c")):
            assert "no history yet" in await press(app, pilot, *keys)


def line(job_view: JobView, width: int = 150, cost: Goodput | None = None) -> str:
    return text_of(training.progress_row(training.newest(job_view), cost, width, GLYPHS))


def with_progress(session: RecordedSession, **changes: Any) -> JobView:
    for node in session.status["nodes"]:
        for rank in node["ranks"]:
            rank["progress"].update(changes)
    return take(session)


@pytest.mark.parametrize("glyphs", [GLYPHS, ASCII])
@pytest.mark.parametrize("width", [-2, 0, 1, 7, 40])
@pytest.mark.parametrize("values", [[], [NAN], [1.0], [1.0] * 9, [3.0, NAN, 1.0], [float(one) for one in range(300)]])
def test_charts_have_exactly_their_size(values: list[float], width: int, glyphs: Glyphs) -> None:
    for lines in (charts.curve(values, width, 5, glyphs), charts.filled(values, width, 5, glyphs)):
        assert [len(one) for one in lines if one] in ([width] * 5, [])
    assert row_width(charts.heat(values, 1.0, width, glyphs)) == (max(0, width) if values else 0)
    ends: list[tuple[float, float]] = [(1.0, 3.0), (-5.0, 99.0)]
    marks = [(5.0, "X", "bad"), (100.0, "X", "bad")]
    row = charts.time_line(0.0, 10.0, width, glyphs, runs=ends, marks=marks)
    assert (row_width(row), text_of(row).count("X")) == (max(0, width), int(width > 0))


def test_a_curve_has_a_gap_where_nothing_is_known() -> None:
    lines = charts.curve([4.0, 3.0, 2.0, 1.0], 4, 4, ASCII)
    assert lines[0][0] == lines[3][3] == "*"
    assert lines[0][3] == lines[3][0] == " "
    assert charts.curve([1.0, NAN, NAN, 1.0], 4, 1, ASCII) == ["*  *"]
    assert charts.filled([0.0, 1.0, 2.0], 3, 2, GLYPHS) == ["  █", " ██"]


def test_a_slow_rank_glows_and_an_unknown_time_is_a_dot() -> None:
    spans = charts.heat([1.0, NAN, 1.2, 2.0], 1.0, 4, GLYPHS)
    assert [(text, role) for text, role in spans] == [("▅", "ok"), ("·", "rule"), ("▅", "warn"), ("█", "bad")]


def test_how_far_how_fast_and_how_long_still() -> None:
    cost = Goodput(540.0, {"stop": 24.0, "import": 12.0, "redo": 2.0})
    shown = with_progress(job(), total=2000, rate=5125.0, steps_s=2.0, loss=1.883)
    found = line(dataclasses.replace(shown), 160, cost)
    assert "/2,000 · 36 %   ETA 10 min 31 s   41k tok/s   loss 1.883   goodput 93 %, 38 s lost: stop 24" in found
    # What has no room goes, the goodput's parts first.
    assert line(shown, 100, cost).endswith("goodput 93 %")
    assert "737/2,000" in line(shown, 30, cost)


def test_only_what_is_known_is_said() -> None:
    quiet = with_progress(job(), total=None, rate=None, unit=None, steps_s=None, loss=None)
    assert line(quiet).strip() == "step 737"
    assert not training.newest(quiet).is_known
    assert (
        line(with_progress(job(), total=None, loss="nan", rate=None, steps_s=0.02))
        == " step 737   50 s/step   loss nan"
    )
    uneven = job()
    uneven.status["nodes"][0]["ranks"][0]["progress"]["total"] = 7
    assert "2,000" not in line(take(uneven))


@pytest.mark.parametrize(("value", "text"), [(0, "0"), (987, "987"), (4100, "4.1k"), (41_000, "41k"), (1.2e6, "1.2M")])
def test_short_numbers(value: float, text: str) -> None:
    assert usage.short(value) == text


def test_of_many_ranks_those_with_problems_are_asked_for() -> None:
    session = measured(many(64, 8))
    session.status["nodes"][60]["ranks"][3]["state"] = "failed"
    kinds, ranks = asked(take(session), 500)
    assert "gpu_use" not in kinds
    assert ranks is not None
    assert ranks[:4] == [500, 2, 483, 0]
    assert len(ranks) == MOST + 1
    assert rank_title(take(session), 500) == "history of rank 500 beside 64 of 512 ranks"
    assert node_title(take(session), "n000") == "history of node n000 beside all nodes"
    assert node_title(take(many(65, 1)), "n064") == "history of node n064 beside 64 of 65 nodes"
    few = take(measured(many(1, 1)))
    assert asked(few, None)[1] is None
    assert (rank_title(few, 0), node_title(few, "n000")) == ("history of rank 0", "history of node n000")


@pytest.mark.parametrize("body", range(12, 60))
def test_the_map_gives_out_every_line_with_a_dashboard_or_without(body: int) -> None:
    for width in (60, 119, 120, 200):
        for nodes, ranks in ((0, 0), (1, 1), (4, 8), (16, 128), (64, 512)):
            for curves in (False, True):
                layout = map_layout(width, body, nodes, ranks, -(-ranks // 60), 3, trains=True, curves=curves)
                below = 0 if layout.beside else layout.ranks
                last = layout.events + (0 if layout.abreast else layout.log)
                whole = layout.training + layout.nodes + layout.grid + below + last
                assert whole == body, layout
                assert min(layout.nodes, layout.ranks, layout.grid, layout.log) >= 0
                assert layout.events >= EVENTS_MIN
                assert layout.training in (0, 1) or (layout.training >= CHARTS_MIN and curves and width >= 120)


async def test_the_history_is_there_while_a_new_group_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    session = job()
    for node in session.status["nodes"]:
        for rank in node["ranks"]:
            rank.update(step=None, progress=None)
    problems, real = [Unreachable("no link")], session.series

    async def series(wanted: SeriesQuery) -> Series:
        if problems:
            raise problems.pop()
        return await real(wanted)

    monkeypatch.setattr(history, "EVERY_S", 0.02)
    monkeypatch.setattr(session, "series", series)
    async with running(session, (160, 48)) as (app, pilot):
        board = app.screen.query_one(Dashboard)
        await until(app, pilot, lambda: board.size.height > 1)
        text = await settle(app, pilot)
        assert "step time by rank" in text
        assert "goodput" in text


async def test_a_narrow_screen_has_one_line_and_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    session = job()
    asked = asking(session, monkeypatch)
    async with running(session, (100, 40)) as (app, pilot):
        assert "737/2,000" in await settle(app, pilot)
        assert (app.screen.query_one(Dashboard).size.height, asked) == (1, [])


def board_rows(job_view: JobView, shown: training.Training) -> list[str]:
    rows = training.dashboard(job_view, training.newest(job_view), shown, 60, 8, ASCII)
    return [text_of(row)[:36] for row in rows]


def test_a_loss_that_has_fallen_far_is_drawn_on_a_logarithmic_scale() -> None:
    def drawn(losses: list[float]) -> list[str]:
        return board_rows(take(many(1, 1)), training.Training(of_ranks(losses), (), (), Measured()))

    steep = drawn([1000.0, 100.0, 10.0, 1.0])
    assert [line.split()[0] for line in steep[:3]] == ["1000", "loss", "(log)"]
    middle = [next(at for at, line in enumerate(steep) if line[charts.GUTTER + column] == "*") for column in (0, 9, 18)]
    assert middle == sorted(middle)
    assert middle[1] >= 1
    assert not any("(log)" in line for line in drawn([4.0, 3.0, 2.0, 1.0]))


def test_the_time_line_shows_what_happened_when() -> None:
    marks = ((4.0, "restart"), (12.0, "failure"), (12.1, "restart"), (16.0, "hang"))
    job_view = take(many(1, 1))
    status: Any = job_view.status
    status["snapshots"] = [{"time_ns": time_s * 10**9} for time_s in (4, 8)]
    rows = board_rows(job_view, training.Training(of_ranks([1.0] * 10), ((0.0, 18.0),), marks, Measured()))
    line = rows[-1][charts.GUTTER : 36]
    assert re.sub("=+", "=", line.rstrip(".")) == "=R=S=X=?="
