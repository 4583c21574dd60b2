"""What the coordinator orders: plain frozen data that the shell around it carries out, in this order.

In: nothing. Out: Command types; state.py offers them beside State and Event.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Union


@dataclasses.dataclass(frozen=True)
class Emit:
    """Write a fact to the journal."""

    type: str
    generation: int
    node: str | None = None
    rank: int | None = None
    detail: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Send:
    """Send an order to a node's agent; the shell adds the term."""

    node: str
    op: str
    args: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Drop:
    """Close a node's connection: when it lives, it has to join anew."""

    node: str


@dataclasses.dataclass(frozen=True)
class HandOver:
    """Give the role to that node; it forms the next generation."""

    node: str


@dataclasses.dataclass(frozen=True)
class Reply:
    """Answer the operator's request: accepted, or refused with kind, message and hint."""

    accepted: bool
    message: str
    generation: int = -1
    kind: str = ""
    hint: str = ""


Command = Union[Emit, Send, Drop, HandOver, Reply]
