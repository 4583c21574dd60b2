"""What a node that lies cannot do: get the job's description or authorities, be trusted, or run a program elsewhere."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import ssl
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography import x509

from remote_agent.agent import orders
from remote_agent.base.paths import Home
from remote_agent.coordinator import environment, formation, quorum
from remote_agent.coordinator import state as s
from remote_agent.coordinator.transitions import Turn
from remote_agent.engine.order import Order
from remote_agent.wire import Answer, JobSpec, NodeSpec, Problem, Rendezvous
from supervisor.control import admission
from supervisor.errors import RequestFailed
from supervisor.launch.certificates import Authority, Leaf, fingerprints, make_authority, sign_with
from tests.fast.waiting import some

SPEC = JobSpec("job", "train.py", tuple(NodeSpec(f"n{number}", "a") for number in (1, 2, 3)))
EVIL = dataclasses.replace(SPEC, script="evil.py")
CA, OTHER_CA, EVIL_CA = (make_authority("job").ca for _ in range(3))


def print_of(*pems: str) -> list[str]:
    return list(fingerprints("".join(pems)))


class View:
    def __init__(self, name: str, identity: dict[str, Any]) -> None:
        self.name = name
        self.identity = identity


class FakeLink:
    """A linked node that reports one thing and answers another."""

    opened = True

    def __init__(self, name: str, spec: JobSpec, *pems: str, reports: JobSpec | None = None) -> None:
        program = (reports or spec).program_digest()
        self.view = View(name, {"authorities": print_of(*pems), "program": program})
        self.spec = spec
        self.pems = pems

    async def call(self, op: str, args: dict[str, Any] | None = None, **_: Any) -> Answer:
        assert op == "describe"
        return Answer({"ca": "".join(self.pems), "spec": self.spec.to_json()})

    async def try_call(self, op: str, args: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
        assert op == "trust"
        self.pems = tuple(fingerprints("".join(self.pems) + args["ca"]).values())
        return {"authorities": print_of(*self.pems)}

    def learn(self, identity: dict[str, Any]) -> None:
        self.view.identity.update(identity)


class FakeHub:
    """A session that has joined a running job."""

    spec: JobSpec | None = None

    def __init__(self, *links: FakeLink) -> None:
        self.links = links
        self.authorities: dict[str, str] = {}
        self.notices: list[str] = []

    async def reach(self) -> None:
        """All are connected to."""

    def opened_links(self, live: bool | None = None) -> list[FakeLink]:
        return list(self.links)

    def trust(self, given: dict[str, str]) -> None:
        self.authorities.update(given)

    def notice(self, text: str, level: str) -> None:
        self.notices.append(text)


def described(*links: FakeLink) -> tuple[JobSpec, list[str]]:
    hub: Any = FakeHub(*links)
    return asyncio.run(admission.description(hub)), hub.notices


def believed(*links: FakeLink) -> list[set[str]]:
    """Return whom each node believes in the end."""
    hub: Any = FakeHub(*links)
    asyncio.run(admission.spread(hub))
    return [set(print_of(*link.pems)) for link in links]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_the_description_is_the_one_that_most_nodes_have(place: int) -> None:
    links = [FakeLink(f"n{number + 1}", EVIL if number == place else SPEC, CA) for number in range(3)]
    spec, notices = described(*links)
    assert spec == SPEC
    assert notices == [f"n{place + 1}: its description of the job differs from that of the other nodes; not used"]


def test_without_a_majority_there_is_no_description() -> None:
    with pytest.raises(RequestFailed, match="the nodes have different descriptions of the job: n1 n2"):
        described(FakeLink("n1", SPEC, CA), FakeLink("n2", EVIL, CA))


def test_a_node_that_answers_another_description_than_it_reports_is_passed_over() -> None:
    liar = FakeLink("n1", EVIL, CA, reports=SPEC)
    assert described(liar, FakeLink("n2", SPEC, CA)) == (SPEC, [])
    with pytest.raises(RequestFailed, match="n1: its description is not the one that it reports"):
        described(liar)


def test_nodes_that_are_added_and_new_files_are_no_other_description() -> None:
    later = dataclasses.replace(SPEC, nodes=SPEC.nodes[:1], tree_digest="f" * 64)
    assert described(FakeLink("n1", later, CA), FakeLink("n2", SPEC, CA)) == (later, [])


def test_an_authority_that_most_nodes_believe_reaches_the_others() -> None:
    links = FakeLink("n1", SPEC, CA, OTHER_CA), FakeLink("n2", SPEC, CA), FakeLink("n3", SPEC, OTHER_CA, CA)
    assert believed(*links) == [set(print_of(CA, OTHER_CA))] * 3


@pytest.mark.parametrize("others", [1, 2])
def test_an_authority_that_one_node_has_made_up_reaches_nobody(others: int) -> None:
    links = [FakeLink("n1", SPEC, EVIL_CA, CA), *(FakeLink(f"n{number + 2}", SPEC, CA) for number in range(others))]
    assert believed(*links)[1:] == [set(print_of(CA))] * others


def test_what_this_session_has_made_reaches_every_linked_node() -> None:
    links = FakeLink("n1", SPEC, CA), FakeLink("n2", SPEC, CA)
    hub: Any = FakeHub(*links)
    issuer = admission.Issuer(hub, "job")
    assert issuer.authority() is issuer.authority()
    asyncio.run(admission.spread(hub))
    assert [print_of(*link.pems) for link in links] == [print_of(CA, issuer.authority().ca)] * 2


def test_a_certificate_counts_while_the_others_believe_its_authority() -> None:
    stale, own = FakeLink("n1", SPEC, OTHER_CA, CA), FakeLink("n2", SPEC, CA)
    hub: Any = FakeHub(stale, own)
    link: Any
    for link, counts in ((stale, False), (own, True)):
        assert admission.is_certified(hub, link) == counts


# Agents of one job trust each other and nobody else: proved with the ssl module that they use.


def _context(directory: Path, side: int, authority: Authority, leaf: Leaf) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    pem = directory / f"{abs(hash(leaf.cert))}.pem"
    pem.write_text(leaf.cert + leaf.key)
    context.load_cert_chain(pem)
    context.load_verify_locations(cadata=authority.ca)
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def meet(directory: Path, ours: Authority, theirs: Authority, called: str = "n2") -> ssl.SSLObject:
    """Let a node with a certificate of theirs connect to our n2, and call it so; returns n2's end."""
    client_leaf, server_leaf = sign_with(theirs.ca, theirs.ca_key, "n1"), sign_with(ours.ca, ours.ca_key, "n2")
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client_context = _context(directory, ssl.PROTOCOL_TLS_CLIENT, ours, client_leaf)
    client = client_context.wrap_bio(to_client, to_server, server_hostname=called)
    server_context = _context(directory, ssl.PROTOCOL_TLS_SERVER, ours, server_leaf)
    server = server_context.wrap_bio(to_server, to_client, server_side=True)
    done = {client: False, server: False}
    for _ in range(10):
        for side in (client, server):
            try:
                side.do_handshake()
                done[side] = True
            except ssl.SSLWantReadError:
                pass
        if all(done.values()):
            break
    assert all(done.values())
    server.write(b"over")
    assert client.read(4) == b"over"
    return server


