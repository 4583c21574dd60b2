"""The GPUs of this node, read by a process of its own: a driver that hangs must not hold the agent.

In: a line on stdin for each reading; NVML through its library, else nvidia-smi. Out: a line of JSON each: a list of
GPUs, what a GPU does not tell is None. The process ends with its stdin, or at once where there is no GPU.
"""

from __future__ import annotations

import csv
import ctypes
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

# nvidia-smi starts the driver's library anew each time.
TOOL_EVERY_S = 5.0
TOOL_DEADLINE_S = 10.0
_MIB = 1 << 20
# What nvidia-smi calls it, what we call it, by how much to multiply.
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
Gpu = dict[str, Any]
Reader = Callable[[], "list[Gpu]"]


def may_be_here() -> bool:
    """Whether it is worth a process to look."""
    return any(map(os.path.exists, ("/dev/nvidiactl", "/dev/dxg"))) or shutil.which("nvidia-smi") is not None


def parse_table(text: str) -> list[Gpu]:
    """Return the GPUs that nvidia-smi lists in csv,noheader,nounits; a line of another form is no GPU."""
    found = []
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(row) == len(_QUERY) and row[0].strip().isdigit():
            cells = zip(_QUERY, row)
            found.append({**{name: _value(cell.strip(), factor) for (_, name, factor), cell in cells}, "xid": None})
    return found


def _value(cell: str, factor: int | None) -> Any:
    """Return a number or text; None for what the tool says instead: [N/A], [Not Supported], [GPU requires reset] …."""
    if factor is None:
        return None if not cell or cell.startswith("[") or cell == "N/A" else cell
    try:
        number = float(cell) * factor
    except ValueError:
        return None
    return int(number) if number.is_integer() else number


