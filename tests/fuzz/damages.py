"""How inputs are damaged: bytes as a disk or a wire does it, lines, and values of JSON as another program does it.

In: a source of randomness, a real input. Out: a damaged one.
"""

from __future__ import annotations

import json
import random
import re
from typing import Any

from tests.fuzz.driver import Damage

# Never larger than this: the limits of the driver are for inputs of a usual size.
MAX_BYTES = 256 * 1024
NUMBER = re.compile(rb"[0-9]+")
ODD_BYTES = (
    b"\0", b"\xff", b"\x1b[2J", b"\r", b"\n", b"\t", b"\xe2\x80\xae",
    b"'", b'"', b"\\", b"%", b"9" * 30, b"-", b"[", b"]",
)  # fmt: skip
ODD_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 7, 2**31, 2**63, 10**30, -(10**30), 0.5, 1e308, float("inf"), float("nan"), "", "x",
    "0", "9" * 5000, "\ud800", "\x1b[2J\u202e", "2026-11-20T10:00:00Z", "0001-01-01T00:00:00.000Z", "x" * 3000, [], {},
    [[]], [None], [0, 1, 2], {"": None}, {"x": []}, ["x"] * 50,
)  # fmt: skip


def flip(dice: random.Random, data: bytes) -> bytes:
    """Change one bit."""
    at = dice.randrange(max(1, len(data)))
    return data[:at] + bytes(byte ^ 1 << dice.randrange(8) for byte in data[at : at + 1]) + data[at + 1 :]


def cut(dice: random.Random, data: bytes) -> bytes:
    """Leave out the end, or a part."""
    first, last = sorted(dice.randrange(len(data) + 1) for _ in range(2))
    return data[:first] if dice.random() < 0.3 else data[:first] + data[last:]


def repeat(dice: random.Random, data: bytes) -> bytes:
    """Repeat a part, up to a thousand times."""
    first = dice.randrange(len(data) + 1)
    part = data[first : first + dice.choice((1, 3, 20, 200))]
    return data[:first] + part * dice.choice((2, 3, 50, 1000)) + data[first:]


def insert(dice: random.Random, data: bytes) -> bytes:
    """Insert odd bytes."""
    at = dice.randrange(len(data) + 1)
    return data[:at] + dice.choice(ODD_BYTES) * dice.choice((1, 1, 2, 40)) + data[at:]


def lines(dice: random.Random, data: bytes) -> bytes:
    """Leave out, repeat, exchange or join lines."""
    every = data.splitlines(keepends=True) or [b""]
    one, other = dice.randrange(len(every)), dice.randrange(len(every))
    how = dice.randrange(4)
    if how == 0:
        del every[one]
    elif how == 1:
        every.insert(other, every[one])
    elif how == 2:
        every[one], every[other] = every[other], every[one]
    else:
        every[one] = every[one].rstrip(b"\n")
    return b"".join(every)


def number(dice: random.Random, data: bytes) -> bytes:
    """Put another number in the place of one."""
    numbers = list(NUMBER.finditer(data))
    if not numbers:
        return data
    one = dice.choice(numbers)
    odd = dice.choice((b"0", b"-1", b"1", b"7", b"00012", b"4294967296", b"9" * 19, b"9" * 400, b"9" * 5000, b"1e400"))
    return data[: one.start()] + odd + data[one.end() :]


def of_bytes(dice: random.Random, data: bytes) -> bytes:
    """Damage bytes and lines, once or a few times."""
    for _ in range(dice.choice((1, 1, 1, 2, 5))):
        data = dice.choice((flip, cut, repeat, insert, number, lines, lines))(dice, data)[:MAX_BYTES]
    return data


TAGS = (
    "[rank{rank}]: ", "[default{rank}]:", "n{node}:{rank}| ", "{rank}: ", "[1,{rank}]<stderr>:", "[rank: {rank}] ",
    "[Rank {rank}] ", "node-{node}: ", "srun: error: n{node}: task {rank}: ", "slurmstepd: error: ",
    "[2025-02-01 07:03:55 TP{rank}] ", "[rank={rank}] || ", "n{node}:41{rank}:41{rank} [{rank}] NCCL INFO ",
    "2026-11-20T10:00:0{rank}.5Z stderr F ", '{{"rank": {rank}, "msg": "x"}}',
)  # fmt: skip


