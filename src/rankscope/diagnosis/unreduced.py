"""Differences between ranks that are no fault: gradients that nothing reduced before the step of an
optimizer, and steps of one number that are not the same step.

Such gradients differ as if a reduction had been forgotten, and parameters and activations follow.
Three kinds of right programs do that:

* Local SGD: ranks train apart and average their parameters now and then. What tells is an exchange
  of the very parameters that the step before left different: an all-reduce of each or of all in one
  flat tensor (told by number of elements and norm), with weights that add up to one, or of the way
  from a common point (DiLoCo: told by differences of sketches); a gather; messages to neighbours
  (gossip). A trace that begins later than the training may lie between two averages: where it shows
  no reduced gradient there is one warning.
* An optimizer that reduces gradients inside its own step. What tells is the parameter: after this
  step or the next it is equal on all these ranks, and changed. Asked only of steps in which no
  gradient agreed (one among reduced ones is forgotten), and in which no reduction came early.
* Optimizer steps inside `no_sync()`. Where no traced step holds an average there is one warning for
  all that differs on these ranks from then on. Forgetting to end `no_sync()` before the optimizer
  steps looks the same; ending it late does not: then gradients do not carry the flag.

Steps are counted by optimizers' steps. Where one rank also trains a model of its own, its n-th step
is not that of others. What tells is a step in which ranks stepped different models, though all step
the same ones elsewhere: from then on nothing is compared between them.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final

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
from rankscope.diagnosis.evidence.stepview import Array, SlotValues, StepView, grouped, positions
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
_TOO_EARLY: Final = (
    "These gradients were reduced before the last backward pass of the step, whose own were added "
    "on each rank afterwards: reduce once the last micro-batch is in."
)
_FOLLOWS: Final = frozenset(Phase) - {Phase.SETUP, Phase.COLLECTIVE}


def note_unreduced(step_view: JudgedStep) -> None:
    """Keep what tells right differences from faults. Call it before parameters are remembered."""
    _note_stepped_models(step_view)
    _note_averaging(step_view)
    _note_updates(step_view)


def without_unreduced(candidates: Iterable[Candidate], context: CheckContext) -> list[Candidate]:
    """Leave out what such programs do, with one warning for steps in `no_sync()`."""
    left: list[Candidate] = []
    for candidate in candidates:
        incarnation = context.incarnation(candidate.incarnation)
        for decide in (_of_uneven_steps, _of_late_reductions, _of_training_apart):
            decided = decide(candidate, incarnation)
            if isinstance(decided, str):
                context.coverage.note(decided)
                break
            candidate = decided
        else:
            left.append(candidate)
    return list(_with_one_warning(left))


# ---- ranks that train apart ----------------------------------------------------------------------


def _note_averaging(step_view: JudgedStep) -> None:
    incarnation = step_view.life
    plain = (h for h in step_view.values(Phase.GRADS) if _is_plain(h) and not h.is_constant)
    events = grouped((id(h.call.top), h.agree(h.ranks) is False) for h in plain)
    are_apart = [all(differs) for differs in events.values()]
    if any(are_apart):
        incarnation.apart.add(step_view.step)
    if not all(are_apart):
        incarnation.together.add(step_view.step)
    latest = [h for h in step_view.values(Phase.PARAMS) if _is_plain(h) and h.slot != _FLAT_SLOT]
    before = incarnation.unlike
    if latest:
        incarnation.begun = incarnation.begun or dict(incarnation.parameters)
        incarnation.unlike = [
            _left(values, incarnation) for values in latest if values.agree(values.ranks) is False
        ]
        if incarnation.unlike:
            roots = grouped((id(values.call.top), values) for values in latest)
            incarnation.unlike += [flat for held in roots.values() for flat in _flat(held)]
    if any(left and _is_average(step_view, left) for left in (before, incarnation.unlike)):
        incarnation.averages.append(step_view.step)
    elif not incarnation.averages:
        _note_alone(step_view, incarnation)


def _left(values: SlotValues, incarnation: IncarnationState) -> Left:
    """Return a parameter as a step left it, and as all of its ranks had it when they began."""
    first, begun = incarnation.begun.get((values.call.path, values.slot)), None
    if first is not None and np.isin(values.ranks, first.ranks).all():
        begun = first.sketches[np.searchsorted(first.ranks, values.ranks)]
    squares, sketches = values.column("l2") ** 2, values.column("sketch").copy()
    return Left(values.ranks.copy(), values.counts.copy(), squares, sketches, begun)


def _flat(held: list[SlotValues]) -> Iterator[Left]:
    """Yield all parameters of a root as one flat tensor, and those that differ as one."""
    unlike = [values for values in held if values.agree(values.ranks) is False]
    for own in (held, unlike):
        if own and all(np.array_equal(each.ranks, own[0].ranks) for each in own):
            counts = np.sum([each.counts for each in own], axis=0)
            squares = np.sum([each.column("l2") ** 2 for each in own], axis=0)
            yield Left(own[0].ranks.copy(), counts, squares, None)


def _is_plain(values: SlotValues) -> bool:
    is_owned = values.slot.startswith(("param:", "grad:"))
    return is_owned and values.source in ("unknown", "marked") and len(values.ranks) > 1


def _is_average(step_view: StepView, left: list[Left]) -> bool:
    every, ranks = _left_of(left)
    handed = dict.fromkeys(ranks, 0)
    for issue in issues_of(step_view):
        values = _exchanged(issue)
        if values is None or (issue.op != "send" and values.agree(values.ranks) is not False):
            continue
        if any(_is_of(values, part) for part in left):
            for rank in issue.ranks.tolist():
                handed[rank] = handed.get(rank, 0) + int(values.counts[0])
    return all(2 * count >= every for count in handed.values())


def _left_of(left: list[Left]) -> tuple[int, set[int]]:
    """Return elements left different, and ranks; flat tensors repeat what stands beside them."""
    alone = [part for part in left if part.sketches is not None]
    ranks = {rank for part in alone for rank in part.ranks.tolist()}
    return sum(int(part.counts[0]) for part in alone), ranks


def _exchanged(issue: IssuedCollective) -> SlotValues | None:
    """Return what may carry parameters to other ranks; an unknown op may."""
    is_exchange = issue.op in _EXCHANGED or issue.op not in OPS
    return issue.call.slots.get("input.0") if is_exchange else None


def _is_of(values: SlotValues, part: Left) -> bool:
    """True where a collective's input is on each rank a parameter of this size and norm, its share
    of a weighted mean, or as far from other ranks' as the parameter."""
    places = positions(part.ranks, values.ranks)
    if (places < 0).any() or (part.counts[places] != values.counts).any():
        return False
    norms = np.sqrt(part.squares[places])
    given = values.column("l2")
    if bool((abs(given - norms) <= _CLOSE * norms).all()):
        return True
    if (norms > 0).all() and abs((given / norms).sum() - 1) <= _CLOSE:
        return True
    if part.sketches is None or len(values.ranks) < 2:
        return False
    apart = _between(part.sketches[places])
    given = _between(values.column("sketch"))
    allowed = _CLOSE_APART * abs(apart).max()
    ways = [sign * scale * given for sign in (1, -1) for scale in (1, len(values.ranks))]
    return bool(allowed) and any(bool((abs(way - apart) <= allowed).all()) for way in ways)


