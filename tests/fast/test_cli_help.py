"""What `supervisor VERB --help` says of its options, and what `up` says of torchrun's."""

from __future__ import annotations

import re

import pytest

from supervisor.actions import BY_VERB
from supervisor.cli import main, torchrun
from supervisor.cli.completion import describe, named_options
from supervisor.cli.up import parse_up


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


def test_the_usage_of_logs_has_their_values(capsys: pytest.CaptureFixture[str]) -> None:
    usage = " ".join(shown("logs", capsys).partition("\n\n")[0].split())
    assert usage.startswith("usage: supervisor logs [HOSTS] [JOB] [--rank RANK[,RANK…]] [--node NODE] [--stream")
    assert " [--stream stdout|stderr|nccl|both|all] [--generation G] [--grep REGEX] [-i] [--include REGEX]… " in usage
    assert " [--exclude REGEX]… [--level debug|" in usage


def test_only_words_that_a_verb_takes_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    for verb, word in (("signal", "SIGNAL"), ("record", "FILE"), ("report", "RECORDING")):
        assert f"{word}: " in shown(verb, capsys)
    assert "JOB" not in shown("check", capsys)


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
