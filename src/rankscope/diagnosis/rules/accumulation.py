"""What optimizers took is not what backward passes left: gradients of micro-batches that are lost,
gradients that were left over from the step before, shards that each rank scaled by its own factor.

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
ranks with the same parameter differ in the mark, some rank is wrong. Ranks that are all alike may
accumulate over steps; accelerators mark zeros too, so a rank with marks beside ranks with some
others tells nothing.

**Rescaled shards.** Each rank scaled its shards by its own factor, as clipping by the norm of one
rank's shards does. Left alone are one factor on all ranks (the norm of all shards, a GradScaler),
factors that differ between gradients of a rank (clipping by layers), no multiples (noise, masks),
and gradients that are whole on each rank: those are replicas.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from rankscope.diagnosis.context import Candidate, JudgedStep, candidate_at
from rankscope.diagnosis.evidence.distances import minority, rounding_of
from rankscope.diagnosis.evidence.gradientpasses import Mixture, TakenGradient, taken_gradients
from rankscope.diagnosis.evidence.replicas import FSDP1_FLAT
from rankscope.diagnosis.evidence.stepview import Array, CallView, SlotValues, StepView, grouped
from rankscope.layout.declared import FSDP1_AXIS
from rankscope.layout.placement import PieceKind
from rankscope.record.finding import Kind, Severity
from rankscope.record.phases import Phase
from rankscope.record.ranks import ranks_named, ranks_text
from rankscope.record.statistics import NONFINITE
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


# ---- shards that are scaled apart ----------------------------------------------------------------


_AS_LEFT: Final = int(ValueFlag.AS_LEFT)
_ABSENT: Final = int(ValueFlag.ABSENT)
_APART: Final = 1e-3
"""Relative: factors that lie nearer are one, or rounded."""
_FLAT_SLOT: Final = f"grad:{FSDP1_FLAT}"
_CLIPPING_ADVICE: Final = (
    "Clip by the norm of all shards: with FSDP1 call clip_grad_norm_ of the wrapped model itself; "
    "with FSDP2 hand torch.nn.utils.clip_grad_norm_ the DTensors, not their local tensors; by "
    "hand, sum the squares over the ranks before the root."
)


def rescaled_shards(step_view: JudgedStep) -> Iterator[Candidate]:
    """Yield one candidate for every set of ranks that scaled their shards apart in a step."""
    for event in taken_gradients(step_view):
        families: dict[bytes, tuple[Array, list[TakenGradient]]] = {}
        runs = _runs(event)
        is_fsdp1 = "FSDP1" in step_view.life.replicas.wrappers
        for gradient in event:
            for ranks in _sharing(gradient, runs, is_fsdp1=is_fsdp1):
                families.setdefault(ranks.tobytes(), (ranks, []))[1].append(gradient)
        for ranks, gradients in families.values():
            factors = _factors(gradients, ranks)
            if factors is not None and _do_replicas_tell(step_view, ranks):
                continue
            if factors is not None and np.ptp(factors) > _allowed(gradients) * factors.max():
                yield _rescaled_candidate(step_view, gradients, ranks, factors)


def _do_replicas_tell(step_view: JudgedStep, ranks: Array) -> bool:
    """Replicas that differ on these ranks are named by themselves, and may tell the rank."""
    for values in step_view.values(Phase.GRADS):
        same = step_view.context.layouts.same(values)
        for group in same.groups if same is not None else ():
            if np.isin(group, ranks).all() and values.agree(group) is False:
                return True
    return False


def _runs(event: Sequence[TakenGradient]) -> list[Array]:
    """Return the ranks over which FSDP1 keeps runs: no mark shows for a rank that holds nothing."""
    runs: dict[tuple[int, ...], None] = {}
    for gradient in event:
        for view in gradient.values.views:
            if gradient.values.source != "dtensor" and FSDP1_AXIS in view.placements:
                runs.update(dict.fromkeys(tuple(sorted(mesh.ranks)) for mesh in view.meshes))
    return [np.array(ranks, np.int64) for ranks in runs]


def _sharing(gradient: TakenGradient, runs: Sequence[Array], *, is_fsdp1: bool) -> Iterator[Array]:
    """Yield the ranks that hold shards of one tensor, or of what FSDP1 keeps as one."""
    values = gradient.values
    if is_fsdp1 and values.source != "dtensor" and runs:
        yield from (ranks for ranks in runs if np.isin(values.ranks, ranks).all())
    elif values.source in ("dtensor", "marked"):
        for view in values.views:
            facts = [placement.kind.facts for placement in view.placements.values()]
            if any(each is not None and each.pieces is PieceKind.SLICES for each in facts):
                for mesh in view.meshes:
                    ranks = np.array(sorted(mesh.ranks), np.int64)
                    if np.isin(ranks, values.ranks).all():
                        yield ranks
    elif values.source == "unknown" and values.slot == _FLAT_SLOT and len(values.ranks) > 1:
        latest = gradient.passes[-1]
        if not (np.array_equal(latest.ranks, values.ranks) and latest.agree(latest.ranks)):
            yield values.ranks


def _allowed(gradients: Sequence[TakenGradient]) -> float:
    return max(_APART, *(4 * rounding_of(each.values.dtype) for each in gradients))


def _factors(gradients: Sequence[TakenGradient], ranks: Array) -> Array | None:
    """Return [ranks] by what each scaled all that it holds; None where there is no such factor."""
    if len(gradients) == 1 and gradients[0].values.slot != _FLAT_SLOT:
        return None
    ratios = np.stack([_ratios(each.values, each.passes[-1], ranks) for each in gradients])
    if np.isinf(ratios).any() or np.isnan(ratios).all(axis=0).any():
        return None
    largest = np.nanmax(ratios, axis=0)
    if (largest - np.nanmin(ratios, axis=0) > _allowed(gradients) * largest).any():
        return None
    return np.asarray(np.nanmedian(ratios, axis=0))


@np.errstate(invalid="ignore", over="ignore", divide="ignore")
def _ratios(taken: SlotValues, left: SlotValues, ranks: Array) -> Array:
    """Return [ranks] factors: NaN where a rank has nothing, inf for no positive multiple."""
    at, before = taken.at(ranks), left.at(ranks)
    norm, size = taken.column("l2")[at], left.column("l2")[before]
    ratios = norm / size
    rests = taken.column("sketch")[at] - ratios[:, None] * left.column("sketch")[before]
    is_multiple = np.sqrt(np.mean(rests**2, axis=1)) <= 4 * rounding_of(taken.dtype) * norm
    is_whole = left.is_known[before] & (taken.counts[at] == left.counts[before]) & (size > 0)
    for values, places in ((taken, at), (left, before)):
        is_whole &= sum(values.column(name)[places] for name in NONFINITE) == 0
    is_absent = (at < 0) | ((taken.flags[at] & _ABSENT) != 0)
    is_empty = (taken.counts[at] == 0) | (norm == 0)
    is_as_left = (taken.flags[at] & _AS_LEFT) != 0
    return np.select(
        [is_absent, ~taken.is_known[at], is_empty, before < 0, is_whole & is_multiple],
        [np.nan, np.inf, np.nan, np.where(is_as_left, 1.0, np.inf), ratios],
        np.inf,
    )


def _rescaled_candidate(
    step_view: JudgedStep, gradients: Sequence[TakenGradient], ranks: Array, factors: Array
) -> Candidate:
    first = next((g.values for g in gradients if (g.values.at(ranks) >= 0).all()), None)
    first = first or gradients[0].values
    step_view.context.coverage.applied(*(gradient.values for gradient in gradients))
    norms = np.sqrt(sum(each.values.column("l2")[each.values.at(ranks)] ** 2 for each in gradients))
    by_rank = {int(rank): float(factor) for rank, factor in zip(ranks, factors)}
    listed = ", ".join(f"rank {rank}: {factor:.6g}" for rank, factor in list(by_rank.items())[:4])
    more = ", ..." if len(by_rank) > 4 else ""
    return step_view.candidate(
        first,
        Kind.SCALE,
        ranks,
        f"between backward and the optimizer's step {ranks_named(ranks)} scaled their "
        f"shards of this and {len(gradients) - 1} other gradients by factors of their own "
        f"({listed}{more}), as clipping by the norm of one rank's shards does",
        advice=_CLIPPING_ADVICE,
        evidence=lambda: {
            "factors": {str(rank): factor for rank, factor in by_rank.items()},
            "norms": {str(rank): float(norm) for rank, norm in zip(ranks.tolist(), norms)},
            "gradients": len(gradients),
        },
        weight=len(gradients),
    )
