"""The records of all ranks as two tables, calls and values, in common numbers.

Besides the calls that were recorded there are *derived* calls: gradients are written under the
forward call they belong to, and become a backward call of their own here, at the time they were
seen.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.assembly.calltable import CallTable
from rankscope.assembly.interning import Interned, Vocabulary
from rankscope.assembly.rankstreams import RankStream
from rankscope.chunks.tensorfiles import standing_references
from rankscope.record.call import CallStatus
from rankscope.record.phases import Phase
from rankscope.record.value import ValueFlag
from rankscope.spool.recordformat import NO_SEQUENCE

__all__ = ["Tables", "build_tables", "factorize"]

_MOST_SPARSE = 4
"""Numbers of a span for each row of a column whose values are counted and not sorted."""
_EVENT_PHASES = sorted(Phase.having(lambda facts: facts.is_event))


@dataclass(slots=True)
class Tables:
    """Calls and values of all streams."""

    calls: CallTable
    values: NDArray[Any]
    """VALUE_DTYPE of spool/recordformat.py, streams behind each other."""
    call: NDArray[np.int64]
    """Row of `calls` each value belongs to."""
    slot: NDArray[np.int32]
    description: NDArray[np.int32]
    has_digest: NDArray[np.bool_]
    sample_start: NDArray[np.int64]
    """First row in `samples` of each value, -1 without samples."""
    sample_count: NDArray[np.int32]
    sample_dim: NDArray[np.int32]
    samples: NDArray[np.float32]
    """[rows, K]."""
    paths: list[str]
    """What the numbers in the calls' column "path" mean."""
    chunk: NDArray[np.uint32]
    """Number of the chunk that holds each value's bytes, 0 for none."""
    errors: list[tuple[int, int, int]]
    """stream, row of `calls` (-1 for none), text number."""
    orphans: list[int]
    """Per stream, values whose call, slot or description was not found."""


def factorize(*columns: NDArray[Any]) -> tuple[NDArray[np.int64], int]:
    """Return for each row the number of its distinct combination of columns, in sorted order, and
    how many there are."""
    codes, count = np.zeros(len(columns[0]), np.int64), 1
    for column in columns:
        own, distinct = _numbered(column)
        if count * max(distinct, 1) >= 1 << 62:  # never in real traces: before it overflows
            codes, count = _numbered(codes)
        codes = codes * distinct + own
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


def build_tables(streams: Sequence[RankStream], vocabulary: Vocabulary) -> Tables:
    """Return the two tables; streams in the order of the vocabulary's lookups."""
    paths = Interned[str]()
    path_of = np.array([paths.number(m.path) for m in vocabulary.modules.items], np.int64)
    calls = CallTable.zeros(sum(len(stream.enters) for stream in streams))
    parts: list[dict[str, NDArray[Any]]] = []
    errors: list[tuple[int, int, int]] = []
    orphans: list[int] = []
    first_row = first_sample = 0
    for number, stream in enumerate(streams):
        recorded = _Sequences(stream.enters["sequence"])
        own = calls.chosen(slice(first_row, first_row + len(stream.enters)))
        _fill(own, number, stream, vocabulary, path_of, recorded, first_row)
        part = _values(number, stream, vocabulary, recorded, first_row, first_sample)
        known = (part["call"] >= 0) & (part["slot"] >= 0) & (part["description"] >= 0)
        orphans.append(int((~known).sum()))
        parts.append(
            {name: column[known] for name, column in part.items()} if orphans[-1] else part
        )
        rows = recorded.find(stream.errors["sequence"])
        texts = _take(vocabulary.text_lookup[number], stream.errors["text"])
        errors += [
            (number, row + first_row if row >= 0 else -1, t)
            for row, t in zip(rows.tolist(), texts.tolist())
        ]
        first_row += len(own)
        first_sample += len(stream.samples.rows)
    joined = (
        {name: np.concatenate([part.pop(name) for part in parts]) for name in list(parts[0])}
        if parts
        else {}
    )
    tables = Tables(
        calls=calls,
        samples=np.concatenate([np.empty((0, 8), np.float32), *(s.samples.rows for s in streams)]),
        errors=errors,
        orphans=orphans,
        paths=paths.items,
        **joined,
    )
    _fold_event_owners(tables)
    first_rows = np.searchsorted(tables.calls["stream"], np.arange(len(streams) + 1)).tolist()
    for begin, end in itertools.pairwise(first_rows):
        _renumber_repeats(tables.calls.chosen(slice(begin, end)))
    tables.calls["forward_ordinal"] = tables.calls["ordinal"]
    _derive_calls(tables, np.array([s.clock_offset_ns for s in streams], np.int64))
    return tables


