"""A job whose agent is not on this node, as its files show it.

In: the request that opens it. Out: the answers to all that follow.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from remote_agent.agent.file_requests import FileRequests
from remote_agent.base.files import read_json
from remote_agent.base.streams import open_pipes
from remote_agent.wire import Channel, Frame, Problem

if TYPE_CHECKING:
    from remote_agent.base.paths import JobFiles
    from remote_agent.bridge.operator import Operator


async def serve(operator: Operator, frame: Frame, files: JobFiles) -> bool:
    """Answer until the operator leaves; return False when the files cannot be read. Raises OSError."""
    try:
        requests = FileRequests(files)
    except (OSError, ValueError, KeyError, TypeError) as error:
        message = f"the files of job {files.name} cannot be read: {error}"
        hint = f"supervisor clean removes it; its logs lie in {files.root}"
        operator.refuse(frame, Problem("broken_job", message, hint))
        return False
    operator.answer(frame, {"live": False, "node": read_json(files.node).get("node")})
    source, sink = (os.fdopen(fd, mode, 0) for fd, mode in ((operator.source, "rb"), (operator.sink, "wb")))
    await Channel(*await open_pipes(source, sink), requests.handle).run()
    return True
