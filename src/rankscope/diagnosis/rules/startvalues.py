"""What parameters hold when training begins: shards that are equal, memory that nobody filled,
replicas and ties that are not equal.

**Equal shards.** Ranks along a `Shard` axis that hold bitwise the same at setup drew the same
random numbers, or loaded the same part of a file. Constants prove nothing, nor do patterns repeated
on purpose: decay tables of channels, experts that begin as copies. So it is a fault where numbers
look random (mean zero within the error of a sample), or most parameters cut along the axis are
equal. Stacked experts (three dims or more) are a warning, unless one of fewer dims shows the same.

**Uninitialised parameters**: `to_empty` without `reset_parameters`. Fresh memory is zero, recycled
memory is anything. Siblings (`layers.*`) say what a parameter should look like: a millionfold other
magnitude is garbage; one of zeros beside random siblings is a fault where its whole layer is zero,
norms and all, else a warning, and nothing for the last sibling or where several are zero.

**Other weights.** Plain parameters that differ at setup may be shards. They are not where the first
gradient that is no constant is equal on these ranks though their module was handed different values
(the first of an adapter is zero where its other half begins as zero): only a reduction does that,
and only replicas are reduced. Weights made equal between setup and the optimizer step are no fault.

**Lost ties.** A parameter that two modules share is in the trace once. Where the weights of an
embedding and of another module begin bitwise equal and step with gradients of their own, a tie was
lost: `parallelize_module` and a copy per module make two parameters of one. So are copies on two
stages of a pipeline whose gradients nobody sums. Copies of whole models (a teacher, a critic) hold
two embeddings and are left alone. Plain weights of one rank may be copied on purpose: a warning.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from rankscope.diagnosis.context import Candidate, JudgedStep
from rankscope.diagnosis.evidence.distances import differing_sides, minority, sides, sides_text
from rankscope.diagnosis.evidence.replicas import clusters, sorted_lines
from rankscope.diagnosis.evidence.stepview import (
    Array,
    SlotValues,
    StepView,
    grouped,
    layer_of,
    sibling_path,
)
from rankscope.record.finding import Kind, Severity
from rankscope.record.phases import Phase
from rankscope.record.ranks import ranks_named, ranks_text

# ---- shards that are equal -----------------------------------------------------------------------

_FEWEST_ELEMENTS: Final = 8
"""Of a shard: fewer may be equal by chance."""
_ERRORS: Final = 5.0
"""A sample's mean lies within so many standard errors of the true one."""
_STACKED: Final = 3
"""Dims of a parameter that holds several experts."""
_EQUAL_ADVICE: Final = (
    "Each rank filled its own shard from the same random numbers, or loaded the same part of the "
    "file: draw the whole tensor alike on all ranks and cut it (distribute_tensor), seed each "
    "shard by its place on the mesh, or look at the offsets with which the checkpoint is read."
)


def equal_shards(step_view: JudgedStep) -> Iterator[Candidate]:
    """Yield a candidate for every sharded parameter whose shards are bitwise equal at setup."""
    if not step_view.is_setup:
        return
    cut: dict[tuple[str, str], list[tuple[SlotValues, list[Array]]]] = {}
    for values in step_view.parameters(Phase.SETUP):
        if values.source != "dtensor" or values.is_constant:
            continue
        for axis, lines in _shard_lines(values).items():
            judged = [(line, values.agree(line)) for line in lines]
            if any(answer is not None for _, answer in judged):
                step_view.context.coverage.applied(values)
                equal = [line for line, answer in judged if answer]
                cut.setdefault((values.views[0].mesh_name, axis), []).append((values, equal))
    seen: set[int] = set()
    for (_, axis), along in cut.items():
        equal_ones = [(values, lines) for values, lines in along if lines]
        is_usual = len(equal_ones) > 1 and 2 * len(equal_ones) >= len(along)
        is_plain = any(len(values.views[0].pieces[0].shape) < _STACKED for values, _ in equal_ones)
        for values, lines in equal_ones:
            if id(values) in seen or not (is_usual or _is_drawn(values)):
                continue
            seen.add(id(values))
            is_stacked = len(values.views[0].pieces[0].shape) >= _STACKED and not is_plain
            yield _equal_candidate(step_view, values, axis, lines, is_stacked=is_stacked)


def _shard_lines(values: SlotValues) -> dict[str, list[Array]]:
    view = values.views[0]
    return {
        axis: [line for mesh in view.meshes for line in sorted_lines(mesh, [axis]) if len(line) > 1]
        for axis, placement in view.placements.items()
        if placement.dim is not None
    }


