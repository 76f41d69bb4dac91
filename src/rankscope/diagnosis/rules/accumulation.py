"""What optimizers took is not what backward passes left.

**Lost micro-batches** were gone when a later backward pass began, and are not in what the optimizer
takes. Programs that measure gradients (of a probe, for a Fisher matrix) and wipe them are right. It
is a fault where the lost gradients were not to be reduced (`no_sync`), the last were, and the same
lines called all forwards; or where every loss was divided by the number of micro-batches. Every
traced train step, two at least, has to be like that; else it is one warning for a job. Nothing is
said where micro-batches had the same inputs, inputs need gradients, or passes share a forward.

**Carried gradients**: `zero_grad` was skipped on some ranks. A reduction hides it, because all
ranks get the same wrong sum; so ranks mark gradients that were not zero when backward began. Ranks
that are all alike may accumulate over steps.

**Rescaled shards**: each rank scaled its shards by its own factor, as clipping by the norm of one
rank's shards does. One factor on all ranks, and factors that differ within a rank, are left alone.

**Joined gradients**: two parameters that are not tied take one gradient, though backward left
unlike ones: their places in the reduced tensor overlap. Parallel branches begin with one gradient.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from rankscope.diagnosis.context import Candidate, JudgedStep, candidate_at
from rankscope.diagnosis.evidence.distances import inferred_evidence, minority, rounding_of
from rankscope.diagnosis.evidence.gradientpasses import Mixture, TakenGradient
from rankscope.diagnosis.evidence.replicas import FSDP1_FLAT
from rankscope.diagnosis.evidence.stages import stage_feeds
from rankscope.diagnosis.evidence.stepview import Array, CallView, SlotValues, StepView, grouped
from rankscope.layout.layoutfile import FSDP1_AXIS
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
        first, worths = gradients[0].values, gradients[0].worths
        ranks, root = first.ranks, first.call.top.path
        calls = [call for call in step_view.roots if call.path == root]
        forwards = [call for call in calls if np.isin(ranks, call.ranks).all()]
        if not mixture.lost or len(forwards) < len(worths):
            continue
        fed = {receiver for _, receiver in stage_feeds(step_view)}
        is_stage = all((root, rank) in fed for rank in ranks.tolist())
        if not _are_batches_of_their_own(forwards, ranks, is_stage=is_stage):
            continue
        step_view.context.coverage.applied(*(gradient.values for gradient in gradients))
        is_meant = len(events) == 1 and (
            _is_held_back(gradients, mixture) or _are_shares(step_view, root, len(forwards))
        )
        is_meant |= is_stage and _accumulate_elsewhere(step_view, len(forwards))
        ends = [1 + worth.call.ordinal for worth in worths]  # passes are counted from 1 for people
        began = [str(ends[number] + 1) for number in mixture.lost if number + 1 < len(ends)]
        more = f" (this gradient and {len(gradients) - 1} others)" if len(gradients) > 1 else ""
        yield step_view.candidate(
            first,
            Kind.SCALE,
            ranks,
            f"{ranks_named(ranks)} stepped without the gradients of earlier micro-batches: "
            f"they were gone when backward pass {' and pass '.join(began)} of {ends[-1]} of this "
            f"step began{more}",
            severity=Severity.FAULT if is_meant else Severity.WARNING,
            advice=_ADVICE if is_meant else _WARNING,
            once="lost micro-batches",
            unless_always=_WARNING if is_meant else "",
            evidence=partial(_lost_evidence, gradients, mixture),
            weight=len(gradients),
        )
        if not is_meant:
            return


def _lost_evidence(gradients: Sequence[TakenGradient], mixture: Mixture) -> dict[str, Any]:
    def norm(parts: Iterable[SlotValues]) -> float:  # on their lowest rank
        return float(np.sqrt(sum(float(values.column("l2")[0]) ** 2 for values in parts)))

    passes = len(gradients[0].worths)
    named = [gradient.values.parameter for gradient in gradients[:_MOST_NAMED]]
    return {
        "parameters": [".".join(filter(None, parameter)) for parameter in named],
        "passes": passes,
        "lost": list(mixture.lost),
        "norms": [norm(gradient.worths[number] for gradient in gradients)
                  for number in range(passes)],
        "taken": norm(gradient.values for gradient in gradients),
    }  # fmt: skip


def _accumulate_elsewhere(step_view: JudgedStep, count: int) -> bool:
    """True where all other ranks step with the gradients of as many backward passes."""
    losers = [event[0].values.ranks for event, mixture in step_view.mixtures if mixture.lost]
    steppers = set().union(*step_view.stepped.values())
    peers = steppers.difference(*(ranks.tolist() for ranks in losers))
    passes = Counter(
        rank
        for call in step_view.of(Phase.BACKWARD)
        if call.parent is None
        for rank in call.ranks.tolist()
    )
    return len(losers) == 1 and bool(peers) and all(passes[rank] == count for rank in peers)


def _are_batches_of_their_own(
    forwards: Sequence[CallView], ranks: Array, *, is_stage: bool
) -> bool:
    """True where no two of these calls were handed the same, and nothing that needs a gradient
    (but for what a stage was fed)."""
    batches = set()
    for call in forwards:
        inputs = list(call.inputs)
        if not inputs or (not is_stage and any(values.needs_gradient for values in inputs)):
            return False
        hashes = [values.hashes[values.at(ranks)] for values in inputs if values.has(ranks)]
        batches.add(np.array(hashes).tobytes())
    return len(batches) == len(forwards)


def _is_held_back(gradients: Sequence[TakenGradient], mixture: Mixture) -> bool:
    """True where one place of the program ran all passes, and only the last was to be reduced."""
    worths = gradients[0].worths
    is_lost_unsynced = all((worths[number].flags & _NO_SYNC).all() for number in mixture.lost)
    flags = [values.flags for values in gradients[0].passes]
    restarted = [bits for bits in flags if (bits & _RESTARTED).any()]
    is_loop = all((bits & _SAME_LINES).all() for bits in restarted)
    return is_loop and is_lost_unsynced and not (worths[-1].flags & _NO_SYNC).any()


def _are_shares(step_view: StepView, root: str, count: int) -> bool:
    """True where every loss of the step was divided by the number of micro-batches."""
    roots = (call for call in step_view.of(Phase.BACKWARD) if call.parent is None)
    by_slot = grouped(((call.path, v.slot), v) for call in roots for v in call.inputs)
    for (path, _), gradients in by_slot.items():
        if len(gradients) != count or not all(values.is_known.all() for values in gradients):
            continue
        if all((values.counts == 1).all() for values in gradients):
            slack = max(1e-6, *(rounding_of(values.dtype) for values in gradients))
            means = np.concatenate([values.column("mean") for values in gradients])
            if (abs(means * count - 1) <= slack).all():
                return True
        elif path == root and _are_small_logits(gradients, count):
            return True
    return False


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


# ---- gradients that are left over ----------------------------------------------------------------

_LEFT_OVER = int(ValueFlag.CARRIED)


def carried_gradients(step_view: JudgedStep) -> Iterator[Candidate]:
    """Yield one candidate for a step that some ranks began with gradients of the step before."""
    marks = [(values, (values.flags & _LEFT_OVER) != 0) for values in step_view.gradients()]
    bearers = np.unique(np.concatenate([v.ranks[m] for v, m in marks] or [np.zeros(0, np.int64)]))
    shared = [v for v, m in marks if m.any() and not np.isin(v.ranks, bearers).all()]
    if not shared:
        return
    first, ranks = shared[0], np.unique(np.concatenate([values.ranks for values in shared]))
    is_bearer = np.isin(ranks, bearers)
    carrying, free = ranks[is_bearer], ranks[~is_bearer]
    odd = minority(ranks, is_bearer)
    blamed = odd if len(odd) < len(ranks) else carrying
    step_view.context.coverage.applied(*shared)
    facts = {"carried_by": ranks_text(carrying), "not_by": ranks_text(free)}
    yield candidate_at(
        step_view,
        first.call,
        Kind.REPLICA,
        first.slot,
        blamed,
        f"backward began with the gradients of the step before on {ranks_named(carrying)}, and "
        f"without on {ranks_named(free)}: they were added to this step's",
        advice="zero_grad was not called on every one of these ranks between the two backward "
        "passes: look for a condition around it that depends on the rank, or for a parameter group "
        "that one rank's optimizer lacks.",
        evidence=partial(dict, facts, gradients=len(shared)),
        times_ns=first.times(blamed) - 2,  # before gradients are reduced: see causes.py
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
    is_fsdp1 = "FSDP1" in step_view.life.replicas.wrappers
    for event in step_view.taken_gradients:
        families: dict[bytes, tuple[Array, list[TakenGradient]]] = {}
        # the ranks over which FSDP1 keeps runs: no mark shows for a rank that holds nothing
        views = [v for g in event if g.values.source != "dtensor" for v in g.values.views]
        meshes = [mesh for v in views if FSDP1_AXIS in v.placements for mesh in v.meshes]
        runs = [
            np.array(r, np.int64) for r in dict.fromkeys(tuple(sorted(m.ranks)) for m in meshes)
        ]
        for gradient in event:
            for ranks in _sharing(gradient, runs if is_fsdp1 else ()):
                families.setdefault(ranks.tobytes(), (ranks, []))[1].append(gradient)
        for ranks, gradients in families.values():
            factors = _factors(gradients, ranks)
            if factors is None or np.ptp(factors) <= _allowed(gradients) * factors.max():
                continue
            # replicas that differ on these ranks are named by themselves, and may tell the rank
            layouts = step_view.context.layouts
            sames = [(values, layouts.same(values)) for values in step_view.values(Phase.GRADS)]
            groups = [
                (values, group)
                for values, replicas in sames
                if replicas
                for group in replicas.groups
            ]
            if any(np.isin(g, ranks).all() and values.agree(g) is False for values, g in groups):
                continue
            factor_of = {str(rank): float(factor) for rank, factor in zip(ranks, factors)}
            listed = [f"rank {rank}: {number:.6g}" for rank, number in factor_of.items()]
            first = next((g.values for g in gradients if g.values.has(ranks)), gradients[0].values)
            step_view.context.coverage.applied(*(gradient.values for gradient in gradients))
            yield step_view.candidate(
                first,
                Kind.SCALE,
                ranks,
                f"between backward and the optimizer's step {ranks_named(ranks)} scaled their "
                f"shards of this and {len(gradients) - 1} other gradients by factors of their own "
                f"({', '.join(listed[:4])}{', ...' if len(listed) > 4 else ''}), as clipping by "
                "the norm of one rank's shards does",
                advice=_CLIPPING_ADVICE,
                evidence=partial(_rescaled_evidence, gradients, ranks, factor_of),
                weight=len(gradients),
            )


def _rescaled_evidence(
    gradients: Sequence[TakenGradient], ranks: Array, factor_of: Mapping[str, float]
) -> dict[str, Any]:
    squares = sum(g.values.column("l2")[g.values.at(ranks)] ** 2 for g in gradients)
    norms = {str(rank): float(norm) for rank, norm in zip(ranks.tolist(), np.sqrt(squares))}
    return {"factors": factor_of, "norms": norms, "gradients": len(gradients)}


def _sharing(gradient: TakenGradient, runs: Sequence[Array]) -> Iterator[Array]:
    """Yield the ranks that hold shards of one tensor, or of what FSDP1 keeps as one (`runs`)."""
    values = gradient.values
    if values.source != "dtensor" and runs:
        yield from (ranks for ranks in runs if np.isin(values.ranks, ranks).all())
    elif values.source in ("dtensor", "marked"):
        for view in values.views:
            kinds = [placement.kind.facts for placement in view.placements.values()]
            if any(facts is not None and facts.pieces is PieceKind.SLICES for facts in kinds):
                meshes = (np.array(sorted(mesh.ranks), np.int64) for mesh in view.meshes)
                yield from (ranks for ranks in meshes if values.has(ranks))
    elif values.source == "unknown" and values.slot == _FLAT_SLOT and len(values.ranks) > 1:
        latest = gradient.passes[-1]
        if not (np.array_equal(latest.ranks, values.ranks) and latest.agree(latest.ranks)):
            yield values.ranks


def _allowed(gradients: Sequence[TakenGradient]) -> float:
    return max(_APART, *(4 * rounding_of(gradient.values.dtype) for gradient in gradients))


def _factors(gradients: Sequence[TakenGradient], ranks: Array) -> Array | None:
    """Return [ranks] by what each scaled all that it holds; None where there is no such factor."""
    if len(gradients) == 1 and gradients[0].values.slot != _FLAT_SLOT:
        return None
    ratios = np.stack([_ratios(g.values, g.passes[-1], ranks) for g in gradients])
    if np.isinf(ratios).any() or np.isnan(ratios).all(axis=0).any():
        return None
    largest = np.nanmax(ratios, axis=0)
    if (largest - np.nanmin(ratios, axis=0) > _allowed(gradients) * largest).any():
        return None
    return np.asarray(np.nanmedian(ratios, axis=0))


@np.errstate(invalid="ignore", over="ignore", divide="ignore")
def _ratios(stepped: SlotValues, passed: SlotValues, ranks: Array) -> Array:
    """Return [ranks] factors: NaN where a rank has nothing, inf for no positive multiple."""
    at, before = stepped.at(ranks), passed.at(ranks)
    norm, size = stepped.column("l2")[at], passed.column("l2")[before]
    ratios = norm / size
    rests = stepped.column("sketch")[at] - ratios[:, None] * passed.column("sketch")[before]
    is_multiple = np.sqrt(np.mean(rests**2, axis=1)) <= 4 * rounding_of(stepped.dtype) * norm
    is_whole = passed.is_known[before] & (stepped.counts[at] == passed.counts[before]) & (size > 0)
    for values, places in ((stepped, at), (passed, before)):
        is_whole &= sum(values.column(name)[places] for name in NONFINITE) == 0
    is_absent = (at < 0) | ((stepped.flags[at] & _ABSENT) != 0)
    is_empty = (stepped.counts[at] == 0) | (norm == 0)
    is_as_left = (stepped.flags[at] & _AS_LEFT) != 0
    return np.select(
        [is_absent, ~stepped.is_known[at], is_empty, before < 0, is_whole & is_multiple],
        [np.nan, np.inf, np.nan, np.where(is_as_left, 1.0, np.inf), ratios],
        np.inf,
    )


# ---- one gradient for two parameters -------------------------------------------------------------

_FEWEST_ELEMENTS: Final = 8
"""Signs of fewer are equal by chance."""
_JOINED_ADVICE: Final = (
    "Look at how gradients are put into the tensor that is reduced, and taken out of it: two of "
    "them share a place, or one is read twice. Tied parameters begin equal, or are one parameter."
)


def joined_gradients(step_view: JudgedStep) -> Iterator[Candidate]:
    """Yield a candidate for every gradient that is that of another parameter, bit by bit, on ranks
    where backward had left another one for each."""
    taken = itertools.chain.from_iterable(step_view.taken_gradients)
    reduced = [gradient for gradient in taken if _is_reduced(gradient)]
    step_view.context.coverage.applied(*(gradient.values for gradient in reduced))
    families = grouped((_key_of(gradient.values), gradient) for gradient in reduced)
    for gradient in reduced:
        values, ranks = gradient.values, gradient.values.ranks
        family = families[_key_of(values)]
        partner = next((g for g in family if _is_joined(step_view, gradient, g)), None)
        if partner is not None and not _is_mean_of_own(gradient):
            name = partner.values.name
            yield step_view.candidate(
                values,
                Kind.COLLECTIVE,
                ranks,
                f"{ranks_named(ranks)} step with what {name} holds, bit by bit, though backward "
                "left another gradient for each of the two",
                advice=_JOINED_ADVICE,
                evidence=partial(inferred_evidence, values, ranks, equal_to=name),
            )
    yield from _joined_over_ranks(step_view)


_PAIRED_ADVICE: Final = (
    "These are two parameters, and one reduction took both: a loop pairs what ranks own by its "
    "order, whatever its name. Leave out of it what is not on all of these ranks (experts, stages)."
)


def _joined_over_ranks(step_view: JudgedStep) -> Iterator[Candidate]:
    """The same where other ranks own the other parameter, under another path."""
    gradients = itertools.chain.from_iterable(step_view.taken_gradients)
    changed = [gradient for gradient in gradients if _is_changed(gradient)]
    families = grouped(((int(g.values.hashes[0]), int(g.values.counts[0])), g) for g in changed)
    for gradient in changed:
        values = gradient.values
        partners = (
            g.values
            for g in families[int(values.hashes[0]), int(values.counts[0])]
            if g.values.call.path != values.call.path
            if not np.isin(g.values.ranks, values.ranks).any()
            if _is_joined(step_view, gradient, g)
        )
        partner = None if _is_mean_of_own(gradient) else next(partners, None)
        if partner is not None:
            yield step_view.candidate(
                values,
                Kind.COLLECTIVE,
                values.ranks,
                f"the gradient of the step is, bit by bit, that of another parameter on "
                f"{ranks_named(partner.ranks)}, though backward left another one for each of the "
                f"two ({partner.name})",
                advice=_PAIRED_ADVICE,
                evidence=partial(dict, equal_to=partner.name),
            )


def _is_changed(gradient: TakenGradient) -> bool:
    """True where all ranks took one plain gradient, which backward had left as another on each."""
    values, remains = gradient.values, gradient.passes[-1]
    return (
        values.source == remains.source == "unknown"
        and np.array_equal(remains.ranks, values.ranks)
        and bool(
            (values.hashes == values.hashes[0]).all() and (values.hashes != remains.hashes).all()
        )
        and values.is_finite(values.ranks)
        and not values.is_constant
        and int(values.counts[0]) >= _FEWEST_ELEMENTS
    )


def _key_of(values: SlotValues) -> tuple[bytes, int, int]:
    return values.ranks.tobytes(), int(values.hashes[0]), int(values.counts[0])


def _is_reduced(gradient: TakenGradient) -> bool:
    """True where ranks took one plain gradient, which backward had left unlike."""
    values, left = gradient.values, gradient.passes[-1]
    ranks = values.ranks
    return (
        len(ranks) > 1
        and values.source == left.source == "unknown"
        and np.array_equal(left.ranks, ranks)
        and bool(values.agree(ranks))
        and left.agree(ranks) is False
        and values.is_finite(ranks)
        and not values.is_constant
        and int(values.counts[0]) >= _FEWEST_ELEMENTS
    )


def _is_joined(step_view: JudgedStep, gradient: TakenGradient, partner: TakenGradient) -> bool:
    """True where backward left on each rank what is no multiple of what it left for the partner,
    whose parameter is another one."""
    values, other = gradient.values, partner.values
    if values.parameter == other.parameter:
        return False
    before, other_before = (
        step_view.life.parameters.get((v.call.path, f"param:{v.parameter[1]}"))
        for v in (values, other)
    )
    if before and other_before and np.isin(before.hashes, other_before.hashes).any():
        return False
    sketches, others = (g.passes[-1].column("sketch") for g in (gradient, partner))
    return not any(_is_along(one, of, values.dtype) for one, of in zip(sketches, others))


def _is_mean_of_own(gradient: TakenGradient) -> bool:
    mean = gradient.passes[-1].column("sketch").mean(axis=0)
    return _is_along(gradient.values.column("sketch")[0], mean, gradient.values.dtype)


def _is_along(vector: Array, of: Array, dtype: str) -> bool:
    """True where a sketch is a multiple of another."""
    square = float(of @ of)
    rest = vector - (float(vector @ of) / square if square else 0.0) * of
    allowed = 16 * rounding_of(dtype)
    return bool(np.linalg.norm(rest) <= allowed * np.linalg.norm(vector))
