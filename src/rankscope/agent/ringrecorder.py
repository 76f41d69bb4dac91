"""The pen of a rank that holds its last steps back: what is never let go, and what it sees happen.

It adds to each record no more than a look at the numbers that are written anyway: a value that is
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import dropwhile
from typing import Final

from rankscope.agent.recorder import Recorder
from rankscope.capture.describe import Described
from rankscope.capture.reading import ValueNumbers
from rankscope.globs import glob_matches, slot_matches, split_place
from rankscope.record.call import Mode
from rankscope.record.collective import Collective
from rankscope.record.notes import Note
from rankscope.record.phases import Phase
from rankscope.record.stepselection import StepSelection
from rankscope.record.value import ValueFlag
from rankscope.run.eventboard import EventBoard, Happening
from rankscope.spool.recordformat import StepEvent
from rankscope.spool.ringwriter import RingWriter

__all__ = ["RingRecorder", "RunningMedian", "WatchingRecorder"]

_WATCHED = (Phase.FORWARD, Phase.PARAMS)
"""Phases in which NaN and +inf are told, besides gradients before the optimizer. Not backward: a
GradScaler may be about to skip what comes of it. Not collectives: they pad with anything."""
_OF_SCALER = int(ValueFlag.SKIPPED | ValueFlag.SCALED)
"""What a GradScaler scales or skips: its size says nothing."""
_GROWING = ("meta", "collective")
"""Kinds of definitions whose number grows with the steps: of each shape, of each message."""
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


class RingRecorder(Recorder):
    """Writes into a ring, and tells what happened."""

    def __init__(
        self, writer: RingWriter, selection: StepSelection, board: EventBoard, rank: int
    ) -> None:
        """Write what comes before the first step where it is never let go."""
        super().__init__(writer)
        self._ring = writer
        self._steps = selection.last
        self._spike = selection.spike
        self._board = board
        self._rank = rank
        self._kept_tables: tuple[dict[Described, int], dict[Collective, int]] = ({}, {})
        self._is_kept = False
        self._mode, self._step = Mode.TRAIN, 0
        self._has_trained = False
        self._spoiled_at: int | None = None
        """Last step with a value that is not finite."""
        self._squares = 0.0
        self._norms = RunningMedian(selection.spike) if selection.spike else None

    def define(self, kind: str, **fields: object) -> int:
        """Commit a definition and return its number: where it is never let go, unless its like
        grows with the steps."""
        writer = self._ring if kind in _GROWING and not self._is_kept else self._ring.kept
        return self._define_in(writer, kind, fields)

    def step(self, event: StepEvent, mode: Mode, step: int, note: Note | None = None) -> None:
        """Record that a traced step began or ended."""
        super().step(event, mode, step, note)
        if event is StepEvent.BEGIN:
            if self._ring.begin_step(mode, step):
                self._metas, self._collectives = {}, {}
            self._has_trained = self._has_trained or mode is Mode.TRAIN
            if mode is Mode.TRAIN or not self._has_trained:
                self._mode, self._step = mode, step
        if event is StepEvent.END and mode is Mode.TRAIN:
            self._judge_norm(step)

    @contextlib.contextmanager
    def never_let_go(self) -> Iterator[None]:
        """Write what is never let go: the setup of a root."""
        if self._is_kept:
            yield
            return
        ring = self._write, self._metas, self._collectives
        self._is_kept = True
        self._write = self._ring.kept.write
        self._metas, self._collectives = self._kept_tables
        try:
            yield
        finally:
            self._write, self._metas, self._collectives = ring
            self._is_kept = False

    def value(
        self,
        sequence: int,
        slot: str,
        described: Described,
        reading: ValueNumbers | None,
        phase: Phase,
        ordinal: int,
        flags: int,
        batch_dim: int,
        reference: int = 0,
    ) -> None:
        """Record one tensor in one slot, and look at its numbers. (By position: hot path.)"""
        if phase is Phase.SETUP:  # an accelerator hands it out later than its call
            with self.never_let_go():
                super().value(
                    sequence, slot, described, reading, phase, ordinal, flags, batch_dim, reference
                )
            return
        super().value(
            sequence, slot, described, reading, phase, ordinal, flags, batch_dim, reference
        )
        if reading is not None:
            self._look(sequence, slot, reading, phase, flags)

    def _look(
        self, sequence: int, slot: str, reading: ValueNumbers, phase: Phase, flags: int
    ) -> None:
        """Look at numbers that were just recorded."""
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
            self._tell("nonfinite", self._mode, self._step, f"{slot} is not finite")

    def _judge_norm(self, step: int) -> None:
        norm, self._squares = math.sqrt(self._squares), 0.0
        if self._norms is None or not 0.0 < norm < math.inf:
            return
        if norm > self._norms.limit:
            times = f"{norm / self._norms.median:.3g} times its running median"
            self._tell("spike", Mode.TRAIN, step, f"gradient norm {norm:.4g}, {times}")
        self._norms.add(norm)

    def _tell(self, kind: str, mode: Mode, step: int, text: str) -> None:
        """Tell what happened, unless a step that is held with it had its like."""
        event = Happening(kind=kind, mode=mode, step=step, text=f"rank {self._rank}: {text}")
        try:
            known = [
                each for each in self._board.events() if (each.kind, each.mode) == (kind, mode)
            ]
            if not any(each.step >= step - self._steps for each in known):
                self._board.tell(event)
        except OSError:  # a full disk: whoever copies the ring tells the others
            if self._ring.hold(event.window(self._steps)):
                self._define_in(self._ring.kept, "untold", {"entry": event.entry})


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


class WatchingRecorder(RingRecorder):
    """Writes into a ring, and tells when a value that was named leaps."""

    def __init__(
        self,
        writer: RingWriter,
        selection: StepSelection,
        board: EventBoard,
        rank: int,
        say: Callable[[str], None] | None = None,
    ) -> None:
        """Watch what the selection names; `say` tells the user which globs took nothing, None where
        another rank does.
        """
        super().__init__(writer, selection, board, rank)
        self._globs = selection.watch
        self._say = say
        self._modules: dict[int, _WatchedModule] = {}
        self._calls: dict[int, tuple[_WatchedModule, Mode, int]] = {}
        """Calls of watched modules, in the order in which they began, with their steps."""
        self._watching = threading.Lock()
        """Autograd's threads bring gradients."""
        self._seen: set[int] = set()
        """Globs that took something here."""
        self._begun = 0

    def define(self, kind: str, **fields: object) -> int:
        """Commit a definition and return its number."""
        number = super().define(kind, **fields)
        if kind == "module":
            path, places = str(fields["path"]), map(split_place, self._globs)
            slots = tuple((i, s) for i, (p, s) in enumerate(places) if glob_matches(p, path))
            if slots:
                self._modules[number] = _WatchedModule(path, slots)
            if len(self._modules) > _MOST_MODULES:  # of a program that makes models all the time
                del self._modules[next(iter(self._modules))]
        return number

    def enter(
        self,
        module: int,
        root: int,
        parent: int | None,
        mode: Mode,
        step: int,
        micro_batch: int | None,
        phase: Phase,
        ordinal: int,
        time_ns: int = 0,
        collective: int = 0,
        number: int = 0,
    ) -> int:
        """Record that a call began; return its sequence number. (By position: hot path.)"""
        sequence = super().enter(
            module, root, parent, mode, step, micro_batch, phase, ordinal, time_ns, collective,
            number,
        )  # fmt: skip
        watched = self._modules.get(module)
        if watched is not None and mode is self._mode and phase in _CALLS_WATCHED:
            self._calls[sequence] = watched, mode, step
        return sequence

    def step(self, event: StepEvent, mode: Mode, step: int, note: Note | None = None) -> None:
        """Record that a traced step began or ended."""
        super().step(event, mode, step, note)
        if event is not StepEvent.BEGIN or mode is not self._mode:
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
        self, sequence: int, slot: str, reading: ValueNumbers, phase: Phase, flags: int
    ) -> None:
        super()._look(sequence, slot, reading, phase, flags)
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
        what = watched.name if reading.count == 1 else f"the root mean square of {watched.name}"
        times = f"{magnitude / median:.3g} times its running median {median:.4g}"
        text = f"{what} is {magnitude:.4g} in step {step}, {times}"
        self._tell("watched", mode, step, text)

    def _begin_to_watch(self, module: _WatchedModule, slot: str) -> _WatchedValue | None:
        """Return where the magnitudes of a slot go; None where no glob takes it."""
        taking = {number for number, glob in module.slots if slot_matches(glob, slot)}
        for number in taking - self._seen:
            self._seen.add(number)
            with contextlib.suppress(OSError):
                self._board.tell_taken(number)
        return _WatchedValue(f"{module.path}:{slot}", self._spike) if taking else None
