"""`supervisor completion`: scripts that the shells accept, with every verb and option."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from supervisor.actions import BY_VERB
from supervisor.cli import main

PARSE = {"bash": ["bash", "-n"], "zsh": ["zsh", "-n"], "fish": ["fish", "--no-execute"]}


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the script of a shell."""
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


def complete(text: str, line: str) -> list[str]:
    """Return what bash offers for the last word of a command line."""
    words = line.split(" ")
    quoted = " ".join(f"'{word}'" for word in words)
    ask = f"COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _supervisor; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    ran = subprocess.run(["bash", "-c", f"{text}\n{ask}"], capture_output=True, text=True, check=True)
    return ran.stdout.split()


@pytest.mark.parametrize("shell", PARSE)
def test_every_verb_is_in_the_script_and_the_shell_accepts_it(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = script(shell, capsys)
    assert all(verb in text for verb in BY_VERB)
    assert "describe-options" not in text
    if shutil.which(shell):
        subprocess.run(PARSE[shell], input=text, text=True, check=True)


def test_bash_completes_verbs_options_and_values(capsys: pytest.CaptureFixture[str]) -> None:
    text = script("bash", capsys)
    assert complete(text, "supervisor cor") == ["cordon"]
    assert complete(text, "supervisor restart --dry") == ["--dry-run"]
    assert "--nproc-per-node" in complete(text, "supervisor up --np")
    assert complete(text, "supervisor logs --stream std") == ["stdout", "stderr"]
    assert complete(text, "supervisor status hosts") == [], "bash completes files itself"
