"""The bootstrap of a rank: it runs inside the worker before the script, and leaves no trace there.

In: the engine's directory, first on PYTHONPATH. Out: messages to the engine, error file, torch's worker server.

The engine copies this file as `sitecustomize.py` into a directory of the generation and starts `python -u SCRIPT ARGS`
as torchrun does. Python imports it at startup and then runs the script itself, so `__main__`, tracebacks,
multiprocessing and exit codes are the real ones: nothing of ours is on the stack.

As a program (`python sitecustomize.py JOB PROGRAM ARGS`) it executes PROGRAM: the bootstrap of a worker without Python.
Nothing here may disturb a script: each part works alone or is skipped, and the imports cost almost nothing.
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

# These are names inside the engine's directory, which boot_dir.py uses too.
PIPE = "main"
HIDDEN_NAME = "sitecustomize"
IMPORTS = "imports"
WAITING = "supervisor_waiting"
SAMPLER = "supervisor_sampler"
PR_SET_PDEATHSIG = 1
SIGKILL = 9
# An answer takes milliseconds, on a loaded machine more.
CLIENTS_S = 2.0
# Since this version torch records collectives by default.
RECORDS_BY_DEFAULT = (2, 7)
RECORDER_NAMES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")


def quietly(part: Callable[..., None], *args: Any) -> None:
    """Run one part and ignore its errors."""
    try:
        part(*args)
    except Exception:  # noqa: BLE001  the script must run, with or without this part
        return


def hide(here: str) -> None:
    """Remove every trace of `here` from this process: PYTHONPATH, sys.path, options, sys.orig_argv."""
    # The engine wrote HERE:REST; HERE when PYTHONPATH was not set, HERE:HERE when it was empty.
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
    """Make the kernel send SIGKILL when the engine dies."""
    try:
        # ctypes takes a millisecond longer to import.
        import _ctypes as c

        prctl = c.dlsym(c.dlopen(None, 0), "prctl")  # type: ignore[arg-type]
        c.call_function(prctl, (PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0))
    except (ImportError, AttributeError):
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)


def report_begun(here: str) -> None:
    """Report that the script is about to run; die when no engine listens: it died before the kernel watched it."""
    import errno

    try:
        notify_engine(here, b"main")
    except OSError as error:
        if error.errno in (errno.ENXIO, errno.ENOENT):
            os.kill(os.getpid(), SIGKILL)
        raise


def notify_engine(here: str, what: bytes) -> None:
    """Send a message with the rank and the time; raises OSError when no engine listens."""
    import time

    pipe = os.open(os.path.join(here, PIPE), os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        os.write(pipe, b"%s %d %d\n" % (what, int(os.environ["RANK"]), time.time_ns()))
    finally:
        os.close(pipe)


def show_faults() -> None:
    """Print Python's stack at a fatal signal, as torch's `record` does."""
    import faulthandler

    faulthandler.enable(all_threads=True)


def write_error(path: str, message: str, callstack: str) -> None:
    """Write torch's error file, unless the script's own `record` has written it."""
    import json
    import time

    if os.path.exists(path) and os.path.getsize(path) > 0:
        return
    extra = {"py_callstack": callstack, "timestamp": str(int(time.time()))}
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"message": {"message": message, "extraInfo": extra}}, file)


def write_exception(path: str, value: BaseException) -> None:
    """Write the error file for an exception."""
    import traceback

    text = "".join(traceback.format_exception(type(value), value, value.__traceback__))
    write_error(path, f"{type(value).__name__}: {value}", text)


class Imports:
    """Notes in a file of the engine's directory which modules a rank runs, in the order in which they begin."""

    def __init__(self, here: str) -> None:
        self._path = os.path.join(here, IMPORTS)
        self._pid = os.getpid()

    def on_event(self, event: str, args: tuple[Any, ...]) -> None:
        """Take an audit event: a file of Python is run, or a compiled module is loaded."""
        if event == "exec":
            caller = sys._getframe(3)
            if caller.f_code.co_name != "_call_with_frames_removed":
                return
            name, file = caller.f_locals["args"][1].get("__name__"), args[0].co_filename
        else:
            name, file = args[0], args[1]
        if file is not None and os.getpid() == self._pid:
            self._write(f"{name}\t{file}\n".encode(errors="replace"))

    def _write(self, line: bytes) -> None:
        # Each name is written at once: the last import cannot be recognised, and scripts must not see our descriptors.
        try:
            notes = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        except OSError:
            return
        try:
            os.write(notes, line)
        finally:
            os.close(notes)


