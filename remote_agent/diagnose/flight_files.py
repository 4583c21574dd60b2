"""The files of torch's flight recorder: JSON, or pickles that are read without running anything. Pure.

In: bytes. Out: the document; `Misfit` with one clear line for bytes that are none.

torch reads its pickles with `pickle.load`, which runs what the file says. This reader knows the opcodes of lists,
dicts, texts and numbers only, so there is nothing that it could run. It takes memory and time in proportion to the
file: no length that the file claims is believed, and a list that appears in several places counts each time.
"""

from __future__ import annotations

import pickletools
import re
import struct
from collections.abc import Callable
from typing import Any

from remote_agent.wire.gate import MAX_DEPTH, Misfit, parse

MAX_BYTES = 64 << 20
MAX_OBJECTS = 4_000_000
PICKLE = re.compile(rb"\x80[\x02-\x05]")
_JSON = re.compile(
    rb'\s*\{.*"(?:collective_seq_id|pg_config|pg_status|comm_lib_version|nccl_comm_state)"\s*:', re.DOTALL
)
# What makes an object of a class, or calls a function.
_RUNS = frozenset(
    ("GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4",
     "PERSID", "BINPERSID")
)  # fmt: skip
_NAMES = {ord(op.code): op.name for op in pickletools.opcodes}
_MAX_LONG = 16


def is_flight_record(head: bytes) -> bool:
    """Whether a file that begins so can be a flight record."""
    return PICKLE.match(head) is not None or _JSON.match(head) is not None


def parse_flight_record(data: bytes) -> Any:
    """Return the document of such a file; raises Misfit."""
    if len(data) > MAX_BYTES:
        raise Misfit(f"is longer than {MAX_BYTES >> 20} MB")
    return _Unpickler(data).load() if PICKLE.match(data) else parse(data)


