"""Which differences began something, and which only follow from others.

A module is judged by the error that it adds to what it was given. A value whose givers agree with
the reference and which does not is an origin; a value with a giver that an origin reached is a
victim, if it differs at all. Givers are

    what goes into a call          everything that was computed before it in the phase
    what comes out of it           what went in, what its children did, its own parameters
    the gradient of a parameter    what went into its module, in both directions
    the update of a parameter      its gradient

Where nothing of the givers is known, everything that was computed before stands for them.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rankscope.diagnosis.comparison.difference import CHI_SQUARE_RANGE
from rankscope.diagnosis.comparison.pendingvalues import PendingValues
from rankscope.diagnosis.comparison.stepdifferences import (
    ComparedValue,
    StepDifferences,
)
from rankscope.diagnosis.comparison.tolerances import Tolerances
from rankscope.diagnosis.stepview import CallView
from rankscope.record.call import Mode, Phase

__all__ = ["Origin", "OriginSearch"]

Array = NDArray[Any]
_AMPLIFICATION: Final = 10.0
"""A call may make an error that it was given so many times larger."""
_ROUTERS: Final = frozenset({"router", "gate", "gating"})
"""Names of modules that choose experts."""
_FEW_TOKENS: Final = 0.7
"""Relative distance up to which some tokens that went elsewhere explain a difference."""
_FLIPPED: Final = 20.0
"""A relative error of what choices are made by flips so many times that part of them: those where
two of them are nearly equal."""
_FEW_FLIPS: Final = 2.0
"""Choices that may flip however small the error is."""
_SAME_FACTOR: Final = 0.02
"""Factors that are no further apart are one."""
_UNSEEN_STEP: Final = 1e-3
"""How far parameters that a trace does not show (FSDP1 keeps them flat) may be off after a step: an
optimizer that takes the sign of a gradient turns its rounding into whole steps."""
_RANDOM_CLASSES: Final = ("dropout", "droppath", "stochasticdepth")
"""In the class names of modules that draw random numbers while a model trains."""


@dataclass(slots=True, eq=False, kw_only=True)
class Origin:
    """A value that differs though what it was made of agrees."""

    compared: ComparedValue
    mode: Mode
    step: int
    inherited: float
    """Largest error of what it was made of."""
    is_random: bool = False
    """True where a module drew other random numbers than the reference's, as it may."""
    is_choice: bool = False
    """True where rounding may have sent some tokens to other experts than the reference's."""
    is_of_batch: bool = False
    """True where a module normalized over a batch that the reference splits in another way."""
    is_isolated: bool = False
    """True where its call was given what the reference's was, to the bit."""
    alike: int = 0
    """Further gradients of which the same is to be said."""
    holders: list[Array] = field(default_factory=list)
    """Ranks that hold their wrong parts, one array for each."""
    is_of_all: bool = False
    """True where it stands for all values of its phase, which share one factor."""
    is_of_most: bool = False
    """True where it stands for most final gradients, which share no factor."""
    is_blind: bool = False
    """True where nothing that these follow from could be compared."""
    victims: list[ComparedValue] = field(default_factory=list)

    @property
    def is_legal(self) -> bool:
        """True where a right program may differ so: nothing behind it can be judged."""
        return self.is_random or self.is_choice or self.is_of_batch

    @property
    def bad_parts(self) -> Array:
        """[p] which parts of the value are wrong."""
        if self.compared.difference is not None and self.compared.difference.partial:
            return np.ones(len(self.compared.errors), bool)
        parts: Array = self.compared.errors > self.compared.allowed
        return parts if parts.any() else np.ones(len(parts), bool)

    @property
    def holder_ranks(self) -> Array:
        """Ranks that hold the wrong parts, sorted."""
        difference = self.compared.difference
        if difference is None:
            every = [np.asarray(v.ranks) for v in self.compared.value.test.values()]
            return np.unique(np.concatenate(every))
        return np.unique(np.concatenate([difference.ranks(self.bad_parts), *self.holders]))


@dataclass(slots=True, eq=False)
class _State:
    """What is known of some values together."""

    error: float = 0.0
    origin: Origin | None = None
    is_known: bool = False

    def take(self, other: _State) -> None:
        """Add what is known of others."""
        if other.is_known:
            self.error = max(self.error, other.error)
            self.origin = self.origin or other.origin
            self.is_known = True

    def or_else(self, other: _State) -> _State:
        """Return this, or the other where nothing is known."""
        return self if self.is_known else other


