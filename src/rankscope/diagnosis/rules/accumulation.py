"""Gradients that a step takes too few of, and gradients that were left over from the step before.

**Lost micro-batches.** Gradients of an earlier micro-batch were gone when a later backward pass
began, and are not in what the optimizer takes. Right programs do that too: they measure gradients
(of a probe, for a Fisher matrix), wipe them, then train. It is a fault where something shows that
the micro-batches were meant to be one batch:

* the lost gradients were not to be reduced (`no_sync`), the last were, and the same lines of the
  program called all forwards: a pass that measures has lines of its own; or
* every loss was divided by the number of micro-batches: its gradient is that fraction, or those of
  the logits are too small by that factor for a mean of cross entropies.

Every traced train step has to be like that, two at least: a first step may run zeros to reserve
memory, another may leave out a bad micro-batch. With several optimizers, gradients that one pass
left for the other are wiped on purpose (a GAN). Else it is one warning for a job. Nothing is said
where micro-batches had the same inputs (sharpness-aware minimization), inputs need gradients
(attacks), or passes share a forward (gradient surgery).

**Carried gradients.** `zero_grad` was skipped on some ranks. A reduction hides it, because all
ranks get the same wrong sum; so ranks mark gradients that were not zero when backward began. Where
ranks with the same parameter differ in the mark, one is wrong. Ranks that are all alike may
accumulate over steps; accelerators mark zeros too, so a rank with marks beside ranks with some
others tells nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from rankscope.diagnosis.context import Candidate, JudgedStep, candidate_at
from rankscope.diagnosis.evidence.distances import minority, rounding_of
from rankscope.diagnosis.evidence.gradientpasses import Mixture, TakenGradient
from rankscope.diagnosis.evidence.stepview import Array, CallView, SlotValues, StepView, grouped
from rankscope.record.finding import Kind, Severity
from rankscope.record.phases import Phase
from rankscope.record.ranks import ranks_named, ranks_text
from rankscope.record.value import ValueFlag

# ---- micro-batches that are lost -----------------------------------------------------------------

_NO_SYNC: Final = int(ValueFlag.NO_SYNC)
_RESTARTED, _SAME_LINES = int(ValueFlag.RESTARTED), int(ValueFlag.SAME_LINES)
_MOST_NAMED: Final = 256
_UNSURE: Final = 0.8
"""Of the largest gradient that a logit can have: some sample of a batch is guessed worse."""
_EVEN: Final = 1e-3
"""Relative: the gradients of a sample's logits add up to 0."""
_ADVICE: Final = (
    "Look for what wipes or replaces gradients between the micro-batches of a step: zero_grad in "
    "the inner loop, buffers that each backward overwrites, an engine that takes every backward "
    "for the last of a step (its gradient accumulation boundary)."
)
_WARNING: Final = (
    "Where the first passes only measure something, this is as it should be. Else look for what "
    "wipes gradients between the micro-batches of a step: zero_grad in the inner loop, or buffers "
    "that each backward overwrites."
)


def lost_micro_batches(step_view: JudgedStep) -> Iterator[Candidate]:
    """Yield a candidate for optimizer steps that lack what earlier micro-batches left."""
    events = {id(call.top) for call in step_view.of(Phase.GRADS)}
    for gradients, mixture in step_view.mixtures:
        ranks = gradients[0].values.ranks
        root = gradients[0].values.call.top.path
        forwards = [
            call
            for call in step_view.of(Phase.FORWARD)
            if call.parent is None and call.path == root and np.isin(ranks, call.ranks).all()
        ]
        if not mixture.lost or len(forwards) < len(gradients[0].worths):
            continue
        if not _are_batches_of_their_own(forwards, ranks):
            continue
        step_view.context.coverage.applied(*(gradient.values for gradient in gradients))
        is_meant = len(events) == 1 and (
            _is_held_back(gradients, mixture) or _are_shares(step_view, root, len(forwards))
        )
        candidate = _lost_candidate(step_view, gradients, mixture, ranks)
        if is_meant:
            yield candidate
        else:
            yield replace(candidate, severity=Severity.WARNING, advice=_WARNING, unless_always="")
            return


def _are_batches_of_their_own(forwards: Sequence[CallView], ranks: Array) -> bool:
    """True where no two of these calls were handed the same, and nothing that needs a gradient."""
    seen = set()
    for call in forwards:
        given = list(call.inputs)
        if not given or any(piece.requires_grad for values in given for piece in values.pieces):
            return False
        own = [values for values in given if np.isin(ranks, values.ranks).all()]
        seen.add(tuple(tuple(values.hashes[values.at(ranks)].tolist()) for values in own))
    return len(seen) == len(forwards)


def _is_held_back(gradients: Sequence[TakenGradient], mixture: Mixture) -> bool:
    """True where one place of the program ran all passes, and only the last was to be reduced."""
    worths = gradients[0].worths
    lost = [bool((worths[number].flags & _NO_SYNC).all()) for number in mixture.lost]
    again = [each.flags for each in gradients[0].passes if (each.flags & _RESTARTED).any()]
    is_loop = all(bool((flags & _SAME_LINES).all()) for flags in again)
    return is_loop and all(lost) and not (worths[-1].flags & _NO_SYNC).any()


