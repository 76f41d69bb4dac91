"""Where the first NaN or infinity came from finite values, and how it reached other ranks.

On every rank the first value that holds one is looked for. The call that made it (finite inputs, an
output that is not) is the origin; a rank that received it (in an input, a collective, a reduced
gradient) is a victim. Where nobody made one it came from outside: the first to hold it is told.

-inf alone is how masks are written: it counts only in a slot that holds none elsewhere, as a
warning where no NaN or +inf comes of it in that step. What collectives alone carry is a warning
too: padding that nobody wrote (Muon), infinity as the best loss so far. Gradients of a step that a
GradScaler skipped are not looked at, nor is a backward pass that left such gradients where all that
optimizers took in the step is finite: overflow is how a scale is found. Receivers of a broadcast
may hold anything before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Final

import numpy as np

from rankscope.diagnosis.context import Candidate, JudgedStep
from rankscope.diagnosis.evidence.distances import sides
from rankscope.diagnosis.evidence.issuedcollectives import issues_in
from rankscope.diagnosis.evidence.stepview import (
    Array,
    SlotValues,
    StepView,
    grouped,
    is_input,
    is_output,
)
from rankscope.record.finding import Kind, Severity
from rankscope.record.phases import Phase
from rankscope.record.ranks import ranks_named
from rankscope.record.statistics import NONFINITE
from rankscope.record.value import ValueFlag

_NAMES: Final = {"nan": "NaN", "posinf": "+inf", "neginf": "-inf"}
_MADE: Final = 0
"""The call's inputs are finite, its own output is not."""
_HOOKED: Final = 1
"""Its output is finite too; what its hooks made of it is not: they may have reduced it."""
_CAUGHT: Final = 2
_NOT_MADE_HERE: Final = (
    "No module made it: look at the loss, at what was loaded, or at whatever else code outside of "
    "modules hands to this one."
)
_NOT_USED: Final = (
    "No module, gradient or parameter of this step has it. Where it pads a collective, or stands "
    "for the worst score so far, this is as it should be."
)
_GRADIENTS: Final = (Phase.BACKWARD, Phase.GRADS)
_MASKS: Final = "-inf that masks"
_CARRIED: Final = "what collectives alone carry"
_First = tuple[int, SlotValues]
"""When a rank first had a value that is not finite, and which."""


def nonfinite_origins(step_view: JudgedStep) -> Iterator[Candidate]:
    """Yield the origins of this step; none where an earlier step of the incarnation had one."""
    for values in step_view.values(*Phase):
        if values.is_known.any():
            step_view.context.coverage.screened(values)
    if step_view.life.is_spoiled:
        return
    spoiled = list(_spoiled(step_view))
    if not spoiled:
        return
    mild = ""
    if not any((values.nonfinite > 0).any() for values, _ in spoiled):
        mild = _MASKS
    elif all(values.call.phase is Phase.COLLECTIVE for values, _ in spoiled):
        mild = _CARRIED
    first = _first_by_rank(spoiled)
    surest = min(_level(values) for _, values in first.values())
    origins = {rank: values for rank, (_, values) in first.items() if _level(values) == surest}
    caught = _caught(spoiled, first, origins)
    for ranks in grouped((id(values), rank) for rank, values in origins.items()).values():
        values, phase, members = origins[ranks[0]], origins[ranks[0]].call.phase, np.sort(ranks)
        counts = {n: int(values.column(n)[values.at(members)].sum()) for n in NONFINITE}
        numbers = ", ".join(f"{count} {_NAMES[name]}" for name, count in counts.items() if count)
        is_made = _level(values) == _MADE
        begin = "its inputs were finite" if is_made else "it came in so"
        if phase is Phase.SETUP:
            begin = "it was so when it was loaded"
        advice = "" if is_made and phase is not Phase.SETUP else _NOT_MADE_HERE
        facts = {"inputs_are_finite": is_made, "caught_through": caught}
        facts["spoiled_values"] = [value.name for value, _ in spoiled[:8]]
        yield step_view.candidate(
            values,
            Kind.NONFINITE,
            members,
            f"{numbers} on {ranks_named(members)}; {begin}",
            advice=_NOT_USED if phase is Phase.COLLECTIVE and mild else advice,
            evidence=partial(_with_sides, values, facts),
            weight=len(spoiled),
            severity=Severity.WARNING if mild else Severity.FAULT,
            once=mild,
            priority=-1,
        )


def _with_sides(values: SlotValues, facts: Mapping[str, Any]) -> dict[str, Any]:
    return {"values": sides(values, values.ranks), **facts}


