"""`check`: one pass over a trace, every rule on every step, and the verdict."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from threading import Thread
from typing import Final

from rankscope.diagnosis.causes import Join, Messages, joins_of, made_report
from rankscope.diagnosis.context import Candidate, CheckContext, History, JudgedStep, judged_step
from rankscope.diagnosis.coverage import Coverage, Evidence, EvidenceScope, recorded_evidence
from rankscope.diagnosis.evidence.lastcalls import ORDERLY, ends_of
from rankscope.diagnosis.evidence.matchedcollectives import MatchedCollectives
from rankscope.diagnosis.evidence.reducedpasses import ReducedPasses
from rankscope.diagnosis.evidence.replicas import Layouts
from rankscope.diagnosis.evidence.stepview import StepView, grouped, step_view_of
from rankscope.diagnosis.evidence.trainedbatches import TrainedBatches
from rankscope.diagnosis.history import advanced, before
from rankscope.diagnosis.rules.accumulation import (
    carried_gradients,
    joined_gradients,
    lost_micro_batches,
    rescaled_shards,
)
from rankscope.diagnosis.rules.batches import (
    batches_of_a_mesh,
    duplicate_batches,
    mixed_up_micro_batches,
    other_batches,
    repeated_batches,
)
from rankscope.diagnosis.rules.buffers import (
    drifting_buffers,
    unlike_frozen_models,
    unlike_starts,
)
from rankscope.diagnosis.rules.collectives import (
    gradients_sent_elsewhere,
    mismatched_collectives,
    multiplying_sums,
    wrong_exchanges,
    wrong_messages,
)
from rankscope.diagnosis.rules.endings import MOST_STALLS, ended_badly
from rankscope.diagnosis.rules.equality import (
    at_innermost_taker,
    origins_of_gradients,
    unequal_replicas,
)
from rankscope.diagnosis.rules.nonfinite import nonfinite_origins
from rankscope.diagnosis.rules.parameterupdates import detached_by_collectives, parameters_left
from rankscope.diagnosis.rules.siblings import (
    changed_recomputations,
    lost_reductions,
    outvoted_outputs,
    scales_behind_gathers,
)
from rankscope.diagnosis.rules.startvalues import (
    equal_shards,
    lost_ties,
    other_weights,
    uninitialised_parameters,
)
from rankscope.diagnosis.rules.structure import (
    different_calls,
    different_kinds,
    layers_of_two_stages,
    left_out_steps,
    unlike_modes,
    unlike_passes,
)
from rankscope.diagnosis.unreduced import without_unreduced
from rankscope.layout.layoutfile import LayoutFile
from rankscope.record.finding import Report, Severity
from rankscope.record.phases import Phase
from rankscope.record.texts import ended_words
from rankscope.run.folders import Progress
from rankscope.tree.reader import TraceLike, opened_trace
from rankscope.tree.views import Step, Trace


@dataclass(frozen=True, slots=True)
class StepRule:
    """A function of a step, asked only where the trace holds what it needs."""

    judge: Callable[[JudgedStep], Iterable[Candidate]]
    asks: str
    """What is not judged where something lacks: a noun phrase."""
    needs: Set[Evidence] = frozenset()

    def __call__(self, step_view: JudgedStep) -> Iterator[Candidate]:
        """Yield what is wrong in a step; nothing where the trace lacks what the rule needs."""
        if not step_view.lacks(self.needs, self.asks):
            yield from self.judge(step_view)


_SETUP, _FORWARD, _RECOMPUTE = Phase.SETUP, Phase.FORWARD, Phase.RECOMPUTE
_GRADS, _PARAMS, _PASSES = Phase.GRADS, Phase.PARAMS, Phase.ACCUMULATED
_COLLECTIVES, _ROOTS = Phase.COLLECTIVE, EvidenceScope.ROOTS

STEP_RULES: Final[tuple[StepRule, ...]] = (
    StepRule(nonfinite_origins, "NaN and infinity"),
    StepRule(uninitialised_parameters, "parameters that nobody initialised", {_SETUP}),
    StepRule(unlike_starts, "buffers and frozen parameters that begin unlike", {_SETUP}),
    StepRule(unlike_frozen_models, "frozen models", {_SETUP, _FORWARD, _COLLECTIVES, _ROOTS}),
    StepRule(drifting_buffers, "buffers", {_SETUP, _FORWARD, _PARAMS, _COLLECTIVES, _ROOTS}),
    StepRule(equal_shards, "shards that begin equal", {_SETUP}),
    StepRule(carried_gradients, "gradients left over from the step before", {_GRADS}),
    StepRule(unequal_replicas, "replicas"),
    StepRule(lost_ties, "lost ties", {_SETUP, _GRADS}),
    StepRule(other_weights, "weights that begin unlike", {_SETUP, _FORWARD, _GRADS, _PARAMS}),
    StepRule(lost_reductions, "outputs that siblings replicate", {_FORWARD, _ROOTS}),
    StepRule(outvoted_outputs, "outputs that most replicas give", {_SETUP, _FORWARD, _ROOTS}),
    StepRule(scales_behind_gathers, "scales behind gathers", {_SETUP, _FORWARD, _COLLECTIVES}),
    StepRule(different_kinds, "dtypes, shapes and placements over ranks"),
    StepRule(different_calls, "modules that some ranks do not call", {_SETUP, _FORWARD, _ROOTS}),
    StepRule(unlike_passes, "passes before a step", {_SETUP, _FORWARD, Phase.BACKWARD, _GRADS}),
    StepRule(unlike_modes, "modules in eval mode", {_SETUP, _FORWARD, _ROOTS}),
    StepRule(left_out_steps, "steps left out", {_SETUP, _FORWARD, Phase.BACKWARD, _GRADS}),
    StepRule(layers_of_two_stages, "layers that two stages run", {_SETUP, _FORWARD, _ROOTS}),
    StepRule(mismatched_collectives, "collectives", {_COLLECTIVES}),
    StepRule(wrong_exchanges, "what collectives exchange", {_COLLECTIVES}),
    StepRule(
        gradients_sent_elsewhere,
        "gradients that go back to whoever sent a value",
        {_FORWARD, Phase.BACKWARD, _COLLECTIVES},
    ),
    StepRule(multiplying_sums, "sums in backward", {_SETUP, _COLLECTIVES}),
    StepRule(mixed_up_micro_batches, "micro-batches of stages", {_FORWARD, _ROOTS}),
    StepRule(changed_recomputations, "recomputations", {_FORWARD, _RECOMPUTE}),
    StepRule(parameters_left, "parameters that do not move", {_GRADS, _PARAMS}),
    StepRule(
        detached_by_collectives,
        "gradients that end at a collective",
        {_FORWARD, _GRADS, _PARAMS, _COLLECTIVES},
    ),
    StepRule(joined_gradients, "gradients of two parameters", {_GRADS, _PASSES}),
    StepRule(rescaled_shards, "gradients scaled by each rank", {_GRADS, _PASSES}),
    StepRule(lost_micro_batches, "lost micro-batches", {_FORWARD, _GRADS, _PASSES, _ROOTS}),
    StepRule(duplicate_batches, "batches that ranks have in common", {_FORWARD, _ROOTS}),
    StepRule(batches_of_a_mesh, "batches of ranks of a mesh", {_FORWARD, _ROOTS}),
    StepRule(
        other_batches,
        "batches of ranks that share a layer",
        {_SETUP, _FORWARD, _ROOTS, _COLLECTIVES},
    ),
)


_RULES_GROUP: Final = "rankscope.rules"
_MOST_RULE_S: Final = 10.0
"""So long a rule of another package may take for one step."""
EachStep = Callable[[StepView, CheckContext], None]
Rule = Callable[[JudgedStep], Iterable[Candidate]]
_LAST_STEPS: Final = 3
_MOST_LOOKED_AT: Final = 256
"""The same, where ranks that did not end in order made fewer steps."""


def check(
    trace: TraceLike,
    layouts: LayoutFile | None = None,
    *,
    progress: Progress | None = None,
    each_step: EachStep | None = None,
) -> Report:
    """Say what is wrong in a trace, without a reference.

    Args:
        trace: open, its folder, or what `with rankscope.trace(...)` gave.
        layouts: declared layouts, for values that no DTensor describes.
        progress: told how far it is.
        each_step: handed every setup and step once the rules have been through it, with what they
            judged of it (`context.coverage`); it keeps no step.

    Raises:
        LayoutError: the layout file is for another number of ranks, or contradicts itself.
        FolderError, TraceError: no trace is there, or a damaged one.
    """
    with opened_trace(trace) as read_trace:
        return _checked(read_trace, layouts, progress, each_step)


def _checked(
    trace: Trace, layouts: LayoutFile | None, progress: Progress | None, each_step: EachStep | None
) -> Report:
    context = CheckContext(
        layouts=Layouts(layouts, int(trace.run["world_size"])),
        coverage=Coverage(),
        evidence=recorded_evidence(trace.run.get("settings", {})),
        hosts={rank["rank"]: str(rank["host"]) for rank in trace.completeness["ranks"]},
    )
    coverage = context.coverage
    rules: tuple[Rule, ...] = (*STEP_RULES, *_installed_rules(coverage))
    steps = [*trace.setup, *trace.steps]
    candidates: list[Candidate] = []
    histories: dict[int, History] = {}
    messages, matched, passes = Messages(), MatchedCollectives(), ReducedPasses()
    batches = TrainedBatches()
    for number, step in enumerate(steps):
        if progress is not None:
            progress("checking", number / len(steps))
        read = step_view_of(step)
        step_view = judged_step(read, context, before(read, histories, context.layouts))
        seen = _judged(step_view, rules)
        histories[step_view.incarnation] = advanced(step_view, seen)
        candidates += seen
        messages.note(step_view, number)
        matched.note(step_view, number)
        passes.note(step_view.incarnation, step_view.ddp_passes)
        batches.note(step_view, number)
        replicas = step_view.life.replicas
        misaligned = step_view.passes_apart
        coverage.count(step_view, context.layouts, replicas, step_view.lines, misaligned)
        if each_step is not None:
            each_step(step_view, context)
        coverage.next_step()
    # steps in which something came that was not sent are read again: most traces have none
    wrong = grouped((m.received.step, m) for m in messages.paired() if m.is_other)
    for number, received in sorted(wrong.items()):
        candidates += wrong_messages(step_view_of(steps[number]), received)
    for number, cycles in grouped((cycle.number, cycle) for cycle in batches.cycles()).items():
        candidates += repeated_batches(step_view_of(steps[number]), cycles)
    candidates = without_unreduced(_settled(candidates, histories), histories, coverage)
    candidates = matched.judged(candidates, steps, ends_of(trace))
    final = [step_view_of(step) for step in _final(trace, steps)]
    candidates += ended_badly(trace, context, final, passes)
    now_ns = time.time_ns() if trace.is_live else None
    coverage.notes.extend(stall.sentence(now_ns) for stall in trace.stalls[-MOST_STALLS:])
    words = ended_words(trace.run)
    ended = f"the job was ended from outside: {words}" if words else ""
    for text in (trace.run.get("untested", ""), *trace.happened, trace.unread, ended):
        if text:
            coverage.note(text)
    joins: list[Join] = []
    if len(candidates) > 1:
        joins += messages.joins()
        for number, step in enumerate(steps):
            step_view = judged_step(step_view_of(step), context, histories[step.incarnation])
            joins += joins_of(step_view, functools.partial(matched.is_one, number))
    return made_report(trace, context, candidates, joins, histories)


def _judged(step_view: JudgedStep, rules: Iterable[Rule]) -> list[Candidate]:
    candidates = [
        candidate
        for rule in rules
        for candidate in rule(step_view)
        if candidate.unless_always or candidate.once not in step_view.life.told
    ]
    candidates = [at_innermost_taker(step_view, candidate) for candidate in candidates]
    return [*candidates, *origins_of_gradients(step_view, candidates)]


def _final(trace: Trace, steps: Sequence[Step]) -> list[Step]:
    """Return the last steps of a job that did not end in order: they say where its ranks stand."""

    def ranks_of(step: Step) -> set[int]:
        return {int(rank) for node in step.nodes for rank in node.ranks}

    behind = {rank for rank, end in ends_of(trace).items() if end not in ORDERLY}
    if not behind or not steps:
        return []
    incarnation = max(step.incarnation for step in steps)
    life = [step for step in steps if step.incarnation == incarnation]
    final = life[-_LAST_STEPS:]
    behind = behind.difference(*map(ranks_of, final))
    for step in life[-_LAST_STEPS - 1 : -_MOST_LOOKED_AT : -1] if behind else ():
        if ran := behind & ranks_of(step):  # one that others did not wait for may have ended early
            final.insert(0, step)
            behind -= ran
    return final


def _settled(
    candidates: Sequence[Candidate], histories: Mapping[int, History]
) -> Iterator[Candidate]:
    """Yield the candidates, with one warning for what would be a fault only if all steps had it."""
    steps = grouped(((c.incarnation, c.once), c.step) for c in candidates if c.unless_always)
    warned: set[tuple[int, str]] = set()
    for candidate in candidates:
        key = (candidate.incarnation, candidate.once)
        numbers = set(steps.get(key, ()))
        if not numbers or (len(numbers) > 1 and numbers == histories[key[0]].stepped):
            yield candidate
        elif key not in warned:
            warned.add(key)
            advice = candidate.unless_always or candidate.advice
            yield dataclasses.replace(candidate, severity=Severity.WARNING, advice=advice)


# ---- rules of other packages ---------------------------------------------------------------------


class InstalledRule:
    """A rule of another package: an entry point of the group `rankscope.rules` that names a
    `StepRule`; left out from its first trouble on."""

    def __init__(self, entry: EntryPoint, coverage: Coverage) -> None:
        """Load nothing yet: `coverage` is told what goes wrong."""
        self._entry, self._coverage = entry, coverage
        self._is_left_out = False

    def __call__(self, step_view: JudgedStep) -> list[Candidate]:
        """Return what the rule finds in a step; nothing once it raised or took too long."""
        if self._is_left_out:
            return []
        answers: list[list[Candidate]] = []
        trouble = f"took longer than {_MOST_RULE_S:g} s for one step"

        def judge() -> None:
            nonlocal trouble
            try:
                answers.append(_checked_candidates(self._entry.load()(step_view)))
            except Exception as error:  # noqa: BLE001  # not our code: any exception is a note
                trouble = f"failed with {type(error).__name__}: {error}"

        # A thread that never ends can be left behind: it ends with this process. Python has no
        # other way to leave a function that does not return.
        thread = Thread(target=judge, name=f"rule {self._entry.name}", daemon=True)
        thread.start()
        thread.join(_MOST_RULE_S)
        if answers:
            return answers[0]
        self._is_left_out = True
        package = self._entry.dist.name if self._entry.dist else self._entry.module
        self._coverage.note(
            f"the rule {self._entry.name!r} of the package {package} {trouble}; "
            "no step from there on is judged by it"
        )
        return []


def _installed_rules(coverage: Coverage) -> Iterator[Callable[[JudgedStep], Iterable[Candidate]]]:
    """Yield the rules of other packages, by name."""
    entries = {(entry.name, entry.value): entry for entry in entry_points(group=_RULES_GROUP)}
    for _, entry in sorted(entries.items()):
        yield InstalledRule(entry, coverage)


def _checked_candidates(candidates: Iterable[Candidate]) -> list[Candidate]:
    listed = list(candidates)
    for candidate in listed:
        if not isinstance(candidate, Candidate):
            raise TypeError(f"a rule yields candidates, not {type(candidate).__name__}")
    return listed
