"""The authorities that a node trusts: `ca.pem`, its own first, then those that operators have added.

In: PEM text that an operator has brought over SSH. Out: the file, and a fingerprint of each authority in it. No node
has the key of an authority, so no node can make a certificate that another one trusts.
"""

from __future__ import annotations

import hashlib
import re
import ssl
from pathlib import Path

from remote_agent.base.files import atomic_write, read_text
from remote_agent.wire import Problem

_PEM = re.compile(r"-----BEGIN CERTIFICATE-----\n[A-Za-z0-9+/=\n]+-----END CERTIFICATE-----\n?")


def _split(text: str) -> dict[str, str]:
    """Return each certificate of a PEM text by its fingerprint, in order."""
    pems = [match[0].rstrip("\n") + "\n" for match in _PEM.finditer(text)]
    return {hashlib.sha256(ssl.PEM_cert_to_DER_cert(pem)).hexdigest(): pem for pem in pems}


def read(path: Path) -> list[str]:
    """Return the fingerprints of the authorities in a file, its node's own first."""
    return list(_split(read_text(path)))


def add(path: Path, text: str) -> None:
    """Trust further authorities; raises Problem for what is no certificate, OSError."""
    known, added = _split(read_text(path)), _split(text)
    if added.keys() <= known.keys():
        return
    both = "".join({**known, **added}.values())
    try:
        # A certificate that cannot be read later would shut all nodes out.
        ssl.create_default_context(cadata=both)
    except ssl.SSLError as error:
        raise Problem("bad_request", f"not a certificate: {error}") from error
    atomic_write(path, both.encode())
