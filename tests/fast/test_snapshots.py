"""Snapshots: which files are one, when it is complete, what a node keeps of it and how it is put in place."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import json
import os
import shutil
import struct
import time
import zipfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from remote_agent.agent.background import Background
from remote_agent.agent.file_requests import JobRequests
from remote_agent.agent.snapshot_copies import SENT_BYTES
from remote_agent.agent.snapshot_keeper import SnapshotKeeper
from remote_agent.base.paths import Home
from remote_agent.base.tasks import Tasks
from remote_agent.election.peers import PeerUnreachable
from remote_agent.snapshots.choice import slot_of
from remote_agent.snapshots.rules import SETTLE_NS, InPlace, Moment, Verdict, is_complete, judge, step_of
from remote_agent.snapshots.scan import matches, scan
from remote_agent.snapshots.store import Abandoned, KeptSnapshot, Store, remove_asides, set_aside
from remote_agent.tree.manifest import pack
from remote_agent.wire import Answer, CallFailed, Channel, Handler, Items, JobSpec, NodeSpec, Problem, WireError
from supervisor.cli import snapshots
from supervisor.cli.snapshots import pull
from supervisor.errors import RequestFailed, UsageError
from supervisor.link.tasks import each
from supervisor.ssh.answers import read_answer


def torch_zip(content: bytes = b"weights") -> bytes:
    """What torch.save writes: a zip file with a pickle and tensors."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_STORED) as archive:
        # As torch does, without the time of day.
        archive.writestr(zipfile.ZipInfo("snapshot/data.pkl"), b"\x80\x02.")
        archive.writestr(zipfile.ZipInfo("snapshot/data/0"), content)
    return made.getvalue()


def safetensors(content: bytes = b"1234") -> bytes:
    header = json.dumps({"w": {"dtype": "U8", "shape": [len(content)], "data_offsets": [0, len(content)]}}).encode()
    return struct.pack("<Q", len(header)) + header + content


def dcp(parts: list[str]) -> bytes:
    """Metadata as torch pickles it, as far as the names of its files go."""
    return b"\x80\x02" + b"".join(b"\x8c" + bytes([len(name)]) + name.encode() for name in parts) + b"."


def lay(base: Path, files: dict[str, bytes]) -> None:
    for path, content in files.items():
        (base / path).parent.mkdir(parents=True, exist_ok=True)
        (base / path).write_bytes(content)


def one(base: Path, pattern: str = "**") -> InPlace:
    (found,) = scan(base, [pattern]).snapshots
    return found


@pytest.mark.parametrize(
    "name",
    [
        "ck/700.orbax-checkpoint-tmp-1700000000", "tmp-checkpoint-500", "checkpoint-500.tmp", "ckpt_100.incomplete",
        "tmpk3x_ab9/step_5", "step_5.tmp123",
    ],
)  # fmt: skip
def test_what_a_library_will_rename_is_no_snapshot_yet(tmp_path: Path, name: str) -> None:
    lay(tmp_path, {f"{name}/data.bin": b"half", "checkpoint-400/model.bin": b"whole"})
    assert [snapshot.path for snapshot in scan(tmp_path, ["**"]).snapshots] == ["checkpoint-400"]


@pytest.mark.parametrize("made", [("snapshot.pt", torch_zip(b"w" * 900), "torch"),
                                  ("model.safetensors", safetensors(b"w" * 900), "safetensors")])  # fmt: skip
def test_a_file_is_complete_to_its_last_byte_only(tmp_path: Path, made: tuple[str, bytes, str]) -> None:
    name, content, form = made
    lay(tmp_path, {name: content})
    assert judge(one(tmp_path)) == Verdict(form, True)
    for length in range(1, len(content), 7):
        (tmp_path / name).write_bytes(content[:length])
        assert judge(one(tmp_path)).whole is not True, length


def test_a_directory_is_complete_with_its_marker_and_parts(tmp_path: Path) -> None:
    weights = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    cases: list[tuple[str, dict[str, bytes], str]] = [
        ("dcp", {"s/.metadata": dcp(["__0_0.distcp", "__1_0.distcp"]), "s/__0_0.distcp": b"a",
                 "s/__1_0.distcp": b"b"}, "s/__1_0.distcp"),
        ("dcp", {"s/__0_0.distcp": b"a", "s/.metadata": dcp(["__0_0.distcp"])}, "s/.metadata"),
        ("trainer", {"checkpoint-20/training_args.bin": torch_zip(), "checkpoint-20/trainer_state.json":
                     b'{"global_step": 20}'}, "checkpoint-20/trainer_state.json"),
        ("index", {"m/model.safetensors.index.json": json.dumps(weights).encode(),
                   "m/model-00001-of-00002.safetensors": safetensors(),
                   "m/model-00002-of-00002.safetensors": safetensors()}, "m/model-00002-of-00002.safetensors"),
    ]  # fmt: skip
    for number, (form, files, last) in enumerate(cases):
        base = tmp_path / str(number)
        lay(base, files)
        assert judge(one(base)) == Verdict(form, True)
        (base / last).unlink()
        assert judge(one(base)) == Verdict(form, False)


