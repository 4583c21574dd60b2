"""Nodes that are added to a running job: whom they believe, who believes them, and that no node can make another."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
import signal
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from remote_agent.base.files import read_json
from remote_agent.base.paths import Home, JobFiles
from remote_agent.election import authorities, peers
from remote_agent.wire import WireError
from remote_agent.wire.channel import refuse
from supervisor.session import Session
from tests.agents.test_session import has, planned, until
from tests.agents.test_session_hosts import WAIT_S, Hosts, hosts


def files_of(made: Hosts, node: str) -> JobFiles:
    return Home(made.home(node)).job("job-t")


def no_node_has_an_authoritys_key(made: Hosts) -> None:
    certified: set[bytes] = set()
    held: set[bytes] = set()
    form = Encoding.DER, PublicFormat.SubjectPublicKeyInfo
    for path in made.root.glob("n*/jobs/job-t/**/*"):
        text = path.read_bytes() if path.is_file() else b""
        if b"PRIVATE KEY" in text:
            held.add(load_pem_private_key(text, None).public_key().public_bytes(*form))
        if path.name == "ca.pem":
            certified |= {one.public_key().public_bytes(*form) for one in x509.load_pem_x509_certificates(text)}
    assert held
    assert certified
    assert not held & certified


async def reaches(made: Hosts, one: str, other: str) -> bool:
    """Whether an agent believes another node's certificate and is believed."""
    port = int(read_json(files_of(made, other).members)[other]["port"])
    try:
        channel = await peers.connect(peers.Tls(files_of(made, one)), other, "127.0.0.1", port, refuse)
    except peers.PeerUnreachable:
        return False
    running = asyncio.ensure_future(channel.run())
    try:
        # TLS 1.3 lets the client finish first.
        return bool((await channel.call("who", {"term": 0}, timeout=10.0)).data["coordinator"])
    except WireError:
        return False
    finally:
        await channel.close()
        await running


async def test_a_node_is_added_by_another_operator_and_believed_by_all_in_the_end(tmp_path: Path) -> None:
    """One node is out of the operator's reach meanwhile: a session that has a link to it tells it."""

    with hosts(tmp_path, 3, min_nodes=1) as made:
        async with planned(made.inventory(), made, "100000", "0.05", nnodes="2") as session:
            await session.ready()
            await until(session, lambda: has(session, "generation_running"))
            no_node_has_an_authoritys_key(made)
        whole = made.inventory()
        partial = dataclasses.replace(whole, hosts=tuple(host for host in whole.hosts if host.name != "n2"))
        async with Session(partial, follow=True, live_only=True) as other:
            await other.ready()
            answer = await other.request("add", node="n3")
            await until(other, lambda: has(other, "generation_running", answer["generation"]))
            assert any("n2: unreachable; it learns about the new node n3" in notice.text for notice in other.notices)
        no_node_has_an_authoritys_key(made)
        assert [len(authorities.read(files_of(made, node).ca)) for node in ("n1", "n2", "n3")] == [2, 1, 2]
        assert await reaches(made, "n3", "n1")
        assert not await reaches(made, "n3", "n2")
        async with Session(whole, "job-t", attach="control") as third:
            await until(third, lambda: len(third.links["n2"].view.identity.get("authorities", ())) == 2)
            assert await reaches(made, "n3", "n2")
            assert await reaches(made, "n2", "n3")
            await third.request("stop", kill=True)
            await until(third, lambda: third.ended)


async def test_a_lost_agent_keeps_its_certificate_and_one_without_files_gets_another(tmp_path: Path) -> None:
    with hosts(tmp_path, 2, min_nodes=1) as made:
        async with planned(made.inventory(), made, "100000", "0.05") as session:
            await session.ready()
            await until(session, lambda: has(session, "generation_running"))
            before = files_of(made, "n2").cert.read_bytes()
            os.kill(made.agents()["n2/job-t"], signal.SIGKILL)
            # It may be back before its loss was noticed: then one new group follows, not two.
            await until(session, lambda: "n2/job-t" in made.agents() and has(session, "generation_running", 1))
            await until(session, lambda: session.status.get("world_size") == 2 and session.status["state"] == "running")
            assert files_of(made, "n2").cert.read_bytes() == before
            assert len(session.authorities) == 1
            await session.request("remove", node="n2")
            await until(session, lambda: "n2/job-t" not in made.agents())
            shutil.rmtree(files_of(made, "n2").root)
            answer = await session.request("add", node="n2")
            await until(session, lambda: has(session, "generation_running", answer["generation"]))
            assert files_of(made, "n2").cert.read_bytes() != before
            assert set(authorities.read(files_of(made, "n1").ca)) == set(session.authorities)
            assert len(session.authorities) == 2
            no_node_has_an_authoritys_key(made)
            await session.request("stop", kill=True)
            await until(session, lambda: session.ended)


async def test_two_operators_who_add_one_node_at_once_start_one_agent_and_both_succeed(tmp_path: Path) -> None:
    with hosts(tmp_path, 2, min_nodes=1) as made:
        async with planned(made.inventory(), made, "100000", "0.05") as session:
            await session.ready()
            await until(session, lambda: has(session, "generation_running"))
            await session.request("remove", node="n2")
            await until(session, lambda: "n2/job-t" not in made.agents())
            async with Session(made.inventory(), "job-t", follow=True, live_only=True) as other:
                await other.ready()
                await other.settle()
                adding = asyncio.gather(*(one.request("add", node="n2") for one in (session, other)))
                answers = await asyncio.wait_for(adding, WAIT_S)
                assert all(answer["accepted"] for answer in answers)
                await until(other, lambda: other.status.get("world_size") == 2)
            started = (files_of(made, "n2").log).read_text().count("agent of n2 for job-t, peers on port")
            assert started == 2, "one at the launch, one since"
            await session.request("stop", kill=True)
            await until(session, lambda: session.ended)
