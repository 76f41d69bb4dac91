"""The pen of a rank that holds its last steps back and watches values that the user named.

A watched value is a number anyway: the record of its digest has its l2 norm and its count. What is
compared is their root mean square, over the finite elements, which does not depend on the size of a
batch; of a scalar that is its magnitude. Where a step has several (micro-batches, a module that is
called again), its largest counts. The step is that of the call, also where an accelerator hands the
digest out later.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from rankscope.agent.ringrecorder import OF_SCALER, RingRecorder
from rankscope.agent.runningmedian import RunningMedian
from rankscope.capture.reading import ValueNumbers
from rankscope.globs import glob_matches, slot_matches, split_place
from rankscope.record.call import Mode
from rankscope.record.notes import Note
from rankscope.record.phases import Phase
from rankscope.record.stepselection import StepSelection
from rankscope.run.eventboard import EventBoard
from rankscope.spool.recordformat import StepEvent
from rankscope.spool.ringwriter import RingWriter

__all__ = ["WatchingRecorder"]

_WATCHED = (Phase.FORWARD, Phase.GRADS, Phase.PARAMS)
"""Phases whose calls are watched; gradients of backward come under the calls of forward. Setup is
of no step, and recomputed and accumulated values are of calls that are watched anyway."""
_LATE: Final = 8
"""Steps that an accelerator may be behind with the digests of a call."""
_MOST_MODULES: Final = 1 << 14
_UNTIL_TOLD: Final = 16
"""Steps after which it is said which globs took nothing."""


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
        if watched is not None and mode is self._mode and phase in _WATCHED:
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
        if watched is None or reading.nan or reading.posinf or flags & OF_SCALER:
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
