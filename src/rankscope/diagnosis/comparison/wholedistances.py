"""How far the wholes of the test lie from the reference's, by digests: parameters and gradients as
they are; what belongs to batches unit by unit where both runs cut the batch alike, sample by sample
where they do not, by statistics where no samples were kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from rankscope.diagnosis.comparison.datasamples import Batches, StepSamples, Unit
from rankscope.diagnosis.comparison.difference import TINY, Difference, Measured, Totals, dots_of
from rankscope.diagnosis.comparison.wholevalues import EVERY_PLACE, Wholes
from rankscope.diagnosis.evidence.stepview import Array
from rankscope.record.phases import Phase
from rankscope.record.statistics import NONFINITE

_SUM_SLACK: Final = 3.0
"""A sum or an average of several values may be so many times further off than one value."""

Units = dict[Unit, tuple[Wholes, list[int]]]
"""Wholes of one slot in all micro-batches of a step, by unit: which of those of its call it has."""


def compare_wholes(
    ref: Mapping[int, Wholes],
    test: Mapping[int, Wholes],
    batches: Batches | None,
    allowed: float,
    phase: Phase,
) -> Difference | str:
    """Return the difference of one slot, or why nothing can be said.

    Args:
        ref: the reference's wholes by micro-batch; `test` are the test's.
        batches: who worked on which samples; None for what all data-parallel ranks have in common,
            which is in every micro-batch.
        allowed: relative distance that counts as none, and that replicas of the reference may have.
        phase: gradients of what has no samples add up over units.
    """
    if batches is None:
        ref, test = ({0: side[min(side)]} for side in (ref, test))
    refs, tests = units_of(ref), units_of(test)
    for unit, (wholes, among) in refs.items():
        holder = _agreed_holder(wholes, among, allowed)
        if isinstance(holder, str):
            return holder
        refs[unit] = (wholes, [holder])
    counts = _counts(refs)
    first = next(iter(tests.values()))[0]
    if batches is None or (batches.are_the_same and refs.keys() == tests.keys()):
        fitting = _of_size(tests, counts)
        if fitting:
            may_add_up = phase not in (Phase.SETUP, Phase.PARAMS)  # nothing reduces those later
            parts = _held_to(refs, fitting, allowed, may_add_up=may_add_up)
            return difference_of(
                parts, _first_rows({unit: refs[unit] for unit in fitting}), _first_rows(fitting)
            )
        if batches is None:
            return _other_size(first)
    is_gradient = phase is Phase.BACKWARD
    common = _without_samples(refs, tests, allowed, is_gradient=is_gradient)
    if common is not None and (common.errors() <= allowed).all():
        return common  # a table of positions may have as many rows as there are samples
    if common is not None and not is_gradient:
        reduced = _reduced_over_units(refs, tests, batches, common, allowed)
        if reduced is not None:
            return reduced
    # the elements that a sample has, where all units have equally many for each
    ref_sizes = {unit: batches.ref.span(unit)[1] for unit in counts}
    has_samples = batches.is_known and all(ref_sizes.values()) and _has_all(batches.ref, counts)
    ratios = {count / ref_sizes[unit] for unit, count in counts.items()} if has_samples else set()
    if len(ratios) == 1:
        ratio = ratios.pop()
        sizes = {unit: batches.test.span(unit)[1] for unit in tests}
        fitting = _of_size(tests, {u: round(ratio * size) for u, size in sizes.items() if size})
        if fitting and _has_all(batches.test, fitting):
            by_sample = _sample_by_sample(refs, fitting, batches, allowed)
            least = None if isinstance(by_sample, str) else by_sample.at_least
            if not is_gradient or least is None or np.isinf(least).any():  # NaN is so at any scale
                return by_sample
            # averages over ranks or micro-batches scale it, and statistics do not tell by how much
            return "gradients of other batches, and no sketches of single samples"
    if common is not None:
        is_cut = _is_cut_in_an_unknown_way(tests, common, allowed)
        return "layout unknown" if is_cut else common
    return _other_size(first)


def _other_size(test: Wholes) -> str:
    if test.is_described or len(test) == 1:
        return "of another size than the reference's"
    return "layout unknown"


def _agreed_holder(wholes: Wholes, among: Sequence[int], allowed: float) -> int | str:
    """Return one of several wholes that are the same within rounding, or why there is no such."""
    first = among[0]
    for index in among[1:]:
        a, b = wholes.sketches[first], wholes.sketches[index]
        distance = float(np.sqrt(np.mean((a - b) ** 2)))
        if math.isnan(distance):
            return "no sketches tell whether the reference's ranks hold the same"
        if distance > allowed * max(float(wholes.rows["l2"][first]), TINY):
            return "the reference's ranks hold different values"
    return first


# ---- units ---------------------------------------------------------------------------------------


def units_of(by_micro_batch: Mapping[int, Wholes]) -> Units:
    """Return the wholes of a slot by unit."""
    units: Units = {}
    for micro_batch, wholes in sorted(by_micro_batch.items()):
        for index, place in enumerate(wholes.places.tolist()):
            units.setdefault((micro_batch, place), (wholes, []))[1].append(index)
    return units


def _of_size(units: Units, count_of: Mapping[Unit, int]) -> Units:
    """Return the wholes with as many elements as `count_of` says for their unit."""
    fitting: Units = {}
    for unit, (wholes, among) in units.items():
        indices = [i for i in among if wholes.counts[i] == count_of.get(unit)]
        if indices:
            fitting[unit] = (wholes, indices)
    return fitting


def _first_rows(units: Units) -> Array:
    """Return the row of one whole of each unit: those of one call are taken at once."""
    at: dict[int, tuple[Wholes, list[int]]] = {}
    for wholes, among in units.values():
        at.setdefault(id(wholes), (wholes, []))[1].append(among[0])
    return np.concatenate([wholes.rows[indices] for wholes, indices in at.values()])


def _counts(units: Units) -> dict[Unit, int]:
    return {unit: wholes.counts[among[0]] for unit, (wholes, among) in units.items()}


def _members(units: Units) -> Array:
    members = [wholes.members[i] for wholes, among in units.values() for i in among]
    return np.unique(np.concatenate(members))


# ---- parts ---------------------------------------------------------------------------------------


class HeldPart(NamedTuple):
    """One part of a difference: what of the test is held to what of the reference."""

    dots: Array
    norm: float
    """NaN where only sketches tell it, as of a partial."""
    members: Array
    unit: Unit
    is_exact: bool = False
    is_sketched: bool = True
    """False where only statistics tell how far it is off."""
    at_least: float = math.nan
    rows: tuple[Array, Array] | None = None
    """Digests of both sides."""
    test_row: Array | None = None
    """The test's digest alone."""
    partial: str = ""

    @property
    def length(self) -> float:
        """Norm of the reference's part."""
        return self.norm if math.isfinite(self.norm) else math.sqrt(max(self.dots[1], 0.0))


