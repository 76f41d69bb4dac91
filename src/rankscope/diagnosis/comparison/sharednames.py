"""Different modules that ranks call by one name: stages of a pipeline that count their layers from
0, and experts of which each rank numbers its own, so that rank 1 calls `experts.0` what the
reference calls `experts.2`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rankscope.diagnosis.comparison.difference import ComparedValue, Difference
from rankscope.diagnosis.comparison.tolerances import Tolerances
from rankscope.diagnosis.comparison.wholevalues import WholeValues
from rankscope.diagnosis.stepview import Array, StepView, sibling_path
from rankscope.record.phases import Phase


def renumbered_modules(
    compared: Sequence[ComparedValue], ref: StepView, wholes: WholeValues
) -> frozenset[str]:
    """Return the paths under which ranks hold different modules of the reference, as a value shows
    that is the reference's of this name on some ranks, and of its siblings on others. `compared` is
    what the runs began with, `ref` the reference's setup."""
    suspects = [
        (each, difference)
        for each in compared
        if (difference := each.difference) is not None
        and len(difference.members) > 1
        and each.error > each.allowed
        and each.key.path.rpartition(".")[0]
    ]
    if not suspects:
        return frozenset()
    families = {(sibling_path(c.key.path), c.key.slot) for c, _ in suspects}
    known: dict[tuple[str, str], list[Array]] = {}
    for values in ref.values(Phase.SETUP):
        family = (sibling_path(values.call.path), values.slot)
        made = wholes.of(values, None) if family in families else ""
        if not isinstance(made, str):
            known.setdefault(family, []).append(made.sketches[0])
    left_out = set()
    for each, difference in suspects:
        siblings = np.array(known[sibling_path(each.key.path), each.key.slot])
        bad = np.flatnonzero(each.errors > each.allowed)
        rows = [difference.test_rows[index] for index in bad.tolist()]
        if all(row is not None and _is_among(row, siblings) for row in rows):
            parts = each.key.path.split(".")
            number = max((i for i, part in enumerate(parts) if part.isdecimal()), default=-1)
            if number >= 0:
                left_out.add(".".join(parts[: number + 1]))
    return frozenset(left_out)


def _is_among(row: Array, sketches: Array) -> bool:
    """True where one of several sketches is that of this digest."""
    apart = np.sqrt(np.mean((sketches - row["sketch"]) ** 2, axis=1))
    return bool((apart <= Tolerances.resolution * max(float(row["l2"]), 1e-30)).any())


def keep_nearest_stage(difference: Difference, stages: Array) -> None:
    """Forget what other stages of a pipeline hold under one name: the module that the reference
    calls so is the one whose value is nearest to the reference's. `stages`, [world of the test],
    says which stage each rank is, -1 where that is not known."""
    own = np.array([stages[ranks].max() for ranks in difference.members])
    if len(np.unique(own)) < 2 or (own < 0).any():
        return
    apart = difference.errors()
    if difference.at_least is None:  # whatever factor gradients of parts of a batch have
        apart = np.minimum(apart, difference.fits()[:, 1])
    difference.keep(own == own[int(np.argmin(apart))])
