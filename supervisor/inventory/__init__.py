"""hosts.toml, or its replacement, as frozen objects.

In: a path, or a document made by `sources`. Out: an `Inventory`, or an InventoryError that names file, key and what to
write instead. Imports `errors`; of the node's side `wire` and `text`.
"""

from supervisor.inventory.load import build, is_inventory, load, local, run_in
from supervisor.inventory.model import Host, Inventory, InventoryError, JobDefaults
from supervisor.inventory.pattern import PatternError, expand

__all__ = [
    "Host",
    "Inventory",
    "InventoryError",
    "JobDefaults",
    "PatternError",
    "build",
    "expand",
    "is_inventory",
    "load",
    "local",
    "run_in",
]
