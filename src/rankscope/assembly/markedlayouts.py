"""Layouts that frameworks wrote on parameters: the tree gives them to parameters and gradients.

A rank records the mark of each of its parameters (`capture/describe.py`). A mark says how a
parameter lies along an axis, often not between which ranks: here, where the groups of all ranks and
what they held at setup are known, `layout/marks.py` says which ranks these are. Where that is not
certain, or where local shapes contradict a mark, the parameter stays as it was recorded: its layout
is unknown.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rankscope.assembly.declaredlayouts import described_slots
from rankscope.assembly.interning import Vocabulary, mark_of
from rankscope.assembly.rankstreams import RankStream
from rankscope.assembly.tables import Tables
from rankscope.errors import LayoutError
from rankscope.layout.declared import declared_pieces
from rankscope.layout.marks import AXIS_GROUPS, Members, ParameterMark, believed_groups
from rankscope.layout.placement import LayoutSource, Mesh
from rankscope.record.phases import Phase

__all__ = ["mark_layouts"]

_ISSUERS: Final = (Phase.FORWARD.word, Phase.RECOMPUTE.word)
_OPS: Final = ("all_reduce", "all_gather", "reduce_scatter")
"""Of collectives inside a layer that is cut, by the word they begin with."""
_SLOTS: Final = ("param:", "grad:")


_Marks = Mapping[tuple[str, str], Mapping[int, ParameterMark]]
"""{(path, name): {stream: mark}}"""


def mark_layouts(
    steps: Sequence[Tables],
    vocabulary: Vocabulary,
    streams: Sequence[RankStream],
) -> None:
    """Give the parameters and gradients that a framework marked their layout. Changes the
    descriptions in the tables, and adds to those of `vocabulary`.

    Args:
        steps: calls and values of all ranks.
        vocabulary: what the numbers in them mean.
        streams: the records, in the order of the tables' numbers.
    """
    marks = _marks(vocabulary, streams)
    if not marks:
        return
    groups = _AxisGroups(steps, vocabulary, streams, marks)

    def marked(path: str, slot: str) -> Mapping[int, ParameterMark] | None:
        return marks.get((path, slot.partition(":")[2])) if slot.startswith(_SLOTS) else None

    found = [
        (
            tables,
            name,
            own,
            dict(zip(tables.calls["stream"][tables.call[rows]].tolist(), rows.tolist())),
        )
        for tables, rows, own, name in described_slots(steps, vocabulary, marked)
    ]
    empty = {
        (name.replace(":param:", ":grad:"), stream)
        for tables, name, _, held in found
        for stream, row in held.items()
        if 0 in vocabulary.descriptions.items[tables.description[row]].piece.shape
    }
    for tables, name, own, all_held in found:
        held = {stream: row for stream, row in all_held.items() if stream in own}
        without = [number for number in own if (name, number) in empty and number not in held]
        for mark, members in _lines(own, held, groups, streams):
            _place(tables, vocabulary, mark, members, held, without, streams)


def _marks(vocabulary: Vocabulary, streams: Sequence[RankStream]) -> _Marks:
    found: dict[tuple[str, str], dict[int, ParameterMark]] = {}
    for number, stream in enumerate(streams):
        lookup = vocabulary.module_lookup[number]
        for definition in stream.defined("mark").values():
            try:
                module = int(lookup[int(definition["module"])])
                mark = mark_of(definition)
                key = (vocabulary.modules.items[module].path, str(definition["name"]))
            except (KeyError, TypeError, ValueError, IndexError, LayoutError):
                continue  # written by something else
            found.setdefault(key, {})[number] = mark
    return found


def _lines(
    marks: Mapping[int, ParameterMark],
    held: Mapping[int, int],
    groups: _AxisGroups,
    streams: Sequence[RankStream],
) -> Iterator[tuple[ParameterMark, Members]]:
    """Yield each group of ranks along the axis of a parameter's marks, with what they say, where
    all of the group say the same."""
    seen: set[Members] = set()
    for number in held:
        mark = marks[number]
        members = mark.members or groups.of(mark.axis, number)
        if members is None or len(members) < 2 or members in seen:
            continue
        seen.add(members)
        others = [
            marks[other]
            for other in held
            if streams[other].stream.rank in members
            and streams[other].stream.incarnation == streams[number].stream.incarnation
        ]
        if all((o.axis, o.placement) == (mark.axis, mark.placement) for o in others):
            yield mark, members


def _place(
    tables: Tables,
    vocabulary: Vocabulary,
    mark: ParameterMark,
    members: Members,
    held: Mapping[int, int],
    without: Iterable[int],
    streams: Sequence[RankStream],
) -> None:
    """Give the values that some ranks hold of one parameter their layout, where their shapes do
    not contradict it. `without`: streams that hold nothing of the parameter, and so no gradient."""
    rows = {streams[number].stream.rank: row for number, row in held.items()}
    rows = {rank: row for rank, row in rows.items() if rank in members}
    descriptions = vocabulary.descriptions
    before = {rank: descriptions.items[tables.description[row]] for rank, row in rows.items()}
    if any(each.piece.layout.source is not LayoutSource.UNKNOWN for each in before.values()):
        return
    mesh = Mesh(axes=(mark.axis,), shape=(len(members),), ranks=members)
    incarnations = {streams[number].stream.incarnation for number in held}
    ranks_without = {
        streams[number].stream.rank
        for number in without
        if streams[number].stream.incarnation in incarnations
    }
    shapes: dict[int, tuple[int, ...]] = dict.fromkeys(ranks_without.intersection(members), (0,))
    shapes |= {rank: each.piece.shape for rank, each in before.items()}
    pieces = declared_pieces(mesh, {mark.axis: mark.placement}, shapes, LayoutSource.MARKED)
    if any(piece.refusal for piece in pieces.values()):
        return
    for rank, each in before.items():
        tables.description[rows[rank]] = descriptions.number(replace(each, piece=pieces[rank]))


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
            if any(mark.axis == axis and mark.is_cut for mark in own.values())
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
        """Return {stream: members of each group} of collectives that these modules issue as they
        run forward."""
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
            return (path, slot[6:]) in cut or None if slot.startswith("param:") else None

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
                found.append(
                    {self._streams[n].stream.rank: h for n, h, is_known in own if is_known}
                )
        return found


def _numbers(tables: Tables) -> tuple[NDArray[Any], ...]:
    return tuple(tables.column(name) for name in ("digested", "min", "max", "hash"))
