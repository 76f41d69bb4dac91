"""Calls of all streams as columns: what is asked of a million calls is asked of one column at a
time, and a column of its own is read many times faster than one field of wide rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Rows = NDArray[np.int64] | NDArray[np.bool_] | slice

_COLUMNS = {
    "stream": "<i4", "incarnation": "<i4", "sequence": "<u8", "parent": "<i8",
    "start": "<i8", "end": "<i8", "module": "<i4", "path": "<i4", "step": "<u4",
    "micro_batch": "<i8", "ordinal": "<i8", "forward_ordinal": "<i8", "pass": "<i4",
    "phase": "u1", "mode": "u1", "status": "u1", "text": "<i4", "collective": "<i4",
    "number": "<u4", "issued": "<u8", "is_backward": "?",
}  # fmt: skip


class CallTable:
    """One row a call, one array a column.

    `parent` is a row of the table of all calls, or -1; `start` and `end` are wall-clock ns; `text`
    and `collective` are -1 for none; `number` counts collectives of one channel, and `issued` those
    of a group by torch's own count; `is_backward` for what backward issued.
    """

    __slots__ = ("_columns", "_count", "_of", "_rows")

    def __init__(self, columns: dict[str, Array], count: int) -> None:
        self._columns = columns
        self._count = count
        self._of: CallTable | None = None
        self._rows: Rows = slice(0)

    @classmethod
    def zeros(cls, count: int) -> CallTable:
        """Return a table of so many calls that says nothing yet."""
        return cls({name: np.zeros(count, dtype) for name, dtype in _COLUMNS.items()}, count)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, name: str) -> Array:
        column = self._columns.get(name)
        if column is None:
            if self._of is None:
                raise KeyError(name)
            column = self._columns[name] = self._of[name][self._rows]
        return column

    def __setitem__(self, name: str, values: Any) -> None:
        self[name][...] = values

    def chosen(self, rows: Rows) -> CallTable:
        """Return some rows, of which a column is taken once it is asked for: copies, and of a slice
        the places themselves, so that what is put there is put here."""
        count = len(range(*rows.indices(self._count))) if isinstance(rows, slice) else (
            int(np.count_nonzero(rows)) if rows.dtype == np.bool_ else len(rows)
        )  # fmt: skip
        table = CallTable({}, count)
        table._of, table._rows = self, rows
        return table

    def apart(self, rows: NDArray[np.int64], *names: str) -> CallTable:
        """Return some columns of rows as a table of its own: this one may go."""
        return CallTable({name: self[name][rows] for name in names}, len(rows))

    def followed_by(self, more: CallTable) -> CallTable:
        """Return a table of these calls, and others behind them."""
        columns = {name: np.concatenate([self[name], more[name]]) for name in _COLUMNS}
        return CallTable(columns, len(self) + len(more))
