"""One of the two traces that are held to each other: its last life, step by step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from rankscope.diagnosis.comparison.datasamples import (
    StepSamples,
    data_places,
    samples_of_step,
    stages_of,
)
from rankscope.diagnosis.comparison.lostranks import LostRanks
from rankscope.diagnosis.comparison.wholevalues import WholeValues
from rankscope.diagnosis.evidence.replicas import Layouts
from rankscope.diagnosis.evidence.stepview import Array, CallView, StepView, step_view_of
from rankscope.layout.layoutfile import LayoutFile
from rankscope.record.call import Mode
from rankscope.tensors.proofs import cut_dtensors
from rankscope.tree.reader import TraceLike, opened_trace
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
    """One of the two traces."""

    def __init__(self, trace: Trace, layouts: LayoutFile | None, name: str) -> None:
        """Read its setup.

        Args:
            trace: an open trace.
            layouts: declared layouts, used where they are for as many ranks.
            name: what people call it, "REF" or "TEST".
        """
        self.trace, self.name = trace, name
        self.world = int(trace.run["world_size"])
        fits = layouts is not None and self.world in (1, layouts.size)
        self.layouts = Layouts(layouts if fits else None, self.world)
        every = [*trace.setup, *trace.steps]
        self.printed_digits = number_setting(trace, "printed-digits", "[0-9]{1,2}")
        """Behind the point, of statistics that a debugger printed; 0 where none were printed."""
        self.incarnation = max((step.incarnation for step in every), default=0)
        self.lost = LostRanks(trace, self.incarnation)
        own = [step for step in trace.setup if step.incarnation == self.incarnation]
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
            (step.mode, step.step): step
            for step in trace.steps
            if step.incarnation == self.incarnation
        }

    def is_late(self, call: CallView) -> bool:
        """True for a call of setup behind the first training step: what it has was made by steps,
        as a moving average of weights is that is first called then."""
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

    def places(self, step_view: StepView) -> Array:
        """Return the data-parallel place of every rank."""
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

    def samples(self, step_view: StepView) -> StepSamples:
        """Return the samples that the ranks worked on."""
        return samples_of_step(step_view, self.places(step_view), self.wholes)
