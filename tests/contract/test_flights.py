"""Flight records that ranks over gloo really wrote: what `diagnose` says of each kind of desync."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from supervisor.postmortem.diagnosis import diagnose
from tests.agents.engine_process import SCRIPTS

# Kind, ranks, category, what the summary says.
KINDS = (
    ("op", [1], "collective_desync", "called broadcast 3 at flights.py:"),
    ("size", [2], "collective_desync", "called broadcast 3 with 5 elements [5] at "),
    ("dtype", [0], "collective_desync", "called all_reduce 3 with Int at "),
    ("order", [1], "collective_desync", "called broadcast [4] before all_reduce [4] at "),
    ("left_out", [2], "collective_desync", "left out broadcast [4] (number 4), which ranks 0-1 called at "),
    ("extra", [0], "collective_desync", "called broadcast 4 [4] at "),
    ("group", [1], "collective_desync", "waiting in all_reduce 1 of group 1 at "),
    ("ahead", [1], "collective_desync", "entered all_reduce 3 [4] at "),
    ("missing", [2], "hang_no_output", "never entered all_reduce 3 [4] after barrier 2 at "),
    (
        "no_record",
        [1],
        "hang_no_output",
        "left no flight record, and may have ended before all_reduce 3 [4]; ranks 0,2 ",
    ),
    ("scatter", [2], "hang_no_output", "never entered scatter 3 [2] after barrier 2 at "),
)


def test_the_rank_that_parts_from_the_others_is_named(tmp_path: Path) -> None:
    words = [sys.executable, str(SCRIPTS / "flights.py"), str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout == "done\n", done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {kind for kind, *_ in KINDS}
    for kind, ranks, category, says in KINDS:
        (incident,) = diagnose([tmp_path / kind])["incidents"]
        shown = (incident["culprit_ranks"], incident["category"], incident["scope"])
        assert shown == (ranks, category, "one_rank"), (kind, incident)
        assert incident["summary"].startswith(f"rank {ranks[0]}: {says}"), (kind, incident)
        assert str(incident["evidence"][0]["file"]).startswith(str(tmp_path / kind / "nccl_trace_rank_"))
