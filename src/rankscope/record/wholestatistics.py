"""Statistics of a whole tensor, as combination makes them and readers of a trace see them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rankscope.record.notes import Note
from rankscope.record.statistics import ADDED, MEASURED


@dataclass(frozen=True, slots=True, kw_only=True)
class Combined:
    """Statistics of one global tensor; None where a number cannot be known."""

    ranks: tuple[int, ...]
    note: Note | None = None
    """Why numbers are missing; None where all are there."""
    count: int | None = None
    nan: int | None = None
    posinf: int | None = None
    neginf: int | None = None
    zero: int | None = None
    min: float | None = None
    max: float | None = None
    mean: float | None = None
    std: float | None = None
    l2: float | None = None
    sketch: tuple[float, ...] | None = None
    added: Mapping[str, float | None] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        numbers: Mapping[str, Any],
        *,
        ranks: tuple[int, ...],
        sketch: tuple[float, ...] | None,
        note: Note | None = None,
    ) -> Combined:
        """Return the whole with these statistics, by name; None for those that are left out."""
        added = {s.name: numbers.get(s.name) for s in ADDED}
        measured = {s.name: numbers.get(s.name) for s in MEASURED}
        return cls(ranks=ranks, note=note, **measured, sketch=sketch, added=added)

    def number(self, name: str) -> float | int | None:
        """Return a statistic by its name in the table, None where it is not known."""
        found: float | int | None = self.added[name] if name in self.added else getattr(self, name)
        return found

    @property
    def is_known(self) -> bool:
        """True where at least the mean and the sketch of the whole could be combined."""
        return self.count is not None