def test_nodes_of_one_job_meet_by_name_and_no_others_do(tmp_path: Path) -> None:
    ours = make_authority("train-k3f9")
    certificate = some(meet(tmp_path, ours, ours).getpeercert())
    assert certificate["subjectAltName"] == (("DNS", "n1"),)
    with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
        meet(tmp_path, ours, ours, "n3")
    with pytest.raises(ssl.SSLError, match="(?i)verify failed|unknown ca"):
        meet(tmp_path, ours, make_authority("train-k3f9"))


def test_validity_and_constraints() -> None:
    authority = make_authority("j" * 64)
    leaf = x509.load_pem_x509_certificate(sign_with(authority.ca, authority.ca_key, "n" * 80).cert.encode())
    span = leaf.not_valid_after_utc - leaf.not_valid_before_utc
    assert 3650 <= span.days <= 3660
    assert not leaf.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["n" * 80]


def test_who_knows_the_secret_is_trusted_and_nobody_else(tmp_path: Path) -> None:
    ours, theirs = make_authority("job", b"a secret in common"), make_authority("job", b"a secret in common")
    meet(tmp_path, ours, theirs)
    for other in (make_authority("job", b"another secret"), make_authority("another", b"a secret in common")):
        with pytest.raises(ssl.SSLError):
            meet(tmp_path, ours, other)


