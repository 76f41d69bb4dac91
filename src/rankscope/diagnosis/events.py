"""One event is one finding: what goes wrong in one way at several parameters, gradients or buffers
of one moment is told once, at the first of them, with how many of how many they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final, TypeVar

from rankscope.diagnosis.evidence.stepview import grouped
from rankscope.record.finding import Finding
from rankscope.record.phases import Phase
from rankscope.record.value import ValueFlag
from rankscope.tree.views import Trace

_NOUNS: Final = {"grad": "gradients", "param": "parameters", "buffer": "buffers"}
_ABSENT: Final = ValueFlag.ABSENT.name.lower()
_F = TypeVar("_F", bound=Finding)


def alike(findings: Iterable[_F]) -> Iterator[list[_F]]:
    """Yield findings that one sentence says, but for its numbers: of parameters, gradients or
    buffers of one moment on the same ranks; every other finding by itself."""
    yield from grouped((_sentence(finding), finding) for finding in findings).values()


def _sentence(finding: Finding) -> tuple[object, ...]:
    family, _, _ = finding.slot.partition(":")
    if family not in _NOUNS:
        return (id(finding),)
    moment = (finding.phase, finding.mode, finding.step, getattr(finding, "incarnation", 0))
    # a factor is what the finding says: other factors are other faults
    factor = finding.evidence.get("factor")
    said = finding.message.removeprefix(f"{finding.place}: ")
    said = re.sub(r"-?\d[\d.e+-]*", "#", re.sub(r" \([^()]*\)", "", said))
    kind = (finding.kind, finding.severity, finding.advice)
    return (family, moment, kind, finding.ranks, factor, said)


def told_once(trace: Trace, event: Sequence[Finding]) -> Finding:
    """Return the first finding of an event, which says how many of its kind the trace has."""
    first, family = event[0], event[0].slot.partition(":")[0]
    places = list(dict.fromkeys((finding.path, finding.slot) for finding in event))
    if len(places) == 1:
        return first
    names = [f"{path}.{slot.partition(':')[2]}".removeprefix(".") for path, slot in places]
    total = len(_places(trace, first).union(places))
    many = f"all {total}" if len(places) == total else f"{len(places)} of the {total}"
    when = "at setup" if first.phase is Phase.SETUP else "of this step"
    more = f"; the same kind of fault: {many} {_NOUNS[family]} {when}"
    evidence = {**first.evidence, "parameters": names}
    return replace(first, message=f"{first.message}{more}", evidence=evidence)


def _places(trace: Trace, finding: Finding) -> set[tuple[str, str]]:
    """Return (path, slot) of the parameters, gradients or buffers that the ranks of a finding have
    in its moment."""
    family = f"{finding.slot.partition(':')[0]}:"
    life = finding.evidence.get("incarnation", 0)
    is_setup = finding.phase is Phase.SETUP
    steps = trace.setup if is_setup else trace.steps
    return {
        (node.path, view.slot)
        for step in steps
        if step.incarnation == life
        if is_setup or (step.mode, step.step) == (finding.mode, finding.step)
        for node in step.passing()
        if node.phase is finding.phase
        for view in node.slots
        if view.slot.startswith(family) and not set(finding.ranks).isdisjoint(view.ranks)
        if any(_ABSENT not in piece.flags for piece in view.pieces)
    }
