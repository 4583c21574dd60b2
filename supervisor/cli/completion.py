"""`supervisor completion SHELL`: print the script with which a shell completes a command line. `man`: the manual page.

In: argv; the parsers of all verbs, the known inventories and jobs. Out: the manual page in roff, or a script for bash,
zsh or fish on stdout. The script calls `supervisor completion --line WORD…` with the words up to the cursor and gets
the candidates for the last one, so the same rules hold in every shell. No host is asked. To complete another kind of
value, add a line to VALUES.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from remote_agent.wire.events import ENDED_STATES
from supervisor import __version__, known
from supervisor.actions import ACTIONS, BY_VERB, Action
from supervisor.cli.entry import NOTES, SUMMARY, SYNOPSIS, run_verb
from supervisor.cli.options import DESCRIBE, Described, make_parser, open_known, parse
from supervisor.cli.output import write_lines
from supervisor.errors import SupervisorError
from supervisor.inventory.sources import SOURCES

LINE = "--line"
# At most this many ranks are offered one by one.
MOST_RANKS = 512
_DESCRIPTION = 60


def run(verb: str, argv: Sequence[str]) -> int:
    """Print the script, or the candidates for a command line; returns the exit code."""
    if argv[:1] == [LINE]:
        kind, candidates = complete(argv[1:])
        write_lines([kind, *("\t".join(filter(None, one)) for one in candidates)])
        return 0
    parser = make_parser(verb, "SHELL", target=False)
    parser.epilog = (
        "bash:  supervisor completion bash > ~/.local/share/bash-completion/completions/supervisor\n"
        "zsh:   supervisor completion zsh > DIR/_supervisor    with DIR in $fpath, before compinit\n"
        "fish:  supervisor completion fish > ~/.config/fish/completions/supervisor.fish"
    )
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))
    options = parse(parser, argv)
    write_lines(SHELLS[options.shell].strip().splitlines())
    return 0


def describe(verb: str) -> argparse.ArgumentParser:
    """Return the parser of a verb with all that the verb accepts."""
    try:
        run_verb(verb, [DESCRIBE])
    except Described as described:
        return described.parser
    raise AssertionError(f"{verb} does not parse its options by supervisor.cli.options")


def named_options(parser: argparse.ArgumentParser) -> list[tuple[argparse.Action, list[str]]]:
    """Return the options with their spellings; torchrun's second ones with underscores still work, and are left out."""
    options = ((one, [name for name in one.option_strings if "_" not in name]) for one in parser._actions)
    return [(one, names) for one, names in options if names and one.help != argparse.SUPPRESS]


# --- candidates


class Candidate(NamedTuple):
    """A word that fits, and what it means."""

    word: str
    text: str = ""


@dataclasses.dataclass
class CommandLine:
    """What the words before the cursor say."""

    action: Action
    hosts: str = ""
    """The inventory, as `Inventory.words`; "" for this machine only."""
    job: str = ""
    last: argparse.Action | None = None
    """The option whose value is being typed."""
    words: list[str] = dataclasses.field(default_factory=list)
    """The positional arguments so far."""


def complete(words: Sequence[str]) -> tuple[str, list[Candidate]]:
    """Return what fits for the last of the words after the program's name, and which files: words, toml or files."""
    # bash makes three words of --node=n1.
    before = [word for word in words[:-1] if word != "="]
    current = words[-1] if words and words[-1] != "=" else ""
    if not before:
        verbs = (Candidate(action.verb, action.help) for action in ACTIONS if action.verb)
        return "words", _fitting(verbs, current)
    if before[0] not in BY_VERB:
        return "words", []
    parser = describe(before[0])
    options = {name: (one, one.help or "") for one, names in named_options(parser) for name in names}
    line = _read(BY_VERB[before[0]], before[1:], {name: one for name, (one, _) in options.items()})
    name, equals, value = current.partition("=")
    if line.last is None and equals and name in options:
        # zsh and fish leave --node=n1 in one word.
        line.last = options[name][0]
        kind, candidates = _values(line, line.last, value)
        return kind, [Candidate(f"{name}={one.word}", one.text) for one in candidates]
    if line.last is not None:
        return _values(line, line.last, current)
    positional = [one for one in parser._actions if not one.option_strings]
    if any(one.nargs == argparse.REMAINDER for one in positional) and any(_is_job(word) for word in line.words):
        # The rest goes to the script.
        return "files", []
    if current.startswith("-"):
        return "words", _fitting((Candidate(name, text) for name, (_, text) in options.items()), current)
    answers = [_values(line, one, current) for one in positional]
    kinds = {kind for kind, _ in answers}
    kind = next((one for one in ("files", "toml") if one in kinds), "words")
    return kind, [candidate for _, candidates in answers for candidate in candidates]


