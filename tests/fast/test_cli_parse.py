"""The command line of `up` and of the other verbs: what is ours, what is the script's."""

from __future__ import annotations

import argparse
import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from supervisor.cli import main, torchrun
from supervisor.cli.logs import parse_logs, selection_of
from supervisor.cli.options import is_terminal, read_duration, read_ranks, split_target
from supervisor.cli.output import write_json
from supervisor.cli.up import job_options, parse_up
from supervisor.errors import UsageError


@pytest.fixture(autouse=True)
def _no_pet(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("PET_"):
            monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("argv", "hosts", "script", "args"),
    [
        (["train.py"], None, "train.py", ()),
        (["train.py", "--lr", "1", "-m", "--headless"], None, "train.py", ("--lr", "1", "-m", "--headless")),
        (["hosts.toml", "train.py", "x"], "hosts.toml", "train.py", ("x",)),
        (["hosts.toml", "--headless", "train.py", "--job", "x"], "hosts.toml", "train.py", ("--job", "x")),
        (["--headless", "hosts.toml", "--job", "j", "train.py"], "hosts.toml", "train.py", ()),
        (["hosts.toml", "--", "train.py", "--help"], "hosts.toml", "train.py", ("--help",)),
        (["--", "hosts.toml", "train.py", "--help"], "hosts.toml", "train.py", ("--help",)),
        (["--", "--odd.py", "-x"], None, "--odd.py", ("-x",)),
        (["train.py", "--", "-x"], None, "train.py", ("--", "-x")),
        (["hosts.toml", "train.py", "config.toml"], "hosts.toml", "train.py", ("config.toml",)),
        (["train.py", "config.toml"], None, "train.py", ("config.toml",)),
        (["--nproc_per_node", "2", "train.py"], None, "train.py", ()),
    ],
)
def test_script_arguments_are_untouched(argv: list[str], hosts: str | None, script: str, args: tuple[str, ...]) -> None:
    options = parse_up(argv)
    assert (options.hosts, options.script, options.args) == (hosts, script, args)


def test_options_count_on_both_sides_of_hosts() -> None:
    options = parse_up(["--headless", "--env", "A=1", "h.toml", "--env", "B=2", "--detach", "t.py", "--env", "C=3"])
    assert options.headless
    assert options.detach
    assert options.env == ["A=1", "B=2"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "SCRIPT is missing"),
        (["hosts.toml"], "SCRIPT is missing"),
        (["a.toml", "b.toml"], "two inventories"),
        (["--no-such", "train.py"], "unrecognized"),
        (["--nproc", "2", "train.py"], "unrecognized"),
        (["--job"], "expected one argument"),
    ],
)
def test_wrong_usage_is_one_clear_message(argv: list[str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        torchrun.notices(parse_up(argv))


@pytest.mark.parametrize("spelling", ["--nproc-per-node", "--nproc_per_node"])
def test_both_spellings(spelling: str) -> None:
    assert job_options(parse_up([spelling, "3", "t.py"])).nproc_per_node == "3"


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


def test_torchruns_defaults_are_the_ones_we_know() -> None:
    """A changed default or a new choice of torchrun is noticed here; docs/torchrun.md tells what ours are."""
    torch_run = pytest.importorskip("torch.distributed.run")
    theirs = {action.dest: action.default for action in torch_run.get_args_parser()._actions if action.option_strings}
    assert {name: value for name, value in theirs.items() if value and name != "help"} == {
        "nnodes": "1:1",
        "nproc_per_node": "1",
        "rdzv_backend": "static",
        "rdzv_id": "none",
        "monitor_interval": 0.1,
        "start_method": "spawn",
        "event_log_handler": "null",
        "role": "default",
        "redirects": "0",
        "tee": "0",
        "master_addr": "127.0.0.1",
        "signals_to_handle": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
    }


def test_options_take_effect() -> None:
    argv = [
        *("--nnodes", "2:4", "--max-restarts", "5", "--rdzv-id", "abc", "--role", "trainer", "-m"),
        *("--shutdown-timeout", "2.5", "--env", "A=b=c", "pkg.train", "x"),
    ]
    options = job_options(parse_up(argv))
    assert (options.nnodes, options.max_restarts, options.job, options.role) == ("2:4", 5, "abc", "trainer")
    assert (options.kind, options.stop_grace, options.env) == ("module", 2.5, {"A": "b=c"})
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
    assert (options.numa_binding, options.stop_grace) == (None, 7.0)


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
    assert (options.log_dir, options.numa_binding, options.virtual_local_rank) == ("logs", "node", True)
    assert options.kind == "run_path"
    assert job_options(parse_up(["--log-dir", "/dev/null", "t.py"])).log_dir is None


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--numa-binding", "core"], "must be one of node, socket"),
        (["--start-method", "thread"], "must be one of spawn"),
        (["--event-log-handler", "dynamic_rendezvous"], "must be null or console"),
        (["--signals-to-handle", "SIGTERM,SIGNO"], "no signal is named 'SIGNO'"),
        (["--monitor-interval", "often"], "must be seconds"),
        (["--node-rank", "first"], "whole number"),
        (["--redirects", "4"], "--redirects '4'"),
        (["--tee", "0:1,1"], "'1' is not valid"),
        (["--local-ranks-filter", "a"], "must be local ranks"),
    ],
)
def test_values_that_torchrun_would_refuse(argv: list[str], words: str) -> None:
    options = parse_up([*argv, "t.py"])
    with pytest.raises(UsageError, match=words):
        torchrun.check(options)
        torchrun.console(options)


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


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--max-restarts", "-1", "t.py"], "max-restarts"),
        (["--max-restarts", "x", "t.py"], "whole number"),
        (["--shutdown-timeout", "x", "t.py"], "seconds"),
        (["--env", "1A=x", "t.py"], "not a valid variable name"),
        (["--env", "SURELY_NOT_SET_HERE", "t.py"], "not set here"),
        (["--job", "a", "--rdzv-id", "b", "t.py"], "both name the job"),
        (["-m", "--no-python", "t"], "cannot be combined"),
    ],
)
def test_bad_values_are_named(argv: list[str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        job_options(parse_up(argv))


def test_env_takes_a_value_from_here_and_does_not_show_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN_HERE", "secret")
    assert job_options(parse_up(["--env", "TOKEN_HERE", "t.py"])).env == {"TOKEN_HERE": "secret"}
    with pytest.raises(UsageError) as caught:
        job_options(parse_up(["--env", "A B=secret", "t.py"]))
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ([], (None, None)),
        (["a.toml"], ("a.toml", None)),
        (["job-1"], (None, "job-1")),
        (["a.toml", "job-1"], ("a.toml", "job-1")),
        (["job-1", "a.toml"], ("a.toml", "job-1")),
    ],
)
def test_targets(words: list[str], found: tuple[str | None, str | None]) -> None:
    assert split_target(words) == found


