"""Differences of values that belong to batches: unit by unit where both runs cut the batch alike,
sample by sample where they do not, by statistics where no samples were kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.diagnosis.comparison.commonvalues import (
    SUM_SLACK,
    Parts,
    agreed_holder,
    least_distance,
    other_size,
)
from rankscope.diagnosis.comparison.datasamples import StepSamples
from rankscope.diagnosis.comparison.difference import (
    TINY,
    Batches,
    Difference,
    Measured,
    Totals,
    dots_of,
)
from rankscope.diagnosis.comparison.wholevalues import EVERY_PLACE, Wholes

__all__ = ["compare_batched"]

Array = NDArray[Any]
Unit = tuple[int, int]


class _Units:
    """The wholes of one slot in all micro-batches of a step, by unit."""

    def __init__(self, by_micro_batch: Mapping[int, Wholes]) -> None:
        self.by_unit: dict[Unit, tuple[Wholes, list[int]]] = {}
        for micro_batch, wholes in sorted(by_micro_batch.items()):
            for index, place in enumerate(wholes.places.tolist()):
                unit = (micro_batch, place)
                self.by_unit.setdefault(unit, (wholes, []))[1].append(index)

    def only(self, count_of: Mapping[Unit, int]) -> _Units:
        """Return the wholes that have as many elements as is said of their unit."""
        found = _Units({})
        for unit, (wholes, among) in self.by_unit.items():
            left = [i for i in among if wholes.counts[i] == count_of.get(unit)]
            if left:
                found.by_unit[unit] = (wholes, left)
        return found

    def first_rows(self) -> Array:
        """Return the row of one whole of each unit."""
        chosen: dict[int, tuple[Wholes, list[int]]] = {}
        for wholes, among in self.by_unit.values():
            chosen.setdefault(id(wholes), (wholes, []))[1].append(among[0])
        return np.concatenate([wholes.rows[own] for wholes, own in chosen.values()])

    def within(self, units: Iterable[Unit]) -> _Units:
        """Return some of the units."""
        found = _Units({})
        found.by_unit = {unit: self.by_unit[unit] for unit in units}
        return found

    def counts(self) -> dict[Unit, int]:
        """Return the elements of one whole of each unit."""
        return {unit: wholes.counts[among[0]] for unit, (wholes, among) in self.by_unit.items()}


def compare_batched(
    ref: Mapping[int, Wholes],
    test: Mapping[int, Wholes],
    batches: Batches,
    allowed: float,
    *,
    is_gradient: bool,
) -> Difference | str:
    """Compare activations or their gradients.

    Args:
        ref: the reference's wholes by micro-batch.
        test: the test's.
        batches: who worked on which samples.
        allowed: relative distance that counts as none.
        is_gradient: gradients of what has no samples add up over units.

    Returns:
        The difference, or why nothing can be said.
    """
    ours, theirs = _Units(ref), _Units(test)
    for unit, (wholes, among) in ours.by_unit.items():
        own = agreed_holder(wholes, among, allowed)
        if isinstance(own, str):
            return own
        ours.by_unit[unit] = (wholes, [own])
    counts = ours.counts()
    if batches.are_the_same and ours.by_unit.keys() == theirs.by_unit.keys():
        left = theirs.only(counts)
        if left.by_unit:
            return _unit_by_unit(ours, left, theirs, allowed)
    common = _if_without_samples(ours, theirs, allowed, is_gradient=is_gradient)
    if common is not None and (common.errors() <= allowed).all():
        return common  # a table of positions may have as many rows as there are samples
    spans = _Spans(batches.ref), _Spans(batches.test)
    if common is not None and not is_gradient:
        reduced = _reduced_over_units(ours, theirs, spans, common, allowed)
        if reduced is not None:
            return reduced
    per_sample = spans[0].per_sample(counts)
    if per_sample is not None:
        left = theirs.only(spans[1].counts(theirs.by_unit, per_sample))
        if left.by_unit and spans[1].covers(left.by_unit):
            found = _sample_by_sample(ours, left, batches, spans, allowed)
            if isinstance(found, str) or not (is_gradient and found.at_least is not None):
                return found
            # averages over ranks or micro-batches scale it, and statistics do not tell by how much
            return "gradients of other batches, and no sketches of single samples"
    if common is not None:
        is_cut = _is_cut_in_an_unknown_way(theirs, common, allowed)
        return "layout unknown" if is_cut else common
    first = next(iter(theirs.by_unit.values()))[0]
    return other_size(first)


def _unit_by_unit(ours: _Units, left: _Units, every: _Units, allowed: float) -> Difference:
    parts = Parts(Measured.SKETCHES)
    for unit, (wholes, among) in left.by_unit.items():
        mine, (own,) = ours.by_unit[unit]
        for index in among:
            parts.add(mine, own, wholes, index, unit)
        if len(among) > 1 and not wholes.is_described:
            parts.try_sum(mine, own, wholes, among, allowed)
    others = [
        wholes.members[i]
        for unit, (wholes, among) in every.by_unit.items()
        for i in among
        if unit not in left.by_unit or i not in left.by_unit[unit][1]
    ]
    return parts.finished(ours.within(left.by_unit).first_rows(), left.first_rows(), others)


class _Spans:
    """Which samples of a step each unit has."""

    def __init__(self, samples: StepSamples) -> None:
        self._samples = samples
        self._starts = samples.starts()

    def of(self, unit: Unit) -> tuple[int, int] | None:
        """Return the first sample of a unit and how many it has."""
        sizes = self._samples.sizes
        if unit[1] != EVERY_PLACE:
            return (self._starts[unit], sizes[unit]) if unit in sizes else None
        own = [each for each in sizes if each[0] == unit[0]]
        return (self._starts[own[0]], sum(sizes[each] for each in own)) if own else None

    def per_sample(self, counts: Mapping[Unit, int]) -> float | None:
        """Return the elements that a sample has where all units have equally many for each."""
        found = set()
        for unit, count in counts.items():
            span = self.of(unit)
            if span is None or not span[1]:
                return None
            found.add(count / span[1])
        return found.pop() if len(found) == 1 and self.covers(counts) else None

    def counts(self, units: Mapping[Unit, Any], per_sample: float) -> dict[Unit, int]:
        """Return the elements that units should have."""
        spans = {unit: self.of(unit) for unit in units}
        return {unit: round(per_sample * span[1]) for unit, span in spans.items() if span}

    def covers(self, units: Mapping[Unit, Any]) -> bool:
        """True where these units have all samples of the step."""
        spans = [self.of(unit) for unit in units]
        return sum(span[1] for span in spans if span) == self._samples.total


def _sample_by_sample(
    ours: _Units,
    left: _Units,
    batches: Batches,
    spans: tuple[_Spans, _Spans],
    allowed: float,
) -> Difference | str:
    mine = _sample_matrix(ours, spans[0], batches.ref.total)
    kept = [wholes.samples[i] for wholes, among in left.by_unit.values() for i in among]
    if mine is None or not all(
        own is not None and np.isfinite(own).all() for own in (mine, *kept)
    ):  # a mask of the least number that a dtype has is too large to sketch
        return _by_statistics(ours, left, batches)
    rows_of_each = mine.shape[1]
    at_once = _all_samples_at_once(ours, left, batches, spans[1], mine)
    if at_once is not None:
        return at_once
    parts, has_known = Parts(Measured.SAMPLES), False
    for unit, (wholes, among) in left.by_unit.items():
        span = spans[1].of(unit)
        assert span is not None
        partner = batches.match.partner[span[0] : span[0] + span[1]]
        known = partner >= 0
        if not known.any():  # nothing of the reference belongs to it
            for index in among:
                square = float(np.square(wholes.sketches[index]).mean())
                dots = np.array([0.0, square, square])
                parts.put(dots, math.sqrt(square), wholes.members[index], unit)
            continue
        has_known = True
        a = mine[partner[known]]
        summed = np.zeros_like(a)
        dots = np.zeros(3)
        for index in among:
            own = wholes.samples[index]
            assert own is not None
            if len(own) != rows_of_each * span[1]:
                return _by_statistics(ours, left, batches)
            b = own.astype(np.float64).reshape(span[1], rows_of_each, -1)[known]
            summed += b * len(wholes.members[index])
            dots = dots_of(a, b)
            parts.put(dots, _norm(dots, wholes.rows[index]), wholes.members[index], unit)
        if len(among) > 1 and not wholes.is_described:
            whole = dots_of(a, summed)
            parts.replace_by_sum(len(among), whole, math.sqrt(max(float(whole[1]), 0.0)), allowed)
    if not has_known:
        return "samples that the reference has not"
    return parts.finished(ours.first_rows(), left.first_rows())


def _all_samples_at_once(
    ours: _Units, left: _Units, batches: Batches, spans: _Spans, mine: Array
) -> Difference | None:
    """Do what `_sample_by_sample` does, for all units together: where each has one value, and the
    reference knows every sample. None for other values."""
    partner = batches.match.partner
    units = list(left.by_unit)
    if (partner < 0).any() or any(len(among) > 1 for _, among in left.by_unit.values()):
        return None
    kept = [wholes.samples[among[0]] for wholes, among in left.by_unit.values()]
    sizes = [span[1] if (span := spans.of(unit)) else 0 for unit in units]
    starts = [span[0] if (span := spans.of(unit)) else 0 for unit in units]
    is_whole = starts == [0, *np.cumsum(sizes)[:-1].tolist()] and sum(sizes) == len(partner)
    if not is_whole or any(
        one is None or len(one) != size * mine.shape[1] for one, size in zip(kept, sizes)
    ):
        return None
    b = np.concatenate([each for each in kept if each is not None]).astype(np.float64)
    a: Array = mine[partner].reshape(len(b), -1)
    each = np.stack([(a * b).sum(1), (a * a).sum(1), (b * b).sum(1)], axis=1) / mine.shape[2]
    dots = np.add.reduceat(each, np.array(starts) * mine.shape[1], axis=0)
    rows = left.first_rows()
    lengths, own, theirs = rows["l2"], dots[:, 1], dots[:, 2]
    known = np.isfinite(lengths) & (lengths > 0) & (own > 0) & (theirs > 0)
    ratio = np.divide(own, theirs, out=own.copy(), where=known)
    norms = np.sqrt(np.maximum(ratio, 0.0)) * np.where(known, lengths, 1.0)
    return Difference(
        dots=dots,
        norms=norms,
        members=[wholes.members[among[0]] for wholes, among in left.by_unit.values()],
        units=units,
        is_exact=np.zeros(len(units), bool),
        measured=Measured.SAMPLES,
        ref=Totals.of(ours.first_rows()),
        test=Totals.of(rows),
    )


def _norm(dots: Array, row: Array) -> float:
    """Return the norm of the reference's part: known for the test's, whose ratio sketches tell."""
    _, own, theirs = dots.tolist()
    if theirs > 0 and own > 0 and math.isfinite(row["l2"]) and row["l2"] > 0:
        return float(row["l2"]) * math.sqrt(own / theirs)
    return math.sqrt(max(own, 0.0))


def _sample_matrix(units: _Units, spans: _Spans, total: int) -> Array | None:
    """Return [samples, rows of each, K] sketches of the reference's samples."""
    found: Array | None = None
    for unit, (wholes, among) in units.by_unit.items():
        own, span = wholes.samples[among[0]], spans.of(unit)
        if own is None or span is None or len(own) % span[1]:
            return None
        each = len(own) // span[1]
        if found is None:
            found = np.zeros((total, each, own.shape[1]))
        if found.shape[1] != each:
            return None
        found[span[0] : span[0] + span[1]] = own.reshape(span[1], each, -1)
    return found


