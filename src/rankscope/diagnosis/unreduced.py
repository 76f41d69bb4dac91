"""Differences between ranks that are no fault: gradients that nothing reduced before the step of an
optimizer, and steps of one number that are not the same step.

* Local SGD: ranks train apart and average their parameters now and then. What tells is an exchange
  of the very parameters that the step before left different: an all-reduce of each or of all in one
  flat tensor (by number of elements and norm), with weights that add up to one, or of what is
  affine in it, such as the way from a common point (DiLoCo: by differences of sketches); a gather;
  messages (gossip). What differed behind a step and is bitwise equal later, though nothing reduced
  its gradient, was averaged as well. A parameter that was in no average though others of its
  module, or most of its siblings, were, stays a fault. Where a trace that begins late shows no
  reduced gradient there is one warning.
* Jobs of their own in one world: nothing is wrapped, and no numbers go from rank to rank.
* An optimizer that reduces gradients inside its own step: after this step or the next the parameter
  is equal on all these ranks, and changed. Asked only of steps in which no gradient agreed (one
  among reduced ones is forgotten), and in which no reduction came early.
* Optimizer steps inside `no_sync()`: one warning where no traced step holds an average.

Steps are counted by optimizers' steps. Where ranks stepped different models in a step, though all
step the same ones elsewhere, nothing is compared between these ranks from then on.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from rankscope.diagnosis.context import (
    Candidate,
    CheckContext,
    IncarnationState,
    JudgedStep,
    Left,
    ParameterUpdate,
)
from rankscope.diagnosis.evidence.issuedcollectives import IssuedCollective, issues_of
from rankscope.diagnosis.evidence.replicas import FSDP1_FLAT
from rankscope.diagnosis.evidence.stepview import (
    Array,
    SlotValues,
    StepView,
    grouped,
    positions,
    sibling_path,
)
from rankscope.record.collective import OPS
from rankscope.record.finding import Kind, Severity
from rankscope.record.phases import Phase
from rankscope.record.ranks import ranks_named

_CLOSE: Final = 1e-5
"""Relative, of norms: those of the parts of a flat tensor are added."""
_FLAT_SLOT: Final = f"param:{FSDP1_FLAT}"
"""Each rank has its own part of it, and FSDP1 gathers the parts to use them, not to average."""
_EXCHANGED: Final = frozenset(
    {"all_reduce", "reduce", "all_gather", "all_gather_into_tensor", "send"}
)
"""What carries parameters of ranks that train apart to where they are averaged."""
_CLOSE_APART: Final = 1e-3
"""Relative, of differences between ranks: they are rounded as the parameters are."""
_ADVICE: Final = (
    "If these ranks are meant to train apart (local SGD), trace a step that holds their average "
    "(--rs-steps): only then it is known that they do. Else end no_sync() before the last backward "
    "pass of a step, or set_requires_gradient_sync(True)."
)
_BEGINS_LATE: Final = (
    "If these ranks are meant to train apart (local SGD), trace from step 0 on, or a step that "
    "holds their average (--rs-steps). Else nothing reduces these gradients: look where the model "
    "is wrapped, or where the program reduces by itself."
)
_NOTHING_SHARED: Final = (
    "Nothing here goes from rank to rank. If these are jobs of their own (trials, members of an "
    "ensemble), seed them by rank, or declare what each rank has for itself in a layout file "
    "(own = true). Else the model was never wrapped, or the reduction is never called."
)
_OF_ALL_STEPS: Final = (_BEGINS_LATE, _NOTHING_SHARED)
_TOO_EARLY: Final = (
    "These gradients were reduced before the last backward pass of the step, whose own were added "
    "on each rank afterwards: reduce once the last micro-batch is in."
)
_LEFT_OUT: Final = (
    "Hand this parameter to the average too. Where each rank is to keep its own, declare that in a "
    "layout file (own = true)."
)
_FOLLOWS: Final = frozenset(Phase) - {Phase.SETUP, Phase.COLLECTIVE}


def note_unreduced(step_view: JudgedStep) -> None:
    """Keep what tells right differences from faults. Call it before parameters are remembered."""
    _note_stepped_models(step_view)
    _note_averaging(step_view)
    _note_updates(step_view)


def without_unreduced(candidates: Iterable[Candidate], context: CheckContext) -> list[Candidate]:
    """Leave out what such programs do, with one warning for steps in `no_sync()`."""
    unexplained: list[Candidate] = []
    for candidate in candidates:
        incarnation = context.incarnation(candidate.incarnation)
        for decide in (_of_uneven_steps, _of_late_reductions, _of_training_apart):
            decision = decide(candidate, incarnation)
            if isinstance(decision, str):
                context.coverage.note(decision)
                break
            candidate = decision
        else:
            unexplained.append(candidate)
    return list(_with_one_warning(unexplained, context))


# ---- ranks that train apart ----------------------------------------------------------------------


def _note_averaging(step_view: JudgedStep) -> None:
    incarnation = step_view.life
    gradients = (v for v in step_view.values(Phase.GRADS) if _is_plain(v) and not v.is_constant)
    events = grouped((id(v.call.top), v.agree(v.ranks) is False) for v in gradients)
    are_apart = [all(differs) for differs in events.values()]
    taken = (v for v in step_view.gradients() if v.is_known.any())
    incarnation.trained |= {(v.call.path, f"param:{v.parameter[1]}") for v in taken}
    incarnation.is_exchanging |= any(map(_moves_numbers, issues_of(step_view)))
    if any(are_apart):
        incarnation.apart.add(step_view.step)
    if not all(are_apart):
        incarnation.together.add(step_view.step)
    parameters = [v for v in step_view.values(Phase.PARAMS) if _is_plain(v)]
    parameters = [values for values in parameters if values.slot != _FLAT_SLOT]
    before = incarnation.unlike
    if parameters:
        incarnation.begun = incarnation.begun or dict(incarnation.parameters)
        unlike = {id(v): v for v in parameters if v.agree(v.ranks) is False}
        incarnation.unlike = []
        for values in unlike.values():
            first, begun = incarnation.begun.get((values.call.path, values.slot)), None
            if first is not None and np.isin(values.ranks, first.ranks).all():
                begun = first.sketches[np.searchsorted(first.ranks, values.ranks)]
            squares, sketches = values.column("l2") ** 2, values.column("sketch").copy()
            key, counts = (values.call.path, values.slot), values.counts.copy()
            part = Left(values.ranks.copy(), counts, squares, sketches, begun, keys=(key,))
            incarnation.unlike.append(part)
        # all parameters of a root as one flat tensor, and those that differ as one
        roots = grouped((id(values.call.top), values) for values in parameters if unlike)
        for owned in roots.values():
            for flat in (owned, [values for values in owned if id(values) in unlike]):
                if flat and all(np.array_equal(v.ranks, flat[0].ranks) for v in flat):
                    counts = np.sum([v.counts for v in flat], axis=0)
                    squares = np.sum([v.column("l2") ** 2 for v in flat], axis=0)
                    keys = tuple((v.call.path, v.slot) for v in flat)
                    part = Left(flat[0].ranks.copy(), counts, squares, None, keys=keys)
                    incarnation.unlike.append(part)
    averaged = _averaged(step_view, before, _rejoined(step_view, before))
    averaged |= _averaged(step_view, incarnation.unlike, ends=_ends_of_updates(step_view))
    if averaged:
        incarnation.averages.append(step_view.step)
        incarnation.averaged |= averaged
    elif not incarnation.averages:
        _note_alone(step_view, incarnation)


def _is_plain(values: SlotValues) -> bool:
    is_owned = values.slot.startswith(("param:", "grad:"))
    return is_owned and values.source in ("unknown", "marked") and len(values.ranks) > 1


def _averaged(
    step_view: StepView,
    parts: list[Left],
    rejoined: Sequence[Left] = (),
    ends: Mapping[int, int] = MappingProxyType({}),
) -> set[tuple[str, str]]:
    """Return (path, slot) of what ranks made an average of, or began to hold alike; of less than
    half of what they had left different nothing. `ends`: {rank: when the step left these parts}."""
    count, ranks = _size_of(parts)
    handed = dict.fromkeys(ranks, sum(int(part.counts[0]) for part in rejoined))
    averaged = {key for part in rejoined for key in part.keys}
    for issue in issues_of(step_view) if parts else ():
        values = _exchanged(issue)
        if values is None or (issue.op != "send" and values.agree(values.ranks) is not False):
            continue
        # what is exchanged earlier may be the gradient, which is affine in the parameter as well
        times = zip(issue.ranks.tolist(), issue.call.times(issue.ranks).tolist())
        is_behind = all(time >= ends.get(rank, 0) for rank, time in times)
        matches = [part for part in parts if _is_of(values, part, is_affine=is_behind)]
        averaged.update(key for part in matches for key in part.keys)
        for rank in issue.ranks.tolist() if matches else ():
            handed[rank] = handed.get(rank, 0) + int(values.counts[0])
    return averaged if all(2 * elements >= count for elements in handed.values()) else set()


def _ends_of_updates(step_view: StepView) -> dict[int, int]:
    """Return {rank: when its last optimizer step of this step had ended}."""
    ends: dict[int, int] = {}
    for call in step_view.of(Phase.PARAMS):
        for rank, time in zip(call.ranks.tolist(), call.times(call.ranks).tolist()):
            ends[rank] = max(time, ends.get(rank, 0))
    return ends


def _rejoined(step_view: StepView, parts: list[Left]) -> list[Left]:
    """Return what ranks hold alike behind this step, though nothing reduced its gradient."""
    single = {part.keys[0]: part for part in parts if part.sketches is not None}
    equal = {
        (values.call.path, values.slot)
        for values in step_view.parameters(Phase.PARAMS)
        if (values.call.path, values.slot) in single and values.agree(values.ranks)
    }
    reduced = {
        (values.call.path, f"param:{values.parameter[1]}")
        for values in step_view.gradients()
        if values.agree(values.ranks)
    }
    return [part for key, part in single.items() if key in equal - reduced]


def _size_of(parts: list[Left]) -> tuple[int, set[int]]:
    """Return elements left different, and ranks; flat tensors repeat what stands beside them."""
    single = [part for part in parts if part.sketches is not None]
    ranks = {rank for part in single for rank in part.ranks.tolist()}
    return sum(int(part.counts[0]) for part in single), ranks


def _exchanged(issue: IssuedCollective) -> SlotValues | None:
    """Return what may carry parameters to other ranks; an unknown op may."""
    is_exchange = issue.op in _EXCHANGED or issue.op not in OPS
    return issue.call.slots.get("input.0") if is_exchange else None


def _is_of(values: SlotValues, part: Left, *, is_affine: bool) -> bool:
    """True where a collective's input is on each rank a parameter of this size and norm, its share
    of a weighted mean, or affine in it: as far from other ranks' as the parameter, but for one
    factor."""
    places = positions(part.ranks, values.ranks)
    if (places < 0).any() or (part.counts[places] != values.counts).any():
        return False
    norms, handed = np.sqrt(part.squares[places]), values.column("l2")
    if (abs(handed - norms) <= _CLOSE * norms).all():
        return True
    if (norms > 0).all() and abs((handed / norms).sum() - 1) <= _CLOSE:
        return True
    if part.sketches is None or len(values.ranks) < 2:
        return False
    distances, steps = (
        np.asarray(sketches[1:] - sketches[0], np.float64)
        for sketches in (part.sketches[places], values.column("sketch"))
    )
    if not distances.any() or not steps.any():
        return False
    scales = [sign * scale for sign in (1, -1) for scale in (1, len(values.ranks))]
    if is_affine:
        scales.append((steps * distances).sum() / (steps**2).sum())
    return any(_is_close(scale * steps, distances) for scale in scales)


def _note_alone(step_view: StepView, incarnation: IncarnationState) -> None:
    """Keep the ranks that handed most of what was left different to others. Once all have, each in
    a step of its own, they averaged their parameters."""
    if incarnation.unlike:
        incarnation.left.append(incarnation.unlike)
    if not incarnation.left:
        return
    handed: Counter[int] = Counter()
    for issue in issues_of(step_view):
        values, peer = _exchanged(issue), issue.facts.get("peer")
        peers = {peer, *(issue.members if issue.op == "send" else ())}
        if values is None or len(issue.ranks) == len(issue.members) > len(peers):
            continue
        # whoever may have taken a message that names no peer
        takers: set[Any] = ({peer} if peer is not None else peers) - {None}
        for rank in issue.ranks.tolist():
            if _is_own(values, rank, incarnation):
                count = int(values.counts[values.place(rank)])
                handed.update(dict.fromkeys(takers | {rank}, count))
    count, ranks = _size_of(incarnation.left[-1])
    incarnation.handed |= {rank for rank, elements in handed.items() if 2 * elements >= count}
    if ranks <= incarnation.handed:
        incarnation.averages.append(step_view.step)


def _is_own(values: SlotValues, rank: int, incarnation: IncarnationState) -> bool:
    """True where a rank hands over a parameter as a step left it, its share of a weighted mean, or
    how far it is from where all began."""
    place = values.place(rank)
    count, norm = int(values.counts[place]), float(values.column("l2")[place])
    handed = values.column("sketch")[place]
    for part in itertools.chain.from_iterable(incarnation.left):
        (at,) = positions(part.ranks, np.array([rank])).tolist()
        if at < 0 or part.counts[at] != count:
            continue
        length = float(np.sqrt(part.squares[at]))
        if abs(norm - length) <= _CLOSE * length:
            return True
        if part.sketches is None or not length:
            continue
        sketch, share = part.sketches[at], norm / length
        if share < 1 and _is_close(handed, share * sketch):
            return True
        scales = (1, -1, 1 / len(part.ranks), -1 / len(part.ranks))
        if part.begun is not None and any(
            _is_close(handed, scale * (part.begun[at] - sketch)) for scale in scales
        ):
            return True
    return False


def _is_close(vector: Array, reference: Array) -> bool:
    return bool(abs(vector - reference).max() <= _CLOSE_APART * abs(reference).max())


def _of_training_apart(candidate: Candidate, incarnation: IncarnationState) -> Candidate | str:
    is_gradient = candidate.kind is Kind.GRADIENT
    is_unequal = candidate.kind is Kind.REPLICA and candidate.phase in (Phase.GRADS, Phase.PARAMS)
    if candidate.step not in incarnation.apart or not (is_unequal or is_gradient):
        return candidate
    if not _is_trained(candidate, incarnation):
        return candidate
    if incarnation.averages:
        is_parameter, key = candidate.phase is Phase.PARAMS, (candidate.path, candidate.slot)
        if is_parameter and _is_left_out(key, incarnation):
            return dataclasses.replace(
                candidate,
                message=f"{ranks_named(candidate.members)} average the parameters beside it (seen "
                f"in step {incarnation.averages[0]}) and not this one",
                advice=_LEFT_OUT,
            )
        return (
            "ranks train apart and average their parameters "
            f"(seen in step {incarnation.averages[0]}): gradients and parameters of steps without "
            "a reduction were not compared"
        )
    # the trace begins later than the training, and no gradient of it was reduced
    advice = ""
    if _are_jobs_of_their_own(incarnation):
        advice = _NOTHING_SHARED
    elif incarnation.begins_late and not incarnation.together:
        advice = _BEGINS_LATE
    if advice and is_gradient:
        return dataclasses.replace(candidate, severity=Severity.WARNING, advice=advice)
    return candidate


def _moves_numbers(issue: IssuedCollective) -> bool:
    """True where tensors went from rank to rank that are more than a loss or a count."""
    return any((values.counts > 1).any() for values in (*issue.call.inputs, *issue.call.outputs))


def _are_jobs_of_their_own(incarnation: IncarnationState) -> bool:
    replicas = incarnation.replicas
    is_wrapped = bool(replicas.wrappers) or replicas.is_marked or replicas.is_placed
    return not (is_wrapped or incarnation.is_exchanging or incarnation.together)


def _is_trained(candidate: Candidate, incarnation: IncarnationState) -> bool:
    """False for a parameter that no optimizer took a gradient of: training did not change it."""
    key = (candidate.path, candidate.slot)
    return candidate.phase is not Phase.PARAMS or key in incarnation.trained


def _is_left_out(key: tuple[str, str], incarnation: IncarnationState) -> bool:
    """True where a parameter was in no average, and others of its module or most of its siblings
    were. Of what has neither, as a head that is each rank's own, nothing is known."""
    averaged = incarnation.averaged
    if not averaged or key in averaged:
        return False
    path, slot = key
    siblings = {
        other
        for other in incarnation.trained - {key}
        if other[1] == slot and sibling_path(other[0]) == sibling_path(path)
    }
    is_of_module = any(owner == path for owner, _ in averaged)
    return is_of_module or 2 * len(siblings & averaged) > len(siblings)


