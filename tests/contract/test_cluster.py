"""The cluster itself: hosts are different machines, faults are real, and nothing is left of it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import Cluster, ClusterError, cluster_obstacle
from tests.cluster.fixtures import hosts_of
from tests.cluster.job import until
from tests.cluster.network import NETNS_DIR, SSH_PORT, process_state
from tests.examples import nightly
from tests.scratch import OUTER, outer

pytestmark = [
    nightly,
    pytest.mark.skipif(cluster_obstacle() is not None, reason=cluster_obstacle() or ""),
]


three = hosts_of(3, operators=1)


@pytest.fixture(autouse=True)
def healed(three: Cluster) -> Iterator[None]:
    yield
    three.heal()


# After a cut, ARP asks again only once a second: where a connection is expected it gets time.
_LONG_S = 10.0
_SHORT_S = 0.4


def _reaches(address: str, timeout_s: float = _LONG_S) -> bool:
    try:
        with socket.create_connection((address, SSH_PORT), timeout=timeout_s) as connection:
            return connection.recv(4) == b"SSH-"
    except OSError:
        return False


def _peer_reaches(cluster: Cluster, source: str, target: str, timeout_s: float = _LONG_S) -> bool:
    code = (
        "import socket, sys\n"
        "try: socket.create_connection((sys.argv[1], 22), timeout=float(sys.argv[2])).close()\n"
        "except OSError: sys.exit(1)"
    )
    args = [sys.executable, "-c", code, cluster.host(target).address, str(timeout_s)]
    return cluster.exec(source, args).returncode == 0


def test_each_host_is_another_machine(three: Cluster) -> None:
    line = 'hostname; echo "$HOME"; pwd; echo ~; getent passwd "$USER" | cut -d: -f6'
    for host in three.hosts:
        done = three.ssh(host, line)
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == [host.name, *[str(host.home)] * 4]
    assert three.exec(1, ["hostname"]).stdout.strip() == "n2"
    assert len({host.home for host in three.hosts}) == 3
    assert len({host.address for host in three.hosts}) == 3


def test_who_is_cut_off_hears_nobody_and_all_others_do(three: Cluster) -> None:
    first, second = (host.address for host in three.hosts[:2])
    three.cut(1)
    assert not _reaches(second, _SHORT_S)
    assert not _peer_reaches(three, "n1", "n2", _SHORT_S)
    assert _peer_reaches(three, "n1", "n3")
    three.heal(1)
    assert _reaches(second)
    three.partition(["n1"], ["n2", "n3"])
    assert not _peer_reaches(three, "n1", "n3", _SHORT_S)
    assert _peer_reaches(three, "n2", "n3")
    three.heal()
    three.cut("operator")
    assert not _reaches(first, _SHORT_S)
    assert _peer_reaches(three, "op1", "n2")
    three.heal("operator")
    assert _reaches(first)


def test_blocked_ssh_leaves_other_ports(three: Cluster) -> None:
    listener = "import socket; s = socket.create_server(('', 7000)); print('up', flush=True); s.accept()"
    with three.popen(0, [sys.executable, "-c", listener], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        three.block_ssh(0)
        assert not _reaches(three.hosts[0].address, _SHORT_S)
        socket.create_connection((three.hosts[0].address, 7000), timeout=5).close()
    three.unblock_ssh(0)
    assert _reaches(three.hosts[0].address)


def test_a_crashed_host_is_silent_and_comes_back_with_its_files(three: Cluster) -> None:
    three.ssh(1, "echo kept > ~/kept")
    with subprocess.Popen([*three.ssh_command(1), "echo up; sleep 600"], stdout=subprocess.PIPE) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == b"up\n"
        # What a process is called is not there for a moment, while it becomes another program.
        until(lambda: any("sleep 600" in line for line in three.processes(1).values()), "sleep")
        three.crash(1)
        assert three.processes(1) == {}
        assert not _reaches(three.hosts[1].address, _SHORT_S)
        with pytest.raises(subprocess.TimeoutExpired):
            client.wait(timeout=0.5)  # nothing told it
        client.kill()
    with pytest.raises(ClusterError, match="n2 is down"):
        three.exec(1, ["true"])
    three.boot(1)
    assert three.ssh(1, "cat ~/kept; hostname").stdout == "kept\nn2\n"


def test_nothing_is_left_of_a_cluster() -> None:
    with pytest.raises(RuntimeError, match="the test fails"), Cluster(2) as cluster:
        daemon = cluster.ssh(0, "setsid sleep 600 </dev/null >/dev/null 2>&1 & echo $!")
        pid = int(daemon.stdout)
        cluster.delay(1, 10)
        network, directory = cluster.network, cluster.directory
        raise RuntimeError("the test fails")
    assert network.namespaces() == []
    assert not Path(f"/sys/class/net/{network.uplink}").exists()
    assert not directory.exists()
    assert process_state(pid) in {"", "Z"}  # a zombie until init has collected it


_OWNER = """
import sys, time
from tests.cluster import Cluster
with Cluster(2) as cluster:
    cluster.ssh(0, "setsid sleep 600 </dev/null >/dev/null 2>&1 &")
    print(cluster.network.net_id, cluster.directory, flush=True)
    time.sleep(600)
