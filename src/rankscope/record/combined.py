"""Statistics of a whole tensor, as combination makes them and readers of a trace see them."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Combined"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Combined:
    """Statistics of one global tensor; None where a number cannot be known."""

    ranks: tuple[int, ...]
    """Ranks that together hold it."""
    note: str | None = None
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

    @property
    def is_known(self) -> bool:
        """True where at least the mean and the sketch of the whole could be combined."""
        return self.count is not None
