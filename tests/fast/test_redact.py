"""What leaves the cluster has no secret in it, and keeps the rest."""

from __future__ import annotations

import pytest

from supervisor.recording import redact

M = redact.MARK


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("HF_TOKEN", True),
        ("AWS_SECRET_ACCESS_KEY", True),
        ("WANDB_API_KEY", True),
        ("--db-password", True),
        ("apiKey", True),
        ("OPENAI_APIKEY", True),
        ("SLACK_WEBHOOK_URL", True),
        ("AWS_ACCESS_KEY_ID", True),
        ("token", True),
        ("--tokenizer", False),
        ("tokens", False),
        ("--max-tokens", False),
        ("seq", False),
        ("PATH", False),
        ("key", False),
        ("NCCL_DEBUG", False),
    ],
)
def test_names(name: str, secret: bool) -> None:
    assert redact.is_secret(name) is secret


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ("postgres://ann:hunter2@db:5432/x", f"postgres://ann:{M}@db:5432/x"),
        ("tcp://10.0.0.1:29400", "tcp://10.0.0.1:29400"),
        ("HF_TOKEN=abc rest", f"HF_TOKEN={M} rest"),
        ('{"password": "hunter2", "step": 3}', f'{{"password": "{M}", "step": 3}}'),
        ("Authorization: Bearer abcdefgh12345678", f"Authorization: Bearer {M}"),
        ("login with hf_abcdefghijklmnopqrst failed", f"login with {M} failed"),
        ("key AKIAABCDEFGHIJKLMNOP", f"key {M}"),
        ("train.py --api-key abc --lr 3", f"train.py --api-key {M} --lr 3"),
        ("the token is wrong", "the token is wrong"),
        ("https://x/y?token=abc&step=4", f"https://x/y?token={M}&step=4"),
        ("tokens: 4096, lr=3e-4, token=None", "tokens: 4096, lr=3e-4, token=None"),
        ("RuntimeError: Connection closed by peer [10.0.0.2]:41233", None),
    ],
)
def test_texts(said: str, kept: str | None) -> None:
    assert redact.text(said) == (said if kept is None else kept)
    assert redact.text(redact.text(said)) == redact.text(said)


def test_command_lines_and_documents() -> None:
    words = ["--lr", "3e-4", "--api-key", "abc", "--token=abc", "--password", "--quiet", "--max-tokens", "7"]
    expected = ["--lr", "3e-4", "--api-key", M, f"--token={M}", "--password", "--quiet", "--max-tokens", "7"]
    assert redact.argv(words) == expected
    found = redact.document({"args": words, "env": {"HF_TOKEN": "x", "A": "b"}, "step": 3, "n": [{"password": ""}]})
    assert found == {"args": expected, "env": {"HF_TOKEN": M, "A": "b"}, "step": 3, "n": [{"password": ""}]}
