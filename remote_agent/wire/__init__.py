"""Everything that both sides share: frames, calls and the documents in them.

In: bytes of a stream. Out: frames, answers, typed documents. Nothing here is pickled or evaluated.
"""

from remote_agent.wire.channel import (
    Answer,
    CallFailed,
    Channel,
    ChannelClosed,
    Handler,
    Items,
    Problem,
)
from remote_agent.wire.frames import (
    MAGIC,
    MAX_BODY,
    MAX_HEADER,
    PROTOCOL,
    Frame,
    ProtocolError,
    WireError,
    encode,
    read_frame,
)
from remote_agent.wire.job_spec import (
    FIRST_TERM,
    JOB_NAME,
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
    "split_endpoint",
]
