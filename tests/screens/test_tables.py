"""Tables that the reader filters and sorts, what is used, the generations; one pane over the whole screen."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import pytest
from textual.widgets import Input

from remote_agent.wire import Answer
from remote_agent.wire.events import PHASES, Condition, NodeState, RankState
from supervisor.history import query
from supervisor.ssh.answers import MalformedAnswer, read_answer
from supervisor.tui import looks, times
from supervisor.tui.generations import Run, Runs, bar
from supervisor.tui.looks import Glyphs
from supervisor.tui.model import JobView, build, take
from supervisor.tui.rows.incident import incident_page
from supervisor.tui.rows.series import gpu_wall
from supervisor.tui.rows.spans import row_width, text_of
from supervisor.tui.rows.tables import Column, SortOrder, Table, event_row, matching, node_columns, rank_columns
from supervisor.tui.rows.usage import node_usage_lines, node_vitals, rank_lines, rank_vitals
from supervisor.tui.screens import nccl, run
from supervisor.tui.training import gather, newest
from supervisor.tui.widgets.bars import alert_rows
from supervisor.tui.widgets.lines import LineView
from supervisor.tui.widgets.rank_grid import METRICS, RankGrid, share
from supervisor.tui.widgets.tables import RankTable
from supervisor.wording import usage
from tests.fast.test_answers import CASES, variants
from tests.screens import fabrics, recorded
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


def columns(job_view: JobView) -> list[Column]:  # type: ignore[type-arg]
    return rank_columns(GLYPHS, False, 4, rank_vitals(job_view.ranks))


def test_a_table_is_sorted_by_values_and_what_is_unknown_comes_last() -> None:
    job_view = take(uneven())

    def order(name: str, falling: bool = False) -> list[int]:
        return [rank.rank for rank in SortOrder(name, falling).sorted(job_view.ranks, columns(job_view))]

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


def test_a_silent_rank_counts_as_alive() -> None:
    session = recorded.many(1, 4)
    session.status["nodes"][0]["ranks"][2]["state"] = "silent"
    job_view = take(session)
    ranks = next(column for column in node_columns(GLYPHS, False, 0, 4) if column.name == "ranks")
    assert ranks.text(job_view.nodes[0]) == "4/4"
    assert "4/4 ranks" in text_of(alert_rows(job_view, 0.0, 120, GLYPHS)[0])


def test_every_state_has_a_look() -> None:
    assert set(looks.RANKS) == set(looks.RANK_ORDER) == set(RankState)
    assert set(looks.NODES) == set(NodeState)
    assert set(looks.JOBS) == set(Condition)


def test_the_name_of_the_sorted_column_is_marked_and_has_its_place() -> None:
    job_view = take(uneven())
    table = Table(columns(job_view), 120, GLYPHS)
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
    job_view = take(uneven())

    def found(needle: str) -> list[int]:
        return [rank.rank for rank in matching(job_view.ranks, columns(job_view), needle)]

    assert (found("N001"), found("running"), found("nothing of that")) == ([2, 3], [0, 1, 2, 3], [])


async def test_keys_and_clicks_filter_and_sort_the_table_that_is_shown() -> None:
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
        text = await settle(app, pilot)
        assert re.findall(r"^.{10,20}([0-3]) +n00[01]", text, re.MULTILINE) == ["2", "0", "3", "1"]
        await press(app, pilot, "O")
        assert table.order == SortOrder("loss", False)
        await press(app, pilot, "o")
        assert table.order.column not in ("", "loss")


# Screen, and the pane that is shown alone.
PANES = {
    "map": (("1", "tab"), "#events"),
    "nodes": (("2", "tab"), "#nodes"),
    "ranks": (("3", "tab"), "#ranks"),
    "run": (("6",), "#events"),
    "generation": (("6", "tab"), "#generations"),
    "nccl": (("7",), "#nccl"),
}


def job() -> recorded.RecordedSession:
    """A job with something in every pane."""
    session = recorded.measured(recorded.many(2, 2))
    session.fabric = fabrics.sample(2)
    return session


def body(text: str) -> list[str]:
    """What is between the bars."""
    return text.splitlines()[2:-2]


@pytest.mark.parametrize("name", PANES)
async def test_one_pane_has_the_whole_body_and_all_come_back(name: str) -> None:
    async with running(job(), (80, 24)) as (app, pilot):
        keys, id_ = PANES[name]
        await press(app, pilot, *keys)
        pane = app.screen.query_one(id_, LineView)
        app.screen.set_focus(pane)
        before = await settle(app, pilot)
        text = await press(app, pilot, "Z")
        assert tuple(pane.region) == (0, 2, 80, 24 - 4)
        assert text.splitlines()[:2] == before.splitlines()[:2]
        assert text.splitlines()[-2] == before.splitlines()[-2]
        assert "Z all panes" in text.splitlines()[-1]
        assert f" {pane.heading} " in body(text)[0]
        assert await press(app, pilot, "Z") == before
        await press(app, pilot, "Z")
        assert await press(app, pilot, "escape") == before


async def test_a_pane_alone_is_filtered_and_follows_the_job() -> None:
    session = job()
    async with running(session, (80, 24)) as (app, pilot):
        await press(app, pilot, "3", "Z", "slash", *"n001", "enter")
        table = app.screen.query_one(RankTable)
        assert (table.line_count(), app.screen.maximized) == (2, table)
        session.touch(status={**session.status, "generation": 5})
        assert "gen 5" in await settle(app, pilot)
        # The escape of the filter is the filter's.
        await press(app, pilot, "slash", "escape")
        assert (table.line_count(), app.screen.maximized) == (4, table)
        # Another screen and back: it is alone still, but not after a terminal that was too small.
        assert " ranks " in body(await press(app, pilot, "1", "3"))[0]
        for size in ((40, 10), (80, 24)):
            await pilot.resize_terminal(*size)
            await settle(app, pilot)
        assert app.screen.maximized is None


async def test_a_pane_that_is_gone_gives_its_room_back() -> None:
    async with running(recorded.many(3, 2), (160, 48)) as (app, pilot):
        text = await press(app, pilot, "shift+tab", "Z", "slash")
        assert "no table in this pane" in text
        assert "Z all panes" in text
        # At this size the map has no log.
        await pilot.resize_terminal(60, 16)
        text = await settle(app, pilot)
        assert app.screen.maximized is None
        assert " nodes " in body(text)[0]


async def test_the_only_pane_says_so() -> None:
    session = recorded.many(2, 2)
    session.fabric = fabrics.sample(1)
    async with running(session, (80, 24)) as (app, pilot):
        text = await press(app, pilot, "7", "Z")
        assert "there is only one pane" in text
        assert app.screen.maximized is None
        # A log and an incident are one pane each.
        for screen in "45":
            before = await press(app, pilot, screen)
            assert body(await press(app, pilot, "Z")) == body(before)


def job_view(nodes: int = 4, *, gpus: bool = True) -> JobView:
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
    cpu, gpu = job_view(gpus=False), job_view()
    assert [column.name for column in rank_vitals(cpu.ranks)] == ["loss", "rate", "lag", "cpu", "rss", "old"]
    assert [column.name for column in rank_vitals(gpu.ranks)] == [
        *("loss", "rate", "lag", "gpu%", "gpu mem", "temp", "power", "old")
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


SHOWN = job_view()


STARTED = next(event for event in recorded.load("failed_4x2").events if event["type"] == "generation_started")


@pytest.mark.parametrize("case", [name for name in CASES if name.startswith(("status", "incidents", "events"))])
def test_what_passes_the_gate_can_be_drawn(case: str) -> None:
    op, document, _ = CASES[case]
    for variant in variants(document):
        with contextlib.suppress(MalformedAnswer):
            data = read_answer("n2", op, Answer(variant)).data
            for incident in data.get("incidents") or ():
                incident_page(incident, SHOWN, 80, GLYPHS, unfolded=True, now_s=2e9)
            if op == "events":
                event_row(data["event"], GLYPHS, 120, wide=True)
                gather([data["event"]], None)
                Runs().follow([STARTED, data["event"]])
            elif op == "status":
                _draw_status(data)


def test_old_values_are_dim_and_say_how_old_they_are() -> None:
    shown = job_view()
    fresh, old = shown.nodes[0], shown.nodes[-1]
    columns = {column.name: column for column in node_vitals(shown.nodes, GLYPHS)}
    assert (columns["cpu"].cell(fresh)[0][1], columns["cpu"].cell(old)[0][1]) == ("text", "off")
    assert (columns["old"].cell(fresh)[0][0], columns["old"].cell(old)[0][0]) == ("", "61 s")
    assert "61 s old" in "".join(map(text_of, node_usage_lines(old, 80)[:2]))
    alarms = [text for row in gpu_wall(shown.nodes[1], None, 80, 0, GLYPHS) for text, role in row if role == "bad"]
    assert alarms == ["1980MHz   ecc errors 1   Xid 79"]
    temperature = next(column for column in rank_vitals(shown.ranks) if column.name == "temp")
    assert (temperature.cell(fresh.ranks[0])[0][1], temperature.cell(old.ranks[0])[0][1]) == ("text", "off")


async def test_a_ranks_page_has_its_history_across_the_restart() -> None:
    session = recorded.trained(recorded.measured(recorded.many(1, 2)), times.now(), 200)
    series = await session.series(query(("loss", "rate", "step_s"), [1], 200, 160))
    lines = [text_of(line) for line in rank_lines(take(session).ranks[1], series, 80, GLYPHS)]
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


async def test_the_heat_map_goes_through_what_is_known() -> None:
    for session, known in (
        (recorded.measured(recorded.many(16, 8)), ["output", "lag", "gpu", "mem", "cpu", "state"]),
        (recorded.many(16, 8), ["output", "state"]),
    ):
        async with running(session, (80, 24)) as (app, pilot):
            grid, seen = app.screen.query_one(RankGrid), []
            for _ in range(6):
                await press(app, pilot, "m")
                seen.append(grid.metric)
            assert seen == (known * 6)[:6]
    async with running(recorded.many(2, 1), (80, 24)) as (app, pilot):
        assert "no heat map here: each rank has a row" in await press(app, pilot, "m")


async def test_a_node_that_was_removed_is_no_problem() -> None:
    session = recorded.load("running_2x2")
    session.status["nodes"][1].update(state="removed", reason="by ann", group_rank=None, ranks=[])
    session.hosts["n2"].state, session.hosts["n2"].error = "lost", "the connection ended"
    async with running(session) as (app, pilot):
        text = await settle(app, pilot)
        assert "by ann" in text
        assert "the connection ended" not in text
        assert "removed" not in await press(app, pilot, "exclamation_mark")


async def test_a_selection_outlives_a_restart() -> None:
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


def journal(*records: tuple[str, int, Any]) -> list[Any]:
    """Events from type, generation and detail; `node` of the detail is the event's own."""
    return [
        {
            "seq": seq,
            "time": f"2026-11-20T10:00:{seq:02d}.000Z",
            "type": kind,
            "generation": generation,
            "node": detail.get("node"),
            "rank": detail.get("rank"),
            "detail": {key: value for key, value in detail.items() if key not in ("node", "rank")},
        }
        for seq, (kind, generation, detail) in enumerate(records, 1)
    ]


