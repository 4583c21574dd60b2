"""Removes secrets from reports and recordings.

In: texts, command lines, documents. Out: the same with `[redacted]` in place of what looks like a secret.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

MARK = "[redacted]"
# The end of names whose values are secrets: HF_TOKEN, apiKey, --db-password.
_SECRET_WORDS = (
    r"(?:pass(?:wd|word|phrase)?|secret|token|api[_-]?key|access[_-]?key|private[_-]?key|auth(?:orization)?|credentials?"
    r"|cookie|webhook(?:_url)?|sas|dsn|pat|pwd)"
)
_SUFFIX = r"(?:[_.-](?:id|key|value|json|base64|[0-9]+))?"
_NAME = re.compile(rf"(?i)(?:^|[_.-]){_SECRET_WORDS}{_SUFFIX}$")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
# NAME=value, "name": "value", Name: value, --name value in a text; found by the end of the name.
_PAIR = re.compile(
    rf"(?i)(?<![a-z0-9])(?P<name>{_SECRET_WORDS}{_SUFFIX})"
    r"(?P<sep>[\"']?\s?[=:]\s?[\"']?|\s+(?=[^\s-]))(?P<value>[^\s\"',;&]+)"
)
_OPTION = re.compile(r"(?:^|\s)--[\w-]{0,80}\Z")
_URL = re.compile(r"(?P<scheme>\b[A-Za-z][A-Za-z0-9+.-]*://)(?P<user>[^\s/:@\"']*):(?P<password>[^\s/@\"']+)@")
_BEARER = re.compile(r"(?i)\b(?P<kind>bearer|basic)\s+[A-Za-z0-9+/._~=-]{8,}")
# Tokens of a known format.
_SHAPES = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|sk-[\w-]{16,}"
    r"|xox[abprs]-[\w-]{10,}|(?:AKIA|ASIA)[A-Z0-9]{16}|AIza[\w-]{30,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*)"
)
_KEY_BLOCK = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)")


def is_secret(name: str) -> bool:
    """Return True if the value of a variable, an option or a key of this name is a secret."""
    return bool(_NAME.search(_CAMEL.sub("_", name.lstrip("-"))))


def text(value: str) -> str:
    """Return a text without passwords in URLs, values of secret names, and tokens of a known format."""
    low = value.lower()
    for marks, pattern, instead in _RULES:
        if any(mark in low for mark in marks):
            value = pattern.sub(instead, value)
    return value


def _pair(match: re.Match[str]) -> str:
    # After a space, it is a value only if the name is that of an option.
    front = match.string[max(0, match.start() - 90) : match.start()]
    kept = not match["sep"].strip() and _OPTION.search(front) is None
    kept = kept or match["value"].lower() in ("none", "null", "true", "false", "bearer", "basic", MARK)
    return match[0] if kept else f"{match['name']}{match['sep']}{MARK}"


# Texts, in lower case, without which a pattern cannot match: logs have millions of lines.
_RULES: tuple[tuple[tuple[str, ...], re.Pattern[str], Any], ...] = (
    (("-----begin ",), _KEY_BLOCK, MARK),
    (("://",), _URL, rf"\g<scheme>\g<user>:{MARK}@"),
    (("bearer", "basic"), _BEARER, rf"\g<kind> {MARK}"),
    (("hf_", "gh", "glpat-", "sk-", "xox", "akia", "asia", "aiza", "eyj"), _SHAPES, MARK),
    (("pass", "secret", "token", "key", "auth", "cred", "cookie", "webhook", "sas", "dsn", "pat", "pwd"), _PAIR, _pair),
)


def argv(words: Sequence[str]) -> list[str]:
    """Return a command line without the values of secret options."""
    out: list[str] = []
    hides = False
    for word in words:
        out.append(MARK if hides and not word.startswith("--") else text(word))
        hides = word.startswith("-") and "=" not in word and is_secret(word)
    return out


def document(value: Any) -> Any:
    """Return a JSON document without its secrets: values of secret names, lists of words as command lines, texts."""
    if isinstance(value, str):
        return text(value)
    if isinstance(value, Mapping):
        return {key: MARK if _hides(key, one) else document(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return argv(value) if all(isinstance(one, str) for one in value) else [document(one) for one in value]
    return value


def _hides(key: str, value: Any) -> bool:
    return isinstance(value, str) and bool(value) and is_secret(key)
