"""What commands write: a terminal acts on nothing that a node, a server or a file has put into it."""

from __future__ import annotations

import io
import json
import logging
import random
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from remote_agent.engine.launchers import inside_torchrun
from remote_agent.text.controls import escape_all_but_colours, escape_controls, json_text
from remote_agent.wire import Problem
from supervisor import handlers
from supervisor.cli import entry, main
from supervisor.cli.output import Writer, write_json, write_ranks, write_table
from supervisor.cli.report import put
from supervisor.cli.whole_lines import WholeLines, prefixed
from supervisor.errors import HostError, HostFailure, LaunchFailed, RequestFailed
from supervisor.logs.fold import Folder
from supervisor.logs.reader import Chunk
from supervisor.logs.rows import LogLine
from supervisor.nccl import Fabric
from supervisor.preflight import probe
from supervisor.report import report
from supervisor.standard_streams import LinesForTerminal, safe_streams
from supervisor.wording.log_lines import line_of, lines_of
from tests.fast.test_fabric import facts
from tests.hostile import ACTED_ON, HOSTILE, Screen, check_harmless, hostile_session, with_hostile_texts
from tests.screens import recorded


def terminal(monkeypatch: pytest.MonkeyPatch) -> Screen:
    """A terminal as stdout and stderr; not in a fixture, after which pytest puts its own streams there."""
    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm-256color")
    return screen


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain\ttext\n", "plain\ttext\n"), ("\x1b]0;x\x07", "\\x1b]0;x\\x07"), ("a\rb\x7f", "a\\rb\\x7f"),
        ("\x9b2J", "\\x9b2J"), ("\u202egnp\u2069", "\\u202egnp\\u2069"), ("\udc9b", "\\udc9b"),
        ("\U000e0041", "\\U000e0041"), ("漢字 é 👩\u200d💻 \xa0", "漢字 é 👩\u200d💻 \xa0"),
    ],
)  # fmt: skip
def test_controls_become_escapes_and_nothing_else_changes(text: str, shown: str) -> None:
    assert escape_controls(text) == escape_controls(shown) == shown


@pytest.mark.parametrize("code", ["\x1b[31m", "\x1b[1;38;5;208m", "\x1b[38:2::1:2:3m", "\x1b[m"])
def test_colours_are_let_through_where_they_are_expected(code: str) -> None:
    assert escape_all_but_colours(f"{code}x\x1b[0m") == f"{code}x\x1b[0m"


@pytest.mark.parametrize(
    "code", ["\x1b[2J", "\x1b[>4;2m", "\x1b[?25l", "\x1b[A", "\x1b[1", "\x1b[1\nm", "\x1bc", "\x1b"]
)
def test_no_other_code_is(code: str) -> None:
    assert "\x1b" not in escape_all_but_colours(code)


def test_json_stays_json() -> None:
    document = {"a": [HOSTILE, "\U000e0041", "é"], HOSTILE: None}
    text = json_text(document)
    check_harmless(text)
    assert json.loads(text) == document
    assert "é" in text


def _raise(error: BaseException) -> Any:
    raise error


REASON = f"n1: connect: owned {HOSTILE}"


@pytest.mark.parametrize(
    "run",
    [
        lambda: print(REASON),
        lambda: sys.stderr.write(REASON),
        lambda: sys.stdout.writelines([REASON]),
        lambda: logging.StreamHandler().emit(logging.makeLogRecord({"msg": REASON})),
        lambda: write_json({"reason": REASON}),
        lambda: _raise(RequestFailed(REASON, HOSTILE)),
        lambda: _raise(LaunchFailed("too few", (HostFailure("n1", "auth", REASON, HOSTILE),))),
        lambda: _raise(ValueError(REASON)),
    ],
)
def test_whatever_a_command_writes(monkeypatch: pytest.MonkeyPatch, run: Callable[[], Any]) -> None:
    screen = terminal(monkeypatch)
    monkeypatch.setattr(entry, "run_verb", lambda verb, argv: run() and 0)
    main(["status"])
    check_harmless(screen.text)
    assert sys.stdout is screen, "the stream is as it was before"


