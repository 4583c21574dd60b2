"""What a node uses is read from its files as kernels write them, and from GPUs as nvidia-smi and NVML tell of them."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from remote_agent.base.tasks import Tasks
from remote_agent.vitals import host as vitals
from remote_agent.vitals.gpus import amdgpu
from remote_agent.vitals.gpus.gpu import Gpu, gpu_of
from remote_agent.vitals.gpus.nvidia_smi import parse_table
from remote_agent.vitals.gpus.nvml import Nvml
from remote_agent.vitals.host import HostUsage, Vitals
from remote_agent.vitals.netif import GLOO, NCCL, TENSORPIPE, choose, interface_of
from tests.fast.test_host_notes import write

GIB = 1 << 30
H100 = (
    "0, GPU-1b5b6a31-8a2f-6d2c-0f54-9c3c7f1e2a10, NVIDIA H100 80GB HBM3, 98, 71342, 81559, 66, 627.31, "
    "700.00, 1980, 0\n"
    "1, GPU-77a0c1de-3c11-e0c1-5a39-0d8e1c2f3b44, NVIDIA H100 80GB HBM3, 0, 4, 81559, 31, 69.95, 700.00, 345, 2\n"
)
MIG = "0, GPU-aa11, NVIDIA A100-SXM4-40GB, [N/A], 25, 40960, 33, 42.10, 400.00, 210, 0\n"
GEFORCE = "0, GPU-bb22, NVIDIA GeForce RTX 3060 Laptop GPU, 12, 512, 6144, 47, [N/A], [Not Supported], 1425, [N/A]\n"
BROKEN = "0, GPU-cc33, [Unknown Error], [Unknown Error], [GPU requires reset], 81559, N/A, [N/A], [N/A], [N/A], [N/A]\n"


def gpus(table: str) -> list[Gpu]:
    return parse_table(table, 0.0)


def test_what_nvidia_smi_lists() -> None:
    first, second = gpus(H100)
    assert first == {
        "index": 0, "uuid": "GPU-1b5b6a31-8a2f-6d2c-0f54-9c3c7f1e2a10", "name": "NVIDIA H100 80GB HBM3", "use": 98,
        "mem_used": 71342 << 20, "mem_total": 81559 << 20, "temp": 66, "power": 627.31, "power_limit": 700,
        "clock": 1980, "ecc": 0, "xid": None, "t": 0.0, "chosen_by": "CUDA_VISIBLE_DEVICES",
    }  # fmt: skip
    assert (second["index"], second["use"], second["ecc"]) == (1, 0, 2)
    (mig,) = gpus(MIG)
    assert (mig["use"], mig["mem_used"]) == (None, 25 << 20)
    (laptop,) = gpus(GEFORCE)
    assert (laptop["use"], laptop["power"], laptop["power_limit"], laptop["ecc"]) == (12, None, None, None)
    (broken,) = gpus(BROKEN)
    known = {name for name, value in broken.items() if value is not None}
    assert known == {
        "index",
        "uuid",
        "mem_total",
        "t",
        "chosen_by",
    }
    assert gpus("No devices were found\n") == []
    assert gpus('Field "clocks.nothing" is not a valid field to query.\n\n') == []
    assert gpus("Unable to determine the device handle for GPU 0000:1A:00.0: Unknown Error\n" + MIG) == [mig]


@pytest.mark.parametrize(
    ("visible", "local_rank", "index"),
    [
        (None, 1, 1), (None, 2, None), ("1,0", 0, 1), ("1", 0, 1), ("1", 1, None), ("", 0, None), ("-1", 0, None),
        ("GPU-77a0c1de", 0, 1), ("MIG-GPU-77a0c1de-3c11-e0c1-5a39-0d8e1c2f3b44/7/0", 0, 1), ("MIG-0d8e1c2f", 0, None),
    ],
)  # fmt: skip
def test_which_gpu_is_a_ranks_own(visible: str | None, local_rank: int, index: int | None) -> None:
    env = {"LOCAL_RANK": str(local_rank)} | ({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    assert gpu_of(env, gpus(H100)) == index


class Driver:
    """NVML's C functions on two GPUs: one is well and has told an Xid, the other has fallen off the bus."""

    LOST, TIMEOUT = 15, 10

    def __init__(self) -> None:
        self.events = [(1, 8, 79)]

    def __getattr__(self, name: str) -> Any:
        if name == "nvmlDeviceGetEnforcedPowerLimit":
            raise AttributeError(name)
        return lambda *args: self.call(name, *args)

    def call(self, name: str, *args: Any) -> int:
        into: Any = getattr(args[-1], "_obj", None) if args else None
        if name in ("nvmlInit_v2", "nvmlDeviceRegisterEvents"):
            return 0
        if name in ("nvmlDeviceGetCount_v2", "nvmlEventSetCreate"):
            into.value = 2
        elif name == "nvmlDeviceGetHandleByIndex_v2":
            into.value = args[0].value + 1
        elif name == "nvmlEventSetWait_v2":
            if not self.events:
                return self.TIMEOUT
            event = args[1]._obj
            event.device, event.type, event.data = self.events.pop()
        elif args[0].value == 2:
            return self.LOST
        elif name in ("nvmlDeviceGetUUID", "nvmlDeviceGetName"):
            args[1].value = b"GPU-1" if name == "nvmlDeviceGetUUID" else b"NVIDIA H100"
        elif name == "nvmlDeviceGetUtilizationRates":
            into.gpu, into.memory = 98, 40
        elif name == "nvmlDeviceGetMemoryInfo":
            into.total, into.used = 80 * GIB, 71 * GIB
        else:
            into.value = {
                "nvmlDeviceGetTemperature": 66, "nvmlDeviceGetPowerUsage": 627310, "nvmlDeviceGetClockInfo": 1980,
                "nvmlDeviceGetTotalEccErrors": 0,
            }[name]  # fmt: skip
        return 0


