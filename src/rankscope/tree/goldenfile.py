"""A golden trace: one small file with what `diff` needs of a trace, and nothing of the machine that
it was taken on.

    one line of JSON    {"format": "rankscope.golden/1", "trace": {...}, "columns": [[name, dtype,
                        shape], ...]}: the tree without times, hosts, arguments, and the digests
                        that stand in the columns
    bytes               the columns of values.safetensors that are kept, one behind the other

all of it compressed (xz). Statistics and sketches are kept as float32, and of single samples the
sketches of the root's inputs alone, unless all are asked for.
"""

from __future__ import annotations

import functools
import json
import lzma
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rankscope.errors import TraceError, TraceVersionError
from rankscope.record.phases import Phase
from rankscope.record.statistics import COUNTS, NUMBERS
from rankscope.record.stepcolumns import COLUMNS
from rankscope.record.value import SKETCH_SIZE
from rankscope.run.files import replacing
from rankscope.run.folders import VALUES_NAME
from rankscope.tree.jsontext import write_nodes
from rankscope.tree.older import FileRows, OlderSteps, listed_nodes
from rankscope.tree.step import StepColumns
from rankscope.tree.stepfile import FileColumns, check_columns, entry_of, filled
from rankscope.tree.tracejson import UNREADABLE, check_json
from rankscope.tree.views import Trace

GOLDEN_FORMAT: Final = "rankscope.golden/1"
_OF_NODES: Final = "rankscope.trace/1"
_MOST_BYTES: Final = 128 << 20
_MOST_MEMORY: Final = 128 << 20
"""Of the decompressor; the strongest preset takes 65 MiB."""
_MAGIC: Final = b"\xfd7zXZ\x00"
_LEFT_OUT: Final = frozenset(
    phase.word for phase in (Phase.RECOMPUTE, Phase.ACCUMULATED, Phase.COLLECTIVE)
)
_SETTINGS: Final = frozenset({"steps", "ranks", "paths", "phases", "slots", "digest", "batch-dim"})
_OF_NODE: Final = ("id", "path", "class", "wrappers", "phase", "micro_batch", "ordinal", "ranks",
                   "status", "outcomes", "of_ordinal", "graph_task")  # fmt: skip
_OF_SLOT: Final = ("slot", "ranks", "dtype", "device", "shape", "layout", "disagree", "rows")
_OF_VALUE: Final = ("ranks", "shape", "ranges", "flags")
_NO_TIME: Final = {"start_us": 0.0, "min_us": None, "max_us": None, "slowest": None}
_LEFT_OUT_OF_RUN: Final[Mapping[str, Any]] = {
    "created": "", "groups": [], "argv": [], "environment": {}, "differs": [],
    "digest": {"sketch_size": SKETCH_SIZE, "hash": "", "max_samples": 0},
}  # fmt: skip
_LEFT_OUT_OF_RANK: Final[Mapping[str, Any]] = {
    "host": "", "origin": "0" * 16, "committed": None, "received": 0, "dropped": 0, "gaps": [],
    "notes": [],
}  # fmt: skip
_OF_VALUES: Final = tuple(
    f"values.{name}"
    for name in (
        *COUNTS, *NUMBERS, "sketch", "hash", "rank", "flags", "digested", "sample_row",
        "sample_count", "sample_dim",
    )
)  # fmt: skip
_SKETCHES: Final = "samples.sketch"
Array = NDArray[Any]