def test_no_text_of_a_node_looks_like_a_line_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    entry.say(str(LaunchFailed("x\nsupervisor: y", (HostFailure("n1", "auth", "a\nn2: ready"),), "do z")))
    assert capsys.readouterr().err == "supervisor: n1: auth: a / n2: ready\n  x\n  supervisor: y\n  hint: do z\n"
    for error in (HostError("n1", "connect", "a\n  hint: do y", "z\nb"), RequestFailed("a\n\n  hint: do y", "z\nb")):
        entry.say(str(error))
        assert capsys.readouterr().err.endswith("a / hint: do y\n  hint: z / b\n")
    reply: Any = {"ranks": {"0": {"message": "a\nrank 1: done", "accepted": True}}}
    write_ranks("j", "signal", reply, as_json=False)
    assert capsys.readouterr().out == "rank 0: a\\nrank 1: done\n"


def test_a_table_has_no_colours_but_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal(monkeypatch)
    with safe_streams():
        write_table([["NODE", "STATE"], ["n1\x1b[31m" + HOSTILE, "failed"]], rich=True)
    check_harmless(screen.text, colours=True)
    assert "\\x1b[31m" in "".join(screen.text.split())
    assert "\x1b[1;31mfailed" in screen.text


def test_a_usage_error_quotes_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal(monkeypatch)
    assert main(["status", f"--{HOSTILE}"]) == 2
    check_harmless(screen.text)


class HostileSession:
    """A job whose nodes put HOSTILE into every text of every document."""

    ended = True
    version = 1
    spared: frozenset[str] = frozenset()

    def __init__(self, *_args: object, **_options: object) -> None:
        source = recorded.load("failed_4x2")
        self.status = with_hostile_texts(source.status)
        self.events = with_hostile_texts(source.events)
        self.incidents = with_hostile_texts([{**one, "missing": MISSING} for one in source.incidents])

    async def __aenter__(self) -> HostileSession:
        return self

    async def __aexit__(self, *_error: object) -> None:
        pass

    async def ready(self) -> None:
        pass

    async def settle(self) -> list[Any]:
        return []

    def set_status(self, _status: object) -> None:
        pass

    async def wait_change(self, *_args: object) -> int:
        return 1

    async def call(self, op: str) -> dict[str, Any]:
        return self.status if op == "status" else {"incidents": self.incidents, "nccl": None}

    async def journal(self) -> Any:
        return self.events

    async def nccl(self, _status: object) -> Fabric:
        return Fabric()

    async def stacks(self, _ranks: object) -> dict[str, Any]:
        return {"stacks": {"0": HOSTILE}, "unreachable": {"1": HOSTILE}, "children": {}, "notes": {HOSTILE: HOSTILE}}


MISSING = {"collective": "ALLREDUCE", "ranks": [1], "waiting": [0], "step": 3, "stacks": {"1": "at x"}}


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("verb", ["status", "status --watch", "events", "events -f", "incidents"])
def test_documents_of_a_hostile_coordinator(monkeypatch: pytest.MonkeyPatch, verb: str, as_json: bool) -> None:
    screen = terminal(monkeypatch)
    monkeypatch.setattr("supervisor.session.Session", HostileSession)
    assert main([*verb.split(), *(["--json"] if as_json else [])]) == 0
    shown = screen.text.replace("\x1b[H\x1b[2J", "", 1) if verb == "status --watch" and not as_json else screen.text
    check_harmless(shown, colours=not as_json)
    if as_json:
        assert [json.loads(line) for line in shown.splitlines()]


def test_a_check_of_hostile_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal(monkeypatch)
    failure = HostFailure("n2", "connect", f"the server says: {HOSTILE}", HOSTILE)
    said = {"n1": facts(driver=f"owned {HOSTILE}", torch={"error": HOSTILE}, code=HOSTILE), "n3": facts()}
    result = probe.Preflight(facts=said, unreachable={"n2": failure}, addresses={"n1": "n1", "n3": "n3"})

    async def preflight(*_args: object, **_options: object) -> probe.Preflight:
        return result

    monkeypatch.setattr(probe, "preflight", preflight)
    assert main(["check"]) == 3, screen.text
    check_harmless(screen.text, colours=True)


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_diagnosis_of_hostile_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]) -> None:
    screen = terminal(monkeypatch)
    folder = tmp_path / f"logs{HOSTILE.replace('/', '')}"
    folder.mkdir()
    text = f'Traceback (most recent call last):\n  File "t.py", line 8, in f\nValueError: owned {HOSTILE}\n'
    (folder / "rank_0.log").write_text(text, errors="surrogateescape")
    assert main(["diagnose", str(folder), *options]) == 0
    check_harmless(screen.text, colours=not options)


