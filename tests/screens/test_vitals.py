"""What is used, on the screen: only what is known, old values are dim, bars of the last minutes."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from remote_agent.wire import Answer
from supervisor.history import query, trimmed
from supervisor.ssh.answers import MalformedAnswer, read_answer
from supervisor.tui import times
from supervisor.tui.generations import Runs
from supervisor.tui.looks import Glyphs
from supervisor.tui.model import Snapshot, build, take
from supervisor.tui.rows.incident import incident_lines
from supervisor.tui.rows.series import RANK_KINDS, gpu_wall
from supervisor.tui.rows.spans import row_width, text_of
from supervisor.tui.rows.tables import SortOrder, event_row
from supervisor.tui.rows.usage import node_usage_lines, node_vitals, rank_lines, rank_vitals
from supervisor.tui.training import gather, newest
from supervisor.tui.widgets.rank_grid import METRICS, RankGrid, share
from supervisor.wording import usage
from tests.fast.test_answers import CASES, variants
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


def _draw_status(status: Any) -> None:
    shown = build(status, {}, (), job="t", ended=False, stale=False)
    for columns, rows in ((rank_vitals(shown.ranks), shown.ranks), (node_vitals(shown.nodes, GLYPHS), shown.nodes)):
        for column in columns:
            ordered: list[Any] = SortOrder(column.name).sorted(rows, columns)
            assert not {"nan%", "inf", "None"} & {column.text(row) for row in ordered}, column.name
    for node in shown.nodes:
        node_usage_lines(node, 80)
        gpu_wall(node, None, 80, 9, GLYPHS)
    for rank in shown.ranks:
        rank_lines(rank, None, 60, GLYPHS)
        assert all(GLYPHS.level(share(rank, metric) or 0) for metric in METRICS)
    newest(shown)


def _draw_incident(incident: Any) -> None:
    incident_lines(incident, SHOWN, 80, GLYPHS, unfolded=True, now_s=2e9)


def _draw_event(event: Any) -> None:
    event_row(event, GLYPHS, 120, wide=True)
    gather([event], None)
    Runs().follow([STARTED, event])


SHOWN = snapshot()
STARTED = next(event for event in recorded.load("failed_4x2").events if event["type"] == "generation_started")


@pytest.mark.parametrize("case", [name for name in CASES if name.startswith(("status", "incidents", "events"))])
def test_what_passes_the_gate_can_be_drawn(case: str) -> None:
    op, document, _ = CASES[case]
    for variant in variants(document):
        with contextlib.suppress(MalformedAnswer):
            data = read_answer("n2", op, Answer(variant)).data
            for incident in data.get("incidents") or ():
                _draw_incident(incident)
            if op == "events":
                _draw_event(data["event"])
            elif op == "status":
                _draw_status(data)


def test_old_values_are_dim_and_say_how_old_they_are() -> None:
    shown = snapshot()
    fresh, old = shown.nodes[0], shown.nodes[-1]
    columns = {column.name: column for column in node_vitals(shown.nodes, GLYPHS)}
    assert (columns["cpu"].cell(fresh)[0][1], columns["cpu"].cell(old)[0][1]) == ("text", "off")
    assert (columns["old"].cell(fresh)[0][0], columns["old"].cell(old)[0][0]) == ("", "61 s")
    assert "61 s old" in "".join(map(text_of, node_usage_lines(old, 80)[:2]))
    alarms = [text for row in gpu_wall(shown.nodes[1], None, 80, 0, GLYPHS) for text, role in row if role == "bad"]
    assert alarms == ["1980MHz   ecc errors 1   Xid 79"]
    temperature = next(column for column in rank_vitals(shown.ranks) if column.name == "temp")
    assert (temperature.cell(fresh.ranks[0])[0][1], temperature.cell(old.ranks[0])[0][1]) == ("text", "off")


def trained(seconds: int = 200) -> recorded.RecordedSession:
    return recorded.trained(recorded.measured(recorded.many(1, 2)), times.now(), seconds)


def lines_of_rank(width: int) -> list[str]:
    session = trained()
    series = trimmed(asyncio.run(session.series(query(RANK_KINDS, [1], 200, 2 * width))))
    return [text_of(line) for line in rank_lines(take(session).ranks[1], series, width, GLYPHS)]


def test_a_ranks_page_has_its_history_across_the_restart_with_its_range() -> None:
    lines = lines_of_rank(80)
    (loss,) = (line for line in lines if line.startswith("  loss"))
    assert loss.endswith(" to 9.5"), loss
    bars = loss[28 : loss.rindex("  ")].rstrip()
    assert bars[0] in "▇█", "the first group's loss is there"
    assert bars[-1] in "▁▂"
    assert all(row_width(((line, ""),)) <= 80 for line in lines)
    # One second a step needs 0.77 s; one form for a duration, and its range.
    (pace,) = (line for line in lines if line.startswith("  pace"))
    assert "0.77 s/step" in pace
    assert pace.endswith("0.77 s to 0.77 s")


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
