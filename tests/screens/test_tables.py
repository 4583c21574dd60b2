"""Tables that the reader filters and sorts: by key, by click, while rows come and go."""

from __future__ import annotations

import asyncio

from textual.widgets import Input

from remote_agent.wire.events import Condition, NodeState, RankState
from supervisor.tui import looks
from supervisor.tui.looks import Glyphs
from supervisor.tui.model import Snapshot, take
from supervisor.tui.rows.spans import text_of
from supervisor.tui.rows.tables import Column, SortOrder, Table, matching, node_columns, rank_columns
from supervisor.tui.rows.usage import rank_vitals
from supervisor.tui.widgets.bars import alert_rows
from supervisor.tui.widgets.tables import RankTable
from tests.screens import recorded
from tests.screens.screens import press, running, settle

GLYPHS = Glyphs()


def uneven() -> recorded.RecordedSession:
    """Four ranks of which one has no value at all, and one the greatest loss."""
    session = recorded.measured(recorded.many(2, 2))
    ranks = [rank for node in session.status["nodes"] for rank in node["ranks"]]
    for rank, loss in zip(ranks, (3.0, None, 20.0, 0.5), strict=True):
        rank["progress"]["loss"] = loss
    ranks[1].update(progress=None, vitals=None, step=None, last_output_age_s=None)
    return session


def columns(snapshot: Snapshot) -> list[Column]:  # type: ignore[type-arg]
    return rank_columns(GLYPHS, False, 4, rank_vitals(snapshot.ranks))


def test_a_table_is_sorted_by_values_and_what_is_unknown_comes_last() -> None:
    snapshot = take(uneven())

    def order(name: str, falling: bool = False) -> list[int]:
        return [rank.rank for rank in SortOrder(name, falling).sorted(snapshot.ranks, columns(snapshot))]

    assert order("loss") == [3, 0, 2, 1]
    assert order("loss", falling=True) == [2, 0, 3, 1]
    assert order("rank", falling=True) == [3, 2, 1, 0]
    assert order("") == order("no such column") == [0, 1, 2, 3]
    failed = take(recorded.load("failed_4x2"))
    assert [row.rank for row in SortOrder().sorted(failed.ranks, columns(failed))] == [*range(8)]


def test_names_are_sorted_as_people_count() -> None:
    column: Column[str] = Column("node", 9, lambda name: ((name, ""),))
    assert SortOrder("node").sorted(["n10", "n9", "m", "-", "n1"], [column]) == ["m", "n1", "n9", "n10", "-"]


def test_one_row_without_values_hides_no_column() -> None:
    names = [column.name for column in columns(take(uneven()))]
    assert {"loss", "rate", "gpu%", "gpu mem", "temp", "power"} <= set(names)


def test_a_silent_rank_counts_as_alive_in_the_bar_and_in_the_table_of_nodes() -> None:
    session = recorded.many(1, 4)
    session.status["nodes"][0]["ranks"][2]["state"] = "silent"
    snapshot = take(session)
    ranks = next(column for column in node_columns(GLYPHS, False, 0, 4) if column.name == "ranks")
    assert ranks.text(snapshot.nodes[0]) == "4/4"
    assert "4/4 ranks" in text_of(alert_rows(snapshot, 0.0, 120, GLYPHS)[0])


def test_every_state_has_a_look() -> None:
    assert set(looks.RANKS) == set(looks.RANK_ORDER) == set(RankState)
    assert set(looks.NODES) == set(NodeState)
    assert set(looks.JOBS) == set(Condition)


def test_the_name_of_the_sorted_column_is_marked_and_has_its_place() -> None:
    snapshot = take(uneven())
    table = Table(columns(snapshot), 120, GLYPHS)
    head = text_of(table.head(SortOrder("loss", True)))
    assert "loss▼" in head
    assert len(head) == len(text_of(table.head()))
    assert table.column_at(head.index("loss▼")) == "loss"
    assert table.column_at(head.index("rank")) == "rank"
    assert (table.column_at(0), table.column_at(500)) == ("", "")
    order = SortOrder("rank").of("loss")
    assert (order, order.of("loss")) == (SortOrder("loss", True), SortOrder("loss", False))
    assert SortOrder().next(["a", "b"]).next(["a", "b"]).next(["a", "b"]) == SortOrder()


def test_a_filter_finds_text_in_any_cell() -> None:
    snapshot = take(uneven())

    def found(needle: str) -> list[int]:
        return [rank.rank for rank in matching(snapshot.ranks, columns(snapshot), needle)]

    assert (found("N001"), found("running"), found("nothing of that")) == ([2, 3], [0, 1, 2, 3], [])


def test_keys_and_clicks_filter_and_sort_the_table_that_is_shown() -> None:
    async def scenario() -> None:
        session = uneven()
        async with running(session, (120, 30)) as (app, pilot):
            text = await press(app, pilot, "3", "slash", *"n001")
            table = app.screen.query_one(RankTable)
            assert table.line_count() == 2, "while it is typed"
            assert "ranks /n001" in text
            await press(app, pilot, "enter")
            assert table.has_focus
            session.touch(status={**session.status})
            await settle(app, pilot)
            assert table.line_count() == 2
            # The field has the text, and esc shows all rows again.
            await press(app, pilot, "slash")
            assert app.screen.query_one(Input).value == "n001"
            await press(app, pilot, "escape")
            assert (table.line_count(), table.has_focus) == (4, True)
            text = await press(app, pilot, "slash", *"zz")
            assert "no row contains zz" in text
            await press(app, pilot, "escape")
            head = text_of(table.head)
            await pilot.click(table, offset=(head.index("loss"), 1))
            assert [table.table.columns[0].name, table.order] == ["state", SortOrder("loss", True)]
            await settle(app, pilot)
            assert [table._keys[at] for at in range(4)] == [2, 0, 3, 1]
            await press(app, pilot, "O")
            assert table.order == SortOrder("loss", False)
            await press(app, pilot, "o")
            assert table.order.column not in ("", "loss")

    asyncio.run(scenario())
