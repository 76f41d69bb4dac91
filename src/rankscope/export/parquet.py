"""`--format parquet`: values and sample sketches as a dataset, partitioned by mode, step and block
of ranks.

    OUT/values/mode=train/step=3/ranks=000-063/part-0.parquet
    OUT/samples/mode=train/step=3/ranks=000-063/part-0.parquet

The number of a part is the life of the ranks (elastic restarts count up). One step and one block of
ranks is in memory at a time, and of its values one row group.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rankscope.errors import SelectionError, SettingError
from rankscope.export.place import ExportPlace
from rankscope.export.rows import Row, mode_word, rows_of
from rankscope.export.subset import Selection
from rankscope.record.statistics import COUNTS, NUMBERS
from rankscope.run.filenames import Progress
from rankscope.tree.digests import Columns
from rankscope.tree.views import Step, Trace

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ImportError as error:
    raise SettingError(
        "--format parquet needs pyarrow, which is not installed: pip install 'rankscope[parquet]'"
    ) from error

__all__ = ["RANKS_A_BLOCK", "ROWS_A_GROUP", "SAMPLES", "VALUES", "write"]

RANKS_A_BLOCK = 64
ROWS_A_GROUP = 1 << 16
_WORD = pa.dictionary(pa.int32(), pa.string())
_KEY = [
    ("incarnation", pa.int32()),
    ("micro_batch", pa.int32()),
    ("phase", _WORD),
    ("path", _WORD),
    ("class", _WORD),
    ("ordinal", pa.int32()),
    ("node", pa.string()),
    ("slot", _WORD),
    ("rank", pa.int32()),
]
VALUES = pa.schema(
    [
        *_KEY,
        ("dtype", _WORD),
        ("device", _WORD),
        ("shape", pa.list_(pa.int64())),
        ("global_shape", pa.list_(pa.int64())),
        ("layout", _WORD),
        ("mesh", _WORD),
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
"""What one rank holds in one slot of one call."""
SAMPLES = pa.schema(
    [*_KEY, ("dim", pa.int32()), ("sample", pa.int32()), ("sketch", pa.list_(pa.float32()))]
)
"""One sample of such a value."""
_OF_THE_FOLD = ("shape", "flags", "requires_grad", "note")


def write(
    trace: Trace, selection: Selection, place: ExportPlace, progress: Progress
) -> Sequence[str]:
    """Write both tables, step by step and block by block."""
    columns = trace.columns()
    blocks = _blocks(selection.ranks(trace), int(trace.run["world_size"]))
    groups, values, samples = len(selection.groups(trace)), 0, 0
    for done, (step, nodes) in enumerate(selection.walk(trace)):
        where = Path(f"mode={mode_word(step)}", f"step={step.step}")
        part = f"part-{step.incarnation}.parquet"
        for at, (name, ranks) in enumerate(blocks):
            progress("writing values", (done + at / len(blocks)) / groups)
            about = _about(trace, step)
            with (
                _Table(place.target / "values" / where / name / part, VALUES, about) as table,
                _Table(place.target / "samples" / where / name / part, SAMPLES, about) as sampled,
            ):
                rows = rows_of(step, nodes, columns, ranks)
                while batch := list(itertools.islice(rows, ROWS_A_GROUP)):
                    table.add(_values(batch, columns))
                    for piece in _samples(batch, columns):
                        sampled.add(piece)
            values, samples = values + table.rows, samples + sampled.rows
    if not values:
        raise SelectionError("the trace holds no value in what is asked for")
    return (f"{values} values in values/, {samples} sample sketches in samples/",)


def _blocks(ranks: frozenset[int], world_size: int) -> list[tuple[str, frozenset[int]]]:
    """Return the name of each block of ranks, and which of them are wanted."""
    last = max(world_size - 1, *ranks)
    digits = max(3, len(str(last)))
    found = []
    for first in range(0, last + 1, RANKS_A_BLOCK):
        upto = min(first + RANKS_A_BLOCK - 1, last)
        inside = ranks & frozenset(range(first, upto + 1))
        if inside:
            found.append((f"ranks={first:0{digits}d}-{upto:0{digits}d}", inside))
    return found


def _about(trace: Trace, step: Step) -> dict[str, str]:
    """What a file says of itself where it has been taken out of its folders."""
    return {
        "rankscope.run": str(trace.run["id"]),
        "rankscope.mode": mode_word(step),
        "rankscope.step": str(step.step),
        "rankscope.complete": "true" if trace.is_complete else "false",
    }


class _Table:
    """A Parquet file that begins with its first rows; without any there is none."""

    def __init__(self, path: Path, schema: Any, about: dict[str, str]) -> None:
        self._path, self._schema = path, schema.with_metadata(about)
        self._writer: Any = None
        self.rows = 0

    def __enter__(self) -> _Table:
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()

    def add(self, columns: dict[str, Any]) -> None:
        """Append a row group."""
        if self._writer is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._writer = pq.ParquetWriter(self._path, self._schema, compression="zstd")
        arrays = [pa.array(columns[f.name], f.type) for f in self._schema]
        table = pa.Table.from_arrays(arrays, schema=self._schema)
        self._writer.write_table(table, row_group_size=ROWS_A_GROUP)
        self.rows += len(table)


def _values(batch: list[Row], columns: Columns) -> dict[str, Any]:
    at = np.array([row.row for row in batch])
    is_digested = columns["values.digested"][at]
    made: dict[str, Any] = _shared(batch, VALUES)
    made |= {name: [getattr(row.fold, name) for row in batch] for name in _OF_THE_FOLD}
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
    made["sketch"] = _lists(columns["values.sketch"][at], ~is_digested)
    return made


def _samples(batch: list[Row], columns: Columns) -> Iterator[dict[str, Any]]:
    """Yield the samples of the values of a row group, a row group at a time."""
    sketches = columns["samples.sketch"]
    at = np.array([row.row for row in batch])
    counts = np.where(columns["values.sample_row"][at] >= 0, columns["values.sample_count"][at], 0)
    for some in _filled(counts, ROWS_A_GROUP):
        picked = [i for i in some if counts[i]]
        if not picked:
            continue
        many = counts[picked]
        first = columns["values.sample_row"][at[picked]]
        sample = np.concatenate([np.arange(count) for count in many])
        made = _shared([batch[i] for i in np.repeat(picked, many)], SAMPLES)
        made["dim"] = np.repeat(columns["values.sample_dim"][at[picked]], many)
        made["sample"] = sample
        made["sketch"] = _lists(sketches[np.repeat(first, many) + sample])
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


def _shared(batch: list[Row], schema: Any) -> dict[str, Any]:
    made: dict[str, Any] = {
        name: [row.shared[name] for row in batch]
        for name in schema.names
        if name in batch[0].shared
    }
    if "placements" in made:
        as_map: Callable[[Any], Any] = lambda p: None if p is None else list(p.items())  # noqa: E731
        made["placements"] = [as_map(each) for each in made["placements"]]
    return made | {"rank": [row.rank for row in batch]}


def _lists(rows: Any, mask: Any = None) -> Any:
    """Return an array of lists from a matrix, without a Python object per number."""
    flat = pa.array(np.ascontiguousarray(rows).reshape(-1))
    width = rows.shape[1]
    offsets = np.arange(len(rows) + 1, dtype=np.int32) * width
    return pa.ListArray.from_arrays(
        pa.array(offsets), flat, mask=None if mask is None else pa.array(mask)
    )
