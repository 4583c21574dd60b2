"""The program of the zipapp and of `python -m remote_agent`, in one of its modes, such as connect, serve or engine.

In: argv. Out: the exit code of the chosen mode; each mode is imported only when it is chosen.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse


def _parser() -> argparse.ArgumentParser:
    import argparse

    parser = argparse.ArgumentParser(prog="agent", description="The node's side of supervisor.")
    modes = parser.add_subparsers(dest="mode", required=True)
    modes.add_parser("connect", help="bridge between stdin/stdout and the agents of this node")
    serve = modes.add_parser("serve", help="the agent of one job")
    serve.add_argument("--job", required=True)
    serve.add_argument("--handler", type=int, metavar="FD", help="socket of the torchrun that has the workers")
    serve.add_argument("--detach", action="store_true", help="continue in a grandchild and print its pid")
    serve.add_argument("--step", action="store_true", help="stay in this Slurm step, and write to the job's log")
    engine = modes.add_parser("engine", help="the part that starts the workers; started by the agent")
    engine.add_argument("--job", required=True)
    engine.add_argument("--wire", required=True, metavar="SOCKET", help="where the agent waits for it")
    store = modes.add_parser("store", help="serves the stores of torch; started by the engine")
    store.add_argument("--job", required=True, help="for ps")
    store.add_argument("--engine", type=int, metavar="PID", required=True)
    modes.add_parser("torchrun", help="torch's own elastic agent; started by the engine")
    reader = modes.add_parser("gpus", help="read this node's GPUs; started by the agent")
    reader.add_argument("--job", required=True, help="for ps")
    probe = modes.add_parser("probe", help="the preflight's use of torch; started by the bridge")
    probe.add_argument("what", choices=["facts", "collective"])
    probe.add_argument("args", nargs="?", default="{}")
    shell = modes.add_parser("shell", help="an operator's shell where a rank runs")
    shell.add_argument("--job", required=True)
    shell.add_argument("--rank", type=int, required=True)
    shell.add_argument("--pid", type=int, required=True)
    shell.add_argument("--inside", action="store_true", help="this is where the ranks run")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one mode of the node's side and return its exit code."""
    words = sys.argv[1:] if argv is None else argv
    # Each operator command starts this mode on every node. It needs no options and no start files, which take time.
    if words == ["connect"]:
        return _connect()
    if sys.flags.no_site:
        _enter_site()
    args = _parser().parse_args(words)
    if args.mode == "serve":
        if args.detach:
            _detach()
        if args.step:
            _detach_from_srun(args.job)
        from remote_agent.agent import agent

        return agent.main(args.job, args.handler)
    if args.mode == "gpus":
        from remote_agent.vitals.gpus import reader as gpu_reader

        return gpu_reader.main()
    if args.mode == "shell":
        from remote_agent.bridge import shell

        return shell.main(args.job, args.rank, args.pid, args.inside)
    if args.mode in ("probe", "store", "torchrun"):
        return _use_torch(args)
    from remote_agent.engine import engine as engine_part

    return engine_part.main(args.job, args.wire)


def _connect() -> int:
    from remote_agent.bridge import bytecode

    if bytecode.is_pushed(sys.argv[0]):
        bytecode.become_compiled(sys.argv[0])
    from remote_agent.bridge import connect

    return connect.main()


def _use_torch(args: argparse.Namespace) -> int:
    """Run one of the modes that import torch."""
    if args.mode == "probe":
        from remote_agent.engine import preflight

        return preflight.main(args.what, args.args)
    if args.mode == "store":
        from remote_agent.engine import store_process

        return store_process.main(args.engine)
    from remote_agent.engine.launchers import torch_agent_process

    return torch_agent_process.main()


def _enter_site() -> None:
    """Run the installation's start files with stdout on stderr, because their output must not mix with our frames."""
    import site

    wire = os.dup(1)
    os.dup2(2, 1)
    try:
        site.main()
        sys.stdout.flush()
    finally:
        os.dup2(wire, 1)
        os.close(wire)


def _detach() -> None:
    """Fork a second time, so that init adopts and reaps the agent; the first child prints the pid and exits.

    The caller has created a session and has set stdin and stderr; stdout is redirected to stderr.
    """
    pid = os.fork()
    if pid:
        os.write(1, b"%d\n" % pid)
        os._exit(0)
    os.dup2(2, 1)
    _ignore_hangup()


def _detach_from_srun(job: str) -> None:
    """Detach from srun, which started this process and exits."""
    from remote_agent.base.paths import Home

    files = Home.from_environment().job(job)
    log = os.open(files.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.chdir(files.home.root)
    _ignore_hangup()


def _ignore_hangup() -> None:
    # A lost terminal does not end an agent. A handler is used because the workers would inherit SIG_IGN.
    signal.signal(signal.SIGHUP, lambda _number, _frame: None)


if __name__ == "__main__":
    sys.exit(main())
