"""Parameters that do not learn: an optimizer step left them as they were, or their graph ends at a
collective.

**Left as they were.** The bytes of what an optimizer holds change where the gradient is not zero
and the step was not skipped. Left alone:

* as many parameters as an optimizer says to step with a learning rate of 0;
* a step in which nothing moved though all is held: a warm-up begins with a learning rate of 0;
* a gradient smaller than those that moved something by a factor of more than 1,000;
* elements so large that the step is less than half their spacing: norms' weights of 1 early in a
  warm-up, or a bias of few elements. The step's size is told by the parameters that moved, in
  proportion to gradients (SGD) or alike (Adam), whichever is less;
* two-byte parameters, where such updates are lost, unless a sibling's moved with a gradient of a
  quarter of the size, each beside its own elements.

A gradient whose parameter no optimizer holds is a warning, and a fault where the optimizer holds
parameters that no module owns: it was made before `fully_shard` replaced them.

**Detached.** The collectives of `torch.distributed` keep no graph: the gradient of what goes
through one ends there. It is named for a parameter that an optimizer steps, that took part in
forward and has no gradient on any rank, if a collective behind its module took a value that needs a
gradient, like the module's output; a module behind was handed the result without a graph; and that
module took part in the loss. Branches that the loss does not use, and `no_grad`, are left alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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
from rankscope.record.notes import NoteKind, RanksNote
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
    stayed: Array
    """Ranks with a gradient whose part is what it was."""
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


def parameters_left(step_view: JudgedStep) -> Iterator[Candidate]:
    """Yield a candidate for every parameter that an optimizer step left as it was."""
    updates = list(_updates(step_view))
    moved = [(u.moved_size, u.distance) for u in updates if len(u.moved)]
    typical, distance = np.median(moved, axis=0).tolist() if moved else (math.inf, 0.0)
    siblings: dict[tuple[str, str], float] = {}
    for update in updates:
        sibling_key = _sibling_key(update.values)
        siblings[sibling_key] = min(siblings.get(sibling_key, math.inf), update.moved_pressure)
    is_stale = bool(_on_foreign_parameters(step_view))
    unheld: set[str] = set()
    at_rest = [
        update
        for update in updates
        if len(update.stayed)
        and not len(update.unheld)
        and _should_move(update, typical, distance, siblings)
    ]
    is_meant = len(at_rest) <= _with_rate_of_zero(step_view)
    called = {root_of(call.path) for call in step_view.of(Phase.FORWARD, Phase.BACKWARD)}
    for update in updates:
        step_view.context.coverage.applied(update.values)
        if len(update.unheld):
            if called and root_of(update.values.call.path) not in called:
                continue  # what is left of a model that the program has replaced
            once = "" if is_stale else f"unheld: {update.values.name}"
            if once in unheld:
                continue
            unheld.update({once} - {""})
            severity = Severity.FAULT if is_stale else Severity.WARNING
            text = _STALE if is_stale else "has a gradient, but no optimizer holds it"
            yield _candidate(step_view, update, update.unheld, text, severity, once=once)
        elif update in at_rest and not is_meant:
            text = "has a gradient and was not moved by the optimizer step"
            yield _candidate(step_view, update, update.stayed, text, Severity.FAULT)


def _with_rate_of_zero(step_view: StepView) -> int:
    notes = [each.note for each in step_view.notes if each.note.kind is NoteKind.RATE_OF_ZERO]
    counts = grouped((note.fields["optimizer"], int(note.fields["parameters"])) for note in notes)
    return sum(map(max, counts.values()))


def _on_foreign_parameters(step_view: StepView) -> list[RanksNote]:
    return [each for each in step_view.notes if each.note.kind is NoteKind.FOREIGN_PARAMETERS]


def _sibling_key(values: SlotValues) -> tuple[str, str]:
    return sibling_path(values.call.path), values.slot


def _should_move(
    update: _JudgedUpdate,
    typical: float,
    distance: float,
    siblings: Mapping[tuple[str, str], float],
) -> bool:
    if update.size < _SMALL * typical:
        return False
    reach = distance * min(1.0, update.size / max(typical, _LEAST))
    if not reach >= _SURE * update.lost:  # a parameter that is NaN has no number to hold it to
        return False
    if update.values.dtype not in _NARROW:
        return True
    return update.pressure >= _SURE * siblings[_sibling_key(update.values)]


def _updates(step_view: JudgedStep) -> Iterator[_JudgedUpdate]:
    incarnation = step_view.life
    gradients = {
        (values.parameter, values.call.ordinal): values for values in step_view.gradients()
    }
    if not gradients:
        return
    # what no optimizer holds is read when the step closes: its gradient came with an earlier event
    last = {key[0]: gradients[key] for key in sorted(gradients)}
    latest = dict(incarnation.parameters)
    for values in step_view.parameters(Phase.PARAMS):
        key = (values.call.path, values.slot)
        before = latest.get(key)
        latest[key] = Latest(values.ranks, values.hashes, values.column("sketch"))
        gradient = gradients.get((values.parameter, values.call.ordinal))
        gradient = gradient or last.get(values.parameter)
        if before is None or gradient is None:
            continue
        update = _update(values, before, gradient)
        if update is not None:
            yield update


def _update(values: SlotValues, before: Latest, gradient: SlotValues) -> _JudgedUpdate | None:
    flags = gradient.flags
    is_skipped = (flags & int(ValueFlag.SKIPPED)) != 0
    is_pushed = gradient.is_known & ~is_skipped & (gradient.column("l2") > 0)
    is_finite = sum(gradient.column(name) for name in NONFINITE) == 0
    ranks = gradient.ranks[is_pushed & is_finite]
    places, old = values.at(ranks), positions(before.ranks, ranks)
    both = (places >= 0) & (old >= 0)
    ranks, places, old = ranks[both], places[both], old[both]
    both = values.is_known[places]
    ranks, places, old = ranks[both], places[both], old[both]
    if not len(ranks):
        return None
    is_same = values.hashes[places] == before.hashes[old]
    at = gradient.at(ranks)
    unheld = (flags[at] & int(ValueFlag.UNHELD)) != 0
    stays = is_same & ~unheld
    scale = gradient.column("l2")[at] / np.sqrt(np.maximum(gradient.counts[at], 1))
    pressure = _largest(gradient, at) / np.maximum(_largest(values, places), _LEAST)
    apart = (values.column("sketch")[places] - before.sketches[old])[~is_same]
    counts = np.maximum(values.counts[places], 1)[~is_same]
    distances = np.sqrt((apart.astype(np.float64) ** 2).mean(axis=1) / counts)
    spacing = _HALF_SPACING.get(values.dtype, 0.0)
    return _JudgedUpdate(
        values=values,
        stayed=ranks[stays],
        moved=ranks[~is_same],
        unheld=ranks[unheld & is_same],
        size=float(scale[is_same].max(initial=0.0)),
        moved_size=float(scale[~is_same].max(initial=0.0)),
        pressure=float(pressure[stays].max(initial=0.0)),
        moved_pressure=float(pressure[~is_same].min(initial=math.inf)),
        distance=float(distances.max(initial=0.0)),
        lost=float((spacing * _smallest(values, places[stays])).min(initial=math.inf)),
    )


def _largest(values: SlotValues, places: Array) -> Array:
    found: Array = np.maximum(abs(values.column("min")[places]), abs(values.column("max")[places]))
    return found


def _smallest(values: SlotValues, places: Array) -> Array:
    """How large the smallest element is; where both signs occur, how large some are at most."""
    low, high = values.column("min")[places], values.column("max")[places]
    share = _FEW * np.maximum(abs(low), abs(high)) / np.maximum(values.counts[places], 1)
    return np.asarray(np.where(low * high > 0, np.minimum(abs(low), abs(high)), share))


def _candidate(
    step_view: JudgedStep,
    update: _JudgedUpdate,
    ranks: Array,
    text: str,
    severity: Severity,
    once: str = "",
) -> Candidate:
    return step_view.candidate(
        update.values,
        Kind.PARAMETER,
        ranks,
        f"{text} ({ranks_named(ranks)})",
        severity=severity,
        once=once,
        evidence=lambda: {
            "gradient_rms": update.size,
            "moved": ranks_text(update.moved),
            "notes": [str(each) for each in _on_foreign_parameters(step_view)],
        },
        priority=-1,
    )


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
    ended: dict[str, IssuedCollective | None] = {}
    for call in step_view.of(Phase.GRADS):
        for values in call.slots.values():
            is_absent = bool((values.flags & int(ValueFlag.ABSENT)).all())
            if not is_absent or values.parameter not in stepped:
                continue
            if call.path not in ended:
                ended[call.path] = _end_of_graph(step_view, call.path)
            issue = ended[call.path]
            if issue is not None:
                yield _detached_candidate(step_view, values, issue)


def _end_of_graph(step_view: StepView, path: str) -> IssuedCollective | None:
    """Return the collective at which the graph of a module's every output ends, None for none."""
    calls = [call for call in step_view.named(path) if call.phase is Phase.FORWARD]
    found = [_taken(call) for call in calls]
    return found[0] if found and None not in found else None


