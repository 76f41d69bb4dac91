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

from rankscope.diagnosis.candidates import Candidate, suspect_at
from rankscope.diagnosis.context import CheckContext
from rankscope.diagnosis.datapeers import same_inputs
from rankscope.diagnosis.distances import sides, sides_text
from rankscope.diagnosis.rules.equality import is_within_rounding
from rankscope.diagnosis.stepview import CallView, SlotValues, StepView, sibling_path
from rankscope.record.call import Phase
from rankscope.record.finding import Kind
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


def lost_reductions(moment: StepView, scene: CheckContext) -> Iterator[Candidate]:
    """Yield a suspect for every output that is not replicated where its siblings' are."""
    for groups in _by_size(same_inputs(moment)):
        for family in _families(moment, scene, groups):
            yield from _judged(moment, scene, family)


def _by_size(groups: tuple[Array, ...]) -> list[Array]:
    sizes = sorted({len(group) for group in groups})
    return [np.stack([g for g in groups if len(g) == size]) for size in sizes]


def _families(moment: StepView, scene: CheckContext, groups: Array) -> Iterable[_Family]:
    sharded = scene.life(moment.incarnation).replicas.sharded_paths
    found: dict[tuple[Any, ...], _Family] = {}
    for call in moment.of(Phase.FORWARD, Phase.BACKWARD):
        outputs = [h for h in call.outputs if not _is_described(scene, h) and not h.is_constant]
        if not outputs:
            continue
        inputs = _inputs_agree(call, groups)
        own = f"{call.path}." if call.path else ""
        is_cut = any(p == call.path or p.startswith(own) for p in sharded) or _holds_dtensors(call)
        for held in outputs:
            key = (
                sibling_path(call.path), call.node.class_name, held.slot, call.phase,
                call.micro_batch, call.ordinal,
            )  # fmt: skip
            family = found.setdefault(key, _Family(groups=groups))
            family.members.append(held)
            family.agrees.append(held.agreements(groups))
            family.inputs_agree.append(inputs)
            family.is_by_itself.append((inputs != 0) & (not is_cut))
    return found.values()


def _is_described(scene: CheckContext, held: SlotValues) -> bool:
    return held.source != "unknown" or scene.layouts.same(held) is not None


def _inputs_agree(call: CallView, groups: Array) -> Array:
    every = [held.agreements(groups) for held in call.inputs]
    return np.stack(every).min(0) if every else np.full(len(groups), -1, np.int8)


def _holds_dtensors(call: CallView) -> bool:
    waiting = [call]
    while waiting:
        each = waiting.pop()
        waiting.extend(each.children)
        if any(held.source == "dtensor" for held in each.held.values()):
            return True
    return False


def _judged(moment: StepView, scene: CheckContext, family: _Family) -> Iterator[Candidate]:
    agrees, inputs = np.stack(family.agrees), np.stack(family.inputs_agree)
    if not (agrees == 1).any():
        return
    for held in family.members:
        scene.ledger.applied(held)
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
        yield _suspect(moment, scene, family.members[row], groups, lost_on[0][1])


def _is_telling(agreeing: Array, lost: Array, is_by_itself: bool) -> bool:
    """True where those that agree show that the others should."""
    if not len(agreeing) or not len(lost):
        return False
    if is_by_itself:
        return len(lost) == 1 and len(agreeing) >= _FEWEST
    return len(lost) <= len(agreeing)


def _suspect(
    moment: StepView,
    scene: CheckContext,
    held: SlotValues,
    groups: list[Array],
    paths: list[str],
) -> Candidate:
    ranks = np.unique(np.concatenate(groups))

    def evidence() -> dict[str, Any]:
        found: dict[str, Any] = {
            "layout": "inferred",
            "values": sides(held, ranks),
            "siblings_that_agree": paths[:4],
            "rank_resolution": "none",
        }
        if len(groups) > 1:
            found["groups"] = [ranks_text(group.tolist()) for group in groups]
        return found

    return suspect_at(
        moment,
        held.call,
        Kind.REPLICA,
        held.slot,
        ranks,
        ranks,
        scene.times(held, ranks),
        f"{ranks_named(ranks.tolist())} hold different values"
        f"{' within their groups' if len(groups) > 1 else ''}, though in {paths[0]} they hold "
        f"the same ({sides_text(held, groups[0])})",
        evidence=evidence,
        priority=1,
    )
