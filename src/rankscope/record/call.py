"""Calls: modes of their steps, how they end, and the key under which those of all ranks meet."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from rankscope.record.phases import Phase


class Mode(enum.IntEnum):
    """Kind of step. The numbers are written in spools: never renumber."""

    TRAIN = 0
    EVAL = 1
    """Root forwards without gradients."""
    UNKNOWN = 2
    """The mode is not known; no agent of today writes it."""

    @property
    def word(self) -> str:
        """The mode as traces and options spell it."""
        return self.name.lower()


class CallStatus(enum.IntEnum):
    """How a call ended: the only list. The numbers stand in spools and traces: never renumber."""

    RETURNED = 0
    RAISED = 1
    ABANDONED = 2
    """No hook saw the call end (KeyboardInterrupt): closed when the stack was repaired."""
    UNFINISHED = 3
    """No end was recorded: the rank died, or is still inside the call. Never in a spool."""
    STOPPED = 4
    """A recomputation that checkpointing stopped once backward's inputs were there."""
    NOT_ENTERED = 5
    """Compiled in place: no hook sees its calls, so nobody knows whether it was called."""
    NOT_WAITED = 6
    """An asynchronous collective for which nobody had waited when its step ended."""

    @property
    def word(self) -> str:
        """The status as traces spell it."""
        return self.name.lower()

    @staticmethod
    def word_of(number: int) -> str:
        """Return the word of a number; "unknown" for one that only a newer rankscope writes."""
        return _STATUS_WORDS.get(number, "unknown")


_STATUS_WORDS = {int(status): status.word for status in CallStatus}
IN_ORDER = (CallStatus.RETURNED.word, CallStatus.STOPPED.word, CallStatus.NOT_ENTERED.word)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class CallKey:
    """Calls of different ranks with an equal key are the same node."""

    mode: Mode
    step: int
    micro_batch: int | None
    """n-th call of the same root inside the step; None outside forward, recompute and backward."""
    phase: Phase
    path: str
    """Canonical module path, "" for the root."""
    ordinal: int
    """0 for the first call of this path in this phase of this micro-batch, and so on."""
