"""The differences of all values of one step, and the factors that are no fault.

Ranks that average their gradients over data-parallel ranks or micro-batches hold gradients of
activations that are so many times larger. A factor that all of backward has in common is taken out
before anything is judged, as far as the final gradients do not have it.

Different modules may share one name: stages of a pipeline that count their layers from 0, and
experts that each rank numbers by itself, so that rank 1 calls `experts.0` what the reference
calls `experts.2`.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from rankscope.diagnosis.comparison.alignment import AlignedValue, SlotKey, whole_shape
from rankscope.diagnosis.comparison.datasamples import Batches, Unit
from rankscope.diagnosis.comparison.difference import (
    DEFAULTS,
    UNSEEN_STEP,
    ComparedValue,
    Difference,
    Measured,
    Tolerances,
)
from rankscope.diagnosis.comparison.fulltensors import FullTensors
from rankscope.diagnosis.comparison.pieces import SeenCuts
from rankscope.diagnosis.comparison.tracesides import PairedStep
from rankscope.diagnosis.comparison.wholedistances import compare_wholes
from rankscope.diagnosis.comparison.wholevalues import NO_TENSOR, Wholes, WholeValues
from rankscope.diagnosis.evidence.distances import rounding_of
from rankscope.diagnosis.evidence.issuedcollectives import issues_of
from rankscope.diagnosis.evidence.stepview import (
    Array,
    CallView,
    SlotValues,
    StepView,
    is_below,
    root_of,
    sibling_path,
)
from rankscope.record.phases import Phase
from rankscope.record.ranks import OPS
from rankscope.record.value import ValueFlag

_OF_PIECES: Final = 3.0
"""All pieces of a value together may be so many times further off than one value."""
_GATHERS: Final = frozenset({"all_gather", "all_gather_into_tensor"})
_NEAR_SCALED: Final = 0.5
"""Gradients of the loss tell their factor where it leaves no more than this."""
_NEAR_SCALED_UPDATE: Final = 0.05
"""A factor of updates leaves no more than this: weight decay and rounding are added to it."""
_SMALL_GRADIENT: Final = 1e-2
"""A gradient whose elements are so many times smaller than others' is measured as if they were of
that size: those that are zero by arithmetic (the bias of keys) consist of rounding alone."""
_OF_OUTPUT: Final = 0.5
"""So many times the norm of the gradient of its module's outputs is the least norm that the
gradient of a vector (a bias, the weights of a norm) is measured by: it is a sum of those over all
samples, and their rounding is what is left of it where they cancel."""
_PLAIN_UPDATE: Final = 0.2
"""What another learning rate or weight decay leaves of the difference of an update is less."""
_MOST_DECAY: Final = 0.5
"""Weight decay takes no larger part of a parameter in one step."""
_MOST_CANCELLED: Final = 1e3
"""A sum of a module may be so many times smaller than what the module was given."""
_NOT_FINITE: Final = "the gradient is NaN or infinite"
_OTHER_SIGNS: Final = 2.0
"""The update of a vector may be off by so much where its gradient agrees: single elements of that
may be zero but for rounding, as those of keys in the bias of queries, keys and values together, and
an optimizer that takes the sign of a gradient moves them by a whole step in any direction."""
_SHARE: Final = 0.8
"""A factor is that of a phase where so many of its values have it."""
_SAME_FACTOR: Final = 0.05
_OWN_COUNTS: Final = "counted by each rank of its own rows, together as the reference's"
_NO_FACTOR: Final = 1e-3
"""A factor this near 1 counts as 1, however exact the dtype."""


class StepDifferences:
    """The differences of all values of one step, or of setup."""

    def __init__(
        self,
        step: PairedStep,
        before: dict[tuple[str, str], tuple[Array, Array]],
        noise: Mapping[SlotKey, float],
        left_out: Collection[str],
        tensors: FullTensors | None,
        stages: Array,
        printed: float,
        cuts: SeenCuts,
    ) -> None:
        """Compare everything.

        Args:
            step: the values of both sides.
            before: sketches of every parameter on both sides as they were before; changed to what
                they are after the step.
            noise: relative distance of each value between two runs of the reference.
            left_out: paths under which ranks of the test hold different modules.
            tensors: what both traces kept; None where that is not to be read.
            stages: [world of the test] which stage of a pipeline each rank is, -1 where that is not
                known.
            printed: relative error of statistics that were printed.
            cuts: how values were seen to be cut; changed to what this step shows.
        """
        self.aligned, self._wholes = step.aligned, step.wholes
        self.batches = None if step.pair is None else step.batches
        self._before, self._left_out, self._tensors = before, left_out, tensors
        self._stages, self._printed, self._cuts = stages, printed, cuts
        self._of_pieces: list[tuple[ComparedValue, str]] = []
        self.views = step.ref, step.test
        self._tolerances = Tolerances(self.aligned.values, noise, _reduced_dtypes(step))
        self.exact = 0
        issues = [i for i in issues_of(step.test) if i.facts.get("issuer") == "forward"]
        parts = (v for i in issues if i.op in _GATHERS for v in i.call.inputs)
        self._gathered = {number for values in parts for number in values.hashes.tolist()}
        """Hashes of what ranks gathered in forward: what is made of it is made of all samples."""
        self._of_one_batch: set[tuple[str, int]] = set()
        """Path and ordinal of calls that all ranks were handed the same for, to the bit."""
        self._left_out_by = dict(_steps_left_out(step.ref, step.test))
        self.compared = [self._compare(value) for value in self.aligned.values]
        why, ranks = step.unlike_passes
        entered = (c for c in self.compared if c.value.is_handed_to_root)
        for compared in itertools.islice(entered if why else (), 1):
            compared.left_out_by, compared.unlike_passes = ranks, why
        cuts.believe(self._of_pieces)
        phases = (Phase.BACKWARD, Phase.GRADS)
        allowed = (c.allowed for c in self.compared if c.key.phase in phases)
        self._no_factor = max(_NO_FACTOR, max(allowed, default=0.0))
        fits = [(d.fit(), 3 * c.allowed) for c, d in self._sketched(Phase.GRADS)]
        self.gradient_scale = self._plain(_common_factor(fits) or 1.0)
        scales = self._scales_of_backward()
        self.weighs_alike = _are_alike(scales.values())
        """True where micro-batches and data-parallel ranks weigh as they do in the reference."""
        self.unit_scales = self._held_alike(scales)
        self._measure()
        self.update_scale = self._scale_of_updates()

    @property
    def errors(self) -> dict[SlotKey, float]:
        """The relative distance of every value that was compared."""
        return {c.key: c.error for c in self.compared if not c.reason}

    # ---- one value -------------------------------------------------------------------------------

    def _compare(self, value: AlignedValue) -> ComparedValue:
        allowed, by_dtype = self._tolerances.of(value), self._tolerances.by_dtype(value)
        compared = ComparedValue(value=value, allowed=allowed, by_dtype=by_dtype)
        path = value.key.path
        if value.key.phase is Phase.GRADS and root_of(path) in self._left_out_by:
            compared.left_out_by = self._left_out_by[root_of(path)]
        if any(is_below(path, outer) for outer in self._left_out):
            compared.reason = "other modules of that name on other ranks"
            return compared
        is_batched = value.key.phase.facts.is_activation
        batches = self.batches if is_batched else None
        places = (None, None) if batches is None else (batches.ref.places, batches.test.places)
        sides: list[dict[int, Wholes]] = []
        for composing, by_micro_batch, own_places in zip(
            self._wholes, (value.ref, value.test), places
        ):
            wholes: dict[int, Wholes] = {}
            for micro_batch, composed in composing.of_all(by_micro_batch, own_places).items():
                if isinstance(composed, str):
                    compared.is_missing = bool(sides) and composed == NO_TENSOR
                    compared.reason = composed
                    return compared
                wholes[micro_batch] = composed
            sides.append(wholes)
        if value.key.phase is Phase.PARAMS:
            sides = [
                {at: _as_used(wholes, by_micro_batch[at], view) for at, wholes in side.items()}
                for side, by_micro_batch, view in zip(sides, (value.ref, value.test), self.views)
            ]
        shapes = [whole_shape(values) for values in (value.first_ref, value.first_test)]
        if _has_other_dims(*shapes):
            sides = [{at: w.without_sketches() for at, w in side.items()} for side in sides]
        ref, test = sides
        is_buffer = value.key.phase is Phase.PARAMS and value.key.slot.startswith("buffer:")
        if is_buffer and self.batches and _are_counts_of_rows(ref, test, self.batches):
            compared.reason = _OWN_COUNTS
            return compared
        difference = compare_wholes(ref, test, batches, compared.allowed, value.key.phase)
        if self._tensors is not None:
            difference = self._tensors.exactly(
                value, (ref, test), difference, self.batches, compared.allowed
            )
        if isinstance(difference, str) and not (batches and batches.are_of_other_samples):
            of_pieces = self._cuts.difference(value, (ref, test), batches)
            if of_pieces is not None:
                self._of_pieces.append((compared, self._unknown(test, difference)))
                compared.allowed *= _OF_PIECES
                if value.key.phase is Phase.PARAMS:
                    compared.allowed = max(compared.allowed, UNSEEN_STEP)
                difference = of_pieces
        as_declared = [{at: w.declared or w for at, w in side.items()} for side in sides]
        if isinstance(difference, str) and as_declared != sides:
            ref, test = as_declared
            difference = compare_wholes(ref, test, batches, compared.allowed, value.key.phase)
        call = value.first_test.call
        if value.key.phase is Phase.FORWARD and call.is_given_the_same(call.ranks):
            self._of_one_batch.add((value.key.path, value.key.ordinal))
        is_of_one = (value.key.path, value.key.ordinal) in self._of_one_batch
        if isinstance(difference, Difference) and difference.is_of_local_batch:
            is_gathered = any(not self._gathered.isdisjoint(v.hashes.tolist()) for v in call.inputs)
            difference.is_of_local_batch = not (is_gathered or is_of_one)
        if isinstance(difference, Difference) and difference.measured == Measured.STATISTICS:
            compared.allowed += self._printed
            every_shape = {
                whole_shape(v)
                for by_micro_batch in (value.ref, value.test)
                for v in by_micro_batch.values()
            }
            if self._printed and len(every_shape) > 1:
                difference = "of another shape than the reference's, and known by statistics alone"
        if isinstance(difference, Difference):
            is_told = ~np.isnan(difference.errors())
            if not is_told.any():
                difference = "no sketches and no statistics tell how far it is off"
            elif not is_told.all():
                difference.keep(is_told)
        if isinstance(difference, str):
            is_param = value.key.phase is Phase.SETUP and value.key.slot.startswith("param:")
            compared.is_of_other_shape = is_param and _is_of_other_shape(value, ref[0], test[0])
            compared.reason = self._unknown(test, difference)
            return compared
        if shapes[0] == shapes[1]:
            difference.take_offsets(shapes[0])
        if is_of_one and value.key.phase is Phase.BACKWARD and value.first_test.agree(call.ranks):
            compared.copies = len(test[min(test)])
        if is_batched and not difference.partial and not is_of_one:
            _keep_nearest_stage(difference, self._stages)
        compared.difference = difference
        squares = (float((whole_values.rows["l2"] ** 2).sum()) for whole_values in ref.values())
        compared.ref_norm = math.sqrt(sum(squares))
        self.exact += bool(difference.is_exact.all())  # of a parameter, not of its update
        if value.key.slot.startswith("param:"):
            self._take_update(compared, difference, ref[min(ref)], test[min(test)])
        return compared

    @staticmethod
    def _unknown(test: Mapping[int, Wholes], reason: str) -> str:
        return next((wholes.reason for wholes in test.values() if wholes.reason), reason)

    def _take_update(
        self, compared: ComparedValue, difference: Difference, ref: Wholes, test: Wholes
    ) -> None:
        """Compare what a step added to a parameter, where both traces know it before."""
        key = (compared.key.path, compared.key.slot)
        now = ref.sketches[0], test.sketches[0]
        before = self._before.get(key)
        if len(test) > 1 or not np.isfinite(now).all():
            self._before.pop(key, None)
            if before is not None:
                is_moved = not np.array_equal(now[0], before[0])
                compared.stays = is_moved & (test.sketches == before[1]).all(1)
            return
        self._before[key] = now
        if compared.key.phase is not Phase.PARAMS or before is None:
            return
        ref_move, test_move = now[0] - before[0], now[1] - before[1]
        size = len(ref_move)
        dots = np.array([[ref_move @ test_move, ref_move @ ref_move, test_move @ test_move]]) / size
        rounding = max(map(rounding_of, compared.value.dtypes))
        norm = float(np.sqrt(dots[0, 1]))
        # what the parameter's own rounding and that of its sketch leave of a small update
        unsure = (rounding + Tolerances.resolution) * difference.ref.l2
        difference.dots, difference.norms, difference.squares = dots, np.array([norm]), None
        difference.is_exact = np.zeros(1, bool)
        difference.measured = Measured.SKETCHES
        compared.is_update = True
        deviation, parts = test_move - ref_move, np.stack([ref_move, before[0]])
        weights = np.linalg.lstsq(parts.T, deviation, rcond=None)[0]
        residual = deviation - weights @ parts
        slack = _PLAIN_UPDATE * np.linalg.norm(deviation)
        is_decay = abs(float(weights[1])) <= _MOST_DECAY
        compared.is_plain_update = is_decay and bool(np.linalg.norm(residual) <= slack)
        compared.unsure = unsure / norm if norm > 0 else math.inf
        compared.is_moved_alone = norm == 0 and float(np.sqrt(dots[0, 2])) > unsure

    # ---- factors that a phase has in common ------------------------------------------------------

    def _of(self, phase: Phase) -> list[tuple[ComparedValue, Difference]]:
        return [
            (c, c.difference)
            for c in self.compared
            if c.key.phase is phase and c.difference is not None and not c.difference.partial
        ]

    def _sketched(self, phase: Phase) -> Iterator[tuple[ComparedValue, Difference]]:
        """Yield what has a distance of which a factor can be taken out."""
        sketched = ((c, d) for c, d in self._of(phase) if d.ref.l2 != 0)
        return ((c, d) for c, d in sketched if d.at_least is None or np.isfinite(d.at_least).all())

    def _scales_of_backward(self) -> dict[Unit, float]:
        """Return the factor that gradients of a unit have in common, or else the one that ranks and
        micro-batches explain, where its first gradient (that of the loss) has one: that holds
        wherever else something is wrong."""
        fits: dict[Unit, list[tuple[tuple[float, float], float]]] = {}
        for compared, difference in self._sketched(Phase.BACKWARD):
            if compared.copies > 1:
                continue
            for unit, fit in zip(difference.units, difference.fits().tolist()):
                fits.setdefault(unit, []).append((fit, 3 * compared.allowed))
        scales: dict[Unit, float] = {}
        for unit, unit_fits in fits.items():
            (first, residual), _ = unit_fits[0]
            plain = self._plain_factors() if residual <= _NEAR_SCALED else ()
            near = (degree for degree in plain if abs(first / degree - 1) <= 0.05)
            factor = _common_factor(unit_fits) or next(near, None)
            if factor:
                scales[unit] = factor
        return scales

    def _held_alike(self, scales: dict[Unit, float]) -> dict[Unit, float]:
        """Return the factors of units, or one for all where they differ and most final gradients
        are wrong: then units weigh otherwise than in the reference."""
        gradients = self._of(Phase.GRADS)
        errors = [d.errors(self.gradient_scale).max(initial=0.0) for _, d in gradients]
        off = sum(error > 3 * c.allowed for error, (c, _) in zip(errors, gradients))
        if 2 * off <= len(gradients) or _are_alike(scales.values()):
            return scales
        logs = [math.log(factor) for factor in scales.values()]
        middle = (min(logs) + max(logs)) / 2
        nearest = min(
            self._plain_factors(),
            key=lambda factor_of_degrees: abs(math.log(factor_of_degrees) - middle),
        )
        return dict.fromkeys(scales, nearest)

    def _plain_factors(self) -> list[float]:
        """Return the factors that averaging over ranks or micro-batches may leave in backward."""
        if self.batches is None:
            return [1.0]
        places = self.batches.test.place_count / self.batches.ref.place_count
        steps = self.batches.test.micro_batches / self.batches.ref.micro_batches
        return sorted({1.0, places, steps, places * steps})

    @property
    def is_scaled_at_the_end(self) -> bool:
        """True where all final gradients have a factor that backward has not: averages over ranks
        or micro-batches are forgotten, or made twice, behind it."""
        if self.batches is None or self.gradient_scale == 1.0:
            return False
        return all(
            any(abs(scale / degree - 1) < 0.02 for degree in self._plain_factors())
            for scale in self.unit_scales.values()
        )

    def _measure(self) -> None:
        legal = 1.0 if self.is_scaled_at_the_end else self.gradient_scale
        scales = {unit: scale / legal for unit, scale in self.unit_scales.items()}
        mean = float(np.median(list(scales.values()))) if scales else 1.0
        sizes = [d.ref.l2 / np.sqrt(d.ref.count) for _, d in self._of(Phase.GRADS) if d.ref.count]
        finite = [size for size in sizes if np.isfinite(size)]
        # the size of elements below which a gradient is as good as zero
        floor = _SMALL_GRADIENT * float(np.median(finite)) if finite else 0.0
        squares_of_outputs: defaultdict[str, float] = defaultdict(float)
        for c in self.compared:
            is_output = c.key.phase is Phase.BACKWARD and c.value.is_input
            if is_output and math.isfinite(c.ref_norm):
                squares_of_outputs[c.key.path] += c.ref_norm**2
        of_gradient: dict[tuple[str, str], float] = {}
        not_finite: set[tuple[str, str]] = set()
        trained = {
            c.key.parameter
            for c in self.compared
            if c.key.phase is Phase.GRADS and c.reason != NO_TENSOR
        }
        entered: defaultdict[CallView, float] = defaultdict(float)
        for compared in self.compared:
            difference, key = compared.difference, compared.key
            if difference is None:
                continue
            if key.phase is Phase.FORWARD and compared.value.is_input and difference.ref.count:
                call, mean_square = compared.value.call, difference.ref.l2**2 / difference.ref.count
                entered[call] = max(entered[call], math.sqrt(mean_square))
            if key.phase in (Phase.BACKWARD, Phase.GRADS) and difference.is_overflow:
                # both passes are thrown away; how many elements overflow depends on rounding
                compared.difference, compared.reason = None, _NOT_FINITE
                not_finite.add(key.parameter)
                continue
            least = 0.0
            if key.phase is Phase.BACKWARD:
                factors = [scales.get(unit, mean) for unit in difference.units]
                compared.scales = np.array([self._plain(factor) for factor in factors])
                scales_of_each = compared.scales * compared.copies
                if (
                    difference.errors(scales_of_each).max()
                    < difference.errors(compared.scales).max()
                ):
                    compared.scales = scales_of_each
            elif key.phase is Phase.GRADS:
                least = floor * float(np.sqrt(difference.ref.count))
                if compared.value.is_vector:
                    least = max(least, _OF_OUTPUT * math.sqrt(squares_of_outputs[key.path]))
            compared.errors = difference.errors(compared.scales, least)
            if key.phase is Phase.FORWARD and not compared.value.is_input:
                _excuse_cancellation(compared, difference, entered[compared.value.call])
            name = key.parameter
            if key.phase is Phase.GRADS:  # relative to the reference's own norm, however small
                of_gradient[name] = float(difference.errors(compared.scales).max(initial=0.0))
                if sum(difference.ref.nonfinite) + sum(difference.test.nonfinite):
                    not_finite.add(name)
            elif compared.is_update:
                compared.is_moved_alone &= bool(trained) and name not in trained
                if compared.is_moved_alone:
                    compared.unsure = 0.0
                measured = self._tolerances.noise_of(compared.value)
                explained = self._tolerances.of_update(compared.value, of_gradient.get(name, 0.0))
                compared.allowed = (explained if measured is None else measured) + compared.unsure
                least = self._tolerances.of_update(compared.value, 0.0)
                compared.by_rounding = least + compared.unsure
                is_any_sign = compared.value.is_vector and not compared.is_plain_update
                if is_any_sign and name in of_gradient and measured is None:
                    compared.allowed = max(compared.allowed, _OTHER_SIGNS)
                if math.isinf(compared.allowed) and compared.error > 0:
                    zero = "the reference's update or its gradient is zero"
                    compared.reason = _NOT_FINITE if name in not_finite else zero
            batches = self.batches if compared.value.is_handed_to_root else None
            if batches is not None and key.slot == batches.ref.slot:
                _take_samples(compared, difference, batches)

    def _plain(self, factor: float) -> float:
        """Return 1.0 for a factor that rounding explains."""
        return 1.0 if abs(factor - 1.0) <= self._no_factor else factor

    def _scale_of_updates(self) -> float:
        fits = [
            (d.fit(), max(c.allowed, _NEAR_SCALED_UPDATE))
            for c, d in self._of(Phase.PARAMS)
            if c.is_update and d.ref.l2 != 0
        ]
        moved = [fit for fit in fits if math.isfinite(fit[0][0])]  # something was added to it
        factor = (_common_factor(moved) or 1.0) if len(moved) > 1 else 1.0
        return 1.0 if abs(factor - 1) < _NEAR_SCALED_UPDATE else factor


def _excuse_cancellation(compared: ComparedValue, difference: Difference, entered: float) -> None:
    """Judge the one element that a module makes beside what it was given (`entered`, the root mean
    square): of what nearly adds up to zero little is left but rounding."""
    norms = entered, _MOST_CANCELLED * compared.ref_norm
    is_scalar = math.prod(whole_shape(compared.value.first_ref)) == 1
    if is_scalar and all(map(math.isfinite, norms)):
        errors = difference.errors(compared.scales, min(norms))
        if errors.max(initial=0.0) <= compared.allowed:
            compared.errors = errors


def _has_other_dims(ref: tuple[int, ...], test: tuple[int, ...]) -> bool:
    """True for as many elements in other dims, of which sketches know nothing: one run has its rows
    in two dims, the other in one."""
    return ref != test and math.prod(ref) == math.prod(test)


def _as_used(wholes: Wholes, values: SlotValues, step_view: StepView) -> Wholes:
    """Return of what ranks hold behind an optimizer step what one of them then sent to all. What
    was read when the step ended has come by then."""
    is_late = (values.flags & int(ValueFlag.AFTER_CALL)).any()
    if len(wholes) == 1 or is_late or not wholes.is_hashed.all():
        return wholes
    ranks, hashes = np.unique(np.concatenate(wholes.members)), wholes.rows["hash"]
    sent = step_view.sent(ranks, hashes)
    if sent is None:
        return wholes
    at = int(np.flatnonzero(hashes == sent)[0])
    return replace(
        wholes,
        rows=wholes.rows[[at]],
        is_hashed=wholes.is_hashed[[at]],
        places=wholes.places[[at]],
        members=[ranks],
        samples=[wholes.samples[at]],
    )


def _are_counts_of_rows(
    ref: Mapping[int, Wholes], test: Mapping[int, Wholes], batches: Batches
) -> bool:
    """True for whole numbers that data-parallel ranks hold, whose sum over their rows, and not the
    numbers themselves, is the reference's."""
    totals = []
    for by_micro_batch, samples in ((ref, batches.ref), (test, batches.test)):
        wholes = by_micro_batch[min(by_micro_batch)]
        by_place = defaultdict(set)
        for at, members in enumerate(wholes.members):
            for place in samples.places[members].tolist():
                by_place[place].add(at)
        if any(len(indices) > 1 for indices in by_place.values()):
            return False
        rows = wholes.rows[[at for indices in by_place.values() for at in indices]]
        columns = (rows["min"], rows["max"], rows["mean"] * rows["count"])
        if not all(np.isfinite(c).all() and (abs(c - c.round()) <= 1e-6).all() for c in columns):
            return False
        totals.append((rows["sketch"].sum(0), rows["sketch"][0]))
    (ref_sum, _), (test_sum, test_first) = totals
    scale = 1e-5 * float(abs(ref_sum).max())
    is_sum = bool((abs(test_sum - ref_sum) <= scale).all())
    return is_sum and bool((abs(test_first - ref_sum) > scale).any())


