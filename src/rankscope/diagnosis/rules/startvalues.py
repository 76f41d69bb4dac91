"""What parameters hold when training begins.

**Equal shards** along a `Shard` axis come from the same random numbers, or the same part of a file.
Patterns may be repeated on purpose, so it is a fault where numbers look random (mean zero within
the error of a sample), or most parameters cut along the axis are equal. Where all are such on a
mesh of CPUs it is one warning: torch seeds every shard alike there. Stacked experts are a warning,
unless a parameter of fewer dims shows the same.

**Uninitialised parameters** (`to_empty` without `reset_parameters`) are zero or anything. Siblings
(`layers.*`) say what a parameter should look like.

**Other weights.** Parameters that differ at setup are no shards where the first gradient that is no
constant is equal on these ranks though their module was handed different values: only replicas are
reduced. Where each has a twin outside the group the reduction is at fault, not the weights. Weights
made equal between setup and the optimizer step are no fault.

**Lost ties.** Weights that begin bitwise equal to an embedding's and step with gradients of their
own: `parallelize_module` and a copy per module make two parameters of one. Copies of whole models
hold two embeddings and are left alone. Plain weights of one rank are a warning.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from rankscope.diagnosis.context import Candidate, JudgedStep
from rankscope.diagnosis.evidence.distances import (
    blamed_ranks,
    differing_sides,
    groups_named,
    is_far_from,
    sides,
    sides_text,
)
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


_CPU_ADVICE: Final = (
    "To begin with different shards on CPUs too, draw the whole tensor alike on all ranks and cut "
    "it (distribute_tensor), or initialise the model before it is sharded."
)


def equal_shards(step_view: JudgedStep) -> Iterator[Candidate]:
    """Yield a candidate for every sharded parameter whose shards are bitwise equal at setup."""
    if not step_view.is_setup:
        return
    by_axis: dict[tuple[str, str], list[tuple[SlotValues, list[Array]]]] = {}
    for values in step_view.parameters(Phase.SETUP):
        if values.source != "dtensor" or values.is_constant:
            continue
        view = values.views[0]
        for axis, placement in view.placements.items():
            if placement.dim is None:
                continue
            lines = [line for mesh in view.meshes for line in sorted_lines(mesh, [axis])]
            known = [line for line in lines if len(line) > 1 and values.agree(line) is not None]
            if known:
                step_view.context.coverage.applied(values)
                groups = [group for line in known for group in _equal_groups(values, line)]
                by_axis.setdefault((view.mesh_name, axis), []).append((values, groups))
    named: set[int] = set()
    for (_, axis), along in by_axis.items():
        equal = [(values, lines) for values, lines in along if lines]
        is_usual = len(equal) > 1 and 2 * len(equal) >= len(along)
        dims = {id(values): len(values.views[0].pieces[0].shape) for values, _ in equal}
        is_any_plain = any(count < _STACKED for count in dims.values())
        drawn = {id(values) for values, _ in equal if _is_drawn(values)}
        is_seeded_alike = len(drawn) == len(along) and all(
            _is_on_cpu(values) and _are_all_of_their_size(values, lines) for values, lines in along
        )
        if is_seeded_alike:
            yield _seeded_alike(step_view, axis, equal)
            continue
        for values, lines in equal:
            if id(values) in named or not (is_usual or id(values) in drawn):
                continue
            named.add(id(values))
            is_stacked = dims[id(values)] >= _STACKED and not is_any_plain
            ranks = np.unique(np.concatenate(lines))
            same_on = [ranks_text(line) for line in lines[:8]]
            yield step_view.candidate(
                values,
                Kind.DUPLICATE,
                ranks,
                f"{ranks_named(ranks)} hold different parts of it (along axis {axis!r}), and yet "
                f"the same values ({sides_text(values, ranks)})",
                advice=_EQUAL_ADVICE,
                severity=Severity.WARNING if is_stacked else Severity.FAULT,
                evidence=partial(_with_values, values, ranks, axis=axis, same_on=same_on),
            )


def _equal_groups(values: SlotValues, line: Array) -> Iterator[Array]:
    """Yield the ranks of a line that hold equal shards, of unlike sizes those of one size."""
    for ranks in clusters(values, line):
        if values.column("std")[values.place(int(ranks[0]))] > 0:
            yield ranks


def _are_all_of_their_size(values: SlotValues, groups: list[Array]) -> bool:
    """True where each group has all ranks whose shard is as large."""
    ranks = np.concatenate(groups)
    sizes = values.counts[values.at(ranks)]
    return bool(np.isin(values.counts, sizes).sum() == len(ranks))


def _is_drawn(values: SlotValues) -> bool:
    """True where a shard's mean is zero within the error of a sample."""
    count, mean, std = (float(values.column(name)[0]) for name in ("count", "mean", "std"))
    return bool(abs(mean) * np.sqrt(count) <= _ERRORS * std and count >= _FEWEST_ELEMENTS)


