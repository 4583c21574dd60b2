"""The rank's bootstrap: it runs inside the worker, before the script, and leaves no trace there.

In: the engine's directory, first on PYTHONPATH. Out: word to the engine, error file, torch's worker server.

The engine copies this file as `sitecustomize.py` into a directory of the generation and starts `python -u SCRIPT ARGS`
as torchrun does. Python imports it while it starts, so the script is then run by Python itself: `__main__`,
tracebacks, multiprocessing and exit codes are the real ones because nothing of ours is on the stack.

As a program (`python sitecustomize.py JOB PROGRAM ARGS`) it becomes PROGRAM: the bootstrap of a worker without Python.
Nothing here may disturb a script: each part works for itself, or is left out. What is imported costs next to nothing.
"""

from __future__ import annotations

import os
import sys

# Importing `typing` would double the time that Python takes to start.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

# Names inside the engine's directory; engine_boot.py knows them too.
WORD = "main"
HIDDEN_NAME = "sitecustomize"
PR_SET_PDEATHSIG = 1
SIGKILL = 9
# An answer takes milliseconds, on a loaded machine more.
ASKERS_S = 2.0
# From here on torch records collectives without being asked.
RECORDS_BY_ITSELF = (2, 7)
RECORDER_NAMES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")


def quietly(part: Callable[..., None], *args: Any) -> None:
    """Run one part; whatever goes wrong in it stays there."""
    try:
        part(*args)
    except Exception:  # noqa: BLE001  the script must run, with or without this part
        return


def hide(here: str) -> None:
    """Remove every trace of `here` from this process: PYTHONPATH, sys.path, options, sys.orig_argv."""
    # The engine wrote HERE:REST; HERE alone where PYTHONPATH was not set, HERE:HERE where it was set but empty.
    _, separator, rest = os.environ.get("PYTHONPATH", here).partition(os.pathsep)
    if not separator:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = "" if rest == here else rest
    sys.path[:] = [entry for entry in sys.path if entry != here]
    sys.path_importer_cache.pop(here, None)
    job = sys._xoptions.pop("supervisor", None)
    argv = getattr(sys, "orig_argv", [])
    option = f"supervisor={job}"
    if option in argv:
        at = argv.index(option)
        del argv[at - 1 : at + 1]


def die_with_engine() -> None:
    """Ask the kernel for SIGKILL at the engine's death."""
    try:
        # ctypes itself takes a millisecond longer to import.
        import _ctypes as c

        prctl = c.dlsym(c.dlopen(None, 0), "prctl")  # type: ignore[arg-type]
        c.call_function(prctl, (PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0))
    except (ImportError, AttributeError):
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)


def say_begun(here: str) -> None:
    """Say that the script is about to run; die when no engine listens: it was gone before the kernel watched it."""
    import errno

    try:
        tell_engine(here, b"main")
    except OSError as error:
        if error.errno in (errno.ENXIO, errno.ENOENT):
            os.kill(os.getpid(), SIGKILL)
        raise


def tell_engine(here: str, word: bytes) -> None:
    """Say what this rank is at, and when; raises OSError when no engine listens."""
    import time

    pipe = os.open(os.path.join(here, WORD), os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        os.write(pipe, b"%s %d %d\n" % (word, int(os.environ["RANK"]), time.time_ns()))
    finally:
        os.close(pipe)


def show_faults() -> None:
    """Print Python's stack at a fatal signal, as torch's `record` does."""
    import faulthandler

    faulthandler.enable(all_threads=True)


def write_error(path: str, message: str, callstack: str) -> None:
    """Write torch's error file, unless the script's own `record` already did."""
    import json
    import time

    if os.path.exists(path) and os.path.getsize(path) > 0:
        return
    extra = {"py_callstack": callstack, "timestamp": str(int(time.time()))}
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"message": {"message": message, "extraInfo": extra}}, file)


def write_exception(path: str, value: BaseException) -> None:
    """Write the error file for one exception."""
    import traceback

    text = "".join(traceback.format_exception(type(value), value, value.__traceback__))
    write_error(path, f"{type(value).__name__}: {value}", text)


def record_failure(path: str) -> None:
    """Write the error file when Python ends this process because of an exception."""
    import _thread

    pid, main = os.getpid(), _thread.get_ident()

    # An audit hook, not sys.excepthook: scripts look at that one, replace it, and forget ours.
    def hear(event: str, args: tuple[Any, ...]) -> None:
        if event != "sys.excepthook" or os.getpid() != pid or _thread.get_ident() != main:
            return
        # Below a frame, somebody only prints an exception and goes on.
        if sys._getframe().f_back is None and isinstance(args[2], Exception):
            quietly(write_exception, path, args[2])

    sys.addaudithook(hear)


def record_missing_script(path: str) -> None:
    """Write the error file when Python will not find the script, which raises no exception."""
    script = sys.argv[0]
    if script in ("", "-c", "-m") or os.path.isdir(script):
        return
    try:
        with open(script, "rb"):
            return
    except OSError as error:
        write_exception(path, error.with_traceback(None))


