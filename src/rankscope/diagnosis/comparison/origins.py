"""Which differences began something, and which only follow from others.

A module is judged by the error that it adds to what it was given (`valueflow.py`). A value whose
givers agree with the reference and which does not is an origin; a value with a giver that an origin
reached is a victim, if it differs at all.

A right program may differ in random numbers, choices between equals, and statistics of a batch that
is split in another way.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Final

import numpy as np

from rankscope.diagnosis.comparison.alignment import whole_shape
from rankscope.diagnosis.comparison.datasamples import Batches
from rankscope.diagnosis.comparison.difference import (
    CHI_SQUARE_RANGE,
    ComparedValue,
    Tolerances,
)
from rankscope.diagnosis.comparison.stepdifferences import StepDifferences
from rankscope.diagnosis.comparison.valueflow import (
    GiverState,
    Origin,
    PendingValues,
    ValueFlow,
)
from rankscope.diagnosis.evidence.stepview import (
    CallView,
    StepView,
    grouped,
    is_below,
    root_of,
    sibling_path,
)
from rankscope.diagnosis.rules.buffers import STATISTICS
from rankscope.record.call import Mode
from rankscope.record.notes import NoteKind, read_modules
from rankscope.record.phases import Phase
from rankscope.record.ranks import ranks_named

_AMPLIFICATION: Final = 10.0
"""A call may make an error that it was given so many times larger."""
_SAME_FACTOR: Final = 0.02
"""Factors that are no further apart are one."""


class OriginSearch:
    """Goes through setups and steps in their order."""

    def __init__(self, *, is_generating: bool = False) -> None:
        self.origins: list[Origin] = []
        self._is_generating = is_generating
        """What the model is handed is in part what it made before."""
        self._owned: defaultdict[str, GiverState] = defaultdict(GiverState)
        """By path of the module: its parameters as they were last seen."""
        self._has_stepped = False
        self._unseen: set[str] = set()
        """Paths of modules with a parameter that could not be compared."""

    def setup(self, differences: StepDifferences) -> None:
        """Judge the values that a run began with."""
        self._take_unseen(differences)
        flow = ValueFlow(self._owned)
        began = _StepSearch(self.origins, differences, flow, Mode.TRAIN, 0)
        for pair in differences.compared:
            if pair.difference is not None:
                self._owned[pair.key.path].take(began.judged(pair, GiverState()))
            elif pair.is_of_other_shape:
                self._owned[pair.key.path].take(began.of_other_shape(pair))

    def step(self, differences: StepDifferences, mode: Mode, step: int) -> None:
        """Judge the values of one step, in the order in which they were computed."""
        first_of = {o.mode: o for o in reversed(self.origins) if not o.is_legal}
        stepped_wrong = first_of.get(Mode.TRAIN) if self._has_stepped else None
        self._take_unseen(differences)
        unseen = dict.fromkeys(self._unseen, stepped_wrong) if stepped_wrong else {}
        scored = first_of.get(Mode.EVAL) if mode is Mode.TRAIN else None
        flow = ValueFlow(self._owned, has_stepped=self._has_stepped, unseen=unseen, scored=scored)
        search = _StepSearch(self.origins, differences, flow, mode, step)
        search.misaligned = next((o for o in self.origins if o.is_left_out_step), None)
        if self._is_generating:
            search.generated_by = stepped_wrong or first_of.get(Mode.EVAL)
        for index in _in_order(differences.compared):
            search.take(index, differences.compared[index])
        for c in differences.compared:  # what was known of them was before this step
            if (
                c.key.phase is Phase.PARAMS
                and c.difference is None
                and c.key.slot.startswith("param:")
            ):
                self._owned[c.key.path] = GiverState(origin=self._owned[c.key.path].origin)
        self._owned.update(flow.stepped)
        self._has_stepped |= mode is Mode.TRAIN

    def _take_unseen(self, differences: StepDifferences) -> None:
        params = (c for c in differences.compared if c.key.slot.startswith("param:"))
        self._unseen.update(c.key.path for c in params if c.difference is None)

    def wrong(self) -> set[int]:
        """Return the `id` of all values that are a fault, or follow from one, so far."""
        faults = [origin for origin in self.origins if not origin.is_legal]
        return {id(pair) for o in faults for pair in (o.compared, *o.victims)}


class _StepSearch:
    """Goes through the values of one step."""

    def __init__(
        self,
        origins: list[Origin],
        differences: StepDifferences,
        flow: ValueFlow,
        mode: Mode,
        step: int,
    ) -> None:
        self._origins, self._found, self._flow = origins, differences, flow
        self._mode, self._step = mode, step
        self._pending = PendingValues(differences.compared)
        self._most = {
            Phase.GRADS: _most_gradients(differences),
            Phase.PARAMS: _most_updates(differences),
        }
        self._are_all_scaled = differences.is_scaled_at_the_end and all(
            c.error > c.allowed
            for c in differences.compared
            if c.key.phase is Phase.GRADS and c.difference and c.difference.ref.l2 > 0
        )
        self._of_all: dict[Phase, Origin] = {}
        self._of_outputs: dict[CallView, Origin] = {}
        self.misaligned: Origin | None = None
        """A step that ranks left out: behind it steps of one number are not one step."""
        self.generated_by: Origin | None = None
        """An earlier fault, where the model made samples from what it learned."""

    def take(self, index: int, pair: ComparedValue) -> None:
        phase = pair.key.phase
        if len(pair.left_out_by) and self.misaligned is None:
            self.misaligned = self._new(pair, 0.0)
            return
        if pair.is_missing:
            givers = self._flow.givers(pair)
            if givers.origin is None:
                self._new(pair, givers.error)
        if pair.difference is not None:
            pair.is_left = self._is_left(index, pair)
        if pair.difference is None or pair.is_left:
            return
        is_all = phase is Phase.PARAMS and self._found.update_scale != 1.0
        if phase is Phase.GRADS:
            is_all = self._are_all_scaled or bool(self._most[phase])
        elif phase is Phase.PARAMS and not is_all:
            is_all = any(pair is wrong for wrong in self._most[phase])
        first = self._of_all.get(phase)
        if is_all and first is not None and pair.error > pair.allowed:
            first.victims.append(pair)
            self._flow.add(pair, GiverState(pair.error, first, True))
            return
        state = self._state_of(pair, is_all=is_all)
        self._flow.add(pair, state)
        if any(pair.other_samples):
            self._flow.data.take(state)
        if pair.difference.is_of_local_batch:
            self._flow.of_batch.take(state)
        self._pending.passed(pair)

    def _is_left(self, index: int, pair: ComparedValue) -> bool:
        """True for a value that is not judged by itself: something else tells it, or will."""
        assert pair.difference is not None
        pending = self._pending
        is_of_batch = pair.difference.is_of_local_batch and not pair.difference.is_newly_nonfinite
        if is_of_batch and not self._found.weighs_alike:
            return True  # gradients tell it better: the batches weigh unlike
        if pair.difference.partial:
            givers = self._flow.givers(pair)
            is_right = pair.error <= pair.allowed  # else their sum is but near the reference's
            if not is_right and givers.origin is not None:
                self._flow.add(pair, self.judged(pair, givers))
                return True
            if is_right or pending.earlier_than(pair) is None:
                pending.summands(pair)
                return True
        if pending.is_counted_elsewhere(index) or index in pending.explained:
            return True
        if pair.difference.cut is None or not pending.is_refuted(index):
            return False
        pair.reason = "pieces that differ, though what is made of them agrees"
        return True

    def _state_of(self, pair: ComparedValue, *, is_all: bool) -> GiverState:
        """Judge a value by its givers; where it is an origin, say what kind of one."""
        before = len(self._origins)
        earlier = self._pending.earlier_than(pair)
        givers = self._flow.givers(pair)
        if givers.origin is None and pair.key.phase is Phase.GRADS and self._most[Phase.GRADS]:
            givers.origin = next(filter(self._is_in_activations, self._origins), None)
        if earlier is not None:  # what is wrong there is what follows from its own givers
            givers.take(GiverState(0.0, self._flow.givers(earlier).origin, True))
        if self._pending.is_left_unreduced(pair) and givers.origin is None:
            state = GiverState(pair.error, self._new(pair, givers.error), True)
        else:
            state = self.judged(pair, givers)
        if len(self._origins) == before:
            return state
        origin = self._origins[-1]
        origin.is_fed = self._flow.is_fed(origin.compared)
        if is_all and earlier is None:
            self._stands_for_all(origin)
        self._mark_legal(origin)
        if earlier is None:
            earlier = self._reordered(origin.compared)
            origin.is_reordered = earlier is not None
        if earlier is not None:  # it is the origin of what was first found behind it
            origin.victims.append(origin.compared)
            origin.compared = earlier
        origin.is_isolated = _is_isolated(origin.compared, self._found)
        if not origin.is_of_all:
            origin.not_compared, origin.agreed = _before(origin.compared, self._found.compared)
        state.origin = self._folded(before)
        return state

    def _is_in_activations(self, origin: Origin) -> bool:
        """True for a fault of this step in what most final gradients are made of, whichever of
        these begins their order."""
        is_of_step = (origin.mode, origin.step) == (self._mode, self._step)
        is_activation = origin.compared.key.phase.facts.is_activation
        return is_of_step and is_activation and not origin.is_legal

    def _reordered(self, pair: ComparedValue) -> ComparedValue | None:
        """Return the pieces that a call was given, where their statistics agree with the
        reference and they do not: the call works on each place by itself, with the reference's
        parameters, and what it makes of them differs."""
        call, difference = pair.value.call, pair.difference
        is_output = pair.key.phase is Phase.FORWARD and not pair.value.is_input
        classes = {call.node.class_name, pair.value.first_test.call.node.class_name}
        if not is_output or call.children or len(classes) > 1 or not classes <= _OF_EACH_PLACE:
            return None
        entered = [c for c in self._found.compared if c.value.call is call and c.value.is_input]
        last = len(whole_shape(pair.value.first_ref)) - 1
        for c in (*entered, pair):
            cut = None if c.difference is None else c.difference.cut
            if cut is None or not cut.dims or last in cut.dims:
                return None
        if difference is None or difference.at_least is None or len(entered) != 1:
            return None
        return entered[0] if self._flow.has_right_parameters(pair.key.path) else None

    def _mark_legal(self, origin: Origin) -> None:
        """Say of an origin whether a right program may differ so."""
        pair, mode = origin.compared, origin.mode
        if pair.difference is not None and pair.difference.is_newly_nonfinite:
            return
        name = pair.value.call.node.class_name.lower()
        is_drawn = mode is Mode.TRAIN and any(word in name for word in _RANDOM_CLASSES)
        is_drawn &= not pair.value.is_input and pair.key.phase.facts.is_activation
        origin.modes = "" if pair.value.is_input else _unlike_modes(pair, self._found.views)
        is_legal = is_drawn and not origin.modes and not self._flow.passes_on(pair)
        origin.is_random = is_legal and not _is_beside_a_right_one(origin)
        if any(pair.other_samples):
            return
        origin.is_at_router = _is_at_router(pair, self._found.batches)
        origin.is_choice = _is_choice(pair, origin.inherited) or _is_flipped(origin)
        origin.is_of_batch = not origin.modes and _is_of_batch(pair, mode, self._found)

    def _stands_for_all(self, origin: Origin) -> None:
        phase = origin.compared.key.phase
        self._of_all[phase], origin.is_of_all = origin, True
        most = self._most.get(phase)
        if most and (phase is Phase.GRADS or self._found.update_scale == 1.0):
            compared = self._found.compared
            activation_paths = {
                c.key.path for c in compared if c.key.phase.facts.is_activation and c.difference
            }
            origin.is_of_most, origin.alike = True, len(most) - 1
            if phase is Phase.GRADS:
                origin.is_apart = all(c.is_wrong_everywhere for c in most)
                origin.is_blind = all(c.key.path not in activation_paths for c in most)
                origin.family, origin.right = _family_of(most, compared)
                origin.not_compared = [u for c in most for u in _before(c, compared)[0]]
                if not origin.is_fed:
                    order = [compared[at] for at in _in_order(compared)]
                    of_phase = [c for c in order if c.key.phase is phase and c.difference]
                    origin.agreed_before = of_phase.index(origin.compared)

    def _folded(self, before: int) -> Origin:
        """Return the last origin, or the one that says the same of an earlier step, or of another
        gradient of this step that ranks did not reduce."""
        new = self._origins[before]
        for old in self._origins[:before]:
            is_again = old.step != new.step and old.compared.key == new.compared.key
            is_alike = _are_alike(new, old)
            if is_again or is_alike:
                old.alike += is_alike and not is_again
                if is_alike:
                    old.holders.append(new.holder_ranks)
                old.victims += [new.compared, *new.victims]
                del self._origins[before]
                return old
        return new

    def _new(self, pair: ComparedValue, inherited: float) -> Origin:
        origin = Origin(compared=pair, mode=self._mode, step=self._step, inherited=inherited)
        self._origins.append(origin)
        if pair.key.phase.facts.is_activation and not pair.value.is_input:
            self._of_outputs.setdefault(pair.value.call, origin)
        return origin

    def _beside(self, pair: ComparedValue) -> Origin | None:
        """Return the fault of another output of the same call: one event makes all of them."""
        origin = None if pair.value.is_input else self._of_outputs.get(pair.value.call)
        return None if origin is None or origin.is_legal else origin

    def of_other_shape(self, pair: ComparedValue) -> GiverState:
        """Return the state of a parameter that has another shape: whatever follows may differ."""
        return GiverState(math.inf, self._new(pair, 0.0), True)

    def judged(self, pair: ComparedValue, givers: GiverState) -> GiverState:
        """Return how wrong a value is, given how wrong its givers are."""
        error = pair.error
        origin: Origin | None = None
        if givers.origin is not None and givers.origin.is_of_batch and _is_own_buffer(pair):
            givers = GiverState()
        givers.origin = givers.origin or self.misaligned or self._beside(pair)
        if any(pair.other_samples):
            givers.origin = givers.origin or self.generated_by
        inherited = 0.0 if pair.value.is_discrete else _AMPLIFICATION * givers.error
        if givers.origin is None and error > pair.allowed + inherited:
            origin = self._new(pair, givers.error)
        elif givers.origin is not None and error > min(pair.allowed, pair.by_rounding):
            origin = givers.origin
            origin.victims.append(pair)
        if origin is None and pair.difference is not None and not pair.is_told_by_elements:
            # statistics that agree do not show that what reached the givers ends here
            return GiverState(max(error, givers.error), givers.origin, True)
        return GiverState(error, origin, True)


def _is_own_buffer(pair: ComparedValue) -> bool:
    """True for a buffer that each rank changed for itself: no batch that is split in another way
    explains that, but for statistics of the rows of a rank."""
    slots = pair.value.first_test.call.slots
    is_buffer = pair.key.phase is Phase.PARAMS and pair.key.slot.startswith("buffer:")
    return is_buffer and STATISTICS.isdisjoint(slots) and pair.is_wrong_everywhere


def _is_beside_a_right_one(origin: Origin) -> bool:
    """True where a rank that works on the same samples holds what the reference does: all of them
    should."""
    units = [] if origin.compared.difference is None else origin.compared.difference.units
    units_of = grouped(zip(origin.bad_parts.tolist(), units))
    return not {*units_of.get(True, ())}.isdisjoint(units_of.get(False, ()))


def _are_alike(new: Origin, old: Origin) -> bool:
    """True where one sentence says both: gradients or updates with one factor, gradients of a step
    that ranks did not reduce, parameters that it left behind."""
    if _has_factor_of(new, old):
        return True
    pairs = new.compared, old.compared
    are_unreduced = all(
        pair.key.phase is Phase.GRADS and pair.difference is not None and pair.difference.partial
        for pair in pairs
    )
    is_one_step = old.step == new.step
    are_left = all(pair.is_left_behind for pair in pairs)
    are_left &= np.array_equal(old.holder_ranks, new.holder_ranks)
    return is_one_step and (are_unreduced or are_left)


def _has_factor_of(new: Origin, old: Origin) -> bool:
    """True where both are gradients, or both updates, that lack nothing but the same factor."""
    factors, measures, is_update = [], set(), new.compared.is_update
    slack = _SAME_FACTOR if is_update else max(_SAME_FACTOR, new.compared.allowed)
    for origin in (new, old):
        compared, difference = origin.compared, origin.compared.difference
        is_of_kind = is_update or compared.key.phase is Phase.GRADS
        if not is_of_kind or compared.is_update is not is_update or difference is None:
            return False
        if difference.partial or not origin.bad_parts.all():
            return False
        factor, residual = difference.fit()
        if not residual <= (slack if is_update else 3 * compared.allowed):
            return False
        factors.append(factor)
        measures.add(difference.at_least is None)
    return all(factors) and len(measures) == 1 and abs(factors[0] / factors[1] - 1) <= slack


def _before(
    pair: ComparedValue, compared: Sequence[ComparedValue]
) -> tuple[list[ComparedValue], ComparedValue | None]:
    """Return the values before this one that were not compared by their elements, and the last
    value before these that agrees; of a gradient, such inputs of its module, and None. Equal
    statistics do not count as agreement: elements in another order have the same ones."""
    phase, call = pair.key.phase, pair.value.call
    if phase is Phase.GRADS:
        into = [c for c in compared if c.key.path == pair.key.path and c.value.is_input]
        into = [c for c in into if c.key.phase.facts.is_activation]
        return [c for c in into if not c.is_told_by_elements], None
    if not phase.facts.is_activation:
        return [], None
    at = next(index for index, other in enumerate(compared) if other is pair)
    before = [other for other in compared[:at] if other.key.phase is phase]
    scopes = [*([] if pair.value.is_input else [call]), *call.around]
    for scope in (*scopes, None):
        inside = [c for c in before if scope is None or scope in c.value.call.around]
        entered = [c for c in before if c.value.is_input and c.value.call is scope]
        if entered and all(c.is_told_by_elements for c in entered):
            break
    unknown = [c for c in inside if not c.is_told_by_elements]
    earlier = before[: before.index(unknown[0])] if unknown else []
    agreed = (
        c
        for c in reversed(earlier)
        if c.is_told_by_elements
        and c.error <= c.allowed
        and not (c.difference and c.difference.partial)
    )
    return unknown, next(agreed, None)


def _is_isolated(pair: ComparedValue, differences: StepDifferences) -> bool:
    """True where all inputs of the calls of a module are the reference's to the bit, by hashes or
    by full tensors; of backward, those of forward too."""
    key = pair.key
    if pair.value.is_input or not key.phase.facts.is_activation:
        return False
    inputs = [
        entered
        for entered in differences.compared
        if entered.value.is_input
        and entered.key.path == key.path
        and entered.key.phase in (Phase.FORWARD, key.phase)
    ]
    slots = {entered.key.slot for entered in inputs if entered.key.phase is key.phase}
    is_all = bool(inputs) and slots >= {values.slot for values in pair.value.call.inputs}
    return is_all and all(
        entered.difference is not None and bool(entered.difference.is_exact.all())
        for entered in inputs
    )


def _most_gradients(differences: StepDifferences) -> list[ComparedValue]:
    """Return the final gradients that are wrong on all their ranks, by no factor that many of them
    share, where these are most: no one of them tells where that began. Else none."""
    compared = [(c, c.difference) for c in differences.compared if c.key.phase is Phase.GRADS]
    with_difference = [(c, d) for c, d in compared if d is not None]
    wrong = [(c, d) for c, d in with_difference if (c.errors > c.allowed).all() and not d.partial]
    fits = [(d.fit(), c.allowed) for c, d in wrong]
    factors = [factor for (factor, residual), allowed in fits if residual <= 3 * allowed]
    is_most = len(wrong) > 1 and len(with_difference) < 2 * len(wrong)
    is_scaled = differences.is_scaled_at_the_end or 2 * len(factors) > len(wrong)
    return [c for c, _ in wrong] if is_most and not is_scaled else []


def _in_order(compared: Sequence[ComparedValue]) -> list[int]:
    """Return the indices of the values of a step. Final gradients come in the order in which
    backward makes them, that of the last module first, where not all that backward gave to modules
    could be compared and calls tell the order."""
    indices, forward = range(len(compared)), Phase.FORWARD
    called = {compared[at].key.path: at for at in indices if compared[at].key.phase is forward}
    gradients = [at for at in indices if compared[at].key.phase is Phase.GRADS]
    paths = {compared[at].key.path for at in gradients if compared[at].difference}
    fed = {c.key.path for c in compared if c.key.phase is Phase.BACKWARD and c.difference}
    if paths <= fed or not all(compared[at].key.path in called for at in gradients):
        return [*indices]
    in_backward = sorted(gradients, key=lambda at: called[compared[at].key.path], reverse=True)
    order = [*indices]
    for at, index in zip(gradients, in_backward):
        order[at] = index
    return order


def _family_of(
    wrong: Sequence[ComparedValue], compared: Sequence[ComparedValue]
) -> tuple[str, int]:
    """Return what the paths of wrong final gradients have in common, and how many others there are,
    where all others agree and none of them lies there; else ("", 0)."""
    paths = [sibling_path(c.key.path).split(".") for c in wrong]
    shared = itertools.takewhile(lambda names: len({*names}) == 1, zip(*paths))
    family = ".".join(names[0] for names in shared)
    judged = [c for c in compared if c.key.phase is Phase.GRADS and c.difference is not None]
    outside = [c for c in judged if not is_below(sibling_path(c.key.path), family)]
    is_apart = family and outside and len(judged) - len(outside) == len(wrong)
    are_right = all(c.error <= c.allowed for c in outside)
    return (family, len(outside)) if is_apart and are_right else ("", 0)


def _most_updates(differences: StepDifferences) -> list[ComparedValue]:
    """Return the updates that are wrong on all their ranks though their gradients agree, where
    these are most and neither another learning rate nor weight decay explains them: the optimizer
    stepped from other numbers than the model's. Else none."""
    right = {
        c.key.parameter
        for c in differences.compared
        if c.key.phase is Phase.GRADS and c.difference is not None and c.error <= c.allowed
    }
    updates = [c for c in differences.compared if c.is_update and c.difference and not c.reason]
    wrong = [
        c
        for c in updates
        if (c.errors > c.allowed).all()
        and c.key.parameter in right
        and not (c.is_left_behind or c.is_moved_alone)
    ]
    is_of_options = 2 * sum(c.is_plain_update for c in wrong) >= len(wrong)
    is_most = len(wrong) > 1 and len(updates) < 2 * len(wrong)
    return wrong if is_most and not is_of_options else []


