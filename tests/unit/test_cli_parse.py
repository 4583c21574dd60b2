"""The command line of `up` and of the other verbs: what is ours, what is the script's."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from supervisor.cli import torchrun
from supervisor.cli.logs import parse_logs, selection_of
from supervisor.cli.options import read_duration, read_ranks, split_target
from supervisor.cli.up import job_options, parse_up
from supervisor.errors import UsageError


@pytest.fixture(autouse=True)
def _no_pet(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

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
    assert theirs <= ours


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
    monkeypatch.setenv("PET_TEE", "3")
    parsed = parse_up(["--max-restarts", "1", "./run.sh"])
    options = job_options(parsed)
    assert (options.nproc_per_node, options.max_restarts, options.kind) == ("4", 1, "binary")
    assert any(line.startswith("--tee has no effect here because") for line in torchrun.notices(parsed))


def test_a_switch_that_pet_turns_off_stays_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_MODULE", "0")
    assert job_options(parse_up(["t.py"])).kind == "script"


def test_options_without_effect_say_why() -> None:
    silent = [flags[-1] for flags, _, _ in torchrun.SILENT]
    argv: list[str] = []
    for flags, metavar, _ in torchrun.SILENT:
        argv += [flags[0]] if metavar is None else [flags[0], "x"]
    lines = torchrun.notices(parse_up([*argv, "t.py"]))
    assert [line.split()[0] for line in lines] == silent
    assert all(" has no effect here because " in line for line in lines)
    assert torchrun.notices(parse_up(["t.py"])) == []


@pytest.mark.parametrize("argv", [["--numa-binding", "node"], ["--virtual-local-rank"]])
def test_options_that_change_the_run_are_refused(argv: list[str]) -> None:
    with pytest.raises(UsageError, match="not supported"):
        torchrun.notices(parse_up([*argv, "t.py"]))


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--max-restarts", "-1", "t.py"], "max-restarts"),
        (["--max-restarts", "x", "t.py"], "whole number"),
        (["--shutdown-timeout", "x", "t.py"], "seconds"),
        (["--env", "1A=x", "t.py"], "not a variable's name"),
        (["--env", "SURELY_NOT_SET_HERE", "t.py"], "not set here"),
        (["--job", "a", "--rdzv-id", "b", "t.py"], "both name the job"),
        (["-m", "--no-python", "t"], "exclude each other"),
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
        (["--raw", "--rank", "0", "--grep", "x"], "exclude each other"),
        (["--raw", "--rank", "0", "--generation", "all"], "one generation"),
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
