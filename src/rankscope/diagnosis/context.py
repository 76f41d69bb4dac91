"""What rules are given and what they hand out: a step with what is known beyond it (the job, its
layouts, earlier steps), and faulty places. None of it changes, but for what `Coverage` counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields
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
    reduced_and_changed,
    taken_gradients,
)
from rankscope.diagnosis.evidence.reducedpasses import (
    PassCount,
    PassesApart,
    UnlikePasses,
    passes_in,
    unlike_passes,
)
from rankscope.diagnosis.evidence.replicas import (
    DDP,
    ComparedReplicas,
    InferredReplicas,
    Layouts,
    ReplicaProofs,
    compared_replicas,
)
from rankscope.diagnosis.evidence.stepview import (
    Array,
    CallView,
    ParameterCall,
    SlotValues,
    StepView,
    positions,
)
from rankscope.record.call import Mode
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
    """Called when the finding is written: of thousands of victims most are written without."""
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
    def first_ns(self) -> int:
        """When it was first seen; 0 where no rank was recorded."""
        return int(self.times_ns.min()) if len(self.times_ns) else 0


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
    """Return a candidate in a call, or at `path`, when its members (default: ranks) began it."""
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
        ranks=tuple(sorted(set(np.asarray(ranks).tolist()))),
        members=members,
        times_ns=call.times(members) if times_ns is None else times_ns,
        message=message,
        advice=advice,
        severity=severity,
        make_evidence=evidence,
        **more,
    )


class Left(NamedTuple):
    """A parameter as a step left it on each of its ranks."""

    ranks: Array
    counts: Array
    squares: Array
    sketches: Array | None
    begun: Array | None = None
    """Sketches of what it was at setup."""
    keys: tuple[tuple[str, str], ...] = ()
    """(path, slot) of the parameter, or of all in a flat tensor."""


class Latest(NamedTuple):
    """A parameter as it was last seen on each of its ranks."""

    ranks: Array
    hashes: Array
    sketches: Array

    def updated_by(self, latest: Latest) -> Latest:
        """Return what ranks hold once some of them were seen again: what one rank's optimizer holds
        and another's does not is read at two places of a step."""
        is_older = ~np.isin(self.ranks, latest.ranks)
        if not is_older.any():
            return latest
        ranks, hashes, sketches = (
            np.concatenate([old[is_older], new]) for old, new in zip(self, latest)
        )
        order = np.argsort(ranks, kind="stable")
        return Latest(ranks[order], hashes[order], sketches[order])


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
        at, before = positions(self.ranks, members), positions(self.ranks_before, members)
        if (at < 0).any() or (before < 0).any():
            return "unknown"
        now = self.hashes[at]
        if (now != now[0]).any():
            return "apart"
        return "stayed" if (now == self.hashes_before[before]).any() else "alike"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class History:
    """What setup and earlier steps of one incarnation say, for the rules of a step; `history.py`
    makes the next one behind them."""

    replicas: InferredReplicas
    """With the stages that the step itself shows."""
    data_lines: Mapping[str, tuple[Array, ...]]
    proofs: ReplicaProofs
    setup: JudgedStep | None = None
    """None once all of `undecided` is decided."""
    undecided: Mapping[ParameterCall, SlotValues] | None = None
    """{((path, name), call): a parameter that differed at setup}, until a gradient says whether it
    is a replica; None before the first optimizer step."""
    told: frozenset[str] = frozenset()
    """`once` of the candidates."""
    is_spoiled: bool = False
    """A value had become NaN or infinite."""
    rounded: frozenset[tuple[str, str]] = frozenset()
    """Parameters whose replicas' gradients differed by rounding: so may the parameters."""
    begins_late: bool = True
    """True until the first train step was seen: the trace begins later than the training."""
    stepped: frozenset[int] = frozenset()
    steppers: Mapping[str, frozenset[int]] = field(default_factory=dict)
    uneven: Mapping[int, Mapping[str, Set[int]]] = field(default_factory=dict)
    """{step: {root: ranks that stepped it}}, of steps in which not all ranks stepped the same"""
    ahead: Mapping[int, int] = field(default_factory=dict)
    """{rank: backward passes that its steps are ahead of the others'}"""
    other_passes: Mapping[int, PassesApart] = field(default_factory=dict)
    """{step in which steps of one number are other passes}"""
    reduced_early: frozenset[int] = frozenset()
    """Steps in which gradients were averaged before those of the last backward pass were added."""
    apart: frozenset[int] = frozenset()
    """Steps in which an optimizer stepped with no gradient that was the same on all ranks."""
    together: frozenset[int] = frozenset()
    averages: tuple[int, ...] = ()
    averaged: frozenset[tuple[str, str]] = frozenset()
    """(path, slot) of parameters that an average was made of."""
    trained: frozenset[tuple[str, str]] = frozenset()
    """(path, slot) of parameters that an optimizer took a gradient of."""
    is_exchanging: bool = False
    """Numbers of more than one element went from rank to rank."""
    begun: Mapping[tuple[str, str], Latest] = field(default_factory=dict)
    """`parameters` before the first optimizer step."""
    unlike: Sequence[Left] = ()
    """Parameters that the latest step left different, then those of each root as one tensor."""
    left: tuple[Sequence[Left], ...] = ()
    """`unlike` of the last steps: ranks may be steps apart."""
    handed: frozenset[int] = frozenset()
    updates: Mapping[tuple[str, str], Mapping[int, ParameterUpdate]] = field(default_factory=dict)
    """{(path, name): {step: what became of it}}, of the steps in `apart` and those behind them."""
    parameters: Mapping[tuple[str, str], Latest] = field(default_factory=dict)
    even: frozenset[int] = frozenset()
    """Train steps behind which all ranks hold the same finite parameters and buffers, `SETUP_STEP`
    among them: nothing that was unlike before is left."""

    @property
    def data_parallel_lines(self) -> list[Array]:
        """The ranks of `data_lines`, whatever says so."""
        return [line for lines in self.data_lines.values() for line in lines]


