"""Calls, dtypes, shapes and placements are the same on ranks that do the same.

* dtype: one value has one on all ranks, but for what a module with different children on different
  ranks is handed and hands out (stages of a pipeline).
* placement, global shape: what DTensors of one mesh say of one value.
* calls: ranks with the same root inputs call the same modules, where all of them own them. Siblings
  of which each rank calls others (experts) are left alone.
* layers of a pipeline: no stage runs a numbered one that the stage before it runs too, where that
  begins further back. Layers whose gradients are shared are left alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Final

import numpy as np

from rankscope.diagnosis.context import Candidate, JudgedStep, candidate_at
from rankscope.diagnosis.coverage import Evidence, EvidenceScope
from rankscope.diagnosis.evidence.distances import minority
from rankscope.diagnosis.evidence.replicas import InferredReplicas
from rankscope.diagnosis.evidence.stepview import (
    Array,
    CallView,
    SlotValues,
    StepView,
    grouped,
    is_input,
    is_output,
    layer_of,
    sibling_path,
)
from rankscope.diagnosis.rules.batches import stage_edges
from rankscope.layout.placement import LayoutSource
from rankscope.record.finding import Kind
from rankscope.record.phases import Phase
from rankscope.record.ranks import ranks_named, ranks_text
from rankscope.tree.slotview import SlotView

_OF_STAGES: Final[frozenset[Evidence]] = frozenset(
    {Phase.FORWARD, Phase.BACKWARD, EvidenceScope.ROOTS, EvidenceScope.RANKS, EvidenceScope.DIGESTS}
)
"""What tells stages of a pipeline, which hold different things under one path, from replicas."""


# ---- dtype, shape, placement ---------------------------------------------------------------------


def different_kinds(step_view: JudgedStep) -> Iterator[Candidate]:
    """Yield a candidate for every value that ranks hold as different things."""
    for values in step_view.values(*Phase):
        if len(values.views) < 2 or values.call.phase is Phase.COLLECTIVE:
            continue
        views = _of_one_part(values, step_view.life.replicas)
        what = {word for view in views for word in view.disagreement}
        if len(views) < 2 or not what or _is_stage(values):
            continue
        example = f"{values.name} differs"
        if values.source == "unknown" and step_view.lacks(_OF_STAGES, "dtypes over ranks", example):
            continue
        if len({view.dtype for view in views}) > 1:
            texts = [view.dtype for view in views]
            yield _candidate(step_view, values, views, texts, Kind.DTYPE)
        elif what & {"source", "mesh", "placements"} and _is_one_mesh(views):
            texts = [_layout_text(view) for view in views]
            yield _candidate(step_view, values, views, texts, Kind.PLACEMENT)
        elif "global_shape" in what and _is_one_mesh(views):
            texts = [str(view.global_shape) for view in views]
            yield _candidate(step_view, values, views, texts, Kind.SHAPE)


def _of_one_part(values: SlotValues, replicas: InferredReplicas) -> list[SlotView]:
    """Return the entries of ranks with one part of a model: stages may hold different things."""
    views = [view for view in values.views if view.dtype != "python"]
    for part in replicas.by_part(values.ranks, fewest=1):
        own = [view for view in views if np.isin(part, view.ranks).any()]
        if len(own) > 1:
            return own
    return []


def _layout_text(view: SlotView) -> str:
    if not view.placements:
        return f"layout {view.source.value}"
    placed = " ".join(f"{axis}={placement}" for axis, placement in view.placements.items())
    source = "" if view.source is LayoutSource.DTENSOR else f" ({view.source.value})"
    return f"{placed} on mesh {view.mesh_name}{source}"


def _is_stage(values: SlotValues) -> bool:
    """True for inputs and outputs of a call whose children are other modules on other ranks."""
    call = values.call
    if not (is_input(values.slot, call.phase) or is_output(values.slot, call.phase)):
        return False
    if call.parent is None and not call.children:
        return True
    return any(len(child.ranks) != len(call.ranks) for child in call.children)


def _is_one_mesh(views: list[SlotView]) -> bool:
    meshes = [set(mesh.ranks) for view in views for mesh in view.meshes]
    return (
        any(sum(not mesh.isdisjoint(view.ranks) for view in views) > 1 for mesh in meshes)
        or not meshes
    )


def _candidate(
    step_view: JudgedStep, values: SlotValues, views: list[SlotView], texts: list[str], kind: Kind
) -> Candidate:
    ranks = np.array([rank for view in views for rank in view.ranks], np.int64)
    keys = np.array([text for view, text in zip(views, texts) for _ in view.ranks])
    blamed = minority(ranks, keys)
    if len(blamed) == len(ranks):
        blamed = _outvoted(step_view, values, ranks, keys, kind)
    members = np.sort(ranks)
    listed = "; ".join(f"{ranks_named(view.ranks)}: {text}" for view, text in zip(views, texts))
    step_view.context.coverage.applied(values)
    return step_view.candidate(
        values,
        kind,
        blamed,
        listed,
        evidence=lambda: {
            "values": [
                {"ranks": ranks_text(view.ranks), kind.value.partition("-")[0]: text}
                for view, text in zip(views, texts)
            ]
        },
        priority=-1,
        members=members,
    )


def _outvoted(
    step_view: StepView, values: SlotValues, ranks: Array, keys: Array, kind: Kind
) -> Array:
    """Return the ranks that hold what sibling modules do not; all where these do not tell."""
    if kind is not Kind.DTYPE:
        return ranks
    call, family = values.call, sibling_path(values.call.path)
    votes = [
        view.dtype
        for other in step_view.of(call.phase)
        if other is not call and _is_like(other, call, family) and values.slot in other.slots
        for view in other.slots[values.slot].views
    ]
    if not votes:
        return ranks
    usual = max(set(votes), key=votes.count)
    others = ranks[keys != usual]
    return others if 0 < len(others) < len(ranks) else ranks


def _is_like(other: CallView, call: CallView, family: str) -> bool:
    same_class = other.node.class_name == call.node.class_name
    return same_class and (sibling_path(other.path) == family or call.phase is Phase.SETUP)


# ---- calls ---------------------------------------------------------------------------------------


def different_calls(step_view: JudgedStep) -> Iterator[Candidate]:
    """Yield a candidate for every module that some of the ranks with the same data did not call."""
    groups = step_view.same_inputs
    owners = step_view.life.replicas.owners
    inside = (call for call in step_view.of(Phase.FORWARD) if call.parent is not None)
    families = grouped(((id(call.parent), sibling_path(call.path)), call) for call in inside)
    for calls in families.values():
        for group in groups:
            absent = [(call, _missing(call, group, owners)) for call in calls]
            partial = [(call, ranks) for call, ranks in absent if len(ranks)]
            if 2 * len(partial) <= len(calls) or len(calls) == 1:
                for call, ranks in partial:
                    yield _uncalled(step_view, call, group, ranks)


def _missing(call: CallView, group: Array, owners: Mapping[str, Array]) -> Array:
    """Return the ranks of a group that own the module and skipped it while others called it."""
    parent = call.parent
    assert parent is not None  # roots are no families
    around = group[np.isin(group, parent.ranks)]
    ended = [r for o in parent.node.outcomes if o.has_returned for r in o.ranks]
    absent = around[~np.isin(around, call.ranks) & np.isin(around, ended)]
    if len(absent) in (0, len(around)):
        return absent[:0]
    below = (ranks for path, ranks in owners.items() if path.startswith(f"{call.path}."))
    holders = [owners[call.path]] if call.path in owners else [*below]
    is_owned = len(holders) > 0 and np.isin(absent, np.concatenate(holders)).all()
    return absent if is_owned else absent[:0]


def _uncalled(step_view: StepView, call: CallView, group: Array, absent: Array) -> Candidate:
    present = group[np.isin(group, call.ranks)]
    return candidate_at(
        step_view,
        call,
        Kind.STRUCTURE,
        "",
        absent if len(present) >= len(absent) else present,
        f"{ranks_named(absent)} did not call it, {ranks_named(present)} with the same data did",
        members=present,
        evidence=lambda: {"called": ranks_text(present), "not_called": ranks_text(absent)},
    )


# ---- stages --------------------------------------------------------------------------------------


def layers_of_two_stages(step_view: JudgedStep) -> Iterator[Candidate]:
    """Yield a candidate for every layer that a pipeline's stage and the one it feeds both run."""
    edges = {(edge.sender, edge.receiver) for edge in stage_edges(step_view)}
    if not edges:
        return
    run = _layers_by_rank(step_view)
    twice: dict[str, set[int]] = {}
    for sender, receiver in edges:
        for layer in _run_by_both(run.get(sender, {}), run.get(receiver, {})):
            if not _is_shared(step_view, layer, np.array(sorted((sender, receiver)), np.int64)):
                twice.setdefault(layer, set()).update((sender, receiver))
    for layer in sorted(twice, key=_family_and_number):
        ranks = sorted(twice[layer])
        yield _run_twice(step_view, run[ranks[0]][layer], layer, ranks)


