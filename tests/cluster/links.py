"""What is wrong with the cluster's links now: cuts, blocked SSH, delays, lost frames.

In: names of hosts, or "operator" for the machine that runs the tests.
Out: rules and slow cables in the switch's namespace.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.cluster.network import (
    ClusterError,
    Network,
    batch,
    command,
    cut_rules,
    one_way_rules,
    process_state,
    ssh_rules,
)

_RELAY = Path(__file__).with_name("relay.py")


class Links:
    """The faults of one network; every change takes effect before the call returns."""

    def __init__(self, network: Network, ports: list[str]) -> None:
        self._network = network
        self._ports = ports
        self._cuts: set[tuple[str, str]] = set()
        self._one_way: set[tuple[str, str]] = set()
        self._no_ssh: set[str] = set()
        self._relays: dict[str, int] = {}
        self._children: dict[int, subprocess.Popen[bytes]] = {}

    def to_json(self) -> dict[str, Any]:
        """The faults, for a later process."""
        cuts = {"cuts": sorted(self._cuts), "one_way": sorted(self._one_way)}
        return {**cuts, "no_ssh": sorted(self._no_ssh), "relays": self._relays}

    def load_json(self, saved: dict[str, Any]) -> None:
        """Take over the faults that an earlier process made."""
        self._cuts = {(first, second) for first, second in saved["cuts"]}
        self._one_way = {(source, target) for source, target in saved["one_way"]}
        self._no_ssh = set(saved["no_ssh"])
        self._relays = dict(saved["relays"])

    def cut(self, first: str, second: str = "") -> None:
        """Drop everything between two ends, or everything of one. Raises ClusterError."""
        self._cuts.add(_pair(first, second))
        self._apply()

    def cut_one_way(self, source: str, target: str = "") -> None:
        """Drop what one end sends to another, or to all; what it receives still arrives. Raises ClusterError."""
        self._one_way.add((source, target))
        self._apply()

    def block_ssh(self, name: str) -> None:
        """Drop SSH to a host, whoever it comes from; all else passes. Raises ClusterError."""
        self._no_ssh.add(name)
        self._apply()

    def unblock_ssh(self, name: str) -> None:
        """Let SSH pass to a host again. Raises ClusterError."""
        self._no_ssh.discard(name)
        self._apply()

    def heal(self, first: str = "", second: str = "") -> None:
        """Repair the link between two ends, all faults of one end, or everything. Raises ClusterError."""
        if second:
            self._cuts.discard(_pair(first, second))
            self._one_way -= {(first, second), (second, first)}
        elif first:
            self._cuts = {pair for pair in self._cuts if first not in pair}
            self._one_way = {pair for pair in self._one_way if first not in pair}
            self._no_ssh.discard(first)
            self._end_delay(first)
        else:
            self._cuts.clear()
            self._one_way.clear()
            self._no_ssh.clear()
            for name in list(self._relays):
                self._end_delay(name)
        self._apply()

    def delay(self, name: str, delay_ms: float, loss: float = 0.0) -> None:
        """Make everything to and from an end late by this much each way, and lose that share of it; 0 ends both.

        Raises ClusterError.
        """
        self._end_delay(name)
        if delay_ms > 0 or loss > 0:
            self._begin_delay(name, delay_ms, loss)
        self._apply()

    def reap(self) -> None:
        """Collect the slow cables of ours that have ended, or end now."""
        living = set(self._relays.values())
        for pid in [pid for pid in self._children if pid not in living]:
            self._children.pop(pid).wait(timeout=10)

    def close(self) -> None:
        """Forget all faults, after the network has gone."""
        self._relays.clear()
        self.reap()

    def _apply(self) -> None:
        ports = {name: [name, _outer(name)] if name in self._relays else [name] for name in self._ports}
        rules: list[str] = []
        for first, second in sorted(self._cuts):
            rules += cut_rules(first, second, ports)
        for source, target in sorted(self._one_way):
            rules += one_way_rules(source, target, ports)
        for name in sorted(self._no_ssh):
            rules += ssh_rules(name, ports)
        self._network.apply(rules)

    def _begin_delay(self, name: str, delay_ms: float, loss: float) -> None:
        switch = self._network.switch
        batch(
            [
                f"link add {_inner(name)} type veth peer name {_outer(name)}",
                f"link set {_inner(name)} up",
                f"link set {_outer(name)} up",
            ],
            "-n",
            switch,
        )
        relay = subprocess.Popen(
            ["ip", "netns", "exec", switch, sys.executable, str(_RELAY), name, _inner(name), str(delay_ms), str(loss)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd="/",
        )
        self._relays[name] = relay.pid
        self._children[relay.pid] = relay
        if relay.stdout is None:
            raise ClusterError("the slow cable has no output")
        with relay.stdout as output:
            line = output.readline()
            if line != b"ready\n":
                raise ClusterError(f"no slow cable: {(line + output.read()).decode().strip()}")
        batch([f"link set {name} nomaster", f"link set {_outer(name)} master br0"], "-n", switch)

    def _end_delay(self, name: str) -> None:
        pid = self._relays.pop(name, None)
        if pid is None:
            return
        batch(
            [f"link set {_outer(name)} nomaster", f"link set {name} master br0"],
            "-n",
            self._network.switch,
        )
        end_process(pid)
        self.reap()
        command("ip", "-n", self._network.switch, "link", "del", _inner(name))


def end_process(pid: int, deadline_s: float = 5.0) -> None:
    """SIGKILL a process that this cluster started and wait until it is gone; raises ClusterError after the deadline."""
    end = time.monotonic() + deadline_s
    while process_state(pid) not in {"", "Z", "X"}:
        if time.monotonic() > end:
            raise ClusterError(f"process {pid} does not end")
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        time.sleep(0.002)  # it may be another process's child, so that we cannot wait for it


def _pair(first: str, second: str) -> tuple[str, str]:
    return (first, second) if first >= second else (second, first)


def _inner(name: str) -> str:
    return f"{name}.in"


def _outer(name: str) -> str:
    return f"{name}.out"