class OriginSearch:
    """Goes through setups and steps in their order."""

    def __init__(self) -> None:
        self.origins: list[Origin] = []
        self._owned: defaultdict[str, _State] = defaultdict(_State)
        """By path of the module: its parameters as they were last seen."""
        self._mode, self._step = Mode.TRAIN, 0
        self._has_stepped = False
        self._batches_seen: dict[str, tuple[float, float]] = {}
        """By path of a batch norm: how many batches both sides took statistics of."""

    def setup(self, found: StepDifferences) -> None:
        """Judge the values that a run began with."""
        self._batches_seen |= _batches_seen(found)
        for each in found.compared:
            if each.difference is not None:
                self._owned[each.key.path].take(self._judge(each, _State()))

    def step(self, found: StepDifferences, mode: Mode, step: int) -> None:
        """Judge the values of one step, in the order in which they were computed."""
        self._mode, self._step = mode, step
        counts = _batches_seen(found)
        seen_before = self._batches_seen
        both = counts.keys() & seen_before.keys()
        in_one = {path for path in both if _moves_alone(seen_before[path], counts[path])}
        self._batches_seen = seen_before | counts
        flow = _Flow(self._owned, has_stepped=self._has_stepped)
        pending = PendingValues(found.compared)
        of_all: dict[Phase, Origin] = {}
        most = _most_gradients(found)
        seen = {
            c.key.path for c in found.compared if c.key.phase.facts.is_activation and c.difference
        }
        for index, each in enumerate(found.compared):
            if each.is_missing:
                self._missing(each, flow)
            if each.difference is None:
                continue
            if each.difference.is_of_local_batch and not found.weighs_alike:
                continue  # gradients tell it better: the batches weigh unlike
            if each.difference.partial:
                behind = flow.givers(each).origin
                is_near = (
                    each.error > each.allowed
                )  # their sum is no more than near the reference's
                if is_near and behind is not None:
                    flow.add(each, self._judge(each, flow.givers(each)))
                    continue
                if not is_near or pending.earlier_than(each) is None:
                    pending.summands(each)
                    continue
            if pending.is_counted_elsewhere(index) or pending.is_due_to_another(index):
                continue
            is_all = each.key.phase is Phase.GRADS and found.is_scaled_at_the_end
            is_all |= each.key.phase is Phase.GRADS and bool(most)
            is_all |= each.key.phase is Phase.PARAMS and found.update_scale != 1.0
            first = of_all.get(each.key.phase)
            if is_all and first is not None and each.error > each.allowed:
                first.victims.append(each)
                flow.add(each, _State(each.error, first, True))
                continue
            before = len(self.origins)
            earlier = pending.earlier_than(each)
            givers = flow.givers(each)
            if earlier is not None:  # what is wrong there is what follows from its own givers
                givers.take(_State(0.0, flow.givers(earlier).origin, True))
            if pending.is_left_unreduced(each) and givers.origin is None:
                state = _State(each.error, self._new(each, givers.error), True)
            else:
                state = self._judge(each, givers)
            if len(self.origins) > before:
                origin = self.origins[-1]
                if is_all and earlier is None:
                    of_all[each.key.phase], origin.is_of_all = origin, True
                    if most and each.key.phase is Phase.GRADS:
                        origin.is_of_most, origin.alike = True, len(most) - 1
                        origin.is_blind = all(c.key.path not in seen for c in most)
                origin.is_random = _is_random(each, mode) and not flow.passes_on(each)
                origin.is_choice = _is_choice(each, origin.inherited) or _is_flipped(origin)
                is_in_one = each.key.path in in_one  # the other one used what it had learned
                origin.is_of_batch = not is_in_one and _is_of_batch(each, mode, found)
                if earlier is not None:
                    self._charge(origin, earlier)
                origin.is_isolated = _is_isolated(origin.compared, found)
                state.origin = self._folded(before)
            flow.add(each, state)
            if any(each.other_samples):
                flow.data.take(state)
            if each.difference.is_of_local_batch:
                flow.of_batch.take(state)
            pending.passed(each)
        for path, state in flow.stepped.items():
            self._owned[path] = state
        self._has_stepped |= mode is Mode.TRAIN

    def _charge(self, origin: Origin, earlier: ComparedValue) -> None:
        """Make an earlier value the origin of what was first found behind it."""
        origin.victims.append(origin.compared)
        origin.compared = earlier

    def _folded(self, before: int) -> Origin:
        """Return the last origin, or the one that says the same of an earlier step, or of another
        gradient of this step that ranks did not reduce."""
        new = self.origins[before]
        for old in self.origins[:before]:
            is_again = old.step != new.step and old.compared.key == new.compared.key
            is_alike = _has_factor_of(new, old) or (
                old.step == new.step
                and (
                    (_is_unreduced(old) and _is_unreduced(new))
                    or (old.compared.is_left_behind and new.compared.is_left_behind)
                )
            )
            if is_again or is_alike:
                old.alike += is_alike and not is_again
                if is_alike:
                    old.holders.append(new.holder_ranks)
                old.victims += [new.compared, *new.victims]
                del self.origins[before]
                return old
        return new

    def _missing(self, each: ComparedValue, flow: _Flow) -> None:
        giver = flow.givers(each)
        if giver.origin is None:
            self._new(each, giver.error)

    def _new(self, each: ComparedValue, inherited: float) -> Origin:
        origin = Origin(compared=each, mode=self._mode, step=self._step, inherited=inherited)
        self.origins.append(origin)
        return origin

    def _judge(self, each: ComparedValue, givers: _State) -> _State:
        """Return what is known of a value, given what is known of its givers."""
        error = each.error
        if givers.origin is not None:
            if error <= min(each.allowed, each.by_rounding):
                return _State(error, None, True)
            givers.origin.victims.append(each)
            return _State(error, givers.origin, True)
        given = 0.0 if each.value.is_discrete else _AMPLIFICATION * givers.error
        if error > each.allowed + given:
            return _State(error, self._new(each, givers.error), True)
        return _State(error, None, True)


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
    names = {
        side.call.node.class_name.lower()
        for side in (*each.value.ref.values(), *each.value.test.values())
    }
    if not all("batchnorm" in name for name in names):
        return False
    if any("sync" in name for name in names):
        return not found.is_normalized_alike_over_ranks
    return not found.is_normalized_alike


