"""The two traces that are held to each other, and which of their steps stand beside each other."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from rankscope.diagnosis.comparison.alignment import (
    COMPARED,
    FORWARDS,
    AlignedStep,
    PathMap,
    align,
)
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
from rankscope.diagnosis.evidence.distances import is_within_rounding, minority
from rankscope.diagnosis.evidence.replicas import InferredReplicas, Layouts
from rankscope.diagnosis.evidence.stepview import (
    Array,
    CallView,
    SlotValues,
    StepView,
    grouped,
    step_view_of,
)
from rankscope.layout.layoutfile import LayoutFile
from rankscope.record.call import Mode
from rankscope.record.phases import Phase
from rankscope.record.ranks import ranks_named, ranks_text
from rankscope.record.texts import counted
from rankscope.tree.reader import TraceLike, opened_trace
from rankscope.tree.tensors.proofs import cut_dtensors
from rankscope.tree.views import Step, Trace, number_setting

StepKey = tuple[Mode, int]


@contextmanager
def two_sides(
    ref: TraceLike, test: TraceLike, layouts: LayoutFile | None
) -> Iterator[tuple[TraceSide, TraceSide]]:
    """Open both traces, or golden files; closed at the end as `opened_trace` says."""
    with (
        opened_trace(ref, takes_golden=True) as ref_trace,
        opened_trace(test, takes_golden=True) as test_trace,
    ):
        yield TraceSide(ref_trace, layouts, "REF"), TraceSide(test_trace, layouts, "TEST")


class TraceSide:
    """The last life of one trace; `name` is what people call it, REF or TEST."""

    def __init__(self, trace: Trace, layouts: LayoutFile | None, name: str) -> None:
        self.trace, self.name = trace, name
        self._paths = PathMap()
        self._began: dict[SlotValues, Array] = {}
        self.world = int(trace.run["world_size"])
        fits = layouts is not None and self.world in (1, layouts.size)
        self.layouts = Layouts(layouts if fits else None, self.world)
        self.printed_digits = number_setting(trace, "printed-digits", "[0-9]{1,2}")
        """Behind the point, of statistics that a debugger printed; 0 where none were printed."""
        all_steps = (*trace.setup, *trace.steps)
        incarnation = max((step.incarnation for step in all_steps), default=0)
        self.lost = LostRanks(trace, incarnation)
        setups = [step for step in trace.setup if step.incarnation == incarnation]
        self.setup: StepView | None = step_view_of(setups[0]) if setups else None
        began = [call.node for call in self.setup.calls] if self.setup else []
        is_any_cut = any(True for _ in cut_dtensors(began))
        self.wholes = WholeValues(self.layouts, self.lost, has_cut_dtensors=is_any_cut)
        self.stage_list = stages_of(self.setup, self.world, self.layouts.mesh)
        self.stages = np.full(self.world, -1)
        """[world] the number of each rank's stage, -1 for ranks without a parameter."""
        for number, stage in enumerate(self.stage_list):
            self.stages[stage.ranks] = number
        self.steps: dict[StepKey, Step] = {
            (step.mode, step.step): step for step in trace.steps if step.incarnation == incarnation
        }

    def begin_us(self, key: StepKey) -> float:
        """Return when the first call of a step began, by the clock of the trace."""
        return min((node.time.start_us for node in self.steps[key].fresh()), default=math.inf)

    @cached_property
    def data_lines(self) -> tuple[Array, ...]:
        """Ranks that should be handed other batches than each other, as `check` knows them."""
        by_source = InferredReplicas(self.setup).data_lines(self.layouts)
        return tuple(itertools.chain.from_iterable(by_source.values()))

    def began_with(self, values: SlotValues) -> Array:
        """Return the sketch of what the run began with, NaN where none is known."""
        if values not in self._began:
            wholes = self.wholes.of(values, None)
            sketch = np.array(np.nan) if isinstance(wholes, str) else wholes.sketches[0]
            self._began[values] = sketch
        return self._began[values]

    def rename(self, paths: PathMap) -> None:
        """Have modules called from now on as these paths say."""
        self._paths = paths
        self.setup = None if self.setup is None else self._named(self.setup)

    def _named(self, step_view: StepView) -> StepView:
        for call in step_view.calls if self._paths else ():
            call.path = self._paths(call.node.path)
        return replace(step_view)

    def is_late(self, call: CallView) -> bool:
        """True for a call of setup behind the first training step: steps made its values."""
        first = next((step for (mode, _), step in self.steps.items() if mode is Mode.TRAIN), None)
        ended = max((n.time.start_us for n in first.fresh()), default=0.0) if first else 0.0
        return 0.0 < ended < call.node.time.start_us

    def view(self, keys: Sequence[StepKey]) -> StepView:
        """Read one step, or several as one in which their micro-batches follow each other."""
        first, *more = (self._named(step_view_of(self.steps[key])) for key in keys)
        for before, step_view in zip((first, *more), more):
            begin = 1 + max(call.micro_batch or 0 for call in before.calls)
            for call in step_view.calls:
                call.micro_batch = begin + (call.micro_batch or 0)
        calls = [call for step_view in (first, *more) for call in step_view.calls]
        return replace(first, calls=calls)

    def wholes_of(self, keys: Sequence[StepKey], step_view: StepView) -> WholeValues:
        """Return what composes the values of steps that are read as one."""
        if len(keys) == 1 or keys[0][0] is Mode.TRAIN:
            return self.wholes
        # each call is a step of its own: a proof of every one would cost more than it tells
        return TokenWholes(self.layouts, self.lost, token_counts(step_view))

    def tokens(self, key: StepKey) -> int | None:
        """Return the tokens of a sample in a step's first call; None where nothing tells them."""
        return next(iter(token_counts(self.view((key,)))), None)


