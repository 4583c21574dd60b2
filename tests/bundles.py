"""Bundles for tests: made member by member, as `supervisor report --bundle` writes them.

In: members, fields of the document. Out: a file.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

HOST: dict[str, Any] = {"name": "n1", "state": "up", "error": None, "hello": {}, "engine": {}}
MEMBERS = {"nodes/n1/spec.json": b"{}", "nodes/n1/generation_0/rank_0/stdout.log": b"step 1\n" * 100}


def write(path: Path, members: dict[str, bytes] | None = None, **about: Any) -> Path:
    """Write a bundle with these members and these fields of its document."""
    members = MEMBERS if members is None else members
    document = {"bundle": 1, "job": "job-t", "made_ns": 10**18, "supervisor": "0", "hosts": [HOST], "status": None,
                "files": {name: [0, 10**18] for name in members}, **about}  # fmt: skip
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in members.items():
            file.writestr(name, data)
        file.writestr("bundle.json", json.dumps(document))
    return path
