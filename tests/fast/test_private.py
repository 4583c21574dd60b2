"""The root on a node: only its user can change it, and nothing in it runs that somebody else wrote."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from remote_agent.base import private
from remote_agent.base.paths import Home
from remote_agent.wire import Problem

STRANGER = 54321


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "above" / "root"


def test_missing_directories_are_made_for_their_user_alone(root: Path) -> None:
    before = os.umask(0o002)
    try:
        private.make_private(str(root))
    finally:
        os.umask(before)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (root.parent, root)] == [0o700, 0o700]
    root.chmod(0o755)
    private.make_private(str(root))
    assert stat.S_IMODE(root.stat().st_mode) == 0o755


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777, 0o1777])
def test_a_root_that_others_may_write_to_is_refused(root: Path, mode: int) -> None:
    root.mkdir(parents=True)
    root.chmod(mode)
    with pytest.raises(private.Untrusted, match=f"other users may write to {root} .mode 0?{mode:o}"):
        private.make_private(str(root))
    with pytest.raises(Problem, match="other users may write") as refused:
        Home(root).make()
    assert (refused.value.kind, "chmod go-w" in refused.value.hint) == ("home_not_private", True)


def test_directories_above_may_be_writable_only_if_they_are_sticky(root: Path) -> None:
    root.parent.mkdir()
    root.parent.chmod(0o1777)
    private.make_private(str(root))
    root.parent.chmod(0o775)
    with pytest.raises(private.Untrusted, match=f"other users may write to {root.parent}, above {root} .mode 0775"):
        private.make_private(str(root))


def test_a_link_above_is_followed_and_checked_and_the_root_is_none(root: Path, tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir()
    link.symlink_to("./x/../real")
    (tmp_path / "x").mkdir()
    private.make_private(str(link / "root"))
    assert (real / "root").is_dir()
    real.chmod(0o777)
    with pytest.raises(private.Untrusted, match=f"write to {real}, above {link}/root"):
        private.make_private(str(link / "root"))
    root.parent.mkdir()
    root.symlink_to(tmp_path / "x")
    with pytest.raises(private.Untrusted, match=f"{root} is a symbolic link"):
        private.make_private(str(root))
    link.unlink()
    link.symlink_to(link)
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        private.make_private(str(link / "root"))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a directory away")
def test_a_directory_of_another_user_is_refused(root: Path, tmp_path: Path) -> None:
    root.mkdir(parents=True)
    os.chown(root, STRANGER, STRANGER)
    with pytest.raises(private.Untrusted, match=f"{root} belongs to another user .uid {STRANGER}"):
        private.make_private(str(root))
    os.chown(root, 0, 0)
    os.chown(root.parent, STRANGER, STRANGER)
    with pytest.raises(private.Untrusted, match=f"{root.parent}, above {root}, belongs to another user"):
        private.make_private(str(root))
    os.chown(root.parent, 0, 0)
    link = tmp_path / "link"
    link.symlink_to(root.parent)
    os.lchown(link, STRANGER, STRANGER)
    with pytest.raises(private.Untrusted, match=f"{link}, above {link}/root, belongs to another user"):
        private.make_private(str(link / "root"))


def test_the_directories_in_the_root_are_checked_too(root: Path, tmp_path: Path) -> None:
    Home(root).make()
    (root / "trees").rmdir()
    (root / "trees").symlink_to(tmp_path)
    with pytest.raises(Problem, match="trees is a symbolic link"):
        Home(root).make()
    (root / "trees").unlink()
    (root / "jobs" / "j").mkdir()
    (root / "jobs" / "j").chmod(0o770)
    with pytest.raises(Problem, match="other users may write to .*/jobs/j "):
        Home(root).job("j").make()


def test_a_file_is_sealed_by_its_content_and_a_key_that_only_its_user_has(tmp_path: Path) -> None:
    key, file, content = os.urandom(private.KEY_BYTES), tmp_path / "file", b"code"
    file.write_bytes(private.seal(key, content) + content)
    assert private.is_sealed(str(file), key)
    for other in (private.seal(key, content) + b"cods", private.seal(key, content + b"x") + content, b"", content):
        file.write_bytes(other)
        assert not private.is_sealed(str(file), key)
    file.write_bytes(private.seal(b"", content) + content)
    assert not private.is_sealed(str(file), b"")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o622])
def test_a_key_that_others_can_read_or_write_is_none(tmp_path: Path, mode: int) -> None:
    path = tmp_path / private.KEY
    path.write_bytes(b"k" * private.KEY_BYTES)
    path.chmod(0o600)
    assert private.read_key(str(tmp_path)) == b"k" * private.KEY_BYTES
    path.chmod(mode)
    assert private.read_key(str(tmp_path)) == b""
    path.unlink()
    path.symlink_to("/etc/hostname")
    assert private.read_key(str(tmp_path)) == b""
