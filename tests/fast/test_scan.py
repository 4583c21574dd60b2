"""The work tree as it is read here: what is left out, what is kept as it is, what is refused."""

from __future__ import annotations

import hashlib
import importlib
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from remote_agent.base.paths import check_name
from supervisor.ssh import SyncError, scan
from supervisor.ssh.sync import Tree, tree_name

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
            ".gitignore": "*.log\n!keep.log\n/build/\n.venv/\n*.pt\n",
            "train.py": "",
            "a.log": "",
            "keep.log": "",
            "build/x": "",
            "sub/build/kept": "",
            "sub/.gitignore": "*.py\n!main.py\n!*.pt\n",
            "sub/other.py": "",
            "sub/main.py": "",
            "sub/model.pt": "",
            "sub/deep/z.py": "",
            "model.pt": "",
            ".venv/lib/big": "",
            "__pycache__/x.pyc": "",
            ".supervisor/x": "",
            "env/pyvenv.cfg": "",
            "env/lib/y": "",
            "data/set": "",
            "data.txt": "",
            "notes/data/deep": "",
        },
    )
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


@pytest.mark.skipif(not HAS_GIT, reason="needs git")
def test_a_directory_stays_when_only_its_content_is_ignored(tmp_path: Path) -> None:
    root = tmp_path / "work"
    _fill(root, {".gitignore": "*.log\nout/\n", "logs/a.log": "", "out/x": "", ".h/x.log": ""})
    _fill(root, {"deep/er/b.log": "", "deep/c.py": ""})
    _git(root, "init")
    tree = scan(root)
    assert _paths(tree) == [".gitignore", "deep/c.py"]
    assert set(dict(tree.dirs)) == {".h", "logs", "deep", "deep/er"}


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
