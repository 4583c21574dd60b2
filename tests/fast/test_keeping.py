"""An engine that outlives its job is taken by the next one in time, or not at all."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from remote_agent.agent.context import Life
from remote_agent.agent.keeping import EngineKeeper, reuse_key, standing
from remote_agent.wire import JobSpec, Problem

SPEC = JobSpec("first", "train.py", ())


class Engine:
    def __init__(self) -> None:
        self.standby = {"state": "ready"}
        self.ended = asyncio.Event()

    async def renew(self, seconds: float) -> None:
        """Nothing is at stake here."""


def test_a_job_that_begins_when_the_time_is_over_is_refused() -> None:
    async def check() -> None:
        engine: Any = Engine()
        files: Any = None
        keeper = EngineKeeper(files, SPEC, Life(), engine)
        taker: Any = object()
        request = {"job": "next", "runs": reuse_key(SPEC), "standing": standing(), "env": {}}
        offer = asyncio.ensure_future(keeper._answer(taker, "take", request))
        await asyncio.sleep(0)
        assert await keeper.wait() is None, "keep_warm is 0"
        assert await offer
        with pytest.raises(Problem, match="not kept any more"):
            await keeper._answer(taker, "begin", {})

    asyncio.run(check())
