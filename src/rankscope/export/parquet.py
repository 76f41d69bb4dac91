"""`--format parquet`: a dataset of plain files, one for each step and table.

    OUT/values/train-00000003.parquet     what a rank held in a slot of a call
    OUT/samples/train-00000003.parquet    sketches of the samples of such values
    OUT/calls/train-00000003.parquet      when a rank made a call, and how the call ended

The rows of a file are sorted, so that the row groups with one module lie together. Everything that
tells rows apart is a column: the names of files and folders say nothing that an engine has to know.
A file appears by rename, `values` last: while a job adds steps, readers see whole files only, and
a step that is in `values` is in all three.

One step is in memory at a time as the nodes of its tree, and of its rows one row group.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rankscope.errors import SelectionError, SettingError
from rankscope.export.place import ExportPlace
from rankscope.export.rows import SlotRows, call_fields, mode_word, slot_rows, value_slots
from rankscope.export.subset import Selection
from rankscope.record.call import CallStatus
from rankscope.record.statistics import COUNTS, NUMBERS
from rankscope.run.filenames import Progress
from rankscope.run.replacing import replacing
from rankscope.tree.slotview import Fold, SlotView
from rankscope.tree.step import StepColumns
from rankscope.tree.views import Node, Step, Trace

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ImportError as error:
    raise SettingError(
        "--format parquet needs pyarrow, which is not installed: pip install 'rankscope[parquet]'"
    ) from error

ROWS_A_GROUP = 122_880
"""What DuckDB writes and reads best; Spark and Ray take any."""
_STEP = [("mode", pa.string()), ("step", pa.int64()), ("incarnation", pa.int32())]
_CALL = [
    *_STEP,
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
        ("time_ns", pa.int64()),
        ("reference", pa.int64()),
        ("digested", pa.bool_()),
        *((name, pa.int64()) for name in COUNTS),
        *((name, pa.float64()) for name in NUMBERS),
        ("hash", pa.string()),
        ("sketch", pa.list_(pa.float64())),
    ]
)
"""What one rank holds in one slot of one call. Strings are plain: Ray Data groups by no dictionary
column, Dask finds no category in one. Columns are only ever added; none changes its type."""
SAMPLES = pa.schema(
    [*_VALUE, ("dim", pa.int32()), ("sample", pa.int32()), ("sketch", pa.list_(pa.float32()))]
)
"""One sample of such a value."""
CALLS = pa.schema(
    [
        *_CALL,
        ("rank", pa.int32()),
        ("start_ns", pa.int64()),
        ("duration_ns", pa.int64()),
        ("status", pa.string()),
    ]
)
"""One call on one rank."""
_OF_THE_FOLD = ("shape", "flags", "requires_grad", "note")


class StepRows(NamedTuple):
    """How many rows a step has in each table."""

    values: int
    samples: int
    calls: int


def write(
    trace: Trace, selection: Selection, place: ExportPlace, progress: Progress
) -> Sequence[str]:
    """Write the tables, step by step."""
    ranks = selection.ranks(trace)
    groups = len(selection.groups(trace))
    every = []
    for done, (step, nodes) in enumerate(selection.walk(trace)):
        progress("writing values", done / groups)
        every.append(write_step(trace, step, place.target, nodes=nodes, ranks=ranks))
    values, samples, made = (sum(counts) for counts in zip(*every))
    if not values:
        raise SelectionError("the trace holds no value in what is asked for")
    return (
        f"{values} values in values/, {samples} sample sketches in samples/, "
        f"{made} calls in calls/",
    )


def write_step(
    trace: Trace,
    step: Step,
    folder: Path,
    *,
    nodes: Iterable[Node] | None = None,
    ranks: frozenset[int] | None = None,
) -> StepRows:
    """Write the files of one step into a dataset, each by rename; files of the same step that are
    there are replaced. A table without rows has no file.

    Args:
        trace: an open trace.
        step: one of its steps, or a setup.
        folder: the dataset; made where it is missing.
        nodes: of the step, in the order of its tree; default all.
        ranks: whose values and calls; default those of all ranks.

    Raises:
        TraceError: the trace is damaged.
        OSError: a file cannot be written.
    """
    known = list(step.passing() if nodes is None else nodes)
    if not known:
        return StepRows(0, 0, 0)
    columns = known[0].step
    wanted = frozenset(int(rank["rank"]) for rank in trace.run["ranks"]) if ranks is None else ranks
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
        for batch in _batches(_calls_in_order(step, known, wanted)):
            calls.add(_calls(batch, columns))
        for batch in _batches(_values_in_order(step, known, wanted)):
            values.add(_values(batch, columns))
            for piece in _samples(batch, columns):
                samples.add(piece)
    return StepRows(values.rows, samples.rows, calls.rows)


def write_steps(trace: Trace, folder: Path) -> None:
    """Write the files of the steps of a trace, not those of its setup, into a dataset; errors as
    of `write_step`."""
    for step in trace.steps:
        write_step(trace, step, folder)


def write_rest(trace: Trace, folder: Path, is_written: Callable[[Step], bool]) -> None:
    """Make a dataset whole that was written while the job ran; nobody writes into it any more.

    Args:
        trace: of the job, finished.
        folder: the dataset.
        is_written: true for a step whose files, where they are there, hold all of it.

    Raises:
        TraceError, OSError: as `write_step`.
    """
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
    """A Parquet file that gets its name when the block ends; without any rows there is none."""

    def __init__(self, path: Path, schema: Any, about: dict[str, str]) -> None:
        self._path, self._schema = path, schema.with_metadata(about)
        self._closing = ExitStack()
        self._writer: Any = None
        self.rows = 0

    def __enter__(self) -> _Table:
        return self

    def __exit__(self, *error: Any) -> None:
        self._closing.__exit__(*error)

    def add(self, columns: dict[str, Any]) -> None:
        """Append a row group."""
        if self._writer is None:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = self._closing.enter_context(replacing(self._path))
            writer = pq.ParquetWriter(file, self._schema, compression="zstd")
            self._writer = self._closing.enter_context(writer)
        arrays = [_array(columns[field.name], field.type) for field in self._schema]
        table = pa.Table.from_arrays(arrays, schema=self._schema)
        self._writer.write_table(table, row_group_size=ROWS_A_GROUP)
        self.rows += len(table)


def _array(column: Any, kind: Any) -> Any:
    return column.cast(kind) if isinstance(column, pa.Array) else pa.array(column, kind)


class _Owner(NamedTuple):
    """What rows that lie together have in common."""

    shared: dict[str, Any]
    fold: Fold | None
    """None in the table of calls."""


class _Batch(NamedTuple):
    """Rows of a table: arrays of equal length, beside what some of the rows share."""

    owners: list[_Owner]
    owner: NDArray[np.int64]
    """Which of `owners` is a row's."""
    rank: NDArray[np.int64]
    row: NDArray[np.int64]
    """Where its numbers stand in the columns of the step."""


