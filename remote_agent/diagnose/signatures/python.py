"""Signatures of what Python code raises and training code prints.

In: nothing. Out: FILES, LOSS, GENERIC_ERRORS; what to do about an error number of the system, or about a class.
"""

from __future__ import annotations

import os
import re

from remote_agent.diagnose.signatures.signature import failed, weakly
from remote_agent.text.names import read_number

FILES = (
    failed(
        "disk_full",
        *("No space left on device", r"Errno 28\b", "Disk quota exceeded", "low on resource: ephemeral-storage"),
        *("PytorchStreamWriter failed writing", r"unexpected pos \d+ vs", r"OSError: \d+ requested and \d+ written"),
        "Not enough free space to write",
    ),
    failed(
        "checkpoint_corrupt",
        # UnpicklingError alone is not enough: it may only mean that a class is not allowed.
        *("failed finding central directory", "PytorchStreamReader failed", "invalid load key"),
        *("pickle data was truncated", "pickle exhausted", "unpickling stack underflow", "SafetensorError"),
        *("archive is corrupted", "BadZipFile", "Ran out of input"),
        "unexpected EOF, expected",
        "Invalid magic number; corrupt file",
    ),
    failed(
        "permission_import_missing_module",
        "ModuleNotFoundError",
        *(r"\bImportError\b", "ZipImportError", r"metadata\.PackageNotFoundError"),
        "No module named",
        *("PermissionError", "Permission denied"),
        # Python prints the first, the program loader the second.
        *(rf"{word}: \S+: cannot open shared object file" for word in ("OSError", "loading shared libraries")),
    ),
)
LOSS = (
    failed("nan_loss", r"ank (?P<rank>\d+)(?:: | at iteration .*message=')found (?:NaN|Inf) in"),
    failed(
        "nan_loss",
        "[Ll]oss (?:is|became infinite or) (?:nan|NaN|inf)",
        "returned nan values",
        "found NaN in",
        r"[Rr]esult (?:is )?(?:nan|NaN|inf)\b",
        "[Ll]oss scale already at minimum",
        "Minimum loss scale reached",
        r"\bgrad[_ ]norm['\"]?[:=] ?nan\b",
        r"OVERFLOW! Rank \d+ Skipping step",
    ),
)
GENERIC_ERRORS = (
    weakly("nan_loss", *(rf"\b{word}['\"]?[:=]? ?(?:nan|NaN)\b" for word in ("loss", "Loss"))),
    weakly("permission_import_missing_module", r"sh: [^\n]*: (?:[Cc]ommand not found|No such file or directory)\b"),
    weakly("user_exception", r"py: error: ", "There are not enough slots available in the system"),
    # Includes a traceback that a log service has joined into one line.
    weakly("user_exception", "can't open file '", "No such file or directory: '", r"Traceback \(m.{,22}: +File "),
    # This is the last line of a traceback whose beginning is missing. RuntimeError is left out: it can mean anything.
    weakly(
        "user_exception",
        r"(?m)^(?:\[(?:rank|default)?\d+\]: ?)?(?:Attribute|Type|Value|Key|Index|Name|Assertion|ZeroDivision"
        r"|NotImplemented|Syntax|Indentation|FileNotFound|UnboundLocal|Recursion)Error(?::.*)?$",
    ),
)

_ERRNO = re.compile(r"\[Errno (\d+)\]")
# The keys are error numbers of Linux.
_ERRNO_HINTS = {
    2: "the path does not exist on this node: check the path, and that the file system is mounted there",
    5: "the disk or the network file system failed: check the node's kernel log (dmesg -T)",
    11: "no more processes or threads are allowed: raise ulimit -u or the cgroup's pids.max, or start fewer workers",
    16: "another process or mount uses it: check with lsof on the node",
    23: "the node has no more open files: raise fs.file-max, or open fewer",
    24: "raise the limit on open files (ulimit -n), or close files and use fewer DataLoader workers",
    26: "another process writes to this program file: copy it first, then rename it",
    27: "raise the limit on file sizes (ulimit -f), or write smaller files; some file systems have a limit too",
    30: "the file system is mounted read-only: check mount on the node; an error of its disk can cause this",
    36: "shorten the file name",
    37: "file locks do not work there: start the file system's lock service, or put the lock file on a local disk",
    40: "the path has a loop of symbolic links",
    97: "the node has no IPv6 or IPv4 address of this kind: check the interface",
    98: "another process uses the port: end it, or choose another port",
    101: "the node has no route to that address: check its network",
    107: "the mount or the peer is gone: mount the file system again",
    110: "the server or the network file system did not answer: check it from this node",
    111: "no server listens at that address: check that it runs, its address and its port",
    113: "the node has no route to that address: check its network",
    116: "the file on the network file system is gone (stale handle): mount it again, or restart the job",
    121: "the device or the network file system failed: check the node's kernel log (dmesg -T)",
    122: "the quota is used up: delete files or raise it",
}
# Other languages print the system's words alone.
_WORDS_HINTS = {os.strerror(code).lower(): hint for code, hint in _ERRNO_HINTS.items()}
_HUB = "the hub refuses this node or is out of reach: share one downloaded HF_HOME, and set HF_HUB_OFFLINE=1"
_CLASS_HINTS = {
    "BdbQuit": "remove breakpoint() or pdb.set_trace() from the script: a rank has no terminal",
    "EOFError": "a rank has no terminal on stdin: remove input(), or pass the answer as an argument",
    "RecursionError": "a function calls itself without an end at the place shown, or raise sys.setrecursionlimit",
    "KeyboardInterrupt": "somebody sent SIGINT (Ctrl-C)",
    "UnicodeDecodeError": "the file is not text in the encoding that was used: check the file, and LANG on the node",
    "JSONDecodeError": "the file is not JSON, or only half of it was written: check the file",
    "HfHubHTTPError": _HUB,
    "LocalEntryNotFoundError": _HUB,
    "GatedRepoError": "accept the model's terms with your account, and give the ranks its token: HF_TOKEN",
    "OutOfResources": "the kernel needs more shared memory than this GPU has: lower its block sizes or num_stages",
}


def hint_of(name: str, message: str) -> str:
    """Return what to do about an exception by its error number or its class; empty if neither says."""
    number = _ERRNO.search(message)
    bare = name.rpartition(".")[2]
    if number is not None:
        return _ERRNO_HINTS.get(read_number(number[1]), "")
    # Python has words of its own for this one.
    if "can't start new thread" in message:
        return _ERRNO_HINTS[11]
    lowered = message.lower()
    words = (hint for text, hint in _WORDS_HINTS.items() if text in lowered)
    if hint := next(words, ""):
        return hint
    return "" if bare == "EOFError" and "reading a line" not in message else _CLASS_HINTS.get(bare, "")