def test_a_guess_of_the_secret_is_expensive_and_a_start_is_not() -> None:
    begun = time.process_time()
    make_authority("job", b"hunter2hunter2hunter2")
    needed_s = time.process_time() - begun
    assert 0.02 < needed_s < 5


# A hostile coordinator: its orders run no program on another node but the one that the operator has brought there.


OWN = {"LR": "0.1", "NCCL_DEBUG": "WARN"}


def context(rendezvous: Rendezvous | None = None) -> Any:
    """Return what this module needs of n1's context."""
    nodes = (NodeSpec("n1", "10.0.0.1", "2", env={"LR": "0.2"}), NodeSpec("n2", "10.0.0.2", "2"))
    spec = JobSpec("job", "train.py", nodes, args=("--lr",), workdir="/", env=OWN, rendezvous=rendezvous)
    files = Home(Path("/home/supervisor")).job("job")
    return SimpleNamespace(spec=spec, node="n1", address="10.0.0.1", workdir="/", files=files)


def ordered(**changes: Any) -> dict[str, Any]:
    """Return a coordinator's `go`."""
    ranks = dict.fromkeys(("generation", "group_rank", "base_rank", "restart_count", "max_restarts"), 0)
    sizes = {"local_world_size": 2, "world_size": 4, "group_world_size": 2, "master_port": 29500}
    return {**ranks, **sizes, "master_addr": "10.0.0.2", "rendezvous": None, "set_env": {}, "tree": None, **changes}


EVIL_NAMES = (
    "PYTHONWARNINGS", "BROWSER", "PYTHONPATH", "PYTHONSTARTUP", "LD_PRELOAD", "PATH", "BASH_ENV", "OMP_NUM_THREADS",
    "NCCL_NET_PLUGIN", "NCCL_TUNER_PLUGIN", "NCCL_CONF_FILE", "NCCL_DEBUG_FILE", "NCCL_CUDA_PATH", "TORCH_HOME",
    "TORCH_EXTENSIONS_DIR", "TORCH_LOGS_OUT", "TORCH_ADDR2LINE_BINARY", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD",
    "NCCL_DEBUG\n", "nccl_debug", "XNCCL_DEBUG",
)  # fmt: skip
EVIL_VALUES = ("/tmp/evil.so", "..\\evil", "x" * 1025, "a\nb")


@pytest.mark.parametrize(
    ("name", "value"), [*((name, "1") for name in EVIL_NAMES), *(("NCCL_NET", value) for value in EVIL_VALUES)]
)
def test_a_coordinator_cannot_set_what_may_run_or_name_a_file(name: str, value: str) -> None:
    with pytest.raises(Problem, match="the coordinator's order is refused"):
        orders.go(context(), ordered(set_env={name: value}))


