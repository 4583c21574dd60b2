"""The agent as one file.

In: the installed remote_agent package. Out: a zipapp (the same bytes for the same sources) and its sha256, which each
command needs; and what is sent to a node that lacks the file.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import io
import re
import struct
import zipfile
import zlib
from pathlib import Path

import remote_agent

MAIN = b"import sys\n\nfrom remote_agent.__main__ import main\n\nif __name__ == '__main__':\n    sys.exit(main())\n"
# Sources and their data; no caches or editor files.
SUFFIXES = frozenset({".py", ".json", ".toml", ".txt"})
# These run from the installed package: in a torchrun that others start (supervisor.handlers), or where the operator is.
ELSEWHERE = frozenset(
    {
        "engine/launchers/inside_torchrun.py",
        "engine/launchers/torchrun_handler.py",
        "bridge/joining.py",
        "coordinator/preview.py",
    }
)
# Docstrings, comment lines, the types of results and what only a type checker imports are not sent; a test shows that
# the code is the same without them.
NOTES = re.compile(rb'^( *)r?"""[^"]*(?:"{1,2}[^"]+)*"""$|^ *#[^\n]*$', re.MULTILINE)
RESULTS = re.compile(rb"^( *(?:async )?(?:def .*)?\)) -> .+:$", re.MULTILINE)
FOR_TYPES = re.compile(rb"^if TYPE_CHECKING:\n(?:(?: {4}[^\n]*)?\n)* {4}[^\n]*\n", re.MULTILINE)
# The oldest date in a zip: the bytes must not depend on the time of the build.
EPOCH = (1980, 1, 1, 0, 0, 0)


@dataclasses.dataclass(frozen=True)
class AgentFile:
    """The zipapp that is pushed to the nodes."""

    data: bytes
    sha256: str

    @functools.cached_property
    def sent(self) -> bytes:
        """What the loader reads: the length of the rest (8 bytes, big-endian), and the file, compressed."""
        # As small as it gets: it is compressed only for a node that lacks it.
        smallest = zlib.compressobj(9, zlib.DEFLATED, zlib.MAX_WBITS, 9)
        packed = smallest.compress(self.data) + smallest.flush()
        return struct.pack(">Q", len(packed)) + packed

    @classmethod
    def build(cls, package: Path | None = None) -> AgentFile:
        """Pack the parts of remote_agent that a node needs; raises OSError."""
        package = package or Path(remote_agent.__file__).parent
        output = io.BytesIO()
        with zipfile.ZipFile(output, "w") as archive:
            _add(archive, "__main__.py", MAIN)
            for path in sorted(package.rglob("*")):
                inside = path.relative_to(package)
                excluded = "__pycache__" in inside.parts or inside.as_posix() in ELSEWHERE
                if path.suffix in SUFFIXES and path.is_file() and not excluded:
                    data = path.read_bytes()
                    is_code = path.suffix == ".py"
                    _add(archive, f"remote_agent/{inside.as_posix()}", code_of(data) if is_code else data)
        data = output.getvalue()
        return cls(data, hashlib.sha256(data).hexdigest())


def code_of(source: bytes) -> bytes:
    """Return a module with empty docstrings, without comments and most types; its lines keep their numbers."""
    code = NOTES.sub(lambda note: (b"" if note[1] is None else note[1] + b'""') + b"\n" * note[0].count(b"\n"), source)
    return RESULTS.sub(rb"\1:", FOR_TYPES.sub(lambda block: b"\n" * block[0].count(b"\n"), code))


def _add(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    entry = zipfile.ZipInfo(name, EPOCH)
    entry.external_attr = 0o644 << 16
    archive.writestr(entry, data)
