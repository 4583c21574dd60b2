"""The failures of the field, each as a script that really fails, or as something that is done to one that runs.

In: nothing. Out: `FAULTS`: what to run, what to do, and the verdict that is right.
"""

from __future__ import annotations

import contextlib
import os
import signal
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.bench.stamps import STAMP, Stamps
from tests.cluster import Cluster
from tests.cluster.network import command

RANK = 2
"""The rank that breaks it: the first of the second host."""
HOST = "n2"
# Events that say what is wrong with a job that goes on.
WARNING, SLOW = "warning", "slow"
"""The category of what is no failure."""
_FIREWALL = """
table inet firewall {
  chain output {
    type filter hook output priority 0; policy accept;
    oifname eth0 tcp flags & (syn | ack) == syn drop
  }
}
"""
_CGROUP = Path("/sys/fs/cgroup/cpu/supervisor-bench")


@dataclass(frozen=True)
class Run:
    """A job that runs, to which something is done."""

    cluster: Cluster
    notes: Stamps


def script(broken: str, *, ranks: str = f"({RANK},)", defines: str = "") -> str:
    """Return a training script whose ranks make steps together, until these ranks are told to go and do that."""
    return f"""{STAMP}
import torch
import torch.distributed as dist

{defines}

dist.init_process_group("gloo")
rank = dist.get_rank()
go = os.path.join(sys.argv[1], "..", "go")
stamp("ready")
for step in range(10**6):
    # The others' word comes with the step: all are told at the same one.
    told = torch.tensor(float(os.path.exists(go)))
    dist.all_reduce(told)
    if told > 0 and rank in {ranks}:
        stamp("fault")
{textwrap.indent(broken.strip(), " " * 8)}
    if step % 10 == 0:
        print(f"step {{step}} loss {{2 + 1 / (step + 1):.4f}}", flush=True)
    time.sleep(0.05)
"""


def _signalled(number: signal.Signals) -> Callable[[Run], None]:
    def act(run: Run) -> None:
        os.kill(run.notes.pid(RANK), number)

    return act


def _crash(run: Run) -> None:
    """End the host as a power failure does."""
    run.cluster.crash(HOST)


def _block(run: Run) -> None:
    """Drop every connection that the host begins, as a firewall does, and let the ranks meet then."""
    command("ip", "netns", "exec", run.cluster.host(HOST).netns, "nft", "-f", "-", stdin=_FIREWALL)
    (run.notes.directory.parent / "go").touch()


def _unblock(cluster: Cluster) -> None:
    command("ip", "netns", "exec", cluster.host(HOST).netns, "nft", "delete", "table", "inet", "firewall")


def _throttle(run: Run) -> None:
    """Leave a tenth of a processor to the host's ranks together."""
    _CGROUP.mkdir(exist_ok=True)
    (_CGROUP / "cpu.cfs_period_us").write_text("100000")
    (_CGROUP / "cpu.cfs_quota_us").write_text("10000")
    for rank in (RANK, RANK + 1):
        (_CGROUP / "cgroup.procs").write_text(str(run.notes.pid(rank)))


def _release(cluster: Cluster) -> None:
    for pid in (_CGROUP / "cgroup.procs").read_text().split():
        with contextlib.suppress(ProcessLookupError):
            (_CGROUP.parent / "cgroup.procs").write_text(pid)
    _CGROUP.rmdir()


@dataclass(frozen=True)
class Fault:
    """One failure: how it is made, and what is right to say of it."""

    name: str
    script: str
    category: str | tuple[str, ...]
    """More than one where the text allows more than one reading."""
    act: Callable[[Run], None] | None = None
    """None: the script does it when it is told to."""
    culprit: tuple[int, ...] = (RANK,)
    hangs: bool = False
    """Whether nothing ends by itself."""
    of_host: bool = False
    """Whether it is the host's: no rank is the culprit then."""
    hosts: tuple[str, ...] = ("n1", HOST)
    undo: Callable[[Cluster], None] | None = None
    """Puts right what `act` did to the host."""
    breaking: int = 1
    """How many ranks break."""


