"""What the values of a step are made of, and what is known of that: errors, and the origin that
reached it. Givers are

    what goes into a call          everything that was computed before it in the phase
    what comes out of it           what went in, what its children did, its own parameters
    the gradient of a parameter    what went into its module, in both directions
    the update of a parameter      its gradient

Where nothing of the givers is known, everything that was computed before stands for them.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from rankscope.diagnosis.comparison.difference import ComparedValue
from rankscope.diagnosis.evidence.stepview import Array, CallView
from rankscope.record.call import Mode
from rankscope.record.phases import Phase

_UNSEEN_STEP: Final = 1e-3
"""How far parameters that a trace does not show (FSDP1 keeps them flat) may be off after a step: an
optimizer that takes the sign of a gradient turns its rounding into whole steps."""


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
    """Further gradients that the same sentence says."""
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
            return self.compared.value.test_ranks
        return np.unique(np.concatenate([difference.ranks(self.bad_parts), *self.holders]))


@dataclass(slots=True, eq=False)
class GiverState:
    """How wrong some values are together."""

    error: float = 0.0
    origin: Origin | None = None
    is_known: bool = False

    def take(self, *others: GiverState) -> None:
        """Add what is known of others."""
        for other in others:
            if other.is_known:
                self.error = max(self.error, other.error)
                self.origin = self.origin or other.origin
                self.is_known = True


class ValueFlow:
    """What is known of the values of a step so far, by call and by module."""

    def __init__(self, owned: defaultdict[str, GiverState], *, has_stepped: bool = False) -> None:
        self._owned, self._has_stepped = owned, has_stepped
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
        """The first input of each call."""
        self._inside: defaultdict[CallView, GiverState] = defaultdict(GiverState)
        """Of the calls that a call makes."""
        self._at: defaultdict[tuple[Phase, str], GiverState] = defaultdict(GiverState)
        """By phase and path of the module."""
        self._gradients: dict[tuple[str, str], GiverState] = {}
        self.of_batch = GiverState()
        """Of values made of a whole batch: gradients of any tensor may come from them."""
        self.data = GiverState()
        """Of the samples of the step, where they are not the reference's."""
        self._spoiled_at = {path: s.origin for path, s in owned.items() if s.origin is not None}
        self._spoiled = next(iter(self._spoiled_at.values()), None)
        """Of parameters that were wrong when the step began: they may reach any value that stands
        behind unknown ones."""
        self.stepped: defaultdict[str, GiverState] = defaultdict(GiverState)
        """By path of the module: its parameters after the step."""

    def givers(self, each: ComparedValue) -> GiverState:
        """Return what is known of what a value was made of."""
        key, call = each.key, each.value.call
        found = GiverState()
        if key.phase is Phase.PARAMS:
            own = self._gradients.get(key.parameter) or self._so_far[Phase.GRADS]
            found.take(own, self._owned[key.path])
            return found
        both = Phase.FORWARD, Phase.BACKWARD
        if key.phase is Phase.GRADS:
            found.take(*(self._at[phase, key.path] for phase in both), self.data)
            if not found.is_known:
                found.take(*(self._so_far[phase] for phase in both))
                found.origin = found.origin or self._spoiled
            found.take(self._owned[key.path])
            return found
        if key.phase is Phase.BACKWARD:
            found.take(self.of_batch, self._at[Phase.FORWARD, key.path])
        if each.value.is_input:
            found.take(self._so_far[key.phase])
            if key.phase is Phase.BACKWARD:
                found.take(self._so_far[Phase.FORWARD])
            if key.path:
                found.origin = found.origin or self._spoiled
            return found
        inputs, inside = self._inputs[call], self._inside[call]
        found.take(inputs, inside, self._owned[key.path])
        if self._has_stepped and key.path not in self._shown:
            found.error = max(found.error, _UNSEEN_STEP)
        if found.origin is None:
            below = f"{key.path}." if key.path else ""
            spoiled = (o for at, o in self._spoiled_at.items() if at.startswith(below))
            found.origin = next(spoiled, None)
        if not inputs.is_known and not inside.is_known:
            found.take(self._so_far[key.phase])
            found.origin = found.origin or self._spoiled
        return found

    def passes_on(self, each: ComparedValue) -> bool:
        """True where a call hands out what it was given, in one of both runs and not in the other:
        random numbers are drawn in that one alone."""
        given = self._handed.get(each.value.call)
        if given is None or given.difference is None or each.difference is None:
            return False
        made, handed = each.difference, given.difference
        return (made.ref == handed.ref) != (made.test == handed.test)

    def add(self, each: ComparedValue, state: GiverState) -> None:
        """Take what was found of a value."""
        key, call = each.key, each.value.call
        self._so_far[key.phase].take(state)
        if key.phase is Phase.PARAMS:
            self.stepped[key.path].take(state)
            return
        if key.phase is Phase.GRADS:
            self._gradients[key.parameter] = state
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
