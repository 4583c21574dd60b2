"""Removes secrets from reports and bundles.

In: texts, command lines, documents. Out: the same with `[redacted]` in place of what looks like a secret; the bytes of
a log with as many asterisks.

There are two rules. By name: the value of a variable, an option, a key or a header that is named as secrets are. By
form: what is a secret wherever it stands, such as a token of a known provider or the URL of a webhook. Ordinary logs
must stay as they are: a name that is an ordinary word too (`token`, `pass`, `auth`) needs more than a colon behind it.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

MARK = "[redacted]"
Place = Callable[[re.Match[str]], tuple[int, int]]
"""Where the secret of a match begins and ends; the same twice: it has none."""
_BYTE = re.compile(rb"[^\r\n]")

# --- by name

# A word in a name begins behind another character, or with a capital as in dbPassword.
_BEGIN = r"(?:(?<![A-Za-z0-9])|(?<=[a-z0-9])(?=[A-Z]))"
# Ends of names whose values are always secrets; the first ones also without a gap before them: PGPASSWORD.
_SURE = (
    r"(?i:pass(?:wd|word|phrase|code)|sshpass|secret|api[_-]?key)"
    rf"|{_BEGIN}(?i:(?:access|account|auth|encryption|master|private|rdzv|shared|signing|subscription)[_-]?key"
    r"|webhook(?:[_-]?url)?|dsn)"
)
# Ends of names that are ordinary words, too.
_ORDINARY = rf"{_BEGIN}(?i:token|auth(?:orization)?|credentials?|cookies?|pass|pwd|pat|sas|sig(?:nature)?)"
_SUFFIX = r"(?:(?:[_.-]|(?<=[a-z0-9])(?=[A-Z]))(?i:id|key|value|json|base64)|[_.-]?[0-9]{1,9})?"
_NAME = rf"(?:(?P<sure>{_SURE})|(?P<ordinary>{_ORDINARY})){_SUFFIX}"
_END_OF_NAME = re.compile(rf"{_NAME}\Z")
# pad_token, loss_per_token: tokens of a text.
_TOKEN_OF_TEXT = re.compile(
    r"(?i)(?:^|[^a-z0-9])(?:audio|begin|bos|cls|end|eos|first|image|last|mask|new|next|pad|per|predicted|prev|previous"
    r"|prompt|sep|special|start|stop|target|text|think|tool|unk|video)[_-]\Z"
)
# NAME=value, "name": "value", Name: value, --name value in a text, with or without quotes, also escaped ones.
_PAIR = re.compile(
    rf"{_NAME}(?P<sep>\\{{0,8}}[\"']?\]?[ \t]{{0,20}}(?:=>|:=|[=:](?!=))[ \t]{{0,20}}|[ \t]+(?=[^\s-])"
    r"|\\{0,8}[\"'],[ \t]{0,4}(?=\\{0,8}[\"'][^-]))"
    r"(?:[bBrRuU]{0,2}(?P<quote>\\{0,8}[\"'])(?P<quoted>(?:(?!(?P=quote))(?:\\.|[^\n]))+)"
    r"|(?P<value>(?:[^\s\"',;&\\]|\\(?![\"']))+))"
)
_WORD = re.compile(r"[\w.-]*")
_OPTION = re.compile(r"(?:^|[\s\"'])--[\w-]{0,80}\Z")
_NUMBER = re.compile(r"[-+]?(?:\d{1,8}(?:\.\d*)?|\.\d+)(?:e[-+]?\d+)?[^\w]*", re.I)
# Letters and digits mixed, as no word of a text is.
_OPAQUE = re.compile(r"(?=[^\d]*\d)(?=[^A-Za-z]*[A-Za-z])[\w+/=%~-]{12,}")
_SCHEMES = r"apikey|api-key|basic|bearer|key|negotiate|ntlm|splunk|sso-key|token"
_LONG_SCHEMES = r"aws4-hmac-sha256|digest|hawk|mac|oauth"
_NOT_SECRET = frozenset(
    ("none", "null", "true", "false", "str", "bytes", "bool", *f"{_SCHEMES}|{_LONG_SCHEMES}".split("|"), MARK)
)
# Tracebacks quote code: client.get_token(…), args.password.
_CALL = re.compile(r"(?:[A-Za-z_]\w*\.)+[A-Za-z_]\w*\(")
_IDENTIFIER = re.compile(r"\w*\Z")
# The whole value of the header is redacted. Digest and similar schemes have several parts.
_AUTHORIZATION = re.compile(
    rf"(?i)(?P<kept>\bauthorization\\{{0,8}}[\"']?\s{{0,9}}[=:]\s{{0,9}}\\{{0,8}}[\"']?(?:(?:{_SCHEMES})\s+(?=[^\s\"'\\])"
    rf"|(?P<long>(?:{_LONG_SCHEMES})\s+)))(?(long)[^\n]+|[^\s\"'\\]+)"
)
_COOKIE = re.compile(r"(?i)(?P<kept>\bcookie:[ \t]*)[^\n\"']+")

# --- by form

_SCHEME = re.compile(r"\b[A-Za-z][A-Za-z0-9+.-]{0,30}\Z")
_URL_PASSWORD = re.compile(r"(?P<kept>://[^\s/:@\"']*:)[^\s/\"']+(?=@)")
_URL_TOKEN = re.compile(r"(?P<kept>://)(?=[\w-]*\d)[\w-]{16,}(?=@)")
_WEBHOOK = re.compile(
    r"(?i)(?P<kept>https?://(?:hooks\.[^/\s]+/|(?:[\w-]+\.)?discord(?:app)?\.com/api/(?:v\d+/)?webhooks/"
    r"|[\w.-]+\.webhook\.office\.com/|outlook\.office(?:365)?\.com/webhook/|api\.telegram\.org/bot"
    r"|[^\s\"'<>]{1,200}?/(?:web)?hooks?/(?=(?:[\w-]{1,15}/){0,4}(?=[\w-]{0,40}\d)[\w-]{16})))[^\s\"'<>\\)]+"
)
_BEARER = re.compile(r"(?i)(?P<kept>\bbearer\s+)(?=\S*\d|\S{20})[A-Za-z0-9+/._~=-]{8,}")
_BASIC = re.compile(r"(?i)(?P<kept>\bbasic\s+)(?P<value>[A-Za-z0-9+/]{6,}={0,2})")
# Tokens of known providers.
_TOKEN = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|sk-(?!ssh-|ecdsa-)(?=[\w-]{0,40}\d)[\w-]{16,}"
    r"|xox[abeprs]-[\w-]{10,}|xapp-[\w-]{20,}|(?:AKIA|ASIA)[A-Z0-9]{16}|AIza[\w-]{30,}|ya29\.[\w-]{20,}"
    r"|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*|npm_[A-Za-z0-9]{30,}|pypi-(?:AgE[\w-]{16,}|[\w-]{60,})|nvapi-[\w-]{20,}"
    r"|dckr_pat_[\w-]{20,}|SG\.[\w-]{16,}\.[\w-]{16,}|(?:gsk|r8|whsec|[rs]k_live)_[A-Za-z0-9]{20,}|xai-[\w-]{40,}"
    r"|hv[bs]\.[\w-]{20,}|do[opr]_v1_[a-f0-9]{40,}|AGE-SECRET-KEY-1[A-Z0-9]{40,})"
)
# A key that is cut off ends where its lines do.
_KEY_BLOCK = re.compile(
    r"(?P<begin>-----BEGIN [A-Z ]*PRIVATE KEY-----)(?P<lines>(?:(?:\s|\\[nr]){1,4}[A-Za-z0-9+/=]{40,})*)"
)
_KEY_END = re.compile(r"-----END [A-Z ]*PRIVATE KEY-----")
KEY_CHARACTERS = 8192


def is_secret(name: str) -> bool:
    """Return True if the value of a variable, an option or a key of this name is a secret."""
    match = _END_OF_NAME.search(name.lstrip("-"))
    return match is not None and not _means_something_else(match) and name not in ("PWD", "sig", "signature")


def text(value: str) -> str:
    """Return a text without passwords in URLs, values of secret names, and secrets of a known form."""
    return _without(value, lambda _hidden: MARK)


def same_length(data: bytes) -> bytes:
    """Return the bytes of a log as `text` does, but with an asterisk for each byte of a secret within a line."""
    return _without(data.decode("utf-8", "surrogateescape"), _asterisks).encode("utf-8", "surrogateescape")


def _asterisks(hidden: str) -> str:
    return _BYTE.sub(b"*", hidden.encode("utf-8", "surrogateescape")).decode()


def _without(value: str, instead: Callable[[str], str]) -> str:
    low = _lower(value)
    for ignores_case, starts, pattern, place in _RULES:
        where = low if ignores_case else value
        places = {one.start(one.lastindex or 0) for start in starts for one in start.finditer(where)}
        if places and (changed := _replaced(value, sorted(places), pattern, place, instead)) != value:
            value, low = changed, _lower(changed)
    return value


def _lower(value: str) -> str:
    """Return a text of the same length in lower case, with letters that the expressions read as i and s."""
    return value.replace("\u0130", "i").replace("\u0131", "i").replace("\u017f", "s").lower()


def _replaced(
    value: str, starts: Sequence[int], pattern: re.Pattern[str], place: Place, instead: Callable[[str], str]
) -> str:
    """Return what `pattern.sub` does to a text in which each match begins at one of these places."""
    out: list[str] = []
    kept = done = 0
    for start in starts:
        match = pattern.match(value, start) if start >= done else None
        if match is not None:
            begin, done = place(match)
            if begin < done:
                out += value[kept:begin], instead(value[begin:done])
                kept = done
    return "".join((*out, value[kept:]))


def _means_something_else(match: re.Match[str]) -> bool:
    """Return whether a name with this ending is harmless."""
    ordinary = match["ordinary"]
    return ordinary is not None and ordinary.lower() == "token" and bool(_TOKEN_OF_TEXT.search(_front(match)))


def _front(match: re.Match[str]) -> str:
    return match.string[max(0, match.start() - 90) : match.start()]


def _pair(match: re.Match[str]) -> tuple[int, int]:
    kept = match.end(), match.end()
    return match.span("quoted" if match["quoted"] else "value") if _holds_secret(match) else kept


def _holds_secret(match: re.Match[str]) -> bool:
    value = match["quoted"] or match["value"]
    # After a space, or as the next word of a list, it is a value only if the name is that of an option.
    is_next = not match["sep"].strip(" \t\\\"',")
    if value.lower() in _NOT_SECRET or (is_next and _OPTION.search(_front(match)) is None):
        return False
    if match["quoted"] is None and _is_code(match, value):
        return False
    if match["sure"]:
        return True
    ordinary = match["ordinary"].lower()
    if _means_something_else(match) or _NUMBER.fullmatch(value) or value[0] in "<[":
        return False
    if ordinary == "pwd" and value[0] in "/~":
        return False
    # In prose, an ordinary word and a colon are no name; a signature is more often one of a function.
    if _is_prose(match) or ordinary.startswith("sig"):
        return _OPAQUE.fullmatch(value) is not None
    return True


def _is_prose(match: re.Match[str]) -> bool:
    """Return whether an ordinary word stands alone, as in `auth: refused` and `token = the`."""
    is_alone = match.start() == 0 or match.string[match.start() - 1] not in "_.-"
    is_loose = match["sep"].lstrip().startswith(":") or match["sep"].startswith(" =")
    return is_alone and is_loose and (match["quoted"] is None or match["ordinary"].lower() == "token")


def _is_code(match: re.Match[str], value: str) -> bool:
    """Return whether a value without quotes is a call, or a variable of the same name."""
    begin = _IDENTIFIER.search(_front(match))
    name = (begin[0] if begin is not None else "") + match.string[match.start() : match.start("sep")]
    last = value.rstrip("),:").rpartition(".")[2]
    return _CALL.match(value) is not None or last.lstrip("_") == name.lstrip("_")


def _basic(match: re.Match[str]) -> tuple[int, int]:
    try:
        is_login = b":" in base64.b64decode(match["value"], validate=True)
    except ValueError:
        is_login = False
    return match.span("value") if is_login else (match.end(), match.end())


def _rest(match: re.Match[str]) -> tuple[int, int]:
    return match.end("kept"), match.end()


def _after_scheme(match: re.Match[str]) -> tuple[int, int]:
    start = match.start()
    has_scheme = _SCHEME.search(match.string, max(0, start - 31), start) is not None
    return match.end("kept") if has_scheme else match.end(), match.end()


def _key_block(match: re.Match[str]) -> tuple[int, int]:
    begin, until = match.start(), match.end("begin") + KEY_CHARACTERS
    # The end's own words have about thirty characters.
    end = _KEY_END.search(match.string, match.end("begin"), until + 1024)
    if end is not None and end.start() <= until:
        return begin, end.end()
    return begin, match.end() if match["lines"] else begin


def _ends(last: str, end: str, names: str) -> str:
    """Return an expression for the end of several names, whose own last characters are known; its group is the name."""
    return f"{end}(?<={last}{end})(?:{'|'.join(f'(?<=({name}{end}))' for name in names.split())})"


_WORDS = "auth|cookie|cred|dsn|key|pass|pat|pwd|sas|secret|sig|token|webhook"
_KEYS = "access account api auth encryption master private rdzv shared signing subscription"
_NAMES = (
    r"auth(?:orization)?", "cookies?", "credentials?", "dsn", "pa(?:ss(?:wd|word|phrase|code)?|t)", "pwd", "sas",
    "secret", "sig(?:nature)?", "sshpass", "token", r"webhook(?:[_-]?url)?",
)  # fmt: skip
_ANY_KEY = rf"(?:{_KEYS.replace(' ', '|')})[_-]?key"
_REST_OF_NAME = r"(?:[_.-]?(?:id|key|value|json|base64|[0-9]{1,9}))?"
# After a space a value is none, unless the name is that of an option; but no other name is looked for in it.
_BEFORE_VALUE = (
    r"(?=\\{0,8}[\"']?\]?[ \t]{0,20}[=:]|\\{0,8}[\"'],"
    rf"|[ \t]+(?:[bru]{{0,2}}\\{{0,8}}[\"']|\S*?(?:{_WORDS})))"
)
_PAIRS = (
    *(
        f"{name}{_REST_OF_NAME}{_BEFORE_VALUE}"
        for name in (*_NAMES, _ends("[_a-z-]", "key", " ".join(f"{one}[_-] {one}" for one in _KEYS.split())))
    ),
    rf"--(?:(?<=[\s\"']--)|(?<=\A--))[\w-]{{0,80}}?({'|'.join((*_NAMES, _ANY_KEY))}){_REST_OF_NAME}[ \t]",
)
_TOKENS = (
    _ends("[18cefkmoprstu]", "_", "hf gh[pousr] github_pat dckr_pat npm gsk r8 whsec [rs]k_live do[opr]_v1"),
    _ends("[Yabeikprst]", "-", "glpat sk xox[abeprs] xapp pypi nvapi xai AGE-SECRET-KEY"),
    # One start in a run of characters is enough, since all of it is hidden.
    r"eyJ(?<=\beyJ)[\w-]{10,}",
    *("A(?:KIA|SIA|Iza)", r"SG\.", r"hv[bs]\.", r"ya29\."),
)
# Logs have millions of lines: a rule is tried only where one of its first expressions matches, in the text or in the
# text in lower case. Each of them begins with a literal, which Python finds at 1 GB/s; alternatives would be a
# twentieth as fast.
_RULES: tuple[tuple[bool, tuple[re.Pattern[str], ...], re.Pattern[str], Place], ...] = tuple(
    (ignores_case, tuple(map(re.compile, starts)), pattern, place)
    for ignores_case, starts, pattern, place in (
        (False, ("-----(?=BEGIN [A-Z ]*PRIVATE KEY-----)",), _KEY_BLOCK, _key_block),
        (True, (r"http(?=s?://(?:api\.telegram|[^\s\"'<>]{0,300}hook))",), _WEBHOOK, _rest),
        (False, (r"://(?=[^\s/]*@)",), _URL_PASSWORD, _after_scheme),
        (False, (r"://(?=[\w-]+@)",), _URL_TOKEN, _after_scheme),
        (True, ("authorization",), _AUTHORIZATION, _rest),
        (True, ("cookie:",), _COOKIE, _rest),
        (True, (r"bearer(?=\s)",), _BEARER, _rest),
        (True, (r"basic(?=\s)",), _BASIC, _basic),
        (False, _TOKENS, _TOKEN, re.Match.span),
        (True, _PAIRS, _PAIR, _pair),
    )
)


def argv(words: Sequence[str]) -> list[str]:
    """Return a command line without the values of secret options and variables."""
    out: list[str] = []
    hides = False
    for word in words:
        name, equals, value = word.partition("=")
        if hides and not word.startswith("--"):
            out.append(MARK)
        else:
            is_setting = equals and _WORD.fullmatch(name) and _hides(name, value)
            out.append(f"{name}={MARK}" if is_setting else text(word))
        hides = word.startswith("-") and not equals and is_secret(word)
    return out


def document(value: object) -> Any:
    """Return a JSON document without its secrets: values of secret names, lists of words as command lines, texts."""
    if isinstance(value, str):
        return text(value)
    if isinstance(value, Mapping):
        return {key: MARK if _hides(key, one) else document(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return argv(value) if all(isinstance(one, str) for one in value) else [document(one) for one in value]
    return value


def _hides(key: str, value: object) -> bool:
    return isinstance(value, str) and bool(value) and value.lower() not in _NOT_SECRET and is_secret(key)