# ---- differences that a right program may have ---------------------------------------------------


_OF_EACH_PLACE: Final = frozenset({"Linear", "LayerNorm", "RMSNorm"})
"""Classes of torch whose calls work on the last dim of each place alone, alike in both modes."""
_ROUTERS: Final = frozenset({"router", "gate", "gating"})
_FEW_TOKENS: Final = 0.7
"""Relative distance up to which some tokens that went elsewhere explain a difference."""
_FLIPPED: Final = 20.0
"""Times the relative error of what choices are made by: the part of them that may flip."""
_FEW_FLIPS: Final = 2.0
"""Choices that may flip however small the error is."""
_RANDOM_CLASSES: Final = ("dropout", "droppath", "stochasticdepth")


def _is_of_batch(pair: ComparedValue, mode: Mode, differences: StepDifferences) -> bool:
    """True for values made of a whole batch, where runs split the batch unlike."""
    if pair.difference is not None and pair.difference.is_of_local_batch:
        return True
    if mode is not Mode.TRAIN or pair.value.is_input or pair.key.phase is not Phase.FORWARD:
        return False
    sides = (*pair.value.ref.values(), *pair.value.test.values())
    names = {side.call.node.class_name.lower() for side in sides}
    batches = differences.batches
    if batches is None or not all("batchnorm" in name for name in names):
        return False
    if any("sync" in name for name in names):  # over the batches of all ranks
        return batches.ref.micro_batches != batches.test.micro_batches
    return not batches.are_the_same


