"""What an exception or a line means: the signature that fits its words, its class and the frames that it came through.

In: exceptions, texts. Out: signatures, and where they match.
"""

from __future__ import annotations

import builtins
import functools
import itertools
import re
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from remote_agent.diagnose.signatures import SIGNATURES, Signature
from remote_agent.diagnose.signatures.distributed import CLASSES
from remote_agent.diagnose.signatures.signature import WRONG_SIZE
from remote_agent.text.shapes import KEPT_TEXTS

if TYPE_CHECKING:
    from remote_agent.diagnose.tracebacks import Trace

# These are failures between ranks: the same words in any other exception are about something else.
BETWEEN_RANKS = frozenset({"gloo_connection_reset", "rendezvous_timeout"})
OF_RANKS = re.compile(
    r"torch[./]distributed|\bc10d\b|\b[Gg]loo\b|[NR]CCL|ProcessGroup|process group|TCPStore"
    r"|\bDist[A-Z]\w*Error|Rendezvous|rendezvous|horovod|mpi4py|deepspeed/comm|\bMPI_"
)
_FRAMES_OF_RANKS = re.compile(r"torch/distributed/|/horovod/|/mpi4py/|deepspeed/comm")
# These words of the system count only in exceptions of Python and torch, and where another exception quotes those.
_OF_SYSTEM = frozenset({"permission_import_missing_module"})
_QUOTES_SYSTEM = re.compile(r"\[Errno \d+\]|\b[A-Z]\w*Error: ")
# In these functions, data that cannot be unpickled came from other ranks, not from a file.
_FROM_OTHERS = re.compile("_tensor_to_object|all_gather|broadcast_object")
_MEETING = re.compile("process_group|new_group|barrier|rendezvous|init_device_mesh")
# These packages belong to Python itself; 3.9 does not list them.
_OF_PYTHON: frozenset[str] = getattr(sys, "stdlib_module_names", frozenset())


@functools.lru_cache(KEPT_TEXTS)
def meaning_of(trace: Trace) -> Signature | None:
    """Return what an exception means; None: nothing is known about such an exception."""
    text = f"{trace.type}: {trace.message}"
    between = _is_between_ranks(trace)
    foreign = _is_foreign(trace.type) and _QUOTES_SYSTEM.search(trace.message) is None
    excluded = {*(() if between else BETWEEN_RANKS), *(_OF_SYSTEM if foreign else ())}
    match = best_match(text, [each for each in SIGNATURES if not each.weak and each.category not in excluded])
    if match is None:
        return next((each for each in CLASSES if each.regex.search(trace.type)), None)
    meaning = match[0]
    if meaning.category == "checkpoint_corrupt" and any(_FROM_OTHERS.search(frame.function) for frame in trace.frames):
        return next(each for each in SIGNATURES if each.title == WRONG_SIZE)
    if meaning.category == "rendezvous_timeout" and "ms, keys: " in trace.message and not _is_meeting(trace):
        return None
    return meaning


def _is_meeting(trace: Trace) -> bool:
    """Return whether ranks met there, by its words or frames; otherwise the script waited for a key of the store."""
    places = [trace.message, *(frame.function for frame in trace.frames)]
    return not trace.frames or any(map(_MEETING.search, places))


def _is_between_ranks(trace: Trace) -> bool:
    """Return whether an exception is about the communication of ranks: its class, its words, or a frame of it."""
    if OF_RANKS.search(f"{trace.type}: {trace.message}") or any(
        _FRAMES_OF_RANKS.search(each.file) for each in trace.frames
    ):
        return True
    # Python's own sockets raise an OSError; torch's C++ code raises this, with its place or only the system's words.
    return trace.type == "RuntimeError" and (
        trace.message.startswith("[")
        or any(each.category in BETWEEN_RANKS and each.regex.match(trace.message) for each in SIGNATURES)
    )


def _is_foreign(name: str) -> bool:
    """Return whether an exception's class is neither Python's nor torch's."""
    package, _, bare = name.rpartition(".")
    root = package.partition(".")[0]
    if not root:
        return not hasattr(builtins, bare)
    return root not in ("torch", "builtins") and root not in _OF_PYTHON


def best_match(
    text: str, signatures: Sequence[Signature] = (), counts: Callable[[Signature, int], bool] = lambda *_: True
) -> tuple[Signature, re.Match[str]] | None:
    """Return the match of the weightiest kind in the first line that has one, there of the first signature.

    Only places that count for a signature are considered.
    """
    matches = [
        (each, match)
        for each in signatures or SIGNATURES
        for match in itertools.islice((one for one in each.regex.finditer(text) if counts(each, one.start())), 1)
    ]
    return min(matches, key=lambda each: (each[0].order, text.rfind("\n", 0, each[1].start())), default=None)