def test_every_phase_has_its_look() -> None:
    assert tuple(run.PHASES) == PHASES


def folded(events: list[Any]) -> Runs:
    """What a screen makes of a journal that comes bit by bit."""
    found = Runs()
    for upto in range(1, len(events) + 1):
        found.follow(events[:upto])
    return found


def started(generation: int, **more: Any) -> tuple[str, int, Any]:
    """A group of one node."""
    return ("generation_started", generation, {"world_size": 2, "restarts": 0, "members": [{"node": "n1"}], **more})


def ended(cause: str, *reported: tuple[str, Any]) -> list[Run]:
    """The runs of a group that stopped for a cause, and of the one after it."""
    before = [(kind, 0, detail) for kind, detail in reported if kind in ("restart_requested", "rank_failed")]
    after = [(kind, 0, detail) for kind, detail in reported if kind not in ("restart_requested", "rank_failed")]
    events = journal(started(0), *before, ("generation_stopped", 0, {"cause": cause}), *after, started(1))
    return folded(events).runs


@pytest.mark.parametrize(
    ("cause", "reported", "word", "sentence"),
    [
        ("restart", [("restart_requested", {"operator": "ann@laptop"})], "operator", "restart by ann@laptop"),
        (
            "failure",
            [("rank_failed", {"node": "n1", "rank": 1}), ("incident", {"summary": "rank 1 (n1): out of memory"})],
            "failure",
            "rank 1 (n1): out of memory",
        ),
        ("failure", [("rank_failed", {"node": "n1", "rank": 1})], "failure", "rank 1 failed on n1"),
        ("removed", [("node_removed", {"node": "n2", "reason": "removed by an operator"})], "removal", "n2 removed"),
        ("node_lost", [("node_lost", {"node": "n2", "reason": "cut off"})], "node lost", "n2 lost: cut off"),
        ("paused", [], "pause", "the coordinator was paused"),
        ("quorum", [], "no quorum", "fewer than half of the nodes were reachable"),
        ("something new", [], "something new", "something new"),
    ],
)
def test_why_a_group_ended_is_why_the_next_one_began(
    cause: str, reported: list[tuple[str, Any]], word: str, sentence: str
) -> None:
    first, second = ended(cause, *reported)
    assert (first.began_by, first.because) == ("launch", "the job was launched")
    assert (first.how, second.began_by, second.because) == (sentence, word, f"after {sentence}")
    assert second.how == ""