def _read(action: Action, words: Sequence[str], options: Mapping[str, argparse.Action]) -> CommandLine:
    line = CommandLine(action)
    sources = {source.option for source in SOURCES}
    for word in words:
        name, equals, value = word.partition("=")
        if line.last is not None:
            name, value = line.last.option_strings[0], word
            line.last = None
        elif name in options and not equals and options[name].nargs != 0:
            line.last = options[name]
            continue
        elif not name.startswith("-"):
            line.words.append(word)
        if name in sources:
            line.hosts = f"{name} {value}".rstrip()
    line.hosts = next((os.path.abspath(word) for word in line.words if word.endswith(".toml")), line.hosts)
    line.job = next(filter(_is_job, line.words), "")
    return line


def _is_job(word: str) -> bool:
    return not word.endswith(".toml")


def _values(line: CommandLine, argument: argparse.Action, current: str) -> tuple[str, list[Candidate]]:
    """Return what fits for an argument, by the names in its metavar."""
    if argument.choices is not None:
        return "words", _fitting((Candidate(str(one)) for one in argument.choices), current)
    metavar = argument.metavar if isinstance(argument.metavar, str) else ""
    names = re.findall(r"[A-Z]+", metavar)
    # Several values in one word: only the last one is being typed.
    head = current[: current.rfind(",") + 1] if metavar.endswith("…]") else ""
    candidates = [candidate for name in names if name in VALUES for candidate in VALUES[name](line)]
    kind = "files" if _FILES.intersection(names) else "toml" if _wants_hosts(line, names) else "words"
    return kind, _fitting((Candidate(head + one.word, one.text) for one in dict.fromkeys(candidates)), current)


def _wants_hosts(line: CommandLine, names: Sequence[str]) -> bool:
    return "HOSTS" in names and not line.hosts


def _fitting(candidates: Iterable[Candidate], current: str) -> list[Candidate]:
    def clean(text: str) -> str:
        text = " ".join(text.replace("%%", "%").split())
        return text if len(text) <= _DESCRIPTION else f"{text[: _DESCRIPTION - 1]}…"

    return [Candidate(one.word, clean(one.text)) for one in candidates if one.word.startswith(current)]


def _hosts(line: CommandLine) -> list[Candidate]:
    if line.hosts:
        return []
    paths = [one.words for one in known.recall() if one.words.startswith("/")]
    here = f"{os.getcwd().rstrip('/')}/"
    return [Candidate(path.removeprefix(here), "used before") for path in paths]


def _known_jobs(line: CommandLine) -> list[known.KnownJob]:
    return [job for one in known.recall() if one.words == line.hosts for job in one.jobs]


def _jobs(line: CommandLine) -> list[Candidate]:
    if line.job:
        return []
    jobs = [
        job
        for job in _known_jobs(line)
        if not (line.action.destructive and line.action.op) or job.state not in ENDED_STATES
    ]
    return [Candidate(job.job, job.state or "job") for job in jobs]


def _nodes(line: CommandLine) -> list[Candidate]:
    try:
        return [Candidate(host.name, host.ssh) for host in open_known(line.hosts).hosts]
    except (SupervisorError, OSError):
        return []


def _ranks(line: CommandLine) -> list[Candidate]:
    jobs = [job for job in _known_jobs(line) if line.job in ("", job.job)]
    live = [job for job in jobs if job.state not in ENDED_STATES]
    world = (live or jobs)[0].world_size if jobs else 0
    return [Candidate(str(rank), "rank") for rank in range(min(world, MOST_RANKS))]


def _signals(_line: CommandLine) -> list[Candidate]:
    return [Candidate(one.name.removeprefix("SIG"), "signal") for one in signal.Signals]


# The names in metavars have these candidates.
VALUES: Mapping[str, Callable[[CommandLine], list[Candidate]]] = {
    "HOSTS": _hosts,
    "JOB": _jobs,
    "NODE": _nodes,
    "RANK": _ranks,
    "SIGNAL": _signals,
}
_FILES = {"FILE", "PATH", "RECORDING", "SCRIPT", "DIR"}


