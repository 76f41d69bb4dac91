"""One value over all ranks as the page shows it: who holds what, however many ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rankscope.diagnosis.stepview import SlotValues
from rankscope.layout.placement import Mesh
from rankscope.record.ranklists import ranks_text
from rankscope.record.statistics import NUMBERS, STATISTICS
from rankscope.record.visibletext import visible
from rankscope.tree.slotview import SlotView, shapes_of

__all__ = ["NUMBER_NAMES", "python_detail", "slot_detail"]

Array = NDArray[Any]
NUMBER_NAMES: Final = tuple(s.name for s in STATISTICS)
"""What the numbers of a value are, in their order."""
_MOST_FOLDS: Final = 6
"""Distinct values that are listed one by one; of more there are the extremes and a summary."""
_MOST_NOTE: Final = 300


def slot_detail(values: SlotValues, marked: Collection[int] = ()) -> dict[str, Any]:
    """Return a value as JSON data.

    Args:
        values: one slot of one call.
        marked: ranks of findings: what they hold is always listed.
    """
    dtypes = " | ".join(dict.fromkeys(visible(view.dtype) for view in values.views))
    shown: dict[str, Any] = {"n": visible(values.slot), "d": dtypes}
    devices = {view.device for view in values.views}
    if devices != {"cpu"}:
        shown["dev"] = ", ".join(sorted(devices))
    shown["l"] = [_layout(view) for view in values.views]
    kept = [rank for view in values.views for rank in view.references()]
    if kept:
        shown["kept"] = ranks_text(kept)
    shapes = shapes_of(values.views)
    groups = _groups(values, shapes)
    pieces = _pieces(values)
    if len(groups) > _MOST_FOLDS:
        shown["distinct"] = len(groups)
        shown["spread"] = _spread(values)
        groups = _chosen(values, groups, marked, pieces)
    shown["f"] = [_fold(values, places, shapes, pieces) for places in groups]
    return shown


def python_detail(view: SlotView) -> dict[str, Any]:
    """Return what was no tensor as JSON data."""
    notes = [fold.note or "" for fold in view.pieces[:_MOST_FOLDS]]
    return {
        "n": visible(view.slot),
        "d": "python",
        "notes": [visible(note)[:_MOST_NOTE] for note in dict.fromkeys(notes) if note],
    }


def _layout(view: SlotView) -> dict[str, Any]:
    shape = view.global_shape
    found: dict[str, Any] = {"src": view.source.value}
    if shape is not None:
        found["shape"] = list(shape)
    if view.placements:
        found["mesh"] = visible(view.mesh_name)
        found["p"] = {visible(axis): str(each) for axis, each in view.placements.items()}
    if view.disagreement:
        found["r"] = ranks_text(view.ranks)
        found["differ"] = list(view.disagreement)
    return found


def _groups(values: SlotValues, shapes: Mapping[int, tuple[int, ...]]) -> list[Array]:
    """Return the places of ranks that hold the same, the largest group first."""
    hashes = values.hashes
    numbers: dict[tuple[int, ...], int] = {}
    own = [numbers.setdefault(shapes.get(r, ()), len(numbers)) for r in values.ranks.tolist()]
    columns = (hashes, values.counts, values.column("digested"), np.array(own))
    keys = np.stack([column.astype(np.uint64) for column in columns], axis=1)
    if (keys == keys[0]).all():
        return [np.arange(len(hashes))]
    as_one = np.ascontiguousarray(keys).view(np.dtype((np.void, keys.shape[1] * 8))).ravel()
    _, labels = np.unique(as_one, return_inverse=True)
    order = np.argsort(labels, kind="stable")
    bounds = np.cumsum(np.bincount(labels))[:-1]
    groups = np.split(order, bounds)
    return sorted(groups, key=lambda places: (-len(places), places[0]))


def _pieces(values: SlotValues) -> Mapping[int, int]:
    """Return which ranks hold the same piece of the value, as far as its layout tells: a number of
    the piece by rank."""
    if len(values.views) != 1 or not values.views[0].placements:
        return {}
    view = values.views[0]
    is_cut = tuple(str(each) != "Replicate()" for each in view.placements.values())
    return _pieces_of(view.meshes, is_cut)


@lru_cache(maxsize=256)
def _pieces_of(meshes: tuple[Mesh, ...], is_cut: tuple[bool, ...]) -> Mapping[int, int]:
    numbers: dict[tuple[int, ...], int] = {}
    found = {}
    for number, mesh in enumerate(meshes):
        for rank in mesh.ranks:
            at = mesh.coordinate(rank) or ()
            key = (number, *(place for place, cut in zip(at, is_cut) if cut))
            found[rank] = numbers.setdefault(key, len(numbers))
    return found


def _chosen(
    values: SlotValues, groups: list[Array], marked: Collection[int], pieces: Mapping[int, int]
) -> list[Array]:
    """Return the largest group, those of the extremes, and those of marked ranks and of the ranks
    that hold the same pieces as they."""
    norms = np.where(values.is_known, values.column("l2"), np.nan)
    wanted = {int(groups[0][0])}
    if not np.isnan(norms).all():
        wanted |= {int(np.nanargmin(norms)), int(np.nanargmax(norms))}
    nonfinite = np.flatnonzero(values.nonfinite)
    wanted |= set(nonfinite[:1].tolist())
    if marked:
        some = sorted(marked)[:_MOST_FOLDS]
        places = values.at(np.array(some, np.int64))
        wanted |= set(places[places >= 0].tolist())
        theirs = {pieces[rank] for rank in some if rank in pieces}
        peers = [n for n, rank in enumerate(values.ranks.tolist()) if pieces.get(rank) in theirs]
        groups_of_peers = [g for g in groups if theirs and not set(peers).isdisjoint(g.tolist())]
        wanted |= {int(g[0]) for g in groups_of_peers[:_MOST_FOLDS]}
    return [places for places in groups if not wanted.isdisjoint(places.tolist())]


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
    found: dict[str, list[Any]] = {}
    for name, column in zip(NUMBERS, columns):
        is_defined = ~np.isnan(column)
        own = column[is_defined]
        if not len(own) or own.min() == own.max():
            continue
        low, high, middle = int(own.argmin()), int(own.argmax()), len(own) // 2
        at = ranks[is_defined]
        found[name] = [
            _number(own[low]), int(at[low]), _number(np.partition(own, middle)[middle]),
            _number(own[high]), int(at[high]),
        ]  # fmt: skip
    return found


def _number(value: Any) -> float | int | None:
    """Return six digits of a number, None where it is not finite."""
    found = value.item() if hasattr(value, "item") else value
    if isinstance(found, int):
        return found
    if not np.isfinite(found):
        return None
    short = float(f"{found:.6g}")
    return int(short) if short.is_integer() and abs(short) < 2**53 else short
