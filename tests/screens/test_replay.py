"""A recording on the screen: the same screens, the time in the header, keys for the time."""

from __future__ import annotations

from pathlib import Path

import pytest

from supervisor.recording.player import Player
from supervisor.recording.reading import load
from supervisor.tui import keys
from supervisor.tui.replay import ReplayApp
from supervisor.tui.screens.map import Dashboard
from tests.hostile import check_harmless, hostile_session
from tests.screens import recordings
from tests.screens.logs import log_of
from tests.screens.screens import compare, named, press, running_app, text_of, until


@pytest.fixture
def player(tmp_path: Path) -> Player:
    recording = load(recordings.write(tmp_path / "job.rec"))
    return Player(recording, recording.begin_ns + 20_000_000_000, paused=True)


@pytest.mark.parametrize("size", [(60, 16), (120, 30)], ids=str)
async def test_header_and_keys_of_a_replay(player: Player, size: tuple[int, int]) -> None:
    async with running_app(ReplayApp(player), size) as pilot:
        app = pilot.app
        assert isinstance(app, ReplayApp)
        compare("replay", {named(size): await press(app, pilot, "right_parenthesis")})


async def test_keys_move_the_time_on_every_screen(player: Player) -> None:
    app = ReplayApp(player)
    async with running_app(app, (100, 30)) as pilot:
        begun = await press(app, pilot, "6")
        assert "REPLAY 10:03:40 x1 paused" in begun
        last = begun
        while player.standing != "end":
            last = await press(app, pilot, ".")
        assert app.current_mode == "incident", "as in a live session that fails"
        assert "REPLAY 10:03:52 x1 end" in last
        assert "FIRST FAILURE" in last
        for key in "123456":
            await press(app, pilot, key)
        for _ in range(5):
            await press(app, pilot, ",")
        assert "REPLAY 10:03:24 x1 paused" in await press(app, pilot, "1")
        assert "RUNNING" in text_of(app)
        assert "FIRST FAILURE" not in text_of(app)
        app.screen.query_one(Dashboard).post_message(Dashboard.TimeClicked(player.recording.begin_ns / 1e9 + 30))
        await until(app, pilot, lambda: "REPLAY 10:03:50" in text_of(app))
        app.go_to_time(player.recording.begin_ns / 1e9 + 4)
        assert "no failure so far" in await press(app, pilot, "5")
        assert "job_failed" not in await press(app, pilot, "6")
        await press(app, pilot, "x", "S")
        assert "read-only" in text_of(app)
        await press(app, pilot, "escape", "p")
        assert player.standing == ""
        await press(app, pilot, "q")
    assert app.return_code == 0


async def test_a_jump_back_takes_later_lines_away(player: Player) -> None:
    app = ReplayApp(player)

    def newest_ns() -> int:
        feed = log_of(app).feed
        assert feed is not None
        row = feed.row(feed.count - 1)
        assert row is not None
        return row.t_ns

    async with running_app(app, (100, 30)) as pilot:
        player.seek(player.recording.end_ns)
        await press(app, pilot, "5", "4")
        before_ns = newest_ns()
        await press(app, pilot, ",", ",", ",", ",", ",")
        assert newest_ns() <= player.now_ns < before_ns
        top = (await press(app, pilot, "g")).splitlines()[4]
        assert (await press(app, pilot, ".", ",")).splitlines()[4] == top


def test_keys_of_a_replay_are_free_elsewhere() -> None:
    # Where a screen itself can be paused, the application decides what that means.
    taken = {one for key in keys.KEYS if key.id != "pause" for one in key.keys.split(",")}
    assert not taken & {one for key in keys.REPLAY for one in key.keys.split(",")}


async def test_names_and_texts_of_a_hostile_recording_are_text(tmp_path: Path) -> None:
    recording = load(recordings.write(tmp_path / "job.rec", session=hostile_session()))
    player = Player(recording, recording.end_ns, paused=True)
    app = ReplayApp(player)
    async with running_app(app, (120, 40)) as pilot:
        for key in "1234567":
            check_harmless(await press(app, pilot, key))