def test_the_words_that_no_name_may_have_are_those_of_the_architecture() -> None:
    text = " ".join((Path(__file__).parents[2] / "ARCHITECTURE.md").read_text().split())
    listed = some(re.search(r"no word of it is ([A-Z, ]+) or ([A-Z]+);", text))
    words = {*listed[1].split(", "), listed[2]}
    assert words == environment.FILE_WORDS
    assert all("(" + word + ")" in environment.refusal(f"NCCL_{word}_A", "1") for word in words)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NCCL_DEBUG", "INFO"), ("NCCL_IB_HCA", "=mlx5_0:1,mlx5_1:1"),
        ("NCCL_ALGO", "allreduce:tree,ring;broadcast:ring"), ("NCCL_SOCKET_IFNAME", "^lo,docker0"),
        ("TORCH_LOGS", "+dynamo,recompiles"), ("TORCH_DISTRIBUTED_DEBUG", "DETAIL"),
        ("TORCH_NCCL_TRACE_BUFFER_SIZE", "2000"), ("GLOO_SOCKET_IFNAME", "eth0"),
    ],
)  # fmt: skip
def test_what_operators_set_while_a_job_runs_reaches_the_workers(name: str, value: str) -> None:
    assert environment.refusal(name, value) == ""
    assert orders.go(context(), ordered(set_env={name: value}))["env"] == {**OWN, "LR": "0.2", name: value}


def test_program_and_directories_are_those_of_this_node_whatever_is_ordered() -> None:
    evil = {
        "env": {"LD_PRELOAD": "evil.so"}, "script": "evil.py", "args": ["evil"], "kind": "binary", "cwd": "/tmp",
        "log_dir": "/tmp", "links": "/tmp", "role": "evil", "run_id": "evil", "numa_binding": "evil",
        "signals_to_handle": "evil", "shutdown_timeout": 0, "virtual_local_rank": True,
    }  # fmt: skip
    assert orders.go(context(), ordered(**evil)) == orders.go(context(), ordered())


def test_a_store_is_opened_at_the_nodes_own_address() -> None:
    asked = {"generation": 3, "host": "192.0.2.9", "port": 0, "hold": True, "ports": "1-9", "more": "x"}
    wanted = {"generation": 3, "host": "10.0.0.1", "port": 0, "hold": True, "ports": ""}
    assert orders.prepare(context(), asked) == wanted


MEETING = {"backend": "c10d", "endpoint": "10.0.0.2:1", "run_id": "r.1", "nnodes": "2", "conf": "", "is_ours": True}


def test_torchs_agents_meet_as_the_order_says() -> None:
    own = context(Rendezvous("c10d", "r", conf="timeout=5"))
    order = orders.go(own, ordered(rendezvous={**MEETING, "backend": "evil", "conf": "evil=1", "local_addr": "x"}))
    assert order["rendezvous"] == {**MEETING, "conf": "timeout=5", "local_addr": "10.0.0.1"}


@pytest.mark.parametrize(
    ("described", "ordered_meeting"),
    [
        (None, MEETING),
        (Rendezvous("c10d", "r"), None),
        (Rendezvous("c10d", "r"), {**MEETING, "run_id": "another"}),
        (Rendezvous("c10d", "r"), {**MEETING, "nnodes": "2:x"}),
    ],
)
def test_another_way_to_meet_is_refused(described: Rendezvous | None, ordered_meeting: dict[str, Any] | None) -> None:
    with pytest.raises(Problem, match="the coordinator's order is refused"):
        orders.go(context(described), ordered(rendezvous=ordered_meeting))


def test_what_the_coordinator_really_sends_is_a_whole_order_for_the_engine(tmp_path: Path) -> None:
    own = context()
    members = {node.name: s.Node(node, nproc=2) for node in own.spec.nodes}
    groups = (*quorum.first("n2", ""), quorum.Group(4, 1, {"n1": "", "n2": ""}, ("n2", "")))
    state = s.State(
        own.spec, "n2", term=1, nodes=members, members=s.ranked(("n1", "n2")), generation=4, env={"NCCL_DEBUG": "INFO"},
        groups=groups, recorded=frozenset({"n2"}), port=29500,
    )  # fmt: skip
    turn = Turn(state, 0.0, 0)
    formation.go_when_recorded(turn)
    sent = next(one for one in turn.commands if isinstance(one, s.Send) and one.node == "n1")
    own.workdir = str(tmp_path)
    order = Order.from_args(orders.go(own, dict(sent.args)))
    assert (order.base_rank, order.world_size, order.script, order.env["NCCL_DEBUG"]) == (0, 4, "train.py", "INFO")
