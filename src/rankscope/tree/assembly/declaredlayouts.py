"""Layouts declared when the trace was taken: plain shards get their places as the tree is built.

A rank knows its own piece alone, so it records it as plain, and the layout file beside it. Here,
where all ranks' shapes are known, the file's placements become the layout of the values that it
describes, with offsets from rank order and local sizes. What a DTensor says stands; what
contradicts the file stays as it was recorded, and the run header says so.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from rankscope.errors import LayoutError
from rankscope.layout.declared import declared_pieces
from rankscope.layout.layoutfile import layout_of_run
from rankscope.layout.placement import LayoutSource, Mesh, Placement
from rankscope.record.ranks import ranks_text
from rankscope.record.value import ValueFlag
from rankscope.tree.assembly.interning import MeshFamily, Vocabulary
from rankscope.tree.assembly.rankstreams import RankStream
from rankscope.tree.assembly.tables import Tables, factorize

T = TypeVar("T")
_CALL: Final = ("incarnation", "mode", "step", "micro_batch", "phase", "path", "ordinal")
_MOST_NOTES: Final = 20
_ABSENT: Final = np.uint32(ValueFlag.ABSENT)


def layout_header(streams: Sequence[RankStream]) -> dict[str, Any]:
    """Return {"layout": {"file", "text"}} of the lowest rank that was given a layout file; {} where
    none was. Ranks that were given another one, or none, stand in its notes."""
    given = {s.stream.rank: _given(s) for s in streams if s.identity}
    first = next((each for each in given.values() if each is not None), None)
    if first is None:
        return {}
    others = [rank for rank, each in given.items() if each is None or each[1] != first[1]]
    note = f"ranks {ranks_text(others)} were given another layout file, or none"
    return {"layout": {"file": first[0], "text": first[1], **({"notes": [note]} if others else {})}}


def _given(stream: RankStream) -> tuple[str, str] | None:
    """Return name and text of the file a rank was given; it is recorded in pieces, in order."""
    pieces = [d for _, d in sorted(stream.defined("layout").items())]
    if not pieces:
        return None
    return str(pieces[0].get("file", "")), "".join(str(d.get("text", "")) for d in pieces)


def declare_layouts(
    steps: Sequence[Tables], vocabulary: Vocabulary, run: dict[str, Any], ranks: NDArray[np.int64]
) -> None:
    """Give the values that the run's layout file describes their layout: changes the descriptions
    in the tables, adds to those of `vocabulary` and to the notes of `run`. `ranks`: rank of each
    stream."""
    given = layout_of_run(run)
    if given is None:
        return
    notes: dict[str, None] = dict.fromkeys(run["layout"].get("notes", ()))
    if isinstance(given, str):
        notes[given] = None
    else:
        layouts, mesh = given
        known: dict[tuple[object, ...], NDArray[np.int32]] = {}

        def placed(path: str, slot: str) -> Mapping[str, Placement] | None:
            try:
                return layouts.placements(path, slot) or None
            except LayoutError as error:
                notes[str(error)] = None
                return None

        for tables, rows, placements, name in described_slots(steps, vocabulary, placed):
            own = ranks[tables.calls["stream"][tables.call[rows]]]
            numbers = tables.description[rows]
            key = (name, numbers.tobytes(), own.tobytes())  # the same in many calls
            if key not in known:
                held = list(zip(own.tolist(), numbers.tolist()))
                declared = _declared(vocabulary, mesh, placements, held)
                if isinstance(declared, str):
                    notes[f"{name} does not lie as declared: {declared}"] = None
                known[key] = numbers if isinstance(declared, str) else declared
            tables.description[rows] = known[key]
    if notes:
        more = len(notes) - _MOST_NOTES
        listed = [*notes][:_MOST_NOTES] + ([f"{more} more like these"] if more > 0 else [])
        run["layout"]["notes"] = listed


def described_slots(
    steps: Iterable[Tables], vocabulary: Vocabulary, describe: Callable[[str, str], T | None]
) -> Iterator[tuple[Tables, NDArray[np.int64], T, str]]:
    """Yield (tables, rows, what is known, name) of each slot of each call that `describe` knows
    something of; it is asked once for each (path, slot)."""
    known_of = functools.cache(describe)
    for tables in steps:
        path, slot = tables.calls["path"][tables.call], tables.slot
        pair, count = factorize(path, slot)
        first = np.full(count, len(pair), np.int64)
        np.minimum.at(first, pair, np.arange(len(pair)))
        found: dict[int, tuple[T, str]] = {}
        for number, row in enumerate(first.tolist()):
            names = vocabulary.paths.items[int(path[row])], vocabulary.slots.items[int(slot[row])]
            if (known := known_of(*names)) is not None:
                found[number] = known, f"{names[0] or '(root)'}:{names[1]}"
        is_tensor = np.array([d.dtype != "python" for d in vocabulary.descriptions.items], np.bool_)
        wanted = np.isin(pair, [*found]) & (tables.column("flags") & _ABSENT == 0)
        rows = np.flatnonzero(wanted & is_tensor[tables.description])
        calls = tables.calls.chosen(tables.call[rows])
        group, groups = factorize(*(calls[name] for name in _CALL), slot[rows])
        order = np.lexsort((calls["stream"], group))
        bounds = np.searchsorted(group[order], np.arange(groups + 1))
        for begin, end in itertools.pairwise(bounds.tolist()):
            own = rows[order[begin:end]]
            yield tables, own, *found[int(pair[own[0]])]


def _declared(
    vocabulary: Vocabulary,
    mesh: Mesh,
    placements: Mapping[str, Placement],
    numbers: Sequence[tuple[int, int]],
) -> NDArray[np.int32] | str:
    """Return the numbers of the descriptions of values that lie so, added to `vocabulary`, or why
    they do not lie so. `numbers`: rank and description of each value."""
    descriptions = vocabulary.descriptions
    unchanged = np.array([number for _, number in numbers], np.int32)
    held = {rank: descriptions.items[number] for rank, number in numbers}
    is_plain = all(each.piece.layout.source is LayoutSource.UNKNOWN for each in held.values())
    if not is_plain or len(held) != len(numbers):
        return unchanged
    shapes = {rank: each.piece.shape for rank, each in held.items()}
    try:
        pieces = declared_pieces(mesh, placements, shapes)
    except LayoutError as error:
        return str(error)
    if refusal := next((piece.refusal for piece in pieces.values() if piece.refusal), ""):
        return refusal
    placed = (replace(each, piece=pieces[rank]) for rank, each in held.items())
    return np.array([descriptions.number(each) for each in placed], np.int32)


def placed_meshes(vocabulary: Vocabulary) -> list[dict[str, Any]]:
    """Return the meshes that no rank made and that layouts name, as the run header lists them."""
    families: dict[MeshFamily, set[tuple[int, ...]]] = {}
    for each in vocabulary.descriptions.items:
        mesh, family = each.piece.layout.mesh, each.family
        if mesh is not None and family is not None and family.source.is_from_all_ranks:
            families.setdefault(family, set()).add(mesh.ranks)
    return [family.listed(over) for family, over in families.items()]