# ---- reductions inside an optimizer's step -------------------------------------------------------


def _note_updates(step_view: JudgedStep) -> None:
    """Keep what became of parameters whose gradients did not agree, in that step and the next: a
    sharded optimizer may hand its part round behind its step."""
    incarnation = step_view.life
    if not incarnation.apart or step_view.step > max(incarnation.apart) + 1:
        return
    for values in step_view.parameters(Phase.PARAMS):
        before = incarnation.parameters.get((values.call.path, values.slot))
        if before is not None:
            update = ParameterUpdate(
                values.ranks.copy(), values.hashes.copy(), before.ranks, before.hashes
            )
            incarnation.updates.setdefault(values.parameter, {})[step_view.step] = update


def _of_late_reductions(candidate: Candidate, incarnation: IncarnationState) -> Candidate | str:
    step = candidate.step
    if candidate.kind is Kind.GRADIENT and step in incarnation.reduced_early:
        return dataclasses.replace(candidate, advice=_TOO_EARLY)
    updates = incarnation.updates.get((candidate.path, candidate.slot.partition(":")[2]), {})
    became = {at: updates[at].of(candidate.members) for at in (step, step + 1) if at in updates}
    is_reduced = candidate.kind is Kind.PARAMETER and became.get(step + 1) == "alike"
    if candidate.kind is Kind.GRADIENT:
        is_reduced = "alike" in became.values() and "apart" not in became.values()
    if step not in incarnation.apart or not is_reduced:
        return candidate
    return (
        "gradients differ before the optimizer's step and their parameters are the same "
        "after it: reduced inside the step, so these gradients were not compared"
    )


