"""Which files are a snapshot, and when it is complete.

In: files as they lie on the disk; nothing is changed, and nothing is unpickled. Out: `Verdict`, names of steps.

A form is known by the file's content: a torch zip, safetensors; a directory by its marker: `.metadata` of
torch.distributed.checkpoint, `trainer_state.json` of a Trainer, the index of safetensors in several parts. **A snapshot
of a known form is complete once its own marker says so.** A file of any other form has no marker: it counts only while
its writers live, once it has been closed for some seconds.
"""

from __future__ import annotations

import json
import os
import re
import stat
import struct
import zipfile
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

TRAINER_STATE, DCP_METADATA, INDEX = "trainer_state.json", ".metadata", ".safetensors.index.json"
# A Trainer writes these between the model and its marker: a directory with one and without the marker is torn.
_TRAINER_FILE = re.compile(r"training_args\.bin|scheduler\.pt|rng_state.*\.pth")
DCP_PART, SAFETENSORS = ".distcp", ".safetensors"
# A script loads such files with torch: one without a whole header is torn, not of another format.
TORCH_NAMES = (".pt", ".pth", ".ckpt", ".bin")
# The Trainer writes the states of random numbers after its marker; others may close a file after its last byte.
SETTLE_NS = 2_000_000_000
# No model has a larger header, and no run has a larger state, even if it lists every log entry.
MAX_HEADER = 64 * 1024 * 1024
# Libraries rename such a file or directory once it is whole: `x.tmp`, `tmp-checkpoint-500` of a Trainer,
# `500.orbax-checkpoint-tmp-17`, `tmpk3x_` of tempfile.
_TEMPORARY = re.compile(r"^tmp|[._-]tmp(?![a-z])|\.(?:temp|part|partial|incomplete|lock)$|~$|^__pycache__$", re.I)
_PART_NAME = re.compile(rb"__\d+_\d+\.distcp")
# Clocks of two nodes agree to some milliseconds; a save takes longer than this after the last one.
CLOCKS_NS = 1_000_000_000
_TRAINER = re.compile(r"checkpoint-\d+")
_STEPPED = re.compile(r"(?:step|iter|epoch|checkpoint|ckpt|snapshot)[^/\d]{0,8}\d+", re.I)
# In `epoch=3-step=120`, only the second number is a step.
_STEP = re.compile(r"(?:step|iter|checkpoint|ckpt|snapshot)[^/\d]{0,8}(\d{1,15})", re.I)
Stamp = tuple[int, int, int]
"""Size, time of the last change in ns, inode."""


class Verdict(NamedTuple):
    """What a snapshot's own form says about it."""

    form: str
    """torch, safetensors, dcp, trainer, index; empty: none that is known."""
    whole: bool | None
    """Whether it is complete; None: it has no marker."""


class Moment(NamedTuple):
    """The moment of a look, in nanoseconds of this machine's clock."""

    now_ns: int
    first_ns: int
    """The time when the job began: older files are not torn by its ranks."""
    group_ns: int | None
    """The time when the group that runs here was started; None: none runs."""


class InPlace(NamedTuple):
    """A snapshot in the working directory, or where the operator has named it."""

    path: str
    """Relative to the working directory, or absolute; of a file, or of a directory with all its files."""
    place: Path
    files: Mapping[str, Stamp]
    """The stamps of its files, by path relative to the directory in which `place` lies."""

    @property
    def changed_ns(self) -> int:
        """The time when it was last written to, by this machine's clock."""
        return max((stamp[1] for stamp in self.files.values()), default=0)

    def is_torn(self) -> bool:
        """Return whether a script would find an unreadable snapshot there, or an empty directory of a Trainer."""
        verdict = judge(self)
        # Files that DCP's `.metadata` names may lie on other nodes.
        return verdict.form not in ("", "dcp") and verdict.whole is False


def stamp_of(info: os.stat_result) -> Stamp:
    """Return values that change with the content of a file."""
    return info.st_size, info.st_mtime_ns, info.st_ino


def is_temporary(name: str) -> bool:
    """Return whether a file or directory has a name under which libraries save before they rename it."""
    return _TEMPORARY.search(name) is not None


def is_aside(name: str) -> bool:
    """Return whether a file or directory is hidden or temporary: no snapshot, or none yet."""
    return is_temporary(name) or (name.startswith(".") and name != DCP_METADATA)


def is_directory_form(name: str, entries: Iterable[str]) -> bool:
    """Return whether a directory is one snapshot, by its name and what lies in it."""
    if _STEPPED.search(name):
        return True
    return any(one in (DCP_METADATA, TRAINER_STATE) or one.endswith((DCP_PART, INDEX)) for one in entries)


def judge(snapshot: InPlace) -> Verdict:
    """Return the form of a snapshot and whether it is complete; a file that vanishes makes it incomplete."""
    try:
        if snapshot.place.name not in snapshot.files:
            return _judge_directory(snapshot)
        return _judge_file(snapshot.place)
    except OSError:
        return Verdict("", False)


def is_complete(snapshot: InPlace, verdict: Verdict, moment: Moment) -> bool:
    """Return whether a snapshot may be handed out: its marker is there, or its writers live and have closed it."""
    changed, now_ns, first_ns, group_ns = snapshot.changed_ns, *moment
    if verdict.whole is False or not snapshot.files:
        return False
    if changed < first_ns:
        return True
    if group_ns is None:
        # Its writers have ended, perhaps in the middle of it.
        return verdict.whole is True
    if verdict.form in ("torch", "safetensors"):
        return True
    # Files of an older group may be torn, and stay so while a new one runs.
    return now_ns - changed >= SETTLE_NS and (verdict.whole is True or changed >= group_ns)


