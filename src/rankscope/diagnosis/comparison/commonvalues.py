"""Differences of values that all data-parallel ranks have in common: parameters, gradients, and
what no batch goes through. Also the parts of which any difference is put together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rankscope.diagnosis.comparison.difference import (
    TINY,
    Difference,
    Measured,
    Totals,
    dots_of,
)
from rankscope.diagnosis.comparison.wholevalues import Wholes

__all__ = ["SUM_SLACK", "Parts", "agreed_holder", "compare_common", "least_distance", "other_size"]

Array = NDArray[Any]
Unit = tuple[int, int]
SUM_SLACK: Final = 3.0
"""A sum or an average of several values may be so many times further off than one value."""


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
    own = agreed_holder(ref, range(len(ref)), allowed)
    if isinstance(own, str):
        return own
    alike = [i for i in range(len(test)) if test.counts[i] == ref.counts[own]]
    if not alike:
        return other_size(test)
    parts = Parts(Measured.SKETCHES)
    for index in alike:
        parts.add(ref, own, test, index, (0, 0))
    if len(alike) > 1 and not test.is_described and is_summed_later:
        parts.try_sum(ref, own, test, alike, allowed)
    others = [test.members[i] for i in range(len(test)) if i not in alike]
    return parts.finished(ref.rows[[own]], test.rows[alike[:1]], others)


def other_size(test: Wholes) -> str:
    """Return why two values of unlike sizes are not compared."""
    if test.is_described or len(test) == 1:
        return "of another size than the reference's"
    return "layout unknown"


def agreed_holder(wholes: Wholes, among: Sequence[int], allowed: float) -> int | str:
    """Return one of several wholes that are the same within rounding, or why there is none."""
    first = among[0]
    for other in among[1:]:
        a, b = wholes.sketches[first], wholes.sketches[other]
        apart = float(np.sqrt(np.mean((a - b) ** 2)))
        if math.isnan(apart):
            return "no sketches tell whether the reference's ranks hold the same"
        if apart > allowed * max(float(wholes.rows["l2"][first]), TINY):
            return "the reference's ranks hold different values"
    return first


class Parts:
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
        least = math.nan
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            if not is_exact:
                self._measured = Measured.STATISTICS
                least = least_distance(Totals.of(row[None]), Totals.of(other[None]))
            if is_exact or not math.isnan(least):
                a = b = np.zeros(len(a))
        self._least.append(least)
        rows = (row, other)
        self.put(dots_of(a, b), float(row["l2"]), test.members[index], unit, is_exact, rows)

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
            len(among), dots_of(ref.sketches[own], summed), float(ref.rows["l2"][own]), allowed
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
            apart = math.sqrt(max(square, 0.0)) / max(norm, TINY)
            if not apart <= SUM_SLACK * allowed:  # where sketches are missing it is NaN
                continue
            unit = self._units[-1]
            for kept in (
                self._dots, self._norms, self._members, self._units, self._exact, self._least,
                self._rows,
            ):  # fmt: skip
                del kept[-count:]
            reduced = np.array([cross / parts, own, theirs / parts**2])
            self._least.append(math.nan)
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


def least_distance(ref: Totals, test: Totals) -> float:
    """Return a relative distance that two values have at least, from their statistics; NaN where
    none of these is known of both."""
    if ref.nonfinite and test.nonfinite and ref.nonfinite != test.nonfinite:
        return math.inf
    norm = max(ref.l2, TINY)
    found = [abs(test.l2 - ref.l2) / norm]
    found.append(abs(test.mean - ref.mean) * math.sqrt(ref.count) / norm)
    found += [abs(a - b) / norm for a, b in ((ref.least, test.least),)]
    found += [abs(ref.greatest - test.greatest) / norm]
    return max((each for each in found if math.isfinite(each)), default=math.nan)
