"""What the values of a step are made of, how wrong those givers are, and the origin that reached
them. Givers are

    what goes into a call          everything that was computed before it in the phase
    what comes out of it           what went in, what its children did, its own parameters
    the gradient of a parameter    what went into its module, in both directions, and its backward
    the update of a parameter      its gradient

Where nothing of the givers is known, everything that was computed before stands for them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from rankscope.diagnosis.comparison.difference import UNSEEN_STEP, ComparedValue
from rankscope.diagnosis.evidence.stepview import Array, CallView
from rankscope.record.call import Mode
from rankscope.record.phases import Phase


@dataclass(slots=True, eq=False, kw_only=True)
class Origin:
    """A value that differs though what it was made of agrees."""

    compared: ComparedValue
    mode: Mode
    step: int
    inherited: float
    """Largest error of what it was made of."""
    is_random: bool = False
    modes: str = ""
    """Who steps its module in eval mode and who does not, where that is not the reference's."""
    is_choice: bool = False
    """True where rounding may have sent some tokens to other experts than the reference's."""
    is_of_batch: bool = False
    """True where a module normalized over a batch that the reference splits in another way."""
    is_at_router: bool = False
    """True for what came back to a router of a batch that the runs split unlike."""
    is_isolated: bool = False
    """True where its call was given what the reference's was, to the bit."""
    not_compared: list[ComparedValue] = field(default_factory=list)
    """Values before this one that were not compared by their elements."""
    agreed: ComparedValue | None = None
    """The last value before these that agrees by its elements; None without one in the phase."""
    alike: int = 0
    """Further gradients that the same sentence says."""
    holders: list[Array] = field(default_factory=list)
    is_of_all: bool = False
    """True where it stands for all values of its phase, which share one factor."""
    is_of_most: bool = False
    """True where it stands for most final gradients, which share no factor."""
    is_apart: bool = False
    """True where ranks hold each of these final gradients unlike."""
    is_fed: bool = True
    """False for a final gradient where what backward gave its module could not be compared."""
    agreed_before: int = 0
    """Gradients of other modules that backward makes before these, and that agree."""
    is_reordered: bool = False
    """True where its statistics agree, and what its module makes of it shows that it does not."""
    is_blind: bool = False
    """True where nothing that these follow from could be compared."""
    family: str = ""
    """What the paths of these have in common, where all other final gradients agree."""
    right: int = 0
    """How many of these others there are."""
    victims: list[ComparedValue] = field(default_factory=list)

    @property
    def is_left_out_step(self) -> bool:
        """True where ranks step another model than the reference does."""
        return len(self.compared.left_out_by) > 0

    @property
    def is_legal(self) -> bool:
        """True where a right program may differ so: nothing behind it can be judged."""
        return self.is_random or self.is_choice or self.is_of_batch

    @property
    def bad_parts(self) -> Array:
        """[p] which parts of the value are wrong."""
        difference = self.compared.difference
        if difference is not None and difference.partial:
            return np.ones(len(self.compared.errors), bool)
        parts: Array = self.compared.errors > self.compared.allowed
        if difference is not None and difference.is_newly_nonfinite:
            parts = parts & difference.nonfinite_parts()
        return parts if parts.any() else np.ones(len(parts), bool)

    @property
    def holder_ranks(self) -> Array:
        """Ranks that hold the wrong parts, sorted."""
        difference = self.compared.difference
        if self.is_left_out_step:
            return self.compared.left_out_by
        if difference is None:
            return self.compared.value.test_ranks
        ranks = np.unique(np.concatenate([difference.ranks(self.bad_parts), *self.holders]))
        return ranks if self._later_ranks is None else np.intersect1d(ranks, self._later_ranks)

    @property
    def _later_ranks(self) -> Array | None:
        """Of pieces: the ranks that hold the next value wrong that elements tell, of that phase;
        None where some of its parts are not those of single ranks, or there is no such value."""
        compared = self.compared
        if compared.difference is None or compared.difference.cut is None:
            return None
        later = (
            v for v in self.victims if v.key.phase is compared.key.phase and v.is_told_by_elements
        )
        for victim in later:
            difference = victim.difference
            if difference is not None and not difference.partial and len(difference.members) > 1:
                return difference.ranks(victim.errors > victim.allowed)
            break
        return None

    @property
    def has_rank_resolution(self) -> bool:
        """True where digests tell which of the ranks that hold it are wrong."""
        difference = self.compared.difference
        is_told = difference is None or len(difference.members) > 1
        return is_told or self._later_ranks is not None


