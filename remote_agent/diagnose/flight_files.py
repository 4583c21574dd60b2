"""The files of torch's flight recorder: JSON, or pickles that are read without running anything. Pure.

In: bytes. Out: the document; `Misfit` with one clear line for bytes that are none.

torch reads its pickles with `pickle.load`, which runs what the file says. This reader is Python's own one in Python,
with the opcodes of lists, dicts, texts and numbers only, so there is nothing that it could run. It takes memory and
time in proportion to the file: it believes no length that the file claims, and a list that appears in several places
counts each time.
"""

from __future__ import annotations

import io
import pickle
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
_PLAIN = (
    "PROTO", "FRAME", "STOP", "MARK", "EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT", "SETITEM", "SETITEMS", "NONE",
    "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINPUT", "LONG_BINPUT", "MEMOIZE",
    "BINGET", "LONG_BINGET",
)  # fmt: skip
# These opcodes make an object of a class, or call a function.
_RUNS = frozenset(
    ("GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4",
     "PERSID", "BINPERSID")
)  # fmt: skip
_NAMES = {ord(op.code): op.name for op in pickletools.opcodes}
_CODES = {name: code for code, name in _NAMES.items()}


def is_flight_record(head: bytes) -> bool:
    """Return whether a file that begins so can be a flight record."""
    return PICKLE.match(head) is not None or _JSON.match(head) is not None


def parse_flight_record(data: bytes) -> Any:
    """Return the document of such a file; raises Misfit."""
    if len(data) > MAX_BYTES:
        raise Misfit(f"is longer than {MAX_BYTES >> 20} MB")
    return _unpickled(data) if PICKLE.match(data) else parse(data)


def _unpickled(data: bytes) -> Any:
    try:
        document = _PlainUnpickler(io.BytesIO(data)).load()
    except Misfit:
        raise
    except (AttributeError, TypeError) as error:
        # The pickle adds items to something that is no list, or has an invalid key.
        raise Misfit("is not plain data") from error
    except (EOFError, LookupError, OverflowError, ValueError, pickle.UnpicklingError, struct.error) as error:
        raise Misfit("is cut off, or not a pickle") from error
    _check_size(document)
    return document


def _check_size(document: Any) -> None:
    """Raise Misfit for too many values, wherever they are in the file, and for what is inside itself."""
    values, objects = [document], 0
    for _depth in range(MAX_DEPTH + 1):
        holders = [value for value in values if isinstance(value, (list, dict))]
        objects += sum(map(len, holders))
        if objects > MAX_OBJECTS:
            raise Misfit(f"has more than {MAX_OBJECTS:,} values")
        if not holders:
            return
        values = [value for one in holders for value in (one.values() if isinstance(one, dict) else one)]
    raise Misfit("is nested too deeply")


class _Opcodes(dict[int, Callable[[Any], None]]):
    """What each opcode does; one that is not here is refused."""

    def __missing__(self, code: int) -> Callable[[Any], None]:
        name = _NAMES.get(code, "unknown opcode")
        if name in _RUNS:
            raise Misfit(f"is not read: it would run code ({name})")
        raise Misfit(f"is not a flight record: {name}")


def _text(layout: str) -> Callable[[Any], None]:
    length = struct.Struct(layout)

    def load(unpickler: Any) -> None:
        size = length.unpack(unpickler.read(length.size))[0]
        unpickler.append(unpickler.read(size).decode("utf-8", "replace"))

    return load


# A tuple is read as a list: the hash of a deep tuple, which could be a key, would end the process.
def _tuple(size: int) -> Callable[[Any], None]:
    def load(unpickler: Any) -> None:
        unpickler.append([unpickler.stack.pop() for _ in range(size)][::-1])

    return load


def _long_tuple(unpickler: Any) -> None:
    unpickler.append(unpickler.pop_mark())


class _PlainUnpickler(pickle._Unpickler):
    """Reads the opcodes of plain data."""

    dispatch = _Opcodes(
        {
            **{_CODES[name]: pickle._Unpickler.dispatch[_CODES[name]] for name in _PLAIN},
            _CODES["SHORT_BINUNICODE"]: _text("<B"),
            _CODES["BINUNICODE"]: _text("<I"),
            _CODES["BINUNICODE8"]: _text("<Q"),
            _CODES["EMPTY_TUPLE"]: _tuple(0),
            _CODES["TUPLE1"]: _tuple(1),
            _CODES["TUPLE2"]: _tuple(2),
            _CODES["TUPLE3"]: _tuple(3),
            _CODES["TUPLE"]: _long_tuple,
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        """Refuse it: plain data needs no class."""
        raise Misfit(f"is not read: it would run code ({module}.{name})")
