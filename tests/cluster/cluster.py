"""A cluster of hosts on this machine: network namespaces with a real sshd each. Needs root.

In: how many hosts.
Out: `Cluster`: hosts, an inventory for them, commands on them, faults; all of it removed at the end.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Collection, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from tests import known_torch
from tests.cluster import machine as machines
from tests.cluster.disk import Disk
from tests.cluster.inventory import write_inventory
from tests.cluster.links import Links
from tests.cluster.machine import Machine
from tests.cluster.network import OPERATOR, ClusterError, Network, command, kill_all, pids_in, process_state
from tests.cluster.prepared import prepared
from tests.cluster.state import PREFIX, STATE_FILE, process_stamp, remove, sweep
from tests.scratch import outer
from tests.stub import STUB

Which = int | str | Machine


class Cluster:
    """`size` hosts n1, n2 … on a network of their own; `with Cluster(4) as cluster: …`.

    `operators` more machines op1, op2 … are on the network but not in the inventory. With `resolve=False` the hosts
    do not know each other's names, and their own is 127.0.1.1, as on many real machines. With `disk_mb` each host's
    home is a disk of that many MiB, which loses at a crash what was not synced. With `stub_torch` Python there imports
    the torch of `tests/stub`: each engine's import of the real one takes two seconds of a processor. With `agent` they
    have the agent from before.
    """

    def __init__(
        self,
        size: int = 4,
        *,
        operators: int = 0,
        resolve: bool = True,
        disk_mb: int = 0,
        stub_torch: bool = False,
        agent: bool = False,
    ) -> None:
        self._disk_mb = disk_mb
        self._names = [f"n{number}" for number in range(1, size + 1)]
        self._operator_names = [f"op{number}" for number in range(1, operators + 1)]
        self._resolve = resolve
        self._python_path = str(STUB) if stub_torch else ""
        self._agent = agent
        self._keepers: dict[str, int] = {}
        self._disks: dict[str, Disk] = {}
        self._children: list[subprocess.Popen[bytes]] = []
        self._old_handlers: dict[signal.Signals, Any] = {}
        self._network: Network | None = None
        self._owned = True
        self.directory = Path()
        self.hosts: list[Machine] = []
        self.operators: list[Machine] = []

    # Life

    def __enter__(self) -> Cluster:
        self.up()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()

    def up(self, *, owned: bool = True) -> None:
        """Make the cluster; `owned` ones do not outlive this process for longer than the next cluster's start.

        Raises ClusterError.
        """
        sweep()
        self._owned = owned
        self._exit_on_signals()
        try:
            self.directory = Path(tempfile.mkdtemp(prefix=PREFIX, dir=outer()))
            self._network = Network.create([*self._names, *self._operator_names])
            self._links = Links(self._network, [OPERATOR, *self._names, *self._operator_names])
            self._make_machines(self._network)
            self._save()
            self._boot(self._machines)
        except BaseException:
            self.down()
            raise

    def down(self) -> None:
        """End every process on every host and remove all of the cluster; a second call does nothing."""
        network, self._network = self._network, None
        try:
            if network is not None:
                network.remove()
                self._links.close()
                for host in self.hosts:
                    known_torch.keep(host.home / ".supervisor")
            for child in self._children:
                child.wait(timeout=10)
            self._children.clear()
        finally:
            if self.directory.name.startswith(PREFIX):
                remove(self.directory)
            for number, handler in self._old_handlers.items():
                signal.signal(number, handler)
            self._old_handlers.clear()

    def _exit_on_signals(self) -> None:
        # Without a handler these two end the interpreter on the spot, and the namespaces stay.
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) == signal.SIG_DFL:
                self._old_handlers[number] = signal.signal(number, _exit)

    def _make_machines(self, network: Network) -> None:
        names = [*self._names, *self._operator_names]
        found = [
            Machine(
                name, number, network.address(number), network.netns(name), self.directory / name, self._python_path
            )
            for number, name in enumerate(names, 1)
        ]
        self.hosts, self.operators = found[: len(self._names)], found[len(self._names) :]
        machines.make_key(self.identity_file)
        known = "".join(f"{host.address} {host.name}\n" for host in found)
        for host in found:
            others = known if self._resolve else f"127.0.1.1 {host.name}\n"
            machines.make_files(host, f"127.0.0.1 localhost\n{others}", self.identity_file.with_suffix(".pub"))
            if self._disk_mb:
                # Before the host boots: its mount namespace is a copy of ours.
                self._disks[host.name] = Disk(host.home, self._disk_mb)
            if self._agent:
                shutil.copytree(prepared(), host.home / ".supervisor")
                known_torch.lend(host.home / ".supervisor")
        if self._disks:
            # A host begins with what an earlier job has left, which is on its disk.
            os.sync()
        self.known_hosts.write_text("".join(f"{host.known_hosts_line}\n" for host in found))

    def _boot(self, which: list[Machine]) -> None:
        keepers = {host: machines.boot(host) for host in which}
        self._children += keepers.values()
        for host, keeper in keepers.items():
            machines.await_booted(host, keeper)
            self._keepers[host.name] = keeper.pid
            self._children.append(machines.start_sshd(host, keeper.pid))
        self._save()
        for host in which:
            machines.await_sshd(host)

    # What is where

    @property
    def _machines(self) -> list[Machine]:
        return [*self.hosts, *self.operators]

    @property
    def network(self) -> Network:
        """The network; raises ClusterError when the cluster is down."""
        if self._network is None:
            raise ClusterError("this cluster is not up")
        return self._network

    @property
    def identity_file(self) -> Path:
        """The key that all hosts let in."""
        return self.directory / "identity"

    @property
    def known_hosts(self) -> Path:
        """The host keys of all hosts."""
        return self.directory / "known_hosts"

    def host(self, which: Which) -> Machine:
        """A host by index (from 0), by name, or itself; raises ClusterError."""
        if isinstance(which, Machine):
            return which
        if isinstance(which, int):
            return self.hosts[which]
        for host in self._machines:
            if host.name == which:
                return host
        raise ClusterError(f"no host {which}; there are {', '.join(host.name for host in self._machines)}")

    def keeper_pid(self, which: Which) -> int:
        """The process that holds a host's namespaces; raises ClusterError when the host has crashed."""
        host = self.host(which)
        if host.name not in self._keepers:
            raise ClusterError(f"{host.name} is down")
        return self._keepers[host.name]

    def inventory(
        self,
        path: Path | None = None,
        *,
        defaults: Mapping[str, object] | None = None,
        hosts: Mapping[str, Mapping[str, object]] | None = None,
        only: Collection[str] | None = None,
        **job: object,
    ) -> Path:
        """Write a hosts.toml (default: in the cluster's directory) and return its path.

        `job` are keys of [job]; `defaults` are more keys of [defaults]; `hosts` are more keys by name of host;
        `only` are the names of the hosts to list (default: all).
        """
        common = {
            "user": machines.environment(self.hosts[0])["USER"],
            "identity_file": str(self.identity_file),
            "known_hosts": str(self.known_hosts),
            "python": sys.executable,
            **(defaults or {}),
        }
        entries: list[dict[str, object]] = [
            {"name": host.name, "ssh": host.address, **(hosts or {}).get(host.name, {})}
            for host in self.hosts
            if only is None or host.name in only
        ]
        return write_inventory(path or self.directory / "hosts.toml", dict(job), common, entries)

    # Commands on hosts

    def ssh(self, which: Which, line: str, *, timeout_s: float = 30.0) -> subprocess.CompletedProcess[str]:
        """Run a shell line on a host through the system's own ssh client."""
        return subprocess.run(
            [*self.ssh_command(which), line],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def ssh_command(self, which: Which) -> list[str]:
        """The ssh client with all options for a host; a command may follow."""
        host = self.host(which)
        options = [f"UserKnownHostsFile={self.known_hosts}", "GlobalKnownHostsFile=/dev/null", "BatchMode=yes"]
        options += ["IdentitiesOnly=yes", "StrictHostKeyChecking=yes", "ConnectTimeout=10", "LogLevel=ERROR"]
        words = [word for option in options for word in ("-o", option)]
        return ["ssh", "-F", "none", "-i", str(self.identity_file), *words, host.address]

    def exec(
        self, which: Which, args: list[str], *, timeout_s: float = 60.0, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host without SSH, in its home, with the environment of a login plus `env`."""
        with self.popen(
            which, args, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            try:
                out, err = process.communicate(timeout=timeout_s)
            except BaseException:
                process.kill()
                raise
        return subprocess.CompletedProcess(args, process.returncode, out.decode(), err.decode())

    def popen(
        self, which: Which, args: list[str], *, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[bytes]:
        """Start a command on a host, as `exec`; the caller owns the process, and `down` ends it at the latest."""
        host = self.host(which)
        options.setdefault("cwd", host.home)
        return subprocess.Popen(
            [*machines.enter(self.keeper_pid(host)), "env", "-C", str(options.pop("cwd")), *args],
            cwd="/",  # nsenter with a mount namespace starts in its root anyway
            env={**machines.environment(host), **(env or {})},
            **options,
        )

    def pids(self, which: Which) -> list[int]:
        """The processes on a host, without its keeper and its sshd."""
        return sorted(self.processes(which))

    def processes(self, which: Which) -> dict[int, str]:
        """The command lines of the processes on a host by pid, without its keeper and its sshd; no zombies."""
        host = self.host(which)
        found = {}
        for pid in pids_in(host.netns):
            if pid == self._keepers.get(host.name):
                continue
            try:
                line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
                program = Path(f"/proc/{pid}/comm").read_text().strip()
            except OSError:
                continue
            if program != "sshd" and process_state(pid) not in {"Z", "X", ""}:
                found[pid] = line
        return found

    # Faults

    def cut(self, first: Which, second: Which | None = None) -> None:
        """Drop everything of a host, or between two; "operator" is this machine itself. Neither side is notified."""
        self._links.cut(self._end(first), "" if second is None else self._end(second))
        self._save()

    def heal(self, first: Which | None = None, second: Which | None = None) -> None:
        """Repair the link between two ends, all links of one, or everything."""
        self._links.heal("" if first is None else self._end(first), "" if second is None else self._end(second))
        self._save()

    def partition(self, one: list[Which], other: list[Which]) -> None:
        """Cut every link between two groups of ends."""
        for first in one:
            for second in other:
                self.cut(first, second)

    def cut_one_way(self, source: Which, target: Which | None = None) -> None:
        """Drop what an end sends to another one, or to all; what it receives still arrives."""
        self._links.cut_one_way(self._end(source), "" if target is None else self._end(target))
        self._save()

    def block_ssh(self, which: Which) -> None:
        """Drop SSH to a host, in both directions, and nothing else."""
        self._links.block_ssh(self._end(which))
        self._save()

    def unblock_ssh(self, which: Which) -> None:
        """Let SSH pass again."""
        self._links.unblock_ssh(self._end(which))
        self._save()

    def delay(self, which: Which, delay_ms: float, loss: float = 0.0) -> None:
        """Make all to and from a host (or "operator") late by this much, each way, and lose that share; 0 ends it."""
        self._links.delay(self._end(which), delay_ms, loss)
        self._save()

    def limit(self, which: Which, mbit: int) -> None:
        """Let a host send and receive no more than this many Mbit/s, until it goes."""
        host = self.host(which)
        for space, interface in ((host.netns, "eth0"), (self.network.switch, host.name)):
            shape = ("root", "tbf", "rate", f"{mbit}mbit", "burst", "64kb", "latency", "50ms")
            command("ip", "netns", "exec", space, "tc", "qdisc", "add", "dev", interface, *shape)

    def crash(self, which: Which) -> None:
        """End a host as a power failure does: everything on it is gone at once and nobody is told."""
        host = self.host(which)
        self.cut(host)
        kill_all(host.netns)
        if host.name in self._disks:
            self._disks[host.name].lose_power()
        self._keepers.pop(host.name, None)
        self._save()

    def boot(self, which: Which) -> None:
        """Start a crashed host again, with the files it had."""
        host = self.host(which)
        _clear_interface(host.netns)
        self.heal(host)
        self._boot([host])

    def freeze(self, which: Which) -> None:
        """SIGSTOP everything on a host but its keeper: the network is there, nobody answers."""
        self._signal_all(which, signal.SIGSTOP)

    def thaw(self, which: Which) -> None:
        """Let a frozen host go on."""
        self._signal_all(which, signal.SIGCONT)

    def _signal_all(self, which: Which, number: signal.Signals) -> None:
        host = self.host(which)
        for pid in pids_in(host.netns):
            if pid == self._keepers.get(host.name):
                continue
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue

    def _end(self, which: Which) -> str:
        return OPERATOR if which == OPERATOR else self.host(which).name

    # State, for `python -m tests.cluster` and for the removal of what a killed process left

    def _save(self) -> None:
        state = {
            "net_id": self.network.net_id,
            "owner": [os.getpid(), process_stamp(os.getpid())] if self._owned else None,
            "names": self._names,
            "operators": self._operator_names,
            "keepers": self._keepers,
            "links": self._links.to_json(),
        }
        path = self.directory / STATE_FILE
        path.with_suffix(".new").write_text(json.dumps(state))
        path.with_suffix(".new").replace(path)

    @classmethod
    def load(cls, directory: Path) -> Cluster:
        """The cluster that another process left in a directory; raises OSError."""
        state = json.loads((directory / STATE_FILE).read_text())
        cluster = cls(len(state["names"]), operators=len(state["operators"]))
        cluster._owned = state["owner"] is not None
        cluster.directory = directory
        network = cluster._network = Network(state["net_id"])
        cluster._keepers = dict(state["keepers"])
        names = [*state["names"], *state["operators"]]
        cluster._links = Links(network, [OPERATOR, *names])
        cluster._links.load_json(state["links"])
        found = [
            Machine(name, number, network.address(number), network.netns(name), directory / name)
            for number, name in enumerate(names, 1)
        ]
        cluster.hosts, cluster.operators = found[: len(state["names"])], found[len(state["names"]) :]
        return cluster


def _clear_interface(netns: str) -> None:
    # The namespace outlives the host's processes, and with it the address that the next boot adds.
    subprocess.run(["ip", "-n", netns, "addr", "flush", "dev", "eth0"], check=True, timeout=30)


def _exit(number: int, frame: object) -> None:
    raise SystemExit(128 + number)