@dataclass(slots=True, eq=False)
class GiverState:
    """How wrong some values are together."""

    error: float = 0.0
    origin: Origin | None = None
    is_known: bool = False

    def take(self, *states: GiverState) -> None:
        """Add other states."""
        for state in states:
            if state.is_known:
                self.error = max(self.error, state.error)
                self.origin = self.origin or state.origin
                self.is_known = True


class ValueFlow:
    """How wrong the values of a step are so far, by call and by module."""

    def __init__(
        self,
        owned: defaultdict[str, GiverState],
        *,
        has_stepped: bool = False,
        unseen: Mapping[str, Origin] | None = None,
        scored: Origin | None = None,
    ) -> None:
        """Take the parameters by module, and whether a step made them. `unseen`: by module whose
        parameters could not be compared, the first fault, which may have reached them. `scored`: a
        fault of what was computed without gradients before, of which a loss may be made."""
        self._owned, self._has_stepped, self._unseen = owned, has_stepped, unseen or {}
        self._shown = {
            path[:end]
            for path, state in owned.items()
            if state.is_known
            for end in (0, *(at for at, char in enumerate(path) if char == "."), len(path))
        }
        """Paths of modules whose parameters are known, and what is around them."""
        self._so_far: defaultdict[Phase, GiverState] = defaultdict(GiverState)
        self._inputs: defaultdict[CallView, GiverState] = defaultdict(GiverState)
        self._handed: dict[CallView, ComparedValue] = {}
        self._inside: defaultdict[CallView, GiverState] = defaultdict(GiverState)
        self._at: defaultdict[tuple[Phase, str], GiverState] = defaultdict(GiverState)
        self._made: defaultdict[str, GiverState] = defaultdict(GiverState)
        """By path: the gradients that backward of the module made."""
        self._gradients: dict[tuple[str, str], GiverState] = {}
        self.of_batch = GiverState()
        """Of values made of a whole batch: gradients of any tensor may come from them."""
        self.data = GiverState()
        """Of the samples of the step, where they are not the reference's."""
        self._spoiled_at = {path: s.origin for path, s in owned.items() if s.origin is not None}
        self._spoiled = next(iter(self._spoiled_at.values()), None)
        self._of_loss = self._spoiled or scored
        """Of parameters that began wrong: they may reach any value behind unknown ones."""
        self.stepped: defaultdict[str, GiverState] = defaultdict(GiverState)
        """By path of the module: its parameters after the step."""

    def givers(self, pair: ComparedValue) -> GiverState:
        """Return how wrong the givers of a value are."""
        key, phase, call = pair.key, pair.key.phase, pair.value.call
        owned, state = self._owned[key.path], GiverState()
        if phase is Phase.PARAMS:
            state.take(self._gradients.get(key.parameter) or self._so_far[Phase.GRADS], owned)
            return state
        directions = Phase.FORWARD, Phase.BACKWARD
        if phase is Phase.GRADS:
            at = [self._at[direction, key.path] for direction in directions]
            state.take(*at, self.data)
            if not state.is_known:
                state.origin = self._spoiled
            unknown = [d for d, state_at in zip(directions, at) if not state_at.is_known]
            state.take(*(self._so_far[direction] for direction in unknown))
            if not at[
                1
            ].is_known:  # what went wrong is behind the gradients that backward makes later
                state.origin = state.origin or self._so_far[Phase.GRADS].origin
            # one backward makes the gradients of a module's inputs and parameters
            state.origin = state.origin or self._made[key.path].origin
            state.take(owned)
            return state
        if phase is Phase.BACKWARD:
            state.take(self.of_batch, self._at[Phase.FORWARD, key.path])
        if pair.value.is_input:
            state.take(self._so_far[phase])
            if phase is Phase.BACKWARD:
                state.take(self._so_far[Phase.FORWARD])
            if phase is Phase.BACKWARD and call.parent is None:  # made of all that a rank holds
                state.origin = state.origin or self._of_loss
            elif key.path:
                state.origin = state.origin or self._spoiled
            else:  # another model may have made it
                elsewhere = (o for at, o in self._spoiled_at.items() if at.startswith("@"))
                state.origin = state.origin or next(elsewhere, None)
            return state
        inputs, inside = self._inputs[call], self._inside[call]
        state.take(inputs, inside, owned)
        if self._has_stepped and key.path not in self._shown:
            state.error = max(state.error, UNSEEN_STEP)
            state.origin = state.origin or self._unseen.get(key.path)
        if state.origin is None:
            below = f"{key.path}." if key.path else ""
            spoiled = (o for at, o in self._spoiled_at.items() if at.startswith(below))
            state.origin = next(spoiled, None)
        if not inputs.is_known and not inside.is_known:
            state.take(self._so_far[phase])
            if phase is Phase.BACKWARD:
                state.take(self._so_far[Phase.FORWARD])
            state.origin = state.origin or self._spoiled
        return state

    def has_right_parameters(self, path: str) -> bool:
        """True where the parameters of a module are known to agree with the reference."""
        owned = self._owned[path]
        return owned.is_known and owned.origin is None and owned.error <= UNSEEN_STEP

    def is_fed(self, pair: ComparedValue) -> bool:
        """False for a final gradient of whose module nothing tells what backward was given."""
        is_gradient = pair.key.phase is Phase.GRADS
        return not is_gradient or self._at[Phase.BACKWARD, pair.key.path].is_known

    def passes_on(self, pair: ComparedValue) -> bool:
        """True where a call hands out what it was given, in one of both runs and not in the other:
        random numbers are drawn in that one alone."""
        entered = self._handed.get(pair.value.call)
        if entered is None or entered.difference is None or pair.difference is None:
            return False
        output, input_difference = pair.difference, entered.difference
        return (output.ref == input_difference.ref) != (output.test == input_difference.test)

    def add(self, pair: ComparedValue, state: GiverState) -> None:
        """Take what was found of a value."""
        key, call = pair.key, pair.value.call
        self._so_far[key.phase].take(state)
        if key.phase is Phase.PARAMS:
            if pair.difference is not None and pair.difference.cut is not None:
                origin = state.origin or self.givers(pair).origin  # its update is not known
                state = replace(state, error=max(state.error, UNSEEN_STEP), origin=origin)
            self.stepped[key.path].take(state)
            return
        if key.phase is Phase.GRADS:
            self._gradients[key.parameter] = state
            return
        if key.phase is not Phase.BACKWARD or pair.value.is_input:
            self._at[key.phase, key.path].take(state)
        elif not call.children:
            self._made[key.path].take(state)
        if pair.value.is_input:
            self._inputs[call].take(state)
            self._handed.setdefault(call, pair)
        for outer in call.around:
            self._inside[outer].take(state)


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
            pair = compared[index]
            if pair.key.phase is not Phase.BACKWARD or pair.difference is None:
                continue
            if pair.value.is_input:
                following = pair
            elif following is not None:
                self._next[index] = following
        self._compared = compared
        self._summands: ComparedValue | None = None
        self._given: set[CallView] = set()
        self._given_to: dict[str, ComparedValue] = {}
        """Where the summands began that backward of a module was given, by its path."""
        self.explained = self._explained_by_others()
        """Indices of the totals of a tensor that another module's part makes wrong."""
        self._gradients: dict[tuple[str, str], ComparedValue] = {}
        self._elsewhere: list[ComparedValue] = []

    def summands(self, pair: ComparedValue) -> None:
        """Take a value that ranks hold as summands."""
        if pair.key.phase is Phase.GRADS:
            name = pair.key.parameter
            self._gradients[name] = self._given_to.get(pair.key.path, pair)
        else:
            self._summands = self._summands or pair
            if pair.value.is_input:
                self._given.add(pair.value.call)
                if pair.key.phase is Phase.BACKWARD:
                    self._given_to.setdefault(pair.key.path, self._summands)

    def _explained_by_others(self) -> set[int]:
        """Return the indices of totals of one tensor that are wrong because another module, which
        uses that tensor too and comes later, was given a wrong gradient."""
        tensors: dict[tuple[str, int, str], bytes] = {}
        totals: dict[tuple[bytes, bytes], list[int]] = {}
        wrongly_given: set[CallView] = set()
        for index, pair in enumerate(self._compared):
            key, difference = pair.key, pair.difference
            if difference is None:
                continue
            if key.phase is Phase.FORWARD:
                tensors[key.path, key.ordinal, key.slot] = difference.fingerprint
            elif key.phase is Phase.BACKWARD and pair.error > pair.allowed:
                tensor = tensors.get((key.path, key.ordinal, key.slot.removeprefix("grad_")))
                if pair.value.is_input:
                    wrongly_given.add(pair.value.call)
                elif tensor is not None and not difference.partial:
                    totals.setdefault((tensor, difference.fingerprint), []).append(index)
        explained: set[int] = set()
        for indices in totals.values():
            calls = [self._compared[index].value.call for index in indices]
            for place, (index, call) in enumerate(zip(indices, calls)):
                later = wrongly_given.intersection(calls[place + 1 :]).difference(call.around)
                if call not in wrongly_given and later:
                    explained.add(index)
        return explained

    def is_left_unreduced(self, pair: ComparedValue) -> bool:
        """True for a parameter that ranks step with gradients of their own, another one on each."""
        return (
            pair.key.phase is Phase.PARAMS
            and pair.difference is not None
            and self.earlier_than(pair) is not None
        )

    def is_counted_elsewhere(self, index: int) -> bool:
        """True for a wrong gradient of an input where what is computed next is right."""
        pair, following = self._compared[index], self._next.get(index)
        if following is None or pair.error <= pair.allowed:
            return False
        # beside such an error the table of dtypes is strict enough, where noise says less
        if following.error > max(following.allowed, following.by_dtype):
            return False
        self._elsewhere.append(pair)
        return True

    def is_refuted(self, index: int) -> bool:
        """True for pieces that are not the reference's together though what is made of them is: the
        next value of the phase that elements tell, else all final gradients that elements tell."""
        pair = self._compared[index]
        if pair.error <= pair.allowed or not pair.key.phase.facts.is_activation:
            return False
        later = [c for c in self._compared[index + 1 :] if c.is_told_by_elements]
        beside = [c for c in later if c.key.phase is pair.key.phase][:1]
        users = beside or [c for c in later if c.key.phase is Phase.GRADS]
        return bool(users) and all(c.error <= c.allowed for c in users)

    def earlier_than(self, pair: ComparedValue) -> ComparedValue | None:
        """Return the value that explains a new origin; None for no such value."""
        if pair.key.phase is Phase.PARAMS:
            gradient = self._gradients.get(pair.key.parameter)
            return gradient if gradient is not None and _is_each_its_own(pair) else None
        if not pair.value.is_input:
            return self._summands if pair.value.call in self._given else None
        if pair.key.phase is Phase.BACKWARD:
            near = (e for e in self._elsewhere if abs(e.error - pair.error) <= 1e-3 * pair.error)
            return next(near, None) or self._summands
        return self._summands

    def passed(self, pair: ComparedValue) -> None:
        """Forget summands once something behind them is right."""
        if pair.error <= pair.allowed and not pair.value.is_input:
            self._summands = None


def _is_each_its_own(pair: ComparedValue) -> bool:
    """False for a parameter that some ranks hold alike after gradients of their own, or as the
    reference has it: they have reduced these elsewhere. Adam's first step hides unlike gradients
    from distances, not from bytes."""
    sides = pair.value.test.values()
    by_rank = {rank: number for v in sides for rank, number in zip(v.ranks.tolist(), v.hashes)}
    is_unlike = 1 < len(by_rank) == len({*by_rank.values()})
    return pair.difference is None or pair.is_wrong_everywhere or is_unlike
