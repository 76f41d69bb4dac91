"""Ranks that should hold the same value hold the same bytes.

Only of values that replicas compute each for itself (activations, gradients) a distance within
rounding counts as equal. Ranks that were handed the same batch and hand out the same go through one
computation, in which an equal value has one gradient. Where gradients of replicas differ on such
ranks, the first place in backward at which they do is the fault: the gradient of the model's output
(the loss differs), or a module with equal gradients of outputs, an equal input and unlike gradients
of that input (parts were not summed). Where they hand out different values, forward went apart at
the first module without weights of any rank's own that drew random numbers. A tensor that several
modules see has one gradient: it is charged to the innermost module that alone took it, not to the
one that made it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from rankscope.diagnosis.context import Candidate, JudgedStep
from rankscope.diagnosis.coverage import EvidenceScope
from rankscope.diagnosis.evidence.distances import (
    blamed_ranks,
    differing_sides,
    groups_named,
    inferred_evidence,
    is_multiple,
    is_within_rounding,
    rounding_of,
    sides_text,
    told_distance,
)
from rankscope.diagnosis.evidence.issuedcollectives import issues_of, moves_numbers
from rankscope.diagnosis.evidence.replicas import Same, clusters
from rankscope.diagnosis.evidence.stepview import (
    Array,
    CallView,
    SlotValues,
    StepView,
    grouped,
    is_input,
)
from rankscope.record.finding import Kind, Severity
from rankscope.record.notes import NoteKind, read_options
from rankscope.record.phases import Phase
from rankscope.record.ranks import ranks_named, ranks_text
from rankscope.record.value import ValueFlag

_LOCAL: Final = Phase.having(lambda facts: facts.is_activation) | {Phase.GRADS}
_NO_GRADIENT: Final = (
    "On these ranks it is frozen (requires_grad), or nothing that went into the loss used it."
)
_CHANGED: Final = (
    "Look at what touches gradients behind their reduction (compression and its scales, noise, "
    "preconditioning): its state and random numbers have to be the same on these ranks."
)
UNTAKEN: Final = (
    "No optimizer stepped here with these gradients: they are reduced, or a wrapper is called, "
    "where they update the parameters by hand. Gradients that travel to another rank may differ."
)
MISSED_EXCHANGE: Final = (
    "Look at what this rank does with what ranks send each other behind the optimizer's step: the "
    "order of the pieces, and a parameter that it does not take up."
)
_CROSSED: Final = (
    "Some ranks reduce these two gradients in the other order, so each is added to the other: go "
    "through the parameters in one order on all ranks (a list, or sorted names; no set)."
)
_SAME_BATCH: Final = (
    "These ranks were handed the same batch: look for random numbers that must be the same on them "
    "(dropout from one seed or generator), and for a reduction that is missing, in backward too. "
    "If they are data-parallel after all, the forward went past the wrapper (DDP, FSDP)."
)
_CLEAR: Final = 16
"""Times the rounding of a dtype that multiples lie apart, whose rest may be four times it."""
_STRAIGHT: Final = 1e-2
"""A move and its gradient point the same way where what is left of it is this small beside it."""
_OF_INFERRED: Final = frozenset(
    {*(Phase.FORWARD, Phase.BACKWARD, Phase.GRADS, Phase.PARAMS, Phase.COLLECTIVE), *EvidenceScope}
)
"""What tells replicas from stages of a pipeline, and from ranks that train apart and average."""


def unequal_replicas(step_view: JudgedStep) -> Iterator[Candidate]:
    """Yield a candidate for every value whose replicas differ."""
    unequal: dict[int, tuple[SlotValues, Candidate]] = {}
    for values, replicas, groups, is_applied in step_view.compared_replicas.values:
        if id(values) in unequal:
            continue
        if groups and replicas.source == "inferred":
            asks, example = "replicas that no layout describes", f"{values.name} differs"
            if step_view.lacks(_OF_INFERRED, asks, example):
                continue
        if is_applied:
            step_view.context.coverage.applied(values)
        is_sent = groups and values.call.phase is Phase.PARAMS
        if is_sent and all(
            step_view.sent(group, values.hashes[values.at(group)]) is not None for group in groups
        ):
            continue
        if groups and not _is_rounding(values, groups, step_view):
            unequal[id(values)] = values, _candidate(step_view, values, replicas, groups)
    crossed = _crossed(values for values, _ in unequal.values())
    for values, candidate in unequal.values():
        partner = crossed.get(id(values))
        if partner is not None:
            text = (
                f"{ranks_named(candidate.ranks)} reduced it together with {partner.name}: on some "
                "ranks the two gradients have changed places"
            )
            candidate = replace(candidate, kind=Kind.COLLECTIVE, message=text, advice=_CROSSED)
        yield candidate


def _crossed(unequal: Iterable[SlotValues]) -> dict[int, SlotValues]:
    """Return {id of a gradient: the first that it met in one reduction}: what one has on some
    ranks, bit by bit, the other has on the others."""
    gradients = (v for v in unequal if v.call.phase is Phase.GRADS and not v.is_constant)
    varied = [values for values in gradients if len(np.unique(values.hashes)) > 1]
    families = grouped(((np.unique(v.hashes).tobytes(), v.ranks.tobytes()), v) for v in varied)
    return {
        id(values): partner
        for family in families.values()
        for values in family
        for partner in reversed(family)
        if (partner.hashes != values.hashes).any()
    }


def _drawn_apart(step_view: StepView, group: Array) -> str:
    """Return the path of the first dropout with equal inputs and unlike outputs, "" for none."""
    calls = step_view.dropouts if step_view.has_same_inputs(group) else ()
    drawing = (
        call.path
        for call in calls
        if call.is_given_the_same(group) and any(v.agree(group) is False for v in call.outputs)
    )
    return next(drawing, "")


def _is_rounding(values: SlotValues, groups: list[Array], step_view: JudgedStep) -> bool:
    phase = values.call.phase
    if phase is Phase.PARAMS:
        rounded = (step_view.life.rounded, step_view.rounded_gradients)
        return any(values.parameter in parameters for parameters in rounded)
    if phase not in _LOCAL or not is_within_rounding(values, groups):
        return False
    step_view.context.coverage.skipped["equal within rounding, not bit by bit"] += 1
    return True


def _candidate(
    step_view: JudgedStep, values: SlotValues, replicas: Same, groups: list[Array]
) -> Candidate:
    blamed, members = blamed_ranks(values, groups)
    is_resolved = len(blamed) < len(members)
    departed = None if is_resolved else _departed(step_view, values, groups)
    if departed is not None:
        blamed, is_resolved = departed[0], True
    is_changed = departed is not None and values.call.phase is Phase.GRADS
    kind = Kind.REPLICA if is_changed else _kind(step_view, values, replicas, groups)
    named = ranks_named(blamed)
    if departed is not None:
        detail = f"{named} {departed[1]}"
    elif is_resolved:
        verb = "holds" if len(blamed) == 1 else "hold"
        detail = f"{named} {verb} another value than the other replicas"
    else:
        detail = f"{named} should hold the same and do not"
        if len(groups) > 1:
            detail = f"each of {groups_named(groups)} should hold the same and does not"
    has_missed = is_resolved and _has_missed_exchange(step_view, values, blamed, members)
    if has_missed and departed is None:
        peers = np.setdiff1d(members, blamed)
        detail = (
            f"{detail}: {ranks_named(peers)} stepped with gradients of their own and hold one "
            "value, so they exchanged it in this step"
        )
    if kind is Kind.PLACEMENT:
        detail = f"called Replicate(), but {detail}"
    is_alike = values.call.phase is Phase.GRADS and id(values) in step_view.reduced_and_changed
    if is_alike and kind is Kind.REPLICA and departed is None:
        detail += (
            ", though all gradients of the step together lie closer than what backward left: they "
            "were reduced, and changed afterwards"
        )
    bare = _without_gradient(step_view, values, members)
    if len(bare):
        blamed, is_resolved = bare, True
        detail = f"{ranks_named(bare)} had no gradient of it, the other replicas had one"
    is_held_back = False
    late = values.flags[values.at(members)] & int(ValueFlag.AFTER_CALL)
    is_untaken = kind is Kind.GRADIENT and bool(late.all())
    if is_untaken:
        detail = f"{named} end a step with gradients that differ, and no optimizer took them"
        is_held_back = any(map(moves_numbers, issues_of(step_view)))
    elif kind is Kind.GRADIENT:
        verb = "calls" if len(blamed) == 1 else "call"
        detail = f"{named} {verb} optimizer.step() with gradients that no reduction made equal"
        alike = sorted(clusters(values, groups[0]), key=min)
        if len(groups) > 1 and not is_resolved:
            detail = f"{groups_named(groups)} step with gradients that differ inside each of them"
        elif alike and not is_resolved:
            detail = (
                f"{named} {verb} optimizer.step() with gradients that are one on "
                f"{', one on '.join(map(ranks_named, alike))}, and differ between these"
            )
        flags = values.flags[values.at(members)]
        is_held_back = bool((flags & int(ValueFlag.NO_SYNC)).all())
    random = next(filter(None, (_drawn_apart(step_view, group) for group in groups)), "")

    def evidence() -> dict[str, Any]:
        largest = max(told_distance(values, values.at(group)) for group in groups)
        facts: dict[str, Any] = {
            "layout": replicas.source,
            "values": differing_sides(values, groups),
            "relative_distance": largest if np.isfinite(largest) else None,
        }
        if values.call.phase is Phase.PARAMS and (options := _unlike_options(step_view, members)):
            facts["options"] = options
        if equal := _equal_inputs(step_view, values, groups):
            facts["equal_inputs"] = equal
        if not is_resolved:
            facts["rank_resolution"] = "none"
        # nearer ones are as good multiples of each other as they are the same
        is_clear = largest > _CLEAR * rounding_of(values.dtype)
        if kind is not Kind.GRADIENT and is_clear and _are_multiples(values, groups):
            facts["scaled"] = True
        return facts | ({"random_numbers": random} if random else {})

    advice = _NO_GRADIENT if len(bare) else _CHANGED if is_alike else ""
    advice = MISSED_EXCHANGE if has_missed else UNTAKEN if is_untaken else advice
    if random:
        advice = drawn_apart_advice(random)
    elif kind is Kind.GRADIENT and all(map(step_view.has_same_inputs, groups)):
        advice = _SAME_BATCH
    return step_view.candidate(
        values,
        kind,
        blamed,
        f"{detail} ({sides_text(values, groups[0])})",
        advice=advice,
        severity=Severity.WARNING if is_held_back else Severity.FAULT,
        evidence=evidence,
        members=members,
    )


def _has_missed_exchange(
    step_view: StepView, values: SlotValues, odd: Array, members: Array
) -> bool:
    """True where the other ranks hold one parameter behind a step that they made with gradients
    which are another one on each of them."""
    if values.call.phase is not Phase.PARAMS or not values.slot.startswith("param:"):
        return False
    peers = np.setdiff1d(members, odd)
    gradients = _gradients_of(step_view, values)
    return len(peers) > 1 and any(
        gradient.are_known(peers)
        and len(np.unique(gradient.hashes[gradient.at(peers)])) == len(peers)
        for gradient in gradients
    )


def _unlike_options(step_view: StepView, members: Array) -> list[dict[str, str]]:
    """Return the options with which these ranks step a class of optimizer, where they differ."""
    options = {
        (noted.note.fields["optimizer"], rank): read_options(str(noted.note.fields["options"]))
        for noted in step_view.notes
        if noted.note.kind is NoteKind.OPTIMIZER_OPTIONS
        for rank in noted.ranks
        if rank in members
    }
    by_name = grouped(
        ((optimizer, name), (" | ".join(sorted(texts)), rank))
        for (optimizer, rank), named in options.items()
        for name, texts in named.items()
    )
    return [
        {"optimizer": str(optimizer), "option": f"{name}={text}", "ranks": ranks_text(holders)}
        for (optimizer, name), pairs in by_name.items()
        if len({text for text, _ in pairs}) > 1
        for text, holders in grouped(pairs).items()
    ]


def _equal_inputs(step_view: StepView, values: SlotValues, groups: list[Array]) -> list[str]:
    """Return the slots that this value was made of and that are bitwise equal in each group."""
    if values.call.phase is Phase.PARAMS:
        inputs = _gradients_of(step_view, values)
    else:
        inputs = [] if is_input(values.slot, values.call.phase) else list(values.call.inputs)
    return [v.slot for v in inputs if all(v.agree(group) for group in groups)]


def _are_multiples(values: SlotValues, groups: list[Array]) -> bool:
    return all(is_multiple(values, values.at(group)) for group in groups)


def drawn_apart_advice(path: str) -> str:
    """Return what to look at where a module drew other random numbers on ranks that share it."""
    return (
        f"{path} was handed the same on these ranks and drew other random numbers: seed what "
        f"is replicated alike on them, or draw from a generator of its own that they share."
    )


def _departed(
    step_view: JudgedStep, values: SlotValues, groups: list[Array]
) -> tuple[Array, str] | None:
    """Return the ranks that left what all held before, and how; None where no record tells them."""
    if len(groups) == 1 and values.call.phase is Phase.GRADS:
        return _unlike_reduced(step_view, values, groups[0])
    if len(groups) == 1 and values.call.phase is Phase.PARAMS and values.slot.startswith("param:"):
        return _moved_oddly(step_view, values, groups[0])
    return None


def _unlike_reduced(
    step_view: StepView, values: SlotValues, group: Array
) -> tuple[Array, str] | None:
    places = values.at(group)
    for issue in issues_of(step_view):
        sums = issue.call.slots.get("output.0") if issue.op == "all_reduce" else None
        if sums is None or sums.agree(group) is not True:
            continue
        is_sum = values.hashes[places] == sums.hashes[sums.at(group)]
        if 0 < is_sum.sum() < len(group) and (sums.counts[0] == values.counts[places]).all():
            return group[~is_sum], "changed the gradient that the reduction gave"
    return None


def _moved_oddly(
    step_view: JudgedStep, values: SlotValues, group: Array
) -> tuple[Array, str] | None:
    """Return the ranks whose parameter stayed, or moved elsewhere than its gradient says, and how;
    all had held the same, and stepped with one gradient."""
    before = step_view.life.parameters.get((values.call.path, values.slot))
    gradients = _gradients_of(step_view, values)
    if before is None or len(gradients) != 1 or gradients[0].agree(group) is not True:
        return None
    old = np.searchsorted(before.ranks, group)
    if not np.isin(group, before.ranks).all() or len(set(before.hashes[old].tolist())) > 1:
        return None
    places = values.at(group)
    gradient = gradients[0].column("sketch")[gradients[0].at(group)[0]]
    is_odd = values.hashes[places] == before.hashes[old[0]]
    if is_odd.any() and gradient.any():
        return group[is_odd], "did not move, though it stepped with the same gradient"
    moves = values.column("sketch")[places] - before.sketches[old[0]]
    sizes = np.sqrt(np.mean(moves**2, axis=1))
    if (rounding_of(values.dtype) * values.column("l2")[places] > _STRAIGHT * sizes).any():
        return None
    factors = moves @ gradient / max(float(gradient @ gradient), np.finfo(np.float64).tiny)
    rests = np.sqrt(np.mean((moves - factors[:, None] * gradient) ** 2, axis=1))
    is_odd = ~(rests <= 2 * _STRAIGHT * sizes)  # NaN is odd
    if is_odd.any() and not is_odd.all():
        text = "held another value before the step, or moved elsewhere than its gradient says"
        return group[is_odd], text
    return None


def _gradients_of(step_view: StepView, parameter: SlotValues) -> list[SlotValues]:
    slot = f"grad:{parameter.slot[6:]}"
    calls = step_view.named(parameter.call.path)
    return [call.slots[slot] for call in calls if slot in call.slots]


def _without_gradient(step_view: StepView, values: SlotValues, members: Array) -> Array:
    """Return the ranks that stepped without a gradient of a parameter while others had one."""
    if values.call.phase is not Phase.PARAMS or not values.slot.startswith("param:"):
        return members[:0]
    events = [call.ranks for call in step_view.of(Phase.GRADS) if call.parent is None]
    holders = [gradient.ranks for gradient in _gradients_of(step_view, values)]
    has_stepped = np.isin(members, np.concatenate([members[:0], *events]))
    bare: Array = members[has_stepped & ~np.isin(members, np.concatenate([members[:0], *holders]))]
    return bare if len(bare) < len(members) else members[:0]


def _kind(step_view: JudgedStep, values: SlotValues, replicas: Same, groups: list[Array]) -> Kind:
    call, phase = values.call, values.call.phase
    if phase is Phase.GRADS:
        # local gradients (of unlike inputs) are unreduced; multiples of each other were changed
        # afterwards, as by clipping on one rank
        if _are_multiples(values, groups) or id(values) in step_view.reduced_and_changed:
            return Kind.REPLICA
        if Phase.ACCUMULATED in step_view.evidence and _is_of_no_pass(values, groups):
            return Kind.REPLICA
        if not {Phase.FORWARD, Phase.BACKWARD} <= step_view.evidence:
            return Kind.GRADIENT
        answers = [v.agree(group) for v in step_view.handed(call.path) for group in groups]
        if not any(answer is not None for answer in answers):  # called on one of these ranks alone
            inputs = [v for v in step_view.handed("") if v.call.phase is Phase.FORWARD]
            answers = [v.agree(group) for v in inputs for group in groups]
        return Kind.GRADIENT if False in answers or not answers else Kind.REPLICA
    if phase in (Phase.SETUP, Phase.PARAMS, Phase.BACKWARD) or replicas.source != "dtensor":
        return Kind.REPLICA
    # an unlike plain tensor went into the call, or was made in it: see `from_local`
    sources = [*call.inputs, *(output for child in call.children for output in child.outputs)]
    plain = [source for source in sources if source.source == "unknown"]
    is_plain_unlike = any(source.agree(group) is False for source in plain for group in groups)
    return Kind.PLACEMENT if is_input(values.slot, phase) or is_plain_unlike else Kind.REPLICA


def _is_of_no_pass(values: SlotValues, groups: list[Array]) -> bool:
    """True where most ranks hold one gradient, and the others one that no backward pass left."""
    blamed, members = blamed_ranks(values, groups)
    is_as_left = (values.flags[values.at(blamed)] & int(ValueFlag.AS_LEFT)) != 0
    return len(blamed) < len(members) and not is_as_left.any()


# ---- where gradients began to differ -------------------------------------------------------------


_NEEDS: Final = frozenset(
    {
        Phase.SETUP,
        Phase.FORWARD,
        Phase.BACKWARD,
        Phase.GRADS,
        EvidenceScope.ROOTS,
        EvidenceScope.SLOTS,
    }
)
_DATA_PARALLEL: Final = frozenset({"DDP", "FSDP1", "FSDP2"})
_OTHER_LOSS: Final = (
    "The model gave the same output on these ranks, and what came back to it differs: look at the "
    "loss on each of them, its weight, its targets and its mask."
)
_NOT_SUMMED: Final = (
    "Every rank hands back the part of the gradient that its own shard gives: sum it over these "
    "ranks, as a column-parallel layer does in its backward."
)


def origins_of_gradients(
    step_view: JudgedStep, candidates: Sequence[Candidate]
) -> Iterator[Candidate]:
    """Yield the place that explains gradients which rules found to differ."""
    if not step_view.evidence >= _NEEDS:
        return
    unequal = [
        s
        for s in candidates
        if (s.phase is Phase.GRADS or s.kind is Kind.PLACEMENT) and s.slot
        if s.severity is Severity.FAULT
    ]
    for group in step_view.same_inputs if unequal else ():
        ranks = set(group.tolist())
        if any(ranks.issubset(s.ranks) and s.kind is not Kind.COLLECTIVE for s in unequal):
            yield from _first(step_view, group)


def _first(step_view: JudgedStep, group: Array) -> Iterator[Candidate]:
    """Yield the first place at which ranks with one batch went apart."""
    answers = [values.agree(group) for call in step_view.roots for values in call.outputs]
    facts: dict[str, Any] = {}
    # a layer that begins at zero may hide it from the output
    drawn = next(_random_outputs(step_view, group), None)
    if drawn is not None:
        values, path = drawn, drawn.call.path
        text = "had the same inputs, but not the same output"
        if is_input(drawn.slot, Phase.FORWARD) and drawn.call.parent is not None:
            path = drawn.call.parent.path
            text = f"hand it unlike values in {path}, which was given the same"
        advice, facts["random_numbers"] = drawn_apart_advice(path), path
    elif False in answers:
        return
    else:
        places = _apart_in_backward(step_view, group) if True in answers else []
        if not places:
            return
        _, _, values = min(places, key=lambda place: place[:2])
        advice, text = _OTHER_LOSS, "had the same forward, but not the same gradient"
        if not values.slot.startswith("grad_output"):
            values, advice = _taker(step_view, values, group), _NOT_SUMMED
    yield step_view.candidate(
        values,
        Kind.REPLICA,
        group,
        f"{ranks_named(group)} {text} ({sides_text(values, group)})",
        advice=advice,
        evidence=lambda: inferred_evidence(values, group, **facts),
    )


def _apart_in_backward(step_view: StepView, group: Array) -> list[tuple[int, int, SlotValues]]:
    """Return (when, -depth, gradient) of those that differ though values and inputs do not."""
    forward = {call.identity: call for call in step_view.of(Phase.FORWARD)}
    places: list[tuple[int, int, SlotValues]] = []
    for call in step_view.of(Phase.BACKWARD):
        first = forward.get(call.identity)
        if first is None or not np.isin(group, call.ranks).all():
            continue
        inputs = list(call.inputs)
        differing = [values for values in inputs if _differs(values, group)]
        if call.parent is None and first.parent is None:
            places += [(0, 0, v) for v in differing if _agrees(first, v, "grad_output", group)]
        if inputs and not differing and all(v.agree(group) is not None for v in inputs):
            depth = call.path.count(".") + bool(call.path)
            places += [
                (int(values.times(group).min()), -depth, values)
                for values in call.outputs
                if _differs(values, group) and _agrees(first, values, "grad_input", group)
            ]
    return places


def _random_outputs(step_view: JudgedStep, group: Array) -> Iterator[SlotValues]:
    """Yield unlike outputs of leaf modules with shared weights, where ranks may not draw apart, and
    what a module without DTensors hands to one inside it."""
    replicas = step_view.life.replicas
    if not _DATA_PARALLEL.isdisjoint(replicas.wrappers):
        return
    # what begins at zero and is cut over ranks differs on them from its first step on
    unlike = {
        path
        for (path, _), latest in step_view.life.parameters.items()
        if len(np.unique(latest.hashes[np.isin(latest.ranks, group)])) > 1
    }
    is_placed = replicas.is_placed and not replicas.sharded_paths
    for call in step_view.of(Phase.FORWARD):
        outer = call.parent
        if (
            is_placed
            and outer is not None
            and outer.parent is not None
            and outer.path not in replicas.placed_below
            and outer.is_given_the_same(group)
        ):
            outputs = [output for child in outer.children for output in child.outputs]
            differing = (v for v in call.inputs if v.agree(group) is False)
            yield from (v for v in differing if not any(o.equals(v, group) for o in outputs))
        if call.children or call.path in replicas.sharded_paths | unlike:
            continue
        is_plain = all(values.source == "unknown" for values in call.slots.values())
        if is_plain and call.is_given_the_same(group):
            yield from (values for values in call.outputs if _differs(values, group))


def at_innermost_taker(step_view: StepView, candidate: Candidate) -> Candidate:
    """Charge a gradient to the innermost module that alone took that tensor: the one that made the
    tensor was handed the gradient."""
    if candidate.phase is not Phase.BACKWARD or candidate.kind is Kind.NONFINITE:
        return candidate
    ranks = np.array(candidate.ranks, np.int64)
    for call in step_view.named(candidate.path):
        values = call.slots.get(candidate.slot) if call.phase is Phase.BACKWARD else None
        if values is not None and call.micro_batch == candidate.micro_batch:
            taker = _taker(step_view, values, ranks)
            return replace(candidate, path=taker.call.path, slot=taker.slot)
    return candidate


def _taker(step_view: StepView, values: SlotValues, group: Array) -> SlotValues:
    """Return the gradient of a tensor at the innermost module that alone took it, or `values`."""
    takers = [
        output
        for call in step_view.of(Phase.BACKWARD)
        if np.isin(group, call.ranks).all()
        for output in call.outputs
        if output.equals(values, group) and _takes(step_view, output, values, group)
    ]
    innermost = [v for v in takers if not any(_is_inside(inner.call, v.call) for inner in takers)]
    return innermost[0] if len({id(inner.call) for inner in innermost}) == 1 else values


def _takes(step_view: StepView, output: SlotValues, values: SlotValues, group: Array) -> bool:
    """True where a call took the tensor whose gradient this is: inside the call that took it, or
    behind the one that made it."""
    call, other = output.call, values.call
    if not is_input(values.slot, Phase.BACKWARD):
        return _is_inside(call, other)
    made, taken = _of_forward(step_view, values), _of_forward(step_view, output)
    if made is None or taken is None or not taken.equals(made, group):
        return False
    return bool((taken.call.times(group) >= made.call.times(group, is_end=True)).all())


def _of_forward(step_view: StepView, gradient: SlotValues) -> SlotValues | None:
    """Return the tensor that this is the gradient of."""
    forward = (c for c in step_view.named(gradient.call.path) if c.phase is Phase.FORWARD)
    slot = gradient.slot.removeprefix("grad_")
    return next((c.slots.get(slot) for c in forward if c.identity == gradient.call.identity), None)


def _is_inside(call: CallView, outer: CallView) -> bool:
    below = f"{outer.path}." if outer.path else ""
    is_within = call is not outer and call.path != outer.path and call.path.startswith(below)
    return is_within and call.micro_batch == outer.micro_batch


def _differs(values: SlotValues, group: Array) -> bool:
    return values.agree(group) is False and not is_within_rounding(values, [group])


def _agrees(forward: CallView, gradient: SlotValues, word: str, group: Array) -> bool:
    slot = gradient.slot.replace(word, word.removeprefix("grad_"), 1)
    value = forward.slots.get(slot)
    return value is not None and value.agree(group) is True
