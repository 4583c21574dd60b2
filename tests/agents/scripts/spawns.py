"""Use multiprocessing with things that live in __main__."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import subprocess
import sys


class Thing:
    def __init__(self, value: int) -> None:
        self.value = value


def double(thing: Thing) -> Thing:
    return Thing(2 * thing.value)


def child_environment(_: int) -> object:
    return (
        sorted(name for name in os.environ if "FR_" in name or name == "PYTHONPATH"),
        sys._xoptions,
        "sitecustomize" in sys.modules,
    )


if __name__ == "__main__":
    print(pickle.dumps(Thing(1)))
    for method in ("fork", "spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(2) as pool:
            print(
                method,
                [thing.value for thing in pool.map(double, [Thing(1), Thing(2)])],
                pool.map(child_environment, [0]),
            )
    print(
        subprocess.run(
            [sys.executable, "-c", "import sys; print(sys.path, sys.orig_argv[1:])"], capture_output=True
        ).stdout
    )
