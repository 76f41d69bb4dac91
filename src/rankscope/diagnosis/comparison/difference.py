"""How far a value of the test lies from the reference's, from digests alone.

For a value a of the reference and b of the test the sketches give three numbers, each the mean
over the K projections: <a, b>, |a|^2 and |b|^2. From them follow the distance of b / s from a for
any factor s, the factor that fits best, and what it leaves (the residual).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rankscope.diagnosis.comparison.datasamples import SampleMatch, StepSamples
from rankscope.diagnosis.comparison.wholevalues import EVERY_PLACE, Wholes
from rankscope.record.statistics import NONFINITE

__all__ = [
    "CHI_SQUARE_RANGE",
    "Batches",
    "Difference",
    "Measured",
    "Totals",
    "compare_batched",
    "compare_common",
]

Array = NDArray[Any]
Unit = tuple[int, int]
CHI_SQUARE_RANGE: Final = (0.68, 1.92)
"""A distance estimated from 8 projections times these is its 95 % range: the square of the estimate
is distributed as chi-square with 8 degrees of freedom over 8."""
_TINY: Final = 1e-300
_SAME_NUMBERS: Final = 1e-5
"""Relative difference of statistics that are those of the same elements in another order."""
_PARTIAL_SLACK: Final = 3.0
"""A sum of partial values may be so many times further off than one value."""


class Measured:
    """Words for what a distance was taken from."""

    BYTES: Final = "bytes"
    SKETCHES: Final = "sketches"
    SAMPLES: Final = "sketches of samples"
    STATISTICS: Final = "statistics"
    """Norms, means and extrema alone: the distance is at least so large."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """What is known of all elements of a value together."""

    count: int
    nonfinite: tuple[int, ...]
    """NaN, +inf, -inf."""
    l2: float
    mean: float
    least: float
    greatest: float

    @classmethod
    def of(cls, rows: Array) -> Totals:
        """Return the totals of several parts (structured rows, one each)."""
        counts = rows["count"].astype(np.float64)
        total = float(counts.sum())
        return cls(
            count=int(total),
            nonfinite=tuple(int(rows[name].sum()) for name in NONFINITE),
            l2=float(np.sqrt((rows["l2"] ** 2).sum())),
            mean=float((rows["mean"] * counts).sum() / total) if total else math.nan,
            least=float(rows["min"].min()),
            greatest=float(rows["max"].max()),
        )

    def has_numbers_of(self, other: Totals) -> bool:
        """True where norm, mean and extrema are those of the same elements in some order."""
        size = max(abs(other.least), abs(other.greatest), _TINY)
        return (
            math.isfinite(self.l2)
            and abs(self.l2 - other.l2) <= _SAME_NUMBERS * other.l2
            and abs(self.mean - other.mean) <= _SAME_NUMBERS * size
            and abs(self.least - other.least) <= _SAME_NUMBERS * size
            and abs(self.greatest - other.greatest) <= _SAME_NUMBERS * size
        )


@dataclass(slots=True, eq=False, kw_only=True)
class Difference:
    """One value of the test beside the reference's, in parts: what single ranks or units hold."""

    dots: Array
    """[p, 3] <a, b>, |a|^2 and |b|^2 of every part."""
    norms: Array
    """[p] L2 norm of the reference's part."""
    members: list[Array]
    """Ranks of the test that hold each part."""
    units: list[Unit]
    is_exact: Array
    """[p] True where a part is bitwise the reference's."""
    measured: str
    """One of `Measured`."""
    ref: Totals
    test: Totals
    at_least: Array | None = None
    """[p] relative distances that follow from statistics, where there are no sketches."""
    partial: str = ""
    """"sum" or "avg" where that of what ranks hold is the reference's value, though nothing says
    so; "" where not."""
    ref_rows: list[Array | None] = field(default_factory=list)
    """[p] digests of the reference's parts, None where only all parts together are known."""
    test_rows: list[Array | None] = field(default_factory=list)
    others: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    """Ranks whose values could not be held to the reference."""

    def is_permuted(self, chosen: Array) -> bool:
        """True where the chosen parts have the reference's norm, mean and extrema."""
        pairs = [
            (a, b) for a, b, is_in in zip(self.ref_rows, self.test_rows, chosen.tolist()) if is_in
        ]
        if pairs and all(a is not None and b is not None for a, b in pairs):
            return all(
                Totals.of(b[None]).has_numbers_of(Totals.of(a[None]))
                for a, b in pairs
                if a is not None and b is not None
            )
        return bool(chosen.all()) and self.test.has_numbers_of(self.ref)

    @property
    def has_other_nonfinite(self) -> bool:
        """True where other numbers of elements are NaN or infinite."""
        return self.ref.nonfinite != self.test.nonfinite

    def errors(self, scales: Array | float = 1.0, floor: float = 0.0) -> Array:
        """Return [p] relative L2 distances of the parts, after division by `scales`.

        Args:
            scales: factor of each part, or of all.
            floor: least norm that a distance is taken relative to.
        """
        if self.at_least is not None:
            return self.at_least
        if self.has_other_nonfinite:
            return np.full(len(self.norms), np.inf)
        cross, own, theirs = self.dots.T
        apart = np.sqrt(np.maximum(theirs / np.square(scales) - 2 * cross / scales + own, 0.0))
        norms = np.maximum(self.norms, floor)
        zero = np.where(apart > 0, np.inf, 0.0)
        found = np.divide(apart, norms, out=zero, where=norms > 0)
        judged: Array = np.where(self.is_exact & (np.asarray(scales) == 1.0), 0.0, found)
        return judged

    def fit(self) -> tuple[float, float]:
        """Return the factor that fits all parts best, and the relative distance it leaves."""
        return _fit(self.dots.sum(0), float(np.sqrt((self.norms**2).sum())))

    def fits(self) -> Array:
        """Return [p, 2] factor and residual of every part."""
        return np.array([_fit(d, n) for d, n in zip(self.dots, self.norms.tolist())])

    def ranks(self, chosen: Array) -> Array:
        """Return the ranks that hold the chosen parts, sorted."""
        listed = [m for m, is_in in zip(self.members, chosen.tolist()) if is_in]
        return np.unique(np.concatenate(listed)) if listed else np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """The batches of one step on both sides."""

    ref: StepSamples
    test: StepSamples
    match: SampleMatch

    @property
    def are_the_same(self) -> bool:
        """True where every unit of the test works on the samples of the reference's unit of that
        number, in that order."""
        same = self.ref.sizes == self.test.sizes
        if self.ref.keys is None or self.test.keys is None:
            same = (self.ref.micro_batches, self.ref.place_count) == (
                self.test.micro_batches,
                self.test.place_count,
            )
        return same and self.match.is_in_order


