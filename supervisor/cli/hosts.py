"""`supervisor hosts`: write a hosts.toml from what the user has already.

In: argv. Out: the text of an inventory on stdout.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from supervisor import inventory
from supervisor.cli.options import make_parser, parse, read_source
from supervisor.errors import UsageError
from supervisor.inventory import sources

USAGE = "--from hosts A,B | --from hostfile FILE | --from slurm  > hosts.toml"


def run(verb: str, argv: Sequence[str]) -> int:
    """Write the inventory; returns the exit status."""
    parser = make_parser(verb, USAGE, target=False)
    parser.add_argument(
        "--from", dest="kind", required=True, choices=["hosts", "hostfile", "slurm"], help="what to read"
    )
    parser.add_argument("text", nargs="?", metavar="A,B | FILE", help="the list, or the file")
    options = parse(parser, argv)
    if (options.text is None) is not (options.kind == "slurm"):
        raise UsageError(
            f"--from {options.kind} {'takes nothing more' if options.text else 'needs one word more'}", USAGE
        )
    options.host_list = options.text if options.kind == "hosts" else None
    options.hostfile = options.text if options.kind == "hostfile" else None
    options.slurm = "auto"
    document = read_source(options)
    # What cannot be an inventory is said now, not at its first use.
    inventory.build(Path(f"--from {options.kind}"), document, Path.cwd())
    sys.stdout.write(sources.to_toml(document, f"supervisor hosts {' '.join(argv)}"))
    return 0
