"""Where the gradients of ranks that share one computation began to differ.

Ranks that were handed the same batch and hand out the same go through one computation: an equal
value has one gradient, the sum over all that was made of it. Where gradients of replicas differ on
such ranks, the first place in backward at which they do is the fault, and they are its victims:

* the gradient of the model's output: the loss differs, though the output is the same, or
* a module with equal gradients of outputs, an equal input and unlike gradients of that: what was
  made of it on several ranks was not summed.

Where ranks hand out different values, forward went apart before: at the first module without
weights of any rank's own that was handed the same and drew random numbers.

A tensor that several modules see has one gradient for all. It is charged to the innermost module
that alone took it; where several did, to the module around them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from rankscope.diagnosis.context import Candidate, JudgedStep
from rankscope.diagnosis.evidence.distances import is_within_rounding, sides, sides_text
from rankscope.diagnosis.evidence.recorded import EvidenceScope
from rankscope.diagnosis.evidence.stepview import Array, CallView, SlotValues, StepView
from rankscope.diagnosis.rules.equality import drawn_apart_advice
from rankscope.record.finding import Kind, Severity
from rankscope.record.phases import Phase
from rankscope.record.ranks import ranks_named

_NEEDS: Final = frozenset(
    {
        Phase.SETUP,
        Phase.FORWARD,
        Phase.BACKWARD,
        Phase.GRADS,
        EvidenceScope.ROOTS,
        EvidenceScope.SLOTS,
    }
)
_DATA_PARALLEL: Final = frozenset({"DDP", "FSDP1", "FSDP2"})
"""Wrappers whose ranks may draw random numbers of their own."""
_OTHER_LOSS: Final = (
    "The model gave the same output on these ranks, and what came back to it differs: look at the "
    "loss on each of them, its weight, its targets and its mask."
)
_NOT_SUMMED: Final = (
    "Every rank hands back the part of the gradient that its own shard gives: sum it over these "
    "ranks, as a column-parallel layer does in its backward."
)


def origins_of_gradients(
    step_view: JudgedStep, candidates: Sequence[Candidate]
) -> Iterator[Candidate]:
    """Yield the place that explains gradients which rules found to differ."""
    if not step_view.evidence >= _NEEDS:
        return
    unequal = [
        s for s in candidates if s.phase is Phase.GRADS and s.severity is Severity.FAULT and s.slot
    ]
    for group in step_view.same_inputs if unequal else ():
        ranks = set(group.tolist())
        if any(ranks.issubset(s.ranks) and s.kind is not Kind.COLLECTIVE for s in unequal):
            yield from _first(step_view, group)


def _first(step_view: JudgedStep, group: Array) -> Iterator[Candidate]:
    """Yield the first place at which ranks with one batch went apart."""
    made = [values.agree(group) for call in step_view.roots for values in call.outputs]
    if False in made:
        values = next(_drawn_apart(step_view, group), None)
        if values is not None:
            advice = drawn_apart_advice(values.call.path)
            what = "were handed the same, and hold different values"
            random = {"random_numbers": values.call.path}
            yield _candidate(step_view, values, group, what, advice, **random)
    elif True in made:
        places = _apart_in_backward(step_view, group)
        if places:
            _, _, values = min(places, key=lambda place: place[:2])
            is_loss = values.slot.startswith("grad_output")
            values = values if is_loss else _taker(step_view, values, group)
            advice = _OTHER_LOSS if is_loss else _NOT_SUMMED
            what = "compute the same, and get different gradients of it"
            yield _candidate(step_view, values, group, what, advice)


def _apart_in_backward(step_view: StepView, group: Array) -> list[tuple[int, int, SlotValues]]:
    """Return (when, -depth, gradient) of those that differ though values and inputs do not."""
    forward = {_key(call): call for call in step_view.of(Phase.FORWARD)}
    places: list[tuple[int, int, SlotValues]] = []
    for call in step_view.of(Phase.BACKWARD):
        own = forward.get(_key(call))
        if own is None or not np.isin(group, call.ranks).all():
            continue
        came = list(call.inputs)
        differing = [values for values in came if _differs(values, group)]
        if call.parent is None and own.parent is None:
            wrong = [h for h in differing if _agrees(own, h, "grad_output", group)]
            places += [(0, 0, values) for values in wrong]
        if came and not differing and all(values.agree(group) is not None for values in came):
            depth = call.path.count(".") + bool(call.path)
            places += [
                (int(values.times(group).min()), -depth, values)
                for values in call.outputs
                if _differs(values, group) and _agrees(own, values, "grad_input", group)
            ]
    return places


def _candidate(
    step_view: JudgedStep, values: SlotValues, group: Array, what: str, advice: str, **evidence: Any
) -> Candidate:
    return step_view.candidate(
        values,
        Kind.REPLICA,
        group,
        f"{ranks_named(group)} {what} ({sides_text(values, group)})",
        advice=advice,
        evidence=lambda: {
            "layout": "inferred",
            "values": sides(values, group),
            "rank_resolution": "none",
            **evidence,
        },
    )


def _drawn_apart(step_view: JudgedStep, group: Array) -> Iterator[SlotValues]:
    """Yield unlike outputs of leaf modules with shared weights, where ranks may not draw apart."""
    replicas = step_view.life.replicas
    if not _DATA_PARALLEL.isdisjoint(replicas.wrappers):
        return
    for call in step_view.of(Phase.FORWARD):
        if call.children or call.path in replicas.sharded_paths:
            continue
        is_plain = all(values.source == "unknown" for values in call.slots.values())
        if is_plain and call.is_given_the_same(group):
            yield from (values for values in call.outputs if _differs(values, group))


def at_innermost_taker(step_view: StepView, candidate: Candidate) -> Candidate:
    """Charge the gradient of an input to the innermost module that alone took that tensor."""
    if candidate.phase is Phase.BACKWARD and candidate.slot.startswith("grad_input"):
        ranks = np.array(candidate.ranks, np.int64)
        for call in step_view.named(candidate.path):
            values = call.slots.get(candidate.slot) if call.phase is Phase.BACKWARD else None
            if values is not None and call.micro_batch == candidate.micro_batch:
                taker = _taker(step_view, values, ranks)
                return replace(candidate, path=taker.call.path, slot=taker.slot)
    return candidate


def _taker(step_view: StepView, values: SlotValues, group: Array) -> SlotValues:
    """Return the gradient of a tensor at the innermost module that alone took it, or `values`."""
    inside = [
        each
        for call in step_view.of(Phase.BACKWARD)
        if _is_inside(call, values.call) and np.isin(group, call.ranks).all()
        for each in call.outputs
        if each.equals(values, group)
    ]
    innermost = [
        each for each in inside if not any(_is_inside(other.call, each.call) for other in inside)
    ]
    return innermost[0] if len({id(each.call) for each in innermost}) == 1 else values


def _is_inside(call: CallView, outer: CallView) -> bool:
    below = f"{outer.path}." if outer.path else ""
    is_within = call is not outer and call.path != outer.path and call.path.startswith(below)
    return is_within and call.micro_batch == outer.micro_batch


def _key(call: CallView) -> tuple[str, int | None, int]:
    return call.path, call.micro_batch, call.ordinal


def _differs(values: SlotValues, group: Array) -> bool:
    return values.agree(group) is False and not is_within_rounding(values, [group])


def _agrees(forward: CallView, gradient: SlotValues, word: str, group: Array) -> bool:
    slot = gradient.slot.replace(word, word.removeprefix("grad_"), 1)
    value = forward.slots.get(slot)
    return value is not None and value.agree(group) is True
