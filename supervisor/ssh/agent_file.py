"""The agent as one file.

In: the installed remote_agent package. Out: a zipapp, the same bytes for the same sources, and its sha256.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import zipfile
from pathlib import Path

import remote_agent

MAIN = b"import sys\n\nfrom remote_agent.__main__ import main\n\nif __name__ == '__main__':\n    sys.exit(main())\n"
# Data that belongs to the sources; caches and editor files do not.
SUFFIXES = frozenset({".py", ".json", ".toml", ".txt"})
# Run in a torchrun that somebody else starts, from the installed package (supervisor.handlers).
ELSEWHERE = frozenset({"engine_handler.py", "engine_torch_handler.py", "joining.py"})
# The oldest date a zip can hold: the bytes must not depend on when they were made.
EPOCH = (1980, 1, 1, 0, 0, 0)


@dataclasses.dataclass(frozen=True)
class AgentFile:
    """The zipapp that is pushed to the nodes."""

    data: bytes
    sha256: str

    @classmethod
    def build(cls, package: Path | None = None) -> AgentFile:
        """Pack what a node needs of the remote_agent package; raises OSError."""
        package = package or Path(remote_agent.__file__).parent
        output = io.BytesIO()
        with zipfile.ZipFile(output, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
            _add(archive, "__main__.py", MAIN)
            for path in sorted(package.rglob("*")):
                inside = path.relative_to(package)
                is_left_out = "__pycache__" in inside.parts or inside.as_posix() in ELSEWHERE
                if path.suffix in SUFFIXES and path.is_file() and not is_left_out:
                    _add(archive, f"remote_agent/{inside.as_posix()}", path.read_bytes())
        data = output.getvalue()
        return cls(data, hashlib.sha256(data).hexdigest())


def _add(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    entry = zipfile.ZipInfo(name, EPOCH)
    entry.compress_type = zipfile.ZIP_DEFLATED
    entry.external_attr = 0o644 << 16
    archive.writestr(entry, data)
