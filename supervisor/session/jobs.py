"""Which job is meant where none is named.

In: what the hosts answered to `jobs`. Out: one row per job; the chosen job's name, or why there is no choice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from supervisor.errors import RequestFailed, Unreachable, UsageError
from supervisor.session.view import ENDED_STATES


def group_jobs(answers: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Return one row per job, newest first: the newest host's state, all hosts' names; live: it goes on somewhere."""
    rows: dict[str, dict[str, Any]] = {}
    for host, jobs in answers.items():
        for entry in jobs:
            row = rows.get(entry["job"])
            if row is None:
                row = rows[entry["job"]] = {**entry, "hosts": [], "live": False}
                row.pop("node", None)
                row.pop("agent_pid", None)
            elif _age(entry) > _age(row):
                row.update({key: entry.get(key) for key in ("state", "updated_ns", "generation", "world_size")})
            row["hosts"].append(host)
            row["live"] = row["live"] or bool(entry.get("live"))
    for row in rows.values():
        # Agents stay for some seconds after the end, and longer while somebody looks.
        row["live"] = row["live"] and row.get("state") not in ENDED_STATES
    return sorted(rows.values(), key=lambda row: (row.get("created_ns") or 0, row["job"]), reverse=True)


def _age(entry: Mapping[str, Any]) -> tuple[int, bool, int]:
    """Return what grows with a job: its end is the last of its generation, whatever a node that was cut off writes."""
    return entry.get("generation") or 0, entry.get("state") in ENDED_STATES, entry.get("updated_ns") or 0


def choose_job(answers: Mapping[str, Sequence[Mapping[str, Any]]], *, live_only: bool) -> str:
    """Return the one live job, else the newest.

    `live_only`: raises UsageError where several are live, RequestFailed where all are over. Unreachable: none is known.
    """
    rows = group_jobs(answers)
    live = [row for row in rows if row["live"]]
    if len(live) == 1:
        return str(live[0]["job"])
    if live_only and live:
        names = " ".join(row["job"] for row in live)
        raise UsageError(f"{len(live)} jobs are live here: {names}", "name the one you mean")
    if not rows:
        raise Unreachable("these hosts know no job", "`supervisor up` starts one")
    if live_only:
        newest = f"the newest, {rows[0]['job']}, is over: {rows[0].get('state')}"
        raise RequestFailed(f"no job is live on these hosts; {newest}", "`supervisor jobs` lists all of them", "ended")
    return str((live or rows)[0]["job"])