_STEPS = script("pass", ranks="()")
_OOM = (
    'raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of '
    '79.15 GiB of which 1.02 GiB is free. Process 4711 has 78.12 GiB memory in use.")'
)
_LOADER = """
import signal
class Data(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, index): os.kill(os.getpid(), signal.SIGKILL)
"""
_STUCK_LOADER = """
class Data(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, index):
        time.sleep(10**6)
"""
_READ = "for batch in torch.utils.data.DataLoader(Data(), num_workers=1): pass"
_TORN = """
torch.save({"model": torch.zeros(1000)}, f"snapshot{os.getpid()}.pt")
os.truncate(f"snapshot{os.getpid()}.pt", 700)
torch.load(f"snapshot{os.getpid()}.pt")
"""
_PORT = """
import socket
taken = socket.create_server(("127.0.0.1", 0))
socket.create_server(taken.getsockname())
"""
_THREAD = """
import queue, threading
batches = queue.Queue()
def prefetch():
    raise ValueError("bad shard 7")
"""
_GIL = "import ctypes; ctypes.PyDLL(None).sleep(10**6)"
# One rank looks for the others elsewhere; nobody has come to a first step.
_LOST = f"""{STAMP}
import datetime
import torch.distributed as dist

stamp("ready")
while not os.path.exists(os.path.join(sys.argv[1], "..", "go")):
    time.sleep(0.05)
if os.environ["RANK"] == "{RANK}":
    stamp("fault")
    os.environ.update(%s)
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=10))
"""
_ADDRESS = _LOST % 'MASTER_ADDR="10.255.255.1", TORCHELASTIC_USE_AGENT_STORE="False"'
_MEET = f"""{STAMP}
import torch.distributed as dist

stamp("ready")
while not os.path.exists(os.path.join(sys.argv[1], "..", "go")):
    time.sleep(0.05)
dist.init_process_group("gloo")
"""
# A step takes 20 ms of a processor.
_WORK = f"""{STAMP}
import torch
import torch.distributed as dist

torch.set_num_threads(1)
dist.init_process_group("gloo")
weights = torch.randn(256, 256)
stamp("ready")
for step in range(10**6):
    until = time.thread_time() + 0.02
    while time.thread_time() < until:
        weights @ weights
    dist.all_reduce(torch.ones(1000))
    if step % 10 == 0:
        print(f"step {{step}} loss {{2 + 1 / (step + 1):.4f}}", flush=True)
    time.sleep(0.05)
"""
# The ranks print one loss for all; from some step on one of them adds a loss that the others do not know.
_APART = f"""{STAMP}
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
stamp("ready")
for step in range(10**6):
    loss = torch.tensor(2 + 1 / (step + 1))
    dist.all_reduce(loss)
    if rank == {RANK} and step >= 1000:
        if step == 1000:
            stamp("fault")
        loss += 0.5
    print(f"step {{step}} loss {{loss.item():.6f}}", flush=True)
    time.sleep(0.02)
"""
# A world of another size than was started: the others never come.
_WORLD = _LOST.replace(f'if os.environ["RANK"] == "{RANK}":', "if True:") % 'WORLD_SIZE="6"'
_BARRIER = """
if rank == 2:
    %s
dist.%s
"""
_DDP = """
model = torch.nn.Linear(4, 5 if rank == 2 else 4)
torch.nn.parallel.DistributedDataParallel(model)
"""
_INTERFACE = _LOST % 'GLOO_SOCKET_IFNAME="nosuch0"'

