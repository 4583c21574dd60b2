"""Do what the argument names: end in some way, fail, start processes. It writes what a reader would see."""

import atexit
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import warnings
import weakref

import early  # type: ignore[import-not-found]


class Thing:
    """Lives in __main__, where children look for it."""

    def __init__(self, value: int) -> None:
        self.value = value


def double(thing: Thing) -> "tuple[int, list[str], bool]":
    return 2 * thing.value, sys.argv[1:], "sitecustomize" in sys.modules


def pool(method: str) -> None:
    with multiprocessing.get_context(method).Pool(2) as workers:
        print(workers.map(double, [Thing(1), Thing(2)]))
        workers.close()
        workers.join()


def fails() -> None:
    try:
        raise ValueError("the first")
    except ValueError as error:
        raise RuntimeError("the failure") from error


def thread_fails() -> None:
    thread = threading.Thread(target=fails, name="worker")
    thread.start()
    thread.join()


def at_exit() -> None:
    atexit.register(print, "at exit")
    globals()["kept"] = thing = Thing(3)
    weakref.finalize(thing, print, "finalized at exit")
    threading.Timer(0.1, print, ("a thread ends",)).start()
    print("main ends")


def forks() -> None:
    pid = os.fork()
    if pid == 0:
        sys.exit(3)
    print(os.waitpid(pid, 0)[1])
    try:
        os.wait()
    except ChildProcessError as error:
        print("no more children:", error)


def runs() -> None:
    code = "import sys; print(sys.path, sys.orig_argv[1:], 'sitecustomize' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


ACTS = {
    "at_exit": at_exit,
    "exception": fails,
    "exit": lambda: sys.exit("a message"),
    "fork": lambda: pool("fork"),
    "forks": forks,
    "forkserver": lambda: pool("forkserver"),
    "import": lambda: __import__("no_such_module"),
    "interrupt": lambda: signal.raise_signal(signal.SIGINT),
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "os_exit": lambda: os._exit(7),
    "runs": runs,
    "spawn": lambda: pool("spawn"),
    "thread": thread_fails,
    "waits": signal.pause,
    "warns": lambda: warnings.warn(early.__name__, UserWarning, stacklevel=1),
}

if __name__ == "__main__":
    print("[{}, {}]", flush=True)  # as the other scripts of its test do
    ACTS[sys.argv[1]]()  # type: ignore[no-untyped-call]
