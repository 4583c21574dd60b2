"""What a rank's time goes to: one thread looks at the main thread's stack 20 times a second, in bouts.

In: the order and the pipe `wake` in the engine's directory. Out: RANK.phases there, the newest windows of this rank.

It is copied next to the bootstrap (worker.py), which starts it once torch.distributed is imported. Between bouts the
thread is blocked in the kernel. It takes no lock, imports nothing, and keeps no frame for longer than one look.

A window is 10 s of the coordinator's clock, so those of all ranks can be compared. The time since the previous look
counts for the place that is seen now: a call into C that keeps the GIL delays this thread, and is seen at its end.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import gc
import json
import os
import sys
import threading
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType, FrameType
    from typing import Any

    Site = tuple[str, str, str, int]
    """Phase, file, function, line."""

# Names in the engine's directory, which inspect/phases.py uses too.
ORDER, WAKE, SUFFIX = "sample", "wake", ".phases"
WINDOW_NS = 10_000_000_000
# A fixed period could meet steps of the same length always in the same place.
PERIOD_S, JITTER = 0.05, 0.25
GOLDEN = 0.618
# After a longer gap the process was probably suspended.
GAP_S = 60.0
# Frames of a stack that are looked at, places that are known, and reported, windows and code objects that are kept.
MAX_FRAMES, MAX_SITES, MAX_REPORTED, MAX_WINDOWS, MAX_CODES = 64, 128, 8, 3, 8192
# Phases and places with less time in a window are not reported.
LEAST_S = 0.05
STACK_BYTES = 512 * 1024
# How long the end of Python waits for this thread's own end.
END_S = 0.2

# What code does, by a part of its file's path, for the functions named there or for all. The innermost frame with a
# rule decides.
RULES = (
    ("/torch/distributed/distributed_c10d.py", "p2p",
     ("send", "recv", "isend", "irecv", "batch_isend_irecv", "send_object_list", "recv_object_list")),
    ("/torch/distributed/pipelining/", "p2p", ("_wait_batch_p2p", "_batch_p2p")),
    ("/p2p_communication.py", "p2p", ()),
    ("/torch/distributed/distributed_c10d.py", "wait", ()),
    ("/torch/distributed/_functional_collectives.py", "wait", ()),
    ("/torch/nn/parallel/distributed.py", "wait",
     ("_sync_buffers", "_sync_module_states", "_distributed_broadcast_coalesced", "_default_broadcast_coalesced")),
    ("/torch/distributed/utils.py", "wait", ("_sync_params_and_buffers", "_verify_param_shape_across_processes")),
    ("/torch/serialization.py", "checkpoint", ()),
    ("/torch/distributed/checkpoint/", "checkpoint", ()),
    ("/safetensors/", "checkpoint", ()),
    ("/torch/utils/data/", "input", ()),
    ("/accelerate/data_loader.py", "input", ()),
    ("/webdataset/", "input", ()),
    ("/torch/utils/tensorboard/", "logging", ()),
    ("/tensorboardX/", "logging", ()),
    ("/logging/__init__.py", "logging", ()),
    ("/wandb/", "logging", ()),
    ("/mlflow/", "logging", ()),
    ("/tqdm/", "logging", ()),
    ("/torch/optim/lr_scheduler.py", "", ()),
    ("/torch/optim/", "optimizer", ()),
    ("/torch/autograd/graph.py", "backward", ("_engine_run_backward",)),
    ("/torch/autograd/__init__.py", "backward", ("backward", "grad")),
    ("/torch/_tensor.py", "backward", ("backward",)),
    ("/torch/nn/modules/module.py", "forward", ("_call_impl", "_wrapped_call_impl", "_slow_forward")),
    ("/torch/nn/functional.py", "forward", ()),
)  # fmt: skip
# These decide also when they are further out: what runs inside is an import or a compilation.
OUTER = (
    ("<frozen importlib._bootstrap>", "start", ("_find_and_load",)),
    ("/torch/_dynamo/convert_frame.py", "compile", ()),
    ("/torch/_inductor/compile_fx.py", "compile", ()),
)
# Functions of the user or of a trainer: forward passes and the script's own lines inside are no training.
EVALUATES = ("evaluate", "evaluation_loop", "validate", "validation_loop", "validation_step", "_evaluate", "_validate")
SAVES = ("save_checkpoint", "_save_checkpoint", "save_model", "save_pretrained")
# The work of the user's own lines, and what it is called inside an evaluation.
SCRIPT, EVALUATION = "script", "eval"
# The main thread is in C++ below `backward`, where DDP also waits for other ranks: the kernel knows which.
ENGINE = "engine"
ANONYMOUS = ("<lambda>", "<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>")
# Code without a file that a person has written.
GENERATED = ("<eval_with_key>", "<string>", "<frozen ", "/torchinductor_", "<__array_function__")


def libraries() -> tuple[str, ...]:
    """Return the directories of this Python's own and installed modules."""
    own = os.path.dirname(os.__file__)
    installed = [path for path in sys.path if path.endswith(("/site-packages", "/dist-packages"))]
    return tuple(f"{path}/" for path in (own, *installed))


