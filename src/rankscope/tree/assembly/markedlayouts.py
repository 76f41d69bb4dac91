"""Layouts that frameworks marked: the tree gives them to parameters, gradients and activations.

A rank records the marks of its parameters and modules (`capture/describe.py`). A mark says how a
value lies along an axis, often not between which ranks: here, where the groups of all ranks and
what they held at setup are known, `layout/declared.py` says which ranks these are. Where that is
not certain, or where local shapes contradict a mark, the value's layout stays unknown.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rankscope.errors import LayoutError
from rankscope.layout.declared import (
    AXIS_GROUPS,
    LayoutMark,
    Members,
    believed_groups,
    declared_pieces,
)
from rankscope.layout.placement import LayoutSource, Mesh
from rankscope.record.phases import Phase
from rankscope.tree.assembly.declaredlayouts import described_slots
from rankscope.tree.assembly.interning import Vocabulary, mark_of
from rankscope.tree.assembly.rankstreams import RankStream
from rankscope.tree.assembly.tables import Tables

_ISSUERS: Final = (Phase.FORWARD.word, Phase.RECOMPUTE.word)
_OPS: Final = ("all_reduce", "all_gather", "reduce_scatter")
"""Of collectives inside a layer that is cut, by the word they begin with."""

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
    found = [
        (tables, rows, own, name, tables.calls["stream"][tables.call[rows]])
        for tables, rows, own, name in described_slots(
            steps, vocabulary, lambda path, slot: marks.get((path, slot))
        )
        # a collective has the path of its module, and slots of the same names
        if tables.calls["phase"][tables.call[rows[0]]] != Phase.COLLECTIVE
    ]
    is_empty = np.array([0 in each.piece.shape for each in vocabulary.descriptions.items], np.bool_)
    empty = {
        (name.replace(":param:", ":grad:"), number)
        for tables, rows, _, name, numbers in found
        if ":param:" in name
        for number in numbers[is_empty[tables.description[rows]]].tolist()
    }
    place = functools.cache(functools.partial(_placed, vocabulary))
    known: dict[tuple[str, bytes, bytes], NDArray[np.int32]] = {}
    for tables, rows, own, name, numbers in found:
        before = tables.description[rows]
        key = name, before.tobytes(), numbers.tobytes()  # the same in many calls
        if key not in known:
            known[key] = before.copy()
            held = {number: at for at, number in enumerate(numbers.tolist()) if number in own}
            lives = {streams[number].stream.incarnation for number in held}
            without = {  # they hold nothing of the parameter, and so no gradient
                streams[number].stream.rank
                for number in own
                if (name, number) in empty and streams[number].stream.incarnation in lives
            }
            for mark, members, at in _lines(own, held, groups, streams):
                numbered = tuple((rank, int(before[row])) for rank, row in at.items())
                lacking = tuple(sorted(without.intersection(members).difference(at)))
                known[key][[*at.values()]] = place(mark, members, numbered, lacking)
        tables.description[rows] = known[key]


def _marks(vocabulary: Vocabulary, streams: Sequence[RankStream]) -> _Marks:
    found: dict[tuple[str, str], dict[int, LayoutMark]] = {}
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
                found.setdefault((path, slot), {})[number] = mark
    return found


def _lines(
    marks: Mapping[int, LayoutMark],
    held: Mapping[int, int],
    groups: _AxisGroups,
    streams: Sequence[RankStream],
) -> Iterator[tuple[LayoutMark, Members, dict[int, int]]]:
    """Yield each group of ranks along the axis of a value's marks, where all of the group say the
    same: what they say, and {rank: what is held of it}."""
    numbers = {streams[number].stream.rank: number for number in held}
    seen: set[Members] = set()
    for number in held:
        mark = marks[number]
        members = mark.members or groups.of(mark.axis, number)
        if members is None or len(members) < 2 or members in seen:
            continue
        seen.add(members)
        own = [numbers[rank] for rank in members if rank in numbers]
        if own and len({replace(marks[other], members=None) for other in own}) == 1:
            yield mark, members, {streams[other].stream.rank: held[other] for other in own}


def _placed(
    vocabulary: Vocabulary,
    mark: LayoutMark,
    members: Members,
    held: tuple[tuple[int, int], ...],
    without: tuple[int, ...],
) -> list[int]:
    """Return the numbers of the descriptions of values that lie as a mark says, added to
    `vocabulary`; unchanged where a layout is known, or shapes contradict the mark. `held`: rank and
    description; `without`: ranks that hold an empty piece, and recorded none."""
    descriptions = vocabulary.descriptions
    unchanged = [number for _, number in held]
    before = {rank: descriptions.items[number] for rank, number in held}
    if any(each.piece.layout.source is not LayoutSource.UNKNOWN for each in before.values()):
        return unchanged
    shapes: dict[int, tuple[int, ...]] = dict.fromkeys(without, (0,))
    shapes |= {rank: each.piece.shape for rank, each in before.items()}
    mesh = Mesh(axes=(mark.axis,), shape=(len(members),), ranks=members)
    placements = {mark.axis: mark.placed(max(map(len, shapes.values())))}
    pieces = declared_pieces(mesh, placements, shapes, LayoutSource.MARKED)
    if any(piece.refusal for piece in pieces.values()):
        return unchanged
    placed = (replace(each, piece=pieces[rank]) for rank, each in before.items())
    return [descriptions.number(each) for each in placed]


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
        found: dict[int, Members] = {}
        for number, stream in enumerate(self._streams):
            for definition in stream.defined("group").values():
                if definition.get("description") == description:
                    members = tuple(map(int, definition["ranks"]))
                    if description and stream.stream.rank in members:
                        found[number] = members
        return found

    def _issued_to(self, axis: str) -> dict[int, Members]:
        """Return {stream: members} of the groups of collectives inside layers that are cut along
        the axis, where what the ranks held at setup shows that they are the axis'."""
        cut = {
            key
            for key, own in self._marks.items()
            if key[1].startswith("param:")
            and any(mark.axis == axis and mark.is_cut for mark in own.values())
        }
        issued = self._issued({path for path, _ in cut})
        found: dict[int, Members] = {}
        for incarnation in {stream.stream.incarnation for stream in self._streams}:
            numbers = {
                stream.stream.rank: number
                for number, stream in enumerate(self._streams)
                if stream.stream.incarnation == incarnation
            }
            candidates = {rank: issued.get(number, ()) for rank, number in numbers.items()}
            hashes = self._hashes(cut, incarnation)
            for rank, members in believed_groups(candidates, hashes).items():
                found[numbers[rank]] = members
        return found

    def _issued(self, paths: set[str]) -> dict[int, set[Members]]:
        """Return {stream: members of each group} of collectives that these modules issue in
        forward."""
        kinds = self._vocabulary.collectives.items
        numbers = [n for n, path in enumerate(self._vocabulary.paths.items) if path in paths]
        wanted = [n for n, k in enumerate(kinds) if k.issuer in _ISSUERS and k.op.startswith(_OPS)]
        found: dict[int, set[Members]] = {}
        for calls in (tables.calls for tables in self._steps):
            rows = np.isin(calls["path"], numbers) & np.isin(calls["collective"], wanted)
            for number, kind in set(
                zip(calls["stream"][rows].tolist(), calls["collective"][rows].tolist())
            ):
                found.setdefault(number, set()).add(kinds[kind].members)
        return found

    def _hashes(self, cut: set[tuple[str, str]], incarnation: int) -> list[dict[int, int]]:
        """Return {rank: hash} of what ranks held of each cut parameter at setup; constants tell
        nothing and are left out."""
        found: list[dict[int, int]] = []

        def is_cut(path: str, slot: str) -> bool | None:
            return (path, slot) in cut or None

        columns = functools.cache(_numbers)
        for tables, rows, _, _ in described_slots(self._steps, self._vocabulary, is_cut):
            call = tables.call[rows[0]]
            of_setup = tables.calls["phase"][call] == Phase.SETUP
            if not of_setup or tables.calls["incarnation"][call] != incarnation:
                continue
            has_digest, least, greatest, hashes = (each[rows] for each in columns(tables))
            if (least < greatest).any():
                numbers = tables.calls["stream"][tables.call[rows]].tolist()
                own = zip(numbers, hashes.tolist(), has_digest.tolist())
                found.append({self._streams[n].stream.rank: h for n, h, known in own if known})
        return found


def _numbers(tables: Tables) -> tuple[NDArray[Any], ...]:
    return tuple(tables.column(name) for name in ("digested", "min", "max", "hash"))
