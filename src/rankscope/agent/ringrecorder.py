"""The pen of a rank that holds its last steps back: what is never let go, and what it sees happen.

It adds to each record no more than a look at the numbers that are written anyway: a value that is
not finite, and a gradient norm far beyond those of the steps before, are told on the board.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

from rankscope.agent.recorder import Recorder
from rankscope.agent.runningmedian import RunningMedian
from rankscope.capture.describe import Described
from rankscope.capture.reading import ValueNumbers
from rankscope.record.call import Mode
from rankscope.record.collective import Collective
from rankscope.record.notes import Note
from rankscope.record.phases import Phase
from rankscope.record.stepselection import StepSelection
from rankscope.record.value import ValueFlag
from rankscope.run.eventboard import EventBoard, Happening
from rankscope.spool.recordformat import StepEvent
from rankscope.spool.ringwriter import RingWriter

__all__ = ["OF_SCALER", "RingRecorder"]

_WATCHED = (Phase.FORWARD, Phase.PARAMS)
"""Phases in which NaN and +inf are told, besides gradients before the optimizer. Not backward: a
GradScaler may be about to skip what comes of it. Not collectives: they pad with anything."""
OF_SCALER = int(ValueFlag.SKIPPED | ValueFlag.SCALED)
"""What a GradScaler scales or skips: its size says nothing."""
_GROWING = ("meta", "collective")
"""Kinds of definitions whose number grows with the steps: of each shape, of each message."""


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

    @contextmanager
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
        if phase is Phase.GRADS and not flags & OF_SCALER and slot.startswith("grad:"):
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
