"""The launch, host by host: what is done and what it took, what runs and since when, what it waits for."""

from __future__ import annotations

import dataclasses

from supervisor.link.view import HostView
from supervisor.tui.looks import Glyphs
from supervisor.tui.model import Snapshot, take
from supervisor.tui.rows.spans import Row, text_of
from supervisor.tui.screens.launch import is_up, launch_rows
from supervisor.tui.widgets.bars import alert_rows
from tests.screens import recorded

GLYPHS, ASCII = Glyphs(), Glyphs(ascii=True)
NOW = 100.0


def launching(*hosts: HostView) -> Snapshot:
    session = recorded.RecordedSession()
    session.hosts = {host.name: host for host in hosts}
    return dataclasses.replace(take(session), bringing_up=True)


def host(name: str, state: str, began: dict[str, float], text: str = "", error: str | None = None) -> HostView:
    return HostView(name, state, list(began)[-1], text, error, began=began)


IMPORTS = host(
    "n1", "up", {"connect": 88.0, "auth": 88.2, "sync": 88.5, "start": 90.0, "engine": 92.0}, "looking for torch"
)
READY = host("n2", "up", {"connect": 88.0, "sync": 88.4, "start": 88.9, "engine": 90.0, "ready": 99.0}, "torch 2.13.0")
SYNCS = host("n3", "connecting", {"connect": 88.0, "sync": 97.0}, "412 of 1,204 files, 3.1 MB of 9.8 MB")
REFUSED = host("n4", "failed", {"resolve": 88.0, "connect": 88.1}, error="connection refused")


def rows(snapshot: Snapshot, width: int, glyphs: Glyphs = GLYPHS) -> list[Row]:
    return [row for _, row in launch_rows(snapshot, width, glyphs, NOW)]


def test_each_host_shows_its_stages_with_what_they_took() -> None:
    imports, ready, syncs, refused = map(text_of, rows(launching(IMPORTS, READY, SYNCS, REFUSED), 150))
    assert "✓ connect 0.5 s" in imports
    assert "✓ sync 1.5 s" in imports
    assert "✓ agent 2.0 s" in imports
    assert "torch 8.0 s" in imports
    assert imports.endswith("looking for torch")
    assert ready.startswith(" ✓ n2")
    assert "✓ torch 9.0 s" in ready
    assert "sync 3.0 s" in syncs
    assert "· agent" in syncs
    assert syncs.endswith("3.1 MB of 9.8 MB")
    # What went wrong, and what to do, has the room of the stages.
    assert refused == " X n4    connect   connection refused"


def test_nothing_is_green_before_it_is_done() -> None:
    snapshot = launching(IMPORTS, READY)
    for width in (60, 150):
        imports, ready = rows(snapshot, width)
        assert (imports[0][1], ready[0][1]) == ("start", "ok")
    assert [is_up(node, snapshot) for node in snapshot.nodes] == [False, True]
    # Attached to a job, a link that is up is all there is.
    attached = dataclasses.replace(snapshot, bringing_up=False)
    assert [is_up(node, attached) for node in attached.nodes] == [True, True]


def test_a_narrow_screen_has_the_present_step_and_its_seconds() -> None:
    imports, ready = map(text_of, rows(launching(IMPORTS, READY), 79))
    assert imports.endswith("engine    looking for torch  8 s")
    assert ready.endswith("ready     torch 2.13.0")
    assert all(text_of(row).isascii() for row in rows(launching(IMPORTS, READY, SYNCS), 150, ASCII))


def test_the_second_row_says_what_a_launch_waits_for() -> None:
    def second(*hosts: HostView) -> str:
        return text_of(alert_rows(launching(*hosts), 0.1, 120, GLYPHS)[1]).strip()

    assert second(IMPORTS, READY) == "looking for torch on n1; ready to form a group on n2"
    assert second(IMPORTS, SYNCS) == "connecting to the hosts: 1 of 2 up"


def test_a_step_begins_once_and_keeps_its_time_while_its_text_changes() -> None:
    view = HostView("n1")
    view.enter("sync", "comparing the work tree")
    began = view.began["sync"]
    view.enter("sync", "3.1 MB of 9.8 MB")
    assert (view.began, view.text) == ({"sync": began}, "3.1 MB of 9.8 MB")
