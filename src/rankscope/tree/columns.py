"""Files of columns, read by mapping.

Columns have fixed names; nothing a model is called ever becomes one. Eight-byte columns come first,
so that every mapped column is aligned.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.errors import TraceError
from rankscope.record.ranks import MAX_RANKS
from rankscope.record.statistics import ADDED
from rankscope.record.stepcolumns import COLUMNS, Column
from rankscope.spool.chunks.safetensors import MappedFile, as_array, parse_entries

_UNCHECKED = {"format": "rankscope.values/1"}
"""All that was said of a file before it had a checksum."""
_WIDTHS = {name: column.width for name, column in COLUMNS.items() if column.width > 1}
_KINDS = {name: np.dtype(column.dtype).kind for name, column in COLUMNS.items()} | dict.fromkeys(
    ("values.node", "calls.node", "values.slot", "values.chunk", "values.incarnation"), "iu"
)
"""Kind of number of each column, as numpy calls it; formats 1 and 2 had ids in place of rows."""
Array = NDArray[Any]


class FileColumns(dict[str, Array]):
    """The columns of one file; to ask for one that it lacks is an error of the file."""

    def __init__(self, file: Path, columns: Iterable[tuple[str, Array]] = ()) -> None:
        super().__init__(columns)
        self.file = file

    def __missing__(self, name: str) -> Array:
        raise TraceError(f"{self.file}: has no column {name}: the file is damaged")


def map_columns(
    path: Path, world_size: int = MAX_RANKS, *, is_checked: bool = False
) -> dict[str, Array]:
    """Return every column of a values file, mapped and not copied; with `is_checked` all of it is
    read, and held to the checksum in its header. No rank is as high as `world_size`.

    Raises:
        TraceError: the file is missing, or no safetensors file whose header fits its size, or its
            columns do not fit each other, or it was changed; asking for a column that is not there
            raises it too.
    """
    file, columns = MappedFile(path, TraceError), FileColumns(path)
    try:
        about, entries = parse_entries(file.header, len(file.data))
        for name, dtype, shape, begin, end in entries:
            columns[name] = as_array(file.data[begin:end], dtype, shape)
        check_columns(columns, world_size)
    except (TraceError, ValueError) as error:
        raise TraceError(
            f"{path}: a column does not fit the file ({error}): the file is damaged"
        ) from error
    if is_checked and about != _UNCHECKED and not file.is_unchanged(about):
        raise TraceError(f"{path}: was changed since it was written: the file is damaged")
    for name in (f"values.{each.name}" for each in ADDED):
        if name not in columns and "values.rank" in columns:  # written before there was such a one
            columns[name] = np.broadcast_to(np.float64(np.nan), columns["values.rank"].shape)
    return columns


def filled(column: Column, rows: int, number: float = 0) -> Array:
    """Return rows of a column that all hold one number."""
    shape = (rows,) if column.width == 1 else (rows, column.width)
    return np.broadcast_to(np.array(number, column.dtype), shape)


def check_columns(columns: Mapping[str, Array], world_size: int) -> None:
    """Refuse, with ValueError, columns of another kind or shape than their name says, columns of
    one table that have other rows than each other, and ranks that are not below `world_size`."""
    rows: dict[str, int] = {}
    for name, column in columns.items():
        width = [_WIDTHS[name]] if name in _WIDTHS else []
        if column.ndim < 1 or (name in _KINDS and [*column.shape[1:]] != width):
            raise ValueError(f"{name} has another shape than a column of its name")
        if name in _KINDS and column.dtype.kind not in _KINDS[name]:
            raise ValueError(f"{name} is of {column.dtype.name}")
        if rows.setdefault(name.partition(".")[0], len(column)) != len(column):
            raise ValueError(f"{name} has {len(column)} rows, and columns beside it have others")
    for name in ("values.rank", "calls.rank"):
        ranks = columns[name] if name in columns else np.empty(0, np.int32)
        if len(ranks) and not 0 <= int(ranks.min()) <= int(ranks.max()) < world_size:
            raise ValueError(f"{name} is outside a world of {world_size}")
