"""Everything that both sides share: frames, calls and the documents in them.

In: bytes of a stream. Out: frames, answers, typed documents. Nothing here is pickled or evaluated. Imports nothing.

A name is imported from its module when it is first used: what starts for each connection needs neither asyncio nor a
job's description, which take longer to import than it takes to answer.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from remote_agent.wire.channel import Answer, Args, CallFailed, Channel, ChannelClosed, Handler, Items, read_frame
    from remote_agent.wire.frames import (
        MAGIC,
        MAX_BODY,
        MAX_HEADER,
        PROTOCOL,
        Frame,
        Problem,
        ProtocolError,
        WireError,
        encode,
        receive,
    )
    from remote_agent.wire.gate import JOB_NAME
    from remote_agent.wire.job_spec import (
        FIRST_TERM,
        PORTS,
        Hook,
        JobSpec,
        NodeSpec,
        Rendezvous,
        SpecError,
        read_conf,
        read_ports,
        split_endpoint,
    )

__all__ = [
    "FIRST_TERM",
    "JOB_NAME",
    "MAGIC",
    "MAX_BODY",
    "MAX_HEADER",
    "PORTS",
    "PROTOCOL",
    "Answer",
    "Args",
    "CallFailed",
    "Channel",
    "ChannelClosed",
    "Frame",
    "Handler",
    "Hook",
    "Items",
    "JobSpec",
    "NodeSpec",
    "Problem",
    "ProtocolError",
    "Rendezvous",
    "SpecError",
    "WireError",
    "encode",
    "read_conf",
    "read_frame",
    "read_ports",
    "receive",
    "split_endpoint",
]

# Modules that are quick to import come first.
_MODULES = ("frames", "gate", "job_spec", "channel")


def __getattr__(name: str) -> Any:
    if name in __all__:
        for module in _MODULES:
            names = vars(importlib.import_module(f"{__name__}.{module}"))
            if name in names:
                return globals().setdefault(name, names[name])
    raise AttributeError(f"module {__name__} has no attribute {name}")