def shards_elsewhere(snapshot: InPlace) -> set[str]:
    """Return the files that a DCP snapshot's `.metadata` names and that are not here: on other nodes' own disks."""
    if f"{snapshot.place.name}/{DCP_METADATA}" not in snapshot.files:
        return set()
    try:
        names = _dcp_parts(snapshot.place / DCP_METADATA)
    except OSError:
        return set()
    return names - {path.rpartition("/")[2] for path in snapshot.files}


def is_shard(name: str) -> bool:
    """Return whether it is the name of a file that DCP's metadata may name."""
    return _PART_NAME.fullmatch(name.encode()) is not None


def step_of(snapshot: InPlace) -> int | None:
    """Return the step that a snapshot itself names, None where it names none."""
    if snapshot.place.name not in snapshot.files:
        step = _trainer_state(snapshot.place / TRAINER_STATE).get("global_step")
        if type(step) is int and 0 <= step < 2**63:
            return step
    numbers = _STEP.findall(snapshot.path)
    return int(numbers[-1]) if numbers else None


def _judge_file(path: Path) -> Verdict:
    if path.name.endswith(SAFETENSORS):
        return Verdict("safetensors", _is_whole_safetensors(path))
    with open(path, "rb") as file:
        head = file.read(4)
    if head == b"PK\x03\x04":
        try:
            # The directory of a zip file is written last.
            with zipfile.ZipFile(path) as archive:
                names = archive.namelist()
        except (zipfile.BadZipFile, ValueError, NotImplementedError):
            return Verdict("torch", False)
        return Verdict("torch" if any(name.endswith("data.pkl") for name in names) else "", True)
    if len(head) < 4 and path.name.endswith(TORCH_NAMES):
        return Verdict("torch", False)
    return Verdict("", None if head else False)


def _is_whole_safetensors(path: Path) -> bool:
    """Return whether a file has all the bytes that its header names."""
    with open(path, "rb") as file:
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else MAX_HEADER + 1
        text = file.read(length) if length <= MAX_HEADER else b""
    try:
        tensors = json.loads(text)
        ends = [int(one["data_offsets"][1]) for name, one in tensors.items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return False
    return path.stat().st_size == 8 + length + max(ends, default=0)


def _judge_directory(snapshot: InPlace) -> Verdict:
    names = {path.rpartition("/")[2]: snapshot.place.parent / path for path in snapshot.files}
    inside = set(snapshot.files)
    loaded = (path for name, path in names.items() if name.endswith((SAFETENSORS, *TORCH_NAMES)))
    torn = next((verdict.form for verdict in map(_judge_file, loaded) if verdict.whole is False), None)
    parts = [index for name, index in names.items() if name.endswith(INDEX)]
    has_parts = all(_index_parts(index) <= {path.rpartition("/")[2] for path in inside} for index in parts)
    if any(name.endswith(DCP_PART) for name in names) or DCP_METADATA in names:
        form, marked = "dcp", DCP_METADATA in names and _dcp_parts(snapshot.place / DCP_METADATA) <= set(names)
        written_ns = snapshot.files.get(f"{snapshot.place.name}/{DCP_METADATA}", (0, 0, 0))[1]
        if marked and snapshot.changed_ns > written_ns + CLOCKS_NS:
            # A save over an older one may have been ended in the middle: the metadata is written last.
            return Verdict(form, None)
    elif TRAINER_STATE in names or _is_unfinished_trainers(snapshot.place, names):
        form, marked = "trainer", bool(_trainer_state(snapshot.place / TRAINER_STATE))
    elif parts:
        form, marked = "index", True
    else:
        return Verdict("", None) if torn is None else Verdict(torn, False)
    return Verdict(form, marked and has_parts and torn is None)


def _is_unfinished_trainers(place: Path, names: Collection[str]) -> bool:
    """Return whether a directory without a marker is a Trainer's: by its files or neighbours, or because it is empty.

    Other scripts save as `checkpoint-500`, too, and know no marker.
    """
    if not _TRAINER.fullmatch(place.name):
        return False
    if not names or any(_TRAINER_FILE.fullmatch(name) for name in names):
        return True
    with os.scandir(place.parent) as entries:
        neighbours = [entry.path for entry in entries if _TRAINER.fullmatch(entry.name)]
    return any(os.path.exists(os.path.join(one, TRAINER_STATE)) for one in neighbours)


def _dcp_parts(metadata: Path) -> set[str]:
    """Return the names of the files that the metadata names; it is a pickle, and is only searched."""
    with open(metadata, "rb") as file:
        return {name.decode() for name in _PART_NAME.findall(file.read(MAX_HEADER))}


def _trainer_state(path: Path) -> dict[str, object]:
    try:
        with open(path, "rb") as file:
            state = json.loads(file.read(MAX_HEADER))
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


def _index_parts(path: Path) -> set[str]:
    """Return the names of an index's parts; one that cannot be read names a part that is never there."""
    try:
        with open(path, "rb") as file:
            return set(map(str, json.loads(file.read(MAX_HEADER))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {""}


def is_regular(info: os.stat_result) -> bool:
    """Return whether it is a plain file: links are never followed."""
    return stat.S_ISREG(info.st_mode)
