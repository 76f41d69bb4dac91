"""What rules are given and what they hand out: a step with what is known beyond it (the job, its
layouts, earlier steps), faulty places, and how much of a trace the rules could judge.

`--rs-phases`, `--rs-paths`, `--rs-slots` and `--rs-ranks` leave things out. A rule that needs what
was left out is silent, and the report says so: less evidence may cost a finding, never make one.
"""

from __future__ import annotations

import enum
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from rankscope.diagnosis.evidence.distances import is_within_rounding
from rankscope.diagnosis.evidence.gradientpasses import (
    Mixture,
    TakenGradient,
    gathered_apart,
    mixture_of,
    taken_gradients,
)
from rankscope.diagnosis.evidence.issuedcollectives import issues_of
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
    grouped,
    positions,
    sibling_path,
)
from rankscope.globs import glob_matches
from rankscope.record.call import Mode
from rankscope.record.finding import MOST_NAMED, Finding, Kind, Severity
from rankscope.record.phases import Phase
from rankscope.record.ranks import ranks_named
from rankscope.tree.summary import counted

# ---- how much could be judged --------------------------------------------------------------------


class EvidenceScope(enum.Enum):
    """What a trace may lack in every phase, with the setting that asks for it."""

    ROOTS = "root modules", "paths"
    SLOTS = "every slot", "slots"
    RANKS = "every rank", "ranks"
    DIGESTS = "digests of root modules on every rank", ""
    """No setting asks for less: a rank was killed, or a value came too late."""

    def __init__(self, word: str, setting: str) -> None:
        self.word = word
        self.setting = setting
        """As in `--rs-paths`; "" for none."""


Evidence: TypeAlias = Phase | EvidenceScope
_ALL: Final[tuple[Evidence, ...]] = (*Phase, *EvidenceScope)
_DEFAULTS: Final = {"phases": "all", "paths": "*", "slots": "*", "ranks": "all"}


def recorded_evidence(settings: Mapping[str, str]) -> frozenset[Evidence]:
    """Return what a job with these settings (`run.settings` of a trace) records."""
    chosen = {name: settings.get(name) or default for name, default in _DEFAULTS.items()}
    phases = chosen["phases"].split(",")
    lacking: set[Evidence] = set()
    if chosen["phases"] != "all":
        lacking.update(phase for phase in Phase if phase.word not in phases)
    if not any(glob_matches(glob.strip(), "") for glob in chosen["paths"].split(",")):
        lacking.add(EvidenceScope.ROOTS)
    if chosen["slots"] != "*":
        lacking.add(EvidenceScope.SLOTS)
    if chosen["ranks"] != "all":
        lacking.add(EvidenceScope.RANKS)
    return frozenset(_ALL) - lacking


def lacking_words(lacking: Collection[Evidence]) -> str:
    """Return what is lacking, with its settings: "backward, params (--rs-phases)"."""
    words_by_setting = grouped(
        ("phases" if isinstance(evidence, Phase) else evidence.setting, evidence.word)
        for evidence in _ALL
        if evidence in lacking
    )
    return "; ".join(
        f"{', '.join(words)}{f' (--rs-{name})' if name else ''}"
        for name, words in words_by_setting.items()
    )


_MOST_UNJUDGED: Final = 8
_MOST_ASKS: Final = 5
_ACTIVATIONS: Final = Phase.having(lambda facts: facts.is_activation)


