"""What a torchrun of others is told before it joins a job: what is wrong with its options, and what they lack."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from remote_agent.bridge import joining


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"endpoint": ""}, "--rdzv-endpoint HOST:PORT is missing"),
        ({"endpoint": "host:port"}, "is not HOST:PORT"),
        ({"run_id": "a/b"}, "bad job name"),
        ({"local_addr": "10.0.0.1"}, "the nodes need a shared secret"),
        ({"key_file": "/does/not/exist"}, "key_file /does/not/exist: No such file"),
        (
            {"join_timout": "5"},
            "--rdzv-conf join_timout: unknown key (did you mean join_timeout? known: join_timeout, ",
        ),
        ({"key_file": os.devnull}, "the nodes need a shared secret"),
        ({"key_file": "/proc/sys/kernel/ostype"}, "fewer than 16"),
    ],
)
def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], message: str) -> None:
    from torch.distributed.elastic.rendezvous import RendezvousParameters

    from supervisor.handlers import create

    monkeypatch.setenv("SUPERVISOR_HOME", str(tmp_path))
    settings = {"backend": "supervisor", "endpoint": "127.0.0.1:29400", "run_id": "job", **change}
    with pytest.raises(SystemExit, match=re.escape(message)):
        create(RendezvousParameters(min_nodes=1, max_nodes=1, **settings))


def test_what_was_left_out_of_the_command_line_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.launcher import api

    from supervisor.handlers import create

    monkeypatch.setenv("SUPERVISOR_HOME", str(tmp_path))
    monkeypatch.setitem(vars(api), "LocalElasticAgent", vars(api)["LocalElasticAgent"])
    create(RendezvousParameters("supervisor", "127.0.0.1", "none", 1, 1, timeout=900))
    said = capfd.readouterr().err
    assert "without --rdzv-id" in said
    assert "--rdzv-endpoint 127.0.0.1 has no port: using 29400" in said


def test_a_machine_whose_own_name_is_loopback_gives_others_another_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def debian(host: str, port: int, **_: Any) -> list[Any]:
        address = "127.0.1.1" if host == "gpu01" else host
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (address, port))]

    monkeypatch.setattr(socket, "getaddrinfo", debian)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((joining.ELSEWHERE, 1))
        except OSError:
            pytest.skip("this machine has no way to anywhere")
        outside = probe.getsockname()[0]
    assert joining.own_address("gpu01", 29400) == outside
    assert joining.own_address("127.0.0.1", 29400) == "127.0.0.1"
