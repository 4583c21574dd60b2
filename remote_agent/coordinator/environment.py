"""Which variables may be set while a job runs: some of NCCL, torch and gloo, and none that names a file or a program.

In: a name and a value that came from an operator or from another node. Out: why they are refused, or "".

The coordinator checks what operators ask for, and each node checks what a coordinator orders: the agent of another node
must not be able to run a program here.
"""

from __future__ import annotations

import re

FAMILIES = re.compile(r"(NCCL|TORCH|GLOO)_[A-Z0-9_]+")
# Variables whose names have such a word hold paths of files that are loaded, run, read as settings or written.
FILE_WORDS = frozenset(
    (
        *("FILE", "DIR", "DIRECTORY", "PATH", "HOME", "OUT", "PIPE"),
        *("LIB", "LIBRARY", "PLUGIN", "PLUGINS", "BINARY", "CONF", "CONFIG", "FLAGS", "LOAD"),
    )
)
VALUE_MAX = 1024


def refusal(name: str, value: str | None) -> str:
    """Return why a variable may not be set (None: may not be unset) while the job runs; "" if it may."""
    if not FAMILIES.fullmatch(name):
        return f"{name}: only NCCL_*, TORCH_* and GLOO_* can be set while a job runs"
    words = sorted(FILE_WORDS & set(name.split("_")))
    if words:
        return f"{name}: a variable that names a file or a program ({words[0]}) cannot be set while a job runs"
    if value is None:
        return ""
    if len(value) > VALUE_MAX or not value.isprintable():
        return f"{name}: its value is longer than {VALUE_MAX} or not printable"
    if "/" in value or "\\" in value:
        return f"{name}: a value with a slash cannot be set while a job runs"
    return ""
