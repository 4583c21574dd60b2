"""--rdzv-backend and what belongs to it: the job's own coordinator, or one of torch's rendezvous backends.

In: torchrun's options. Out: values for UpOptions, notices for the user.
"""

from __future__ import annotations

import argparse

from remote_agent.wire import PORTS, Rendezvous, read_conf, split_endpoint
from supervisor.cli.options import read_seconds
from supervisor.errors import UsageError

OURS = "supervisor"
BACKENDS = ("c10d", "etcd-v2", "etcd", "static")
# What of --rdzv-conf means something to the coordinator too, in seconds.
TIMEOUTS = ("join_timeout", "last_call_timeout")


def read_rendezvous(options: argparse.Namespace) -> Rendezvous | None:
    """Return which of torch's backends forms the group, None where the coordinator does; raises UsageError."""
    backend = options.rdzv_backend or OURS
    _conf(options)
    if backend == OURS or options.standalone:
        return None
    if backend not in BACKENDS:
        raise UsageError(
            f"--rdzv-backend {backend!r}: must be {OURS}, {', '.join(BACKENDS[:-1])} or {BACKENDS[-1]}",
            "leave it out: the job's own coordinator forms the group",
        )
    endpoint = options.rdzv_endpoint or ""
    if backend == "static" and not endpoint and options.master_addr:
        endpoint = f"{options.master_addr}:{options.master_port or PORTS['static']}"
    if endpoint.endswith(":0"):
        endpoint = ""
    if not endpoint and backend.startswith("etcd"):
        raise UsageError(f"--rdzv-backend {backend} needs --rdzv-endpoint: HOST:PORT of the etcd server")
    try:
        split_endpoint(endpoint, PORTS[backend])
    except ValueError as error:
        raise UsageError(f"--rdzv-endpoint {error}") from error
    return Rendezvous(backend, run_id="", endpoint=endpoint, conf=options.rdzv_conf or "")


def used(options: argparse.Namespace) -> frozenset[str]:
    """Return options that say where torch's static backend meets, and have no effect otherwise."""
    is_static = options.rdzv_backend == "static" and not options.standalone and not options.rdzv_endpoint
    return frozenset({"--master-addr", "--master-port"}) if is_static else frozenset()


def read_timeouts(options: argparse.Namespace) -> dict[str, float]:
    """Return the timeouts of --rdzv-conf that the coordinator takes, where it forms the group; raises UsageError."""
    if (options.rdzv_backend or OURS) != OURS:
        return {}
    return {
        key: read_seconds(f"--rdzv-conf {key}={value}", value)
        for key, value in _conf(options).items()
        if key in TIMEOUTS
    }


def notices(options: argparse.Namespace) -> list[str]:
    """Return what the user should know of this choice, one line each."""
    backend = options.rdzv_backend or OURS
    if backend != OURS and not options.standalone:
        why = "a restart takes longer than with the job's own coordinator (leave --rdzv-backend out for it)"
        return [f"torch's own {backend} rendezvous forms the group: {why}"]
    said = []
    if options.rdzv_endpoint is not None:
        said.append("--rdzv-endpoint has no effect here because each generation gets a fresh store on a free port")
    rest = [key for key in _conf(options) if key not in TIMEOUTS]
    if rest:
        said.append(
            f"--rdzv-conf {','.join(rest)} has no effect here because the job's own coordinator forms the group"
        )
    return said


def _conf(options: argparse.Namespace) -> dict[str, str]:
    try:
        return read_conf(options.rdzv_conf or "")
    except ValueError as error:
        raise UsageError(f"--rdzv-conf: {error}", "as in join_timeout=300,last_call_timeout=5") from error
