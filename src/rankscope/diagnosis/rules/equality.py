"""Ranks that should hold the same value hold the same bytes.

Applies to every value that a layout places whole on several ranks, and to plain parameters and
gradients of which `replicas.py` knows it. Hashes are compared. Only of values that replicas
compute each for itself (activations, gradients) a distance within rounding counts as equal.

**Where gradients began to differ.** Ranks that were handed the same batch and hand out the same go
through one computation, in which an equal value has one gradient. Where gradients of replicas
differ on such ranks, the first place in backward at which they do is the fault:

* the gradient of the model's output: the loss differs, though the output is the same, or
* a module with equal gradients of outputs, an equal input and unlike gradients of that: what was
  made of it on several ranks was not summed.

Where ranks hand out different values, forward went apart before: at the first module without
weights of any rank's own that was handed the same and drew random numbers. A tensor that several
modules see has one gradient for all. It is charged to the innermost module that alone took it;
where several did, to the module around them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from rankscope.diagnosis.context import Candidate, JudgedStep
from rankscope.diagnosis.coverage import EvidenceScope
from rankscope.diagnosis.evidence.distances import (
    differing_sides,
    distance,
    is_multiple,
    is_within_rounding,
    minority,
    rounding_of,
    sides,
    sides_text,
)
from rankscope.diagnosis.evidence.issuedcollectives import issues_in
from rankscope.diagnosis.evidence.replicas import Same
from rankscope.diagnosis.evidence.stepview import Array, CallView, SlotValues, StepView, is_input
from rankscope.record.finding import Kind, Severity
from rankscope.record.phases import Phase
from rankscope.record.ranks import ranks_named
from rankscope.record.value import ValueFlag

_LOCAL: Final = Phase.having(lambda facts: facts.is_activation) | {Phase.GRADS}
_NO_GRADIENT: Final = (
    "On these ranks it is frozen (requires_grad), or nothing that went into the loss used it."
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
_STRAIGHT: Final = 1e-2
"""A move and its gradient point the same way where what is left of it is this small beside it."""
_PHASES: Final = tuple(phase for phase in Phase if phase is not Phase.COLLECTIVE)
_OF_INFERRED: Final = frozenset(
    {
        *(Phase.FORWARD, Phase.BACKWARD, Phase.GRADS, Phase.PARAMS, Phase.COLLECTIVE),
        *EvidenceScope,
    }
)
"""What tells replicas from stages of a pipeline, and from ranks that train apart and average."""


def unequal_replicas(step_view: JudgedStep) -> Iterator[Candidate]:
    """Yield a candidate for every value whose replicas differ."""
    unequal: list[tuple[SlotValues, Candidate]] = []
    for values in step_view.values(*_PHASES):
        for same, groups, is_applied in step_view.compared_replicas(values):
            if groups and same.source == "inferred":
                asks, example = "replicas that no layout describes", f"{values.name} differs"
                if step_view.lacks(_OF_INFERRED, asks, example):
                    continue
            if is_applied:
                step_view.context.coverage.applied(values)
            if groups and not _is_rounding(values, groups, step_view):
                unequal.append((values, _candidate(step_view, values, same, groups)))
                break
    crossed = _crossed([values for values, _ in unequal if values.call.phase is Phase.GRADS])
    for values, candidate in unequal:
        other = crossed.get(id(values))
        if other is None:
            yield candidate
            continue
        text = (
            f"{ranks_named(candidate.ranks)} reduced it together with {other.call.path}:"
            f"{other.slot}: what it holds on some ranks, the other holds on the others"
        )
        yield replace(candidate, kind=Kind.COLLECTIVE, message=text, advice=_CROSSED)


def _crossed(gradients: list[SlotValues]) -> dict[int, SlotValues]:
    """Return {id of a gradient: the first that it met in one reduction}: what one has on some
    ranks, bit by bit, the other has on the others."""
    alike: dict[tuple[bytes, bytes], list[SlotValues]] = {}
    for values in gradients:
        own = np.unique(values.hashes)
        if len(own) > 1 and not values.is_constant:
            alike.setdefault((own.tobytes(), values.ranks.tobytes()), []).append(values)
    return {
        id(values): other
        for family in alike.values()
        for values in family
        for other in reversed(family)
        if (other.hashes != values.hashes).any()
    }


def _is_shared(step_view: StepView, group: Array) -> bool:
    return any(np.isin(group, shared).all() for shared in step_view.same_inputs)


def _drawn_apart(step_view: StepView, group: Array) -> str:
    """Return the path of the first dropout with equal inputs and unlike outputs, "" for none."""
    if not _is_shared(step_view, group):
        return ""
    return next(
        (
            call.path
            for call in step_view.dropouts
            if call.is_given_the_same(group)
            and any(value.agree(group) is False for value in call.outputs)
        ),
        "",
    )


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
    step_view: JudgedStep, values: SlotValues, same: Same, groups: list[Array]
) -> Candidate:
    blamed = np.concatenate([minority(g, values.hashes[values.at(g)]) for g in groups])
    members = np.unique(np.concatenate(groups))
    is_resolved = len(blamed) < len(members)
    known = None if is_resolved else _departed(step_view, values, groups)
    if known is not None:
        blamed, is_resolved = known[0], True
    is_changed = known is not None and values.call.phase is Phase.GRADS
    kind = Kind.REPLICA if is_changed else _kind(step_view, values, same, groups)
    whose = ranks_named(blamed)
    detail = (
        f"{whose} hold{'s' if len(blamed) == 1 else ''} another value than the other replicas"
        if is_resolved
        else f"{whose} should hold the same and do not"
    )
    if known is not None:
        detail = f"{whose} {known[1]}"
    if kind is Kind.PLACEMENT:
        detail = f"called Replicate(), but {detail}"
    bare = _without_gradient(step_view, values, members)
    if len(bare):
        blamed, is_resolved = bare, True
        detail = f"{ranks_named(bare)} had no gradient of it, the other replicas had one"
    is_held_back = False
    if kind is Kind.GRADIENT:
        detail = f"{ranks_named(members)} step the optimizer with different, unreduced gradients"
        flags = values.flags[values.at(members)]
        is_held_back = bool((flags & int(ValueFlag.NO_SYNC)).all())
    random = next(filter(None, (_drawn_apart(step_view, group) for group in groups)), "")

    def evidence() -> dict[str, Any]:
        apart = max(distance(values, values.at(group)) for group in groups)
        found: dict[str, Any] = {
            "layout": same.source,
            "values": differing_sides(values, groups),
            "relative_distance": apart if np.isfinite(apart) else None,
        }
        if not is_resolved:
            found["rank_resolution"] = "none"
        if kind is not Kind.GRADIENT and all(is_multiple(values, values.at(g)) for g in groups):
            found["scaled"] = True
        if random:
            found["random_numbers"] = random
        return found

    advice = _NO_GRADIENT if len(bare) else ""
    if random:
        advice = drawn_apart_advice(random)
    elif kind is Kind.GRADIENT and all(_is_shared(step_view, group) for group in groups):
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
    if len(groups) != 1:
        return None
    (group,) = groups
    if values.call.phase is Phase.GRADS:
        how = "changed the gradient that the reduction gave"
        odd = _unlike_reduced(step_view, values, group)
        return None if odd is None else (odd, how)
    if values.call.phase is Phase.PARAMS and values.slot.startswith("param:"):
        return _moved_oddly(step_view, values, group)
    return None


def _unlike_reduced(step_view: StepView, values: SlotValues, group: Array) -> Array | None:
    places = values.at(group)
    for call in step_view.of(Phase.COLLECTIVE):
        for issue in issues_in(call):
            made = call.slots.get("output.0") if issue.op == "all_reduce" else None
            if made is None or made.agree(group) is not True:
                continue
            is_same = values.hashes[places] == made.hashes[made.at(group)]
            if (
                is_same.any()
                and not is_same.all()
                and (made.counts[0] == values.counts[places]).all()
            ):
                odd: Array = group[~is_same]
                return odd
    return None


def _moved_oddly(
    step_view: JudgedStep, values: SlotValues, group: Array
) -> tuple[Array, str] | None:
    """Return the ranks whose parameter stayed, or moved elsewhere than its gradient says, and how;
    all had held the same, and stepped with one gradient."""
    before = step_view.life.parameters.get((values.call.path, values.slot))
    slot = f"grad:{values.slot[6:]}"
    own = [call.slots[slot] for call in step_view.named(values.call.path) if slot in call.slots]
    if before is None or len(own) != 1 or own[0].agree(group) is not True:
        return None
    at = np.searchsorted(before.ranks, group)
    if not np.isin(group, before.ranks).all() or len(set(before.hashes[at].tolist())) > 1:
        return None
    places, gradient = values.at(group), own[0].column("sketch")[own[0].at(group)[0]]
    is_odd = values.hashes[places] == before.hashes[at[0]]
    if is_odd.any() and gradient.any():
        return group[is_odd], "did not move, though it stepped with the same gradient"
    moves = values.column("sketch")[places] - before.sketches[at[0]]
    sizes = np.sqrt(np.mean(moves**2, axis=1))
    if (rounding_of(values.dtype) * values.column("l2")[places] > _STRAIGHT * sizes).any():
        return None
    is_odd = np.array([not _is_along(move, gradient) for move in moves])
    if is_odd.any() and not is_odd.all():
        how = "held another value before the step, or moved elsewhere than its gradient says"
        return group[is_odd], how
    return None


def _is_along(move: Array, gradient: Array) -> bool:
    square = float(gradient @ gradient)
    factor = float(move @ gradient) / square if square else 0.0
    rest = float(np.sqrt(np.mean((move - factor * gradient) ** 2)))
    return rest <= 2 * _STRAIGHT * float(np.sqrt(np.mean(move**2)))


def _without_gradient(step_view: StepView, values: SlotValues, members: Array) -> Array:
    """Return the ranks that stepped without a gradient of a parameter while others had one."""
    nobody = members[:0]
    if values.call.phase is not Phase.PARAMS or not values.slot.startswith("param:"):
        return nobody
    events = [call for call in step_view.of(Phase.GRADS) if call.parent is None]
    stepped = np.concatenate([call.ranks for call in events]) if events else nobody
    slot = f"grad:{values.slot[6:]}"
    own = [call.slots[slot] for call in step_view.named(values.call.path) if slot in call.slots]
    had = np.concatenate([each.ranks for each in own]) if own else nobody
    bare: Array = members[np.isin(members, stepped) & ~np.isin(members, had)]
    return bare if len(bare) < len(members) else nobody


def _kind(step_view: JudgedStep, values: SlotValues, same: Same, groups: list[Array]) -> Kind:
    phase = values.call.phase
    if phase is Phase.GRADS:
        return _gradient_kind(step_view, values, groups)
    if phase in (Phase.SETUP, Phase.PARAMS, Phase.BACKWARD) or same.source != "dtensor":
        return Kind.REPLICA
    if is_input(values.slot, phase):
        return Kind.PLACEMENT
    return Kind.PLACEMENT if _plain_entered(values, groups) else Kind.REPLICA


def _plain_entered(values: SlotValues, groups: list[Array]) -> bool:
    """True where an unlike plain tensor went into the call or was made in it: see `from_local`."""
    call = values.call
    sources = [*call.inputs, *(out for child in call.children for out in child.outputs)]
    return any(
        source.source == "unknown" and source.agree(group) is False
        for source in sources
        for group in groups
    )


def _gradient_kind(step_view: JudgedStep, values: SlotValues, groups: list[Array]) -> Kind:
    """Local gradients (of unlike inputs) are unreduced; multiples of each other were changed
    afterwards, as by clipping on one rank."""
    if all(is_multiple(values, values.at(group)) for group in groups):
        return Kind.REPLICA
    if not {Phase.FORWARD, Phase.BACKWARD} <= step_view.evidence:
        return Kind.GRADIENT
    given = step_view.handed(values.call.path)
    handed = [value.agree(group) for value in given for group in groups]
    if all(each is None for each in handed):  # called on one of these ranks alone
        given = [each for each in step_view.handed("") if each.call.phase is Phase.FORWARD]
        handed = [value.agree(group) for value in given for group in groups]
    return Kind.GRADIENT if False in handed or not handed else Kind.REPLICA


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
"""Wrappers whose ranks may draw random numbers of their own."""
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
        s for s in candidates if s.phase is Phase.GRADS and s.severity is Severity.FAULT and s.slot
    ]
    for group in step_view.same_inputs if unequal else ():
        ranks = set(group.tolist())
        if any(ranks.issubset(s.ranks) and s.kind is not Kind.COLLECTIVE for s in unequal):
            yield from _first(step_view, group)


def _first(step_view: JudgedStep, group: Array) -> Iterator[Candidate]:
    """Yield the first place at which ranks with one batch went apart."""
    made = [values.agree(group) for call in step_view.roots for values in call.outputs]
    if False in made:
        values = next(_random_outputs(step_view, group), None)
        if values is not None:
            advice = drawn_apart_advice(values.call.path)
            what = "were handed the same, and hold different values"
            random = {"random_numbers": values.call.path}
            yield _origin_candidate(step_view, values, group, what, advice, **random)
    elif True in made:
        places = _apart_in_backward(step_view, group)
        if places:
            _, _, values = min(places, key=lambda place: place[:2])
            is_loss = values.slot.startswith("grad_output")
            values = values if is_loss else _taker(step_view, values, group)
            advice = _OTHER_LOSS if is_loss else _NOT_SUMMED
            what = "compute the same, and get different gradients of it"
            yield _origin_candidate(step_view, values, group, what, advice)


def _apart_in_backward(step_view: StepView, group: Array) -> list[tuple[int, int, SlotValues]]:
    """Return (when, -depth, gradient) of those that differ though values and inputs do not."""
    forward = {_key(call): call for call in step_view.of(Phase.FORWARD)}
    places: list[tuple[int, int, SlotValues]] = []
    for call in step_view.of(Phase.BACKWARD):
        own = forward.get(_key(call))
        if own is None or not np.isin(group, call.ranks).all():
            continue
        came = list(call.inputs)
        differing = [values for values in came if _differs(values, group)]
        if call.parent is None and own.parent is None:
            wrong = [h for h in differing if _agrees(own, h, "grad_output", group)]
            places += [(0, 0, values) for values in wrong]
        if came and not differing and all(values.agree(group) is not None for values in came):
            depth = call.path.count(".") + bool(call.path)
            places += [
                (int(values.times(group).min()), -depth, values)
                for values in call.outputs
                if _differs(values, group) and _agrees(own, values, "grad_input", group)
            ]
    return places


def _origin_candidate(
    step_view: JudgedStep, values: SlotValues, group: Array, what: str, advice: str, **evidence: Any
) -> Candidate:
    return step_view.candidate(
        values,
        Kind.REPLICA,
        group,
        f"{ranks_named(group)} {what} ({sides_text(values, group)})",
        advice=advice,
        evidence=lambda: {
            "layout": "inferred",
            "values": sides(values, group),
            "rank_resolution": "none",
            **evidence,
        },
    )


def _random_outputs(step_view: JudgedStep, group: Array) -> Iterator[SlotValues]:
    """Yield unlike outputs of leaf modules with shared weights, where ranks may not draw apart."""
    replicas = step_view.life.replicas
    if not _DATA_PARALLEL.isdisjoint(replicas.wrappers):
        return
    for call in step_view.of(Phase.FORWARD):
        if call.children or call.path in replicas.sharded_paths:
            continue
        is_plain = all(values.source == "unknown" for values in call.slots.values())
        if is_plain and call.is_given_the_same(group):
            yield from (values for values in call.outputs if _differs(values, group))


def at_innermost_taker(step_view: StepView, candidate: Candidate) -> Candidate:
    """Charge the gradient of an input to the innermost module that alone took that tensor."""
    if candidate.phase is Phase.BACKWARD and candidate.slot.startswith("grad_input"):
        ranks = np.array(candidate.ranks, np.int64)
        for call in step_view.named(candidate.path):
            values = call.slots.get(candidate.slot) if call.phase is Phase.BACKWARD else None
            if values is not None and call.micro_batch == candidate.micro_batch:
                taker = _taker(step_view, values, ranks)
                return replace(candidate, path=taker.call.path, slot=taker.slot)
    return candidate


def _taker(step_view: StepView, values: SlotValues, group: Array) -> SlotValues:
    """Return the gradient of a tensor at the innermost module that alone took it, or `values`."""
    inside = [
        each
        for call in step_view.of(Phase.BACKWARD)
        if _is_inside(call, values.call) and np.isin(group, call.ranks).all()
        for each in call.outputs
        if each.equals(values, group)
    ]
    innermost = [
        each for each in inside if not any(_is_inside(other.call, each.call) for other in inside)
    ]
    return innermost[0] if len({id(each.call) for each in innermost}) == 1 else values


def _is_inside(call: CallView, outer: CallView) -> bool:
    below = f"{outer.path}." if outer.path else ""
    is_within = call is not outer and call.path != outer.path and call.path.startswith(below)
    return is_within and call.micro_batch == outer.micro_batch


def _key(call: CallView) -> tuple[str, int | None, int]:
    return call.path, call.micro_batch, call.ordinal


def _differs(values: SlotValues, group: Array) -> bool:
    return values.agree(group) is False and not is_within_rounding(values, [group])


def _agrees(forward: CallView, gradient: SlotValues, word: str, group: Array) -> bool:
    slot = gradient.slot.replace(word, word.removeprefix("grad_"), 1)
    value = forward.slots.get(slot)
    return value is not None and value.agree(group) is True
