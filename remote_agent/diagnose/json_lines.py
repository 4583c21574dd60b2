"""Records of loggers that write JSON, as a terminal would show them.

In: a line. Out: the lines of its text, with rank, time and level; tracebacks in Python's form.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

# Loggers store the message, the time, the level and the rank under these names.
_MESSAGES = ("message", "msg", "event", "log", "text")
_TIMES = ("timestamp", "@timestamp", "time", "ts", "asctime")
_LEVELS = ("level", "levelname", "severity", "log.level")
_RANKS = ("rank", "global_rank")
# Other fields that say what failed contain one of these; inside of them every name does.
_ERRORS = ("err", "exc", "trace", "stack", "fail")
# The parts of an exception that is stored as an object.
_TYPES = ("type", "exc_type", "kind", "name", "class")
_VALUES = ("message", "value", "exc_value", "msg")
_FRAMES = ("frames", "stack", "stacktrace", "stack_trace", "traceback")
# Such a text is read as an exception, so it has a line of its own.
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(?::|$)")
_MAX_DEPTH = 4
# A collector may put its own words before a record.
_PREFIX_CHARS = 80
_LEVEL_CHARS = 9


def shown_lines(line: str) -> list[str]:
    """Return the lines of a JSON record's text; an empty list where the line is none, or has no text."""
    begin = line.find("{", 0, _PREFIX_CHARS)
    if begin < 0 or not line.endswith("}"):
        return []
    try:
        record = json.loads(line[begin:])
    except (ValueError, RecursionError):
        return []
    return _record_lines(record) if isinstance(record, dict) else []


def _record_lines(record: dict[str, Any]) -> list[str]:
    # loguru has everything in a second record, and its text for the terminal beside it.
    inner = record.get("record")
    if isinstance(inner, dict) and isinstance(record.get("text"), str):
        record, inner = {"text": record["text"], **{name: inner.get(name) for name in _RANKS}}, {}
    facts = {**inner, **record} if isinstance(inner, dict) else record
    rank = next((facts[name] for name in _RANKS if type(facts.get(name)) is int), None)
    texts = [facts[name] for name in _MESSAGES if isinstance(facts.get(name), str)][:1]
    for text in _errors(facts):
        if any(text in known for known in texts):
            continue
        if texts and "\n" not in text and not _EXCEPTION.match(text):
            texts[0] = f"{texts[0]}: {text}"
        else:
            texts.append(text)
    if not texts:
        return []
    head = _first_text(facts, _TIMES)
    level = _first_text(facts, _LEVELS)
    if level and len(level) <= _LEVEL_CHARS and level.upper() not in texts[0]:
        head += f"{level.upper()} "
    tag = "" if rank is None else f"[rank{rank}]: "
    lines = "\n".join(texts).splitlines()
    return [f"{tag}{'' if number else head}{line}" for number, line in enumerate(lines)]


def _first_text(facts: Mapping[str, Any], names: tuple[str, ...]) -> str:
    values = (facts.get(name) for name in names)
    values = (value.get("name") if isinstance(value, dict) else value for value in values)
    text = next((value for value in values if isinstance(value, str)), "")
    return f"{text} " if text and names is _TIMES else text


def _errors(value: Any, inside: bool = False, depth: int = 0) -> Iterator[str]:
    """Yield the texts of fields that are named after an error, at any depth."""
    if depth > _MAX_DEPTH:
        return
    if isinstance(value, str) and inside and value.strip():
        yield value.strip("\n")
    elif isinstance(value, list):
        for one in value:
            yield from _errors(one, inside, depth + 1)
    elif isinstance(value, dict):
        exception = _exception(value) if inside else ""
        if exception:
            yield exception
            return
        for name, one in value.items():
            about_error = any(word in name.lower() for word in _ERRORS)
            if about_error or isinstance(one, (dict, list)):
                yield from _errors(one, inside or about_error, depth + 1)


def _exception(value: Mapping[str, Any]) -> str:
    """Return an exception that is stored as an object, as Python prints it; empty if it is none."""
    kind = next((value[name] for name in _TYPES if isinstance(value.get(name), str)), "")
    message = next((value[name] for name in _VALUES if isinstance(value.get(name), str)), "")
    stack = next((value[name] for name in _FRAMES if value.get(name)), None)
    line = f"{kind}: {message}" if message else kind
    if isinstance(stack, str):
        return stack.strip("\n") + ("" if kind.rpartition(".")[2] in stack else f"\n{line}")
    if not kind:
        return ""
    frames = [_frame(one) for one in stack if isinstance(one, dict)] if isinstance(stack, list) else []
    head = ["Traceback (most recent call last):", *frames] if frames else []
    return "\n".join([*head, line])


def _frame(frame: Mapping[str, Any]) -> str:
    file = frame.get("filename") or frame.get("file") or frame.get("abs_path") or "?"
    line = frame.get("lineno") or frame.get("line") or 0
    return f'  File "{file}", line {line}, in {frame.get("name") or frame.get("function") or "?"}'