def test_readings_of_nvml() -> None:
    one, lost = Nvml(Driver()).read()
    assert one["t"] <= time.monotonic()
    assert one == {
        "t": one["t"], "chosen_by": "CUDA_VISIBLE_DEVICES",
        "index": 0, "uuid": "GPU-1", "name": "NVIDIA H100", "use": 98, "mem_used": 71 * GIB, "mem_total": 80 * GIB,
        "temp": 66, "power": 627.31, "power_limit": None, "clock": 1980, "ecc": 0, "xid": 79,
    }  # fmt: skip
    assert {name for name, value in lost.items() if value is not None} == {"index", "t", "chosen_by"}


STAT = "cpu  {0} 0 0 {1} 0 0 0 0 0 0\ncpu0 1 2\n"
DEV = (
    "Inter-|  Receive | Transmit\n face |bytes packets|bytes packets\n"
    "  eth0: {0} 9 0 0 0 0 0 0 {1} 9 0 0 0 0 0 0\n    lo: 5 1 0 0 0 0 0 0 5 1\n"
)


def test_amd_gpus_are_read_from_sysfs_in_the_order_of_their_addresses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices, drm = tmp_path / "devices", tmp_path / "drm"
    for card, address in ((1, "0000:23:00.0"), (0, "0000:43:00.0"), (2, "0000:03:00.0")):
        write(devices / address / "vendor", "0x1a03\n" if card == 2 else "0x1002\n")
        write(devices / address / "gpu_busy_percent", "97\n")
        (drm / f"card{card}").mkdir(parents=True)
        (drm / f"card{card}" / "device").symlink_to(devices / address)
    full = devices / "0000:23:00.0"
    for name, text in {
        "unique_id": "6b8e2a1f0c4d9e73", "mem_info_vram_used": str(5 * GIB), "mem_info_vram_total": str(192 * GIB),
        "hwmon/hwmon4/temp1_input": "61000", "hwmon/hwmon4/power1_input": "412000000",
        "hwmon/hwmon4/power1_cap": "750000000", "hwmon/hwmon4/freq1_input": "2100000000",
        "ras/umc_err_count": "ue: 1\nce: 7",
    }.items():  # fmt: skip
        write(full / name, f"{text}\n")
    monkeypatch.setattr(amdgpu, "DRM", drm)
    read = amdgpu.open_reader()
    assert read is not None
    first, second = read()
    assert {name: value for name, value in first.items() if name != "t"} == {
        "index": 0, "uuid": "6b8e2a1f0c4d9e73", "name": None, "use": 97, "mem_used": 5 * GIB, "mem_total": 192 * GIB,
        "temp": 61, "power": 412, "power_limit": 750, "clock": 2100, "ecc": 1, "xid": None,
        "chosen_by": "HIP_VISIBLE_DEVICES",
    }  # fmt: skip
    known = {name for name, value in second.items() if value is not None}
    assert known == {"index", "use", "t", "chosen_by"}
    monkeypatch.setattr(amdgpu, "DRM", tmp_path / "nothing")
    assert amdgpu.open_reader() is None


