"""What rules are given and what they hand out: a step with what is known beyond it (the job, its
layouts, what was seen before), and faulty places, before it is known which of them came first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np

from rankscope.diagnosis.coverage import Coverage, Evidence, EvidenceScope
from rankscope.diagnosis.evidence.distances import is_within_rounding
from rankscope.diagnosis.evidence.gradientpasses import (
    Mixture,
    TakenGradient,
    gathered_apart,
    mixture_of,
    taken_gradients,
)
from rankscope.diagnosis.evidence.replicas import (
    InferredReplicas,
    Layouts,
    Same,
    differing_groups,
)
from rankscope.diagnosis.evidence.stepview import (
    Array,
    CallView,
    ParameterCall,
    SlotValues,
    StepView,
    positions,
)
from rankscope.record.finding import Finding, Kind, Severity
from rankscope.record.phases import Phase


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Candidate(Finding):
    """A place where something is wrong, before it is known what came first: `message` lacks the
    place, and `advice` is "" where its kind and phase say what to look at."""

    is_origin: bool = False
    victims: int = 0
    incarnation: int
    members: Array
    times_ns: Array
    """Per member when it happened, on the member's own clock."""
    make_evidence: Callable[[], Mapping[str, Any]]
    """Called when the finding is written: most candidates are victims, which need none."""
    weight: int = 1
    priority: int = 0
    """Of two candidates at one place the lower is reported."""
    once: str = ""
    """Told of the first step of an incarnation alone: what it says, as later candidates have it."""
    unless_always: str = ""
    """Advice of the one warning that it becomes, unless every train step of the incarnation, of two
    at least, has a candidate with the same `once`; "" for what stands for itself."""

    @property
    def where(self) -> tuple[Any, ...]:
        """Incarnation, step, call and slot."""
        step = (self.incarnation, self.mode, self.step)
        return (*step, self.phase, self.path, self.micro_batch, self.slot)

    @property
    def place(self) -> str:
        """Path and slot, as people write them."""
        return f"{self.path or '(root)'}{f':{self.slot}' if self.slot else ''}"


def candidate_at(
    step_view: StepView,
    call: CallView,
    kind: Kind,
    slot: str,
    ranks: Array | tuple[int, ...] | list[int],
    message: str,
    *,
    members: Array | None = None,
    times_ns: Array | None = None,
    path: str | None = None,
    advice: str = "",
    severity: Severity = Severity.FAULT,
    evidence: Callable[[], Mapping[str, Any]] = dict,
    **more: Any,
) -> Candidate:
    """Return a candidate in a call, at `path` where it is to be looked for elsewhere, when its
    members (default: ranks) began that call."""
    members = np.asarray(ranks) if members is None else members
    return Candidate(
        kind=kind,
        phase=call.phase,
        mode=step_view.mode,
        step=step_view.step,
        incarnation=step_view.incarnation,
        micro_batch=call.micro_batch,
        path=call.path if path is None else path,
        slot=slot,
        ranks=tuple(sorted({int(rank) for rank in ranks})),
        members=members,
        times_ns=call.times(members) if times_ns is None else times_ns,
        message=message,
        advice=advice,
        severity=severity,
        make_evidence=evidence,
        **more,
    )


_STEPS_LEFT: Final = 8


class Left(NamedTuple):
    """A parameter as a step left it on each of its ranks."""

    ranks: Array
    counts: Array
    squares: Array
    sketches: Array | None
    """None of several parameters in one flat tensor."""
    begun: Array | None = None
    """Sketches of what it was at setup."""


class Latest(NamedTuple):
    """A parameter as it was last seen on each of its ranks."""

    ranks: Array
    hashes: Array
    sketches: Array


class DecidedStart(NamedTuple):
    """A parameter that differed at setup, in the first step whose gradient tells what it is."""

    begun: SlotValues
    gradient: SlotValues
    latest: SlotValues


