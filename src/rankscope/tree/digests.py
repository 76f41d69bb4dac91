"""A trace's numbers as records, from rows of its value columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rankscope.record.statistics import COUNTS, NUMBERS
from rankscope.record.value import Digest

__all__ = ["Columns", "column_digest", "digest_rows"]

Columns = Mapping[str, NDArray[Any]]
_NAMES = (*COUNTS, *NUMBERS, "hash", "sketch")


class _Columns(Protocol):
    def __getitem__(self, name: str, /) -> NDArray[Any]: ...


def column_digest(columns: _Columns, row: int) -> Digest:
    """Return the numbers in one row of the value columns."""
    numbers: dict[str, Any] = {name: int(columns[f"values.{name}"][row]) for name in COUNTS}
    numbers |= {name: float(columns[f"values.{name}"][row]) for name in NUMBERS}
    sketch = tuple(columns["values.sketch"][row].tolist())
    return Digest.of(numbers, int(columns["values.hash"][row]), sketch)


def digest_rows(columns: _Columns, rows: Any) -> NDArray[Any]:
    """Return the numbers of some rows, of any shape, as a structured array."""
    taken = {name: columns[f"values.{name}"][rows] for name in _NAMES}
    shape = taken["hash"].shape
    dtype = np.dtype([(name, each.dtype, each.shape[len(shape) :]) for name, each in taken.items()])
    found = np.empty(shape, dtype)
    for name, each in taken.items():
        found[name] = each
    return found
