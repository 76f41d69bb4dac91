"""The runs of torch's pipeline schedules: one call of `schedule.step()` or `eval()` is one run.

A run sends all micro-batches of a batch through this rank's stages, so all of its forwards belong
to one step; nothing else tells that where no optimizer steps. A function of ours stands in the
classes that all schedules inherit `step` from.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import CodeType
from typing import Any

from rankscope.agent.hooks.pythonstack import frames_here
from rankscope.agent.standins import StandIns
from rankscope.capture.torch_internals.parallel import pipeline_schedules


class ScheduleWatch(StandIns):
    """Says in which run of a schedule this process is, from the first question until `take_off`."""

    def __init__(self, begins: Callable[[object], None]) -> None:
        """`begins` is told of the schedule when a run begins, and must not raise."""
        super().__init__()
        self._begins = begins
        self._numbers = itertools.count()
        self._run: int | None = None
        self._codes: frozenset[CodeType] = frozenset()
        """Code of torch's own `step`, while a run goes on that began before ours stood there."""
        self._is_over = False

    def current(self) -> int | None:
        """Return the number of the run that goes on, counted from 0; None outside every run."""
        if not (self.is_on or self._is_over):
            self._put_on()
        if self._codes and not any(frame.f_code in self._codes for frame in frames_here()):
            self._run, self._codes = None, frozenset()
        return self._run

    def take_off(self) -> None:
        """Put the originals back, for good."""
        self._is_over = True
        super().take_off()

    def _put_on(self) -> None:
        classes = pipeline_schedules()
        if not classes:
            return
        codes = (getattr(vars(cls)["step"], "__code__", None) for cls in classes)
        known = frozenset(code for code in codes if code is not None)
        for cls in classes:
            self.put(cls, "step", self._around)
        frame = next((frame for frame in frames_here() if frame.f_code in known), None)
        if frame is not None:  # the first run of all: it has brought us here
            self._run, self._codes = next(self._numbers), known
            self._begins(frame.f_locals.get(frame.f_code.co_varnames[0]))

    def _around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(schedule: object, *args: Any, **kwargs: Any) -> Any:
            if self._is_over or self.current() is not None:
                return original(schedule, *args, **kwargs)
            self._run = next(self._numbers)
            try:
                self._begins(schedule)
                return original(schedule, *args, **kwargs)
            finally:
                self._run = None

        return step
