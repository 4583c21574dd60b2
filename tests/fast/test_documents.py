"""What the gate lets through has the type that mypy believes: both read one declaration, field by field."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

import pytest

from remote_agent.wire import documents
from remote_agent.wire.gate import Misfit, record, shape
from supervisor.recording import file_format
from supervisor.ssh import answers

KINDS = {
    name: kind
    for module in (documents, answers, file_format)
    for name, kind in vars(module).items()
    if is_typeddict(kind) and kind.__module__ == module.__name__
}
VALUES: tuple[Any, ...] = (
    *(None, True, 0, 1, -9, 1.5, "x", "2026-11-20T10:00:00.123Z", "nan", [], {}, ["x"], [0, 0], ["x", 0], [0, 0, None]),
    *([[0, 0]], [["x", 0], ["x", 0]], {"x": 0}, {"x": "x"}, {"x": None}, 2**70, "x" * 300, float("nan")),
)


def _is(value: Any, kind: Any) -> bool:
    """Whether a value has a type, as far as a type says it: the test's own reading of the declaration."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _is(value, args[0])
    if kind is Any or origin is Literal:
        return kind is Any or value in args
    if origin in (Union, types.UnionType):
        return any(_is(value, one) for one in args)
    if origin is list:
        return isinstance(value, list) and all(_is(one, args[0]) for one in value)
    if origin is dict:
        return isinstance(value, dict) and all(_is(key, str) and _is(one, args[1]) for key, one in value.items())
    if is_typeddict(kind):
        fields = get_type_hints(kind, include_extras=True)
        return isinstance(value, dict) and all(_is(one, fields[key]) for key, one in value.items() if key in fields)
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _examples(kind: Any) -> Iterator[Any]:
    """Yield values that the gate lets through as this type."""
    if is_typeddict(kind):
        yield _document(kind)
    if get_origin(kind) is list:
        yield [one for one in [next(_examples(get_args(kind)[0]), None)] if one is not None]
    for value in VALUES:
        if not _read(kind, value)[1]:
            yield value


def _document(kind: Any) -> dict[str, Any]:
    return {key: next(_examples(field)) for key, field in get_type_hints(kind, include_extras=True).items()}


def _read(kind: Any, value: Any) -> tuple[Any, str]:
    """Return what the gate returns, or why it refuses the value."""
    try:
        return shape(kind)(value), ""
    except Misfit as wrong:
        return None, str(wrong)


@pytest.mark.parametrize("name", KINDS)
def test_what_the_gate_lets_through_has_the_declared_type(name: str) -> None:
    kind = KINDS[name]
    whole = _document(kind)
    assert shape(kind)(whole) == whole
    for key, field in get_type_hints(kind, include_extras=True).items():
        rest = {other: value for other, value in whole.items() if other != key}
        if key in kind.__required_keys__:
            with pytest.raises(Misfit, match=f"^{key} is missing$"):
                shape(kind)(rest)
        else:
            assert shape(kind)(rest) == rest
        for value in (*VALUES, *_examples(field)):
            read, refused = _read(kind, {**rest, key: value})
            assert refused.startswith(key) if refused else _is(read[key], field), (key, value)


def test_a_declaration_that_the_gate_cannot_check_is_refused() -> None:
    for kind in (object, set, int | str, dict[int, str], tuple[int, str], Literal["a"]):
        with pytest.raises(TypeError, match="cannot have a field of type"):
            record({"x": kind})({"x": 1})