def _note_alone(step_view: StepView, incarnation: IncarnationState) -> None:
    """Keep the ranks that handed most of what was left different to others. Once all have, each in
    a step of its own, they averaged their parameters."""
    if incarnation.unlike:
        incarnation.left.append(incarnation.unlike)
    if not incarnation.left:
        return
    handed: dict[int, int] = {}
    for issue in issues_of(step_view):
        values = _exchanged(issue)
        peer = issue.facts.get("peer")
        peers = {peer, *(issue.members if issue.op == "send" else ())}
        if values is None or len(issue.ranks) == len(issue.members) > len(peers):
            continue
        # whoever may have taken a message that names no peer
        takers = ({peer} if peer is not None else peers) - {None}
        for rank in issue.ranks.tolist():
            if _is_own(values, rank, incarnation):
                count = int(values.counts[values.at(np.array([rank]))[0]])
                for each in {rank, *takers}:
                    handed[each] = handed.get(each, 0) + count
    every, ranks = _left_of(incarnation.left[-1])
    incarnation.handed |= {rank for rank, count in handed.items() if 2 * count >= every}
    if ranks <= incarnation.handed:
        incarnation.averages.append(step_view.step)


def _is_own(values: SlotValues, rank: int, incarnation: IncarnationState) -> bool:
    """True where a rank hands over a parameter as a step left it, its share of a weighted mean, or
    how far it is from where all began."""
    place = values.at(np.array([rank]))[0]
    count, norm = int(values.counts[place]), float(values.column("l2")[place])
    given = values.column("sketch")[place]
    for left in incarnation.left:
        for part in left:
            (at,) = positions(part.ranks, np.array([rank])).tolist()
            if at < 0 or part.counts[at] != count:
                continue
            own = float(np.sqrt(part.squares[at]))
            if abs(norm - own) <= _CLOSE * own:
                return True
            if part.sketches is None or not own:
                continue
            sketch, share = part.sketches[at], norm / own
            if share < 1 and _is_close(given, share * sketch):
                return True
            way = np.zeros(0) if part.begun is None else part.begun[at] - sketch
            scales = (1, -1, 1 / len(part.ranks), -1 / len(part.ranks))
            if len(way) and any(_is_close(given, scale * way) for scale in scales):
                return True
    return False


