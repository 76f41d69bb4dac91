"""The records of all ranks as two tables, calls and values, in common numbers.

Besides the calls that were recorded there are *derived* calls: gradients are written under the
forward call they belong to, and become a backward call of their own here, at the time they were
seen.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.record.call import CallStatus
from rankscope.record.phases import Phase
from rankscope.record.value import ValueFlag
from rankscope.spool.recordcolumns import Sequences
from rankscope.spool.recordformat import NO_SEQUENCE
from rankscope.tree.assembly.interning import Vocabulary, common_numbers
from rankscope.tree.assembly.rankstreams import RankStream, ValueColumns

_MOST_SPARSE = 4
"""Numbers of a span for each row of a column whose values are counted and not sorted."""
KEY_COLUMNS = ("incarnation", "mode", "step", "micro_batch", "phase", "path", "ordinal")
"""Calls of all ranks with equal keys are one node."""
_PLACE = ("sequence", "slot", "ordinal", "phase")
_EVENT_PHASES = sorted(Phase.having(lambda facts: facts.is_event))


@dataclass(slots=True, eq=False)
class Tables:
    """Calls and values of some steps, streams behind each other."""

    calls: CallTable
    rows: list[ValueColumns]
    call: NDArray[np.int64]
    """Row of `calls` each value belongs to."""
    slot: NDArray[np.int32]
    description: NDArray[np.int32]
    time_ns: NDArray[np.int64]
    """When it was read, by its rank's monotonic clock."""
    sample_start: NDArray[np.int32]
    """First row in `samples` of each value, -1 without samples."""
    sample_count: NDArray[np.int32]
    sample_dim: NDArray[np.uint16]
    samples: NDArray[np.float32]
    """[rows, K]."""
    errors: list[tuple[int, int, int]]
    """Of what failed inside rankscope in a call: stream, row of `calls`, text number."""

    def parts(self, name: str) -> list[NDArray[Any]]:
        """Return a column of these tables, else of the streams' values, in consecutive pieces."""
        column = getattr(self, name, None)
        return [rows[name] for rows in self.rows] if column is None else [column]

    def column(self, name: str) -> NDArray[Any]:
        """Return the same in one piece."""
        return np.concatenate(self.parts(name))

    def put_in_order(self, name: str, place: NDArray[np.int64]) -> NDArray[Any]:
        """Return a column with each value at its place, without a second copy."""
        parts = self.parts(name)
        ordered = np.empty((len(place), *parts[0].shape[1:]), parts[0].dtype)
        begin = 0
        for part in parts:
            ordered[place[begin : begin + len(part)]] = part
            begin += len(part)
        return ordered


def factorize(*columns: NDArray[Any]) -> tuple[NDArray[np.int64], int]:
    """Return for each row the number of its distinct combination, sorted, and how many there
    are."""
    codes, count = np.zeros(len(columns[0]), np.int64), 1
    for column in columns:
        numbers, distinct = _numbered(column)
        if count * max(distinct, 1) >= 1 << 62:  # never in real traces: before it overflows
            codes, count = _numbered(codes)
        codes = codes * distinct + numbers
        count *= distinct
    return _numbered(codes)


def _numbered(column: NDArray[Any]) -> tuple[NDArray[np.int64], int]:
    """Return the number of each value among the distinct ones, sorted, and how many there are."""
    if not len(column):
        return np.empty(0, np.int64), 0
    low, high = int(column.min()), int(column.max())
    if high - low > max(_MOST_SPARSE * len(column), 1 << 16):
        distinct, numbers = np.unique(column, return_inverse=True)
        return numbers.reshape(-1).astype(np.int64), len(distinct)
    # values lie close together: counting them takes one pass, sorting them twenty
    if column.dtype.kind == "u":  # may be beyond what a signed number holds
        places = (column - column.dtype.type(low)).astype(np.int64)
    else:
        places = column.astype(np.int64) - low
    is_there = np.zeros(high - low + 1, np.bool_)
    is_there[places] = True
    number = np.cumsum(is_there) - 1
    return number[places], int(number[-1]) + 1


