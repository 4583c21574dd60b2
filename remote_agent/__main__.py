"""What the zipapp and `python -m remote_agent` run: connect, serve, engine, torchrun, gpus or probe.

In: argv. Out: the exit status of the chosen part; each part is imported only when it is chosen.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys


def main(argv: list[str] | None = None) -> int:
    """Run one part of the node's side and return its exit status."""
    parser = argparse.ArgumentParser(prog="agent", description="The node's side of supervisor.")
    modes = parser.add_subparsers(dest="mode", required=True)
    modes.add_parser("connect", help="bridge between stdin/stdout and the agents of this node")
    serve = modes.add_parser("serve", help="the agent of one job")
    serve.add_argument("--job", required=True)
    serve.add_argument("--handler", type=int, metavar="FD", help="the wire to the torchrun that has the workers")
    serve.add_argument("--detach", action="store_true", help="go on in a grandchild; its pid is printed")
    serve.add_argument("--step", action="store_true", help="stay in this Slurm step, and write to the job's log")
    engine = modes.add_parser("engine", help="the part that imports torch; started by the agent")
    engine.add_argument("--job", required=True)
    modes.add_parser("torchrun", help="torch's own elastic agent; started by the engine")
    reader = modes.add_parser("gpus", help="what this node's GPUs do; started by the agent")
    reader.add_argument("--job", required=True, help="for ps")
    probe = modes.add_parser("probe", help="what a preflight asks of torch; started by the bridge")
    probe.add_argument("what", choices=["facts", "collective"])
    probe.add_argument("args", nargs="?", default="{}")
    args = parser.parse_args(argv)
    if sys.flags.no_site:
        _enter_site()
    if args.mode == "connect":
        from remote_agent import bytecode

        if bytecode.is_pushed(sys.argv[0]):
            bytecode.become_compiled(sys.argv[0])
        from remote_agent import bridge

        return bridge.main()
    if args.mode == "serve":
        if args.detach:
            _detach()
        if args.step:
            _settle(args.job)
        from remote_agent import agent

        return agent.main(args.job, args.handler)
    if args.mode == "probe":
        from remote_agent import engine_probe

        return engine_probe.main(args.what, args.args)
    if args.mode == "gpus":
        from remote_agent import gpus

        return gpus.main()
    if args.mode == "torchrun":
        from remote_agent import engine_torchrun

        return engine_torchrun.main()
    from remote_agent import engine as engine_part

    return engine_part.main(args.job)


def _enter_site() -> None:
    """Find the installed packages, with stdout on stderr: start files that print must not write among our frames."""
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
    """Fork a second time, so that init adopts and reaps the agent; the first child prints its pid and is gone.

    The caller has made a session of its own, and has set stdin and stderr; stdout becomes what stderr is.
    """
    pid = os.fork()
    if pid:
        os.write(1, b"%d\n" % pid)
        os._exit(0)
    os.dup2(2, 1)
    _outlive_terminals()


def _settle(job: str) -> None:
    """Let go of srun, which started this process and does not stay."""
    from remote_agent.paths import Home

    files = Home.from_environment().job(job)
    log = os.open(files.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.chdir(files.home.root)
    _outlive_terminals()


def _outlive_terminals() -> None:
    # A handler, not SIG_IGN: an ignored signal would still be ignored in the workers.
    signal.signal(signal.SIGHUP, _stay)


def _stay(_number: int, _frame: object) -> None:
    """Do nothing: a lost terminal never ends an agent."""


if __name__ == "__main__":
    sys.exit(main())
