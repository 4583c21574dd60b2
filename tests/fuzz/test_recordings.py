"""Damaged recordings: refused as a whole with one error, or shown, printed and reported like any other."""

from __future__ import annotations

import asyncio
import io
import json
import random
import zipfile
from pathlib import Path

from supervisor.cli.record import _items
from supervisor.errors import RequestFailed
from supervisor.link.view import local_rank_of
from supervisor.logs.selection import RecordFilter, Selection
from supervisor.recording.file_format import RecordingError
from supervisor.recording.player import Player
from supervisor.recording.reading import load
from supervisor.report import lines, report
from supervisor.tui import generations, model
from supervisor.wording.status import status_lines
from tests.fuzz import damages, seeds
from tests.fuzz.driver import fuzz
from tests.screens import recordings

ALL = Selection(generation="all")
NCCL_NODE = {
    "generation": 0, "stamp": "0:9",
    "groups": [{"ranks": [0, 1], "facts": {"version": "2.26.2", "network": "IB", "devices": ["mlx5_0"], "channels": 8,
                                           "gdr_off": True, "env": {"NCCL_DEBUG": "INFO"}}}],
    "comms": [[0, "0xabc", 0, 8], [1, "0xabc", 1, 8]],
    "links": [[0, "0xabc", 0, 1, "P2P/CUMEM", 8], [1, "?8", 1, 2, "NET/IB/GDRDMA", 2]],
    "warnings": [[0, "NET/IB: Got completion with status=12", 1]],
}  # fmt: skip


def members_of(path: Path) -> bytes:
    """Return the members of a recording one after the other, so that they can be damaged like one text."""
    with zipfile.ZipFile(path) as file:
        return b"".join(b"--- %s\n%s" % (name.encode(), file.read(name)) for name in file.namelist())


def zipped(data: bytes) -> bytes:
    """Return a recording with the members of such a text."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as file:
        for part in data.split(b"--- ")[1:]:
            name, _, content = part.partition(b"\n")
            member = name.decode("ascii", "replace").replace("\0", "") or "x"
            if member not in file.NameToInfo:
                file.writestr(member, content)
    return made.getvalue()


async def play(path: Path) -> None:
    """Do with a recording what `replay` and `report` do."""
    async with Player(load(path), paused=True) as player:
        recording = player.recording
        for t_ns in (recording.begin_ns, (recording.begin_ns + recording.end_ns) // 2, recording.end_ns):
            player.seek(t_ns)
            snapshot = model.take(player)
            snapshot.worst_first()
            runs = generations.Runs()
            runs.follow(player.events)
            runs.differing()
            "\n".join(status_lines(player.status)).encode()
            await player.nccl()
            local_rank_of(player.events, 0, 1)
            page = await player.merged(ALL, 40)
            narrow = Selection(generation="all", filter=RecordFilter(("step",), ("xyz",), "warn"))
            await player.merged(narrow, 40, after_ns=0)
            for row in page.rows[:2]:
                args = {"generation": row.generation, "rank": row.rank, "stream": row.stream, "line": -5, "count": 9}
                await player.log(row.node, "log_window", args)
        async for row in player.search(ALL, pattern="step 1"):
            assert row.text
        document = await report(
            player, player.events, player.incidents, recording.meta["nccl"], recording.meta["hosts"]
        )
        "\n".join([*lines(document), json.dumps(document, allow_nan=False)]).encode()
        for _, item in _items(recording):
            assert item


def made(tmp_path: Path) -> list[Path]:
    """Write recordings: a job that failed, and one with an event of each type."""
    events = [json.loads(line) for line in seeds.EVENTS.splitlines()]
    nodes = {"n1": NCCL_NODE, "n2": {**NCCL_NODE, "groups": []}, "n3": None}
    return [
        recordings.write(tmp_path / "one.rec", nccl_nodes=nodes),
        recordings.write(tmp_path / "two.rec", events=events, nccl_nodes=nodes),
    ]


def test_recordings(tmp_path: Path) -> None:
    """The members of a recording, or the file as a whole."""
    path = tmp_path / "job.rec"
    files = made(tmp_path)
    whole = [one.read_bytes() for one in files]

    def run(data: bytes) -> None:
        path.write_bytes(zipped(data) if data.startswith(b"--- ") else data)
        asyncio.run(play(path))

    def damage(dice: random.Random, data: bytes) -> bytes:
        return (damages.of_bytes if data in whole else damages.of_json_lines)(dice, data)

    fuzz(run, [*map(members_of, files), *whole], damage, (RecordingError, RequestFailed))