# ---- steps beside each other ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepPair:
    """Steps that are compared with each other: one on each side, or calls that make one."""

    ref: tuple[StepKey, ...]
    test: tuple[StepKey, ...]

    @property
    def is_of_forwards(self) -> bool:
        """True where no more than forwards can be compared."""
        return self.is_of_passes or self.ref[0][0] is not self.test[0][0] or self.is_joined

    @property
    def is_joined(self) -> bool:
        """True where several steps of a side are read as one."""
        return len(self.ref) + len(self.test) > 2

    @property
    def is_of_passes(self) -> bool:
        """True for training in which one side took several steps with the samples of one."""
        return self.is_joined and self.ref[0][0] is self.test[0][0] is Mode.TRAIN


class PairedStep:
    """The values of a pair of steps, or of both setups where there is no pair."""

    def __init__(self, sides: tuple[TraceSide, TraceSide], pair: StepPair | None) -> None:
        self._sides, self.pair = sides, pair
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
        return align(self.ref, self.test, FORWARDS if is_of_forwards else COMPARED)

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
        return self.pair is not None and self.pair.is_joined

    @property
    def has_other_passes(self) -> bool:
        """True for a train step that went through more, or fewer, samples than the reference's."""
        if self.pair is None or self.pair.is_of_forwards or self.test.mode is not Mode.TRAIN:
            return False
        batches = self.batches
        is_told = batches.are_of_other_samples and not batches.is_by_order
        if not is_told or batches.ref.total == batches.test.total:
            return False
        # ranks that were handed one batch, and should have another each, are no other passes
        places = batches.test.places
        return all(len({*places[line].tolist()}) == len(line) for line in self._sides[1].data_lines)

    @cached_property
    def unlike_passes(self) -> tuple[str, Array]:
        """Why samples of a step are not the reference's, and the ranks of the test that tell: one
        side took several steps with them, or ranks of the test went through unlike numbers of
        passes; "" for neither."""
        if self.pair is None:
            return "", np.zeros(0, np.int64)
        counts = Counter(r for call in self.test.trained_roots for r in call.ranks.tolist())
        ranks = np.array(sorted(counts), np.int64)
        if self.pair.is_of_passes:
            ref, test = map(_steps_text, (self.pair.ref, self.pair.test))
            return f"{test} went through the samples of the reference's {ref}", ranks
        if not self.has_other_passes or len(set(counts.values())) < 2:
            return "", ranks[:0]
        passes = grouped((count, rank) for rank, count in sorted(counts.items()))
        listed = [
            f"{ranks_named(members)} went through {counted(count, 'pass', 'passes')}"
            for count, members in sorted(passes.items())
        ]
        odd = minority(ranks, np.array([counts[rank] for rank in ranks.tolist()]))
        return f"{', '.join(listed)} before the optimizer's step", odd

    @cached_property
    def batches(self) -> Batches:
        """Who worked on which samples."""
        places = self._places()
        ref = samples_of_step(self.ref, places[0], self.wholes[0])
        batches = match_samples(ref, samples_of_step(self.test, places[1], self.wholes[1]))
        if not batches.lost:
            return batches
        # ranks may have been handed other batches though nothing shows them to be data-parallel
        test = self._sides[1]
        handed = places_by_inputs(self.test, test.world)
        by_inputs = match_samples(ref, samples_of_step(self.test, handed, test.wholes))
        is_better = by_inputs.lost < batches.lost and not by_inputs.unknown
        if is_better and _differs_on_a_mesh(self.test):
            return replace(batches, are_apart=True)
        return by_inputs if is_better else batches

    def _places(self) -> list[Array]:
        """Return the places of the ranks on both sides. What a trace of fewer options does not tell
        the other one does, where both are of one program on as many ranks and the same meshes."""
        places, can_place = [], []
        for side, step_view in zip(self._sides, (self.ref, self.test)):
            places.append(data_places(side.stage_list, side.setup, step_view, side.world))
            # parameters at setup, and what a root was handed, tell the places
            is_handed = any([*call.inputs] for call in step_view.trained_roots)
            can_place.append(bool(side.stage_list) and is_handed)
        ref, test = (side.trace.run for side in self._sides)
        is_one = ref.get("argv", ())[:1] == test.get("argv", ())[:1]
        is_one &= all(ref[name] == test[name] for name in ("world_size", "meshes"))
        if can_place[0] != can_place[1] and is_one:
            places[can_place.index(False)] = places[can_place.index(True)]
        return places

    @property
    def is_cut(self) -> bool:
        """True where a run broke off in the step before it had all samples."""
        if self.pair is None:
            return False
        keys = zip(self._sides, (self.pair.ref, self.pair.test))
        is_cut = any(side.lost.is_cut(*key) for side, step_keys in keys for key in step_keys)
        return is_cut and bool(self.batches.are_of_other_samples)


