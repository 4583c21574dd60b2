"""Join a job from a torchrun that somebody else started on this machine.

In: torchrun's settings (RendezvousParameters, WorkerSpec), a certificate. Out: this node's name and address, the job's
directory here, and its agent as a child of torchrun.
"""

from __future__ import annotations

import contextlib
import difflib
import ipaddress
import os
import re
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from remote_agent.agent import jobs
from remote_agent.base.files import read_json, set_aside
from remote_agent.base.paths import Home, JobFiles, agent_alive
from remote_agent.bridge import starting
from remote_agent.engine.launchers.inside_torchrun import HandlerThread
from remote_agent.wire import JobSpec, NodeSpec, Problem, split_endpoint
from remote_agent.wire.events import ENDED_STATES

# These are torch's defaults for the port of c10d's endpoint and for its rendezvous (RendezvousTimeout).
PORT = 29400
JOIN_S = 600.0
LONGEST_HOST = 40
CONF = ("join_timeout", "last_call_timeout", "node_timeout", "hang_after", "hang_restart", "key_file")
# torchrun adds this key itself.
ALWAYS_THERE = "timeout"
# The route to this address for documentation (RFC 5737) is the default route.
ELSEWHERE = "192.0.2.1"


class JoiningNode:
    """A node that joins by torchrun: the job's files on this machine, the node's name and its addresses."""

    def __init__(self, params: Any) -> None:
        """Read torchrun's RendezvousParameters; raises Problem."""
        if not params.endpoint:
            raise Problem("endpoint", "--rdzv-endpoint HOST:PORT is missing", "HOST: a node that all others reach")
        self.params = params
        try:
            host, self.port = split_endpoint(params.endpoint, PORT)
            self.files = Home.from_environment().job(params.run_id)
        except (ValueError, Problem) as error:
            raise Problem("usage", f"--rdzv-endpoint, --rdzv-id: {error}") from error
        self.host = host.strip("[]")
        self.is_here = _is_local(self.host)
        self.address = params.local_addr or own_address(self.host, self.port)
        starting.make_home(self.files)
        _make_room(self.files)
        self.node = _node_name(self.files)

    def describe(self, worker_spec: Any, grace_s: float) -> JobSpec:
        """Return the job as this torchrun knows it; raises Problem."""
        command = worker_spec.entrypoint
        if not isinstance(command, str):
            raise Problem("usage", "--run-path and functions are not for this backend", "start the script itself")
        python = command in (sys.executable, os.environ.get("PYTHON_EXEC"))
        words = [word for word in worker_spec.args if word != "-u"] if python else [command, *worker_spec.args]
        module = words[:1] == ["-m"]
        words = words[1:] if module else words
        return JobSpec(
            job=self.params.run_id,
            script=words[0] if words else command,
            args=tuple(str(word) for word in words[1:]),
            kind="module" if module else "script" if python else "binary",
            nodes=(NodeSpec(self.node, self.address, nproc_per_node=str(worker_spec.local_world_size)),),
            workdir=os.getcwd(),
            min_nodes=self.params.min_nodes,
            max_nodes=self.params.max_nodes,
            max_restarts=worker_spec.max_restarts,
            role=worker_spec.role,
            stop_grace=grace_s,
            node_timeout=self._seconds("node_timeout", JobSpec.node_timeout),
            hang_after=self._seconds("hang_after", JobSpec.hang_after),
            hang_restart=self._seconds("hang_restart", JobSpec.hang_restart),
            join_timeout=self._seconds("join_timeout", JOIN_S),
            settle_timeout=self._seconds("last_call_timeout", JobSpec.settle_timeout),
            coordinator_port=self.port if self.is_here else 0,
            created_ns=time.time_ns(),
            endpoint=f"{self.host}:{self.port}",
        )

    def _seconds(self, name: str, default: float) -> float:
        try:
            return float(self.params.get(name, default))
        except ValueError as error:
            raise Problem("usage", f"--rdzv-conf {name}: {error}") from error

    def start(self, spec: JobSpec, certificate: dict[str, str]) -> tuple[HandlerThread, subprocess.Popen[bytes]]:
        """Start this node's agent as our child; raises Problem."""
        ours, theirs = socket.socketpair()
        with theirs:
            args = {"spec": spec.to_json(), "node": self.node, **certificate}
            agent = starting.start_for_torchrun(self.files, args, theirs.fileno())
        return HandlerThread(spec.job, ours, str(self.files.log)), agent


def check_conf(conf: Mapping[str, object]) -> None:
    """Refuse a key of --rdzv-conf that means nothing here; raises Problem."""
    for key in conf:
        if key not in (*CONF, ALWAYS_THERE):
            near = difflib.get_close_matches(key, CONF, 1)
            hint = (f"did you mean {near[0]}? " if near else "") + f"known: {', '.join(CONF)}"
            raise Problem("usage", f"--rdzv-conf {key}: unknown key", hint)


def _is_local(host: str) -> bool:
    """Return whether a name or an address is this machine's; raises Problem when it is unknown."""
    for family, _, _, _, where in _resolve(host, 0):
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            try:
                probe.bind(where)
            except OSError:
                continue
            return True
    return False


def own_address(host: str, port: int) -> str:
    """Return the address at which others that know us by the endpoint's host reach this machine; raises Problem."""
    address = _address_towards(host, port)
    if is_loopback(address) and host != "localhost" and not is_loopback(host):
        # Debian gives a machine's own name the address 127.0.1.1, which nobody else can reach.
        with contextlib.suppress(Problem):
            return _address_towards(ELSEWHERE, port)
    return address


def is_loopback(address: str) -> bool:
    """Return whether that is an address which only this machine can reach."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _address_towards(host: str, port: int) -> str:
    """Return the address that this machine has on the way to another; nothing is sent."""
    family, _, _, _, where = _resolve(host, port)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(where)
        except OSError as error:
            raise Problem("endpoint", f"--rdzv-endpoint {host}: {error.strerror}") from error
        return str(probe.getsockname()[0])


def _resolve(host: str, port: int) -> list[Any]:
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise Problem("endpoint", f"--rdzv-endpoint {host}: {error.strerror}") from error


def _node_name(files: JobFiles) -> str:
    """Return this node's name in the job: the host's with an ending of its own, and the same after a restart."""
    known = read_json(files.node)
    if known.get("hostname") == socket.gethostname():
        return str(known["node"])
    host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname().partition(".")[0])[:LONGEST_HOST].strip("-")
    return f"{host or 'node'}-{secrets.token_hex(2)}"


def _make_room(files: JobFiles) -> None:
    """Rename the directory of a run that is over, for a new run of the same name."""
    if files.root.is_dir() and agent_alive(files) is None and jobs.describe(files)["state"] in ENDED_STATES:
        set_aside(files.root, ".")
