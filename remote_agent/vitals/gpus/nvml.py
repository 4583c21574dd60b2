"""NVIDIA GPUs by NVML, the driver's C library.

In: libnvidia-ml.so.1. Out: one `Gpu` for each device, with its Xid events.
"""

from __future__ import annotations

import ctypes
import os
import time
from typing import TYPE_CHECKING, Any

from remote_agent.vitals.gpus.gpu import NVIDIA

if TYPE_CHECKING:
    from remote_agent.vitals.gpus.gpu import Gpu, Reader

_XID_EVENT = 8
_SM_CLOCK = 1
_UNCORRECTED, _SINCE_BOOT = 1, 0


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


def may_be_here() -> bool:
    """Return whether the driver's device files exist."""
    return any(map(os.path.exists, ("/dev/nvidiactl", "/dev/dxg")))


def open_reader() -> Reader | None:
    """Return a function that reads NVML, or None when the library is missing or lists no GPU."""
    try:
        nvml = Nvml(ctypes.CDLL("libnvidia-ml.so.1"))
        return nvml.read if nvml.read() else None
    except (OSError, AttributeError):
        return None


class Nvml:
    """A session with the library; raises OSError when NVML does not start."""

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
        """Return the GPUs; one that has fallen off the bus has an index and no values."""
        self._read_events()
        return [self._read_one(index, device) for index, device in enumerate(self._devices)]

    def _read_one(self, index: int, device: ctypes.c_void_p) -> Gpu:
        rates, memory = _Rates(), _Memory()
        has_rates = self._fill(rates, "nvmlDeviceGetUtilizationRates", device)
        has_memory = self._fill(memory, "nvmlDeviceGetMemoryInfo", device)
        power_mw = self._number("nvmlDeviceGetPowerUsage", device)
        limit_mw = self._number("nvmlDeviceGetEnforcedPowerLimit", device)
        return {
            "index": index,
            "uuid": self._text("nvmlDeviceGetUUID", device),
            "name": self._text("nvmlDeviceGetName", device),
            "use": rates.gpu if has_rates else None,
            "mem_used": memory.used if has_memory else None,
            "mem_total": memory.total if has_memory else None,
            "temp": self._number("nvmlDeviceGetTemperature", device, 0),
            "power": None if power_mw is None else power_mw / 1000,
            "power_limit": None if limit_mw is None else limit_mw / 1000,
            "clock": self._number("nvmlDeviceGetClockInfo", device, _SM_CLOCK),
            "ecc": self._number("nvmlDeviceGetTotalEccErrors", device, _UNCORRECTED, _SINCE_BOOT),
            "xid": self._xids.get(device.value),
            "t": time.monotonic(),
            "chosen_by": NVIDIA,
        }

    def _fill(self, into: Any, name: str, device: ctypes.c_void_p, *args: int) -> bool:
        """Call a function that writes into a value; returns False when it fails or this driver does not have it."""
        function = getattr(self._library, name, None)
        if not device.value or function is None:
            return False
        return not function(device, *map(ctypes.c_uint, args), ctypes.byref(into))

    def _number(self, name: str, device: ctypes.c_void_p, *args: int) -> int | None:
        # NVML writes 32 or 64 bits; on a little-endian machine the wider type holds both.
        value = ctypes.c_ulonglong()
        return int(value.value) if self._fill(value, name, device, *args) else None

    def _text(self, name: str, device: ctypes.c_void_p) -> str | None:
        text = ctypes.create_string_buffer(96)
        known = device.value and not getattr(self._library, name)(device, text, ctypes.c_uint(len(text)))
        return text.value.decode(errors="replace") if known else None

    def _read_events(self) -> None:
        """Store the newest Xid of each GPU since this process started."""
        event = _Event()
        while self._events.value and not self._library.nvmlEventSetWait_v2(
            self._events, ctypes.byref(event), ctypes.c_uint(0)
        ):
            self._xids[event.device] = event.data
