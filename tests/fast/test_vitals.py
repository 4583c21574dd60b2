"""What a node uses is read from its files as kernels write them, and from GPUs as nvidia-smi and NVML tell of them."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from remote_agent.base.tasks import Tasks
from remote_agent.vitals import host as vitals
from remote_agent.vitals.gpus import amdgpu
from remote_agent.vitals.gpus.gpu import Gpu, gpu_of
from remote_agent.vitals.gpus.nvidia_smi import parse_table
from remote_agent.vitals.gpus.nvml import Nvml
from remote_agent.vitals.host import HostUsage, Vitals
from remote_agent.vitals.host_notes import DEADLINE_S, MAX_CHARS, MAX_LINES, HostNotes
from remote_agent.vitals.netif import GLOO, NCCL, TENSORPIPE, choose
from tests.fast.waiting import some

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
    assert known == {"index", "uuid", "mem_total", "t", "chosen_by"}
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


def test_amd_gpus_are_read_in_the_order_of_their_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    read = some(amdgpu.open_reader())
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
    first: Any = host.read(10.0, "eth0")
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


async def test_gpus_come_from_a_process_of_its_own(tool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vitals, "WATCHED_S", 0.05)
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
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
    assert 0 <= some(node["gpus"][0]["age_s"]) < 60
    assert some(node["age_s"]) < 60
    await tasks.close()
    assert (tool / "asked").read_text().count("asked --query-gpu=index,uuid,") == 1, "not more often than every 5 s"


def read_gpus() -> int:
    command = [sys.executable, "-m", "remote_agent", "gpus", "--job", "x"]
    return subprocess.run(command, input=b"\n", timeout=30, capture_output=True, check=False).returncode


def test_a_reader_ends_where_there_is_no_gpu_and_says_when_it_cannot_read(tool: Path) -> None:
    write(tool / "table", "No devices were found\n")
    assert read_gpus() == 0
    (tool / "bin/nvidia-smi").write_bytes(b"\0not a program")
    assert read_gpus() == 1


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


# What a host says of a death is read from its files as kernels and containers write them.


V2 = "low 0\nhigh 0\nmax 12\noom {0}\noom_kill {0}\noom_group_kill 0\n"
V1 = "oom_kill_disable 0\nunder_oom 0\noom_kill {0}\n"


def ended(signal: str | None = "SIGKILL", tail: str = "", **more: Any) -> Any:
    code = 1 if signal is None else None
    base = {"rank": 3, "pid": 4003, "code": code, "signal": signal, "stopped_by_us": False, "tail": tail, "error": None}
    return {**base, **more}


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("own", "counters", "form", "reported"),
    [
        pytest.param("0::/job/task_0\n", "job/task_0/memory.events", V2, ["oom_kill 2", "oom 2"], id="v2"),
        pytest.param("0::/kubepods/pod1/x\n", "memory.events", V2, ["oom_kill 2", "oom 2"], id="container v2"),
        pytest.param("0::/../x\n", "memory.events", V2, ["oom_kill 2", "oom 2"], id="container beside"),
        pytest.param("0::/u/s\n", "u/memory.events", V2, ["oom_kill 2", "oom 2"], id="controller above"),
        pytest.param("9:memory:/job\n0::/job\n", "memory/job/memory.oom_control", V1, ["oom_kill 2"], id="v1"),
        pytest.param("3:cpu,memory:/docker/1\n", "memory/memory.oom_control", V1, ["oom_kill 2"], id="container v1"),
        pytest.param("0::/job\n", "job/memory.events", "broken\noom_kill x\n", [], id="unknown form"),
    ],
)
def test_kills_are_counted(tmp_path: Path, own: str, counters: str, form: str, reported: list[str]) -> None:
    path = tmp_path / "sys/fs/cgroup" / counters
    write(tmp_path / "proc/self/cgroup", own)
    write(path, form.format(5))
    host = HostNotes(tmp_path)
    host.begin(tmp_path, tmp_path)
    assert host.notes(ended()) == []
    write(path, form.format(7))
    assert sorted(host.notes(ended())) == sorted(f"{path}: {each} since the workers started" for each in reported)
    assert host.notes(ended(None, "ValueError: x")) == [], "no death of memory's"
    assert bool(host.notes(ended(None, code=137))) == bool(reported), "a shell's word for SIGKILL"
    host.begin(tmp_path, tmp_path)
    assert host.notes(ended()) == []


def test_a_host_without_notes_is_not_quoted(tmp_path: Path) -> None:
    write(tmp_path / "dev/kmsg", "6,1,1,-;Out of memory: Killed process 4003 (python)\n")
    host = HostNotes(tmp_path)
    host.begin(tmp_path / "gone", tmp_path / "gone")
    assert host.notes(ended()) == [], "a file that stands for the kernel's log is none"
    assert host.notes(ended("SIGBUS", "OSError: [Errno 28] No space left on device: 'x'")) == []


def test_the_file_systems_that_count_are_looked_at(tmp_path: Path) -> None:
    (tmp_path / "dev/shm").mkdir(parents=True)
    host = HostNotes(tmp_path)
    host.begin(tmp_path, tmp_path)
    (shm,) = host.notes(ended("SIGBUS"))
    assert shm.startswith(f"{tmp_path}/dev/shm: ")
    error = {"message": "OSError: [Errno 28] No space left on device: '/proc/x/model.pt'"}
    (here,) = host.notes(ended(None, error=error))
    assert here.startswith(f"{tmp_path}: ")
    assert here.endswith(" MiB free afterwards")
    error = {"message": "OSError: [Errno 28] No space left on device: '/proc/model.pt'"}
    assert [line.partition(":")[0] for line in host.notes(ended(None, error=error))] == ["/proc", str(tmp_path)]


@pytest.mark.parametrize(
    ("blocks", "inodes", "reported"),
    [(3, 9, ": 0.0 of 0.8 MiB free afterwards"), (100, 0, ": 0.4 of 0.8 MiB free afterwards, no inode free")],
)
def test_a_full_disk_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocks: int, inodes: int, reported: str
) -> None:
    host = HostNotes(tmp_path)
    host.begin(tmp_path, tmp_path / "gone")
    assert host.notes(ended(None)) == []
    space = SimpleNamespace(f_bavail=blocks, f_frsize=4096, f_blocks=200, f_files=9, f_favail=inodes)
    monkeypatch.setattr(os, "statvfs", lambda _: space)
    assert host.notes(ended(None)) == [f"{tmp_path}{reported}"]


async def test_a_host_that_hangs_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "cgroup")
    host = HostNotes(tmp_path)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").symlink_to(tmp_path / "cgroup")
    loop = asyncio.get_running_loop()
    before = loop.time()
    assert await host.explain(ended()) == []
    took = loop.time() - before
    threading.Thread(target=(tmp_path / "cgroup").write_text, args=("",)).start()
    assert took < DEADLINE_S + 1


def log_of_this_machine() -> HostNotes:
    host = HostNotes()
    if not host.knows_pids or not os.access("/dev/kmsg", os.W_OK):
        pytest.skip("needs a kernel's log that can be read and written, in the first pid namespace")
    return host


def say(*lines: str) -> None:
    """Write to the kernel's log, as its own code does."""
    for line in lines:
        with open("/dev/kmsg", "w") as log:
            log.write(f"<6>{line}\n")


