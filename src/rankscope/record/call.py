"""What happened when: phases, modes, and the key under which calls of all ranks meet."""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["CallKey", "Mode", "Phase"]


class Phase(enum.IntEnum):
    """Part of a step a call belongs to. The numbers are written in spools: never renumber."""

    SETUP = 0
    """Parameters and buffers before the first root forward."""
    FORWARD = 1
    RECOMPUTE = 2
    """Activation checkpointing re-running forward inside backward."""
    BACKWARD = 3
    GRADS = 4
    """Final gradients, just before the optimizer step."""
    PARAMS = 5
    """Parameters and buffers, just after the optimizer step."""
    COLLECTIVE = 6

    @property
    def word(self) -> str:
        """The phase as traces and options spell it."""
        return self.name.lower()


class Mode(enum.IntEnum):
    """Kind of step. The numbers are written in spools: never renumber."""

    TRAIN = 0
    EVAL = 1
    """Root forwards without gradients."""

    @property
    def word(self) -> str:
        """The mode as traces and options spell it."""
        return self.name.lower()


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class CallKey:
    """What makes two ranks' calls the same node."""

    mode: Mode
    step: int
    micro_batch: int | None
    """n-th call of the same root inside the step; None outside forward, recompute and backward."""
    phase: Phase
    path: str
    """Canonical module path, "" for the root."""
    ordinal: int
    """0 for the first call of this path in this phase of this micro-batch, and so on."""
