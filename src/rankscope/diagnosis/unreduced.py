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
* Where nothing is wrapped and no numbers go from rank to rank, all that differs is one fault; one
  warning where ranks begin alike and compute from one batch until they step (trials).
* An optimizer that reduces gradients inside its own step: after this step or the next, behind the
  last step after each one before it, the parameter is equal on all these ranks, and changed. Asked
  only of steps in which no gradient agreed (one among reduced ones is forgotten), and in which no
  reduction came early.
* Optimizer steps inside `no_sync()`: one warning where no traced step holds an average.

* Steps of one number that are other passes on some ranks (`evidence/reducedpasses.py`): what they
  hold is not compared.

Steps are counted by optimizers' steps. Where ranks stepped different models in a step, though all
step the same ones elsewhere, nothing is compared between these ranks from then on.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import numpy as np

from rankscope.diagnosis.context import SETUP_STEP, Candidate, History
from rankscope.diagnosis.coverage import Coverage
from rankscope.diagnosis.evidence.stepview import sibling_path
from rankscope.diagnosis.rules.equality import MISSED_EXCHANGE, UNTAKEN
from rankscope.diagnosis.rules.structure import LEFT_OUT_STEP, OTHER_PASSES
from rankscope.record.call import Mode
from rankscope.record.finding import Kind, Severity
from rankscope.record.phases import Phase
from rankscope.record.ranks import ranks_named

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
    "Nothing here goes from rank to rank: the model was never wrapped, its wrapper (DDP) is never "
    "called, or nothing reduces by hand. If these are jobs of their own (trials, members of an "
    "ensemble), seed them by rank, or declare what each rank has for itself in a layout file "
    "(own = true)."
)
_OF_ALL_STEPS: Final = (_BEGINS_LATE, _NOTHING_SHARED)
_LEFT_OUT: Final = (
    "Hand this parameter to the average too. Where each rank is to keep its own, declare that in a "
    "layout file (own = true)."
)
_TOO_EARLY: Final = (
    "These gradients were reduced before the last backward pass of the step, whose own were added "
    "on each rank afterwards: reduce once the last micro-batch is in."
)
_FOLLOWS: Final = frozenset(Phase) - {Phase.SETUP, Phase.COLLECTIVE}


def without_unreduced(
    candidates: Iterable[Candidate], histories: Mapping[int, History], coverage: Coverage
) -> list[Candidate]:
    """Leave out what such programs do, with one warning for steps in `no_sync()`; a history is that
    of an incarnation behind its last step."""
    unexplained: list[Candidate] = []
    sharing_nothing: set[int] = set()
    for history in histories.values():
        if history.other_passes:
            coverage.note(_of_passes(history))
    for candidate in candidates:
        history = histories[candidate.incarnation]
        for decide in (_of_other_passes, _of_uneven_steps, _of_late_reductions, _of_training_apart):
            decision = decide(candidate, history)
            if isinstance(decision, str):
                coverage.note(decision)
                break
            candidate = decision
        else:
            is_told = candidate.incarnation in sharing_nothing and _is_of_training(candidate)
            if candidate.once == _NOTHING_SHARED:
                sharing_nothing.add(candidate.incarnation)
            if not is_told:
                unexplained.append(candidate)
    return list(_as_one(unexplained, histories))


def _of_training_apart(candidate: Candidate, history: History) -> Candidate | str:
    is_gradient = candidate.kind is Kind.GRADIENT
    is_shared = history.replicas.is_wrapped or history.is_exchanging or history.together
    if not _is_of_training(candidate) or candidate.advice in (MISSED_EXCHANGE, UNTAKEN):
        return candidate
    if candidate.step not in history.apart:
        if is_shared or is_gradient or SETUP_STEP not in history.even:
            return candidate
        return dataclasses.replace(
            candidate,
            message=f"{ranks_named(candidate.members)} begin alike, compute from the same and "
            "exchange nothing; from here on they hold unlike values",
            severity=Severity.WARNING,
            advice=_NOTHING_SHARED,
            once=_NOTHING_SHARED,
        )
    if not _is_trained(candidate, history):
        return candidate
    if history.averages:
        is_parameter, key = candidate.phase is Phase.PARAMS, (candidate.path, candidate.slot)
        if is_parameter and _is_left_out(key, history):
            return dataclasses.replace(
                candidate,
                message=f"{ranks_named(candidate.members)} average the parameters beside it (seen "
                f"in step {history.averages[0]}) and not this one",
                advice=_LEFT_OUT,
            )
        return (
            "ranks train apart and average their parameters "
            f"(seen in step {history.averages[0]}): gradients and parameters of steps without "
            "a reduction were not compared"
        )
    # the trace begins later than the training, and no gradient of it was reduced
    if is_gradient and history.begins_late and not history.together:
        return dataclasses.replace(candidate, severity=Severity.WARNING, advice=_BEGINS_LATE)
    if is_gradient and not is_shared:
        return dataclasses.replace(candidate, advice=_NOTHING_SHARED)
    return candidate