# --- scripts

_BASH = r"""
_supervisor() {
    local word="${COMP_WORDS[COMP_CWORD]}" kind="" line
    [[ $word == "=" ]] && word=""
    COMPREPLY=()
    while IFS= read -r line; do
        if [[ -z $kind ]]; then kind="$line"; else COMPREPLY+=("${line%%$'\t'*}"); fi
    done < <("${1/#\~/$HOME}" completion --line "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
    [[ $kind == words ]] && return
    compopt -o filenames 2>/dev/null
    local only=()
    [[ $kind == toml ]] && only=(-X '!*.toml')
    while IFS= read -r line; do
        COMPREPLY+=("$line")
    done < <(compgen -f "${only[@]}" -- "$word"; [[ $kind == toml ]] && compgen -d -- "$word")
}
complete -F _supervisor supervisor
"""

_ZSH = r"""
#compdef supervisor
_supervisor() {
    local -a lines values
    local line word
    lines=("${(@f)$(${(Q)words[1]} completion --line "${(@Q)words[2,CURRENT]}" 2>/dev/null)}")
    for line in "${(@)lines[2,-1]}"; do
        word="${line%%$'\t'*}"
        values+=("${word//:/\\:}${${line#$word}/$'\t'/:}")
    done
    local found=1
    (( $#values )) && _describe -t values value values && found=0
    case $lines[1] in
    files) _files && found=0 ;;
    toml) _files -g '*.toml(-.)' && found=0 ;;
    esac
    return found
}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    _supervisor "$@"
else
    compdef _supervisor supervisor
fi
"""

_FISH = r"""
function __supervisor_complete
    set -l words (commandline -opc)
    set -l current (commandline -ct)
    set -l lines ($words[1] completion --line $words[2..-1] "$current" 2>/dev/null)
    printf '%s\n' $lines[2..-1]
    switch "$lines[1]"
        case files
            __fish_complete_path "$current"
        case toml
            __fish_complete_suffix .toml
    end
end
complete -c supervisor -f -a '(__supervisor_complete)'
"""

SHELLS: Mapping[str, str] = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


# --- the manual page


def run_man(verb: str, argv: Sequence[str]) -> int:
    """Print the manual page, `supervisor.1` in roff; returns the exit code."""
    parser = make_parser(verb, "> supervisor.1", target=False)
    parser.epilog = "to read it:     supervisor man | man -l -\nto install it:  supervisor man > DIR/man1/supervisor.1"
    parse(parser, argv)
    write_lines(list(page()))
    return 0


def page() -> Iterator[str]:
    """Yield the lines of the page."""
    yield f'.TH SUPERVISOR 1 "" "supervisor {__version__}" "User Commands"'
    yield from (".SH NAME", f"supervisor \\- {_text(SUMMARY.rstrip('.'))}")
    yield from (".SH SYNOPSIS", f".B {_text(SYNOPSIS)}")
    yield ".SH DESCRIPTION"
    for line in NOTES:
        yield from (_text(line), ".br")
    yield ".SH COMMANDS"
    for action in ACTIONS:
        if action.verb:
            yield from _command(describe(action.verb))


def _command(parser: argparse.ArgumentParser) -> Iterator[str]:
    usage = " ".join((parser.usage or "").split())
    yield from (f".SS {_text(parser.prog)}", f".B {_text(usage)}", ".PP", f"{_text(parser.description or '')}.")
    formatter = parser._get_formatter()
    options = dict(named_options(parser))
    for group in parser._action_groups:
        mine = [one for one in group._group_actions if one in options and one.dest != "help"]
        if mine and group is not parser._optionals:
            yield from (".PP", f"{_text(group.title or '')}:")
        for one in mine:
            names = ", ".join(options[one])
            value = "" if one.nargs == 0 else f" {one.metavar or '|'.join(map(str, one.choices or ()))}"
            yield from (".TP", f".B {_text(names + value)}", _text(formatter._expand_help(one)))
    if parser.epilog:
        yield from (".PP", ".nf", *map(_text, parser.epilog.splitlines()), ".fi")


def _text(text: str) -> str:
    """Return a text of which roff takes nothing as a request."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{text}" if text[:1] in (".", "'") else text
