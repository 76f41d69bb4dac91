"""What a rank that holds its last steps back sees happen.

Each record takes no more than a look at the numbers that are written anyway: a value that is
not finite, and a gradient norm far beyond those of the steps before, are told on the board.

So is a value that the user named and that leaps. What is compared is its root mean square, over the
finite elements, which does not depend on the size of a batch; of a scalar that is its magnitude.
Where a step has several (micro-batches, a module that is called again), its largest counts. The
step is that of the call, also where an accelerator hands the digest out later.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import dropwhile
from typing import Final

from rankscope.agent.recorder import Recorder
from rankscope.capture.reading import ValueNumbers
from rankscope.globs import glob_matches, slot_matches, split_place
from rankscope.record.call import Mode
from rankscope.record.phases import Phase
from rankscope.record.stepselection import StepSelection
from rankscope.record.triggers import Trigger
from rankscope.record.value import ValueFlag
from rankscope.run.eventboard import EventBoard, Happening
from rankscope.spool.recordformat import StepEvent
from rankscope.spool.ringwriter import RingWriter

__all__ = ["BlackBoxWatch", "LeapWatch", "RunningMedian"]

_WATCHED = (Phase.FORWARD, Phase.PARAMS)
"""Phases in which NaN and +inf are told, besides gradients before the optimizer. Not backward: a
GradScaler may be about to skip what comes of it. Not collectives: they pad with anything."""
_OF_SCALER = int(ValueFlag.SKIPPED | ValueFlag.SCALED)
"""What a GradScaler scales or skips: its size says nothing."""
_MEDIAN_STEPS: Final = 32
"""Steps whose magnitudes make the running median."""
_FEWEST: Final = 8
"""Nothing leaps before so many are known."""
_RISING: Final = 2.0
"""Times the median beyond which a step may be one of those over which a run diverges."""
_LEAST: Final = 0.01
"""Part of the highest median so far below which a magnitude is near zero."""
_CALLS_WATCHED = (Phase.FORWARD, Phase.GRADS, Phase.PARAMS)
"""Phases whose calls are watched; gradients of backward come under the calls of forward. Setup is
of no step, and recomputed and accumulated values are of calls that are watched anyway."""
_LATE: Final = 8
"""Steps that an accelerator may be behind with the digests of a call."""
_MOST_MODULES: Final = 1 << 14
_UNTIL_TOLD: Final = 16
"""Steps after which it is said which globs took nothing."""


class RunningMedian:
    """The magnitudes that one number had in the last steps."""

    __slots__ = ("_factor", "_highest", "_last", "limit", "median")

    def __init__(self, factor: float) -> None:
        """Know no step yet; a magnitude `factor` times the median leaps."""
        self._factor = factor
        self._last: deque[float] = deque(maxlen=_MEDIAN_STEPS)
        self._highest = 0.0
        self.median = 0.0
        """Of the last steps."""
        self.limit = math.inf
        """A magnitude of the next step leaps where it is beyond this; inf where nothing is."""

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
        if len(last) < _FEWEST:
            return
        self.median = statistics.median(last)
        self._highest = max(self._highest, self.median)
        if not self.median:
            self.limit = math.inf
            return
        rising = _RISING * self.median
        before = max(dropwhile(lambda one: one > rising, reversed(last)), default=0.0)
        self.limit = max(
            self._factor * self.median, math.sqrt(self._factor) * before, _LEAST * self._highest
        )


class BlackBoxWatch:
    """Tells the ring of steps, and everybody of what happened."""

    def __init__(
        self,
        recorder: Recorder,
        ring: RingWriter,
        selection: StepSelection,
        board: EventBoard,
        rank: int,
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
        """Last step with a value that is not finite."""
        self._squares = 0.0
        factor = selection.given[Trigger.SPIKE][-1]
        self._norms = RunningMedian(factor) if factor else None
        recorder.on_step.append(self._step_marked)
        recorder.on_value.append(self._look)

    def _step_marked(self, event: StepEvent, mode: Mode, step: int) -> None:
        if event is StepEvent.BEGIN:
            if self._ring.begin_step(mode, step):
                self._recorder.define_anew()
            self._has_trained = self._has_trained or mode is Mode.TRAIN
            if mode is Mode.TRAIN or not self._has_trained:
                self.mode, self._step = mode, step
        if event is StepEvent.END and mode is Mode.TRAIN:
            self._judge_norm(step)

    def _look(
        self, sequence: int, slot: str, reading: ValueNumbers, phase: Phase, flags: int
    ) -> None:
        is_bad = reading.nan or reading.posinf
        if phase is Phase.GRADS and not flags & _OF_SCALER and slot.startswith("grad:"):
            self._squares += reading.l2 * reading.l2
            if is_bad:
                self._spoil(slot)
        elif is_bad and phase in _WATCHED:
            self._spoil(slot)

    def _spoil(self, slot: str) -> None:
        """Tell of a value that is not finite, unless one of the steps that are held had one."""
        last, self._spoiled_at = self._spoiled_at, self._step
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
        """Tell what happened, unless a step that is held with it had its like; `fields`: those of
        the trigger's sentence, besides `rank` and `step`."""
        text = trigger.text(rank=self._rank, step=step, **fields)
        event = Happening(trigger=trigger, mode=mode, step=step, text=text)
        try:
            if not any(
                (each.trigger, each.mode) == (trigger, mode) and each.step >= step - self._steps
                for each in self._board.events()
            ):
                self._board.tell(event)
        except OSError:  # a full disk: whoever copies the ring tells the others
            if self._ring.hold(event.window(self._steps)):
                self._recorder.define("untold", entry=event.entry)


