"""NVIDIA GPUs by nvidia-smi, where NVML cannot be used.

In: the table of `nvidia-smi --query-gpu`. Out: one `Gpu` for each row.
"""

from __future__ import annotations

import csv
import shutil
import subprocess
import time
from typing import TYPE_CHECKING, Any, cast

from remote_agent.vitals.gpus.gpu import NVIDIA

if TYPE_CHECKING:
    from remote_agent.vitals.gpus.gpu import Gpu, Reader

# nvidia-smi loads the driver's library each time.
EVERY_S = 5.0
DEADLINE_S = 10.0
_MIB = 1 << 20
# Each entry has the column's name, our name, and the factor (None for text).
_QUERY = (
    ("index", "index", 1),
    ("uuid", "uuid", None),
    ("name", "name", None),
    ("utilization.gpu", "use", 1),
    ("memory.used", "mem_used", _MIB),
    ("memory.total", "mem_total", _MIB),
    ("temperature.gpu", "temp", 1),
    ("power.draw", "power", 1),
    ("enforced.power.limit", "power_limit", 1),
    ("clocks.current.sm", "clock", 1),
    ("ecc.errors.uncorrected.volatile.total", "ecc", 1),
)


def may_be_here() -> bool:
    """Return whether nvidia-smi is installed."""
    return shutil.which("nvidia-smi") is not None


def open_reader() -> Reader | None:
    """Return a function that runs nvidia-smi, or None when it is not installed or lists no GPU."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, f"--query-gpu={','.join(name for name, _, _ in _QUERY)}", "--format=csv,noheader,nounits"]
    last: list[Gpu] = []
    started = -EVERY_S

    def read() -> list[Gpu]:
        nonlocal last, started
        if time.monotonic() - started >= EVERY_S:
            started = time.monotonic()
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=DEADLINE_S)
            last = parse_table(done.stdout.decode(errors="replace"), started)
        return last

    return read if read() else None


def parse_table(text: str, t: float) -> list[Gpu]:
    """Return the GPUs in output of format csv,noheader,nounits; other lines are ignored."""
    gpus = []
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(row) == len(_QUERY) and row[0].strip().isdigit():
            values = {name: _value(cell.strip(), factor) for (_, name, factor), cell in zip(_QUERY, row)}
            gpus.append(cast("Gpu", {**values, "xid": None, "t": t, "chosen_by": NVIDIA}))
    return gpus


def _value(cell: str, factor: int | None) -> Any:
    """Return a number or text; None for [N/A], [Not Supported], [GPU requires reset] and the like."""
    if factor is None:
        return None if not cell or cell.startswith("[") or cell == "N/A" else cell
    try:
        number = float(cell) * factor
    except ValueError:
        return None
    return int(number) if number.is_integer() else number