FAULTS = (
    Fault("exception on one rank", script('raise ValueError("bad batch")'), "user_exception"),
    Fault(
        "the same exception on all ranks", script('raise ValueError("bad config")', ranks="range(4)"),
        "user_exception", culprit=(0, 1, 2, 3), breaking=4,
    ),
    Fault(
        "module missing on all ranks", script("import flash_attention_9", ranks="range(4)"),
        "permission_import_missing_module", culprit=(0, 1, 2, 3), breaking=4,
    ),
    Fault("CUDA out of memory (its text)", script(_OOM), "cuda_oom"),
    Fault("SIGSEGV", script("import ctypes; ctypes.string_at(0)"), "segfault"),
    Fault("SIGABRT", script("os.abort()"), "sigabrt"),
    Fault("SIGKILL from outside", _STEPS, ("other", "host_oom_kill"), _signalled(signal.SIGKILL)),
    Fault("SIGTERM from outside", _STEPS, "signal_preempted", _signalled(signal.SIGTERM)),
    Fault("DataLoader worker killed", script(_READ, defines=_LOADER), "dataloader_worker_killed"),
    Fault("disk full at the checkpoint", script('torch.save(torch.zeros(1 << 20), "/dev/full")'), "disk_full"),
    Fault("torn snapshot", script(_TORN), "checkpoint_corrupt"),
    Fault("port in use", script(_PORT), "port_in_use", culprit=()),
    Fault("NaN loss, and the script stops at it", script('raise RuntimeError("loss is nan at step 40")'), "nan_loss"),
    Fault("wrong MASTER_ADDR on one rank", _ADDRESS, ("rendezvous_timeout", "nccl_network")),
    Fault("no such interface on one rank", _INTERFACE, "rendezvous_timeout"),
    Fault("a collective in another shape", script("dist.all_reduce(torch.ones(9))"), "collective_desync", culprit=()),
    Fault("leaves early with status 0", script("sys.exit(0)"), ("collective_desync", "other", "gloo_connection_reset")),
    Fault(
        "leaves before a barrier", script(_BARRIER % ("os._exit(0)", "barrier()"), ranks="range(4)"),
        ("collective_desync", "other", "gloo_connection_reset"),
    ),
    Fault(
        "does not come to a monitored barrier",
        script(_BARRIER % ("time.sleep(60)", "monitored_barrier(timeout=__import__('datetime').timedelta(seconds=5))"),
               ranks="range(4)"),
        "collective_desync",
    ),
    Fault(
        "leaves a monitored barrier",
        script(_BARRIER % ("os._exit(0)", "monitored_barrier(timeout=__import__('datetime').timedelta(seconds=5))"),
               ranks="range(4)"),
        ("collective_desync", "gloo_connection_reset"),
    ),
    Fault("a world of another size", _WORLD, "rendezvous_timeout", culprit=(), breaking=4),
    Fault("another model in DDP's constructor", script(_DDP, ranks="range(4)"), "collective_desync", breaking=4),
    Fault(
        "disk full in numpy.tofile", script("import numpy; numpy.zeros(1 << 20).tofile('/dev/full')"), "disk_full",
    ),
    Fault(
        "host gone", _STEPS, "node_lost", _crash, culprit=(), of_host=True, undo=lambda cluster: cluster.boot(HOST)
    ),
    Fault(
        "ports blocked during rendezvous", _MEET, "rendezvous_timeout", _block, culprit=(), hangs=True,
        of_host=True, hosts=("n1", HOST, "n3"), undo=_unblock,
    ),
    Fault(
        "slow host", _WORK, SLOW, _throttle, culprit=(), hangs=True, of_host=True, undo=_release,
    ),
    Fault("loss that was the same on all ranks", _APART, WARNING, hangs=True),
    Fault(
        "collectives in another order", script("dist.broadcast(torch.ones(4), src=0)"), "collective_desync", hangs=True
    ),
    Fault("waits for a file beside the others' barrier", script("time.sleep(10**6)"), "hang_no_output", hangs=True),
    Fault("SIGSTOP", _STEPS, "hang_no_output", _signalled(signal.SIGSTOP), hangs=True),
    Fault("holds the GIL in C", script(_GIL), "hang_no_output", hangs=True),
    Fault("DataLoader worker hangs", script(_READ, defines=_STUCK_LOADER), "hang_no_output", hangs=True),
    Fault(
        "exception in a thread that feeds it",
        script("threading.Thread(target=prefetch).start()\nbatches.get()", defines=_THREAD),
        ("user_exception", "hang_no_output"), hangs=True,
    ),
)  # fmt: skip