def build_tables(parts: Iterable[tuple[int, RankStream]], vocabulary: Vocabulary) -> Tables:
    """Return the tables of some steps; `parts`: number and records of each stream."""
    parts = [*parts]
    calls = CallTable.zeros(sum(len(stream.enters) for _, stream in parts))
    columns: list[dict[str, NDArray[Any]]] = []
    rows: list[ValueColumns] = []
    errors: list[tuple[int, int, int]] = []
    first_row = first_sample = 0
    for number, stream in parts:
        recorded = Sequences(stream.enters["sequence"])
        stream_calls = calls.chosen(slice(first_row, first_row + len(stream.enters)))
        _fill(stream_calls, number, stream, vocabulary, recorded, first_row)
        standing, fields = _values(number, stream, vocabulary, recorded, first_row, first_sample)
        rows.append(standing)
        columns.append(fields)
        texts = common_numbers(vocabulary.lookups[number]["text"], stream.errors["text"])
        of_call = recorded.find(stream.errors["sequence"]) + first_row
        errors += [(number, row, text) for row, text in zip(of_call.tolist(), texts.tolist())]
        first_row += len(stream_calls)
        first_sample += len(stream.samples.rows)
    tables = Tables(
        calls=calls,
        rows=rows,
        samples=np.concatenate([stream.samples.rows for _, stream in parts]),
        errors=errors,
        **{name: np.concatenate([part.pop(name) for part in columns]) for name in [*columns[0]]},
    )
    _fold_event_owners(tables)
    streams = tables.calls["stream"]
    bounds = np.flatnonzero(np.diff(streams, prepend=-1, append=-1)).tolist()
    for begin, end in itertools.pairwise(bounds):
        _renumber_repeats(tables.calls.chosen(slice(begin, end)))
    tables.calls["forward_ordinal"] = tables.calls["ordinal"]
    offsets = np.zeros(int(streams.max()) + 1, np.int64)
    offsets[[number for number, _ in parts]] = [stream.clock_offset_ns for _, stream in parts]
    _derive_calls(tables, offsets)
    return tables


def _fill(
    calls: CallTable,
    number: int,
    stream: RankStream,
    vocabulary: Vocabulary,
    recorded: Sequences,
    first_row: int,
) -> None:
    enters, exits, offset = stream.enters, stream.exits, stream.clock_offset_ns
    lookups = vocabulary.lookups[number]
    parent = recorded.find(enters["parent"])
    parent[enters["parent"] == NO_SEQUENCE] = -1
    calls["stream"], calls["sequence"] = number, enters["sequence"]
    calls["incarnation"] = stream.stream.incarnation
    calls["parent"] = np.where(parent >= 0, parent + first_row, -1)
    calls["start"] = enters["time_ns"] + offset
    calls["end"] = calls["start"]
    calls["module"] = np.maximum(common_numbers(lookups["module"], enters["module"]), 0)
    calls["path"] = vocabulary.path_of[calls["module"]]
    calls["step"], calls["ordinal"] = enters["step"], enters["ordinal"]
    calls["micro_batch"] = enters["micro_batch"].astype(np.int64)
    calls["micro_batch"][enters["micro_batch"] == 0xFFFF_FFFF] = -1
    calls["phase"], calls["mode"] = enters["phase"], enters["mode"]
    calls["status"], calls["text"] = CallStatus.UNFINISHED, -1
    calls["collective"] = common_numbers(lookups["collective"], enters["collective"])
    calls["number"] = enters["number"]
    issuers = [kind.issuer == "backward" for kind in vocabulary.collectives.items]
    calls["is_backward"] = np.array([*issuers, False])[calls["collective"]]
    at = recorded.find(exits["sequence"])
    calls["end"][at] = exits["time_ns"] + offset
    calls["status"][at], calls["issued"][at] = exits["status"], exits["issued"]
    calls["text"][at] = common_numbers(lookups["text"], exits["text"])


