"""What a rank that holds its last steps back sees happen, and tells on the board of events.

It looks at the numbers in the records of a step, which were written anyway: a value that is not
finite, a gradient norm far beyond those of the steps before, a value that the user named and that
leaps. Of a named value the root mean square over the finite elements is compared, which does not
depend on the size of a batch; of several in a step (micro-batches, several calls) the largest, in
the step of its call, also where an accelerator hands the digest out later.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import dropwhile
from typing import Final

import numpy as np

from rankscope.agent.recorder import Recorder
from rankscope.globs import glob_matches, slot_matches, split_place
from rankscope.record.call import Mode
from rankscope.record.phases import Phase
from rankscope.record.stepselection import StepSelection, Trigger
from rankscope.record.value import ValueFlag
from rankscope.run.agreements import EventBoard, Happening
from rankscope.spool.recordcolumns import Records, Structured, ValueRows
from rankscope.spool.recordformat import RecordKind, StepEvent
from rankscope.spool.ringwriter import RingWriter

_WATCHED: Final = np.isin(np.arange(256), (Phase.FORWARD, Phase.PARAMS))
"""Phases in which NaN and +inf are told; gradients before the optimizer count too. Not backward: a
GradScaler may be about to skip what comes of it. Not collectives: they pad with anything."""
_OF_SCALER = int(ValueFlag.SKIPPED | ValueFlag.SCALED)
"""Phases whose values a GradScaler scales or skips: their size says nothing."""
_MEDIAN_STEPS: Final = 32
_FEWEST_STEPS: Final = 8
_RISING: Final = 2.0
"""Times the median beyond which a step may be one of those over which a run diverges."""
_LEAST: Final = 0.01
"""Part of the highest median so far below which a magnitude is near zero."""
_CALLS_WATCHED: Final = np.isin(np.arange(256), (Phase.FORWARD, Phase.GRADS, Phase.PARAMS))
"""Phases whose calls are watched; gradients of backward come under the calls of forward. Setup is
of no step, and recomputed and accumulated values are of calls that are watched anyway."""
_MOST_MODULES: Final = 1 << 14
"""Limit for programs that keep making models: the oldest modules are forgotten."""
_LATE: Final = 8
"""Steps that an accelerator may be behind with the digests of a call."""
_STEPS_UNTIL_TOLD: Final = 16


class RunningMedian:
    """The magnitudes that one number had in the last steps."""

    __slots__ = ("_factor", "_highest", "_last", "limit", "median")

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._last: deque[float] = deque(maxlen=_MEDIAN_STEPS)
        self._highest = 0.0
        self.median = 0.0
        self.limit = math.inf

    def add(self, magnitude: float) -> None:
        """Take what a step had; finite, 0 or more.

        The limit is `factor` times the median, raised so that right programs stay below it: where
        some steps are of another kind (a second data set, a loss that every tenth step has), to the
        square root of `factor` times the largest of them, which does not look at the steps that
        have been rising until now; where the number has all but vanished, to a hundredth of its
        highest median. A median of 0 has no multiples.
        """
        last = self._last
        last.append(magnitude)
        if len(last) < _FEWEST_STEPS:
            return
        self.median = statistics.median(last)
        self._highest = max(self._highest, self.median)
        if not self.median:
            self.limit = math.inf
            return
        rising = _RISING * self.median
        before = max(dropwhile(lambda earlier: earlier > rising, reversed(last)), default=0.0)
        self.limit = max(
            self._factor * self.median, math.sqrt(self._factor) * before, _LEAST * self._highest
        )


class BlackBoxWatch:
    """Reports events to all ranks."""

    def __init__(
        self,
        recorder: Recorder,
        ring: RingWriter,
        selection: StepSelection,
        board: EventBoard,
        rank: int,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self._recorder = recorder
        self._ring = ring
        self._steps = selection.last
        self._board = board
        self._rank = rank
        self.mode, self._step = Mode.TRAIN, 0
        """The step that counts: a train step, or an eval step of a program that has not trained."""
        self._has_trained = False
        self._spoiled_at: int | None = None
        self._squares = 0.0
        factor = selection.given[Trigger.SPIKE][-1]
        self._norms = RunningMedian(factor) if factor else None
        self._leaps: _LeapWatch | None = None
        if selection.waits_for(Trigger.WATCHED):
            self._leaps = _LeapWatch(self, recorder, selection, board, say)
        recorder.observe(self._take_batch)

    def _take_batch(self, batch: Records) -> None:
        """Look at the values, then at the mark of a step: a batch ends with one, or has none."""
        kinds = RecordKind.VALUE, RecordKind.ENTER, RecordKind.STEP
        of_values, of_calls, of_marks = map(batch.positions, kinds)
        values = batch.values_at(of_values)
        self._judge_values(values)
        if self._leaps is not None:
            self._leaps.look(batch.rows_at(of_calls, RecordKind.ENTER), values)
        marks = batch.rows_at(of_marks, RecordKind.STEP)
        for event, mode, step in _rows(marks, "event", "mode", "step"):
            self._step_marked(StepEvent(event), Mode(mode), step)

    def _step_marked(self, event: StepEvent, mode: Mode, step: int) -> None:
        if event is StepEvent.BEGIN:
            self._has_trained = self._has_trained or mode is Mode.TRAIN
            if mode is Mode.TRAIN or not self._has_trained:
                self.mode, self._step = mode, step
                self._squares = 0.0  # of a step whose end found no room
            if self._leaps is not None and mode is self.mode:
                self._leaps.step_begins(mode, step)
        if event is StepEvent.END and mode is Mode.TRAIN:
            self._judge_norm(step)

    def _judge_values(self, values: ValueRows) -> None:
        phases, slots = values["phase"], values["slot"]
        is_watched = _WATCHED[phases]
        rows = np.flatnonzero((phases == Phase.GRADS) & (values["flags"] & _OF_SCALER == 0))
        if len(rows):
            gradients = [n for name, n in self._recorder.slots.items() if name.startswith("grad:")]
            rows = rows[np.isin(slots[rows], gradients)]
            self._squares += float(np.square(values["l2"][rows]).sum())
            is_watched[rows] = True
        bad = np.flatnonzero(is_watched & ((values["nan"] > 0) | (values["posinf"] > 0)))
        if len(bad):
            self._spoil(_slot_names(self._recorder)[int(slots[bad[0]])])

    def _spoil(self, slot: str) -> None:
        last, self._spoiled_at = self._spoiled_at, self._step
        # NaN stays for all later steps: one event asks for those that led to the first
        if last is None or self._step - last > self._steps:
            self.tell(Trigger.NONFINITE, self.mode, self._step, slot=slot)

    def _judge_norm(self, step: int) -> None:
        norm, self._squares = math.sqrt(self._squares), 0.0
        if self._norms is None or not 0.0 < norm < math.inf:
            return
        if norm > self._norms.limit:
            times = norm / self._norms.median
            self.tell(Trigger.SPIKE, Mode.TRAIN, step, norm=norm, times=times)
        self._norms.add(norm)

    def tell(self, trigger: Trigger, mode: Mode, step: int, **fields: object) -> None:
        """Report an event, unless a step that is held with it had a like event."""
        text = trigger.text(rank=self._rank, step=step, **fields)
        event = Happening(trigger=trigger, mode=mode, step=step, text=text)
        try:
            if not any(
                (earlier.trigger, earlier.mode) == (trigger, mode)
                and earlier.step >= step - self._steps
                for earlier in self._board.events()
            ):
                self._board.tell(event)
        except OSError:  # a full disk: whoever copies the ring tells the others
            if self._ring.hold(event.window(self._steps)):
                self._recorder.define("untold", entry=event.entry)


def _slot_names(recorder: Recorder) -> dict[int, str]:
    return {number: name for name, number in recorder.slots.items()}


def _rows(table: Structured, *names: str) -> Iterator[tuple[int, ...]]:
    return zip(*(table[name].tolist() for name in names))


class _WatchedValue:
    __slots__ = ("history", "largest", "name", "step")

    def __init__(self, name: str, factor: float) -> None:
        self.name = name
        self.history = RunningMedian(factor)
        self.step = -1
        self.largest = 0.0

    def leaps(self, step: int, magnitude: float) -> bool:
        if step > self.step:
            if self.step >= 0:
                self.history.add(self.largest)
            self.step, self.largest = step, magnitude
        elif step == self.step:
            self.largest = max(self.largest, magnitude)
        return magnitude > self.history.limit


@dataclass(slots=True)
class _WatchedModule:
    path: str
    slots: tuple[tuple[int, str], ...]
    """(number of the glob, its part that selects slots)."""
    values: dict[tuple[Mode, str], _WatchedValue | None] = field(default_factory=dict)
    """Watched values by slot; None for a slot that no glob selects."""


class _LeapWatch:
    def __init__(
        self,
        box: BlackBoxWatch,
        recorder: Recorder,
        selection: StepSelection,
        board: EventBoard,
        say: Callable[[str], None] | None,
    ) -> None:
        self._box = box
        self._globs: tuple[str, ...] = selection.given[Trigger.WATCHED]
        self._factor: float = selection.given[Trigger.SPIKE][-1]
        self._board = board
        self._say = say
        self._recorder = recorder
        self._uncalled_paths = recorder.modules = {}
        self._watched: dict[int, _WatchedModule] = {}
        self._calls: dict[int, tuple[_WatchedModule, Mode, int]] = {}
        """Calls of watched modules, in the order in which they began, with their steps."""
        self._matched_globs: set[int] = set()
        self._steps_begun = 0

    def look(self, calls: Structured, values: ValueRows) -> None:
        """Look at the calls of a batch, then at its values: they come after their call."""
        while len(self._uncalled_paths) > _MOST_MODULES:
            del self._uncalled_paths[next(iter(self._uncalled_paths))]
        for number in self._uncalled_paths.keys() & {*calls["module"].tolist()}:
            path = self._uncalled_paths.pop(number)
            places = map(split_place, self._globs)
            slots = tuple((i, s) for i, (p, s) in enumerate(places) if glob_matches(p, path))
            if slots:
                self._watched[number] = _WatchedModule(path, slots)
            if len(self._watched) > _MOST_MODULES:
                del self._watched[next(iter(self._watched))]
        is_watched = _CALLS_WATCHED[calls["phase"]] & (calls["mode"] == self._box.mode)
        is_watched &= np.isin(calls["module"], [*self._watched])
        for sequence, number, step in _rows(calls[is_watched], "sequence", "module", "step"):
            self._calls[sequence] = self._watched[number], self._box.mode, step
        if self._calls:
            self._compare(values)

    def step_begins(self, mode: Mode, step: int) -> None:
        """Forget calls whose digests an accelerator would have delivered by now."""
        for sequence, (_, its_mode, its_step) in list(self._calls.items()):
            if its_mode is mode and its_step >= step - _LATE:
                break
            self._calls.pop(sequence, None)
        self._steps_begun += 1
        if self._steps_begun == _STEPS_UNTIL_TOLD + 1 and self._say is not None:
            for number, glob in enumerate(self._globs):
                if number not in self._matched_globs and not self._board.has_taken(number):
                    self._say(
                        f"watch:{glob} took nothing in {_STEPS_UNTIL_TOLD} steps: no rank seen "
                        "from here recorded numbers of such a value. Write path:slot as `rankscope "
                        "show` prints them, such as lm_head:output"
                    )

    def _compare(self, values: ValueRows) -> None:
        """Hold the values of watched calls to those of the steps before."""
        calls = np.fromiter(self._calls, np.uint64, len(self._calls))
        values = values.chosen(values.has_digest & np.isin(values["sequence"], calls))
        # what is not finite is told as such, or is a GradScaler's business
        is_told = (values["nan"] == 0) & (values["posinf"] == 0)
        is_told &= values["flags"] & _OF_SCALER == 0
        finite = values["count"] - values["neginf"]
        is_told &= (finite > 0) & (values["l2"] < math.inf)
        magnitudes = values["l2"] / np.sqrt(np.maximum(finite, 1))
        names = _slot_names(self._recorder) if len(values) else {}
        for sequence, slot, count, is_compared, magnitude in zip(
            values["sequence"].tolist(), values["slot"].tolist(), values["count"].tolist(),
            is_told.tolist(), magnitudes.tolist(),
        ):  # fmt: skip
            module, mode, step = self._calls[sequence]
            watched = self._watched_value(module, mode, names[slot])
            if watched is not None and is_compared and watched.leaps(step, magnitude):
                self._tell_leap(watched, mode, step, magnitude, is_scalar=count == 1)

    def _watched_value(self, module: _WatchedModule, mode: Mode, slot: str) -> _WatchedValue | None:
        if (mode, slot) in module.values:
            return module.values[mode, slot]
        taking = {number for number, glob in module.slots if slot_matches(glob, slot)}
        for number in taking - self._matched_globs:
            self._matched_globs.add(number)
            with contextlib.suppress(OSError):
                self._board.tell_taken(number)
        watched = _WatchedValue(f"{module.path}:{slot}", self._factor) if taking else None
        module.values[mode, slot] = watched
        return watched

    def _tell_leap(
        self, watched: _WatchedValue, mode: Mode, step: int, magnitude: float, *, is_scalar: bool
    ) -> None:
        median = watched.history.median
        value = watched.name if is_scalar else f"the root mean square of {watched.name}"
        numbers = {"magnitude": magnitude, "times": magnitude / median, "median": median}
        self._box.tell(Trigger.WATCHED, mode, step, value=value, **numbers)
