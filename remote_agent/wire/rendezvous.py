"""One of torch's own rendezvous backends, as a job asks for it, and torchrun's way to write its settings.

In: words of the command line. Out: a frozen object, dicts, hosts and ports.
"""

from __future__ import annotations

import dataclasses

# Where torch looks when an endpoint has no port.
PORTS = {"c10d": 29400, "static": 29500, "etcd": 2379, "etcd-v2": 2379}


@dataclasses.dataclass(frozen=True)
class Rendezvous:
    """One of torch's own rendezvous backends, for a job whose group torch's agents form."""

    backend: str
    """c10d, etcd-v2, etcd or static."""
    run_id: str
    endpoint: str = ""
    """HOST:PORT; empty: a free port of the group's first node."""
    conf: str = ""
    """torchrun's K=V,…"""
    nnodes: str = ""
    """N or MIN:MAX, where nodes that are not ours may join; empty: as many as the group has."""


def read_conf(text: str) -> dict[str, str]:
    """Return torchrun's K=V,… as a dict; raises ValueError that names the part which is none."""
    conf = {}
    for part in text.split(","):
        if part.strip():
            key, equals, value = part.partition("=")
            if not equals or not key.strip() or not value.strip():
                raise ValueError(f"{part!r} is not K=V")
            conf[key.strip()] = value.strip()
    return conf


def split_endpoint(endpoint: str, default: int) -> tuple[str, int]:
    """Return host and port of HOST[:PORT]; raises ValueError for a port that is none."""
    host, colon, port = endpoint.rpartition(":")
    if not colon:
        return endpoint, default
    if not port.isdecimal() or not 0 < int(port) < 65536 or not host:
        raise ValueError(f"{endpoint!r} is not HOST:PORT")
    return host, int(port)