def _values(
    number: int,
    stream: RankStream,
    vocabulary: Vocabulary,
    recorded: Sequences,
    first_row: int,
    first_sample: int,
) -> tuple[ValueColumns, dict[str, NDArray[Any]]]:
    """Return the values of a stream that stand, and the columns of `Tables` about them."""
    values, time_ns = _without_replaced(stream.values)
    heads = stream.samples.heads
    start = np.full(len(values), -1, np.int32)
    count, dim = np.zeros(len(values), np.int32), np.zeros(len(values), np.uint16)
    if len(heads):
        places = [np.concatenate([values[n], heads[n]]).astype(np.uint64) for n in _PLACE]
        codes, _ = factorize(*places)
        at = Sequences(codes[: len(values)]).find(codes[len(values) :])
        firsts = np.cumsum(heads["count"], dtype=np.int64) - heads["count"] + first_sample
        has_sample = at >= 0
        start[at[has_sample]] = firsts[has_sample]
        count[at[has_sample]] = heads["count"][has_sample]
        dim[at[has_sample]] = heads["dim"][has_sample]
    slot = common_numbers(vocabulary.lookups[number]["slot"], values["slot"])
    description = common_numbers(vocabulary.lookups[number]["meta"], values["meta"])
    return values, {
        "call": recorded.find(values["sequence"]) + first_row,
        "slot": slot.astype(np.int32),
        "description": description.astype(np.int32),
        "time_ns": time_ns,
        "sample_start": start,
        "sample_count": count,
        "sample_dim": dim,
    }


def _without_replaced(values: ValueColumns) -> tuple[ValueColumns, NDArray[np.int64]]:
    """Return the values that stand, and their times: a record that replaces an earlier one of its
    slot takes its place."""
    time_ns = values["time_ns"]
    replacing = (values["flags"] & np.uint32(ValueFlag.SUPERSEDES)) != 0
    if not replacing.any():
        return values, time_ns
    # the latest replacing record stands where the first of its slot stood: slots are listed in the
    # order of first sight, and a late read of a pending value must not move its slot to the end
    rows = np.arange(len(values))
    codes, count = factorize(*(values[name] for name in _PLACE))
    first = np.full(count, len(values), np.int64)
    np.minimum.at(first, codes, rows)
    latest = np.full(count, -1, np.int64)
    np.maximum.at(latest, codes[replacing], rows[replacing])
    is_replaced = latest >= 0
    stays = ~np.isin(codes, np.flatnonzero(is_replaced))
    stays[first[is_replaced]] = True
    rows[first[is_replaced]] = latest[is_replaced]
    return values.chosen(rows[stays]), time_ns[stays]


def _fold_event_owners(tables: Tables) -> None:
    """Fold a root that owns parameters into one call: it is its own child in setup, grads and
    params."""
    calls = tables.calls
    parent = calls["parent"]
    inside = np.flatnonzero((parent >= 0) & np.isin(calls["phase"], _EVENT_PHASES))
    is_owner = np.ones(len(inside), np.bool_)
    for name in ("path", "phase"):  # column by column: rows are wide
        is_owner &= calls[name][parent[inside]] == calls[name][inside]
    if not is_owner.any():
        return
    is_folded = np.zeros(len(calls), np.bool_)
    is_folded[inside[is_owner]] = True
    stands_for = np.arange(len(calls))
    stands_for[is_folded] = parent[is_folded]
    calls["parent"] = np.where(parent >= 0, stands_for[np.maximum(parent, 0)], -1)
    tables.call = stands_for[tables.call]
    rows = np.cumsum(~is_folded) - 1
    calls["parent"] = np.where(calls["parent"] >= 0, rows[np.maximum(calls["parent"], 0)], -1)
    tables.call = rows[tables.call]
    tables.errors = [(s, int(rows[stands_for[row]]), text) for s, row, text in tables.errors]
    tables.calls = calls.chosen(~is_folded)


def _renumber_repeats(calls: CallTable) -> None:
    """Give calls of one stream that share a key (two losses of one class) ordinals by sequence."""
    names = ("mode", "step", "micro_batch", "phase", "path")
    group, _ = factorize(*(calls[name] for name in names))
    if factorize(group, calls["ordinal"])[1] == len(calls):
        return
    order = np.lexsort((calls["sequence"], calls["ordinal"], group))
    sorted_group, ordinal = group[order], calls["ordinal"][order]
    repeats = (sorted_group[1:] == sorted_group[:-1]) & (ordinal[1:] == ordinal[:-1])
    touched = np.isin(sorted_group, np.unique(sorted_group[1:][repeats]))
    starts = np.flatnonzero(np.concatenate([[True], sorted_group[1:] != sorted_group[:-1]]))
    position = np.arange(len(order)) - np.repeat(starts, np.diff([*starts, len(order)]))
    calls["ordinal"][order[touched]] = position[touched]