def note_imports(here: str) -> None:
    """Note which modules the node's first rank runs, if its engine asks for it: a waiting process loads them."""
    if os.environ.get("LOCAL_RANK") != "0" or not os.path.exists(os.path.join(here, IMPORTS)):
        return
    imports = Imports(here)

    def on_event(event: str, args: tuple[Any, ...]) -> None:
        if event in ("exec", "import"):
            quietly(imports.on_event, event, args)

    sys.addaudithook(on_event)


def record_failure(path: str) -> None:
    """Write the error file when an exception ends this process."""
    import _thread

    pid, main = os.getpid(), _thread.get_ident()

    # An audit hook is used because scripts inspect and replace sys.excepthook.
    def on_event(event: str, args: tuple[Any, ...]) -> None:
        if event != "sys.excepthook" or os.getpid() != pid or _thread.get_ident() != main:
            return
        # With a frame below, the script only prints an exception and continues.
        if sys._getframe().f_back is None and isinstance(args[2], Exception):
            quietly(write_exception, path, args[2])

    sys.addaudithook(on_event)


def record_missing_script(path: str) -> None:
    """Write the error file when Python cannot read the script, which raises no exception."""
    script = sys.argv[0]
    if script in ("", "-c", "-m") or os.path.isdir(script):
        return
    try:
        with open(script, "rb"):
            return
    except OSError as error:
        write_exception(path, error.with_traceback(None))


class AfterImport:
    """A finder that runs `then` once, after the module `name` was imported."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name = name
        self._then = then

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the spec of the other finders, with a loader that then calls `then`."""
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

        # Python omits importlib's frames from tracebacks, and so this one too.
        exec_module.__code__ = exec_module.__code__.replace(co_filename="<frozen importlib._bootstrap>")
        loader.exec_module = exec_module


def serve_stacks_later(here: str) -> None:
    """Start torch's worker server once torch.distributed is imported; that may be so already."""
    pid = os.getpid()

    def start() -> None:
        if os.getpid() == pid:
            quietly(report_group, here)
            try:
                record_collectives()
                serve_stacks(here)
            finally:
                report_over_later(here, pid)
                quietly(sample_later, here)

    if "torch.distributed" in sys.modules:
        quietly(start)
    else:
        sys.meta_path.insert(0, AfterImport("torch.distributed", start))


class InitTimer:
    """Takes the place of torch's wait counter for one call of init_process_group, which torch wraps in it.

    It is no function around the call: signatures, stacks and tracebacks stay as they are.
    """

    def __init__(self, here: str, module: Any) -> None:
        self._here = here
        self._module = module
        self._real = module._WaitCounter
        self._counter: Any = None
        self._guard: Any = None
        self._pid = os.getpid()

    def __call__(self, name: str) -> Any:
        if not name.endswith(".init_process_group") or os.getpid() != self._pid:
            return self._real(name)
        self._module._WaitCounter = self._real
        self._counter = self._real(name)
        return self

    def guard(self) -> InitTimer:
        return self

    def __enter__(self) -> None:
        quietly(notify_engine, self._here, b"init")
        self._guard = self._counter.guard()
        self._guard.__enter__()

    def __exit__(self, *error: object) -> None:
        self._guard.__exit__(*error)
        if error[0] is None:
            quietly(notify_engine, self._here, b"group")


def report_group(here: str) -> None:
    """Report when init_process_group is called, and when it has returned; not under a torch without its counter."""
    module: Any = sys.modules["torch.distributed.c10d_logger"]
    module._WaitCounter = InitTimer(here, module)


def report_over_later(here: str, pid: int) -> None:
    """Report when the script is over: after that Python closes the connections to the other ranks."""
    import atexit

    def report() -> None:
        if os.getpid() == pid:
            quietly(notify_engine, here, b"over")

    atexit.register(report)


def record_collectives() -> None:
    """Enable the flight recorder where torch does not do so by default; the script's own setting wins."""
    version = sys.modules["torch"].__version__
    major, minor = (int(part) for part in version.split(".")[:2])
    if (major, minor) < RECORDS_BY_DEFAULT and not any(name in os.environ for name in RECORDER_NAMES):
        for name in RECORDER_NAMES:
            # Only C code sees the variable: os.environ stays as under torchrun.
            os.putenv(name, "2000")