def tag(dice: random.Random, data: bytes) -> bytes:
    """Put the tag of a rank, a node or a launcher before some lines."""
    tags = dice.sample(TAGS, dice.choice((1, 1, 3)))
    share, ranks = dice.choice((0.1, 1.0)), dice.choice((1, 2, 8))

    def mark() -> bytes:
        if dice.random() > share:
            return b""
        return dice.choice(tags).format(rank=dice.randrange(ranks), node=dice.randrange(3)).encode()

    return b"".join(mark() + line for line in data.splitlines(keepends=True))


def mixed(others: list[bytes]) -> Damage:
    """Damage bytes and lines, and put lines of other inputs between them."""
    pool = [line for data in others for line in data.splitlines(keepends=True)]

    def damage(dice: random.Random, data: bytes) -> bytes:
        for _ in range(dice.choice((0, 1, 3))):
            every = data.splitlines(keepends=True)
            at = dice.randrange(len(every) + 1)
            every[at:at] = dice.choices(pool, k=dice.choice((1, 4)))
            data = b"".join(every)
        if dice.random() < 0.4:
            data = tag(dice, data)
        return data[:MAX_BYTES] if dice.random() < 0.3 else of_bytes(dice, data)

    return damage


def value(dice: random.Random, document: Any) -> Any:
    """Return a document in which one value, somewhere, is another, is missing or is there twice."""
    if isinstance(document, dict) and document and dice.random() < 0.9:
        key = dice.choice(list(document))
        how = dice.random()
        if how < 0.1:
            return {name: one for name, one in document.items() if name != key}
        if how < 0.15:
            return {**document, dice.choice(("x", "", "\ud800", "node", "rank")): document[key]}
        return {**document, key: value(dice, document[key])}
    if isinstance(document, list) and document and dice.random() < 0.9:
        at = dice.randrange(len(document))
        how = dice.random()
        if how < 0.1:
            return document[:at] + document[at + 1 :]
        if how < 0.2:
            return document + [document[at]] * dice.choice((1, 3, 100))
        return [*document[:at], value(dice, document[at]), *document[at + 1 :]]
    if isinstance(document, int) and dice.random() < 0.3:
        return document + dice.choice((-1, 1, 1000, 10**9))
    if dice.random() < 0.02:
        return nested(dice.choice((50, 5000)))
    return dice.choice(ODD_VALUES)


def nested(depth: int) -> Any:
    """Return lists in lists."""
    document: Any = []
    for _ in range(depth):
        document = [document]
    return document


def of_json(dice: random.Random, data: bytes) -> bytes:
    """Damage one JSON document: mostly its values, sometimes its bytes."""
    if dice.random() < 0.2:
        return of_bytes(dice, data)
    document = json.loads(data)
    for _ in range(dice.choice((1, 1, 2, 4))):
        document = value(dice, document)
    return dumped(document)


def dumped(document: Any) -> bytes:
    """Return a document as JSON; what is nested too deeply for Python is written by hand."""
    try:
        return json.dumps(document).encode()
    except RecursionError:
        return b"[" * 5000 + b"]" * 5000


def of_json_lines(dice: random.Random, data: bytes) -> bytes:
    """Damage a file with a JSON document in each line: values, lines, sometimes bytes."""
    for _ in range(dice.choice((1, 1, 1, 3))):
        every = data.splitlines(keepends=True)
        if not every or dice.random() < 0.25:
            data = dice.choice((lines, of_bytes))(dice, data)
            continue
        at = dice.randrange(len(every))
        try:
            every[at] = dumped(value(dice, json.loads(every[at]))) + b"\n"
        except (ValueError, RecursionError):
            every[at] = of_bytes(dice, every[at])
        data = b"".join(every)
    return data[:MAX_BYTES]