@pytest.mark.parametrize("as_json", [False, True])
async def test_the_report_of_a_hostile_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_json: bool) -> None:
    screen, session = terminal(monkeypatch), hostile_session()
    document = await report(session, session.events, session.incidents, None, [])
    with safe_streams():
        for output in (None, tmp_path / "report"):
            put(document, Namespace(json=as_json, output=output))
    check_harmless(screen.text)
    check_harmless((tmp_path / "report").read_text())
    assert (tmp_path / "report").stat().st_mode & 0o777 == 0o600


def test_torchruns_plugin_says_only_text(capsys: pytest.CaptureFixture[str]) -> None:
    inside_torchrun.say(f"job{HOSTILE}", f"owned {HOSTILE}")
    check_harmless(capsys.readouterr().err)
    with pytest.raises(SystemExit) as ended:
        handlers._refuse(Problem("taken", f"owned {HOSTILE}", HOSTILE))
    check_harmless(str(ended.value))


# --- workers' lines


def test_a_workers_line_keeps_its_colours_on_a_terminal_and_nothing_else() -> None:
    feed = LinesForTerminal("utf-8").feed
    shown = feed(f"n1:0| \x1b[31mred{HOSTILE}\nn1:1| plain é漢\n".encode(errors="surrogateescape")).decode()
    check_harmless(shown, colours=True)
    first, second, _ = shown.split("\n")
    assert first.startswith("n1:0| \x1b[31mred")
    assert first.endswith("\x1b[m"), "its colours end with it"
    assert second == "n1:1| plain é漢"


def test_pieces_may_end_anywhere() -> None:
    text = f"n1:0| a\x1b[1;31mé漢\x1b[0m{HOSTILE}\n".encode(errors="surrogateescape") * 3
    whole = LinesForTerminal("utf-8").feed(text)
    for seed in range(50):
        random.seed(seed)
        cuts = sorted(random.sample(range(len(text)), 9))
        feed = LinesForTerminal("utf-8").feed
        assert b"".join(feed(text[a:b]) for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)) == whole


def test_a_terminal_without_utf8_gets_no_c1_from_it() -> None:
    # The second byte of this letter in UTF-8 is CSI.
    assert LinesForTerminal("latin-1").feed("ě é\n".encode()) == b"\\u011b \xe9\n"


def _write(file: Any, data: bytes, *, raw: bool = False) -> bytes:
    writer = Writer(file, raw=raw)
    writer.put(data)
    assert writer.close(10.0)
    return bytes(file.getvalue())


def test_pipes_and_raw_stay_the_bytes() -> None:
    data = HOSTILE.encode(errors="surrogateescape") + b"\xff\r\n"
    assert _write(io.BytesIO(), data) == data
    assert _write(Screen().buffer, data, raw=True) == data
    assert not ACTED_ON.search(_write(Screen().buffer, data).decode())


def test_a_row_is_one_line_whatever_a_node_says() -> None:
    row = LogLine("n1", 0, 3, "stdout", 0, 0, 5, None, b"a\nn9:9| b")
    assert line_of(row) == b"n1:3| a\\nn9:9| b\n"
    folder: Folder[LogLine] = Folder()
    folds = [*folder.feed([row, row._replace(rank=4)]), *folder.rest()]
    assert lines_of(folds) == b"[3-4]| a\\nn9:9| b\n"


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_of_a_line_that_overwrites_itself_a_terminal_shows_the_last_state(size: int) -> None:
    text = b"\r 5%|#\r10%|##\r15%|###\r\nn9:9| x\ry\nwindows\r\n" + b"\rbar" * 9
    lines, pieces = WholeLines(overwrites=True), []
    for at in range(0, len(text), size):
        pieces += lines.feed(Chunk("n1", 0, 3, "stdout", at, 0, text[at : at + size]))
    pieces += lines.rest()
    shown = b"".join(prefixed(*piece) for piece in pieces if isinstance(piece, tuple))
    assert shown == b"n1:3| 15%|###\nn1:3| y\nn1:3| windows\nn1:3| bar\n"
