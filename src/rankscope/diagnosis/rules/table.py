"""The rules that every step and setup goes through, in this order, and what each of them needs."""

from __future__ import annotations

from typing import Final

from rankscope.diagnosis.context import StepRule
from rankscope.diagnosis.evidence.recorded import Evidence
from rankscope.diagnosis.rules.accumulation import carried_gradients, lost_micro_batches
from rankscope.diagnosis.rules.batches import duplicate_batches, other_batches
from rankscope.diagnosis.rules.collectives import mismatched_collectives, wrong_exchanges
from rankscope.diagnosis.rules.detached import detached_by_collectives
from rankscope.diagnosis.rules.equality import unequal_replicas
from rankscope.diagnosis.rules.nonfinite import nonfinite_origins
from rankscope.diagnosis.rules.parameterupdates import parameters_left
from rankscope.diagnosis.rules.recompute import changed_recomputations
from rankscope.diagnosis.rules.rescaled import rescaled_shards
from rankscope.diagnosis.rules.siblings import lost_reductions
from rankscope.diagnosis.rules.stages import mixed_up_micro_batches
from rankscope.diagnosis.rules.startvalues import equal_shards, uninitialised_parameters
from rankscope.diagnosis.rules.structure import (
    different_calls,
    different_kinds,
    layers_of_two_stages,
)
from rankscope.diagnosis.rules.weights import lost_ties, other_weights

__all__ = ["STEP_RULES"]

_SETUP, _FORWARD = Evidence.SETUP, Evidence.FORWARD
_GRADS, _PARAMS, _PASSES = Evidence.GRADS, Evidence.PARAMS, Evidence.ACCUMULATED
_COLLECTIVES, _ROOTS = Evidence.COLLECTIVE, Evidence.ROOTS


def _needs(*evidence: Evidence) -> frozenset[Evidence]:
    return frozenset(evidence)


STEP_RULES: Final[tuple[StepRule, ...]] = (
    StepRule(judge=nonfinite_origins, asks="NaN and infinity"),
    StepRule(
        judge=uninitialised_parameters,
        asks="parameters that nobody initialised",
        needs=_needs(_SETUP),
    ),
    StepRule(judge=equal_shards, asks="shards that begin equal", needs=_needs(_SETUP)),
    StepRule(
        judge=carried_gradients,
        asks="gradients left over from the step before",
        needs=_needs(_GRADS),
    ),
    StepRule(judge=unequal_replicas, asks="replicas"),
    StepRule(judge=lost_ties, asks="lost ties", needs=_needs(_SETUP, _GRADS)),
    StepRule(
        judge=other_weights,
        asks="weights that begin unlike",
        needs=_needs(_SETUP, _FORWARD, _GRADS, _PARAMS),
    ),
    StepRule(
        judge=lost_reductions,
        asks="outputs that siblings replicate",
        needs=_needs(_FORWARD, _ROOTS),
    ),
    StepRule(judge=different_kinds, asks="dtypes, shapes and placements over ranks"),
    StepRule(
        judge=different_calls,
        asks="modules that some ranks do not call",
        needs=_needs(_SETUP, _FORWARD, _ROOTS),
    ),
    StepRule(
        judge=layers_of_two_stages,
        asks="layers that two stages run",
        needs=_needs(_SETUP, _FORWARD, _ROOTS),
    ),
    StepRule(judge=mismatched_collectives, asks="collectives", needs=_needs(_COLLECTIVES)),
    StepRule(judge=wrong_exchanges, asks="what collectives exchange", needs=_needs(_COLLECTIVES)),
    StepRule(
        judge=mixed_up_micro_batches, asks="micro-batches of stages", needs=_needs(_FORWARD, _ROOTS)
    ),
    StepRule(
        judge=changed_recomputations,
        asks="recomputations",
        needs=_needs(_FORWARD, Evidence.RECOMPUTE),
    ),
    StepRule(
        judge=parameters_left, asks="parameters that do not move", needs=_needs(_GRADS, _PARAMS)
    ),
    StepRule(
        judge=detached_by_collectives,
        asks="gradients that end at a collective",
        needs=_needs(_FORWARD, _GRADS, _PARAMS, _COLLECTIVES),
    ),
    StepRule(
        judge=rescaled_shards, asks="gradients scaled by each rank", needs=_needs(_GRADS, _PASSES)
    ),
    StepRule(
        judge=lost_micro_batches,
        asks="lost micro-batches",
        needs=_needs(_FORWARD, _GRADS, _PASSES, _ROOTS),
    ),
    StepRule(
        judge=duplicate_batches,
        asks="batches that ranks have in common",
        needs=_needs(_FORWARD, _ROOTS),
    ),
    StepRule(
        judge=other_batches,
        asks="batches of ranks that share a layer",
        needs=_needs(_SETUP, _FORWARD, _ROOTS, _COLLECTIVES),
    ),
)
