"""The `torchrun.handlers` plugin: `torchrun --rdzv-backend supervisor`, for nodes that are started by others.

In: torchrun's RendezvousParameters, a secret that all nodes share. Out: torchrun's rendezvous handler, with a
certificate for this node. torch imports this module everywhere, so it imports what it needs only when it is used.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from remote_agent.bridge.joining import JoiningNode

KEY_VARIABLE = "SUPERVISOR_RDZV_KEY"
SHORTEST_KEY = 16
LOCAL_KEY = "rdzv.key"
# torchrun's name for a job without --rdzv-id.
NO_ID = "none"


def handler() -> Callable[[Any], Any]:
    """Return the function that makes the handler; torch calls this entry point."""
    return create


def create(params: Any) -> Any:
    """Return torchrun's rendezvous handler; ends torchrun with a message if this node cannot take part."""
    from remote_agent.bridge.joining import JoiningNode, check_conf
    from remote_agent.engine.launchers import torchrun_handler
    from remote_agent.engine.launchers.inside_torchrun import say
    from remote_agent.wire import Problem

    try:
        check_conf(params.config)
        place = JoiningNode(params)
        secret = _secret(place)
    except Problem as problem:
        _refuse(problem)

    if params.run_id == NO_ID:
        say(NO_ID, f"without --rdzv-id the job is called {NO_ID!r}, like every job without one")
    if ":" not in params.endpoint:
        say(params.run_id, f"--rdzv-endpoint {params.endpoint} has no port: using {place.port}")

    def begin(spec: Any, grace_s: float) -> Any:
        try:
            return place.start(place.describe(spec, grace_s), _certificate(place, secret))
        except Problem as problem:
            _refuse(problem)

    return torchrun_handler.make_handler(params.run_id, begin)


def _refuse(problem: Any) -> NoReturn:
    from remote_agent.text.controls import escape_controls

    hint = f" ({problem.hint})" if problem.hint else ""
    raise SystemExit(escape_controls(f"torchrun --rdzv-backend supervisor: {problem.message}{hint}"))


def _certificate(place: JoiningNode, secret: bytes) -> dict[str, str]:
    from supervisor.launch.certificates import make_authority, sign_with

    authority = make_authority(place.params.run_id, secret)
    leaf = sign_with(authority.ca, authority.ca_key, place.node)
    return {"ca": authority.ca, "cert": leaf.cert, "key": leaf.key}


def _secret(place: JoiningNode) -> bytes:
    """Return the secret that all nodes of the job share; raises Problem."""
    from remote_agent.bridge.joining import is_loopback
    from remote_agent.wire import Problem

    # The workers must not have it: anyone who knows it may join the job and read its logs.
    text = os.environ.pop(KEY_VARIABLE, "").encode()
    path = place.params.get("key_file")
    if path:
        try:
            text = Path(os.path.expanduser(path)).read_bytes()
        except OSError as error:
            raise Problem("key", f"key_file {path}: {error.strerror}") from error
    elif not text and is_loopback(place.address):
        text = _local_key(place.files.home.root / LOCAL_KEY)
    text = text.strip()
    if not text:
        hint = f"--rdzv-conf key_file=PATH, or {KEY_VARIABLE} in the environment; the same on every node"
        raise Problem("key", "the nodes need a shared secret", hint)
    if len(text) < SHORTEST_KEY:
        raise Problem("key", f"the key has {len(text)} bytes, fewer than {SHORTEST_KEY}", "openssl rand -hex 32 > PATH")
    return text


def _local_key(path: Path) -> bytes:
    """Return this user's key for jobs on this machine alone; it is made at its first use."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(32))
    # The file is linked, not renamed: of several processes at once, all use the key of the first.
    with contextlib.suppress(FileExistsError):
        os.link(draft, path)
    draft.unlink()
    return path.read_bytes()
