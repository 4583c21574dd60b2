"""Find the verb, run it, and turn an error into one clear message and an exit code.

In: argv. Out: an exit code of the contract.
"""

from __future__ import annotations

import difflib
import importlib
import logging
import os
import re
import sys
import traceback
from collections.abc import Sequence
from types import ModuleType

from supervisor import __version__
from supervisor.actions import ACTIONS, BY_VERB
from supervisor.errors import SupervisorError, UsageError
from supervisor.standard_streams import flush_out, safe_streams, write_err, write_out

INTERRUPTED = 130
# A shell reports this for a program that wrote into a closed pipe.
CLOSED_PIPE = 141


SYNOPSIS = "supervisor COMMAND [HOSTS] [JOB] [options]"
SUMMARY = "torchrun over SSH: launch, watch, restart and scale PyTorch jobs on several hosts."
NOTES = (
    "HOSTS is an inventory, a file whose name ends in .toml; without it, a command applies to this machine only.",
    "Without JOB, a command applies to the only live job; if there are several, read-only commands use the newest.",
    "`supervisor COMMAND --help` shows the options of a command.",
)


def overview() -> str:
    """Return the text of `supervisor --help`."""
    width = max(len(action.verb) for action in ACTIONS)
    verbs = "\n".join(f"  {action.verb:<{width}}  {action.help}" for action in ACTIONS if action.verb)
    return (
        f"usage: {SYNOPSIS}\n\n{SUMMARY}\n\ncommands:\n{verbs}\n\n" + "\n".join(NOTES) + "\n\n"
        "options:\n"
        "  --help     show this help\n"
        "  --version  show the version\n"
        "  --debug    (after any command) log to stderr and show tracebacks\n"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    with safe_streams():
        return _run(list(sys.argv[1:] if argv is None else argv))


def _run(words: list[str]) -> int:
    try:
        status = _dispatch(words)
        flush_out()
        return status
    except SupervisorError as error:
        _show_traceback()
        say(str(error))
        return error.exit_status
    except KeyboardInterrupt:
        _show_traceback()
        say("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        # The reader has closed the pipe; nothing may be written at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return CLOSED_PIPE
    except Exception as error:  # noqa: BLE001  the last resort: users see a traceback only with --debug
        _show_traceback()
        say(f"internal error: {type(error).__name__}: {error}\n  hint: run it again with --debug for the traceback")
        return 1


def say(text: str) -> None:
    """Write one message to stderr; a closed stderr is not an error."""
    # Only our own messages begin a line, also where a node has put several lines into one.
    write_err("supervisor: {}\n".format(re.sub(r"\n(?!  )", "\n  ", text)))


def _show_traceback() -> None:
    if logging.getLogger().isEnabledFor(logging.DEBUG):
        write_err(traceback.format_exc())


def _dispatch(words: list[str]) -> int:
    # --debug lowers the level.
    logging.basicConfig(level=logging.CRITICAL, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    if not words and _module("options").is_terminal():
        return int(_module("home").run())
    if not words or words[0] in ("-h", "--help", "help"):
        write_out(overview())
        return 0 if words else UsageError.exit_status
    if words[0] in ("-V", "--version"):
        write_out(f"supervisor {__version__}\n")
        return 0
    verb = words[0]
    if verb not in BY_VERB:
        near = difflib.get_close_matches(verb, BY_VERB, 1)
        hint = f"did you mean `supervisor {near[0]}`?" if near else "`supervisor --help` lists the commands"
        raise UsageError(f"no such command: {verb}", hint)
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise UsageError("the current directory has been removed", "cd to another one") from error
    return run_verb(verb, words[1:])


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"supervisor.cli.{name}")


def run_verb(verb: str, argv: Sequence[str]) -> int:
    """Run one verb; returns its exit code. Its module is imported only now, so that `--help` stays quick."""
    module, _, function = BY_VERB[verb].runner.partition(".")
    return int(getattr(_module(module), function or "run")(verb, argv))
