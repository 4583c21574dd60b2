"""The command line of `up` and of the other verbs: what is ours, what is the script's."""

from __future__ import annotations

import argparse
import io
import json
import logging
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from supervisor import known
from supervisor.actions import BY_VERB
from supervisor.cli import main, torchrun
from supervisor.cli.completion import complete, describe, named_options
from supervisor.cli.logs import parse_logs, selection_of
from supervisor.cli.options import is_terminal, read_duration, read_ranks, split_target
from supervisor.cli.output import write_json
from supervisor.cli.up import job_options, parse_up
from supervisor.errors import UsageError
from supervisor.inventory import load, local
from tests.fast.cases import DATA


@pytest.fixture(autouse=True)
def _no_pet(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("PET_"):
            monkeypatch.delenv(name)


@pytest.mark.parametrize("line", (DATA / "up_words.txt").read_text().splitlines()[1:])
def test_script_arguments_are_untouched(line: str) -> None:
    given, _, meant = line.partition(" -> ")
    options = parse_up(shlex.split(given))
    assert [str(options.hosts), options.script, *options.args] == shlex.split(meant)


def test_options_count_on_both_sides_of_hosts() -> None:
    options = parse_up(["--headless", "--env", "A=1", "h.toml", "--env", "B=2", "--detach", "t.py", "--env", "C=3"])
    assert options.headless
    assert options.detach
    assert options.env == ["A=1", "B=2"]


def given(verb: str, argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Read a command line as its verb does."""
    if verb == "logs":
        parse_logs(argv)
    elif verb == "up":
        options = parse_up(argv)
        torchrun.notices(options)
        torchrun.check(options)
        torchrun.console(options)
        job_options(options)
    else:
        assert main([verb, *argv]) == 2
        raise UsageError(capsys.readouterr().err)


MISTAKES = [line.split(" -> ") for line in (DATA / "usage_mistakes.txt").read_text().splitlines()[1:]]


@pytest.mark.parametrize(("line", "words"), MISTAKES)
def test_each_mistake_has_one_clear_message(line: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    verb, *argv = shlex.split(line)
    with pytest.raises(UsageError, match=words):
        given(verb, argv, capsys)


def test_every_option_of_torchrun_is_known() -> None:
    torch_run = pytest.importorskip("torch.distributed.run")
    theirs = {
        option
        for action in torch_run.get_args_parser()._actions
        for option in action.option_strings
        if option not in ("-h", "--help")
    }
    ours = {
        spelling
        for table in (torchrun.ACTING, torchrun.SILENT, torchrun.REFUSED)
        for flags, _, _ in table
        for spelling in torchrun._spellings(flags)
    }
    assert theirs == ours


def test_options_take_effect() -> None:
    argv = [
        *("--nnodes", "2:4", "--max-restarts", "5", "--rdzv-id", "abc", "--role", "trainer", "-m"),
        *("--shutdown-timeout", "2.5", "--env", "A=b=c", "pkg.train", "x"),
    ]
    options = job_options(parse_up(argv))
    assert (options.nnodes, options.max_restarts, options.job) == ("2:4", 5, "abc")
    assert (options.kind, options.env) == ("module", {"A": "b=c"})
    assert (options.settings["role"], options.settings["stop_grace"]) == ("trainer", 2.5)
    assert (options.script, options.args) == ("pkg.train", ("x",))


def test_pet_variables_are_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NPROC_PER_NODE", "4")
    monkeypatch.setenv("PET_MAX_RESTARTS", "7")
    monkeypatch.setenv("PET_NO_PYTHON", "1")
    monkeypatch.setenv("PET_NODE_RANK", "3")
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "7")
    monkeypatch.setenv("PET_NUMA_BINDING", "torchrun reads no such variable")
    parsed = parse_up(["--max-restarts", "1", "./run.sh"])
    options = job_options(parsed)
    assert (options.nproc_per_node, options.max_restarts, options.kind) == ("4", 1, "binary")
    assert [line.split()[0] for line in torchrun.notices(parsed)] == ["--node-rank"]
    assert (options.settings["numa_binding"], options.settings["stop_grace"]) == (None, 7.0)


@pytest.mark.parametrize(("value", "kind"), [("0", "script"), ("off", "script"), ("1", "module"), ("2", "module")])
def test_a_switch_is_what_its_variable_says(monkeypatch: pytest.MonkeyPatch, value: str, kind: str) -> None:
    monkeypatch.setenv("PET_MODULE", value)
    assert job_options(parse_up(["t.py"])).kind == kind


def test_a_switch_whose_variable_says_nothing_clear_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_STANDALONE", "maybe")
    with pytest.raises(UsageError, match="PET_STANDALONE=maybe: must be 1 or 0"):
        parse_up(["t.py"])


def test_options_without_effect_say_why() -> None:
    silent = [flags[-1] for flags, _, _ in torchrun.SILENT]
    argv: list[str] = []
    for flags, metavar, _ in torchrun.SILENT:
        argv += [flags[0]] if metavar is None else [flags[0], "x"]
    lines = torchrun.notices(parse_up([*argv, "t.py"]))
    assert [line.split()[0] for line in lines] == silent
    assert all(" has no effect here because " in line for line in lines)
    assert torchrun.notices(parse_up(["t.py"])) == []


@pytest.mark.parametrize("flags", [flags for flags, _, _ in torchrun.REFUSED])
def test_options_whose_effect_would_be_missed_are_refused(flags: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match="not supported: .*--(grep|log-dir)"):
        torchrun.notices(parse_up([flags[0], "x", "t.py"]))


def test_options_that_the_node_carries_out() -> None:
    argv = [*("--log-dir", "logs", "--numa-binding", "node", "--virtual-local-rank"), "--run-path", "t.py"]
    options = job_options(parse_up(argv))
    said = [options.settings[name] for name in ("log_dir", "numa_binding", "virtual_local_rank")]
    assert (said, options.kind) == (["logs", "node", True], "run_path")
    assert job_options(parse_up(["--log-dir", "/dev/null", "t.py"])).settings["log_dir"] is None


def test_the_console_shows_what_torchrun_would() -> None:
    def shown(*argv: str) -> list[tuple[int, str]]:
        """Ranks 0, 1 on one node, 2, 3 on the next."""
        found = torchrun.console(parse_up([*argv, "t.py"]))
        streams = [(rank, stream) for rank in range(4) for stream in ("stdout", "stderr")]
        return [(rank, stream) for rank, stream in streams if found.shows(rank, rank % 2, stream)]

    assert len(shown()) == 8
    assert shown("-r", "3") == []
    assert shown("-r", "3", "-t", "0:1") == [(0, "stdout"), (2, "stdout")]
    assert shown("-r", "3", "-t", "rank3:2") == [(3, "stderr")]
    assert shown("-r", "1:3,rank3:1") == [*((0, "stdout"), (0, "stderr"), (2, "stdout"), (2, "stderr"), (3, "stderr"))]
    assert shown("--local-ranks-filter", "1", "--redirects", "2") == [(1, "stdout"), (3, "stdout")]


def test_env_takes_a_value_from_here_and_does_not_show_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN_HERE", "secret")
    assert job_options(parse_up(["--env", "TOKEN_HERE", "t.py"])).env == {"TOKEN_HERE": "secret"}
    with pytest.raises(UsageError) as caught:
        job_options(parse_up(["--env", "A B=secret", "t.py"]))
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("read", "given", "meant"),
    [
        (split_target, [], (None, None)), (split_target, ["a.toml"], ("a.toml", None)),
        (split_target, ["job-1"], (None, "job-1")), (split_target, ["a.toml", "job-1"], ("a.toml", "job-1")),
        (split_target, ["job-1", "a.toml"], ("a.toml", "job-1")),
        (split_target, ["a.toml", "b.toml"], UsageError), (split_target, ["a", "b"], UsageError),
        (split_target, ["../x"], UsageError), (split_target, ["a", "b", "c.toml"], UsageError),
        (read_ranks, "0", [0]), (read_ranks, "0,2-4", [0, 2, 3, 4]), (read_ranks, "3,1,1", [1, 3]),
        *((read_ranks, text, argparse.ArgumentTypeError) for text in ("", "a", "4-2", "-1", "1,,2", "0-9999999999")),
        (read_duration, "90", 90), (read_duration, "90s", 90), (read_duration, "10m", 600), (read_duration, "2h", 7200),
        (read_duration, "1d", 86400),
    ],
)  # fmt: skip
def test_how_words_are_read(read: Callable[[Any], Any], given: Any, meant: Any) -> None:
    if isinstance(meant, type):
        with pytest.raises(meant):
            read(given)
    else:
        assert read(given) == meant


def test_logs_selection() -> None:
    options = parse_logs(["h.toml", "--rank", "0-1", "j", "--node", "n2", "--stream", "all", "--generation", "3"])
    selection = selection_of(options)
    assert selection.ranks == [0, 1]
    assert selection.nodes == ["n2"]
    assert selection.streams == ("stdout", "stderr", "nccl")
    assert selection.generation == 3
    assert options.target == ["h.toml", "j"]
    default: Any = selection_of(parse_logs([]))
    assert (default.generation, default.ranks, default.streams) == (None, None, ("stdout", "stderr"))


def test_the_scripts_own_debug_is_not_ours(capsys: pytest.CaptureFixture[str]) -> None:
    before = logging.getLogger().level
    try:
        assert main(["up", "no-such.py", "--debug"]) == 2
        assert "Traceback" not in capsys.readouterr().err
        assert main(["up", "--debug", "no-such.py"]) == 2
        assert "Traceback" in capsys.readouterr().err
    finally:
        logging.getLogger().setLevel(before)


def test_odd_surroundings_are_no_internal_errors(tmp_path: Path) -> None:
    def run(line: str, **env: str) -> subprocess.CompletedProcess[bytes]:
        command = ["/bin/sh", "-c", line.replace("supervisor", '"$0" -m supervisor'), sys.executable]
        return subprocess.run(
            command, cwd=tmp_path, env={**os.environ, **env}, capture_output=True, timeout=60, check=False
        )

    assert run("supervisor frob <&- >&- 2>&-").returncode == 2
    shown = run("supervisor up --help", PYTHONIOENCODING="latin-1")
    assert (shown.returncode, shown.stderr) == (0, b"")
    assert b"SCRIPT [ARGS\\u2026]" in shown.stdout
    gone = run("mkdir gone && cd gone && rmdir ../gone && supervisor jobs")
    assert gone.returncode == 2
    assert b"has been removed" in gone.stderr


def test_ctrl_c_while_modules_are_imported_leaves_no_traceback() -> None:
    code = (
        "import sys\nfrom supervisor.__main__ import main\n"
        "class Interrupted:\n  def find_spec(*_): raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupted())\nsys.exit(main())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (130, b"")


def test_a_dumb_terminal_gets_no_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdin", "stdout"):
        monkeypatch.setattr(f"sys.{name}", SimpleNamespace(isatty=lambda: True))
    for term, screen in (("xterm", True), ("dumb", False)):
        monkeypatch.setenv("TERM", term)
        assert is_terminal() is screen


def test_json_is_json_in_any_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    for encoding in ("utf-8", "latin-1"):
        out = io.BytesIO()
        monkeypatch.setattr("sys.stdout", io.TextIOWrapper(out, encoding, "backslashreplace"))
        write_json({"text": "é…"})
        assert json.loads(out.getvalue().decode(encoding)) == {"text": "é…"}


def test_an_option_after_the_script_is_the_script_s_and_a_notice_says_so() -> None:
    given = ["hosts.toml", "t.py", "--detach", "--job=x", "--job", "y", "--debug", "--lr", "1", "-m", "--detac", "--"]
    options = parse_up([*given, "--no-sync"])
    assert (options.detach, options.job, options.args) == (False, None, (*given[2:], "--no-sync"))
    assert options.misplaced == ["--detach --job after t.py goes to the script; for supervisor, write it before t.py"]
    for quiet in (["--", *given], [*given[:2], "--", *given[2:]], ["--detach", *given[:2], "--lr", "1"]):
        assert parse_up(quiet).misplaced == []


HOSTS_TOML = '[[hosts]]\nname = "n1"\n'


def test_an_inventory_after_the_script_is_a_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("hosts.toml").write_text(HOSTS_TOML)
    Path("config.toml").write_text("lr = 1\n")
    with pytest.raises(UsageError, match="hosts.toml comes after train.py") as refused:
        parse_up(["train.py", "hosts.toml"])
    assert "supervisor up hosts.toml train.py" in refused.value.hint
    assert parse_up(["--", "train.py", "hosts.toml"]).args == ("hosts.toml",)
    assert parse_up(["hosts.toml", "train.py", "hosts.toml"]).args == ("hosts.toml",)
    assert parse_up(["--hosts", "a,b", "train.py", "hosts.toml"]).args == ("hosts.toml",)
    assert parse_up(["train.py", "config.toml", "missing.toml"]).args == ("config.toml", "missing.toml")


@pytest.mark.parametrize(
    ("verb", "words"),
    [("status", []), ("check", []), ("logs", []), ("stop", []), ("jobs", []), ("up", ["--headless", "no-such.py"])],
)
def test_every_command_says_that_it_is_about_this_machine(
    verb: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("hosts.toml").write_text(HOSTS_TOML)

    def give_up(work: Coroutine[Any, Any, int]) -> None:
        work.close()
        raise UsageError("enough")

    monkeypatch.setattr("asyncio.run", give_up)
    assert main([verb, *words]) == 2
    first = capsys.readouterr().err.splitlines()[0]
    assert first == "supervisor: hosts: this machine only; hosts.toml here is not used unless you name it"


def test_check_refuses_a_workdir_that_up_would_refuse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inventory = tmp_path / "hosts.toml"
    inventory.write_text(f'[job]\nworkdir = "gone"\n{HOSTS_TOML}')
    assert main(["check", str(inventory)]) == 2
    assert f"[job].workdir: {tmp_path}/gone: there is no such directory" in capsys.readouterr().err


# What `supervisor VERB --help` says of its options, and what `up` says of torchrun's.


def shown(verb: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The text of --help."""
    with pytest.raises(SystemExit, match="0"):
        main([verb, "--help"])
    return capsys.readouterr().out


@pytest.mark.parametrize("verb", [verb for verb in BY_VERB if verb != "up"])
def test_the_usage_of_a_verb_names_all_of_its_options(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    usage, _, rest = shown(verb, capsys).partition("\n\n")
    own = rest.partition("\noptions:\n")[2].partition("\n\n")[0]
    options = set(re.findall(r"^  (-[-\w]+)", own, re.MULTILINE)) - {"-h", "--debug"}
    assert options <= set(re.findall(r"(?<!\S)\[?(--?[a-z][a-z-]*)", usage))
    assert max(map(len, usage.splitlines())) <= 100


def test_what_is_refused_of_torchrun_has_a_heading_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown("up", capsys)
    silent = text.index("without effect here")
    refused = text.index("that are refused")
    assert all(silent < text.index(flags[-1]) < refused for flags, _, _ in torchrun.SILENT)
    assert all(refused < text.index(flags[-1]) for flags, _, _ in torchrun.REFUSED)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--local-addr", "10.0.0.1", "t.py"], []),
        (["--local-addr", "10.0.0.1", "hosts.toml", "t.py"], ["--local-addr"]),
        (["--local-addr", "10.0.0.1", "--hosts", "a,b", "t.py"], ["--local-addr"]),
        (["--master-addr", "n1", "--master-port", "1", "t.py"], ["--master-addr", "--master-port"]),
        (["--rdzv-backend", "static", "--master-addr", "n1", "--master-port", "1", "t.py"], ["torch's"]),
    ],
)
def test_an_option_is_called_without_effect_only_where_it_has_none(argv: list[str], said: list[str]) -> None:
    assert [line.split()[0] for line in torchrun.notices(parse_up(argv))] == said


def test_the_manual_page_has_every_command_and_option_and_no_stray_request(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["man"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for verb in BY_VERB:
        start = lines.index(f".SS supervisor {verb}")
        own = "\n".join(lines[start + 1 :]).partition("\n.SS ")[0]
        options = [name for _, names in named_options(describe(verb)) for name in names if name not in ("-h", "--help")]
        assert all(name.replace("-", "\\-") in own for name in options), verb
    requests = {line.split(" ")[0] for line in lines if line.startswith((".", "'"))}
    assert requests == {".TH", ".SH", ".SS", ".PP", ".TP", ".B", ".br", ".nf", ".fi"}


# `supervisor completion`: what fits at each place of a command line, from parsers, files and what was seen before.


HOSTS = """
[[hosts]]
name = "gpu[1-2]"
[[hosts]]
name = "west"
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with an inventory that was used before, and its two jobs."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts.toml").write_text(HOSTS)
    known.note(local(), [{"job": "alone-1", "state": "running", "world_size": 1}])
    ended = {"job": "old-7", "state": "failed", "world_size": 2}
    known.note(load(tmp_path / "hosts.toml"), [{"job": "train-k3f9", "state": "running", "world_size": 4}, ended])
    return tmp_path


def words(line: str) -> list[str]:
    """What is offered for the last word."""
    return [one.word for one in complete(line.split(" ")[1:])[1]]


COMPLETIONS = [line.split("^ ->") for line in (DATA / "completions.txt").read_text().splitlines()[1:]]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("line", "offered"), COMPLETIONS)
def test_what_fits_is_offered(line: str, offered: str) -> None:
    assert words(f"supervisor {line}") == offered.split()


@pytest.mark.usefixtures("here")
def test_all_verbs_are_offered_and_no_option_of_our_own() -> None:
    assert words("supervisor ") == list(BY_VERB)
    assert "--describe-options" not in words("supervisor status --")
    assert "USR1" in words("supervisor signal hosts.toml train-k3f9 U")


@pytest.mark.parametrize("verb", BY_VERB)
def test_every_verb_completes_its_options(verb: str) -> None:
    assert "--debug" in words(f"supervisor {verb} --")


def test_the_shell_completes_files_where_they_belong(here: Path) -> None:
    assert complete(["status", ""])[0] == "toml"
    assert complete(["status", "hosts.toml", ""])[0] == "words"
    assert complete(["up", "hosts.toml", ""])[0] == "files"
    assert complete(["up", "hosts.toml", "train.py", "--"]) == ("files", []), "the rest goes to the script"
    assert complete(["report", "-o", ""])[0] == "files"


def test_what_is_gone_or_broken_is_not_offered(here: Path) -> None:
    for file in (here / "state" / "supervisor" / "known").glob("*.json"):
        file.with_name(f"x{file.name}").write_text('{"words": 3, "jobs": [{"job": "$(x)"}]}')
    known.note(load(here / "hosts.toml"), [{"job": "new-1"}], complete=True)
    assert words("supervisor status hosts.toml ") == ["new-1"]
    (here / "hosts.toml").unlink()
    assert words("supervisor status ") == ["alone-1"]
    assert words("supervisor cordon hosts.toml --node ") == []