class AfterImport:
    """Finds modules like everybody else, but runs `then` once, after `name` was imported."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name = name
        self._then = then

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the spec that the other finders find, with a loader that tells us when it is done."""
        if name != self._name:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(name, path, target) if finder is not self and find else None
            if spec is not None:
                quietly(self._attach, spec.loader)
                return spec
        return None

    def _attach(self, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                quietly(self._then)

        # Python leaves importlib's own frames out of tracebacks; this one belongs to them.
        exec_module.__code__ = exec_module.__code__.replace(co_filename="<frozen importlib._bootstrap>")
        loader.exec_module = exec_module


def serve_stacks_later(here: str) -> None:
    """Start torch's worker server as soon as the script has imported torch.distributed."""
    pid = os.getpid()

    def start() -> None:
        if os.getpid() == pid:
            try:
                record_collectives()
                serve_stacks(here)
            finally:
                say_over_later(here, pid)

    sys.meta_path.insert(0, AfterImport("torch.distributed", start))


def say_over_later(here: str, pid: int) -> None:
    """Say when the script is over: what Python then destroys closes the connections to the others."""
    import atexit

    def say() -> None:
        if os.getpid() == pid:
            quietly(tell_engine, here, b"over")

    atexit.register(say)


def record_collectives() -> None:
    """Switch the flight recorder on where torch does not do it itself; the script's own setting wins."""
    version = sys.modules["torch"].__version__
    major, minor = (int(part) for part in version.split(".")[:2])
    if (major, minor) < RECORDS_BY_ITSELF and not any(name in os.environ for name in RECORDER_NAMES):
        for name in RECORDER_NAMES:
            # Only C code shall see it: os.environ stays what torchrun gives.
            os.putenv(name, "2000")


def serve_stacks(here: str) -> None:
    """Start torch's worker server on a socket in `here`; raises where this torch has none."""
    import _ctypes
    import atexit

    from torch._C._distributed_c10d import _WorkerServer

    directory = os.open(here, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # The path of a socket has 108 bytes at most, wherever the directory lies.
        path = f"/proc/self/fd/{directory}/{int(os.environ['RANK'])}.sock"
        server = without_its_words(lambda: _WorkerServer(path))
    finally:
        os.close(directory)
    # Never destroyed: a forked child would wait for ever for a thread that it does not have.
    _ctypes.Py_INCREF(server)
    # It ends with the process; but who asks for Python's lock while Python ends takes the process down with SIGABRT.
    atexit.register(quietly, part_from_askers, os.path.join(here, os.path.basename(path)), path, os.getpid())


def part_from_askers(file: str, name: str, pid: int) -> None:
    """Let nobody ask the worker server any more, and wait for those who do; nothing in a forked child.

    Not its `shutdown`, which waits for them with Python's lock in its hands. `name`: of its socket, to the kernel.
    """
    import time

    if os.getpid() != pid:
        return
    os.unlink(file)
    end = time.monotonic() + ASKERS_S
    while time.monotonic() < end:
        try:
            if not has_askers(name):
                return
            time.sleep(0.002)
        except (SystemExit, KeyboardInterrupt):
            continue  # of the script's handler of a signal: the process is ending already


def has_askers(name: str) -> bool:
    """Tell whether somebody is connected to the unix socket of that name."""
    with open("/proc/net/unix", encoding="utf-8", errors="replace") as file:
        sockets = [line.split() for line in file]
    # The socket that listens has flag 0x10000.
    return any(fields[7:] == [name] and not int(fields[3], 16) & 0x10000 for fields in sockets[1:])


def without_its_words(make: Callable[[], Any]) -> Any:
    """Return make(), less the lines the worker server writes to stderr; other threads' lines are kept."""
    real = os.dup(2)
    caught = os.memfd_create("stderr")
    try:
        os.dup2(caught, 2)
        try:
            return make()
        finally:
            os.dup2(real, 2)
            lines = os.pread(caught, os.fstat(caught).st_size, 0).splitlines(keepends=True)
            kept = b"".join(line for line in lines if b"WorkerServer.cpp" not in line)
            if kept:
                os.write(2, kept)
    finally:
        os.close(caught)
        os.close(real)


def import_hidden() -> None:
    """Import the sitecustomize that ours stood before; raises what it raises, or that there is none."""
    del sys.modules[HIDDEN_NAME]
    __import__(HIDDEN_NAME)


def bootstrap() -> None:
    """Prepare this Python process to be a rank; ends with the system's own sitecustomize."""
    here = os.path.dirname(os.path.abspath(__file__))
    quietly(hide, here)
    quietly(die_with_engine)
    quietly(show_faults)
    path = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    if path:
        quietly(record_failure, path)
        quietly(record_missing_script, path)
    quietly(serve_stacks_later, here)
    try:
        import_hidden()
    finally:
        quietly(say_begun, here)


def why_not(program: str, error: OSError) -> str:
    """Say why a program cannot be started; the kernel's words mislead where the file itself is there."""
    if isinstance(error, FileNotFoundError) and "/" not in program:
        return "No such program in PATH"
    if isinstance(error, FileNotFoundError) and os.path.exists(program):
        return "its first line names an interpreter that is not there (Windows line ends?)"
    return str(error.strerror)


def become(argv: list[str]) -> int:
    """Replace this process by a program: argv is JOB PROGRAM ARGS; returns a shell's exit status if that fails."""
    import signal

    program = argv[1:]
    here = os.path.dirname(os.path.abspath(__file__))
    quietly(die_with_engine)
    # Python ignores them for itself; a program started by torchrun has them at their defaults.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    quietly(say_begun, here)
    try:
        os.execvp(program[0], program)
    except OSError as error:
        why = why_not(program[0], error)
        # exec does not say which program it could not start.
        named = type(error)(error.errno, why, program[0])
        quietly(write_exception, os.environ.get("TORCHELASTIC_ERROR_FILE", os.devnull), named)
        sys.stderr.write(f"{program[0]}: {why}\n")
        return 127 if isinstance(error, FileNotFoundError) else 126


if __name__ == HIDDEN_NAME:
    bootstrap()
elif __name__ == "__main__":
    sys.exit(become(sys.argv[1:]))