@dataclass(slots=True)
class Coverage:
    """How many values rules were applied to, and why they were not to others."""

    compared: int = 0
    with_others: int = 0
    """Those of `compared` that were held to what another rank has, or another run of the call."""
    recorded: int = 0
    undeclared: int = 0
    """Those of `compared` that several ranks hold, in a layout that nothing describes, and that
    were held to no others."""
    undeclared_names: dict[str, None] = field(default_factory=dict)
    is_any_inside: bool = False
    skipped: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    _not_asked: dict[str, str] = field(default_factory=dict)
    """{what rules ask that the trace cannot tell: the first place where it matters, "" for none}"""
    _not_recorded: set[Evidence] = field(default_factory=set)
    _lacking: defaultdict[tuple[str, str], Counter[int]] = field(
        default_factory=lambda: defaultdict(Counter)
    )
    """{(what it is of, the unknown fact): how often on each rank, or of each step}"""
    _seen: set[int] = field(default_factory=set)
    _looked_at: set[int] = field(default_factory=set)

    def applied(self, *compared: SlotValues) -> None:
        """Count values that were held to others, once; without finite elements as screened."""
        for values in compared:
            self.screened(values)
            if id(values) not in self._seen and not values.is_all_nonfinite:
                self._seen.add(id(values))
                self.with_others += 1

    def screened(self, values: SlotValues) -> None:
        """Count a value that a rule looked at by itself."""
        if id(values) not in self._looked_at:
            self._looked_at.add(id(values))
            self.compared += 1

    def was_held(self, values: SlotValues) -> bool:
        """True for a value of this step that was held to others."""
        return id(values) in self._seen

    def next_step(self) -> None:
        """Forget which values were counted: they go with their step."""
        self._seen.clear()
        self._looked_at.clear()

    def count(self, step_view: StepView, layouts: Layouts, lines: Sequence[Array]) -> None:
        """Count the values of a step behind its rules; ranks of an `apart` line have other data."""
        if step_view.mode is Mode.UNKNOWN:
            self._lacking["step", "mode"][step_view.step] += 1
        for issue in issues_of(step_view):
            if issue.lacks:
                noun = "message" if issue.is_message else "collective"
                self._lacking[noun, issue.lacks].update(issue.ranks.tolist())
        for call in step_view.calls:
            for values in call.slots.values():
                if values.dtype == "python":
                    continue
                self.recorded += 1
                self.is_any_inside |= bool(call.path)
                if len(values.ranks) > 1 and id(values) not in self._seen:
                    self._count_skipped(values, layouts, lines)

    def _count_skipped(self, values: SlotValues, layouts: Layouts, lines: Sequence[Array]) -> None:
        if values.is_all_nonfinite:
            self.skipped["no finite element on any rank"] += 1
            return
        path, slot = values.call.path, values.slot
        is_undeclared = values.source == "unknown" and not layouts.placements(path, slot)
        reason = "layout unknown" if is_undeclared else "held once"
        if layouts.is_own(values):
            is_undeclared, reason = False, "each rank's own, as declared"
        # no layout could make one tensor of activations of data-parallel ranks
        is_activation = is_undeclared and values.call.phase in _ACTIVATIONS
        if is_activation and any(np.isin(values.ranks, line).all() for line in lines):
            is_undeclared, reason = False, "other data on each rank"
        self.skipped[reason if values.is_known.any() else "not digested"] += 1
        if is_undeclared and id(values) in self._looked_at:
            self.undeclared += 1
            if len(self.undeclared_names) <= MOST_NAMED:
                self.undeclared_names[f"{sibling_path(path) or '(root)'}:{slot}"] = None

    def not_asked(self, asks: str, lacking: Set[Evidence], example: str) -> None:
        """Keep what was not judged, why, and the first place where it matters."""
        self._not_asked.setdefault(asks, example)
        self._not_recorded |= lacking

    def unjudged(self) -> Iterator[str]:
        """Yield a line for what the trace was not asked to hold, and for every unknown fact."""
        if self._not_asked:
            listed = [f"{asks} ({place})" for asks, place in self._not_asked.items() if place]
            listed += [asks for asks, place in self._not_asked.items() if not place]
            more = f", {len(listed) - _MOST_ASKS} more" if len(listed) > _MOST_ASKS else ""
            asks = ", ".join(listed[:_MOST_ASKS])
            yield f"not judged without {lacking_words(self._not_recorded)}: {asks}{more}"
        for (noun, fact), of in [*self._lacking.items()][:_MOST_UNJUDGED]:
            unjudged = f"order of collectives, messages and hangs of {ranks_named(set(of))}"
            if noun == "step":
                unjudged = "batches that ranks have in common, and how many steps each rank took"
            times = counted(of.total(), noun)
            name = "names" if of.total() == 1 else "name"
            yield f"not judged: {unjudged}, because {times} {name} no {fact}"

    def note(self, text: str) -> None:
        """Keep a remark, once."""
        if text not in self.notes:
            self.notes.append(text)


# ---- what rules are given ------------------------------------------------------------------------


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
    def first_ns(self) -> int:
        """When it was first seen; 0 where no rank was recorded."""
        return int(self.times_ns.min()) if len(self.times_ns) else 0

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
    begun: Array | None = None
    """Sketches of what it was at setup."""
    keys: tuple[tuple[str, str], ...] = ()
    """(path, slot) of the parameter, or of all in a flat tensor."""


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
        at, before = positions(self.ranks, members), positions(self.ranks_before, members)
        if (at < 0).any() or (before < 0).any():
            return "unknown"
        now = self.hashes[at]
        if (now != now[0]).any():
            return "apart"
        return "stayed" if (now == self.hashes_before[before]).any() else "alike"


@dataclass(slots=True, kw_only=True)
class IncarnationState:
    """The state of one incarnation of a job, filled as its steps pass by."""

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
    """Parameters whose replicas' gradients differed by rounding: so may the parameters."""
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
    averaged: set[tuple[str, str]] = field(default_factory=set)
    """(path, slot) of parameters that an average was made of."""
    trained: set[tuple[str, str]] = field(default_factory=set)
    """(path, slot) of parameters that an optimizer took a gradient of."""
    is_exchanging: bool = False
    """Numbers of more than one element went from rank to rank."""
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
        """Return the state of an incarnation."""
        if incarnation not in self.incarnations:
            self.begin(incarnation, None)
        return self.incarnations[incarnation]

    def begin(self, incarnation: int, setup: JudgedStep | None) -> None:
        """Begin the state of an incarnation with its setup."""
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
    def mixtures(self) -> list[tuple[list[TakenGradient], Mixture]]:
        """What the gradients of optimizer steps are made of that were wiped between passes."""
        events = filter(None, map(gathered_apart, taken_gradients(self)))
        mixed = ((event, mixture_of(event, self.life.replicas.lines)) for event in events)
        return [(event, mixture) for event, mixture in mixed if mixture is not None]

    def compared_replicas(self, values: SlotValues) -> list[tuple[Same, list[Array], bool]]:
        """Return the ranks that should hold the same of a value, by layout and then by inference,
        those groups of them that differ, and whether any could be compared."""
        if self.context.layouts.is_own(values):
            return []
        if id(values) not in self._compared:
            placed, inferred = self.context.layouts.same(values), None
            is_of_one_mesh = placed is None or placed.source in ("dtensor", "marked")
            if is_of_one_mesh and values.slot.startswith(("param:", "grad:")):
                inferred = self.life.replicas.same(values, self)
            self._compared[id(values)] = [
                (replicas, *differing_groups(values, replicas.groups))
                for replicas in (placed, inferred)
                if replicas is not None and replicas.groups
            ]
        return self._compared[id(values)]

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

    @cached_property
    def rounded_gradients(self) -> set[tuple[str, str]]:
        """(path, name) of parameters whose replicas' gradients differ by rounding alone."""
        return {
            values.parameter
            for values in self.values(Phase.GRADS)
            for _, groups, _ in self.compared_replicas(values)
            if groups and is_within_rounding(values, groups)
        }

    @property
    def life(self) -> IncarnationState:
        """The state of its incarnation."""
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
