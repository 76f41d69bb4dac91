"""What all sibling modules do, one module does too: replicated activations nobody declared.

Under hand-written parallelism nothing says that the output of a row-parallel layer is the same on
all ranks. But where ranks were handed the same root inputs, an output that agrees bit by bit on
them in `layers.1.attn.o_proj`, though its inputs or its weights differ there, is replicated by a
reduction. Then `layers.*.attn.o_proj` should be, and one that is not has lost its reduction.

Of an output that agrees by itself (same inputs, same weights) the same is said only where at least
two siblings agree and one does not: random numbers of their own on each rank look alike. Constants
prove nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rankscope.diagnosis.candidates import Candidate, candidate_of
from rankscope.diagnosis.context import CheckContext
from rankscope.diagnosis.datapeers import same_inputs
from rankscope.diagnosis.distances import sides, sides_text
from rankscope.diagnosis.rules.equality import is_within_rounding
from rankscope.diagnosis.stepview import CallView, SlotValues, StepView, sibling_path
from rankscope.record.finding import Kind
from rankscope.record.phases import Phase
from rankscope.record.ranklists import ranks_named, ranks_text

__all__ = ["lost_reductions"]

Array = NDArray[Any]
_FEWEST: Final = 2


@dataclass(slots=True, kw_only=True)
class _Family:
    """One output of sibling calls, over groups of ranks of one size."""

    groups: Array
    """[g, n] ranks."""
    members: list[SlotValues] = field(default_factory=list)
    agrees: list[Array] = field(default_factory=list)
    """Per member [g]: 1 the same bytes, 0 not, -1 unknown."""
    inputs_agree: list[Array] = field(default_factory=list)
    """Per member [g]; -1 also where there are no tensor inputs."""
    is_by_itself: list[Array] = field(default_factory=list)
    """Per member [g]: nothing that goes in differs, it would agree without a reduction."""


def lost_reductions(step_view: StepView, context: CheckContext) -> Iterator[Candidate]:
    """Yield a candidate for every output that is not replicated where its siblings' are."""
    for groups in _by_size(same_inputs(step_view)):
        for family in _families(step_view, context, groups):
            yield from _judged(step_view, context, family)


def _by_size(groups: tuple[Array, ...]) -> list[Array]:
    sizes = sorted({len(group) for group in groups})
    return [np.stack([g for g in groups if len(g) == size]) for size in sizes]


def _families(step_view: StepView, context: CheckContext, groups: Array) -> Iterable[_Family]:
    sharded = context.incarnation(step_view.incarnation).replicas.sharded_paths
    found: dict[tuple[Any, ...], _Family] = {}
    for call in step_view.of(Phase.FORWARD, Phase.BACKWARD):
        outputs = [h for h in call.outputs if not _is_described(context, h) and not h.is_constant]
        if not outputs:
            continue
        inputs = _inputs_agree(call, groups)
        own = f"{call.path}." if call.path else ""
        meshes = _meshes_inside(call)
        is_cut = any(p == call.path or p.startswith(own) for p in sharded) or bool(meshes)
        for values in outputs:
            key = (
                sibling_path(call.path), call.node.class_name, values.slot, call.phase,
                call.micro_batch, call.ordinal, meshes,
            )  # fmt: skip
            family = found.setdefault(key, _Family(groups=groups))
            family.members.append(values)
            family.agrees.append(values.agreements(groups))
            family.inputs_agree.append(inputs)
            family.is_by_itself.append((inputs != 0) & (not is_cut))
    return found.values()


def _is_described(context: CheckContext, values: SlotValues) -> bool:
    return values.source != "unknown" or context.layouts.same(values) is not None


def _inputs_agree(call: CallView, groups: Array) -> Array:
    every = [values.agreements(groups) for values in call.inputs]
    return np.stack(every).min(0) if every else np.full(len(groups), -1, np.int8)


def _meshes_inside(call: CallView) -> frozenset[str]:
    """Return the meshes of DTensors inside a call: siblings on other meshes do otherwise."""
    found: set[str] = set()
    waiting = [call]
    while waiting:
        each = waiting.pop()
        waiting.extend(each.children)
        dtensors = (values for values in each.slots.values() if values.source == "dtensor")
        found.update(view.mesh_name for values in dtensors for view in values.views)
    return frozenset(found)


def _judged(step_view: StepView, context: CheckContext, family: _Family) -> Iterator[Candidate]:
    agrees, inputs = np.stack(family.agrees), np.stack(family.inputs_agree)
    if not (agrees == 1).any():
        return
    for values in family.members:
        context.coverage.applied(values)
    by_itself = np.stack(family.is_by_itself)
    found: dict[int, list[tuple[Array, list[str]]]] = {}
    for column in np.flatnonzero((agrees == 1).any(0) & (agrees == 0).any(0)).tolist():
        for like in (1, 0, -1):
            rows = np.flatnonzero(inputs[:, column] == like)
            agreeing = rows[agrees[rows, column] == 1]
            lost = rows[agrees[rows, column] == 0]
            if not _is_telling(agreeing, lost, bool(by_itself[agreeing, column].any())):
                continue
            group = family.groups[column]
            for row in lost.tolist():
                if not is_within_rounding(family.members[row], [group]):
                    paths = [family.members[other].call.path for other in agreeing.tolist()]
                    found.setdefault(row, []).append((group, paths))
    for row, lost_on in found.items():
        groups = [group for group, _ in lost_on]
        yield _candidate(step_view, family.members[row], groups, lost_on[0][1])


def _is_telling(agreeing: Array, lost: Array, is_by_itself: bool) -> bool:
    """True where those that agree show that the others should."""
    if not len(agreeing) or not len(lost):
        return False
    if is_by_itself:
        return len(lost) == 1 and len(agreeing) >= _FEWEST
    return len(lost) <= len(agreeing)


def _candidate(
    step_view: StepView,
    values: SlotValues,
    groups: list[Array],
    paths: list[str],
) -> Candidate:
    ranks = np.unique(np.concatenate(groups))

    def evidence() -> dict[str, Any]:
        found: dict[str, Any] = {
            "layout": "inferred",
            "values": sides(values, ranks),
            "siblings_that_agree": paths[:4],
            "rank_resolution": "none",
        }
        if len(groups) > 1:
            found["groups"] = [ranks_text(group.tolist()) for group in groups]
        return found

    return candidate_of(
        step_view,
        values,
        Kind.REPLICA,
        ranks,
        f"{ranks_named(ranks.tolist())} hold different values"
        f"{' within their groups' if len(groups) > 1 else ''}, though in {paths[0]} they hold "
        f"the same ({sides_text(values, groups[0])})",
        evidence=evidence,
        priority=1,
    )
