"""values.safetensors: the per-rank numbers as columns, written in one pass and read by mapping.

Columns have fixed names; nothing a model is called ever becomes one. Eight-byte columns come first,
so that every mapped column is aligned.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.chunks.safetensors import MappedFile, as_array, parse_entries, write_arrays
from rankscope.errors import TraceError
from rankscope.record.call import CallStatus
from rankscope.record.statistics import ADDED, COUNTS, NUMBERS
from rankscope.record.streams import MAX_RANKS
from rankscope.record.value import SKETCH_SIZE
from rankscope.run.filenames import VALUES_NAME
from rankscope.tree.document import Document
from rankscope.tree.joinedcolumns import FileColumns

__all__ = [
    "VALUES_FORMAT",
    "VALUES_NAME",
    "check_columns",
    "columns_of",
    "map_columns",
    "write_columns",
]

VALUES_FORMAT = "rankscope.values/1"
_ABOUT = {"format": VALUES_FORMAT}
_SKETCHES = frozenset({"values.sketch", "samples.sketch"})
_KINDS = {
    **{f"values.{name}": "u" for name in (*COUNTS, "hash", "node", "reference", "flags")},
    **{f"values.{name}": "f" for name in (*NUMBERS, "sketch")},
    **{f"values.{name}": "iu" for name in ("rank", "incarnation", "chunk", "slot", "time_ns")},
    **{f"values.sample_{name}": "i" for name in ("row", "count", "dim")},
    "values.digested": "b", "samples.sketch": "f", "calls.rank": "i", "calls.node": "u",
    "calls.status": "u", "calls.issued": "u", "calls.start_ns": "i", "calls.duration_ns": "i",
}  # fmt: skip
"""Kind of number of each column, as numpy calls it."""
Column = NDArray[Any]
_PLAIN = (*COUNTS, *NUMBERS, "hash", "sketch")


def columns_of(document: Document, first_node: int = 0) -> dict[str, Callable[[], Column]]:
    """Return how to make each column; made one at a time, because there may be a million rows.

    Args:
        document: a trace in memory.
        first_node: leave out the rows of nodes before this one.
    """
    merged, tables, ranks = document.merged, document.tables, document.rank_of_stream
    values, calls, order = merged.values, merged.calls, merged.order
    nodes = np.arange(len(merged.parent))
    call_node = np.repeat(nodes, np.diff(merged.call_start))
    made: dict[str, Callable[[], Column]] = {
        "values.node": lambda: merged.identity[merged.value_node],
        **{f"values.{name}": functools.partial(values.column, name) for name in _PLAIN},
        "values.reference": lambda: values.column("reference"),
        "values.time_ns": lambda: (
            values.column("time_ns") + document.clock_offsets[merged.value_stream]
        ),
        "values.sample_row": lambda: _sample_rows(document),
        "calls.node": lambda: merged.identity[call_node],
        "calls.issued": lambda: calls["issued"],
        "calls.start_ns": lambda: calls["start"],
        "calls.duration_ns": lambda: np.where(
            calls["status"] == CallStatus.UNFINISHED, -1, calls["end"] - calls["start"]
        ),
        "values.slot": lambda: _slot_places(document),
        "values.rank": lambda: ranks[merged.value_stream].astype(np.int32),
        "values.incarnation": lambda: tables.calls["incarnation"][tables.call[order]].astype(
            np.uint32
        ),
        "values.chunk": lambda: tables.chunk[order],
        "values.flags": lambda: values.column("flags"),
        "values.sample_count": lambda: tables.sample_count[order],
        "values.sample_dim": lambda: tables.sample_dim[order],
        "samples.sketch": lambda: tables.samples,
        "calls.rank": lambda: ranks[calls["stream"]].astype(np.int32),
        "values.digested": lambda: tables.has_digest[order],
        "calls.status": lambda: calls["status"],
    }
    if not first_node:
        return made
    first_value = int(merged.entry_start[merged.node_entries[first_node]])
    first_call = int(merged.call_start[first_node])
    first_of = {"values": first_value, "calls": first_call, "samples": 0}
    return {
        name: functools.partial(_from_row, make, first_of[name.partition(".")[0]])
        for name, make in made.items()
    }


def _from_row(make: Callable[[], Column], first: int) -> Column:
    return make()[first:]


def _sample_rows(document: Document) -> Column:
    rows = document.tables.sample_start[document.merged.order]
    return np.where(rows >= 0, rows + document.first_sample, rows)


def _slot_places(document: Document) -> Column:
    """Return for each value the place of its slot entry in its node's list."""
    merged = document.merged
    entries = np.arange(len(merged.entry_start) - 1)
    places = entries - np.repeat(merged.node_entries[:-1], np.diff(merged.node_entries))
    return np.repeat(places, np.diff(merged.entry_start)).astype(np.int32)


def write_columns(path: Path, columns: Mapping[str, Callable[[], Column]]) -> None:
    """Write columns as a safetensors file, under another name until it is whole.

    Each is made once, and one at a time: the header, which says where they are, is written last.

    Raises:
        OSError: the file cannot be written.
    """
    write_arrays(path, columns, _ABOUT)


def map_columns(
    path: Path, world_size: int = MAX_RANKS, *, is_checked: bool = False
) -> dict[str, Column]:
    """Return every column of a values file, mapped and not copied.

    Args:
        path: of the file.
        world_size: no rank is as high.
        is_checked: read all of it, and hold it to the checksum in its header.

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
    # files written before they had a checksum say their format alone
    if is_checked and about != _ABOUT and not file.is_unchanged(about):
        raise TraceError(f"{path}: was changed since it was written: the file is damaged")
    for name in (f"values.{each.name}" for each in ADDED):
        if name not in columns and "values.rank" in columns:  # written before there was such a one
            columns[name] = np.broadcast_to(np.float64(np.nan), columns["values.rank"].shape)
    return columns


def check_columns(columns: Mapping[str, Column], world_size: int) -> None:
    """Refuse columns of another kind or shape than their name says, columns of one table that have
    other rows than each other, and ranks that nobody is.

    Args:
        columns: as they were read.
        world_size: no rank is as high.

    Raises:
        ValueError: there are such.
    """
    rows: dict[str, int] = {}
    for name, column in columns.items():
        if column.ndim < 1 or [*column.shape[1:]] != ([SKETCH_SIZE] if name in _SKETCHES else []):
            raise ValueError(f"{name} has another shape than a column of its name")
        if name in _KINDS and column.dtype.kind not in _KINDS[name]:
            raise ValueError(f"{name} is of {column.dtype.name}")
        if rows.setdefault(name.partition(".")[0], len(column)) != len(column):
            raise ValueError(f"{name} has {len(column)} rows, and columns beside it have others")
    for name in ("values.rank", "calls.rank"):
        ranks = columns[name] if name in columns else np.empty(0, np.int32)
        if len(ranks) and not 0 <= int(ranks.min()) <= int(ranks.max()) < world_size:
            raise ValueError(f"{name} is outside a world of {world_size}")