# ---- one warning -------------------------------------------------------------------------------


def _with_one_warning(candidates: list[Candidate], context: CheckContext) -> Iterator[Candidate]:
    """Put one warning in place of all that comes of steps in `no_sync()`, of late traces, or of
    jobs of their own."""
    held_back = [
        c for c in candidates if c.kind is Kind.GRADIENT and c.severity is Severity.WARNING
    ]
    first = {candidate.incarnation: candidate for candidate in reversed(held_back)}
    followers = {id(candidate) for candidate in held_back}
    for candidate in candidates if first else ():
        began = first.get(candidate.incarnation)
        if (
            began is not None
            and candidate.kind is Kind.REPLICA
            and candidate.phase in _FOLLOWS
            and candidate.step >= began.step
            and np.isin(candidate.members, began.members).all()
            and _is_trained(candidate, context.incarnation(candidate.incarnation))
        ):
            followers.add(id(candidate))
    counts = Counter(c.incarnation for c in candidates if id(c) in followers)
    for candidate in candidates:
        if id(candidate) not in followers:
            yield candidate
        elif candidate is first[candidate.incarnation]:
            advice = candidate.advice if candidate.advice in _OF_ALL_STEPS else _ADVICE
            where = "in every traced step" if advice in _OF_ALL_STEPS else "inside no_sync()"
            yield dataclasses.replace(
                candidate,
                message=f"{ranks_named(candidate.members)} step {where}, each with "
                "gradients of their own data, and no traced step averages their parameters; what "
                "differs between these ranks from here on follows from that",
                advice=advice,
                weight=counts[candidate.incarnation],
            )