def held_part(ref: Wholes, at: int, test: Wholes, index: int, unit: Unit) -> HeldPart:
    """Hold one whole of the test to one of the reference."""
    row, test_row = ref.rows[at], test.rows[index]
    is_exact = bool(ref.is_hashed[at] and test.is_hashed[index] and row["hash"] == test_row["hash"])
    a, b = ref.sketches[at], test.sketches[index]
    is_sketched, least = True, math.nan
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        is_sketched = is_exact
        if not is_exact:
            least = Totals.of(test_row[None]).least_distance(Totals.of(row[None]))
        if is_exact or not math.isnan(least):
            a = b = np.zeros(len(a))
    return HeldPart(
        dots_of(a, b), float(row["l2"]), test.members[index], unit,
        is_exact=is_exact, is_sketched=is_sketched, at_least=least, rows=(row, test_row),
        test_row=test_row,
    )  # fmt: skip


def _held_to(
    partners: Units, units: Units, allowed: float, *, may_add_up: bool = True
) -> list[HeldPart]:
    """Hold the wholes of each unit to the reference's; plain ones may be undeclared summands."""
    all_parts = []
    for unit, (wholes, among) in units.items():
        refs, (at,) = partners[unit]
        parts = [held_part(refs, at, wholes, index, unit) for index in among]
        if len(among) > 1 and not wholes.is_described and may_add_up:
            weights = np.array([len(wholes.members[i]) for i in among])[:, None]
            dots = dots_of(refs.sketches[at], (wholes.sketches[among] * weights).sum(0))
            parts = _or_their_sum(parts, dots, float(refs.rows["l2"][at]), allowed)
        all_parts += parts
    return all_parts


def _or_their_sum(
    parts: list[HeldPart], dots: Array, norm: float, allowed: float
) -> list[HeldPart]:
    """Return parts of a unit, as one where `dots` of their sum say that it, or their average, is
    right, and none of them is by itself."""
    for part in parts:
        cross, ref_square, test_square = part.dots.tolist()
        distance = math.sqrt(max(test_square - 2 * cross + ref_square, 0.0))
        if part.is_exact or distance <= allowed * part.length:
            return parts
    members = np.unique(np.concatenate([part.members for part in parts]))
    cross, ref_square, test_square = dots.tolist()
    for op, count in (("sum", 1), ("avg", len(members))):
        distance = math.sqrt(
            max(test_square / count**2 - 2 * cross / count + ref_square, 0.0)
        ) / max(norm, TINY)
        if distance <= _SUM_SLACK * allowed:  # where sketches are missing it is NaN
            reduced = np.array([cross / count, ref_square, test_square / count**2])
            return [HeldPart(reduced, norm, members, parts[0].unit, partial=op)]
    return parts


