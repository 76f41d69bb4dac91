"""Layouts that no rank recorded: declared by a layout file, or marked by a framework.

A rank knows its own piece alone. Here all ranks' shapes and groups are known, so a declaration or a
mark becomes the layout of the values it describes, with offsets from rank order and local sizes.
What a DTensor says stands. A value that contradicts its declaration keeps its recorded layout, and
the run header says so; a mark (`capture/describe.py`) that is not certain is left out.
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
from rankscope.layout.layoutfile import (
    AXIS_GROUPS,
    LayoutMark,
    Members,
    believed_groups,
    declared_pieces,
    layout_of_run,
)
from rankscope.layout.placement import LayoutSource, Mesh, Placement
from rankscope.record.phases import Phase
from rankscope.record.ranks import ranks_text
from rankscope.record.value import ValueFlag
from rankscope.tree.assembly.interning import MeshFamily, Vocabulary, mark_of
from rankscope.tree.assembly.rankstreams import RankStream
from rankscope.tree.assembly.tables import KEY_COLUMNS, Tables, factorize

T = TypeVar("T")
_MOST_NOTES: Final = 20
_ABSENT: Final = np.uint32(ValueFlag.ABSENT)


def layout_header(streams: Sequence[RankStream]) -> dict[str, Any]:
    """Return {"layout": {"file", "text"}} of the lowest rank that was given a layout file; {} where
    none was. Ranks that were given another one, or none, stand in its notes."""
    files = {s.stream.rank: _given(s) for s in streams if s.identity}
    first = next((f for f in files.values() if f is not None), None)
    if first is None:
        return {}
    deviating = [rank for rank, f in files.items() if f is None or f[1] != first[1]]
    note = f"ranks {ranks_text(deviating)} were given another layout file, or none"
    return {
        "layout": {"file": first[0], "text": first[1], **({"notes": [note]} if deviating else {})}
    }


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
    layout = layout_of_run(run)
    if layout is None:
        return
    notes: dict[str, None] = dict.fromkeys(run["layout"].get("notes", ()))
    if isinstance(layout, str):
        notes[layout] = None
    else:
        layouts, mesh = layout
        by_value: dict[tuple[object, ...], NDArray[np.int32]] = {}

        def placed(path: str, slot: str) -> Mapping[str, Placement] | None:
            try:
                return layouts.placements(path, slot) or None
            except LayoutError as error:
                notes[str(error)] = None
                return None

        for tables, rows, placements, name in described_slots(steps, vocabulary, placed):
            value_ranks = ranks[tables.calls["stream"][tables.call[rows]]]
            numbers = tables.description[rows]
            key = (name, numbers.tobytes(), value_ranks.tobytes())  # the same in many calls
            if key not in by_value:
                rank_numbers = list(zip(value_ranks.tolist(), numbers.tolist()))
                declared = _declared_numbers(vocabulary, mesh, placements, rank_numbers)
                if isinstance(declared, str):
                    notes[f"{name} does not lie as declared: {declared}"] = None
                by_value[key] = numbers if isinstance(declared, str) else declared
            tables.description[rows] = by_value[key]
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
        slots: dict[int, tuple[T, str]] = {}
        for number, row in enumerate(first.tolist()):
            names = vocabulary.paths.items[int(path[row])], vocabulary.slots.items[int(slot[row])]
            if (facts := known_of(*names)) is not None:
                slots[number] = facts, f"{names[0] or '(root)'}:{names[1]}"
        is_tensor = np.array([d.dtype != "python" for d in vocabulary.descriptions.items], np.bool_)
        is_described = np.isin(pair, [*slots]) & (tables.column("flags") & _ABSENT == 0)
        rows = np.flatnonzero(is_described & is_tensor[tables.description])
        calls = tables.calls.chosen(tables.call[rows])
        group, groups = factorize(*(calls[name] for name in KEY_COLUMNS), slot[rows])
        order = np.lexsort((calls["stream"], group))
        bounds = np.searchsorted(group[order], np.arange(groups + 1))
        for begin, end in itertools.pairwise(bounds.tolist()):
            slot_rows = rows[order[begin:end]]
            yield tables, slot_rows, *slots[int(pair[slot_rows[0]])]


def _declared_numbers(
    vocabulary: Vocabulary,
    mesh: Mesh,
    placements: Mapping[str, Placement],
    numbers: Sequence[tuple[int, int]],
) -> NDArray[np.int32] | str:
    """Return the numbers of the descriptions of values that lie so, added to `vocabulary`, or why
    they do not lie so. `numbers`: rank and description of each value."""
    descriptions = vocabulary.descriptions
    unchanged = np.array([number for _, number in numbers], np.int32)
    plain = {rank: descriptions.items[number] for rank, number in numbers}
    is_plain = all(d.piece.layout.source is LayoutSource.UNKNOWN for d in plain.values())
    if not is_plain or len(plain) != len(numbers):
        return unchanged
    shapes = {rank: d.piece.shape for rank, d in plain.items()}
    try:
        pieces = declared_pieces(mesh, placements, shapes)
    except LayoutError as error:
        return str(error)
    if refusal := next((piece.refusal for piece in pieces.values() if piece.refusal), ""):
        return refusal
    placed = (replace(d, piece=pieces[rank]) for rank, d in plain.items())
    return np.array([descriptions.number(d) for d in placed], np.int32)


def placed_meshes(vocabulary: Vocabulary) -> list[dict[str, Any]]:
    """Return the meshes that no rank made and that layouts name, as the run header lists them."""
    families: dict[MeshFamily, set[tuple[int, ...]]] = {}
    for description in vocabulary.descriptions.items:
        mesh, family = description.piece.layout.mesh, description.family
        if mesh is not None and family is not None and family.source.is_from_all_ranks:
            families.setdefault(family, set()).add(mesh.ranks)
    return [family.listed(over) for family, over in families.items()]


_ISSUERS: Final = (Phase.FORWARD.word, Phase.RECOMPUTE.word)
_OPS: Final = ("all_reduce", "all_gather", "reduce_scatter")

_Marks = Mapping[tuple[str, str], Mapping[int, LayoutMark]]
"""{(path, slot): {stream: mark}}"""


def mark_layouts(
    steps: Sequence[Tables], vocabulary: Vocabulary, streams: Sequence[RankStream]
) -> None:
    """Give the values that a framework marked their layout: changes the descriptions in the tables,
    adds to those of `vocabulary`. `streams` are in the order of the tables' numbers."""
    marks = _marks(vocabulary, streams)
    if not marks:
        return
    groups = _AxisGroups(steps, vocabulary, streams, marks)
    slots = [
        (tables, rows, marked, name, tables.calls["stream"][tables.call[rows]])
        for tables, rows, marked, name in described_slots(
            steps, vocabulary, lambda path, slot: marks.get((path, slot))
        )
        # a collective has the path of its module, and slots of the same names
        if tables.calls["phase"][tables.call[rows[0]]] != Phase.COLLECTIVE
    ]
    is_empty = np.array([0 in d.piece.shape for d in vocabulary.descriptions.items], np.bool_)
    empty = {
        (name.replace(":param:", ":grad:"), number)
        for tables, rows, _, name, numbers in slots
        if ":param:" in name
        for number in numbers[is_empty[tables.description[rows]]].tolist()
    }
    place = functools.cache(functools.partial(_marked_numbers, vocabulary))
    by_slot: dict[tuple[str, bytes, bytes], NDArray[np.int32]] = {}
    for tables, rows, marked, name, numbers in slots:
        before = tables.description[rows]
        key = name, before.tobytes(), numbers.tobytes()  # the same in many calls
        if key not in by_slot:
            by_slot[key] = before.copy()
            row_of = {number: at for at, number in enumerate(numbers.tolist()) if number in marked}
            lives = {streams[number].stream.incarnation for number in row_of}
            without = {  # they hold nothing of the parameter, and so no gradient
                streams[number].stream.rank
                for number in marked
                if (name, number) in empty and streams[number].stream.incarnation in lives
            }
            for mark, members, at in _lines(marked, row_of, groups, streams):
                numbered = tuple((rank, int(before[row])) for rank, row in at.items())
                lacking = tuple(sorted(without.intersection(members).difference(at)))
                by_slot[key][[*at.values()]] = place(mark, members, numbered, lacking)
        tables.description[rows] = by_slot[key]


