"""What is behind the cells: calls with their values, in blocks of modules that the browser inflates
when one of them is looked at."""

from __future__ import annotations

import json
import zlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rankscope.diagnosis.evidence.stepview import (
    CallView,
    SlotValues,
    StepView,
    is_input,
    is_output,
)
from rankscope.layout.placement import Mesh
from rankscope.record.phases import Phase
from rankscope.record.ranks import collective_words, ranks_named, ranks_text
from rankscope.record.statistics import NUMBERS, STATISTICS
from rankscope.record.texts import visible
from rankscope.tree.slotview import SlotView, shapes_of
from rankscope.words.page.cellplanes import ModuleRows

Array = NDArray[Any]
ROWS_PER_BLOCK: Final = 32
_MOST_ERROR: Final = 500
_LINKED: Final = (Phase.FORWARD, Phase.BACKWARD, Phase.RECOMPUTE)
_MOST_TAKERS: Final = 6
NUMBER_NAMES: Final = tuple(s.name for s in STATISTICS)
_MOST_FOLDS: Final = 6
"""Distinct values that are listed one by one; of more there are the extremes and a summary."""
_MOST_NOTE: Final = 300


def packed_json(data: Any) -> bytes:
    """Return JSON data, deflated (zlib)."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return zlib.compress(text.encode("ascii"), 9)


def packed_blocks(calls: Iterable[dict[str, Any]]) -> dict[int, bytes]:
    """Return calls, those of 32 modules together, deflated: by row // ROWS_PER_BLOCK."""
    blocks: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
    for call in calls:
        blocks[call["m"] // ROWS_PER_BLOCK].append(call)
    return {number: packed_json(block) for number, block in sorted(blocks.items())}


class CallDetails:
    """The details of chosen modules in chosen steps."""

    def __init__(self, rows: ModuleRows, marked: Mapping[int, Collection[int]]) -> None:
        self._rows, self._marked = rows, marked
        self.calls: list[dict[str, Any]] = []
        """As JSON data; `m` is the row of the module, `static/detail.js` reads the other fields."""

    def add(
        self,
        step: int,
        step_view: StepView,
        is_judged: Collection[int] | bytearray,
        chosen: Collection[int] | None,
    ) -> None:
        """Add a step. `step`: its number on the page; `is_judged`: for every slot of its calls, in
        order, whether it was held to others; `chosen`: rows that are wanted, None for all."""
        links = _ValueLinks(step_view)
        place = 0
        judged = bytes(is_judged)
        for call in (*step_view.calls, *step_view.left_by_passes):
            row = self._rows.of(call.path)
            count = len(call.slots)
            if chosen is None or row in chosen:
                call_judged = judged[place : place + count]
                self.calls.append(self._call(step, row, call, call_judged, links))
            place += count

    def _call(
        self, step: int, row: int, call: CallView, judged: bytes, links: _ValueLinks
    ) -> dict[str, Any]:
        node, timing = call.node, call.node.time
        detail: dict[str, Any] = {
            "m": row,
            "t": step,
            "p": call.phase.word,
            "r": node.ranks_text,
            "us": [timing.min_us, timing.max_us, timing.slowest],
        }
        if call.micro_batch is not None:
            detail["b"] = call.micro_batch
        if call.ordinal:
            detail["o"] = call.ordinal
        if node.wrappers:
            detail["w"] = visible(", ".join(node.wrappers))
        ends = (*(() if node.has_returned else node.outcomes), *node.errors)
        if ends:
            detail["end"] = [visible(outcome.words)[:_MOST_ERROR] for outcome in ends]
        if node.collectives:
            detail["co"] = [_collective(ranks, facts) for ranks, facts in node.collectives]
        marked = self._marked.get(row, ())
        slots = []
        for (slot, values), is_held in zip(call.slots.items(), judged):
            if values.dtype == "python":
                slots.append(_python_detail(values.views[0]))
                continue
            detail_of_slot = slot_detail(values, marked)
            if is_held:
                detail_of_slot["held"] = 1
            if (producer := links.producer(call, slot)) is not None:
                detail_of_slot["from"] = self._end(producer)
            if takers := links.consumers(call, slot):
                detail_of_slot["to"] = [self._end(taker) for taker in takers]
            slots.append(detail_of_slot)
        if slots:
            detail["s"] = slots
        return detail

    def _end(self, end: _ValueEnd) -> list[Any]:
        return [self._rows.of(end.call.path), end.call.phase.word, visible(end.slot)]


def _collective(ranks: str, facts: Mapping[str, Any]) -> str:
    more = (("group", "in group"), ("issuer", "issued by"), ("at", "at"))
    words = [*collective_words(facts), *(f"{word} {facts[n]}" for n, word in more if facts.get(n))]
    return f"{ranks_named(ranks)}: {visible(' '.join(words))}"


class _ValueEnd(NamedTuple):
    call: CallView
    slot: str


class _ValueLinks:
    """Where the values of one step came from and who took them: those with the same bytes on one
    rank.

    A call's input that has the bytes of an earlier call's output came from it, as far as bytes can
    tell. Values that hold one number alone tell nothing, and are left out.
    """

    def __init__(self, step_view: StepView) -> None:
        self._from: dict[tuple[int, str], _ValueEnd] = {}
        self._to: defaultdict[tuple[int, str], list[_ValueEnd]] = defaultdict(list)
        makers_of: dict[tuple[Phase, int, int], list[_ValueEnd]] = {}
        for call in step_view.calls:
            if call.phase not in _LINKED:
                continue
            keys = [(slot, _key(values)) for slot, values in call.slots.items()]
            for slot, key in keys:
                if key is not None and is_input(slot, call.phase):
                    self._link(_ValueEnd(call, slot), makers_of.get(key, []), key)
            for slot, key in keys:
                if key is not None and is_output(slot, call.phase):
                    makers_of.setdefault(key, []).append(_ValueEnd(call, slot))

    def _link(self, taker: _ValueEnd, makers: list[_ValueEnd], key: tuple[Phase, int, int]) -> None:
        around = set(_around(taker.call))
        if outside := [maker for maker in makers if maker.call not in around]:
            maker = outside[-1]
            outer = {end.call: end for end in outside}
            for call in _around(maker.call):
                if call in around:
                    break
                maker = outer.get(call, maker)
        else:
            parent = taker.call.parent
            slots = () if parent is None else parent.slots.items()
            handed = [s for s, v in slots if is_input(s, taker.call.phase) and _key(v) == key]
            if parent is None or not handed:
                return
            maker = _ValueEnd(parent, handed[0])
        self._from[id(taker.call), taker.slot] = maker
        takers = self._to[id(maker.call), maker.slot]
        if len(takers) < _MOST_TAKERS:
            takers.append(taker)

    def producer(self, call: CallView, slot: str) -> _ValueEnd | None:
        """Return what made an input, or handed it down; None where bytes do not tell."""
        return self._from.get((id(call), slot))

    def consumers(self, call: CallView, slot: str) -> list[_ValueEnd]:
        """Return the first calls that took a value."""
        return self._to.get((id(call), slot), [])


def _key(values: SlotValues) -> tuple[Phase, int, int] | None:
    """Return what values with the same bytes share; None where they may share it by chance."""
    if values.dtype == "python" or not len(values.ranks) or not values.is_known[0]:
        return None
    if not values.column("min")[0] < values.column("max")[0]:
        return None
    return values.call.phase, int(values.ranks[0]), int(values.hashes[0])


def _around(call: CallView) -> list[CallView]:
    callers = []
    at: CallView | None = call
    while at is not None:
        callers.append(at)
        at = at.parent
    return callers


def slot_detail(values: SlotValues, marked: Collection[int] = ()) -> dict[str, Any]:
    """Return a value as JSON data; values of `marked` ranks (those of findings) are always
    listed."""
    dtypes = " | ".join(dict.fromkeys(visible(view.dtype) for view in values.views))
    detail: dict[str, Any] = {"n": visible(values.slot), "d": dtypes}
    devices = {view.device for view in values.views}
    if devices != {"cpu"}:
        detail["dev"] = ", ".join(sorted(devices))
    detail["l"] = [_layout(view) for view in values.views]
    if ranks_kept := [rank for view in values.views for rank in view.references()]:
        detail["kept"] = ranks_text(ranks_kept)
    shapes = shapes_of(values.views)
    groups = _groups(values, shapes)
    pieces = _pieces(values)
    if len(groups) > _MOST_FOLDS:
        detail["distinct"] = len(groups)
        detail["spread"] = _spread(values)
        groups = _chosen(values, groups, marked, pieces)
    detail["f"] = [_fold(values, places, shapes, pieces) for places in groups]
    return detail


def _python_detail(view: SlotView) -> dict[str, Any]:
    notes = [fold.note or "" for fold in view.pieces[:_MOST_FOLDS]]
    return {
        "n": visible(view.slot),
        "d": "python",
        "notes": [visible(note)[:_MOST_NOTE] for note in dict.fromkeys(notes) if note],
    }


def _layout(view: SlotView) -> dict[str, Any]:
    shape = view.global_shape
    detail: dict[str, Any] = {"src": view.source.value}
    if shape is not None:
        detail["shape"] = list(shape)
    if view.placements:
        detail["mesh"] = visible(view.mesh_name)
        detail["p"] = {visible(axis): str(placement) for axis, placement in view.placements.items()}
    if view.disagreement:
        detail["r"] = ranks_text(view.ranks)
        detail["differ"] = list(view.disagreement)
    return detail


def _groups(values: SlotValues, shapes: Mapping[int, tuple[int, ...]]) -> list[Array]:
    """Return the places of ranks that hold the same, the largest group first."""
    hashes = values.hashes
    numbers: dict[tuple[int, ...], int] = {}
    shape_of = [numbers.setdefault(shapes.get(r, ()), len(numbers)) for r in values.ranks.tolist()]
    columns = (hashes, values.counts, values.column("digested"), np.array(shape_of))
    keys = np.stack([column.astype(np.uint64) for column in columns], axis=1)
    if (keys == keys[0]).all():
        return [np.arange(len(hashes))]
    as_one = np.ascontiguousarray(keys).view(np.dtype((np.void, keys.shape[1] * 8))).ravel()
    _, labels = np.unique(as_one, return_inverse=True)
    order = np.argsort(labels, kind="stable")
    groups = np.split(order, np.cumsum(np.bincount(labels))[:-1])
    return sorted(groups, key=lambda places: (-len(places), places[0]))


def _pieces(values: SlotValues) -> Mapping[int, int]:
    """Return a number of the piece by rank, equal for equal pieces, as far as the layout tells."""
    if len(values.views) != 1 or not values.views[0].placements:
        return {}
    view = values.views[0]
    is_cut = tuple(str(placement) != "Replicate()" for placement in view.placements.values())
    return _pieces_of(view.meshes, is_cut)


@lru_cache(maxsize=256)
def _pieces_of(meshes: tuple[Mesh, ...], is_cut: tuple[bool, ...]) -> Mapping[int, int]:
    numbers: dict[tuple[int, ...], int] = {}
    piece_of = {}
    for number, mesh in enumerate(meshes):
        for rank in mesh.ranks:
            at = mesh.coordinate(rank) or ()
            key = (number, *(place for place, cut in zip(at, is_cut) if cut))
            piece_of[rank] = numbers.setdefault(key, len(numbers))
    return piece_of


def _chosen(
    values: SlotValues, groups: list[Array], marked: Collection[int], pieces: Mapping[int, int]
) -> list[Array]:
    """Return the largest group, the extremes, marked ranks, and ranks that hold the same pieces."""
    norms = np.where(values.is_known, values.column("l2"), np.nan)
    chosen = {int(groups[0][0])}
    if not np.isnan(norms).all():
        chosen |= {int(np.nanargmin(norms)), int(np.nanargmax(norms))}
    chosen |= set(np.flatnonzero(values.nonfinite)[:1].tolist())
    if marked:
        some = sorted(marked)[:_MOST_FOLDS]
        places = values.at(np.array(some, np.int64))
        chosen |= set(places[places >= 0].tolist())
        same_pieces = {pieces[rank] for rank in some if rank in pieces}
        peers = [
            n for n, rank in enumerate(values.ranks.tolist()) if pieces.get(rank) in same_pieces
        ]
        groups_of_peers = [
            g for g in groups if same_pieces and not set(peers).isdisjoint(g.tolist())
        ]
        chosen |= {int(g[0]) for g in groups_of_peers[:_MOST_FOLDS]}
    return [places for places in groups if not chosen.isdisjoint(places.tolist())]


def _fold(
    values: SlotValues,
    places: Array,
    shapes: Mapping[int, tuple[int, ...]],
    pieces: Mapping[int, int],
) -> dict[str, Any]:
    place = int(places[0])
    ranks = values.ranks[places].tolist()
    fold: dict[str, Any] = {"r": ranks_text(ranks), "s": list(shapes.get(ranks[0], ()))}
    if ranks[0] in pieces:
        fold["k"] = pieces[ranks[0]]
    if not values.column("digested")[place]:
        return fold
    fold["v"] = [_number(values.column(name)[place]) for name in NUMBER_NAMES]
    fold["h"] = f"{int(values.hashes[place]):016x}"
    return fold


def _spread(values: SlotValues) -> dict[str, list[Any]]:
    """Return for each number that ranks differ in: least, its rank, median, greatest, its rank."""
    columns = np.stack([values.column(name) for name in NUMBERS])[:, values.is_known]
    ranks = values.ranks[values.is_known]
    spreads: dict[str, list[Any]] = {}
    for name, column in zip(NUMBERS, columns):
        is_defined = ~np.isnan(column)
        defined = column[is_defined]
        if not len(defined) or defined.min() == defined.max():
            continue
        low, high, middle = int(defined.argmin()), int(defined.argmax()), len(defined) // 2
        at = ranks[is_defined]
        spreads[name] = [
            _number(defined[low]), int(at[low]), _number(np.partition(defined, middle)[middle]),
            _number(defined[high]), int(at[high]),
        ]  # fmt: skip
    return spreads


def _number(value: Any) -> float | int | None:
    """Return six digits of a number, None where it is not finite."""
    number = value.item() if hasattr(value, "item") else value
    if isinstance(number, int):
        return number
    if not np.isfinite(number):
        return None
    short = float(f"{number:.6g}")
    return int(short) if short.is_integer() and abs(short) < 2**53 else short
