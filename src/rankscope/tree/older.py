"""Traces of formats 1 and 2, and golden files, as steps: nodes were JSON there, beside the numbers
in columns.

    trace.json            nodes inside, or in steps/000007.json: one file for each step
    values.safetensors    columns of all steps; in format 2 steps/000007.safetensors, of some steps
                          each
"""

from __future__ import annotations

import bisect
import functools
import itertools
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from rankscope.errors import TraceError
from rankscope.layout.placement import Mesh, Ranges, global_ranges, parse_placement
from rankscope.record.call import CallStatus
from rankscope.record.ranks import parse_ranks
from rankscope.record.statistics import MEASURED
from rankscope.record.stepcolumns import COLUMNS, Column
from rankscope.record.value import SKETCH_SIZE, ModuleName, TensorFacts, read_ranges
from rankscope.run.folders import STEPS_FOLDER, TRACE_NAME, VALUES_NAME
from rankscope.tree.assembly.interning import Interned
from rankscope.tree.step import Columns, StepColumns, StepHead, StepTexts
from rankscope.tree.stepfile import MOST_OPEN, filled, known_entries, map_columns
from rankscope.tree.tracejson import UNREADABLE, damage, load_json
from rankscope.tree.views import meshes_of

if TYPE_CHECKING:
    from rankscope.record.ranks import StreamId
    from rankscope.spool.chunks.tensorfiles import TensorRecords

Array = NDArray[Any]
Data = Mapping[str, Any]
_NODES: Final = re.compile(rf"{STEPS_FOLDER}/\d{{6,}}\.json")
_VALUES: Final = re.compile(rf"{re.escape(VALUES_NAME)}|{STEPS_FOLDER}/\d{{6,}}\.safetensors")
_COUNTED_BY: Final = {"values": "values.rank", "samples": "samples.sketch", "calls": "calls.rank"}
_ALWAYS: Final = frozenset(
    f"values.{name}"
    for name in ("rank", "flags", "digested", "hash", "sketch", *(s.name for s in MEASURED))
)
"""Columns of values without which a file is damaged."""
_NEVER: Final = 2**62
_STATUSES: Final = {status.word: int(status) for status in CallStatus}


def is_older(head: Data) -> bool:
    """True for the head of a trace whose nodes are JSON."""
    return str(head["format"]) in ("rankscope.trace/1", "rankscope.trace/2")


FileRows = tuple[Columns, int, int]
"""The values file of a step, and how many rows of values and samples lie in the files before it:
rows of a step are counted through all files."""


class OlderSteps(ABC):
    """Steps whose nodes are JSON, as the source of a trace."""

    def __init__(self, head: Data, groups: Sequence[Data]) -> None:
        """Read none yet. `head`: {"run", "completeness"}; `groups`: heads of the steps, with nodes
        inside or the file of them."""
        self.head = head
        entries, self.passed_over = known_entries(groups)
        self.heads = [step_head for step_head, _ in entries]
        self._groups = [group for _, group in entries]
        self._world_size = int(head["run"]["world_size"])
        self._meshes = meshes_of(head["run"])

    @abstractmethod
    def file(self, group: int) -> Path:
        """Where the nodes of a step are."""

    @abstractmethod
    def _nodes(self, group: int) -> list[dict[str, Any]]: ...

    @abstractmethod
    def _rows(self, nodes: Sequence[Data]) -> FileRows:
        """Return where the values of a step lie."""

    @property
    @abstractmethod
    def _began_ns(self) -> int: ...

    def step(self, group: int) -> StepColumns:
        """Return the columns of a step; TraceError: it is damaged."""
        try:
            nodes = self._nodes(group)
            reader = _Reader(self.heads[group], self._rows(nodes), self._meshes, self._world_size)
            return reader.step(nodes, self._began_ns)
        except UNREADABLE as error:
            raise damage(self.file(group), error) from error

    @property
    def tensors(self) -> Mapping[StreamId, TensorRecords]:
        """{}: the chunks of a finished trace need no records."""
        return {}


