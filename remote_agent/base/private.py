"""Directories that nobody else can change, and a seal for the files in them that we run.

In: the path of the root, of a directory in it, of a sealed file. Out: the directory, made with mode 0700, or Untrusted
with the directory that others could change; whether a file is as this user wrote it.

The loader contains this text (supervisor/ssh/loader.py), so every Python must be able to parse it.
"""

import errno
import os
import stat

KEY = "agent.key"
KEY_BYTES = 32
SEAL_BYTES = 66
"""The length of a sealed file's first line: `#`, the seal in hex, and the end of the line."""
MAX_LINKS = 40
OTHERS_WRITE = 0o022


class Untrusted(Exception):
    """Other users could change a directory; the text says which, and how."""


def make_private(path):
    # type: (str) -> None
    """Make the root, an absolute path, and check that only this user can change or replace it.

    The directories above it may belong to root; others may write to one only if it is sticky, as /tmp is.
    Raises Untrusted, OSError.
    """
    here, todo, links = "/", path.strip("/").split("/"), 0
    _check_above(here, path)
    while len(todo) > 1:
        name = todo.pop(0)
        there = os.path.normpath(os.path.join(here, name))
        if not os.path.lexists(there):
            _make(there)
        if stat.S_ISLNK(_check_above(there, path).st_mode):
            links += 1
            if links > MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), there)
            target = os.readlink(there)
            here = "/" if target.startswith("/") else here
            todo[:0] = [part for part in target.split("/") if part]
        else:
            here = there
    make_own(os.path.join(here, todo[0]))


def make_own(path):
    # type: (str) -> None
    """Make a directory in one that is private, and check that it is this user's own; raises Untrusted, OSError."""
    _make(path)
    info = os.lstat(path)
    if stat.S_ISLNK(info.st_mode):
        raise Untrusted(path + " is a symbolic link")
    if not stat.S_ISDIR(info.st_mode):
        raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
    if info.st_uid != os.geteuid():
        raise Untrusted(path + " belongs to another user (uid " + str(info.st_uid) + ")")
    if info.st_mode & OTHERS_WRITE:
        raise Untrusted("other users may write to " + path + " (mode " + _mode(info) + ")")


def _make(path):
    # type: (str) -> None
    try:
        os.mkdir(path, 0o700)
    except OSError as error:
        if error.errno != errno.EEXIST:
            raise


def _check_above(path, root):
    # type: (str, str) -> os.stat_result
    info = os.lstat(path)
    # The owner of `/` can replace everything; in a user namespace its number is not 0.
    if info.st_uid not in (os.geteuid(), 0, os.lstat("/").st_uid):
        raise Untrusted(path + ", above " + root + ", belongs to another user (uid " + str(info.st_uid) + ")")
    is_link, is_sticky = stat.S_ISLNK(info.st_mode), info.st_mode & stat.S_ISVTX
    if info.st_mode & OTHERS_WRITE and not is_link and not is_sticky:
        raise Untrusted("other users may write to " + path + ", above " + root + " (mode " + _mode(info) + ")")
    return info


def _mode(info):
    # type: (os.stat_result) -> str
    return oct(stat.S_IMODE(info.st_mode))[-4:].replace("o", "0")


def read_key(home):
    # type: (str) -> bytes
    """Return the key of this user's seals in a private root; empty where there is none that only we can know."""
    try:
        fd = os.open(os.path.join(home, KEY), os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return b""
    try:
        info, key = os.fstat(fd), os.read(fd, KEY_BYTES + 1)
    finally:
        os.close(fd)
    is_ours = stat.S_ISREG(info.st_mode) and info.st_uid == os.geteuid() and not info.st_mode & 0o077
    return key if is_ours and len(key) == KEY_BYTES else b""


def seal(key, content):
    # type: (bytes, bytes) -> bytes
    """Return the first line that shows that this user wrote what follows it."""
    import hashlib
    import hmac

    return b"#" + hmac.new(key, content, hashlib.sha256).hexdigest().encode("ascii") + b"\n"


def is_sealed(path, key):
    # type: (str, bytes) -> bool
    """Tell whether a file is as this user wrote it."""
    try:
        with open(path, "rb") as file:
            head, content = file.read(SEAL_BYTES), file.read()
    except OSError:
        return False
    import hmac

    return bool(key) and hmac.compare_digest(head, seal(key, content))