def _is_drawn(values: SlotValues) -> bool:
    """True where the elements look like random numbers around zero."""
    count, mean, std = (values.column(name)[0] for name in ("count", "mean", "std"))
    return bool(count >= _FEWEST_ELEMENTS and abs(mean) * np.sqrt(count) <= _ERRORS * std)


def _equal_candidate(
    step_view: JudgedStep, values: SlotValues, axis: str, lines: list[Array], *, is_stacked: bool
) -> Candidate:
    ranks = np.unique(np.concatenate(lines))
    return step_view.candidate(
        values,
        Kind.DUPLICATE,
        ranks,
        f"{ranks_named(ranks)} hold different parts of it (along axis {axis!r}), and yet "
        f"the same values ({sides_text(values, ranks)})",
        advice=_EQUAL_ADVICE,
        severity=Severity.WARNING if is_stacked else Severity.FAULT,
        evidence=lambda: {
            "axis": axis,
            "same_on": [ranks_text(line) for line in lines[:8]],
            "values": sides(values, ranks),
        },
    )


# ---- parameters that nobody initialised ----------------------------------------------------------

_FEWEST: Final = 2
"""Siblings that have to agree on what a parameter looks like."""
_FAR: Final = 1e6
"""Parameters that were initialised do not lie as far apart as that, nor do trained ones."""
_ALIKE: Final = 1e2
_ADVICE: Final = (
    "Nothing seems to have initialised this module: call reset_parameters() behind to_empty(), or "
    "load its weights. Zeros on purpose are no fault."
)


def uninitialised_parameters(step_view: JudgedStep) -> Iterator[Candidate]:
    """Yield a candidate for every parameter at setup that is zero, or garbage beside siblings."""
    if not step_view.is_setup:
        return
    filled = [values for values in step_view.parameters(Phase.SETUP) if values.has_elements.any()]
    instances = grouped((layer_of(h.call.path) or h.call.path, h) for h in filled)
    families = grouped(
        ((sibling_path(h.call.path), h.call.node.class_name, h.slot), h) for h in filled
    )
    for family in families.values():
        if len(family) > _FEWEST:
            yield from _judged_family(step_view, family, instances)


def _judged_family(
    step_view: JudgedStep, family: list[SlotValues], instances: dict[str, list[SlotValues]]
) -> Iterator[Candidate]:
    sizes = [_size(values) for values in family]
    zeros = [values for values, size in zip(family, sizes) if not size]
    filled = [size for values, size in zip(family, sizes) if size and not values.is_constant]
    usual = float(np.median(filled)) if filled else 0.0
    alike = sum(1 / _ALIKE <= size / usual <= _ALIKE for size in filled) if usual else 0
    if alike < _FEWEST or 2 * alike <= len(family):
        return
    for values in family:
        step_view.context.coverage.applied(values)
        own = _sizes(values)
        far = values.has_elements & (own > 0) & ((own > _FAR * usual) | (own * _FAR < usual))
        if far.any():
            yield _empty_candidate(step_view, values, values.ranks[far], usual, Severity.FAULT)
    for values in zeros:
        path = values.call.path
        is_whole = all(not _size(each) for each in instances[layer_of(path) or path])
        is_alone = len(zeros) == 1 and values is not family[-1]
        if values is family[-1] or not (is_whole or is_alone):
            continue
        severity = Severity.FAULT if is_whole else Severity.WARNING
        ranks = values.ranks[values.has_elements]
        yield _empty_candidate(step_view, values, ranks, usual, severity)


def _sizes(values: SlotValues) -> Array:
    found: Array = values.column("l2") / np.sqrt(np.maximum(values.counts, 1))
    return found


def _size(values: SlotValues) -> float:
    """Return the largest of `_sizes`; inf where a rank holds what is not finite."""
    if not values.is_finite(values.ranks):
        return float("inf")
    return float(_sizes(values)[values.has_elements].max())


def _empty_candidate(
    step_view: JudgedStep, values: SlotValues, ranks: Array, usual: float, severity: Severity
) -> Candidate:
    what = "is zero" if not _size(values) else "is of another order of magnitude"
    return step_view.candidate(
        values,
        Kind.SCALE,
        ranks,
        f"{what} on {ranks_named(ranks)}, while the same parameter of its siblings has a "
        f"root mean square of {usual:.3g} ({sides_text(values, ranks)})",
        advice=_ADVICE,
        severity=severity,
        evidence=lambda: {"values": sides(values, ranks), "siblings_rms": usual},
        priority=1,
    )


# ---- other weights -------------------------------------------------------------------------------


def other_weights(step_view: JudgedStep) -> Iterator[Candidate]:
    """Yield a candidate for every parameter that differed at setup though its gradient does not."""
    setup = step_view.life.setup
    if setup is None:
        return
    for values, gradient, latest in step_view.decided_starts.values():
        groups = [
            g for g in clusters(gradient) if _is_unlike(g, values, gradient, latest, step_view)
        ]
        if groups:
            yield _other_candidate(setup, values, groups)


