"""What is used, on the screen: only what is known, old values are dim, bars of the last minutes."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from supervisor.tui import history as sparks
from supervisor.tui.app import SupervisorApp
from supervisor.tui.history import RankHistory, spark
from supervisor.tui.looks import Glyphs
from supervisor.tui.model import Snapshot, take
from supervisor.tui.rows.spans import row_width, text_of
from supervisor.tui.rows.usage import node_usage_lines, node_vitals, rank_lines, rank_vitals
from supervisor.tui.widgets.rank_grid import METRICS, RankGrid, share
from supervisor.wording import usage
from supervisor.wording.status import status_lines
from tests.screens import recorded
from tests.screens.screens import press, running, settle

GLYPHS = Glyphs()


def snapshot(nodes: int = 4, *, gpus: bool = True) -> Snapshot:
    return take(recorded.measured(recorded.many(nodes, 4), gpus=gpus))


@pytest.mark.parametrize(
    ("used", "total", "text"),
    [
        (71 << 30, 80 << 30, "71/80G"), (5 << 30, 8 << 30, "5.0/8.0G"), (201 << 30, 2 << 40, "201G/2.0T"),
        (0, 80 << 30, "0/80G"), (None, 80 << 30, "-"), (900, None, "900B"), (1023 << 20, None, "1.0G"),
    ],
)  # fmt: skip
def test_bytes_in_short(used: float | None, total: float | None, text: str) -> None:
    assert usage.share(used, total) == text


def test_bars_of_values() -> None:
    assert spark((1, 2, None, 3), 10, GLYPHS) == "▁▅ █"
    assert spark((9, 1, 2), 2, GLYPHS) == "▁█"
    assert spark((2, 2), 9, GLYPHS) == "▅▅"
    assert spark((0, 4, 8), 9, Glyphs(ascii=True)) == "059"
    assert spark((None,), 9, GLYPHS) == spark((), 9, GLYPHS) == spark((1,), 0, GLYPHS) == ""


def test_columns_are_there_only_where_something_is_known() -> None:
    cpu, gpu = snapshot(gpus=False), snapshot()
    assert [column.name for column in rank_vitals(cpu.ranks)] == ["loss", "rate", "lag", "cpu", "rss", "old"]
    assert [column.name for column in rank_vitals(gpu.ranks)] == [
        *("loss", "rate", "lag", "gpu%", "gpu mem", "temp", "power", "old"),
    ]
    names = ["cpu", "mem", "disk free", "net in/out", "old"]
    assert [column.name for column in node_vitals(cpu.nodes, GLYPHS)] == names
    assert [column.name for column in node_vitals(gpu.nodes, GLYPHS)] == ["gpu%", *names]
    assert [column.name for column in node_vitals(gpu.nodes[:1], GLYPHS)] == ["gpu%", *names[:-1]]
    none = take(recorded.many(2, 2))
    assert [*rank_vitals(none.ranks), *node_vitals(none.nodes, GLYPHS)] == []
    for column in rank_vitals(gpu.ranks):
        assert all(row_width(column.cell(rank)) <= column.width for rank in gpu.ranks), column.name


@pytest.mark.parametrize("odd", [None, 5, "x", [], {}, {"index": []}, float("nan"), float("inf"), -1, True])
def test_odd_documents_are_shown_as_unknown(odd: object) -> None:
    session = recorded.measured(recorded.many(1, 2))
    (node,) = session.status["nodes"]
    gpu = dict.fromkeys(node["vitals"]["gpus"][0], odd)
    for vitals in (
        odd,
        dict.fromkeys(node["vitals"], odd),
        {**node["vitals"], "gpus": [odd, gpu, {**gpu, "index": 0}]},
    ):
        node["vitals"] = vitals
        for each in node["ranks"]:
            each.update(vitals={"cpu": odd, "rss": odd, "gpu": odd}, progress={"loss": odd, "rate": odd, "lag": odd})
        shown = take(session)
        texts = [text_of(column.cell(rank)) for column in rank_vitals(shown.ranks) for rank in shown.ranks]
        texts += [text_of(column.cell(row)) for column in node_vitals(shown.nodes, GLYPHS) for row in shown.nodes]
        lines = [*node_usage_lines(shown.nodes[0], 80), *rank_lines(shown.ranks[0], RankHistory(), 60, GLYPHS)]
        texts += [text_of(line) for line in lines]
        assert not [text for text in texts if "nan" in text or "inf" in text or "[]" in text]
        assert all(GLYPHS.level(share(rank, metric) or 0) for rank in shown.ranks for metric in METRICS)
        assert status_lines(session.status)


def test_old_values_are_dim_and_say_how_old_they_are() -> None:
    shown = snapshot()
    fresh, old = shown.nodes[0], shown.nodes[-1]
    columns = {column.name: column for column in node_vitals(shown.nodes, GLYPHS)}
    assert (columns["cpu"].cell(fresh)[0][1], columns["cpu"].cell(old)[0][1]) == ("text", "off")
    assert (columns["old"].cell(fresh)[0][0], columns["old"].cell(old)[0][0]) == ("", "61 s")
    assert "61 s old" in "".join(map(text_of, node_usage_lines(old, 80)[:2]))
    assert {role for _, role in node_usage_lines(shown.nodes[1], 80)[3]} == {"dim", "bad"}, "an Xid is an alarm"
    temperature = next(column for column in rank_vitals(shown.ranks) if column.name == "temp")
    assert (temperature.cell(fresh.ranks[0])[0][1], temperature.cell(old.ranks[0])[0][1]) == ("text", "off")


def test_history_keeps_the_last_minutes_of_one_generation() -> None:
    history, shown = RankHistory(), snapshot(1)
    now = shown
    for number in range(100):
        rank = shown.ranks[1]
        progress = {"loss": "nan" if number == 99 else float(number), "rate": None, "steps_s": 2.0}
        rank = rank._replace(document={**rank.document, "progress": progress})
        node = dataclasses.replace(shown.nodes[0], ranks=(rank,))
        now = dataclasses.replace(shown, nodes=(node,))
        history.take(now, number * sparks.EVERY_S)
        history.take(now, number * sparks.EVERY_S + 1)
    past = history.of(1)
    assert list(past) == ["loss", "pace"]
    assert past["loss"][-3:] == (97.0, 98.0, None)
    assert len(past["loss"]) == sparks.KEPT
    assert set(past["pace"]) == {0.5}
    lines = [text_of(line) for line in rank_lines(now.ranks[0], history, 60, GLYPHS)]
    assert any(line.startswith("  loss     nan") and line.endswith("█ ") for line in lines), lines
    history.take(dataclasses.replace(now, generation=9), 1e6)
    assert len(history.of(1)["pace"]) == 1


def test_the_heat_map_goes_through_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    async def metrics(session: recorded.RecordedSession) -> list[str]:
        async with running(session, (80, 24)) as (app, pilot):
            seen = []
            for _ in range(6):
                await press(app, pilot, "m")
                seen.append(app.screen.query_one(RankGrid).metric)
            return seen

    async def check(known: list[str], session: recorded.RecordedSession) -> None:
        assert await metrics(session) == (known * 6)[:6]

    asyncio.run(check(["output", "lag", "gpu", "mem", "cpu", "state"], recorded.measured(recorded.many(16, 8))))
    asyncio.run(check(["output", "state"], recorded.many(16, 8)))

    async def none_here() -> None:
        async with running(recorded.many(2, 1), (80, 24)) as (app, pilot):
            assert "no heat map here: each rank has a row" in await press(app, pilot, "m")

    asyncio.run(none_here())


def test_a_node_that_was_removed_is_no_problem() -> None:
    async def scenario() -> None:
        session = recorded.load("running_2x2")
        session.status["nodes"][1].update(state="removed", reason="by ann", group_rank=None, ranks=[])
        session.hosts["n2"].state, session.hosts["n2"].error = "lost", "the connection ended"
        async with running(session) as (app, pilot):
            text = await settle(app, pilot)
            assert "by ann" in text
            assert "the connection ended" not in text
            assert "removed" not in await press(app, pilot, "exclamation_mark")

    asyncio.run(scenario())


def test_a_ranks_page_grows_its_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparks, "EVERY_S", 0.0)
    session = recorded.measured(recorded.many(1, 2))

    async def check() -> None:
        async with running(session, (80, 24)) as (app, pilot):
            await press(app, pilot, "3")
            for number in range(8):
                _tell(session, app, 8 - number)
            text = await press(app, pilot, "j", "k")
            assert "rate     96,021 tok/s" in text
            (line,) = (line for line in text.splitlines() if line.startswith("  loss"))
            assert line.endswith("█▇▆▅▄▃▂▁"), line

    asyncio.run(check())


def _tell(session: recorded.RecordedSession, app: SupervisorApp, loss: int) -> None:
    node = session.status["nodes"][0]
    ranks: list[dict[str, Any]] = [{**rank, "progress": {**rank["progress"], "loss": loss}} for rank in node["ranks"]]
    session.touch(status={**session.status, "nodes": [{**node, "ranks": ranks}]})
    app.tick()


def test_the_page_below_a_table_is_reached_and_the_selection_outlives_a_restart() -> None:
    async def scenario() -> None:
        session = recorded.measured(recorded.many(2, 8))
        async with running(session, (60, 16)) as (app, pilot):
            assert "gpu 7" not in await press(app, pilot, "2")
            assert "gpu 7" in await press(app, pilot, "tab", "G")
            assert "rank 3 ─" in await press(app, pilot, "3", "down", "down", "down")
            nodes = session.status["nodes"]
            session.touch(status={**session.status, "nodes": [{**node, "ranks": []} for node in nodes]})
            assert "no ranks yet" in await settle(app, pilot)
            session.touch(status={**session.status, "nodes": nodes})
            assert "rank 3 ─" in await settle(app, pilot)

    asyncio.run(scenario())
