"""What a preflight asks of a node: its facts, and whether the other nodes can be reached from it.

In: requests of a bridge. Out: plain documents. Nothing of it outlives the bridge.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import platform
import re
import resource
import secrets
import shutil
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from remote_agent.agent import jobs
from remote_agent.base.files import disk_free, disk_space
from remote_agent.base.paths import Home, agent_alive, named_agent
from remote_agent.base.ports import NoFreePort, listening
from remote_agent.base.proc import last_line, run_program, stat_fields
from remote_agent.engine import installed
from remote_agent.runtime import containers
from remote_agent.runtime.runtime import Place, Runtime, Start, runtime_of
from remote_agent.text.names import SECRET_NAME
from remote_agent.vitals import netif
from remote_agent.wire import JOB_NAME, Args, Problem
from remote_agent.wire.answers import AllReduce
from remote_agent.wire.events import ENDED_STATES
from remote_agent.wire.gate import parse, reader

if TYPE_CHECKING:
    from remote_agent.wire.answers import LeftOver, ProbeFacts, ProbePort, ProbeTarget, Reached, TorchFacts

# Importing torch from a cold network disk takes a minute or two.
TORCH_S = 120.0
TOOL_S = 10.0
REACH_S = 3.0
SHUTDOWN_S = 5.0
# The tree of a training script has fewer files; a larger one is data.
CODE_FILES = 2000
# Variables that change how torch, NCCL or Python behave. Nothing else of the environment leaves the node.
COMPARED = re.compile(
    r"(NCCL|TORCH|TORCHELASTIC|PYTORCH|CUDA|GLOO|OMP|MKL|UCX|FI|HSA|ROCR|HIP)_\w+"
    r"|PYTHONPATH|PYTHONHOME|PYTHON_EXEC|LD_LIBRARY_PATH|LD_PRELOAD|MASTER_ADDR|MASTER_PORT|VIRTUAL_ENV|CONDA_PREFIX"
)
SECRET_VALUE = re.compile(r"://[^/\s]*:[^/\s]*@|(key|token|secret|passw\w*)=", re.IGNORECASE)
OWN_PROCESS = re.compile(r"(remote_agent|\.pyz)\0(?P<mode>serve|engine)\0(.*\0)?--job\0(?P<job>[^\0]+)", re.DOTALL)

_read_times = reader(AllReduce)


class Probe:
    """One node's part of a preflight; close() ends what it started."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._server: asyncio.AbstractServer | None = None
        self._token = secrets.token_hex(8)
        self._child: asyncio.subprocess.Process | None = None
        self._runtime = Runtime(home, Place(str(home.root)))
        """Where ranks would run."""
        self._start: Start | None = None
        """How the newest rank of a collective was started."""

    def close(self) -> None:
        """Stop listening, and kill a collective that still runs."""
        if self._server is not None:
            self._server.close()
        if self._child is not None and self._child.returncode is None:
            self._child.kill()

    # Facts

    async def facts(self, args: Args, body: bytes) -> ProbeFacts:
        """Return the node's facts.

        `workdir`: whose Python files are hashed, None where the tree will be synced; `env`: what workers get on top;
        `address`: of this node for the others; `place`: what the inventory says about where the ranks run.
        """
        place = Place(workdir=str(self._home.root), **(args.get("place") or {}))
        self._runtime = runtime_of(self._home, dataclasses.replace(place, environment=""))
        # A container has none of the login's.
        env = {**({} if place.container else os.environ), **args["env"]}
        torch, gpu_processes, driver, sockets = await asyncio.gather(
            self._torch(place),
            _nvidia("--query-compute-apps=pid,process_name,used_memory"),
            _nvidia("--query-gpu=driver_version"),
            self._sockets(str(args["address"]), env),
        )
        workdir = args.get("workdir")
        disks = (os.path.expanduser("~"), str(self._home.root))
        return {
            "sockets": {"kind": sockets.kind, "message": sockets.notice},
            "kernel": platform.release(),
            "torch": torch,
            "driver": driver[0] if driver else None,
            "gpu_processes": gpu_processes,
            "env": {name: env[name] for name in sorted(env) if is_compared(name, env[name])},
            "disk_free": {path: disk_free(path) for path in disks},
            "shm": disk_space("/dev/shm"),
            "memlock": _limit(resource.RLIMIT_MEMLOCK),
            "open_files": _limit(resource.RLIMIT_NOFILE),
            "load": os.getloadavg()[0],
            "live_jobs": self._live_jobs(),
            "left_over": await asyncio.to_thread(left_over, self._home),
            "remarks": await containers.remarks(place.container) if place.container else [],
            "code": None if workdir is None else await asyncio.to_thread(code_of, Path(str(workdir))),
        }

    async def _torch(self, place: Place) -> TorchFacts:
        """Return what is known of torch where the ranks would run; nothing is built or pulled for it."""
        if place.environment:
            return {"torch": f"from {place.environment}, built by up"}
        if place.container and not await containers.is_here(place.container):
            return {"torch": f"in {place.container}, pulled by up"}
        start = await self._runtime.start("probe", "facts")
        try:
            facts = await installed.ask(start.command, start.variables, TORCH_S)
            facts["place"] = await self._runtime.digest()
            return facts
        finally:
            await self._runtime.end(start)

    async def _sockets(self, address: str, env: Mapping[str, str]) -> netif.Sockets:
        return await netif.sockets(address, await netif.own_name_address(), env)

    def _live_jobs(self) -> list[str]:
        live = []
        for name in self._home.job_names():
            files = self._home.job(name)
            # A job may be cleaned away while we look.
            with contextlib.suppress(OSError):
                if agent_alive(files) is not None and jobs.describe(files)["state"] not in ENDED_STATES:
                    live.append(name)
        return live

    # Connections between nodes

    async def listen(self, args: Args, body: bytes) -> ProbePort:
        """Listen on a free port (of the range `ports`), as a store will, until the bridge ends; raises Problem.

        Each connection gets a token.
        """

        async def greet(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(ConnectionError):
                writer.write(f"{self._token}\n".encode())
                await writer.drain()
            writer.close()

        try:
            sock = listening(str(args.get("ports") or ""))
        except NoFreePort as error:
            raise Problem("ports", str(error), "ss -ltnp shows what uses them") from error
        self._server = await asyncio.start_server(greet, sock=sock)
        return {"port": sock.getsockname()[1], "token": self._token}

    async def reach(self, args: Args, body: bytes) -> Mapping[str, dict[str, Reached]]:
        """Connect to all others at once; returns the outcomes by name."""
        targets: dict[str, ProbeTarget] = args["targets"]
        answers = await asyncio.gather(*(_reach(target) for target in targets.values()))
        return {"reached": dict(zip(targets, answers))}

    # A collective

    async def collective_start(self, args: Args, body: bytes) -> Mapping[str, int]:
        """Start this node's rank of a small group, reached at `address`; rank 0 answers with the port of its store."""
        if self._child is not None:
            # The child belongs to a group that was never complete.
            await self._last_words()
        sockets = await self._sockets(str(args["address"]), os.environ)
        self._start = start = await self._runtime.start("probe", "collective", json.dumps(args), more=sockets.variables)
        self._child = await asyncio.create_subprocess_exec(
            *start.command,
            env=start.variables,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        if int(args["rank"]) or self._child.stdout is None:
            return {}
        try:
            line = await asyncio.wait_for(self._child.stdout.readline(), TORCH_S)
            return {"port": int(json.loads(line)["port"])}
        except (asyncio.TimeoutError, ValueError, KeyError) as error:
            raise Problem("collective", await self._last_words()) from error

    async def collective_end(self, args: Args, body: bytes) -> AllReduce:
        """Wait for this node's rank; returns its times, or an error."""
        child = self._child
        if child is None:
            raise Problem("collective", "no collective was started here")
        try:
            out, err = await asyncio.wait_for(child.communicate(), float(args["timeout_s"]))
        except asyncio.TimeoutError:
            return {"error": f"not finished within {args['timeout_s']:g} s", "last": await self._last_words()}
        with contextlib.suppress(ValueError, IndexError):
            return _read_times(parse(out.splitlines()[-1]))
        return {"error": last_line(err.decode(errors="replace")) or f"it exited with code {child.returncode}"}

    async def _last_words(self) -> str:
        child, self._child = self._child, None
        if child is None:
            return ""
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        try:
            _, err = await asyncio.wait_for(child.communicate(), SHUTDOWN_S)
        except asyncio.TimeoutError:
            return "it did not end after SIGKILL, or a process that it started still holds its output open"
        finally:
            if self._start is not None:
                await self._runtime.end(self._start)
        return last_line(err.decode(errors="replace")) or "it printed nothing"


def is_compared(name: str, value: str) -> bool:
    """Return whether a variable is compared between nodes; what may hold a secret never is."""
    return COMPARED.fullmatch(name) is not None and not SECRET_NAME.search(name) and not SECRET_VALUE.search(value)


def code_of(workdir: Path) -> str:
    """Return a hash over the names and bytes of all Python files below, or in words why there is none."""
    if not workdir.is_dir():
        return f"no directory {workdir}"
    paths = sorted(itertools.islice(_python_files(workdir), CODE_FILES + 1))
    if not paths:
        return f"no Python file in {workdir}"
    if len(paths) > CODE_FILES:
        return f"more than {CODE_FILES} Python files: not compared"
    digest = hashlib.sha256()
    for path in paths:
        with contextlib.suppress(OSError):
            digest.update(f"{path.relative_to(workdir)}\0".encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:12]


def left_over(home: Home) -> list[LeftOver]:
    """Return our processes of jobs whose agent is gone.

    They are known by their command line, which names the job, by their user and by their home: another home may have a
    job of that name. An agent that has taken over another job, or waits for one, owns what it has started all the same.
    """
    processes: list[LeftOver] = []
    agents = {pid for name in home.job_names() if (pid := named_agent(home.job(name))) is not None}
    for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
            ours = os.stat(f"/proc/{pid}").st_uid == os.getuid()
        except OSError:
            continue
        match = OWN_PROCESS.search("\0".join(words[1:]))
        if not ours or match is None or not JOB_NAME.fullmatch(match["job"]):
            continue
        files = home.job(match["job"])
        if not files.root.is_dir() or agent_alive(files) is not None or not home.is_of(pid):
            continue
        line = _line(pid)
        if line and not agents & line:
            processes.append({"pid": pid, "mode": match["mode"], "job": files.name})
    return processes


def _line(pid: int) -> set[int]:
    """Return a process, its parent, and so on; an empty set if it has ended."""
    while True:
        line: set[int] = set()
        at = pid
        while at > 0 and (fields := stat_fields(at)):
            line.add(at)
            at = int(fields[1])
        # If a process above has ended meanwhile, this one has another parent.
        if at <= 0 or at == pid:
            return line


def _python_files(workdir: Path) -> Iterable[Path]:
    for root, directories, names in os.walk(workdir):
        directories[:] = [name for name in directories if not name.startswith(".") and name != "__pycache__"]
        yield from (Path(root, name) for name in names if name.endswith(".py"))


def _limit(which: int) -> int | None:
    """Return a soft limit, None for unlimited."""
    soft = resource.getrlimit(which)[0]
    return None if soft == resource.RLIM_INFINITY else soft


async def _nvidia(query: str) -> list[str] | None:
    """Return nvidia-smi's rows, None where there is no such tool or it fails."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    try:
        status, out, _ = await run_program([tool, query, "--format=csv,noheader,nounits"], TOOL_S)
    except (asyncio.TimeoutError, OSError):
        return None
    return [line.strip() for line in out.splitlines() if line.strip()] if status == 0 else None


async def _reach(target: ProbeTarget) -> Reached:
    began = time.monotonic()
    try:
        reader, writer = await asyncio.wait_for(
            asyncio.open_connection(target["address"], int(target["port"])), REACH_S
        )
    except asyncio.TimeoutError:
        return {"error": f"no answer within {REACH_S:g} s"}
    except OSError as error:
        return {"error": error.strerror or str(error)}
    try:
        token = (await asyncio.wait_for(reader.readline(), REACH_S)).decode().strip()
    except (asyncio.TimeoutError, ConnectionError, UnicodeDecodeError):
        token = ""
    finally:
        writer.close()
    if token != target["token"]:
        return {"error": "another machine answers at that address"}
    return {"ms": round((time.monotonic() - began) * 1000, 2)}