def _by_statistics(ours: _Units, left: _Units, batches: Batches) -> Difference | str:
    """Compare what batches hold together, where their samples were not sketched."""
    if batches.match.lost or batches.match.unknown:
        return "other samples, and no sketches of single ones"
    ref, test = ours.first_rows(), left.first_rows()
    totals = Totals.of(ref), Totals.of(test)
    if not math.isfinite(totals[0].l2):
        return "neither sketches of samples nor statistics"
    members = [wholes.members[i] for wholes, among in left.by_unit.values() for i in among]
    return Difference(
        dots=np.zeros((1, 3)),
        norms=np.array([totals[0].l2]),
        members=[np.unique(np.concatenate(members))],
        units=[(0, EVERY_PLACE)],
        is_exact=np.array([False]),
        measured=Measured.STATISTICS,
        ref=totals[0],
        test=totals[1],
        at_least=np.array([least_distance(*totals)]),
    )


def _if_without_samples(
    ours: _Units, theirs: _Units, allowed: float, *, is_gradient: bool
) -> Difference | None:
    """Compare every unit with the reference's where all have as many elements; else None."""
    one = set(ours.counts().values())
    if len(one) != 1:
        return None
    left = theirs.only(dict.fromkeys(theirs.by_unit, one.pop()))
    if len(left.by_unit) != len(theirs.by_unit):
        return None
    return _without_samples(ours, left, allowed, is_gradient=is_gradient)


