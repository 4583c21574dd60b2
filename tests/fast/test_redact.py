"""What leaves the cluster has no secret in it, and keeps the rest."""

from __future__ import annotations

import time

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
        ("PGPASSWORD", True),
        ("SSHPASS", True),
        ("REDISCLI_AUTH", True),
        ("MYSQL_PWD", True),
        ("AccountKey", True),
        ("SharedAccessKey", True),
        ("awsSecretKey", True),
        ("authToken", True),
        ("X-Amz-Signature", True),
        ("X-Amz-Security-Token", True),
        ("passphrase", True),
        ("PWD", False),
        ("OLDPWD", False),
        ("signature", False),
        ("eos_token", False),
        ("pad_token_id", False),
        ("loss_per_token", False),
        ("compass", False),
        ("bypass", False),
        ("keyboard", False),
        ("primary_key", False),
        ("num_passes", False),
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


OPAQUE = "a1B2c3D4e5F6g7H8i9J0"
BASE64 = "dGhpcyBpcyBub3QgYSByZWFsIGtleSwgaXQgaXMgYSB0ZXN0IQ=="


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        # Headers.
        ("Authorization: Token abc", f"Authorization: Token {M}"),
        ("-H 'Authorization: token abc' https://x", f"-H 'Authorization: token {M}' https://x"),
        ("Proxy-Authorization: Basic YW5uOmh1bnRlcjI=", f"Proxy-Authorization: Basic {M}"),
        ('authorization: Digest username="ann", response="6629fa"', f"authorization: Digest {M}"),
        ("Authorization: AWS4-HMAC-SHA256 Credential=AK/x, Signature=fe5f", f"Authorization: AWS4-HMAC-SHA256 {M}"),
        (f"Authorization: {OPAQUE}", f"Authorization: {M}"),
        ('{"Authorization": "Token abc"}', f'{{"Authorization": "{M}"}}'),
        (f"X-Api-Key: {OPAQUE}", f"X-Api-Key: {M}"),
        ("Set-Cookie: a=b; sid=hunter2; Path=/", f"Set-Cookie: {M}"),
        # Values in quotes, with spaces.
        ('password = "correct horse battery"', f'password = "{M}"'),
        ("{'db_password': 'correct horse', 'step': 3}", f"{{'db_password': '{M}', 'step': 3}}"),
        (r'"{\"password\": \"correct horse\", \"n\": 1}"', rf'"{{\"password\": \"{M}\", \"n\": 1}}"'),
        (r'password="a\"b c" n=1', f'password="{M}" n=1'),
        ("secret=b'a b'", f"secret=b'{M}'"),
        ("--db-password 'correct horse' --lr 3", f"--db-password '{M}' --lr 3"),
        ("password: 'correct horse", f"password: '{M}"),
        ("password:      hunter2", f"password:      {M}"),
        # Names.
        ("PGPASSWORD=hunter2 psql", f"PGPASSWORD={M} psql"),
        ("export REDISCLI_AUTH=hunter2", f"export REDISCLI_AUTH={M}"),
        ("SSHPASS=hunter2 sshpass -e", f"SSHPASS={M} sshpass -e"),
        ("Server=db;Uid=ann;Pwd=hunter2;", f"Server=db;Uid=ann;Pwd={M};"),
        ("password=correct.horse", f"password={M}"),
        ("password=mypassword", f"password={M}"),
        (f"AccountName=x;AccountKey={BASE64};EndpointSuffix=y", f"AccountName=x;AccountKey={M};EndpointSuffix=y"),
        (f"SharedAccessKeyName=x;SharedAccessKey={BASE64}", f"SharedAccessKeyName=x;SharedAccessKey={M}"),
        (f"use token: {OPAQUE}", f"use token: {M}"),
        # Signatures in URLs.
        ("https://a.blob.core.windows.net/c?sv=2022&sig=q1w2E3r4t5%2Bab%3D&se=3", f"https://a.blob.core.windows.net/c?sv=2022&sig={M}&se=3"),
        (f"https://b.s3.amazonaws.com/k?X-Amz-Date=1&X-Amz-Signature={OPAQUE}", f"https://b.s3.amazonaws.com/k?X-Amz-Date=1&X-Amz-Signature={M}"),
        ("https://b.s3.amazonaws.com/k?X-Amz-Security-Token=IQo&Expires=1", f"https://b.s3.amazonaws.com/k?X-Amz-Security-Token={M}&Expires=1"),
        # Webhooks.
        ("POST https://hooks.slack.com/services/T0/B0/Xy failed", f"POST https://hooks.slack.com/{M} failed"),
        ("https://discord.com/api/webhooks/1234/ab-CD_ef", f"https://discord.com/api/webhooks/{M}"),
        ("https://discordapp.com/api/v10/webhooks/1234/ab", f"https://discordapp.com/api/v10/webhooks/{M}"),
        ("https://x.webhook.office.com/webhookb2/a@b/IncomingWebhook/c/d", f"https://x.webhook.office.com/{M}"),
        ("https://outlook.office.com/webhook/a@b/IncomingWebhook/c", f"https://outlook.office.com/webhook/{M}"),
        (f"https://chat.example.org/hooks/{OPAQUE}", f"https://chat.example.org/hooks/{M}"),
        ("https://api.telegram.org/bot1:ab/sendMessage", f"https://api.telegram.org/bot{M}"),
        # Passwords and tokens in URLs.
        ("redis://:p@ss@host:6379/0", f"redis://:{M}@host:6379/0"),
        (f"https://{OPAQUE}@o1.ingest.sentry.io/2", f"https://{M}@o1.ingest.sentry.io/2"),
        # Forms.
        (f"npm_{'a1B2' * 9}", M),
        (f"pypi-AgEIcHlwaS5vcmc{OPAQUE}", M),
        (f"nvapi-{OPAQUE}", M),
        ("SUPERVISOR_RDZV_KEY=hunter2", f"SUPERVISOR_RDZV_KEY={M}"),
        ("os.environ['HF_TOKEN'] = 'hunter2'", f"os.environ['HF_TOKEN'] = '{M}'"),
        (f"gsk_{'a1B2' * 13}", M),
        (f"xai-{'a1B2' * 20}", M),
        (f"r8_{'a1B2' * 9}", M),
        (f"sk_live_{'a1B2' * 6}", M),
        (f"hvs.{'a1B2' * 6}", M),
        (f"dop_v1_{'a1b2' * 16}", M),
        (f"AGE-SECRET-KEY-1{'A1B2' * 14}", M),
        ("Basic YW5uOmh1bnRlcjI=", f"Basic {M}"),
    ],
)  # fmt: skip
def test_secrets_by_name_and_by_form(said: str, kept: str) -> None:
    assert redact.text(said) == kept
    assert redact.text(kept) == kept


