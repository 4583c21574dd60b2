"""Takes away from this process what macOS does not have; test_macos.py installs it as sitecustomize.

Source: the notes on availability in Python's documentation of os, signal, select, socket and resource.
"""

from __future__ import annotations

import fnmatch
import importlib
import sys
from typing import Any

# In this order: socket imports select.
LACKS = {
    "os": "sched_[gs]* SCHED_* pidfd_open P_PIDFD memfd_create MFD_* eventfd* EFD_* timerfd* TFD_* posix_fadvise"
    " POSIX_FADV_* posix_fallocate copy_file_range splice SPLICE_* getrandom GRND_* [gs]etresuid [gs]etresgid pipe2"
    " O_PATH O_TMPFILE O_DIRECT O_NOATIME O_LARGEFILE *xattr XATTR_* fdatasync unshare setns CLONE_*",
    "signal": "pidfd_send_signal sigtimedwait sigwaitinfo SIGRT* SIGPWR SIGPOLL SIGSTKFLT",
    "select": "epoll EPOLL*",
    "socket": "SO_PEERCRED SO_BINDTODEVICE SO_PASSCRED SO_MARK AF_NETLINK AF_VSOCK AF_ALG TCP_USER_TIMEOUT SOCK_CLOEXEC"
    " SOCK_NONBLOCK",
    "resource": "prlimit",
}
C_CALLS = ("prctl", "syscall", "inotify_", "sched_", "unshare", "setns", "eventfd", "memfd_create", "epoll_")
OPENS = ("open", "os.listdir", "os.scandir", "os.chdir")


def refuse(event: str, args: tuple[Any, ...]) -> None:
    """Fail as the call would on macOS: no /proc, no abstract sockets, none of Linux's own functions in C."""
    if event in OPENS and str(args[0]).startswith(("/proc", "/sys/")):
        raise FileNotFoundError(2, "No such file or directory", args[0])
    if event in ("socket.bind", "socket.connect") and args[1][:1] in ("\0", b"\0"):
        raise FileNotFoundError(2, "No such file or directory")
    if event == "ctypes.dlsym" and str(args[1]).startswith(C_CALLS):
        raise AttributeError(f"dlsym(RTLD_DEFAULT, {args[1]}): symbol not found")


for lacking, patterns in LACKS.items():
    module = importlib.import_module(lacking)
    for pattern in patterns.split():
        for name in fnmatch.filter(dir(module), pattern):
            delattr(module, name)
sys.platform = "darwin"
sys.addaudithook(refuse)
