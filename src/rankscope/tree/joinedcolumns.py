"""The value columns of several files as one: rows are counted through, and copied when they are
asked for.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from rankscope.errors import TraceError
from rankscope.record.stepcolumns import COLUMNS
from rankscope.tree.digests import Columns
from rankscope.tree.step import LazyColumns, StepColumns, StepHead

__all__ = ["FileColumns", "JoinedColumn", "as_arrays", "join_columns", "join_steps"]

Array = NDArray[Any]
_MOST_OPEN: Final = 64
"""Files mapped at a time; each takes a file descriptor."""


class FileColumns(dict[str, Array]):
    """The columns of one file; to ask for one that it lacks is an error of the file."""

    def __init__(self, file: Path, columns: Iterable[tuple[str, Array]] = ()) -> None:
        """Hold columns of a file."""
        super().__init__(columns)
        self.file = file

    def __missing__(self, name: str) -> Array:
        raise TraceError(f"{self.file}: has no column {name}: the file is damaged")


class JoinedColumn:
    """One column over all files. What it is asked for is an array as of any other column."""

    def __init__(self, part: Callable[[int], Array], counts: Sequence[int]) -> None:
        """Open no file yet.

        Args:
            part: returns the column of one file.
            counts: rows of each file.
        """
        self._part = part
        self._starts = [0, *itertools.accumulate(counts)]

    def __len__(self) -> int:
        return self._starts[-1]

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of every file's column."""
        return self._part(0).dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """[rows] or [rows, numbers of one]."""
        return (len(self), *self._part(0).shape[1:])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        whole: Array = self[:]
        return whole if dtype is None else whole.astype(dtype)

    def __getitem__(self, rows: Any) -> Any:
        if isinstance(rows, slice):
            return self._slice(*rows.indices(len(self)))
        if np.ndim(rows) == 0:
            at = int(rows) + (len(self) if rows < 0 else 0)
            if not 0 <= at < len(self):
                raise IndexError(f"row {rows} of {len(self)}")
            part = bisect.bisect_right(self._starts, at) - 1
            return self._part(part)[at - self._starts[part]]
        wanted = np.asarray(rows)
        return self._take(np.flatnonzero(wanted) if wanted.dtype == bool else wanted)

    def tolist(self) -> list[Any]:
        """Return all rows as Python objects."""
        return cast("list[Any]", self[:].tolist())

    def min(self, initial: Any) -> Any:
        """Return the least of all rows and of `initial`."""
        return min((self._part(i).min(initial=initial) for i in self._parts()), default=initial)

    def _parts(self) -> range:
        return range(len(self._starts) - 1)

    def _slice(self, begin: int, end: int, step: int) -> Array:
        if step != 1:
            return self._take(np.arange(begin, end, step))
        first = min(bisect.bisect_right(self._starts, begin) - 1, len(self._starts) - 2)
        pieces: list[Array] = []
        for part in range(first, len(self._starts) - 1):
            start = self._starts[part]
            if pieces and start >= end:
                break
            pieces.append(self._part(part)[max(0, begin - start) : max(0, end - start)])
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def _take(self, rows: Array) -> Array:
        if not len(rows):
            return self._part(0)[:0]
        if rows.min() < -len(self) or rows.max() >= len(self):
            raise IndexError(f"rows {rows.min()} to {rows.max()} of {len(self)}")
        rows = np.where(rows < 0, rows + len(self), rows)
        parts = np.searchsorted(self._starts, rows, side="right") - 1
        found: Array | None = None
        for part in np.unique(parts).tolist():
            own = parts == part
            taken = self._part(part)[rows[own] - self._starts[part]]
            if found is None:
                found = np.empty((len(rows), *taken.shape[1:]), taken.dtype)
            found[own] = taken
        assert found is not None  # there are rows
        return found


def join_columns(
    files: Sequence[Callable[[], Columns]], counts: Sequence[Mapping[str, int]]
) -> Columns:
    """Return the columns of several files, or of a document in memory behind them, as one.

    Args:
        files: opens each.
        counts: of each file {"values", "samples", "calls": rows}.

    Raises:
        TraceError: a file holds other rows than that, or other columns than the first; shows when
            a column of it is asked for.
    """

    @functools.lru_cache(_MOST_OPEN)
    def columns(number: int) -> Columns:
        found = {name: np.asarray(column) for name, column in files[number]().items()}
        for name, column in found.items():
            said = counts[number].get(name.partition(".")[0], len(column))
            if len(column) != said:
                raise TraceError(
                    f"values file {number + 1} of {len(files)}: {name} has {len(column)} rows, "
                    f"the trace says {said}: the trace is damaged"
                )
        return found

    def joined(name: str) -> Array:
        rows = [int(each[name.partition(".")[0]]) for each in counts]

        def of_file(number: int) -> Array:
            found = columns(number).get(name)
            if found is None:
                raise TraceError(
                    f"values file {number + 1} of {len(files)} has no column {name}: the trace is "
                    "damaged"
                )
            return found

        column = JoinedColumn(of_file, rows)
        return cast(Array, column)  # it is asked for rows as an array is

    return {name: joined(name) for name in columns(0)}


_OF_ALL: Final = ("values.", "samples.", "calls.")
_WITHIN: Final = frozenset({"values.node", "calls.node"}) | {
    column.name for column in COLUMNS.values() if column.is_text
}
"""Columns that say something within their step or file alone."""
_FEW: Final = 1 << 18
"""Rows of a column that are joined at once."""


def join_steps(
    read: Callable[[int], StepColumns],
    heads: Sequence[StepHead],
    counts: Sequence[Mapping[str, int]],
    first: Sequence[Mapping[str, int]],
) -> Columns:
    """Return the columns of all steps as one: those that say something beyond their step.

    Args:
        read: returns a step.
        heads: of the steps.
        counts: {"values", "calls", "samples": rows} of each.
        first: the same of all before it.
    """
    step = functools.lru_cache(_MOST_OPEN)(read)

    def of_step(name: str, number: int) -> Array:
        own = step(number)
        if name == "values.incarnation":
            return np.full(counts[number]["values"], heads[number].incarnation, np.uint32)
        column = own[name]
        if name != "values.sample_row":
            return column
        return np.where(column >= 0, column + first[number]["samples"], -1)

    def whole(name: str) -> Array:
        rows = [each[name.partition(".")[0]] for each in counts]
        if not rows:
            kind = COLUMNS.get(name)
            width = kind.width if kind else 1
            shape = (0,) if width == 1 else (0, width)
            return np.empty(shape, kind.dtype if kind else np.uint32)
        part = functools.partial(of_step, name)
        if sum(rows) <= _FEW:
            parts = [part(number) for number in range(len(rows))]
            return parts[0] if len(parts) == 1 else np.concatenate(parts)
        return cast(Array, JoinedColumn(part, rows))  # it is asked for rows as an array is

    names = [*(n for n in COLUMNS if n.startswith(_OF_ALL) and n not in _WITHIN)]
    return LazyColumns(
        {name: functools.partial(whole, name) for name in (*names, "values.incarnation")}
    )


def as_arrays(columns: Mapping[str, Any]) -> dict[str, Array]:
    """Return columns for many small reads: arrays are sliced faster than maps of files. Those that
    lie in several files stay there: they may be more than memory holds.
    """
    found: dict[str, Array] = {}
    if isinstance(columns, FileColumns):
        found = FileColumns(columns.file)
    for name, column in columns.items():
        is_joined: bool = type(column) is JoinedColumn
        found[name] = column if is_joined else np.asarray(column)
    return found
