"""Charts with a cursor, a zoom and a comparison; the wall of GPUs; the speed of generations."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
from textual import events

from remote_agent.history.pyramid import History
from supervisor.history import Series, SeriesQuery, of_histories, query
from supervisor.tui import times
from supervisor.tui.generations import Runs
from supervisor.tui.history import WHOLE
from supervisor.tui.looks import Glyphs
from supervisor.tui.model import take
from supervisor.tui.rows import charts
from supervisor.tui.rows.charts import Chart
from supervisor.tui.rows.series import RANK_KINDS, gpu_wall, node_charts, rank_charts
from supervisor.tui.rows.spans import row_width, text_of
from supervisor.tui.screens.run import run_columns
from supervisor.tui.widgets.chart_view import ChartView
from supervisor.wording import usage
from tests.screens.recorded import RecordedSession, many, measured, trained
from tests.screens.screens import press, running, settle, until

GLYPHS, ASCII = Glyphs(), Glyphs(True)
NAN = math.nan


def job(nodes: int = 4, per_node: int = 2, *, gpus: bool = True) -> RecordedSession:
    return trained(measured(many(nodes, per_node), gpus=gpus), times.now(), 600)


def figures(*values: float, **more: Any) -> Chart:
    return Chart("loss", values, usage.figure, **more)


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
    chart = figures(*values, other_name="median", other=values, low=values, high=values)
    for at in (None, 0, max(0, len(values) - 1)):
        rows = charts.chart_rows(chart, width, height, glyphs, at)
        assert [row_width(row) for row in rows] == [max(charts.GUTTER, width)] * max(0, height)
        assert len(charts.stacked([chart] * 3, width, height, glyphs, at)) <= max(0, height)
        if glyphs.ascii:
            assert all(text_of(row).isascii() for row in rows)


def test_a_chart_shows_its_values_now_or_under_the_cursor() -> None:
    chart = figures(
        3.0, 2.0, NAN, other_name="median", other=(1.0, 1.5, 1.0), low=(0.5, 1.0, 1.0), high=(3.0, 2.0, 1.0)
    )
    assert text_of(charts.values_row(chart, None)) == "  loss 2   median 1"
    assert text_of(charts.values_row(chart, 0)) == "  loss 3   median 1   range 0.5 to 3"
    assert text_of(charts.values_row(chart, 2)) == "  loss -   median 1"


def test_the_range_is_shaded_and_the_cursor_stands_in_the_column_of_its_bucket() -> None:
    chart = figures(4.0, 4.0, 4.0, low=(0.0, 0.0, 0.0), high=(4.0, 4.0, 4.0))
    rows = [text_of(row)[charts.GUTTER :] for row in charts.chart_rows(chart, charts.GUTTER + 5, 3, ASCII, 1)]
    assert rows == ["*****", "::|::", "::|::"]


@pytest.mark.parametrize(("buckets", "columns"), [(1, 1), (1, 70), (3, 70), (70, 70), (140, 70), (139, 70)])
def test_each_column_shows_the_bucket_that_is_shown_there(buckets: int, columns: int) -> None:
    for column in range(columns):
        at = charts.bucket_at(column, buckets, columns)
        assert 0 <= at < buckets
        back = charts.column_of(at, buckets, columns)
        assert back is not None
        assert abs(back - column) <= max(1, columns // buckets)


@pytest.mark.parametrize("cursor", [None, 0, 1, 9, 30, 60, 71])
def test_the_axis_names_its_ends_and_the_cursor(cursor: int | None) -> None:
    row = charts.axis(3600.0, 4200.0, 80, None if cursor is None else (4000.0, cursor))
    text = text_of(row)
    assert len(text) == 80
    words = text.split()
    assert words[:2] == ["10", "min"]
    assert set(words[2:]) <= {"01:00:00", "01:10:00", "01:06:40"}
    assert ("01:06:40" in words) == (cursor is not None)
    assert text_of(charts.axis(86400.0, 3 * 86400.0, 80)).split()[2:] == ["01-02", "00:00", "01-04", "00:00"]


def test_a_rank_is_compared_with_the_others() -> None:
    series = of_ranks([1.0, 2.0, 3.0], [2.0, NAN, 5.0], [9.0, 4.0, 4.0])
    (all_ranks,) = rank_charts(series, 0, (0, 1, 2))
    assert (all_ranks.other_name, all_ranks.range_name) == ("median", "3 ranks")
    assert [list(values) for values in (all_ranks.other, all_ranks.low, all_ranks.high)] == [
        [2.0, 3.0, 4.0], [1.0, 2.0, 3.0], [9.0, 4.0, 5.0],
    ]  # fmt: skip
    (second,) = rank_charts(series, 0, (2,))
    assert (second.other_name, list(second.other), second.low) == ("rank 2", [9.0, 4.0, 4.0], ())
    (alone,) = rank_charts(series, 0, ())
    assert (alone.other, list(alone.low), list(alone.high)) == ((), [1.0, 2.0, 3.0], [1.0, 2.0, 3.0])
    assert rank_charts(series, 7, (0, 1)) == []
    assert node_charts(series, "n1") == []


@pytest.mark.parametrize("glyphs", [GLYPHS, ASCII])
@pytest.mark.parametrize(("width", "height"), [(79, 9), (79, 17), (159, 40), (59, 0), (10, 3)])
def test_the_wall_has_all_gpus_in_any_room(width: int, height: int, glyphs: Glyphs) -> None:
    session = job(1, 8)
    (node,) = take(session).nodes
    wanted = query(("gpu_use", "gpu_mem", "gpu_power", "gpu_temp"), None, 600, 20, node="n000")
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


def test_cursor_zoom_and_comparison_by_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    session = job()
    asked = asking(session, monkeypatch)

    async def scenario() -> None:
        async with running(session, (160, 48)) as (app, pilot):
            text = await press(app, pilot, "3", "j", "j", "j", "j", "j")
            await until(app, pilot, lambda: app.screen.query_one(ChartView).is_known)
            text = await settle(app, pilot)
            assert "history of rank 5 beside all 8 ranks" in text
            assert "step time 2.5 s   median 0.77 s   8 ranks 0.77 s to 2.5 s" in text
            assert "10:35:20" in text
            assert asked[-1].ids is None
            text = await press(app, pilot, "<", "<", "<")
            assert "10:44:56" in text
            text = await press(app, pilot, "+", "+")
            assert "zoom: 2 min 30 s" in text
            assert "10:44:56" in text, "the cursor stays at its time"
            await until(app, pilot, lambda: asked[-1].level == 0)
            assert "zoom:" not in await press(app, pilot, "_", "_", "_")
            assert "history of rank 5 ─" in await press(app, pilot, "v")
            assert "history of rank 5 beside rank 4" in await press(app, pilot, "k", "space", "j", "v", "v")
            assert "rank 4 0.77 s" in await settle(app, pilot)
        assert all(one.buckets <= 2 * 160 for one in asked)
        assert {one.kinds for one in asked if one.kinds != asked[0].kinds} == {RANK_KINDS}

    asyncio.run(scenario())


def test_the_cursor_leaves_the_newest_value_and_moves_the_part_that_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    session = job()
    asked = asking(session, monkeypatch)

    async def scenario() -> None:
        async with running(session, (80, 24)) as (app, pilot):
            await press(app, pilot, "3", "c")
            view = app.screen.query_one(ChartView)
            await until(app, pilot, lambda: view.is_known)
            await press(app, pilot, "left", "right")
            assert view._bucket is None
            await press(app, pilot, "+", "+", "+", "+", "+")
            assert view.zoom.length_s == 600 / 32
            before = view.zoom
            await press(app, pilot, *["left"] * 12)
            assert view.zoom.end_s is not None
            assert view.zoom.length_s == before.length_s
            await until(app, pilot, lambda: asked[-1].last is not None and asked[-1].level == 0)
            assert "─ ranks" in await press(app, pilot, "c")
            assert "─ ranks" not in await press(app, pilot, "c")
            assert "─ ranks" in await press(app, pilot, "escape")
            assert "─ ranks" not in await press(app, pilot, "plus"), "a key of the charts shows them"

    asyncio.run(scenario())


def _wheel(view: ChartView, x: int) -> Any:
    return events.MouseScrollUp(view, x, 3, 0, 0, 0, False, False, False)


def test_mouse_and_wheel_read_and_zoom_a_chart() -> None:
    async def scenario() -> None:
        async with running(job(), (80, 24)) as (app, pilot):
            await press(app, pilot, "3", "c")
            view = app.screen.query_one(ChartView)
            await until(app, pilot, lambda: view.is_known)
            await pilot.mouse_down(ChartView, offset=(charts.GUTTER + 36, 5))
            text = await settle(app, pilot)
            assert view._bucket is not None
            assert "10:40:" in text
            await pilot.mouse_up(ChartView)
            view.on_mouse_scroll_up(_wheel(view, charts.GUTTER + 36))
            assert view.zoom.length_s == 300
            assert "zoom: 5 min" in await settle(app, pilot)
            view.on_mouse_scroll_down(_wheel(view, charts.GUTTER))
            assert view.zoom == WHOLE

    asyncio.run(scenario())


def test_charts_of_the_job_of_a_node_and_of_an_empty_history() -> None:
    async def scenario() -> None:
        async with running(job(2, 2, gpus=False), (80, 24)) as (app, pilot):
            await press(app, pilot, "c")
            await until(app, pilot, lambda: app.screen.query_one(ChartView).is_known)
            text = await settle(app, pilot)
            assert "history of the job" in text
            assert "ranks 0.77 s" not in text, "they are equal"
            await press(app, pilot, "c", "2")
            await until(app, pilot, lambda: app.screen.query_one(ChartView).is_known)
            text = await settle(app, pilot)
            assert "history of node n000" in text
            assert "cpu 12%" in text
        async with running(many(2, 2), (80, 24)) as (app, pilot):
            for keys in (("3", "c"), ("c", "2", "c"), ("c", "1", "c")):
                assert "no history yet" in await press(app, pilot, *keys)

    asyncio.run(scenario())


def test_of_512_ranks_some_are_compared_and_none_is_asked_for_more_than_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    session = trained(measured(many(64, 8)), times.now(), 80)
    asked = asking(session, monkeypatch)

    async def scenario() -> None:
        async with running(session, (160, 48)) as (app, pilot):
            await press(app, pilot, "3", "G")
            await until(app, pilot, lambda: bool(asked and 511 in (asked[-1].ids or ())))
            await until(app, pilot, lambda: app.screen.query_one(ChartView).is_known)
            assert "history of rank 511 beside 64 of 512 ranks" in await settle(app, pilot)
            assert asked[-1].ids is not None
            assert len(asked[-1].ids) == 65

    asyncio.run(scenario())