def write_golden(trace: Trace, file: Path, *, has_samples: bool) -> int:
    """Write a golden file, and return its size in bytes; one that is there is replaced.
    `has_samples`: keep the sketches of single samples of every value. OSError: it cannot be
    written."""
    rows = _Rows(has_samples=has_samples)
    body: dict[str, list[Any]] = {"setup": [], "steps": []}
    for step in (*trace.setup, *trace.steps):
        take = functools.partial(rows.take, step.columns())
        text: list[str] = []
        write_nodes(step, "\n", text.append)
        nodes = [*_nodes(json.loads("".join(text)), take)]
        entry = {**entry_of(step.head), "nodes": nodes}
        body["setup" if step.is_setup else "steps"].append(entry)
    columns = rows.columns()
    head = {
        "format": GOLDEN_FORMAT,
        "trace": {**_head({"run": trace.run, "completeness": trace.completeness}), **body},
        "columns": [[name, c.dtype.str, list(c.shape)] for name, c in columns.items()],
    }
    raw = json.dumps(head, separators=(",", ":")).encode() + b"\n"
    raw += b"".join(np.ascontiguousarray(c).tobytes() for c in columns.values())
    packed = lzma.compress(raw, preset=9 | lzma.PRESET_EXTREME)
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file.resolve()) as out:  # where a link points to
        out.write(packed)
    return len(packed)


def is_golden(path: Path) -> bool:
    """True for a file that begins as a golden one does."""
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


class GoldenFile(OlderSteps):
    """A golden file as the source of a trace."""

    _began_ns = 0

    def __init__(self, file: Path) -> None:
        """Read it. TraceError: damaged, or another file; TraceVersionError: of a newer format."""
        self._file = file
        try:
            line, _, content = _inflated(file.read_bytes()).partition(b"\n")
            head = json.loads(line)
            family, _, number = str(head["format"]).partition("/")
            if family != GOLDEN_FORMAT.partition("/")[0]:
                raise ValueError(f"its format is {head['format']!r}")
            if number != GOLDEN_FORMAT.partition("/")[2]:
                raise TraceVersionError(f"{file}: format {head['format']}: use a newer rankscope")
            trace: Mapping[str, Any] = head["trace"]
            check_json(_filled(trace), "older_trace", file)
            self._columns = FileColumns(file, _unpacked(head["columns"], content))
            check_columns(self._columns, trace["run"]["world_size"])
        except (OSError, lzma.LZMAError, RecursionError, *UNREADABLE, EOFError) as error:
            raise TraceError(f"{file}: no golden trace, or a damaged one: {error}") from error
        super().__init__(trace, [*trace["setup"], *trace["steps"]])

    def file(self, group: int) -> Path:
        """Return the file itself."""
        return self._file

    def _nodes(self, group: int) -> list[dict[str, Any]]:
        return listed_nodes(self._groups[group], self._file)

    def _rows(self, nodes: Any) -> FileRows:
        return self._columns, 0, 0

    def faults(self) -> Iterator[str]:
        """Yield nothing: the file was read whole."""
        yield from ()

    def trace(self) -> Trace:
        """Return the trace."""
        return Trace(self, self._file)


def _filled(head: Mapping[str, Any]) -> dict[str, Any]:
    """Return the trace with all that a golden file leaves out, as far as the schema wants it."""
    run, completeness = head["run"], head["completeness"]
    return {
        **head,
        "format": _OF_NODES,
        "run": {**_LEFT_OUT_OF_RUN, **run},
        "completeness": {
            **completeness,
            "ranks": [{**_LEFT_OUT_OF_RANK, **rank} for rank in completeness["ranks"]],
        },
        "storage": {"values": VALUES_NAME, "numbers": "columns"},
    }


def _inflated(packed: bytes) -> bytes:
    """Return the decompressed bytes; LZMAError, ValueError: damaged, or too large."""
    inflating = lzma.LZMADecompressor(memlimit=_MOST_MEMORY)
    raw = inflating.decompress(packed, _MOST_BYTES)
    if not inflating.eof:
        raise ValueError(f"it is cut short, or larger than {_MOST_BYTES} bytes")
    return raw


def _unpacked(listed: Any, data: bytes) -> Iterator[tuple[str, Array]]:
    at = 0
    for name, dtype, shape in listed:
        kind, count = np.dtype(dtype), math.prod(shape)
        column = np.frombuffer(data, kind, count, at).reshape(shape)
        at += count * kind.itemsize
        is_number = kind == np.float32 and name != "samples.sketch"
        yield name, column.astype(np.float64) if is_number else column