class _WatchedValue:
    """One slot of one module, step by step."""

    __slots__ = ("history", "largest", "name", "step")

    def __init__(self, name: str, factor: float) -> None:
        self.name = name
        self.history = RunningMedian(factor)
        self.step = -1
        self.largest = 0.0
        """Of that step, so far."""

    def leaps(self, step: int, magnitude: float) -> bool:
        """Take one magnitude; True where it is beyond those of the steps before."""
        if step > self.step:
            if self.step >= 0:
                self.history.add(self.largest)
            self.step, self.largest = step, magnitude
        elif step == self.step:
            self.largest = max(self.largest, magnitude)
        return magnitude > self.history.limit


@dataclass(slots=True)
class _WatchedModule:
    """A module of whose path a glob speaks."""

    path: str
    slots: tuple[tuple[int, str], ...]
    """(number of the glob, what it says of slots)."""
    values: dict[tuple[Mode, str], _WatchedValue | None] = field(default_factory=dict)
    """By slot; None for one that no glob takes."""


class LeapWatch:
    """Tells when a value that the user named leaps."""

    def __init__(
        self,
        recorder: Recorder,
        box: BlackBoxWatch,
        selection: StepSelection,
        board: EventBoard,
        say: Callable[[str], None] | None = None,
    ) -> None:
        """Watch what the selection names; `say` tells the user which globs took nothing, None where
        another rank does.
        """
        self._box = box
        self._globs: tuple[str, ...] = selection.given[Trigger.WATCHED]
        self._factor: float = selection.given[Trigger.SPIKE][-1]
        self._board = board
        self._say = say
        self._modules: dict[int, _WatchedModule] = {}
        self._calls: dict[int, tuple[_WatchedModule, Mode, int]] = {}
        """Calls of watched modules, in the order in which they began, with their steps."""
        self._watching = threading.Lock()
        """Autograd's threads bring gradients."""
        self._seen: set[int] = set()
        """Globs that took something here."""
        self._begun = 0
        recorder.on_module.append(self._module_defined)
        recorder.on_call.append(self._call_began)
        recorder.on_value.append(self._look)
        recorder.on_step.append(self._step_marked)

    def _module_defined(self, number: int, path: str) -> None:
        places = map(split_place, self._globs)
        slots = tuple((i, s) for i, (p, s) in enumerate(places) if glob_matches(p, path))
        if slots:
            self._modules[number] = _WatchedModule(path, slots)
        if len(self._modules) > _MOST_MODULES:  # of a program that makes models all the time
            del self._modules[next(iter(self._modules))]

    def _call_began(
        self, sequence: int, module: int, _root: int, _parent: int | None, mode: Mode, step: int,
        phase: Phase,
    ) -> None:  # fmt: skip
        watched = self._modules.get(module)
        if watched is not None and mode is self._box.mode and phase in _CALLS_WATCHED:
            self._calls[sequence] = watched, mode, step

    def _step_marked(self, event: StepEvent, mode: Mode, step: int) -> None:
        if event is not StepEvent.BEGIN or mode is not self._box.mode:
            return
        for sequence, (_, its_mode, its_step) in list(self._calls.items()):
            if its_mode is mode and its_step >= step - _LATE:
                break
            self._calls.pop(sequence, None)
        self._begun += 1
        if self._begun == _UNTIL_TOLD + 1 and self._say is not None:
            for number, glob in enumerate(self._globs):
                if number not in self._seen and not self._board.has_taken(number):
                    self._say(
                        f"watch:{glob} took nothing in {_UNTIL_TOLD} steps: no rank seen from here "
                        "recorded numbers of such a value. Write path:slot as `rankscope show` "
                        "prints them, such as lm_head:output"
                    )

    def _look(
        self, sequence: int, slot: str, reading: ValueNumbers, _phase: Phase, flags: int
    ) -> None:
        call = self._calls.get(sequence)
        if call is None:
            return
        module, mode, step = call
        try:
            watched = module.values[mode, slot]
        except KeyError:
            watched = module.values[mode, slot] = self._begin_to_watch(module, slot)
        if watched is None or reading.nan or reading.posinf or flags & _OF_SCALER:
            return  # what is not finite is told as such, or is a GradScaler's business
        finite = reading.count - reading.neginf
        if not finite or not reading.l2 < math.inf:
            return
        magnitude = reading.l2 / math.sqrt(finite)
        with self._watching:
            if not watched.leaps(step, magnitude):
                return
            median = watched.history.median
        value = watched.name if reading.count == 1 else f"the root mean square of {watched.name}"
        numbers = {"magnitude": magnitude, "times": magnitude / median, "median": median}
        self._box.tell(Trigger.WATCHED, mode, step, value=value, **numbers)

    def _begin_to_watch(self, module: _WatchedModule, slot: str) -> _WatchedValue | None:
        """Return where the magnitudes of a slot go; None where no glob takes it."""
        taking = {number for number, glob in module.slots if slot_matches(glob, slot)}
        for number in taking - self._seen:
            self._seen.add(number)
            with contextlib.suppress(OSError):
                self._board.tell_taken(number)
        return _WatchedValue(f"{module.path}:{slot}", self._factor) if taking else None
