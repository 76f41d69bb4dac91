"""How far a value of the test lies from the reference's, from digests alone.

For a value a of the reference and b of the test the sketches give three numbers, each the mean
over the K projections: <a, b>, |a|^2 and |b|^2. From them follow the distance of b / s from a for
any factor s, the factor that fits best, and what it leaves (the residual).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from rankscope.diagnosis.comparison.alignment import AlignedValue, SlotKey
from rankscope.diagnosis.comparison.datasamples import Unit
from rankscope.diagnosis.evidence.distances import rounding_of
from rankscope.diagnosis.evidence.stepview import Array
from rankscope.record.phases import Phase
from rankscope.record.sketchfactors import factors
from rankscope.record.statistics import NONFINITE
from rankscope.record.value import SKETCH_SIZE

CHI_SQUARE_RANGE: Final = (0.68, 1.92)
"""A distance estimated from 8 projections times these is its 95 % range: the square of the estimate
is distributed as chi-square with 8 degrees of freedom over 8."""
TINY: Final = 1e-300
_CLEAR_OFFSET: Final = 1e-5
"""Relative distance from which the means of both sides tell an offset: they are rounded too."""
_SAME_NUMBERS: Final = 1e-5
"""Relative difference of statistics that are those of the same elements in another order."""


class Measured:
    """Words for what a distance was taken from."""

    BYTES: Final = "bytes"
    SKETCHES: Final = "sketches"
    SAMPLES: Final = "sketches of samples"
    TENSORS: Final = "full tensors"
    STATISTICS: Final = "statistics"
    """Norms, means and extrema alone: the distance is at least so large."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Numbers over all elements of a value."""

    count: int
    nonfinite: tuple[int, ...]
    """NaN, +inf, -inf; () where that is not known, as of summands that are reduced later."""
    l2: float
    mean: float
    least: float
    greatest: float

    @classmethod
    def of(cls, rows: Array) -> Totals:
        """Return the totals of several parts (structured rows, one each)."""
        counts = rows["count"].astype(np.float64)
        total = float(counts.sum())
        names = () if np.isnan(rows["l2"]).any() else NONFINITE
        return cls(
            count=int(total),
            nonfinite=tuple(int(rows[name].sum()) for name in names),
            l2=float(np.sqrt((rows["l2"] ** 2).sum())),
            mean=float((rows["mean"] * counts).sum() / total) if total else math.nan,
            least=float(rows["min"].min()),
            greatest=float(rows["max"].max()),
        )

    @property
    def variance(self) -> float:
        """Of the elements, divisor n."""
        return max(self.l2**2 / self.count - self.mean**2, 0.0) if self.count else math.nan

    def has_numbers_of(self, totals: Totals) -> bool:
        """True where norm, mean and extrema are those of the same elements in some order."""
        size = max(abs(totals.least), abs(totals.greatest), TINY)
        elements = (
            (self.mean, totals.mean),
            (self.least, totals.least),
            (self.greatest, totals.greatest),
        )
        is_as_long = abs(self.l2 - totals.l2) <= _SAME_NUMBERS * totals.l2
        is_like = all(abs(a - b) <= _SAME_NUMBERS * size for a, b in elements)
        return math.isfinite(self.l2) and is_as_long and is_like

    def least_distance(self, ref: Totals, scale: float = 1.0) -> float:
        """Return the least relative distance from `ref` that statistics show, after division by a
        factor; NaN where they show none."""
        if self.nonfinite and ref.nonfinite and self.nonfinite != ref.nonfinite:
            return math.inf
        extrema = sorted((self.least / scale, self.greatest / scale))
        gaps = (
            abs(self.l2 / abs(scale) - ref.l2),
            abs(self.mean / scale - ref.mean) * math.sqrt(ref.count),
            abs(extrema[0] - ref.least),
            abs(extrema[1] - ref.greatest),
        )
        relative = [gap / max(ref.l2, TINY) for gap in gaps]
        return max((gap for gap in relative if math.isfinite(gap)), default=math.nan)

    def fit(self, ref: Totals) -> tuple[float, float]:
        """Return the factor by which these are the numbers of `ref`, and the least relative
        distance that it leaves."""
        if not (ref.l2 > 0 and self.l2 > 0) or self.nonfinite != ref.nonfinite:
            return math.nan, math.inf
        ratio = self.l2 / ref.l2
        fits = [(self.least_distance(ref, factor), factor) for factor in (ratio, -ratio)]
        residual, factor = min(fits)
        return factor, residual


