"""Values that ranks hold in pieces, in a layout that nothing describes.

The sketch of a piece cut by hand counts its indices from 0, so pieces do not add up to the sketch
of the whole. What is known of them:

* Where both runs have the same ranks, what a rank holds is held to its own by sketches.
* Norm, mean, extrema and counts of all pieces together are those of the whole, in whatever order
  the pieces lie. No permutation changes these, so agreement by them is weak
  (`Measured.STATISTICS`).

That ranks hold such pieces is inferred from sizes, and believed where data show it: a value that
the same ranks hold in pieces of the same part and dims agrees with the reference.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from rankscope.diagnosis.comparison.alignment import AlignedValue, SlotKey, whole_shape
from rankscope.diagnosis.comparison.datasamples import Batches, Unit
from rankscope.diagnosis.comparison.difference import ComparedValue, Cut, Difference, Totals
from rankscope.diagnosis.comparison.wholedistances import (
    HeldPart,
    Units,
    difference_of,
    held_part,
    units_of,
)
from rankscope.diagnosis.comparison.wholevalues import EVERY_PLACE, Wholes
from rankscope.diagnosis.evidence.stepview import Array
from rankscope.record.phases import Phase
from rankscope.record.statistics import NONFINITE

_FEWEST: Final = 8
"""Elements of a value whose agreement shows how it is cut: fewer may agree by accident."""
_FINE: Final = 1e-3
"""Tolerance up to which statistics that agree do not do so by accident."""
_FEWEST_COARSE: Final = 3
"""Values that show the same beyond it."""


@dataclass(slots=True, eq=False)
class SeenCuts:
    """How the values of one comparison were seen to be cut, so far."""

    proven: set[Cut] = field(default_factory=set)
    _agreed: defaultdict[Cut, set[SlotKey]] = field(default_factory=lambda: defaultdict(set))
    of_parameters: dict[tuple[str, str], tuple[Cut, list[Array]]] = field(default_factory=dict)
    """By path and name of what the test began with: how it is cut, and the ranks of each piece."""

    def difference(
        self,
        value: AlignedValue,
        sides: tuple[Mapping[int, Wholes], Mapping[int, Wholes]],
        batches: Batches | None,
    ) -> Difference | None:
        """Return the difference of a value whose pieces ranks hold; None where sizes show none."""
        ref, test = ({0: s[min(s)]} if batches is None else s for s in sides)
        refs, tests = units_of(ref), units_of(test)
        if any(wholes.is_described for wholes, _ in tests.values()):
            return None
        if any(len(among) > 1 for _, among in refs.values()):
            is_alike = batches is None or batches.are_the_same
            return _rank_by_rank(refs, tests) if is_alike else None
        if value.key.phase in (Phase.GRADS, Phase.PARAMS):
            return self._of_parameter(value, refs, tests)
        cut = _cut_of(value, refs, tests)
        if cut is None:
            return None
        if value.key.phase is Phase.SETUP:
            ((wholes, among),) = tests.values()
            self.of_parameters[value.key.parameter] = cut, [wholes.members[i] for i in among]
        is_by_unit = refs.keys() == tests.keys() and all(
            _count({unit: refs[unit]}) == _count({unit: tests[unit]}) for unit in tests
        )
        if is_by_unit and (batches is None or batches.are_the_same):
            parts = [_joined({unit: refs[unit]}, {unit: tests[unit]}, unit) for unit in tests]
        else:
            parts = [_joined(refs, tests, (0, EVERY_PLACE))]
        return _of_parts(parts, [part.rows for part in parts if part.rows], cut)

    def _of_parameter(self, value: AlignedValue, refs: Units, tests: Units) -> Difference | None:
        """Compare a gradient or a parameter by what its module began with, which says which ranks
        hold the same piece. Replicas of all pieces are parts of their own where they differ."""
        cut, holders = self.of_parameters.get(value.key.parameter, (None, []))
        if cut not in self.proven:
            return None
        assert cut is not None
        ((unit, (wholes, among)),) = tests.items()
        row_of = {rank: i for i in among for rank in wholes.members[i].tolist()}
        if not row_of.keys() >= {*np.concatenate(holders).tolist()}:
            return None
        replicas: dict[tuple[int, ...], list[int]] = {}
        for column in range(max(map(len, holders))):
            ranks = [int(piece[column % len(piece)]) for piece in holders]
            replicas.setdefault(tuple(row_of[rank] for rank in ranks), []).extend(ranks)
        parts = []
        for rows, ranks in replicas.items():
            test = {unit: (wholes, list(rows))}
            if _count(test) != _count(refs):
                return None
            parts.append(_joined(refs, test, unit)._replace(members=np.unique(ranks)))
        return _of_parts(parts, [part.rows for part in parts if part.rows][:1], cut)

    def believe(self, of_pieces: Sequence[tuple[ComparedValue, str]]) -> None:
        """Take what values show of how they are cut. A value that is cut as none that agrees is not
        compared, for the reason beside it."""
        for c, _ in of_pieces:
            assert c.difference is not None and c.difference.cut is not None
            is_told = c.difference.ref.count >= _FEWEST and c.difference.ref.variance > 0
            errors = c.difference.errors()
            if c.key.phase is Phase.BACKWARD:  # whatever factor all of backward has
                errors = c.difference.fits()[:, 1]
            if is_told and errors.max(initial=0.0) <= c.allowed:
                agreed = self._agreed[c.difference.cut]
                agreed.add(c.key)
                if c.allowed <= _FINE or len(agreed) >= _FEWEST_COARSE:
                    self.proven.add(c.difference.cut)
        for c, reason in of_pieces:
            if c.difference is not None and c.difference.cut not in self.proven:
                c.difference, c.reason = None, reason


def _rank_by_rank(refs: Units, tests: Units) -> Difference | None:
    """Hold what each rank has to what the same rank has in the reference."""
    parts, pairs = [], {}
    for unit, (wholes, among) in tests.items():
        partners, of_unit = refs.get(unit, (wholes, []))
        row_of = {rank: i for i in of_unit for rank in partners.members[i].tolist()}
        ranks_of: dict[tuple[int, int], list[int]] = {}
        for index in among:
            for rank in wholes.members[index].tolist():
                at = row_of.pop(rank, None)
                if at is None or partners.counts[at] != wholes.counts[index]:
                    return None
                ranks_of.setdefault((at, index), []).append(rank)
        if row_of or partners.is_described:
            return None
        for (at, index), ranks in ranks_of.items():
            part = held_part(partners, at, wholes, index, unit)
            parts.append(part._replace(members=np.array(ranks)))
            pairs[unit, at] = partners.rows[at], wholes.rows[index]
    if refs.keys() != tests.keys():
        return None
    return _of_parts(parts, list(pairs.values()), Cut((), ()))


def _cut_of(value: AlignedValue, refs: Units, tests: Units) -> Cut | None:
    """Return how a value would be cut if ranks hold its pieces; None where sizes do not fit."""
    ref_shape, test_shape = whole_shape(value.first_ref), whole_shape(value.first_test)
    total = _count(refs)
    if len(ref_shape) != len(test_shape) or not ref_shape or _count(tests) != total or not total:
        return None
    dims = tuple(
        dim for dim, sizes in enumerate(zip(ref_shape, test_shape)) if sizes[0] != sizes[1]
    )
    pieces = [
        (tuple(wholes.members[index].tolist()), wholes.counts[index] / total)
        for wholes, among in tests.values()
        for index in among
    ]
    return Cut(dims, tuple(sorted({*pieces}))) if dims and len(pieces) > 1 else None


def _count(units: Units) -> int:
    return sum(wholes.counts[index] for wholes, among in units.values() for index in among)


def _joined(refs: Units, tests: Units, unit: Unit) -> HeldPart:
    """Return what all pieces of some units are together, beside the same of the reference."""
    rows = [_row_of_all(side) for side in (refs, tests)]
    members = [wholes.members[i] for wholes, among in tests.values() for i in among]
    return HeldPart(
        dots=np.zeros(3),
        norm=float(rows[0]["l2"]),
        members=np.unique(np.concatenate(members)),
        unit=unit,
        is_sketched=False,
        at_least=Totals.of(rows[1][None]).least_distance(Totals.of(rows[0][None])),
        rows=(rows[0], rows[1]),
        test_row=rows[1],
    )


def _row_of_all(units: Units) -> Array:
    """Return the digest of all wholes of some units together, as far as it does not depend on
    their order."""
    rows = np.concatenate([wholes.rows[among] for wholes, among in units.values()])
    totals, row = Totals.of(rows), np.copy(rows[0])
    for name in ("count", *NONFINITE):
        row[name] = rows[name].sum()
    row["l2"], row["mean"], row["min"], row["max"] = (
        totals.l2, totals.mean, totals.least, totals.greatest
    )  # fmt: skip
    row["hash"], row["sketch"] = 0, np.nan
    return row


def _of_parts(
    parts: Sequence[HeldPart], pairs: Sequence[tuple[Array, Array]], cut: Cut
) -> Difference:
    """Return the difference of parts; `pairs` are the digests of both sides that make the whole."""
    ref_rows, test_rows = zip(*pairs)
    difference = difference_of(parts, np.stack(ref_rows), np.stack(test_rows))
    difference.cut = cut
    return difference
