"""What is true now, as rows of text: the condition of the job, a launch, a hang while it lasts and after."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from remote_agent.diagnose.incidents import incidents_after
from supervisor.link.view import HostView
from supervisor.tui import model, times
from supervisor.tui.looks import Glyphs
from supervisor.tui.model import JobView, take
from supervisor.tui.rows.incident import hang_rows
from supervisor.tui.rows.spans import Row, row_width, text_of
from supervisor.tui.rows.tables import legend
from supervisor.tui.screens.launch import is_up, launch_rows
from supervisor.tui.terminal import notice_sequence, title_sequence
from supervisor.tui.widgets.bars import alert_rows
from tests.screens import recorded
from tests.screens.conftest import NOW
from tests.screens.screens import press, running
from tests.screens.screens import text_of as screen_text

HANG: Any = {
    "id": 1, "generation": 0, "time": "2026-11-20T10:45:08.000Z", "category": "hang_no_output", "scope": "one_rank",
    "culprit_ranks": [3], "culprit_node": "n2", "confidence": "established",
    "summary": "rank 3 (n2): stopped by a signal (SIGSTOP, SIGTSTP or a debugger); ranks 0-2 waiting in all_reduce 44",
    "evidence": [], "traceback": None, "exit": {"code": None, "signal": None}, "hint": "kill -CONT resumes it",
    "victims": [],
    "missing": {"collective": "all_reduce", "seq": 44, "waiting": [0, 1, 2], "missing": [3], "stacks": {}},
    "ongoing": True, "times_out_at": "2026-11-20T11:14:47.000Z", "restarts_at": None,
    "state": "open", "ended_at": None, "over": None,
}  # fmt: skip
HEALED = {
    **HANG, "ongoing": False, "state": "healed", "ended_at": "2026-11-20T10:45:28.000Z",
    "over": "training resumed after 20 s",
}  # fmt: skip


def job(condition: str, incident: Any | None = None, **more: Any) -> recorded.RecordedSession:
    session = recorded.load("running_2x2")
    session.status.update(condition=condition, incident=incident, **more)
    session.incidents = [incident] if incident else []
    return session


def rows(session: recorded.RecordedSession, width: int = 160, **options: Any) -> list[str]:
    return [text_of(row) for row in alert_rows(model.take(session), 0.2, width, Glyphs(), **options)]


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let the clock of the screens go forward, from 32 s after the hang began."""

    def pass_time(seconds: float) -> None:
        monkeypatch.setattr(times, "now", lambda: NOW + 20 + seconds)

    return pass_time


@pytest.mark.parametrize(
    ("condition", "state", "word"),
    [
        ("launching", "starting", "~ LAUNCHING"),
        ("importing", "running", "~ IMPORTING"),
        ("running", "running", "● RUNNING"),
        ("degraded", "running", "! DEGRADED"),
        ("hung", "running", "? HUNG"),
        ("restarting", "restarting", "~ RESTARTING"),
        ("stopping", "restarting", "↓ STOPPING"),
        ("stopped", "stopped", "□ STOPPED"),
    ],
)
def test_the_first_row_has_the_condition(condition: str, state: str, word: str) -> None:
    first, _ = rows(job(condition, HANG if condition == "hung" else None, state=state))
    assert word in first


def test_a_desktop_notice_is_one_sequence_where_the_terminal_shows_it() -> None:
    args = ("supervisor llama", "HUNG: rank 3; waiting\x1b]0;x\a")
    sent = notice_sequence(*args, {})
    # What a rank has printed neither ends the sequence nor begins another one.
    assert sent.startswith("\x1b]9;supervisor llama: HUNG: rank 3; waiting")
    assert (sent.count("\x1b"), sent.count("\a")) == (1, 1)
    assert notice_sequence(*args, {"TERM": "linux"}) == notice_sequence(*args, {"TMUX": "1"}) == ""


async def test_the_terminal_has_the_condition_in_its_title_and_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    session = job("running")
    async with running(session) as (app, pilot):
        written: list[str] = []
        assert app._driver is not None
        monkeypatch.setattr(app._driver, "write", written.append)
        monkeypatch.setattr(app, "bell", lambda: written.append("bell"))
        for condition in ("restarting", "running", "hung", "hung", "running", "degraded"):
            session.status = {**session.status, "condition": condition}
            session.touch()
            app.tick()
            await pilot.pause()
        assert [text for text in written if text.startswith("\x1b]2;")] == [
            f"\x1b]2;{word} train-k3f9\a" for word in ("RESTARTING", "RUNNING", "HUNG", "RUNNING", "DEGRADED")
        ]
        # Hung, running again, degraded; an operator's restart calls nobody.
        assert written.count("bell") == 3
    assert written[-1] == "\x1b[23;2t", "the terminal gets its own title back"
    assert title_sequence("x", {"TERM": "linux"}) == ""


