"""One condition, and what was found."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Status(enum.Enum):
    """How a condition stands."""

    OK = "ok"
    NOTE = "note"
    """Tracing works; there is something to know."""
    FAILED = "failed"
    SKIPPED = "skipped"
    """Cannot be asked as long as another one fails."""


@dataclass(frozen=True, slots=True)
class Condition:
    """One line of the answer."""

    name: str
    status: Status
    found: str
    remedy: str = ""

    @classmethod
    def ok(cls, name: str, found: str) -> Condition:
        """Return a condition that holds."""
        return cls(name, Status.OK, found)

    @classmethod
    def note(cls, name: str, found: str, remedy: str) -> Condition:
        """Return one that holds, with something to know."""
        return cls(name, Status.NOTE, found, remedy)

    @classmethod
    def failed(cls, name: str, found: str, remedy: str) -> Condition:
        """Return one that does not hold, with what to do."""
        return cls(name, Status.FAILED, found, remedy)

    @classmethod
    def skipped(cls, name: str, because_of: str) -> Condition:
        """Return one that cannot be asked because another fails."""
        return cls(name, Status.SKIPPED, f"cannot be asked: see {because_of!r}")