@pytest.mark.parametrize("words", [["a.toml", "b.toml"], ["a", "b"], ["../x"], ["a", "b", "c.toml"]])
def test_bad_targets(words: list[str]) -> None:
    with pytest.raises(UsageError):
        split_target(words)


@pytest.mark.parametrize(("text", "ranks"), [("0", [0]), ("0,2-4", [0, 2, 3, 4]), ("3,1,1", [1, 3])])
def test_rank_lists(text: str, ranks: list[int]) -> None:
    assert read_ranks(text) == ranks


@pytest.mark.parametrize("text", ["", "a", "4-2", "-1", "1,,2", "0-9999999999"])
def test_bad_rank_lists(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        read_ranks(text)


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("90s", 90), ("10m", 600), ("2h", 7200), ("1d", 86400)])
def test_durations(text: str, seconds: float) -> None:
    assert read_duration(text) == seconds


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--raw"], "--rank"),
        (["--raw", "--rank", "0,1"], "one rank"),
        (["--raw", "--rank", "0", "--stream", "all"], "one stream"),
        (["--raw", "--rank", "0", "--grep", "x"], "cannot be combined"),
        (["--raw", "--rank", "0", "--generation", "all"], "one generation"),
        (["--raw", "--rank", "0", "--fold"], "cannot be combined"),
        (["--grep", "("], "--grep"),
        (["--tail", "-1"], "tail"),
        (["--stream", "no"], "invalid choice"),
    ],
)
def test_logs_options_that_contradict_each_other(argv: list[str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse_logs(argv)


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


def test_a_script_named_like_an_inventory_is_an_inventory(tmp_path: Path) -> None:
    assert parse_up([str(tmp_path / "x.toml"), "t.py"]).hosts == str(tmp_path / "x.toml")


def test_the_scripts_own_debug_is_not_ours(capsys: pytest.CaptureFixture[str]) -> None:
    before = logging.getLogger().level
    try:
        assert main(["up", "no-such.py", "--debug"]) == 2
        assert "Traceback" not in capsys.readouterr().err
        assert main(["up", "--debug", "no-such.py"]) == 2
        assert "Traceback" in capsys.readouterr().err
    finally:
        logging.getLogger().setLevel(before)


def test_a_pattern_that_the_nodes_would_not_take_is_a_mistake() -> None:
    with pytest.raises(UsageError, match="bad escape"):
        parse_logs(["-f", "--grep", r"\u20ac"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--later"], "--later needs a variable"),
        (["--env", "A-B=1"], "not a valid variable name"),
        (["--sync", "--rollback"], "--sync and --rollback cannot be combined"),
        (["--sync", "--env", "NCCL_DEBUG=INFO"], "--sync and --env cannot be combined"),
        (["--partial"], "needs --sync or --rollback"),
        (["--env", "NCCL_NOT_SET_HERE"], "not set here"),
    ],
)
def test_a_restart_that_would_set_nothing(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["restart", "h.toml", *words]) == 2
    assert said in capsys.readouterr().err


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
def test_every_command_says_first_that_it_is_about_this_machine_only(
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
