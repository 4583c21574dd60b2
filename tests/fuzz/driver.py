"""Runs a function on damaged inputs until it fails in a way that it does not declare, or its time is over.

In: real inputs, how to damage them, the errors that the function declares. Out: nothing; or a failure that names the
seed and the smallest input that was found.

`SUPERVISOR_FUZZ_S` is the processor time for each target in seconds, `SUPERVISOR_FUZZ_SEED` repeats a run.
"""

from __future__ import annotations

import functools
import os
import random
import secrets
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from tests.scratch import outer

SECONDS = float(os.environ.get("SUPERVISOR_FUZZ_S", "1"))
# Of one input: far more than any of these seeds needs, also on a slow machine.
INPUT_CPU_S = 5.0
INPUT_MB = 256
# The smallest input is looked for for so long, in processor time.
SHRINK_S = 20.0
# A longer input is written to a file.
SHOWN_BYTES = 2000

ROOT = Path(__file__).resolve().parents[2]
Damage = Callable[[random.Random, bytes], bytes]
Run = Callable[[bytes], object]
Declared = tuple[type[Exception], ...]


class TooSlow(BaseException):
    """An input took more than INPUT_CPU_S; no `except Exception` may hide that."""


def fuzz(run: Run, seeds: Sequence[bytes], damage: Damage, declared: Declared = ()) -> None:
    """Run the function on damaged seeds; it may raise the declared errors only, and must be fast and small."""
    seed = int(os.environ.get("SUPERVISOR_FUZZ_SEED") or secrets.randbits(32))
    print(f"SUPERVISOR_FUZZ_SEED={seed}")
    dice = random.Random(seed)
    for real in seeds:
        # A seed that is refused says nothing about what lies behind the first check.
        run(real)
    end = time.process_time() + SECONDS
    count = 0
    while time.process_time() < end:
        count += 1
        data = damage(dice, dice.choice(seeds))
        problem = attempt(run, data, declared)
        if problem:
            smallest = shrink(data, functools.partial(_fails_alike, run, declared, _place(problem)))
            problem = attempt(run, smallest, declared) or problem
            raise AssertionError(f"{problem}\nSUPERVISOR_FUZZ_SEED={seed}, input {count}: {_shown(smallest)}")
    print(f"{count} inputs")


def attempt(run: Run, data: bytes, declared: Declared) -> str:
    """Return what went wrong with one input, "" if nothing did; the first line names the place."""
    before = _memory_mb(reset=True)
    try:
        with _bounded(INPUT_CPU_S):
            run(data)
    except declared:
        pass
    except TooSlow as error:
        return f"slow in {_where(error)}: more than {INPUT_CPU_S:g} s"
    except Exception as error:  # noqa: BLE001  any of them is what is looked for
        return f"{type(error).__name__} in {_where(error)}\n{''.join(traceback.format_exception(error)[-8:])}"
    used = _memory_mb() - before
    return f"memory\n{used:.0f} MB for one input" if used > INPUT_MB else ""


def _fails_alike(run: Run, declared: Declared, place: str, data: bytes) -> bool:
    return _place(attempt(run, data, declared)) == place


def shrink(data: bytes, fails: Callable[[bytes], bool]) -> bytes:
    """Return the input without the parts that it fails without."""
    end = time.process_time() + SHRINK_S
    size = max(1, len(data) // 2)
    while size and time.process_time() < end:
        at = 0
        while at < len(data) and time.process_time() < end:
            less = data[:at] + data[at + size :]
            if fails(less):
                data = less
            else:
                at += size
        size //= 2
    return data


@contextmanager
def _bounded(cpu_s: float) -> Iterator[None]:
    """Raise TooSlow inside once it has used that much processor time."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _memory_mb(*, reset: bool = False) -> float:
    """Return the largest size that the process has had; `reset`: forget it, and return the present one."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def _where(error: BaseException) -> str:
    """Return the last place in our code."""
    ours = (str(ROOT / "supervisor"), str(ROOT / "remote_agent"))
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(ours)]
    last = frames[-1] if frames else traceback.extract_tb(error.__traceback__)[-1]
    return f"{Path(last.filename).name}:{last.lineno} {last.name}"


def _place(problem: str) -> str:
    return problem.partition("\n")[0]


def _shown(data: bytes) -> str:
    if len(data) <= SHOWN_BYTES:
        return repr(data)
    path = outer() / f"fuzz-{secrets.token_hex(4)}"
    path.write_bytes(data)
    return f"{len(data)} bytes in {path}"
