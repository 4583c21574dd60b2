"""Which files under a path are logs of ranks, and of which rank, generation and node.

In: paths. Out: RunFile objects, in order; the reasons why logs cannot be read. Known: the job directories of supervisor
and torchrun, `rank_<R>.<stream>.log`, and any other text file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from remote_agent.diagnose.flight_files import is_flight_record
from remote_agent.text.names import GENERATION_FOLDER, RANK_FOLDER
from remote_agent.wire.documents import MAX_RANKS
from supervisor.errors import UsageError

# A later start of a rank sets an old directory aside under a name with this end.
_OLD = re.compile(r"\.old\d+\Z")
_ATTEMPT = re.compile(r"attempt_(\d+)\Z")
_RANK_FILE = re.compile(r"rank_?(\d+)[._-](stdout|stderr)\.(?:log|txt)\Z")
# torch names its flight records nccl_trace_rank_3; people add a suffix.
_FLIGHT = re.compile(r"(?:.*\D)?(\d{1,6})(?:\.(?:json|pkl|pickle|dump))?\Z")
_STREAM = re.compile(r"(stdout|stderr|nccl)\.log\Z")
# These files next to the logs are written by us or by torch, but are no logs.
_NOT_LOGS = (".idx", ".json", ".jsonl", ".pt", ".pyc", ".pid", ".sock", ".so", ".bin", ".npz")
# In our job directory: the kept snapshots, under names without a suffix, and keys.
_OURS = ("snapshots", "tls")
_PACKED = (".gz", ".xz", ".bz2", ".zst", ".zip")
_LOGS = (".log", ".txt", ".out", ".err")
_SNIFF = 8192
# The first bytes of logs that need another program to be read.
_FORMATS = (
    (b"\x1f\x8b", "compressed: unpack it first (gunzip)"),
    (b"\xfd7zXZ\0", "compressed: unpack it first (unxz)"),
    (b"BZh", "compressed: unpack it first (bunzip2)"),
    (b"\x28\xb5\x2f\xfd", "compressed: unpack it first (unzstd)"),
    (b"PK\x03\x04", "compressed: unpack it first (unzip)"),
    (b"\xff\xfe", "UTF-16: convert it first (iconv -f UTF-16 -t UTF-8)"),
    (b"\xfe\xff", "UTF-16: convert it first (iconv -f UTF-16 -t UTF-8)"),
)
BINARY = "not a text file"
# A crash of the machine leaves such a hole in a text, and so does a log that is copied and truncated.
_HOLE = re.compile(rb"\0{16,}")
_FEW = 3
LeaveOut = Callable[[str], None]


@dataclass(frozen=True)
class RunFile:
    """One file of a run. rank None: its lines name the ranks, or it is a launcher's."""

    path: Path
    group: str = ""
    """Equal for files of the same run: its job directory or torchrun log directory; empty for loose files."""
    generation: int = 0
    rank: int | None = None
    stream: str = "stderr"
    """stdout, stderr, nccl, error (error.json), journal (events.jsonl) or flight (a flight record of torch)."""


def find(paths: Sequence[Path], leave_out: LeaveOut = lambda _why: None) -> list[RunFile]:
    """Return the files under these paths; raises UsageError for a path that does not exist or has no log.

    `leave_out` is called for each log in a directory that cannot be read, with the reason.
    """
    files: list[RunFile] = []
    for path in paths:
        if not path.exists():
            raise UsageError(f"{path}: no such file or directory")
        if not path.is_dir() and not path.is_file():
            raise UsageError(f"{path}: neither a file nor a directory")
        left: list[str] = []
        here = list(_under(path, left.append)) if path.is_dir() else [_named(path)]
        if not here:
            hint = few(left) or "name a directory with logs, or the files themselves"
            raise UsageError(f"{path}: no log file found", hint)
        for why in left:
            leave_out(why)
        files += here
    return _without_local_ranks(_with_nodes_joined(list(dict.fromkeys(files))))


def _under(folder: Path, leave_out: LeaveOut) -> Iterator[RunFile]:
    def unlisted(error: OSError) -> None:
        leave_out(f"{error.filename}: {error.strerror}")

    for base, folders, names in os.walk(folder, onerror=unlisted):
        others = ("__pycache__", *(_OURS if "events.jsonl" in names else ()))
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in others)
        for name in sorted(names):
            path = Path(base, name)
            # Reading a pipe would block; a broken link has no target.
            file = (_flight(path) or _classify(path)) if path.is_file() else None
            if file is None:
                continue
            why = _unfit(file)
            if not why:
                yield file
            elif why != BINARY:
                leave_out(f"{path}: {why}")


def _named(path: Path) -> RunFile:
    """Return a file that the user named, whatever its name is; raises UsageError."""
    file = _flight(path) or _classify(path) or RunFile(path, stream="stdout")
    why = _unfit(file)
    if why:
        raise UsageError(f"{path}: {why}")
    return file


