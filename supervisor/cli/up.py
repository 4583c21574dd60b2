"""`supervisor up` and `supervisor attach`: launch a job and watch it; watch a running or finished job.

In: argv, PET_* variables, the inventory. Out: a job on the nodes; the TUI, a merged log, or the job's id.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import itertools
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from supervisor.cli import torchrun
from supervisor.cli.entry import say
from supervisor.cli.options import (
    LOOKS,
    add_screen,
    add_sources,
    is_terminal,
    load_inventory,
    make_parser,
    parse,
    read_duration,
    source_words,
    split_target,
)
from supervisor.cli.torchrun import read_rendezvous, read_timeouts
from supervisor.errors import UsageError
from supervisor.standard_streams import binary_out, out_is_terminal

if TYPE_CHECKING:
    from supervisor.cli.options import Parser
    from supervisor.cli.torchrun import Console
    from supervisor.inventory import Inventory
    from supervisor.launch.specs import UpOptions
    from supervisor.link.view import LaunchPlan
    from supervisor.session import Session

USAGE = "[HOSTS] [options] SCRIPT [ARGS…]"
EPILOG = """\
HOSTS ends in .toml; without it the job runs on this machine only. Arguments after SCRIPT go to the script unchanged.

exit code: 0 succeeded (or detached), 1 failed, 2 usage error, 3 too few nodes, 4 stopped by an operator, 130 Ctrl-C
"""


def _add_job(parser: Parser) -> None:
    """Add the options of the job that are not torchrun's."""
    parser.add_argument(
        "--detach", action="store_true", help="return once all ranks are running, and print the job's id"
    )
    parser.add_argument("--job", metavar="ID", help="the job's id (default: the name of SCRIPT and four letters)")
    parser.add_argument("--env", metavar="K=V", action="append", default=[], help="a variable for all workers")
    parser.add_argument(
        "--environment",
        metavar="FILE",
        help="build what the ranks need on each node: uv.lock, pylock.toml or requirements.txt of the work tree",
    )
    parser.add_argument("--container", metavar="IMAGE", help="run the ranks in a container of Podman or Docker")
    parser.add_argument(
        "--snapshots",
        metavar="PATTERN",
        action="append",
        default=[],
        help="what the script saves to and resumes from: copies are kept on other nodes",
    )
    parser.add_argument(
        "--no-sync",
        "--no_sync",
        action="store_true",
        help="do not copy the work tree, because it is already on the nodes",
    )
    parser.add_argument(
        "--force", action="store_true", help="launch although another job runs from the same work tree, and share it"
    )
    parser.add_argument(
        "--standby",
        choices=["auto", "off"],
        help="auto (default): each host keeps a process that waits with modules loaded, so restarts skip the imports",
    )
    parser.add_argument(
        "--no-slow", action="store_true", help="do not sample the ranks: then nothing says which one is slow, and why"
    )
    parser.add_argument(
        "--keep-warm",
        type=read_duration,
        metavar="T",
        help="keep that process for T (10m) after the job's end: the next `up` from this work tree skips the imports",
    )
    # The demo uses this option: its hosts are part of its process.
    parser.add_argument("--ends-with-screen", action="store_true", help=argparse.SUPPRESS)


def parse_up(argv: Sequence[str]) -> argparse.Namespace:
    """Return the options, with `hosts`, `script` and `args`; raises UsageError."""
    parser = make_parser("up", USAGE, target=False)
    parser.epilog = EPILOG
    _add_job(parser)
    add_screen(parser)
    add_sources(parser)
    torchrun.add_torchrun(parser)
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="[HOSTS] SCRIPT [ARGS…]")
    options = parser.parse_args(list(argv))
    options.hosts = None
    words, ended = _strip_dashes(options.words)
    if words and words[0].endswith(".toml") and len(words) > 1:
        options.hosts = words[0]
        words = words[1:]
        if not ended:
            # Options between HOSTS and SCRIPT are still ours.
            options = parser.parse_args(words, options)
            words, ended = _strip_dashes(options.words)
    if not words:
        raise UsageError("SCRIPT is missing", f"supervisor up {USAGE}")
    if words[0].endswith(".toml"):
        missing = options.hosts is None
        raise UsageError(
            f"SCRIPT is missing after {words[0]}" if missing else f"two inventories: {options.hosts} and {words[0]}",
            f"supervisor up {USAGE}",
        )
    options.script, options.args = words[0], tuple(words[1:])
    if options.hosts is None and not options.sources and not ended:
        _refuse_inventory_after_script(options)
    options.misplaced = [] if ended else _options_after_script(parser, options)
    torchrun.apply_environment(options)
    return options


def _refuse_inventory_after_script(options: argparse.Namespace) -> None:
    """Raise UsageError for `up train.py hosts.toml`, which would run on this machine only; `--` allows it."""
    from supervisor.inventory import is_inventory

    for word in options.args:
        if word.endswith(".toml") and is_inventory(Path(word)):
            raise UsageError(
                f"{word} comes after {options.script}, so it is an argument of the script and names no hosts",
                f"supervisor up {word} {options.script} …; if it is meant for the script: supervisor up -- "
                f"{options.script} …",
            )


def _options_after_script(parser: Parser, options: argparse.Namespace) -> list[str]:
    """Return a notice if arguments of the script are named like options of ours, unless they follow `--`."""
    actions = parser._option_string_actions.items()
    ours = {name for name, action in actions if name[:2] == "--" and action.help != argparse.SUPPRESS}
    # Scripts have --help and --debug, too.
    ours -= {"--help", "--debug"}
    words = (word.partition("=")[0] for word in itertools.takewhile(lambda word: word != "--", options.args))
    names = " ".join(dict.fromkeys(word for word in words if word in ours))
    script = options.script
    return [f"{names} after {script} goes to the script; for supervisor, write it before {script}"] if names else []