def _are_shares(step_view: StepView, root: str, count: int) -> bool:
    """True where every loss of the step was divided by the number of micro-batches."""
    roots = (call for call in step_view.of(Phase.BACKWARD) if call.parent is None)
    came = grouped(((call.path, h.slot), h) for call in roots for h in call.inputs)
    for (path, _), gradients in came.items():
        if len(gradients) != count or not all(each.is_known.all() for each in gradients):
            continue
        if all((each.counts == 1).all() for each in gradients):
            if all(_is_near(each.column("mean"), 1 / count, each.dtype) for each in gradients):
                return True
        elif path == root and _are_small_logits(gradients, count):
            return True
    return False


def _is_near(numbers: Array, wanted: float, dtype: str) -> bool:
    return bool((abs(numbers - wanted) <= max(1e-6, rounding_of(dtype)) * wanted).all())


def _are_small_logits(gradients: Sequence[SlotValues], count: int) -> bool:
    """True where gradients of logits are those of mean cross entropies divided by `count`: over the
    number of samples, a probability, less 1 for the right logit. So those of a sample add up to 0,
    and none is below -1 over the number of samples."""
    largest = []
    for values in gradients:
        shapes = {piece.shape for piece in values.pieces}
        if len(shapes) != 1 or len(shape := shapes.pop()) < 2 or shape[-1] < 2:
            return False
        samples = np.prod(shape[:-1])
        least = -values.column("min")
        uneven = abs(values.column("mean")) * shape[-1]
        if not ((least > 0) & (uneven <= _EVEN * least)).all():  # NaN is neither
            return False
        largest.append(float((samples * count * least).max()))
    slack = 1 + max(1e-3, rounding_of(gradients[0].dtype))
    return max(largest) <= slack and max(largest) >= _UNSURE


def _lost_candidate(
    step_view: JudgedStep, gradients: Sequence[TakenGradient], mixture: Mixture, ranks: Array
) -> Candidate:
    first, worths = gradients[0].values, gradients[0].worths
    ends = [1 + worth.call.ordinal for worth in worths]  # passes are counted from 1 for people
    began = [str(ends[number] + 1) for number in mixture.lost if number + 1 < len(ends)]
    others = len(gradients) - 1
    return step_view.candidate(
        first,
        Kind.SCALE,
        ranks,
        f"{ranks_named(ranks)} stepped without the gradients of earlier micro-batches: "
        f"they were gone when backward pass {' and pass '.join(began)} of {ends[-1]} of this step "
        "began" + (f" (this gradient and {others} others)" if others else ""),
        advice=_ADVICE,
        once="lost micro-batches",
        unless_always=_WARNING,
        evidence=lambda: {
            "parameters": [
                ".".join(filter(None, gradient.values.parameter))
                for gradient in gradients[:_MOST_NAMED]
            ],
            "passes": len(worths),
            "lost": list(mixture.lost),
            "norms": [_norm([g.worths[n] for g in gradients]) for n in range(len(worths))],
            "taken": _norm([gradient.values for gradient in gradients]),
        },
        weight=len(gradients),
    )


def _norm(values: Sequence[SlotValues]) -> float:
    """On their lowest rank."""
    return float(np.sqrt(sum(float(each.column("l2")[0]) ** 2 for each in values)))


# ---- gradients that are left over ----------------------------------------------------------------

_LEFT_OVER = int(ValueFlag.CARRIED)


def carried_gradients(step_view: JudgedStep) -> Iterator[Candidate]:
    """Yield one candidate for a step that some ranks began with gradients of the step before."""
    marks = [(values, (values.flags & _LEFT_OVER) != 0) for values in step_view.gradients()]
    bearers = np.unique(np.concatenate([h.ranks[m] for h, m in marks] or [np.zeros(0, np.int64)]))
    shared = [(h, m) for h, m in marks if m.any() and not np.isin(h.ranks, bearers).all()]
    if not shared:
        return
    first, _ = shared[0]
    ranks = np.unique(np.concatenate([values.ranks for values, _ in shared]))
    own = ranks[np.isin(ranks, bearers)]
    others = ranks[~np.isin(ranks, bearers)]
    odd = minority(ranks, np.isin(ranks, bearers))
    blamed = odd if len(odd) < len(ranks) else own
    step_view.context.coverage.applied(*(values for values, _ in shared))
    yield candidate_at(
        step_view,
        first.call,
        Kind.REPLICA,
        first.slot,
        blamed,
        f"backward began with the gradients of the step before on {ranks_named(own)}, and "
        f"without on {ranks_named(others)}: they were added to this step's",
        advice="zero_grad was not called on every one of these ranks between the two backward "
        "passes: look for a condition around it that depends on the rank, or for a parameter group "
        "that one rank's optimizer lacks.",
        evidence=lambda: {
            "carried_by": ranks_text(own),
            "not_by": ranks_text(others),
            "gradients": len(shared),
        },
        times_ns=first.times(blamed) - 2,  # before gradients are reduced: see evidence/joins.py
        weight=len(shared),
        priority=-2,
    )
