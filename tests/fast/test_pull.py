"""`supervisor snapshots --pull`: a snapshot comes complete or not at all, from the first node that sends it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from remote_agent.agent.file_requests import JobRequests
from remote_agent.wire import Answer, CallFailed, Items, Problem
from supervisor.cli import snapshots
from supervisor.cli.snapshots import pull
from supervisor.errors import RequestFailed, UsageError
from supervisor.link.tasks import each
from supervisor.ssh.answers import read_answer
from tests.fast.test_snapshots import Disk, lay, torch_zip


class Node:
    """One node's files, reached as by a link."""

    opened, is_malformed = True, False

    def __init__(self, name: str, root: Path) -> None:
        self.view = SimpleNamespace(name=name)
        root.mkdir(exist_ok=True)
        self.disk = Disk(root)
        (root / "kept").mkdir(exist_ok=True)
        (root / "snapshots").symlink_to("kept")
        files, kept = SimpleNamespace(root=root), SimpleNamespace(answer=None)
        self.requests = JobRequests(files, None, None, kept, list)  # type: ignore[arg-type]

    async def call(self, op: str, args: dict[str, Any], *, timeout_s: float) -> Answer:
        try:
            answer = await self.requests.handle(op, args, b"")
        except Problem as problem:
            raise CallFailed(problem.kind, problem.message, problem.hint) from problem
        assert isinstance(answer, Answer)
        return read_answer(self.view.name, op, answer)

    async def whole_stream(self, op: str, args: dict[str, Any], *, timeout_s: float) -> Items:
        async with aclosing(each(self._stream(op, args), timeout_s)) as items:
            async for item in items:
                yield item

    async def _stream(self, op: str, args: dict[str, Any]) -> Items:
        items = await self.requests.handle(op, args, b"")
        assert not isinstance(items, Answer)
        try:
            async for item in items:
                yield read_answer(self.view.name, op, item)
        except Problem as problem:
            raise CallFailed(problem.kind, problem.message, problem.hint) from problem


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mapping[str, Node]:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return {name: Node(name, tmp_path / name) for name in ("n1", "n2")}


def bring(nodes: Mapping[str, Node], name: str, place: Path | None = None) -> tuple[str, int, str]:
    found = asyncio.run(pull(SimpleNamespace(links=nodes), name, place))  # type: ignore[arg-type]
    return str(found.place), found.size, found.node


def test_a_file_and_a_directory_come_from_the_node_that_has_them(nodes: Mapping[str, Node]) -> None:
    disk = nodes["n2"].disk
    content = torch_zip(b"w" * 3_000_000)
    one = disk.save("out/snapshot.pt", content, 1)
    assert bring(nodes, one.id) == ("snapshot.pt", len(content), "n2")
    assert Path("snapshot.pt").read_bytes() == content
    with pytest.raises(UsageError, match=r"snapshot\.pt exists"):
        bring(nodes, one.id)
    with pytest.raises(UsageError, match="there is no directory no/such"):
        bring(nodes, one.id, Path("no/such/snapshot.pt"))
    lay(disk.base, {"checkpoint-20/a.bin": b"weights"})
    whole = disk.save("checkpoint-20/trainer_state.json", b'{"global_step": 20}', 2, 20)
    assert bring(nodes, whole.id, Path("kept"))[0] == "kept"
    assert sorted(os.listdir("kept")) == ["a.bin", "trainer_state.json"]
    assert sorted(os.listdir()) == ["kept", "snapshot.pt"]


def test_what_is_damaged_or_would_lie_elsewhere_leaves_nothing(nodes: Mapping[str, Node]) -> None:
    disk = nodes["n1"].disk
    one = disk.save("snapshot.pt", torch_zip(b"w" * 5000), 1)
    (sha,) = [file.sha256 for file in one.manifest.files.values()]
    disk.store.path_of(sha).write_bytes(torch_zip(b"x" * 5000))
    with pytest.raises(RequestFailed, match="arrived damaged"):
        bring(nodes, one.id)
    disk.store.path_of(sha).unlink()
    with pytest.raises(RequestFailed, match="no longer kept"):
        bring(nodes, one.id)
    with pytest.raises(RequestFailed, match="no node has snapshot 123456789abc"):
        bring(nodes, "123456789abc")

    async def elsewhere(args: dict[str, Any]) -> Answer:
        return Answer({"path": "a.pt", "files": [["a.pt/../../b.pt", 0o600, 1, sha]]})

    nodes["n1"].requests.ops["snapshot_files"] = elsewhere
    with pytest.raises(RequestFailed, match="does not match snapshot"):
        bring(nodes, one.id)
    assert not os.listdir()


def test_a_node_that_stops_in_the_middle_is_given_up(
    nodes: Mapping[str, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "PIECE_DEADLINE", 0.05)
    content = torch_zip(b"w" * 5000)
    one = nodes["n1"].disk.save("snapshot.pt", content, 1)

    async def hangs(args: dict[str, Any]) -> Items:
        yield Answer({}, content[:100])
        await asyncio.Event().wait()

    nodes["n1"].requests.ops["snapshot_read"] = hangs
    with pytest.raises(RequestFailed, match="n1: no answer in time"):
        bring(nodes, one.id)
    assert not os.listdir()