def tool_reader() -> Reader | None:
    """Return what asks nvidia-smi, None where there is none or it lists no GPU."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, f"--query-gpu={','.join(name for name, _, _ in _QUERY)}", "--format=csv,noheader,nounits"]
    last: list[Gpu] = []
    asked = -TOOL_EVERY_S

    def read() -> list[Gpu]:
        nonlocal last, asked
        if time.monotonic() - asked >= TOOL_EVERY_S:
            asked = time.monotonic()
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=TOOL_DEADLINE_S)
            last = [{**gpu, "t": asked} for gpu in parse_table(done.stdout.decode(errors="replace"))]
        return last

    return read if read() else None


class _Rates(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Event(ctypes.Structure):
    _fields_ = (
        ("device", ctypes.c_void_p),
        ("type", ctypes.c_ulonglong),
        ("data", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


_XID_EVENT = 8
_SM_CLOCK = 1
_UNCORRECTED, _SINCE_BOOT = 1, 0


class Nvml:
    """NVML by its C library; raises OSError where it is not there or does not start."""

    def __init__(self, library: Any) -> None:
        self._library = library
        count = ctypes.c_uint()
        if library.nvmlInit_v2() or library.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            raise OSError("NVML does not start")
        self._devices = [self._device(index) for index in range(count.value)]
        self._xids: dict[int | None, int] = {}
        self._events = ctypes.c_void_p()
        if library.nvmlEventSetCreate(ctypes.byref(self._events)):
            self._events = ctypes.c_void_p()
        for device in self._devices:
            if self._events.value and device.value:
                library.nvmlDeviceRegisterEvents(device, ctypes.c_ulonglong(_XID_EVENT), self._events)

    def _device(self, index: int) -> ctypes.c_void_p:
        device = ctypes.c_void_p()
        self._library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device))
        return device

    def read(self) -> list[Gpu]:
        """Return the GPUs as they are now; one that has fallen off the bus tells nothing but its index."""
        self._hear_xids()
        return [{"index": index, "t": time.monotonic(), **self._tell(one)} for index, one in enumerate(self._devices)]

    def _tell(self, device: ctypes.c_void_p) -> Gpu:
        rates, memory = _Rates(), _Memory()
        knows_rates = self._fill(rates, "nvmlDeviceGetUtilizationRates", device)
        knows_memory = self._fill(memory, "nvmlDeviceGetMemoryInfo", device)
        watts = self._number("nvmlDeviceGetPowerUsage", device)
        limit = self._number("nvmlDeviceGetEnforcedPowerLimit", device)
        return {
            "uuid": self._text("nvmlDeviceGetUUID", device),
            "name": self._text("nvmlDeviceGetName", device),
            "use": rates.gpu if knows_rates else None,
            "mem_used": memory.used if knows_memory else None,
            "mem_total": memory.total if knows_memory else None,
            "temp": self._number("nvmlDeviceGetTemperature", device, 0),
            "power": None if watts is None else watts / 1000,
            "power_limit": None if limit is None else limit / 1000,
            "clock": self._number("nvmlDeviceGetClockInfo", device, _SM_CLOCK),
            "ecc": self._number("nvmlDeviceGetTotalEccErrors", device, _UNCORRECTED, _SINCE_BOOT),
            "xid": self._xids.get(device.value),
        }

    def _fill(self, into: Any, name: str, device: ctypes.c_void_p, *args: int) -> bool:
        """Call a function that writes into a value; False where it cannot, or this driver does not have it."""
        function = getattr(self._library, name, None)
        if not device.value or function is None:
            return False
        return not function(device, *map(ctypes.c_uint, args), ctypes.byref(into))

    def _number(self, name: str, device: ctypes.c_void_p, *args: int) -> int | None:
        # Wide enough for both widths that NVML writes, on a little-endian machine.
        found = ctypes.c_ulonglong()
        return int(found.value) if self._fill(found, name, device, *args) else None

    def _text(self, name: str, device: ctypes.c_void_p) -> str | None:
        text = ctypes.create_string_buffer(96)
        known = device.value and not getattr(self._library, name)(device, text, ctypes.c_uint(len(text)))
        return text.value.decode(errors="replace") if known else None

    def _hear_xids(self) -> None:
        """Note the newest Xid of each GPU since this process has started."""
        event = _Event()
        while self._events.value and not self._library.nvmlEventSetWait_v2(
            self._events, ctypes.byref(event), ctypes.c_uint(0)
        ):
            self._xids[event.device] = event.data


def library_reader() -> Reader | None:
    """Return what asks NVML, None where it is not there or knows no GPU."""
    try:
        nvml = Nvml(ctypes.CDLL("libnvidia-ml.so.1"))
        return nvml.read if nvml.read() else None
    except (OSError, AttributeError):
        return None


def gpu_of(visible: str | None, local_rank: int, gpus: Iterable[Gpu]) -> int | None:
    """Return the index of the GPU that is a rank's own by CUDA_VISIBLE_DEVICES and LOCAL_RANK, None where unknown."""
    entries = [entry.strip() for entry in visible.split(",")] if visible is not None else None
    if entries is not None and not 0 <= local_rank < len(entries):
        return None
    wanted = str(local_rank) if entries is None else entries[local_rank]
    # A slice of a GPU by its older name, MIG-GPU-<uuid>/<instance>/<instance>, names the GPU as well.
    parent = wanted[len("MIG-") :].partition("/")[0] if wanted.startswith("MIG-GPU-") else wanted
    for gpu in gpus:
        if wanted == str(gpu["index"]) or (parent.startswith("GPU-") and str(gpu["uuid"]).startswith(parent)):
            return int(gpu["index"])
    return None


def main() -> int:
    """Answer each line of stdin with the GPUs; returns 0 where there are none, 1 when they cannot be read."""
    try:
        read = library_reader() or tool_reader()
        for _ in sys.stdin:
            if read is None:
                break
            sys.stdout.write(json.dumps(read()) + "\n")
            sys.stdout.flush()
    except (OSError, subprocess.SubprocessError) as error:
        sys.stderr.write(f"GPUs: {error}\n")
        return 1
    return 0