def _fit(dots: Array, norm: float) -> tuple[float, float]:
    cross, own, theirs = dots.tolist()
    if own <= 0 or norm <= 0:
        return math.nan, math.inf
    factor = cross / own
    rest = math.sqrt(max(theirs - cross * cross / own, 0.0))
    return factor, rest / (max(abs(factor), _TINY) * norm)


def _dots(a: Array, b: Array) -> Array:
    """Return <a, b>, |a|^2, |b|^2 over [n, K] sketches, mean over K."""
    found: Array = np.array([(a * b).sum(), (a * a).sum(), (b * b).sum()]) / a.shape[-1]
    return found


# ---- what all data-parallel ranks have in common -------------------------------------------------


def compare_common(
    ref: Wholes, test: Wholes, allowed: float, *, is_summed_later: bool
) -> Difference | str:
    """Compare parameters, buffers or final gradients.

    Args:
        ref: the reference's wholes.
        test: the test's.
        allowed: relative distance that replicas of the reference may have.
        is_summed_later: ranks may hold summands that nothing declares.

    Returns:
        The difference, or why nothing can be said.
    """
    own = _agreed(ref, range(len(ref)), allowed)
    if own is None:
        return "the reference's ranks hold different values"
    alike = [i for i in range(len(test)) if test.counts[i] == ref.counts[own]]
    if not alike:
        return _other_size(ref, test)
    parts = _Parts(Measured.SKETCHES)
    for index in alike:
        parts.add(ref, own, test, index, (0, 0))
    if len(alike) > 1 and not test.is_described and is_summed_later:
        parts.try_sum(ref, own, test, alike, allowed)
    others = [test.members[i] for i in range(len(test)) if i not in alike]
    return parts.finished(ref.rows[[own]], test.rows[alike[:1]], others)


def _other_size(ref: Wholes, test: Wholes) -> str:
    if test.is_described or len(test) == 1:
        return "of another size than the reference's"
    return "layout unknown"