class OlderTrace(OlderSteps):
    """A trace folder of format 1 or 2, or one half grown in format 2."""

    def __init__(
        self, folder: Path, head: Data, groups: Sequence[Data], values: Sequence[Data]
    ) -> None:
        """Read no step yet. `values`: {"file", "values", "samples", "calls"} of each values file,
        of a single one the name alone; the others as of `OlderSteps`."""
        super().__init__(head, groups)
        self._folder, self._values = folder, values
        self._opened = functools.lru_cache(MOST_OPEN)(self._columns)

    @classmethod
    def of(cls, folder: Path, head: Data) -> OlderTrace:
        """Return the finished trace of a trace.json."""
        values = head["storage"]["values"]
        listed = [{"file": values}] if isinstance(values, str) else values
        return cls(folder, head, [*head["setup"], *head["steps"]], listed)

    def file(self, group: int) -> Path:
        """Where the nodes of a step are."""
        data = self._groups[group]
        if "nodes_file" not in data:
            return self._folder / TRACE_NAME
        return self._named(str(data["nodes_file"]), _NODES, "nodes")

    def faults(self) -> Iterator[str]:
        """Yield what is wrong with each file that nodes or columns lie in."""
        for group, data in enumerate(self._groups):
            if "nodes_file" in data:
                try:
                    self._nodes(group)
                except TraceError as error:
                    yield str(error)
        for number in range(len(self._values)):
            try:
                self._columns(number, is_checked=True)
            except TraceError as error:
                yield str(error)

    def _nodes(self, group: int) -> list[dict[str, Any]]:
        data, file = self._groups[group], self.file(group)
        return listed_nodes(load_json(file, "nodes") if "nodes_file" in data else data, file)

    def _columns(self, number: int, *, is_checked: bool = False) -> Columns:
        """Map a values file; TraceError: it is damaged, or holds other rows than the trace says."""
        part = self._values[number]
        path = self._named(part["file"], _VALUES, "values")
        columns = map_columns(path, self._world_size, is_checked=is_checked)
        for kind, column in _COUNTED_BY.items():
            if kind in part and len(columns[column]) != part[kind]:
                raise TraceError(
                    f"{path}: {column} has {len(columns[column])} rows, the trace says "
                    f"{part[kind]}: the file is damaged"
                )
        return columns

    def _rows(self, nodes: Sequence[Data]) -> FileRows:
        """Return the file of a step's first value, without values of its first call, and so of
        all."""
        if len(self._values) == 1 or not nodes:
            return self._opened(0), 0, 0
        values, samples = (
            [0, *itertools.accumulate(int(part[kind]) for part in self._values)]
            for kind in ("values", "samples")
        )
        rows = (slot["rows"][0] for data, _ in _walked(nodes) for slot in data["slots"])
        first = next(rows, None)
        if first is None:
            node_id = np.uint64(int(nodes[0]["id"], 16))
            files = range(len(self._values))
            number = next((n for n in files if node_id in self._opened(n).get("calls.node", ())), 0)
        else:
            number = min(bisect.bisect_right(values, first), len(self._values)) - 1
        return self._opened(number), values[number], samples[number]

    @functools.cached_property
    def _began_ns(self) -> int:
        files = (self._opened(n) for n in range(len(self._values)))
        starts = (columns["calls.start_ns"] for columns in files if "calls.node" in columns)
        return min((int(columns.min(initial=_NEVER)) for columns in starts), default=0)

    def _named(self, name: str, pattern: re.Pattern[str], kind: str) -> Path:
        if not pattern.fullmatch(name):
            raise TraceError(f"{self._folder}: {name!r} is no {kind} file: the trace is damaged")
        return self._folder / name


def listed_nodes(holder: Data, file: Path) -> list[dict[str, Any]]:
    """Return the nodes of a step in a trace.json, or of a nodes file; TraceError: it has none."""
    nodes = holder.get("nodes")
    if not isinstance(nodes, list):
        raise TraceError(f"{file}: has no list of nodes: the trace is damaged")
    return nodes


def _walked(nodes: Sequence[Data]) -> Iterator[tuple[Data, int]]:
    """Yield every node with the row of its parent, parents first; -1 for none."""
    waiting = [(node, -1) for node in reversed(nodes)]
    for row in itertools.count():
        if not waiting:
            return
        data, parent = waiting.pop()
        yield data, parent
        waiting += [(child, row) for child in reversed(data["children"])]


