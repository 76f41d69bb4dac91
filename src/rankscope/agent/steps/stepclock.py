"""When a step begins and ends: a pure rule over root forwards and optimizer steps. No torch.

An optimizer step marks the train step as *ended*; the next root forward with gradients *closes* it.
So several optimizers, gradient accumulation, the forwards of one closure and nested
`super().step()` calls stay one step, and a loop that runs every forward inside a closure (LBFGS,
Lightning) still has one step per optimizer step. A root forward without gradients is an eval step
of its own. Where no optimizer exists every root forward is a step. All forwards of one run of a
pipeline schedule are one step, whatever their mode.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rankscope.record.call import Mode

__all__ = ["StepClock", "Tick"]


@dataclass(frozen=True, slots=True)
class Tick:
    """What one root forward means."""

    mode: Mode
    step: int
    opened: bool
    """True where this forward begins a new step of its mode."""


class StepClock:
    """Counts train and eval steps of one process, apart from each other."""

    def __init__(self) -> None:
        self.train = -1
        """Current train step, -1 before the first."""
        self.eval = -1
        self.is_ended = False
        """An optimizer has stepped since the train step began."""
        self.train_run: int | None = None
        """Run of a pipeline schedule that the latest train forward was part of."""
        self.eval_run: int | None = None
        self._optimizer_depth = 0
        self._is_manual = False

    def root_forward(
        self, *, has_gradients: bool, optimizer_exists: Callable[[], bool], run: int | None = None
    ) -> Tick:
        """Return the step this root forward belongs to, opening a new one where the rule
        says so.

        Args:
            has_gradients: it builds a graph that reaches a parameter.
            optimizer_exists: asked where that decides.
            run: the run of a pipeline schedule it is part of, None outside every run.
        """
        if not has_gradients:
            is_new = run is None or run != self.eval_run
            self.eval_run = run
            self.eval += is_new
            return Tick(Mode.EVAL, self.eval, is_new)
        is_same_run = run is not None and run == self.train_run
        self.train_run = run
        if is_same_run:
            return Tick(Mode.TRAIN, self.train, False)
        is_over = self.train < 0 or self.is_ended
        if not is_over and not self._optimizer_depth:  # a closure may run forward several times
            is_over = not (self._is_manual or optimizer_exists())
        if is_over:
            self.train += 1
            self.is_ended = False
            return Tick(Mode.TRAIN, self.train, True)
        return Tick(Mode.TRAIN, self.train, False)

    def step_of_next_run(self, mode: Mode, optimizer_exists: Callable[[], bool]) -> int:
        """Return the step that a run of a pipeline schedule belongs to which begins now."""
        if mode is Mode.EVAL:
            return self.eval + 1
        if self.train < 0 or self.is_ended:
            return self.train + 1
        return self.train + (not (self._is_manual or optimizer_exists()))

    @property
    def is_inside_optimizer(self) -> bool:
        """True between the begin and the end of an optimizer step."""
        return self._optimizer_depth > 0

    def optimizer_begins(self) -> bool:
        """Enter an optimizer step; True for the outermost one (ZeRO calls `super().step()` inside
        its own).
        """
        self._optimizer_depth += 1
        return self._optimizer_depth == 1

    def optimizer_ends(self) -> bool:
        """Leave an optimizer step; True for the outermost one, which marks the train step
        as ended.
        """
        self._optimizer_depth = max(self._optimizer_depth - 1, 0)
        if self._optimizer_depth == 0:
            self.is_ended = self.is_ended or not self._is_manual
            return True
        return False

    def set_optimizer_depth(self, running: int) -> None:
        """Correct the count of optimizer steps that are running: one that raised never ended."""
        self._optimizer_depth = max(min(self._optimizer_depth, running), 0)

    def step(self) -> None:
        """Close the train step now (`rankscope.step()`); from here on only this call
        closes steps.
        """
        self._is_manual = True
        self.is_ended = True