def _is_on_cpu(values: SlotValues) -> bool:
    return all(view.device == "cpu" for view in values.views)


def _seeded_alike(
    step_view: JudgedStep, axis: str, equal: list[tuple[SlotValues, list[Array]]]
) -> Candidate:
    """Return the warning for a mesh of CPUs on which all shards have the numbers of one seed."""
    first = equal[0][0]
    ranks = np.unique(np.concatenate([line for _, lines in equal for line in lines]))
    more = f" (this parameter and {len(equal) - 1} others)" if len(equal) > 1 else ""
    return step_view.candidate(
        first,
        Kind.DUPLICATE,
        ranks,
        f"{ranks_named(ranks)} drew the same random numbers for every shard along axis {axis!r} of "
        f"a mesh of CPUs{more}: torch seeds all shards alike there, and on no accelerator",
        advice=_CPU_ADVICE,
        severity=Severity.WARNING,
        evidence=partial(_with_values, first, ranks, axis=axis, parameters=len(equal)),
        weight=len(equal),
    )


def _with_values(values: SlotValues, ranks: Array, **more: Any) -> dict[str, Any]:
    return {**more, "values": sides(values, ranks)}


# ---- parameters that nobody initialised ----------------------------------------------------------

_FEWEST: Final = 2
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
    similar = sum(1 / _ALIKE <= size / usual <= _ALIKE for size in filled) if usual else 0
    if similar < _FEWEST or 2 * similar <= len(family):
        return
    for values in family:
        step_view.context.coverage.screened(values)
        is_far = is_far_from(values.rms, usual) & values.has_elements
        if is_far.any():
            yield _empty_candidate(step_view, values, values.ranks[is_far], usual, Severity.FAULT)
    for values in zeros:
        path = values.call.path
        is_layer_zero = not any(map(_size, instances[layer_of(path) or path]))
        if values is family[-1] or not (is_layer_zero or len(zeros) == 1):
            continue
        severity = Severity.FAULT if is_layer_zero else Severity.WARNING
        ranks = values.ranks[values.has_elements]
        yield _empty_candidate(step_view, values, ranks, usual, severity)


def _size(values: SlotValues) -> float:
    """Return the largest root mean square of a rank; inf where one holds what is not finite."""
    if not values.is_finite(values.ranks):
        return float("inf")
    return float(values.rms[values.has_elements].max())


def _empty_candidate(
    step_view: JudgedStep, values: SlotValues, ranks: Array, usual: float, severity: Severity
) -> Candidate:
    problem = "is zero" if not _size(values) else "is of another order of magnitude"
    return step_view.candidate(
        values,
        Kind.SCALE,
        ranks,
        f"{problem} on {ranks_named(ranks)}, while the same parameter of its siblings has a "
        f"root mean square of {usual:.3g} ({sides_text(values, ranks)})",
        advice=_ADVICE,
        severity=severity,
        evidence=lambda: {"values": sides(values, ranks), "siblings_rms": usual},
        priority=1,
    )


# ---- other weights -------------------------------------------------------------------------------

_TOO_WIDE_ADVICE: Final = (
    "Reduce it over the ranks that hold one value of it alone. If all are meant to hold one, their "
    "seeds or files differ: broadcast it before training."
)


def other_weights(step_view: JudgedStep) -> Iterator[Candidate]:
    """Yield a candidate for every parameter that differed at setup though its gradient does not."""
    setup = step_view.life.setup
    if setup is None:
        return
    for values, gradient, latest in step_view.decided_starts.values():
        groups = [
            group
            for group in clusters(gradient)
            if values.agree(group) is False
            and latest.agree(group) is False
            and (values.counts[values.at(group)] == gradient.counts[gradient.at(group)]).all()
            and _is_fed_apart(step_view, values.call.path, group)
            and not _have_twins_elsewhere(values, group)
        ]
        if not groups:
            continue
        step_view.context.coverage.applied(gradient, latest)
        blamed, members = blamed_ranks(values, groups)
        is_resolved = len(blamed) < len(members)
        owners = clusters(values, members)
        if len(groups) == 1 and _are_parts_of_their_own(setup, owners, members):
            yield step_view.candidate(
                gradient,
                Kind.GROUP,
                members,
                f"is reduced over {ranks_named(members)}, of which "
                f"{groups_named(owners)} begin with weights of their own, while "
                f"other parameters begin alike on all of them",
                advice=_TOO_WIDE_ADVICE,
                evidence=partial(dict, layout="inferred", same_on=[*map(ranks_text, owners)]),
            )
            continue
        yield setup.candidate(
            values,
            Kind.REPLICA,
            blamed,
            f"{ranks_named(blamed)} begin{'s' if len(blamed) == 1 else ''} with other "
            f"weights{' than the other replicas' if is_resolved else ''}, though the gradient is "
            f"reduced over {ranks_named(members)} ({sides_text(values, groups[0])})",
            evidence=partial(_replica_evidence, values, groups, is_resolved=is_resolved),
            priority=1,
            members=members,
        )