def _flight(path: Path) -> RunFile | None:
    """Return a flight record of the rank that its name ends with."""
    named = _FLIGHT.fullmatch(path.name)
    if named is None or path.name.startswith(".") or int(named[1]) >= MAX_RANKS:
        return None
    with contextlib.suppress(OSError), path.open("rb") as file:
        if is_flight_record(file.read(_SNIFF)):
            return RunFile(path, rank=int(named[1]), stream="flight")
    return None


def few(texts: Sequence[str]) -> str:
    """Return the first texts in one line, and how many more there are."""
    more = len(texts) - _FEW
    return "; ".join([*texts[:_FEW], *([f"and {more} more"] if more > 0 else [])])


def _classify(path: Path) -> RunFile | None:
    """Return what a file is, by its name."""
    if path.name == "events.jsonl":
        return RunFile(path, group=str(path.parent), stream="journal")
    place = _place(path)
    if place is not None:
        return place
    named = _RANK_FILE.fullmatch(path.name)
    if named is not None:
        return RunFile(path, rank=int(named[1]), stream=named[2])
    is_packed = path.suffix in _PACKED and Path(path.stem).suffix not in _LOGS
    if path.name.startswith(".") or path.suffix in _NOT_LOGS or is_packed:
        return None
    generation = GENERATION_FOLDER.fullmatch(path.parent.name)
    if generation is not None:
        return RunFile(path, str(path.parent.parent), int(generation[1]), stream="stdout")
    # Our agent's own log is neither a rank's nor a launcher's.
    is_ours = path.name == "agent.log" and (path.parent / "events.jsonl").exists()
    return None if is_ours else RunFile(path, stream="stdout")


def _place(path: Path) -> RunFile | None:
    """Return a file of a rank's directory, ours or torchrun's."""
    stream = "error" if path.name == "error.json" else None
    matched = _STREAM.fullmatch(path.name)
    stream = matched[1] if matched is not None else stream
    if stream is None:
        return None
    folder, above = path.parent, path.parent.parent
    rank, generation = RANK_FOLDER.fullmatch(_OLD.sub("", folder.name)), GENERATION_FOLDER.fullmatch(above.name)
    if rank is not None:
        number = int(generation[1]) if generation is not None else 0
        group = above.parent if generation is not None else above
        return RunFile(path, str(group), number, int(rank[1]), stream)
    attempt = _ATTEMPT.fullmatch(above.name)
    if attempt is not None and folder.name.isdecimal():
        return RunFile(path, str(above.parent), int(attempt[1]), int(folder.name), stream)
    return None


def _with_nodes_joined(files: list[RunFile]) -> list[RunFile]:
    """Return the files with the directories of one job on several nodes as one run: their journals start alike."""
    jobs: dict[bytes, list[RunFile]] = {}
    for each in files:
        if each.stream == "journal" and (first := _first_line(each.path)):
            jobs.setdefault(first, []).append(each)
    shared = [journals for journals in jobs.values() if len(journals) > 1]
    home = {journal.group: journals[0].group for journals in shared for journal in journals}
    # All journals are equal, but one node may have been cut off from the others.
    longest = {id(max(journals, key=lambda each: each.path.stat().st_size)) for journals in shared}
    return [
        dataclasses.replace(each, group=home[each.group]) if each.group in home else each
        for each in files
        if each.stream != "journal" or each.group not in home or id(each) in longest
    ]


def _first_line(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.readline(_SNIFF)


def _without_local_ranks(files: list[RunFile]) -> list[RunFile]:
    """Return the files without torchrun's ranks if there are several nodes: its directories show local ranks only."""
    runs = {each.group for each in files if each.rank is not None and _ATTEMPT.fullmatch(each.path.parent.parent.name)}
    if len(runs) < 2:
        return files
    return [dataclasses.replace(each, group="torchrun", rank=None) if each.group in runs else each for each in files]


def _unfit(run_file: RunFile) -> str:
    """Return why a file cannot be read as a log; empty: it can."""
    try:
        with run_file.path.open("rb") as file:
            start = 0
            with contextlib.suppress(OSError, AttributeError):
                # The oldest bytes of our own logs may have been freed.
                start = os.lseek(file.fileno(), 0, os.SEEK_DATA)
            head = file.read(_SNIFF).lstrip(b"\0" if start else b"")
    except OSError as error:
        return error.strerror or str(error)
    # A rank may print anything to its own file.
    if run_file.rank is not None or run_file.stream == "journal":
        return ""
    packed = next((why for magic, why in _FORMATS if head.startswith(magic)), "")
    text = _HOLE.sub(b"", head) or head
    return packed or (BINARY if text.count(b"\0") > len(text) // 20 else "")


def total_size(files: Iterable[RunFile]) -> int:
    """Return the bytes of these files."""
    return sum(each.path.stat().st_size for each in files)