def _is_at_router(pair: ComparedValue, batches: Batches | None) -> bool:
    """True for what came back to a router of a batch that the runs split unlike."""
    is_router = pair.key.path.rpartition(".")[2].lower() in _ROUTERS
    is_gradient = pair.key.phase is Phase.BACKWARD and pair.value.is_input
    return is_router and is_gradient and batches is not None and not batches.are_the_same


def _unlike_modes(pair: ComparedValue, views: tuple[StepView, StepView]) -> str:
    """Return who steps the module of an activation in eval mode and who does not, where that is not
    as in the reference; "" where traces do not tell, and for what works alike in both modes."""
    calls = pair.value.first_ref.call, pair.value.first_test.call
    classes = {call.node.class_name for call in calls}
    if not pair.key.phase.facts.is_activation or classes <= _OF_EACH_PLACE:
        return ""
    ref, test = (_modes_of(call, view) for call, view in zip(calls, views))
    if len(test) > 1:
        return f"{ranks_named(test[True])} stepped this module in eval mode, other ranks did not"
    if len(ref) != 1 or not test or ref.keys() == test.keys():
        return ""
    modes = ("training", "eval") if True in ref else ("eval", "training")
    return "its module is in {} mode here, and in {} mode in the reference".format(*modes)


def _modes_of(call: CallView, view: StepView) -> dict[bool, list[int]]:
    """Return {is in eval mode: ranks that step the module of a call so}; {} where that is not
    known, as where two roots of one class are called."""
    root, class_name = root_of(call.node.path), call.top.node.class_name
    path = call.node.path.removeprefix(root).removeprefix(".")
    notes = [n for n in view.notes if n.note.kind is NoteKind.IN_EVAL_MODE]
    is_noted = any(n.note.kind is NoteKind.OPTIMIZER_OPTIONS for n in view.notes)
    if not is_noted or len({c.path for c in view.roots if c.node.class_name == class_name}) != 1:
        return {}
    in_eval_mode = {
        rank
        for fields, ranks in ((n.note.fields, n.ranks) for n in notes)
        if fields["model"] == class_name
        and any(is_below(path, m) for m in read_modules(str(fields["modules"])))
        for rank in ranks
    }
    return grouped((rank in in_eval_mode, rank) for rank in call.ranks.tolist())


def _is_choice(pair: ComparedValue, inherited: float) -> bool:
    """True for a part of what a call with experts computes: what its router was given is not
    exactly the reference's, so a token between two experts may take the other one."""
    if pair.value.is_input or not pair.key.phase.facts.is_activation:
        return False
    names = {child.path.rpartition(".")[2].lower() for child in pair.value.call.children}
    is_routed = not names.isdisjoint(_ROUTERS)
    return is_routed and inherited > Tolerances.resolution and pair.error < _FEW_TOKENS


def _is_flipped(origin: Origin) -> bool:
    """True for indices or a mask with no more other elements than rounding can flip."""
    pair, difference = origin.compared, origin.compared.difference
    is_choice = pair.key.phase is Phase.FORWARD and pair.is_of_choices
    if not is_choice or difference is None or origin.inherited == 0 or difference.is_shifted:
        return False
    fewest = difference.flips(is_mask=pair.value.is_mask) * CHI_SQUARE_RANGE[0] ** 2
    return fewest <= _FEW_FLIPS + _FLIPPED * origin.inherited * difference.ref.count
