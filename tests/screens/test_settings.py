"""What the user sets: themes of his own, other keys, and what is kept of a job from one look to the next."""

from __future__ import annotations

import asyncio
import base64
import json
import os
from pathlib import Path

import pytest
from rich.style import Style

from supervisor.cli.options import read_theme
from supervisor.cli.up import parse_up
from supervisor.errors import UsageError
from supervisor.logs.selection import RecordFilter
from supervisor.paths import themes_dir
from supervisor.tui import keys, preferences
from supervisor.tui import themes as theming
from tests.screens import recorded
from tests.screens.screens import playing, press, running, settle, text_of


@pytest.fixture
def themes(tmp_path: Path) -> Path:
    """The folder of the user's themes."""
    folder = tmp_path / "supervisor" / "themes"
    folder.mkdir(parents=True)
    return folder


def test_an_unknown_theme_is_refused_at_once() -> None:
    with pytest.raises(UsageError, match="did you mean 'deutan'.*default-dark, default-light") as refused:
        parse_up(["--theme", "detuan", "train.py"])
    assert refused.value.exit_status == 2
    assert read_theme("mono") == "mono"


def test_our_own_themes_stand_the_trial_of_the_users() -> None:
    loaded = [theming.load(path) for path in sorted(themes_dir().glob("*.toml"))]
    assert any(skin.theme.variables for skin in loaded)
    assert {skin.name for skin in loaded} == set(theming.load_all()[0])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("primary = '#112233'\nprimry = '#112233'\n", "mine.toml:2: unknown key 'primry'; did you mean 'primary'?"),
        ("primary = '#zzz'\n", "mine.toml:1: primary"),
        ("primary = '#112233'\n[roles]\nok = 'bold'\nbad = 'bold #nope'\n", "mine.toml:4: role bad"),
        ("primary = '#112233'\n[variables]\nborder = 'no colour'\n", "mine.toml:3: "),
        ("primary = '#112233'\nprimary = \n", "mine.toml:2: "),
        ("primary = '#112233'\n[roles]\nbat = 'bold'\n", "mine.toml:3: unknown role 'bat'; did you mean"),
        ("primary = '#112233'\ndark = 'yes'\n", "mine.toml:2: dark"),
        ("name = 'mine'\n", "mine.toml: "),
    ],
)
def test_what_is_wrong_with_a_theme_names_file_and_line(text: str, said: str, themes: Path) -> None:
    (themes / "mine.toml").write_text(text)
    _, notices = theming.load_all()
    assert len(notices) == 1
    assert said in notices[0]
    with pytest.raises(theming.ThemeError, match=r"no theme named 'mine'.*mine.toml"):
        theming.find("mine")


@pytest.mark.parametrize(
    ("css", "said"),
    [
        ("#alert {\n  colour: red;\n}", "default-dark.tcss:2: "),
        ("\n#alert { color: $nosuch; }", "default-dark.tcss:2: "),
        ("#alert { color: red;\n", "default-dark.tcss:"),
    ],
)
def test_a_bad_style_sheet_leaves_the_theme_without_it(css: str, said: str, themes: Path) -> None:
    (themes / "default-dark.tcss").write_text(css)
    skins, notices = theming.load_all()
    assert len(notices) == 1
    assert said in notices[0]
    assert skins["default-dark"].css == ""


