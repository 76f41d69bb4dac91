"""Calls of all ranks merged into nodes, and their values into slots: pure index work on the tables.

A node is every rank's call of one key: incarnation, mode, step, micro-batch, phase, path, ordinal.
A slot entry is one slot of one node as all ranks agree on it; where ranks disagree in dtype, global
shape or layout there is one entry per variant. Inside an entry, ranks that hold the same value
share a fold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from rankscope.record.call import Mode
from rankscope.record.phases import Phase
from rankscope.record.value import UNFOLDED_FLAGS
from rankscope.tree.assembly.calltable import CallTable
from rankscope.tree.assembly.interning import Interned, Vocabulary
from rankscope.tree.assembly.tables import Tables, factorize

MAX_DEPTH = 50
"""Deeper nodes are hung onto their ancestor at this depth: readers of JSON recurse."""
KEY_COLUMNS = ("incarnation", "mode", "step", "micro_batch", "phase", "path", "ordinal")
_OF_NODES = (*KEY_COLUMNS, "forward_ordinal", "pass")
_OF_CALLS = (
    "stream", "start", "end", "module", "status", "text", "collective", "number", "issued",
)  # fmt: skip


@dataclass(slots=True, kw_only=True)
class Merged:
    """Nodes as ranges over sorted calls, and their values in order.

    Nodes are numbered in the order of a walk: groups (setup, then steps) behind each other,
    children after their parent, siblings by the time of the lowest rank that made the call.
    """

    calls: CallTable
    """Sorted by node, then rank: what ranks may say each for itself."""
    heads: CallTable
    """One row a node: what all its calls say."""
    call_start: NDArray[np.int64]
    """[nodes + 1] first row in `calls` of each node."""
    parent: NDArray[np.int64]
    """[nodes] node number of the parent, -1 at the top."""
    group: NDArray[np.int64]
    identity: NDArray[np.uint64]
    place: NDArray[np.int64]
    """[values] where each value of the tables stands, sorted by entry, fold, rank."""
    failures: NDArray[np.int64]
    """[failures, 3] node, stream and text number of what failed inside rankscope, by node."""
    value_node: NDArray[np.int64]
    value_stream: NDArray[np.int32]


def merge(tables: Tables, vocabulary: Vocabulary) -> Merged:
    """Return the nodes that the calls of all streams, in rank order, make together."""
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
    parent = np.where(parent[walk] >= 0, number[np.maximum(parent[walk], 0)], -1)
    call_start = np.searchsorted(node[by_node], np.arange(count + 1))
    failures = sorted((int(node[row]), stream, text) for stream, row, text in tables.errors)
    slots = _slots(tables, vocabulary, node[tables.call])
    heads = calls.apart(by_node[call_start[:-1]], *_OF_NODES)
    return Merged(
        calls=calls.apart(by_node, *_OF_CALLS),
        heads=heads,
        failures=np.array(failures, np.int64).reshape(-1, 3),
        call_start=call_start,
        parent=parent,
        group=group_of[walk],
        identity=_identities(heads, vocabulary.paths.items),
        **slots,
    )


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
    own = np.arange(count)
    parent[:count][(parent[:count] == own) | (group[parent[:count]] != group)] = -1
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
    while waiting:
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


def _slots(tables: Tables, vocabulary: Vocabulary, node: NDArray[np.int64]) -> dict[str, Any]:
    stream = tables.calls["stream"][tables.call]
    shared: Interned[Any] = Interned()
    local: Interned[Any] = Interned()
    described = [each.facts for each in vocabulary.descriptions.items]
    kinds = [shared.number(tuple(each.shared.values())) for each in described]
    variant = np.array(kinds, np.int64)[tables.description]
    piece = np.array([local.number(each.local) for each in described], np.int64)[tables.description]
    flags = tables.column("flags") & ~np.uint32(UNFOLDED_FLAGS)
    pair, pairs = factorize(node, tables.slot)
    seen = _first_seen(pair, pairs, stream, tables.time_ns)
    entry, entries = factorize(pair, variant)
    del variant
    fold, folds = factorize(entry, piece, flags, tables.column("count"), tables.column("hash"))
    del piece, flags
    # folds are sorted, of which there are few, and then the values by the place of their fold
    row = np.empty(folds, np.int64)
    row[fold] = np.arange(len(fold))
    entry_of, pair_of = entry[row], pair[row]
    by_place = np.lexsort(
        (_lowest(stream, fold, folds), entry_of, _lowest(stream, entry, entries)[entry_of],
         pair_of, seen[pair_of], node[row])
    )  # fmt: skip
    place = np.empty(folds, np.int64)
    place[by_place] = np.arange(folds)
    order = _by_stream(place[fold], stream)
    at = np.empty(len(order), np.int64)
    at[order] = np.arange(len(order))
    return {"place": at, "value_node": node[order], "value_stream": stream[order]}


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
