"""What `clean` removes on a node."""

from __future__ import annotations

import json
from pathlib import Path

from remote_agent.agent.jobs import clean
from remote_agent.base.paths import Home
from remote_agent.wire.job_spec import JobSpec, NodeSpec


def test_what_scripts_load_is_remembered_until_the_last_job_is_removed(tmp_path: Path) -> None:
    home = Home(tmp_path)
    for name in ("a", "b"):
        files = home.job(name)
        files.root.mkdir(parents=True)
        files.spec.write_text(json.dumps(JobSpec(name, "train.py", (NodeSpec("n1", "n1", "1"),)).to_json()))
    home.standby.mkdir()
    (home.standby / "0.json").write_text("{}")
    assert clean(home, "a")["removed"] == ["a"]
    assert home.standby.is_dir()
    assert clean(home, "b")["removed"] == ["b"]
    assert not home.standby.exists()
    assert home.job_names() == []
