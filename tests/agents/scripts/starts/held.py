"""Imported by the scripts here: stops a rank for as long as the test wants it to live."""

import os
import time


def wait() -> None:
    """Say that this rank has come here, and return when the test has removed the file `hold`."""
    if os.path.exists("hold"):
        with open("held-" + os.environ["RANK"], "w"):
            pass
        while os.path.exists("hold"):
            time.sleep(0.01)