def _batches(parts: Iterable[_Batch]) -> Iterator[_Batch]:
    """Yield the same rows in batches of a row group; the last one may be smaller."""
    waiting: list[_Batch] = []
    rows = 0
    for part in parts:
        if not len(part.row):
            continue
        waiting.append(part)
        rows += len(part.row)
        while rows >= ROWS_A_GROUP:
            whole = _joined(waiting)
            yield _cut(whole, slice(None, ROWS_A_GROUP))
            waiting, rows = [_cut(whole, slice(ROWS_A_GROUP, None))], rows - ROWS_A_GROUP
    if rows:
        yield _joined(waiting)


def _joined(parts: list[_Batch]) -> _Batch:
    firsts = itertools.accumulate((len(part.owners) for part in parts), initial=0)
    return _Batch(
        [owner for part in parts for owner in part.owners],
        np.concatenate([part.owner + first for part, first in zip(parts, firsts)]),
        np.concatenate([part.rank for part in parts]),
        np.concatenate([part.row for part in parts]),
    )


def _cut(batch: _Batch, some: slice) -> _Batch:
    used, owner = np.unique(batch.owner[some], return_inverse=True)
    owners = [batch.owners[place] for place in used]
    return _Batch(owners, owner, batch.rank[some], batch.row[some])


def _place(node: Node) -> tuple[str, str]:
    return node.path, node.phase.word


def _turn(node: Node) -> tuple[int, int]:
    return -1 if node.micro_batch is None else node.micro_batch, node.ordinal


def _values_in_order(step: Step, nodes: Iterable[Node], ranks: frozenset[int]) -> Iterator[_Batch]:
    """Yield the values of one slot after the other, by path, phase, slot, micro-batch, ordinal."""
    found: dict[tuple[Any, ...], tuple[Node, list[SlotView]]] = {}
    for node in nodes:
        for slot in value_slots(node):
            key = (*_place(node), slot.slot, *_turn(node), node.id)
            found.setdefault(key, (node, []))[1].append(slot)
    for key in sorted(found):
        node, slots = found.pop(key)
        call = call_fields(step, node)
        held = (slot_rows(call, slot, ranks) for slot in slots)
        parts = [_of_slot(each) for each in held if len(each.row)]
        if not parts:
            continue
        whole = _joined(parts)
        order = np.argsort(whole.rank, kind="stable")
        yield _Batch(whole.owners, whole.owner[order], whole.rank[order], whole.row[order])


def _of_slot(held: SlotRows) -> _Batch:
    owners = [_Owner(held.shared, fold) for fold in held.folds]
    return _Batch(owners, held.fold, held.rank, held.row)