def test_after_the_end_no_age_stands_still() -> None:
    session = job("stopped", state="stopped")
    session.ended = True
    for rank in (rank for node in session.status["nodes"] for rank in node["ranks"]):
        rank.update(state="killed", signal="SIGKILL", last_output_age_s=5.4)
    job_view = model.take(session)
    assert {rank.output_age_s for rank in job_view.ranks} == {None}
    assert text_of(legend(Glyphs(), job_view.ranks)) == "x killed"


def test_a_hang_counts_while_no_status_arrives(later: Any) -> None:
    session = job("hung", HANG)
    later(0)
    _, second = rows(session, 240)
    assert " ! HANG 32 s " in second
    assert "next: waiting for you; torch times out in 29 min 7 s (11:14)" in second
    later(70)
    _, second = rows(session, 240)
    assert " ! HANG 1 min 42 s " in second
    assert "in 27 min 57 s (11:14)" in second
    assert rows(session, 160)[1].endswith("next: waiting for you; torch times out in 27 min 57 s  [i] why ")
    assert rows(session, 80)[1].endswith(" next: waiting for you  [i] why ")
    _, frozen = rows(session, 240, paused_s=70.0)
    assert " ! HANG 32 s " in frozen, "a frozen display stays at its time"


def test_a_hang_restarts_at_a_time(later: Any) -> None:
    later(0)
    _, second = rows(job("hung", {**HANG, "restarts_at": "2026-11-20T10:55:40.000Z"}), 240)
    assert "next: the group restarts in 10 min (10:55) if the hang lasts" in second


def test_after_a_hang_its_culprit_stays_in_the_header(later: Any) -> None:
    later(0)
    first, second = rows(job("running", HEALED), 80)
    assert "RUNNING" in first
    assert second.startswith(" healed 12 s ago: rank 3 on n2, hang   ")
    assert second.endswith("[i] why ")
    assert "HANG" not in second
    # The ranks of a failed job are being stopped: nothing has healed.
    over = {**HEALED, "state": "over", "over": "job failed"}
    assert rows(job("stopping", over, plan="stopping generation 0 (failure); waiting for n1"))[1].startswith(" ! HANG ")
    killed = {**HEALED, "category": "other", "exit": {"code": None, "signal": "SIGKILL"}}
    assert rows(job("running", killed))[1].startswith(" healed 12 s ago: rank 3 on n2, killed by SIGKILL   ")


def test_an_incident_of_a_group_that_was_replaced_is_no_news() -> None:
    session = recorded.load("restarting_4x2")
    assert "FIRST FAILURE" in rows(session)[1]
    generation = session.incidents[-1]["generation"] + 1
    healed: Any = {**session.events[-1], "type": "incident_healed", "generation": generation}
    session.incidents = incidents_after(session.incidents, healed)
    session.status.update(generation=generation, incident=session.incidents[-1])
    # The next group is being stopped, and why is not known yet; then a spare has come in.
    for more in ({}, {"state": "running", "condition": "running", "plan": None, "restarts": 0}):
        session.status.update(more)
        shown = rows(session)[1]
        assert "FIRST FAILURE" not in shown
        assert "ago: rank 3 on n2, CUDA out" in shown


async def test_the_page_of_a_healed_hang_is_in_the_past_without_advice(later: Any) -> None:
    later(0)
    async with running(job("hung", HANG), (100, 40)) as (app, pilot):
        text = await press(app, pilot, "5")
        assert "kill -CONT" in text
        assert "hung for 32 s" in text
        assert "waiting for you; torch times out in 29 min 7 s (11:14)" in text
        assert "all_reduce 44: 3 ranks are waiting" in text
        assert "n1 ■■  n2 ■?" in text
        assert "rank 3 never reached it" in text
        later(2)
        app.tick()
        await pilot.pause()
        assert "hung for 34 s" in screen_text(app), "it counts although no new status has arrived"
        session: Any = app.shell.source
        session.status.update(condition="running", incident=HEALED)
        session.touch(incidents=[HEALED])
        text = await press(app, pilot, "g")
        assert "kill -CONT" not in text
        assert "healed 14 s ago: training resumed after 20 s" in text
        assert "3 ranks were waiting" in text
        assert "waiting for you" not in text


def test_what_a_start_waits_for_leaves_room_for_the_verdict() -> None:
    failed = {**HANG, "ongoing": False, "category": "killed", "summary": "rank 3 (n2): killed by SIGKILL from outside"}
    for width in (60, 80, 160):
        _, second = rows(job("importing", failed), width, waits="imports: 8 s")
        assert second.startswith(" imports: 8 s ")
        assert second.endswith("[i] why ")
        assert len(second) == width


SOURCE = {
    "first": 18,
    "text": "    def next_batch(self, step):\n        if step == 40:\n            self.ready.wait()\n\ndef main():",
}


def missing(waiting: list[int], absent: list[int], **more: Any) -> Any:
    return {"collective": "all_reduce", "seq": 81, "waiting": waiting, "missing": absent, "stacks": {}, **more}