def _is_unlike(
    group: Array, values: SlotValues, gradient: SlotValues, latest: SlotValues, step_view: StepView
) -> bool:
    """True where ranks of one gradient hold unlike weights before and after, and unlike inputs."""
    if values.agree(group) is not False or latest.agree(group) is not False:
        return False
    if (values.counts[values.at(group)] != gradient.counts[gradient.at(group)]).any():
        return False
    return any(value.agree(group) is False for value in step_view.handed(values.call.path))


def _other_candidate(setup: JudgedStep, values: SlotValues, groups: list[Array]) -> Candidate:
    blamed = np.concatenate([minority(g, values.hashes[values.at(g)]) for g in groups])
    members = np.unique(np.concatenate(groups))
    is_resolved = len(blamed) < len(members)
    return setup.candidate(
        values,
        Kind.REPLICA,
        blamed,
        f"{ranks_named(blamed)} begin{'s' if len(blamed) == 1 else ''} with other "
        f"weights{' than the other replicas' if is_resolved else ''}, though the gradient is "
        f"reduced over {ranks_named(members)} ({sides_text(values, groups[0])})",
        evidence=lambda: {
            "layout": "inferred",
            "values": differing_sides(values, groups),
            **({} if is_resolved else {"rank_resolution": "none"}),
        },
        priority=1,
        members=members,
    )


# ---- ties that were lost -------------------------------------------------------------------------

_TIE_ADVICE = (
    "Tie them again behind parallelize_module or fully_shard (head.weight = embedding.weight), "
    "before the optimizer is made. If one was only initialised from the other, this is no fault."
)
_STAGES_ADVICE = (
    "Sum the gradients of the two over the ranks that hold them, before the optimizer steps. "
    "If one was only initialised from the other, this is no fault."
)


def lost_ties(step_view: JudgedStep) -> Iterator[Candidate]:
    """Yield a candidate for every weight equal to an embedding's that trains apart."""
    incarnation = step_view.life
    setup = incarnation.setup
    if setup is None or incarnation.undecided is not None:
        return
    gradients = {values.parameter: values for values in step_view.values(Phase.GRADS)}
    for embedding, other in _equal_pairs(setup):
        own, its = gradients.get(embedding.parameter), gradients.get(other.parameter)
        if own is None or its is None:
            continue
        step_view.context.coverage.applied(own, its)
        if not np.isin(own.hashes, its.hashes).any():
            yield _tie_candidate(setup, embedding, other)


def _equal_pairs(setup: StepView) -> Iterator[tuple[SlotValues, SlotValues]]:
    """Yield the weights of embeddings with those of other modules that hold the same."""
    embeddings: list[SlotValues] = []
    others: dict[int, list[SlotValues]] = {}
    for values in setup.parameters(Phase.SETUP):
        if values.is_constant or not values.is_known.all():
            continue
        if "embedding" in values.call.node.class_name.lower():
            embeddings.append(values)
        else:
            others.setdefault(int(values.hashes[0]), []).append(values)
    for embedding in embeddings:
        for other in others.get(int(embedding.hashes[0]), ()):
            same = (embedding.ranks, embedding.hashes, embedding.counts)
            is_beside = all(map(np.array_equal, same, (other.ranks, other.hashes, other.counts)))
            if is_beside or _is_on_other_ranks(embedding, other):
                yield embedding, other


def _is_on_other_ranks(embedding: SlotValues, other: SlotValues) -> bool:
    is_apart = not np.isin(embedding.ranks, other.ranks).any()
    hashes = np.unique(np.concatenate([embedding.hashes, other.hashes]))
    counts = np.unique(np.concatenate([embedding.counts, other.counts]))
    return is_apart and len(hashes) == len(counts) == 1


def _tie_candidate(setup: JudgedStep, embedding: SlotValues, other: SlotValues) -> Candidate:
    first = ".".join(embedding.parameter)
    ranks = np.union1d(embedding.ranks, other.ranks)
    is_beside = np.array_equal(embedding.ranks, other.ranks)
    is_fault = other.source == "dtensor" or not is_beside
    return setup.candidate(
        other,
        Kind.STRUCTURE,
        ranks,
        f"is initialised with the values of {first}, but is another parameter: each steps with a "
        f"gradient of its own, so the two are not tied",
        advice=_TIE_ADVICE if is_beside else _STAGES_ADVICE,
        severity=Severity.FAULT if is_fault else Severity.WARNING,
        evidence=lambda: {"tied_to": first, "values": sides(other, other.ranks)},
        priority=1,
        members=other.ranks,
    )
