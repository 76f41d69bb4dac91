"""Parameters that do not learn: a step left them as they were, or their graph ends at a collective.

Left alone are as many parameters as an optimizer steps with a learning rate of 0; a step in which
nothing moved; gradients a thousand times smaller than those that moved something; elements so large
that the step is less than half their spacing, as the parameters that moved tell; and two-byte
parameters, unless a sibling's moved with a quarter of the gradient, each beside its own elements.
A gradient whose parameter no optimizer holds is a warning. It is a fault where the optimizer holds
parameters that no module owns: it was made before `fully_shard` replaced them. And where it moved
on other ranks, which held the same, step with the same gradient and move another parameter together
with these ranks: where each parameter has an owner that steps it, no two ranks move one.

The collectives of `torch.distributed` keep no graph. A parameter without a gradient is named where
a collective behind its module took a value that needs a gradient, a module behind was handed the
result without a graph, and that module took part in the loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from rankscope.diagnosis.context import Candidate, JudgedStep, Latest, candidate_at
from rankscope.diagnosis.evidence.issuedcollectives import IssuedCollective, issues_in
from rankscope.diagnosis.evidence.stepview import (
    Array,
    CallView,
    SlotValues,
    StepView,
    grouped,
    positions,
    root_of,
    sibling_path,
)
from rankscope.record.finding import Kind, Severity
from rankscope.record.notes import NoteKind
from rankscope.record.phases import Phase
from rankscope.record.ranks import ranks_named, ranks_text
from rankscope.record.statistics import NONFINITE
from rankscope.record.value import ValueFlag

_NARROW: Final = ("bfloat16", "float16")
_HALF_SPACING: Final = {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-8,
                        "float16": 2.0**-11}  # fmt: skip
"""Of numbers of a dtype, beside the number: a smaller change may be lost."""
_SMALL: Final = 1e-3
_SURE: Final = 4.0
"""Times a sibling's gradient, beside its elements, with which a narrow parameter should move."""
_FEW: Final = 5.0
"""With `_SURE`, twenty elements should have moved, where they are spread evenly."""
_LEAST: Final = 1e-30
_STALE: Final = (
    "has a gradient and did not move: no optimizer holds it, but one holds parameters that no "
    "module owns any more"
)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _JudgedUpdate:
    """One parameter in one optimizer step."""

    values: SlotValues
    gradient: SlotValues
    stayed: Array
    moved: Array
    unheld: Array
    size: float
    """Root mean square of the gradient, the largest over the ranks on which it stayed."""
    moved_size: float
    """The same over those on which it moved; 0 where there are none."""
    pressure: float
    """Largest gradient by largest element, the largest over the ranks on which it stayed."""
    moved_pressure: float
    """The same, the smallest over those on which it moved; inf where there are none."""
    distance: float
    """Root mean square of how far its elements went, by sketches, on ranks on which it moved."""
    lost: float
    """Change that may be lost of every element, on every rank on which it stayed. Elements of both
    signs spread evenly: of n, several lie below `_FEW` n-th parts of the largest."""

    @property
    def family(self) -> tuple[str, str]:
        """What it has in common with its siblings."""
        return sibling_path(self.values.call.path), self.values.slot