def _agreed(wholes: Wholes, among: Sequence[int], allowed: float) -> int | None:
    """Return one of several wholes that are the same within rounding; None where they are not."""
    first = among[0]
    for other in among[1:]:
        a, b = wholes.sketches[first], wholes.sketches[other]
        apart = float(np.sqrt(np.mean((a - b) ** 2)))
        if not apart <= allowed * max(float(wholes.rows["l2"][first]), _TINY):
            return None
    return first


class _Parts:
    """Collects the parts of a difference."""

    def __init__(self, measured: str) -> None:
        self._measured = measured
        self._dots: list[Array] = []
        self._norms: list[float] = []
        self._members: list[Array] = []
        self._units: list[Unit] = []
        self._exact: list[bool] = []
        self._least: list[float] = []
        self._rows: list[tuple[Array | None, Array | None]] = []
        self._partial = ""

    def add(self, ref: Wholes, own: int, test: Wholes, index: int, unit: Unit) -> None:
        """Hold one whole of the test to one of the reference."""
        row, other = ref.rows[own], test.rows[index]
        is_exact = bool(
            ref.is_hashed[own] and test.is_hashed[index] and row["hash"] == other["hash"]
        )
        a, b = ref.sketches[own], test.sketches[index]
        if not is_exact and not (np.isfinite(a).all() and np.isfinite(b).all()):
            self._measured = Measured.STATISTICS
            self._least.append(_least(Totals.of(row[None]), Totals.of(other[None])))
            a = b = np.zeros(len(a))
        else:
            self._least.append(0.0)
        rows = (row, other)
        self.put(_dots(a, b), float(row["l2"]), test.members[index], unit, is_exact, rows)

    def put(
        self,
        dots: Array,
        norm: float,
        members: Array,
        unit: Unit,
        is_exact: bool = False,
        rows: tuple[Array | None, Array | None] = (None, None),
    ) -> None:
        """Add one part."""
        self._rows.append(rows)
        if not math.isfinite(norm):  # of a partial: only its sketch is known
            norm = math.sqrt(max(float(dots[1]), 0.0))
        self._dots.append(dots)
        self._norms.append(norm)
        self._members.append(members)
        self._units.append(unit)
        self._exact.append(is_exact)

    def try_sum(
        self, ref: Wholes, own: int, test: Wholes, among: Sequence[int], allowed: float
    ) -> None:
        """Take the last parts as one where their sum is what the reference holds."""
        weights = np.array([len(test.members[i]) for i in among])[:, None]
        summed = (test.sketches[list(among)] * weights).sum(0)
        self.replace_by_sum(
            len(among), _dots(ref.sketches[own], summed), float(ref.rows["l2"][own]), allowed
        )

    def replace_by_sum(self, count: int, dots: Array, norm: float, allowed: float) -> None:
        """Take the last `count` parts as one where `dots` of their sum say that it is right and
        none of them is by itself."""
        one = self._difference(slice(-count, None))
        if (one.errors() <= allowed).any():
            return
        members = np.unique(np.concatenate(self._members[-count:]))
        cross, own, theirs = dots.tolist()
        for op, parts in (("sum", 1), ("avg", len(members))):
            square = theirs / parts**2 - 2 * cross / parts + own
            apart = math.sqrt(max(square, 0.0)) / max(norm, _TINY)
            if apart > _PARTIAL_SLACK * allowed:
                continue
            unit = self._units[-1]
            for kept in (
                self._dots, self._norms, self._members, self._units, self._exact, self._least,
                self._rows,
            ):  # fmt: skip
                del kept[-count:]
            reduced = np.array([cross / parts, own, theirs / parts**2])
            self._least.append(0.0)
            self.put(reduced, norm, members, unit)
            self._partial = op
            return

    def _difference(self, which: slice) -> Difference:
        nothing = Totals(count=0, nonfinite=(), l2=0.0, mean=0.0, least=0.0, greatest=0.0)
        return Difference(
            dots=np.array(self._dots[which]),
            norms=np.array(self._norms[which]),
            members=self._members[which],
            units=self._units[which],
            is_exact=np.array(self._exact[which]),
            measured=self._measured,
            ref=nothing,
            test=nothing,
        )

    def finished(self, ref: Array, test: Array, others: Sequence[Array] = ()) -> Difference:
        """Return the difference.

        Args:
            ref: rows of the reference's values.
            test: rows of the test's, one for each part that is no replica of another.
            others: ranks whose values could not be held to the reference.
        """
        found = self._difference(slice(None))
        found.ref, found.test = Totals.of(ref), Totals.of(test)
        found.partial = self._partial
        found.ref_rows = [a for a, _ in self._rows]
        found.test_rows = [b for _, b in self._rows]
        if self._measured == Measured.STATISTICS:
            found.at_least = np.array(self._least)
        elif found.is_exact.all():
            found.measured = Measured.BYTES
        if others:
            found.others = np.unique(np.concatenate(list(others)))
        return found


