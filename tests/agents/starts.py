"""The same script started cold and warm by one engine, and what it shows compared field by field.

In: scripts that call `held.wait()` where they may stop for a while. Out: what each start showed; the differences.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.agents.engine_process import DEADLINE_S, SCRIPTS, SharedEngine

TREE = SCRIPTS / "starts"
RANKS = 2
# What no two starts have in common: numbers of pipes and processes, addresses, what is new in each generation.
_OWN = (
    (re.compile(r"^(MASTER_PORT|TORCHELASTIC_RESTART_COUNT)=\d+$"), r"\1=N"),
    (re.compile(r"generation_\d+"), "generation_G"),
    (re.compile(r"\.run-\w+"), ".run-R"),
    (re.compile(r"(pipe|socket):\[\d+\]"), r"\1:[N]"),
    (re.compile(r"( at|thread) 0x[0-9a-f]+"), r"\1 0xA"),
)
# By field, why it may differ between a cold and a warm start.
ALLOWED: Mapping[str, str] = {
    r"fields\.freed\.0": "gc.freeze before the fork keeps the pages of the loaded modules shared",
    r"fields\.kernels_environ": "/proc/PID/environ is the memory of the process that was started, not of its variables",
    r"fields\.(modules\w*|first|imported)": "what is loaded early is in sys.modules from the start",
    r"fields\.imports\.[\w.]+\.(new|atexit)": "what an import does besides has been done",
    r"fields\.settings\.environ": "and so are the variables that libraries set",
    r"fields\.(interpreter\.atexit|again\.asked|importer_cache)": "as above",
}


@dataclasses.dataclass
class Shown:
    """What a script showed in one generation, by rank, and how it was started."""

    exits: list[dict[str, Any]]
    out: list[str]
    err: list[str]
    cold: str
    """Why the engine started it cold; empty: it was warm."""
    generation: int
    port: int
    """Of the generation's store."""

    @property
    def documents(self) -> list[dict[str, Any]]:
        """The JSON that each rank printed."""
        return [json.loads(text) for text in self.out]

    def fields(self, rank: int) -> dict[str, Any]:
        """Return all that is compared of a rank, by dotted name."""
        ended = self.exits[rank]
        found: dict[str, Any] = {"code": ended["code"], "signal": ended["signal"], "err": self.err[rank]}
        error = ended["error"] or {}
        found.update(message=error.get("message"), callstack=error.get("callstack"))
        try:
            document = {"fields": json.loads(self.out[rank])["fields"]}
        except (ValueError, KeyError, TypeError):
            document = {"out": self.out[rank]}
        found.update(_flat(document))
        return {name: _plain(value) for name, value in found.items()}


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        parts = list(value.items())
    elif isinstance(value, list) and value and not all(isinstance(one, str) for one in value):
        parts = list(enumerate(value))
    else:
        yield name, value
        return
    for key, part in parts:
        yield from _flat(part, f"{name}.{key}" if name else str(key))


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        for pattern, text in _OWN:
            value = pattern.sub(text, value)
    elif isinstance(value, list):
        value = [_plain(one) for one in value]
    return value


def differences(one: Shown, other: Shown, allowed: Mapping[str, str] = ALLOWED) -> list[str]:
    """Return in which fields two starts differ, as `rank 0 fields.umask: 18, 0`."""
    lines = []
    for rank in range(len(one.exits)):
        before, after = one.fields(rank), other.fields(rank)
        pairs = ((name, before.get(name, "-"), after.get(name, "-")) for name in {**before, **after})
        lines += [
            f"rank {rank} {name}: {_apart(old, new)}"
            for name, old, new in pairs
            if old != new and not any(re.fullmatch(pattern, name) for pattern in allowed)
        ]
    return lines


def _apart(before: Any, after: Any) -> str:
    """Return two values; of long lists and texts what only one of them has."""
    if isinstance(before, str) and isinstance(after, str):
        before, after = before.splitlines(), after.splitlines()
    if isinstance(before, list) and isinstance(after, list) and sorted(before) != sorted(after):
        before, after = ([one for one in before if one not in after], [one for one in after if one not in before])
    elif isinstance(before, list) and isinstance(after, list):
        at = next(place for place, (old, new) in enumerate(zip(before, after, strict=True)) if old != new)
        before, after = f"order from {at} on: {before[at : at + 5]}", after[at : at + 5]
    return f"{str(before)[:600]} | {str(after)[:600]}"


class Starts:
    """One engine and a work tree, and generations of it one after the other."""

    def __init__(self, shared: SharedEngine, tree: Path) -> None:
        self._shared = shared
        self._tree = Path(shutil.copytree(TREE, tree, ignore=shutil.ignore_patterns("__pycache__")))
        self._warm: tuple[Any, ...] = ()
        """What the node is warm for."""

    @property
    def tree(self) -> Path:
        """The work tree, and working directory."""
        return self._tree

    def cold(self, script: str, *args: str, **changes: Any) -> Shown:
        """Run a script to its end, started as it always was."""
        return self._shared.do(self._run(script, args, changes))

    def warm(self, script: str, *args: str, **changes: Any) -> Shown:
        """Run a script to its end on a node that is warm for it; where it is not, it is held until the node is."""
        changes = {"standby": str(self._shared.root / "standby"), **changes}
        wanted = (script, args, changes)
        if self._warm != wanted:
            self._shared.do(self._warm_up(script, args, changes))
            self._warm = wanted
        return self._shared.do(self._run(script, args, changes))

    async def _go(self, script: str, args: tuple[str, ...], changes: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        generation = self._shared.generation()
        given = {"local_world_size": RANKS, "world_size": RANKS, "cwd": str(self._tree), **changes}
        engine = self._shared.engine
        port = (await engine.call("prepare", generation=generation, host="127.0.0.1"))["port"]
        # What is new in each generation.
        new = {"generation": generation, "restart_count": generation, "master_port": port}
        return generation, {"port": port, **await engine.go(script, *args, **{**new, **given})}

    async def _run(self, script: str, args: tuple[str, ...], changes: dict[str, Any]) -> Shown:
        generation, answer = await self._go(script, args, changes)
        ranks = int(changes.get("local_world_size", RANKS))
        try:
            exits = await self._shared.engine.wait_exits(generation, ranks)
        finally:
            await self._shared.engine.call("stop", generation=generation, grace_s=0.0, collect=False)
        directories = [self._shared.rank_dir(generation, rank) for rank in range(ranks)]
        out = [(directory / "stdout.log").read_text() for directory in directories]
        err = [(directory / "stderr.log").read_text() for directory in directories]
        return Shown(exits, out, err, answer["cold"], generation, answer["port"])

    async def _warm_up(self, script: str, args: tuple[str, ...], changes: dict[str, Any]) -> None:
        engine, hold = self._shared.engine, self._tree / "hold"
        hold.touch()
        try:
            generation, _ = await self._go(script, args, changes)
            held = [self._tree / f"held-{rank}" for rank in range(int(changes.get("local_world_size", RANKS)))]
            await asyncio.wait_for(_all_there(held), DEADLINE_S)
            before = len(engine.standby)
            await engine.call("standby", generation=generation)
            await engine.wait_standby(before)
        finally:
            hold.unlink()
        await engine.call("stop", generation=generation, grace_s=0.0, collect=False)
        for path in held:
            path.unlink()


async def _all_there(paths: list[Path]) -> None:
    while not all(path.exists() for path in paths):
        await asyncio.sleep(0.02)