def _reduced_dtypes(step: PairedStep) -> set[str]:
    """Return the dtypes in which ranks of either side reduced something in a step."""
    issues = (issue for side in (step.ref, step.test) for issue in issues_of(side))
    reductions = {issue.call for issue in issues if "reduce" in OPS.get(issue.op, ())}
    return {values.dtype for call in reductions for values in call.slots.values()}


def _is_of_other_shape(value: AlignedValue, ref: Wholes, test: Wholes) -> bool:
    """True where a parameter is another one in both runs: neither of its shapes is that of a shard
    which nothing describes, nor the other one with rows added, as vocabularies are filled up."""
    if not value.dtypes.issubset(DEFAULTS) or len(ref) + len(test) > 2:
        return False
    counts = ref.counts[0], test.counts[0]
    for wholes, (count, other) in zip((ref, test), (counts, counts[::-1])):
        is_one_rank = wholes.is_described or len(wholes.members[0]) == 1
        if not count or (not is_one_rank and other % count == 0):
            return False
    small, large = sorted(whole_shape(values) for values in (value.first_ref, value.first_test))
    if not small or not large or small[1:] != large[1:]:
        return small != large
    multiple = large[0] & -large[0]
    return large[0] - small[0] >= multiple or small[0] % multiple == 0


def _steps_left_out(ref: StepView, test: StepView) -> Iterator[tuple[str, Array]]:
    """Yield the roots that the reference steps and some ranks of the test do not, which step one
    that the reference leaves alone in this step; and these ranks."""
    expected, stepped = ref.stepped.keys(), test.stepped
    elsewhere = set().union(*(ranks for path, ranks in stepped.items() if path not in expected))
    for path in expected & stepped.keys():
        if elsewhere - stepped[path]:
            yield path, np.array(sorted(elsewhere - stepped[path]), np.int64)


