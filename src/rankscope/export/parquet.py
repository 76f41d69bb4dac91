"""`--format parquet`: a dataset of plain files, one for each step and table.

    OUT/values/train-00000003.parquet     what a rank held in a slot of a call
    OUT/samples/train-00000003.parquet    sketches of the samples of such values
    OUT/calls/train-00000003.parquet      when a rank made a call, and how the call ended

The rows of a file are sorted, so that the row groups with one module lie together. Everything that
tells rows apart is a column: the names of files and folders say nothing that an engine has to know.
A file appears by rename, `values` last: while a job adds steps, readers see whole files only, and
a step that is in `values` is in all three.

Of a step, one row group is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.errors import SelectionError, SettingError
from rankscope.export.formats import Cells, ExportedStep, ExportPlace, Selection, mode_word
from rankscope.record.stepcolumns import COLUMNS, Column, exported_columns
from rankscope.run.files import replacing
from rankscope.run.folders import Progress
from rankscope.tree.views import Node, Step, Trace

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ImportError as error:
    raise SettingError(
        "--format parquet needs pyarrow, which is not installed: pip install 'rankscope[parquet]'"
    ) from error

Array = NDArray[Any]
ROWS_A_GROUP = 122_880
"""What DuckDB writes and reads best; Spark and Ray take any."""
_KINDS = {
    "|b1": pa.bool_(), "|u1": pa.int32(), "<i4": pa.int32(), "<f4": pa.float32(),
    "<f8": pa.float64(),
}  # fmt: skip


def _kind(column: Column) -> Any:
    """Return the type of a column that says what a step says; other whole numbers are int64."""
    if column.is_hex:
        return pa.string()
    kind = _KINDS.get(column.dtype, pa.int64())
    return pa.list_(kind) if column.width > 1 else kind


def _told(table: str) -> list[tuple[str, Any]]:
    return [(column.own_name, _kind(column)) for column in exported_columns(table)]


_CALL = [
    ("mode", pa.string()),
    ("step", pa.int64()),
    ("incarnation", pa.int32()),
    ("micro_batch", pa.int32()),
    ("phase", pa.string()),
    ("path", pa.string()),
    ("class", pa.string()),
    ("ordinal", pa.int32()),
    ("node", pa.string()),
]
_VALUE = [*_CALL, ("slot", pa.string()), ("rank", pa.int32())]
VALUES = pa.schema(
    [
        *_VALUE,
        ("dtype", pa.string()),
        ("device", pa.string()),
        ("shape", pa.list_(pa.int64())),
        ("global_shape", pa.list_(pa.int64())),
        ("layout", pa.string()),
        ("mesh", pa.string()),
        ("placement", pa.string()),
        ("placements", pa.map_(pa.string(), pa.string())),
        ("flags", pa.list_(pa.string())),
        ("requires_grad", pa.bool_()),
        ("note", pa.string()),
        *_told("values"),
    ]
)
"""What one rank holds in one slot of one call. Strings are plain: Ray Data groups by no dictionary
column, Dask finds no category in one. Columns are only ever added; none changes its type."""
SAMPLES = pa.schema(
    [
        *_VALUE,
        ("dim", pa.int32()),
        ("sample", pa.int32()),
        ("sketch", _kind(COLUMNS["samples.sketch"])),
    ]
)
CALLS = pa.schema([*_CALL, ("rank", pa.int32()), *_told("calls"), ("status", pa.string())])


def write(
    trace: Trace, selection: Selection, place: ExportPlace, progress: Progress
) -> Sequence[str]:
    """Write the tables, step by step."""
    ranks = selection.ranks(trace)
    step_rows = []
    for step, nodes in selection.walk(trace, progress, "writing values"):
        step_rows.append(write_step(trace, step, place.target, nodes=nodes, ranks=ranks))
    values, samples, calls = (sum(counts) for counts in zip(*step_rows))
    if not values:
        raise SelectionError("the trace holds no value in what is asked for")
    return (
        f"{values} values in values/, {samples} sample sketches in samples/, "
        f"{calls} calls in calls/",
    )


def write_step(
    trace: Trace,
    step: Step,
    folder: Path,
    *,
    nodes: Iterable[Node] | None = None,
    ranks: frozenset[int] | None = None,
) -> tuple[int, int, int]:
    """Write the files of one step, or a setup, into a dataset, each by rename; files of the same
    step that are there are replaced. A table without rows has no file. Return how many values,
    samples and calls there are.

    Args:
        folder: the dataset; made where it is missing.
        nodes: of the step, in the order of its tree; default all.
        ranks: whose values and calls; default those of all ranks.

    Raises:
        TraceError: the trace is damaged.
        OSError: a file cannot be written.
    """
    chosen = frozenset(int(rank["rank"]) for rank in trace.run["ranks"]) if ranks is None else ranks
    exported = ExportedStep(step, nodes, chosen)
    about = {
        "rankscope.run": str(trace.run["id"]),
        "rankscope.mode": mode_word(step),
        "rankscope.step": str(step.step),
        "rankscope.complete": "true" if trace.is_complete else "false",
    }
    name = _file_of(step)
    with (  # left in reverse: values appear last
        _Table(folder / "values" / name, VALUES, about) as values,
        _Table(folder / "samples" / name, SAMPLES, about) as samples,
        _Table(folder / "calls" / name, CALLS, about) as calls,
    ):
        for rows in _groups(exported.in_order("calls", exported.calls())):
            calls.add(exported.call_cells(rows))
        of_values = exported.in_order("values", exported.values())
        for rows in _groups(of_values):
            values.add(exported.value_cells(rows))
        for cells in _samples(exported, of_values):
            samples.add(cells)
    return values.rows, samples.rows, calls.rows


def write_steps(trace: Trace, folder: Path) -> None:
    """Write the files of all steps but setup into a dataset; errors as of `write_step`."""
    for step in trace.steps:
        write_step(trace, step, folder)


def write_rest(trace: Trace, folder: Path, is_written: Callable[[Step], bool]) -> None:
    """Make a dataset whole that was written while the job ran; nobody writes into it any more.
    `is_written`: true for a step whose files, where they are there, hold all of it. Errors as of
    `write_step`."""
    for draft in folder.glob("*/.*.new"):  # of a process that was killed
        draft.unlink(missing_ok=True)
    for step in (*trace.setup, *trace.steps):
        is_there = any((folder / table / _file_of(step)).exists() for table in ("values", "calls"))
        if not (is_there and is_written(step)):
            write_step(trace, step, folder)


def _file_of(step: Step) -> str:
    life = f".{step.incarnation}" if step.incarnation else ""
    return f"{mode_word(step)}-{step.step:08d}{life}.parquet"


class _Table:
    """A Parquet file that gets its name when the block ends; not made without rows."""

    def __init__(self, path: Path, schema: Any, about: dict[str, str]) -> None:
        self._path, self._schema = path, schema.with_metadata(about)
        self._closing = ExitStack()
        self._writer: Any = None
        self.rows = 0

    def __enter__(self) -> _Table:
        return self

    def __exit__(self, *error: Any) -> None:
        self._closing.__exit__(*error)

    def add(self, cells: dict[str, Cells]) -> None:
        if self._writer is None:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = self._closing.enter_context(replacing(self._path))
            writer = pq.ParquetWriter(file, self._schema, compression="zstd")
            self._writer = self._closing.enter_context(writer)
        arrays = [_array(cells[field.name], field.type) for field in self._schema]
        table = pa.Table.from_arrays(arrays, schema=self._schema)
        self._writer.write_table(table, row_group_size=ROWS_A_GROUP)
        self.rows += len(table)


def _groups(rows: Array) -> Iterator[Array]:
    for begin in range(0, len(rows), ROWS_A_GROUP):
        yield rows[begin : begin + ROWS_A_GROUP]


def _samples(exported: ExportedStep, rows: Array) -> Iterator[dict[str, Cells]]:
    columns = exported.columns
    firsts = columns["values.sample_row"][rows]
    counts = np.where(firsts >= 0, columns["values.sample_count"][rows], 0)
    begins = np.cumsum(counts) - counts
    for some in _groups(np.arange(counts.sum())):
        value = np.searchsorted(begins, some, "right") - 1
        sample = some - begins[value]
        yield {
            **exported.shared_cells("values", rows[value]),
            "dim": Cells(columns["values.sample_dim"][rows[value]]),
            "sample": Cells(sample),
            "sketch": Cells(columns["samples.sketch"][firsts[value] + sample]),
        }


def _array(cells: Cells, kind: Any) -> Any:
    items, place, is_known = cells
    if place is not None:
        if pa.types.is_map(kind):
            items = [None if mapping is None else [*mapping.items()] for mapping in items]
        return pa.array(items, kind).take(pa.array(place))
    if items.ndim > 1:
        return _lists(items, np.ones(len(items), np.bool_) if is_known is None else is_known)
    if items.dtype.kind == "u":
        items = items.astype(np.int64)
    return pa.array(items, kind, mask=None if is_known is None else ~is_known)


def _lists(rows: Array, is_known: Array) -> Any:
    """Return an array of lists from a matrix, without a Python object per number.

    A list that is not known is null and has no elements: older releases of pyarrow write no other.
    """
    flat = pa.array(np.ascontiguousarray(rows[is_known]).reshape(-1))
    offsets = np.concatenate([[0], np.cumsum(is_known)]).astype(np.int32) * rows.shape[1]
    return pa.ListArray.from_arrays(pa.array(offsets), flat, mask=pa.array(~is_known))