def test_a_trainers_directory_is_known_by_its_files(tmp_path: Path) -> None:
    """Other scripts save as checkpoint-500, too, and write no trainer_state.json: theirs must not count as torn."""
    weights = {"checkpoint-20/model.pt": torch_zip()}
    lay(tmp_path / "own", weights)
    assert judge(one(tmp_path / "own")) == Verdict("", None)
    index = {"checkpoint-20/model.safetensors.index.json": b'{"weight_map": {"a": "a.safetensors"}}'}
    lay(tmp_path / "index", {**index, "checkpoint-20/a.safetensors": safetensors(), "checkpoint-20/optimizer.pt":
                             torch_zip()})  # fmt: skip
    assert judge(one(tmp_path / "index")) == Verdict("index", True)
    cut = {"checkpoint-20/config.json": b"{}", "checkpoint-20/model.safetensors": safetensors()[:-1]}
    lay(tmp_path / "cut", cut)
    assert one(tmp_path / "cut").is_torn(), "also the first one, of which nothing else is there yet"
    torn = {"checkpoint-20/optimizer.pt": torch_zip()[:-9], "checkpoint-20/trainer_state.json": b'{"global_step": 20}'}
    lay(tmp_path / "torn", torn)
    assert judge(one(tmp_path / "torn")) == Verdict("trainer", False), "a torn part makes all of it incomplete"
    lay(tmp_path / "files", {**weights, "checkpoint-20/rng_state_0.pth": torch_zip()})
    assert judge(one(tmp_path / "files")) == Verdict("trainer", False)
    lay(tmp_path / "beside", {**weights, "checkpoint-10/trainer_state.json": b'{"global_step": 10}'})
    found = {each.path: judge(each) for each in scan(tmp_path / "beside", ["checkpoint-*"]).snapshots}
    assert found == {"checkpoint-10": Verdict("trainer", True), "checkpoint-20": Verdict("trainer", False)}


def test_a_file_without_a_marker_counts_only_while_its_writers_live() -> None:
    found = InPlace("a.bin", Path("/w/a.bin"), {"a.bin": (3, 100 * SETTLE_NS, 1)})
    quiet = 102 * SETTLE_NS
    unmarked, marked, torn = Verdict("", None), Verdict("trainer", True), Verdict("torch", False)
    live, ended = Moment(quiet, 1, 50 * SETTLE_NS), Moment(quiet, 1, None)
    assert is_complete(found, unmarked, live)
    assert not is_complete(found, unmarked, ended)
    # Its writers were ended in the middle of it, and the next group does not make it whole.
    assert not is_complete(found, unmarked, Moment(quiet, 1, 101 * SETTLE_NS))
    # It is older than the job.
    assert is_complete(found, unmarked, Moment(quiet, 101 * SETTLE_NS, None))
    assert is_complete(found, marked, live)
    assert is_complete(found, marked, ended)
    # The Trainer writes after its marker; a file has its own at its end.
    assert not is_complete(found, marked, Moment(100 * SETTLE_NS + 1, 1, 50 * SETTLE_NS))
    assert is_complete(found, Verdict("torch", True), Moment(100 * SETTLE_NS + 1, 1, 50 * SETTLE_NS))
    assert not is_complete(found, torn, live)


def test_the_step_and_the_series_of_a_snapshot(tmp_path: Path) -> None:
    lay(tmp_path, {"checkpoint-7/trainer_state.json": b'{"global_step": 21}'})
    assert step_of(one(tmp_path)) == 21
    for path, step in {"ckpt_100.pt": 100, "epoch=3-step=120.ckpt": 120, "epoch_3.pt": None, "model.pt": None}.items():
        assert step_of(InPlace(path, Path("/w") / path, {path: (1, 1, 1)})) == step
    assert slot_of("out/ckpt_100.pt") == slot_of("out/ckpt_20.pt") != slot_of("out/best_100.pt")
    assert slot_of("ckpt_100_rank0.pt") != slot_of("ckpt_100_rank1.pt")
    assert slot_of("model-00001-of-00002.safetensors") != slot_of("model-00002-of-00002.safetensors")


def test_patterns_name_files_directories_and_what_lies_in_them() -> None:
    assert matches("snapshot.pt", "snapshot.pt")
    assert matches("checkpoints/**", "checkpoints/a/b.pt")
    assert matches("checkpoints", "checkpoints/a.pt")
    assert matches("/data/*.pt", "/data/a.pt")
    assert not matches("*.pt", "a/b.pt")
    assert not matches("snapshot.pt", "train.py")
    assert not matches("**", "../a.pt")
    assert not matches("**", "/etc/a.pt")


def test_links_are_never_followed_and_one_that_leads_out_is_reported(tmp_path: Path) -> None:
    outside, base = tmp_path / "outside", tmp_path / "work"
    lay(outside, {"a.pt": torch_zip()})
    lay(base, {"own.pt": torch_zip(), ".hidden.pt": b"x", "own.pt.tmp": b"x"})
    (base / "checkpoints").symlink_to(outside)
    (base / "link.pt").symlink_to(outside / "a.pt")
    (base / "latest.pt").symlink_to("own.pt")
    seen = scan(base, ["*.pt", "checkpoints/**"])
    assert [found.path for found in seen.snapshots] == ["own.pt"]
    assert sorted(problem.partition(" is a link")[2][:14] for problem in seen.problems) == [
        " that leads ou", " that leads ou", ": other nodes "
    ]  # fmt: skip