# ---- what is kept --------------------------------------------------------------------------------


class _Rows:
    def __init__(self, *, has_samples: bool) -> None:
        self._has_samples = has_samples
        self._parts = {name: [filled(COLUMNS[name], 0)] for name in (*_OF_VALUES, _SKETCHES)}
        self._count = self._samples = 0

    def take(self, step: StepColumns, first: int, last: int, *, is_of_root: bool) -> list[int]:
        """Take the rows of one slot of a step; return where they stand in the golden file."""
        columns = {name: step[name][first:last] for name in _OF_VALUES}
        starts, counts = columns["values.sample_row"], columns["values.sample_count"]
        is_kept = (starts >= 0) & (is_of_root or self._has_samples)
        for start, count in zip(starts[is_kept].tolist(), counts[is_kept].tolist()):
            self._parts[_SKETCHES].append(step[_SKETCHES][start : start + count])
        sample_counts = np.where(is_kept, counts, 0).astype(counts.dtype)
        ends = self._samples + np.cumsum(sample_counts)
        columns["values.sample_row"] = np.where(is_kept, ends - sample_counts, -1)
        columns["values.sample_count"] = sample_counts
        for name, column in columns.items():
            self._parts[name].append(column)
        begin = self._count
        self._count += last - first
        self._samples += int(sample_counts.sum())
        return [begin, self._count]

    def columns(self) -> dict[str, Array]:
        columns = {name: np.concatenate(parts) for name, parts in self._parts.items()}
        return {name: _narrowed(column) for name, column in columns.items()}


def _narrowed(column: Array) -> Array:
    """Return float64 as float32 where every number stays finite that is."""
    if column.dtype != np.float64:
        return column
    with np.errstate(over="ignore"):
        narrow = column.astype(np.float32)
    return narrow if (np.isfinite(narrow) == np.isfinite(column)).all() else column


def _nodes(nodes: list[dict[str, Any]], take: Callable[..., list[int]]) -> Iterator[dict[str, Any]]:
    for node in nodes:
        if node["phase"] in _LEFT_OUT:
            continue
        fields: dict[str, Any] = {key: node[key] for key in _OF_NODE if key in node}
        is_root = not node["path"] and node["phase"] == Phase.FORWARD.word
        slots = [
            _slot(slot, take, is_of_root=is_root and slot["slot"].startswith("input"))
            for slot in node["slots"]
            if slot["dtype"] != "python"
        ]
        children = [*_nodes(node["children"], take)]
        yield {**fields, "time": _NO_TIME, "slots": slots, "children": children}


def _slot(
    slot: Mapping[str, Any], take: Callable[..., list[int]], *, is_of_root: bool
) -> dict[str, Any]:
    fields = {key: slot[key] for key in _OF_SLOT if key in slot}
    fields["rows"] = take(*slot["rows"], is_of_root=is_of_root)
    fields["values"] = [
        {key: value[key] for key in _OF_VALUE if key in value} for value in slot["values"]
    ]
    return fields


def _head(head: Mapping[str, Any]) -> dict[str, Any]:
    """Return the header without what tells of the machine."""
    run, completeness = head["run"], head["completeness"]
    settings = {key: state for key, state in run["settings"].items() if key in _SETTINGS}
    ranks = [{"rank": r["rank"], "incarnation": r["incarnation"]} for r in run["ranks"]]
    place = {"host": "", "pid": 0, "local_rank": 0}
    ends = [
        {**{key: state[key] for key in ("rank", "incarnation", "end", "complete")}, "errors": []}
        for state in completeness["ranks"]
    ]
    return {
        "run": {
            "id": "golden",
            "world_size": run["world_size"],
            "ranks": [{**rank, **place} for rank in ranks],
            "hosts": [],
            "meshes": run["meshes"],
            "versions": run["versions"],
            "settings": settings,
        },
        "completeness": {
            "complete": completeness["complete"],
            "missing": completeness["missing"],
            "ranks": ends,
        },
    }