def _marks(vocabulary: Vocabulary, streams: Sequence[RankStream]) -> _Marks:
    marks: dict[tuple[str, str], dict[int, LayoutMark]] = {}
    for number, stream in enumerate(streams):
        lookup = vocabulary.lookups[number]["module"]
        for definition in stream.defined("mark").values():
            try:
                module = int(lookup[int(definition["module"])])
                mark = mark_of(definition)
                path, name = vocabulary.modules.items[module].path, str(definition["name"])
            except (KeyError, TypeError, ValueError, IndexError, LayoutError):
                continue  # written by something else
            is_activation = definition.get("activation", False)
            for slot in [name] if is_activation else [f"param:{name}", f"grad:{name}"]:
                marks.setdefault((path, slot), {})[number] = mark
    return marks


def _lines(
    marks: Mapping[int, LayoutMark],
    row_of: Mapping[int, int],
    groups: _AxisGroups,
    streams: Sequence[RankStream],
) -> Iterator[tuple[LayoutMark, Members, dict[int, int]]]:
    """Yield (mark, group of ranks, {rank: row}) where all of the group have one mark."""
    numbers = {streams[number].stream.rank: number for number in row_of}
    visited: set[Members] = set()
    for number in row_of:
        mark = marks[number]
        members = mark.members or groups.of(mark.axis, number)
        if members is None or len(members) < 2 or members in visited:
            continue
        visited.add(members)
        present = [numbers[rank] for rank in members if rank in numbers]
        if present and len({replace(marks[number], members=None) for number in present}) == 1:
            yield (
                mark,
                members,
                {streams[number].stream.rank: row_of[number] for number in present},
            )


