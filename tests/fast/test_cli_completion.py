"""`supervisor completion`: what fits at each place of a command line, from parsers, files and what was seen before."""

from __future__ import annotations

from pathlib import Path

import pytest

from supervisor import known
from supervisor.actions import BY_VERB
from supervisor.cli import main
from supervisor.cli.completion import SHELLS, complete
from supervisor.inventory import load, local

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


def test_verbs_options_and_choices_come_from_the_registry_and_the_parsers(here: Path) -> None:
    assert words("supervisor ") == list(BY_VERB)
    assert words("supervisor cor") == ["cordon"]
    assert words("supervisor nosuch ") == []
    assert words("supervisor restart --dry") == ["--dry-run"]
    assert words("supervisor up --np") == ["--nproc-per-node"]
    assert words("supervisor up --nproc_") == [], "torchrun's second spellings are not offered"
    assert words("supervisor logs --stream std") == ["stdout", "stderr"]
    assert words("supervisor logs --stream=std") == ["--stream=stdout", "--stream=stderr"]
    assert words("supervisor logs --stream = std") == ["stdout", "stderr"], "the words that bash makes of it"
    assert words("supervisor completion z") == ["zsh"]
    assert "--describe-options" not in words("supervisor status --")


@pytest.mark.parametrize("verb", BY_VERB)
def test_every_verb_completes_its_options(verb: str) -> None:
    assert "--debug" in words(f"supervisor {verb} --")


def test_inventories_jobs_nodes_and_ranks_are_offered_where_they_belong(here: Path) -> None:
    assert words("supervisor status ") == ["hosts.toml", "alone-1"]
    assert words("supervisor status hosts.toml ") == ["train-k3f9", "old-7"]
    assert words("supervisor stop hosts.toml ") == ["train-k3f9"], "an ended job cannot be stopped"
    assert words("supervisor status hosts.toml old-7 ") == []
    assert words("supervisor cordon hosts.toml --node g") == ["gpu1", "gpu2"]
    assert words("supervisor remove hosts.toml --node gpu1,w") == ["gpu1,west"]
    assert words("supervisor logs --hosts a,b --node ") == ["a", "b"]
    assert words("supervisor logs hosts.toml --rank ") == ["0", "1", "2", "3"], "of the newest live job"
    assert words("supervisor logs hosts.toml old-7 --rank 0,") == ["0,0", "0,1"]
    assert "USR1" in words("supervisor signal hosts.toml train-k3f9 U")


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


def test_the_script_of_each_shell_asks_for_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    for shell in SHELLS:
        assert main(["completion", shell]) == 0
        assert capsys.readouterr().out == SHELLS[shell].lstrip()
