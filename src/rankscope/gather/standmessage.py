"""What a relay says of a host that stood still; `protocol` has how it is written."""

from __future__ import annotations

from dataclasses import dataclass

from rankscope.record.standstill import Standstill

__all__ = ["Stands"]


@dataclass(frozen=True, slots=True)
class Stands:
    """The last time in which no rank of this host moved: a `Standstill` on its way."""

    since_ns: int
    noticed_ns: int
    over_ns: int
    is_by_end: bool
    host: str
    where: str

    @classmethod
    def of(cls, standstill: Standstill) -> Stands:
        """Return the message that tells of a standstill."""
        return cls(
            standstill.since_ns,
            standstill.noticed_ns,
            standstill.over_ns,
            standstill.is_by_end,
            standstill.host,
            standstill.where,
        )

    def standstill(self) -> Standstill:
        """Return what it tells of."""
        return Standstill(
            host=self.host,
            since_ns=self.since_ns,
            noticed_ns=self.noticed_ns,
            over_ns=self.over_ns,
            is_by_end=self.is_by_end,
            where=self.where,
        )
