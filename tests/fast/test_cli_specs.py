"""From inventory and command line to the job description; nothing is started when it cannot be made."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from remote_agent.wire import JOB_NAME, JobSpec
from supervisor.errors import UsageError
from supervisor.inventory import Host, Inventory, JobDefaults
from supervisor.launch.specs import UpOptions, check_job, make_job_name, make_plan, merge_host, tree_for


@pytest.fixture
def work(tmp_path: Path) -> Path:
    directory = tmp_path / "work"
    (directory / "sub").mkdir(parents=True)
    (directory / "train.py").write_text("pass")
    (directory / "sub" / "other.py").write_text("pass")
    (tmp_path / "outside.py").write_text("pass")
    return directory


def names(kind: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)} & {field.name for field in dataclasses.fields(JobSpec)}


JOB_KEYS, OPTIONS = names(JobDefaults), names(UpOptions)
# A value in [job] and another one on the command line; a new key with an option of its name has none, and fails.
VALUES: dict[str, tuple[Any, Any]] = {
    "env": ({"A": "1"}, {"A": "2"}),
    "keep_warm": (60.0, 0.0),
    "max_restarts": (3, 0),
    "snapshots": (("a.pt",), ("b.pt",)),
    "standby": ("off", "auto"),
    "stop_grace": (7.0, 1.0),
}


def hosts_of(work: Path, count: int = 4, *, spares: tuple[int, ...] = (), **job: Any) -> Inventory:
    hosts = tuple(
        Host(f"n{i}", f"n{i}.x", f"10.0.0.{i}", nproc_per_node="2", spare=i in spares, env={"H": str(i)})
        for i in range(1, count + 1)
    )
    regular = count - len(spares)
    defaults = {"min_nodes": regular, "max_nodes": regular, "max_restarts": 3, **job}
    return Inventory(work.parent / "hosts.toml", hosts, JobDefaults(workdir=work, **defaults))


def alone(work: Path) -> Inventory:
    return Inventory(None, (Host("here", "localhost", "127.0.0.1", local=True),), JobDefaults(work, sync=False))


def test_defaults_come_from_the_inventory(work: Path) -> None:
    plan = make_plan(hosts_of(work, env={"A": "1"}, stop_grace=7.0), UpOptions("train.py", ("-x",)), work)
    spec = plan.spec
    assert plan.hosts == ("n1", "n2", "n3", "n4")
    assert [node.name for node in spec.nodes] == ["n1", "n2", "n3", "n4"]
    assert (spec.min_nodes, spec.max_nodes, spec.max_restarts, spec.stop_grace) == (4, 4, 3, 7.0)
    assert (spec.script, spec.args, spec.kind, spec.workdir) == ("train.py", ("-x",), "script", ".")
    assert spec.tree is not None
    assert spec.tree.startswith("work-")
    assert spec.env == {"A": "1"}
    assert spec.nodes[0].env == {"H": "1"}
    assert JOB_NAME.fullmatch(spec.job)
    assert spec.job.startswith("train-")


def test_the_command_line_wins(work: Path) -> None:
    options = UpOptions(
        "train.py", job="mine", nproc_per_node="1", max_restarts=0, stop_grace=1.0, env={"A": "2"}, sync=False
    )
    spec = make_plan(hosts_of(work, env={"A": "1", "B": "1"}), options, work).spec
    assert spec.job == "mine"
    assert {node.nproc_per_node for node in spec.nodes} == {"1"}
    assert (spec.max_restarts, spec.stop_grace, spec.tree, spec.workdir) == (0, 1.0, None, str(work))
    assert spec.env == {"A": "2", "B": "1"}


@pytest.mark.parametrize("name", sorted(JOB_KEYS & OPTIONS))
def test_an_option_takes_precedence_over_the_key_of_its_name_and_a_key_over_nothing(work: Path, name: str) -> None:
    key, option = VALUES[name]
    inventory = hosts_of(work, **{name: key})
    assert getattr(make_plan(inventory, UpOptions("train.py"), work).spec, name) == key
    assert getattr(make_plan(inventory, UpOptions("train.py", **{name: option}), work).spec, name) == option


@pytest.mark.parametrize(
    ("nnodes", "hosts", "low", "high"),
    [
        ("2", ("n1", "n2", "n5"), 2, 2),
        ("1:3", ("n1", "n2", "n3", "n5"), 1, 3),
        ("2:9", ("n1", "n2", "n3", "n4", "n5"), 2, 9),
        (None, ("n1", "n2", "n3", "n4", "n5"), 4, 4),
    ],
)
def test_nnodes_chooses_hosts_in_order_and_spares_come_along(
    work: Path, nnodes: str | None, hosts: tuple[str, ...], low: int, high: int
) -> None:
    plan = make_plan(hosts_of(work, 5, spares=(5,)), UpOptions("train.py", nnodes=nnodes), work)
    assert (plan.hosts, plan.spec.min_nodes, plan.spec.max_nodes) == (hosts, low, high)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"nnodes": "0"}, "nnodes"),
        ({"nnodes": "3:2"}, "nnodes"),
        ({"nnodes": "a"}, "nnodes"),
        ({"nnodes": "5"}, "4 host"),
        ({"nproc_per_node": "0"}, "nproc-per-node '0'"),
        ({"nproc_per_node": "-1"}, "nproc-per-node"),
        ({"nproc_per_node": "gpus"}, "nproc-per-node"),
        ({"nproc_per_node": "many"}, "nproc-per-node"),
        ({"job": "a b"}, "job name"),
        ({"job": "x.toml"}, "job name"),
        ({"standalone": True}, "--standalone"),
    ],
)
def test_bad_requests_are_refused(work: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make_plan(hosts_of(work), UpOptions("train.py", **options), work)


def test_more_nodes_than_this_machine(work: Path) -> None:
    with pytest.raises(UsageError, match="this machine alone has 1 host") as caught:
        make_plan(alone(work), UpOptions("train.py", nnodes="2"), work)
    assert "hosts.toml" in caught.value.hint


@pytest.mark.parametrize(
    ("script", "cwd", "found"),
    [
        ("train.py", ".", "train.py"),
        ("train.py", "sub", "train.py"),
        ("other.py", "sub", "sub/other.py"),
        ("work/train.py", "..", "train.py"),
        ("./sub/../train.py", ".", "train.py"),
    ],
)
def test_scripts_are_named_from_the_workdir(work: Path, script: str, cwd: str, found: str) -> None:
    assert make_plan(hosts_of(work), UpOptions(script), work / cwd).spec.script == found


def test_absolute_scripts(work: Path) -> None:
    assert make_plan(hosts_of(work), UpOptions(str(work / "train.py")), Path("/")).spec.script == "train.py"
    outside = str(work.parent / "outside.py")
    with pytest.raises(UsageError, match="outside the workdir"):
        make_plan(hosts_of(work), UpOptions(outside), work)
    assert make_plan(hosts_of(work), UpOptions(outside, sync=False), work).spec.script == outside


@pytest.mark.parametrize(("script", "words"), [("no.py", "does not exist"), ("sub", "is a directory")])
def test_a_missing_script_is_refused_before_anything_starts(work: Path, script: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make_plan(hosts_of(work), UpOptions(script), work)
    with pytest.raises(UsageError, match=words):
        make_plan(alone(work), UpOptions(script), work)


def test_a_workdir_that_is_not_there_is_named_before_the_script(work: Path) -> None:
    inventory = hosts_of(work)
    elsewhere = dataclasses.replace(inventory.job, workdir=work / "gone")
    with pytest.raises(UsageError, match=r"\[job\]\.workdir: .*gone: there is no such directory"):
        make_plan(dataclasses.replace(inventory, job=elsewhere), UpOptions("train.py"), work)


def test_modules_and_programs_are_not_looked_for(work: Path) -> None:
    assert make_plan(hosts_of(work), UpOptions("pkg.train", kind="module"), work).spec.script == "pkg.train"
    assert make_plan(hosts_of(work), UpOptions("nvidia-smi", kind="binary"), work).spec.script == "nvidia-smi"
    for cwd, program in (work, "./train.py"), (work.parent, "work/train.py"):
        assert make_plan(hosts_of(work), UpOptions(program, kind="binary"), cwd).spec.script == "./train.py"
    with pytest.raises(UsageError, match="does not exist"):
        make_plan(hosts_of(work), UpOptions("./no.sh", kind="binary"), work)


def test_a_tree_that_is_only_on_the_nodes(work: Path) -> None:
    inventory = hosts_of(Path("/nowhere/at/all"), sync=False)
    spec = make_plan(inventory, UpOptions("train.py"), work / "sub").spec
    assert (spec.script, spec.workdir, spec.tree) == ("train.py", "/nowhere/at/all", None)


def test_this_machine_alone_runs_where_it_is_called(work: Path) -> None:
    spec = make_plan(alone(work), UpOptions("../train.py", standalone=True), work / "sub").spec
    assert (spec.script, spec.workdir, spec.tree) == ("../train.py", str(work / "sub"), None)


def test_a_script_that_is_not_sent_is_refused(work: Path) -> None:
    inventory = hosts_of(work, exclude=("*.py",))
    plan = make_plan(inventory, UpOptions("train.py"), work)
    with pytest.raises(UsageError, match="is excluded"):
        tree_for(inventory, plan.spec)
    tree = tree_for(hosts_of(work), plan.spec)
    assert tree is not None
    assert tree.name == plan.spec.tree


def test_job_names() -> None:
    assert make_job_name("a/b/My Train!.py").startswith("My-Train-")
    assert make_job_name("/x/---.py").startswith("job-")
    assert len({make_job_name("t.py") for _ in range(50)}) > 40
    assert len(make_job_name("x" * 200 + ".py")) <= 64
    assert check_job("a-1.b_2") == "a-1.b_2"


def test_a_host_that_joins_takes_its_place_in_the_order(work: Path) -> None:
    inventory = hosts_of(work, 4, spares=(2,))
    spec = make_plan(inventory, UpOptions("train.py", nnodes="1"), work).spec
    assert [node.name for node in spec.nodes] == ["n1", "n2"]
    host = inventory.host("n3")
    assert host is not None
    assert [node.name for node in merge_host(spec, host, inventory).nodes] == ["n1", "n2", "n3"]
    first = inventory.host("n1")
    assert first is not None
    assert merge_host(spec, first, inventory) is spec


def test_a_script_and_a_named_job_have_work_trees_of_their_own(work: Path) -> None:
    def tree(**options: Any) -> str | None:
        return make_plan(hosts_of(work), UpOptions(**options), work).spec.tree

    assert tree(script="train.py") == tree(script="./train.py", args=("--lr", "1"))
    (work / "eval.py").write_text("")
    trees = [tree(script="train.py"), tree(script="eval.py"), *(tree(script="train.py", job=job) for job in "ab")]
    assert len(set(trees)) == len(trees)
    assert tree(script="train.py", job="a") == tree(script="eval.py", job="a")
