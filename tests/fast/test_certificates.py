"""Agents of one job trust each other and nobody else: proved with the ssl module that they use."""

from __future__ import annotations

import ssl
import time
from pathlib import Path

import pytest
from cryptography import x509

from supervisor.launch.certificates import Authority, Leaf, make_authority, sign_with


def _context(directory: Path, side: int, authority: Authority, leaf: Leaf) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    pem = directory / f"{abs(hash(leaf.cert))}.pem"
    pem.write_text(leaf.cert + leaf.key)
    context.load_cert_chain(pem)
    context.load_verify_locations(cadata=authority.ca)
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def _handshake(client_context: ssl.SSLContext, server_context: ssl.SSLContext, name: str) -> ssl.SSLObject:
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(to_client, to_server, server_hostname=name)
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


def _pair(directory: Path, authority: Authority, other: Authority, name: str) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    client = _context(directory, ssl.PROTOCOL_TLS_CLIENT, authority, sign_with(other.ca, other.ca_key, "n1"))
    server = _context(directory, ssl.PROTOCOL_TLS_SERVER, authority, sign_with(authority.ca, authority.ca_key, name))
    return client, server


def test_nodes_of_one_job_meet_by_name(tmp_path: Path) -> None:
    authority = make_authority("train-k3f9")
    client, server = _pair(tmp_path, authority, authority, "n2")
    ended = _handshake(client, server, "n2")
    certificate = ended.getpeercert()
    assert certificate is not None
    assert certificate["subjectAltName"] == (("DNS", "n1"),)


def test_another_name_is_refused(tmp_path: Path) -> None:
    authority = make_authority("train-k3f9")
    client, server = _pair(tmp_path, authority, authority, "n2")
    with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
        _handshake(client, server, "n3")


def test_another_job_of_the_same_name_is_refused(tmp_path: Path) -> None:
    client, server = _pair(tmp_path, make_authority("train"), make_authority("train"), "n2")
    with pytest.raises(ssl.SSLError, match="(?i)verify failed|unknown ca"):
        _handshake(client, server, "n2")


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
    client, server = _pair(tmp_path, ours, theirs, "n2")
    _handshake(client, server, "n2")
    for other in (make_authority("job", b"another secret"), make_authority("another", b"a secret in common")):
        client, server = _pair(tmp_path, ours, other, "n2")
        with pytest.raises(ssl.SSLError):
            _handshake(client, server, "n2")


def test_a_guess_of_the_secret_is_expensive_and_a_start_is_not() -> None:
    begun = time.process_time()
    make_authority("job", b"hunter2hunter2hunter2")
    needed_s = time.process_time() - begun
    assert 0.02 < needed_s < 5