def _derive_calls(tables: Tables, clock_offset: NDArray[np.int64]) -> None:
    """Append the calls of values whose phase is not that of their call (backward, collectives)."""
    calls, phase = tables.calls, tables.column("phase")
    away = np.flatnonzero(phase != calls["phase"][tables.call])
    if not len(away):
        return
    # A rank records a gradient under the forward call that it belongs to: to enter a backward call
    # would cost a record for each tensor hook. Here each (recorded call, phase, backward pass)
    # becomes one row of its own, behind all recorded ones. Invariants: rows that exist keep their
    # numbers, because values, parents and `origin` refer to rows by number; `keys` is sorted, so
    # that the row made for a key is found by bisection (`_derived_parents`). A key is one number,
    # so that a single `np.unique` does both.
    source = tables.call[away]
    span = np.int64(1) << 24  # phase and graph task of a call, in one number
    kind = phase[away].astype(np.int64) << 16 | tables.column("ordinal")[away].astype(np.int64)
    keys, inverse = np.unique(source * span + kind, return_inverse=True)
    inverse = inverse.reshape(-1)
    origin, kind = keys // span, keys % span
    derived = calls.chosen(origin)
    derived["phase"], derived["pass"] = kind >> 16, kind & 0xFFFF
    times = tables.time_ns[away]
    first = np.full(len(keys), np.iinfo(np.int64).max)
    last = np.full(len(keys), np.iinfo(np.int64).min)
    np.minimum.at(first, inverse, times)
    np.maximum.at(last, inverse, times)
    offset = clock_offset[derived["stream"]]
    derived["start"], derived["end"] = first + offset, last + offset
    derived["status"], derived["text"] = CallStatus.RETURNED, -1
    parents = _derived_parents(calls, keys, origin, kind, span)
    derived["parent"] = np.where(derived["phase"] == Phase.COLLECTIVE, origin, parents)
    derived["collective"], derived["number"] = -1, 0
    _number_passes(derived)
    # The values move to their new rows; nothing may look `calls` up by `tables.call[away]` after.
    tables.call[away] = inverse + len(calls)
    _hang_below_backward(calls, derived, origin)
    tables.calls = calls.followed_by(derived)


def _hang_below_backward(calls: CallTable, derived: CallTable, origin: NDArray[np.int64]) -> None:
    """Make collectives of backward children of the backward call that ran then, in place."""
    issued = np.flatnonzero((calls["collective"] >= 0) & calls["is_backward"])
    if not len(issued):
        return
    backward = np.flatnonzero(derived["phase"] == Phase.BACKWARD)
    order = backward[np.lexsort((derived["start"][backward], origin[backward]))]
    owner, start = origin[order], derived["start"][order]
    for row in issued.tolist():
        first, last = np.searchsorted(owner, [calls["parent"][row], calls["parent"][row] + 1])
        if first < last:
            at = first + np.searchsorted(start[first:last], calls["start"][row], "right")
            calls["parent"][row] = len(calls) + order[max(at - 1, first)]


def _derived_parents(
    calls: CallTable,
    keys: NDArray[np.int64],
    origin: NDArray[np.int64],
    kind: NDArray[np.int64],
    span: np.int64,
) -> NDArray[np.int64]:
    """Return the derived row of the nearest caller of the same kind: backward mirrors forward."""
    # All rows climb at once, one caller in each turn, until every one has found its parent or has
    # left the outermost call. So it takes as many turns as calls nest, however many there are.
    result = np.full(len(keys), -1, np.int64)
    ancestor = calls["parent"][origin]
    open_ = ancestor >= 0
    while open_.any():
        key = ancestor * span + kind
        at = np.minimum(np.searchsorted(keys, key), len(keys) - 1)
        is_found = open_ & (keys[at] == key)
        result[is_found] = at[is_found] + len(calls)
        open_ &= ~is_found
        ancestor = np.where(open_, calls["parent"][np.maximum(ancestor, 0)], -1)
        open_ &= ancestor >= 0
    return result


def _number_passes(derived: CallTable) -> None:
    """Make one ordinal of graph task, then forward ordinal, the same on every rank."""
    names = ("incarnation", "mode", "step", "micro_batch", "phase", "path")
    group, _ = factorize(*(derived[name] for name in names))
    codes, count = factorize(group, derived["pass"], derived["ordinal"])
    group_of = np.zeros(count, np.int64)
    group_of[codes] = group
    derived["ordinal"] = (np.arange(count) - np.searchsorted(group_of, group_of))[codes]


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
        """Return some rows. Each column is taken on demand: a slice shares memory with this table,
        so writing there writes here; other rows are copies."""
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
