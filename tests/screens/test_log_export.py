"""What is taken out of a log: a record, all lines into a file, all lines in a pager; the same of a recording."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from textual.widgets import Input

from remote_agent.wire import Answer
from supervisor.errors import Unreachable
from supervisor.logs.merge import Page
from supervisor.logs.rows import LogLine
from supervisor.logs.selection import Selection
from supervisor.recording.player import Player
from supervisor.recording.reading import load
from supervisor.tui import terminal
from supervisor.tui.dialogs import record
from supervisor.tui.logs import ansi
from supervisor.tui.logs.feeds import Jump, RankFeed
from supervisor.tui.replay import ReplayApp
from supervisor.tui.screens.logs import export
from supervisor.tui.screens.logs.export import Export, LineFormat
from supervisor.wording import values
from tests.hostile import HOSTILE, check_harmless
from tests.screens import recordings
from tests.screens.screens import press, running, running_app, settle, text_of, type_key, until
from tests.screens.test_feeds import ALL, Cluster, NodeLink, run
from tests.screens.test_follow import FILE, log_of
from tests.screens.test_log_keys import BEGIN, SECOND, answer, body, numbered

TRACE = (
    b"step 7", b"[rank0]: Traceback (most recent call last):", b'[rank0]:   File "train.py", line 88, in <module>',
    b"[rank0]:     main()", b"[rank0]: ValueError: \x1b[31mnot this time", b"step 8",
)  # fmt: skip


@pytest.mark.parametrize("keys", [("4",), ("3", "enter", "s")], ids=["merged", "one stream"])
def test_enter_shows_all_of_a_traceback_and_y_copies_it(keys: tuple[str, ...], tmp_path: Path) -> None:
    async def scenario() -> None:
        session = numbered(400)
        session.write(FILE, *TRACE)
        async with running(session, (100, 30)) as (app, pilot):
            await press(app, pilot, *keys)
            # One of its inner lines is read.
            log_of(app).jump_to_key(session.files[FILE][403].t_ns, (0, 0, "stdout", 403))
            await settle(app, pilot)
            before = body(app)
            text = await press(app, pilot, "enter")
            assert "lines 402 to 405 of generation_0/rank_0/stdout.log on n1, from" in text
            assert "32,080" in text
            assert "arrived 2026-11-20 10:09:59.002 to 10:09:59.005" in text
            assert "ValueError: not this time" in text
            await press(app, pilot, "y", "escape")
            copied = (tmp_path / "state" / "supervisor" / "copied.txt").read_text()
            assert copied == b"\n".join(TRACE[1:5]).decode().replace("\x1b[31m", "") + "\n"
            assert body(app)[:10] == before[:10]

    asyncio.run(scenario())


def test_a_record_longer_than_a_page_and_one_whose_node_is_lost() -> None:
    async def scenario() -> None:
        session = numbered(10)
        session.write(FILE, b"Traceback (most recent call last):", *(b"  File %d" % number for number in range(200)))
        session.write(FILE, b"KeyError: 1")
        row = RankFeed(session, "n1", 0, 0, "stdout")
        await row.seek(Jump(session.files[FILE][150].t_ns), 3)
        inner = row.row(150)
        assert inner is not None
        found = await record.fetch(session, inner)
        assert found.text.splitlines()[::201] == ["Traceback (most recent call last):", "KeyError: 1"]
        assert found.facts[0].startswith("lines 11 to 212 of generation_0/rank_0/stdout.log")
        async with running(session) as (app, pilot):
            await press(app, pilot, "4", "g")
            session.hosts["n1"].state = "lost"
            text = await press(app, pilot, "enter")
            assert "cannot load the lines around it: n1: no link" in text
            assert "line 000000" in text

    asyncio.run(scenario())


@pytest.mark.parametrize("keys", [("4",), ("4", "z"), ("3", "enter", "s")], ids=["merged", "folded", "one stream"])
def test_all_lines_are_saved_and_no_file_is_written_over(
    keys: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(export, "ROWS", 64)

    async def scenario() -> None:
        session = numbered(300)
        session.files[FILE][7].text = b"\x1b[31mred\x1b[0m and \x1b]0;title\x07 1%\r2%"
        session.write(("n1", 0, 0, "stderr"), *(b"warning %d" % number for number in range(30)), t_ns=BEGIN)
        async with running(session) as (app, pilot):
            await press(app, pilot, *keys, "pageup", "#", "t")
            before = body(app)
            assert "saved" in await press(app, pilot, "S", "enter")
            (path,) = tmp_path.glob("*.log")
            lines = path.read_text().splitlines()
            wanted = [line.text.decode() for line in session.files[FILE]]
            wanted[7] = "2%"
            own = [line.rpartition("| ")[2] for line in lines if "warning" not in line]
            assert own == wanted
            assert sum("warning" in line for line in lines) == (0 if "s" in keys else 30)
            assert body(app)[:9] == before[:9]
            assert re.search(r" save to \S", await press(app, pilot, "S"))
            field = app.screen.query_one(Input)
            assert field.value == str(path).replace(".log", "-2.log")
            field.value = str(path)
            assert "exists already" in await press(app, pilot, "enter")
            field.value = str(tmp_path / "none" / "x.log")
            assert "No such file" in await press(app, pilot, "enter")
            assert path.read_text().splitlines() == lines

    asyncio.run(scenario())


def test_lines_of_any_length_are_saved_whole_or_say_what_is_missing(tmp_path: Path) -> None:
    long = "".join(f"\x1b[3{number % 8}m漢字 {number:06d} " for number in range(80_000))

    async def scenario(cluster: Cluster, first: NodeLink, second: NodeLink) -> None:
        await first.written(0, f"short\n{long}\nlast\n".encode())
        await second.written(1, b"x" * 100_000 + b"\n")
        ask = cluster.log

        async def log(node: str, op: str, args: Any) -> Answer:
            if node == "n2":
                raise Unreachable("n2: no link")
            return await ask(node, op, args)

        cluster.log = log  # type: ignore[method-assign]
        saved = Export(cluster.source, ALL, None, LineFormat(time=False, source=True))
        with (tmp_path / "saved").open("wb") as file:
            await saved.write(file)
        lines = (tmp_path / "saved").read_text().split("\n")
        wanted = re.sub(r"\x1b\[\d+m", "", long)
        assert lines == ["n1:0| short", f"n1:0| {wanted}", "n1:0| last", f"n2:1| {'x' * 65536}… +34.5 kB", ""]
        assert (saved.lines, saved.absent) == (4, {"n2"})

    run(tmp_path, scenario, 2)


def test_of_a_filtered_log_only_what_it_keeps_is_saved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(export, "ROWS", 4)

    async def scenario() -> None:
        async with running(numbered(300)) as (app, pilot):
            await press(app, pilot, "3", "enter", "s")
            await answer(app, pilot, "&", "line 0001[0-9]7")
            await press(app, pilot, "S", "enter")
            (path,) = tmp_path.glob("*.log")
            numbers = re.findall(r"line (\d+)", path.read_text())
            assert numbers == [f"0001{number}7" for number in range(10)]

    asyncio.run(scenario())


def test_what_is_being_saved_says_how_far_it_is_and_can_be_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(export, "ROWS", 64)

    async def gone(*_args: object, **_more: object) -> Page:
        raise Unreachable("n1: no link")

    async def scenario() -> None:
        session = numbered(1000)
        async with running(session) as (app, pilot):
            await press(app, pilot, "4")
            merged = session.merged

            async def some(selection: Selection, count: int, **bounds: Any) -> Page:
                if (bounds.get("after_ns") or 0) > BEGIN + 300 * SECOND:
                    await asyncio.Event().wait()
                return await merged(selection, count, **bounds)

            session.merged = some  # type: ignore[method-assign]
            await press(app, pilot, "S", "enter")
            await until(app, pilot, lambda: "32% saved, 320 lines, esc cancels" in text_of(app))
            assert "one at a time" in await press(app, pilot, "o")
            type_key(app, "escape")
            await until(app, pilot, lambda: not list(tmp_path.glob("*.log")))
            text = await settle(app, pilot)
            assert "% saved, 320 lines, esc" not in text
            assert "one at a time" not in text
            assert app.current_mode == "logs"
            session.merged = gone  # type: ignore[method-assign]
            await press(app, pilot, "S", "enter")
            assert any("was not written: n1: no link" in note.message for note in app._notifications)
            assert not list(tmp_path.glob("*.log"))

    asyncio.run(scenario())


def test_how_much_is_saved_goes_by_lines_where_most_came_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(export, "ROWS", 64)

    async def scenario() -> None:
        session = numbered(0)
        session.write(FILE, *(b"at once" for _ in range(999)))
        session.write(FILE, b"late", t_ns=session.files[FILE][-1].t_ns + 10_000 * SECOND)
        said: list[str] = []
        merged = session.merged

        async def note(selection: Selection, count: int, **bounds: Any) -> Page:
            said.append(save.progress_text())
            return await merged(selection, count, **bounds)

        session.merged = note  # type: ignore[method-assign]
        save = Export(session, ALL, None, LineFormat(time=False, source=False))
        with (tmp_path / "saved").open("wb") as file:
            await save.write(file)
        assert said[1:5] == ["0% saved, 0 lines", "6% saved, 64 lines", "13% saved, 128 lines", "19% saved, 192 lines"]
        assert save.progress_text() == "100% saved, 1,000 lines"

    asyncio.run(scenario())


def test_a_name_in_an_exported_line_is_text() -> None:
    row = LogLine(f"n1{HOSTILE}", 0, 3, "stdout", 0, 0, 5, None, b"owned\x1b]0;x\x07")
    check_harmless(LineFormat(time=False, source=True, colour=True).line(row).decode().removesuffix("\n"))


def test_a_pager_that_there_is_not() -> None:
    for program, said in (
        ("no-such-pager -x", "no-such-pager not found"),
        ("less '", "PAGER: No closing quotation"),
    ):
        with pytest.raises(LookupError, match=said):
            terminal.pager({"PAGER": program})
    assert terminal.pager({"PAGER": "sh -c 'x y'"}) == ["sh", "-c", "x y"]
    assert ansi.coloured(b"a\x1b[31mred\x1b[2J\x1b[>4;2m\x08") == "a\x1b[31mred\\x1b[2J\\x1b[>4;2m\\x08\x1b[m"


@pytest.mark.parametrize("keys", [("4",), ("3", "enter", "s")], ids=["merged", "one stream"])
def test_the_keys_of_a_log_in_a_replay(keys: tuple[str, ...], tmp_path: Path) -> None:
    recording = load(recordings.write(tmp_path / "job.rec"))
    player = Player(recording, recording.end_ns, paused=True)

    async def scenario() -> None:
        app = ReplayApp(player)
        async with running_app(app, (100, 30)) as pilot:
            await press(app, pilot, *keys)
            log = log_of(app)
            row = log.feed.row(log.feed.count - 1) if log.feed is not None else None
            assert row is not None
            await answer(app, pilot, "@", values.clock_ns(row.t_ns))
            await until(app, pilot, lambda: log.pointer == row.key)
            await press(app, pilot, "m", "G", "'")
            assert log.pointer == row.key
            assert "arrived 20" in await press(app, pilot, "enter")
            await press(app, pilot, "escape", "S", "enter")
            (path,) = tmp_path.glob("*.log")
            assert ansi.plain(row.raw) in path.read_text()
            assert "cannot run a pager" in await press(app, pilot, "o")

    asyncio.run(scenario())