def _batches_seen(found: StepDifferences) -> dict[str, tuple[float, float]]:
    return {
        c.key.path: (c.difference.ref.mean, c.difference.test.mean)
        for c in found.compared
        if c.difference is not None and c.key.slot == "buffer:num_batches_tracked"
    }


def _moves_alone(before: tuple[float, float], now: tuple[float, float]) -> bool:
    return (before[0] == now[0]) != (before[1] == now[1])


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
        if not (is_update or compared.key.phase is Phase.GRADS):
            return False
        if compared.is_update is not is_update or difference is None or difference.partial:
            return False
        if difference.at_least is not None or not origin.bad_parts.all():
            return False
        factor, rest = difference.fit()
        if not rest <= (slack if is_update else 3 * compared.allowed):
            return False
        factors.append(factor)
    return abs(factors[0] / factors[1] - 1) <= slack


def _is_choice(each: ComparedValue, inherited: float) -> bool:
    """True for a part of what a call with experts computes: what its router was given is not
    exactly the reference's, so a token between two experts may take the other one."""
    if each.value.is_input or not each.key.phase.facts.is_activation:
        return False
    names = {child.path.rpartition(".")[2].lower() for child in each.value.call.children}
    is_routed = not names.isdisjoint(_ROUTERS)
    return is_routed and inherited > Tolerances.resolution and each.error < _FEW_TOKENS


def _is_flipped(origin: Origin) -> bool:
    """True for indices or a mask of which no more are other ones than rounding can flip: what they
    were made of is not exactly the reference's."""
    each, difference = origin.compared, origin.compared.difference
    is_choice = each.value.is_discrete and each.key.phase is Phase.FORWARD
    if not is_choice or difference is None or origin.inherited == 0:
        return False
    if not each.is_of_choices or difference.is_shifted:
        return False
    fewest = difference.flips(is_mask=each.value.is_mask) * CHI_SQUARE_RANGE[0] ** 2
    return fewest <= _FEW_FLIPS + _FLIPPED * origin.inherited * difference.ref.count