def _take_samples(compared: ComparedValue, difference: Difference, batches: Batches) -> None:
    """Judge the input that tells samples apart by those that only one of both runs has."""
    ref, test = batches.ref, batches.test
    spans = [(test.starts[u], test.sizes[u]) for u in difference.units if u in test.sizes]
    has_unknown = {at for at, count in spans if (batches.partner[at : at + count] < 0).any()}
    is_bad = np.array([test.starts.get(unit) in has_unknown for unit in difference.units])
    share = max(batches.lost, batches.unknown) / ref.total if ref.total else 0.0
    missing = np.where(is_bad if is_bad.any() else True, share, 0.0)
    compared.errors = np.maximum(compared.errors, missing)
    compared.other_samples = (batches.lost, batches.unknown)
    compared.are_samples_apart = batches.are_apart
    # ranks that were handed the same may have been meant to have all of the reference's
    copies = len(compared.value.test_ranks) // test.place_count
    is_handed_to_all = copies > 1 and test.total * copies == ref.total
    compared.is_repeated = batches.repeated > 0 or is_handed_to_all


def _common_factor(fits: Sequence[tuple[tuple[float, float], float]]) -> float | None:
    """Return the factor of most values from (fit, slack) of each, None where they share none."""
    factors = [factor for (factor, residual), slack in fits if residual <= slack]
    if not factors:
        return None
    middle = float(np.median(factors))
    near = sum(1 for f in factors if abs(f - middle) <= _SAME_FACTOR * abs(middle))
    return middle if middle and near >= _SHARE * len(fits) else None