class _Unpickler:
    """Reads the opcodes of plain data."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self._sizes: dict[int, tuple[int, int]] = {}
        """By the id of a list or dict: the objects that it holds, and how deep."""
        self._kept: list[Any] = []
        """Keeps those alive: an id must not be given twice."""
        self._shared: set[int] = set()
        """Those that are in more than one place: they no longer change, so none is inside itself."""

    def load(self) -> Any:
        """Return the value."""
        data, handlers = self._data, _HANDLERS
        try:
            while True:
                code = data[self._at]
                self._at += 1
                if code == _STOP:
                    return self._stack.pop()
                handler = handlers.get(code)
                if handler is None:
                    raise self._refused(code)
                handler(self)
        except (IndexError, struct.error) as error:
            raise Misfit("is cut off, or not a pickle") from error
        except TypeError as error:
            # A key that cannot be one.
            raise Misfit("is not plain data") from error

    def _refused(self, code: int) -> Misfit:
        name = _NAMES.get(code, "")
        if name in _RUNS:
            return Misfit(f"is not read: it would run code ({name})")
        return Misfit(f"is not a flight record: {name or 'unknown opcode'} at byte {self._at - 1}")

    def take(self, count: int) -> bytes:
        """Return the next bytes."""
        end = self._at + count
        if count < 0 or end > len(self._data):
            raise Misfit("is cut off, or not a pickle")
        piece = self._data[self._at : end]
        self._at = end
        return piece

    def number(self, layout: struct.Struct) -> Any:
        """Return the next number."""
        return layout.unpack(self.take(layout.size))[0]

    def push(self, value: Any) -> None:
        """Add a value to the stack."""
        self._stack.append(value)

    def text(self, length: int) -> None:
        """Add the next bytes as a text."""
        self._stack.append(self.take(length).decode("utf-8", "replace"))

    def mark(self) -> None:
        """Begin a list of items."""
        self._marks.append(len(self._stack))

    def items(self) -> list[Any]:
        """Return what was added since the last mark."""
        if not self._marks:
            raise Misfit("is cut off, or not a pickle")
        start = self._marks.pop()
        values = self._stack[start:]
        del self._stack[start:]
        return values

    def last(self, count: int) -> list[Any]:
        """Return the last values."""
        if count > len(self._stack) - (self._marks[-1] if self._marks else 0):
            raise Misfit("is cut off, or not a pickle")
        values = self._stack[-count:]
        del self._stack[-count:]
        return values

    def begin(self, holder: list[Any] | dict[Any, Any]) -> None:
        """Add an empty list or dict."""
        self._kept.append(holder)
        self._sizes[id(holder)] = (1, 1)
        self._stack.append(holder)

    def add(self, values: list[Any]) -> None:
        """Put items into the list that is last on the stack."""
        holder = self._stack[-1]
        if type(holder) is not list:
            raise Misfit("is not plain data")
        self._count(holder, values)
        holder.extend(values)

    def set(self, values: list[Any]) -> None:
        """Put keys and values, in turn, into the dict that is last on the stack."""
        holder = self._stack[-1]
        if type(holder) is not dict or len(values) % 2:
            raise Misfit("is not plain data")
        self._count(holder, values)
        holder.update(zip(values[::2], values[1::2]))

    def _count(self, holder: object, values: list[Any]) -> None:
        """Note what a list or dict is about to hold."""
        if id(holder) in self._shared:
            raise Misfit("is not plain data")
        objects, depth = self._sizes[id(holder)]
        for one in values:
            inner = self._sizes[id(one)] if type(one) in (list, dict) else None
            objects += 1 if inner is None else inner[0]
            depth = depth if inner is None else max(depth, inner[1] + 1)
        if objects > MAX_OBJECTS:
            raise Misfit(f"has more than {MAX_OBJECTS:,} values")
        if depth > MAX_DEPTH:
            raise Misfit("is nested too deeply")
        self._sizes[id(holder)] = objects, depth

    def tuple(self, values: list[Any]) -> None:
        """Add a tuple, as a list."""
        self.begin([])
        self.add(values)

    def put(self, number: int) -> None:
        """Remember the last value."""
        self._memo[number] = self._stack[-1]

    def get(self, number: int) -> None:
        """Add a value that was remembered."""
        if number not in self._memo:
            raise Misfit("is cut off, or not a pickle")
        value = self._memo[number]
        if type(value) in (list, dict):
            self._shared.add(id(value))
        self._stack.append(value)

    def memoize(self) -> None:
        """Remember the last value under the next number."""
        self.put(len(self._memo))

    def long(self) -> None:
        """Add a number of some bytes."""
        length = self.take(1)[0]
        if length > _MAX_LONG:
            raise Misfit("is not a flight record: a number is too large")
        self.push(int.from_bytes(self.take(length), "little", signed=True))


_U1, _U2, _I4, _U4, _U8, _F8 = (struct.Struct(layout) for layout in ("<B", "<H", "<i", "<I", "<Q", ">d"))
_STOP = ord(".")
_HANDLERS: dict[int, Callable[[_Unpickler], None]] = {
    0x80: lambda the: _no_value(the.take(1)),
    0x95: lambda the: _no_value(the.take(8)),
    ord("}"): lambda the: the.begin({}),
    ord("]"): lambda the: the.begin([]),
    ord(")"): lambda the: the.tuple([]),
    ord("("): _Unpickler.mark,
    ord("t"): lambda the: the.tuple(the.items()),
    0x85: lambda the: the.tuple(the.last(1)),
    0x86: lambda the: the.tuple(the.last(2)),
    0x87: lambda the: the.tuple(the.last(3)),
    ord("a"): lambda the: the.add(the.last(1)),
    ord("e"): lambda the: the.add(the.items()),
    ord("s"): lambda the: the.set(the.last(2)),
    ord("u"): lambda the: the.set(the.items()),
    ord("N"): lambda the: the.push(None),
    0x88: lambda the: the.push(True),
    0x89: lambda the: the.push(False),
    ord("J"): lambda the: the.push(the.number(_I4)),
    ord("K"): lambda the: the.push(the.number(_U1)),
    ord("M"): lambda the: the.push(the.number(_U2)),
    0x8A: _Unpickler.long,
    ord("G"): lambda the: the.push(the.number(_F8)),
    ord("X"): lambda the: the.text(the.number(_U4)),
    0x8C: lambda the: the.text(the.number(_U1)),
    0x8D: lambda the: the.text(the.number(_U8)),
    ord("q"): lambda the: the.put(the.number(_U1)),
    ord("r"): lambda the: the.put(the.number(_U4)),
    0x94: _Unpickler.memoize,
    ord("h"): lambda the: the.get(the.number(_U1)),
    ord("j"): lambda the: the.get(the.number(_U4)),
}


def _no_value(_bytes: bytes) -> None:
    """The protocol, and the length of a frame: nothing depends on them."""
