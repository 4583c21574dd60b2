"""The command line: verbs, their options, plain and JSON output.

In: argv. Out: `main`, which returns an exit code of the contract; each verb is a module that is imported when used.
Imports every folder above except `history`, `nccl`, `redact` and `handlers`; of the node's side `wire`, `text`,
`diagnose` and `snapshots`.
"""

from supervisor.cli.entry import main

__all__ = ["main"]
