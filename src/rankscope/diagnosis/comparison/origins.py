"""Which differences began something, and which only follow from others.

A module is judged by the error that it adds to what it was given (`valueflow.py`). A value whose
givers agree with the reference and which does not is an origin; a value with a giver that an origin
reached is a victim, if it differs at all.

A right program may differ in random numbers, choices between equals, and statistics of a batch that
is split in another way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Final

from rankscope.diagnosis.comparison.difference import CHI_SQUARE_RANGE, ComparedValue, Tolerances
from rankscope.diagnosis.comparison.stepdifferences import StepDifferences
from rankscope.diagnosis.comparison.valueflow import GiverState, Origin, ValueFlow
from rankscope.diagnosis.evidence.stepview import CallView
from rankscope.record.call import Mode
from rankscope.record.phases import Phase

_AMPLIFICATION: Final = 10.0
"""A call may make an error that it was given so many times larger."""
_SAME_FACTOR: Final = 0.02
"""Factors that are no further apart are one."""


class OriginSearch:
    """Goes through setups and steps in their order."""

    def __init__(self) -> None:
        self.origins: list[Origin] = []
        self._owned: defaultdict[str, GiverState] = defaultdict(GiverState)
        """By path of the module: its parameters as they were last seen."""
        self._batches_seen: dict[str, tuple[float, float]] = {}
        """By path of a batch norm: how many batches both sides took statistics of."""
        self._has_stepped = False

    def setup(self, found: StepDifferences) -> None:
        """Judge the values that a run began with."""
        flow = ValueFlow(self._owned)
        began = _StepSearch(self.origins, found, flow, Mode.TRAIN, 0, self._learned(found))
        for each in found.compared:
            if each.difference is not None:
                self._owned[each.key.path].take(began.judged(each, GiverState()))

    def step(self, found: StepDifferences, mode: Mode, step: int) -> None:
        """Judge the values of one step, in the order in which they were computed."""
        flow = ValueFlow(self._owned, has_stepped=self._has_stepped)
        search = _StepSearch(self.origins, found, flow, mode, step, self._learned(found))
        for index, each in enumerate(found.compared):
            search.take(index, each)
        self._owned.update(flow.stepped)
        self._has_stepped |= mode is Mode.TRAIN

    def wrong(self) -> set[int]:
        """Return the `id` of all values that are a fault, or follow from one, so far."""
        faults = [origin for origin in self.origins if not origin.is_legal]
        return {id(each) for o in faults for each in (o.compared, *o.victims)}

    def _learned(self, found: StepDifferences) -> frozenset[str]:
        """Return the batch norms that took statistics in one of both runs alone: the other one used
        what it had learned."""
        counts = {
            c.key.path: (c.difference.ref.mean, c.difference.test.mean)
            for c in found.compared
            if c.difference is not None and c.key.slot == "buffer:num_batches_tracked"
        }
        before = self._batches_seen
        self._batches_seen = before | counts
        moved = {
            path: [was != now for was, now in zip(before[path], counts[path])]
            for path in counts.keys() & before.keys()
        }
        return frozenset(path for path, (ref, test) in moved.items() if ref != test)


class _StepSearch:
    """Goes through the values of one step."""

    def __init__(
        self,
        origins: list[Origin],
        found: StepDifferences,
        flow: ValueFlow,
        mode: Mode,
        step: int,
        learned: frozenset[str],
    ) -> None:
        self._origins, self._found, self._flow = origins, found, flow
        self._mode, self._step, self._learned = mode, step, learned
        self._pending = PendingValues(found.compared)
        self._most = _most_gradients(found)
        self._of_all: dict[Phase, Origin] = {}
        """The origins that stand for all values of a phase."""

    def take(self, index: int, each: ComparedValue) -> None:
        if each.is_missing:
            givers = self._flow.givers(each)
            if givers.origin is None:
                self._new(each, givers.error)
        if each.difference is not None:
            each.is_left = self._is_left(index, each)
        if each.difference is None or each.is_left:
            return
        is_all = self._is_of_all(each.key.phase)
        first = self._of_all.get(each.key.phase)
        if is_all and first is not None and each.error > each.allowed:
            first.victims.append(each)
            self._flow.add(each, GiverState(each.error, first, True))
            return
        state = self._state_of(each, is_all=is_all)
        self._flow.add(each, state)
        if any(each.other_samples):
            self._flow.data.take(state)
        if each.difference.is_of_local_batch:
            self._flow.of_batch.take(state)
        self._pending.passed(each)

    def _is_left(self, index: int, each: ComparedValue) -> bool:
        """True for a value that is not judged by itself: something else tells it, or will."""
        assert each.difference is not None
        pending = self._pending
        if each.difference.is_of_local_batch and not self._found.weighs_alike:
            return True  # gradients tell it better: the batches weigh unlike
        if each.difference.partial:
            givers = self._flow.givers(each)
            is_right = each.error <= each.allowed  # else their sum is but near the reference's
            if not is_right and givers.origin is not None:
                self._flow.add(each, self.judged(each, givers))
                return True
            if is_right or pending.earlier_than(each) is None:
                pending.summands(each)
                return True
        return pending.is_counted_elsewhere(index) or index in pending.explained

    def _is_of_all(self, phase: Phase) -> bool:
        if phase is Phase.GRADS:
            return self._found.is_scaled_at_the_end or bool(self._most)
        return phase is Phase.PARAMS and self._found.update_scale != 1.0

    def _state_of(self, each: ComparedValue, *, is_all: bool) -> GiverState:
        """Judge a value by its givers; where it is an origin, say what kind of one."""
        before = len(self._origins)
        earlier = self._pending.earlier_than(each)
        givers = self._flow.givers(each)
        if earlier is not None:  # what is wrong there is what follows from its own givers
            givers.take(GiverState(0.0, self._flow.givers(earlier).origin, True))
        if self._pending.is_left_unreduced(each) and givers.origin is None:
            state = GiverState(each.error, self._new(each, givers.error), True)
        else:
            state = self.judged(each, givers)
        if len(self._origins) == before:
            return state
        origin = self._origins[-1]
        if is_all and earlier is None:
            self._stands_for_all(origin)
        self._mark_legal(origin)
        if earlier is not None:  # it is the origin of what was first found behind it
            origin.victims.append(origin.compared)
            origin.compared = earlier
        origin.is_isolated = _is_isolated(origin.compared, self._found)
        state.origin = self._folded(before)
        return state

    def _mark_legal(self, origin: Origin) -> None:
        """Say of an origin whether a right program may differ so."""
        each, mode = origin.compared, origin.mode
        origin.is_random = _is_random(each, mode) and not self._flow.passes_on(each)
        origin.is_choice = _is_choice(each, origin.inherited) or _is_flipped(origin)
        is_learned = each.key.path in self._learned
        origin.is_of_batch = not is_learned and _is_of_batch(each, mode, self._found)

    def _stands_for_all(self, origin: Origin) -> None:
        phase = origin.compared.key.phase
        self._of_all[phase], origin.is_of_all = origin, True
        if self._most and phase is Phase.GRADS:
            compared = self._found.compared
            seen = {
                c.key.path for c in compared if c.key.phase.facts.is_activation and c.difference
            }
            origin.is_of_most, origin.alike = True, len(self._most) - 1
            origin.is_blind = all(c.key.path not in seen for c in self._most)

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

    def _new(self, each: ComparedValue, inherited: float) -> Origin:
        origin = Origin(compared=each, mode=self._mode, step=self._step, inherited=inherited)
        self._origins.append(origin)
        return origin

    def judged(self, each: ComparedValue, givers: GiverState) -> GiverState:
        """Return how wrong a value is, given how wrong its givers are."""
        error = each.error
        origin: Origin | None = None
        given = 0.0 if each.value.is_discrete else _AMPLIFICATION * givers.error
        if givers.origin is None and error > each.allowed + given:
            origin = self._new(each, givers.error)
        elif givers.origin is not None and error > min(each.allowed, each.by_rounding):
            origin = givers.origin
            origin.victims.append(each)
        return GiverState(error, origin, True)


def _are_alike(new: Origin, old: Origin) -> bool:
    """True where one sentence says both: gradients or updates with one factor, gradients of a step
    that ranks did not reduce, parameters that it left behind."""
    if _has_factor_of(new, old):
        return True
    both = (old, new)
    return old.step == new.step and (
        all(map(_is_unreduced, both)) or all(each.compared.is_left_behind for each in both)
    )


def _is_unreduced(origin: Origin) -> bool:
    difference = origin.compared.difference
    is_gradient = origin.compared.key.phase is Phase.GRADS
    return is_gradient and difference is not None and bool(difference.partial)


def _has_factor_of(new: Origin, old: Origin) -> bool:
    """True where both are gradients, or both updates, that lack nothing but the same factor."""
    factors, is_update = [], new.compared.is_update
    slack = _SAME_FACTOR if is_update else max(_SAME_FACTOR, new.compared.allowed)
    for origin in (new, old):
        compared, difference = origin.compared, origin.compared.difference
        is_of_kind = is_update or compared.key.phase is Phase.GRADS
        if not is_of_kind or compared.is_update is not is_update or difference is None:
            return False
        if difference.partial or difference.at_least is not None or not origin.bad_parts.all():
            return False
        factor, rest = difference.fit()
        if not rest <= (slack if is_update else 3 * compared.allowed):
            return False
        factors.append(factor)
    return all(factors) and abs(factors[0] / factors[1] - 1) <= slack


def _is_isolated(each: ComparedValue, found: StepDifferences) -> bool:
    """True where all inputs of the calls of a module are the reference's to the bit, by hashes or
    by full tensors; of backward, those of forward too."""
    key = each.key
    if each.value.is_input or not key.phase.facts.is_activation:
        return False
    given = [
        other
        for other in found.compared
        if other.value.is_input
        and other.key.path == key.path
        and other.key.phase in (Phase.FORWARD, key.phase)
    ]
    slots = {other.key.slot for other in given if other.key.phase is key.phase}
    is_all = bool(given) and slots >= {values.slot for values in each.value.call.inputs}
    return is_all and all(
        other.difference is not None and bool(other.difference.is_exact.all()) for other in given
    )


def _most_gradients(found: StepDifferences) -> list[ComparedValue]:
    """Return the final gradients that are wrong on all their ranks, by no factor that many of them
    share, where these are most: no one of them tells where that began. Else none."""
    compared = [(c, c.difference) for c in found.compared if c.key.phase is Phase.GRADS]
    known = [(c, d) for c, d in compared if d is not None]
    wrong = [(c, d) for c, d in known if (c.errors > c.allowed).all() and not d.partial]
    fits = [(d.fit(), c.allowed) for c, d in wrong]
    factors = [factor for (factor, rest), allowed in fits if rest <= 3 * allowed]
    is_most = len(wrong) > 1 and len(known) < 2 * len(wrong)
    is_scaled = found.is_scaled_at_the_end or 2 * len(factors) > len(wrong)
    return [c for c, _ in wrong] if is_most and not is_scaled else []


# ---- differences that a right program may have ---------------------------------------------------


_ROUTERS: Final = frozenset({"router", "gate", "gating"})
"""Names of modules that choose experts."""
_FEW_TOKENS: Final = 0.7
"""Relative distance up to which some tokens that went elsewhere explain a difference."""
_FLIPPED: Final = 20.0
"""A relative error of what choices are made by flips so many times that part of them: those where
two of them are nearly equal."""
_FEW_FLIPS: Final = 2.0
"""Choices that may flip however small the error is."""
_RANDOM_CLASSES: Final = ("dropout", "droppath", "stochasticdepth")
"""In the class names of modules that draw random numbers while a model trains."""


def _is_random(each: ComparedValue, mode: Mode) -> bool:
    name = each.value.call.node.class_name.lower()
    is_output = not each.value.is_input and each.key.phase.facts.is_activation
    return mode is Mode.TRAIN and is_output and any(word in name for word in _RANDOM_CLASSES)


def _is_of_batch(each: ComparedValue, mode: Mode, found: StepDifferences) -> bool:
    """True for what a module makes that normalizes over its batch, and for a value made of a whole
    batch, where runs split that unlike."""
    if each.difference is not None and each.difference.is_of_local_batch:
        return True
    if mode is not Mode.TRAIN or each.value.is_input or each.key.phase is not Phase.FORWARD:
        return False
    sides = (*each.value.ref.values(), *each.value.test.values())
    names = {side.call.node.class_name.lower() for side in sides}
    batches = found.batches
    if batches is None or not all("batchnorm" in name for name in names):
        return False
    if any("sync" in name for name in names):  # over the batches of all ranks
        return batches.ref.micro_batches != batches.test.micro_batches
    return not batches.are_the_same


def _is_choice(each: ComparedValue, inherited: float) -> bool:
    """True for a part of what a call with experts computes: what its router was given is not
    exactly the reference's, so a token between two experts may take the other one."""
    if each.value.is_input or not each.key.phase.facts.is_activation:
        return False
    names = {child.path.rpartition(".")[2].lower() for child in each.value.call.children}
    is_routed = not names.isdisjoint(_ROUTERS)
    return is_routed and inherited > Tolerances.resolution and each.error < _FEW_TOKENS