def _marked_numbers(
    vocabulary: Vocabulary,
    mark: LayoutMark,
    members: Members,
    pairs: tuple[tuple[int, int], ...],
    without: tuple[int, ...],
) -> list[int]:
    """Return the numbers of the descriptions of values that lie as a mark says, added to
    `vocabulary`; unchanged where a layout is known, or shapes contradict the mark. `pairs`:
    rank and description; `without`: ranks that hold an empty piece, and recorded none."""
    descriptions = vocabulary.descriptions
    unchanged = [number for _, number in pairs]
    before = {rank: descriptions.items[number] for rank, number in pairs}
    if any(d.piece.layout.source is not LayoutSource.UNKNOWN for d in before.values()):
        return unchanged
    shapes: dict[int, tuple[int, ...]] = dict.fromkeys(without, (0,))
    shapes |= {rank: d.piece.shape for rank, d in before.items()}
    mesh = Mesh(axes=(mark.axis,), shape=(len(members),), ranks=members)
    placements = {mark.axis: mark.placed(max(map(len, shapes.values())))}
    pieces = declared_pieces(mesh, placements, shapes, LayoutSource.MARKED)
    if any(piece.refusal for piece in pieces.values()):
        return unchanged
    placed = (replace(d, piece=pieces[rank]) for rank, d in before.items())
    return [descriptions.number(d) for d in placed]


# ---- between which ranks -------------------------------------------------------------------------


