"""The phases of a step, and what is true of each."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseFacts:
    """What is true of a phase, whatever the module."""

    is_event: bool = False
    """An event of a whole root: its modules stand in one list however they nest. Else a phase of
    calls."""
    has_micro_batches: bool = False
    """Each of its calls belongs to one micro-batch."""
    is_activation: bool = False
    """Modules compute its values from a batch of samples."""
    slots: tuple[str, ...] = ()
    """Kinds of slots that a query without a phase finds in this phase; forward has the rest."""
    results: tuple[str, ...] = ()
    handed: tuple[str, ...] = ()
    """Prefixes of the slots that are inputs of its calls."""
    unequal: str
    """What to look at when replicas first differ in this phase."""


class Phase(enum.IntEnum):
    """Part of a step a call belongs to. The numbers are written in spools: never renumber."""

    SETUP = 0
    """Parameters and buffers before the first root forward."""
    FORWARD = 1
    RECOMPUTE = 2
    """Activation checkpointing re-running forward inside backward."""
    BACKWARD = 3
    GRADS = 4
    """Final gradients, just before the optimizer step: as the optimizer takes them."""
    PARAMS = 5
    """Parameters and buffers, just after the optimizer step."""
    COLLECTIVE = 6
    ACCUMULATED = 7
    """Gradients as a backward pass left them, where the optimizer took different ones."""

    @property
    def word(self) -> str:
        """The phase as traces and options spell it."""
        return self.name.lower()

    @property
    def facts(self) -> PhaseFacts:
        """Facts about the phase."""
        return _FACTS[self]

    @classmethod
    def having(cls, fact: Callable[[PhaseFacts], bool]) -> frozenset[Phase]:
        """Return the phases that have a fact."""
        return frozenset(phase for phase in cls if fact(phase.facts))


_FACTS: Final = {
    Phase.SETUP: PhaseFacts(
        unequal="The ranks begin with different weights: look at seeds, at how the checkpoint is "
        "loaded on each rank, and at the broadcast after it.",
        is_event=True,
    ),
    Phase.FORWARD: PhaseFacts(
        unequal="Look for a reduction that is missing in this module, for other weights, and for "
        "random numbers that should be the same on these ranks.",
        has_micro_batches=True,
        is_activation=True,
        results=("output",),
        handed=("input",),
    ),
    Phase.RECOMPUTE: PhaseFacts(
        unequal="Look for random numbers that should be the same on these ranks.",
        has_micro_batches=True,
        is_activation=True,
        results=("output",),
        handed=("input",),
    ),
    Phase.BACKWARD: PhaseFacts(
        unequal="Look for a reduction that is missing in the backward of this module.",
        has_micro_batches=True,
        is_activation=True,
        slots=("grad_input", "grad_output"),
        results=("grad_input",),
        handed=("grad_output",),
    ),
    Phase.GRADS: PhaseFacts(
        unequal="Something changed these gradients on some ranks only: clipping, scaling, a hook, "
        "a reduction over the wrong group.",
        is_event=True,
        slots=("grad", "scaler"),
    ),
    Phase.PARAMS: PhaseFacts(
        unequal="Look at optimizer state and options that differ by rank, and at code that writes "
        "parameters outside the optimizer.",
        is_event=True,
        slots=("param", "buffer"),
    ),
    Phase.ACCUMULATED: PhaseFacts(
        unequal="Nothing says that gradients are reduced when a backward pass ends.", is_event=True
    ),
    Phase.COLLECTIVE: PhaseFacts(
        unequal="Look at the arguments of this collective on these ranks.",
        has_micro_batches=True,
        slots=("collective",),
        results=("collective",),
    ),
}