def _is_pass_thrown_away(step_view: StepView) -> bool:
    """True where a pass left gradients that are not finite, and all that optimizers took is."""
    left = (values for call in step_view.left_by_passes for values in call.slots.values())
    if not any((values.nonfinite > 0).any() for values in left):
        return False
    taken = [*step_view.gradients()]
    return bool(taken) and not any((values.nonfinite > 0).any() for values in taken)


def _spoiled(step_view: StepView) -> Iterator[tuple[SlotValues, Array]]:
    """Yield every value with the positions of the ranks on which it is not finite."""
    gradients = step_view.values(Phase.GRADS)
    is_skipped = any((values.flags & int(ValueFlag.SKIPPED)).any() for values in gradients)
    is_thrown_away = _is_pass_thrown_away(step_view)
    masks: list[tuple[SlotValues, Array]] = []
    finite: set[tuple[str, str]] = set()
    for values in step_view.values(*Phase):
        if values.slot.startswith("scaler:") or (is_skipped and _is_of_gradients(values)):
            continue
        if is_thrown_away and values.call.phase in (Phase.BACKWARD, Phase.COLLECTIVE):
            continue
        is_bad = values.nonfinite > 0
        is_low = values.is_known & (values.column("neginf") > 0)
        if is_bad.any() and values.call.phase is Phase.COLLECTIVE:
            is_overwritten = np.isin(values.ranks, _receivers(values))
            is_bad, is_low = is_bad & ~is_overwritten, is_low & ~is_overwritten
        if is_bad.any():
            yield values, np.flatnonzero(is_bad | is_low)
        elif is_low.any():
            masks.append((values, np.flatnonzero(is_low)))
        if (values.is_known & ~is_low).any():
            finite.add((values.call.path, values.slot))
    for values, places in masks:
        if (values.call.path, values.slot) in finite:
            yield values, places


def _receivers(values: SlotValues) -> list[int]:
    """Return the ranks on which an input of a collective is only what its output overwrites."""
    if not is_input(values.slot, values.call.phase):
        return []
    broadcasts = (issue for issue in issues_in(values.call) if issue.op == "broadcast")
    return [r for issue in broadcasts for r in issue.ranks.tolist() if r != issue.facts.get("src")]


def _is_of_gradients(values: SlotValues) -> bool:
    """True for gradients, and for values of a collective that backward or an optimizer issued."""
    issuers = {facts.get("issuer") for _, facts in values.call.node.collectives}
    return values.call.phase in _GRADIENTS or not issuers.isdisjoint(("backward", "optimizer"))


def _first_by_rank(spoiled: list[tuple[SlotValues, Array]]) -> dict[int, _First]:
    first: dict[int, _First] = {}
    for values, places in spoiled:
        ranks = values.ranks[places]
        for rank, time_ns in zip(ranks.tolist(), values.times(ranks).tolist()):
            if rank not in first or time_ns < first[rank][0]:
                first[rank] = (time_ns, values)
    return first


def _level(values: SlotValues) -> int:
    """Return how surely it began here: _MADE, _HOOKED or _CAUGHT."""
    phase = values.call.phase
    if phase is Phase.SETUP:
        return _MADE
    if phase is Phase.COLLECTIVE or not is_output(values.slot, phase):
        return _CAUGHT
    return _HOOKED if values.slot.startswith("returned") else _MADE


def _caught(
    spoiled: list[tuple[SlotValues, Array]],
    first: dict[int, _First],
    origins: dict[int, SlotValues],
) -> list[str]:
    """Return the collective through which other ranks caught it, else the value they first have."""
    ways: dict[str, None] = {}
    for values, places in spoiled:
        call = values.call
        if call.phase is Phase.COLLECTIVE and values.slot.startswith("output"):
            entered = {
                rank
                for value, at in spoiled
                if value.call is call and is_input(value.slot, call.phase)
                for rank in value.ranks[at].tolist()
            }
            late = [rank for rank in values.ranks[places].tolist() if rank not in entered]
            if late and entered:
                place = f"{call.path or '(root)'}:collective.{call.ordinal}"
                ways[f"{place} ({ranks_named(late)})"] = None
    later = [(time_ns, rank) for rank, (time_ns, _) in first.items() if rank not in origins]
    if later and not ways:
        _, rank = min(later)
        _, values = first[rank]
        ways[f"{values.name} ({ranks_named([rank])}, {values.call.phase.word})"] = None
    return list(ways)[:4]