async def test_themes_are_taken_while_the_screen_runs(themes: Path) -> None:
    async with running(recorded.load("running_2x2"), (120, 30)) as (app, pilot):
        (themes / "mine.toml").write_text("primary = '#112233'\nbackground = '#010203'\n")
        (themes / "mine.tcss").write_text("#alert { background: #040506; }")
        app.reread_themes()
        app.shell.set_theme("mine")
        await settle(app, pilot)
        assert app.screen.styles.background.hex == "#010203"
        assert app.screen.query_one("#alert").styles.background.hex == "#040506"
        (themes / "mine.toml").write_text("primary = '#112233'\nbackground = '#0a0b0c'\n")
        (themes / "mine.tcss").unlink()
        app.reread_themes()
        await settle(app, pilot)
        assert app.screen.styles.background.hex == "#0A0B0C"
        assert app.screen.query_one("#alert").styles.background.hex != "#040506"
        # A broken file is told, and what is shown stays.
        (themes / "mine.toml").write_text("primary = '#112233'\nbackground = '#0a0b0'\n")
        app.reread_themes()
        assert "mine.toml:2" in (await settle(app, pilot)).replace("\n", "").replace(" ", "")
        assert app.shell.palette.name == "mine"
        assert app.screen.styles.background.hex == "#0A0B0C"


def _config(tmp_path: Path, text: str) -> keys.Config:
    (tmp_path / "supervisor").mkdir(exist_ok=True)
    (tmp_path / "supervisor" / "config.toml").write_text(text)
    return keys.load_config()


def _keys(tmp_path: Path, text: str) -> dict[str, str]:
    return _config(tmp_path, text).keys


def test_a_selected_row_in_reverse_has_one_background() -> None:
    skins, _ = theming.load_all()
    row = ((" ok ", "ok"), (" dim ", "dim"), (" bad ", "bad"), (" 3 hits ", "hit"))
    for name, skin in skins.items():
        styles = [segment.style for segment in skin.palette.segments(row, 60, Style(), "cursor")]
        plain = [style for style in styles if style is not None and style.reverse and not style.bgcolor]
        assert len({style.color for style in plain}) <= 1, name
    # What has a background of its own keeps it.
    hit = skins["ansi"].palette.segments(row, 60, Style(), "cursor")[3].style
    assert hit is not None
    assert hit.bgcolor is not None


def test_how_the_user_is_called_is_a_setting(tmp_path: Path) -> None:
    assert keys.load_config().notice == "bell"
    assert _keys(tmp_path, "notice = 'desktop'\n[keys]\nact = 'X'\n") == {"act": "X"}
    assert keys.load_config().notice == "desktop"
    with pytest.raises(UsageError, match=r"config.toml:1: notice cannot be 'mail'"):
        _keys(tmp_path, "notice = 'mail'\n")


