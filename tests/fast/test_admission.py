"""A node that lies about the job: other nodes do not get its description, nor its authorities."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from remote_agent.wire import Answer, JobSpec, NodeSpec
from supervisor.control import admission
from supervisor.errors import RequestFailed
from supervisor.launch.certificates import fingerprints, make_authority

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
