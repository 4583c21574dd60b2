"""Do what the file `act` names: end in some way, fail, start processes. It writes what a reader would see."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import warnings
import weakref

import held  # type: ignore[import-not-found]


class Thing:
    """Lives in __main__."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __del__(self) -> None:
        if self.value < 0:
            raise RuntimeError("while it is deleted")


def double(thing: Thing) -> Thing:
    return Thing(2 * thing.value)


def child_sees(_: int) -> tuple[object, ...]:
    names = sorted(name for name in os.environ if "PYTHON" in name or "SUPERVISOR" in name)
    descriptors = sorted(os.listdir("/proc/self/fd"))
    return (names, sys._xoptions, "sitecustomize" in sys.modules, sys.argv, len(descriptors), sys.path)


def pool(method: str) -> None:
    with multiprocessing.get_context(method).Pool(2) as workers:
        values = [thing.value for thing in workers.map(double, [Thing(1), Thing(2)])]
        seen = workers.map(child_sees, [0])[0]
    print(method, values, seen[:4] if method == "fork" else seen)


def fails(depth: int) -> None:
    if depth:
        fails(depth - 1)
    try:
        raise ValueError("the first")
    except ValueError as error:
        raise RuntimeError("the failure") from error


def thread_fails() -> None:
    thread = threading.Thread(target=fails, args=(1,), name="worker")
    thread.start()
    thread.join()


def at_exit() -> None:
    for number in range(3):
        atexit.register(print, "atexit", number)
    weakref.finalize(Thing(1), print, "finalized")
    thing = Thing(3)
    vars(sys.modules["__main__"])["kept"] = thing
    weakref.finalize(thing, print, "finalized at exit")
    threading.Timer(0.1, print, ("a thread ends",)).start()
    print("main ends")


def forks() -> None:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(write, b"child %d\n" % len(threading.enumerate()))
        sys.exit(3)
    os.close(write)
    print(os.read(read, 100), os.waitpid(pid, 0)[1])
    try:
        os.wait()
    except ChildProcessError as error:
        print("no more children:", error)


def handles() -> None:
    signal.signal(signal.SIGUSR1, lambda number, _frame: print("signal", number, flush=True))
    os.kill(os.getpid(), signal.SIGUSR1)
    signal.alarm(1)
    signal.pause()


def warns() -> None:
    warnings.warn("of the script", UserWarning, stacklevel=1)
    warnings.warn("not shown in a module", DeprecationWarning, stacklevel=1)
    print(pickle.dumps(Thing(1)), pickle.loads(pickle.dumps(Thing(2))).value)
    del globals()["held"]
    Thing(-1)


def runs() -> None:
    code = "import sys; print(sys.path, sys.orig_argv[1:], sys.argv, 'sitecustomize' in sys.modules)"
    print(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
    print(subprocess.run([sys.executable, "-m", "chunk_of_the_tree"], capture_output=True, check=False, env={}))


ACTS = {
    "at_exit": at_exit,
    "exception": lambda: fails(2),
    "exit3": lambda: sys.exit(3),
    "exit_none": sys.exit,
    "forks": forks,
    "handles": handles,
    "import": lambda: __import__("raises_at_import"),
    "interrupt": lambda: signal.raise_signal(signal.SIGINT),
    "message": lambda: sys.exit("a message"),
    "os_exit": lambda: os._exit(7),
    "pool_fork": lambda: pool("fork"),
    "pool_forkserver": lambda: pool("forkserver"),
    "pool_spawn": lambda: pool("spawn"),
    "runs": runs,
    "syntax": lambda: compile("x = (1,\ny = 2\n", "<text>", "exec"),
    "thread": thread_fails,
    "warns": warns,
}

if __name__ == "__main__":
    held.wait()
    with open("act") as file:
        act = file.read()
    if act.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, act))
    else:
        ACTS[act]()