def _family_and_number(layer: str) -> tuple[str, int]:
    family, _, number = layer.rpartition(".")
    return family, int(number)


def _layers_by_rank(step_view: JudgedStep) -> dict[int, dict[str, CallView]]:
    """Return {rank: {layer with parameters and a number: its first call}}; those that run more than
    once in a micro-batch share weights on purpose."""
    owned = {layer_of(path) for path in step_view.life.replicas.owners}
    calls = [(call, layer_of(call.path)) for call in step_view.of(Phase.FORWARD)]
    repeated = {layer for call, layer in calls if call.ordinal and call.path == layer}
    layers: dict[int, dict[str, CallView]] = {}
    for call, layer in calls:
        if layer and layer in owned and layer not in repeated:
            for rank in call.ranks.tolist():
                layers.setdefault(rank, {}).setdefault(layer, call)
    return layers


def _run_by_both(first: Collection[str], second: Collection[str]) -> Iterator[str]:
    """Yield layers at the end of one stage and the begin of the next. Two models, of which one
    feeds the other, both begin with a layer 0."""
    own, others = _numbers_by_family(first), _numbers_by_family(second)
    for layer in {*first} & {*second}:
        family, _ = _family_and_number(layer)
        (low, high), (other_low, other_high) = own[family], others[family]
        if low < other_low and high <= other_high:
            yield layer