class _AxisGroups:
    """Which ranks each axis of the marks runs over, as far as that is certain."""

    def __init__(
        self,
        steps: Sequence[Tables],
        vocabulary: Vocabulary,
        streams: Sequence[RankStream],
        marks: _Marks,
    ) -> None:
        self._steps, self._vocabulary = steps, vocabulary
        self._streams, self._marks = streams, marks
        self._known: dict[str, dict[int, Members]] = {}

    def of(self, axis: str, stream: int) -> Members | None:
        """Return the ranks along an axis that a rank is one of; None where they are not known."""
        if axis not in self._known:
            named = self._described_as(AXIS_GROUPS.get(axis))
            self._known[axis] = named or self._issued_to(axis)
        return self._known[axis].get(stream)

    def _described_as(self, description: str | None) -> dict[int, Members]:
        """Return {stream: members} of the groups that the framework describes so."""
        groups: dict[int, Members] = {}
        for number, stream in enumerate(self._streams):
            for definition in stream.defined("group").values():
                if definition.get("description") == description:
                    members = tuple(map(int, definition["ranks"]))
                    if description and stream.stream.rank in members:
                        groups[number] = members
        return groups

    def _issued_to(self, axis: str) -> dict[int, Members]:
        """Return {stream: members} of the axis' groups, as its collectives and the values at setup
        prove."""
        cut = {
            key
            for key, marks in self._marks.items()
            if key[1].startswith("param:")
            and any(mark.axis == axis and mark.is_cut for mark in marks.values())
        }
        issued = self._issued({path for path, _ in cut})
        groups: dict[int, Members] = {}
        for incarnation in {stream.stream.incarnation for stream in self._streams}:
            numbers = {
                stream.stream.rank: number
                for number, stream in enumerate(self._streams)
                if stream.stream.incarnation == incarnation
            }
            candidates = {rank: issued.get(number, ()) for rank, number in numbers.items()}
            hashes = self._hashes(cut, incarnation)
            for rank, members in believed_groups(candidates, hashes).items():
                groups[numbers[rank]] = members
        return groups

    def _issued(self, paths: set[str]) -> dict[int, set[Members]]:
        """Return {stream: members of each group} of the collectives in these modules' forward."""
        kinds = self._vocabulary.collectives.items
        numbers = [n for n, path in enumerate(self._vocabulary.paths.items) if path in paths]
        kind_numbers = [
            n for n, k in enumerate(kinds) if k.issuer in _ISSUERS and k.op.startswith(_OPS)
        ]
        groups: dict[int, set[Members]] = {}
        for calls in (tables.calls for tables in self._steps):
            rows = np.isin(calls["path"], numbers) & np.isin(calls["collective"], kind_numbers)
            for number, kind in set(
                zip(calls["stream"][rows].tolist(), calls["collective"][rows].tolist())
            ):
                groups.setdefault(number, set()).add(kinds[kind].members)
        return groups

    def _hashes(self, cut: set[tuple[str, str]], incarnation: int) -> list[dict[int, int]]:
        """Return {rank: hash} of each cut parameter at setup, without constants: they prove
        nothing."""
        by_parameter: list[dict[int, int]] = []

        def is_cut(path: str, slot: str) -> bool | None:
            return (path, slot) in cut or None

        columns = functools.cache(_numbers)
        for tables, rows, _, _ in described_slots(self._steps, self._vocabulary, is_cut):
            call = tables.call[rows[0]]
            of_setup = tables.calls["phase"][call] == Phase.SETUP
            if not of_setup or tables.calls["incarnation"][call] != incarnation:
                continue
            has_digest, least, greatest, hashes = (column[rows] for column in columns(tables))
            if (least < greatest).any():
                numbers = tables.calls["stream"][tables.call[rows]][has_digest].tolist()
                ranks = (self._streams[number].stream.rank for number in numbers)
                by_parameter.append(dict(zip(ranks, hashes[has_digest].tolist())))
        return by_parameter


def _numbers(tables: Tables) -> tuple[NDArray[Any], ...]:
    return tuple(tables.column(name) for name in ("digested", "min", "max", "hash"))
