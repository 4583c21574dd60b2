"""A work tree on its way to a node: what goes over the link, and what comes of files that change meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from remote_agent.base.paths import Home
from remote_agent.tree.sync import TreeSync
from supervisor.inventory import local
from supervisor.ssh import AgentFile, HostError, NodeLink, SyncError, connect, push_tree, scan
from tests.cluster.disk import Disk, obstacle
from tests.fast.test_tree import TREE, Node, sha

pytestmark = pytest.mark.usefixtures("ssh_home")


@contextlib.asynccontextmanager
async def _link(agent: AgentFile) -> AsyncIterator[NodeLink]:
    link = await connect(local().hosts[0], agent=agent, deadline_s=30)
    try:
        yield link
    finally:
        await link.close()


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A work tree here; the node's home is beside it."""
    monkeypatch.setenv("SUPERVISOR_HOME", str(tmp_path / "sup"))
    root = tmp_path / "work"
    root.mkdir()
    return root


async def test_the_copy_is_equal_and_only_changes_travel(work: Path, agent: AgentFile) -> None:
    odd = os.fsdecode(b"caf\xe9")
    (work / "sub").mkdir()
    (work / "empty").mkdir()
    (work / "train.py").write_text("print(1)\n" * 1000)
    (work / "sub" / "ü\n.sh").write_text("x")
    (work / "sub" / "ü\n.sh").chmod(0o755)
    (work / odd).write_text("odd")
    (work / "none").write_text("")
    (work / "link").symlink_to("../outside")
    incompressible = random.Random(1).randbytes(9_500_000)
    (work / "big").write_bytes(incompressible)

    async with _link(agent) as link:
        said: list[str] = []
        first = await push_tree(link, scan(work), said.append)
        assert (first.sent_files, first.changed, first.removed) == (5, 8, 0)
        # What does not shrink is sent as it is.
        assert len(incompressible) < first.sent_bytes < len(incompressible) + 10_000
        assert any("of 9.5 MB" in text for text in said)
        root = Path(first.root)
        assert (root / "big").read_bytes() == incompressible
        assert (root / "train.py").read_text() == (work / "train.py").read_text()
        assert (root / "sub" / "ü\n.sh").stat().st_mode & 0o777 == 0o755
        assert (root / odd).read_text() == "odd"
        assert os.readlink(root / "link") == "../outside"
        assert (root / "empty").is_dir()
        second = await push_tree(link, scan(work))
        assert (second.sent_bytes, second.sent_files, second.changed) == (0, 0, 0)
        (work / "train.py").write_text("print(2)\n")
        (work / "none").unlink()
        third = await push_tree(link, scan(work))
        assert (third.sent_files, third.changed, third.removed) == (1, 1, 1)
        assert third.sent_bytes < 100
        assert third.root == first.root
        (root / "out").mkdir()
        for place in ("snapshot.pt", "out/loss.txt", "sub/cache"):
            (root / place).write_text("by the script")
        (root / "__pycache__").mkdir()
        assert (third.left, set((await push_tree(link, scan(work))).left)) == ((), {"snapshot.pt", "out/", "sub/cache"})


async def test_a_file_that_changed_since_the_scan_stops_the_sync(work: Path, agent: AgentFile) -> None:
    (work / "a").write_text("one")
    tree = scan(work)

    async with _link(agent) as link:
        for text in ("longer", "", "two", None):
            if text is None:
                (work / "a").unlink()
            else:
                (work / "a").write_text(text)
            with pytest.raises(SyncError, match="changed while it was being sent"):
                await push_tree(link, tree)
        (work / "a").write_text("one, and lines since then")
        assert (await push_tree(link, tree)).sent_files == 1


async def test_a_tree_that_somebody_else_syncs_is_waited_for(work: Path, agent: AgentFile) -> None:
    (work / "a").write_text("one")
    tree = scan(work)
    other = TreeSync(Home(Path(os.environ["SUPERVISOR_HOME"])))

    async with _link(agent) as link:
        assert other.lock(tree.name)
        task = asyncio.ensure_future(push_tree(link, tree))
        done, _ = await asyncio.wait([task], timeout=0.5)
        assert not done
        other.close()
        assert (await task).sent_files == 1


async def test_a_refusal_of_a_node_names_the_host(work: Path, agent: AgentFile) -> None:
    (work / "d").mkdir()
    (work / "d" / "f").write_text("x")
    tree = scan(work)

    async with _link(agent) as link:
        root = Path(os.environ["SUPERVISOR_HOME"]) / "trees" / tree.name
        root.mkdir(parents=True)
        (root / "d").symlink_to("/etc")
        with pytest.raises(HostError, match="is a symbolic link on the node") as refused:
            await push_tree(link, tree)
        assert (refused.value.host, refused.value.step) == (link.host.name, "sync")
        (root / "d").unlink()
        assert (await push_tree(link, tree)).sent_files == 1
        (root / "d" / "f").write_text("changed there")
        result = await push_tree(link, tree)
        assert result.conflicts == ("d/f",)
        assert result.kept_in is not None
        assert [path.read_text() for path in Path(result.kept_in).rglob("f")] == ["changed there"]


async def test_a_lost_connection_is_reported(work: Path, agent: AgentFile) -> None:
    (work / "a").write_text("one")

    async with _link(agent) as link:
        os.kill(link.hello["pid"], 9)
        await asyncio.wait_for(link.closed.wait(), 60)
        with pytest.raises(HostError, match="the connection was lost"):
            await push_tree(link, scan(work))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """A disk for the node's home that can lose its power."""
    if why := obstacle(tmp_path / "tried"):
        pytest.skip(why)
    place = tmp_path / "disk"
    place.mkdir()
    made = Disk(place, 32)
    yield made
    made.unmount()


def test_a_synced_tree_and_its_kept_versions_outlive_a_power_failure(disk: Disk) -> None:
    """A digest is believed after it: the state file is there, so the files must be."""
    first, second = {"a.py": "1" * 9000, "lib/b.py": "b"}, {"a.py": "2" * 9000, "lib/c.py": "c", "new/d.py": "d"}
    third = {"a.py": "3" * 9000, "lib/c.py": "c"}
    digests = {sha(str(number)): content for number, content in enumerate((first, second, third))}
    one, two, three = digests

    def after_power_failure() -> Node:
        disk.lose_power()
        return Node(disk.place / "sup")

    node = Node(disk.place / "sup")
    node.push(first, digest=one)
    node = after_power_failure()
    assert (_files(node), node.sync.in_place(TREE)) == (first, [one])
    node.stage(second, two)
    node = after_power_failure()
    assert (_files(node), node.sync.digests(TREE)) == (first, sorted((one, two)))
    for digest in (two, one, two):
        node.switch(digest)
        node = after_power_failure()
        assert (_files(node), node.sync.in_place(TREE)) == (digests[digest], [digest])
    node.push(third, mode=0o755, digest=three)
    node = after_power_failure()
    assert (_files(node), node.sync.in_place(TREE)) == (third, [three])
    assert os.access(node.root / "a.py", os.X_OK)
    (node.root / "a.py").write_text("what nobody synced")
    assert _files(after_power_failure()) != {**third, "a.py": "what nobody synced"}, "this disk loses nothing"


def _files(node: Node) -> dict[str, str]:
    return {path: text for path, text in node.content().items() if text is not None}
