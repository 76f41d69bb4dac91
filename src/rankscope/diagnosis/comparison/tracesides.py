"""The two traces that are held to each other, and which of their steps stand beside each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rankscope.diagnosis.comparison.alignment import COMPARED, FORWARDS, AlignedStep, PathMap, align
from rankscope.diagnosis.comparison.datasamples import (
    Batches,
    data_places,
    match_samples,
    places_by_inputs,
    samples_of_step,
    stages_of,
)
from rankscope.diagnosis.comparison.wholevalues import (
    LostRanks,
    TokenWholes,
    WholeValues,
    token_counts,
)
from rankscope.diagnosis.evidence.replicas import Layouts
from rankscope.diagnosis.evidence.stepview import Array, CallView, StepView, step_view_of
from rankscope.layout.layoutfile import LayoutFile
from rankscope.record.call import Mode
from rankscope.tree.reader import TraceLike, opened_trace
from rankscope.tree.tensors.proofs import cut_dtensors
from rankscope.tree.views import Step, Trace, number_setting

StepKey = tuple[Mode, int]


@contextmanager
def two_sides(
    ref: TraceLike, test: TraceLike, layouts: LayoutFile | None
) -> Iterator[tuple[TraceSide, TraceSide]]:
    """Open both traces, or golden files; closed at the end as `opened_trace` says."""
    with opened_trace(ref, takes_golden=True) as one, opened_trace(test, takes_golden=True) as two:
        yield TraceSide(one, layouts, "REF"), TraceSide(two, layouts, "TEST")


class TraceSide:
    """The last life of one trace; `name` is what people call it, REF or TEST."""

    def __init__(self, trace: Trace, layouts: LayoutFile | None, name: str) -> None:
        self.trace, self.name = trace, name
        self.world = int(trace.run["world_size"])
        fits = layouts is not None and self.world in (1, layouts.size)
        self.layouts = Layouts(layouts if fits else None, self.world)
        self.printed_digits = number_setting(trace, "printed-digits", "[0-9]{1,2}")
        """Behind the point, of statistics that a debugger printed; 0 where none were printed."""
        every = (*trace.setup, *trace.steps)
        incarnation = max((step.incarnation for step in every), default=0)
        self.lost = LostRanks(trace, incarnation)
        own = [step for step in trace.setup if step.incarnation == incarnation]
        self.setup: StepView | None = step_view_of(own[0]) if own else None
        began = [call.node for call in self.setup.calls] if self.setup else []
        is_any_cut = any(True for _ in cut_dtensors(began))
        self.wholes = WholeValues(self.layouts, self.lost, has_cut_dtensors=is_any_cut)
        self._stages = stages_of(self.setup, self.world, self.layouts.mesh)
        self.stages = np.full(self.world, -1)
        """[world] the number of each rank's stage, -1 for ranks without a parameter: modules of one
        name that stages of a pipeline call are different ones."""
        for number, stage in enumerate(self._stages):
            self.stages[stage.ranks] = number
        self.steps: dict[StepKey, Step] = {
            (step.mode, step.step): step for step in trace.steps if step.incarnation == incarnation
        }

    def is_late(self, call: CallView) -> bool:
        """True for a call of setup behind the first training step: steps made what it has, as of a
        moving average of weights that is first called then."""
        first = next((step for (mode, _), step in self.steps.items() if mode is Mode.TRAIN), None)
        ended = max((n.time.start_us for n in first.fresh()), default=0.0) if first else 0.0
        return 0.0 < ended < call.node.time.start_us

    def view(self, keys: Sequence[StepKey]) -> StepView:
        """Read one step, or several as one in which each is a micro-batch."""
        found = step_view_of(self.steps[keys[0]])
        for index, key in enumerate(keys[1:], 1):
            more = step_view_of(self.steps[key])
            for call in more.calls:
                call.micro_batch = index
            found.calls += more.calls
        return found

    def wholes_of(self, keys: Sequence[StepKey], step_view: StepView) -> WholeValues:
        """Return what composes the values of steps that are read as one."""
        if len(keys) == 1:
            return self.wholes
        # each call is a step of its own: a proof of every one would cost more than it tells
        return TokenWholes(self.layouts, self.lost, token_counts(step_view))

    def tokens(self, key: StepKey) -> int | None:
        """Return the tokens of a sample in a step's first call; None where nothing tells them."""
        return next(iter(token_counts(self.view((key,)))), None)

    def places(self, step_view: StepView) -> Array:
        """Return [world] the data-parallel place of every rank."""
        return data_places(self._stages, self.setup, step_view, self.world)

    def can_place(self, step_view: StepView) -> bool:
        """True where the trace holds what tells the places of ranks: parameters at setup, and what
        a root was handed."""
        roots = (call for call in step_view.calls if call.parent is None and call.path == "")
        return bool(self._stages) and any(any(True for _ in call.inputs) for call in roots)

    def is_same_program(self, other: TraceSide) -> bool:
        """True where both jobs are one program on as many ranks and the same meshes."""
        own, theirs = self.trace.run, other.trace.run
        is_one = own.get("argv", ())[:1] == theirs.get("argv", ())[:1]
        return is_one and all(own[name] == theirs[name] for name in ("world_size", "meshes"))