class _Flow:
    """What is known of the values of a step so far, by call and by module."""

    def __init__(self, owned: defaultdict[str, _State], *, has_stepped: bool) -> None:
        self._owned, self._has_stepped = owned, has_stepped
        self._shown = {
            path[:end]
            for path, state in owned.items()
            if state.is_known
            for end in (0, *(at for at, char in enumerate(path) if char == "."), len(path))
        }
        """Paths of modules whose parameters are known, and what is around them."""
        self._so_far: defaultdict[Phase, _State] = defaultdict(_State)
        self._inputs: defaultdict[CallView, _State] = defaultdict(_State)
        self._handed: dict[CallView, ComparedValue] = {}
        """The first input of each call."""
        self._inside: defaultdict[CallView, _State] = defaultdict(_State)
        """Of the calls that a call makes."""
        self._at: defaultdict[tuple[Phase, str], _State] = defaultdict(_State)
        """By phase and path of the module."""
        self._gradients: dict[tuple[str, str], _State] = {}
        self.of_batch = _State()
        """Of values made of a whole batch: gradients of any tensor may come from them."""
        self.data = _State()
        """Of the samples of the step, where they are not the reference's."""
        self._spoiled_at = {path: s.origin for path, s in owned.items() if s.origin is not None}
        self._spoiled = next(iter(self._spoiled_at.values()), None)
        """Of parameters that were wrong when the step began: they may reach any value that stands
        behind unknown ones."""
        self.stepped: defaultdict[str, _State] = defaultdict(_State)
        """By path of the module: its parameters after the step."""

    def givers(self, each: ComparedValue) -> _State:
        """Return what is known of what a value was made of."""
        key, call = each.key, each.value.call
        found = _State()
        if key.phase is Phase.PARAMS:
            own = self._gradients.get((key.path, key.slot.partition(":")[2]))
            found.take(own or self._so_far[Phase.GRADS])
            found.take(self._owned[key.path])
            return found
        if key.phase is Phase.GRADS:
            found.take(self._at[Phase.FORWARD, key.path])
            found.take(self._at[Phase.BACKWARD, key.path])
            found.take(self.data)
            if not found.is_known:
                found.take(self._so_far[Phase.FORWARD])
                found.take(self._so_far[Phase.BACKWARD])
                found.origin = found.origin or self._spoiled
            found.take(self._owned[key.path])
            return found
        if key.phase is Phase.BACKWARD:
            found.take(self.of_batch)
            found.take(self._at[Phase.FORWARD, key.path])
        if each.value.is_input:
            found.take(self._so_far[key.phase])
            if key.phase is Phase.BACKWARD:
                found.take(self._so_far[Phase.FORWARD])
            if key.path:
                found.origin = found.origin or self._spoiled
            return found
        inputs, inside = self._inputs[call], self._inside[call]
        found.take(inputs)
        found.take(inside)
        found.take(self._owned[key.path])
        if self._has_stepped and key.path not in self._shown:
            found.error = max(found.error, _UNSEEN_STEP)
        if found.origin is None:
            found.origin = self._spoiled_inside(key.path)
        if not inputs.is_known and not inside.is_known:
            found.take(self._so_far[key.phase])
            found.origin = found.origin or self._spoiled
        return found

    def _spoiled_inside(self, path: str) -> Origin | None:
        """Return what made a parameter wrong before the step, of a module inside another one."""
        inside = (o for at, o in self._spoiled_at.items() if not path or at.startswith(f"{path}."))
        return next(inside, None)

    def passes_on(self, each: ComparedValue) -> bool:
        """True where a call hands out what it was given, in one of both runs and not in the other:
        random numbers are drawn in that one alone."""
        given = self._handed.get(each.value.call)
        if given is None or given.difference is None or each.difference is None:
            return False
        made, handed = each.difference, given.difference
        return (made.ref == handed.ref) != (made.test == handed.test)

    def add(self, each: ComparedValue, state: _State) -> None:
        """Take what was found of a value."""
        key, call = each.key, each.value.call
        self._so_far[key.phase].take(state)
        if key.phase is Phase.PARAMS:
            self.stepped[key.path].take(state)
            return
        if key.phase is Phase.GRADS:
            self._gradients[key.path, key.slot.partition(":")[2]] = state
            return
        if key.phase is not Phase.BACKWARD or each.value.is_input:
            self._at[key.phase, key.path].take(state)
        if each.value.is_input:
            self._inputs[call].take(state)
            self._handed.setdefault(call, each)
        around = call.parent
        while around is not None:
            self._inside[around].take(state)
            around = around.parent
