"""Shards of one tensor that each rank scaled by a factor of its own before the optimizer's step, as
clipping by the norm of one rank's shards does (`torch.nn.utils.clip_grad_norm_` on FSDP1 or on
local tensors of DTensors): what backward left and what the optimizer takes are multiples, with one
factor for all gradients of a rank and another on the next.

Left alone: one factor on all ranks (the norm of all shards, a GradScaler), factors that differ
between gradients of a rank (clipping by layers), no multiples (noise, masks, clipping of elements),
and gradients that are whole on each rank: those are replicas.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from rankscope.diagnosis.context import Candidate, JudgedStep
from rankscope.diagnosis.evidence.distances import rounding_of
from rankscope.diagnosis.evidence.gradientpasses import TakenGradient, taken_gradients
from rankscope.diagnosis.evidence.replicas import FSDP1_FLAT
from rankscope.diagnosis.evidence.stepview import Array, SlotValues
from rankscope.layout.declared import FSDP1_AXIS
from rankscope.layout.placement import PieceKind
from rankscope.record.finding import Kind
from rankscope.record.phases import Phase
from rankscope.record.ranks import ranks_named
from rankscope.record.statistics import NONFINITE
from rankscope.record.value import ValueFlag

_AS_LEFT: Final = int(ValueFlag.AS_LEFT)
_ABSENT: Final = int(ValueFlag.ABSENT)
_APART: Final = 1e-3
"""Relative: factors that lie nearer are one, or rounded."""
_FLAT_SLOT: Final = f"grad:{FSDP1_FLAT}"
_ADVICE: Final = (
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
                yield _candidate(step_view, gradients, ranks, factors)


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


def _candidate(
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
        advice=_ADVICE,
        evidence=lambda: {
            "factors": {str(rank): factor for rank, factor in by_rank.items()},
            "norms": {str(rank): float(norm) for rank, norm in zip(ranks.tolist(), norms)},
            "gradients": len(gradients),
        },
        weight=len(gradients),
    )