def _is_close(one: Array, other: Array) -> bool:
    return bool(abs(one - other).max() <= _CLOSE_APART * abs(other).max())


def _between(sketches: Array) -> Array:
    return np.asarray(sketches[1:] - sketches[0], np.float64)


def _of_training_apart(candidate: Candidate, incarnation: IncarnationState) -> Candidate | str:
    is_unequal = candidate.kind is Kind.REPLICA and candidate.phase in (Phase.GRADS, Phase.PARAMS)
    if candidate.step not in incarnation.apart or not (
        is_unequal or candidate.kind is Kind.GRADIENT
    ):
        return candidate
    if incarnation.averages:
        return (
            "ranks train apart and average their parameters "
            f"(seen in step {incarnation.averages[0]}): gradients and parameters of steps without "
            "a reduction were not compared"
        )
    # the trace begins later than the training, and no gradient of it was reduced
    is_late = incarnation.begins_late and not incarnation.together
    if candidate.kind is Kind.GRADIENT and is_late:
        return dataclasses.replace(candidate, severity=Severity.WARNING, advice=_BEGINS_LATE)
    return candidate


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
    if candidate.kind is Kind.GRADIENT and candidate.step in incarnation.reduced_early:
        return dataclasses.replace(candidate, advice=_TOO_EARLY)
    updates = incarnation.updates.get((candidate.path, candidate.slot.partition(":")[2]), {})
    both = (candidate.step, candidate.step + 1)
    became = {step: updates[step].of(candidate.members) for step in both if step in updates}
    is_alike = "alike" in became.values() and "apart" not in became.values()
    is_reduced = {
        Kind.GRADIENT: is_alike,
        Kind.PARAMETER: became.get(candidate.step + 1) == "alike",
    }
    if candidate.step not in incarnation.apart or not is_reduced.get(candidate.kind):
        return candidate
    return (
        "gradients differ before the optimizer's step and their parameters are the same "
        "after it: reduced inside the step, so these gradients were not compared"
    )


# ---- one warning -------------------------------------------------------------------------------


def _with_one_warning(listed: list[Candidate]) -> Iterator[Candidate]:
    """Put one warning in place of all that comes of steps in `no_sync()`, or of late traces."""
    first = {s.incarnation: s for s in reversed(listed) if _is_held_back(s)}
    counts = Counter(
        candidate.incarnation
        for candidate in listed
        if candidate.incarnation in first and _is_due_to(candidate, first[candidate.incarnation])
    )
    for candidate in listed:
        began = first.get(candidate.incarnation)
        if began is None or not _is_due_to(candidate, began):
            yield candidate
        elif candidate is began:
            is_late = began.advice == _BEGINS_LATE
            where = "in every traced step" if is_late else "inside no_sync()"
            yield dataclasses.replace(
                began,
                message=f"{ranks_named(began.members)} step {where}, each with "
                "gradients of their own data, and no traced step averages their parameters; what "
                "differs between these ranks from here on follows from that",
                advice=_BEGINS_LATE if is_late else _ADVICE,
                weight=counts[candidate.incarnation],
            )


def _is_held_back(candidate: Candidate) -> bool:
    return candidate.kind is Kind.GRADIENT and candidate.severity is Severity.WARNING


def _is_due_to(candidate: Candidate, began: Candidate) -> bool:
    if _is_held_back(candidate):
        return True
    return (
        candidate.kind is Kind.REPLICA
        and candidate.phase in _FOLLOWS
        and candidate.step >= began.step
        and bool(np.isin(candidate.members, began.members).all())
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
