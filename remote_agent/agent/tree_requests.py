"""The work tree as requests: the sync of one connection, and what the agent of a job does with its tree.

In: `tree_*` requests of a bridge or an agent; the digest that a `go` carries. Out: answers; a tree that is switched
before workers start.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from remote_agent.agent import jobs
from remote_agent.base.paths import Home, check_name
from remote_agent.base.tasks import to_the_end
from remote_agent.tree.sync import TreeSync, left_in
from remote_agent.wire import Args, Problem

if TYPE_CHECKING:
    from remote_agent.tree.manifest import SyncPlan

T = TypeVar("T")

# This is long enough for another operator's small sync of the same tree, or launch from it, to end.
LOCK_DEADLINE_S = 10.0
# This is shorter than the coordinator waits for the workers.
SWITCH_DEADLINE_S = 40.0
POLL_S = 0.05
MAX_LISTED = 200


class TreeRequests:
    """The sync of one connection. `job`: that of the agent that serves it; its own group may run from the tree."""

    def __init__(self, home: Home, job: str = "") -> None:
        self._home = home
        self._job = job
        self._sync = TreeSync(home)
        self._alone = False
        """No other live job may run from the tree: the lock is kept until this launch's agent runs from it."""
        self._turn = asyncio.Lock()
        self.ops: dict[str, Callable[[dict[str, Any], bytes], Awaitable[dict[str, Any]]]] = {
            "tree_has": self._has,
            "tree_plan": self._plan,
            "tree_put": self._put,
            "tree_commit": self._commit,
        }
        if job:
            self.ops.update(tree_differences=self._differences, tree_free=self._free)

    def close(self) -> None:
        """Give back what a half-done sync holds."""
        self._sync.close()

    async def leave(self) -> None:
        """Close once the work in a thread has ended."""
        async with self._turn:
            self._sync.close()

    async def _in_turn(self, work: Callable[..., T], *args: Any) -> T:
        """Do one thing in a thread: in the order of the requests, and to its end."""
        async with self._turn:
            return await to_the_end(asyncio.to_thread(work, *args))

    async def _has(self, args: Args, body: bytes) -> dict[str, Any]:
        look = self._sync.digests if args.get("kept") else self._sync.in_place
        return {"has": str(args["digest"]) in await self._in_turn(look, _name(args))}

    async def _differences(self, args: Args, body: bytes) -> dict[str, Any]:
        paths_by_kind = await self._in_turn(self._sync.differences, _name(args), body)
        numbers = {"files": len(paths_by_kind["changed"]) + len(paths_by_kind["removed"])}
        return {**numbers, **{key: paths[:MAX_LISTED] for key, paths in paths_by_kind.items()}}

    async def _free(self, args: Args, body: bytes) -> dict[str, Any]:
        """Refuse where another job runs from the tree, which must not change under it."""
        self._refuse_used(_name(args))
        return {}

    async def _plan(self, args: Args, body: bytes) -> dict[str, Any]:
        tree = _name(args)
        await lock(self._sync, tree)
        try:
            plan = await self._in_turn(self._sync.plan, tree, body)
            self._alone = bool(args.get("alone"))
            if self._alone or plan.changed or plan.removed:
                self._refuse_used(tree, alone=self._alone)
            left = await self._in_turn(left_in, plan)
        except BaseException:
            self._sync.close()
            raise
        return {"missing": list(plan.missing), "left": left[:MAX_LISTED], **_numbers(plan)}

    def _refuse_used(self, tree: str, *, alone: bool = False) -> None:
        """Refuse if another job runs from the tree; `alone`: because it does, not because its files would change."""
        user = jobs.running_from(self._home, tree, self._job)
        if user is not None and alone:
            hint = (
                f"watch it: supervisor attach HOSTS {user}; end it: supervisor stop HOSTS {user}; --job NAME gives "
                f"this job a work tree of its own; --force shares the files of {user}, its snapshots too"
            )
            raise Problem("tree_in_use", f"job {user} is live and runs from the same work tree", hint)
        if user is not None:
            hint = f"stop {user} first, or launch with --no-sync to run the files that are there"
            raise Problem("tree_in_use", f"job {user} runs from tree {tree}, whose files would change", hint)

    async def _put(self, args: Args, body: bytes) -> dict[str, Any]:
        await self._in_turn(self._sync.put, _name(args), args["parts"], body, bool(args.get("packed")))
        return {}

    async def _commit(self, args: Args, body: bytes) -> dict[str, Any]:
        tree, digest = _name(args), str(args.get("digest", ""))
        if self._job:
            # A group runs from the tree, so the new files are for the next group.
            plan = await self._in_turn(self._sync.stage, tree, digest, [str(one) for one in args.get("keep", ())])
        else:
            plan = await self._in_turn(partial(self._sync.commit, keep_lock=self._alone), tree, digest)
        return {**_numbers(plan), "kept_in": str(plan.side / "replaced") if plan.conflicts else None}


class JobTree:
    """The tree of one job on its agent's node; `name`: None where it is not synced."""

    def __init__(self, home: Home, name: str | None) -> None:
        self._home = home
        self.name = name
        self.digests: list[str] = []
        """What a group can be started from here."""
        self.look()

    def look(self) -> None:
        """Learn what is there."""
        if self.name is not None:
            self.digests = TreeSync(self._home).digests(self.name)

    async def switch(self, digest: str | None) -> None:
        """Put in place what the next group starts from, None: what is there; raises Problem."""
        if self.name is None or not digest:
            return
        sync = TreeSync(self._home)
        if digest in await asyncio.to_thread(sync.in_place, self.name):
            return
        await lock(sync, self.name)
        doing = asyncio.ensure_future(asyncio.to_thread(sync.switch, self.name, digest))
        # The lock is released when the switch ends, which may be after the deadline.
        doing.add_done_callback(lambda _: sync.close())
        try:
            await asyncio.wait_for(asyncio.shield(doing), SWITCH_DEADLINE_S)
        except asyncio.TimeoutError as late:
            message = f"the work tree was not in place within {SWITCH_DEADLINE_S:.0f} s"
            raise Problem("tree", message, "is a file system of this node slow, or hanging?") from late
        finally:
            self.look()


async def lock(sync: TreeSync, tree: str) -> None:
    """Take the lock of a tree, waiting for another's sync of it; raises Problem."""
    deadline = time.monotonic() + LOCK_DEADLINE_S
    while not sync.lock(tree):
        if time.monotonic() > deadline:
            raise Problem("tree_busy", f"tree {tree} is being synced by somebody else", "try again in a moment")
        await asyncio.sleep(POLL_S)


def _numbers(plan: SyncPlan) -> dict[str, Any]:
    return {
        "root": str(plan.root),
        "changed": len(plan.changed),
        "removed": len(plan.removed),
        "conflicts": plan.conflicts[:20],
    }


def _name(args: Args) -> str:
    return check_name(args.get("tree"), "tree")