def serve_stacks(here: str) -> None:
    """Start torch's worker server on a socket in `here`; raises when this torch has none."""
    import _ctypes
    import atexit

    from torch._C._distributed_c10d import _WorkerServer

    directory = os.open(here, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # A socket's path is limited to 108 bytes.
        path = f"/proc/self/fd/{directory}/{int(os.environ['RANK'])}.sock"
        server = without_server_log(lambda: _WorkerServer(path))
    finally:
        os.close(directory)
    # The server is never destroyed: a forked child would wait forever for a thread that it does not have.
    _ctypes.Py_INCREF(server)
    # It ends with the process, but a request that needs the GIL while Python ends would abort the process.
    atexit.register(quietly, stop_serving, os.path.join(here, os.path.basename(path)), path, os.getpid())


def stop_serving(file: str, name: str, pid: int) -> None:
    """Refuse new requests to the worker server and wait for current ones; does nothing in a forked child.

    Its `shutdown` would wait while it holds the GIL. `name`: the kernel's name of its socket.
    """
    import time

    if os.getpid() != pid:
        return
    end = time.monotonic() + CLIENTS_S
    while True:
        try:
            _wait_for_clients(file, name, end)
            break
        except (SystemExit, KeyboardInterrupt):
            # The script's signal handler may raise at any step; the process is ending already.
            continue


def _wait_for_clients(file: str, name: str, end: float) -> None:
    import time

    if os.path.exists(file):
        os.unlink(file)
    while time.monotonic() < end and has_clients(name):
        time.sleep(0.002)


def has_clients(name: str) -> bool:
    """Return whether a client is connected to the Unix socket of that name."""
    with open("/proc/net/unix", encoding="utf-8", errors="replace") as file:
        sockets = [line.split() for line in file]
    # The listening socket has flag 0x10000.
    return any(fields[7:] == [name] and not int(fields[3], 16) & 0x10000 for fields in sockets[1:])


def sample_later(here: str) -> None:
    """Start the thread that samples this rank in bouts, unless the job has it off: then its file is not there."""
    if os.path.exists(os.path.join(here, f"{SAMPLER}.py")):
        import_from(here, SAMPLER).start(here, int(os.environ["RANK"]))


def without_server_log(make: Callable[[], Any]) -> Any:
    """Return make() without the worker server's lines on stderr; other threads' lines are kept."""
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
    """Import the sitecustomize that ours has hidden; raises ImportError when there is none."""
    del sys.modules[HIDDEN_NAME]
    __import__(HIDDEN_NAME)


def import_from(here: str, name: str) -> Any:
    """Return a module of the engine's directory, of which sys.path and sys.modules keep no trace."""
    sys.path.insert(0, here)
    try:
        return __import__(name)
    finally:
        sys.path.remove(here)
        sys.path_importer_cache.pop(here, None)
        sys.modules.pop(name, None)


def wait_for_orders(here: str) -> str:
    """Load modules and wait; returns, in each rank that is forked then, its own directory."""
    known = set(sys.modules)
    try:
        there: str = import_from(here, WAITING).wait(here, known)
    except BaseException:  # noqa: BLE001  Python would ignore it and run the script, in a process that is no rank
        os._exit(1)
    return there


def bootstrap() -> None:
    """Prepare this Python process to be a rank, then import the system's own sitecustomize."""
    here = os.path.dirname(os.path.abspath(__file__))
    quietly(hide, here)
    quietly(die_with_engine)
    if os.path.exists(os.path.join(here, f"{WAITING}.py")):
        here = wait_for_orders(here)
    quietly(show_faults)
    path = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    if path:
        quietly(record_failure, path)
        quietly(record_missing_script, path)
    quietly(note_imports, here)
    quietly(serve_stacks_later, here)
    try:
        import_hidden()
    finally:
        quietly(report_begun, here)


def reason(program: str, error: OSError) -> str:
    """Return why a program cannot be started; the kernel's message misleads when the file exists."""
    if isinstance(error, FileNotFoundError) and "/" not in program:
        return "No such program in PATH"
    if isinstance(error, FileNotFoundError) and os.path.exists(program):
        return "its first line names an interpreter that does not exist (Windows line endings?)"
    return str(error.strerror)


def exec_program(argv: list[str]) -> int:
    """Replace this process by a program: argv is JOB PROGRAM ARGS; returns a shell's exit code on failure."""
    import signal

    program = argv[1:]
    here = os.path.dirname(os.path.abspath(__file__))
    quietly(die_with_engine)
    # Python ignores these signals; a program that torchrun starts has their defaults.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    quietly(report_begun, here)
    try:
        os.execvp(program[0], program)
    except OSError as error:
        why = reason(program[0], error)
        # The error of exec does not name the program.
        named = type(error)(error.errno, why, program[0])
        quietly(write_exception, os.environ.get("TORCHELASTIC_ERROR_FILE", os.devnull), named)
        sys.stderr.write(f"{program[0]}: {why}\n")
        return 127 if isinstance(error, FileNotFoundError) else 126


if __name__ == HIDDEN_NAME:
    bootstrap()
elif __name__ == "__main__":
    sys.exit(exec_program(sys.argv[1:]))