def test_the_end_of_the_job_is_the_end_of_its_last_group() -> None:
    phases = {"detect": 0.0, "stop": 10.0, "rendezvous": 10.0, "spawn": 20.0, "main": 60.0}
    env = {"NCCL_DEBUG": "INFO"}
    events = journal(started(0, env=env, restarts=1), ("generation_running", 0, phases), ("job_succeeded", 0, {}))
    (run,) = folded(events).runs
    assert (run.how, run.took_ms, run.env, run.restarts) == ("all ranks succeeded", 100.0, env, 1)
    assert bar(run.phases, 200.0, 20) == [("stop", 1), ("rendezvous", 1), ("spawn", 2), ("main", 6)]
    assert bar({}, 0.0, 20) == []
    shown = journal(started(0), ("generation_running", 0, phases), ("process_group_up", 0, {"imports": 300.0}))
    (run,) = folded(shown).runs
    assert (run.took_ms, bar(run.phases, 400.0, 20)[-1]) == (400.0, ("imports", 15))
    assert run.starts == ""
    starts = {"n1": {"warm": True, "why": ""}, "n2": {"warm": False, "why": "not enough memory"}}
    facts = {**phases, "starts": starts}
    (run,) = folded(journal(started(0), ("generation_running", 0, facts), ("first_step", 0, {"first_step": 1.0}))).runs
    assert run.starts == "cold on n2: not enough memory"


