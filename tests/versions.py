"""The versions of torch that docs/hosts.md names: what each lacks of what we use, and jobs with each of them.

    python -m tests.versions [VERSION …]    # installs each into an environment of its own, runs the jobs, removes it

In: versions that pip finds; each brings 3 to 6 GB. Out: a table for each; exit 0 if all are right and as LACKS says.
"""

from __future__ import annotations

import importlib
import inspect
import json
import socket
import subprocess
import sys
import tempfile
from datetime import timedelta
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NEWEST = "newest"
WAYS = ("healthy", "exception", "sleep", "stacks", "diagnose", "kill")
# What we use of torch that some version lacks; after a colon a parameter or a field.
NAMES = (
    "torch.xpu",
    "torch.accelerator",
    "torch.numa.binding",
    "torch._utils.cpu_count",
    "torch._C._get_privateuse1_backend_name",
    "torch._C._distributed_c10d._WorkerServer",
    "torch.distributed.c10d_logger._WaitCounter",
    "torch.distributed.launcher.api.LaunchConfig:signals_to_handle",
    "torch.distributed.launcher.api.LaunchConfig:virtual_local_rank",
    "torch.distributed.launcher.api.LaunchConfig:shutdown_timeout",
    "torch.distributed.elastic.multiprocessing.start_processes:numa_options",
)
# A store that serves on a socket that it is given.
LIBUV_SOCKET = "TCPStore: a listening socket with libuv"
HANDLERS = ("ping", "dump_traceback", "dump_nccl_trace_pickle", "dump_nccl_trace_json", "fr_trace_json")
"""What we ask of a rank's worker server."""


def lacks() -> list[str]:
    """Return what this interpreter's torch lacks: of NAMES, LIBUV_SOCKET, and the handlers of HANDLERS."""
    missing = [name for name in NAMES if not has(name)]
    if not takes_socket():
        missing.append(LIBUV_SOCKET)
    handlers = served()
    return missing + [f"/handler/{name}" for name in HANDLERS if name not in handlers]


def has(name: str) -> bool:
    """Return whether torch has a module, an attribute, or (after a colon) a parameter or field."""
    path, _, parameter = name.partition(":")
    owner = resolve(path)
    return owner is not None and (not parameter or parameter in inspect.signature(owner).parameters)


def resolve(path: str) -> Any:
    """Return what a dotted name means, None if there is no such thing."""
    parent, _, name = path.rpartition(".")
    if not parent:
        return importlib.import_module(path)
    owner = resolve(parent)
    found = getattr(owner, name, None)
    if found is None and inspect.ismodule(owner) and hasattr(owner, "__path__"):
        try:
            return importlib.import_module(path)
        except ImportError:
            return None
    return found


def takes_socket() -> bool:
    """Return whether a store with libuv, torch's default, serves on a socket that it is given."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        options: Any = {"is_master": True, "wait_for_workers": False, "timeout": timedelta(seconds=5)}
        try:
            TCPStore("127.0.0.1", port, **options, master_listen_fd=listening.detach())
        except RuntimeError:
            return False
    return True


def served() -> list[str]:
    """Return the handlers of torch's worker server."""
    from torch._C._distributed_c10d import _WorkerServer

    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/server.sock"
        server = _WorkerServer(path)
        connection = HTTPConnection("localhost")
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(path)
        connection.request("GET", "/handler/")
        names: list[str] = json.loads(connection.getresponse().read())
        connection.close()
        server.shutdown()
    return names


_BEFORE_2_13 = (
    "torch._utils.cpu_count",
    "torch.distributed.launcher.api.LaunchConfig:shutdown_timeout",
)
_BEFORE_2_11 = (
    *_BEFORE_2_13,
    "torch.numa.binding",
    "torch.distributed.launcher.api.LaunchConfig:signals_to_handle",
    "torch.distributed.launcher.api.LaunchConfig:virtual_local_rank",
    "torch.distributed.elastic.multiprocessing.start_processes:numa_options",
    "/handler/fr_trace_json",
)
LACKS: dict[str, tuple[str, ...]] = {
    "2.4.1": (
        *_BEFORE_2_11,
        LIBUV_SOCKET,
        "torch.accelerator",
        "torch.distributed.c10d_logger._WaitCounter",
        "/handler/dump_traceback",
        "/handler/dump_nccl_trace_json",
    ),
    "2.6.0": (*_BEFORE_2_11, LIBUV_SOCKET),
    "2.8.0": _BEFORE_2_11,
    "2.11.0": _BEFORE_2_13,
    "2.13.0": (),
    NEWEST: (),
}
"""What `lacks` returned for the package with CUDA of each version, in any order."""


def main(versions: list[str]) -> int:
    """Run the jobs with these versions, one after the other; returns 1 if one of them went wrong."""
    wrong = [version for version in versions or LACKS if not is_right(version)]
    print(f"wrong: {wrong or 'none'}", flush=True)
    return 1 if wrong else 0


def is_right(version: str) -> bool:
    """Install a version, compare what it lacks, and run the jobs with it."""
    print(f"torch {version}", flush=True)
    with tempfile.TemporaryDirectory(prefix="supervisor-torch-") as folder:
        python = Path(folder) / "bin/python"
        wanted = "torch" if version == NEWEST else f"torch=={version}"
        install = [str(python), "-m", "pip", "install", "-qq", "--no-cache-dir", "--disable-pip-version-check"]
        run([sys.executable, "-m", "venv", folder])
        run([*install, "--upgrade", wanted, "numpy", "py-spy", "--editable", "."])
        code = "import json; from tests import versions; print(json.dumps(versions.lacks()))"
        missing = json.loads(run([str(python), "-c", code]))
        # A build for CPUs has nothing of NCCL.
        is_as_known = {each for each in missing if "nccl" not in each} == {
            each for each in LACKS[version] if "nccl" not in each
        }
        print(f"lacks {', '.join(missing) or 'nothing'}{'' if is_as_known else ': NOT as known'}", flush=True)
        jobs = subprocess.run([python, "-m", "tests.gpu", "-j", "1", *WAYS], cwd=ROOT, check=False)
    return is_as_known and jobs.returncode == 0


def run(command: list[str]) -> str:
    """Run a command in the repository and return its output; raises CalledProcessError."""
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
