"""A trace assembled in memory: its head, and its steps as columns.

Calls of all ranks are merged into nodes, and their values into slots, by index work on the tables.
A node is every rank's call of one key: incarnation, mode, step, micro-batch, phase, path, ordinal.
Where ranks disagree in dtype, global shape or layout, a slot has one entry per variant. Inside an
entry, ranks that hold the same value share a fold.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from rankscope.record.call import CallStatus, Mode
from rankscope.record.phases import Phase
from rankscope.record.ranks import StreamId
from rankscope.record.statistics import STATISTICS
from rankscope.record.value import UNFOLDED_FLAGS
from rankscope.spool.chunks.tensorfiles import TensorRecords
from rankscope.tree.assembly.interning import Interned, Vocabulary
from rankscope.tree.assembly.layouts import declare_layouts, mark_layouts, placed_meshes
from rankscope.tree.assembly.rankstreams import RankStream
from rankscope.tree.assembly.steprecords import Group, StepRecords
from rankscope.tree.assembly.tables import KEY_COLUMNS, CallTable, Tables, build_tables, factorize
from rankscope.tree.step import LazyColumns, StepColumns, StepHead, StepTexts

Array = NDArray[Any]
_PLACED: Final = sorted(Phase.having(lambda facts: facts.has_micro_batches))
_OWN: Final = (
    *(each.name for each in STATISTICS), "hash", "sketch", "digested", "flags", "reference",
    "chunk", "sample_count", "sample_dim",
)  # fmt: skip
"""Columns of values that nothing is done with."""
_KINDS: Final = ("paths", "modules", "slots", "tensors", "errors", "collectives", "phases")
_MOST_PARTS: Final = 4
"""Parts that are remembered: of a job that is looked at while it runs there are few."""


class Document:
    """A trace in memory; its steps are put together on demand, until then they lie in the
    records."""

    def __init__(
        self,
        *,
        run: dict[str, Any],
        completeness: dict[str, Any],
        streams: Sequence[RankStream],
        records: StepRecords,
        vocabulary: Vocabulary,
        notes: Mapping[Group, Sequence[Mapping[str, Any]]],
        began_ns: int,
    ) -> None:
        """Put nothing together yet. `run`, `completeness`: as docs/trace-format.md; `streams`: in
        the order of the vocabulary's lookups; `began_ns`: wall clock of the first call of the run,
        what `start_us` counts from."""
        self.run, self.completeness, self.began_ns = run, completeness, began_ns
        self.took_all = not any(stream.has_set_aside for stream in streams)
        """False where records were set aside: their bytes say more than the tree."""
        self.tensors: Mapping[StreamId, TensorRecords] = {
            s.stream: (s.tensors, s.definitions) for s in streams if len(s.tensors)
        }
        self._records, self._vocabulary = records, vocabulary
        self._rank_of_stream = np.array([stream.stream.rank for stream in streams], np.int64)
        self._clock_offsets = np.array([stream.clock_offset_ns for stream in streams], np.int64)
        self._part = functools.lru_cache(_MOST_PARTS)(self._made_part)
        self._placed: list[NDArray[np.int32]] = []
        """Per part, what its values are, where layouts are known from beside the records."""
        self.heads = [
            StepHead(
                is_setup=group.is_setup,
                mode=Mode(group.mode),
                step=group.step,
                incarnation=group.incarnation,
                notes=tuple(notes.get(group, ())),
            )
            for group in records.groups
        ]
        self._place_values(streams)

    @property
    def head(self) -> dict[str, Any]:
        """Who ran what, and how much of it is here."""
        return {"run": self.run, "completeness": self.completeness}

    def close(self) -> None:
        """Let the records go: nothing is asked of its steps any more."""
        self._records.close()
        self._part.cache_clear()

    def faults(self) -> Iterator[str]:
        """Yield nothing: what is wrong with the records stands beside their rank."""
        yield from ()

    def step(self, group: int) -> StepColumns:
        """Return the columns of a group."""
        number = self._records.part_of_group[group]
        part, texts, first_text = self._part(number), *self._texts
        place = group - bisect.bisect_left(self._records.part_of_group, number)
        first, last = np.searchsorted(part.group, [place, place + 1]).tolist()
        calls = slice(*part.call_start[[first, last]].tolist())
        values = slice(*np.searchsorted(part.value_node, [first, last]).tolist())
        makers = {
            **_node_columns(part, first, last, first_text),
            **self._call_columns(part, calls, first, first_text),
            **self._value_columns(part, values, first, first_text),
            **self._failure_columns(part, first, last, first_text),
        }
        return StepColumns(
            head=self.heads[group], columns=LazyColumns(makers), texts=texts, began_ns=self.began_ns
        )

    def _tables(self, number: int) -> Tables:
        return build_tables(self._records.streams(number), self._vocabulary)

    def _made_part(self, number: int) -> MergedPart:
        tables = self._tables(number)
        if self._placed:
            tables.description = self._placed[number]
        return MergedPart(tables, self._vocabulary)

    def _place_values(self, streams: Sequence[RankStream]) -> None:
        """Give values the layouts that no rank knew alone; this looks at the calls of all steps."""
        if "layout" not in self.run and not any(stream.defined("mark") for stream in streams):
            return
        steps = [self._tables(number) for number in range(len(set(self._records.part_of_group)))]
        mark_layouts(steps, self._vocabulary, streams)
        declare_layouts(steps, self._vocabulary, self.run, self._rank_of_stream)
        self.run["meshes"] += placed_meshes(self._vocabulary)
        self._placed = [tables.description for tables in steps]

    @functools.cached_property
    def _texts(self) -> tuple[StepTexts, dict[str, int]]:
        """The texts of all groups, and the number of the first of each kind."""
        vocabulary = self._vocabulary
        lists: list[list[Any]] = [
            vocabulary.paths.items,
            vocabulary.modules.items,
            vocabulary.slots.items,
            [description.facts for description in vocabulary.descriptions.items],
            vocabulary.texts.items,
            vocabulary.collectives.items,
            [phase.word for phase in Phase],
        ]
        firsts, items = {}, list[object]()
        for kind, listed in zip(_KINDS, lists):
            firsts[kind] = len(items)
            items += listed
        return StepTexts(items), firsts

    def _call_columns(
        self, part: MergedPart, rows: slice, first_node: int, texts: dict[str, int]
    ) -> dict[str, Any]:
        calls = part.calls.chosen(rows)
        node = part.call_start.searchsorted(np.arange(rows.start, rows.stop), "right") - 1
        return {
            "calls.node": lambda: node - first_node,
            "calls.rank": lambda: self._rank_of_stream[calls["stream"]].astype(np.int32),
            "calls.start_ns": lambda: calls["start"],
            "calls.duration_ns": lambda: np.where(
                calls["status"] == CallStatus.UNFINISHED, -1, calls["end"] - calls["start"]
            ),
            "calls.status": lambda: calls["status"],
            "calls.issued": lambda: calls["issued"],
            "calls.module": lambda: calls["module"] + np.int32(texts["modules"]),
            "calls.error": lambda: _numbered(calls["text"], texts["errors"]),
            "calls.collective": lambda: _numbered(calls["collective"], texts["collectives"]),
            "calls.number": lambda: calls["number"],
        }

    def _value_columns(
        self, part: MergedPart, rows: slice, first_node: int, texts: dict[str, int]
    ) -> dict[str, Any]:
        tables = part.tables
        stream = part.value_stream[rows]

        def own(name: str) -> Callable[[], Array]:
            return lambda: part.column(name, rows)

        starts, counts = part.column("sample_start", rows), part.column("sample_count", rows)
        ends = np.cumsum(counts)

        def samples() -> Array:
            rows = np.arange(int(counts.sum())) + np.repeat(starts - ends + counts, counts)
            return np.asarray(tables.samples[rows])

        return {
            "values.node": lambda: part.value_node[rows] - first_node,
            "values.slot": lambda: part.column("slot", rows) + np.int32(texts["slots"]),
            "values.tensor": lambda: part.column("description", rows) + np.int32(texts["tensors"]),
            "values.rank": lambda: self._rank_of_stream[stream].astype(np.int32),
            **{f"values.{name}": own(name) for name in _OWN},
            "values.time_ns": lambda: part.column("time_ns", rows) + self._clock_offsets[stream],
            "values.sample_row": lambda: np.where(starts >= 0, ends - counts, -1),
            "samples.sketch": samples,
        }

    def _failure_columns(
        self, part: MergedPart, first: int, last: int, texts: dict[str, int]
    ) -> dict[str, Any]:
        failures = part.failures
        rows = failures[(failures[:, 0] >= first) & (failures[:, 0] < last)]
        return {
            "failures.node": lambda: rows[:, 0] - first,
            "failures.rank": lambda: self._rank_of_stream[rows[:, 1]].astype(np.int32),
            "failures.text": lambda: _numbered(rows[:, 2].astype(np.int32), texts["errors"]),
        }


def _node_columns(part: MergedPart, first: int, last: int, texts: dict[str, int]) -> dict[str, Any]:
    rows = slice(first, last)
    heads = part.heads.chosen(rows)
    parent = part.parent[rows]
    is_placed = np.isin(heads["phase"], _PLACED)
    return {
        "nodes.id": lambda: part.identity[rows],
        "nodes.parent": lambda: np.where(parent >= 0, parent - first, -1),
        "nodes.path": lambda: heads["path"] + np.int32(texts["paths"]),
        "nodes.phase": lambda: heads["phase"].astype(np.int32) + np.int32(texts["phases"]),
        "nodes.micro_batch": lambda: np.where(is_placed, heads["micro_batch"], -1),
        "nodes.ordinal": lambda: heads["ordinal"],
        "nodes.of_ordinal": lambda: heads["forward_ordinal"],
        "nodes.graph_task": lambda: heads["pass"],
    }


def _numbered(column: Array, first: int) -> Array:
    """Return numbers of texts, -1 for none."""
    numbers: Array = np.where(column >= 0, column + np.int32(first), np.int32(-1))
    return numbers


MAX_DEPTH = 50
"""Deeper nodes are hung onto their ancestor at this depth: readers of JSON recurse."""
_OF_NODES = (*KEY_COLUMNS, "forward_ordinal", "pass")
_OF_CALLS = (
    "stream", "start", "end", "module", "status", "text", "collective", "number", "issued",
)  # fmt: skip


class MergedPart:
    """Some steps whose calls are merged into nodes, and whose values are in order.

    Nodes are numbered in the order of a walk: groups (setup, then steps) behind each other,
    children after their parent, siblings by the time of the lowest rank that made the call.
    """

    def __init__(self, tables: Tables, vocabulary: Vocabulary) -> None:
        calls = tables.calls
        code, count = factorize(*(calls[name] for name in KEY_COLUMNS))
        by_node = _by_stream(code, calls["stream"])
        first = by_node[np.searchsorted(code[by_node], np.arange(count))]
        group_of = _groups(calls, first)
        parent = _parents(calls, code, by_node, group_of, count)
        walk = _walk(parent, group_of, calls["start"][first])
        number = np.empty(count, np.int64)
        number[walk] = np.arange(count)
        node = number[code]
        by_node = _by_stream(node, calls["stream"])
        slots = _slots(tables, vocabulary, node[tables.call])
        self._place, self.value_node, self.value_stream = slots
        self.parent = np.where(parent[walk] >= 0, number[np.maximum(parent[walk], 0)], -1)
        """[nodes] -1 at the top."""
        self.call_start = np.searchsorted(node[by_node], np.arange(count + 1))
        """[nodes + 1] first row in `calls` of each node."""
        self.heads = calls.apart(by_node[self.call_start[:-1]], *_OF_NODES)
        """One row a node: what all its calls say."""
        self.calls = calls.apart(by_node, *_OF_CALLS)
        """By node, then rank: what ranks may say differently."""
        self.group = group_of[walk]
        self.identity = _identities(self.heads, vocabulary.paths.items)
        failures = sorted((int(node[row]), stream, text) for stream, row, text in tables.errors)
        self.failures = np.array(failures, np.int64).reshape(-1, 3)
        """[failures, 3] node, stream and text number, by node."""
        # what is merged is not kept twice
        tables.calls, tables.call = CallTable.zeros(0), np.empty(0, np.int64)
        self.tables = tables
        self._columns: dict[str, Array] = {}

    def column(self, name: str, rows: slice) -> Array:
        """Return rows of a column of values, in order; kept where others may ask for the rest."""
        column = self._columns.get(name)
        if column is None:
            column = self.tables.put_in_order(name, self._place)
            # a part of one large step is read once, column by column: kept, it would lie here twice
            if rows.stop - rows.start < len(column):
                self._columns[name] = column
        return column[rows]


def _by_stream(node: NDArray[np.int64], stream: NDArray[Any]) -> NDArray[np.int64]:
    """Return the order of rows by node, and of one node by stream."""
    streams = int(stream.max(initial=0)) + 1
    return np.argsort(node * streams + stream, kind="stable")


def _groups(calls: CallTable, first: NDArray[np.int64]) -> NDArray[np.int64]:
    """Number the groups: by incarnation, setup before steps, train before eval, by step."""
    heads = calls.chosen(first)
    setup = heads["phase"] == Phase.SETUP
    mode, step = np.where(setup, Mode.TRAIN, heads["mode"]), np.where(setup, 0, heads["step"])
    return factorize(heads["incarnation"], ~setup, mode, step)[0]


def _parents(
    calls: CallTable,
    code: NDArray[np.int64],
    by_node: NDArray[np.int64],
    group: NDArray[np.int64],
    count: int,
) -> NDArray[np.int64]:
    """Return each node's parent node: what the lowest rank that knows one says."""
    # Ranks may contradict each other (one calls `a` inside `b`, another `b` inside `a`). Whatever
    # they say, the result must be a forest of nodes of one step: `_walk` would never end on a ring.
    # `count` stands for "no parent" while it is computed, so that it may be an index.
    # reversed: the lowest rank writes last
    with_parent = by_node[calls["parent"][by_node] >= 0][::-1]
    parent = np.full(count + 1, -1, np.int64)
    parent[code[with_parent]] = code[calls["parent"][with_parent]]
    node = np.arange(count)
    parent[:count][(parent[:count] == node) | (group[parent[:count]] != group)] = -1
    # Pointer doubling: after k turns `jump` is the ancestor 2**k above. No chain is longer than
    # there are nodes, so after log2(count) turns whatever has not come out at the top is on a ring,
    # or hangs below one.
    jump = np.where(parent < 0, count, parent)
    for _ in range(max(count, 2).bit_length()):
        jump = jump[jump]
    parent[jump != count] = -1  # cut everywhere: no place of a ring is the right one
    return parent[:count]


