"""The cluster by hand: `python -m tests.cluster up 4`, `… cut n2`, `… down`.

In: the command line; the state file of the newest cluster that was made by hand.
Out: on stdout the hosts.toml of `up`, or what the command has to say; on stderr where things are.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

from tests.cluster import Cluster, ClusterError, cluster_obstacle, machine
from tests.cluster.network import OPERATOR
from tests.cluster.state import by_hand, directories, sweep


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    options = _parser().parse_args(argv)
    obstacle = cluster_obstacle()
    if obstacle:
        print(f"no cluster here: {obstacle}", file=sys.stderr)
        return 2
    try:
        return _run(options)
    except ClusterError as error:
        print(error, file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    up = verbs.add_parser("up", help="make hosts n1 … and print a hosts.toml for them")
    up.add_argument("size", nargs="?", type=int, default=4)
    up.add_argument("--operators", type=int, default=0, help="machines op1 … that are not in the hosts.toml")
    up.add_argument("--no-resolve", action="store_true", help="the hosts do not know each other's names")
    verbs.add_parser("down", help="remove all clusters made by hand, and what killed test runs left")
    verbs.add_parser("list", help="what there is, and what runs on it")
    for verb, text in {
        "cut": "drop everything of NODE (or the link to OTHER)",
        "heal": "repair all links of NODE (or the link to OTHER)",
    }.items():
        faulty = verbs.add_parser(verb, help=text)
        faulty.add_argument("node", help=f'a host, or "{OPERATOR}" for this machine')
        faulty.add_argument("other", nargs="?")
    for verb in ("block-ssh", "unblock-ssh", "crash", "boot", "freeze", "thaw"):
        verbs.add_parser(verb).add_argument("node")
    delay = verbs.add_parser("delay", help="make all that NODE sends and receives late, each way")
    delay.add_argument("node")
    delay.add_argument("milliseconds", type=float)
    run = verbs.add_parser("exec", help="run a command on NODE (default: a shell)")
    run.add_argument("node")
    run.add_argument("command", nargs=argparse.REMAINDER)
    return parser


def _run(options: argparse.Namespace) -> int:
    if options.verb == "up":
        return _up(options)
    if options.verb == "down":
        return _down()
    cluster = _newest()
    verb = str(options.verb).replace("-", "_")
    if verb == "list":
        _list()
    elif verb == "exec":
        _exec(cluster, options.node, options.command)
    elif verb in {"cut", "heal"}:
        getattr(cluster, verb)(options.node, options.other)
    elif verb == "delay":
        cluster.delay(options.node, options.milliseconds)
    else:
        getattr(cluster, verb)(options.node)
    return 0


def _up(options: argparse.Namespace) -> int:
    cluster = Cluster(options.size, operators=options.operators, resolve=not options.no_resolve)
    cluster.up(owned=False)
    path = cluster.inventory()
    print(path.read_text(), end="")
    print(f"hosts file: {path}\nremove all: python -m tests.cluster down", file=sys.stderr)
    return 0


def _down() -> int:
    sweep()
    for directory in by_hand():
        Cluster.load(directory).down()
    return 0


def _newest() -> Cluster:
    found = by_hand()
    if not found:
        raise ClusterError("no cluster was made by hand: python -m tests.cluster up 4")
    return Cluster.load(found[-1])


def _list() -> None:
    for directory in directories():
        cluster = Cluster.load(directory)
        print(directory, "" if directory in by_hand() else "(of a running test)")
        for host in [*cluster.hosts, *cluster.operators]:
            print(f"  {host.name:6} {host.address}")
            for pid, line in cluster.processes(host).items():
                print(f"    {pid:7} {line[:110]}")


def _exec(cluster: Cluster, node: str, command: list[str]) -> None:
    host = cluster.host(node)
    words = command[1:] if command[:1] == ["--"] else command
    args = [*machine.enter(cluster.keeper_pid(host)), "env", "-C", str(host.home), *(words or ["bash"])]
    program = shutil.which(args[0])
    if program is None:
        raise ClusterError("no nsenter: apt-get install util-linux")
    environment = machine.environment(host) | {"TERM": os.environ.get("TERM", "dumb")}
    sys.stdout.flush()
    os.chdir(Path("/"))
    os.execve(program, args, environment)


if __name__ == "__main__":
    sys.exit(main())