def _strip_dashes(words: list[str]) -> tuple[list[str], bool]:
    """Remove a leading `--`; also returns whether there was one: everything after it is positional."""
    return (words[1:], True) if words[:1] == ["--"] else (words, False)


def job_options(options: argparse.Namespace) -> UpOptions:
    """Return the options of the job; raises UsageError."""
    from supervisor.inventory.model import Place, snapshot_patterns
    from supervisor.launch.specs import UpOptions, check_env

    kinds = [name for name in ("module", "no_python", "run_path") if getattr(options, name)]
    if len(kinds) > 1:
        raise UsageError(f"{' and '.join('--' + name.replace('_', '-') for name in kinds)} cannot be combined")
    timeouts = read_timeouts(options)
    rdzv_id = options.rdzv_id if options.rdzv_id not in (None, "none") else None
    if options.job and rdzv_id and options.job != rdzv_id:
        raise UsageError(f"--job {options.job} and --rdzv-id {rdzv_id} both name the job", "use one of them")
    return UpOptions(
        script=options.script,
        args=options.args,
        kind={"module": "module", "no_python": "binary", "run_path": "run_path"}[kinds[0]] if kinds else "script",
        job=options.job if options.job is not None else rdzv_id,
        nnodes=options.nnodes,
        nproc_per_node=options.nproc_per_node,
        max_restarts=torchrun.number(options, "max_restarts"),
        env=check_env(options.env),
        sync=not options.no_sync,
        force=options.force,
        standalone=bool(options.standalone),
        local_addr=options.local_addr,
        rendezvous=read_rendezvous(options),
        settings={
            **{name: getattr(options, name) for name in ("numa_binding", "signals_to_handle", "standby", "keep_warm")},
            "role": options.role or None,
            "stop_grace": torchrun.duration(options, "shutdown_timeout"),
            "log_dir": options.log_dir if options.log_dir != os.devnull else None,
            "virtual_local_rank": options.virtual_local_rank or None,
            "join_timeout": timeouts.get("join_timeout"),
            "settle_timeout": timeouts.get("last_call_timeout"),
            "slow": False if options.no_slow else None,
            "snapshots": snapshot_patterns(Place("up", "--snapshots"), "", options.snapshots) or None,
        },
    )


def run(verb: str, argv: Sequence[str]) -> int:
    """Launch; returns the exit code."""
    from supervisor.inventory import run_in
    from supervisor.launch.specs import make_plan

    options = parse_up(argv)
    torchrun.check(options)
    console = torchrun.console(options)
    notices = torchrun.notices(options)
    inventory = run_in(load_inventory(options.hosts, options), options.environment, options.container)
    plan = make_plan(inventory, job_options(options), Path.cwd())
    for notice in (*options.misplaced, *notices):
        say(notice)
    if options.detach or options.headless or not is_terminal():
        return _headless(inventory, plan, options, console)
    return _tui(inventory, plan, options)


def _headless(inventory: Inventory, plan: LaunchPlan, options: argparse.Namespace, console: Console) -> int:
    from supervisor.cli.headless import Headless
    from supervisor.session import Session

    async def launch() -> int:
        session = Session(inventory, attach="control", plan=plan, read_only=options.read_only)
        # SIGTERM at the end of an allocation must stop the job; outside one, only Ctrl-C does.
        in_allocation = any(source.variable for source, _ in options.sources or ())
        stops_on = (signal.SIGINT, signal.SIGTERM) if in_allocation else (signal.SIGINT,)
        json_events = options.event_log_handler == "console"
        watch = Headless(session, binary_out(), console, json_events=json_events, stops_on=stops_on)
        return await watch.launched(detach=options.detach, hosts=source_words(options.hosts, options))

    return asyncio.run(launch())


def _tui(inventory: Inventory, plan: LaunchPlan, options: argparse.Namespace) -> int:
    from supervisor.cli import home
    from supervisor.session import Session

    def session() -> Session:
        return Session(inventory, attach="control", plan=plan, read_only=options.read_only)

    hosts = source_words(options.hosts, options)
    return home.show(
        session,
        hosts,
        read_only=options.read_only,
        theme=options.theme,
        ascii_only=options.ascii,
        job_stays=not options.ends_with_screen,
    )


# --- attach


def run_attach(verb: str, argv: Sequence[str]) -> int:
    """Attach; returns the exit code."""
    parser = make_parser(verb, LOOKS)
    add_screen(parser, ": new lines, or the last ones of a finished job")
    options = parse(parser, argv)
    hosts, job = split_target(options.target)
    inventory = load_inventory(hosts, options)
    read_only = options.read_only or inventory.made_s is not None
    mode = "watch" if read_only else "control"
    from supervisor.session import Session

    if options.headless or not is_terminal():
        from supervisor.cli.headless import Headless

        if not options.headless and out_is_terminal() and not read_only:
            say("this terminal cannot show the TUI (TERM=dumb, or stdin is not a terminal); Ctrl-C stops the job")

        async def watch() -> int:
            session = Session(inventory, job, attach=mode, read_only=read_only)
            return await Headless(session, binary_out()).attached(hosts=source_words(hosts, options))

        return asyncio.run(watch())
    from supervisor.cli import home
    from supervisor.tui import times

    def make() -> Session:
        return Session(inventory, job, attach=mode, read_only=read_only)

    # In a bundle of a job that had not ended, nothing has happened since it was made.
    clock = time.time if inventory.made_s is None else functools.partial(float, inventory.made_s)
    with times.read_from(clock):
        words = source_words(hosts, options)
        return home.show(make, words, read_only=read_only, theme=options.theme, ascii_only=options.ascii)