def _are_alike(factors: Iterable[float]) -> bool:
    listed = list(factors)
    return not listed or min(listed) <= 0 or max(listed) <= (1 + _SAME_FACTOR) * min(listed)


# ---- modules that share a name -------------------------------------------------------------------


def renumbered_modules(
    compared: Sequence[ComparedValue], ref: StepView, wholes: WholeValues
) -> frozenset[str]:
    """Return the paths under which ranks hold different modules of the reference, as a value shows
    that is the reference's of this name on some ranks, and of its siblings on others. `compared` is
    what the runs began with, `ref` the reference's setup."""
    suspects = [
        (suspect, difference)
        for suspect in compared
        if (difference := suspect.difference) is not None
        and len(difference.members) > 1
        and suspect.error > suspect.allowed
        and suspect.key.path.rpartition(".")[0]
    ]
    if not suspects:
        return frozenset()
    families = {(sibling_path(c.key.path), c.key.slot) for c, _ in suspects}
    ref_sketches: dict[tuple[str, str], list[Array]] = {}
    for values in ref.values(Phase.SETUP):
        family = (sibling_path(values.call.path), values.slot)
        composed = wholes.of(values, None) if family in families else ""
        if not isinstance(composed, str):
            ref_sketches.setdefault(family, []).append(composed.sketches[0])
    left_out = set()
    for suspect, difference in suspects:
        siblings = np.array(ref_sketches[sibling_path(suspect.key.path), suspect.key.slot])
        bad = np.flatnonzero(suspect.errors > suspect.allowed)
        pairs = [difference.rows[index] for index in bad.tolist()]
        if all(pair is not None and _is_among(pair[1], siblings) for pair in pairs):
            parts = suspect.key.path.split(".")
            number = max((i for i, part in enumerate(parts) if part.isdecimal()), default=-1)
            if number >= 0:
                left_out.add(".".join(parts[: number + 1]))
    return frozenset(left_out)


def _is_among(row: Array, sketches: Array) -> bool:
    distances = np.sqrt(np.mean((sketches - row["sketch"]) ** 2, axis=1))
    return bool((distances <= Tolerances.resolution * max(float(row["l2"]), 1e-30)).any())


def _keep_nearest_stage(difference: Difference, stages: Array) -> None:
    """Forget what other stages of a pipeline hold under one name: the module that the reference
    calls so is the one whose value is nearest to the reference's. `stages`, [world of the test],
    says which stage each rank is, -1 where that is not known."""
    part_stages = np.array([stages[ranks].max() for ranks in difference.members])
    if len(np.unique(part_stages)) < 2 or (part_stages < 0).any():
        return
    distances = difference.errors()
    if difference.at_least is None:  # whatever factor gradients of parts of a batch have
        distances = np.minimum(distances, difference.fits()[:, 1])
    difference.keep(part_stages == part_stages[int(np.argmin(distances))])
