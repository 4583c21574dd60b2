"""The sync of the work tree: how it is read here, and what a node requests, replaces, leaves alone and refuses."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import shutil
import socket
import subprocess
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from remote_agent.base.paths import Home, check_name
from remote_agent.tree.manifest import SyncPlan
from remote_agent.tree.sync import TreeSync
from remote_agent.wire import Problem
from supervisor.ssh import SyncError, scan
from supervisor.ssh.sync import Tree, tree_name

TREE = "work-0123abcd"


class Node:
    """A node's trees, with an operator's view of one of them as {path: content}; "@x" is a link, None a directory."""

    def __init__(self, root: Path) -> None:
        self.home = Home(root)
        self.home.make()
        self.root = self.home.tree(TREE)
        self.sync = TreeSync(self.home)

    def plan(self, content: dict[str, Any], mode: int = 0o644) -> SyncPlan:
        """Take the lock and compare."""
        assert self.sync.lock(TREE)
        return self.sync.plan(TREE, manifest(content, mode))

    def push(self, content: dict[str, Any], mode: int = 0o644, digest: str = "") -> tuple[SyncPlan, list[str]]:
        """Sync as the supervisor does; returns the plan and the contents that had to be sent."""
        sent = self._send(content, mode)
        return self.sync.commit(TREE, digest), sent

    def stage(self, content: dict[str, Any], digest: str, keep: Sequence[str] = ()) -> list[str]:
        """Bring a version while a group runs; returns the contents that had to be sent."""
        sent = self._send(content, 0o644)
        self.sync.stage(TREE, digest, keep)
        return sent

    def switch(self, digest: str) -> None:
        """Put a version in place."""
        assert self.sync.lock(TREE)
        self.sync.switch(TREE, digest)

    def _send(self, content: dict[str, Any], mode: int) -> list[str]:
        plan = self.plan(content, mode)
        by_hash = {sha(text): text for text in content.values() if isinstance(text, str) and text[:1] != "@"}
        sent = sorted(by_hash[wanted] for wanted in plan.missing)
        for text in sent:
            data = text.encode()
            self.sync.put(TREE, [[sha(text), 0, len(data), len(data)]], data, packed=False)
        return sent

    def content(self) -> dict[str, Any]:
        """Return what lies on the disk, as `push` takes it."""
        found: dict[str, Any] = {}
        for path in sorted(self.root.rglob("*")):
            name = str(path.relative_to(self.root))
            if path.is_symlink():
                found[name] = f"@{os.readlink(path)}"
            else:
                found[name] = None if path.is_dir() else path.read_text()
        return found


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def manifest(content: dict[str, Any], mode: int = 0o644) -> bytes:
    files = [[p, mode, len(t.encode()), sha(t)] for p, t in content.items() if isinstance(t, str) and t[:1] != "@"]
    links = [[p, t[1:]] for p, t in content.items() if isinstance(t, str) and t[:1] == "@"]
    return raw(files=files, links=links, dirs=[[p, 0o755] for p, t in content.items() if t is None])


def raw(**parts: Any) -> bytes:
    return zlib.compress(json.dumps({"files": [], "links": [], "dirs": [], **parts}).encode())


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path / "sup")
    yield made
    made.sync.close()


FIRST: dict[str, Any] = {"a.py": "a", "lib": None, "lib/b.py": "b", "same.py": "a", "empty": "", "link": "@lib/b.py"}


def test_only_what_changed_is_asked_for(node: Node) -> None:
    _, sent = node.push(FIRST)
    assert sent == ["", "a", "b"]
    assert node.content() == FIRST
    plan, sent = node.push(FIRST)
    assert (sent, plan.changed, plan.removed) == ([], [], [])
    plan, sent = node.push({**FIRST, "a.py": "new"})
    assert (sent, plan.changed, plan.removed) == (["new"], ["a.py"], [])
    assert node.content() == {**FIRST, "a.py": "new"}


def test_a_file_that_moved_is_not_sent_again(node: Node) -> None:
    node.push({"old/a": "content", "b": "other"})
    plan, sent = node.push({"new/a": "content", "b": "content", "c": "other"})
    assert sent == []
    assert sorted(plan.changed) == ["b", "c", "new/a"]
    assert node.content() == {"new": None, "new/a": "content", "b": "content", "c": "other"}


def test_modes_follow_without_content(node: Node) -> None:
    node.push({"run": "x"})
    plan, sent = node.push({"run": "x"}, mode=0o755)
    assert (sent, plan.changed) == ([], ["run"])
    assert (node.root / "run").stat().st_mode & 0o777 == 0o755


def test_what_the_script_made_is_never_touched(node: Node) -> None:
    node.push(FIRST)
    (node.root / "snapshot.pt").write_text("model")
    (node.root / "lib" / "cache").mkdir()
    (node.root / "lib" / "cache" / "x").write_text("cached")
    node.push({"a.py": "a"})
    assert node.content() == {
        "a.py": "a", "snapshot.pt": "model", "lib": None, "lib/cache": None, "lib/cache/x": "cached",
    }  # fmt: skip


def test_a_synced_file_that_the_node_changed_is_kept_aside(node: Node) -> None:
    node.push({"a": "1", "gone": "1"})
    for name in ("a", "gone"):
        (node.root / name).write_text("changed there")
    (node.root / "b").write_text("made there")
    plan, _ = node.push({"a": "1", "b": "2"})
    assert plan.conflicts == ["a", "b"]
    assert node.content() == {"a": "1", "b": "2", "gone": "changed there"}
    kept = {path.name: path.read_text() for path in (plan.side / "replaced").rglob("*") if path.is_file()}
    assert kept == {"a": "changed there", "b": "made there"}


def test_links_are_kept_as_they_are(node: Node) -> None:
    node.push({"up": "@../../..", "dangling": "@nowhere", "absolute": "@/etc/passwd"})
    assert node.content() == {"up": "@../../..", "dangling": "@nowhere", "absolute": "@/etc/passwd"}
    plan, _ = node.push({"up": "@elsewhere", "dangling": "now a file"})
    assert node.content() == {"up": "@elsewhere", "dangling": "now a file"}
    assert plan.conflicts == []
    assert Path("/etc/passwd").exists()


def test_files_and_directories_may_swap(node: Node) -> None:
    node.push({"x": "file", "y": None, "y/z": "file"})
    node.push({"x": None, "x/w": "file", "y": "file"})
    assert node.content() == {"x": None, "x/w": "file", "y": "file"}
    (node.root / "x" / "made").write_text("there")
    with pytest.raises(Problem, match="is a directory|Is a directory") as refused:
        node.push({"x": "file again", "y": "file"})
    assert refused.value.kind == "tree_conflict"
    assert str(node.root / "x") in refused.value.message


def test_nothing_is_written_or_removed_through_a_link(node: Node, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    node.push({"d": None, "d/f": "1"})
    (outside / "f").write_text("1")
    (node.root / "d" / "f").unlink()
    (node.root / "d").rmdir()
    (node.root / "d").symlink_to(outside)
    with pytest.raises(Problem, match="is a symbolic link on the node, but a directory here"):
        node.plan({"d/f": "2"})
    node.sync.close()
    node.push({})
    assert (outside / "f").read_text() == "1"


@pytest.mark.parametrize("path", ["../x", "/etc/x", "a/../../x", "a//b", "./a", "a/", "", "a/\0", ".."])
def test_paths_that_would_leave_the_tree_are_refused(node: Node, path: str) -> None:
    assert node.sync.lock(TREE)
    for parts in ({"files": [[path, 0o644, 1, sha("a")]]}, {"links": [[path, "x"]]}, {"dirs": [[path, 0o755]]}):
        with pytest.raises(Problem, match="would leave the tree") as refused:
            node.sync.plan(TREE, raw(**parts))
        assert refused.value.kind == "bad_manifest"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"junk", "cannot read"),
        (zlib.compress(b"[]"), "cannot read"),
        (raw(files=[["a", 0o644, 1]]), "cannot read"),
        (raw(files=[["a", 0o644, 1, "../../x"]]), "bad size, mode or hash"),
        (raw(files=[["a", 0o4755, 1, sha("a")]]), "bad size, mode or hash"),
        (raw(files=[["a", 0o644, -1, sha("a")]]), "bad size, mode or hash"),
        (raw(files=[["a", 0o644, 1, sha("a")]], dirs=[["a", 0o755]]), "listed twice"),
        (raw(links=[["a", "/etc"]], files=[["a/b", 0o644, 1, sha("a")]]), "a directory and something else"),
        (raw(links=[["a", ""]]), "bad target"),
        (raw(dirs=[["a", 0o1777]]), "bad mode"),
    ],
)
def test_bad_manifests_are_refused(node: Node, body: bytes, message: str) -> None:
    assert node.sync.lock(TREE)
    with pytest.raises(Problem, match=message):
        node.sync.plan(TREE, body)


def test_too_large_manifests_are_refused(node: Node) -> None:
    assert node.sync.lock(TREE)
    with pytest.raises(Problem, match="over the limit"):
        node.sync.plan(TREE, zlib.compress(b" " * (65 * 1024 * 1024), 1))
    with pytest.raises(Problem, match="more than 100000"):
        node.sync.plan(TREE, raw(dirs=[[str(n), 0o755] for n in range(100_001)]))


def test_pieces_arrive_in_order_and_are_checked(node: Node) -> None:
    text = "0123456789"
    plan = node.plan({"f": text})
    digest = sha(text)
    assert plan.missing == {digest: 10}
    with pytest.raises(Problem, match="not requested"):
        node.sync.put(TREE, [[sha("other"), 0, 5, 5]], b"other", packed=False)
    with pytest.raises(Problem, match="out of order"):
        node.sync.put(TREE, [[digest, 5, 10, 5]], b"56789", packed=False)
    with pytest.raises(Problem, match="not requested in this size"):
        node.sync.put(TREE, [[digest, 0, 10, 11]], b"0123456789x", packed=False)
    with pytest.raises(Problem, match="piece of a file"):
        node.sync.put(TREE, [[digest, 0]], b"", packed=False)
    with pytest.raises(Problem, match="piece of a file"):
        node.sync.put(TREE, [], b"junk", packed=True)
    with pytest.raises(Problem, match="have arrived"):
        node.sync.commit(TREE)
    node.sync.put(TREE, [[digest, 0, 10, 5]], b"01234", packed=False)
    with pytest.raises(Problem, match="changed while it was being sent"):
        node.sync.put(TREE, [[digest, 5, 10, 5]], b"wrong", packed=False)
    node.sync.put(TREE, [[digest, 0, 10, 5]], zlib.compress(b"01234"), packed=True)
    node.sync.put(TREE, [[digest, 5, 10, 5]], b"56789", packed=False)
    node.sync.commit(TREE)
    assert node.content() == {"f": text}
    with pytest.raises(Problem, match="call tree_plan first"):
        node.sync.commit(TREE)


def test_a_sync_that_broke_off_goes_on_where_it_was(node: Node) -> None:
    content = {"a": "first", "b": "second"}
    node.plan(content)
    node.sync.put(TREE, [[sha("first"), 0, 5, 5]], b"first", packed=False)
    node.sync.close()
    _, sent = node.push(content)
    assert sent == ["second"]
    assert node.content() == content


def test_one_sync_at_a_time(node: Node) -> None:
    other = TreeSync(node.home)
    assert node.sync.lock(TREE)
    assert not other.lock(TREE)
    assert other.lock("another-tree")
    node.sync.close()
    assert other.lock(TREE)
    other.close()


def test_a_damaged_state_file_only_costs_reading(node: Node) -> None:
    node.push(FIRST)
    state = node.home.trees / ".state" / TREE / "state.json"
    for damage in (b"", b"{}", b'{"files": [], "stamps": {}, "links": {}, "dirs": {}}', b"[1"):
        state.write_bytes(damage)
        plan, sent = node.push(FIRST)
        assert (sent, plan.changed, plan.conflicts) == ([], [], [])


@pytest.mark.skipif(os.getuid() != 0, reason="mounts a small file system")
def test_a_disk_that_is_full(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=0700,size=24m", "tmpfs", disk], check=True)
    node = Node(disk / "sup")
    try:
        big = "x" * 12_000_000
        with pytest.raises(Problem) as refused:
            node.plan({"big": big})
        assert refused.value.kind == "disk_full"
        assert str(node.root) in refused.value.message
        assert "28,777,216 bytes are needed" in refused.value.message
        node.sync.close()
        # Somebody else takes the space between plan and put.
        small = "y" * 6_000_000
        node.plan({"small": small})
        (disk / "other").write_bytes(bytes(20_000_000))
        with pytest.raises(Problem) as late:
            node.sync.put(TREE, [[sha(small), 0, len(small), len(small)]], small.encode(), packed=False)
        assert late.value.kind == "disk_full"
        node.sync.close()
        (disk / "other").unlink()
        assert node.push({"small": small})[1] == [small]
    finally:
        node.sync.close()
        subprocess.run(["umount", disk], check=True)


def test_a_version_waits_beside_the_tree_and_the_one_before_stays(node: Node) -> None:
    one, two, three = ("1" * 64, "2" * 64, "3" * 64)
    first = {"a": "old", "b": "same", "gone": "once"}
    node.push(first, digest=one)
    (node.root / "snapshot.pt").write_text("model")
    (node.root / "b").write_text("changed there")
    sent = node.stage({"a": "new", "b": "same", "lib/c": "old"}, two)
    # The script's version of `b` is what its group runs from, so that is what is gone back to; `old` is here already.
    assert sent == ["new", "same"]
    assert node.content() == {**first, "b": "changed there", "snapshot.pt": "model"}
    assert (node.sync.in_place(TREE), node.sync.digests(TREE)) == ([one], [one, two])
    node.switch(two)
    assert node.content() == {"a": "new", "b": "same", "lib": None, "lib/c": "old", "snapshot.pt": "model"}
    (node.root / "snapshot.pt").write_text("newer")
    node.switch(one)
    assert node.content() == {**first, "b": "changed there", "snapshot.pt": "newer"}
    # One who died in the middle of a switch: what is in place has no name, and the next switch puts all in order.
    state = node.home.trees / ".state" / TREE / "state.json"
    state.write_text(state.read_text().replace(one, ""))
    (node.root / "a").write_text("new")
    node.switch(one)
    assert (node.root / "a").read_text() == "old"
    node.stage({"a": "newest"}, three, keep=[two])
    assert node.sync.digests(TREE) == [one, two, three]
    node.switch(three)
    assert node.sync.digests(TREE) == [one, three]
    side = node.home.trees / ".state" / TREE
    blobs = side / "versions" / "blobs"
    assert sorted(path.read_text() for path in blobs.iterdir()) == ["changed there", "newest", "old", "once"]
    # As on a node that joined with the newest tree alone: that is kept too when the others go back.
    (side / "versions" / three).unlink()
    node.switch(one)
    assert node.sync.digests(TREE) == [one, three]
    with pytest.raises(Problem, match="22222222 of the work tree is not on this node"):
        node.switch(two)


def test_what_could_not_be_put_in_place_is_refused_before_a_group_stops(node: Node) -> None:
    node.push({"a": "1"}, digest="1" * 64)
    (node.root / "new.py").mkdir()
    with pytest.raises(Problem, match=r"new.py is a directory on the node, but a file here"):
        node.stage({"a": "1", "new.py": "x"}, "2" * 64)
    node.sync.close()
    with pytest.raises(Problem, match="not the name of a version"):
        node.stage({"a": "2"}, "../../x")


# The work tree as it is read here: what is left out, what is kept as it is, what is refused.


pytestmark = pytest.mark.usefixtures("ssh_home")

HAS_GIT = shutil.which("git") is not None


def _fill(root: Path, files: dict[str, str]) -> None:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)


def _paths(tree: Tree) -> list[str]:
    return [file.path for file in tree.files]


def _git(root: Path, *words: str) -> None:
    # No configuration of whoever runs the tests.
    env = {"PATH": os.environ["PATH"], "HOME": str(root), "GIT_CONFIG_NOSYSTEM": "1"}
    subprocess.run(["git", "-c", "init.defaultBranch=main", *words], cwd=root, check=True, env=env, capture_output=True)


PLAIN = pytest.param(lambda root: None, id="no repository")
REPOSITORY = pytest.param(
    lambda root: _git(root, "init"), id="repository", marks=pytest.mark.skipif(not HAS_GIT, reason="needs git")
)
# As on a machine without git, and as when git refuses a directory of somebody else.
BROKEN = pytest.param(lambda root: _fill(root, {".git": "not a repository"}), id="git refuses")


@pytest.mark.parametrize("begin", [PLAIN, REPOSITORY, BROKEN])
def test_gitignore_is_respected(tmp_path: Path, begin: Callable[[Path], None]) -> None:
    _fill(
        tmp_path,
        {
            ".gitignore": "*.log\n!keep.log\n/build/\n.venv/\n*.pt\n", "train.py": "", "a.log": "", "keep.log": "",
            "build/x": "", "sub/build/kept": "", "sub/.gitignore": "*.py\n!main.py\n!*.pt\n", "sub/other.py": "",
            "sub/main.py": "", "sub/model.pt": "", "sub/deep/z.py": "", "model.pt": "", ".venv/lib/big": "",
            "__pycache__/x.pyc": "", ".supervisor/x": "", "env/pyvenv.cfg": "", "env/lib/y": "", "data/set": "",
            "data.txt": "", "notes/data/deep": "",
        },
    )  # fmt: skip
    begin(tmp_path)
    tree = scan(tmp_path, ("data/", "*.txt"))
    assert _paths(tree) == sorted(
        [".gitignore", "keep.log", "sub/.gitignore", "sub/build/kept", "sub/main.py", "sub/model.pt", "train.py"]
    )
    assert "build" not in dict(tree.dirs)


@pytest.mark.skipif(not HAS_GIT, reason="needs git")
def test_what_git_knows_is_sent_even_where_it_would_be_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _git(tmp_path, "init")
    _fill(tmp_path, {".gitignore": "*.dat\nout/\n", "tracked.dat": "", "other.dat": "", "out/x": "", "sub/y.dat": ""})
    _git(tmp_path, "add", "-f", "tracked.dat")
    _fill(tmp_path, {"nested/.gitignore": "*.py", "nested/a.py": "", "nested/b": "", "nested/c.dat": ""})
    _git(tmp_path / "nested", "init")
    # As when started from a hook of another repository.
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "nowhere"))
    assert _paths(scan(tmp_path)) == [".gitignore", "nested/.gitignore", "nested/b", "nested/c.dat", "tracked.dat"]
    assert _paths(scan(tmp_path / "sub")) == []
    # A workdir that the repository around it ignores is meant to be sent all the same.
    assert _paths(scan(tmp_path / "out")) == ["x"]


def test_kinds_modes_and_odd_names_are_kept(tmp_path: Path) -> None:
    tmp_path = tmp_path / "work"
    tmp_path.mkdir()
    odd = os.fsdecode(b"caf\xe9 \xff")
    _fill(tmp_path, {"run.sh": "x", "naïve ü.py": "", "line\nbreak": "", odd: ""})
    (tmp_path / "run.sh").chmod(0o750)
    (tmp_path / "empty").mkdir(mode=0o700)
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "outside").symlink_to("/etc")
    (tmp_path / "loop").symlink_to(".")
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(tmp_path / "sock"))
        tree = scan(tmp_path)
    assert _paths(tree) == sorted(["run.sh", "naïve ü.py", "line\nbreak", odd])
    assert {file.path: file.mode for file in tree.files}["run.sh"] == 0o750
    assert dict(tree.links) == {"dangling": "nowhere", "outside": "/etc", "loop": "."}
    assert dict(tree.dirs) == {"empty": 0o700}


def test_too_much_is_refused_with_the_biggest_files(tmp_path: Path) -> None:
    for number in range(7):
        (tmp_path / f"f{number}").write_bytes(bytes(number * 1000))
    assert scan(tmp_path, limit_bytes=21_000).size == 21_000
    with pytest.raises(SyncError) as refused:
        scan(tmp_path, limit_bytes=20_000)
    assert "is 21.0 kB, over the limit of 20.0 kB" in refused.value.message
    assert "f6 (6.0 kB), f5 (5.0 kB), f4 (4.0 kB), f3 (3.0 kB), f2 (2.0 kB)" in refused.value.message
    assert "f1" not in refused.value.message
    for way in ("exclude", ".gitignore", "sync_limit_mb", "sync = false"):
        assert way in refused.value.hint


def test_a_huge_tree_is_given_up_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fill(tmp_path, {f"{number}/file": "" for number in range(5)})
    stop = threading.Event()
    assert len(scan(tmp_path, stop=stop).files) == 5
    stop.set()
    with pytest.raises(SyncError, match="was cancelled"):
        scan(tmp_path, stop=stop)
    monkeypatch.setattr(importlib.import_module("supervisor.ssh.scan"), "MAX_ENTRIES", 6)
    with pytest.raises(SyncError, match="holds more than 6 files and directories") as refused:
        scan(tmp_path)
    assert "exclude" in refused.value.hint


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(SyncError, match="there is no such directory"):
        scan(tmp_path / "none")
    with pytest.raises(SyncError, match="exclude"):
        scan(tmp_path, ("a/***/[",) * 3 + ("!",))
    if os.getuid() == 0:
        # Root reads everything but what the kernel itself refuses.
        _fill(tmp_path, {"ok": ""})
        subprocess.run(["mount", "--bind", "/proc/self/task", tmp_path], check=True)
        try:
            with pytest.raises(SyncError, match="cannot be read") as refused:
                scan(tmp_path)
            assert "exclude" in refused.value.hint
        finally:
            subprocess.run(["umount", tmp_path], check=True)
    else:
        _fill(tmp_path, {"secret": ""})
        (tmp_path / "secret").chmod(0)
        with pytest.raises(SyncError, match="secret: cannot be read: Permission denied"):
            scan(tmp_path)


@contextmanager
def _written_all_the_time(path: Path, mode: str) -> Iterator[None]:
    begun, stop = threading.Event(), threading.Event()

    def write() -> None:
        with path.open(mode, buffering=0) as file:
            while not stop.is_set():
                file.write(b"line\n")
                if mode == "r+b":
                    file.seek(0)
                begun.set()

    writer = threading.Thread(target=write)
    writer.start()
    begun.wait()
    try:
        yield
    finally:
        stop.set()
        writer.join()


def test_a_file_that_changes_all_the_time_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.log"
    path.write_bytes(bytes(40_000_000))
    with _written_all_the_time(path, "r+b"):
        with pytest.raises(SyncError, match=r"metrics\.log keeps changing") as refused:
            scan(tmp_path)
        assert 'exclude = ["metrics.log"]' in refused.value.hint


def test_a_log_that_grows_is_what_it_was_when_it_was_opened(tmp_path: Path) -> None:
    path = tmp_path / "metrics.log"
    path.write_bytes(bytes(40_000_000))
    with _written_all_the_time(path, "ab"):
        (found,) = scan(tmp_path).files
    assert 40_000_000 <= found.size < path.stat().st_size
    assert found.sha256 == hashlib.sha256(path.read_bytes()[: found.size]).hexdigest()


def test_the_name_is_stable_and_fit_for_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER", "me")
    monkeypatch.delenv("LOGNAME", raising=False)
    name = tree_name(tmp_path / "My Project (ü)")
    assert name.startswith("My-Project")
    assert name == check_name(tree_name(tmp_path / "x" / ".." / "My Project (ü)"))
    assert check_name(tree_name(Path("/")))
    assert check_name(tree_name(Path("/" + "x" * 200)))
    monkeypatch.setenv("USER", "you")
    assert tree_name(tmp_path / "My Project (ü)") != name
