"""The cluster's network: a switch in a namespace of its own, one cable per host, and rules that cut links.

In: names and numbers of hosts.
Out: namespaces, links and addresses, made and removed through `ip` and `nft`.
"""

from __future__ import annotations

import ipaddress
import json
import os
import random
import select
import signal
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

NETNS_DIR = Path("/run/netns")
OPERATOR = "operator"
SSH_PORT = 22
MAX_HOSTS = 200
_OPERATOR_NUMBER = 254


class ClusterError(Exception):
    """The cluster cannot be made or changed; the message says why."""


def command(*args: str, stdin: str | None = None) -> str:
    """Run a system command, deadline 30 s, and return what it printed; raises ClusterError with its complaint."""
    done = subprocess.run(args, input=stdin, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode != 0:
        raise ClusterError(f"{' '.join(args)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


class Network:
    """One /24 behind a switch; its id is the two middle octets, so that the kernel refuses a second one of the id."""

    def __init__(self, net_id: str) -> None:
        self.net_id = net_id
        second, third = net_id.split("-")
        self.prefix = f"10.{second}.{third}."
        self.uplink = f"sv-{net_id}"
        self.switch = self.netns("switch")

    def netns(self, name: str) -> str:
        """The namespace of the host with this name."""
        return f"sv-{self.net_id}-{name}"

    def address(self, number: int) -> str:
        """The address of the host with this number, counted from 1."""
        return f"{self.prefix}{number}"

    @property
    def operator_address(self) -> str:
        """The address that this machine itself has on the network."""
        return self.address(_OPERATOR_NUMBER)

    @classmethod
    def create(cls, names: list[str]) -> Network:
        """Make the network with a namespace and a cable for each host; raises ClusterError."""
        if not 0 < len(names) <= MAX_HOSTS:
            raise ClusterError(f"{len(names)} hosts asked for; 1 to {MAX_HOSTS} are possible")
        network = cls._claim()
        try:
            network._wire(names)
        except BaseException:
            network.remove()
            raise
        return network

    @classmethod
    def _claim(cls) -> Network:
        taken = _routed()
        for _ in range(100):
            network = cls(f"{random.randint(60, 250)}-{random.randint(0, 255)}")
            wanted = ipaddress.ip_network(f"{network.prefix}0/24")
            if any(wanted.overlaps(other) for other in taken):
                continue
            try:
                command("ip", "netns", "add", network.switch)
            except ClusterError as error:
                if "File exists" in str(error):
                    continue
                raise
            return network
        raise ClusterError("no free /24 between 10.60.0.0 and 10.250.255.255")

    def _wire(self, names: list[str]) -> None:
        outside = [f"netns add {self.netns(name)}" for name in names]
        outside += [f"link add {self.uplink} type veth peer name {OPERATOR} netns {self.switch}"]
        outside += [f"addr add {self.operator_address}/24 dev {self.uplink}", f"link set {self.uplink} up"]
        batch(outside)
        # forward_delay 0: without it a port of the bridge learns for 15 s before it forwards.
        inside = ["link add br0 type bridge forward_delay 0 stp_state 0 mcast_snooping 0", "link set br0 up"]
        inside += [f"link add {name} type veth peer name eth0 netns {self.netns(name)}" for name in names]
        inside += [f"link set {port} master br0 up" for port in [OPERATOR, *names]]
        batch(inside, "-n", self.switch)

    def namespaces(self) -> list[str]:
        """All namespaces of this network that exist now."""
        return sorted(path.name for path in NETNS_DIR.glob(f"sv-{self.net_id}-*"))

    def apply(self, rules: Iterable[str]) -> None:
        """Replace all rules of the switch at once. The cut is silent: no carrier is lost and nothing answers."""
        body = "\n".join(rules)
        script = (
            "table bridge cuts\ndelete table bridge cuts\n"
            "table bridge cuts {\nchain forward {\ntype filter hook forward priority 0; policy accept;\n"
            f"{body}\n}}\n}}\n"
        )
        command("ip", "netns", "exec", self.switch, "nft", "-f", "-", stdin=script)

    def remove(self) -> None:
        """End every process in the network's namespaces and remove them and all links."""
        names = self.namespaces()
        for name in names:
            kill_all(name)
        if Path(f"/sys/class/net/{self.uplink}").exists():
            command("ip", "link", "del", self.uplink)
        batch([f"netns del {name}" for name in names])


def cut_rules(first: str, second: str, ports: dict[str, list[str]]) -> list[str]:
    """The rules that drop everything of a host, or everything between two; `ports` are the switch ports of each."""
    ours = _port_set(ports[first])
    if not second:
        return [f"iifname {ours} drop", f"oifname {ours} drop"]
    theirs = _port_set(ports[second])
    return [f"iifname {ours} oifname {theirs} drop", f"iifname {theirs} oifname {ours} drop"]


def one_way_rules(source: str, target: str, ports: dict[str, list[str]]) -> list[str]:
    """The rule that drops what one end sends to another, or to all."""
    theirs = f" oifname {_port_set(ports[target])}" if target else ""
    return [f"iifname {_port_set(ports[source])}{theirs} drop"]


def ssh_rules(name: str, ports: dict[str, list[str]]) -> list[str]:
    """The rules that drop SSH to a host and nothing else."""
    ours = _port_set(ports[name])
    return [f"oifname {ours} tcp dport {SSH_PORT} drop", f"iifname {ours} tcp sport {SSH_PORT} drop"]


def _port_set(names: list[str]) -> str:
    return "{ " + ", ".join(f'"{name}"' for name in names) + " }"


def batch(lines: list[str], *options: str) -> None:
    """Run several `ip` commands in one process; raises ClusterError."""
    if lines:
        command("ip", *options, "-batch", "-", stdin="\n".join(lines) + "\n")


def _routed() -> list[ipaddress.IPv4Network]:
    routes = json.loads(command("ip", "-json", "-4", "route", "show", "table", "all") or "[]")
    networks = []
    for route in routes:
        target = str(route.get("dst", "default"))
        if target != "default" and target != "0.0.0.0/0":
            networks.append(ipaddress.IPv4Network(target, strict=False))
    return networks


def pids_in(netns: str) -> list[int]:
    """The processes whose network namespace is the named one, in order of pid; none when there is no such namespace."""
    try:
        wanted = (NETNS_DIR / netns).stat()
    except FileNotFoundError:
        return []
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            its = os.stat(f"/proc/{entry}/ns/net")
        except OSError:
            continue
        if (its.st_ino, its.st_dev) == (wanted.st_ino, wanted.st_dev):
            found.append(int(entry))
    return sorted(found)


def kill_all(netns: str, deadline_s: float = 10.0) -> None:
    """SIGKILL what runs in the namespace until nothing does; raises ClusterError when something cannot be ended."""
    end = time.monotonic() + deadline_s
    while pids := _alive(pids_in(netns)):
        if time.monotonic() > end:
            raise ClusterError(f"processes {pids} in namespace {netns} do not end")
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.002)  # a child forked meanwhile is seen only by looking again


def _alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if process_state(pid) not in {"Z", "X", ""}]


def await_ends(pids: Iterable[int], timeout_s: float) -> None:
    """Wait until all of these processes have ended, or this time has passed."""
    end = time.monotonic() + timeout_s
    for pid in pids:
        try:
            ended = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            select.select([ended], [], [], max(0.0, end - time.monotonic()))
        finally:
            os.close(ended)


def process_state(pid: int) -> str:
    """The state letter of a process from /proc, empty when it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[0]