class Cut(NamedTuple):
    """How ranks were seen to hold the pieces of a value."""

    dims: tuple[int, ...]
    """Those in which a piece is shorter than the whole."""
    pieces: tuple[tuple[tuple[int, ...], float], ...]
    """Which ranks hold each, and the part of all elements that it has."""


@dataclass(slots=True, eq=False, kw_only=True)
class Difference:
    """One value of the test beside the reference's, in parts: what single ranks or units hold."""

    dots: Array
    """[p, 3] <a, b>, |a|^2 and |b|^2 of every part."""
    norms: Array
    members: list[Array]
    units: list[Unit]
    is_exact: Array
    measured: str
    ref: Totals
    test: Totals
    rows: list[tuple[Array, Array] | None]
    """[p] digests of both sides' parts, None where only all parts together are known."""
    test_rows: list[Array | None]
    """[p] the test's digest of each part, None where only all parts together are known."""
    at_least: Array | None = None
    """[p] relative distances by statistics, NaN for parts with sketches; None where all have."""
    squares: Array | None = None
    """[p] sums of the squared differences, where full tensors or means tell them, else NaN."""
    partial: str = ""
    """"sum" or "avg" where that of what ranks hold is the reference's value, though nothing says
    so; "" where not."""
    is_of_local_batch: bool = False
    """True where units hold a value made of all their samples (a loss, a balance of experts), which
    neither its average nor its sum makes the reference's: those split the batch in another way."""
    cut: Cut | None = None
    """How the pieces lie that were compared (`pieces.py`); None for wholes."""

    def is_permuted(self, chosen: Array) -> bool:
        """True where the chosen parts have the reference's norm, mean and extrema."""
        pairs = [pair for pair, is_in in zip(self.rows, chosen.tolist()) if is_in]
        digests = [pair for pair in pairs if pair is not None]
        if digests and len(digests) == len(pairs):
            return all(Totals.of(b[None]).has_numbers_of(Totals.of(a[None])) for a, b in digests)
        return bool(chosen.all()) and self.test.has_numbers_of(self.ref)

    @property
    def is_shifted(self) -> bool:
        """True where elements differ in one direction, as positions that begin elsewhere do."""
        moved = abs(self.test.mean - self.ref.mean) * self.ref.count
        return moved > 2 * math.sqrt(self._squared_distance) + 1

    def flips(self, *, is_mask: bool) -> float:
        """Return about how many elements of indices or a mask are other ones.

        The squared distance of two masks is their number. That of indices is twice their variance
        for every index that is another one, if it may be any of them.
        """
        square = 1.0 if is_mask else 2 * max(self.ref.variance, self.test.variance)
        count = float(self.ref.count)
        return min(self._squared_distance / square, count) if square > 0 else count

    @property
    def _squared_distance(self) -> float:
        cross, ref_square, test_square = self.dots.sum(0).tolist()
        return max(float(ref_square + test_square - 2 * cross), 0.0)

    @property
    def has_other_nonfinite(self) -> bool:
        """True where other numbers of elements are NaN or infinite, as far as both are known."""
        counts = self.ref.nonfinite, self.test.nonfinite
        return all(counts) and counts[0] != counts[1]

    @property
    def is_newly_nonfinite(self) -> bool:
        """True where elements are NaN or infinite here, and none is in the reference."""
        counts = self.ref.nonfinite, self.test.nonfinite
        return all(counts) and not sum(counts[0]) and bool(sum(counts[1]))

    @property
    def is_overflow(self) -> bool:
        """True where elements are NaN or infinite in both runs, and not as many in each."""
        sides = self.ref.nonfinite, self.test.nonfinite
        return self.has_other_nonfinite and all(map(sum, sides))

    def totals_with(self, chosen: Array) -> Totals:
        """Return the test's totals: of each unit what the first chosen part holds, else the first
        part; those of all parts where a digest is not known."""
        row_of: dict[Unit, Array] = {}
        for is_in in (True, False):
            for unit, row, is_chosen in zip(self.units, self.test_rows, chosen.tolist()):
                if row is None:
                    return self.test
                if is_chosen is is_in:
                    row_of.setdefault(unit, row)
        return Totals.of(np.stack([row_of[unit] for unit in sorted(row_of)]))

    def is_zero(self, chosen: Array) -> bool:
        """True where the chosen parts are all zeros, and the reference's are not."""
        _, ref_squares, test_squares = self.dots[chosen].T
        rows = [row for row, is_in in zip(self.test_rows, chosen.tolist()) if is_in]
        is_empty = all(row is not None and row["l2"] == 0 for row in rows)
        return is_empty and bool((ref_squares > 0).all() and (test_squares == 0).all())

    def nonfinite_parts(self) -> Array:
        """Return [p] True for parts with other numbers of NaN or infinities than the reference's;
        for all parts where digests do not tell which."""
        is_other = []
        for pair, row in zip(self.rows, self.test_rows):
            if row is None or np.isnan(row["l2"]) or (pair is None and any(self.ref.nonfinite)):
                return np.ones(len(self.norms), bool)
            refs = (0, 0, 0) if pair is None else tuple(int(pair[0][name]) for name in NONFINITE)
            is_other.append(refs != tuple(int(row[name]) for name in NONFINITE))
        return np.array(is_other) if any(is_other) else np.ones(len(self.norms), bool)

    def errors(self, scales: Array | float = 1.0, floor: float = 0.0) -> Array:
        """Return [p] relative L2 distances of the parts, after division by `scales` (the factor of
        each part, or of all); NaN where nothing tells how far a part is off. `floor` is the least
        norm that a distance is taken relative to."""
        norms = np.maximum(self.norms, floor)
        least = self._bounds(scales)
        if least is not None and floor:
            least = least * np.divide(self.norms, norms, out=np.ones(len(norms)), where=norms > 0)
        if least is not None and not np.isnan(least).any():
            return least
        counts = self.ref.nonfinite, self.test.nonfinite
        if not all(counts) and any(map(any, counts)):
            return np.full(len(self.norms), np.nan)
        cross, ref_squares, test_squares = self.dots.T
        distances = np.sqrt(
            np.maximum(test_squares / np.square(scales) - 2 * cross / scales + ref_squares, 0.0)
        )
        if self.squares is not None:
            is_told = (np.asarray(scales) == 1.0) & ~np.isnan(self.squares)
            distances = np.where(is_told, np.sqrt(self.squares), distances)
        zero = np.where(distances == 0, 0.0, distances + np.inf)  # NaN stays NaN
        errors = np.divide(distances, norms, out=zero, where=norms > 0)
        judged: Array = np.where(self.is_exact & (np.asarray(scales) == 1.0), 0.0, errors)
        if self.has_other_nonfinite:
            judged = np.where(self.nonfinite_parts(), np.inf, judged)
        return judged if least is None else np.where(np.isnan(least), judged, least)

    def totals_of(self, part: int) -> tuple[Totals, Totals]:
        """Return the numbers of one part on both sides."""
        pair = self.rows[part]
        if pair is None:
            return self.ref, self.test
        return Totals.of(pair[0][None]), Totals.of(pair[1][None])

    def _bounds(self, scales: Array | float) -> Array | None:
        """Return `at_least` after division by factors."""
        least = self.at_least
        if least is None or (np.asarray(scales) == 1.0).all():
            return least
        bounds: Array = least.copy()
        for part, scale in enumerate(np.broadcast_to(scales, len(least)).tolist()):
            if not np.isnan(least[part]):
                ref, test = self.totals_of(part)
                bounds[part] = test.least_distance(ref, scale)
        return bounds

    @property
    def fingerprint(self) -> bytes:
        """What another value has too that is of the same tensors, as good as no other one."""
        numbers = self.dots.tobytes()
        return numbers if self.at_least is None else numbers + repr((self.ref, self.test)).encode()

    def take_offsets(self, shape: tuple[int, ...]) -> None:
        """Measure what is mostly one number added to all elements by the means, which tell it
        exactly: a sketch of equal numbers may be far from their size. No two values lie nearer than
        their lengths differ. `shape`: of both sides."""
        if self.squares is not None or self.at_least is not None or self.partial:
            return
        squares = np.full(len(self.norms), np.nan)
        for index, pair in enumerate(self.rows):
            if pair is None or self.is_exact[index] or int(pair[0]["count"]) != math.prod(shape):
                continue
            ref, test = pair
            offset = float(test["mean"]) - float(ref["mean"])
            square = math.prod(shape) * offset**2
            rest = test["sketch"] - ref["sketch"] - offset * _sketch_of_ones(shape)
            remaining = float(np.mean(rest**2))
            least = (float(test["l2"]) - float(ref["l2"])) ** 2
            clear = (_CLEAR_OFFSET * float(self.norms[index])) ** 2
            if square > max(remaining, clear):
                squares[index] = max(square + remaining, least)
            elif least > max(float(np.mean((test["sketch"] - ref["sketch"]) ** 2)), clear):
                squares[index] = least
        if not np.isnan(squares).all():
            self.squares = squares

    def fit(self) -> tuple[float, float]:
        """Return the factor that fits all parts best, and the relative distance it leaves."""
        if self.at_least is not None:
            return self.test.fit(self.ref)
        return _fit(self.dots.sum(0), float(np.sqrt((self.norms**2).sum())))

    def fits(self) -> Array:
        """Return [p, 2] factor and residual of every part."""
        fits = [_fit(d, n) for d, n in zip(self.dots, self.norms.tolist())]
        if self.at_least is not None:
            for part in np.flatnonzero(~np.isnan(self.at_least)).tolist():
                ref, test = self.totals_of(part)
                fits[part] = test.fit(ref)
        return np.array(fits)

    def factors(self) -> Array:
        """Return [p] factors that fit the parts best. Digests hold how long a part is beside the
        reference's, so sketches are asked for its direction alone, which they tell better."""
        cross, ref_squares, test_squares = self.dots.T
        factors: Array = self.fits()[:, 0]
        for index, pair in enumerate(self.rows if self.measured == Measured.SKETCHES else ()):
            size = ref_squares[index] * test_squares[index]
            if pair is not None and pair[0]["l2"] > 0 and size > 0:
                length = float(pair[1]["l2"]) / float(pair[0]["l2"])
                factors[index] = length * cross[index] / math.sqrt(size)
        return factors

    def keep(self, chosen: Array) -> None:
        """Forget all parts but the chosen ones ([p] booleans, at least one True)."""
        at = np.flatnonzero(chosen).tolist()
        self.dots, self.norms, self.is_exact = self.dots[at], self.norms[at], self.is_exact[at]
        self.members, self.units = [self.members[i] for i in at], [self.units[i] for i in at]
        self.rows = [self.rows[i] for i in at]
        self.test_rows = [self.test_rows[i] for i in at]
        if self.at_least is not None:
            self.at_least = self.at_least[at]
        if self.squares is not None:
            self.squares = self.squares[at]

    def ranks(self, chosen: Array) -> Array:
        """Return the ranks that hold the chosen parts, sorted."""
        listed = [m for m, is_in in zip(self.members, chosen.tolist()) if is_in]
        return np.unique(np.concatenate(listed)) if listed else np.zeros(0, np.int64)


