"""`supervisor completion SHELL`: print the script that completes verbs, options and their values.

In: argv; the parsers of all verbs. Out: a script for bash, zsh or fish on stdout.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence

from supervisor.actions import ACTIONS, Action
from supervisor.cli.entry import run_verb
from supervisor.cli.options import DESCRIBE, Described, make_parser, parse
from supervisor.cli.output import write_lines

Options = list[argparse.Action]


def run(verb: str, argv: Sequence[str]) -> int:
    """Print the script; returns the exit status."""
    parser = make_parser(verb, "SHELL", target=False)
    parser.epilog = (
        "bash:  supervisor completion bash > ~/.local/share/bash-completion/completions/supervisor\n"
        "zsh:   supervisor completion zsh > DIR/_supervisor    with DIR in $fpath, before compinit\n"
        "fish:  supervisor completion fish > ~/.config/fish/completions/supervisor.fish"
    )
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))
    options = parse(parser, argv)
    verbs = [(action, _options(action.verb)) for action in ACTIONS if action.verb]
    write_lines(list(SHELLS[options.shell](verbs)))
    return 0


def _options(verb: str) -> Options:
    """Return the options of a verb, as its own parser defines them."""
    try:
        run_verb(verb, [DESCRIBE])
    except Described as described:
        actions = described.parser._actions
        return [one for one in actions if one.option_strings and one.help != argparse.SUPPRESS]
    raise AssertionError(f"{verb} does not parse its options by supervisor.cli.options")


def _names(option: argparse.Action) -> list[str]:
    """Return the spellings of an option; torchrun's second ones with underscores still work, and are not offered."""
    return [name for name in option.option_strings if "_" not in name]


def _bash(verbs: Sequence[tuple[Action, Options]]) -> Iterator[str]:
    yield "_supervisor() {"
    yield '    local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" words=""'
    yield '    case "$COMP_CWORD,${COMP_WORDS[1]}" in'
    yield f'    1,*) words="{" ".join(action.verb for action, _ in verbs)}" ;;'
    for action, options in verbs:
        values = [one for one in options if one.choices]
        yield f"    *,{action.verb})"
        yield '        case "$before" in'
        for one in values:
            yield f'        {"|".join(_names(one))}) words="{" ".join(map(str, one.choices or ()))}" ;;'
        yield f'        *) [[ $word == -* ]] && words="{" ".join(name for one in options for name in _names(one))}" ;;'
        yield "        esac ;;"
    yield "    esac"
    yield '    COMPREPLY=($(compgen -W "$words" -- "$word"))'
    yield "}"
    # Where no word fits, bash completes file names: an inventory, a script.
    yield "complete -o default -F _supervisor supervisor"


def _zsh(verbs: Sequence[tuple[Action, Options]]) -> Iterator[str]:
    yield "#compdef supervisor"
    yield "_supervisor() {"
    yield "    local -a verbs options"
    yield f"    verbs=({' '.join(shlex.quote(f'{action.verb}:{action.help}') for action, _ in verbs)})"
    yield "    (( CURRENT == 2 )) && { _describe verb verbs; return }"
    yield "    case $words[2] in"
    for action, options in verbs:
        named = (f"{name}:{_help(one)}" for one in options for name in _names(one))
        yield f"    {action.verb}) options=({' '.join(map(shlex.quote, named))}) ;;"
    yield "    esac"
    yield "    [[ $PREFIX == -* ]] && _describe option options || _files"
    yield "}"
    yield "if [[ $zsh_eval_context[-1] == loadautofunc ]]; then"
    yield '    _supervisor "$@"'
    yield "else"
    yield "    compdef _supervisor supervisor"
    yield "fi"


def _fish(verbs: Sequence[tuple[Action, Options]]) -> Iterator[str]:
    for action, options in verbs:
        yield f"complete -c supervisor -n __fish_use_subcommand -f -a {action.verb} -d {_fish_text(action.help)}"
        for one in options:
            names = " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in _names(one))
            value = f" -x -a {_fish_text(' '.join(map(str, one.choices)))}" if one.choices else ""
            value = value or ("" if one.nargs == 0 else " -r")
            seen = f"'__fish_seen_subcommand_from {action.verb}'"
            yield f"complete -c supervisor -n {seen} {names}{value} -d {_fish_text(_help(one))}"


def _help(option: argparse.Action) -> str:
    return (option.help or "").replace("%%", "%")


def _fish_text(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


SHELLS: Mapping[str, Callable[[Sequence[tuple[Action, Options]]], Iterator[str]]] = {
    "bash": _bash,
    "zsh": _zsh,
    "fish": _fish,
}
