"""Differences that a right program may have: random numbers, choices between equals, statistics of
a batch that is split in another way.
"""

from __future__ import annotations

from typing import Final

from rankscope.diagnosis.comparison.comparedvalue import ComparedValue
from rankscope.diagnosis.comparison.difference import CHI_SQUARE_RANGE
from rankscope.diagnosis.comparison.stepdifferences import StepDifferences
from rankscope.diagnosis.comparison.tolerances import Tolerances
from rankscope.diagnosis.comparison.valueflow import Origin, ValueFlow
from rankscope.record.call import Mode
from rankscope.record.phases import Phase

__all__ = ["LegalDifferences"]

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


class LegalDifferences:
    """Tells them, step by step."""

    def __init__(self) -> None:
        self._batches_seen: dict[str, tuple[float, float]] = {}
        """By path of a batch norm: how many batches both sides took statistics of."""
        self._in_one: frozenset[str] = frozenset()
        """Batch norms that took statistics in one of both runs alone: the other one used what it
        had learned."""

    def read(self, found: StepDifferences) -> None:
        """Take note of which batch norms learned in a step, or of what a run began with."""
        counts, before = _batches_seen(found), self._batches_seen
        both = counts.keys() & before.keys()
        self._in_one = frozenset(p for p in both if _moves_alone(before[p], counts[p]))
        self._batches_seen = before | counts

    def mark(self, origin: Origin, flow: ValueFlow, found: StepDifferences) -> None:
        """Say of an origin whether a right program may differ so."""
        each, mode = origin.compared, origin.mode
        origin.is_random = _is_random(each, mode) and not flow.passes_on(each)
        origin.is_choice = _is_choice(each, origin.inherited) or _is_flipped(origin)
        is_learned = each.key.path in self._in_one
        origin.is_of_batch = not is_learned and _is_of_batch(each, mode, found)


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
    is_choice = each.key.phase is Phase.FORWARD and each.is_of_choices
    if not is_choice or difference is None or origin.inherited == 0 or difference.is_shifted:
        return False
    fewest = difference.flips(is_mask=each.value.is_mask) * CHI_SQUARE_RANGE[0] ** 2
    return fewest <= _FEW_FLIPS + _FLIPPED * origin.inherited * difference.ref.count