# ---- ranks that count their steps unlike ---------------------------------------------------------

_OF_ONE_RANK = frozenset({Kind.NONFINITE, Kind.RECOMPUTE})
"""What needs no other rank to be seen."""


def _note_stepped_models(step_view: JudgedStep) -> None:
    stepped: dict[str, set[int]] = {}
    for call in step_view.of(Phase.GRADS):
        if call.parent is None:
            stepped.setdefault(call.path, set()).update(call.ranks.tolist())
    incarnation = step_view.life
    incarnation.begins_late &= step_view.step > 0 or not stepped
    for root, ranks in stepped.items():
        incarnation.steppers.setdefault(root, set()).update(ranks)
    everyone = set().union(*stepped.values())
    if any(ranks != everyone for ranks in stepped.values()):
        incarnation.uneven[step_view.step] = stepped


def _of_uneven_steps(candidate: Candidate, incarnation: IncarnationState) -> Candidate | str:
    members = set(candidate.members.tolist())
    for step, stepped in incarnation.uneven.items() if candidate.kind not in _OF_ONE_RANK else ():
        if step > candidate.step and not incarnation.begins_late:
            continue
        everyone = set().union(*stepped.values()) & members
        for root, ranks in stepped.items():
            behind = (everyone - ranks) & incarnation.steppers[root]
            if behind and ranks & members:
                return (
                    f"in step {step} {ranks_named(behind)} stepped another model than other ranks "
                    "did, so steps of one number are not the same step on them: not compared from "
                    "there on"
                )
    return candidate
