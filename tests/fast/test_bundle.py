"""Bundles: what is refused when one is opened, what is unpacked, and how much of a log is in one."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
import tracemalloc
import zipfile
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis.strategies import from_regex, lists

from remote_agent.wire import JOB_NAME, Answer
from supervisor import bundle
from supervisor.cli import main
from supervisor.cli.report import read_limit
from supervisor.errors import UsageError
from supervisor.report import lines, report
from tests import bundles
from tests.examples import examples
from tests.screens import recorded

REPORT = Path(__file__).parent.parent / "screens" / "snapshots" / "report.md"
HOST_FACTS: Any = {
    "name": "", "state": "up", "error": None,
    "hello": {"python": "3.11.7", "cpu_count": 8, "executable": "/opt/venv/bin/python", "version": "0.1.0"},
    "engine": {"torch": "2.7.0+cu128", "cuda": "12.8", "nccl": "2.26.2", "gpus": 2},
}  # fmt: skip
NCCL: Any = {"versions": ["2.26.2+cuda12.8"], "networks": ["Socket"], "nranks": 8, "warnings": []}


def test_sizes_of_logs() -> None:
    assert [read_limit(text) for text in ("all", "500k", "2M", "17")] == [None, 500_000, 2_000_000, 17]
    with pytest.raises(argparse.ArgumentTypeError, match="write all, or a size"):
        read_limit("much")


def test_files_are_where_the_job_had_them_with_their_times_and_holes(tmp_path: Path) -> None:
    log = "nodes/n1/generation_0/rank_0/stdout.log"
    path = bundles.write(tmp_path / "job.zip", {log: b"end\n"}, files={log: [2**21, 123_000_000_000]})
    about = bundle.unpack(path, tmp_path)
    info = (tmp_path / log).stat()
    assert (about["job"], info.st_size, info.st_mtime_ns) == ("job-t", 2**21 + 4, 123_000_000_000)
    assert info.st_blocks * 512 < 2**20
    assert (tmp_path / log).read_bytes()[-5:] == b"\0end\n"


@pytest.mark.parametrize(
    "name",
    ["../x", "/etc/x", "x", "nodes/n1/../../x", "nodes/n1/tls/key.pem", "nodes/n1/generation_0/../../agent.sock",
     "nodes/n1/generation_0/.hidden", "nodes/../spec.json", "nodes/n1/generation_0/rank_0/a\\b"],
)  # fmt: skip
def test_a_path_that_no_bundle_has_is_refused(name: str, tmp_path: Path) -> None:
    path = bundles.write(tmp_path / "job.zip", {**bundles.MEMBERS, name: b"x"})
    (tmp_path / "into").mkdir()
    with pytest.raises(UsageError, match="no bundle, or damaged"):
        bundle.unpack(path, tmp_path / "into")
    assert list((tmp_path / "into").iterdir()) == []


def test_what_is_no_bundle_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = bundles.write(tmp_path / "good.zip").read_bytes()
    middle = bytearray(good)
    middle[good.index(b"spec.json") + 9] ^= 0xFF
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as file:
        file.writestr("a", "b")
    cases = {
        b"": "this is no bundle, or damaged",
        b"step 1\n" * 100: "this is no bundle, or damaged",
        good[: len(good) // 2]: "this is no bundle, or damaged",
        bytes(middle): "cannot be unpacked",
        (tmp_path / "other.zip").read_bytes(): "this is no bundle",
        bundles.write(tmp_path / "a.zip", bundle=2).read_bytes(): "a newer version of supervisor made it",
        bundles.write(tmp_path / "b.zip", made_ns=None).read_bytes(): "this is no bundle, or damaged: made_ns",
        bundles.write(tmp_path / "c.zip", job="../x").read_bytes(): "this is no bundle, or damaged",
        bundles.write(tmp_path / "d.zip", files={}).read_bytes(): "this is no bundle, or damaged",
        bundles.write(tmp_path / "e.zip", {}).read_bytes(): "no host's files are in it",
    }
    broken = tmp_path / "broken.zip"
    for content, said in cases.items():
        broken.write_bytes(content)
        assert main(["status", str(broken)]) == 2
        assert capsys.readouterr().err.startswith(f"supervisor: {broken}: {said}"), said
    assert main(["status", str(tmp_path / "none.zip")]) == 2
    assert "No such file" in capsys.readouterr().err


def test_a_bundle_of_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "FREE_BYTES", 10_000)
    large = bundles.write(tmp_path / "large.zip", {"nodes/n1/spec.json": b" " * 50_000_000})
    tracemalloc.start()
    try:
        with pytest.raises(UsageError, match="more than any bundle of this size has"):
            bundle.unpack(large, tmp_path)
        _size, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16_000_000
    assert not (tmp_path / "nodes").exists()


@pytest.mark.parametrize("words", [("restart", "{}"), ("stop", "{}"), ("clean", "{}"), ("jobs", "{}"), ("check", "{}")])
def test_what_changes_hosts_takes_no_bundle(
    words: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = bundles.write(tmp_path / "job.zip")
    assert main([words[0], str(path)]) == 2
    assert "this command needs the hosts of the job, not a bundle" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["report", "--bundle", "job.tar"], "job.tar: the name of a bundle ends in .zip"),
        (["report", "--bundle", "there.zip"], "there.zip exists"),
        (["report", "--bundle", "job.zip", "--json"], "--bundle writes a file of its own"),
    ],
)
def test_what_cannot_be_written_is_said_first(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.zip").touch()
    assert main(words) == 2
    assert capsys.readouterr().err.startswith(f"supervisor: {said}")


class Sender:
    """A session with one host, which sends a log in pieces, and a last one only when it may."""

    def __init__(self, pieces: int, name: str = "n1") -> None:
        view = SimpleNamespace(name=name, state="up", error=None, hello=HOST_FACTS["hello"], engine={}, live=True)
        self.view, self.job, self.pieces, self.ended, self.is_over = view, "job-t", pieces, False, True
        self.inventory, self.hosts, self.links = SimpleNamespace(path=None, made_s=None), {name: view}, {name: self}
        self.through = False
        self.goes_on = asyncio.Event()

    async def call(self, _op: str) -> dict[str, Any]:
        return {}

    async def try_call(self, _op: str, timeout_s: float) -> None:
        return None

    def set_status(self, status: Any) -> None:
        pass

    async def whole_stream(self, _op: str, _args: Any, *, timeout_s: float) -> AsyncIterator[Answer]:
        lines = b"step 17 | loss 2.31 | tokens=4096\n" * 99 + b"password: hunter2 | token=%s\n" % (b"a1" * 20)
        about = {"path": "generation_0/rank_0/stdout.log", "mtime_ns": 10**18, "at": 0}
        yield Answer(
            {**about, "path": "spec.json", "left": self.pieces * 10**6}, b'{"host":"%s"}' % self.view.name.encode()
        )
        for _ in range(self.pieces):
            yield Answer({**about, "left": self.pieces * 10**6}, lines * (10**6 // len(lines)))
        await self.goes_on.wait()


async def test_secrets_are_searched_off_the_loop(tmp_path: Path) -> None:
    """The thread of the loop has next to nothing to do for a log of 8 MB, and the bar moves."""
    session: Any = Sender(8)
    session.goes_on.set()
    shown: list[Any] = []

    def bar(what: str, size: int) -> AbstractContextManager[Callable[[int], None]]:
        shown.append((what, size))
        return nullcontext(shown.append)

    begun = time.thread_time()
    assert await bundle.write(session, tmp_path / "job.zip", None, bar) == []
    assert time.thread_time() - begun < 0.5
    assert shown[0] == ("n1", 8_000_000)
    assert 7_900_000 < sum(shown[1:]) <= 8_000_100
    count = 8 * (10**6 // 3433)
    with zipfile.ZipFile(tmp_path / "job.zip") as file:
        log = file.read("nodes/n1/generation_0/rank_0/stdout.log")
    assert (log.count(b"password: ******* | token=" + b"*" * 40), log.count(b"\n") // 100) == (count, count)


async def test_an_interrupt_leaves_no_file(tmp_path: Path) -> None:
    """Neither while a host sends nothing, nor while its lines are searched for secrets."""
    for pieces in (0, 1, 2):
        session: Any = Sender(pieces)
        arrived = asyncio.Event()
        work = asyncio.ensure_future(
            bundle.write(session, tmp_path / "job.zip", None, lambda *_: nullcontext(lambda _: arrived.set()))  # noqa: B023
        )
        await (asyncio.wait_for(arrived.wait(), 30) if pieces else asyncio.sleep(0.05))
        assert len(list(tmp_path.iterdir())) == 1
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        assert list(tmp_path.iterdir()) == []


@examples(30)
@given(lists(from_regex(JOB_NAME, fullmatch=True), min_size=2, max_size=2, unique=True))
@example(["nas", "nas.home"])
@example(["a..b", "a"])
def test_any_two_hosts_of_an_inventory_come_back(names: list[str]) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "job.zip"
        session: Any = Sender(0, names[0])
        other = Sender(0, names[1])
        session.links[names[1]], session.hosts[names[1]] = other, other.view
        for one in (session, other):
            one.goes_on.set()
        assert asyncio.run(bundle.write(session, path, None, lambda *_: nullcontext(lambda _: None))) == []
        hosts = bundle.open_inventory(path).hosts
        specs = [Path(host.env["SUPERVISOR_HOME"]) / "jobs" / "job-t" / "spec.json" for host in hosts]
        assert [json.loads(spec.read_text()) for spec in specs] == [{"host": name} for name in names]


def test_a_host_that_came_through_another_one_has_the_description_of_that(tmp_path: Path) -> None:
    members = {"nodes/n1/history.bin": b"", "nodes/n2/spec.json": b"{}", "nodes/n2/history.bin": b""}
    homes = [
        Path(host.env["SUPERVISOR_HOME"])
        for host in bundle.open_inventory(bundles.write(tmp_path / "a.zip", members)).hosts
    ]
    assert [(home / "jobs" / "job-t" / "spec.json").read_text() for home in homes] == ["{}"] * 2


async def test_the_report_of_a_job() -> None:
    session: Any = recorded.load("failed_4x2")
    events: Any = [
        {**event, "detail": session.incidents[0]} if event["type"] == "incident" else event for event in session.events
    ]
    hosts: Any = [{**HOST_FACTS, "name": name} for name in session.hosts]
    hosts[-1] = {**hosts[-1], "hello": {**HOST_FACTS["hello"], "python": "3.12.1"}}
    document = await report(session, events, session.incidents, NCCL, hosts)
    text = "\n".join(lines(document)) + "\n"
    if os.environ.get("UPDATE_SNAPSHOTS") == "1":
        REPORT.write_text(text)
    assert text == REPORT.read_text()