def parameters_left(step_view: JudgedStep) -> Iterator[Candidate]:
    """Yield a candidate for every parameter that an optimizer step left as it was."""
    updates = list(_updates(step_view))
    moved = [(u.moved_size, u.distance) for u in updates if len(u.moved)]
    typical, distance = np.median(moved, axis=0).tolist() if moved else (math.inf, 0.0)
    pressures: dict[tuple[str, str], float] = {}
    for update in updates:
        lowest = pressures.get(update.family, math.inf)
        pressures[update.family] = min(lowest, update.moved_pressure)
    notes = [noted.note for noted in step_view.notes if noted.note.kind is NoteKind.RATE_OF_ZERO]
    rates = grouped((note.fields["optimizer"], int(note.fields["parameters"])) for note in notes)
    foreign = [str(n) for n in step_view.notes if n.note.kind is NoteKind.FOREIGN_PARAMETERS]
    at_rest = [
        update
        for update in updates
        if len(update.stayed)
        and not len(update.unheld)
        and _should_move(update, typical, distance, pressures)
    ]
    is_meant = len(at_rest) <= sum(map(max, rates.values()))
    called = {root_of(call.path) for call in step_view.of(Phase.FORWARD, Phase.BACKWARD)}
    unheld: set[str] = set()
    for update in updates:
        step_view.context.coverage.screened(update.values)
        once = "" if foreign else f"unheld: {update.values.name}"
        holders: Array = update.moved[:0]
        if len(update.unheld):
            # roots that nobody called are left of a model that the program has replaced
            if once in unheld or (called and root_of(update.values.call.path) not in called):
                continue
            unheld.update({once} - {""})
            text = _STALE if foreign else "has a gradient, but no optimizer holds it"
            ranks, severity = update.unheld, Severity.FAULT if foreign else Severity.WARNING
            holders = _holders_elsewhere(step_view, update, updates)
            if len(holders):
                text += f" here, and on {ranks_named(holders)} one moved it"
                severity, once = Severity.FAULT, ""
        elif update in at_rest and not is_meant:
            text = "has a gradient and was not moved by the optimizer step"
            ranks, severity, once = update.stayed, Severity.FAULT, ""
        else:
            continue
        is_moved_elsewhere = len(update.moved) > 0 and not len(update.unheld)
        more = f"; {ranks_named(update.moved)} moved it" if is_moved_elsewhere else ""
        facts = {"gradient_rms": update.size, "moved": ranks_text(update.moved), "notes": foreign}
        yield step_view.candidate(
            update.values,
            Kind.PARAMETER,
            ranks,
            f"{text} ({ranks_named(ranks)}){more}",
            severity=severity,
            advice=_MOVED_ELSEWHERE if is_moved_elsewhere or len(holders) else "",
            once=once,
            evidence=partial(dict, facts),
            priority=-1,
        )


_MOVED_ELSEWHERE: Final = (
    "The optimizers of these ranks do unlike things with one parameter: look at who owns it, and "
    "whether what the owner made (the parameter, or its update) is sent to all."
)


def _holders_elsewhere(
    step_view: JudgedStep, update: _JudgedUpdate, updates: Sequence[_JudgedUpdate]
) -> Array:
    """Return the replicas of a parameter that no optimizer of these ranks holds, on which one moved
    it; none where ranks step nothing together."""
    values = update.values
    moved = [u.moved for u in updates if u.values.parameter == values.parameter]
    holders = np.unique(np.concatenate(moved))
    members = np.union1d(holders, update.unheld)
    before = step_view.life.parameters[values.call.path, values.slot]
    places = positions(before.ranks, members)
    is_replica = (
        len(holders) > 0
        and (places >= 0).all()
        and len(np.unique(before.hashes[places])) == 1
        and update.gradient.agree(members) is True
        and not update.gradient.is_constant
    )
    # an owner steps it, and on the others it is read once the step closes: two updates
    movers = grouped((u.values.parameter, u.moved) for u in updates).values()
    is_stepped_together = any(np.isin(members, np.concatenate(some)).all() for some in movers)
    return holders if is_replica and is_stepped_together else holders[:0]


def _should_move(
    update: _JudgedUpdate,
    typical: float,
    distance: float,
    pressures: Mapping[tuple[str, str], float],
) -> bool:
    reach = distance * min(1.0, update.size / max(typical, _LEAST))
    # a parameter that is NaN has no number to hold it to
    if update.size < _SMALL * typical or not reach >= _SURE * update.lost:
        return False
    is_narrow = update.values.dtype in _NARROW
    return not is_narrow or update.pressure >= _SURE * pressures[update.family]