@dataclass(frozen=True, slots=True)
class ParameterUpdate:
    """One parameter after a step and before it."""

    ranks: Array
    hashes: Array
    ranks_before: Array
    hashes_before: Array

    def of(self, members: Array) -> str:
        """Return what became of it on these ranks: "alike", "apart", "stayed", or "unknown"."""
        at, there = positions(self.ranks, members), positions(self.ranks_before, members)
        if (at < 0).any() or (there < 0).any():
            return "unknown"
        now = self.hashes[at]
        if (now != now[0]).any():
            return "apart"
        return "stayed" if (now == self.hashes_before[there]).any() else "alike"


@dataclass(slots=True, kw_only=True)
class IncarnationState:
    """What is known of one incarnation of a job, filled as its steps pass by."""

    replicas: InferredReplicas
    setup: JudgedStep | None = None
    """None once all of `undecided` is decided."""
    begins_late: bool = True
    """True until the first train step was seen: the trace begins later than the training."""
    undecided: dict[ParameterCall, SlotValues] | None = None
    """{((path, name), call): a parameter that differed at setup}, until a gradient says whether it
    is a replica; None before the first optimizer step."""
    data_lines: Mapping[str, tuple[Array, ...]]
    rounded: set[tuple[str, str]] = field(default_factory=set)
    """Parameters of which replicas' gradients differed by rounding: so may the parameters."""
    told: set[str] = field(default_factory=set)
    unlike: list[Left] = field(default_factory=list)
    """Parameters that the latest step left different, then those of each root as one tensor."""
    left: deque[list[Left]] = field(default_factory=lambda: deque(maxlen=_STEPS_LEFT))
    """`unlike` of the last steps: ranks may be steps apart."""
    handed: set[int] = field(default_factory=set)
    apart: set[int] = field(default_factory=set)
    """Steps in which an optimizer stepped with no gradient that was the same on all ranks."""
    together: set[int] = field(default_factory=set)
    reduced_early: set[int] = field(default_factory=set)
    """Steps in which gradients were averaged before those of the last backward pass were added."""
    stepped: set[int] = field(default_factory=set)
    steppers: dict[str, set[int]] = field(default_factory=dict)
    uneven: dict[int, dict[str, set[int]]] = field(default_factory=dict)
    """{step: {root: ranks that stepped it}}, of steps in which not all ranks stepped the same"""
    averages: list[int] = field(default_factory=list)
    updates: dict[tuple[str, str], dict[int, ParameterUpdate]] = field(default_factory=dict)
    """{(path, name): {step: what became of it}}, of the steps in `apart` and those behind them."""
    is_spoiled: bool = False
    parameters: dict[tuple[str, str], Latest] = field(default_factory=dict)
    begun: dict[tuple[str, str], Latest] = field(default_factory=dict)
    """`parameters` before the first optimizer step."""


@dataclass(slots=True, kw_only=True)
class CheckContext:
    """One trace that is checked."""

    layouts: Layouts
    coverage: Coverage
    evidence: frozenset[Evidence]
    hosts: Mapping[int, str] = field(default_factory=dict)
    incarnations: dict[int, IncarnationState] = field(default_factory=dict)

    def incarnation(self, incarnation: int) -> IncarnationState:
        """Return what is known of an incarnation."""
        if incarnation not in self.incarnations:
            self.begin(incarnation, None)
        return self.incarnations[incarnation]

    def begin(self, incarnation: int, setup: JudgedStep | None) -> None:
        """Forget what was known of an incarnation, but for its setup."""
        replicas = InferredReplicas(setup)
        lines = replicas.data_lines(self.layouts)
        self.incarnations[incarnation] = IncarnationState(
            replicas=replicas, setup=setup, data_lines=lines
        )