def _calls_in_order(step: Step, nodes: Iterable[Node], ranks: frozenset[int]) -> Iterator[_Batch]:
    """Yield the calls of one node after the other, by path, phase, micro-batch and ordinal."""
    wanted = np.array(sorted(ranks), np.int64)
    for node in sorted(nodes, key=lambda node: (*_place(node), *_turn(node), node.id)):
        rank = np.array(node.ranks, np.int64)  # in order
        own = np.flatnonzero(np.isin(rank, wanted))
        owner = _Owner(call_fields(step, node), None)
        yield _Batch([owner], np.zeros_like(own), rank[own], node.call_rows.start + own)


def _shared(batch: _Batch, schema: Any) -> dict[str, Any]:
    """Return the columns that rows have from their owners."""
    made: dict[str, Any] = {}
    place = pa.array(batch.owner)
    first = batch.owners[0].shared
    for field in schema:
        if field.name in first:
            own = [owner.shared[field.name] for owner in batch.owners]
        elif field.name in _OF_THE_FOLD and batch.owners[0].fold is not None:
            own = [getattr(owner.fold, field.name) for owner in batch.owners]
        else:
            continue
        if pa.types.is_map(field.type):
            own = [None if each is None else list(each.items()) for each in own]
        made[field.name] = pa.array(own, field.type).take(place)
    return made | {"rank": batch.rank}


def _calls(batch: _Batch, columns: StepColumns) -> dict[str, Any]:
    made = _shared(batch, CALLS)
    duration = columns["calls.duration_ns"][batch.row]
    status, place = np.unique(columns["calls.status"][batch.row], return_inverse=True)
    words = pa.array([CallStatus.word_of(int(each)) for each in status])
    return made | {
        "start_ns": columns["calls.start_ns"][batch.row],
        "duration_ns": pa.array(duration, mask=duration < 0),
        "status": words.take(pa.array(place)),
    }


def _values(batch: _Batch, columns: StepColumns) -> dict[str, Any]:
    at = batch.row
    is_digested = columns["values.digested"][at]
    made = _shared(batch, VALUES)
    made["time_ns"] = columns["values.time_ns"][at]
    reference = columns["values.reference"][at].astype(np.int64)
    made["reference"] = pa.array(reference, mask=reference == 0)
    made["digested"] = is_digested
    for name in COUNTS:
        numbers = columns[f"values.{name}"][at].astype(np.int64)
        made[name] = pa.array(numbers, mask=~is_digested)
    for name in NUMBERS:
        numbers = columns[f"values.{name}"][at]
        made[name] = pa.array(numbers, mask=~is_digested | np.isnan(numbers))
    hashes = columns["values.hash"][at].astype(">u8").tobytes().hex()
    made["hash"] = [
        hashes[16 * i : 16 * i + 16] if known else None for i, known in enumerate(is_digested)
    ]
    made["sketch"] = _lists(columns["values.sketch"][at], is_digested)
    return made


def _samples(batch: _Batch, columns: StepColumns) -> Iterator[dict[str, Any]]:
    """Yield the samples of the values of a row group, a row group at a time."""
    sketches, at = columns["samples.sketch"], batch.row
    counts = np.where(columns["values.sample_row"][at] >= 0, columns["values.sample_count"][at], 0)
    for some in _filled(counts, ROWS_A_GROUP):
        picked = np.array([i for i in some if counts[i]], np.int64)
        if not len(picked):
            continue
        many = counts[picked]
        value = np.repeat(picked, many)
        first = columns["values.sample_row"][at[value]]
        sample = np.concatenate([np.arange(count) for count in many])
        made = _shared(_cut_at(batch, value), SAMPLES)
        made["dim"] = columns["values.sample_dim"][at[value]]
        made["sample"] = sample
        made["sketch"] = _lists(sketches[first + sample], np.ones(len(sample), np.bool_))
        yield made


def _filled(counts: Iterable[int], limit: int) -> Iterator[list[int]]:
    """Yield places behind each other, as many at a time as count up to a limit (at least one)."""
    some: list[int] = []
    total = 0
    for place, count in enumerate(counts):
        if some and total + count > limit:
            yield some
            some, total = [], 0
        some.append(place)
        total += count
    yield some


def _cut_at(batch: _Batch, places: NDArray[np.int64]) -> _Batch:
    return _Batch(batch.owners, batch.owner[places], batch.rank[places], batch.row[places])


def _lists(rows: Any, is_known: Any) -> Any:
    """Return an array of lists from a matrix, without a Python object per number.

    A list that is not known is null and has no elements: older releases of pyarrow write no other.
    """
    flat = pa.array(np.ascontiguousarray(rows[is_known]).reshape(-1))
    offsets = np.concatenate([[0], np.cumsum(is_known)]).astype(np.int32) * rows.shape[1]
    return pa.ListArray.from_arrays(pa.array(offsets), flat, mask=pa.array(~is_known))