async def test_keys_are_changed_where_they_act_and_where_they_are_shown(tmp_path: Path) -> None:
    text = "[keys]\nact = 'X,f4'\n'log.find' = ['ctrl+o', '?']\nhelp = 'f1'\ntheme='f2'\n"
    config = _config(tmp_path, text)
    async with running(recorded.load("running_2x2"), (120, 30), config=config) as (app, pilot):
        assert "X actions" in text_of(app)
        assert "actions on" not in await press(app, pilot, "x")
        assert "actions on" in await press(app, pilot, "X")
        await press(app, pilot, "escape", "4")
        assert app.screen.query_one("#find").display is False
        await press(app, pilot, "?")
        assert app.screen.query_one("#find").display is True


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[keys]\n'log.folow' = 'X'\n", "config.toml:2: no key has the id 'log.folow'"),
        (
            "[keys]\nact = 'X'\n'log.follow' = 'T'\n",
            "config.toml:3: log.follow: 'T' is theme's key on the screen 'logs'",
        ),
        ("[keys]\nact = 'j'\n", "config.toml:2: act: 'j' is move's key"),
        ("[keys]\nact = 'ctrl+nosuch'\n", "config.toml:2: there is no key 'ctrl+nosuch'"),
        ("[keys]\nact = 3\n", "config.toml:2: act must be a key"),
        ("[keys]\nmove = 'J'\n", "config.toml:2: move is a key of every list"),
        ("[kyes]\n", "config.toml:1: unknown key 'kyes'"),
        ("[keys\n", "config.toml: "),
    ],
)
def test_a_bad_key_is_one_clear_error(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as refused:
        _keys(tmp_path, text)
    assert said in refused.value.message


async def test_only_problems_and_a_stopped_screen() -> None:
    async with playing("restarting_4x2", (120, 30)) as (app, pilot, session):
        text = await press(app, pilot, "2", "!")
        assert "problems only" in text
        assert ("n4" in text, "n1  " in text) == (True, False)
        assert "no problem; ! shows all" in await press(app, pilot, "3")
        assert "PAUSED" in await press(app, pilot, "!", "p")
        session.touch(status={**session.status, "generation": 9})
        await settle(app, pilot)
        assert "generation 9" not in await press(app, pilot, "2")
        assert "generation 9" in await press(app, pilot, "p")
        assert "PAUSED" not in text_of(app)


def test_a_row_and_a_line_go_to_the_clipboard(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    written: list[str] = []
    kept = tmp_path / "state" / "supervisor" / "copied.txt"

    async def scenario() -> None:
        async with running(recorded.load("running_2x2"), (120, 30)) as (app, pilot):
            assert app._driver is not None
            monkeypatch.setattr(app._driver, "write", written.append)
            assert "copied" in await press(app, pilot, "3", "y")
            assert kept.read_text().split()[:3] == ["■", "running", "0"]
            await press(app, pilot, "4", "y")

    asyncio.run(scenario())
    sent = [
        base64.b64decode(text.partition("52;c;")[2].partition("\a")[0]).decode() for text in written if "52;c" in text
    ]
    assert sent[0].split()[:3] == ["■", "running", "0"]
    assert sent[1] + "\n" == kept.read_text()


def test_what_was_set_for_a_job_is_there_at_the_next_look() -> None:
    async def look(job: str, *keys: str) -> tuple[str, str]:
        session = recorded.load("running_2x2")
        session.job = job
        async with running(session, (120, 30)) as (app, pilot):
            text = await press(app, pilot, *keys)
            return app.shell.palette.name, text

    theme, _ = asyncio.run(look("one", "T", "4", "z", "t", *"&lossy", "enter", "v"))
    again, text = asyncio.run(look("one", "4"))
    assert again == theme != theming.DEFAULT_THEME
    assert "folded" in text
    assert "+lossy  ≥warn" in text
    assert "+lossy" not in asyncio.run(look("one", "4", "\\"))[1]
    assert "+lossy" not in asyncio.run(look("one", "4"))[1]
    assert asyncio.run(look("two"))[0] == theming.DEFAULT_THEME


@pytest.mark.parametrize(
    "text",
    [
        "{", "[]", '{"theme": 3, "nodes": [1, "n1"], "ranks": ["x", true, 2]}', "x" * 300_000,
        '{"log_filter": {"include": [3, "a"], "exclude": 7, "level": []}}', '{"log_filter": [1]}',
    ],
)  # fmt: skip
def test_a_broken_memory_is_as_if_never_written(text: str) -> None:
    preferences.keep("job-1", preferences.Preferences())
    path = next(Path(os.environ["XDG_STATE_HOME"]).rglob("job-1.json"))
    path.write_text(text)
    found = preferences.recall("job-1")
    assert (found.theme, found.log_time) == ("", True)
    assert found.nodes in ([], ["n1"])
    assert found.ranks in ([], [2])
    assert found.log_filter in (RecordFilter(), RecordFilter(("a",)))


def test_memory_is_bounded_and_stays_in_its_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preferences, "JOBS_KEPT", 3)
    folder = Path(os.environ["XDG_STATE_HOME"]) / "supervisor" / "jobs"
    for number in range(6):
        preferences.keep(f"job-{number}", preferences.Preferences(theme=str(number)))
        os.utime(folder / f"job-{number}.json", (number, number))
    preferences.keep("../../out", preferences.Preferences())
    left = sorted(path.name for path in folder.iterdir())
    assert left == ["job-3.json", "job-4.json", "job-5.json"]
    assert json.loads((folder / "job-5.json").read_text())["theme"] == "5"