class Window:
    """What the main thread did in one window; times in seconds."""

    def __init__(self, number: int, end_ns: int, counts: list[int]) -> None:
        self.number = number
        self.end_ns = end_ns
        self.counts = counts
        """The counters of the main thread when it began."""
        self.looks = 0
        self.phases: dict[str, list[float]] = {}
        """By phase: time, and the processor's share of it."""
        self.sites: dict[Site, float] = {}
        self.disk_s = 0.0
        self.cuda = getattr(getattr(sys.modules.get("torch"), "cuda", None), "_initialized", False) is True

    def add(self, site: Site, seconds: float, cpu_s: float, state: str) -> None:
        """Count this time for what was seen at its end."""
        times = self.phases.setdefault(site[0], [0.0, 0.0])
        times[0] += seconds
        times[1] += cpu_s
        if state == "D":
            self.disk_s += seconds
        if site not in self.sites and len(self.sites) >= MAX_SITES:
            del self.sites[min(self.sites, key=self.sites.__getitem__)]
        self.sites[site] = self.sites.get(site, 0.0) + seconds

    def to_json(self, counts: list[int]) -> dict[str, Any]:
        """Return it as it is written, with the counters at its end."""
        sites = sorted(self.sites.items(), key=lambda item: -item[1])[:MAX_REPORTED]
        faults, delay_ns, processor = counts
        return {
            "window": self.number,
            "looks": self.looks,
            "phases": {
                name: [round(each, 2) for each in times] for name, times in self.phases.items() if times[0] >= LEAST_S
            },
            "disk_s": round(self.disk_s, 3),
            "delay_s": round((delay_ns - self.counts[1]) / 1e9, 3),
            "faults": faults - self.counts[0],
            "processor": processor,
            "cuda": self.cuda,
            "sites": [[*site, round(seconds, 2)] for site, seconds in sites if seconds >= LEAST_S],
        }