def _reduced_over_units(
    ours: _Units,
    theirs: _Units,
    spans: tuple[_Spans, _Spans],
    common: Difference,
    allowed: float,
) -> Difference | None:
    """Compare what is made of all samples of a batch, such as a loss, where runs split that batch
    unlike: the average over samples, or the sum over units, may be the reference's.

    Returns:
        The difference of the average or the sum; `common` with `is_of_local_batch` where neither is
        the reference's; None where every unit holds the same, or units lack samples.
    """
    ref, test = _weighted(ours, spans[0]), _weighted(theirs, spans[1])
    if ref is None or test is None:
        return None
    (mine, ref_weights), (held, test_weights) = ref, test
    if len(mine) == len(held) == 1 or (_are_equal(mine, allowed) and _are_equal(held, allowed)):
        return None
    for weights in ((ref_weights, test_weights), (np.ones(len(mine)), np.ones(len(held)))):
        a, b = (np.tensordot(w, rows, 1) for w, rows in zip(weights, (mine, held)))
        parts = Parts(Measured.SKETCHES)
        members = [w.members[i] for w, among in theirs.by_unit.values() for i in among]
        parts.put(dots_of(a, b), math.nan, np.unique(np.concatenate(members)), (0, EVERY_PLACE))
        found = parts.finished(ours.first_rows()[:1], theirs.first_rows()[:1])
        if (found.errors() <= SUM_SLACK * allowed).all():
            return found
    common.is_of_local_batch = True
    return common