def process(root: Path, pid: int, ticks: int, children: str, started: int = 77) -> None:
    fields = ["S", "1", *["0"] * 9, str(ticks), "0", "0", "0", *["0"] * 4, str(started), "0", "25"]
    write(root / f"proc/{pid}/stat", f"{pid} (py) thon)) {' '.join(fields)}\n")
    write(root / f"proc/{pid}/task/{pid}/children", children)


def test_a_host_and_its_ranks_from_its_files(tmp_path: Path) -> None:
    write(tmp_path / "proc/stat", STAT.format(100, 900))
    write(tmp_path / "proc/meminfo", f"MemTotal: {64 << 20} kB\nMemFree: 1 kB\nMemAvailable: {48 << 20} kB\n")
    write(tmp_path / "proc/net/dev", DEV.format(1000, 500))
    (tmp_path / "dev/shm").mkdir(parents=True)
    host = HostUsage(tmp_path, tmp_path)
    first = host.read(10.0, "eth0")
    assert (first["cpu"], first["net_in"], first["net_out"]) == (None, None, None), "a rate needs two looks"
    assert (first["mem_used"], first["mem_total"]) == (16 * GIB, 64 * GIB)
    assert 0 < first["disk_free"] <= first["disk_total"]
    assert first["shm_total"] == first["disk_total"]
    write(tmp_path / "proc/stat", STAT.format(175, 925))
    write(tmp_path / "proc/net/dev", DEV.format(5000, 700))
    second = host.read(12.0, "eth0")
    assert (second["cpu"], second["net_in"], second["net_out"]) == (75.0, 2000, 100)
    # The cgroup with the tightest limit, without what the kernel would give back.
    write(tmp_path / "proc/self/cgroup", "0::/pod/x\n")
    write(tmp_path / "sys/fs/cgroup/pod/memory.max", str(8 * GIB))
    write(tmp_path / "sys/fs/cgroup/pod/x/memory.max", "max\n")
    write(tmp_path / "sys/fs/cgroup/pod/memory.current", str(6 * GIB))
    write(tmp_path / "sys/fs/cgroup/pod/memory.stat", f"anon 5\ninactive_file {2 * GIB}\n")
    third = host.read(14.0, "eth0")
    assert (third["mem_used"], third["mem_total"]) == (4 * GIB, 8 * GIB)
    assert set(HostUsage(tmp_path, tmp_path / "gone").read(1.0, None).values()) > {None}


def test_a_worker_with_its_children_until_its_number_is_another_process(tmp_path: Path) -> None:
    devices = gpus(H100)
    host = HostUsage(tmp_path, tmp_path)
    nothing = {"cpu": None, "rss": None, "gpu": None}
    assert host.read_rank(50, 1.0, devices) == nothing
    process(tmp_path, 50, 100, "51 ")
    process(tmp_path, 51, 10, "")
    assert host.read_rank(50, 2.0, devices) == nothing, "it is not the script yet"
    write(tmp_path / "proc/50/environ", "PATH=/x\0LOCAL_RANK=0\0CUDA_VISIBLE_DEVICES=1\0")
    page, ticks_s = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_CLK_TCK")
    assert host.read_rank(50, 3.0, devices) == {"cpu": None, "rss": 25 * page, "gpu": 1}
    process(tmp_path, 50, 100 + ticks_s, "51 ")
    process(tmp_path, 51, 10 + ticks_s, "")
    assert host.read_rank(50, 5.0, devices)["cpu"] == 100.0
    process(tmp_path, 50, 5000, "", started=99)
    assert host.read_rank(50, 6.0, devices) == nothing