def _walk(
    parent: NDArray[np.int64], group: NDArray[np.int64], start: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return nodes in walk order; clips `parent` at MAX_DEPTH in place."""
    siblings = np.lexsort((start, group)).tolist()
    above: list[int] = parent.tolist()
    children: dict[int, list[int]] = {}
    tops: list[int] = []
    for node in siblings:
        if above[node] < 0:
            tops.append(node)
        else:
            children.setdefault(above[node], []).append(node)
    order: list[int] = []
    lineage: list[int] = []
    waiting = [(node, 0) for node in reversed(tops)]
    while waiting:  # a loop, because Python's own recursion ends at a thousand calls
        node, depth = waiting.pop()
        del lineage[depth:]
        if depth >= MAX_DEPTH:
            parent[node], depth = lineage[MAX_DEPTH - 1], MAX_DEPTH
        else:
            lineage.append(node)
        order.append(node)
        waiting.extend((child, depth + 1) for child in reversed(children.get(node, ())))
    return np.array(order, np.int64)


def _identities(heads: CallTable, paths: list[str]) -> NDArray[np.uint64]:
    """Return a 64-bit id per node, of its key alone: the same in every trace."""
    columns = [heads[name].tolist() for name in KEY_COLUMNS]
    place = KEY_COLUMNS.index("path")
    columns[place] = [paths[i] for i in columns[place]]
    keys = ("\0".join(map(str, key)).encode("utf-8", "backslashreplace") for key in zip(*columns))
    return np.array([xxhash.xxh3_64_intdigest(key) for key in keys], np.uint64)


def _slots(
    tables: Tables, vocabulary: Vocabulary, node: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int32]]:
    """Return the place of each value, sorted by entry, fold, rank; nodes and streams in order."""
    stream = tables.calls["stream"][tables.call]
    shared: Interned[Any] = Interned()
    local: Interned[Any] = Interned()
    described = [d.facts for d in vocabulary.descriptions.items]
    kinds = [shared.number(tuple(facts.shared.values())) for facts in described]
    # every array here has a row per value, in a large step most of the memory: each goes at once
    variant = np.array(kinds, np.int64)[tables.description]
    pieces = np.array([local.number(facts.local) for facts in described], np.int64)
    piece = pieces[tables.description]
    flags = tables.column("flags") & ~np.uint32(UNFOLDED_FLAGS)
    pair, pairs = factorize(node, tables.slot)
    turn = _first_seen(pair, pairs, stream, tables.time_ns)
    entry, entries = factorize(pair, variant)
    del variant
    fold, folds = factorize(entry, piece, flags, tables.column("count"), tables.column("hash"))
    del piece, flags
    # there are few folds: they are sorted first, then the values by the place of their fold
    row = np.empty(folds, np.int64)
    row[fold] = np.arange(len(fold))
    entry_of, pair_of = entry[row], pair[row]
    by_place = np.lexsort(
        (_lowest(stream, fold, folds), entry_of, _lowest(stream, entry, entries)[entry_of],
         pair_of, turn[pair_of], node[row])
    )  # fmt: skip
    place = np.empty(folds, np.int64)
    place[by_place] = np.arange(folds)
    order = _by_stream(place[fold], stream)
    at = np.empty(len(order), np.int64)
    at[order] = np.arange(len(order))
    return at, node[order], stream[order]


def _first_seen(
    pair: NDArray[np.int64], pairs: int, stream: NDArray[np.int32], time: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the place of each slot of a node by lowest rank, then time: how slots are listed."""
    # ranks have clocks of their own: slots only later ranks have come behind those of the lowest
    lowest = _lowest(stream, pair, pairs)
    of_lowest = stream == lowest[pair]
    earliest = _lowest(time[of_lowest], pair[of_lowest], pairs)
    place = np.empty(pairs, np.int64)
    place[np.lexsort((earliest, lowest))] = np.arange(pairs)
    return place


def _lowest(column: NDArray[Any], group: NDArray[np.int64], groups: int) -> NDArray[np.int64]:
    lowest = np.full(groups, np.iinfo(np.int64).max)
    np.minimum.at(lowest, group, column)
    return lowest