def test_a_directory_is_all_of_a_snapshot_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lay(tmp_path, {"checkpoint-20/.hidden/notes": b"1", "checkpoint-20/trainer_state.json": b'{"global_step": 20}',
                   "checkpoint-30/trainer_state.json": b'{"global_step": 30}', "weights.bin": b"w"})  # fmt: skip
    (tmp_path / "checkpoint-30/model.bin").symlink_to(tmp_path / "weights.bin")
    seen = scan(tmp_path, ["checkpoint-*"])
    assert [sorted(found.files) for found in seen.snapshots] == [
        ["checkpoint-20/.hidden/notes", "checkpoint-20/trainer_state.json"]
    ]
    assert seen.problems == ("snapshots: checkpoint-30 is left out: model.bin in it is not a plain file",)
    monkeypatch.setattr("remote_agent.snapshots.scan.MAX_ENTRIES", 6)
    assert not scan(tmp_path, ["checkpoint-*"]).snapshots


class Disk:
    """A node's working directory and store."""

    def __init__(self, root: Path, patterns: tuple[str, ...] = ("**",), limit: int = 0) -> None:
        self.base = root / "work"
        self.base.mkdir(parents=True)
        self.store = Store(root / "kept", self.base, patterns, limit)

    def save(self, path: str, content: bytes, time_ns: int, step: int | None = None) -> KeptSnapshot:
        lay(self.base, {path: content})
        top = path.partition("/")[0]
        found = next(found for found in scan(self.base, ["**"]).snapshots if found.path in (path, top))
        return self.store.keep(found, time_ns, step, exact=step is not None, stop=lambda: False)

    def take_from(self, other: Disk, snapshot: KeptSnapshot) -> None:
        """Copy a snapshot piece by piece, as the agents do."""
        for sha, (size, here) in self.store.expect(snapshot).items():
            content = other.store.path_of(sha).read_bytes()
            assert len(content) == size
            self.store.receive(sha, here, [content[here:]], lambda: False)
        self.store.add(snapshot)


def cut(store: Store, sha: str, piece: bytes) -> bool:
    """Let a part of a content arrive, then the connection be cut; returns whether that is what it was."""

    def pieces() -> Iterator[bytes]:
        yield piece
        raise WireError("the link was cut")

    with pytest.raises(WireError):
        store.receive(sha, 0, pieces(), lambda: False)
    return True


