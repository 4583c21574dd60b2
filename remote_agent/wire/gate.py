"""The gate for documents that others have written: files, bundles, other machines.

In: JSON text, or what was parsed from it; the type that it should have. Out: values of that type; `Misfit`, which names
the field, for everything else, so that the code behind the gate needs no checks.

The type of a document is a TypedDict, so that mypy checks its readers against the same declaration. Its fields are
str, int, float, bool, Any (what nobody reads), list[…], tuple[…], dict[str, …], Optional[…], another TypedDict, or
`Annotated[type, shape]`. A shape is a function that returns its argument, or raises Misfit. Texts come out without lone
surrogates, numbers are finite and fit into 64 bits, nothing is nested deeper than MAX_DEPTH.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar, get_args, get_origin

Shape = Callable[[Any], Any]
T = TypeVar("T")
MAX_DEPTH = 32
# The name of a job is also the name of its directory on every node.
JOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
# No name of a host, a job or a stream has more characters.
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


def text(value: object) -> str:
    """Return a text; `?` in place of a lone surrogate, which no encoding has. Raises Misfit."""
    if not isinstance(value, str):
        raise Misfit("is not a text")
    return value if value.isascii() else value.encode("utf-8", "replace").decode()


def name(value: object) -> str:
    """Return a text that is no longer than a name; raises Misfit."""
    if len(text(value)) > NAME_CHARS:
        raise Misfit(f"is longer than {NAME_CHARS} characters")
    return text(value)


def number(value: object) -> float:
    """Return a finite number, an integer as it is; raises Misfit."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise Misfit("is not a number")
    if not abs(value) <= _INT_MAX:
        raise Misfit("is too large a number")
    return value


def flag(value: object) -> bool:
    """Return true or false; raises Misfit."""
    if not isinstance(value, bool):
        raise Misfit("is not true or false")
    return value


def whole(low: int = -_INT_MAX, high: int = _INT_MAX) -> Shape:
    """Return the shape of an integer within these bounds."""

    def read(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise Misfit(f"is not a whole number from {low} to {high}")
        return value

    return read


def row(*kinds: Any) -> Shape:
    """Return the shape of a list with exactly these values, each of its type."""
    shapes: list[Shape] = []

    def read(value: object) -> list[Any]:
        if not isinstance(value, (list, tuple)) or len(value) != len(kinds):
            raise Misfit(f"is not a list of {len(kinds)} values")
        if not shapes:
            # The list is filled in one step because another thread may read it.
            shapes[:] = [shape(kind) for kind in kinds]
        return [one_shape(one) for one_shape, one in zip(shapes, value)]

    return read


def record(needed: Mapping[str, object], optional: Mapping[str, object] | None = None) -> Shape:
    """Return the shape of an object with all `needed` keys, perhaps `optional` ones, and others that nobody reads.

    Both give the type of each key. It is for objects that are read where they arrive; others have a TypedDict.
    """
    kinds = {**(optional or {}), **needed}
    shapes: dict[str, Shape] = {}

    def read(value: object) -> dict[str, object]:
        if not isinstance(value, dict):
            raise Misfit("is not an object")
        for key in needed:
            if key not in value:
                raise Misfit(f"{key} is missing")
        if not shapes:
            # The shapes are made at the first use, as many commands read no such document, and in one step, as above.
            shapes.update({key: shape(kind) for key, kind in kinds.items()})
        result = {}
        for key, one in value.items():
            try:
                result[text(key)] = shapes.get(key, anything)(one)
            except Misfit as wrong:
                raise wrong.inside(key) from wrong
        return result

    return read


def fields(kind: Any) -> tuple[dict[str, object], dict[str, object]]:
    """Return the needed and the optional fields of a TypedDict, in their order, each with its type."""
    kinds = kind.__annotations__
    needed = {key: one for key, one in kinds.items() if key in kind.__required_keys__}
    return needed, {key: one for key, one in kinds.items() if key not in needed}


def reader(kind: type[T], *needed: str) -> Callable[[Any], T]:
    """Return the function that returns its argument as a document of this type, or raises Misfit.

    `needed`: fields that such a document has, but not every document of its type.
    """
    own = record({key: kind.__annotations__[key] for key in needed}, kind.__annotations__) if needed else None

    def read(value: object) -> T:
        document: T = (own or shape(kind))(value)
        return document

    return read


# These types have a shape; for any other type it is made when it is first used.
_SHAPES: dict[Any, Shape] = {Any: anything, str: text, int: whole(), float: number, bool: flag}


def shape(kind: Any) -> Shape:
    """Return the shape of values of a type, as the module's docstring lists them; TypeError for another type."""
    if kind not in _SHAPES:
        _SHAPES[kind] = _shape(kind)
    return _SHAPES[kind]


def _shape(kind: Any) -> Shape:
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        own: Shape = args[1]
        return own
    if origin is list:
        return _each(shape(args[0]))
    if origin is tuple:
        return row(*args)
    if origin is dict and args[0] is str:
        return _by_name(shape(args[1]))
    if hasattr(kind, "__required_keys__"):
        return record(*fields(kind))
    if len(args) == 2 and args[1] is type(None):
        return _maybe(shape(args[0]))
    raise TypeError(f"a document cannot have a field of type {kind}")


def _maybe(inner: Shape) -> Shape:
    return lambda value: None if value is None else inner(value)


def _each(inner: Shape) -> Shape:
    def read(value: object) -> list[Any]:
        if not isinstance(value, (list, tuple)):
            raise Misfit("is not a list")
        try:
            return [inner(one) for one in value]
        except Misfit as wrong:
            raise wrong.inside("[]") from wrong

    return read


def _by_name(inner: Shape) -> Shape:
    def read(value: object) -> dict[str, object]:
        if not isinstance(value, dict):
            raise Misfit("is not an object")
        return {text(key): inner(one) for key, one in value.items()}

    return read


Name = Annotated[str, name]
JsonObject = Annotated[dict[str, Any], record({})]
"""An object that nobody reads here."""