def paired_steps(ref: TraceSide, test: TraceSide) -> list[StepPair]:
    """Return which steps are compared: those of the same mode and number.

    Where there are none, or eval steps of one number worked on different numbers of tokens, eval
    steps stand beside the steps of the other run in their order, several of them where these
    together have as many tokens.
    """
    common = [key for key in ref.steps if key in test.steps]
    evaluated = next((key for key in common if key[0] is Mode.EVAL), None)
    is_in_parts = evaluated is not None and ref.tokens(evaluated) != test.tokens(evaluated)
    if common and not is_in_parts:
        if len({mode for mode, _ in common}) > 1:  # what is wrong in one may be used in the other
            common.sort(key=test.begin_us)
        return [StepPair((key,), (key,)) for key in common]
    pairs = [StepPair((key,), (key,)) for key in common if key[0] is Mode.TRAIN]
    keys = [[key for key in side.steps if not pairs or key[0] is Mode.EVAL] for side in (ref, test)]
    while all(keys):
        pair = _next_pair((ref, test), keys)
        if pair is None:
            break
        pairs.append(pair)
    return pairs


def aligned_by_pass(
    sides: tuple[TraceSide, TraceSide], pairs: Sequence[StepPair]
) -> list[StepPair]:
    """Return pairs of train steps from the first pair on that went through the same samples,
    several of a side together where the other took one step with them, and behind them the pairs
    of eval steps; nothing where the first pair has no such partner."""
    starts = pairs[0].ref[0], pairs[0].test[0]
    waiting = [
        [key for key in side.steps if key[0] is Mode.TRAIN and key[1] >= start[1]]
        for side, start in zip(sides, starts)
    ]
    aligned: list[StepPair] = []
    while all(waiting):
        ref, test = ([keys.pop(0)] for keys in waiting)
        while (batches := PairedStep(sides, StepPair((*ref,), (*test,))).batches).lost or (
            batches.unknown
        ):
            missing = batches.test.total - batches.ref.total
            side, keys = (ref, waiting[0]) if missing > 0 else (test, waiting[1])
            if not missing or not keys or len(ref if side is test else test) > 1:
                break
            side.append(keys.pop(0))
        if batches.are_of_other_samples:
            break
        aligned.append(StepPair((*ref,), (*test,)))
    evaluated = [pair for pair in pairs if pair.test[0][0] is not Mode.TRAIN]
    return [*aligned, *evaluated] if aligned else []


def _steps_text(keys: Sequence[StepKey]) -> str:
    """Return steps of a mode as people write them: `train steps 1-2`."""
    noun = f"{keys[0][0].word} step{'s' if len(keys) > 1 else ''}"
    return f"{noun} {ranks_text([number for _, number in keys])}"


def _next_pair(
    traces: tuple[TraceSide, TraceSide], unpaired: list[list[StepKey]]
) -> StepPair | None:
    """Take steps off both lists that worked on as many tokens; None where none do."""
    pair = [[step_keys.pop(0)] for step_keys in unpaired]
    counts = [trace.tokens(step_keys[0]) for trace, step_keys in zip(traces, pair)]
    while counts[0] != counts[1]:
        if counts[0] is None or counts[1] is None:
            return None
        short = 0 if counts[0] < counts[1] else 1
        following = unpaired[short][:1]
        if any(mode is not Mode.EVAL for mode, _ in (*pair[short], *following)) or not following:
            return None
        pair[short].append(unpaired[short].pop(0))
        more = traces[short].tokens(pair[short][-1])
        counts[short] = None if more is None else (counts[short] or 0) + more
    is_alike = pair[0][0][0] is pair[1][0][0] and len(pair[0]) == len(pair[1]) == 1
    if is_alike and pair[0] != pair[1]:
        return None  # steps of one mode and other numbers are other steps
    return StepPair(tuple(pair[0]), tuple(pair[1]))


def _differs_on_a_mesh(step_view: StepView) -> bool:
    """True where a module was handed what it calls `Replicate()`, and ranks hold other numbers of
    it: no right program hands these ranks other samples."""
    layouts = Layouts()
    entered = (v for call in step_view.of(Phase.FORWARD) for v in call.inputs)
    placed = ((v, layouts.same(v)) for v in entered if v.source == "dtensor")
    return any(
        not is_within_rounding(v, [group])
        for v, replicas in placed
        for group in (replicas.groups if replicas else ())
        if v.agree(group) is False
    )