def _taken(call: CallView) -> IssuedCollective | None:
    given = [values for values in call.outputs if _needs_gradient(values)]
    inner, around = call, call.parent
    while given and around is not None:
        at = next(n for n, child in enumerate(around.children) if child is inner)
        behind = around.children[at + 1 :]
        for n, child in enumerate(behind):
            if child.phase is not Phase.COLLECTIVE:
                continue
            for issue in issues_in(child):
                if _takes(issue, given) and any(_is_handed(issue, to) for to in behind[n + 1 :]):
                    return issue
        inner, around = around, around.parent
    return None


def _needs_gradient(values: SlotValues) -> bool:
    return all(piece.requires_grad for piece in values.pieces)


def _takes(issue: IssuedCollective, given: list[SlotValues]) -> bool:
    if issue.is_message or issue.lacks or len(issue.ranks) != len(issue.members):
        return False
    taken = issue.call.slots.get("input.0")
    if taken is None or not _needs_gradient(taken):
        return False
    places = taken.at(issue.ranks)
    return any(
        (places >= 0).all()
        and (at := values.at(issue.ranks)).min(initial=0) >= 0
        and np.array_equal(values.counts[at], taken.counts[places])
        for values in given
    )


def _is_handed(issue: IssuedCollective, call: CallView) -> bool:
    """True where a call that took part in the loss was handed what came out, with no graph."""
    if call.phase is not Phase.FORWARD or not any(map(_needs_gradient, call.outputs)):
        return False
    outputs = [v for s, v in issue.call.slots.items() if s.split(".")[0] == "output"]
    known = [output for output in outputs if output.are_known(issue.ranks)]
    return any(
        not any(piece.requires_grad for piece in values.pieces)
        and (
            (
                not values.is_constant
                and values.are_known(issue.ranks)
                and any(values.equals(output, issue.ranks) for output in known)
            )
            or _are_joined(values, outputs, issue.ranks)
        )
        for values in call.inputs
    )


