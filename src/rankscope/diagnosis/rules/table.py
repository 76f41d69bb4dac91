"""The rules that every step and setup goes through, in this order, and what each of them needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass
from typing import Final

from rankscope.diagnosis.context import Candidate, JudgedStep
from rankscope.diagnosis.evidence.recorded import Evidence, EvidenceScope
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
from rankscope.record.phases import Phase

__all__ = ["STEP_RULES"]


@dataclass(frozen=True, slots=True)
class StepRule:
    """A function of a step, asked only where the trace holds what it needs."""

    judge: Callable[[JudgedStep], Iterable[Candidate]]
    asks: str
    """What is not judged where something lacks: a noun phrase."""
    needs: Set[Evidence] = frozenset()

    def __call__(self, step_view: JudgedStep) -> Iterator[Candidate]:
        """Yield what is wrong in a step; nothing where the trace lacks what the rule needs."""
        if not step_view.lacks(self.needs, self.asks):
            yield from self.judge(step_view)


_SETUP, _FORWARD, _RECOMPUTE = Phase.SETUP, Phase.FORWARD, Phase.RECOMPUTE
_GRADS, _PARAMS, _PASSES = Phase.GRADS, Phase.PARAMS, Phase.ACCUMULATED
_COLLECTIVES, _ROOTS = Phase.COLLECTIVE, EvidenceScope.ROOTS

STEP_RULES: Final[tuple[StepRule, ...]] = (
    StepRule(nonfinite_origins, "NaN and infinity"),
    StepRule(uninitialised_parameters, "parameters that nobody initialised", {_SETUP}),
    StepRule(equal_shards, "shards that begin equal", {_SETUP}),
    StepRule(carried_gradients, "gradients left over from the step before", {_GRADS}),
    StepRule(unequal_replicas, "replicas"),
    StepRule(lost_ties, "lost ties", {_SETUP, _GRADS}),
    StepRule(other_weights, "weights that begin unlike", {_SETUP, _FORWARD, _GRADS, _PARAMS}),
    StepRule(lost_reductions, "outputs that siblings replicate", {_FORWARD, _ROOTS}),
    StepRule(different_kinds, "dtypes, shapes and placements over ranks"),
    StepRule(different_calls, "modules that some ranks do not call", {_SETUP, _FORWARD, _ROOTS}),
    StepRule(layers_of_two_stages, "layers that two stages run", {_SETUP, _FORWARD, _ROOTS}),
    StepRule(mismatched_collectives, "collectives", {_COLLECTIVES}),
    StepRule(wrong_exchanges, "what collectives exchange", {_COLLECTIVES}),
    StepRule(mixed_up_micro_batches, "micro-batches of stages", {_FORWARD, _ROOTS}),
    StepRule(changed_recomputations, "recomputations", {_FORWARD, _RECOMPUTE}),
    StepRule(parameters_left, "parameters that do not move", {_GRADS, _PARAMS}),
    StepRule(
        detached_by_collectives,
        "gradients that end at a collective",
        {_FORWARD, _GRADS, _PARAMS, _COLLECTIVES},
    ),
    StepRule(rescaled_shards, "gradients scaled by each rank", {_GRADS, _PASSES}),
    StepRule(lost_micro_batches, "lost micro-batches", {_FORWARD, _GRADS, _PASSES, _ROOTS}),
    StepRule(duplicate_batches, "batches that ranks have in common", {_FORWARD, _ROOTS}),
    StepRule(
        other_batches,
        "batches of ranks that share a layer",
        {_SETUP, _FORWARD, _ROOTS, _COLLECTIVES},
    ),
)
