"""What a script imports when it is run, by its text: only installed packages, and nothing that it may never reach."""

from __future__ import annotations

from pathlib import Path

import pytest

from remote_agent.engine.order import Order
from remote_agent.engine.standby import LastStart, named_by, set_by
from tests.agents.engine_process import order

PACKAGES = ("torch", "numpy", "data", "late", "rare")


def _started(root: Path, text: str, **changes: str) -> LastStart:
    """A start of a script beside which there is a module `data`, with the PACKAGES installed."""
    packages = root / "site-packages"
    for name in PACKAGES:
        (packages / name).mkdir(parents=True, exist_ok=True)
        (packages / name / "__init__.py").touch()
    tree = root / "tree"
    tree.mkdir()
    (tree / "data.py").touch()
    (tree / "train.py").write_text(text)
    described = {**order(root, "train.py", cwd=str(tree)), **changes}
    return LastStart(Order.from_args(described), {"PYTHONPATH": str(packages)}, None)


def _named(root: Path, text: str, **changes: str) -> list[str]:
    return named_by(_started(root, text, **changes))


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (
            "import numpy as np\nfrom torch.nn import functional\n",
            ["numpy", "torch.nn", "torch.nn:functional", "torch._dynamo"],
        ),
        ("from numpy import *\n", ["numpy"]),
        ("import os, json\nfrom pathlib import Path\n", []),
        ("import data\nfrom data.sets import one\n", []),
        ("from . import numpy\nfrom .torch import nn\n", []),
        ("import missing\nimport numpy\n", ["numpy"]),
        ("def main():\n    import numpy\nclass One:\n    import late\n", []),
        ("try:\n    import rare\nexcept ImportError:\n    import late\n", ["rare", "late"]),
        ("if __name__ == '__main__':\n    with open('x'):\n        import numpy\n", ["numpy"]),
        ("import numpy\nimport numpy\nimport numpy.linalg\n", ["numpy", "numpy.linalg"]),
        ("import numpy\nthis is no Python\n", []),
        ("\0", []),
    ],
)
def test_what_a_script_names(tmp_path: Path, text: str, names: list[str]) -> None:
    assert _named(tmp_path, text) == names


def test_a_script_that_is_not_there_names_nothing(tmp_path: Path) -> None:
    assert _named(tmp_path, "import numpy\n", script="other.py") == []


def test_a_module_is_not_read(tmp_path: Path) -> None:
    assert _named(tmp_path, "import numpy\n", kind="module") == []


@pytest.mark.parametrize(
    ("text", "variables"),
    [
        ('import os\nos.environ["HF_HOME"] = "/scratch/hf"\n', {"HF_HOME": "/scratch/hf"}),
        (
            "from os import environ\nenviron.setdefault('A', '1')\nenviron['B'] = ''\nif 1:\n    environ['C'] = '1'\n",
            {"A": "1", "B": ""},
        ),
        ("import os\nos.environ['A'] = str(1)\nos.environ[name] = 'x'\nother['B'] = 'x'\n", {}),
        ("import os\ndef main():\n    os.environ['A'] = 'x'\n", {}),
    ],
)
def test_what_a_script_sets(tmp_path: Path, text: str, variables: dict[str, str]) -> None:
    assert set_by(_started(tmp_path, text).order) == variables