def difference_of(
    parts: Sequence[HeldPart], ref: Array, test: Array, measured: str = Measured.SKETCHES
) -> Difference:
    """Return the difference that has these parts. `ref` are the rows of the reference's values,
    `test` those of the test's, one for each part that is no replica of another."""
    difference = Difference(
        dots=np.array([part.dots for part in parts]),
        norms=np.array([part.length for part in parts]),
        members=[part.members for part in parts],
        units=[part.unit for part in parts],
        is_exact=np.array([part.is_exact for part in parts]),
        measured=measured,
        ref=Totals.of(ref),
        test=Totals.of(test),
        partial=next((part.partial for part in reversed(parts) if part.partial), ""),
        rows=[part.rows for part in parts],
        test_rows=[part.test_row for part in parts],
    )
    if not all(part.is_sketched for part in parts):
        difference.measured = Measured.STATISTICS
        difference.at_least = np.array([part.at_least for part in parts])
    elif difference.is_exact.all():
        difference.measured = Measured.BYTES
    return difference


# ---- samples -------------------------------------------------------------------------------------


def _has_all(samples: StepSamples, units: Iterable[Unit]) -> bool:
    return sum(samples.span(unit)[1] for unit in units) == samples.total


def _sample_by_sample(
    refs: Units, tests: Units, batches: Batches, allowed: float
) -> Difference | str:
    matrix = _sample_matrix(refs, batches.ref)
    listed = [wholes.samples[i] for wholes, among in tests.values() for i in among]
    sketches = [rows for rows in listed if rows is not None and np.isfinite(rows).all()]
    places = [batches.test.span(unit) for unit, (_, among) in tests.items() for _ in among]
    if matrix is None or not np.isfinite(matrix).all() or len(sketches) < len(listed):
        return _by_statistics(refs, tests, batches)  # as of a mask of a dtype's least number
    sizes = np.array([len(rows) for rows in sketches])
    if (sizes != [count * matrix.shape[1] for _, count in places]).any():
        return _by_statistics(refs, tests, batches)
    partner = np.concatenate([batches.partner[at : at + count] for at, count in places])
    is_known = np.repeat(partner >= 0, matrix.shape[1])[:, None]
    a = np.where(is_known, matrix[partner].reshape(-1, matrix.shape[2]), 0.0)
    b = np.where(is_known, np.concatenate(sketches), 0.0).astype(np.float64)
    ends = np.cumsum(sizes)
    starts = ends - sizes
    has_known = np.logical_or.reduceat(is_known[:, 0], starts)
    if not has_known.any():
        return "samples that the reference has not"
    products = np.stack([(a * b).sum(1), (a * a).sum(1), (b * b).sum(1)], axis=1)
    dots = np.add.reduceat(products / matrix.shape[2], starts, axis=0)
    all_parts: list[HeldPart] = []
    at = 0
    for unit, (wholes, among) in tests.items():
        parts = []
        for index in among:
            sample_dots, norm = dots[at], math.nan
            if has_known[at]:
                # the norm of the test's part is known, sketches tell its ratio to the reference's
                _, ref_square, test_square = sample_dots.tolist()
                length, norm = float(wholes.rows["l2"][index]), math.sqrt(max(ref_square, 0.0))
                if test_square > 0 and ref_square > 0 and math.isfinite(length) and length > 0:
                    norm = length * math.sqrt(ref_square / test_square)
            else:  # nothing of the reference belongs to it
                square = float(np.square(wholes.sketches[index]).mean())
                sample_dots = np.array([0.0, square, square])
            row = wholes.rows[index]
            parts.append(HeldPart(sample_dots, norm, wholes.members[index], unit, test_row=row))
            at += 1
        if len(among) > 1 and not wholes.is_described and has_known[at - 1]:
            rows = [slice(starts[i], ends[i]) for i in range(at - len(among), at)]
            summands = [b[span] * len(part.members) for span, part in zip(rows, parts)]
            sum_dots = dots_of(a[rows[0]], np.sum(summands, axis=0))
            parts = _or_their_sum(parts, sum_dots, math.sqrt(max(float(sum_dots[1]), 0.0)), allowed)
        all_parts += parts
    return difference_of(all_parts, _first_rows(refs), _first_rows(tests), Measured.SAMPLES)


def _sample_matrix(units: Units, samples: StepSamples) -> Array | None:
    """Return [samples, rows of each, K] of the reference."""
    matrix: Array | None = None
    for unit, (wholes, among) in units.items():
        sketches, (start, size) = wholes.samples[among[0]], samples.span(unit)
        if sketches is None or not size or len(sketches) % size:
            return None
        rows_per_sample = len(sketches) // size
        if matrix is None:
            matrix = np.zeros((samples.total, rows_per_sample, sketches.shape[1]))
        if matrix.shape[1] != rows_per_sample:
            return None
        matrix[start : start + size] = sketches.reshape(size, rows_per_sample, -1)
    return matrix