# ---- steps beside each other ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepPair:
    """Steps that are compared with each other: one on each side, or calls that make one."""

    ref: tuple[StepKey, ...]
    test: tuple[StepKey, ...]

    @property
    def is_of_forwards(self) -> bool:
        """True where no more than forwards can be compared."""
        return self.ref != self.test


class PairedStep:
    """The values of a pair of steps, or of both setups where there is no pair."""

    def __init__(
        self, sides: tuple[TraceSide, TraceSide], paths: PathMap, pair: StepPair | None
    ) -> None:
        self._sides, self._paths, self.pair = sides, paths, pair
        ref, test = sides
        if pair is None:
            assert ref.setup is not None and test.setup is not None
            self.ref, self.test = ref.setup, test.setup
        else:
            self.ref, self.test = ref.view(pair.ref), test.view(pair.test)

    @cached_property
    def aligned(self) -> AlignedStep:
        """Which values belong together."""
        is_of_forwards = self.pair is not None and self.pair.is_of_forwards
        return align(self.ref, self.test, self._paths, FORWARDS if is_of_forwards else COMPARED)

    @cached_property
    def wholes(self) -> tuple[WholeValues, WholeValues]:
        """What composes the values of the reference and of the test."""
        ref, test = self._sides
        if self.pair is None:
            return ref.wholes, test.wholes
        return ref.wholes_of(self.pair.ref, self.ref), test.wholes_of(self.pair.test, self.test)

    @property
    def is_joined(self) -> bool:
        """True where several steps of a side are read as one."""
        return self.pair is not None and len(self.pair.ref) + len(self.pair.test) > 2

    @cached_property
    def batches(self) -> Batches:
        """Who worked on which samples."""
        places = self._places()
        ref = samples_of_step(self.ref, places[0], self.wholes[0])
        batches = match_samples(ref, samples_of_step(self.test, places[1], self.wholes[1]))
        if not batches.lost or batches.test.place_count > 1:
            return batches
        # ranks may have been handed other batches though nothing shows them to be data-parallel
        test = self._sides[1]
        handed = places_by_inputs(self.test, test.world)
        found = match_samples(ref, samples_of_step(self.test, handed, test.wholes))
        is_better = found.lost < batches.lost and not found.unknown
        return found if is_better else batches

    def _places(self) -> list[Array]:
        """Return the places of the ranks on both sides. What a trace of fewer options does not tell
        the other one does, where both are of one program."""
        views = self.ref, self.test
        places = [side.places(view) for side, view in zip(self._sides, views)]
        can = [side.can_place(view) for side, view in zip(self._sides, views)]
        if can[0] != can[1] and self._sides[0].is_same_program(self._sides[1]):
            places[can.index(False)] = places[can.index(True)]
        return places

    @property
    def is_cut(self) -> bool:
        """True where a run broke off in the step before it had all samples."""
        if self.pair is None:
            return False
        keys = zip(self._sides, (self.pair.ref, self.pair.test))
        is_cut = any(side.lost.is_cut(*key) for side, own in keys for key in own)
        return is_cut and bool(self.batches.are_of_other_samples)


def paired_steps(ref: TraceSide, test: TraceSide) -> list[StepPair]:
    """Return which steps are compared: those of the same mode and number.

    Where there are none, or eval steps of one number worked on unlike many tokens, eval steps stand
    beside the steps of the other run in their order, several of them where these together have as
    many tokens.
    """
    common = [key for key in ref.steps if key in test.steps]
    evaluated = next((key for key in common if key[0] is Mode.EVAL), None)
    is_in_parts = evaluated is not None and ref.tokens(evaluated) != test.tokens(evaluated)
    if common and not is_in_parts:
        return [StepPair((key,), (key,)) for key in common]
    found = [StepPair((key,), (key,)) for key in common if key[0] is Mode.TRAIN]
    left = [[key for key in side.steps if not found or key[0] is Mode.EVAL] for side in (ref, test)]
    while all(left):
        pair = _next_pair((ref, test), left)
        if pair is None:
            break
        found.append(pair)
    return found


def _next_pair(traces: tuple[TraceSide, TraceSide], left: list[list[StepKey]]) -> StepPair | None:
    """Take steps off both lists that worked on as many tokens; None where none do."""
    taken = [[own.pop(0)] for own in left]
    counts = [trace.tokens(own[0]) for trace, own in zip(traces, taken)]
    while counts[0] != counts[1]:
        if counts[0] is None or counts[1] is None:
            return None
        short = 0 if counts[0] < counts[1] else 1
        following = left[short][:1]
        if any(mode is not Mode.EVAL for mode, _ in (*taken[short], *following)) or not following:
            return None
        taken[short].append(left[short].pop(0))
        more = traces[short].tokens(taken[short][-1])
        counts[short] = None if more is None else (counts[short] or 0) + more
    is_alike = taken[0][0][0] is taken[1][0][0] and len(taken[0]) == len(taken[1]) == 1
    if is_alike and taken[0] != taken[1]:
        return None  # steps of one mode and other numbers are other steps
    return StepPair(tuple(taken[0]), tuple(taken[1]))
