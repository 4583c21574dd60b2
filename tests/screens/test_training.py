"""The dashboard of the map: curves, strips, time line, the line of progress, and when the nodes are asked."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import re
from typing import Any

import pytest

from remote_agent.history.pyramid import History
from supervisor.errors import Unreachable
from supervisor.history import merge, query
from supervisor.tui import history, times, training
from supervisor.tui.looks import Glyphs
from supervisor.tui.model import Snapshot, take
from supervisor.tui.rows import charts
from supervisor.tui.rows.spans import row_width, text_of
from supervisor.tui.screens.map import CHARTS_MIN, map_layout
from supervisor.tui.widgets.dashboard import Dashboard
from supervisor.wording import usage
from supervisor.wording.goodput import Goodput
from tests.screens.recorded import RecordedSession, many, measured, trained
from tests.screens.screens import press, running, settle, until

GLYPHS, ASCII = Glyphs(), Glyphs(True)
NAN = math.nan


def job(nodes: int = 4, per_node: int = 2, *, gpus: bool = True) -> RecordedSession:
    return trained(measured(many(nodes, per_node), gpus=gpus), times.now())


def line(snapshot: Snapshot, width: int = 150, cost: Goodput | None = None) -> str:
    return text_of(training.progress_row(training.newest(snapshot), cost, width, GLYPHS))


def with_progress(session: RecordedSession, **changes: Any) -> Snapshot:
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


def test_a_curve_falls_from_its_greatest_value_to_its_least_and_has_a_gap_where_nothing_is_known() -> None:
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
    kinds, chosen = training.asked(take(session))
    assert chosen is not None
    assert "gpu_use" not in kinds
    assert chosen[:3] == [2, 483, 0]
    assert len(chosen) == training.MOST_RANKS
    assert training.asked(take(measured(many(4, 2)))) == (training.KINDS, None)


@pytest.mark.parametrize("body", range(8, 60))
def test_a_layout_fills_the_body_with_a_dashboard_or_without(body: int) -> None:
    for width in (60, 119, 120, 200):
        for nodes, ranks in ((1, 1), (4, 8), (16, 128), (64, 512)):
            for curves in (False, True):
                layout = map_layout(width, body, nodes, ranks, -(-ranks // 60), 3, trains=True, curves=curves)
                below = 0 if layout.beside else layout.ranks
                last = layout.events + (0 if layout.abreast else layout.log)
                whole = layout.training + layout.nodes + layout.grid + below + last
                assert whole == body, layout
                assert layout.training in (0, 1) or (layout.training >= CHARTS_MIN and curves and width >= 120)


def test_the_map_of_a_healthy_job_shows_its_training_and_leaves_little_room_empty() -> None:
    async def scenario() -> str:
        session = job()
        for rank in range(8):
            lines = [f"step={step}/2000 loss={9 / step:.4f} lr=3.0e-04 tok/s=96,021 mem=71".encode() for step in (7, 8)]
            session.write((f"n{rank // 2:03d}", 1, rank, "stdout"), *lines)
        async with running(session, (160, 48)) as (app, pilot):
            await until(app, pilot, lambda: app.screen.query_one(Dashboard).size.height > 1)
            return await settle(app, pilot)

    text = asyncio.run(scenario())
    for words in ("737/2,000", "ETA", "tok/s", "goodput", "step time by rank", "✖"):
        assert words in text
    lines = [row.ljust(160) for row in text.splitlines()]
    empty = sum(1 for row in lines for begin in (0, 80) if not row[begin : begin + 80].strip())
    assert empty < 0.15 * 2 * 48, f"{empty / 2 / 48:.0%}"


def test_the_history_is_there_while_a_new_group_imports() -> None:
    session = job()
    for node in session.status["nodes"]:
        for rank in node["ranks"]:
            rank.update(step=None, progress=None)

    async def scenario() -> None:
        async with running(session, (160, 48)) as (app, pilot):
            await until(app, pilot, lambda: app.screen.query_one(Dashboard).size.height > 1)
            text = await settle(app, pilot)
            assert "step time by rank" in text
            assert "goodput" in text

    asyncio.run(scenario())


def test_another_key_shows_other_strips() -> None:
    async def scenario() -> None:
        async with running(job(), (160, 48)) as (app, pilot):
            board = app.screen.query_one(Dashboard)
            await until(app, pilot, lambda: board.size.height > 1)
            seen = [board.strip]
            for _ in range(3):
                await press(app, pilot, "m")
                seen.append(board.strip)
            assert seen == ["step_s", "gpu_use", "rank_cpu", "step_s"]

    asyncio.run(scenario())


def test_nodes_are_asked_in_the_background_and_an_error_costs_one_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    session = job()
    answers: list[Any] = [Unreachable("no link"), None]
    real = session.series

    async def series(*args: Any) -> Any:
        problem = answers.pop(0) if answers else None
        if problem is not None:
            raise problem
        return await real(*args)

    monkeypatch.setattr(history, "EVERY_S", 0.0)
    monkeypatch.setattr(session, "series", series)

    async def scenario() -> None:
        async with running(session, (160, 48)) as (app, pilot):
            await until(app, pilot, lambda: app.screen.query_one(Dashboard).size.height > 1)
            assert not answers

    asyncio.run(scenario())


def test_a_loss_that_has_fallen_far_is_drawn_on_a_logarithmic_scale() -> None:
    def drawn(losses: list[float]) -> list[str]:
        history = History()
        for at, loss in enumerate(losses):
            history.add(2.0 * at, {("loss", 0): loss})
        wanted = query(["loss"], None, 2.0 * len(losses) - 2, 99)
        series = merge(wanted, {"n1": history.spans(["loss"], None, wanted.level, wanted.buckets)})
        shown = training.Training(series, (), (), 0.0)
        snapshot = take(many(1, 1))
        rows = training.dashboard(snapshot, training.newest(snapshot), shown, "step_s", 60, 8, ASCII)
        return [text_of(row)[:36] for row in rows]

    steep = drawn([1000.0, 100.0, 10.0, 1.0])
    assert [line.split()[0] for line in steep[:3]] == ["1000", "loss", "(log)"]
    middle = [next(at for at, line in enumerate(steep) if line[charts.GUTTER + column] == "*") for column in (0, 9, 18)]
    assert middle == sorted(middle)
    assert middle[1] >= 1
    assert not any("(log)" in line for line in drawn([4.0, 3.0, 2.0, 1.0]))


def test_the_time_line_shows_what_happened_when_and_the_most_important_of_one_cell() -> None:
    history = History()
    for at in range(10):
        history.add(2.0 * at, {("loss", 0): 1.0})
    wanted = query(["loss"], None, 18.0, 99)
    series = merge(wanted, {"n1": history.spans(["loss"], None, wanted.level, wanted.buckets)})
    marks = ((4.0, "restart"), (12.0, "failure"), (12.1, "restart"), (16.0, "hang"))
    snapshot = take(many(1, 1))
    status: Any = snapshot.status
    status["snapshots"] = [{"time_ns": time_s * 10**9} for time_s in (4, 8)]
    shown = training.Training(series, ((0.0, 18.0),), marks, 0.0)
    rows = training.dashboard(snapshot, training.newest(snapshot), shown, "step_s", 60, 8, ASCII)
    line = text_of(rows[-1])[charts.GUTTER : 36]
    assert re.sub("=+", "=", line.rstrip(".")) == "=R=S=X=?="


def test_a_narrow_screen_has_one_line_and_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    session = job()

    async def series(*args: Any) -> Any:
        raise AssertionError("nothing shows it")

    monkeypatch.setattr(session, "series", series)

    async def scenario() -> None:
        async with running(session, (100, 40)) as (app, pilot):
            board = app.screen.query_one(Dashboard)
            assert (board.size.height, "737/2,000" in await settle(app, pilot)) == (1, True)

    asyncio.run(scenario())