def test_the_interface_of_an_address() -> None:
    assert asyncio.run(interface_of("127.0.0.1")) == "lo"
    assert asyncio.run(interface_of("localhost")) == "lo"


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An nvidia-smi on PATH that prints what stands in `table`, and notes that it was asked; no NVML."""
    script = tmp_path / "bin/nvidia-smi"
    write(script, f'#!/bin/sh\necho asked "$1" >> {tmp_path}/asked\ncat {tmp_path}/table\n')
    script.chmod(0o755)
    write(tmp_path / "table", H100)
    write(tmp_path / "lib/libnvidia-ml.so.1", "not a library\n")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path / "lib"))
    monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")
    return tmp_path


def test_gpus_come_from_a_process_of_its_own(tool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vitals, "WATCHED_S", 0.05)
    monkeypatch.setenv("PYTHONPATH", os.getcwd())

    async def check() -> None:
        tasks, host = Tasks(), HostUsage(tool)
        taken = Vitals(host, "job-x", lambda: True)
        taken.start(tasks, "127.0.0.1", dict)
        end = time.monotonic() + 60
        while not ((node := taken.report({})[0]) and node["gpus"] and node["cpu"] is not None):
            assert time.monotonic() < end
            await asyncio.sleep(0.02)
        assert node["net_in"] is not None
        assert [gpu["use"] for gpu in node["gpus"]] == [98, 0]
        assert "uuid" not in node["gpus"][0]
        assert 0 <= node["gpus"][0]["age_s"] < 60
        assert node["age_s"] < 60
        await tasks.close()

    asyncio.run(check())
    assert (tool / "asked").read_text().count("asked --query-gpu=index,uuid,") == 1, "not more often than every 5 s"


def read_gpus() -> int:
    command = [sys.executable, "-m", "remote_agent", "gpus", "--job", "x"]
    return subprocess.run(command, input=b"\n", timeout=30, capture_output=True, check=False).returncode


def test_a_reader_ends_where_there_is_no_gpu_and_says_when_it_cannot_read(tool: Path) -> None:
    write(tool / "table", "No devices were found\n")
    assert read_gpus() == 0
    (tool / "bin/nvidia-smi").write_bytes(b"\0not a program")
    assert read_gpus() == 1


def test_a_measurement_costs_little(tmp_path: Path) -> None:
    """Eight ranks, watched: half a percent of a core are 15 ms every 3 s."""
    taken = Vitals(HostUsage(tmp_path), "job-x", lambda: True)
    workers = {rank: os.getpid() for rank in range(8)}
    taken.measure(workers)
    assert taken.report(workers)[1].keys() == workers.keys()
    # Another process has come in a rank's place: what the one before used is not its own.
    assert taken.report({**workers, 3: 1})[1].keys() == workers.keys() - {3}
    begin = time.process_time()
    for _ in range(20):
        taken.measure(workers)
        taken.report(workers)
    each_ms = (time.process_time() - begin) / 20 * 1000
    print(f"\none measurement with 8 ranks: {each_ms:.1f} ms")
    assert each_ms < 15


OWN = {"127.0.0.1": "lo", "172.17.0.1": "docker0", "10.0.0.7": "eth0", "192.168.1.7": "eth1"}


@pytest.mark.parametrize(
    ("interface", "leads_to", "given", "variables", "kind"),
    [
        ("eth0", "127.0.1.1", {}, {GLOO: "eth0", TENSORPIPE: "eth0"}, "interface"),
        ("eth0", None, {}, {GLOO: "eth0", TENSORPIPE: "eth0"}, "interface"),
        ("eth0", "192.168.1.7", {}, {GLOO: "eth0", TENSORPIPE: "eth0"}, "interface"),
        ("eth0", "127.0.1.1", {GLOO: "eth1"}, {TENSORPIPE: "eth0"}, "interface"),
        ("eth0", "127.0.1.1", {GLOO: "eth1", TENSORPIPE: "eth1"}, {}, ""),
        ("eth0", "10.0.0.7", {}, {}, ""),
        ("eth0", "10.0.0.8", {}, {}, ""),  # a second address of some interface
        ("lo", "127.0.1.1", {}, {}, ""),
        (None, "10.0.0.7", {}, {}, ""),
        (None, "127.0.1.1", {}, {}, "host_name"),
        (None, None, {}, {}, "host_name"),
        (None, "127.0.1.1", {GLOO: "eth0"}, {}, ""),
    ],
)
def test_workers_use_the_interface_at_which_others_reach_them(
    interface: str | None, leads_to: str | None, given: dict[str, str], variables: dict[str, str], kind: str
) -> None:
    answer = choose(interface, leads_to, OWN, given)
    assert (answer.variables, answer.kind) == (variables, kind)
    assert bool(answer.notice) == bool(kind)
    assert all(name in answer.notice for name in variables)


def test_nccl_is_given_the_interface_only_where_it_would_take_another() -> None:
    own = {"127.0.0.1": "lo", "172.17.0.1": "docker0", "10.0.0.7": "virbr1"}
    answer = choose("virbr1", "10.0.0.7", own, {})
    assert answer.variables == {NCCL: "=virbr1"}
    assert "NCCL would choose docker0" in answer.notice
    assert choose("virbr1", "10.0.0.7", {**own, "10.1.0.7": "ib0"}, {}).variables == {}
    assert choose("virbr1", "10.0.0.7", own, {NCCL: "virbr1"}).variables == {}
