"""Calls, dtypes, shapes and placements are the same on ranks that do the same.

* dtype: one value has one on all ranks, but for what a module with different children on different
  ranks is handed and hands out (stages of a pipeline).
* placement, global shape: DTensors of one mesh agree on those of a value.
* calls: ranks with the same root inputs call the same modules, where all of them own them. Siblings
  are left alone where each rank calls others of them (experts).
* backward passes: ranks that reduce together go through as many before they step. Else one has left
  out a step, or a pass.
* training mode: replicas step with the same modules in eval mode.
* steps: all ranks of a DDP model step it that went through its backward passes.
* layers of a pipeline: no stage runs a numbered one that the stage before it runs too, where that
  begins further back. Layers whose gradients are shared are left alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Final

import numpy as np

from rankscope.diagnosis.context import Candidate, JudgedStep, candidate_at
from rankscope.diagnosis.coverage import Evidence, EvidenceScope
from rankscope.diagnosis.evidence.distances import minority
from rankscope.diagnosis.evidence.replicas import DDP, InferredReplicas
from rankscope.diagnosis.evidence.stages import stage_edges
from rankscope.diagnosis.evidence.stepview import (
    Array,
    CallView,
    SlotValues,
    StepView,
    grouped,
    is_below,
    is_input,
    is_output,
    layer_of,
    sibling_path,
)
from rankscope.layout.placement import LayoutSource
from rankscope.record.finding import Kind
from rankscope.record.notes import NoteKind, read_modules
from rankscope.record.phases import Phase
from rankscope.record.ranks import ranks_named, ranks_text
from rankscope.record.texts import counted
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
        aspects = {word for view in views for word in view.disagreement}
        if len(views) < 2 or not aspects or _is_stage(values):
            continue
        example = f"{values.name} differs"
        if values.source == "unknown" and step_view.lacks(_OF_STAGES, "dtypes over ranks", example):
            continue
        if len({view.dtype for view in views}) > 1:
            texts = [view.dtype for view in views]
            yield _candidate(step_view, values, views, texts, Kind.DTYPE)
        elif aspects & {"source", "mesh", "placements"} and _is_one_mesh(views):
            texts = []
            for view in views:
                placed = " ".join(f"{axis}={place}" for axis, place in view.placements.items())
                is_dtensor = view.source is LayoutSource.DTENSOR
                source = "" if is_dtensor else f" ({view.source.value})"
                text = f"{placed} on mesh {view.mesh_name}{source}"
                texts.append(text if placed else f"layout {view.source.value}")
            yield _candidate(step_view, values, views, texts, Kind.PLACEMENT)
        elif "global_shape" in aspects and _is_one_mesh(views):
            texts = [str(view.global_shape) for view in views]
            yield _candidate(step_view, values, views, texts, Kind.SHAPE)


def _of_one_part(values: SlotValues, replicas: InferredReplicas) -> list[SlotView]:
    """Return the entries of ranks with one part of a model: stages may hold different things."""
    views = [view for view in values.views if view.dtype != "python"]
    for part in replicas.by_part(values.ranks, fewest=1):
        of_part = [view for view in views if np.isin(part, view.ranks).any()]
        if len(of_part) > 1:
            return of_part
    return []


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
    shared = (sum(not mesh.isdisjoint(view.ranks) for view in views) > 1 for mesh in meshes)
    return not meshes or any(shared)


def _candidate(
    step_view: JudgedStep, values: SlotValues, views: list[SlotView], texts: list[str], kind: Kind
) -> Candidate:
    ranks = np.array([rank for view in views for rank in view.ranks], np.int64)
    keys = np.array([text for view, text in zip(views, texts) for _ in view.ranks])
    blamed = minority(ranks, keys)
    if len(blamed) == len(ranks) and kind is Kind.DTYPE:
        blamed = _outvoted(step_view, values, ranks, keys)
    step_view.context.coverage.applied(values)
    aspect = kind.value.partition("-")[0]
    sides = [{"ranks": ranks_text(view.ranks), aspect: text} for view, text in zip(views, texts)]
    return step_view.candidate(
        values,
        kind,
        blamed,
        "; ".join(f"{ranks_named(view.ranks)}: {text}" for view, text in zip(views, texts)),
        evidence=partial(dict, values=sides),
        priority=-1,
        members=np.sort(ranks),
    )


def _outvoted(step_view: StepView, values: SlotValues, ranks: Array, keys: Array) -> Array:
    """Return the ranks that hold what sibling modules do not; all where these do not tell."""
    call, family = values.call, sibling_path(values.call.path)
    votes = [
        view.dtype
        for sibling in step_view.of(call.phase)
        if sibling is not call and sibling.node.class_name == call.node.class_name
        if sibling_path(sibling.path) == family or call.phase is Phase.SETUP
        if values.slot in sibling.slots
        for view in sibling.slots[values.slot].views
    ]
    if not votes:
        return ranks
    outvoted = ranks[keys != max(set(votes), key=votes.count)]
    return outvoted if 0 < len(outvoted) < len(ranks) else ranks


# ---- calls ---------------------------------------------------------------------------------------


def different_calls(step_view: JudgedStep) -> Iterator[Candidate]:
    """Yield a candidate for every module that some of the ranks with the same data did not call."""
    owners = step_view.life.replicas.owners
    inside = (call for call in step_view.of(Phase.FORWARD) if call.parent is not None)
    families = grouped(((id(call.parent), sibling_path(call.path)), call) for call in inside)
    for calls, group in itertools.product(families.values(), step_view.same_inputs):
        missing = [(call, _missing(call, group, owners)) for call in calls]
        partly_called = [(call, ranks) for call, ranks in missing if len(ranks)]
        if len(calls) > 1 and 2 * len(partly_called) > len(calls):
            continue
        for call, absent in partly_called:
            present = group[np.isin(group, call.ranks)]
            facts = {"called": ranks_text(present), "not_called": ranks_text(absent)}
            yield candidate_at(
                step_view,
                call,
                Kind.STRUCTURE,
                "",
                absent if len(present) >= len(absent) else present,
                f"{ranks_named(absent)} did not call it, "
                f"{ranks_named(present)} with the same data did",
                members=present,
                evidence=partial(dict, facts),
            )


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


# ---- passes --------------------------------------------------------------------------------------

_PASSES_ADVICE: Final = (
    "These ranks reduce together, so from here on steps of one number are other passes on them, "
    "and are not compared. Look for what leaves out a step, a backward or a micro-batch on one "
    "rank alone (a condition on a loss, infinity, an empty batch, no_sync): all ranks have to "
    "decide alike."
)
OTHER_PASSES: Final = "other passes"
"""`once` of a candidate that says why steps of one number are other passes on some ranks."""


def unlike_passes(step_view: JudgedStep) -> Iterator[Candidate]:
    """Yield a candidate for the first model whose ranks stepped after unlike numbers of reduced
    passes, and with unlike gradients."""
    for path, line, counts, is_meant in step_view.unlike_passes:
        if is_meant:
            continue
        first = next(call for call in step_view.named(path) if np.isin(line, call.ranks).all())
        ranks_by_count = grouped((count, rank) for rank, count in counts.items())
        listed = [
            f"{ranks_named(ranks)} took {counted(count, 'backward pass', 'backward passes')}"
            for count, ranks in sorted(ranks_by_count.items())
        ]
        steps = (c for c in step_view.of(Phase.GRADS) if np.isin(line, c.ranks).all())
        stepped = next((c for c in steps if is_below(c.path, path)), None)
        reduces = "DDP reduces" if step_view.ddp_passes else "are reduced"
        yield candidate_at(
            step_view,
            first,
            Kind.STRUCTURE,
            "",
            minority(line, np.array([counts[rank] for rank in line.tolist()])),
            f"before the optimizer's step {', '.join(listed)} through a model whose gradients "
            f"{reduces} over these ranks",
            advice=_PASSES_ADVICE,
            members=line,
            times_ns=_begun(step_view, line) if stepped is None else stepped.times(line) - 1,
            evidence=partial(dict, passes={str(rank): n for rank, n in counts.items()}),
            once=OTHER_PASSES,
        )
        return


LEFT_OUT_ADVICE: Final = (
    "Look for what leaves out optimizer.step() on some ranks (a condition on a loss or an accuracy "
    "of their own rows): all ranks have to decide alike, by a number that was reduced."
)
LEFT_OUT_STEP: Final = "left out step"
"""`once` of a candidate that says why steps of one number are not the same step on all ranks."""


def left_out_steps(step_view: JudgedStep) -> Iterator[Candidate]:
    """Yield a candidate for the first model of DDP that some of its ranks stepped and others not,
    which went through its backward passes too, and stepped another model."""
    stepped, stepped_at = step_view.stepped, dict[int, int]()
    for call in step_view.of(Phase.GRADS):
        stepped_at.update(zip(call.ranks.tolist(), call.times(call.ranks).tolist()))
    is_uneven = len(stepped) > 1 and not step_view.life.uneven
    lines = step_view.life.data_lines.get(DDP, ()) if is_uneven else ()
    for (path, by_rank), line in itertools.product(step_view.ddp_passes.items(), lines):
        members = set(line.tolist())
        steppers = stepped.get(path, set()) & members
        idle = (members - steppers) & stepped_at.keys()
        backwards = [c for c in step_view.named(path) if c.phase is Phase.BACKWARD]
        passed = {
            rank
            for call in backwards
            for rank, time in zip(call.ranks.tolist(), call.times(call.ranks).tolist())
            if rank in stepped_at and time < stepped_at[rank] and by_rank[rank].reduced
        }
        if not steppers or not idle or not members <= passed:
            continue
        first = next(call for call in step_view.named(path) if np.isin(line, call.ranks).all())
        absent = sorted(idle)
        yield candidate_at(
            step_view,
            first,
            Kind.STRUCTURE,
            "",
            absent,
            f"{ranks_named(absent)} did not step this model, though its backward passes went "
            f"through {'it' if len(absent) == 1 else 'them'}, and {ranks_named(steppers)} did",
            advice=LEFT_OUT_ADVICE,
            members=line,
            times_ns=_begun(step_view, line),
            evidence=partial(
                dict, stepped=ranks_text(sorted(steppers)), not_stepped=ranks_text(absent)
            ),
            once=LEFT_OUT_STEP,
        )
        return


# ---- training mode -------------------------------------------------------------------------------

MODES_ADVICE: Final = (
    "Dropout and the statistics of normalization follow module.training, so what is in another "
    "mode does not compute the same: look for an eval() (evaluation, generation, saving on rank 0) "
    "without train() behind it."
)


def unlike_modes(step_view: JudgedStep) -> Iterator[Candidate]:
    """Yield a candidate for replicas that step with unlike modules in eval mode."""
    noted = {
        kind: [
            (rank, n.note.fields)
            for n in step_view.notes
            if n.note.kind is kind
            for rank in n.ranks
        ]
        for kind in (NoteKind.OPTIMIZER_OPTIONS, NoteKind.IN_EVAL_MODE)
    }
    stepped = [rank for rank, _ in noted[NoteKind.OPTIMIZER_OPTIONS]]
    eval_modules = grouped(
        (rank, f"{fields['modules']} of {fields['model']}")
        for rank, fields in noted[NoteKind.IN_EVAL_MODE]
    )
    for line in (*step_view.lines, *step_view.same_inputs) if eval_modules else ():
        members = line[np.isin(line, stepped)]
        texts = np.array(
            [", ".join(sorted(eval_modules.get(r, ["none"]))) for r in members.tolist()]
        )
        roots = [call for call in step_view.roots if np.isin(members, call.ranks).all()]
        if len(set(texts.tolist())) < 2 or not roots:
            continue
        modules = [
            {
                (fields["model"], path)
                for holder, fields in noted[NoteKind.IN_EVAL_MODE]
                if holder == rank
                for path in read_modules(str(fields["modules"]))
            }
            for rank in members.tolist()
        ]
        unlike = modules[0].union(*modules[1:]) - modules[0].intersection(*modules[1:])
        model, path = unlike.pop() if len(unlike) == 1 else ("", "")
        is_of_first = not roots[0].path and model == roots[0].node.class_name
        blamed = minority(members, texts)
        if len(blamed) == len(members):
            is_whole = np.array([any(not path for _, path in paths) for paths in modules])
            blamed = members[is_whole] if is_whole.any() else members
        sides = grouped(zip(texts.tolist(), members.tolist()))
        listed = [f"{text} on {ranks_named(ranks)}" for text, ranks in sides.items()]
        yield candidate_at(
            step_view,
            roots[0],
            Kind.STRUCTURE,
            "",
            blamed,
            f"replicas step with unlike modules in eval mode: {'; '.join(listed)}",
            advice=MODES_ADVICE,
            members=members,
            path=path if is_of_first else None,
            times_ns=_begun(step_view, members),
            evidence=partial(dict, eval_modules={ranks_text(r): t for t, r in sides.items()}),
        )
        return


def _begun(step_view: StepView, ranks: Array) -> Array:
    """Return a time just before the step began on each of these ranks, ns: its calls come later."""
    times = [c.times(ranks) for c in step_view.calls if np.isin(ranks, c.ranks).all()]
    earliest: Array = np.min(times, axis=0) - 1
    return earliest


# ---- stages --------------------------------------------------------------------------------------


def layers_of_two_stages(step_view: JudgedStep) -> Iterator[Candidate]:
    """Yield a candidate for every layer that a pipeline's stage and the one it feeds both run."""
    edges = {(edge.sender, edge.receiver) for edge in stage_edges(step_view)}
    if not edges:
        return
    calls = _layers_by_rank(step_view)
    stages: dict[str, set[int]] = {}
    for sender, receiver in edges:
        for layer in _run_by_both(calls.get(sender, {}), calls.get(receiver, {})):
            if not _is_shared(step_view, layer, np.array(sorted((sender, receiver)), np.int64)):
                stages.setdefault(layer, set()).update((sender, receiver))
    for layer in sorted(stages, key=_family_and_number):
        ranks = sorted(stages[layer])
        call = calls[ranks[0]][layer]
        yield candidate_at(
            step_view,
            call,
            Kind.STRUCTURE,
            "",
            ranks,
            f"{layer} runs on {ranks_named(ranks)}, where one stage feeds the other: the model "
            "runs it twice",
            advice="Look at how the layers are split into stages: the end of one range is the "
            "begin of the next, and counts for one of them alone. A layer that stages share on "
            "purpose has to have its gradients summed over them.",
            members=call.ranks[np.isin(call.ranks, ranks)],
            evidence=partial(dict, stages=ranks_text(ranks)),
        )


def _family_and_number(layer: str) -> tuple[str, int]:
    family, _, number = layer.rpartition(".")
    return family, int(number)


def _layers_by_rank(step_view: JudgedStep) -> dict[int, dict[str, CallView]]:
    """Return {rank: {layer with parameters and a number: its first call}}. Layers that run more
    than once in a micro-batch share weights on purpose and are left out."""
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
    """Yield layers at the end of one stage and the begin of the next."""
    ends = []
    for layers in (first, second):
        numbers = grouped(map(_family_and_number, layers))
        ends.append({family: (min(n), max(n)) for family, n in numbers.items()})
    for layer in {*first} & {*second}:
        family, _ = _family_and_number(layer)
        (low, high), (next_low, next_high) = ends[0][family], ends[1][family]
        if low < next_low and high <= next_high:
            yield layer


def _is_shared(step_view: StepView, layer: str, ranks: Array) -> bool:
    for phase in (Phase.GRADS, Phase.PARAMS):
        agrees = [
            values.agree(ranks)
            for values in step_view.values(phase)
            if f"{values.call.path}.".startswith(f"{layer}.") and not values.is_constant
            if values.slot.startswith(("grad:", "param:"))
        ]
        if agrees and all(agrees):
            return True
    return False
