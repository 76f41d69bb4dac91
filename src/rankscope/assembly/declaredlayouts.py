"""Layouts declared when the trace was taken: plain shards get their places as the tree is built.

A rank knows its own piece alone, so it records it as plain, and the layout file beside it. Here,
where all ranks' shapes are known, the file's placements become the layout of the values that it
describes, with offsets from rank order and local sizes. What a DTensor says stands; what
contradicts the file stays as it was recorded, and the run header says so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from rankscope.assembly.interning import MeshFamily, Vocabulary
from rankscope.assembly.rankstreams import RankStream
from rankscope.assembly.tables import Tables, factorize
from rankscope.errors import LayoutError
from rankscope.layout.declared import declared_pieces
from rankscope.layout.layoutfile import LayoutFile, layout_given
from rankscope.layout.placement import LayoutSource, Mesh, Placement
from rankscope.record.ranklists import ranks_text
from rankscope.record.value import ValueFlag

__all__ = ["declare_layouts", "described_slots", "layout_header", "meshes_as_listed"]

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
    """Give the values that the run's layout file describes their layout. Changes the descriptions
    in the tables, adds to those of `vocabulary`, and to meshes and notes of `run`.

    Args:
        steps: calls and values of all ranks.
        vocabulary: what the numbers in them mean.
        run: the run header.
        ranks: rank of each stream.
    """
    given = layout_given(run)
    if given is None:
        return
    notes: dict[str, None] = dict.fromkeys(run["layout"].get("notes", ()))
    if isinstance(given, str):
        notes[given] = None
    else:
        declaring = _Declaring(vocabulary, *given, notes)
        layouts = given[0]

        def placed(path: str, slot: str) -> Mapping[str, Placement] | None:
            try:
                return layouts.placements(path, slot) or None
            except LayoutError as error:
                notes[str(error)] = None
                return None

        for tables, rows, placements, name in described_slots(steps, vocabulary, placed):
            own = ranks[tables.calls["stream"][tables.call[rows]]]
            tables.description[rows] = declaring.of(placements, name, tables.description[rows], own)
        run["meshes"] += declaring.meshes()
    if notes:
        more = len(notes) - _MOST_NOTES
        listed = [*notes][:_MOST_NOTES] + ([f"{more} more like these"] if more > 0 else [])
        run["layout"]["notes"] = listed


def described_slots(
    steps: Iterable[Tables], vocabulary: Vocabulary, describe: Callable[[str, str], T | None]
) -> Iterator[tuple[Tables, NDArray[np.int64], T, str]]:
    """Yield the rows of each slot of each call that something is known of, in which table, what is
    known, and what the slot is called.

    Args:
        steps: calls and values of all ranks.
        vocabulary: what the numbers in them mean.
        describe: says what is known of (path, slot), None for nothing; asked once for each.
    """
    known = functools.cache(describe)
    for tables in steps:
        for rows, found, name in _described(tables, vocabulary, known):
            yield tables, rows, found, name


def _described(
    tables: Tables, vocabulary: Vocabulary, describe: Callable[[str, str], T | None]
) -> Iterator[tuple[NDArray[np.int64], T, str]]:
    path, slot = tables.calls["path"][tables.call], tables.slot
    pair, count = factorize(path, slot)
    first = np.full(count, len(pair), np.int64)
    np.minimum.at(first, pair, np.arange(len(pair)))
    found: dict[int, tuple[T, str]] = {}
    for number, row in enumerate(first.tolist()):
        names = vocabulary.paths.items[int(path[row])], vocabulary.slots.items[int(slot[row])]
        known = describe(*names)
        if known is not None:
            found[number] = known, f"{names[0] or '(root)'}:{names[1]}"
    is_tensor = np.array([d.dtype != "python" for d in vocabulary.descriptions.items], np.bool_)
    wanted = np.isin(pair, [*found]) & (tables.column("flags") & _ABSENT == 0)
    rows = np.flatnonzero(wanted & is_tensor[tables.description])
    if not len(rows):
        return
    calls = tables.calls.chosen(tables.call[rows])
    group, groups = factorize(*(calls[name] for name in _CALL), slot[rows])
    order = np.lexsort((calls["stream"], group))
    bounds = np.searchsorted(group[order], np.arange(groups + 1))
    for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist()):
        own = rows[order[begin:end]]
        yield own, *found[int(pair[own[0]])]


def meshes_as_listed(families: Mapping[MeshFamily, Iterable[Mesh]]) -> list[dict[str, Any]]:
    """Return meshes that no rank made as the run header lists them."""
    return [
        {
            "name": family.name,
            "axes": list(family.axes),
            "shape": list(family.shape),
            "device": "",
            "over": sorted(list(mesh.ranks) for mesh in meshes),
        }
        for family, meshes in families.items()
    ]


class _Declaring:
    """Makes descriptions with a declared layout; those of one slot in many calls are made once."""

    def __init__(
        self, vocabulary: Vocabulary, layouts: LayoutFile, mesh: Mesh, notes: dict[str, None]
    ) -> None:
        self._descriptions = vocabulary.descriptions
        self._layouts, self._mesh, self._notes = layouts, mesh, notes
        self._known: dict[tuple[object, ...], NDArray[np.int32]] = {}
        self._meshes: dict[MeshFamily, dict[Mesh, None]] = {}

    def of(
        self,
        placements: Mapping[str, Placement],
        name: str,
        numbers: NDArray[np.int32],
        ranks: NDArray[np.int64],
    ) -> NDArray[np.int32]:
        """Return the numbers of the descriptions that the ranks' values now have."""
        key = (name, numbers.tobytes(), ranks.tobytes())
        if key not in self._known:
            self._known[key] = self._made(placements, name, numbers, ranks.tolist())
        return self._known[key]

    def meshes(self) -> list[dict[str, Any]]:
        """Return the meshes that layouts now name, as the run header lists them."""
        return meshes_as_listed(self._meshes)

    def _made(
        self,
        placements: Mapping[str, Placement],
        name: str,
        numbers: NDArray[np.int32],
        ranks: list[int],
    ) -> NDArray[np.int32]:
        held = [self._descriptions.items[number] for number in numbers.tolist()]
        is_plain = all(each.piece.layout.source is LayoutSource.UNKNOWN for each in held)
        if not is_plain or len(set(ranks)) != len(ranks):
            return numbers
        shapes = {rank: each.piece.shape for rank, each in zip(ranks, held)}
        try:
            pieces = declared_pieces(self._mesh, placements, shapes)
        except LayoutError as error:
            self._notes[f"{name}: {error}"] = None
            return numbers
        refusal = next((piece.refusal for piece in pieces.values() if piece.refusal), None)
        if refusal is not None:
            self._notes[f"{name} does not lie as declared: {refusal}"] = None
            return numbers
        made = np.empty_like(numbers)
        for at, (rank, each) in enumerate(zip(ranks, held)):
            described = replace(each, piece=pieces[rank])
            mesh, family = described.piece.layout.mesh, described.family
            assert mesh is not None and family is not None
            self._meshes.setdefault(family, {})[mesh] = None
            made[at] = self._descriptions.number(described)
        return made
