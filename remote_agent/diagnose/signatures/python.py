"""Signatures of what Python code raises and training code prints.

In: nothing. Out: FILES, LOSS, GENERIC_ERRORS.
"""

from __future__ import annotations

from remote_agent.diagnose.signatures.signature import generic, primary

FILES = (
    primary(
        "disk_full",
        *("No space left on device", r"Errno 28\b", "Disk quota exceeded", "low on resource: ephemeral-storage"),
        r"inline_container\.cc.*unexpected pos",
        r"unexpected pos \d+ vs",
    ),
    primary(
        "checkpoint_corrupt",
        *("failed finding central directory", "PytorchStreamReader failed", "invalid load key", "UnpicklingError"),
        *("pickle data was truncated", "SafetensorError"),
        *("archive is corrupted", "BadZipFile", "Ran out of input"),
        "unexpected EOF, expected",
        "Invalid magic number; corrupt file",
    ),
    primary(
        "permission_import_missing_module",
        "ModuleNotFoundError",
        r"\bImportError\b",
        "No module named",
        *("PermissionError", "Permission denied", r"OSError: \S+: cannot open shared object file"),
    ),
)
LOSS = (
    primary("nan_loss", r"ank (?P<rank>\d+)(?:: | at iteration .*message=')found (?:NaN|Inf) in"),
    primary(
        "nan_loss",
        "[Ll]oss (?:is|became infinite or) (?:nan|NaN|inf)",
        "returned nan values",
        "found NaN in",
        "[Ll]oss scale already at minimum",
        "Minimum loss scale reached",
        r"\bgrad[_ ]norm['\"]?[:=] ?nan\b",
        r"OVERFLOW! Rank \d+ Skipping step",
    ),
)
GENERIC_ERRORS = (
    generic("nan_loss", *(rf"\b{word}['\"]?[:=]? ?(?:nan|NaN)\b" for word in ("loss", "Loss"))),
    generic("permission_import_missing_module", r": command not found\b"),
    generic("user_exception", "There are not enough slots available in the system"),
    # Includes a traceback that a log service has joined into one line.
    generic("user_exception", "can't open file '", "No such file or directory: '", r"Traceback \(m.{,22}: +File "),
    # The last line of a traceback whose beginning is not in the text. No RuntimeError: it can mean anything.
    generic(
        "user_exception",
        r"(?m)^(?:\[(?:rank|default)?\d+\]: ?)?(?:Attribute|Type|Value|Key|Index|Name|Assertion|ZeroDivision"
        r"|NotImplemented|Syntax|Indentation|FileNotFound|UnboundLocal|Recursion)Error(?::.*)?$",
    ),
)