@functools.lru_cache(maxsize=256)
def _sketch_of_ones(shape: tuple[int, ...]) -> Array:
    sums = [factors(dim, ((0, size),)).sum(1, dtype=np.float64) for dim, size in enumerate(shape)]
    ones: Array = np.prod([np.ones(SKETCH_SIZE), *sums], axis=0)
    return ones


def _fit(dots: Array, norm: float) -> tuple[float, float]:
    cross, ref_square, test_square = dots.tolist()
    if ref_square <= 0 or norm <= 0:
        return math.nan, math.inf
    factor = cross / ref_square
    residual = math.sqrt(max(test_square - cross * cross / ref_square, 0.0))
    return factor, residual / (max(abs(factor), TINY) * norm)


def dots_of(a: Array, b: Array) -> Array:
    """Return <a, b>, |a|^2, |b|^2 over [n, K] sketches, mean over K."""
    dots: Array = np.array([(a * b).sum(), (a * a).sum(), (b * b).sum()]) / a.shape[-1]
    return dots


@dataclass(slots=True, eq=False, kw_only=True)
class ComparedValue:
    """One value of both traces, and how far apart the two are."""

    value: AlignedValue
    allowed: float
    """Relative distance that rounding explains, before anything is inherited."""
    difference: Difference | None = None
    reason: str = ""
    errors: Array = field(default_factory=lambda: np.zeros(0))
    """[p] relative L2 distance of every part, legal factors taken out."""
    scales: Array | float = 1.0
    """The legal factors, by part."""
    copies: int = 1
    """Of a gradient that was added up over so many ranks, which hold the same and were handed the
    same: either their sum is the reference's, or each of them."""
    other_samples: tuple[int, int] = (0, 0)
    """Of the root's input: samples that are missing, and those that the reference has not."""
    earlier_samples: tuple[int, str] = (0, "")
    """Of the root's input: how many of the latter were in which earlier step of the reference."""
    is_repeated: bool = False
    """Of the root's input: True where samples are missing because others came twice."""
    are_samples_apart: bool = False
    """True where ranks that should have one batch have other samples, together the reference's."""
    left_out_by: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    """Of a final gradient: ranks that step another model here, and not the one it is of."""
    unlike_passes: str = ""
    """Of the root's input: why this step is no step of the reference, in words."""
    is_missing: bool = False
    is_late: bool = False
    """Of setup: True where steps had been made before it was seen."""
    is_of_other_shape: bool = False
    """True for a parameter that both runs began with, in two shapes."""
    is_left: bool = False
    """True where it is not judged by itself: another value tells its difference, or will."""
    ref_norm: float = 0.0
    unsure: float = 0.0
    """Of an update: what roundings of the parameter before and after it leave, relative."""
    by_dtype: float = 0.0
    """As `allowed`, had no noise been measured."""
    by_rounding: float = math.inf
    """Of an update: as `allowed`, without what the error of its gradient explains."""
    is_update: bool = False
    is_moved_alone: bool = False
    """Of an update: True where the reference's parameter stayed as it was."""
    stays: Array | None = None
    """[p] of a parameter that ranks hold unlike: who has what it was before, and the reference's
    moved."""
    is_plain_update: bool = False
    """True where another learning rate or weight decay leaves such a difference."""

    @property
    def key(self) -> SlotKey:
        """The reference's words for it."""
        return self.value.key

    @property
    def error(self) -> float:
        """The largest relative L2 distance of its parts."""
        return float(self.errors.max(initial=0.0))

    @property
    def is_wrong_everywhere(self) -> bool:
        """True where ranks hold several values, and none of them is the reference's."""
        return len(self.errors) > 1 and bool((self.errors > self.allowed).all())

    @property
    def divisors(self) -> list[float]:
        """The legal factors, each once and in order; none where no value was divided."""
        factors: list[float] = np.unique(self.scales).tolist()
        return [] if factors == [1.0] else factors

    @property
    def is_told_by_elements(self) -> bool:
        """True where more than statistics was compared."""
        difference = self.difference
        return difference is not None and difference.measured != Measured.STATISTICS

    @property
    def is_left_behind(self) -> bool:
        """True for a parameter that the step moved in the reference and did not here."""
        if self.stays is not None and len(self.stays) == len(self.errors):
            is_bad = self.errors > self.allowed
            return bool(is_bad.any() and self.stays[is_bad].all())
        if self.difference is None or not self.is_update:
            return False
        _, ref_square, test_square = self.difference.dots.sum(0).tolist()
        return bool(ref_square > 0 and test_square == 0)

    @property
    def is_of_choices(self) -> bool:
        """True for a mask, and for indices that come many times each, as those of experts do."""
        if self.difference is None or not self.value.is_discrete:
            return False
        ref = self.difference.ref
        is_repeated = ref.count >= 2 * (ref.greatest - ref.least + 1)
        return self.value.is_mask or is_repeated