def _by_statistics(refs: Units, tests: Units, batches: Batches) -> Difference | str:
    """Compare what batches hold together, where their samples were not sketched."""
    if batches.are_of_other_samples:
        return "other samples, and no sketches of single ones"
    ref, test = _first_rows(refs), _first_rows(tests)
    total = Totals.of(ref)
    if not math.isfinite(total.l2):
        return "neither sketches of samples nor statistics"
    least = Totals.of(test).least_distance(total)
    part = HeldPart(np.zeros(3), total.l2, _members(tests), (0, EVERY_PLACE))
    return difference_of([part._replace(is_sketched=False, at_least=least)], ref, test)


def _reduced_over_units(
    refs: Units, tests: Units, batches: Batches, common: Difference, allowed: float
) -> Difference | None:
    """Compare what is made of all samples of a batch, such as a loss, where runs split that batch
    unlike: by the average over samples or the sum over units, where one is the reference's, else
    `common` with `is_of_local_batch`. None where every unit holds the same, or units lack
    samples."""
    ref, test = _weighted(refs, batches.ref), _weighted(tests, batches.test)
    if ref is None or test is None:
        return None
    (ref_rows, ref_weights), (test_rows, test_weights) = ref, test
    if len(ref_rows) == len(test_rows) == 1 or (
        _are_equal(ref_rows, allowed) and _are_equal(test_rows, allowed)
    ):
        return None
    for weights in ((ref_weights, test_weights), (np.ones(len(ref_rows)), np.ones(len(test_rows)))):
        a, b = (np.tensordot(w, rows, 1) for w, rows in zip(weights, (ref_rows, test_rows)))
        part = HeldPart(dots_of(a, b), math.nan, _members(tests), (0, EVERY_PLACE))
        difference = difference_of([part], _first_rows(refs)[:1], _first_rows(tests)[:1])
        if (difference.errors() <= _SUM_SLACK * allowed).all():
            return difference
    common.is_of_local_batch = True
    return common


def _weighted(units: Units, samples: StepSamples) -> tuple[Array, Array] | None:
    """Return the sketches of what units hold, [u, K], and the part of the samples that each has;
    None where a unit does not hold one finite value, or its samples are not known."""
    rows, sizes = [], []
    for unit, (wholes, among) in units.items():
        _, size = samples.span(unit)
        is_finite = np.isfinite(wholes.sketches[among[0]]).all()
        is_finite &= not any(wholes.rows[name][among[0]] for name in NONFINITE)
        if len(among) != 1 or not size or not is_finite:
            return None
        rows.append(wholes.sketches[among[0]])
        sizes.append(size)
    return np.array(rows), np.array(sizes) / sum(sizes)


def _are_equal(rows: Array, allowed: float) -> bool:
    distance = np.sqrt(np.mean((rows - rows[0]) ** 2, axis=1)).max()
    return bool(distance <= allowed * max(float(np.sqrt(np.mean(rows[0] ** 2))), TINY))


def _is_cut_in_an_unknown_way(units: Units, common: Difference, allowed: float) -> bool:
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
        and isinstance(_agreed_holder(wholes, among, allowed), str)
        for unit, (wholes, among) in units.items()
    )


def _without_samples(
    refs: Units, tests: Units, allowed: float, *, is_gradient: bool
) -> Difference | None:
    """Compare what does not depend on the batch, such as a table of positions, every unit with the
    reference's; gradients of it add up over all units. None where not all have as many elements."""
    sizes = set(_counts(refs).values())
    if len(sizes) != 1:
        return None
    fitting = _of_size(tests, dict.fromkeys(tests, sizes.pop()))
    if len(fitting) != len(tests):
        return None
    ref_rows, test_rows = _first_rows(refs)[:1], _first_rows(fitting)
    nonfinite = np.sum([test_rows[name] for name in NONFINITE], axis=0)
    test_rows = test_rows[[int(nonfinite.argmax())]]  # the first where all is finite
    if not is_gradient:
        partners = dict.fromkeys(fitting, next(iter(refs.values())))
        return difference_of(_held_to(partners, fitting, allowed), ref_rows, test_rows)
    a, b = (
        np.sum([wholes.sketches[among[0]] for wholes, among in side.values()], axis=0)
        for side in (refs, fitting)
    )
    norm = float(ref_rows["l2"][0]) if len(refs) == 1 else math.nan
    part = HeldPart(dots_of(a, b), norm, _members(fitting), (0, EVERY_PLACE))
    return difference_of([part], ref_rows, test_rows)
