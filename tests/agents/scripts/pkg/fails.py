"""A module for `-m` that fails."""

import sys

print(__name__, __package__, __spec__.name, sys.argv[1:], __file__)


def fail() -> None:
    raise RuntimeError("from a module")


fail()
