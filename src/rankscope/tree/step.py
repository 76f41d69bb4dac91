"""One step in columns, as memory, files and every reader have it: `rankscope.record.stepcolumns`
names the columns.

Nodes and slots are ranges of rows: the calls of a node stand side by side, and so do the values of
a slot on which ranks agree what it is (an *entry*), and in it the ranks that hold the same (a
*fold*). Where each begins is found here once, for all of a step at a time.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rankscope.record.call import CallStatus, Mode
from rankscope.record.ranks import Collective, step_label
from rankscope.record.statistics import COUNTS, NUMBERS, Combined
from rankscope.record.value import UNFOLDED_FLAGS, Digest, ModuleName, TensorFacts
from rankscope.tree.tracejson import UNREADABLE, damage

Array = NDArray[Any]
Columns = Mapping[str, Array]
_DIGEST: Final = (*COUNTS, *NUMBERS, "hash", "sketch")
_NEVER: Final = np.iinfo(np.int64).max
_MOST_ROWS: Final = 1 << 14
"""Values that are read together."""


class StepName(NamedTuple):
    """Life of the job, mode and number of a step; sorts as the tree does."""

    incarnation: int
    mode: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepHead:
    """Which step it is, and what ranks noted of it."""

    is_setup: bool
    mode: Mode
    step: int
    incarnation: int
    notes: tuple[Mapping[str, Any], ...] = field(default=(), compare=False)
    """As `notes` of docs/trace-format.md."""

    @property
    def words(self) -> str:
        """Which step it is, as people say it: `train step 3`, `setup`."""
        return "setup" if self.is_setup else f"{self.mode.word} step {self.step}"

    @property
    def label(self) -> str:
        """The same with the life of the ranks, where it is not their first."""
        return step_label(self.mode, self.step, self.incarnation, is_setup=self.is_setup)

    @property
    def name(self) -> StepName:
        """Which step it is, in the order of the tree; setup is told by `is_setup`."""
        return StepName(self.incarnation, int(self.mode), self.step)


class LazyColumns(dict[str, Array]):
    """Columns that are each made when it is asked for."""

    def __init__(self, makers: Mapping[str, Callable[[], Array]]) -> None:
        super().__init__()
        self._makers = makers

    def __missing__(self, name: str) -> Array:
        column = self[name] = self._makers[name]()
        return column

    def once(self, name: str) -> Array:
        """Return a column that nobody asks for again: it is not kept."""
        return self[name] if dict.__contains__(self, name) else self._makers[name]()

    def __contains__(self, name: object) -> bool:
        return name in self._makers

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)

    def items(self) -> Any:
        """Return names and columns; this makes all of them."""
        return [(name, self[name]) for name in self._makers]


class StepTexts:
    """The texts of a step by number: words, and descriptions as JSON, parsed on demand."""

    def __init__(self, items: Sequence[object], file: object = "") -> None:
        """Hold texts; one of a description may be that itself; `file` is what they lie in."""
        self._items, self._file = items, file
        self._read: dict[int, Any] = {}
        self._kinds: dict[tuple[object, ...], int] = {}
        self._pieces: dict[tuple[object, ...], int] = {}
        self.made: dict[object, Any] = {}
        """What readers made of these texts and keep for the next step."""

    def __len__(self) -> int:
        return len(self._items)

    def text(self, number: int) -> str:
        """Return a text."""
        item = self._item(number)
        if isinstance(item, str):
            return item
        return json.dumps(item.as_fields(), ensure_ascii=False)

    def module(self, number: int) -> ModuleName:
        """Return the name of a module."""
        name: ModuleName = self._described(number, ModuleName.read)
        return name

    def tensor(self, number: int) -> TensorFacts:
        """Return what a rank holds."""
        facts: TensorFacts = self._described(number, TensorFacts.read)
        return facts

    def collective(self, number: int) -> Mapping[str, Any]:
        """Return a collective, as `collective` of docs/trace-format.md."""
        described = self._described(number, lambda fields: {**fields})
        return described.as_fields() if isinstance(described, Collective) else described

    def kinds_and_pieces(self, tensors: Array) -> tuple[Array, Array]:
        """Return two numbers per tensor: equal where ranks agree what it is, and which piece."""
        table = np.zeros((2, len(self._items)), np.int64)
        used = np.zeros(len(self._items), np.bool_)
        used[tensors] = True
        for number in np.flatnonzero(used).tolist():
            facts = self.tensor(number)
            shared = tuple(facts.shared.values())
            table[0, number] = self._kinds.setdefault(shared, len(self._kinds))
            table[1, number] = self._pieces.setdefault(facts.local, len(self._pieces))
        return table[0][tensors], table[1][tensors]

    def _described(self, number: int, read: Callable[[Any], Any]) -> Any:
        if number not in self._read:
            item = self._item(number)
            try:
                self._read[number] = read(json.loads(item)) if isinstance(item, str) else item
            except UNREADABLE as error:
                raise damage(self._file, error) from error
        return self._read[number]

    def _item(self, number: int) -> Any:
        try:
            return self._items[number]
        except UNREADABLE as error:
            raise damage(self._file, error) from error


class NodeLists:
    """What all calls of each node say together, a list over the nodes for each question, and what
    the first value of each entry says, over the entries."""

    def __init__(self, step: StepColumns) -> None:
        self.path = step["nodes.path"].tolist()
        self.phase = step["nodes.phase"].tolist()
        self.parent = step["nodes.parent"].tolist()
        self.micro_batch = step["nodes.micro_batch"].tolist()
        self.ordinal = step["nodes.ordinal"].tolist()
        self.first_call = step.call_start.tolist()
        self.first_entry = step.node_entries.tolist()
        self.first_value = step.entry_start.tolist()
        self.slot = step["values.slot"][step.entry_start[:-1]].tolist()
        self.tensor = step["values.tensor"][step.entry_start[:-1]].tolist()
        self.module = step["calls.module"][step.call_start[:-1]].tolist()
        is_alike = _as_first(step, step["calls.error"])
        returned = (step["calls.status"] == CallStatus.RETURNED) & is_alike
        self.has_returned = _of_all(step, returned).tolist()
        self.children: list[list[int]] = [[] for _ in self.path]
        self.tops: list[int] = []
        for node, parent in enumerate(self.parent):
            (self.tops if parent < 0 else self.children[parent]).append(node)


@dataclass(eq=False)
class StepColumns:
    """One step."""

    head: StepHead
    columns: Columns
    """Rows are counted from 0 in each step."""
    texts: StepTexts
    began_ns: int
    """Wall clock of the first call of the run."""
    combined: dict[int, tuple[Combined, ...]] = field(default_factory=dict)
    """Numbers of whole tensors by entry, as far as somebody asked (`slotview`)."""
    _ranks: dict[bytes, tuple[int, ...]] = field(default_factory=dict)
    _by_rank: dict[bytes, tuple[Array, Array | None]] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Array:
        return self.columns[name]

    def once(self, name: str) -> Array:
        """Return a column that nobody asks for again."""
        columns = self.columns
        return columns.once(name) if isinstance(columns, LazyColumns) else columns[name]

    @cached_property
    def lists(self) -> NodeLists:
        """What is asked of every node."""
        return NodeLists(self)

    @cached_property
    def call_start(self) -> Array:
        """[nodes + 1] first row in calls of each node."""
        return np.searchsorted(self["calls.node"], np.arange(len(self["nodes.id"]) + 1))

    @cached_property
    def entry_start(self) -> Array:
        """[entries + 1] first row in values of each entry."""
        node, slot = self["values.node"], self["values.slot"]
        return run_starts(node, slot, self._kinds_and_pieces[0])

    @cached_property
    def has_one_entry(self) -> list[bool]:
        """Of each entry: all ranks agree in what its slot is."""
        first = self.entry_start[:-1]
        slot = self["values.node"][first].astype(np.int64) << 32 | self["values.slot"][first]
        _, numbers, counts = np.unique(slot, return_inverse=True, return_counts=True)
        is_only: list[bool] = (counts == 1)[numbers.reshape(-1)].tolist()
        return is_only

    @cached_property
    def node_entries(self) -> Array:
        """[nodes + 1] first entry of each node."""
        of_entry = self["values.node"][self.entry_start[:-1]]
        return np.searchsorted(of_entry, np.arange(len(self["nodes.id"]) + 1))

    @cached_property
    def fold_start(self) -> Array:
        """[folds + 1] first row in values of each fold."""
        # two entries of one slot may hold equal numbers: a fold never crosses an entry
        entry = np.zeros(len(self["values.rank"]), np.int64)
        entry[self.entry_start[:-1]] = 1
        flags = self["values.flags"] & ~np.uint32(UNFOLDED_FLAGS)
        numbers = self["values.count"], self["values.hash"]
        return run_starts(np.cumsum(entry), self.piece_numbers, flags, *numbers)

    @cached_property
    def entry_folds(self) -> Array:
        """[entries + 1] first fold of each entry."""
        return np.searchsorted(self.fold_start, self.entry_start)

    @cached_property
    def _alike_entries(self) -> Array:
        """[entries] equal where the same ranks hold the same, whatever its numbers are."""
        names = ("rank", "tensor", "digested")
        rows = np.stack([self[f"values.{name}"].astype(np.int32) for name in names], axis=1)
        numbers: dict[bytes, int] = {}
        phases = self["nodes.phase"][self["values.node"][self.entry_start[:-1]]].tolist()
        bounds = zip(phases, itertools.pairwise(self.entry_start.tolist()))
        keys = (b"%d " % phase + rows[a:b].tobytes() for phase, (a, b) in bounds)
        return np.array([numbers.setdefault(key, len(numbers)) for key in keys])

    def alike_rows(self, entry: int) -> tuple[list[int], Array]:
        """Return an entry and later ones in whose slots the same ranks hold the same, in one phase,
        and their rows, [entries, ranks].

        numpy costs the same for one slot and for thousands, and readers ask slot by slot: what lies
        alike is read together, bounded so that no step is held twice.
        """
        alike = self._alike_entries
        entries = np.flatnonzero(alike[entry:] == alike[entry]) + entry
        begin, end = self.entry_start[entry : entry + 2].tolist()
        entries = entries[: max(1, _MOST_ROWS // (end - begin))]
        return entries.tolist(), self.entry_start[entries][:, None] + np.arange(end - begin)

    @cached_property
    def durations(self) -> tuple[list[float], list[float], list[float], list[int]]:
        """Of each node: when it began on the lowest rank, since the first call of the run, its
        shortest and its longest call, in us, and whose that is: -1 where none has ended."""
        first, lasted = self.call_start[:-1], self["calls.duration_ns"]
        begin = _microseconds(self["calls.start_ns"][first] - self.began_ns).tolist()
        if not len(lasted):
            return begin, begin, begin, []
        is_done = lasted >= 0
        shortest = np.minimum.reduceat(np.where(is_done, lasted, _NEVER), first)
        longest = np.maximum.reduceat(lasted, first)
        row = np.arange(len(lasted))
        is_longest = is_done & (lasted == longest[self["calls.node"]])
        at = np.minimum.reduceat(np.where(is_longest, row, len(lasted)), first)
        has_any = at < len(lasted)
        whose = np.where(has_any, self["calls.rank"][np.where(has_any, at, 0)], -1)
        least = _microseconds(np.where(has_any, shortest, 0)).tolist()
        return begin, least, _microseconds(longest).tolist(), whose.tolist()

    @cached_property
    def is_one_module(self) -> list[bool]:
        """Of each node: its ranks call the module by one name."""
        agrees: list[bool] = _of_all(self, _as_first(self, self["calls.module"])).tolist()
        return agrees

    @cached_property
    def failures(self) -> dict[int, list[tuple[int, int]]]:
        """{node: (rank, text) of each failure inside rankscope}."""
        by_node: dict[int, list[tuple[int, int]]] = {}
        names = ("node", "rank", "text")
        for node, *failure in zip(*(self[f"failures.{n}"].tolist() for n in names)):
            by_node.setdefault(node, []).append((failure[0], failure[1]))
        return by_node

    @property
    def piece_numbers(self) -> Array:
        """[values] equal where ranks hold the same piece of a whole, whatever its numbers are."""
        return self._kinds_and_pieces[1]

    def ranks(self, table: str, rows: slice | Array) -> tuple[int, ...]:
        """Return the ranks of some rows of calls or values; equal ones are the same tuple."""
        ranks = self[f"{table}.rank"][rows]
        key = ranks.tobytes()
        ranks_tuple = self._ranks.get(key)
        if ranks_tuple is None:
            ranks_tuple = self._ranks[key] = tuple(ranks.tolist())
        return ranks_tuple

    def by_rank(self, rows: slice | Array) -> tuple[Array, Array | None]:
        """Return the ranks of some rows of values, sorted, and the order of the rows that makes
        them so, None for their own; equal ones are the same arrays."""
        ranks = self["values.rank"][rows]
        key = ranks.tobytes()
        if key not in self._by_rank:
            is_sorted = (ranks[1:] > ranks[:-1]).all()
            order = None if is_sorted else np.argsort(ranks, kind="stable")
            self._by_rank[key] = ranks if order is None else ranks[order], order
        return self._by_rank[key]

    def digest(self, row: int) -> Digest | None:
        """Return the numbers in a row of values; None where the value was not digested."""
        if not self["values.digested"][row]:
            return None
        numbers: dict[str, Any] = {name: int(self[f"values.{name}"][row]) for name in COUNTS}
        numbers |= {name: float(self[f"values.{name}"][row]) for name in NUMBERS}
        sketch = tuple(self["values.sketch"][row].tolist())
        return Digest.of(numbers, int(self["values.hash"][row]), sketch)

    def digests(self, rows: slice | Array) -> Array:
        """Return the numbers in some rows of values, of any shape, as a structured array."""
        columns, dtype = self._digest_columns
        digests = np.empty(columns["hash"][rows].shape, dtype)
        for name, column in columns.items():
            digests[name] = column[rows]
        return digests

    @cached_property
    def _digest_columns(self) -> tuple[Mapping[str, Array], np.dtype[Any]]:
        columns = {name: self[f"values.{name}"] for name in _DIGEST}
        dtype = [(name, column.dtype, column.shape[1:]) for name, column in columns.items()]
        return columns, np.dtype(dtype)

    @cached_property
    def _kinds_and_pieces(self) -> tuple[Array, Array]:
        return self.texts.kinds_and_pieces(self["values.tensor"])


def run_starts(*columns: Array) -> Array:
    """Return where each run of equal rows begins, and the length of the whole at the end."""
    count = len(columns[0])
    if not count:
        return np.zeros(1, np.int64)
    changes = np.zeros(count - 1, np.bool_)
    for column in columns:
        changes |= column[1:] != column[:-1]
    return np.concatenate([[0], np.flatnonzero(changes) + 1, [count]]).astype(np.int64)


def _as_first(step: StepColumns, column: Array) -> Array:
    """[calls] True where a call has in a column what the first call of its node has."""
    is_same: Array = column == column[step.call_start[:-1]][step["calls.node"]]
    return is_same


def _of_all(step: StepColumns, holds: Array) -> Array:
    """[nodes] True where it holds for every call."""
    if not len(holds):
        return holds
    holds_for_all: Array = np.logical_and.reduceat(holds, step.call_start[:-1])
    return holds_for_all


def _microseconds(ns: Array) -> Array:
    """Nanoseconds in microseconds, to one place; in integers, so that halves round the same way."""
    rounded: Array = (ns + 50) // 100 / 10
    return rounded