def test_the_kernels_log_is_read_from_the_start_and_names_the_process(tmp_path: Path) -> None:
    host = log_of_this_machine()
    killed = "test: Memory cgroup out of memory: Killed process 4194305 (python)"
    mine = ended(pid=4194305)
    say(killed)
    host.begin(tmp_path, tmp_path)
    assert killed not in str(host.notes(mine))
    say(killed, "test: Out of memory: Killed process 14194305 (other)", "test: no news of 4194305")
    assert host.notes(mine) == [f"kernel: {killed}"]
    assert host.notes(mine) == [f"kernel: {killed}"], "the second rank that dies is told as much"
    assert host.notes(ended(pid=1)) == []
    loader = "RuntimeError: DataLoader worker (pid(s) 7, 4194305) exited unexpectedly"
    assert host.notes(ended(None, loader))[0] == f"kernel: {killed}"


def test_an_xid_is_that_of_the_process_that_it_names(tmp_path: Path) -> None:
    host = log_of_this_machine()
    host.begin(tmp_path, tmp_path)
    xid = "NVRM: Xid (PCI:0000:04:00): 31, pid={}, name=python, Ch 00000008, intr 00000000. MMU Fault"
    mine, other = xid.format(4194308), xid.format(4194309)
    unnamed = "NVRM: Xid (PCI:0000:04:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
    say(mine, other, unnamed)
    message = "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"
    assert host.notes(ended(None, message, pid=4194308)) == [f"kernel: {mine}", f"kernel: {unnamed}"]
    assert host.notes(ended("SIGSEGV", pid=4194310)) == [f"kernel: {unnamed}"]
    # In a container the kernel's pids are not those that we see.
    host.knows_pids = False
    assert host.notes(ended(None, message, pid=7))[:3] == [f"kernel: {line}" for line in (mine, other, unnamed)]
    assert host.notes(ended("SIGSEGV", pid=7))[:1] == [f"kernel: {unnamed}"]


def test_notes_are_bounded(tmp_path: Path) -> None:
    host = log_of_this_machine()
    host.begin(tmp_path, tmp_path)
    say(*(f"test: python[4194306]: segfault at {number} {'x' * 400}" for number in range(30)))
    lines = host.notes(ended("SIGSEGV", pid=4194306))
    assert 0 < len(lines) <= MAX_LINES
    assert {len(line) for line in lines} == {MAX_CHARS}
    assert "segfault at 29" in lines[-1]
