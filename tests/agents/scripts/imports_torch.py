"""Look for traces of the bootstrap before and after torch.distributed was imported."""

import importlib
import sys


def finders() -> list[str]:
    return [getattr(finder, "__name__", type(finder).__name__) for finder in sys.meta_path]


print([name for name in finders() if name != "AfterImport"])
distributed = importlib.import_module("torch.distributed")
spec = distributed.__spec__
assert spec is not None
print(finders())
print(type(spec.loader).__name__, "exec_module" in vars(spec.loader), distributed.__loader__ is spec.loader)
importlib.reload(importlib.import_module("torch.distributed.constants"))
print("reloaded", [path for path in sys.path_importer_cache if ".run-" in path])