def test_reports_of_nodes_are_compared() -> None:
    def ready(node: str, torch: str) -> tuple[str, int, Any]:
        return ("node_ready", -1, {"node": node, "nproc": 2, "versions": {"torch": torch, "python": "3.11"}})

    events = journal(ready("n1", "2.7.1"), ready("n2", "2.7.1"), ready("n3", "2.6.0"))
    assert folded(events).differing() == [("torch", {"2.7.1": ("n1", "n2"), "2.6.0": ("n3",)})]


async def test_a_generation_leads_to_its_log() -> None:
    async with running(recorded.load("failed_4x2"), (120, 30)) as (app, pilot):
        text = await press(app, pilot, "6", "tab", "G")
        assert "generation 0" in text
        text = await press(app, pilot, "enter")
        assert app.current_mode == "logs"
        assert "generation 0" in text


async def test_a_line_of_nccl_opens_its_output(monkeypatch: pytest.MonkeyPatch) -> None:
    session = recorded.many(4, 8)
    async with running(session, (120, 30)) as (app, pilot):
        assert "no NCCL output yet" in await press(app, pilot, "7")
        # It is asked again while somebody looks.
        monkeypatch.setattr(nccl, "EVERY_S", 0.05)
        session.fabric = fabrics.sample(4)
        assert "n002 uses TCP sockets" in await settle(app, pilot)
        assert "leads to no other machine" in await press(app, pilot, "j")
        assert "set NCCL_SOCKET_IFNAME" in await settle(app, pilot)
        text = await press(app, pilot, "enter")
        assert app.current_mode == "logs"
        assert "n002, nccl" in text
