"""asyncssh, imported without letting it run a compiler.

In: asyncssh. Out: the same; nobody else imports it.

It looks for two libraries that few machines have, and `ctypes.util.find_library` runs gcc and ld for each that ldconfig
does not know: eight processes at the start of every command, on a machine with a compiler.
"""

from __future__ import annotations

import contextlib
import ctypes.util
from collections.abc import Iterator

_BY_COMPILER = ("_findLib_gcc", "_findLib_ld")


@contextlib.contextmanager
def _ldconfig_alone() -> Iterator[None]:
    module = vars(ctypes.util)
    kept = {name: module[name] for name in _BY_COMPILER if name in module}
    module.update(dict.fromkeys(kept, lambda _: None))
    try:
        yield
    finally:
        module.update(kept)


with _ldconfig_alone():
    import asyncssh
    from asyncssh.config import SSHClientConfig

__all__ = ["SSHClientConfig", "asyncssh"]