def _numbers_by_family(layers: Iterable[str]) -> dict[str, tuple[int, int]]:
    spans: dict[str, tuple[int, int]] = {}
    for family, number in map(_family_and_number, layers):
        low, high = spans.get(family, (number, number))
        spans[family] = min(low, number), max(high, number)
    return spans


def _is_shared(step_view: StepView, layer: str, ranks: Array) -> bool:
    inside = f"{layer}."
    for phase in (Phase.GRADS, Phase.PARAMS):
        agrees = [
            values.agree(ranks)
            for values in step_view.values(phase)
            if f"{values.call.path}.".startswith(inside)
            and values.slot.startswith(("grad:", "param:"))
            and not values.is_constant
        ]
        if agrees and all(agrees):
            return True
    return False


def _run_twice(step_view: StepView, call: CallView, layer: str, ranks: list[int]) -> Candidate:
    return candidate_at(
        step_view,
        call,
        Kind.STRUCTURE,
        "",
        ranks,
        f"{layer} runs on {ranks_named(ranks)}, of which one stage feeds the other: the model "
        f"runs it twice",
        advice="Look at how the layers are split into stages: the end of one range is the begin of "
        "the next, and counts for one of them alone. A layer that stages share on purpose has to "
        "have its gradients summed over them.",
        members=call.ranks[np.isin(call.ranks, ranks)],
        evidence=lambda: {"stages": ranks_text(ranks)},
    )
