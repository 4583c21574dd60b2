"""What is known of the torch that is installed here, without importing it in this process.

In: the state of the installation's files, a file of what was seen before. Out: torch's facts, or why it cannot be
imported.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.util
import json
import logging
import os
import sys
import sysconfig
from collections.abc import Awaitable, Callable
from pathlib import Path

from remote_agent.base.files import atomic_write, read_json
from remote_agent.base.proc import last_line, own_command, run_program
from remote_agent.vitals.gpus.gpu import SELECTORS
from remote_agent.wire.answers import TorchFacts
from remote_agent.wire.gate import Misfit, parse, reader

log = logging.getLogger(__name__)

# A cold file system may need this long to import torch.
IMPORT_S = 300.0
# A node remembers this many installations.
MAX_KNOWN = 16
# If such a name appears in /dev, torch sees something else.
DEVICES = ("nvidia", "kfd", "dri", "accel")
# These variables change what torch is, or what it sees.
VARIABLES = ("PYTHONPATH", "LD_LIBRARY_PATH", "LD_PRELOAD", *SELECTORS)
_read_facts = reader(TorchFacts, "torch", "python", "gpus", "devices", "cuda", "nccl", "leaked")
Ask = Callable[[], Awaitable["TorchFacts"]]


async def ask(
    command: list[str] | None = None, variables: dict[str, str] | None = None, timeout_s: float = IMPORT_S
) -> TorchFacts:
    """Return torch's facts, or only why it cannot be imported: a process imports it and ends.

    `command`, `variables`: of that process; None: as this process runs.
    """
    try:
        status, out, err = await run_program(command or own_command("probe", "facts"), timeout_s, variables)
    except asyncio.TimeoutError:
        return {"error": f"torch did not import within {timeout_s:g} s"}
    if status == 0:
        with contextlib.suppress(ValueError, IndexError):
            return _read_facts(parse(out.splitlines()[-1]))
    return {"error": last_line(err) or f"the probe exited with code {status}"}


class Installation:
    """The facts of one installation; those that were seen before count while its files are as they were."""

    def __init__(self, known: str, ask_torch: Ask = ask) -> None:
        """`known`: the file with what was seen before; empty: there is none."""
        self._path = Path(known) if known else None
        self._ask = ask_torch
        self._key = stamp() if known else ""

    def remembered(self) -> TorchFacts | None:
        """Return the facts as they were seen last; None if this installation is new here."""
        if self._path is None or not self._key:
            return None
        try:
            return _read_facts(read_json(self._path).get(self._key))
        except Misfit:
            return None

    async def facts(self, nproc: str) -> TorchFacts:
        """Return the facts, or only an error; `nproc`: a number, or a word that `devices` has and torch must count."""
        facts = self.remembered()
        if facts is not None and (nproc.isdigit() or facts.get("only_cpu")):
            return facts
        facts = await self._ask()
        if "error" not in facts and self._path is not None and self._key:
            known = {**read_json(self._path), self._key: facts}
            newest = dict(list(known.items())[-MAX_KNOWN:])
            try:
                atomic_write(self._path, json.dumps(newest).encode())
            except OSError as error:
                log.warning("cannot remember what torch is installed: %s", error)
        return facts


def stamp() -> str:
    """Return a name for the torch that this interpreter would import, as it is now; empty if that is unknown."""
    try:
        spec = importlib.util.find_spec("torch")
    except (ImportError, ValueError):
        return ""
    if spec is None or not spec.origin:
        return ""
    folder = os.path.dirname(spec.origin)
    places = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), os.path.dirname(folder)}
    files = [spec.origin, os.path.join(folder, "version.py"), os.path.join(folder, "lib"), *sorted(places)]
    seen = [(path, *_state(path)) for path in files]
    devices = sorted(name for name in os.listdir("/dev") if name.startswith(DEVICES))
    more = [sys.executable, sys.version, len(os.sched_getaffinity(0)), [os.environ.get(name) for name in VARIABLES]]
    return hashlib.sha256(json.dumps([seen, devices, more]).encode()).hexdigest()[:32]


def _state(path: str) -> tuple[int, int]:
    try:
        status = os.stat(path)
    except OSError:
        return -1, -1
    return status.st_size, status.st_mtime_ns