def _weighted(units: _Units, spans: _Spans) -> tuple[Array, Array] | None:
    """Return [u, K] sketches of what units hold and the part of the samples that each has; None
    where a unit's value is not one, or its samples are not known."""
    rows, sizes = [], []
    for unit, (wholes, among) in units.by_unit.items():
        span = spans.of(unit)
        if len(among) != 1 or span is None or not np.isfinite(wholes.sketches[among[0]]).all():
            return None
        rows.append(wholes.sketches[among[0]])
        sizes.append(span[1])
    return (np.array(rows), np.array(sizes) / sum(sizes)) if sum(sizes) else None


def _are_equal(rows: Array, allowed: float) -> bool:
    apart = np.sqrt(np.mean((rows - rows[0]) ** 2, axis=1)).max()
    return bool(apart <= allowed * max(float(np.sqrt(np.mean(rows[0] ** 2))), TINY))


def _is_cut_in_an_unknown_way(theirs: _Units, common: Difference, allowed: float) -> bool:
    """True where ranks of one place hold plain values that differ, none of them the reference's:
    shards of a whole batch may have as many elements as a part of the batch has."""
    if common.partial:
        return False
    right = {
        unit for unit, error in zip(common.units, common.errors().tolist()) if error <= allowed
    }
    return any(
        unit not in right
        and len(among) > 1
        and not wholes.is_described
        and isinstance(agreed_holder(wholes, among, allowed), str)
        for unit, (wholes, among) in theirs.by_unit.items()
    )


def _without_samples(
    ours: _Units, left: _Units, allowed: float, *, is_gradient: bool
) -> Difference:
    """Compare what does not depend on the batch, such as a table of positions; gradients of it add
    up over all units."""
    parts = Parts(Measured.SKETCHES)
    mine = [(wholes, among[0]) for wholes, among in ours.by_unit.values()]
    ref_rows, test_rows = ours.first_rows(), left.first_rows()
    if is_gradient:
        a = np.sum([wholes.sketches[i] for wholes, i in mine], axis=0)
        b = np.sum([w.sketches[among[0]] for w, among in left.by_unit.values()], axis=0)
        members = [w.members[i] for w, among in left.by_unit.values() for i in among]
        norm = float(ref_rows["l2"][0]) if len(mine) == 1 else math.nan
        parts.put(dots_of(a, b), norm, np.unique(np.concatenate(members)), (0, EVERY_PLACE))
        return parts.finished(ref_rows[:1], test_rows[:1])
    first, own = mine[0]
    for unit, (wholes, among) in left.by_unit.items():
        for index in among:
            parts.add(first, own, wholes, index, unit)
        if len(among) > 1 and not wholes.is_described:
            parts.try_sum(first, own, wholes, among, allowed)
    return parts.finished(ref_rows[:1], test_rows[:1])
