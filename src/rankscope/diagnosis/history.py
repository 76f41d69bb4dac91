"""What steps leave to the next: `before` the rules of a step, `advanced` behind them.

A history says which steps reduced their gradients, and how: differences that follow from it are no
faults (`unreduced.py`).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from rankscope.diagnosis.context import (
    SETUP_STEP,
    Candidate,
    History,
    JudgedStep,
    Latest,
    Left,
    ParameterUpdate,
)
from rankscope.diagnosis.coverage import EvidenceScope
from rankscope.diagnosis.evidence.issuedcollectives import (
    IssuedCollective,
    issues_of,
    moves_numbers,
)
from rankscope.diagnosis.evidence.replicas import (
    FSDP1_FLAT,
    InferredReplicas,
    Layouts,
    ReplicaProofs,
)
from rankscope.diagnosis.evidence.stages import stage_feeds
from rankscope.diagnosis.evidence.stepview import Array, SlotValues, StepView, grouped, positions
from rankscope.record.call import Mode
from rankscope.record.finding import Kind, Severity
from rankscope.record.phases import Phase
from rankscope.record.ranks import OPS

_STEPS_LEFT: Final = 8
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


def before(step_view: StepView, histories: Mapping[int, History], layouts: Layouts) -> History:
    """Return what is known before rules are asked about a step, with the stages that it shows;
    `histories`: of incarnations, behind the steps before."""
    history = None if step_view.is_setup else histories.get(step_view.incarnation)
    if history is None:
        replicas = InferredReplicas(step_view if step_view.is_setup else None)
        lines = replicas.data_lines(layouts)
        history = History(replicas=replicas, data_lines=lines, proofs=ReplicaProofs({}, {}))
    return replace(history, replicas=history.replicas.with_stages(stage_feeds(step_view)))


def advanced(step_view: JudgedStep, candidates: Sequence[Candidate]) -> History:
    """Return what is known behind a step, in which rules saw some candidates."""
    history = _told(step_view.life, candidates)
    for advance in ADVANCES:
        history = advance(history, step_view)
    return history


def _told(history: History, candidates: Sequence[Candidate]) -> History:
    told = history.told | {candidate.once for candidate in candidates} - {""}
    kinds = {c.kind for c in candidates if c.severity is Severity.FAULT}
    return replace(history, told=told, is_spoiled=history.is_spoiled or Kind.NONFINITE in kinds)


def _gradients(history: History, step_view: JudgedStep) -> History:
    rounded = history.rounded | step_view.rounded_gradients
    is_early = any(mixture.is_reduced_early for _, mixture in step_view.mixtures)
    early = history.reduced_early | ({step_view.step} if is_early else set())
    proofs = step_view.compared_replicas.proofs
    return replace(history, proofs=proofs, rounded=rounded, reduced_early=early)


def _passes(history: History, step_view: JudgedStep) -> History:
    misaligned = step_view.passes_apart
    if misaligned is None:
        return history
    by_step = {**history.other_passes, step_view.step: misaligned}
    return replace(history, ahead=step_view.ahead, other_passes=by_step)


def _starts(history: History, step_view: JudgedStep) -> History:
    """Keep the setup until gradients have decided on all that differed in it."""
    if step_view.is_setup:
        return replace(history, setup=step_view)
    if not any(True for _ in step_view.of(Phase.GRADS)):
        return history
    history = replace(history, stepped=history.stepped | {step_view.step})
    if history.setup is None:
        return history
    decided, starts = step_view.decided_starts, step_view.undecided_starts.items()
    undecided = {key: values for key, values in starts if key not in decided}
    return replace(history, undecided=undecided, setup=history.setup if undecided else None)


def _parameters(history: History, step_view: JudgedStep) -> History:
    parameters = dict(history.parameters)
    for phase in (Phase.SETUP, Phase.PARAMS):
        for values in step_view.values(phase):  # buffers too
            is_known = values.is_known
            if is_known.any():
                columns = values.ranks, values.hashes, values.column("sketch")
                latest = Latest(*(column[is_known] for column in columns))
                key = (values.call.path, values.slot)
                earlier = parameters.get(key, latest)
                parameters[key] = earlier.updated_by(latest)
    return replace(history, parameters=parameters)


def _stepped_models(history: History, step_view: JudgedStep) -> History:
    """Keep which ranks stepped which model."""
    stepped = step_view.stepped
    if not stepped:
        return history
    steppers, uneven = dict(history.steppers), history.uneven
    for root, ranks in stepped.items():
        steppers[root] = steppers.get(root, frozenset()) | ranks
    everyone = set().union(*stepped.values())
    if any(ranks != everyone for ranks in stepped.values()):
        uneven = {**uneven, step_view.step: stepped}
    begins_late = history.begins_late and step_view.step > 0
    return replace(history, begins_late=begins_late, steppers=steppers, uneven=uneven)


def _averages(history: History, step_view: JudgedStep) -> History:
    """Keep what steps left different, and which ones averaged it."""
    gradients = (v for v in step_view.values(Phase.GRADS) if _is_plain(v) and not v.is_constant)
    events = grouped((id(v.call.top), v.agree(v.ranks) is False) for v in gradients)
    are_apart = [all(differs) for differs in events.values()]
    apart = history.apart | ({step_view.step} if any(are_apart) else set())
    # ranks that compute from the same make equal gradients each for itself
    ranks = next((v.ranks for v in step_view.values(Phase.GRADS) if _is_plain(v)), None)
    is_one_batch = ranks is not None and step_view.has_same_inputs(ranks)
    together = history.together | (set() if all(are_apart) or is_one_batch else {step_view.step})
    taken = (v for v in step_view.gradients() if v.is_known.any())
    trained = history.trained | {(v.call.path, f"param:{v.parameter[1]}") for v in taken}
    is_exchanging = history.is_exchanging or any(map(moves_numbers, issues_of(step_view)))
    history = replace(
        history, apart=apart, together=together, trained=trained, is_exchanging=is_exchanging
    )
    parameters = [v for v in step_view.values(Phase.PARAMS) if _is_plain(v)]
    parameters = [values for values in parameters if values.slot != _FLAT_SLOT]
    before = history.unlike
    if parameters:
        starts = history.begun or history.parameters
        unlike = {id(v): v for v in parameters if v.agree(v.ranks) is False}
        parts: list[Left] = []
        for values in unlike.values():
            first, begun = starts.get((values.call.path, values.slot)), None
            if first is not None and np.isin(values.ranks, first.ranks).all():
                begun = first.sketches[np.searchsorted(first.ranks, values.ranks)]
            squares, sketches = values.column("l2") ** 2, values.column("sketch").copy()
            key, counts = (values.call.path, values.slot), values.counts.copy()
            parts.append(Left(values.ranks.copy(), counts, squares, sketches, begun, keys=(key,)))
        # all parameters of a root as one flat tensor, and those that differ as one
        roots = grouped((id(values.call.top), values) for values in parameters if unlike)
        for owned in roots.values():
            for flat in (owned, [values for values in owned if id(values) in unlike]):
                if flat and all(np.array_equal(v.ranks, flat[0].ranks) for v in flat):
                    counts = np.sum([v.counts for v in flat], axis=0)
                    squares = np.sum([v.column("l2") ** 2 for v in flat], axis=0)
                    keys = tuple((v.call.path, v.slot) for v in flat)
                    parts.append(Left(flat[0].ranks.copy(), counts, squares, None, keys=keys))
        history = replace(history, begun=starts, unlike=parts)
    averaged = _averaged(step_view, before, _rejoined(step_view, before))
    averaged |= _averaged(step_view, history.unlike, ends=_ends_of_updates(step_view))
    if averaged:
        averages = (*history.averages, step_view.step)
        return replace(history, averages=averages, averaged=history.averaged | averaged)
    return history if history.averages else _averages_one_by_one(history, step_view)


def _is_plain(values: SlotValues) -> bool:
    is_owned = values.slot.startswith(("param:", "grad:"))
    return is_owned and values.source in ("unknown", "marked") and len(values.ranks) > 1


def _averaged(
    step_view: StepView,
    parts: Sequence[Left],
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
        if values is None:
            continue
        group = values.ranks[np.isin(values.ranks, issue.members)]
        if issue.op != "send" and values.agree(group) is not False:
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


def _rejoined(step_view: StepView, parts: Sequence[Left]) -> list[Left]:
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


def _size_of(parts: Sequence[Left]) -> tuple[int, set[int]]:
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


def _averages_one_by_one(history: History, step_view: StepView) -> History:
    """Keep the ranks that handed most of what was left different to others. Once all have, each in
    a step of its own, they averaged their parameters."""
    left = (*history.left, *([history.unlike] if history.unlike else ()))[-_STEPS_LEFT:]
    if not left:
        return history
    handed: Counter[int] = Counter()
    for issue in issues_of(step_view):
        values, peer = _exchanged(issue), issue.facts.get("peer")
        peers = {peer, *(issue.members if issue.op == "send" else ())}
        if values is None or len(issue.ranks) == len(issue.members) > len(peers):
            continue
        # whoever may have taken a message that names no peer
        takers: set[Any] = ({peer} if peer is not None else peers) - {None}
        for rank in issue.ranks.tolist():
            if _is_own(values, rank, left):
                count = int(values.counts[values.place(rank)])
                handed.update(dict.fromkeys(takers | {rank}, count))
    count, ranks = _size_of(left[-1])
    most = history.handed | {rank for rank, elements in handed.items() if 2 * elements >= count}
    averages = (step_view.step,) if ranks <= most else ()
    return replace(history, left=left, handed=most, averages=averages)


def _is_own(values: SlotValues, rank: int, left: Iterable[Sequence[Left]]) -> bool:
    """True where a rank hands over a parameter as a step left it, its share of a weighted mean, or
    how far it is from where all began."""
    place = values.place(rank)
    count, norm = int(values.counts[place]), float(values.column("l2")[place])
    handed = values.column("sketch")[place]
    for part in itertools.chain.from_iterable(left):
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


def _updates(history: History, step_view: JudgedStep) -> History:
    """Keep what became of parameters whose gradients did not agree, in that step and the next: a
    sharded optimizer may hand its part round behind its step."""
    if not history.apart or step_view.step > max(history.apart) + 1:
        return history
    updates = dict(history.updates)
    for values in step_view.parameters(Phase.PARAMS):
        before = history.parameters.get((values.call.path, values.slot))
        if before is not None:
            update = ParameterUpdate(
                values.ranks.copy(), values.hashes.copy(), before.ranks, before.hashes
            )
            of_steps = updates.get(values.parameter, {})
            updates[values.parameter] = {**of_steps, step_view.step: update}
    return replace(history, updates=updates)


_STATE: Final = frozenset({Phase.SETUP, Phase.PARAMS, EvidenceScope.SLOTS, EvidenceScope.RANKS})
"""What a trace has to record to show the parameters and buffers of a module."""


def _evenness(history: History, step_view: JudgedStep) -> History:
    """Keep the steps behind which all ranks hold the same, and all of it finite."""
    phase = Phase.SETUP if step_view.is_setup else Phase.PARAMS
    written = list(step_view.values(phase))
    is_train = step_view.is_setup or step_view.mode is Mode.TRAIN
    if not (written and is_train and step_view.context.evidence >= _STATE):
        return history
    ranks = max((latest.ranks for latest in history.parameters.values()), key=len, default=())
    is_even = all(v.is_known.all() and v.is_finite(v.ranks) for v in written) and all(
        np.array_equal(latest.ranks, ranks) and (latest.hashes == latest.hashes[0]).all()
        for latest in history.parameters.values()
    )
    number = SETUP_STEP if step_view.is_setup else step_view.step
    return replace(history, even=history.even | {number}) if is_even else history


ADVANCES: Final[tuple[Callable[[History, JudgedStep], History], ...]] = (
    _gradients,
    _passes,
    _starts,
    _stepped_models,
    _averages,
    _updates,
    _parameters,
    _evenness,
)
"""In this order, each with what those before it have added: `_updates` reads which steps were apart
from `_averages`, both read the parameters of the step before, `_evenness` those behind it."""