_OF_PASSES: Final = frozenset({Phase.SETUP, Phase.FORWARD, Phase.BACKWARD, Phase.GRADS})
"""What tells how many passes an optimizer stepped after."""
SETUP_STEP: Final = -1
"""Stands before the first step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckContext:
    """One trace that is checked."""

    layouts: Layouts
    coverage: Coverage
    evidence: frozenset[Evidence]
    hosts: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, eq=False, kw_only=True)
class JudgedStep(StepView):
    """The evidence of one step: what takes work is computed once a rule asks for it, from what
    stands above it here alone."""

    context: CheckContext
    life: History

    @cached_property
    def roots(self) -> list[CallView]:
        """None where roots are not recorded: what stands outermost then is a module inside."""
        return super().roots if EvidenceScope.ROOTS in self.context.evidence else []

    @cached_property
    def evidence(self) -> frozenset[Evidence]:
        """What this step holds."""
        values = (values for call in self.roots for values in (*call.inputs, *call.outputs))
        is_whole = all(root_values.is_known.all() for root_values in values)
        return self.context.evidence - (frozenset() if is_whole else {EvidenceScope.DIGESTS})

    def lacks(self, needs: Set[Evidence], asks: str, example: str = "") -> bool:
        """True where the step lacks what a rule needs: the report says what was not asked."""
        lacking = needs - self.evidence
        if lacking:
            self.context.coverage.not_asked(asks, lacking, example)
        return bool(lacking)

    @cached_property
    def compared_replicas(self) -> ComparedReplicas:
        """Replicas of all values but those of collectives, compared; none of other passes."""
        life, misaligned = self.life, self.passes_apart
        compared = compared_replicas(self, self.context.layouts, life.replicas, life.proofs)
        if misaligned is None:
            return compared
        level = [
            entry
            for entry in compared.values
            if not any(
                misaligned.parts(entry[0].call.phase, entry[0].call.micro_batch, group)
                for group in entry[1].groups
            )
        ]
        return compared._replace(values=level)

    @cached_property
    def rounded_gradients(self) -> frozenset[tuple[str, str]]:
        """(path, name) of parameters whose replicas' gradients differ by rounding alone."""
        return frozenset(
            values.parameter
            for values, _, groups, _ in self.compared_replicas.values
            if groups and values.call.phase is Phase.GRADS and is_within_rounding(values, groups)
        )

    @cached_property
    def taken_gradients(self) -> list[list[TakenGradient]]:
        """The gradients of each optimizer step for which a pass is recorded."""
        return list(taken_gradients(self))

    @cached_property
    def ddp_passes(self) -> Mapping[str, Mapping[int, PassCount]]:
        """{path of a model that DDP wraps: {rank: its passes in this step}}."""
        return passes_in(self)

    @cached_property
    def unlike_passes(self) -> list[UnlikePasses]:
        """Models that ranks stepped after unlike numbers of passes."""
        if self.mode is not Mode.TRAIN or not self.evidence >= _OF_PASSES:
            return []
        lines = self.life.data_lines.get(DDP, ())
        return list(unlike_passes(self, self.ddp_passes, lines, self.lines))

    @cached_property
    def ahead(self) -> dict[int, int]:
        """`life.ahead` behind this step."""
        ahead = dict(self.life.ahead)
        for _, line, counts, _ in {u.line.tobytes(): u for u in self.unlike_passes}.values():
            totals = {rank: counts[rank] + ahead.get(rank, 0) for rank in line.tolist()}
            least = min(totals.values())
            ahead |= {rank: total - least for rank, total in totals.items()}
        return {rank: passes for rank, passes in ahead.items() if passes}

    @cached_property
    def passes_apart(self) -> PassesApart | None:
        """What of this step is of other passes on some ranks; None for nothing."""
        if self.life.ahead and self.mode is Mode.TRAIN:
            return PassesApart(0, self.life.ahead)
        counts = [count for unlike in self.unlike_passes for count in unlike.counts.values()]
        return PassesApart(min(counts), self.ahead) if counts else None

    @cached_property
    def mixtures(self) -> list[tuple[list[TakenGradient], Mixture]]:
        """What the gradients of optimizer steps are made of that were wiped between passes."""
        events = filter(None, map(gathered_apart, self.taken_gradients))
        mixed = ((event, mixture_of(event, self.life.replicas.lines)) for event in events)
        return [(event, mixture) for event, mixture in mixed if mixture is not None]

    @cached_property
    def reduced_and_changed(self) -> frozenset[int]:
        """Identities of gradients that were reduced, and changed afterwards on each rank."""
        return frozenset(id(values) for values in reduced_and_changed(self.taken_gradients))

    @cached_property
    def lines(self) -> tuple[Array, ...]:
        """Ranks that hold the same of a model, each with rows of its own: a wrapper or an axis says
        so, or all parameters are plain and equal, or all gradients of the step (where a parameter
        began unlike), and what the model is given is not."""
        replicas = self.life.replicas
        equal = () if replicas.is_placed else replicas.lines
        unlike = (line for line in equal if not self.has_same_inputs(line))
        lines = (*self.life.data_parallel_lines, *unlike)
        gradients = [] if lines or replicas.is_placed else list(self.gradients())
        ranks = gradients[0].ranks if gradients else np.zeros(0, np.int64)
        is_reduced = len(ranks) > 1 and not self.has_same_inputs(ranks)
        is_reduced = is_reduced and any(not values.is_constant for values in gradients)
        if is_reduced and all(np.array_equal(v.ranks, ranks) and v.agree(ranks) for v in gradients):
            return (ranks,)
        return lines

    @cached_property
    def undecided_starts(self) -> Mapping[ParameterCall, SlotValues]:
        """Parameters that differed at setup and on which no step before has decided."""
        history = self.life
        if history.undecided is not None or history.setup is None:
            return history.undecided or {}
        return {
            values.parameter_call: values
            for values in history.setup.parameters(Phase.SETUP)
            if values.source == "unknown" and not values.is_constant
            if values.agree(values.ranks) is False and self.context.layouts.same(values) is None
            if not self.context.layouts.is_own(values)
        }

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


def judged_step(step_view: StepView, context: CheckContext, life: History) -> JudgedStep:
    """Return a step with what is known beyond it."""
    read = {column.name: getattr(step_view, column.name) for column in fields(StepView)}
    return JudgedStep(**read, context=context, life=life)