def _are_joined(values: SlotValues, outputs: list[SlotValues], ranks: Array) -> bool:
    """True where a value has as many elements and the norm of all outputs put together."""
    places, at = values.at(ranks), [output.at(ranks) for output in outputs]
    if len(outputs) < 2 or (places < 0).any() or any((each < 0).any() for each in at):
        return False
    counts = sum(output.counts[each] for output, each in zip(outputs, at))
    norms = sum(output.column("l2")[each] ** 2 for output, each in zip(outputs, at))
    wanted = values.column("l2")[places] ** 2
    is_like = (values.counts[places] == counts) & (abs(norms - wanted) <= _SAME_NORM * wanted)
    return bool(is_like.all() and (wanted > 0).all())


def _detached_candidate(
    step_view: StepView, values: SlotValues, issue: IssuedCollective
) -> Candidate:
    ranks = values.ranks
    at = str(issue.facts.get("at", ""))
    return candidate_at(
        step_view,
        values.call,
        Kind.PARAMETER,
        f"param:{values.parameter[1]}",
        ranks,
        f"has no gradient on {ranks_named(ranks)}: what the module gave went through "
        f"{issue.op}{f' ({at})' if at else ''}, which keeps no graph",
        advice=_DETACHED_ADVICE,
        evidence=lambda: {"collective": {"op": issue.op, "path": issue.call.path, "at": at}},
    )