class Sampler:
    """The thread of one rank."""

    def __init__(self, here: str, rank: int) -> None:
        self._here = here
        self._path = os.path.join(here, f"{rank}{SUFFIX}")
        self._pid = os.getpid()
        self._main = threading.main_thread().ident or 0
        self._clock = time.pthread_getcpuclockid(self._main)
        self._libraries = libraries()
        self._codes: dict[int, tuple[CodeType, str, str, bool]] = {}
        """By id: the code, which stays alive so; its rule; its rule if it is further out; whether a user wrote it."""
        self._guards = sys.version_info[:2] == (3, 11)
        """In CPython 3.11 a collection in the middle of a look can end the process (python/cpython#106883)."""
        self._turns = 0.0
        self._windows: list[dict[str, Any]] = []
        self._stops = False
        self._has_ended = False

    def run(self) -> None:
        """Sample in bouts until the process ends; a fault of its own ends it silently."""
        try:
            while not self._stops:
                # This waits for a writer, and nothing is open meanwhile.
                os.close(os.open(os.path.join(self._here, WAKE), os.O_RDONLY | os.O_CLOEXEC))
                self._sample()
        except Exception:  # noqa: BLE001  the script must go on, with or without this thread
            return
        finally:
            self._has_ended = True

    def stop(self) -> None:
        """End the thread before Python ends: one that wants the GIL then can abort the process."""
        if os.getpid() != self._pid:
            return
        self._stops = True
        end = time.monotonic() + END_S
        while not self._has_ended and time.monotonic() < end:
            try:
                with contextlib.suppress(OSError):
                    os.close(os.open(os.path.join(self._here, WAKE), os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC))
                time.sleep(0.001)
            except (SystemExit, KeyboardInterrupt):
                # The script's signal handler may raise at any step; the process is ending already.
                continue

    def _order(self) -> tuple[int, int]:
        """Return when sampling ends, and what to add to this clock for the coordinator's, in ns."""
        words = _read(os.path.join(self._here, ORDER)).split()
        # The guard is no proof: there, a rank is sampled only for a reason.
        return (int(words[0]), int(words[1])) if words and not (self._guards and int(words[2])) else (0, 0)

    def _sample(self) -> None:
        """Sample until the order says that it is enough."""
        until_ns, shift_ns = self._order()
        now_ns, cpu_s = time.time_ns(), time.clock_gettime(self._clock)
        last_ns, window = now_ns, self._window(now_ns, shift_ns)
        while now_ns < until_ns and not self._stops:
            self._turns = (self._turns + GOLDEN) % 1
            time.sleep(PERIOD_S * (1 + JITTER * (2 * self._turns - 1)))
            # This is first: whatever gives the GIL away lets the main thread go on.
            site = self._look()
            now_ns, before_s, cpu_s = time.time_ns(), cpu_s, time.clock_gettime(self._clock)
            state = _stat()[0]
            if site[0] == ENGINE:
                # With a GPU, the main thread sleeps while another one queues the work.
                site = ("gpu" if window.cuda else "wait" if state in "SD" else "backward", *site[1:])
            window.looks += 1
            gap_s = (now_ns - last_ns) / 1e9
            if not 0 < gap_s < GAP_S:
                # The clock was set, or the process was suspended.
                last_ns, window = now_ns, self._window(now_ns, shift_ns)
                continue
            while True:
                part_s = (min(now_ns, window.end_ns) - last_ns) / 1e9
                window.add(site, part_s, (cpu_s - before_s) * part_s / gap_s, state)
                last_ns = min(now_ns, window.end_ns)
                if now_ns < window.end_ns:
                    break
                self._write(window)
                window = self._window(last_ns, shift_ns)
                until_ns, shift_ns = self._order()

    def _window(self, now_ns: int, shift_ns: int) -> Window:
        number = (now_ns + shift_ns) // WINDOW_NS
        return Window(number, (number + 1) * WINDOW_NS - shift_ns, _counters())

    def _write(self, window: Window) -> None:
        self._windows = [*self._windows[1 - MAX_WINDOWS :], window.to_json(_counters())]
        _put(self._path, {"windows": self._windows})

    def _look(self) -> Site:
        """Return the main thread's phase and place."""
        enabled = self._guards and gc.isenabled()
        if enabled:
            gc.disable()
        try:
            return self._read_stack(sys._current_frames().get(self._main))
        finally:
            if enabled:
                gc.enable()

    def _read_stack(self, frame: FrameType | None) -> Site:
        if len(self._codes) >= MAX_CODES:
            self._codes.clear()
        phase, place = "", None
        if frame is not None and frame.f_code.co_name == "_engine_run_backward":
            phase = ENGINE
        innermost = frame
        for _ in range(MAX_FRAMES):
            if frame is None:
                break
            code = frame.f_code
            known = self._codes.get(id(code))
            if known is None:
                known = self._codes[id(code)] = self._classify(code)
            _, own, outer, is_user = known
            phase = phase or own
            if outer == EVALUATION:
                phase = EVALUATION if phase in ("", "forward") else phase
            elif outer:
                phase = outer
            if place is None and is_user:
                place = frame
            frame = frame.f_back
        place = place or innermost
        if place is None:
            return (phase or SCRIPT, "", "", 0)
        code = place.f_code
        return (phase or SCRIPT, os.path.basename(code.co_filename), code.co_name, place.f_lineno or 0)

    def _classify(self, code: CodeType) -> tuple[CodeType, str, str, bool]:
        file, name = code.co_filename, code.co_name
        own = next((phase for part, phase, names in RULES if part in file and (not names or name in names)), "")
        outer = next((phase for part, phase, names in OUTER if part in file and (not names or name in names)), "")
        if name in EVALUATES:
            outer = outer or EVALUATION
        if name in SAVES:
            own = own or "checkpoint"
        is_library = file.startswith(self._libraries) or any(part in file for part in GENERATED)
        return code, own, outer, not (is_library or name in ANONYMOUS)


def _read(path: str) -> bytes:
    """Return the beginning of a small file; b"" if there is none."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return b""
    try:
        return os.read(file, 4096)
    finally:
        os.close(file)


def _stat() -> list[str]:
    """Return the fields of the main thread after its name: its state first."""
    return _read(f"/proc/self/task/{os.getpid()}/stat").rpartition(b")")[2].decode().split() or ["?"]


def _counters() -> list[int]:
    """Return the main thread's major page faults, its ns of waiting for a processor, and its processor."""
    fields = _stat()
    delay = _read(f"/proc/self/task/{os.getpid()}/schedstat").split()
    return [int(fields[9]), int(delay[1]) if delay else 0, int(fields[36])] if len(fields) > 36 else [0, 0, -1]


def _put(path: str, document: dict[str, Any]) -> None:
    """Replace a file, so that a reader sees all or nothing of it."""
    file = os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.write(file, json.dumps(document).encode())
    finally:
        os.close(file)
    os.rename(f"{path}.new", path)


def why_off() -> str:
    """Return why this Python cannot be sampled; "": it can."""
    if sys.implementation.name != "cpython":
        return f"{sys.implementation.name} is not CPython"
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return "this Python is free-threaded"
    return ""


def start(here: str, rank: int) -> None:
    """Start the thread of this process."""
    reason = why_off()
    if reason:
        _put(os.path.join(here, f"{rank}{SUFFIX}"), {"off": reason})
        return
    sampler = Sampler(here, rank)
    atexit.register(sampler.stop)
    before = _thread.stack_size(STACK_BYTES)
    try:
        _thread.start_new_thread(sampler.run, ())
    finally:
        _thread.stack_size(before)
