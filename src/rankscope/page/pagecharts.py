"""What the page draws as lines: the loss, gradients and updates by module, time by rank."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.diagnosis.stepview import CallView, SlotValues, StepView
from rankscope.page.modulerows import ModuleRows
from rankscope.record.call import Mode
from rankscope.record.phases import Phase

__all__ = ["CheckCharts"]

Array = NDArray[Any]
_TIMED = (Phase.FORWARD, Phase.BACKWARD)


class CheckCharts:
    """Takes the steps that `check` has been through."""

    def __init__(self, rows: ModuleRows, world: int) -> None:
        self._rows, self._world = rows, world
        self._before: dict[tuple[int, str], Array] = {}
        """Sketches of parameters as they were."""
        self._scalars: list[dict[tuple[str, str], list[float | None]]] = []
        self.steps: list[dict[str, Any]] = []
        """Of each step: {"grad": {row: norm}, "update": {row: ratio}, "ms": {phase: [world]},
        "odd": [rows whose gradients or parameters are not finite]}."""

    @np.errstate(over="ignore", invalid="ignore")
    def note(self, step_view: StepView) -> None:
        """Take a step, in the order of the trace."""
        if step_view.is_setup:
            self._before.clear()
        gradients = self._by_module(step_view, Phase.GRADS, "grad:")
        found: dict[str, Any] = {}
        odd = {
            self._rows.of(call.path)
            for call in step_view.of(Phase.GRADS, Phase.PARAMS)
            for values in call.slots.values()
            if values.dtype != "python" and values.nonfinite.any()
        }
        if odd:
            found["odd"] = sorted(odd)
        if gradients:
            found["grad"] = _roots(gradients)
        updates = self._updates(step_view)
        if updates:
            found["update"] = updates
        times = self._times(step_view)
        if times:
            found["ms"] = times
        self.steps.append(found)
        self._scalars.append(_scalars(step_view))

    def with_loss(self) -> list[dict[str, Any]]:
        """Return the steps, each with "loss": [mean, least, greatest of the ranks], nulls where it
        is not finite; without where more than one scalar may be the loss."""
        names = {name for scalars in self._scalars for name in scalars}
        names = {name for name in names if name[1].endswith("loss")} or names
        for step, scalars in zip(self.steps, self._scalars):
            if len(names) == 1 and names <= scalars.keys():
                step["loss"] = scalars[next(iter(names))]
        return self.steps

    def _by_module(self, step_view: StepView, phase: Phase, prefix: str) -> dict[int, float]:
        """Return the sum of squares of all gradients of each module, of its last optimizer step."""
        found: dict[int, float] = {}
        ordinals: dict[int, int] = {}
        for call in step_view.of(phase):
            row = self._rows.of(call.path)
            if ordinals.get(row, -1) != call.ordinal:
                ordinals[row], found[row] = call.ordinal, 0.0
            for values in _named(call, prefix):
                norm, _ = _whole(values)
                if norm is not None:
                    found[row] += norm * norm
        return found

    def _updates(self, step_view: StepView) -> dict[int, float]:
        """Return how far the parameters of each module went, over their norm, by sketches."""
        moved: dict[int, list[float]] = {}
        phases = (Phase.SETUP, Phase.PARAMS)
        for call in step_view.of(*phases):
            row = self._rows.of(call.path)
            for values in _named(call, "param:"):
                norm, sketch = _whole(values)
                if sketch is None:
                    continue
                before = self._before.get((row, values.slot))
                self._before[row, values.slot] = sketch
                if before is not None and norm and call.phase is Phase.PARAMS:
                    squares = moved.setdefault(row, [0.0, 0.0])
                    squares[0] += float(((sketch - before) ** 2).mean())
                    squares[1] += norm * norm
        return _roots({row: far / of for row, (far, of) in moved.items() if of})

    def _times(self, step_view: StepView) -> dict[str, list[float]]:
        """Return how long the outermost calls of a phase took on each rank, in ms."""
        found = {phase: np.zeros(self._world) for phase in _TIMED}
        for call in step_view.of(*_TIMED):
            if call.parent is None:
                begin, end = call.span(call.ranks)
                found[call.phase][call.ranks] += (end - begin) / 1e6
        return {
            phase.word: [round(float(each), 3) for each in times]
            for phase, times in found.items()
            if times.any()
        }


def _scalars(step_view: StepView) -> dict[tuple[str, str], list[float | None]]:
    """Return mean, least and greatest over ranks of the scalars that outermost calls of a train
    step return; of each rank the mean of its micro-batches."""
    found: dict[tuple[str, str], list[SlotValues]] = {}
    is_train = step_view.mode is Mode.TRAIN and not step_view.is_setup
    for call in step_view.of(Phase.FORWARD) if is_train else ():
        for values in call.outputs if call.parent is None else ():
            shapes = {shape for view in values.views for shape in view.shapes().values()}
            if "float" in values.dtype and shapes == {()} and values.is_known.all():
                found.setdefault((call.path, values.slot), []).append(values)
    return {name: _spread(values) for name, values in found.items()}


def _spread(micro_batches: list[SlotValues]) -> list[float | None]:
    if any(v.nonfinite.any() or v.column("neginf").any() for v in micro_batches):
        return [None, None, None]
    ranks = np.concatenate([values.ranks for values in micro_batches])
    means = np.concatenate([values.column("mean") for values in micro_batches])
    of_ranks = [float(means[ranks == rank].mean()) for rank in np.unique(ranks)]
    return [sum(of_ranks) / len(of_ranks), min(of_ranks), max(of_ranks)]


def _named(call: CallView, prefix: str) -> list[SlotValues]:
    return [
        values
        for slot, values in call.slots.items()
        if slot.startswith(prefix) and values.dtype != "python" and len(values.views) == 1
    ]


def _whole(values: SlotValues) -> tuple[float | None, Array | None]:
    """Return norm and sketch of the whole value: what the shards add up to, else what the lowest
    rank holds."""
    combined = values.views[0].combined
    if combined:
        sketch = combined[0].sketch
        norm = combined[0].l2
        is_known = norm is not None and np.isfinite(norm)
        return (norm if is_known else None), None if sketch is None else np.asarray(sketch)
    if not values.is_known[0]:
        return None, None
    norm = float(values.column("l2")[0])
    return (norm if np.isfinite(norm) else None), np.asarray(values.column("sketch")[0], float)


def _roots(squares: dict[int, float]) -> dict[int, float]:
    """Return the roots, four digits of each; without those of numbers too large to be squared."""
    return {row: float(f"{np.sqrt(s):.4g}") for row, s in squares.items() if np.isfinite(s)}