# ---- tolerances ----------------------------------------------------------------------------------


DEFAULTS: Final = {
    "float64": (1e-10, 1e-9),
    "float32": (5e-6, 5e-5),
    "float16": (4e-3, 2e-2),
    "bfloat16": (2.4e-2, 8e-2),
    "complex64": (5e-6, 5e-5),
    "complex128": (1e-10, 1e-9),
}
"""Relative L2 distance by which a value of forward and a gradient may be off, by dtype: what
kernels that add in another order leave over some layers. Integers have none."""
UNSEEN_STEP: Final = 1e-3
"""How far parameters may be off after a step that a trace does not show (FSDP1 keeps them flat, or
they lie in pieces): an optimizer that takes the sign of a gradient turns its rounding into whole
steps."""
_UPDATE_SPREAD: Final = 3.0
_COARSE: Final = 1e-4
"""Roundings above it are those of half precision, which no run repeats exactly."""
_NOISES: Final = 4.0


class Tolerances:
    """How far the values of a step may be off by rounding alone."""

    resolution: Final = 1e-6
    """Relative distance below which sketches, whose factors are float32, tell nothing."""

    def __init__(
        self,
        values: Iterable[AlignedValue],
        noise: Mapping[SlotKey, float],
        reduced: Iterable[str] = (),
    ) -> None:
        """Take the values of a step, the relative distance of each value between two runs of the
        reference, and the dtypes in which ranks reduced something: gradients may have travelled in
        the coarsest. Under autocast the coarsest dtype of activations rounds others too."""
        self._noise = noise
        activations = [v for v in values if v.key.phase.facts.is_activation]
        defaults = [DEFAULTS[d] for v in activations for d in v.dtypes if d in DEFAULTS]
        self._coarsest = max(defaults, default=(0.0, 0.0))
        self._reduced = max((DEFAULTS[d] for d in reduced if d in DEFAULTS), default=(0.0, 0.0))

    def of(self, value: AlignedValue) -> float:
        """Return the relative L2 distance that the coarser of both dtypes explains."""
        measured = self.noise_of(value)
        return self.by_dtype(value) if measured is None else measured

    def by_dtype(self, value: AlignedValue) -> float:
        """Return the same where no noise was measured."""
        rounding = 0.0
        if value.key.phase is Phase.SETUP:
            rounding = max(map(rounding_of, value.dtypes)) if len(value.dtypes) > 1 else 0.0
        elif not value.dtypes.isdisjoint(DEFAULTS):
            is_gradient = value.key.phase in (Phase.BACKWARD, Phase.GRADS)
            rounding = self._by_rounding(value)[is_gradient]
        return max(rounding, self.resolution)

    def noise_of(self, value: AlignedValue) -> float | None:
        """Return the distance that measured noise explains, None where none was measured."""
        noise = self._noise.get(value.key) if self._noise else None
        if noise is None or not math.isfinite(noise) or value.key.phase is Phase.SETUP:
            return None
        rounding = max(map(rounding_of, value.dtypes)) / 2 if len(value.dtypes) == 1 else 0.0
        coarse = rounding if rounding > _COARSE else 0.0
        return max(_NOISES * noise, coarse, self.resolution)

    def of_update(self, value: AlignedValue, gradient_error: float) -> float:
        """Return the same for what an optimizer adds: where it takes the sign of a gradient, the
        square root of the gradient's error is that of the update."""
        return _UPDATE_SPREAD * math.sqrt(max(self._by_rounding(value)[1], gradient_error))

    def _by_rounding(self, value: AlignedValue) -> tuple[float, float]:
        is_reduced = value.key.phase in (Phase.GRADS, Phase.PARAMS)
        dtypes = (DEFAULTS[d] for d in value.dtypes if d in DEFAULTS)
        return max((*dtypes, self._coarsest, *([self._reduced] if is_reduced else [])))