"""


def _owner(repository: Path) -> tuple[subprocess.Popen[str], str, Path]:
    owner = subprocess.Popen([sys.executable, "-c", _OWNER], stdout=subprocess.PIPE, text=True, cwd=repository)
    assert owner.stdout is not None
    net_id, directory = owner.stdout.readline().split()
    return owner, net_id, Path(directory)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_removes_the_cluster(number: signal.Signals, repository: Path) -> None:
    owner, net_id, directory = _owner(repository)
    with owner:
        owner.send_signal(number)
        assert owner.wait(timeout=20) != 0
    assert list(NETNS_DIR.glob(f"sv-{net_id}-*")) == []
    assert not directory.exists()


def test_what_killed_owners_left_is_swept_up_whoever_comes_first(repository: Path) -> None:
    owner, net_id, directory = _owner(repository)
    with owner:
        owner.kill()
        owner.wait(timeout=20)
    # Several sessions that start at once find the same leftovers.
    code = "from tests.cluster.state import sweep; sweep()"
    sweepers = [subprocess.Popen([sys.executable, "-c", code], cwd=repository) for _ in range(4)]
    assert [sweeper.wait(timeout=60) for sweeper in sweepers] == [0, 0, 0, 0]
    assert list(NETNS_DIR.glob(f"sv-{net_id}-*")) == []
    assert not directory.exists()


def test_by_hand(repository: Path) -> None:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "tests.cluster", *words],
            capture_output=True,
            text=True,
            cwd=repository,
            check=False,
            timeout=60,
            env={**os.environ, OUTER: str(state)},
        )

    state = outer() / f"supervisor-by-hand-{os.getpid()}"
    state.mkdir()
    try:
        up = run("up", "2")
        assert up.returncode == 0, up.stderr
        assert up.stdout.count("[[hosts]]") == 2
        address = up.stdout.rpartition('ssh = "')[2].split('"')[0]
        assert run("exec", "n2", "--", "hostname").stdout == "n2\n"
        assert _reaches(address)
        assert run("cut", "n2").returncode == 0
        assert not _reaches(address, _SHORT_S)
        assert run("delay", "n2", "5").returncode == 0
        assert run("heal", "n2").returncode == 0
        assert _reaches(address)
        assert "n2" in run("list").stdout
        wrong = run("cut", "n9")
        assert (wrong.returncode, wrong.stderr) == (1, "no host n9; there are n1, n2\n")
    finally:
        down = run("down")
        left = list(state.iterdir())
        state.rmdir()
    assert (down.returncode, left) == (0, [])