@pytest.mark.parametrize(
    "said",
    [
        "step 120 loss 2.31 tok/s=41000 tokens=4096 tokens/s: 41000",
        "loss_per_token: 2.31 time_per_token=0.2 next_token=cat",
        "Setting `pad_token_id` to `eos_token_id`:50256 for open-end generation.",
        '{"bos_token": "<s>", "eos_token": "</s>", "pad_token": "[PAD]", "unk_token_id": 0}',
        "tokenizer.pad_token = tokenizer.eos_token",
        "special tokens: mask_token=[MASK] image_token=<image>",
        "token: the prob 0.31",
        "Token: 'the', Auth: none",
        "forward pass: OK, backward pass: 3.2 ms, pass=2",
        "PASS: test_allreduce",
        "n2: auth: auth refused for user root; keys tried: /root/.ssh/id_ed25519",
        "PWD=/root/work OLDPWD=/root",
        "sig=0.05 sigma=1.2 signature: (x: Tensor) -> Tensor",
        "signature=forward",
        "basic configuration, Basic PyTorchLightning, bearer certificate",
        "key: value, KeyError: 'model.layers.0.weight', primary_key=id",
        "Missing key(s) in state_dict: layer1.weight",
        "host key of [10.0.0.1]:22 is not in ~/.ssh/known_hosts: ssh-ed25519 SHA256:abcdefghijklmnop1234",
        "pat=5 patience=3 sas=1",
        "    c = Client(address, authkey=process.current_process().authkey)",
        "    model = load(name, token=token, use_auth_token=use_auth_token)",
        "    password=args.password, token = self.get_token(name)",
        'if token.value == "auto":',
        "https://huggingface.co/docs/hub/webhooks/automation",
        "https://pytorch.org/docs/stable/notes/hooks/backward.html",
        "npm_config_registry=https://registry.npmjs.org pypi-mirror",
        "sk-ssh-ed25519@openssh.com",
        "c10d://n1:29500, tcp://[::1]:29500, git@github.com:org/repo.git, https://ann@host/x",
        "NCCL INFO Bootstrap: Using eth0:10.0.0.1<0>",
        "compass: token-free, bypass=on, keyboard interrupt",
        "credentials: found in environment",
    ],
)
def test_ordinary_logs_stay_as_they_are(said: str) -> None:
    assert redact.text(said) == said


@pytest.mark.parametrize(
    "piece",
    ["a.", "://", "https://x/hooks/", "hooks/", "eyJaaaaaaaaaa-", "sk-", "password=\\", "\\", "token", 'pass="',
     "--pass ", "authorization: ", "bearer ", "basic aaaaaaaa ", "x://u:p@", "cookie:", "SG.",
     "-----BEGIN PRIVATE KEY-----"],
)  # fmt: skip
def test_no_line_of_a_rank_takes_long(piece: str) -> None:
    begun = time.process_time()
    redact.text("https://x/hooks/ a://b@ password=" + piece * (60_000 // len(piece)))
    assert time.process_time() - begun < 2


def test_variables_on_a_command_line_may_have_spaces() -> None:
    words = ["env", "PGPASSWORD=correct horse", "PWD=/root", "-H", "Authorization: Token a"]
    expected = ["env", f"PGPASSWORD={M}", "PWD=/root", "-H", f"Authorization: Token {M}"]
    assert redact.argv(words) == expected
    assert redact.document({"env": {"SSHPASS": "a b", "PWD": "/root", "eos_token": "</s>"}}) == {
        "env": {"SSHPASS": M, "PWD": "/root", "eos_token": "</s>"}
    }
