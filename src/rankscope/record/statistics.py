"""THE table of statistics: the numbers of a digest beside its hash and its sketch.

Spools, JSON and columns, combination over shards, `show`, the exports and the rules of `check` read
this table; none of them names the statistics again. The capture kernels compute the rows without
`of_values` (`rankscope.capture.measuring.ValueNumbers`). A row with `of_values` is computed in
Python, and needs nothing else but its line in the JSON schema and in docs/trace-format.md.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from rankscope.record.notes import Note

if TYPE_CHECKING:  # a finished tree is read without numpy
    import numpy as np
    import numpy.typing as npt

MOST_ADDED: Final = 4
"""Most rows with `of_values`: a value's record in a spool has no room for more."""


class OverShards(enum.Enum):
    """How the numbers of shards make the number of the whole tensor."""

    SUM = "their sum"
    LEAST = "the least of them"
    GREATEST = "the greatest of them"
    MEAN = "their mean, weighted by finite elements"
    """Linear, and thus the only number of a partial that is known before its reduction."""
    SPREAD = "Chan's update of squared deviations, divisor n - 1"
    ROOT_OF_SQUARES = "root of the sum of their squares"
    UNKNOWN = "not known from shards"


@dataclass(frozen=True, slots=True)
class Statistic:
    """One number of a digest."""

    name: str
    meaning: str
    over_shards: OverShards
    is_count: bool = False
    """A number of elements: u64 in spools and columns, an integer in JSON, always defined. Else
    over the finite elements: f64, in JSON a number or null where it is undefined."""
    is_nonfinite: bool = False
    is_element: bool = False
    """Value of one element: `show` prints it in full where the value is of integers."""
    of_values: Callable[[npt.NDArray[np.float64]], float] | None = None
    """Computes it from the finite elements, flat, at least one. Undefined for tensors on
    accelerators and for values without a finite element. None: the capture kernels compute it."""


STATISTICS: Final = (
    Statistic(
        "count",
        "elements, finite or not; a complex one counts as two",
        OverShards.SUM,
        is_count=True,
    ),
    Statistic("nan", "elements that are NaN", OverShards.SUM, is_count=True, is_nonfinite=True),
    Statistic("posinf", "elements that are +inf", OverShards.SUM, is_count=True, is_nonfinite=True),
    Statistic("neginf", "elements that are -inf", OverShards.SUM, is_count=True, is_nonfinite=True),
    Statistic("zero", "elements that are 0 or -0", OverShards.SUM, is_count=True),
    Statistic("min", "least finite element", OverShards.LEAST, is_element=True),
    Statistic("max", "greatest finite element", OverShards.GREATEST, is_element=True),
    Statistic("mean", "mean of the finite elements", OverShards.MEAN),
    Statistic(
        "std",
        "standard deviation of the finite elements, divisor n - 1 as in torch",
        OverShards.SPREAD,
    ),
    Statistic(
        "l2",
        "root of the sum of squares of the finite elements; 0 where there is none",
        OverShards.ROOT_OF_SQUARES,
    ),
)
"""In the order of the columns and of JSON. Spools hold the measured ones in this order (count
apart, in the head of the record), then the sketch, then the added ones: append, never reorder."""

COUNTS: Final = tuple(s.name for s in STATISTICS if s.is_count)
NUMBERS: Final = tuple(s.name for s in STATISTICS if not s.is_count)
NONFINITE: Final = tuple(s.name for s in STATISTICS if s.is_nonfinite)
MEASURED: Final = tuple(s for s in STATISTICS if s.of_values is None)
ADDED: Final = tuple(s for s in STATISTICS if s.of_values is not None)
"""What is computed from the elements in Python. Older files and spools do not hold it."""
ADDED_UNKNOWN: Final = (math.nan,) * len(ADDED)

assert len(ADDED) <= MOST_ADDED, "a value's record has no room for more statistics"
assert not any(s.is_count for s in ADDED), "an added statistic has to be able to say undefined"


def finite_counts(rows: Any) -> npt.NDArray[Any]:
    """Return how many elements are finite in each of some rows that have the columns of counts."""
    finite: npt.NDArray[Any] = rows["count"]
    for name in NONFINITE:
        finite = finite - rows[name]
    return finite


def numbers_with_first(*first: str) -> tuple[str, ...]:
    """Return the names of all numbers that are no counts, the given ones first."""
    return (*first, *(name for name in NUMBERS if name not in first))


@dataclass(frozen=True, slots=True, kw_only=True)
class Combined:
    """Statistics of one global tensor; None for a number that cannot be known."""

    ranks: tuple[int, ...]
    note: Note | None = None
    """Why numbers are missing; None where none is."""
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
        value: float | int | None = self.added[name] if name in self.added else getattr(self, name)
        return value

    @property
    def is_known(self) -> bool:
        """True where at least the mean and the sketch of the whole could be combined."""
        return self.count is not None