def _take(lookup: NDArray[np.int64], numbers: NDArray[Any]) -> NDArray[np.int64]:
    known = numbers < len(lookup)
    return np.where(known, lookup[np.where(known, numbers, 0).astype(np.int64)], -1)


class _Sequences:
    """Finds rows by a number that each of them has."""

    def __init__(self, numbers: NDArray[Any]) -> None:
        """Sort the numbers, unless they follow on each other, as those of a rank's calls do."""
        numbers = np.ascontiguousarray(numbers)
        self._count = len(numbers)
        is_dense = self._count > 0 and bool((np.diff(numbers) == 1).all())
        self._first = numbers[0] if is_dense else None
        self._order = None if is_dense else np.argsort(numbers, kind="stable")
        self._sorted = numbers if self._order is None else numbers[self._order]

    def find(self, wanted: NDArray[Any]) -> NDArray[np.int64]:
        """Return the row of each wanted number, -1 where there is none."""
        if not self._count:
            return np.full(len(wanted), -1, np.int64)
        if self._order is None:
            at = (wanted - self._first).astype(np.int64)
            return np.where((at >= 0) & (at < self._count), at, -1)
        at = np.minimum(np.searchsorted(self._sorted, wanted), self._count - 1)
        return np.where(self._sorted[at] == wanted, self._order[at], -1)


def _fill(
    own: CallTable,
    number: int,
    stream: RankStream,
    vocabulary: Vocabulary,
    path_of: NDArray[Any],
    recorded: _Sequences,
    first_row: int,
) -> None:
    """Fill the rows of a stream's calls."""
    enters, exits, offset = stream.enters, stream.exits, stream.clock_offset_ns
    parent = recorded.find(enters["parent"])
    parent[enters["parent"] == NO_SEQUENCE] = -1
    own["stream"], own["sequence"] = number, enters["sequence"]
    own["incarnation"] = stream.stream.incarnation
    own["parent"] = np.where(parent >= 0, parent + first_row, -1)
    own["start"] = enters["time_ns"] + offset
    own["end"] = own["start"]
    own["module"] = np.maximum(_take(vocabulary.module_lookup[number], enters["module"]), 0)
    own["path"] = path_of[own["module"]]
    own["step"], own["ordinal"] = enters["step"], enters["ordinal"]
    own["micro_batch"] = enters["micro_batch"].astype(np.int64)
    own["micro_batch"][enters["micro_batch"] == 0xFFFF_FFFF] = -1
    own["phase"], own["mode"] = enters["phase"], enters["mode"]
    own["status"], own["text"] = CallStatus.UNFINISHED, -1
    own["collective"] = _take(vocabulary.collective_lookup[number], enters["collective"])
    own["number"] = enters["number"]
    issuers = [kind.issuer == "backward" for kind in vocabulary.collectives.items]
    own["is_backward"] = np.array([*issuers, False])[own["collective"]]
    at = recorded.find(exits["sequence"])
    if (at < 0).any():
        exits, at = exits[at >= 0], at[at >= 0]
    own["end"][at] = exits["time_ns"] + offset
    own["status"][at], own["issued"][at] = exits["status"], exits["issued"]
    own["text"][at] = _take(vocabulary.text_lookup[number], exits["text"])