def _is_flipped(origin: Origin) -> bool:
    """True for indices or a mask with no more other elements than rounding can flip: what they were
    made of is not exactly the reference's."""
    each, difference = origin.compared, origin.compared.difference
    is_choice = each.key.phase is Phase.FORWARD and each.is_of_choices
    if not is_choice or difference is None or origin.inherited == 0 or difference.is_shifted:
        return False
    fewest = difference.flips(is_mask=each.value.is_mask) * CHI_SQUARE_RANGE[0] ** 2
    return fewest <= _FEW_FLIPS + _FLIPPED * origin.inherited * difference.ref.count


# ---- values that explain one behind them ---------------------------------------------------------


class PendingValues:
    """Values that are no fault by themselves, but would explain one behind them.

    * Summands: what each rank holds differs and makes the reference's value together. A right
      program reduces it before it is used.
    * Gradients that one side counts at another tensor: `grad_input` is the total of one tensor. A
      module that was handed a copy (a DTensor made of a plain tensor) has its own share alone. What
      is computed from the total next is right then.
    """

    def __init__(self, compared: Sequence[ComparedValue]) -> None:
        self._next: dict[int, ComparedValue] = {}
        """Of gradients of inputs: the next gradient of an output that is known."""
        following: ComparedValue | None = None
        for index in range(len(compared) - 1, -1, -1):
            each = compared[index]
            if each.key.phase is not Phase.BACKWARD or each.difference is None:
                continue
            if each.value.is_input:
                following = each
            elif following is not None:
                self._next[index] = following
        self._compared = compared
        self._summands: ComparedValue | None = None
        self._given: set[CallView] = set()
        """Calls that were given summands."""
        self._given_to: dict[str, ComparedValue] = {}
        """Where the summands began that backward of a module was given, by its path."""
        self.explained = self._explained_by_others()
        """Indices of the totals of a tensor that another module's part makes wrong."""
        self._gradients: dict[tuple[str, str], ComparedValue] = {}
        self._elsewhere: list[ComparedValue] = []

    def summands(self, each: ComparedValue) -> None:
        """Take a value that ranks hold as summands."""
        if each.key.phase is Phase.GRADS:
            name = each.key.parameter
            self._gradients[name] = self._given_to.get(each.key.path, each)
        else:
            self._summands = self._summands or each
            if each.value.is_input:
                self._given.add(each.value.call)
                if each.key.phase is Phase.BACKWARD:
                    self._given_to.setdefault(each.key.path, self._summands)

    def _explained_by_others(self) -> set[int]:
        """Return the indices of totals of one tensor that are wrong because another module, which
        uses that tensor too and comes later, was given a wrong gradient."""
        tensors: dict[tuple[str, int, str], bytes] = {}
        totals: dict[tuple[bytes, bytes], list[int]] = {}
        given: set[CallView] = set()
        for index, each in enumerate(self._compared):
            key, difference = each.key, each.difference
            if difference is None:
                continue
            if key.phase is Phase.FORWARD:
                tensors[key.path, key.ordinal, key.slot] = difference.dots.tobytes()
            elif key.phase is Phase.BACKWARD and each.error > each.allowed:
                tensor = tensors.get((key.path, key.ordinal, key.slot.removeprefix("grad_")))
                if each.value.is_input:
                    given.add(each.value.call)
                elif tensor is not None and not difference.partial:
                    totals.setdefault((tensor, difference.dots.tobytes()), []).append(index)
        found: set[int] = set()
        for same in totals.values():
            calls = [self._compared[index].value.call for index in same]
            for place, index in enumerate(same):
                if calls[place] not in given and any(
                    later in given and not _is_within(calls[place], later)
                    for later in calls[place + 1 :]
                ):
                    found.add(index)
        return found

    def is_left_unreduced(self, each: ComparedValue) -> bool:
        """True for a parameter that ranks step with gradients of their own, so that it is another
        one on each of them."""
        return (
            each.key.phase is Phase.PARAMS
            and each.difference is not None
            and len(each.difference.members) > 1
            and not each.difference.is_exact.all()
            and self.earlier_than(each) is not None
        )

    def is_counted_elsewhere(self, index: int) -> bool:
        """True for a wrong gradient of an input where what is computed next is right."""
        each, following = self._compared[index], self._next.get(index)
        if following is None or each.error <= each.allowed or following.error > following.allowed:
            return False
        self._elsewhere.append(each)
        return True

    def earlier_than(self, each: ComparedValue) -> ComparedValue | None:
        """Return the value that explains a new origin, None where there is none."""
        if each.key.phase is Phase.PARAMS:
            return self._gradients.get(each.key.parameter)
        if not each.value.is_input:
            return self._summands if each.value.call in self._given else None
        if each.key.phase is Phase.BACKWARD:
            alike = (e for e in self._elsewhere if abs(e.error - each.error) <= 1e-3 * each.error)
            return next(alike, None) or self._summands
        return self._summands

    def passed(self, each: ComparedValue) -> None:
        """Forget summands once something behind them is right."""
        if each.error <= each.allowed and not each.value.is_input:
            self._summands = None


def _is_within(call: CallView, other: CallView) -> bool:
    around = call.parent
    while around is not None and around is not other:
        around = around.parent
    return around is other