def _is_of_training(candidate: Candidate) -> bool:
    """True for gradients and parameters that differ between ranks."""
    is_unequal = candidate.kind is Kind.REPLICA and candidate.phase in (Phase.GRADS, Phase.PARAMS)
    return is_unequal or candidate.kind is Kind.GRADIENT


def _is_trained(candidate: Candidate, history: History) -> bool:
    """False for a parameter that no optimizer took a gradient of: training did not change it."""
    key = (candidate.path, candidate.slot)
    return candidate.phase is not Phase.PARAMS or key in history.trained


def _is_left_out(key: tuple[str, str], history: History) -> bool:
    """True where a parameter was in no average, and others of its module or most of its siblings
    were. Of what has neither, as a head that is each rank's own, nothing is known."""
    averaged = history.averaged
    if not averaged or key in averaged:
        return False
    path, slot = key
    siblings = {
        other
        for other in history.trained - {key}
        if other[1] == slot and sibling_path(other[0]) == sibling_path(path)
    }
    is_of_module = any(owner == path for owner, _ in averaged)
    return is_of_module or 2 * len(siblings & averaged) > len(siblings)


def _of_late_reductions(candidate: Candidate, history: History) -> Candidate | str:
    step = candidate.step
    if candidate.kind is Kind.GRADIENT and step in history.reduced_early:
        return dataclasses.replace(candidate, advice=_TOO_EARLY)
    updates = history.updates.get((candidate.path, candidate.slot.partition(":")[2]), {})
    became = {at: updates[at].of(candidate.members) for at in (step, step + 1) if at in updates}
    is_reduced = candidate.kind is Kind.PARAMETER and became.get(step + 1) == "alike"
    if candidate.kind is Kind.GRADIENT:
        # behind the last step nothing tells: what the program did with all before, it does there
        earlier = {at: update.of(candidate.members) for at, update in updates.items() if at < step}
        seen = became or (earlier if earlier.keys() <= history.apart else {})
        is_reduced = "alike" in seen.values() and "apart" not in seen.values()
    if step not in history.apart or not is_reduced:
        return candidate
    return (
        "gradients differ before the optimizer's step and their parameters are the same "
        "after it: reduced inside the step, so these gradients were not compared"
    )


def _as_one(candidates: list[Candidate], histories: Mapping[int, History]) -> Iterator[Candidate]:
    """Put one candidate in place of all that comes of steps in `no_sync()`, of late traces, or of
    ranks that share nothing."""
    held_back = [
        c
        for c in candidates
        if c.kind is Kind.GRADIENT
        and (c.severity is Severity.WARNING or c.advice == _NOTHING_SHARED)
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
            and _is_trained(candidate, histories[candidate.incarnation])
        ):
            followers.add(id(candidate))
    counts = Counter(c.incarnation for c in candidates if id(c) in followers)
    for candidate in candidates:
        if id(candidate) not in followers:
            yield candidate
        elif candidate is first[candidate.incarnation]:
            candidate = dataclasses.replace(candidate, weight=counts[candidate.incarnation])
            if candidate.advice == UNTAKEN:
                yield candidate
                continue
            advice = candidate.advice if candidate.advice in _OF_ALL_STEPS else _ADVICE
            where = "in every traced step" if advice in _OF_ALL_STEPS else "inside no_sync()"
            yield dataclasses.replace(
                candidate,
                message=f"{ranks_named(candidate.members)} step {where}, each with "
                "gradients of their own data, and no traced step averages their parameters; what "
                "differs between these ranks from here on follows from that",
                advice=advice,
            )


_OF_ONE_RANK = frozenset({Kind.NONFINITE, Kind.RECOMPUTE})
"""What needs no other rank to be seen."""


def _of_other_passes(candidate: Candidate, history: History) -> Candidate | str:
    misaligned = history.other_passes.get(candidate.step)
    is_told = candidate.kind in _OF_ONE_RANK or candidate.once in (OTHER_PASSES, LEFT_OUT_STEP)
    if misaligned is None or is_told or candidate.mode is not Mode.TRAIN:
        return candidate
    if not misaligned.parts(candidate.phase, candidate.micro_batch, candidate.members):
        return candidate
    return _of_passes(history)


def _of_passes(history: History) -> str:
    return (
        f"ranks stepped after unlike numbers of backward passes (in train step "
        f"{min(history.other_passes)} first): values that are of other passes on some ranks were "
        "not compared"
    )


def _of_uneven_steps(candidate: Candidate, history: History) -> Candidate | str:
    members = set(candidate.members.tolist())
    is_told = candidate.kind in _OF_ONE_RANK or candidate.once == LEFT_OUT_STEP
    for step, stepped in () if is_told else history.uneven.items():
        if step > candidate.step and not history.begins_late:
            continue
        everyone = set().union(*stepped.values()) & members
        for root, ranks in stepped.items():
            behind = (everyone - ranks) & history.steppers[root]
            if behind and ranks & members:
                return (
                    f"in step {step} {ranks_named(behind)} stepped another model than other ranks "
                    "did, so steps of one number are not the same step on them: not compared from "
                    "there on"
                )
    return candidate