def _updates(step_view: JudgedStep) -> Iterator[_JudgedUpdate]:
    gradients = {values.parameter_call: values for values in step_view.gradients()}
    if not gradients:
        return
    # what no optimizer holds is read when the step closes: its gradient came with an earlier event
    last = {key[0]: gradients[key] for key in sorted(gradients)}
    latest = dict(step_view.life.parameters)
    for values in step_view.parameters(Phase.PARAMS):
        key = (values.call.path, values.slot)
        before = latest.get(key)
        seen = Latest(values.ranks, values.hashes, values.column("sketch"))
        latest[key] = before.updated_by(seen) if before is not None else seen
        gradient = gradients.get(values.parameter_call) or last.get(values.parameter)
        if before is not None and gradient is not None:
            update = _update(values, before, gradient)
            if update is not None:
                yield update


def _update(values: SlotValues, before: Latest, gradient: SlotValues) -> _JudgedUpdate | None:
    is_skipped = (gradient.flags & int(ValueFlag.SKIPPED)) != 0
    is_finite = sum(gradient.column(name) for name in NONFINITE) == 0
    is_pushed = gradient.is_known & ~is_skipped & (gradient.column("l2") > 0) & is_finite
    ranks = gradient.ranks[is_pushed]
    places, old = values.at(ranks), positions(before.ranks, ranks)
    is_in_both = (places >= 0) & (old >= 0) & values.is_known[places]
    ranks, places, old = ranks[is_in_both], places[is_in_both], old[is_in_both]
    if not len(ranks):
        return None
    at = gradient.at(ranks)
    is_same = values.hashes[places] == before.hashes[old]
    is_unheld = (gradient.flags[at] & int(ValueFlag.UNHELD)) != 0
    stays = is_same & ~is_unheld
    scale = gradient.rms[at]
    pressure = _largest(gradient, at) / np.maximum(_largest(values, places), _LEAST)
    moves = (values.column("sketch")[places] - before.sketches[old])[~is_same]
    counts = np.maximum(values.counts[places], 1)[~is_same]
    distances = np.sqrt((moves.astype(np.float64) ** 2).mean(axis=1) / counts)
    # how large the smallest element is; where both signs occur, how large some are at most
    low, high = (values.column(name)[places[stays]] for name in ("min", "max"))
    share = _FEW * np.maximum(abs(low), abs(high)) / np.maximum(values.counts[places[stays]], 1)
    smallest = np.where(low * high > 0, np.minimum(abs(low), abs(high)), share)
    spacing = _HALF_SPACING.get(values.dtype, 0.0)
    return _JudgedUpdate(
        values=values,
        gradient=gradient,
        stayed=ranks[stays],
        moved=ranks[~is_same],
        unheld=ranks[is_unheld & is_same],
        size=float(scale[is_same].max(initial=0.0)),
        moved_size=float(scale[~is_same].max(initial=0.0)),
        pressure=float(pressure[stays].max(initial=0.0)),
        moved_pressure=float(pressure[~is_same].min(initial=math.inf)),
        distance=float(distances.max(initial=0.0)),
        lost=float((spacing * smallest).min(initial=math.inf)),
    )


def _largest(values: SlotValues, places: Array) -> Array:
    ends = abs(values.column("min")[places]), abs(values.column("max")[places])
    return np.asarray(np.maximum(*ends))


# ---- graphs that end at a collective -------------------------------------------------------------


_DETACHED_ADVICE: Final = (
    "Gather or reduce with an autograd function (torch.distributed.nn.functional, or one of your "
    "own with a backward), or freeze the parameter if it is not meant to learn."
)
_SAME_NORM: Final = 1e-6
"""Relative distance within which two norms of the same elements lie."""


