"""Write what a script can see of how it was started."""

import atexit
import json
import os
import signal
import sys
import threading

main = sys.modules["__main__"]
seen = {
    "environ": dict(os.environ),
    "argv": sys.argv,
    "orig_argv": getattr(sys, "orig_argv", None),
    "xoptions": sys._xoptions,
    "warnoptions": sys.warnoptions,
    "flags": list(sys.flags),
    "path": sys.path,
    "cwd": os.getcwd(),
    "executable": sys.executable,
    "name": __name__,
    "file": __file__,
    "package": __package__,
    "spec": str(main.__spec__),
    "loader": type(main.__loader__).__name__,
    "builtins": type(__builtins__).__name__,
    "doc": __doc__,
    "names": sorted(name for name in vars(main) if name not in ("seen", "main")),
    "sitecustomize": getattr(sys.modules.get("sitecustomize"), "__file__", None),
    "excepthook": sys.excepthook is sys.__excepthook__,
    "threads": [thread.name for thread in threading.enumerate()],
    "atexit": atexit._ncallbacks(),
    "stdin": os.readlink("/proc/self/fd/0"),
    "fds": sorted(os.listdir("/proc/self/fd")),
    "line_buffering": [getattr(sys.stdout, name) for name in ("line_buffering", "write_through")],
    "signals": {int(number): str(signal.getsignal(number)) for number in signal.valid_signals()},
    "blocked": sorted(int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "leader": [os.getpgrp() == os.getpid(), os.getsid(0) == os.getpid()],
    "umask": os.umask(0o22),
}
path = sys.argv[1] + os.environ.get("RANK", "")
with open(path, "w") as file:
    json.dump(seen, file)
