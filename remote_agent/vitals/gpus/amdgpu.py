"""The GPUs of AMD, as the kernel's driver amdgpu shows them in sysfs.

In: /sys/class/drm. Out: one `Gpu` for each card, in the order of their PCI addresses, which is HIP's.

Files and units: https://docs.kernel.org/gpu/amdgpu/thermal.html and .../amdgpu/driver-misc.html (power in microwatts,
temperature in thousandths of a degree, clock in hertz, memory in bytes).
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from remote_agent.base.files import read_text
from remote_agent.vitals.gpus.gpu import AMD

if TYPE_CHECKING:
    from remote_agent.vitals.gpus.gpu import Gpu, Reader

DRM = Path("/sys/class/drm")
_VENDOR = "0x1002"


def may_be_here() -> bool:
    """Return whether the kernel's compute driver for AMD has a device."""
    return Path("/dev/kfd").exists()


def open_reader() -> Reader | None:
    """Return a function that reads the cards, None when there are none."""
    cards = _cards(DRM)
    return (lambda: [_read(index, card) for index, card in enumerate(cards)]) if cards else None


def _cards(drm: Path) -> list[Path]:
    devices = {(card / "device").resolve() for card in drm.glob("card*") if card.name[4:].isdigit()}
    ours = (one for one in devices if read_text(one / "vendor").strip() == _VENDOR)
    return sorted(one for one in ours if (one / "gpu_busy_percent").exists())


def _read(index: int, card: Path) -> Gpu:
    sensors = next(iter(sorted(card.glob("hwmon/hwmon*"))), card)
    power = _number(sensors / "power1_average", 1e-6)
    return {
        "index": index,
        "uuid": read_text(card / "unique_id").strip() or None,
        "name": read_text(card / "product_name").strip() or None,
        "use": _number(card / "gpu_busy_percent"),
        "mem_used": _whole(card / "mem_info_vram_used"),
        "mem_total": _whole(card / "mem_info_vram_total"),
        "temp": _number(sensors / "temp1_input", 1e-3),
        # Newer cards report the current power only.
        "power": _number(sensors / "power1_input", 1e-6) if power is None else power,
        "power_limit": _number(sensors / "power1_cap", 1e-6),
        "clock": _number(sensors / "freq1_input", 1e-6),
        "ecc": _errors(card / "ras" / "umc_err_count"),
        "xid": None,
        "t": time.monotonic(),
        "chosen_by": AMD,
    }


def _number(path: Path, factor: float = 1.0) -> float | None:
    try:
        return round(float(read_text(path)) * factor, 3)
    except ValueError:
        return None


def _whole(path: Path) -> int | None:
    number = _number(path)
    return None if number is None else int(number)


def _errors(path: Path) -> int | None:
    """Return the uncorrected memory errors from the lines `ue: N` and `ce: N`."""
    lines = dict(line.split(": ", 1) for line in read_text(path).splitlines() if ": " in line)
    return int(lines["ue"]) if lines.get("ue", "").isdigit() else None
