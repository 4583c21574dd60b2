"""The gate for documents that others have written: files, recordings, other machines.

In: JSON text, or what was parsed from it. Out: values of a declared shape; `Misfit`, which names the field, for
everything else, so that the code behind the gate needs no checks.

A shape is a function that returns its argument, or raises Misfit. Texts come out without lone surrogates, numbers are
finite and fit into 64 bits, nothing is nested deeper than MAX_DEPTH.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

Shape = Callable[[Any], Any]
MAX_DEPTH = 32
# The name of a job is also the name of its directory on every node.
JOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
# More characters than any name of a host, a job or a stream.
NAME_CHARS = 255
_INT_MAX = 2**63 - 1
# JSON has no such numbers, but Python writes them: they are unknown values.
_DECODER = json.JSONDecoder(parse_constant=lambda _name: None)


class Misfit(ValueError):
    """A document is not of the shape that it should have; the text names the field."""

    def inside(self, key: object) -> Misfit:
        """Return the same error of the object or list that holds the field."""
        return Misfit(f"{key}.{self}" if " is " in str(self) else f"{key} {self}")


def parse(document: str | bytes) -> Any:
    """Return the value of a JSON text; raises Misfit."""
    text = document.decode("utf-8", "replace") if isinstance(document, bytes) else document
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        raise Misfit("is not JSON") from error


def anything(value: Any, depth: int = 0) -> Any:
    """Return any JSON value, for a field that nobody reads; null for a number that is too large. Raises Misfit."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return text(value)
    if isinstance(value, (int, float)):
        return value if abs(value) <= _INT_MAX else None
    if depth == MAX_DEPTH:
        raise Misfit("is nested too deeply")
    if isinstance(value, list):
        return [anything(one, depth + 1) for one in value]
    if isinstance(value, dict):
        return {text(key): anything(one, depth + 1) for key, one in value.items()}
    raise Misfit("is not JSON")


def text(value: Any) -> str:
    """Return a text; `?` in place of a lone surrogate, which no encoding has. Raises Misfit."""
    if not isinstance(value, str):
        raise Misfit("is not a text")
    return value if value.isascii() else value.encode("utf-8", "replace").decode()


def name(value: Any) -> str:
    """Return a text that is no longer than a name; raises Misfit."""
    if len(text(value)) > NAME_CHARS:
        raise Misfit(f"is longer than {NAME_CHARS} characters")
    return text(value)


def number(value: Any) -> float:
    """Return a finite number, an integer as it is; raises Misfit."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise Misfit("is not a number")
    if not abs(value) <= _INT_MAX:
        raise Misfit("is too large a number")
    return value


def flag(value: Any) -> bool:
    """Return true or false; raises Misfit."""
    if not isinstance(value, bool):
        raise Misfit("is not true or false")
    return value


def whole(low: int = -_INT_MAX, high: int = _INT_MAX) -> Shape:
    """Return the shape of an integer within these bounds."""

    def read(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise Misfit(f"is not a whole number from {low} to {high}")
        return value

    return read


def maybe(shape: Shape) -> Shape:
    """Return the shape of a value that may be null."""
    return lambda value: None if value is None else shape(value)


def each(shape: Shape) -> Shape:
    """Return the shape of a list of such values."""

    def read(value: Any) -> list[Any]:
        if not isinstance(value, (list, tuple)):
            raise Misfit("is not a list")
        try:
            return [shape(one) for one in value]
        except Misfit as wrong:
            raise wrong.inside("[]") from wrong

    return read


def row(*shapes: Shape) -> Shape:
    """Return the shape of a list with exactly these values."""

    def read(value: Any) -> list[Any]:
        if not isinstance(value, list) or len(value) != len(shapes):
            raise Misfit(f"is not a list of {len(shapes)} values")
        return [shape(one) for shape, one in zip(shapes, value)]

    return read


def by_name(shape: Shape) -> Shape:
    """Return the shape of an object with such values under any keys."""

    def read(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise Misfit("is not an object")
        return {text(key): shape(one) for key, one in value.items()}

    return read


def record(needed: Mapping[str, Shape], optional: Mapping[str, Shape] | None = None) -> Shape:
    """Return the shape of an object with all `needed` keys, perhaps `optional` ones, and others that nobody reads."""
    shapes = {**(optional or {}), **needed}

    def read(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise Misfit("is not an object")
        for key in needed:
            if key not in value:
                raise Misfit(f"{key} is missing")
        result = {}
        for key, one in value.items():
            try:
                result[text(key)] = shapes.get(key, anything)(one)
            except Misfit as wrong:
                raise wrong.inside(key) from wrong
        return result

    return read