def test_the_newest_two_of_each_series_are_kept_by_content(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    kept = [disk.save(f"ckpt_{number}.pt", torch_zip(b"%d" % number), number) for number in range(1, 5)]
    other = disk.save("best.pt", torch_zip(b"best"), 1)
    assert [one.id for one in disk.store.kept] == [other.id, kept[2].id, kept[3].id]
    # Its second version has another name, and the file in place is none of the store's.
    again = disk.save("best.pt", torch_zip(b"better"), 2)
    assert again.id != other.id
    (disk.base / "best.pt").write_bytes(b"torn")
    fresh = Store(tmp_path / "kept", disk.base, ("**",))
    assert {one.id for one in fresh.kept} == {other.id, again.id, kept[2].id, kept[3].id}
    fresh.put_in_place(again, 5, stop=lambda: False)
    assert (disk.base / "best.pt").read_bytes() == torch_zip(b"better")
    assert (disk.base / "best.pt").stat().st_mtime_ns == 5
    assert sorted(os.listdir(disk.base)) == ["best.pt", *(f"ckpt_{number}.pt" for number in range(1, 5))]


def test_a_copy_goes_on_where_it_was_cut_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    source, target = Disk(tmp_path / "a"), Disk(tmp_path / "b")
    content = torch_zip(b"w" * 5000)
    snapshot = source.save("snapshot.pt", content, 1)
    (sha,) = target.store.expect(snapshot)
    assert cut(target.store, sha, content[:1000])
    again = Store(tmp_path / "b" / "kept", target.base, ("**",))
    assert again.expect(snapshot) == {sha: (len(content), 1000)}
    with pytest.raises(Problem, match="out of order"):
        again.receive(sha, 0, [content], lambda: False)
    with pytest.raises(Problem, match="damaged"):
        again.receive(sha, 1000, [b"x" * (len(content) - 1000)], lambda: False)
    assert again.expect(snapshot) == {sha: (len(content), 0)}
    assert not again.kept
    target.take_from(source, snapshot)
    target.store.put_in_place(snapshot, 1, stop=lambda: False)
    assert (target.base / "snapshot.pt").read_bytes() == content


def test_a_directory_is_put_in_place_in_one_step_and_replaces_a_torn_one(tmp_path: Path) -> None:
    source, target = Disk(tmp_path / "a"), Disk(tmp_path / "b")
    lay(source.base, {"checkpoint-20/optimizer.pt": torch_zip()})
    snapshot = source.save("checkpoint-20/trainer_state.json", b'{"global_step": 20}', 1, 20)
    lay(target.base, {"checkpoint-20/optimizer.pt": b"torn", "checkpoint-20/other": b"torn"})
    target.take_from(source, snapshot)
    target.store.put_in_place(snapshot, 1, stop=lambda: False)
    assert judge(one(target.base)) == Verdict("trainer", True)
    assert sorted(os.listdir(target.base / "checkpoint-20")) == ["optimizer.pt", "trainer_state.json"]
    assert os.listdir(target.base) == ["checkpoint-20"]


def test_a_snapshot_that_changes_while_it_is_read_is_not_kept(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    lay(disk.base, {"snapshot.pt": torch_zip()})
    found = one(disk.base)
    with (disk.base / "snapshot.pt").open("ab") as file:
        file.write(b"more")
    with pytest.raises(Abandoned):
        disk.store.keep(found, 1, None, exact=False, stop=lambda: False)
    with pytest.raises(Abandoned):
        disk.store.keep(one(disk.base), 1, None, exact=False, stop=lambda: True)
    assert not disk.store.kept


def test_another_node_cannot_name_another_place(tmp_path: Path) -> None:
    source, target = Disk(tmp_path / "a"), Disk(tmp_path / "b", ("*.pt", "links/*.pt"))
    script = source.save("train.py", b"evil", 1)
    with pytest.raises(Problem, match="not one of this job's snapshots"):
        target.store.check_place(script)
    (target.base / "links").symlink_to(tmp_path)
    with pytest.raises(Problem, match="or lies outside the work tree"):
        target.store.check_place(source.save("links/a.pt", torch_zip(), 1))
    head = {**script.head(), "path": "a.pt"}
    with pytest.raises(Problem, match="does not match its description"):
        KeptSnapshot.read(head, pack(script.manifest))
    with pytest.raises(Problem, match="time_ns is not a whole number"):
        KeptSnapshot.read({**head, "time_ns": None}, pack(script.manifest))


def test_a_full_disk_and_the_limit_are_named_and_the_newest_copy_stays(tmp_path: Path) -> None:
    disk = Disk(tmp_path, limit=3000)
    first = disk.save("snapshot.pt", torch_zip(b"1" * 1000), 1)
    second = disk.save("snapshot.pt", torch_zip(b"2" * 1000), 2)
    assert disk.store.kept == (first, second)
    third = disk.save("snapshot.pt", torch_zip(b"3" * 1200), 3)
    # There was no room for three.
    assert [one.id for one in disk.store.kept] == [second.id, third.id]
    with pytest.raises(Problem, match="snapshots_limit is 3,000"):
        disk.save("snapshot.pt", torch_zip(b"4" * 2900), 4)
    assert disk.store.kept[-1].id == third.id


def test_the_newer_copy_replaces_the_older_where_one_fits(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "a", limit=1500)
    disk.save("snapshot.pt", torch_zip(b"1" * 1000), 1)
    second = disk.save("snapshot.pt", torch_zip(b"2" * 1000), 2)
    assert disk.store.kept == (second,)
    # One that never fits drops none.
    with pytest.raises(Problem, match="no room"):
        disk.save("snapshot.pt", torch_zip(b"3" * 2000), 3)
    assert disk.store.kept == (second,)
    with pytest.raises(Problem, match="no room"):
        disk.store.make_room("snapshot.pt", 1000)
    assert disk.store.kept == (second,)


def test_a_loss_of_power_leaves_nothing_behind(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    lost, stays = disk.save("a.pt", torch_zip(b"a"), 1), disk.save("b.pt", torch_zip(b"b"), 2)
    contents = tmp_path / "kept/contents"
    (sha,) = [file.sha256 for file in lost.manifest.files.values()]
    disk.store.path_of(sha).write_bytes(b"half")
    assert cut(disk.store, "0" * 64, b"arriving")
    (contents / "12.copy").write_bytes(b"half")
    again = Store(tmp_path / "kept", disk.base, ("**",))
    assert again.kept == (stays,)
    assert len(os.listdir(contents)) == 1
    shutil.rmtree(contents)
    again.check()
    assert not again.kept


def test_newer_snapshots_are_hidden_from_the_script(tmp_path: Path) -> None:
    lay(tmp_path, {"ckpt_30.pt": b"PK\x03\x04torn"})
    assert set_aside(one(tmp_path)) == ".ckpt_30.pt.aside1"
    assert not scan(tmp_path, ["**"]).snapshots
    lay(tmp_path, {"best_30.pt": b"PK\x03\x04torn"})
    set_aside(one(tmp_path))
    # It goes once the job has saved a newer one of the same series.
    lay(tmp_path, {"ckpt_20.pt": torch_zip()})
    remove_asides(one(tmp_path))
    assert sorted(os.listdir(tmp_path)) == [".best_30.pt.aside1", "ckpt_20.pt"]


class Others:
    """The other nodes' agents, as one answer to every question."""

    def __init__(self, answer: Any | None, **by_node: Any) -> None:
        self.members: Any = {"n1": {}, "n2": {}, "n3": {}}
        self.answer = answer
        self.by_node = by_node
        self.asked: list[tuple[str, str, Any]] = []

    async def ask(self, node: str, op: str, args: Any) -> Any | None:
        self.asked.append((node, op, args.get("take")))
        return self.by_node.get(node, self.answer)

    async def connect(self, node: str, handler: Handler) -> Channel:
        raise PeerUnreachable(f"{node}: no answer")


KEEPERS: list[tuple[SnapshotKeeper, Background]] = []


@pytest.fixture(autouse=True)
def _end_threads() -> Iterator[None]:
    yield
    while KEEPERS:
        for made in KEEPERS.pop():
            made.close()


LONG_AGO = {"time": "2020-01-01T00:00:00.000Z"}


def keeper(
    root: Path,
    others: Others,
    *,
    records: Sequence[Any] = (),
    home: Path | None = None,
    job: str = "job",
    **changes: Any,
) -> tuple[SnapshotKeeper, list[Any]]:
    """A keeper whose group has begun, and the notices that it gives; `records`: the journal."""
    nodes = (NodeSpec("n1", "a"), NodeSpec("n2", "b"))
    spec = JobSpec(job, "train.py", nodes, workdir=str(root / "work"), **{"snapshots": ("*.pt",), **changes})
    (root / "work").mkdir(exist_ok=True)
    files = Home(home or root / "home").job(job)
    logs = SimpleNamespace(progress=lambda generation: {})
    peers: Any = others
    background = Background("n1", peers)
    journal: Any = SimpleNamespace(records=records)
    made = SnapshotKeeper(files, spec, spec.workdir, background, peers, logs, journal)  # type: ignore[arg-type]
    KEEPERS.append((made, background))
    said: list[Any] = []
    member = SimpleNamespace(running=0, shift_ns=0, report=lambda op, args: said.append(args))
    made.start(SimpleNamespace(spawn=lambda work, name: work.close()), member)  # type: ignore[arg-type]
    made.begin_group()
    return made, said


@pytest.mark.parametrize(("answer", "kept"), [({"sees": True}, 0), ({"sees": False}, 1), (None, 1)])
async def test_what_the_other_nodes_see_too_is_not_copied(tmp_path: Path, answer: Any | None, kept: int) -> None:
    made, _ = keeper(tmp_path, Others(answer))
    lay(tmp_path / "work", {"snapshot.pt": torch_zip()})
    assert len(await made.hold()) == kept


async def test_a_named_snapshot_stays_until_its_group_has_formed(tmp_path: Path) -> None:
    """The ranks may save once more between the order and their end."""
    made, _ = keeper(tmp_path, Others({"sees": False}))
    for number in range(2):
        lay(tmp_path / "work", {"model.pt": torch_zip(b"%d" % number)})
        await made.hold()
    named = made.heads()[0]["id"]
    lay(tmp_path / "work", {"model.pt": torch_zip(b"later")})
    held = [each["id"] for each in await made.hold([named])]
    made.begin_group()
    lay(tmp_path / "work", {"model.pt": torch_zip(b"next")})
    await made.hold()
    after = [each["id"] for each in made.heads()]
    assert named in held
    assert (len(held), len(after), named in after) == (3, 2, False)


async def test_a_snapshot_that_names_no_step_has_the_one_that_ranks_had_printed(tmp_path: Path) -> None:
    """Steps are noted also while the keeping waits for the processor."""
    made, _ = keeper(tmp_path, Others({"sees": False}))
    printed: Any = {0: {"step": 7}, 1: {"step": None}}
    made._logs = SimpleNamespace(progress=lambda generation: printed)  # type: ignore[assignment]
    await made._note_step()
    lay(tmp_path / "work", {"model.pt": torch_zip(), "ckpt_step9.pt": torch_zip(b"9")})
    await made.hold()
    assert sorted((each["step"], each["exact"]) for each in made.heads()) == [(7, False), (9, True)]


async def test_what_no_longer_counts_makes_room_first(tmp_path: Path) -> None:
    """Who has gone back keeps the snapshot that was good, not the one after it."""
    made, _ = keeper(tmp_path, Others({"sees": False}))
    for number in range(2):
        lay(tmp_path / "work", {"model.pt": torch_zip(b"%d" % number)})
        await made.hold()
    good, spike = await made.hold()
    await made.restore([{**good, "holders": ["n1"]}], [(good["time_ns"], spike["time_ns"])])
    made.begin_group()
    lay(tmp_path / "work", {"model.pt": torch_zip(b"next")})
    await made.hold()
    kept = [each["id"] for each in made.heads()]
    assert (len(kept), good["id"] in kept, spike["id"] in kept) == (2, True, False)


async def test_what_no_longer_counts_is_hidden(tmp_path: Path) -> None:
    made, _ = keeper(tmp_path, Others({"sees": False}))
    begun = time.time_ns()
    lay(tmp_path / "work", {"model.pt": torch_zip(b"1"), "ema.pt": torch_zip(b"2"), "old.pt": torch_zip(b"3")})
    for name, age_s in (("model.pt", 60), ("ema.pt", 30), ("old.pt", 90)):
        os.utime(tmp_path / "work" / name, ns=(begun - age_s * 10**9,) * 2)
    (model,) = [one for one in await made.hold() if one["path"] == "model.pt"]
    report = await made.restore([{**model, "holders": ["n1"]}], [(model["time_ns"], begun)])
    assert report["aside"] == ["ema.pt -> .ema.pt.aside1"]
    assert sorted(os.listdir(tmp_path / "work")) == [".ema.pt.aside1", "model.pt", "old.pt"]


@pytest.mark.parametrize("shared", [False, True])
async def test_a_snapshot_that_the_job_does_not_name_is_reported_once(tmp_path: Path, shared: bool) -> None:
    made, said = keeper(tmp_path, Others({"sees": shared}), snapshots=())
    lay(tmp_path / "work", {"a.log": b"step 1", "torn.pt": torch_zip()[:-5]})
    await made.look_for_unnamed()
    assert not said
    lay(tmp_path / "work", {"out/checkpoint-20/trainer_state.json": b'{"global_step": 20}', "b.pt": torch_zip()})
    for _ in range(3):
        await made.look_for_unnamed()
    assert [one["kind"] for one in said] == ([] if shared else ["snapshot_unnamed"])
    assert shared or "--snapshots 'b.pt'" in said[0]["message"]


async def test_a_pattern_that_matches_nothing_is_reported(tmp_path: Path) -> None:
    made, said = keeper(tmp_path, Others({"sees": False}), snapshots=("ckpts/**", "part.pt"))
    lay(tmp_path / "work", {"part.pt": torch_zip()[:-5]})
    await made.look_for_unnamed()
    assert not said
    lay(tmp_path / "work", {"checkpoints/a.pt": torch_zip()})
    for _ in range(2):
        await made.look_for_unnamed()
    (notice,) = said
    assert notice["message"].startswith('nothing matches snapshots = ["ckpts/**", "part.pt"] so far, and checkpoints/')
    # Once something matches, others may be left out on purpose.
    made, said = keeper(tmp_path / "work", Others({"sees": False}), snapshots=("own.pt",))
    lay(tmp_path / "work/work", {"own.pt": torch_zip(), "best.pt": torch_zip(b"best")})
    await made.hold()
    await made.look_for_unnamed()
    assert not said


async def test_what_ranks_of_this_job_left_torn_is_hidden_and_nothing_else(tmp_path: Path) -> None:
    made, _ = keeper(tmp_path, Others(None), snapshots=("**",), records=[LONG_AGO])
    torn = {"snapshot.pt": torch_zip()[:-5], "empty.ckpt": b"", "part/.metadata": dcp(["__0_0.distcp"])}
    lay(tmp_path / "work", {**torn, "log.txt": b"step 1", "_SUCCESS": b"", "older.pt": b"PK\x03\x04"})
    (tmp_path / "work/checkpoint-5").mkdir()
    os.utime(tmp_path / "work/older.pt", ns=(1, 1))
    with (tmp_path / "work/open.pt").open("wb"):
        await made.hold()
    found = list((await made.restore([]))["aside"])
    hidden = sorted(name.partition(" -> ")[0] for name in found)
    assert hidden == ["checkpoint-5", "empty.ckpt", "snapshot.pt"]
    left = [name for name in sorted(os.listdir(tmp_path / "work")) if ".aside" not in name]
    assert left == ["_SUCCESS", "log.txt", "older.pt", "open.pt", "part"]


async def test_a_newer_snapshot_is_hidden_and_not_written_over(tmp_path: Path) -> None:
    made, said = keeper(tmp_path, Others(None), snapshots_limit=1200)
    lay(tmp_path / "work", {"snapshot.pt": torch_zip(b"1" * 100)})
    newer = torch_zip(b"2" * 2000)
    (head,) = await made.hold()
    lay(tmp_path / "work", {"snapshot.pt": newer})
    assert await made.hold() == [head]
    report = await made.restore([{**head, "holders": ["n1"]}])
    assert len(said) == 1
    assert report["aside"] == ["snapshot.pt -> .snapshot.pt.aside1"]
    assert (tmp_path / "work/.snapshot.pt.aside1").read_bytes() == newer
    assert (tmp_path / "work/snapshot.pt").read_bytes() == torch_zip(b"1" * 100)


async def test_kept_snapshots_are_offered_again(tmp_path: Path) -> None:
    lay(tmp_path / "work", {"snapshot.pt": torch_zip()})

    async def offers(others: Others) -> list[tuple[str, str, Any]]:
        made, _ = keeper(tmp_path, others)
        await made.hold()
        others.asked.clear()
        for _ in range(2):
            await made.copies.send()
        made.begin_group()
        await made.copies.send()
        return others.asked

    # Its own goes to the next node; once that has it, nobody is asked until another group begins.
    assert await offers(Others({"has": True})) == [("n2", "snapshot_offer", True)] * 2
    (tmp_path / "work/snapshot.pt").unlink()
    # After a restart it is not known who has it: all are asked before one is to take it.
    asked = await offers(Others({}, n3={"has": True}))
    assert asked == [("n2", "snapshot_offer", False), ("n3", "snapshot_offer", False)] * 2
    asked = await offers(Others({}, n2={"arrives": True}))
    assert ("n2", "snapshot_offer", True) in asked


async def test_a_damaged_content_is_taken_from_the_next_node_that_has_it(tmp_path: Path) -> None:
    made, _ = keeper(tmp_path, Others(None))
    source = Disk(tmp_path / "a").save("snapshot.pt", torch_zip(), 1)

    async def pull(node: str, name: str, *, slow: bool) -> KeptSnapshot:
        if node == "n2":
            raise Problem("bad_piece", "a copy of a snapshot arrived damaged")
        return source

    made.copies.pull = pull  # type: ignore[method-assign]
    assert await made.copies.obtain({**source.head(), "holders": ["n2", "n3"]}) == (source, "n3")


class Link:
    """A connection to another keeper, without a network."""

    def __init__(self, other: SnapshotKeeper, own: str = "n1") -> None:
        self.other, self.own = other, own

    async def call(self, op: str, args: Any, timeout: float) -> Answer:
        answer = await self.other.requests[op](self.own, None, args)
        assert isinstance(answer, Answer)
        return answer

    async def stream(self, op: str, args: Any) -> Items:
        items = await self.other.requests[op](self.own, None, args)
        assert not isinstance(items, Answer)
        async for item in items:
            yield item


def linked(made: SnapshotKeeper, other: SnapshotKeeper, *, pieces: int = 99) -> list[int]:
    """Let a keeper reach another one as n2; each connection ends after some pieces. Returns the offsets it asks for."""
    offsets: list[int] = []

    @contextlib.asynccontextmanager
    async def connected(node: str) -> AsyncIterator[Link]:
        if node != "n2":
            raise PeerUnreachable("no answer")
        yield Link(other)

    def receive(node: str, sha: str, here: int, slow: bool, opened: list[Any]) -> None:
        offsets.append(here)

        def bodies() -> Iterator[bytes]:
            args = {"sha": sha, "offset": here, "slow": slow}

            async def read() -> list[bytes]:
                return [item.body async for item in Link(other).stream("snapshot_read", args)]

            for number, body in enumerate(asyncio.run(read())):
                if number == pieces:
                    raise WireError("the link was cut")
                yield body

        made._store.receive(sha, here, bodies(), lambda: False)

    made._background.connected = connected  # type: ignore[method-assign, assignment]
    made.copies.receive = receive  # type: ignore[method-assign]
    return offsets


async def two_keepers(tmp_path: Path) -> tuple[SnapshotKeeper, list[Any], SnapshotKeeper, Any]:
    """A keeper with its notices, and another one with a snapshot of two pieces and a half: its head."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    made, said = keeper(tmp_path / "a", Others({"sees": False}))
    other, _ = keeper(tmp_path / "b", Others({"sees": False}))
    lay(tmp_path / "b/work", {"snapshot.pt": torch_zip(os.urandom(5 * SENT_BYTES // 2))})
    (head,) = await other.hold()
    return made, said, other, head


async def test_a_copy_goes_on_after_its_link_was_cut(tmp_path: Path) -> None:
    made, said, other, head = await two_keepers(tmp_path)
    offsets = linked(made, other, pieces=1)
    for _ in range(3):
        await made.copies.take("n2", head["id"])
        # A part of it is never handed out.
        assert made.heads() in ([], [head])
    assert offsets == [0, SENT_BYTES, 2 * SENT_BYTES]
    assert made.heads() == [head]
    assert not said


async def test_what_is_saved_again_is_as_new_as_that(tmp_path: Path) -> None:
    """After `restart --from`, a script that saves the same again must not lose it with its node."""
    made, said, other, head = await two_keepers(tmp_path)
    offsets = linked(made, other)
    await made.copies.take("n2", head["id"])
    place = tmp_path / "b/work/snapshot.pt"
    later_ns = head["time_ns"] + 10**9
    os.utime(place, ns=(later_ns, later_ns))
    (again,) = await other.hold()
    assert (again["id"], again["time_ns"]) == (head["id"], later_ns)
    tasks = Tasks()
    made.copies.start(tasks)
    answer = await Link(made, "n2").call("snapshot_offer", {"id": again["id"], "time_ns": later_ns}, 0)
    await asyncio.gather(*made.copies.arriving.values())
    after = await Link(made, "n2").call("snapshot_offer", {"id": again["id"], "time_ns": later_ns}, 0)
    await tasks.close()
    assert (answer.data, after.data) == ({"arrives": True}, {"has": True})
    assert made.heads() == [again]
    assert (offsets, said) == ([0], []), "its content is there already"


async def test_a_full_disk_costs_no_older_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, said, other, head = await two_keepers(tmp_path)
    older = Disk(tmp_path / "c").save("snapshot.pt", torch_zip(b"older"), 1)
    monkeypatch.setattr(Store, "check", lambda self: None)
    made._store.add(older)
    linked(made, other)
    written: list[bytes] = []

    def write(fd: int, piece: bytes) -> None:
        if written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written.append(piece)
        os.write(fd, piece)

    monkeypatch.setattr("remote_agent.snapshots.store._write", write)
    await made.copies.take("n2", head["id"])
    (notice,) = said
    assert notice["kind"] == "snapshot_not_kept"
    assert notice["message"].startswith("a copy of a snapshot of n2 is not kept here: ")
    assert "No space left on device" in notice["message"]
    assert made.heads() == [older.head()]
    assert not list((tmp_path / "a/home").rglob("*.part"))
    # The node that has it asks another one.
    answer = await Link(made, "n2").call("snapshot_offer", {"id": head["id"]}, 0)
    assert "No space left" in answer.data["refused"]


async def test_shards_of_several_nodes_become_one_snapshot(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    made, said = keeper(tmp_path / "a", Others({"sees": False}), snapshots=("ckpt/*",), records=[LONG_AGO])
    other, _ = keeper(tmp_path / "b", Others({"sees": False}), snapshots=("ckpt/*",), records=[LONG_AGO])
    shards = {"n2": {"__1_0.distcp": b"one" * 500}, "n3": {}}
    linked(made, other)
    files = {".metadata": dcp(["__0_0.distcp", "__1_0.distcp"]), "__0_0.distcp": b"zero"}
    lay(tmp_path / "a/work/ckpt/step_20", files)
    lay(tmp_path / "b/work/ckpt/step_20", {"other.distcp": b"not asked for"})

    # The other shard is not there yet, or newer than the metadata: a save over this one goes on.
    assert await made.hold() == []
    lay(tmp_path / "b/work/ckpt/step_20", shards["n2"])
    late_ns = time.time_ns() + 5_000_000_000
    os.utime(tmp_path / "b/work/ckpt/step_20/__1_0.distcp", ns=(late_ns, late_ns))
    assert await made.hold() == []
    os.utime(tmp_path / "b/work/ckpt/step_20/__1_0.distcp")
    (head,) = await made.hold()
    assert head["step"] == 20
    assert (await made.restore([{**head, "holders": ["n1"]}]))["placed"] == {head["id"]: None}
    place = tmp_path / "a/work/ckpt/step_20"
    assert {path.name: path.read_bytes() for path in place.iterdir()} == {**files, **shards["n2"]}
    assert not said


def test_a_dcp_snapshot_that_is_being_written_over_is_not_complete(tmp_path: Path) -> None:
    lay(tmp_path, {"s/.metadata": dcp(["__0_0.distcp"]), "s/__0_0.distcp": b"a"})
    os.utime(tmp_path / "s/.metadata", ns=(10**9, 10**9))
    found = one(tmp_path)
    assert judge(found) == Verdict("dcp", None)
    ended = Moment(found.changed_ns + SETTLE_NS, 1, None)
    assert not is_complete(found, judge(found), ended)


# `supervisor snapshots --pull`: a snapshot comes complete or not at all, from the first node that sends it.


class Node:
    """One node's files, reached as by a link."""

    can_be_asked, is_malformed = True, False

    def __init__(self, name: str, root: Path) -> None:
        self.view = SimpleNamespace(name=name)
        root.mkdir(exist_ok=True)
        self.disk = Disk(root)
        (root / "kept").mkdir(exist_ok=True)
        (root / "snapshots").symlink_to("kept")
        files, kept = SimpleNamespace(root=root), SimpleNamespace(answer=None)
        self.requests = JobRequests(files, None, None, kept, list)  # type: ignore[arg-type]

    async def call(self, op: str, args: dict[str, Any], *, timeout_s: float) -> Answer:
        try:
            answer = await self.requests.handle(op, args, b"")
        except Problem as problem:
            raise CallFailed(problem.kind, problem.message, problem.hint) from problem
        assert isinstance(answer, Answer)
        return read_answer(self.view.name, op, answer)

    async def whole_stream(self, op: str, args: dict[str, Any], *, timeout_s: float) -> Items:
        async with aclosing(each(self._stream(op, args), timeout_s)) as items:
            async for item in items:
                yield item

    async def _stream(self, op: str, args: dict[str, Any]) -> Items:
        items = await self.requests.handle(op, args, b"")
        assert not isinstance(items, Answer)
        try:
            async for item in items:
                yield read_answer(self.view.name, op, item)
        except Problem as problem:
            raise CallFailed(problem.kind, problem.message, problem.hint) from problem


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mapping[str, Node]:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return {name: Node(name, tmp_path / name) for name in ("n1", "n2")}


def bring(nodes: Mapping[str, Node], name: str, place: Path | None = None) -> tuple[str, int, str]:
    found = asyncio.run(pull(SimpleNamespace(links=nodes), name, place))  # type: ignore[arg-type]
    return str(found.place), found.size, found.node


def test_a_file_and_a_directory_come_from_the_node_that_has_them(nodes: Mapping[str, Node]) -> None:
    disk = nodes["n2"].disk
    content = torch_zip(b"w" * 3_000_000)
    one = disk.save("out/snapshot.pt", content, 1)
    assert bring(nodes, one.id) == ("snapshot.pt", len(content), "n2")
    assert Path("snapshot.pt").read_bytes() == content
    with pytest.raises(UsageError, match=r"snapshot\.pt exists"):
        bring(nodes, one.id)
    with pytest.raises(UsageError, match="there is no directory no/such"):
        bring(nodes, one.id, Path("no/such/snapshot.pt"))
    lay(disk.base, {"checkpoint-20/a.bin": b"weights"})
    whole = disk.save("checkpoint-20/trainer_state.json", b'{"global_step": 20}', 2, 20)
    assert bring(nodes, whole.id, Path("kept"))[0] == "kept"
    assert sorted(os.listdir("kept")) == ["a.bin", "trainer_state.json"]
    assert sorted(os.listdir()) == ["kept", "snapshot.pt"]


def test_what_is_damaged_or_would_lie_elsewhere_leaves_nothing(nodes: Mapping[str, Node]) -> None:
    disk = nodes["n1"].disk
    one = disk.save("snapshot.pt", torch_zip(b"w" * 5000), 1)
    (sha,) = [file.sha256 for file in one.manifest.files.values()]
    disk.store.path_of(sha).write_bytes(torch_zip(b"x" * 5000))
    with pytest.raises(RequestFailed, match="arrived damaged"):
        bring(nodes, one.id)
    disk.store.path_of(sha).unlink()
    with pytest.raises(RequestFailed, match="no longer kept"):
        bring(nodes, one.id)
    with pytest.raises(RequestFailed, match="no node has snapshot 123456789abc"):
        bring(nodes, "123456789abc")

    async def elsewhere(args: dict[str, Any]) -> Answer:
        return Answer({"path": "a.pt", "files": [["a.pt/../../b.pt", 0o600, 1, sha]]})

    nodes["n1"].requests.ops["snapshot_files"] = elsewhere
    with pytest.raises(RequestFailed, match="does not match snapshot"):
        bring(nodes, one.id)
    assert not os.listdir()


def test_a_node_that_stops_is_given_up(nodes: Mapping[str, Node], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "PIECE_DEADLINE", 0.05)
    content = torch_zip(b"w" * 5000)
    one = nodes["n1"].disk.save("snapshot.pt", content, 1)

    async def hangs(args: dict[str, Any]) -> Items:
        yield Answer({}, content[:100])
        await asyncio.Event().wait()

    nodes["n1"].requests.ops["snapshot_read"] = hangs
    with pytest.raises(RequestFailed, match="n1: no answer in time"):
        bring(nodes, one.id)
    assert not os.listdir()