def drawn(document: Any, nodes: int, per_node: int, width: int = 118, **options: Any) -> list[str]:
    group = take(recorded.many(nodes, per_node)).nodes
    rows = hang_rows(document, group, width, Glyphs(options.pop("ascii_only", False)), over=False)
    assert max(map(row_width, rows)) <= width
    return [text_of(row).rstrip() for row in rows]


def test_the_source_of_the_missing_rank_stands_beside_the_ranks() -> None:
    place = "train.py:20 in next_batch"
    document = missing([0, 1, 2], [3], stacks={"3": place}, sources={place: SOURCE})
    assert drawn(document, 2, 2) == [
        "  all_reduce 81: 3 ranks are waiting    rank 3 at train.py:20 in next_batch",
        "    n000 ■■  n001 ■?                      18  def next_batch(self, step):",
        "  ? rank 3 never reached it               19      if step == 40:",
        "                                        ▸ 20          self.ready.wait()",
    ]
    assert drawn(document, 2, 2, 78, ascii_only=True)[1:5] == [
        "    n000 ##  n001 #?",
        "  ? rank 3 never reached it",
        "  rank 3 at train.py:20 in next_batch",
        "    18  def next_batch(self, step):",
    ]


def test_ranks_in_different_collectives_have_a_strip_each() -> None:
    calls = [
        {"collective": "all_reduce", "seq": 81, "group": "0", "ranks": [0, 1, 2]},
        {"collective": "broadcast", "seq": None, "group": "5", "ranks": [3]},
    ]
    assert drawn(missing([0, 1, 2], [3], calls=calls, stacks={"3": "train.py:9 in load"}), 2, 2) == [
        "  all_reduce 81: 3 ranks are waiting",
        "    n000 ■■  n001 ■?",
        "  broadcast of group 5: 1 rank is waiting",
        "    n000 ··  n001 ·■",
        "    rank 3 at train.py:9 in load",
    ]


@pytest.mark.parametrize(
    ("absent", "shown"),
    [([300], ["    n037 ■■■■?■■■", "    ■ and 504 ranks of other nodes"]), ([], ["    ■ all 512 ranks"])],
)
def test_nodes_of_a_large_group_that_wait_alike_share_a_line(absent: list[int], shown: list[str]) -> None:
    waiting = [rank for rank in range(512) if rank not in absent]
    assert drawn(missing(waiting, absent), 64, 8)[1 : 1 + len(shown)] == shown


def test_a_group_that_is_over_shows_its_ranks_without_nodes() -> None:
    assert drawn(missing(list(range(9)), [9]), 1, 2)[1] == "    r0 ■■■■■■■■  r8 ■?"


GLYPHS = Glyphs()
SINCE = 100.0


def launching(*hosts: HostView) -> JobView:
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


def launch_lines(job_view: JobView, width: int, glyphs: Glyphs = GLYPHS) -> list[Row]:
    return [row for _, row in launch_rows(job_view, width, glyphs, SINCE)]


def test_each_host_shows_its_stages_with_what_they_took() -> None:
    imports, ready, syncs, refused = map(text_of, launch_lines(launching(IMPORTS, READY, SYNCS, REFUSED), 150))
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
    job_view = launching(IMPORTS, READY)
    for width in (60, 150):
        imports, ready = launch_lines(job_view, width)
        assert (imports[0][1], ready[0][1]) == ("start", "ok")
    assert [is_up(node, job_view) for node in job_view.nodes] == [False, True]
    # Attached to a job, a link that is up is all there is.
    attached = dataclasses.replace(job_view, bringing_up=False)
    assert [is_up(node, attached) for node in attached.nodes] == [True, True]


def test_a_narrow_screen_has_the_present_step_and_its_seconds() -> None:
    imports, ready = map(text_of, launch_lines(launching(IMPORTS, READY), 79))
    assert imports.endswith("engine    looking for torch  8 s")
    assert ready.endswith("ready     torch 2.13.0")
    assert all(text_of(row).isascii() for row in launch_lines(launching(IMPORTS, READY, SYNCS), 150, Glyphs(True)))


def test_the_second_row_says_what_a_launch_waits_for() -> None:
    def second(*hosts: HostView) -> str:
        return text_of(alert_rows(launching(*hosts), 0.1, 120, Glyphs())[1]).strip()

    assert second(IMPORTS, READY) == "looking for torch on n1; ready to form a group on n2"
    assert second(IMPORTS, SYNCS) == "connecting to the hosts: 1 of 2 up"


def test_a_step_keeps_its_time_while_its_text_changes() -> None:
    view = HostView("n1")
    view.enter("sync", "comparing the work tree")
    began = view.began["sync"]
    view.enter("sync", "3.1 MB of 9.8 MB")
    assert (view.began, view.text) == ({"sync": began}, "3.1 MB of 9.8 MB")