def _values(
    number: int,
    stream: RankStream,
    vocabulary: Vocabulary,
    recorded: _Sequences,
    first_row: int,
    first_sample: int,
) -> dict[str, NDArray[Any]]:
    values, rows = _standing(stream.values)
    values, chunk = _kept(values, stream)
    heads = stream.samples.heads
    call = recorded.find(values["sequence"])
    start = np.full(len(values), -1, np.int64)
    count, dim = np.zeros(len(values), np.int32), np.zeros(len(values), np.int32)
    if len(heads):
        names = ("sequence", "slot", "ordinal", "phase")
        both = [np.concatenate([values[n], heads[n]]).astype(np.uint64) for n in names]
        codes, _ = factorize(*both)
        of_value, of_head = codes[: len(values)], codes[len(values) :]
        at = _Sequences(of_value).find(of_head)
        firsts = (
            np.concatenate([[0], np.cumsum(heads["count"], dtype=np.int64)])[:-1] + first_sample
        )
        found = at >= 0
        start[at[found]], count[at[found]] = firsts[found], heads["count"][found]
        dim[at[found]] = heads["dim"][found]
    return {
        "values": values,
        "call": np.where(call >= 0, call + first_row, -1),
        "slot": _take(vocabulary.slot_lookup[number], values["slot"]).astype(np.int32),
        "description": _take(vocabulary.description_lookup[number], values["meta"]).astype(
            np.int32
        ),
        "has_digest": stream.has_digest[rows],
        "sample_start": start,
        "sample_count": count,
        "sample_dim": dim,
        "chunk": chunk,
    }


def _kept(values: NDArray[Any], stream: RankStream) -> tuple[NDArray[Any], NDArray[np.uint32]]:
    """Return the values with the keys under which their bytes lie, and the number of each one's
    chunk; bytes that never arrived are marked as not kept."""
    chunk = np.zeros(len(values), np.uint32)
    was_given = values["reference"] != 0
    if not was_given.any():
        return values, chunk
    keys = standing_references(values["reference"], stream.tensors)
    values = values.copy()
    values["reference"] = keys
    values["flags"][was_given & (keys == 0)] |= np.uint32(ValueFlag.NOT_KEPT)
    if len(stream.tensors):
        order = np.argsort(stream.tensors["reference"], kind="stable")
        known = stream.tensors["reference"][order]
        at = np.searchsorted(known, keys[keys != 0])
        chunk[keys != 0] = stream.tensors["chunk"][order][at]
    return values, chunk


