"""What a view of the logs is narrowed to.

In: patterns as typed, a level. Out: the same in the words of the nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

LEVELS: Final = ("", "warn", "error")


@dataclass(frozen=True)
class Filter:
    """Keeps records of which a line matches one of `include` (none: any), none one of `exclude`, one has the level."""

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    level: str = ""

    def __bool__(self) -> bool:
        return bool(self.include or self.exclude or self.level)

    def args(self) -> dict[str, Any]:
        """Return the filter in the words of the log_* requests; what is not set is left out."""
        named = {"include": list(self.include), "exclude": list(self.exclude), "level": self.level}
        return {name: value for name, value in named.items() if value}


ALL = Filter()