def detached_by_collectives(step_view: StepView) -> Iterator[Candidate]:
    """Yield a candidate for every parameter whose gradient ends at a collective."""
    stepped = {
        values.parameter
        for values in step_view.parameters(Phase.PARAMS)
        if not (values.flags & int(ValueFlag.AFTER_CALL)).any()
    }
    ends: dict[str, list[IssuedCollective | None]] = {}
    for call in step_view.of(Phase.GRADS):
        for values in call.slots.values():
            is_absent = (values.flags & int(ValueFlag.ABSENT)).all()
            if not is_absent or values.parameter not in stepped:
                continue
            if call.path not in ends:
                calls = [c for c in step_view.named(call.path) if c.phase is Phase.FORWARD]
                ends[call.path] = [_end_of_graph(forward) for forward in calls] or [None]
            issue = ends[call.path][0]
            if issue is None or None in ends[call.path]:
                continue
            line = str(issue.facts.get("at", ""))
            collective = {"op": issue.op, "path": issue.call.path, "at": line}
            yield candidate_at(
                step_view,
                call,
                Kind.PARAMETER,
                f"param:{values.parameter[1]}",
                values.ranks,
                f"has no gradient on {ranks_named(values.ranks)}: what the module gave went "
                f"through {issue.op}{f' ({line})' if line else ''}, which keeps no graph",
                advice=_DETACHED_ADVICE,
                evidence=partial(dict, collective=collective),
            )


def _end_of_graph(call: CallView) -> IssuedCollective | None:
    """Return the collective at which the graph of a call's outputs ends, None for none."""
    outputs = [values for values in call.outputs if _needs_gradient(values)]
    inner, around = call, call.parent
    while outputs and around is not None:
        at = next(n for n, child in enumerate(around.children) if child is inner)
        behind = around.children[at + 1 :]
        for n, child in enumerate(behind):
            for issue in issues_in(child) if child.phase is Phase.COLLECTIVE else ():
                is_handed_on = (_is_handed(issue, taker) for taker in behind[n + 1 :])
                if _takes(issue, outputs) and any(is_handed_on):
                    return issue
        inner, around = around, around.parent
    return None


def _needs_gradient(values: SlotValues) -> bool:
    return all(piece.requires_grad for piece in values.pieces)


def _takes(issue: IssuedCollective, outputs: list[SlotValues]) -> bool:
    if issue.is_message or issue.lacks or len(issue.ranks) != len(issue.members):
        return False
    taken_values = issue.call.slots.get("input.0")
    if taken_values is None or not _needs_gradient(taken_values):
        return False
    counts = taken_values.counts[taken_values.at(issue.ranks)]
    return taken_values.has(issue.ranks) and any(
        values.has(issue.ranks) and np.array_equal(values.counts[values.at(issue.ranks)], counts)
        for values in outputs
    )


def _is_handed(issue: IssuedCollective, call: CallView) -> bool:
    """True where a call that took part in the loss was handed what came out, with no graph."""
    if call.phase is not Phase.FORWARD or not any(map(_needs_gradient, call.outputs)):
        return False
    outputs, ranks = list(issue.call.outputs), issue.ranks
    digested = [output for output in outputs if output.are_known(ranks)]
    for values in call.inputs:
        if values.needs_gradient:
            continue
        is_telling = not values.is_constant and values.are_known(ranks)
        if is_telling and any(values.equals(output, ranks) for output in digested):
            return True
        if _are_joined(values, outputs, ranks):
            return True
    return False


def _are_joined(values: SlotValues, outputs: list[SlotValues], ranks: Array) -> bool:
    """True where a value has as many elements and the norm of all outputs put together."""
    if len(outputs) < 2 or not all(part.has(ranks) for part in (values, *outputs)):
        return False
    counts = sum(output.counts[output.at(ranks)] for output in outputs)
    squares = sum(output.column("l2")[output.at(ranks)] ** 2 for output in outputs)
    places = values.at(ranks)
    square = values.column("l2")[places] ** 2
    is_like = (values.counts[places] == counts) & (abs(squares - square) <= _SAME_NORM * square)
    return bool(is_like.all() and (square > 0).all())