def _standing(values: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return the values that stand, and the rows they were in: where a later record replaces one of
    the same slot it takes its place and its time, so that slots keep the order they were seen
    in."""
    rows = np.arange(len(values))
    replacing = (values["flags"] & np.uint32(ValueFlag.SUPERSEDES)) != 0
    if not replacing.any():
        return values, rows
    codes, count = factorize(*(values[name] for name in ("sequence", "slot", "ordinal", "phase")))
    first = np.full(count, len(values), np.int64)
    np.minimum.at(first, codes, rows)
    latest = np.full(count, -1, np.int64)
    np.maximum.at(latest, codes[replacing], rows[replacing])
    is_replaced = latest >= 0
    kept = ~np.isin(codes, np.flatnonzero(is_replaced))
    kept[first[is_replaced]] = True
    rows[first[is_replaced]] = latest[is_replaced]
    standing = values[rows]
    standing["time_ns"] = values["time_ns"]
    return standing[kept], rows[kept]


def _fold_event_owners(tables: Tables) -> None:
    """A root that owns parameters itself is its own child in setup, grads and params: one call, not
    two."""
    calls = tables.calls
    parent = calls["parent"]
    inside = np.flatnonzero((parent >= 0) & np.isin(calls["phase"], _EVENT_PHASES))
    is_owner = np.ones(len(inside), np.bool_)
    for name in ("path", "phase"):  # column by column: rows are wide
        is_owner &= calls[name][parent[inside]] == calls[name][inside]
    if not is_owner.any():
        return
    same = np.zeros(len(calls), np.bool_)
    same[inside[is_owner]] = True
    kept = np.arange(len(calls))
    kept[same] = parent[same]
    calls["parent"] = np.where(parent >= 0, kept[np.maximum(parent, 0)], -1)
    tables.call = kept[tables.call]
    rows = np.cumsum(~same) - 1
    calls["parent"] = np.where(calls["parent"] >= 0, rows[np.maximum(calls["parent"], 0)], -1)
    tables.call = rows[tables.call]
    tables.errors = [
        (s, int(rows[kept[row]]) if row >= 0 else -1, text) for s, row, text in tables.errors
    ]
    tables.calls = calls.chosen(~same)


def _renumber_repeats(calls: CallTable) -> None:
    """Give calls of one stream that share a key (two losses of one class) ordinals in order of
    their sequence.

    Args:
        calls: those of the stream.
    """
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
    """Append the calls that values of another phase than their call's stand for (backward,
    collectives)."""
    calls, values = tables.calls, tables.values
    away = (
        np.flatnonzero(values["phase"] != calls["phase"][tables.call])
        if len(values)
        else np.empty(0, np.int64)
    )
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
    kind = values["phase"][away].astype(np.int64) << 16 | values["ordinal"][away].astype(np.int64)
    keys, inverse = np.unique(source * span + kind, return_inverse=True)
    inverse = inverse.reshape(-1)
    origin, kind = keys // span, keys % span
    derived = calls.chosen(origin)
    derived["phase"], derived["pass"] = kind >> 16, kind & 0xFFFF
    times = values["time_ns"][away]
    first = np.full(len(keys), np.iinfo(np.int64).max)
    last = np.full(len(keys), np.iinfo(np.int64).min)
    np.minimum.at(first, inverse, times)
    np.maximum.at(last, inverse, times)
    offset = clock_offset[derived["stream"]]
    derived["start"], derived["end"] = first + offset, last + offset
    derived["status"], derived["text"] = CallStatus.RETURNED, -1
    derived["parent"] = np.where(
        derived["phase"] == Phase.COLLECTIVE,
        origin,
        _derived_parents(calls, keys, origin, kind, span),
    )
    derived["collective"], derived["number"] = -1, 0
    _number_passes(derived)
    # The values move to their new rows; nothing may look `calls` up by `tables.call[away]` after.
    tables.call[away] = inverse + len(calls)
    _hang_below_backward(calls, derived, origin)
    tables.calls = calls.followed_by(derived)


def _hang_below_backward(calls: CallTable, derived: CallTable, origin: NDArray[np.int64]) -> None:
    """Make collectives that backward issued children of the backward call that ran then, in place:
    records know the forward call alone."""
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
    """Return the derived row of the nearest caller that has one of the same kind: backward mirrors
    forward."""
    # All rows climb at once, one caller in each turn, until every one has found its parent or has
    # left the outermost call. So it takes as many turns as calls nest, however many there are.
    result = np.full(len(keys), -1, np.int64)
    ancestor = calls["parent"][origin]
    open_ = ancestor >= 0
    while open_.any():
        wanted = ancestor * span + kind
        at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
        found = open_ & (keys[at] == wanted)
        result[found] = at[found] + len(calls)
        open_ &= ~found
        ancestor = np.where(open_, calls["parent"][np.maximum(ancestor, 0)], -1)
        open_ &= ancestor >= 0
    return result


def _number_passes(derived: CallTable) -> None:
    """Make one ordinal of graph task and forward ordinal, the same on every rank: task first, then
    call."""
    names = ("incarnation", "mode", "step", "micro_batch", "phase", "path")
    group, _ = factorize(*(derived[name] for name in names))
    codes, count = factorize(group, derived["pass"], derived["ordinal"])
    group_of = np.zeros(count, np.int64)
    group_of[codes] = group
    starts = np.searchsorted(group_of, group_of)
    derived["ordinal"] = (np.arange(count) - starts)[codes]
