"""Follow is a property of the view: what is being read never moves, on either axis, and nothing is lost."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from typing import Any

import pytest
from textual.pilot import Pilot

from remote_agent.wire import Answer
from supervisor.errors import Unreachable
from supervisor.logs.merge import Page
from supervisor.logs.selection import Selection
from supervisor.tui.app import SupervisorApp
from supervisor.tui.logs.feeds import RankFeed
from supervisor.tui.logs.merged import MergedFeed
from supervisor.tui.rows.incident import LogPlace
from supervisor.tui.screens.logs.screen import LogsScreen
from supervisor.tui.shell import Target
from supervisor.tui.widgets.virtual_log import VirtualLog
from tests.screens import recorded
from tests.screens.screens import press, running, settle, text_of, type_key, until

FILE = ("n1", 0, 0, "stdout")


def talking(lines: int = 3000) -> recorded.RecordedSession:
    """Two nodes, of which one rank has written a lot."""
    session = recorded.load("running_2x2")
    session.files = {}
    session.write(FILE, *(f"line {number:06d} ".encode() + b"x" * 200 for number in range(lines)))
    return session


def log_of(app: SupervisorApp) -> VirtualLog:
    """The log of the log screen."""
    screen = app.screen
    assert isinstance(screen, LogsScreen)
    return screen.view


def body(app: SupervisorApp) -> list[str]:
    """The lines of the log, without title and bars; the scroll bar may move."""
    return [line[:79].rstrip() for line in text_of(app).splitlines()[3:-2]]


async def open_stdout(app: SupervisorApp, pilot: Pilot[int]) -> VirtualLog:
    """The stdout of rank 0, by line number."""
    await press(app, pilot, "3", "enter", "s")
    log = log_of(app)
    assert isinstance(log.feed, RankFeed)
    return log


async def check_reader(app: SupervisorApp, pilot: Pilot[int], session: recorded.RecordedSession) -> None:
    """Whatever is written, the lines on the screen stay; f shows the end."""
    log = log_of(app)
    await press(app, pilot, "pageup", "pageup", "right")
    assert not log.follow
    before = body(app)
    for number in range(20):
        session.write(FILE, *(f"new {number} {part}".encode() for part in range(50)))
        await settle(app, pilot, 1)
        assert body(app) == before
    await until(app, pilot, lambda: bool(log.new_lines_text) and f" {log.new_lines_text} " in text_of(app))
    assert body(app) == before
    await press(app, pilot, "f", "0")
    await until(app, pilot, lambda: any("new 19 49" in line for line in body(app)))


def test_reader_of_one_stream_is_not_moved() -> None:
    async def scenario() -> None:
        session = talking()
        async with running(session) as (app, pilot):
            await open_stdout(app, pilot)
            await check_reader(app, pilot, session)

    asyncio.run(scenario())


def test_reader_of_the_merged_log_is_not_moved() -> None:
    async def scenario() -> None:
        session = talking()
        async with running(session) as (app, pilot):
            await press(app, pilot, "4")
            assert isinstance(log_of(app).feed, MergedFeed)
            await check_reader(app, pilot, session)

    asyncio.run(scenario())


def test_reading_back_shows_every_line_once() -> None:
    async def scenario() -> None:
        session = talking(700)
        async with running(session) as (app, pilot):
            await press(app, pilot, "4")
            seen: list[str] = []
            for _ in range(400):
                page = [line.split("line ")[1][:6] for line in body(app) if "line " in line]
                seen = [number for number in page if number not in seen] + seen
                if "000000" in page:
                    break
                await pilot.press("pageup")
                await settle(app, pilot, 2)
            assert seen == [f"{number:06d}" for number in range(700)]

    asyncio.run(scenario())


def test_begin_and_end_of_ten_million_lines() -> None:
    class Long(recorded.RecordedSession):
        """A stream that is made when it is asked for."""

        async def log(self, node: str, op: str, args: dict[str, object]) -> Answer:
            line, count = int(str(args["line"])), int(str(args["count"]))
            total = 10_000_000
            first = max(0, total + line if line < 0 else line)
            lines = range(first, min(total, first + count))
            rows = [{"line": at, "offset": at * 9, "t_ns": at, "level": None} for at in lines]
            body = b"\n".join(b"line %d" % at for at in lines)
            return Answer({"line": first, "total_lines": total, "size": total * 9, "rows": rows}, body)

    async def scenario() -> None:
        session = Long()
        source = recorded.load("running_2x2")
        session.hosts, session.status = source.hosts, source.status
        async with running(session) as (app, pilot):
            log = await open_stdout(app, pilot)
            assert "line 9999999" in body(app)[-1]
            await press(app, pilot, "g")
            assert "line 0" in body(app)[0]
            assert log.follow is False
            log.jump(5_000_000)
            await settle(app, pilot)
            assert any("line 5000000" in line for line in body(app))
            await press(app, pilot, "G")
            assert "line 9999999" in body(app)[-1]

    asyncio.run(scenario())


def test_a_long_line_says_how_much_of_it_is_not_shown() -> None:
    async def scenario() -> None:
        session = talking(3)
        session.write(FILE, b"x" * 4096, b"\x1b[31m" + b"x" * 100_000)
        async with running(session) as (app, pilot):
            await open_stdout(app, pilot)
            text = await press(app, pilot, "dollar_sign")
            assert "x… +95.9 kB" in text
            assert "x… +95.9 kB" in await press(app, pilot, "w", "G")

    asyncio.run(scenario())


@pytest.mark.parametrize("keys", [(), ("z",), ("w",), ("v",)], ids=["plain", "folded", "wrapped", "filtered"])
def test_lines_of_a_node_that_is_back_come_to_who_reads_and_the_others_stay(keys: tuple[str, ...]) -> None:
    async def scenario() -> None:
        session = talking(0)
        for number in range(400):
            session.write(FILE, b"here %d" % number, level="error")
            session.write(("n2", 0, 2, "stdout"), b"there %d" % number, level="error")
        session.hosts["n2"].state = "lost"
        session.unread = {"n2"}
        async with running(session) as (app, pilot):
            await press(app, pilot, "4", *keys, "pageup", "pageup")
            await until(app, pilot, lambda: "without n2" in text_of(app))
            log, third = log_of(app), log_of(app).body_height // 3
            before = log.rows_here()
            assert {row.node for row in before} == {"n1"}
            session.hosts["n2"].state = "up"
            session.unread = set()
            await until(app, pilot, lambda: "without n2" not in text_of(app))
            after = log.rows_here()
            assert after[third] == before[third], "what is read stays where it is"
            assert after[third + 1].raw == b"there %d" % before[third].line
            assert not log.follow

    asyncio.run(scenario())


def test_sideways_position_survives_new_lines() -> None:
    async def scenario() -> None:
        session = talking(50)
        async with running(session) as (app, pilot):
            log = await open_stdout(app, pilot)
            await press(app, pilot, "right", "right")
            assert log.follow
            assert log.left == 32
            session.write(FILE, b"0123456789" * 10)
            await until(app, pilot, lambda: any("2345678901" in line for line in body(app)))
            assert log.left == 32
            assert "column 32" in text_of(app)

    asyncio.run(scenario())


def test_restart_is_followed_into_the_next_generation() -> None:
    async def scenario() -> None:
        session = talking(50)
        async with running(session) as (app, pilot):
            await open_stdout(app, pilot)
            session.write(("n1", 1, 0, "stdout"), b"hello from generation 1")
            session.touch(status={**session.status, "generation": 1})
            await until(app, pilot, lambda: any("hello from generation 1" in line for line in body(app)))

    asyncio.run(scenario())


def test_a_lost_link_is_said_and_what_is_here_stays() -> None:
    async def scenario() -> None:
        session = talking(50)
        async with running(session) as (app, pilot):
            await open_stdout(app, pilot)
            before = body(app)
            session.hosts["n1"].state = "lost"
            await until(app, pilot, lambda: "n1: no link" in text_of(app))
            assert body(app) == before
            session.hosts["n1"].state = "up"
            session.write(FILE, b"back again")
            await until(app, pilot, lambda: any("back again" in line for line in body(app)))

    asyncio.run(scenario())


def test_keys_while_a_refresh_is_on_its_way_do_not_move_the_reader() -> None:
    async def scenario() -> None:
        session = talking()
        async with running(session) as (app, pilot):
            await press(app, pilot, "4")
            session.latency_s = 0.2
            calls = session.log_calls
            await until(app, pilot, lambda: session.log_calls > calls)
            type_key(app, "pageup")
            await until(app, pilot, lambda: not log_of(app).follow)
            await settle(app, pilot)
            before = body(app)
            session.write(FILE, *(f"new {number}".encode() for number in range(200)))
            await until(app, pilot, lambda: bool(log_of(app).new_lines_text))
            assert body(app) == before

    asyncio.run(scenario())


def test_a_line_that_never_came_leaves_no_goal_behind() -> None:
    async def scenario() -> None:
        session = talking()
        session.hosts["n2"].state = "lost"
        async with running(session) as (app, pilot):
            app.open_place(LogPlace("n2", 0, 3, "stderr", 41))
            await settle(app, pilot)
            await until(app, pilot, lambda: "no link" in text_of(app))
            app.open_log(Target("n1", 0))
            await until(app, pilot, lambda: any("line 002999" in line for line in body(app)))
            await press(app, pilot, "k")
            session.touch()
            await settle(app, pilot)
            assert any("line 002998" in line for line in body(app))

    asyncio.run(scenario())


def test_a_rank_is_followed_to_another_node() -> None:
    async def scenario() -> None:
        session = talking()
        session.write(("n2", 0, 3, "stdout"), b"alive on n2")
        async with running(session) as (app, pilot):
            app.open_log(Target("n2", 3))
            assert "rank 3 on n2, stdout+stderr" in await settle(app, pilot)
            both = app.screen
            await press(app, pilot, "s")
            first, second = session.status["nodes"]
            first["ranks"], second["ranks"], second["state"] = first["ranks"] + second["ranks"], [], "removed"
            session.hosts["n2"].state = "lost"
            session.write(("n1", 1, 3, "stdout"), b"alive on n1")
            session.touch(status={**session.status, "generation": 1})
            await until(app, pilot, lambda: any("alive on n1" in line for line in body(app)))
            text = await settle(app, pilot)
            assert "rank 3 on n1, stdout" in text
            await press(app, pilot, "s", "s", "s")
            assert app.screen is both
            await until(app, pilot, lambda: any("alive on n1" in line for line in body(app)))

    asyncio.run(scenario())


def test_a_long_name_of_a_node_hides_nothing() -> None:
    async def scenario() -> None:
        session = talking(50)
        name = "ip-10-0-12-34.ec2.internal"
        session.status = json.loads(json.dumps(session.status).replace('"n1"', f'"{name}"'))
        session.hosts = {name: dataclasses.replace(session.hosts["n1"], name=name), "n2": session.hosts["n2"]}
        session.files = {(name, 0, 0, "stdout"): session.files[FILE]}
        async with running(session) as (app, pilot):
            app.open_log(Target(name, 0), 0)
            assert " following " in await settle(app, pilot)
            await press(app, pilot, "slash", *"zzz", "enter")
            await until(app, pilot, lambda: "zzz: not found" in text_of(app))
            assert "log of rank 0" in text_of(app)
            session.hosts["n2"].state = "lost"
            await until(app, pilot, lambda: "without n2" in text_of(app))

    asyncio.run(scenario())


def test_the_next_rank_and_back_and_a_whole_line_and_back() -> None:
    async def scenario() -> None:
        async with running(talking(50)) as (app, pilot):
            assert "log of rank 0 on n1" in await press(app, pilot, "3", "enter")
            assert "log of rank 1 on n1" in await press(app, pilot, "greater_than_sign")
            assert "log of rank 0 on n1" in await press(app, pilot, "less_than_sign")
            for opened in ("enter", "question_mark"):
                await press(app, pilot, opened)
                assert len(app.screen_stack) == 2
                await press(app, pilot, "enter")
                assert len(app.screen_stack) == 1
            await press(app, pilot, "1", "shift+tab")
            assert app.focused is not None
            assert app.focused.id == "tail"
            assert "log of all ranks" in await press(app, pilot, "enter")

    asyncio.run(scenario())


def test_a_merged_log_says_how_well_the_clocks_agree() -> None:
    async def scenario() -> None:
        session = talking(50)
        for node, error_ms in zip(session.status["nodes"], (0.0, 0.4), strict=True):
            node["clock_error_ms"] = error_ms
        async with running(session) as (app, pilot):
            assert "clocks within 0.4 ms" in await press(app, pilot, "4")
            app.open_log(Target("n1", 0), 0)
            assert "clocks within" not in await settle(app, pilot)

    asyncio.run(scenario())


def test_no_agent_in_reach_at_all() -> None:
    class Gone(recorded.RecordedSession):
        """Nobody answers."""

        async def merged(self, *args: object, **more: object) -> Page:
            raise Unreachable("n1: no link\ncannot reach job train-k3f9")

    async def scenario() -> None:
        source = recorded.load("running_2x2")
        session = Gone()
        session.hosts, session.status = source.hosts, source.status
        async with running(session) as (app, pilot):
            assert "cannot reach job" in await press(app, pilot, "4")

    asyncio.run(scenario())


def test_a_log_and_nccl_that_are_opened_before_a_host_answers_wait_for_it() -> None:
    class Connecting(recorded.RecordedSession):
        """Nobody can be asked before the first status."""

        async def merged(self, selection: Selection, count: int, **bounds: Any) -> Page:
            if not self.status:
                raise Unreachable("cannot reach any job")
            return await super().merged(selection, count, **bounds)

    async def scenario() -> None:
        source = talking(50)
        session = Connecting()
        session.hosts, session.files, session.status_age_s = source.hosts, source.files, float("inf")
        async with running(session) as (app, pilot):
            text = await press(app, pilot, "4")
            assert "connecting to the hosts; the log opens once one answers" in text
            assert "cannot reach" not in text
            assert "asking the nodes" in await press(app, pilot, "7")
            assert "still connecting to the job" in await press(app, pilot, "4", "x")
            await press(app, pilot, "escape")
            session.status, session.status_age_s = source.status, 0.1
            session.touch()
            await until(app, pilot, lambda: "line 000049" in text_of(app))

    asyncio.run(scenario())
