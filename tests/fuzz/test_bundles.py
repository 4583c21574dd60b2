"""Damaged bundles: refused as a whole with one error, or unpacked below their directory like any other."""

from __future__ import annotations

import io
import json
import random
import tempfile
import zipfile
from pathlib import Path

from supervisor.bundle import unpack
from supervisor.errors import UsageError
from tests import bundles
from tests.fuzz import damages
from tests.fuzz.driver import fuzz
from tests.screens import recorded


def members_of(path: Path) -> bytes:
    """Return the members of a bundle one after the other, so that they can be damaged like one text."""
    with zipfile.ZipFile(path) as file:
        return b"".join(b"--- %s\n%s" % (name.encode(), file.read(name)) for name in file.namelist())


def zipped(data: bytes) -> bytes:
    """Return a bundle with the members of such a text."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as file:
        for part in data.split(b"--- ")[1:]:
            name, _, content = part.partition(b"\n")
            member = name.decode("ascii", "replace").replace("\0", "") or "x"
            if member not in file.NameToInfo:
                file.writestr(member, content)
    return made.getvalue()


def test_bundles(tmp_path: Path) -> None:
    """The members of a bundle, or the file as a whole."""
    path = tmp_path / "job.zip"
    status = recorded.load("running_2x2").status
    whole = bundles.write(tmp_path / "whole.zip", status=status)
    kept = whole.read_bytes()

    def run(data: bytes) -> None:
        path.write_bytes(zipped(data) if data.startswith(b"--- ") else data)
        with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
            about = unpack(path, Path(folder))
            json.dumps(about, allow_nan=False)
            assert {place.name for place in Path(folder).iterdir()} <= {"nodes"}

    def damage(dice: random.Random, data: bytes) -> bytes:
        return (damages.of_bytes if data == kept else damages.of_json_lines)(dice, data)

    fuzz(run, [members_of(whole), kept], damage, (UsageError,))
    assert {place.name for place in tmp_path.iterdir()} == {"job.zip", "whole.zip"}