@dataclass(eq=False, kw_only=True)
class JudgedStep(StepView):
    """A step as rules are given it: with what is known beyond it."""

    context: CheckContext
    _compared: dict[int, list[tuple[Same, list[Array], bool]]] = field(default_factory=dict)

    @cached_property
    def roots(self) -> list[CallView]:
        """None where roots are not recorded: what stands outermost then is a module inside."""
        return super().roots if EvidenceScope.ROOTS in self.context.evidence else []

    @cached_property
    def evidence(self) -> frozenset[Evidence]:
        """What this step holds."""
        given = (values for call in self.roots for values in (*call.inputs, *call.outputs))
        is_whole = all(values.is_known.all() for values in given)
        return self.context.evidence - (frozenset() if is_whole else {EvidenceScope.DIGESTS})

    def lacks(self, needs: Set[Evidence], asks: str, example: str = "") -> bool:
        """True where the step lacks what a rule needs: the report says what was not asked."""
        lacking = needs - self.evidence
        if lacking:
            self.context.coverage.not_asked(asks, lacking, example)
        return bool(lacking)

    @cached_property
    def mixtures(self) -> list[tuple[list[TakenGradient], Mixture]]:
        """What the gradients of optimizer steps are made of that were wiped between passes."""
        apart = (gathered_apart(event) for event in taken_gradients(self))
        mixed = ((own, mixture_of(own, self.life.replicas.lines)) for own in apart if own)
        return [(own, mixture) for own, mixture in mixed if mixture is not None]

    def compared_replicas(self, values: SlotValues) -> list[tuple[Same, list[Array], bool]]:
        """Return the ranks that should hold the same of a value, by layout and then by inference,
        those groups of them that differ, and whether any could be compared."""
        if id(values) not in self._compared:
            self._compared[id(values)] = [
                (same, *differing_groups(values, same.groups)) for same in self._replicas_of(values)
            ]
        return self._compared[id(values)]

    def _replicas_of(self, values: SlotValues) -> Iterator[Same]:
        laid = self.context.layouts.same(values)
        if laid is not None and laid.groups:
            yield laid
        is_of_one_mesh = laid is not None and laid.source in ("dtensor", "marked")
        if (laid is None or is_of_one_mesh) and values.slot.startswith(("param:", "grad:")):
            inferred = self.life.replicas.same(values, self)
            if inferred is not None:
                yield inferred

    @cached_property
    def undecided_starts(self) -> Mapping[ParameterCall, SlotValues]:
        """Parameters that differed at setup and on which no step before has decided."""
        history = self.life
        if history.undecided is not None or history.setup is None:
            return history.undecided or {}
        return {
            values.parameter_call: values
            for values in history.setup.parameters(Phase.SETUP)
            if self._is_open(values)
        }

    def _is_open(self, values: SlotValues) -> bool:
        is_plain = values.source == "unknown" and not values.is_constant
        is_unlike = is_plain and values.agree(values.ranks) is False
        return is_unlike and self.context.layouts.same(values) is None

    @cached_property
    def decided_starts(self) -> Mapping[ParameterCall, DecidedStart]:
        """Those of them on which this step decides."""
        gradients = {values.parameter_call: values for values in self.values(Phase.GRADS)}
        after = {values.parameter_call: values for values in self.values(Phase.PARAMS)}
        return {
            key: DecidedStart(values, gradients[key], after[key])
            for key, values in (self.undecided_starts.items() if gradients else ())
            if key in gradients and key in after
            if gradients[key].source == "unknown" and not gradients[key].is_constant
        }

    @cached_property
    def rounded_gradients(self) -> set[tuple[str, str]]:
        """(path, name) of parameters whose replicas' gradients differ by rounding alone: so may
        the parameters behind the step."""
        return {
            values.parameter
            for values in self.values(Phase.GRADS)
            for _, groups, _ in self.compared_replicas(values)
            if groups and is_within_rounding(values, groups)
        }

    @property
    def life(self) -> IncarnationState:
        """What is known of its incarnation."""
        return self.context.incarnation(self.incarnation)

    def candidate(
        self,
        values: SlotValues,
        kind: Kind,
        ranks: Array | list[int],
        message: str,
        *,
        members: Array | None = None,
        **more: Any,
    ) -> Candidate:
        """Return a candidate in a value of the step, when its members (default: ranks) had it."""
        members = np.asarray(ranks) if members is None else members
        more |= {"members": members, "times_ns": values.times(members)}
        return candidate_at(self, values.call, kind, values.slot, ranks, message, **more)
