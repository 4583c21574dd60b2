"""What srun is asked: one step with all of a node, whatever the allocation says of other steps."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from supervisor.inventory import Host
from supervisor.ssh import AgentFile, HostError, connect
from supervisor.ssh.srun import environment, words

pytestmark = pytest.mark.usefixtures("ssh_home")

HOST = Host(name="a", ssh="n1", address="n1", via="srun")


def test_options_for_other_steps_do_not_reach_ours() -> None:
    kept = {
        "PATH": "/bin",
        "SLURM_JOB_ID": "7",
        "SLURM_CONF": "/c",
        "SLURM_SUBMIT_DIR": "/d",
        "SLURM_ARRAY_TASK_ID": "1",
    }
    dropped = {"SLURM_LABELIO": "1", "SLURM_MEM_PER_CPU": "9", "SRUN_CPUS_PER_TASK": "2", "SLURM_EXPORT_ENV": "NONE"}
    assert environment({**kept, **dropped}) == kept


@pytest.mark.parametrize(("environ", "gpus"), [({}, []), ({"SLURM_GPUS_ON_NODE": "8"}, ["--gpus-per-node=8"])])
def test_a_step_has_all_of_its_node(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], gpus: list[str]) -> None:
    for name, value in {"SLURM_JOB_ID": "7", **environ}.items():
        monkeypatch.setenv(name, value)
    line = words(HOST, "env x", "--unbuffered")
    assert line[:2] == ["srun", "--jobid=7"]
    assert line[-4:] == ["--unbuffered", "sh", "-c", "exec env x"]
    assert {"--overlap", "--nodelist=n1", "--nodes=1", "--ntasks=1", "--cpu-bind=none", "--mem=0"} < set(line)
    assert [word for word in line if "gpus" in word] == gpus


def test_srun_that_does_not_come_so_far_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, agent: AgentFile
) -> None:
    async def reason() -> str:
        with pytest.raises(HostError) as caught:
            await connect(HOST, agent=agent)
        return str(caught.value)

    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert asyncio.run(reason()).startswith("a: connect: srun: SLURM_JOB_ID is not set")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    (tmp_path / "srun").write_text("#!/bin/sh\necho srun: error: no such node >&2\nexit 1\n")
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    said = "a: python: srun exited with code 1 before the agent ran; it printed: srun: error: no such node"
    assert asyncio.run(reason()).startswith(said)