def _least(ref: Totals, test: Totals) -> float:
    """Return a relative distance that two values have at least, from their statistics."""
    if ref.nonfinite != test.nonfinite:
        return math.inf
    norm = max(ref.l2, _TINY)
    found = [abs(test.l2 - ref.l2) / norm]
    found.append(abs(test.mean - ref.mean) * math.sqrt(ref.count) / norm)
    found += [abs(a - b) / norm for a, b in ((ref.least, test.least),)]
    found += [abs(ref.greatest - test.greatest) / norm]
    return max((each for each in found if math.isfinite(each)), default=0.0)


# ---- what belongs to batches ---------------------------------------------------------------------


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
        own = _agreed(wholes, among, allowed)
        if own is None:
            return "the reference's ranks hold different values"
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
    per_sample = spans[0].per_sample(counts)
    if per_sample is not None:
        left = theirs.only(spans[1].counts(theirs.by_unit, per_sample))
        if left.by_unit and spans[1].covers(left.by_unit):
            return _sample_by_sample(ours, left, batches, spans, allowed)
    if common is not None:
        return common
    first = next(iter(theirs.by_unit.values()))[0]
    return _other_size(next(iter(ours.by_unit.values()))[0], first)


def _unit_by_unit(ours: _Units, left: _Units, every: _Units, allowed: float) -> Difference:
    parts = _Parts(Measured.SKETCHES)
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
    if mine is None or not all(
        wholes.samples[i] is not None for wholes, among in left.by_unit.values() for i in among
    ):
        return _by_statistics(ours, left, batches)
    rows_of_each = mine.shape[1]
    at_once = _all_samples_at_once(ours, left, batches, spans[1], mine)
    if at_once is not None:
        return at_once
    parts = _Parts(Measured.SAMPLES)
    for unit, (wholes, among) in left.by_unit.items():
        span = spans[1].of(unit)
        assert span is not None
        partner = batches.match.partner[span[0] : span[0] + span[1]]
        known = partner >= 0
        if not known.any():
            return "samples that the reference has not"
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
            dots = _dots(a, b)
            parts.put(dots, _norm(dots, wholes.rows[index]), wholes.members[index], unit)
        if len(among) > 1 and not wholes.is_described:
            whole = _dots(a, summed)
            parts.replace_by_sum(len(among), whole, math.sqrt(max(float(whole[1]), 0.0)), allowed)
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
        at_least=np.array([_least(*totals)]),
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


def _without_samples(
    ours: _Units, left: _Units, allowed: float, *, is_gradient: bool
) -> Difference:
    """Compare what does not depend on the batch, such as a table of positions; gradients of it add
    up over all units."""
    parts = _Parts(Measured.SKETCHES)
    mine = [(wholes, among[0]) for wholes, among in ours.by_unit.values()]
    ref_rows, test_rows = ours.first_rows(), left.first_rows()
    if is_gradient:
        a = np.sum([wholes.sketches[i] for wholes, i in mine], axis=0)
        b = np.sum([w.sketches[among[0]] for w, among in left.by_unit.values()], axis=0)
        members = [w.members[i] for w, among in left.by_unit.values() for i in among]
        norm = float(ref_rows["l2"][0]) if len(mine) == 1 else math.nan
        parts.put(_dots(a, b), norm, np.unique(np.concatenate(members)), (0, EVERY_PLACE))
        return parts.finished(ref_rows[:1], test_rows[:1])
    first, own = mine[0]
    for unit, (wholes, among) in left.by_unit.items():
        for index in among:
            parts.add(first, own, wholes, index, unit)
        if len(among) > 1 and not wholes.is_described:
            parts.try_sum(first, own, wholes, among, allowed)
    return parts.finished(ref_rows[:1], test_rows[:1])