class _Reader:
    """Makes the columns of one step of its nodes."""

    def __init__(
        self, head: StepHead, rows: FileRows, meshes: Mapping[str, Sequence[Mesh]], world_size: int
    ) -> None:
        self._head, self._meshes, self._world_size = head, meshes, world_size
        self._columns, self._first_value, self._first_sample = rows
        self._texts: Interned[Any] = Interned()
        self._number = self._texts.number
        self._node: dict[str, list[int]] = {n: [] for n in COLUMNS if n.startswith("nodes.")}
        self._call: dict[str, list[Array]] = {}
        self._failure: list[tuple[int, int, int]] = []
        self._value: dict[str, list[Array]] = {"node": [], "slot": [], "tensor": []}
        self._rows: list[tuple[int, int]] = []
        self._next_call: int | None = None

    def step(self, nodes: Sequence[Data], began_ns: int) -> StepColumns:
        for row, (data, parent) in enumerate(_walked(nodes)):
            self._add_node(data, parent, row)
        columns: dict[str, Array] = {
            name: np.array(listed, COLUMNS[name].dtype) for name, listed in self._node.items()
        }
        for name, parts in self._call.items():
            columns[name] = np.concatenate(parts).astype(COLUMNS[name].dtype)
        failures = np.array(self._failure, np.int64).reshape(-1, 3)
        for place, name in enumerate(("node", "rank", "text")):
            columns[f"failures.{name}"] = failures[:, place]
        first = self._rows[0][0] if self._rows else 0
        last = self._rows[-1][1] if self._rows else 0
        if [begin for begin, _ in self._rows[1:]] != [end for _, end in self._rows[:-1]]:
            raise ValueError("the rows of its slots do not follow on each other")
        for name, parts in self._value.items():
            columns[f"values.{name}"] = np.concatenate([*parts, np.empty(0, np.int64)])
        for column in COLUMNS.values():
            if column.table == "values" and column.name not in columns:
                columns[column.name] = self._values(column, first, last)
            elif column.table == "calls" and column.name not in columns:
                count = len(columns.get("calls.node", ()))
                columns[column.name] = filled(column, count, column.missing)
        columns["samples.sketch"] = self._samples(columns)
        texts = StepTexts(self._texts.items)
        return StepColumns(head=self._head, columns=columns, texts=texts, began_ns=began_ns)

    def _values(self, column: Column, first: int, last: int) -> Array:
        """Return a column of values from the file, or what stands for one that it may lack."""
        if column.name in self._columns or column.name in _ALWAYS:
            return np.asarray(self._columns[column.name][first:last])
        is_unknown = column.since == 1 and np.dtype(column.dtype).kind == "f"
        return filled(column, last - first, np.nan if is_unknown else column.missing)

    def _samples(self, columns: dict[str, Array]) -> Array:
        """Return the rows of samples of the step, and count its own from 0."""
        starts = columns["values.sample_row"]
        has_any = starts >= 0
        if not has_any.any():
            return np.empty((0, SKETCH_SIZE), np.float32)
        counts = columns["values.sample_count"].astype(np.int64)
        first = int(starts[has_any].min())
        last = int((starts + counts)[has_any].max())
        columns["values.sample_row"] = np.where(has_any, starts - first, -1)
        first, last = first - self._first_sample, last - self._first_sample
        sketches = self._columns["samples.sketch"]
        if not 0 <= first <= last <= len(sketches):
            raise ValueError(f"samples {first} to {last} are not in the columns")
        return sketches[first:last]

    # ---- nodes and calls

    def _add_node(self, data: Data, parent: int, row: int) -> None:
        ranks = np.array(parse_ranks(data["ranks"], self._world_size), np.int64)
        if not len(ranks):
            raise ValueError("a node of no rank")
        ordinal, micro = int(data["ordinal"]), data["micro_batch"]
        facts = {
            "id": int(data["id"], 16), "parent": parent, "path": self._number(str(data["path"])),
            "phase": self._number(str(data["phase"])),
            "micro_batch": -1 if micro is None else int(micro), "ordinal": ordinal,
            "of_ordinal": int(data.get("of_ordinal", ordinal)),
            "graph_task": int(data.get("graph_task", 0)),
        }  # fmt: skip
        for name, fact in facts.items():
            self._node[f"nodes.{name}"].append(fact)
        self._add_calls(data, row, ranks)
        for failure in data.get("errors", ()):
            text = self._number(str(failure["error"]))
            for rank in parse_ranks(failure["ranks"], self._world_size):
                self._failure.append((row, rank, text))
        for slot in data["slots"]:
            self._add_slot(slot, row)

    def _add_calls(self, data: Data, row: int, ranks: Array) -> None:
        classes = data.get("classes")
        module = self._on(ranks, classes, lambda entry: self._module(data, entry["class"]))
        default = self._module(data, str(data["class"]))
        outcomes = data.get("outcomes") or [{"ranks": data["ranks"], "status": data["status"]}]
        status = self._on(ranks, outcomes, lambda entry: _STATUSES.get(str(entry["status"]), 255))
        failed = [entry for entry in outcomes if "error" in entry]
        error = self._on(ranks, failed, lambda entry: self._number(str(entry["error"])))
        issued = data.get("collectives") or (
            [{"ranks": data["ranks"], **data["collective"]}] if "collective" in data else None
        )
        columns: dict[str, Array] = {
            "node": np.full(len(ranks), row),
            "rank": ranks,
            "module": np.where(module >= 0, module, default),
            "status": status,
            "error": error,
            "collective": self._on(ranks, issued, self._collective),
            "number": np.maximum(
                self._on(ranks, issued, lambda entry: int(entry.get("sequence", 0))), 0
            ),
            **self._times(data, len(ranks)),
        }
        for name, column in columns.items():
            self._call.setdefault(f"calls.{name}", []).append(column)

    def _times(self, data: Data, count: int) -> dict[str, Array]:
        """Return start and duration of calls; without columns, as if begun at once and not
        ended."""
        names = ("start_ns", "duration_ns", "issued")
        if "calls.node" not in self._columns:
            nothing = np.zeros(count, np.int64)
            return dict(zip(names, (nothing, nothing - 1, nothing)))
        node, node_id = self._columns["calls.node"], np.uint64(int(data["id"], 16))
        first = self._next_call
        if first is None or first >= len(node) or node[first] != node_id:
            matches = np.flatnonzero(np.asarray(node) == node_id)
            if not len(matches):
                raise ValueError(f"the columns have no call of node {data['id']}")
            first = int(matches[0])
        if (node[first : first + count] != node_id).any() or len(node) < first + count:
            raise ValueError(f"the columns have other calls of node {data['id']} than its ranks")
        self._next_call = first + count
        return {
            name: np.asarray(self._columns[f"calls.{name}"][first : first + count])
            if f"calls.{name}" in self._columns
            else np.zeros(count, np.int64)
            for name in names
        }

    def _on(
        self, ranks: Array, listed: Sequence[Data] | None, number: Callable[[Data], int]
    ) -> Array:
        """Return a number for each rank, from entries for some ranks each; -1 without an entry."""
        numbers = np.full(len(ranks), -1, np.int64)
        for entry in listed or ():
            of = parse_ranks(entry["ranks"], self._world_size)
            is_all = len(of) == len(ranks)
            numbers[slice(None) if is_all else np.isin(ranks, of)] = number(entry)
        return numbers

    def _module(self, data: Data, class_name: str) -> int:
        return self._number(
            ModuleName(
                path="",
                raw_path=str(data.get("raw_path", data["path"])),
                class_name=class_name,
                wrappers=tuple(map(str, data.get("wrappers", ()))),
                opaque=bool(data.get("opaque", False)),
            )
        )

    def _collective(self, data: Data) -> int:
        fields = {name: field for name, field in data.items() if name not in ("ranks", "sequence")}
        return self._number(json.dumps(fields))

    # ---- slots and values

    def _add_slot(self, data: Data, row: int) -> None:
        begin, end = (row - self._first_value for row in data["rows"])
        ranks = self._columns["values.rank"][begin:end]
        if not 0 <= begin < end or len(ranks) != end - begin:
            raise ValueError(f"rows {begin} to {end} are not in the columns")
        tensor = np.full(end - begin, -1, np.int64)
        at = 0
        for value in data["values"]:
            of = parse_ranks(value["ranks"], self._world_size)
            place: Any = slice(at, at + len(of))
            if tuple(ranks[place].tolist()) != of:  # in a large trace folds were no ranges
                place = np.flatnonzero(np.isin(ranks, of))
            at += len(of)
            tensor[place] = self._tensors(data, value, ranks[place])
        if (tensor < 0).any():
            raise ValueError(f"{data['slot']}: nothing says what some of its ranks hold")
        self._rows.append((begin, end))
        self._value["node"].append(np.full(end - begin, row))
        self._value["slot"].append(np.full(end - begin, self._number(str(data["slot"]))))
        self._value["tensor"].append(tensor)

    def _tensors(self, slot: Data, value: Data, ranks: Array) -> Array | int:
        """Return the number of what each rank holds."""
        layout, full_shape = slot["layout"], slot["shape"]
        mesh = str(layout.get("mesh", ""))
        placements = tuple((str(a), str(p)) for a, p in layout.get("placements", {}).items())
        shape = tuple(map(int, value["shape"]))
        common: dict[str, Any] = {
            "dtype": str(slot["dtype"]), "device": str(slot["device"]), "shape": shape,
            "global_shape": None if full_shape is None else tuple(map(int, full_shape)),
            "source": str(layout["source"]), "mesh": mesh, "placements": placements,
            "note": value.get("note"), "requires_grad": bool(value.get("requires_grad", False)),
        }  # fmt: skip
        is_told = "summary" not in slot and shape != common["global_shape"]
        if "ranges" in value or is_told or not mesh or full_shape is None:
            ranges = read_ranges(value["ranges"]) if "ranges" in value else None
            return self._number(TensorFacts(**common, ranges=ranges))
        parts = [self._ranges(mesh, placements, common["global_shape"], r) for r in ranks.tolist()]
        return np.array([self._number(TensorFacts(**common, ranges=part)) for part in parts])

    def _ranges(
        self, mesh: str, placements: Any, global_shape: tuple[int, ...], rank: int
    ) -> tuple[Ranges, ...] | None:
        """Return what of a whole a rank holds, as its placements say."""
        for candidate in self._meshes.get(mesh, ()):
            if (at := candidate.coordinate(rank)) is not None:
                by_axis = dict(placements)
                placed = [parse_placement(by_axis[axis]) for axis in candidate.axes]
                return global_ranges(global_shape, candidate.shape, at, placed)
        return None
