"""The certificate authority of one job: its agents trust each other and no one else.

In: the names of a job and its nodes. Out: PEM text of the authority and of one certificate per node.
"""

from __future__ import annotations

import datetime
import hashlib
import secrets
import time
from dataclasses import dataclass, field

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

# The bits of a serial number below the time of the issue, as election/peers.py of the agent reads it.
SERIAL_BITS = 64
VALID = datetime.timedelta(days=3653)
# The clocks of nodes may be behind the operator's.
EARLIER = datetime.timedelta(days=2)
# The limit of a common name; peers check the subject alternative name, which may be longer.
LONGEST_COMMON_NAME = 64
# SECP256R1 has this many private keys; the seed has more bytes, so that the remainder is evenly distributed.
KEYS = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551 - 1
SEED_BYTES = 48
# 64 MiB and 0.2 s of one core, once for each torchrun.
SCRYPT_N, SCRYPT_R = 2**16, 8


@dataclass(frozen=True)
class Authority:
    """A job's authority: its certificate and its private key, as PEM text."""

    ca: str
    ca_key: str = field(repr=False)
    """The key stays in the memory of the command that made it: its owner can pose as any node."""


@dataclass(frozen=True)
class Leaf:
    """One node's certificate and private key, as PEM text."""

    cert: str
    key: str


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name[:LONGEST_COMMON_NAME])])


def _pem(key: ec.EllipticCurvePrivateKey) -> str:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()


def _builder(
    subject: x509.Name, issuer: x509.Name, public_key: ec.EllipticCurvePublicKey, after_ns: int = 0
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.timezone.utc)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(max(time.time_ns(), after_ns) << SERIAL_BITS | secrets.randbits(SERIAL_BITS))
        .not_valid_before(now - EARLIER)
        .not_valid_after(now + VALID)
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _key_of(secret: bytes, job: str) -> ec.EllipticCurvePrivateKey:
    # A certificate of the job is enough to try secrets offline, so each try must be expensive.
    salt = b"supervisor job " + job.encode()
    seed = hashlib.scrypt(secret, salt=salt, n=SCRYPT_N, r=SCRYPT_R, p=1, maxmem=2**28, dklen=SEED_BYTES)
    return ec.derive_private_key(int.from_bytes(seed, "big") % KEYS + 1, ec.SECP256R1())


def fingerprints(text: str) -> dict[str, str]:
    """Return each certificate of a PEM text by its SHA-256, in order; raises ValueError."""
    certificates = x509.load_pem_x509_certificates(text.encode())
    return {
        one.fingerprint(hashes.SHA256()).hex(): one.public_bytes(serialization.Encoding.PEM).decode()
        for one in certificates
    }


def make_authority(job: str, secret: bytes | None = None) -> Authority:
    """Return a new authority for one job; with a secret, everyone who knows it gets the same key."""
    key = ec.generate_private_key(ec.SECP256R1()) if secret is None else _key_of(secret, job)
    name = _name(f"supervisor job {job}")
    certificate = (
        _builder(name, name, key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return Authority(certificate.public_bytes(serialization.Encoding.PEM).decode(), _pem(key))


def sign_with(ca_pem: str, ca_key_pem: str, name: str, after_ns: int = 0) -> Leaf:
    """Return a certificate for the node `name`, for server and client; raises ValueError for bad PEM.

    Its serial number says when it was issued, and that is after `after_ns` whatever this machine's clock says: nodes
    refuse what was issued to a node before they went on without it.
    """
    authority = x509.load_pem_x509_certificate(ca_pem.encode())
    authority_key = serialization.load_pem_private_key(ca_key_pem.encode(), password=None)
    if not isinstance(authority_key, ec.EllipticCurvePrivateKey):
        raise ValueError("the authority's key is not an elliptic curve key")  # noqa: TRY004  the text is wrong, not its type
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = (
        _builder(_name(name), authority.subject, key.public_key(), after_ns)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    return Leaf(certificate.public_bytes(serialization.Encoding.PEM).decode(), _pem(key))