def _is_fed_apart(step_view: StepView, path: str, group: Array) -> bool:
    """True where these ranks cannot have made equal gradients each for itself: what came back to
    the module differs (of a bias nothing else counts), or no backward pass is recorded."""
    handed = step_view.handed(path)
    backward = [values for values in handed if values.call.phase is Phase.BACKWARD]
    return any(values.agree(group) is False for values in backward or handed)


def _are_parts_of_their_own(setup: StepView, owners: Sequence[Array], members: Array) -> bool:
    """True where none of the members stands alone with its value, and they begin with other
    parameters alike: this one belongs to some of them, and is not drawn by each."""
    beside = (v for v in setup.parameters(Phase.SETUP) if not v.is_constant)
    is_parted = len(owners) > 1 and sum(map(len, owners)) == len(members)
    return is_parted and any(v.agree(members) for v in beside)


def _have_twins_elsewhere(values: SlotValues, group: Array) -> bool:
    """True where all of these ranks begin as ranks outside the group do: shards whose gradient was
    reduced over the ranks that share a layer, not over those that hold the same."""
    elsewhere = [equal for equal in clusters(values) if not np.isin(equal, group).all()]
    return all(any(rank in equal for equal in elsewhere) for rank in group.tolist())


def _replica_evidence(
    values: SlotValues, groups: list[Array], *, is_resolved: bool
) -> dict[str, Any]:
    resolution = {} if is_resolved else {"rank_resolution": "none"}
    return {"layout": "inferred", "values": differing_sides(values, groups), **resolution}


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
    setup = step_view.life.setup
    if setup is None or step_view.life.undecided is not None:
        return
    gradients = {values.parameter: values for values in step_view.values(Phase.GRADS)}
    for embedding, copy in _equal_pairs(setup):
        pair = gradients.get(embedding.parameter), gradients.get(copy.parameter)
        if pair[0] is None or pair[1] is None:
            continue
        step_view.context.coverage.screened(pair[0])
        step_view.context.coverage.screened(pair[1])
        if np.isin(pair[0].hashes, pair[1].hashes).any():
            continue
        name = ".".join(embedding.parameter)
        is_beside = np.array_equal(embedding.ranks, copy.ranks)
        is_fault = copy.source == "dtensor" or not is_beside
        yield setup.candidate(
            copy,
            Kind.STRUCTURE,
            np.union1d(embedding.ranks, copy.ranks),
            f"is initialised with the values of {name}, but is another parameter: each steps with "
            f"a gradient of its own, so the two are not tied",
            advice=_TIE_ADVICE if is_beside else _STAGES_ADVICE,
            severity=Severity.FAULT if is_fault else Severity.WARNING,
            evidence=partial(_with_values, copy, copy.ranks, tied_to=name),
            priority=1,
            members=copy.ranks,
        )


def _equal_pairs(setup: StepView) -> Iterator[tuple[SlotValues, SlotValues]]:
    """Yield the weights of embeddings with those of other modules that hold the same: on the same
    ranks, or on none of them."""
    embeddings: list[SlotValues] = []
    copies: dict[int, list[SlotValues]] = {}
    for values in setup.parameters(Phase.SETUP):
        if values.is_constant or not values.is_known.all():
            continue
        if "embedding" in values.call.node.class_name.lower():
            embeddings.append(values)
        else:
            copies.setdefault(int(values.hashes[0]), []).append(values)
    for embedding in embeddings:
        for copy in copies.get(int(embedding.hashes[0]), ()):
            columns = [(embedding.hashes, copy.hashes), (embedding.counts, copy.counts)]
            if np.array_equal(embedding.ranks, copy.ranks):
                is_copy = all(np.array_equal(*pair) for pair in columns)
            else:
                is_copy = all(len(np.unique(np.concatenate(pair))) == 1 for pair in columns)
                is_copy &= not np.isin(embedding.ranks, copy.ranks).any()
            if is_copy:
                yield embedding, copy
